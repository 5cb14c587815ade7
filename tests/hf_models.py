"""Small models of transformers and their checkpoints."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from imports import import_or_skip
from safetensors.torch import load_file, save_file
from sizes import DECODER
from torch import Tensor, nn

import cutlass_ops as co
from cutlass_ops.weights import formats

transformers = import_or_skip("transformers")

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6], [5, 3, 5, 8, 9, 7, 9, 3]])

SIZES = {**DECODER, "vocab_size": 160, "initializer_range": 0.2}

FAMILIES = {
    "llama": "LlamaConfig",
    "mistral": "MistralConfig",
    "qwen2": "Qwen2Config",
    "qwen3": "Qwen3Config",
}


def tiny(family: str = "llama", **options: Any) -> Any:
    """A random model whose every parameter matters: norms that are not 1, biases that are not 0."""
    config = getattr(transformers, FAMILIES[family])(**{**SIZES, **options})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.copy_(torch.rand_like(parameter) + 0.5 * name.endswith("norm.weight"))
    return model


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    """The layers that are packed: all but the head."""
    return {
        name: m
        for name, m in model.named_modules()
        if isinstance(m, nn.Linear) and name != "lm_head"
    }


def logits(model: Any) -> Tensor:
    with torch.inference_mode():
        result: Tensor = model(input_ids=TOKENS).logits.float()
    return result


def assert_same_logits(found: Any, expected: Any) -> None:
    a, b = logits(found), logits(expected)
    assert (a - b).abs().max() <= 2e-5 * b.square().mean().sqrt()


def mixed(model: nn.Module) -> dict[str, co.MixedLinear]:
    return {
        name: module for name, module in model.named_modules() if isinstance(module, co.MixedLinear)
    }


MOE = {"num_local_experts": 2, "num_experts_per_tok": 1, "num_hidden_layers": 1}


def imported(code: str, hooks: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = {
        name: value for name, value in os.environ.items() if name != "CUTLASS_OPS_IMPORT_HOOKS"
    }
    if hooks is not None:
        environment["CUTLASS_OPS_IMPORT_HOOKS"] = hooks
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-c",
        "import sys\nbefore = list(sys.meta_path)\nimport cutlass_ops\n" + code,
    ]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)


Written = tuple[dict[str, Tensor], Tensor]

PERM = torch.randperm(96, generator=torch.Generator().manual_seed(3))


def words(codes: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Codes of 4 bits ``[R, C]`` as int32 ``[R, C / 8]``."""
    eights = codes.long().view(codes.shape[0], -1, 8)[..., list(order)]
    packed = (eights << torch.arange(0, 32, 4)).sum(-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def rounded(weight: Tensor, symmetric: bool = False) -> co.QuantizedWeight:
    return co.quantize(weight.half(), 4, 32, symmetric)


def awq(weight: Tensor) -> Written:
    qw = rounded(weight)
    assert qw.zeros is not None
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {
        "qweight": words(qw.codes.t(), order),
        "qzeros": words(qw.zeros.t(), order),
        "scales": qw.scales.t(),
    }
    return tensors, co.dequantize(qw, torch.float32)


def gptq(weight: Tensor) -> Written:
    """Act order: the group of column i of x follows from its position in a permuted order."""
    k = weight.shape[1]
    perm = PERM[k > PERM]
    qw = rounded(weight[:, perm])
    assert qw.zeros is not None
    place = torch.argsort(perm)
    tensors = {
        "qweight": words(qw.codes[:, place]).t(),
        "qzeros": words((qw.zeros.long() - 1).t() & 15),
        "scales": qw.scales.t(),
        "g_idx": (place // 32).to(torch.int32),
    }
    return tensors, co.dequantize(qw, torch.float32)[:, place]


def compressed_tensors(weight: Tensor) -> Written:
    qw = rounded(weight, symmetric=True)
    tensors = {
        "weight_packed": words(qw.codes),
        "weight_scale": qw.scales,
        "weight_shape": torch.tensor(weight.shape),
    }
    return tensors, co.dequantize(qw, torch.float32)


def compressed_tensors_int8(weight: Tensor) -> Written:
    qw = co.quantize(weight, 8, -1)
    tensors = {"weight": (qw.codes.int() - 128).to(torch.int8), "weight_scale": qw.scales}
    return tensors, co.dequantize(qw, torch.float32)


def bitsandbytes(weight: Tensor) -> Written:
    codes, absmax = co.quantize_4bit(weight, blocksize=32, quant_type="nf4")
    described = {
        "quant_type": "nf4",
        "blocksize": 32,
        "dtype": "float32",
        "shape": list(weight.shape),
    }
    tensors = {
        "weight": codes.view(-1, 1),
        "weight.absmax": absmax,
        "weight.quant_map": torch.tensor(formats.NF4),
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(
            list(json.dumps(described).encode()), dtype=torch.uint8
        ),
    }
    return tensors, co.dequantize_4bit(
        codes, absmax, weight.shape, blocksize=32, quant_type="nf4", dtype=torch.float32
    )


def bitsandbytes_int8(weight: Tensor) -> Written:
    absmax = weight.abs().amax(1)
    codes = (weight * 127 / absmax[:, None]).round().to(torch.int8)
    tensors = {"weight": codes, "SCB": absmax, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return tensors, codes * (absmax / 127)[:, None]


def hqq(weight: Tensor) -> Written:
    qw = co.quantize(weight, 4, 32, False)
    assert qw.zeros is not None
    rows = qw.codes.view(-1, 32)
    high, low = rows.chunk(2)
    zeros = qw.zeros.view(-1, 1) + 0.25  # real ones
    numbers = {"nbits": 4, "group_size": 32, "axis": 1}
    flags = {"view_as_float": 0, "quant_scale": 0, "encoded_state_dict": 1}
    tensors = {
        "W_q": high << 4 | low,
        "scale": qw.scales.view(-1, 1),
        "zero": zeros,
        "shape": torch.tensor(weight.shape),
        "packing": torch.tensor(list(b"4bit_u8"), dtype=torch.uint8),
        **{name: torch.tensor(value, dtype=torch.int32) for name, value in numbers.items()},
        **{name: torch.tensor(value, dtype=torch.uint8) for name, value in flags.items()},
    }
    return tensors, ((rows - zeros) * qw.scales.view(-1, 1)).view(weight.shape)


CT = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}

CT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}


def ct_config(form: str, weights: dict[str, Any]) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "ignore": ["lm_head"],
        "config_groups": groups,
    }


DIALECTS: dict[str, tuple[Callable[[Tensor], Written], dict[str, Any]]] = {
    "awq": (
        awq,
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
    ),
    "gptq": (
        gptq,
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": False},
    ),
    "compressed-tensors": (compressed_tensors, ct_config("pack-quantized", CT)),
    "compressed-tensors int8": (compressed_tensors_int8, ct_config("int-quantized", CT8)),
    "bitsandbytes nf4": (bitsandbytes, {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    "bitsandbytes int8": (
        bitsandbytes_int8,
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
    ),
    "hqq": (hqq, {"quant_method": "hqq"}),
}


def write_dialect(folder: Path, dialect: str) -> Any:
    """A checkpoint of a random model; the model that has the checkpoint's values."""
    write, quantization = DIALECTS[dialect]
    model = tiny("qwen2" if dialect == "awq" else "llama")
    layers = linears(model)
    tensors = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if name.removesuffix(".weight") not in layers
    }
    with torch.no_grad():
        for name, linear in layers.items():
            written, values = write(linear.weight.detach())
            tensors.update(
                {f"{name}.{part}": tensor.contiguous() for part, tensor in written.items()}
            )
            linear.weight.copy_(values)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {**model.config.to_dict(), "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
    return model


def write_act_order(folder: Path) -> Path:
    """Write a packed Llama of one layer with permutations and zero points; returns its file, beside
    its configuration.
    """
    model = tiny(num_hidden_layers=1)
    tensors: dict[str, Any] = {}
    for name, tensor in model.state_dict().items():
        module = name.removesuffix(".weight")
        if module in linears(model):
            weight = co.quantize(tensor, 4, 32, False)
            perm = torch.randperm(weight.k, generator=torch.Generator().manual_seed(0))
            tensors[module] = co.reorder(
                co.QuantizedWeight(
                    weight.codes, weight.scales, weight.zeros, bits=4, group_size=32, perm=perm
                )
            )
        else:
            tensors[name] = tensor
    co.save_packed(folder / "packed.safetensors", tensors)
    (folder / "config.json").write_text(model.config.to_json_string())
    return folder / "packed.safetensors"


def rewrite(packed: Path, target: Path, change: dict[str, Tensor | None]) -> Path:
    """A packed directory with other tensors, in one shard."""
    target.mkdir()
    tensors = {
        name: tensor
        for file in packed.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
    kept = {name: tensor for name, tensor in {**tensors, **change}.items() if tensor is not None}
    save_file(kept, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_bytes((packed / "config.json").read_bytes())
    return target
