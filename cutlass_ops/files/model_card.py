"""The model card of a packed directory."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..checkpoints import Checkpoint

#: The model card's file.
CARD = "README.md"


def model_card(
    checkpoint: Checkpoint, weights: Mapping[str, tuple[int, int, int, int]], act_quant: str
) -> str:
    """The model card: source, formats, how to load the directory, and the source's card."""
    source = checkpoint.files[0].parent
    base = _hub_name(source, checkpoint.config)
    name = base or (source.resolve().name if checkpoint.config else checkpoint.path.name)
    readme = source / CARD
    theirs = (
        readme.read_text(encoding="utf-8", errors="replace")
        if checkpoint.config and readme.is_file()
        else ""
    )
    front = re.match(r"---\n(.*?)\n---\n", theirs, re.DOTALL)
    facts = [f"base_model: {base}", "base_model_relation: quantized"] if base else []
    facts += ["library_name: transformers", "tags:", "- cutlass_ops"]
    if front:
        facts += [line for line in front[1].splitlines() if re.match(r"license\w*: ", line)]
    counts = Counter((bits, group_size) for _, _, bits, group_size in weights.values())
    listed = ", ".join(
        f"{count} of {bits} bits in "
        f"{'one group a row' if group_size == -1 else f'groups of {group_size}'}"
        for (bits, group_size), count in counts.most_common()
    )
    activations = (
        "not quantised"
        if act_quant == "none"
        else f'quantised to int8, one scale a {act_quant} ("{act_quant}")'
    )
    head = "\n".join(facts)
    text = f"""---
{head}
---

# {name}, packed by cutlass_ops

The linear layers of {name} ({listed}), in the order in which the kernels of cutlass_ops read them.
Activations are {activations} unless the loader's options say otherwise.

```python
import cutlass_ops  # before from_pretrained: transformers alone refuses these files
from transformers import AutoModelForCausalLM, AutoTokenizer

path = "..."  # this directory, or the name of this repository
model = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
tokenizer = AutoTokenizer.from_pretrained(path)
```

`cutlass_ops.load_model(path)` of a local directory also lets one kernel serve layers that multiply
the same activations.
"""
    body = theirs[front.end() :] if front else theirs
    return f"{text}\n## Card of the base model\n\n{body.lstrip()}" if body.strip() else text


def _hub_name(source: Path, config: Mapping[str, Any]) -> str:
    """A model's name on the Hugging Face hub, by the hub's cache or its configuration; else ""."""
    for part in source.absolute().parts:
        if match := re.fullmatch(r"models--([\w.-]+?)--([\w.-]+)", part):
            return f"{match[1]}/{match[2]}"
    named = config.get("_name_or_path")
    return named if isinstance(named, str) and re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", named) else ""
