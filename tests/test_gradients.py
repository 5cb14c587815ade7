"""Gradients: those of the dequantised weight, in bounded memory; and an error
wherever there are none.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import cutlass_ops as co
from cutlass_ops.ops import gradients, library, products
from cutlass_ops.ops.call import Call
from cutlass_ops.weights import formats

N, K, M = 200, 288, 6
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ACTIVATIONS: dict[str, tuple[Any, Callable[[Tensor], Tensor]]] = {
    "none": (None, lambda z: z),
    "relu": ("relu", F.relu),
    "relu6": ("relu6", F.relu6),
    "gelu": ("gelu", F.gelu),
    "silu": ("silu", F.silu),
    "gelu_tanh": ("gelu_tanh", lambda z: F.gelu(z, approximate="tanh")),
    "clamp": (("clamp", -3.0, 5.0), lambda z: z.clamp(-3.0, 5.0)),
}


def weight(
    kind: str = "zeros", n: int = N, k: int = K, group_size: int = 32, device: str = "cpu"
) -> co.PackedWeight:
    """A weight of each format there is."""
    random = torch.Generator().manual_seed(0)
    bits = 8 if kind == "int8" else 4
    groups = formats.group_count(k, group_size)

    def codes(*shape: int) -> Tensor:
        return torch.randint(0, 1 << bits, shape, generator=random).to(torch.uint8)

    packed = co.reorder(
        co.QuantizedWeight(
            codes=codes(n, k),
            scales=(torch.rand(n, groups, generator=random) * 2**-bits + 0.01).half(),
            zeros=codes(n, groups) if kind in ("zeros", "perm") else None,
            offsets=torch.randn(n, groups, generator=random).bfloat16()
            if kind == "offsets"
            else None,
            bits=bits,
            group_size=group_size,
            perm=torch.randperm(k, generator=random) if kind == "perm" else None,
            book=torch.tensor(formats.NF4) if kind == "book" else None,
        )
    )
    return packed.to(device)


def values(
    *shape: int, seed: int = 1, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def assert_product(
    found: Tensor, grad: Tensor, packed: co.PackedWeight, dtype: torch.dtype
) -> None:
    """Each element is that of ``grad @ W``, up to roundings of the factors and of the
    result to ``dtype``.
    """
    w = co.dequantize(packed, torch.float32).double()
    grad = grad.double()
    assert found.dtype == dtype
    error = (found.double() - grad @ w).abs()
    # In fp32 the rounding of the sums, whose order depends on the number of threads, and of z adds
    # to the final one.
    units = 8 if dtype == torch.float32 else 2
    assert (error <= units * torch.finfo(dtype).eps * (grad.abs() @ w.abs())).all()


# ---- values


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["zeros", "symmetric", "offsets", "int8", "book", "perm"])
def test_the_gradient_of_x_is_a_product_with_the_dequantised_weight(
    kind: str, dtype: torch.dtype, device: str
) -> None:
    packed = weight(kind, device=device)
    x = values(2, M, K, dtype=dtype, device=device).requires_grad_()
    y = co.mixed_gemm(x, packed)
    with torch.no_grad():
        assert torch.equal(y, co.mixed_gemm(x, packed))
    grad = values(2, M, N, seed=2, dtype=dtype, device=device)
    y.backward(grad)
    assert_product(x.grad, grad, packed, dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("act_quant", "symmetric"),
    [("none", True), ("block", True), ("block", False), ("token", False)],
)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients_through_the_epilogue(
    activation: str, act_quant: str, symmetric: bool, device: str
) -> None:
    """Straight through the quantisation of x, at the z that the product has with it."""
    name, function = ACTIVATIONS[activation]
    dtype = torch.float32
    packed = weight(device=device)
    x = values(M, K, dtype=dtype, device=device).requires_grad_()
    bias = values(N, seed=3, device=device).requires_grad_()
    residual = values(M, N, seed=4, dtype=torch.bfloat16, device=device).requires_grad_()
    options = {"act_quant": act_quant, "act_symmetric": symmetric}
    z = co.mixed_gemm(
        x.detach(), packed, bias.detach(), out_dtype=torch.float32, **options
    ).requires_grad_()
    grad = values(M, N, seed=2, dtype=dtype, device=device)
    (of_z,) = torch.autograd.grad(function(z), z, grad.float())

    y = co.mixed_gemm(x, packed, bias, name, residual=residual, **options)
    y.backward(grad)
    if activation in (*co.reference.CLAMPS, "clamp"):
        assert 0.2 < (of_z == 0).float().mean() < 0.9
    assert_product(x.grad, of_z, packed, dtype)
    torch.testing.assert_close(bias.grad, of_z.sum(0), rtol=1e-5, atol=1e-5)
    assert torch.equal(residual.grad, grad.bfloat16())


@pytest.mark.parametrize("device", DEVICES)
def test_only_inputs_that_require_it_get_a_gradient(device: str) -> None:
    packed = weight(device=device)
    x = values(M, K, dtype=torch.float16, device=device)
    for wanted in ("bias", "residual"):
        given = {"bias": values(N, device=device), "residual": values(M, N, device=device)}
        given[wanted].requires_grad_()
        y = co.mixed_gemm(x, packed, activation="silu", **given)
        y.sum().backward()
        assert {name: t.grad is not None for name, t in given.items()} == {
            name: name == wanted for name in given
        }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("activation", [None, "relu"])
def test_the_gradient_of_a_bias_is_summed_in_fp32(activation: str | None, device: str) -> None:
    packed = weight(n=3, k=32, device=device)
    x = torch.zeros(4099, 32, dtype=torch.float16, device=device)
    bias = torch.ones(3, device=device).requires_grad_()
    co.mixed_gemm(x, packed, bias, activation).sum().backward()
    assert bias.grad.tolist() == [4099.0] * 3  # fp16 has multiples of 4 there


@pytest.mark.parametrize("device", DEVICES)
def test_saturated_elements_have_gradient_0(device: str) -> None:
    packed = weight(device=device)
    x = values(M, K, dtype=torch.float16, device=device).requires_grad_()
    residual = torch.zeros(M, N, device=device)
    residual[::2, ::3] = 1e6
    residual[1::2, ::3] = -1e6
    residual.requires_grad_()
    grad = values(M, N, seed=2, dtype=torch.float16, device=device)
    y = co.mixed_gemm(x, packed, residual=residual, saturate=True)
    assert y.isfinite().all()
    y.backward(grad)
    expected = torch.where(residual == 0, grad, 0.0)
    assert_product(x.grad, expected, packed, torch.float16)
    assert torch.equal(residual.grad, expected.float())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
def test_a_result_of_another_dtype(out_dtype: torch.dtype, device: str) -> None:
    """Gradients beyond fp16's largest number reach the place where they are summed."""
    packed = weight(device=device)
    x = values(M, K, dtype=torch.float16, device=device).requires_grad_()
    grad = values(M, N, seed=2, dtype=out_dtype, device=device)
    grad[0, 0], grad[0, 1] = 2.0**17, -(2.0**17)
    co.mixed_gemm(x, packed, out_dtype=out_dtype).backward(grad)
    w = co.dequantize(packed, torch.float32)
    fits = ((grad.float() @ w).abs() < 6e4).all(1)
    assert fits[1:].all()
    assert_product(x.grad[fits], grad[fits], packed, torch.float16)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(0, K), (K,), (3, 0, K)], ids=str)
def test_shapes_of_x(shape: tuple[int, ...], device: str) -> None:
    packed = weight(device=device)
    x = values(*shape, dtype=torch.float16, device=device).requires_grad_()
    y = co.mixed_gemm(x, packed)
    assert y.shape == (*shape[:-1], N)
    y.sum().backward()
    assert x.grad.shape == x.shape
    if x.numel():
        assert_product(x.grad[None], torch.ones(1, N, device=device), packed, torch.float16)


@pytest.mark.parametrize(
    ("activation", "bounds"),
    [
        ("relu", [0.0]),
        ("relu6", [0.0, 6.0]),
        ("gelu", [0.0]),
        ("silu", [0.0]),
        ("gelu_tanh", [0.0]),
        (("clamp", -3.0, 5.0), [-3.0, 5.0]),
        (("clamp", 2.0, 2.0), [2.0]),
    ],
    ids=str,
)
def test_at_a_bound_the_gradient_is_that_of_torch(activation: Any, bounds: list[float]) -> None:
    edges = torch.tensor(bounds)
    near = [edges.nextafter(torch.tensor(side)) for side in (-math.inf, math.inf)]
    z = torch.cat([edges, *near, torch.tensor([-100.0, 100.0])]).requires_grad_()
    name, *limits = activation if isinstance(activation, tuple) else (activation, 0.0, 0.0)
    function = (lambda v: v.clamp(*limits)) if name == "clamp" else ACTIVATIONS[name][1]
    grad = values(len(z))
    (expected,) = torch.autograd.grad(function(z), z, grad)
    if name == "clamp":  # torch's passes there before version 2.15 alone
        expected = torch.where((z >= limits[0]) & (z <= limits[1]), grad, 0.0).detach()
    assert torch.equal(
        gradients.through_activation(grad, z.detach(), Call(None, name, *limits)), expected
    )
    # The same by way of a product: an identity in fp32 whose z are these values.
    eye = co.reorder(
        co.QuantizedWeight(
            8 + torch.eye(len(z), dtype=torch.uint8), torch.ones(len(z), 1), group_size=-1
        )
    )
    x = z.detach()[None].clone().requires_grad_()
    co.mixed_gemm(x, eye, activation=activation).backward(grad[None])
    assert torch.equal(x.grad, expected[None])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_result_of_the_largest_number_has_its_gradient(dtype: torch.dtype, device: str) -> None:
    """Saturating changes values beyond the largest number, and not that number itself."""
    largest = torch.finfo(dtype).max
    beyond = largest * (1 + 2**-20)
    residual = torch.tensor([[largest, -largest, beyond, -beyond, 1.0]], device=device)
    codes = torch.full((5, 32), 8, dtype=torch.uint8)
    codes[:, 0] = 9  # each result is x[0, 0] and the residual
    packed = co.reorder(co.QuantizedWeight(codes, torch.ones(5, 1), group_size=32)).to(device)
    x = torch.zeros(1, 32, dtype=dtype, device=device).requires_grad_()
    residual.requires_grad_()
    y = co.mixed_gemm(x, packed, residual=residual, saturate=True)
    assert y.abs().tolist() == [[largest] * 4 + [1.0]]
    y.backward(torch.tensor([[1.0, 2.0, 4.0, 8.0, 16.0]], dtype=dtype, device=device))
    assert residual.grad.tolist() == [[1.0, 2.0, 0.0, 0.0, 16.0]]
    assert x.grad[0, 0].item() == 1 + 2 + 16


# ---- memory


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("kind", ["zeros", "offsets", "int8", "book", "perm"])
def test_panels_of_rows_add_up(
    kind: str, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = weight(kind, device=device)
    panels: list[tuple[int, int]] = []

    def dequantize(*args: Any) -> Tensor:
        panels.append(args[2:])
        return whole(*args)

    whole = products.run_dequantize
    monkeypatch.setattr(products, "run_dequantize", dequantize)
    monkeypatch.setattr(products, "_PANEL_VALUES", 70 * K)
    act_quant = "none" if dtype == torch.float16 or kind == "book" else "block"
    x = values(M, K, dtype=dtype, device=device).requires_grad_()
    grad = values(M, N, seed=2, dtype=dtype, device=device)
    y = co.mixed_gemm(x, packed, act_quant=act_quant)
    panels.clear()
    y.backward(grad)
    assert panels == [(0, 64), (64, 128), (128, 192), (192, 200)]
    monkeypatch.undo()
    assert_product(x.grad, grad, packed, dtype)


@pytest.mark.parametrize("fp32_results", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_panels_of_16_bits_add_up_in_fp32(
    dtype: torch.dtype, fp32_results: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where ``torch.mm`` has fp32 results; with a torch that lacks them the
    panels are fp32.
    """
    panels: list[int] = []

    def mm(a: Tensor, b: Tensor, *, out_dtype: torch.dtype) -> Tensor:
        assert a.dtype == b.dtype == dtype
        panels.append(len(b))
        return (a.double() @ b.double()).to(out_dtype)

    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(gradients, "_FP32_RESULTS", fp32_results)
    monkeypatch.setattr(products, "_PANEL_VALUES", 64 * K)
    codes = torch.randint(0, 16, (N, K), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    packed = co.reorder(co.QuantizedWeight(codes, torch.ones(N, 1), group_size=-1))
    grad = (values(M, N) * 60).round().to(dtype)
    exact = grad.double() @ (codes.double() - 8)
    # so are the sums of a panel: rounded to 16 bits they would show
    assert (exact != exact.to(dtype)).any()
    assert torch.equal(gradients._times_weight(grad, packed, dtype), exact.to(dtype))
    assert torch.equal(gradients._times_weight(grad, packed, torch.float32), exact.float())
    assert panels == ([64, 64, 64, 8] * 2 if fp32_results else [])


@pytest.mark.parametrize("activation", [None, "silu"])
def test_tensors_that_are_kept_for_the_backward_pass(activation: str | None) -> None:
    """The packed tensors; x only where the gradient depends on it; no values of W, and no z."""
    packed = weight("perm")
    kept: list[Tensor] = []
    x = values(M, K).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(t), t)[1], lambda t: t):
        co.mixed_gemm(x, packed, activation=activation)
    addresses = {t.data_ptr() for t in packed.tensors().values()}
    others = [t for t in kept if t.data_ptr() not in addresses]
    assert [t.data_ptr() for t in others] == ([] if activation is None else [x.data_ptr()])


def test_a_weight_that_changes_before_the_backward_pass_is_noticed() -> None:
    packed = weight()
    x = values(M, K).requires_grad_()
    y = co.mixed_gemm(x, packed)
    packed.scales.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# ---- operators without gradients


@pytest.mark.parametrize("part", ["scales", "bias", "offsets", "book"])
def test_packed_weights_are_frozen(part: str) -> None:
    n, k = 64, 128
    qw = co.QuantizedWeight(
        codes=torch.zeros(n, k, dtype=torch.uint8),
        scales=torch.ones(n, 1),
        offsets=torch.ones(n, 1) if part == "offsets" else None,
        book=torch.tensor(formats.NF4) if part == "book" else None,
        bias=torch.ones(n),
    )
    packed = co.reorder(qw)
    getattr(packed, part).requires_grad_()
    with pytest.raises(
        RuntimeError,
        match=f"{part} of the packed weight requires a gradient; packed weights are frozen",
    ):
        co.mixed_gemm(values(2, k), packed)
    with pytest.raises(RuntimeError, match="packed weights are frozen"):
        co.dequantize(packed)
    with torch.no_grad():
        assert co.mixed_gemm(values(2, k), packed).shape == (2, n)


def calls() -> dict[str, Callable[[Tensor], Any]]:
    """Every operator without a gradient, of a float matrix."""
    packed = weight(group_size=128, k=256)
    n, k, blocks = 16, 64, 2
    words, zeros = (
        torch.zeros(k, n // 8, dtype=torch.int32),
        torch.zeros(blocks, n // 8, dtype=torch.int32),
    )
    half = torch.ones(blocks, n).half()
    byte = torch.zeros(32, dtype=torch.uint8)
    quantized = co.quantize_activations(values(M, 256))
    nested = co.NestedAbsmax.quantize(torch.ones(1))
    return {
        "quantize_activations": lambda t: co.quantize_activations(t),
        "rms_norm_quantize": lambda t: co.rms_norm_quantize(t, torch.ones(256)),
        "rms_norm_quantize's weight": lambda t: co.rms_norm_quantize(t.detach(), t[0]),
        "rms_norm_quantize's residual": lambda t: co.rms_norm_quantize(
            t.detach(), torch.ones(256), 1e-6, t
        ),
        "silu_mul_quantize": lambda t: co.silu_mul_quantize(t, t.detach()),
        "silu_mul_quantize's up": lambda t: co.silu_mul_quantize(t.detach(), t),
        "mixed_gemm of quantised activations": lambda t: co.mixed_gemm(
            quantized, packed, bias=t[0, :N]
        ),
        "mixed_gemm of quantised activations, residual": lambda t: co.mixed_gemm(
            quantized, packed, residual=t[:, :N]
        ),
        "quantize_4bit": lambda t: co.quantize_4bit(t),
        "dequantize_4bit": lambda t: co.dequantize_4bit(byte, t[0, :1], (64,)),
        "dequantize_4bit's nested": lambda t: co.dequantize_4bit(
            byte, nested._replace(absmax=t[0, :1]), (64,)
        ),
        "awq_gemm": lambda t: co.awq_gemm(t[:, :k].half(), words, half, zeros),
        "awq_gemm's scales": lambda t: co.awq_gemm(
            t[:, :k].detach().half(), words, half * t[0, 0].half(), zeros
        ),
        "awq_dequantize": lambda t: co.awq_dequantize(words, half * t[0, 0].half(), zeros),
    }


@pytest.mark.parametrize("name", calls())
def test_operators_without_a_gradient_say_so(name: str) -> None:
    call = calls()[name]
    t = values(M, 256).requires_grad_()
    with pytest.raises(
        RuntimeError,
        match=r"has no gradient, and an input requires one; .* torch.no_grad\(\).*detach\(\)",
    ):
        call(t)
    with torch.no_grad():
        call(t)
    call(t.detach())
    with (
        forward_ad.dual_level(),
        pytest.raises(RuntimeError, match="neither forward-mode derivatives"),
    ):
        call(forward_ad.make_dual(t.detach(), torch.ones_like(t)))


def test_no_gradient_of_the_gradient() -> None:
    x = values(M, K).requires_grad_()
    (dx,) = torch.autograd.grad(
        co.mixed_gemm(x, weight(), activation="silu").sum(), x, create_graph=True
    )
    with pytest.raises(RuntimeError, match="mixed_gemm has no gradient of its gradient"):
        dx.sum().backward()


def test_no_forward_mode_and_no_transforms() -> None:
    packed, x = weight(), values(M, K)

    def run(x: Tensor) -> Tensor:
        return co.mixed_gemm(x, packed)

    transforms: list[Callable[[], Any]] = [
        lambda: torch.func.grad(lambda t: run(t).sum())(x),
        lambda: torch.func.vmap(run)(x[None]),
        lambda: torch.func.jvp(run, (x,), (x,)),
    ]
    for transform in transforms:
        with pytest.raises(RuntimeError, match="neither forward-mode derivatives nor rules"):
            transform()
    # Operands outside of a transform are computed as usual.
    assert torch.equal(torch.func.vmap(lambda t: t + run(x))(torch.zeros(2, M, N))[1], run(x))
    with forward_ad.dual_level():
        assert run(x).shape == (M, N)
        compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
        # torch 2.15 refuses the operand itself
        with pytest.raises(RuntimeError, match=r"neither forward-mode derivatives|dual tensor"):
            compiled(forward_ad.make_dual(x, torch.ones_like(x)))


def test_no_trace_of_torch_jit() -> None:
    packed = weight()
    with (
        pytest.warns((DeprecationWarning, FutureWarning), match="torch.jit.trace"),
        pytest.raises(RuntimeError, match=r"cannot be recorded by torch.jit.trace"),
    ):
        torch.jit.trace(lambda x: co.mixed_gemm(x, packed), values(M, K))


# ---- torch around it


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("activation", [None, "silu"])
def test_compiles_into_one_graph(activation: str | None, device: str) -> None:
    packed = weight(device=device)

    def run(x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        return co.mixed_gemm(x * 2, packed, bias, activation, residual=residual).sin()

    compiled = torch.compile(run, fullgraph=True, dynamic=True, backend="aot_eager")
    for m in (3, 5):
        shapes = ((m, K), (N,), (m, N))
        inputs = [
            values(*shape, dtype=torch.float16, device=device).requires_grad_() for shape in shapes
        ]
        y, expected = compiled(*inputs), run(*inputs)
        assert torch.equal(y, expected)
        grad = values(m, N, seed=2, dtype=torch.float16, device=device)
        for a, b in zip(
            torch.autograd.grad(y, inputs, grad),
            torch.autograd.grad(expected, inputs, grad),
            strict=True,
        ):
            torch.testing.assert_close(a, b, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("saturate", [False, True])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_the_operator_has_the_gradients_of_the_function(
    activation: str | None, saturate: bool
) -> None:
    packed = weight()
    grad = values(M, N, seed=2)
    found = []
    for registered in (False, True):
        x, bias, residual = values(M, K), values(N, seed=3), values(M, N, seed=4)
        residual[::2, ::3] = torch.finfo(torch.float16).max * 2
        given = [tensor.requires_grad_() for tensor in (x, bias, residual)]
        if registered:
            end = (
                bias,
                activation,
                0.0,
                0.0,
                residual,
                torch.float16,
                saturate,
                "none",
                True,
                False,
                0,
                False,
            )
            y = torch.ops.cutlass_ops.mixed_gemm(x, *library.weight_fields(packed), *end)
        else:
            y = co.mixed_gemm(
                x,
                packed,
                bias,
                activation,
                residual=residual,
                out_dtype=torch.float16,
                saturate=saturate,
            )
        found.append([y, *torch.autograd.grad(y, given, grad.half())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert bool((found[0][3][::2, ::3] == 0).all()) == saturate


@pytest.mark.parametrize("device", DEVICES)
def test_the_operators_registration(device: str) -> None:
    fields = library.weight_fields(weight("perm", device=device))
    x = values(M, K, dtype=torch.float16, device=device).requires_grad_()
    bias, residual = (
        values(N, device=device).requires_grad_(),
        values(M, N, device=device).requires_grad_(),
    )
    end = (bias, "silu", 0.0, 0.0, residual, torch.float16, True, "block", True, False, 0, False)
    torch.library.opcheck(torch.ops.cutlass_ops.mixed_gemm, (x, *fields, *end))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool, device: str) -> None:
    packed = weight(device=device)
    x = values(M, K, dtype=torch.float16, device=device).requires_grad_()
    grad = values(M, N, seed=2, dtype=torch.float16, device=device)

    def run(x: Tensor) -> Tensor:
        return co.mixed_gemm(x.sin(), packed, activation="gelu").cos()

    (expected,) = torch.autograd.grad(run(x), x, grad)
    checkpoint(run, x, use_reentrant=reentrant).backward(grad)
    assert torch.equal(x.grad, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_does_to_x_what_it_does_before_a_linear_layer(compiled: bool, device: str) -> None:
    packed = weight(device=device)

    def product(x: Tensor, **options: Any) -> Tensor:
        return co.mixed_gemm(x, packed, **options)

    run = torch.compile(product, fullgraph=True, backend="aot_eager") if compiled else product
    x = values(M, K, device=device).requires_grad_()
    grad = values(M, N, seed=2, dtype=torch.bfloat16, device=device)
    with torch.autocast(device, dtype=torch.bfloat16):
        y = run(x)
        y.backward(grad)
        half = run(x.detach().half())
        wide, quantized = run(x, out_dtype=torch.float32), run(x, act_quant="block")
    with torch.no_grad():
        assert torch.equal(y, product(x.bfloat16()))
        assert torch.equal(half, product(x.half()))
        assert torch.equal(wide, product(x.bfloat16(), out_dtype=torch.float32))
        assert torch.equal(quantized, product(x.bfloat16(), act_quant="block"))
    assert x.grad.dtype == torch.float32
    assert_product(x.grad.bfloat16(), grad, packed, torch.bfloat16)
