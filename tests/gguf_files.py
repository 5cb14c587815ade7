"""Files of GGUF, by the format's own writer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy.typing as npt
from gguf import GGMLQuantizationType as Type


def write_gguf(
    path: Path,
    tensors: dict[str, tuple[npt.NDArray[Any], Type]],
    architecture: str = "llama",
    **keys: int,
) -> Path:
    """A file by the format's own writer. Quantised tensors are given as bytes
    ``[..., bytes of a row]``.
    """
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in keys.items():
        writer.add_uint32(f"{architecture}.attention.{key}", value)
    writer.add_array("tokenizer.ggml.tokens", ["a", "bc", ""])
    writer.add_array("tokenizer.ggml.scores", [1.0, 2.0])
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
