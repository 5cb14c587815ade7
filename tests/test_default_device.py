"""Torch's defaults (torch.set_default_device, torch.set_default_dtype) change no
result and no device.
"""

from __future__ import annotations

import ast
import copy
import inspect
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from imports import import_or_skip
from safetensors.torch import save_file
from torch import Tensor, nn

import cutlass_ops as co
from cutlass_ops.files import Options

PACKAGE = Path(co.__file__).parent
#: torch's functions that make a tensor on the default device, as its DeviceContext knows them.
FACTORIES = {
    "arange",
    "as_tensor",
    "asarray",
    "empty",
    "empty_permuted",
    "empty_strided",
    "eye",
    "full",
    "linspace",
    "logspace",
    "ones",
    "rand",
    "randint",
    "randn",
    "randperm",
    "range",
    "scalar_tensor",
    "tensor",
    "tril_indices",
    "triu_indices",
    "zeros",
}
#: Functions whose dtype is an integer's if none is given.
INTEGERS = {"arange", "randint", "randperm", "tril_indices", "triu_indices"}


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# "meta" represents any other device: its tensors have no address.
DEFAULTS: dict[str, Callable[[], Any]] = {
    "device": lambda: torch.device("meta"),
    "dtype": lambda: default_dtype(torch.bfloat16),
}


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_every_new_tensor_names_its_device_and_dtype(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        function, owner = node.func.attr, node.func.value
        if isinstance(owner, ast.Name) and owner.id == "torch" and function in FACTORIES:
            named = {keyword.arg for keyword in node.keywords}
            assert "device" in named, (
                f"line {node.lineno}: torch.{function} takes the default device"
            )
            assert "dtype" in named or function in INTEGERS, (
                f"line {node.lineno}: torch.{function} takes the default dtype"
            )


class Arguments:
    """Arguments of the calls below, made before a default changes."""

    def __init__(self, folder: Path) -> None:
        random = torch.Generator().manual_seed(0)

        def floats(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=random)

        def words(*shape: int) -> Tensor:
            return torch.randint(-(1 << 31), 1 << 31, shape, generator=random).to(torch.int32)

        self.weight, self.x = floats(64, 128), floats(3, 128)
        self.quantized = co.quantize(self.weight, 4, 32, symmetric=False)
        self.packed = co.reorder(self.quantized)
        self.rows_of_table = torch.tensor([0, 63, 7])
        self.flat, self.absmax = co.quantize_4bit(self.weight)
        self.awq = words(128, 8), floats(4, 64).half(), words(4, 8)
        self.experts = [co.quantize(floats(64, 64), 4, 32) for _ in range(2)]
        self.gate_up = co.reorder_experts(self.experts, gated=True)
        self.down = co.reorder_experts([co.quantize(floats(64, 32), 4, 32) for _ in range(2)])
        self.ids, self.shares = torch.tensor([[0, 1], [1, -1], [0, 0]]), floats(3, 2)
        self.rows, self.pixels, self.voxels = (
            floats(2, 32, 9),
            floats(2, 32, 5, 6),
            floats(2, 32, 3, 4, 5),
        )
        self.convs = [
            co.reorder(co.quantize(floats(8, 32, *(3,) * dims), 4, 32)) for dims in (1, 2, 3)
        ]
        self.static = co.reorder(co.quantize(floats(8, 32, 3, 3), 8, -1))
        self.static_linear = co.reorder(co.quantize(floats(8, 32), 8, -1))
        self.bias = floats(8)
        self.int8 = torch.randint(-128, 128, (2, 32, 5, 6), generator=random).to(torch.int8)
        self.layers = nn.ModuleDict(
            {name: nn.Linear(128, 64, bias=False) for name in ("q_proj", "k_proj", "v_proj")}
        )
        self.conv_layers = nn.ModuleDict({"conv": nn.Conv2d(32, 8, 3, bias=False)})
        self.file, self.gptq, self.llama = (
            folder / "packed.safetensors",
            folder / "gptq",
            folder / "llama",
        )
        co.save_packed(self.file, {"m": self.packed, "e": self.gate_up, "t": self.x})
        self.gptq.mkdir()
        tensors = {
            "m.qweight": words(16, 64),
            "m.qzeros": words(4, 8),
            "m.scales": floats(4, 64).half(),
        }
        save_file(tensors, self.gptq / "model.safetensors")
        settings = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}
        (self.gptq / "config.json").write_text(json.dumps({"quantization_config": settings}))


def load_model(a: Arguments) -> Any:
    transformers = import_or_skip("transformers")
    if not a.llama.exists():
        sizes = {
            "hidden_size": 64,
            "intermediate_size": 64,
            "num_attention_heads": 2,
            "vocab_size": 32,
        }
        config = transformers.LlamaConfig(**sizes, num_hidden_layers=1, num_key_value_heads=2)
        with torch.device("cpu"):
            transformers.LlamaForCausalLM(config).float().save_pretrained(a.llama)
    model = co.load_model(a.llama, options=Options(4, 32), dtype=torch.float32)
    return model(input_ids=a.ids.clamp(min=0), use_cache=False).logits


def layers(a: Arguments, change: Callable[[nn.Module], Any] = lambda model: None) -> Any:
    model = copy.deepcopy(a.layers)
    co.replace_linears(model, dict.fromkeys(model, a.packed))
    change(model)
    return [
        module(a.x)
        for module in model.modules()
        if isinstance(module, co.MixedLinear) and not module.shared_by
    ]


def fused(a: Arguments) -> Any:
    model = copy.deepcopy(a.layers)
    co.replace_linears(model, dict.fromkeys(model, a.packed))
    co.fuse_linears(model)
    return list(model.buffers())


def quantized_model(a: Arguments) -> Any:
    model = co.quantize_model(copy.deepcopy(a.layers), 4, 32)
    return [module(a.x) for module in model.values()]


def conv_layers(a: Arguments) -> Any:
    model = copy.deepcopy(a.conv_layers)
    co.replace_convs(model, {"conv": a.convs[1]})
    return model["conv"](a.pixels)


def save_packed(a: Arguments) -> Any:
    file = a.file.with_name("written.safetensors")
    co.save_packed(file, {"m": a.packed})
    return file.read_bytes()


def mixed_gemm(a: Arguments) -> Any:
    x = a.x.clone().requires_grad_()
    co.mixed_gemm(x, a.packed, activation="silu").square().sum().backward()
    quantized = co.mixed_gemm(co.quantize_activations(a.x, 32), a.packed)
    return [
        quantized,
        x.grad,
        *(
            co.mixed_gemm(a.x, a.packed, None, "gelu", mode, False)
            for mode in ("none", "token", "block")
        ),
    ]


def mixed_conv(function: Callable[..., Any], x: Tensor, weight: co.PackedWeight) -> Any:
    return [
        function(x, weight, padding=1, act_quant=mode)
        for mode in ("none", "token", "block", "tensor")
    ]


def static(function: Callable[..., Any], x: Tensor, weight: co.PackedWeight, bias: Tensor) -> Any:
    scales = {"x_scale": 0.02, "x_zero_point": 3, "y_scale": 0.5, "y_zero_point": 1}
    return [
        function(x, weight, bias, activation=end, **scales)
        for end in (None, "relu6", ("clamp", -1.0, 2.0))
    ]


#: A call of each public function, and of what makes tensors in the methods of public classes.
CALLS: dict[str, Callable[[Arguments], Any]] = {
    "awq_dequantize": lambda a: co.awq_dequantize(*a.awq),
    "awq_gemm": lambda a: co.awq_gemm(a.x.half(), *a.awq),
    "conv2d_int8": lambda a: static(co.conv2d_int8, a.int8, a.static, a.bias),
    "dequantize": lambda a: [co.dequantize(weight) for weight in (a.quantized, a.packed, *a.convs)],
    "embedding": lambda a: co.embedding(a.rows_of_table, a.packed),
    "dequantize_4bit": lambda a: co.dequantize_4bit(a.flat, a.absmax, (64, 128)),
    "explain": lambda a: [
        str(co.explain(a.x, a.packed)),
        str(co.explain(3, a.packed, device="sm_90")),
    ],
    "fuse_linears": fused,
    "grouped_gemm": lambda a: co.grouped_gemm(a.x[:, :64], a.gate_up, co.route(a.ids, 2)),
    "linear_int8": lambda a: static(co.linear_int8, a.int8.movedim(1, -1), a.static_linear, a.bias),
    "load_checkpoint": lambda a: co.load_checkpoint(a.gptq)["m"],
    "load_model": load_model,
    "load_packed": lambda a: co.load_packed(a.file),
    "mixed_conv1d": lambda a: mixed_conv(co.mixed_conv1d, a.rows, a.convs[0]),
    "mixed_conv2d": lambda a: mixed_conv(co.mixed_conv2d, a.pixels, a.convs[1]),
    "mixed_conv3d": lambda a: mixed_conv(co.mixed_conv3d, a.voxels, a.convs[2]),
    "mixed_gemm": mixed_gemm,
    "mixed_moe": lambda a: co.mixed_moe(a.x[:, :64], a.gate_up, a.down, a.ids, a.shares),
    "quantize": lambda a: [
        co.quantize(a.weight, 4, 32, book=book) for book in (None, "nf4", "fp4", "mxfp4")
    ],
    "quantize_4bit": lambda a: [
        co.quantize_4bit(a.weight, quant_type=kind) for kind in ("nf4", "fp4")
    ],
    "quantize_activations": lambda a: co.quantize_activations(a.x, symmetric=False),
    "quantize_model": quantized_model,
    "reorder": lambda a: [co.reorder(a.quantized), co.reorder([a.quantized, a.quantized])],
    "reorder_experts": lambda a: co.reorder_experts(a.experts),
    "replace_convs": conv_layers,
    "replace_linears": layers,
    "rms_norm_quantize": lambda a: co.rms_norm_quantize(a.x, a.x[0], residual=a.x),
    "route": lambda a: co.route(a.ids, 2, a.ids[0]),
    "save_packed": save_packed,
    "set_activations": lambda a: layers(
        a, lambda model: co.set_activations(model, "token", act_symmetric=False)
    ),
    "silu_mul_quantize": lambda a: co.silu_mul_quantize(a.x, a.x),
    "PackedExperts": lambda a: a.gate_up.unpack(),
    "PackedWeight": lambda a: [
        weight.unpack() for weight in (a.packed, a.packed.row_panels(0, 64), a.convs[1].matrix)
    ],
    "QuantizedActivations": lambda a: co.quantize_activations(a.x).dequantize(),
    "QuantizedWeight": lambda a: co.QuantizedWeight.from_flat(
        a.flat, a.absmax, (64, 128), 64, co.quantize(a.weight, book="nf4").book
    ),
}


def plain(result: Any) -> Any:
    """Tensors as their bytes with dtype and device, in any structure."""
    if isinstance(result, Tensor):
        assert result.device.type == "cpu", f"a result is on {result.device}"
        return (
            str(result.dtype),
            tuple(result.shape),
            result.detach().reshape(-1).view(torch.uint8).tolist(),
        )
    if isinstance(result, dict):
        return {name: plain(value) for name, value in result.items()}
    if isinstance(result, list | tuple):
        return [plain(value) for value in result]
    if isinstance(
        result, co.QuantizedWeight | co.PackedWeight | co.PackedExperts | co.QuantizedActivations
    ):
        return plain(vars(result))
    return result


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Arguments:
    return Arguments(tmp_path_factory.mktemp("default_device"))


def test_every_public_function_is_called() -> None:
    functions = {name for name in co.__all__ if inspect.isfunction(getattr(co, name))}
    assert functions <= CALLS.keys()


@pytest.mark.parametrize("default", DEFAULTS)
@pytest.mark.parametrize("name", CALLS)
def test_results_do_not_depend_on_the_default(given: Arguments, name: str, default: str) -> None:
    expected = plain(CALLS[name](given))
    with DEFAULTS[default]():
        found = CALLS[name](given)
    assert plain(found) == expected
