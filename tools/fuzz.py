#!/usr/bin/env python3
"""Damage small models of every dialect and check that each is read correctly, or refused.

    tools/fuzz.py --count 20000             all dialects, seed 0
    tools/fuzz.py --seed 7 --seconds 600    as many as ten minutes take
    tools/fuzz.py --seed 7 --only 1234      one case again, with its traceback; its files stay in
                                            the printed folder

A model is one decoder layer of Llama. It is written as AWQ (gemm, gemv), GPTQ (in act order and
not), compressed-tensors (packed, int8), bitsandbytes (4 bits, nested, 8 bits), HQQ, torchao, MNN,
GGUF (of 32-element and of 256-element blocks), as a packed file of layout version 1 and 2, as a
packed directory, and as ``save_pretrained`` writes one.

A case is one of them with one to three kinds of damage: flipped bits, bytes that are cut out, put
in or set to zero, files cut short, extended or removed, values of JSON (headers, config, graph)
that are replaced or removed, tensors that are dropped, renamed, swapped, or given another dtype or
shape. Then, in a forked process with limits of memory and time:

    inspect      the function behind it
    read         every tensor in every way, for a checkpoint; both ways to a weight's
                 values must agree
    reorder      into a file, which ``verify`` must find right
    verify       for a packed model
    load_model   every tenth case, if inspect took it (otherwise transformers reads the
                 configuration first, and raises other errors)

Errors that count as a refusal are CheckpointError, ValueError and TypeError, with a message of less
than 4000 characters. All else is a failure: other exceptions, a crash, a case that runs into the
limit. So is a damaged packed file of version 2 in which ``verify`` finds nothing; and a tensor that
was dropped, or renamed to a name that nobody knows, while the values of a quantised weight that is
still read are not the honest ones. Flipped bits of other dialects' codes and scales are other codes
and scales, and nothing can be said of them.
"""

from __future__ import annotations

import os

# before torch; and forked processes have no other threads
os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import copy
import io
import json
import math
import multiprocessing
import random
import resource
import shutil
import struct
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from rich.console import Console
from safetensors.torch import load_file, save
from torch import Tensor

from cutlass_ops import CheckpointError, cli, load_checkpoint, load_packed, reference
from cutlass_ops.files.conversion_plan import Options
from cutlass_ops.files.model_directory import reorder_model
from cutlass_ops.files.packed_file import is_packed, packed_info
from cutlass_ops.files.packing import reorder_checkpoint
from cutlass_ops.files.verify import verify_packed
from cutlass_ops.weights import formats

Files = dict[str, bytes]
REFUSALS = (CheckpointError, ValueError, TypeError)
MEMORY = 4 << 30
LOAD_EVERY = 10


# ---- undamaged models


@dataclass
class Model:
    """A model as files, and what of it is read: the folder or one of its files."""

    files: Files
    path: str = "."
    sealed: bool = False
    values: dict[str, Tensor] = field(default_factory=dict)


def linears(hidden: int, inner: int) -> dict[str, tuple[int, int]]:
    """Names and shapes of the layer's linear layers."""
    attention = {f"self_attn.{name}_proj": (hidden, hidden) for name in "qkvo"}
    mlp = {
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    return {f"model.layers.0.{name}": shape for name, shape in (attention | mlp).items()}


def config(hidden: int, inner: int, quantization: dict[str, Any] | None) -> bytes:
    """A ``config.json`` for transformers."""
    content = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 32,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    return json.dumps(
        content | ({} if quantization is None else {"quantization_config": quantization})
    ).encode()


def others(hidden: int) -> dict[str, Tensor]:
    """The tensors that are not quantised."""
    norms = (
        "model.norm",
        "model.layers.0.input_layernorm",
        "model.layers.0.post_attention_layernorm",
    )
    found = {f"{name}.weight": torch.rand(hidden) + 0.5 for name in norms}
    return found | {
        f"{name}.weight": torch.randn(32, hidden) for name in ("model.embed_tokens", "lm_head")
    }


def words(codes: Tensor, bits: int = 4) -> Tensor:
    """Codes along the last dimension, the first in the lowest bits, as int32."""
    each = 32 // bits
    parts = codes.long().view(*codes.shape[:-1], -1, each) << torch.arange(each) * bits
    return parts.sum(-1).to(torch.int64).add_(1 << 31).remainder_(1 << 32).sub_(1 << 31).int()


def directory(
    make: Callable[[str, int, int], dict[str, Tensor]],
    quantization: dict[str, Any] | None,
    metadata: dict[str, str] | None = None,
) -> Model:
    """A model's directory in which ``make(name, n, k)`` gives the tensors of each linear layer, by
    what follows its name (".weight").
    """
    tensors = others(64)
    for name, (n, k) in linears(64, 96).items():
        tensors |= {f"{name}{part}": value.contiguous() for part, value in make(name, n, k).items()}
    return Model(
        {"model.safetensors": save(tensors, metadata), "config.json": config(64, 96, quantization)}
    )


def codes_of(n: int, k: int, bits: int = 4) -> Tensor:
    """Random codes, one a byte."""
    return torch.randint(0, 1 << bits, (n, k), dtype=torch.uint8)


def awq(_: str, n: int, k: int) -> dict[str, Tensor]:
    """Tensors of AutoAWQ's gemm."""
    order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])
    codes, zeros = (
        codes_of(rows, n).view(rows, -1, 8)[..., order].flatten(1) for rows in (k, k // 32)
    )
    return {
        ".qweight": words(codes),
        ".qzeros": words(zeros),
        ".scales": torch.rand(k // 32, n).half(),
    }


def awq_gemv(_: str, n: int, k: int) -> dict[str, Tensor]:
    """Tensors of AutoAWQ's gemv."""
    return {
        ".qweight": words(codes_of(n, k)),
        ".qzeros": words(codes_of(n, 32)),
        ".scales": torch.rand(n, 32).half(),
    }


def gptq(_: str, n: int, k: int) -> dict[str, Tensor]:
    """Tensors of GPTQ, version 1, symmetric."""
    return {
        ".qweight": words(codes_of(n, k)).t(),
        ".qzeros": words(torch.full((k // 32, n), 7)),
        ".scales": torch.rand(k // 32, n).half(),
    }


def gptq_act_order(name: str, n: int, k: int) -> dict[str, Tensor]:
    """Tensors of GPTQ with zero points and groups in act order."""
    zeros = words(torch.randint(1, 14, (k // 32, n)))
    return gptq(name, n, k) | {".qzeros": zeros, ".g_idx": (torch.randperm(k) // 32).int()}


def ct_packed(_: str, n: int, k: int) -> dict[str, Tensor]:
    """Tensors of compressed-tensors, pack-quantized, not symmetric."""
    return {
        ".weight_packed": words(codes_of(n, k)),
        ".weight_shape": torch.tensor([n, k]),
        ".weight_scale": torch.rand(n, k // 32),
        ".weight_zero_point": words(codes_of(k // 32, n)).t(),
    }


def ct_int8(_: str, n: int, k: int) -> dict[str, Tensor]:
    """Tensors of compressed-tensors, int-quantized, with a scale of static activations."""
    return {
        ".weight": codes_of(n, k, 8).view(torch.int8),
        ".weight_scale": torch.rand(n, 1),
        ".input_scale": torch.ones(1),
    }


def as_bytes(value: Any) -> Tensor:
    """JSON as a tensor."""
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def bnb4(name: str, n: int, k: int) -> dict[str, Tensor]:
    """Tensors of bitsandbytes' NF4, nested in the MLP."""
    state = {"quant_type": "nf4", "blocksize": 32, "dtype": "float32", "shape": [n, k]}
    blocks = n * k // 32
    parts = {".weight": codes_of(n * k // 2, 1, 8), ".weight.quant_map": torch.tensor(formats.NF4)}
    if "mlp" in name:
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.5}
        parts |= {
            ".weight.absmax": codes_of(blocks, 1, 8)[:, 0],
            ".weight.nested_absmax": torch.rand(-(-blocks // 256)),
            ".weight.nested_quant_map": torch.rand(256),
        }
    else:
        parts[".weight.absmax"] = torch.rand(blocks)
    return parts | {".weight.quant_state.bitsandbytes__nf4": as_bytes(state)}


def bnb8(_: str, n: int, k: int) -> dict[str, Tensor]:
    """Tensors of bitsandbytes' int8."""
    return {
        ".weight": codes_of(n, k, 8).view(torch.int8),
        ".SCB": torch.rand(n),
        ".weight_format": torch.tensor(0).byte(),
    }


def hqq(_: str, n: int, k: int) -> dict[str, Tensor]:
    """Tensors of HQQ."""
    numbers = {".nbits": 4, ".group_size": 32, ".axis": 1}
    return {
        ".W_q": codes_of(n * k // 64, 32, 8),
        ".scale": torch.rand(n * k // 32, 1),
        ".zero": torch.rand(n * k // 32, 1) * 15,
        ".shape": torch.tensor([n, k]),
        ".packing": torch.tensor(list(b"4bit_u8"), dtype=torch.uint8),
        ".quant_scale": torch.tensor(0).byte(),
        **{name: torch.tensor(value, dtype=torch.int32) for name, value in numbers.items()},
    }


def torchao(name: str, n: int, k: int) -> dict[str, Tensor]:
    """Tensors of torchao: Int8Tensor in the MLP, else Int4Tensor."""
    if "mlp" in name:
        return {
            "._weight_qdata": codes_of(n, k, 8).view(torch.int8),
            "._weight_scale": torch.rand(n, 1),
        }
    zero = {"._weight_zero_point": torch.rand(k // 32, n)}
    return {
        "._weight_qdata": codes_of(n, k // 2, 8).view(torch.int8),
        "._weight_scale": torch.rand(k // 32, n),
    } | zero


def torchao_metadata() -> dict[str, str]:
    """The header of torchao's file."""
    found: dict[str, Any] = {"tensor_names": [f"{name}.weight" for name in linears(64, 96)]}
    for name, (n, k) in linears(64, 96).items():
        eight = "mlp" in name
        found[f"{name}.weight"] = {
            "_type": "Int8Tensor" if eight else "Int4Tensor",
            "_data": {"block_size": [1, k if eight else 32], "shape": [n, k]},
            "_tensor_data_names": ["qdata", "scale"] if eight else ["qdata", "scale", "zero_point"],
        }
    return {name: json.dumps(value) for name, value in found.items()}


def mnn() -> Model:
    """An exported MNN model: layers of 4 bits with offsets and of 8 bits without."""
    blob, operators = b"", []
    for index, (name, (n, k)) in enumerate(linears(64, 96).items()):
        bits, parts = (8, 1) if index % 2 else (4, 2)
        values = range(-(1 << bits - 1), 1 << bits - 1)
        weight = struct.pack("<B2H", 2, n, k) + struct.pack(
            f"B{len(values)}b", len(values) % 256, *values
        )
        weight += codes_of(n, k * bits // 8, 8).numpy().tobytes()
        alpha = torch.rand(n, k // 32, parts).numpy().tobytes()
        quan = {
            "type": 1,
            "quantScale": 1.0,
            "readType": parts - 1,
            "scaleStorage": "FP32",
            "aMin": 1,
        }
        common = {"kernelX": 1, "kernelY": 1, "group": 1, "outputCount": n, "inputCount": k}
        external = [len(blob), len(weight), len(alpha), 0, 0]
        operators.append(
            {
                "type": "Convolution",
                "name": "/"
                + name.removeprefix("model.").replace(".", "/").replace("layers/0", "layers.0")
                + "/Linear",
                "main": {"common": common, "external": external, "quanParameter": quan},
            }
        )
        blob += weight + alpha
    graph = {"oplists": operators, "subgraphs": []}
    return Model(
        {"llm.mnn.json": json.dumps(graph).encode(), "llm.mnn.weight": blob}, "llm.mnn.json"
    )


def ggml(types: list[str], hidden: int) -> Model:
    """A GGUF file whose linear layers have these types in turn."""
    names = dict(zip("qkvo", ("attn_q", "attn_k", "attn_v", "attn_output"), strict=True))
    with tempfile.TemporaryDirectory() as folder:
        writer = gguf.GGUFWriter(f"{folder}/m.gguf", "llama")
        for key, value in (("head_count", 2), ("head_count_kv", 2)):
            writer.add_uint32(f"llama.attention.{key}", value)
        writer.add_block_count(1)
        writer.add_embedding_length(hidden)
        writer.add_feed_forward_length(hidden)
        writer.add_context_length(64)
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_vocab_size(32)
        for name, shape in {
            "token_embd": (32, hidden),
            "output": (32, hidden),
            "output_norm": (hidden,),
        }.items():
            writer.add_tensor(f"{name}.weight", torch.rand(shape).numpy())
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.0.{name}.weight", torch.rand(hidden).numpy())
        for index, name in enumerate((*names.values(), "ffn_gate", "ffn_up", "ffn_down")):
            kind = gguf.GGMLQuantizationType[types[index % len(types)]]
            size, nbytes = gguf.GGML_QUANT_SIZES[kind]
            blocks = (
                codes_of(hidden, hidden // size * nbytes, 8).numpy().reshape(hidden, -1, nbytes)
            )
            for first in {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)}.get(
                kind.name, (0, 2) if kind.name.endswith(("_1", "_K")) else (0,)
            ):
                blocks[..., first : first + 2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
            writer.add_tensor(f"blk.0.{name}.weight", blocks.reshape(hidden, -1), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return Model({"m.gguf": Path(folder, "m.gguf").read_bytes()}, "m.gguf")


def read_folder(folder: Path) -> Files:
    """All files of a folder, by name."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def header_of(content: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and data of safetensors."""
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def with_header(header: Any, data: bytes) -> bytes:
    """Safetensors of a header and data."""
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data


def packed() -> dict[str, Model]:
    """Packed files, a packed directory, and one as transformers saves it."""
    floats = others(64) | {
        f"{name}.weight": torch.randn(shape) for name, shape in linears(64, 96).items()
    }
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "source")
        write(source, {"model.safetensors": save(floats), "config.json": config(64, 96, None)})
        out = Path(folder, "out")
        reorder_model(
            load_checkpoint(source),
            out,
            Options(bits=4, group_size=32, symmetric=False),
            shard_bytes=20_000,
        )
        one = Path(folder, "one.safetensors")
        reorder_checkpoint(load_checkpoint(source), one, bits=4, group_size=32)
        shards = read_folder(out)
        whole = one.read_bytes()
        tensors = load_file(one)
        facts = header_of(whole)[0]["__metadata__"]
        weights = {"format": "pt", "weights": facts["weights"]}
        form = json.loads(shards["config.json"])
        form["quantization_config"]["tensors"].pop("zeros")
    old = {
        name: value for name, value in facts.items() if name not in ("checksums", "header_sha256")
    }
    plain = config(64, 96, None)
    return {
        "packed 2": Model(
            {"model.safetensors": whole, "config.json": plain}, "model.safetensors", sealed=True
        ),
        "packed 1": Model(
            {
                "model.safetensors": save(tensors, old | {"layout_version": "1"}),
                "config.json": plain,
            },
            "model.safetensors",
        ),
        "packed directory": Model(shards, sealed=True),
        "save_pretrained": Model(
            {"model.safetensors": save(tensors, weights), "config.json": json.dumps(form).encode()}
        ),
    }


def ct(**weights: Any) -> dict[str, Any]:
    """The config of compressed-tensors."""
    group = {
        "targets": ["Linear"],
        "weights": {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 32} | weights,
    }
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}


def models() -> dict[str, Model]:
    """All honest models, by name."""
    torch.manual_seed(0)
    four = {"bits": 4, "group_size": 32}
    return {
        "awq gemm": directory(awq, {"quant_method": "awq", "version": "gemm", **four}),
        "awq gemv": directory(awq_gemv, {"quant_method": "awq", "version": "gemv", **four}),
        "gptq": directory(gptq, {"quant_method": "gptq", "sym": True, "desc_act": False, **four}),
        "gptq act order": directory(
            gptq_act_order, {"quant_method": "gptq", "sym": False, "desc_act": True, **four}
        ),
        "ct packed": directory(ct_packed, ct(symmetric=False)),
        "ct int8": directory(
            ct_int8, ct(num_bits=8, strategy="channel", group_size=None, symmetric=True)
        ),
        "bitsandbytes 4": directory(bnb4, {"quant_method": "bitsandbytes", "load_in_4bit": True}),
        "bitsandbytes 8": directory(bnb8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
        "hqq": directory(hqq, {"quant_method": "hqq"}),
        "torchao": directory(torchao, {"quant_method": "torchao"}, torchao_metadata()),
        "mnn": mnn(),
        "gguf": ggml(["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"], 64),
        "gguf 256": ggml(["Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"], 256),
        **packed(),
    }


# ---- damage

NUMBERS = [
    0,
    1,
    2,
    3,
    5,
    7,
    8,
    16,
    31,
    32,
    33,
    48,
    64,
    96,
    128,
    255,
    -1,
    -2,
    1 << 31,
    1 << 60,
    1 << 63,
    1 << 64,
    10**18,
    10**400,
]
OTHERS: list[Any] = [
    None,
    True,
    False,
    0.5,
    1e308,
    "",
    "4",
    "x",
    "re:(a+)+$",
    [],
    {},
    [[]],
    {"a": {}},
    ["Linear"],
    "gptq",
    "awq",
]
DTYPES = [
    "F64",
    "F32",
    "F16",
    "BF16",
    "F8_E4M3",
    "I64",
    "I32",
    "I16",
    "I8",
    "U8",
    "BOOL",
    "C64",
    "F4",
    "",
]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths to every item of JSON."""
    yield path
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, item in items:
        yield from places(item, (*path, key))


def edit_json(value: Any, rng: random.Random) -> Any:
    """A copy with one item, at any depth, replaced, moved or removed."""
    value = copy.deepcopy(value)
    where = rng.choice(list(places(value)))
    if not where:
        return rng.choice(OTHERS)
    holder = value
    for key in where[:-1]:
        holder = holder[key]
    action, old = rng.random(), holder[where[-1]]
    if action < 0.2:
        del holder[where[-1]]
    elif action < 0.3 and isinstance(old, (int, float)):
        holder[where[-1]] = old * rng.choice([2, -1, 0.5]) + rng.choice([0, 1, -1])
    elif action < 0.35:
        deep: Any = old
        for _ in range(rng.choice([3, 90, 900])):
            deep = [deep]
        holder[where[-1]] = deep
    elif action < 0.5 and isinstance(old, str) and old.startswith(("{", "[")):
        holder[where[-1]] = json.dumps(edit_json(json.loads(old), rng))
    else:
        holder[where[-1]] = rng.choice([*NUMBERS, *OTHERS, *DTYPES])
    return value


def edit_bytes(content: bytes, rng: random.Random) -> bytes:
    """Bytes with a few of them changed, cut out or put in, or with another end."""
    data = bytearray(content)
    if not data:
        return b"\0"
    # Most damage goes to the front, where headers are.
    offset = rng.randrange(min(len(data), rng.choice([16, 400, 4000, len(data)])))
    action = rng.random()
    if action < 0.5:
        for _ in range(rng.choice([1, 1, 2, 8])):
            data[min(len(data) - 1, offset + rng.randrange(64))] ^= 1 << rng.randrange(8)
    elif action < 0.65:
        data[offset : offset + rng.choice([1, 8, 100])] = rng.choice(
            [b"\0", b"\xff" * 8, b'"', b"{", b"9", b"\x7f\xff"]
        )
    elif action < 0.75:
        del data[offset : offset + rng.choice([1, 8, 100])]
    elif action < 0.85:
        del data[rng.randrange(len(data)) :]
    elif action < 0.95:
        data += bytes(rng.choice([1, 8, 4096]))
    else:
        data[offset : offset + 64] = bytes(len(data[offset : offset + 64]))
    return bytes(data)


def edit_tensors(content: bytes, rng: random.Random, case: Case) -> bytes:
    """Safetensors with tensors dropped, renamed, swapped, or described otherwise."""
    header, data = header_of(content)
    names = [name for name in header if name != "__metadata__"]
    name = rng.choice(names)
    action = rng.random()
    if action < 0.35:  # drop, or rename to what nobody knows
        entry = header.pop(name)
        if action < 0.2:
            begin, end = entry["data_offsets"]
            data = data[:begin] + data[end:]
            for other in header:
                if other != "__metadata__" and header[other]["data_offsets"][0] >= end:
                    header[other]["data_offsets"] = [
                        offset - (end - begin) for offset in header[other]["data_offsets"]
                    ]
        else:
            header[f"{name}_unknown"] = entry
        case.dropped += 1
    elif action < 0.5:
        other = rng.choice(names)
        header[name], header[other] = header[other], header[name]
    elif action < 0.6:
        header[
            rng.choice(
                [rng.choice(names), name.rpartition(".")[0], "__metadata__", name + ".weight"]
            )
        ] = header.pop(name)
    elif action < 0.75:
        header[name]["dtype"] = rng.choice(DTYPES)
    elif action < 0.9:
        shape = header[name]["shape"]
        header[name]["shape"] = rng.choice(
            [shape[::-1], [*shape, 1], [1, *shape], shape[1:], [1 << 62, 0, 1 << 62], [-1]]
        )
    else:
        header[name]["data_offsets"] = [rng.choice(NUMBERS), rng.choice(NUMBERS)]
    return with_header(header, data)


def edit_quantization(content: bytes, rng: random.Random) -> bytes:
    """Another quantisation in config.json; the rest concerns transformers only."""
    value = json.loads(content)
    value["quantization_config"] = edit_json(value.get("quantization_config", {}), rng)
    return json.dumps(value).encode()


@dataclass
class Case:
    """A damaged model.

    Attributes:
        files: it.
        damage: what was done, in words.
        dropped: how many tensors were dropped or renamed to what nobody knows.
        other: how much other damage was done.
    """

    files: Files
    damage: list[str] = field(default_factory=list)
    dropped: int = 0
    other: int = 0


def damaged(model: Model, rng: random.Random) -> Case:
    """The model with damage."""
    case = Case(dict(model.files))
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        name = rng.choice(sorted(case.files))
        content = case.files[name]
        action = rng.random()
        before = case.dropped
        try:
            if action < 0.02:
                del case.files[name]
                case.damage.append(f"removed {name}")
                case.other += 1
                if not case.files:
                    break
                continue
            if name == "config.json":
                new = edit_quantization(content, rng)
            elif name.endswith(".safetensors") and action < 0.6:
                if action < 0.35:
                    new = edit_tensors(content, rng, case)
                else:
                    header, data = header_of(content)
                    new = with_header(edit_json(header, rng), data)
            elif name.endswith(".json") and action < 0.7:
                new = json.dumps(edit_json(json.loads(content), rng)).encode()
            else:
                new = edit_bytes(content, rng)
        except (
            ValueError,
            TypeError,
            KeyError,
            AttributeError,
            IndexError,
            RecursionError,
            OverflowError,
        ):
            new = edit_bytes(content, rng)  # what was damaged before has no structure any more
        case.other += case.dropped == before
        case.damage.append(f"changed {name}")
        case.files[name] = new
    return case


# ---- what is done with a model


def write(folder: Path, files: Files) -> None:
    """Write files into a folder."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


class Wrong(Exception):
    """A case that was read, and should not have been."""


def step(run: Callable[[], Any], longest: float = 4000) -> Any:
    """What ``run`` returns, or the refusal, whose message has so many characters at most."""
    try:
        return run()
    except REFUSALS as error:
        if len(str(error)) > longest:
            raise Wrong(f"a message of {len(str(error))} characters") from error
        return error


def inspect(path: Path) -> None:
    """What ``cutlass-ops inspect`` does."""
    described = (
        cli.describe.describe_packed(packed_info(path))
        if is_packed(path)
        else cli.describe.describe_checkpoint(load_checkpoint(path))
    )
    cli.describe.add_kernels(described["tensors"], ["sm_90"], "none")
    cli.inspect.show(Console(file=io.StringIO(), width=80), described, ["sm_90"], "none")
    json.dumps(cli.common.json_value(described), allow_nan=False)


def read(path: Path, honest: dict[str, Tensor] | None) -> None:
    """Read every tensor of a checkpoint in every way; ``honest`` are values that quantised weights
    must have, if any.
    """
    checkpoint = load_checkpoint(path)
    for name, entry in checkpoint.entries.items():
        values = step(entry.values)
        if entry.quantized is None:
            continue
        weight = step(entry.quantized.read)
        if isinstance(values, Exception) or isinstance(weight, Exception):
            continue
        found = reference.dequantize_weight(weight, torch.float32)
        # The offsets of some formats are rounded to fp32.
        size = weight.scales.float().abs().amax() * 2.0**weight.bits
        size += 0 if weight.offsets is None else weight.offsets.float().abs().amax()
        both = found.isfinite() & values.isfinite()
        if found.shape != values.shape or not bool(
            ((found - values).abs()[both] <= size * 2.0**-20).all()
        ):
            raise Wrong(f"two ways to the values of {name} do not agree")
        if honest is not None and name in honest and not torch.equal(values, honest[name]):
            raise Wrong(f"{name} has other values, though only tensors are missing")


def repack(path: Path, out: Path) -> None:
    """Pack a checkpoint into a file and verify that."""
    checkpoint = load_checkpoint(path)
    reorder_checkpoint(checkpoint, out)
    found = verify_packed(out, checkpoint)
    if found.problems:
        raise Wrong(f"verify does not like what reorder wrote: {found.problems[0]}")


def check(model: Model, case: Case, folder: Path, load: bool) -> str:
    """The outcome of a case: "read" or "refused".

    Raises:
        Wrong, or whatever should not have been raised.
    """
    target = folder / "case"
    write(target, case.files)
    path = target / model.path
    results = [step(lambda: inspect(path))]
    ours = step(lambda: is_packed(path))
    if ours is True:
        found = step(lambda: verify_packed(path))
        results.append(found)
        results.append(
            step(
                lambda: [
                    value.unpack()
                    for value in load_packed(path).values()
                    if hasattr(value, "unpack")
                ]
            )
        )
        changed = any(
            case.files.get(name) != content
            for name, content in model.files.items()
            if name.endswith("safetensors")
        )
        if (
            model.sealed
            and changed
            and not isinstance(found, Exception)
            and not found.problems
            and not found.notes
        ):
            raise Wrong("verify finds nothing in a packed file that was damaged")
    elif not isinstance(ours, Exception):
        honest = model.values if case.dropped and not case.other else None
        results.append(step(lambda: read(path, honest)))
        results.append(step(lambda: repack(path, folder / "out.safetensors")))
    if load and not isinstance(results[0], Exception):
        from cutlass_ops.integrations.hf import load_model

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            results.append(step(lambda: load_model(path), math.inf))  # it may name all tensors
    return "refused" if any(isinstance(result, Exception) for result in results) else "read"


# ---- cases, one after another in a process that may die


def one(
    all_models: dict[str, Model], seed: int, index: int, folder: Path, load_every: int
) -> tuple[str, str, str]:
    """Name of the model, what became of it ("read", "refused" or "FAILED"), and a
    text that says more.
    """
    rng = random.Random(f"{seed}/{index}")
    name = rng.choice(sorted(all_models))
    case = damaged(all_models[name], rng)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        result = check(
            all_models[name],
            case,
            folder,
            load_every > 0 and index % load_every == 0 and "mnn" not in name,
        )
    except BaseException:
        return name, "FAILED", f"{', '.join(case.damage)}\n{traceback.format_exc()[-3000:]}"
    return name, result, ""


def work(
    pipe: Any,
    all_models: dict[str, Model],
    seed: int,
    indices: range,
    folder: Path,
    load_every: int,
) -> None:
    """Run cases, one after another, and send what became of each."""
    torch.set_num_threads(1)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    sys.stdout = sys.stderr = io.StringIO()
    for index in indices:
        pipe.send((index, *one(all_models, seed, index, folder, load_every)))


def run(
    count: int, seed: int = 0, seconds: float = 1e9, limit: float = 60, load_every: int = LOAD_EVERY
) -> tuple[Counter[str], list[str]]:
    """Run ``count`` cases, or as many as ``seconds`` take, each for ``limit`` seconds at most.

    Returns:
        How many were "read", "refused" and "FAILED"; a text for each failure.
    """
    all_models = honest_models(load_every > 0)
    counted: Counter[str] = Counter()
    failures: list[str] = []
    context = multiprocessing.get_context("fork")
    end, done = time.monotonic() + seconds, 0
    with tempfile.TemporaryDirectory() as folder:
        while done < count and time.monotonic() < end:
            receiver, sender = context.Pipe(False)
            arguments = (
                sender,
                all_models,
                seed,
                range(done, count),
                Path(folder, "work"),
                load_every,
            )
            process = context.Process(target=work, args=arguments, daemon=True)
            process.start()
            sender.close()
            while done < count and time.monotonic() < end:
                try:
                    if not receiver.poll(limit):
                        result = (done, "", "FAILED", f"ran for more than {limit} s")
                    else:
                        result = receiver.recv()
                except EOFError:
                    process.join()
                    result = (
                        done,
                        "",
                        "FAILED",
                        f"the process died with status {process.exitcode}",
                    )
                index, name, what, text = result
                done = index + 1
                counted[what] += 1
                if what == "FAILED":
                    failures.append(f"case {index} ({name}): {text}")
                    print(failures[-1], flush=True)
                if not name:
                    break
                if done % 1000 == 0:
                    print(f"{done} cases: {dict(counted)}", flush=True)
            process.kill()
            process.join()
    return counted, failures


def honest_models(load: bool) -> dict[str, Model]:
    """All models, each of them read without an error."""
    found = models()
    with tempfile.TemporaryDirectory() as folder:
        for name, model in found.items():
            case = Case(dict(model.files))
            target = Path(folder, name)
            if check(model, case, target, load and name != "mnn") != "read":
                read(target / "case" / model.path, None)  # raises the reason, if it is the reader's
                raise RuntimeError(f"the honest model {name!r} is refused")
            path = target / "case" / model.path
            if not is_packed(path):
                entries = load_checkpoint(path).entries
                model.values = {
                    key: entry.values()
                    for key, entry in entries.items()
                    if entry.quantized is not None
                }
    return found


def main() -> int:
    """Run what the command line says; 1 if anything failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=20_000, help="cases to run (20000)")
    parser.add_argument("--seed", type=int, default=0, help="another seed, other cases (0)")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after so many seconds")
    parser.add_argument(
        "--limit", type=float, default=60, help="seconds that one case may take (60)"
    )
    parser.add_argument(
        "--load-every",
        type=int,
        default=LOAD_EVERY,
        help="call load_model in every so many cases; 0 is never (10)",
    )
    parser.add_argument(
        "--only", type=int, metavar="INDEX", help="run one case in this process, and keep its files"
    )
    options = parser.parse_args()
    if options.only is not None:
        folder = Path(tempfile.mkdtemp())
        name, what, text = one(
            models(), options.seed, options.only, folder / "work", options.load_every
        )
        print(f"{name}: {what} in {folder}\n{text}")
        return what == "FAILED"
    start = time.monotonic()
    counted, failures = run(
        options.count, options.seed, options.seconds, options.limit, options.load_every
    )
    total = sum(counted.values())
    print(f"{total} cases in {time.monotonic() - start:.0f} s: {dict(counted)}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
