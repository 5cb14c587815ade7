"""Small files of other dialects."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save as to_safetensors
from torch import Tensor

from cutlass_ops.weights import formats

RANDOM = torch.Generator().manual_seed(1)


def random_bytes(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, generator=RANDOM, dtype=torch.uint8)


def as_json(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def scalar(value: int) -> Tensor:
    return torch.tensor(value, dtype=torch.int32)


def hqq_module(bits: int, n: int, k: int) -> dict[str, Tensor]:
    stored = 4 if bits == 4 else 8
    return {
        "W_q": random_bytes(n * k // 32 * stored // 8, 32) & (15 if bits == 5 else 255),
        "scale": torch.randn(n * k // 32, 1, generator=RANDOM),
        "zero": torch.randn(n * k // 32, 1, generator=RANDOM),
        "nbits": scalar(bits),
        "group_size": scalar(32),
        "shape": torch.tensor([n, k]),
        "axis": scalar(1),
        "packing": torch.tensor(list(f"{stored}bit_u8".encode()), dtype=torch.uint8),
        "view_as_float": torch.tensor(0, dtype=torch.uint8),
        "quant_scale": torch.tensor(0, dtype=torch.uint8),
        "bias": torch.ones(n),
    }


def prefixed(module: str, parts: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{module}{name}": value for name, value in parts.items()}


STATE = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [6, 96]}

NESTED = {**STATE, "nested_blocksize": 4, "nested_dtype": "float32", "nested_offset": 0.25}

INT8 = {"block_size": [1, 32], "dtype": {"_type": "torch.dtype", "_data": "float32"}}

HEADER: dict[str, Any] = {
    "p.weight": ("Int4Tensor", {"block_size": [1, 32], "shape": [6, 64]}),
    "t.weight": ("Int4TilePackedTo4dTensor", {"block_size": [1, 256], "shape": [6, 300]}),
    "x.weight": (
        "IntxUnpackedToInt8Tensor",
        {**INT8, "target_dtype": {"_type": "torch.dtype", "_data": "int4"}},
    ),
    "e.weight": ("Int8Tensor", {**INT8, "block_size": [1, 64]}),
}

MODELS: dict[str, dict[str, Tensor]] = {
    "hqq": prefixed("m.", hqq_module(4, 6, 64))
    | prefixed("f.", hqq_module(5, 2, 32))
    | prefixed("e.", hqq_module(8, 3, 96)),
    "bitsandbytes": {
        "m.weight": random_bytes(288, 1),
        "m.weight.absmax": random_bytes(9),
        "m.weight.quant_map": torch.tensor(formats.NF4),
        "m.weight.nested_absmax": torch.rand(3, generator=RANDOM),
        "m.weight.nested_quant_map": torch.rand(256, generator=RANDOM),
        "m.weight.quant_state.bitsandbytes__nf4": as_json(NESTED),
        "m.bias": torch.ones(6),
        "f.weight": random_bytes(288, 1),
        "f.weight.absmax": torch.rand(9, generator=RANDOM),
        "f.weight.quant_map": torch.tensor(formats.FP4),
        "f.weight.quant_state.bitsandbytes__fp4": as_json(STATE),
        "i.weight": random_bytes(4, 9).view(torch.int8),
        "i.SCB": torch.rand(4, generator=RANDOM),
        "i.weight_format": torch.tensor(0, dtype=torch.uint8),
    },
    "torchao": {
        "p._weight_qdata": random_bytes(6, 32).view(torch.int8),
        "p._weight_scale": torch.randn(2, 6, generator=RANDOM),
        "p._weight_zero_point": torch.randn(2, 6, generator=RANDOM),
        "t._weight_qdata": random_bytes(1, 8, 32, 16).view(torch.int32),
        "t._weight_scale_and_zero": torch.randn(4, 8, 2, generator=RANDOM).bfloat16(),
        "x._weight_qdata": (random_bytes(3, 64) % 16).to(torch.int8) - 8,
        "x._weight_scale": torch.randn(3, 2, generator=RANDOM),
        "x._weight_zero_point": torch.zeros(3, 2, dtype=torch.int8),
        "e._weight_qdata": random_bytes(3, 64).view(torch.int8),
        "e._weight_scale": torch.randn(3, 1, generator=RANDOM),
        "e.bias": torch.ones(3),
    },
}


def saved(name: str, tensors: dict[str, Tensor], header: dict[str, Any] = HEADER) -> bytes:
    metadata = None
    if name == "torchao":
        described = {key: {"_type": kind, "_data": data} for key, (kind, data) in header.items()}
        metadata = {key: json.dumps(value) for key, value in described.items()} | {
            "tensor_names": json.dumps([*header])
        }
    return to_safetensors({key: value.contiguous() for key, value in tensors.items()}, metadata)


def write(folder: Path, name: str, content: bytes) -> Path:
    (folder / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": name}}))
    path = folder / "model.safetensors"
    path.write_bytes(content)
    return path


def mnn_model() -> tuple[dict[str, Any], bytes]:
    """Layers of 4 and of 8 bits, symmetric and not, one of fp16, and a norm."""
    blob, operators = b"", []
    for name, bits, asymmetric in (("a", 4, True), ("b", 4, False), ("c", 8, True)):
        values = range(-(1 << bits - 1), 1 << bits - 1)
        weight = struct.pack("<B2H", 2, 3, 64) + struct.pack(
            f"B{len(values)}b", len(values) % 256, *values
        )
        weight += bytes(random_bytes(3 * 64 * bits // 8).tolist())
        alpha = torch.randn(3, 2, 2 if asymmetric else 1, generator=RANDOM).numpy().tobytes()
        quan = {
            "type": 1,
            "quantScale": 1.0,
            "has_scaleInt": False,
            "shapeInt32": False,
            "aMaxOrBits": bits,
            "aMin": 1,
        }
        common = {"kernelX": 1, "kernelY": 1, "group": 1, "outputCount": 3, "inputCount": 64}
        main = {
            "common": common,
            "external": [len(blob), len(weight), len(alpha), 12, 0],
            "quanParameter": {**quan, "readType": int(asymmetric), "scaleStorage": "FP32"},
        }
        operators.append({"type": "Convolution", "name": name, "main": main})
        blob += weight + alpha + struct.pack("<3f", 1, 2, 3)
    common = {"outputCount": 2, "inputCount": 4}
    main = {"common": common, "external": [len(blob), 16, 0, 0, 0], "quanParameter": {"type": 3}}
    operators.append({"type": "Convolution", "name": "h", "main": main})
    operators.append(
        {"type": "LayerNorm", "name": "n", "main": {"external": [len(blob) + 16, 8, 8]}}
    )
    return {"oplists": operators, "subgraphs": [{"nodes": []}]}, blob + bytes(32)


GRAPH, BLOB = mnn_model()


def write_mnn(folder: Path, graph: Any, blob: bytes) -> Path:
    path = folder / "llm.mnn.json"
    path.write_text(json.dumps(graph))
    (folder / "llm.mnn.weight").write_bytes(blob)
    return path
