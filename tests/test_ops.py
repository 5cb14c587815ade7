"""The operators where no GPU is needed: arguments, shapes, options, torch.library and torch.compile, what would run."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import cutlass_ops as co
from cutlass_ops import _C, reference
from cutlass_ops.ops import activations as activations_module
from cutlass_ops.ops import gemm
from cutlass_ops.reference import dequantize_weight

NAN, INF = math.nan, math.inf
N, K = 40, 200


def weight(
    bits: int = 4, kind: str = "symmetric", group_size: int = 64, n: int = N, k: int = K, bias: bool = False, perm: bool = False
) -> co.QuantizedWeight:
    """Random codes; scales, offsets and bias are multiples of 1/4, so that products of small integers are exact in fp32."""
    random = torch.Generator().manual_seed(bits * 1000 + group_size)

    def integers(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=random)

    groups = 1 if group_size == -1 else -(-k // group_size)
    return co.QuantizedWeight(
        codes=integers(0, 1 << bits, n, k).to(torch.uint8),
        scales=2.0 ** integers(-2, 2, n, groups) * (1 - 2 * integers(0, 2, n, groups)),
        zeros=integers(0, 1 << bits, n, groups).to(torch.uint8) if kind == "zeros" else None,
        offsets=integers(-8, 9, n, groups) / 4 if kind == "offsets" else None,
        bits=bits,
        group_size=group_size,
        bias=integers(-8, 9, n) / 4 if bias else None,
        perm=torch.randperm(k, generator=random) if perm else None,
    )


def sized(n: int, k: int, bits: int) -> co.PackedWeight:
    """A weight of which only the sizes are looked at; n and k are multiples of 64 and 128."""
    codes, scales = torch.empty(n * k * bits // 8, dtype=torch.uint8), torch.empty(k // 128, n, dtype=torch.float16)
    return co.PackedWeight(codes, scales, None, None, None, None, n, k, bits, 128)


def activations(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Integers from -5 to 5: exact in every float type."""
    return torch.randint(-5, 6, shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def product(x: Tensor, qw: co.QuantizedWeight) -> Tensor:
    """x times the weight's values, in fp64."""
    return x.double() @ dequantize_weight(qw, torch.float64).t()


def quantized_product(x: Tensor, qw: co.QuantizedWeight, block: int, symmetric: bool) -> Tensor:
    """The same with the values that x's codes stand for."""
    columns = torch.arange(x.shape[1]) if qw.perm is None else qw.perm
    codes, scales, zeros = reference.quantize_activations(x[:, columns], block, symmetric)
    centred = codes.double()
    block = x.shape[1] if block == -1 else block
    per_column = torch.arange(x.shape[1]) // block
    if zeros is not None:
        centred -= zeros.double()[:, per_column]
    values = centred * scales.double()[:, per_column]
    return values @ dequantize_weight(qw, torch.float64)[:, columns].t()


def close(y: Tensor, exact: Tensor) -> bool:
    """Within fp32 sums of ``exact``: relative Frobenius error 1e-6, every element within 1e-5 rms."""
    error = y.double() - exact
    rms = exact.square().mean().sqrt()
    return bool(error.norm() <= 1e-6 * exact.norm()) and bool(error.abs().max() <= 1e-5 * rms)


def same(a: Tensor, b: Tensor) -> bool:
    """Equal in dtype, shape and value, NaN equal to NaN."""
    return a.dtype == b.dtype and a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


# ---- values


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("group_size", [32, 64, 128, 256, -1])
@pytest.mark.parametrize("kind", ["symmetric", "zeros", "offsets"])
@pytest.mark.parametrize("bits", [4, 8])
def test_floats_times_weight_are_exact(bits: int, kind: str, group_size: int, dtype: torch.dtype) -> None:
    qw = weight(bits, kind, group_size)
    x = activations(3, K, dtype=dtype)
    y = co.mixed_gemm(x, co.reorder(qw), out_dtype=torch.float32)
    assert torch.equal(y.double(), product(x, qw))


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("act_quant", ["token", "block"])
@pytest.mark.parametrize("group_size", [32, 128, 256, -1])
@pytest.mark.parametrize("kind", ["symmetric", "zeros", "offsets"])
@pytest.mark.parametrize("bits", [4, 8])
def test_activations_are_quantized_on_the_way(bits: int, kind: str, group_size: int, act_quant: str, symmetric: bool) -> None:
    qw = weight(bits, kind, group_size)
    x = torch.randn(5, K, generator=torch.Generator().manual_seed(1))
    block = -1 if act_quant == "token" else {32: 32, 128: 128, 256: 128, -1: 128}[group_size]
    exact = quantized_product(x, qw, block, symmetric)
    packed = co.reorder(qw)
    y = co.mixed_gemm(x, packed, act_quant=act_quant, act_symmetric=symmetric)
    assert close(y, exact)
    qa = co.quantize_activations(x, block=block, symmetric=symmetric)
    assert torch.equal(co.mixed_gemm(qa, packed), y)


@pytest.mark.parametrize("act_quant", ["none", "token", "block"])
def test_act_order(act_quant: str) -> None:
    qw = weight(perm=True)
    packed = co.reorder(qw)
    assert packed.perm is not None
    x = activations(5, K)
    y = co.mixed_gemm(x, packed, act_quant=act_quant)
    if act_quant == "none":
        assert torch.equal(y.double(), product(x, qw))
        return
    block = -1 if act_quant == "token" else 64
    assert close(y, quantized_product(x, qw, block, True))
    qa = co.quantize_activations(x, block=block, perm=packed.perm)
    assert torch.equal(co.mixed_gemm(qa, packed), y)
    assert torch.equal(qa.dequantize(), co.quantize_activations(x[:, qw.perm], block=block).dequantize())


@pytest.mark.parametrize("shape", [(K,), (1, K), (0, K), (2, 3, K), (2, 0, K), (1, 1, 1, K)], ids=str)
@pytest.mark.parametrize("act_quant", ["none", "token", "block"])
def test_any_leading_shape(act_quant: str, shape: tuple[int, ...]) -> None:
    packed = co.reorder(weight())
    x = activations(*shape)
    residual = activations(*shape[:-1], N)
    y = co.mixed_gemm(x, packed, act_quant=act_quant, residual=residual)
    rows = co.mixed_gemm(x.reshape(-1, K), packed, act_quant=act_quant, residual=residual.reshape(-1, N))
    assert y.shape == (*shape[:-1], N)
    assert torch.equal(y.reshape(-1, N), rows)
    if act_quant != "none":
        qa = co.quantize_activations(x, block=-1 if act_quant == "token" else 64)
        assert qa.shape == x.shape
        assert torch.equal(co.mixed_gemm(qa, packed, residual=residual), y)
        assert qa.dequantize().shape == x.shape


STRIDED: dict[str, Callable[[Tensor], Tensor]] = {
    "columns of a wider matrix": lambda x: torch.cat([x, x, x], 1)[:, 1 : K + 1].copy_(x),
    "transposed": lambda x: x.t().contiguous().t(),
    "every other row": lambda x: x.repeat_interleave(2, 0)[::2],
    "one row expanded": lambda x: x[:1].expand(5, -1),
    "overlapping rows": lambda x: torch.cat([x, x]).view(-1).as_strided((5, K), (K // 2, 1)),
}


@pytest.mark.parametrize("act_quant", ["none", "token", "block"])
@pytest.mark.parametrize("stride", STRIDED)
def test_strided_operands(stride: str, act_quant: str) -> None:
    packed = co.reorder(weight())
    x = STRIDED[stride](activations(5, K))
    residual = activations(N, 5).t()
    bias = activations(2 * N)[::2]
    y = co.mixed_gemm(x, packed, bias, act_quant=act_quant, residual=residual)
    expected = co.mixed_gemm(x.clone().contiguous(), packed, bias.clone(), act_quant=act_quant, residual=residual.contiguous())
    assert torch.equal(y, expected)
    assert torch.equal(co.quantize_activations(x).codes, co.quantize_activations(x.clone().contiguous()).codes)


# ---- options

ACTIVATIONS: dict[Any, Callable[[Tensor], Tensor]] = {
    None: lambda v: v,
    "relu": lambda v: torch.where(v > 0, v, 0.0),
    "relu6": lambda v: torch.where(v > 6, 6.0, torch.where(v > 0, v, 0.0)),
    "gelu": lambda v: v * 0.5 * (1 + torch.erf(v / math.sqrt(2))),
    "silu": lambda v: v / (1 + torch.exp(-v)),
    ("clamp", -40.0, 24.5): lambda v: torch.where(v > 24.5, 24.5, torch.where(v < -40, -40.0, v)),
    ("clamp", 1.5, 1.5): lambda v: torch.full_like(v, 1.5),
}


@pytest.mark.parametrize("act_quant", ["none", "block"])
@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
def test_bias_then_activation_then_residual(activation: Any, act_quant: str) -> None:
    qw = weight()
    x = activations(4, K) / 16
    bias, residual = activations(N).half(), activations(4, N).bfloat16()
    y = co.mixed_gemm(x, co.reorder(qw), bias, activation, act_quant, residual=residual)
    total = product(x, qw) if act_quant == "none" else quantized_product(x, qw, 64, True)
    assert close(y, ACTIVATIONS[activation](total + bias.double()) + residual.double())


def test_the_weights_own_bias_is_added() -> None:
    qw = weight(bias=True)
    assert qw.bias is not None
    x = activations(4, K)
    packed = co.reorder(qw)
    assert torch.equal(co.mixed_gemm(x, packed).double(), product(x, qw) + qw.bias)
    qa = co.quantize_activations(x, block=64)
    assert torch.equal(co.mixed_gemm(qa, packed), co.mixed_gemm(x, packed, act_quant="block"))


@pytest.mark.parametrize("x_dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("out_dtype", [None, torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_out_dtype_is_rounded_to_once(x_dtype: torch.dtype, out_dtype: torch.dtype | None) -> None:
    qw = weight()
    x = activations(4, K, dtype=x_dtype)
    packed = co.reorder(qw)
    expected = product(x, qw).float().to(out_dtype or x_dtype)  # the sum is exact in fp32
    assert same(co.mixed_gemm(x, packed, out_dtype=out_dtype), expected)
    qa = co.quantize_activations(x, block=64)
    assert co.mixed_gemm(qa, packed, out_dtype=out_dtype).dtype == (out_dtype or x_dtype)


def test_overflow_is_infinite_or_saturates() -> None:
    codes = torch.tensor([[9], [7], [8]], dtype=torch.uint8)  # 1, -1, 0
    packed = co.reorder(co.QuantizedWeight(codes, torch.full((3, 1), 2.0), group_size=-1))
    x = torch.tensor([[60000.0]], dtype=torch.float16)
    assert same(co.mixed_gemm(x, packed), torch.tensor([[INF, -INF, 0.0]], dtype=torch.float16))
    limit = torch.tensor([[65504.0, -65504.0, 0.0]], dtype=torch.float16)
    assert same(co.mixed_gemm(x, packed, saturate=True), limit)
    assert same(co.mixed_gemm(co.quantize_activations(x), packed, saturate=True), limit)
    largest = torch.finfo(torch.bfloat16).max
    wide = torch.tensor([[largest]], dtype=torch.bfloat16)
    residual = torch.tensor([[largest, -largest, largest]])
    assert same(co.mixed_gemm(wide / 4, packed, residual=residual), torch.tensor([[INF, -INF, largest]]).bfloat16())
    saturated = co.mixed_gemm(wide / 4, packed, residual=residual, saturate=True)
    assert same(saturated, torch.tensor([[largest, -largest, largest]]).bfloat16())


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("act_quant", ["none", "token", "block"])
@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
def test_a_row_with_nan_or_infinity_is_nan_and_no_other(symmetric: bool, act_quant: str, bad: float) -> None:
    packed = co.reorder(weight(kind="zeros"))
    x = activations(4, K)
    options: dict[str, Any] = {"activation": "relu", "act_quant": act_quant, "act_symmetric": symmetric, "saturate": True}
    clean = co.mixed_gemm(x, packed, **options)
    x[2, K - 1] = bad
    y = co.mixed_gemm(x, packed, **options)
    assert y[2].isnan().all()
    assert torch.equal(y[[0, 1, 3]], clean[[0, 1, 3]])


# ---- quantised activations


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("block", [32, 64, 128, -1])
@pytest.mark.parametrize("shape", [(5, K), (17, 7), (0, 100), (16, 128)], ids=str)
def test_quantized_activations_are_the_references(shape: tuple[int, int], block: int, symmetric: bool) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    if shape[0]:
        x[0] = 0
        x[1, 3] = NAN
    qa = co.quantize_activations(x, block=block, symmetric=symmetric)
    codes, scales, zeros = reference.quantize_activations(x, block, symmetric)
    k_pad = -(-shape[1] // 128) * 128
    assert qa.codes.shape == (shape[0], k_pad)
    assert torch.equal(qa.codes, reference.activation_order(codes, zeros, block))
    stride = -(-shape[0] // 16) * 16
    assert qa.scales.shape == (1 if block == -1 else k_pad // block, stride)
    natural = qa.natural()
    assert torch.equal(natural[0], codes)
    assert same(natural[1], scales)
    if symmetric:
        assert qa.zeros is None
        assert natural[2] is None
    else:
        assert zeros is not None
        assert natural[2] is not None
        assert torch.equal(natural[2], zeros)
    assert same(qa.dequantize(), reference.dequantize_activations(codes, scales, zeros, block))
    assert (qa.block, qa.k, qa.shape, qa.dtype, qa.device) == (block, shape[1], shape, torch.float32, x.device)


def test_blocks_beyond_k_have_scale_one_and_code_zero() -> None:
    qa = co.quantize_activations(torch.full((2, 7), 3.0), block=32, symmetric=False)
    assert qa.zeros is not None
    assert torch.equal(qa.scales[1:, :2], torch.ones(3, 2))
    assert not qa.zeros[1:, :2].any()
    assert not qa.codes[:, 32:].any()
    # lo = 0, hi = 3: the zero point is -128, and padding columns of the first block have it.
    assert torch.equal(qa.zeros[0, :2], torch.tensor([-128, -128], dtype=torch.int8))
    assert torch.equal(qa.codes[0, :32].sort().values, torch.tensor([-128] * 25 + [127] * 7, dtype=torch.int8))


# ---- dequantise


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["symmetric", "zeros", "offsets"])
@pytest.mark.parametrize("perm", [False, True], ids=["natural", "act-order"])
def test_dequantize_packed_or_not(perm: bool, kind: str, dtype: torch.dtype) -> None:
    qw = weight(8, kind, perm=perm)
    expected = dequantize_weight(qw, dtype)
    assert same(co.dequantize(co.reorder(qw), dtype), expected)
    assert same(co.dequantize(qw, dtype), expected)


# ---- arguments

Change = dict[str, Any]


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"weight": weight()}, TypeError, ["weight", "QuantizedWeight", "PackedWeight", "reorder"]),
        ({"weight": torch.zeros(2, K)}, TypeError, ["weight", "Tensor", "PackedWeight"]),
        ({"x": [[1.0] * K]}, TypeError, ["x", "list", "torch.Tensor"]),
        ({"x": torch.zeros(2, K, dtype=torch.float64)}, TypeError, ["x", "float64", "float32, float16, bfloat16"]),
        ({"x": torch.zeros(2, K, dtype=torch.int8)}, TypeError, ["x", "int8", "float16"]),
        ({"x": torch.zeros(2, K - 1)}, ValueError, ["x", "(2, 199)", "[..., 200]", "[40, 200]"]),
        ({"x": torch.zeros(K, 2)}, ValueError, ["x", "(200, 2)", "[..., 200]"]),
        ({"x": torch.tensor(1.0)}, ValueError, ["x", "()", "[..., 200]"]),
        ({"x": torch.zeros(2, K, device="meta")}, ValueError, ["x", "meta", "cpu"]),
        ({"act_quant": "row"}, ValueError, ["act_quant", "'row'", "'none', 'token' and 'block'"]),
        ({"act_quant": None}, ValueError, ["act_quant", "None", "'none', 'token' and 'block'"]),
        ({"activation": "tanh"}, ValueError, ["activation", "'tanh'", "'relu6'", "clamp"]),
        ({"activation": "clamp"}, ValueError, ["activation", "'clamp'", "('clamp', lo, hi)"]),
        ({"activation": ("clamp", 1.0)}, ValueError, ["activation", "('clamp', 1.0)", "('clamp', lo, hi)"]),
        ({"activation": ("clamp", 2.0, 1.0)}, ValueError, ["activation", "('clamp', 2.0, 1.0)", "lo <= hi"]),
        ({"activation": ("clamp", NAN, 1.0)}, ValueError, ["activation", "nan", "lo <= hi"]),
        ({"bias": torch.zeros(N + 1)}, ValueError, ["bias", "(41,)", "(40,)"]),
        ({"bias": torch.zeros(1, N)}, ValueError, ["bias", "(1, 40)", "(40,)"]),
        ({"bias": torch.zeros(N, dtype=torch.int32)}, TypeError, ["bias", "int32", "float16"]),
        ({"bias": 1.0}, TypeError, ["bias", "float", "torch.Tensor"]),
        ({"bias": torch.zeros(N, device="meta")}, ValueError, ["bias", "meta", "cpu"]),
        ({"bias": torch.zeros(N), "weight": co.reorder(weight(bias=True))}, ValueError, ["bias", "has one already"]),
        ({"residual": torch.zeros(2, N + 1)}, ValueError, ["residual", "(2, 41)", "(2, 40)"]),
        ({"residual": torch.zeros(N)}, ValueError, ["residual", "(40,)", "(2, 40)"]),
        ({"residual": torch.zeros(2, N, dtype=torch.int64)}, TypeError, ["residual", "int64", "float16"]),
        ({"residual": torch.zeros(2, N, device="meta")}, ValueError, ["residual", "meta", "cpu"]),
        ({"out_dtype": torch.float64}, TypeError, ["out_dtype", "float64", "float32, float16, bfloat16"]),
        ({"out_dtype": torch.int8}, TypeError, ["out_dtype", "int8", "float16"]),
        ({"out_dtype": "float16"}, TypeError, ["out_dtype", "float16", "bfloat16"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_mixed_gemm_refuses(change: Change, error: type[Exception], words: list[str]) -> None:
    arguments: Change = {"x": activations(2, K), "weight": co.reorder(weight()), **change}
    with pytest.raises(error) as caught:
        co.mixed_gemm(**arguments)
    for word in words:
        assert word in str(caught.value)


def test_mixed_gemm_refuses_quantized_activations_that_do_not_fit() -> None:
    packed = co.reorder(weight(group_size=64))
    with pytest.raises(ValueError, match=r"blocks of 128; .* groups of 64 they must be of 64, or -1"):
        co.mixed_gemm(co.quantize_activations(activations(2, K), block=128), packed)
    with pytest.raises(ValueError, match=r"\(2, 100\); \[\.\.\., 200\] is expected"):
        co.mixed_gemm(co.quantize_activations(activations(2, 100), block=64), packed)
    with pytest.raises(ValueError, match="act order"):
        co.mixed_gemm(co.quantize_activations(activations(2, K), block=64), co.reorder(weight(perm=True)))
    with pytest.raises(ValueError, match="act order"):
        co.mixed_gemm(co.quantize_activations(activations(2, K), block=64, perm=torch.arange(K).int()), packed)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"x": 3}, TypeError, ["x", "int", "torch.Tensor"]),
        ({"x": torch.zeros(2, K, dtype=torch.float64)}, TypeError, ["x", "float64", "float32, float16, bfloat16"]),
        ({"x": torch.tensor(1.0)}, ValueError, ["x", "()", "[..., K]"]),
        ({"x": torch.zeros(2, 0)}, ValueError, ["x", "(2, 0)", "K at least 1"]),
        ({"x": torch.zeros(2, K, device="meta")}, ValueError, ["meta", "cpu and cuda"]),
        ({"block": 16}, ValueError, ["block", "16", "32, 64, 128 and -1"]),
        ({"block": 256}, ValueError, ["block", "256", "32, 64, 128 and -1"]),
        ({"block": 0}, ValueError, ["block", "0", "32, 64, 128 and -1"]),
        ({"block": None}, ValueError, ["block", "None", "32, 64, 128 and -1"]),
        ({"perm": torch.arange(K)}, ValueError, ["perm", "int64", "int32 (200,)"]),
        ({"perm": torch.arange(K - 1).int()}, ValueError, ["perm", "(199,)", "int32 (200,)"]),
        ({"perm": torch.arange(K, device="meta").int()}, ValueError, ["perm", "meta", "cpu"]),
        ({"perm": list(range(K))}, TypeError, ["perm", "list", "torch.Tensor"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_quantize_activations_refuses(change: Change, error: type[Exception], words: list[str]) -> None:
    arguments: Change = {"x": activations(2, K), **change}
    with pytest.raises(error) as caught:
        co.quantize_activations(**arguments)
    for word in words:
        assert word in str(caught.value)


def test_dequantize_refuses() -> None:
    with pytest.raises(TypeError, match=r"dtype is torch\.int8; supported are float32, float16, bfloat16"):
        co.dequantize(co.reorder(weight()), torch.int8)
    with pytest.raises(TypeError, match=r"dtype is torch\.float64"):
        co.dequantize(weight(), torch.float64)
    with pytest.raises(TypeError, match="weight is a Tensor; a PackedWeight or a QuantizedWeight"):
        co.dequantize(torch.zeros(2, 2))  # type: ignore[arg-type]


def test_too_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (activations_module, gemm):
        monkeypatch.setattr(module, "MAX_M", 8)
    packed = co.reorder(weight())
    co.mixed_gemm(activations(2, 4, K), packed)
    with pytest.raises(ValueError, match="x has 9 rows; at most 8"):
        co.mixed_gemm(activations(3, 3, K), packed)
    with pytest.raises(ValueError, match="x has 9 rows; at most 8"):
        co.quantize_activations(activations(9, K))


# ---- bits that do not depend on M, and kernels of earlier architectures


INVARIANT_MS = (0, 1, 3, 17, 64, 129, 1000, 8192)


@pytest.mark.parametrize("act_quant", ["none", "token", "block"])
@pytest.mark.parametrize("shape", [(4096, 4096), (28672, 4096), (192, 640)])
def test_a_batch_invariant_product_is_planned_alike_for_every_m(shape: tuple[int, int], act_quant: str) -> None:
    n, k = shape
    for bits in (4, 8):
        packed = sized(n, k, bits)
        for device in ("sm_80", "sm_90", "sm_120"):
            plans = [co.explain(m, packed, act_quant, device=device, batch_invariant=True) for m in INVARIANT_MS]
            assert len({(plan.kernel, plan.slices) for plan in plans}) == 1
            free = [co.explain(m, packed, act_quant, device=device) for m in INVARIANT_MS]
            assert len({(plan.kernel, plan.slices) for plan in free}) > 1 or n != 4096


def test_explain_takes_the_kernels_of_an_earlier_architecture() -> None:
    packed = sized(4096, 4096, 4)
    for m in (1, 64, 4096):
        for act_quant in ("none", "block"):
            old = co.explain(m, packed, act_quant, device="sm_90", architecture=80)
            assert old.device == "sm_90"
            assert old.kernel == co.explain(m, packed, act_quant, device="sm_80").kernel
    assert co.explain(4096, packed, device="sm_90").kernel != co.explain(4096, packed, device="sm_90", architecture=89).kernel
    with pytest.raises(ValueError, match="architecture is 90; the GPU is sm_80"):
        co.explain(1, packed, device="sm_80", architecture=90)
    with pytest.raises(ValueError, match=r"architecture 75 \(.*mma_gemm_a16.*\); kernels run on sm_80 and later"):
        co.explain(1, packed, device="sm_80", architecture=75)


@pytest.mark.parametrize("act_quant", ["none", "block"])
def test_batch_invariance_on_a_cpu(act_quant: str) -> None:
    packed = co.reorder(weight(kind="zeros", bias=True))
    random = torch.Generator().manual_seed(0)
    x, residual = torch.randn(33, K, generator=random), torch.randn(33, N, generator=random)
    whole = co.mixed_gemm(x, packed, None, "silu", act_quant, residual=residual, batch_invariant=True)
    assert whole.shape == (33, N)
    for rows in (slice(0, 1), slice(4, 21), slice(32, 33)):
        y = co.mixed_gemm(x[rows], packed, None, "silu", act_quant, residual=residual[rows], batch_invariant=True)
        assert torch.equal(y, whole[rows])
    quantized = co.quantize_activations(x, 64)
    y = co.mixed_gemm(quantized, packed, batch_invariant=True)
    assert torch.equal(y[5:6], co.mixed_gemm(co.quantize_activations(x[5:6], 64), packed, batch_invariant=True))
    assert co.mixed_gemm(x[:0], packed, batch_invariant=True).shape == (0, N)


# ---- quantisers that compute a function of x


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("block", [32, 128, -1])
def test_fused_quantisers_are_the_reference_and_the_plain_one(dtype: torch.dtype, block: int) -> None:
    random = torch.Generator().manual_seed(7)
    x, other = (torch.randn(2, 3, 700, generator=random).to(dtype) for _ in range(2))
    weight_ = torch.randn(700, generator=random).to(dtype)
    perm = torch.randperm(700, generator=random).int()
    flat = other.view(6, 700)
    plain, _ = reference.rms_norm(x.view(6, 700), weight_, 1e-5)
    summed, total = reference.rms_norm(x.view(6, 700), weight_, 1e-5, flat)
    for symmetric in (True, False):
        for order in (None, perm):
            options: dict[str, Any] = {"block": block, "symmetric": symmetric, "perm": order}
            found = [co.rms_norm_quantize(x, weight_, 1e-5, **options)]
            with_residual, stream = co.rms_norm_quantize(x, weight_, 1e-5, other, **options)
            assert torch.equal(stream, total.view(x.shape))
            found += [with_residual, co.silu_mul_quantize(x, other, **options)]
            for qa, y in zip(found, (plain, summed, reference.silu_mul(x.view(6, 700), flat)), strict=True):
                expected = co.quantize_activations(y.view(x.shape), **options)
                assert (qa.shape, qa.dtype, qa.block, qa.k) == (x.shape, dtype, block, 700)
                assert qa.perm is order
                assert torch.equal(qa.codes, expected.codes)
                assert torch.equal(qa.scales, expected.scales)
                assert (qa.zeros is None) == (expected.zeros is None)
                if qa.zeros is not None:
                    assert torch.equal(qa.zeros, expected.zeros)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"x": 3}, TypeError, ["x", "int"]),
        ({"weight": torch.zeros(K, dtype=torch.float16)}, TypeError, ["weight", "float16", "x is float32"]),
        ({"weight": torch.zeros(K - 1)}, ValueError, ["weight", "(199,)", "(200,)"]),
        ({"weight": None}, TypeError, ["weight", "NoneType"]),
        ({"weight": torch.zeros(K, device="meta")}, TypeError, ["weight", "meta", "cpu"]),
        ({"eps": 0.0}, ValueError, ["eps", "0.0", "1e-15 to 1"]),
        ({"eps": math.nextafter(1e-15, 0.0)}, ValueError, ["eps", "9.99"]),
        ({"eps": NAN}, ValueError, ["eps", "nan"]),
        ({"eps": math.nextafter(1.0, 2.0)}, ValueError, ["eps", "1.0000000000000002"]),
        ({"residual": torch.zeros(3, K)}, ValueError, ["residual", "(3, 200)", "(2, 200)"]),
        ({"residual": torch.zeros(2, K).half()}, TypeError, ["residual", "float16", "float32"]),
        ({"block": 16}, ValueError, ["block", "16"]),
        ({"perm": torch.arange(K)}, ValueError, ["perm", "int64"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_rms_norm_quantize_refuses(change: Change, error: type[Exception], words: list[str]) -> None:
    arguments: Change = {"x": activations(2, K), "weight": activations(K), **change}
    with pytest.raises(error) as caught:
        co.rms_norm_quantize(**arguments)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("eps", [1e-15, 1.0])
def test_a_norm_takes_the_least_and_the_largest_eps(eps: float) -> None:
    x, gain = torch.full((1, K), 1e-7), torch.ones(K)
    expected = reference.rms_norm(x, gain, eps)[0]
    assert torch.equal(co.rms_norm_quantize(x, gain, eps).codes, co.quantize_activations(expected).codes)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + eps).sqrt()
    torch.testing.assert_close(expected.double(), exact, rtol=1e-6, atol=0)


def test_silu_mul_quantize_refuses() -> None:
    x = activations(2, K)
    with pytest.raises(ValueError, match=r"up has shape \(2, 100\); \(2, 200\) is expected"):
        co.silu_mul_quantize(x, x[:, :100])
    with pytest.raises(TypeError, match="up is float16 on cpu; x is float32 on cpu"):
        co.silu_mul_quantize(x, x.half())
    with pytest.raises(TypeError, match="up is a int"):
        co.silu_mul_quantize(x, 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="block is 16"):
        co.silu_mul_quantize(x, x, block=16)


def test_a_norm_of_too_many_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations_module, "_MAX_NORM_K", 199)
    with pytest.raises(ValueError, match="x has 200 columns; a norm of at most 199"):
        co.rms_norm_quantize(activations(2, K), activations(K))


# ---- torch.library and torch.compile


def fields(packed: co.PackedWeight) -> tuple[Any, ...]:
    parts = [getattr(packed, name) for name in ("codes", "scales", "zeros", "offsets", "bias", "perm")]
    return (*parts, packed.n, packed.k, packed.bits, packed.group_size, packed.book)


def samples() -> list[Any]:
    """Arguments for each registered operator."""
    library = torch.ops.cutlass_ops
    packed = {
        kind: co.reorder(weight(kind=kind, perm=kind == "zeros", bias=kind == "offsets")) for kind in ("zeros", "offsets")
    }
    packed["symmetric"] = co.reorder(weight(8))
    x, half = activations(5, K), torch.float16
    qa = co.quantize_activations(x, block=64, symmetric=False)
    residual = activations(5, N)
    epilogue = (activations(N), "clamp", -1.0, 1.0, residual)
    plain = (None, None, 0.0, 0.0, None, half, False, "none", True, False, 0, False)
    found: list[Any] = [
        ("quantize_activations", library.quantize_activations, (x, packed["zeros"].perm, 64, False)),
        ("quantize_activations", library.quantize_activations, (x, None, -1, True)),
        ("rms_norm_quantize", library.rms_norm_quantize, (x, activations(K), 1e-6, activations(5, K), None, 64, False)),
        ("rms_norm_quantize", library.rms_norm_quantize, (x, activations(K), 1e-6, None, packed["zeros"].perm, -1, True)),
        ("silu_mul_quantize", library.silu_mul_quantize, (x, activations(5, K), None, 128, True)),
        ("gemm_quantized", library.gemm_quantized,
         (qa.codes, qa.scales, qa.zeros, 64, qa.dtype, *fields(packed["symmetric"]), *epilogue, half, True, False, 0, False)),
    ]  # fmt: skip
    for kind, weight_ in packed.items():
        found.append((f"dequantize-{kind}", library.dequantize, (*fields(weight_), half)))
        found.append((f"mixed_gemm-{kind}", library.mixed_gemm, (x, *fields(weight_), *plain)))
    args = (x, *fields(packed["symmetric"]), *epilogue, torch.bfloat16, True, "block", False, True, 80, False)
    found.append(("mixed_gemm-epilogue", library.mixed_gemm, args))
    return [pytest.param(op, args, id=name) for name, op, args in found]


@pytest.mark.parametrize(("op", "args"), samples())
def test_opcheck(op: Any, args: tuple[Any, ...]) -> None:
    torch.library.opcheck(op.default, args)


def test_the_registered_operators_give_what_the_functions_give() -> None:
    packed = co.reorder(weight(kind="zeros", perm=True))
    x = activations(5, K)
    end = (None, "relu", 0.0, 0.0, None, torch.float16, False)
    y = torch.ops.cutlass_ops.mixed_gemm(x, *fields(packed), *end, "token", False, False, 0, False)
    assert torch.equal(y, co.mixed_gemm(x, packed, None, "relu", "token", False, out_dtype=torch.float16))
    assert torch.equal(torch.ops.cutlass_ops.dequantize(*fields(packed), torch.float16), co.dequantize(packed, torch.float16))


def compiled(function: Callable[..., Any]) -> tuple[Callable[..., Any], list[int]]:
    """``function`` through fullgraph compilation with dynamic sizes, and a list that grows with every graph made."""
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        from torch._dynamo.backends.debugging import aot_eager

        graphs.append(len(graph.graph.nodes))
        return aot_eager(graph, inputs)

    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, dynamic=True, backend=backend), graphs


@pytest.mark.parametrize("act_quant", ["none", "token", "block"])
def test_compile_with_any_number_of_rows(act_quant: str) -> None:
    packed = co.reorder(weight(kind="zeros", bias=True, perm=True))

    def layer(x: Tensor, residual: Tensor) -> Tensor:
        y = co.mixed_gemm(x * 2, packed, activation="silu", act_quant=act_quant, residual=residual, out_dtype=torch.float32)
        return y + 1

    run, graphs = compiled(layer)
    for m in (5, 3, 33, 129):
        x, residual = activations(2, m, K), activations(2, m, N)
        assert torch.equal(run(x, residual), layer(x, residual))
    assert len(graphs) == 1


def test_compile_with_activations_quantized_once_for_two_products() -> None:
    first, second = co.reorder(weight(4)), co.reorder(weight(8, "offsets"))

    def layer(x: Tensor) -> tuple[Tensor, Tensor]:
        qa = co.quantize_activations(x, block=64, symmetric=False)
        return co.mixed_gemm(qa, first, activation=("clamp", -3.0, 3.0)), co.mixed_gemm(qa, second)

    run, graphs = compiled(layer)
    for m in (5, 16, 33):
        x = activations(m, K, dtype=torch.bfloat16)
        for got, expected in zip(run(x), layer(x), strict=True):
            assert same(got, expected)
    assert len(graphs) == 1


def test_compile_dequantize() -> None:
    packed = co.reorder(weight(kind="offsets"))
    run, graphs = compiled(lambda: co.dequantize(packed, torch.bfloat16) * 2)
    assert torch.equal(run(), co.dequantize(packed, torch.bfloat16) * 2)
    assert len(graphs) == 1


def test_fake_tensors_get_shapes_and_types_without_running() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.empty(7, K, dtype=torch.bfloat16)
        codes, scales, zeros = torch.ops.cutlass_ops.quantize_activations(x, None, 32, False)
    assert (codes.shape, codes.dtype) == ((7, 256), torch.int8)
    assert (scales.shape, scales.dtype) == ((8, 16), torch.float32)
    assert (zeros.shape, zeros.dtype) == ((8, 16), torch.int8)


# ---- explain


def test_explain_on_the_cpu() -> None:
    explanation = co.explain(3, co.reorder(weight()))
    assert explanation.device == "cpu"
    assert explanation.kernel == _C.cpu_kernel()
    assert explanation.launches == ()
    assert str(explanation) == f"cpu: {_C.cpu_kernel()} (the bits are the reference's)"


@pytest.mark.parametrize("device", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_120"])
@pytest.mark.parametrize("act_quant", ["none", "token", "block"])
@pytest.mark.parametrize("bits", [4, 8])
def test_explain_a_gpu_that_is_not_there(bits: int, act_quant: str, device: str) -> None:
    packed = co.reorder(weight(bits))
    for m in (0, 1, 17, 64, 65, 4097):
        explanation = co.explain(m, packed, act_quant=act_quant, dtype=torch.bfloat16, device=device)
        assert explanation.device == device.rstrip("a")
        decodes = explanation.kernel in ("decode_gemm", "wgmma_decode_fold16")
        assert decodes == (explanation.device == "sm_90" and m <= 16)
        # Weights in groups of 64 are rounded to x's dtype on Hopper from 17 rows on, and of fewer by one of the kernels.
        rounds = explanation.kernel in ("wgmma_fold16", "wgmma_decode_fold16")
        assert rounds or explanation.device != "sm_90" or m <= 16
        assert explanation.exact != rounds
        assert decodes or rounds or explanation.kernel.endswith("_a16" if act_quant == "none" else "_a8")
        assert co.explain(m, packed, act_quant=act_quant, dtype=torch.bfloat16, device=device, exact=True).exact
        itself = explanation.kernel == "decode_gemm" or (decodes and act_quant == "block")
        quantizes = act_quant != "none" and not itself
        launches = ["quantize_activations"] * quantizes + [explanation.kernel]
        launches += ["splitk_reduce"] * (explanation.slices > 1 and explanation.tail_tiles == 0)
        assert explanation.launches == (tuple(launches) if m else ())
        assert min(explanation.tile) >= 8
        assert explanation.slices >= 1
        # The quantiser's codes, k_pad bytes a row, are in the workspace.
        assert explanation.workspace >= (m * 256 if quantizes else 0)
        for part in (explanation.kernel, f"{explanation.tile[1]} rows", explanation.why):
            assert part in str(explanation)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"act_quant": "row"}, ValueError, ["act_quant", "'row'", "'token'"]),
        ({"dtype": torch.int8}, TypeError, ["dtype", "int8", "float16"]),
        ({"dtype": torch.float32, "x": -1}, ValueError, ["m is -1", "16777216"]),
        ({"dtype": torch.float32, "x": (1 << 24) + 1}, ValueError, ["m is 16777217", "16777216"]),
        ({"x": -1}, ValueError, ["m is -1", "16777216"]),
        ({"x": (1 << 24) + 1}, ValueError, ["m is 16777217", "16777216"]),
        ({"device": "sm_75"}, ValueError, ["'sm_75'", "sm_80", "sm_120"]),
        ({"device": "sm_x"}, ValueError, ["'sm_x'", "sm_80"]),
        ({"device": "meta"}, ValueError, ["meta", "cpu and cuda"]),
        ({"x": activations(3, K), "dtype": torch.bfloat16}, ValueError, ["torch.bfloat16", "x has dtype torch.float32"]),
        ({"x": activations(3, 8)}, ValueError, ["x has shape (3, 8)", str(K)]),
        ({"out_dtype": torch.int8}, TypeError, ["out_dtype", "int8", "float16"]),
        ({"activation": "tanh"}, ValueError, ["tanh"]),
        ({"bias": torch.zeros(3)}, ValueError, ["bias has shape (3,)"]),
        ({"residual": torch.zeros(3)}, ValueError, ["residual has shape (3,)"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_explain_refuses(change: Change, error: type[Exception], words: list[str]) -> None:
    arguments: Change = {"x": 3, "weight": co.reorder(weight()), "device": "sm_90", **change}
    with pytest.raises(error) as caught:
        co.explain(**arguments)
    for word in words:
        assert word in str(caught.value)


def aligned(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    """A tensor whose memory starts on 16 bytes."""
    memory = torch.zeros(math.prod(shape) + 8, dtype=dtype)
    return memory[-memory.data_ptr() % 16 // memory.element_size() :][: math.prod(shape)].view(shape)


def test_explain_takes_what_the_product_takes() -> None:
    packed = co.reorder(weight())
    x = aligned(2, 3, K)
    of_rows = co.explain(6, packed, device="sm_90")
    assert co.explain(x, packed, device="sm_90") == of_rows
    end: Change = {"bias": torch.zeros(N), "activation": "gelu", "residual": torch.zeros(2, 3, N), "saturate": True}
    assert co.explain(x, packed, device="sm_90", **end) == of_rows
    assert co.explain(x.bfloat16(), packed, device="sm_90") == co.explain(6, packed, dtype=torch.bfloat16, device="sm_90")
    assert co.explain(x, packed).kernel == _C.cpu_kernel()
    # Quantised before, they are not quantised again.
    many = aligned(300, K)
    for block in (64, -1):
        quantized = co.quantize_activations(many, block=block)
        before = co.explain(quantized, packed, device="sm_90", exact=True)
        after = co.explain(many, packed, "token" if block == -1 else "block", device="sm_90", exact=True)
        assert after.launches == ("quantize_activations", *before.launches)
        assert (before.kernel, before.grid, before.shared_memory) == (after.kernel, after.grid, after.shared_memory)
    rounded = co.explain(quantized, packed, device="sm_90")
    assert rounded.launches[:2] == ("upcast_activations", "wgmma_fold16")
    assert not rounded.exact
    assert co.explain(torch.zeros(0, K, dtype=torch.float16), packed, device="sm_90").launches == ()


def test_explain_sees_how_x_lies_in_memory() -> None:
    packed = co.reorder(co.quantize(torch.randn(192, 512), bits=4, group_size=128))

    def upcasts(x: Tensor, **options: Any) -> bool:
        explanation = co.explain(x, packed, device="sm_90", **options)
        assert explanation.kernel == "wgmma_gemm_a16"
        return "upcast_activations" in explanation.launches

    wide = aligned(64, 1024)
    assert not upcasts(wide[:, :512])
    assert not upcasts(wide[:, 8:520])
    assert upcasts(wide[:, 4:516])  # rows do not start on 16 bytes
    assert upcasts(aligned(64, 516)[:, :512])
    assert not upcasts(aligned(512, 64).t())  # is copied
    assert not upcasts(aligned(64, 1, 1024)[:, :, 4:516].transpose(0, 1).expand(2, 64, 512))  # so is what is no matrix
    assert not upcasts(wide[:, 4:516], batch_invariant=True)
    assert upcasts(wide.view(4, 16, 1024)[..., 4:516])
    assert not upcasts(wide[:1, 4:516].expand(64, 512))  # rows that overlap are copied, too
    assert not upcasts(wide[:2, 4:516].expand(32, 2, 512).transpose(0, 1))
    # One row of three dimensions keeps its stride without other options, and has none as a matrix.
    row, large = aligned(1, 1, 28673)[..., :28672], sized(8192, 28672, 4)
    assert co.explain(row, large, device="sm_90").kernel == "decode_gemm"
    assert co.explain(row, large, device="sm_90", exact=True) == co.explain(1, large, device="sm_90")


def test_explain_casts_as_autocast_does() -> None:
    packed = co.reorder(weight())
    x = aligned(40, K, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert co.explain(x, packed, device="sm_90") == co.explain(40, packed, dtype=torch.bfloat16, device="sm_90")
    assert co.explain(x, packed, device="sm_90").kernel == "torch.matmul"


def test_explain_says_that_fp32_is_multiplied_by_torch() -> None:
    packed = sized(28672, 4096, 4)
    found = co.explain(5, packed, dtype=torch.float32, device="sm_90")
    assert (found.kernel, found.launches, found.exact) == ("torch.matmul", ("dequantize",), True)
    assert found.workspace == 4 * (1 << 26)
    assert str(found).startswith("sm_90: torch.matmul (no kernel takes an fp32 x")
    assert co.explain(0, packed, dtype=torch.float32, device="sm_90").launches == ()
    for act_quant in ("token", "block"):
        assert co.explain(5, packed, act_quant, torch.float32, "sm_90").launches[-1] != "dequantize"
    with pytest.raises(ValueError, match="batch_invariant is True and x is float32 with act_quant='none'"):
        co.explain(5, packed, dtype=torch.float32, device="sm_90", batch_invariant=True)
    quantized = co.quantize_activations(torch.zeros(5, 4096))
    assert co.explain(quantized, packed, device="sm_90").kernel != "torch.matmul"
    assert co.explain(quantized, packed, device="sm_90", batch_invariant=True).kernel != "torch.matmul"


# What a GPU does with an fp32 x that is not quantised, on the CPU.


@pytest.mark.parametrize("values", [70 * K, 1 << 26])
@pytest.mark.parametrize("kind", ["symmetric", "zeros", "offsets", "perm"])
@pytest.mark.parametrize("bits", [4, 8])
def test_panels_of_the_weight_give_the_product(bits: int, kind: str, values: int, monkeypatch: pytest.MonkeyPatch) -> None:
    qw = weight(bits, "zeros" if kind == "perm" else kind, 64, n=200, perm=kind == "perm")
    packed, x = co.reorder(qw), activations(6, K)
    monkeypatch.setattr(gemm, "_PANEL_VALUES", values)
    monkeypatch.setattr(gemm, "_CPU_PANEL_VALUES", values // torch.get_num_threads())
    assert [rows.stop - rows.start for rows, _ in gemm.panels(packed, torch.float16)] == (
        [64, 64, 64, 8] if values < 1 << 26 else [200]
    )
    exact = product(x, qw)
    found = gemm.panel_gemm(
        x, packed, (2, 3, 200), (None, None, 0.0, 0.0, None, torch.float32, False, False, 0, False), torch.float32
    )
    assert torch.equal(found.double().view(6, 200), exact)
    bias, residual = activations(200), activations(6, 200)
    end = (bias, "clamp", -40.0, 24.5, residual, torch.float16, True, False, 0, True)
    found = gemm.panel_gemm(x, packed, (6, 200), end, torch.float32)
    expected = (exact + bias).clamp(-40, 24.5) + residual
    assert found.dtype == torch.float16
    assert torch.equal(found.double(), expected.half().double())


def test_panels_of_rows_that_are_not_finite_or_not_there() -> None:
    packed = co.reorder(weight(n=200))
    end = (None, "relu", 0.0, 0.0, None, torch.float32, False, False, 0, False)
    x = activations(3, K)
    x[0, 3], x[2, 5] = NAN, INF
    y = gemm.panel_gemm(x, packed, (3, 200), end, torch.float32)
    assert y[[0, 2]].isnan().all()
    assert y[1].isfinite().all()
    assert gemm.panel_gemm(x[:0], packed, (0, 200), end, torch.float32).shape == (0, 200)
    with pytest.raises(ValueError, match="batch_invariant is True"):
        gemm.panel_gemm(x, packed, (3, 200), (*end[:7], True, 0, False), torch.float32)


# What a CPU does with many rows of an x that is not quantised.


@pytest.mark.parametrize("kind", ["symmetric", "zeros", "offsets", "perm"])
@pytest.mark.parametrize("bits", [4, 8])
def test_many_rows_on_a_cpu_are_multiplied_by_torch(bits: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    qw = weight(bits, "zeros" if kind == "perm" else kind, 64, n=200, perm=kind == "perm")
    packed, bias = co.reorder(qw), activations(200)
    monkeypatch.setattr(gemm, "_CPU_PANEL_VALUES", 70 * K)  # four panels
    relative = {torch.float32: 0, torch.float16: 2**-10, torch.bfloat16: 2**-8}
    for dtype, rows in ((torch.float32, 128), (torch.float16, 128), (torch.bfloat16, 128), (torch.bfloat16, 32)):
        x = torch.randn(rows, K, generator=torch.Generator().manual_seed(rows)).to(dtype)
        for given in (None, bias.to(dtype), bias):
            for more in ({}, {"out_dtype": torch.float32}, {"activation": "relu"}, {"residual": torch.zeros(rows, 200)}):
                y = co.mixed_gemm(x, packed, given, **more)
                exact = co.explain(x, packed, bias=given, **more).exact
                values = reference.dequantize_weight(qw, torch.float64 if exact else torch.bfloat16).double()
                expected = x.double() @ values.t() + (0 if given is None else given.double())
                absolute = 1e-5 * expected.square().mean().sqrt()
                expected = expected.relu() if "activation" in more else expected
                assert y.dtype == more.get("out_dtype", dtype)
                assert ((y.double() - expected).abs() <= relative[y.dtype] * expected.abs() + absolute).all()
        for keeps in ("exact", "batch_invariant"):
            y = co.mixed_gemm(x, packed, **{keeps: True})
            assert torch.equal(y, reference.mixed_gemm(x, qw))
            assert torch.equal(y[:5], co.mixed_gemm(x[:5], packed))


def test_many_rows_on_a_cpu_round_a_code_book_to_their_dtype_first() -> None:
    qw = reference.quantize_weight_book(torch.randn(200, K), 64, "nf4")
    packed = co.reorder(qw)
    for dtype in (torch.float16, torch.bfloat16):
        x = torch.randn(128, K, generator=torch.Generator().manual_seed(1)).to(dtype)
        y = co.mixed_gemm(x, packed, out_dtype=torch.float32)
        assert co.explain(x, packed, out_dtype=torch.float32).kernel == "torch.matmul"
        expected = reference.mixed_gemm(x, qw, out_dtype=torch.float32)
        assert (y - expected).norm() <= 1e-6 * expected.norm()


def test_many_rows_on_a_cpu_that_are_not_finite() -> None:
    packed = co.reorder(weight(n=200))
    for dtype in (torch.bfloat16, torch.float32):
        x = activations(128, K).to(dtype)
        x[0, 3], x[7, 5] = NAN, INF
        y = co.mixed_gemm(x, packed)
        assert y[[0, 7]].isnan().all()
        assert y[1:7].isfinite().all()


def test_explain_says_what_a_cpu_does_with_many_rows() -> None:
    packed = sized(4096, 4096, 4)
    in_bfloat16 = _C.cpu_multiplies_bfloat16()
    for m, dtype, options, rounds in (
        (128, torch.float32, {}, False),
        (128, torch.float16, {}, False),
        (128, torch.bfloat16, {}, in_bfloat16),
        (128, torch.bfloat16, {"out_dtype": torch.float32}, False),
        (128, torch.bfloat16, {"bias": torch.zeros(4096)}, False),
        (128, torch.bfloat16, {"activation": "relu"}, False),
    ):
        found = co.explain(m, packed, dtype=dtype, **options)
        assert (found.device, found.kernel, found.launches, found.exact) == ("cpu", "torch.matmul", (), not rounds)
        assert found.workspace == (2 if rounds else 4) * 2**20 * min(torch.get_num_threads(), 16)
    for m, dtype, options in (
        (127, torch.float32, {}),
        (31, torch.bfloat16, {}),
        (128, torch.float32, {"exact": True}),
        (128, torch.float32, {"batch_invariant": True}),
        (128, torch.float32, {"act_quant": "block"}),
    ):
        assert co.explain(m, packed, dtype=dtype, **options).kernel == _C.cpu_kernel()
    assert (co.explain(32, packed, dtype=torch.bfloat16).kernel == "torch.matmul") == in_bfloat16


@pytest.mark.skipif(_C.built_with_cuda, reason="this build has CUDA kernels")
def test_a_build_without_kernels_says_so() -> None:
    with pytest.raises(RuntimeError, match="no CUDA kernels"):
        co.explain(3, co.reorder(weight()), device="cuda")
    with pytest.raises(ValueError, match="no CUDA kernels"):
        _C.current_device()
