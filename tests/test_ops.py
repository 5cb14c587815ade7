"""Operators where no GPU is needed: values, options, arguments."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from op_cases import INF, NAN, Change, K, N, activations, product, same, sized, weight
from torch import Tensor

import cutlass_ops as co
from cutlass_ops import reference
from cutlass_ops.ops import activations as activations_module
from cutlass_ops.ops import gemm
from cutlass_ops.reference import dequantize_weight
from cutlass_ops.weights import formats


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
    """Within fp32 sums of ``exact``: relative Frobenius error 1e-6, every element
    within 1e-5 rms.
    """
    error = y.double() - exact
    rms = exact.square().mean().sqrt()
    return bool(error.norm() <= 1e-6 * exact.norm()) and bool(error.abs().max() <= 1e-5 * rms)


# ---- values


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("group_size", [16, 32, 64, 128, 256, -1])
@pytest.mark.parametrize("kind", ["symmetric", "zeros", "offsets"])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_floats_times_weight_are_exact(
    bits: int, kind: str, group_size: int, dtype: torch.dtype
) -> None:
    qw = weight(bits, kind, group_size)
    x = activations(3, K, dtype=dtype)
    y = co.mixed_gemm(x, co.reorder(qw), out_dtype=torch.float32)
    assert torch.equal(y.double(), product(x, qw))


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("act_quant", ["token", "block"])
@pytest.mark.parametrize("group_size", [16, 32, 128, 256, -1])
@pytest.mark.parametrize("kind", ["symmetric", "zeros", "offsets"])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_activations_are_quantized_on_the_way(
    bits: int, kind: str, group_size: int, act_quant: str, symmetric: bool
) -> None:
    qw = weight(bits, kind, group_size)
    x = torch.randn(5, K, generator=torch.Generator().manual_seed(1))
    block = -1 if act_quant == "token" else formats.activation_block(group_size)
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
    assert torch.equal(
        qa.dequantize(), co.quantize_activations(x[:, qw.perm], block=block).dequantize()
    )


@pytest.mark.parametrize(
    "shape", [(K,), (1, K), (0, K), (2, 3, K), (2, 0, K), (1, 1, 1, K)], ids=str
)
@pytest.mark.parametrize("act_quant", ["none", "token", "block"])
def test_any_leading_shape(act_quant: str, shape: tuple[int, ...]) -> None:
    packed = co.reorder(weight())
    x = activations(*shape)
    residual = activations(*shape[:-1], N)
    y = co.mixed_gemm(x, packed, act_quant=act_quant, residual=residual)
    rows = co.mixed_gemm(
        x.reshape(-1, K), packed, act_quant=act_quant, residual=residual.reshape(-1, N)
    )
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
    "of the other sign": lambda x: torch._neg_view(x),
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
    expected = co.mixed_gemm(
        x.clone().contiguous(),
        packed,
        bias.clone(),
        act_quant=act_quant,
        residual=residual.contiguous(),
    )
    assert torch.equal(y, expected)
    dense = x.resolve_neg().clone(memory_format=torch.contiguous_format)
    assert torch.equal(
        co.mixed_gemm(x, packed, act_quant=act_quant),
        co.mixed_gemm(dense, packed, act_quant=act_quant),
    )
    assert torch.equal(co.quantize_activations(x).codes, co.quantize_activations(dense).codes)


# ---- options


ACTIVATIONS: dict[Any, Callable[[Tensor], Tensor]] = {
    None: lambda v: v,
    "relu": lambda v: torch.where(v > 0, v, 0.0),
    "relu6": lambda v: torch.where(v > 6, 6.0, torch.where(v > 0, v, 0.0)),
    "gelu": lambda v: v * 0.5 * (1 + torch.erf(v / math.sqrt(2))),
    "silu": lambda v: v / (1 + torch.exp(-v)),
    "gelu_tanh": lambda v: (
        v * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)))
    ),
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
    assert same(
        co.mixed_gemm(wide / 4, packed, residual=residual),
        torch.tensor([[INF, -INF, largest]]).bfloat16(),
    )
    saturated = co.mixed_gemm(wide / 4, packed, residual=residual, saturate=True)
    assert same(saturated, torch.tensor([[largest, -largest, largest]]).bfloat16())


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("act_quant", ["none", "token", "block"])
@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
def test_a_row_with_nan_or_infinity_is_nan_and_no_other(
    symmetric: bool, act_quant: str, bad: float
) -> None:
    packed = co.reorder(weight(kind="zeros"))
    x = activations(4, K)
    options: dict[str, Any] = {
        "activation": "relu",
        "act_quant": act_quant,
        "act_symmetric": symmetric,
        "saturate": True,
    }
    clean = co.mixed_gemm(x, packed, **options)
    x[2, K - 1] = bad
    y = co.mixed_gemm(x, packed, **options)
    assert y[2].isnan().all()
    assert torch.equal(y[[0, 1, 3]], clean[[0, 1, 3]])


# ---- quantised activations


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("block", [16, 32, 64, 128, -1])
@pytest.mark.parametrize("shape", [(5, K), (17, 7), (0, 100), (16, 128)], ids=str)
def test_quantized_activations_are_the_references(
    shape: tuple[int, int], block: int, symmetric: bool
) -> None:
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
    assert (qa.block, qa.k, qa.shape, qa.dtype, qa.device) == (
        block,
        shape[1],
        shape,
        torch.float32,
        x.device,
    )


def test_blocks_beyond_k_have_scale_one_and_code_zero() -> None:
    qa = co.quantize_activations(torch.full((2, 7), 3.0), block=32, symmetric=False)
    assert qa.zeros is not None
    assert torch.equal(qa.scales[1:, :2], torch.ones(3, 2))
    assert not qa.zeros[1:, :2].any()
    assert not qa.codes[:, 32:].any()
    # lo = 0, hi = 3: the zero point is -128, and padding columns of the first block have it.
    assert torch.equal(qa.zeros[0, :2], torch.tensor([-128, -128], dtype=torch.int8))
    assert torch.equal(
        qa.codes[0, :32].sort().values, torch.tensor([-128] * 25 + [127] * 7, dtype=torch.int8)
    )


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


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"weight": weight()}, TypeError, ["weight", "QuantizedWeight", "PackedWeight", "reorder"]),
        ({"weight": torch.zeros(2, K)}, TypeError, ["weight", "Tensor", "PackedWeight"]),
        ({"x": [[1.0] * K]}, TypeError, ["x", "list", "torch.Tensor"]),
        (
            {"x": torch.zeros(2, K, dtype=torch.float64)},
            TypeError,
            ["x", "float64", "float32, float16, bfloat16"],
        ),
        ({"x": torch.zeros(2, K, dtype=torch.int8)}, TypeError, ["x", "int8", "float16"]),
        ({"x": torch.zeros(2, K - 1)}, ValueError, ["x", "(2, 199)", "[..., 200]", "[40, 200]"]),
        ({"x": torch.zeros(K, 2)}, ValueError, ["x", "(200, 2)", "[..., 200]"]),
        ({"x": torch.tensor(1.0)}, ValueError, ["x", "()", "[..., 200]"]),
        ({"x": torch.zeros(2, K, device="meta")}, ValueError, ["x", "meta", "cpu"]),
        ({"act_quant": "row"}, ValueError, ["act_quant", "'row'", "'none', 'token' and 'block'"]),
        ({"act_quant": None}, ValueError, ["act_quant", "None", "'none', 'token' and 'block'"]),
        ({"activation": "tanh"}, ValueError, ["activation", "'tanh'", "'relu6'", "clamp"]),
        ({"activation": "clamp"}, ValueError, ["activation", "'clamp'", "('clamp', lo, hi)"]),
        (
            {"activation": ("clamp", 1.0)},
            ValueError,
            ["activation", "('clamp', 1.0)", "('clamp', lo, hi)"],
        ),
        (
            {"activation": ("clamp", 2.0, 1.0)},
            ValueError,
            ["activation", "('clamp', 2.0, 1.0)", "lo <= hi"],
        ),
        ({"activation": ("clamp", NAN, 1.0)}, ValueError, ["activation", "nan", "lo <= hi"]),
        ({"bias": torch.zeros(N + 1)}, ValueError, ["bias", "(41,)", "(40,)"]),
        ({"bias": torch.zeros(1, N)}, ValueError, ["bias", "(1, 40)", "(40,)"]),
        ({"bias": torch.zeros(N, dtype=torch.int32)}, TypeError, ["bias", "int32", "float16"]),
        ({"bias": 1.0}, TypeError, ["bias", "float", "torch.Tensor"]),
        ({"bias": torch.zeros(N, device="meta")}, ValueError, ["bias", "meta", "cpu"]),
        (
            {"bias": torch.zeros(N), "weight": co.reorder(weight(bias=True))},
            ValueError,
            ["bias", "has one already"],
        ),
        ({"residual": torch.zeros(2, N + 1)}, ValueError, ["residual", "(2, 41)", "(2, 40)"]),
        ({"residual": torch.zeros(N)}, ValueError, ["residual", "(40,)", "(2, 40)"]),
        (
            {"residual": torch.zeros(2, N, dtype=torch.int64)},
            TypeError,
            ["residual", "int64", "float16"],
        ),
        ({"residual": torch.zeros(2, N, device="meta")}, ValueError, ["residual", "meta", "cpu"]),
        (
            {"out_dtype": torch.float64},
            TypeError,
            ["out_dtype", "float64", "float32, float16, bfloat16"],
        ),
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
    with pytest.raises(
        ValueError, match=r"blocks of 128; .* groups of 64 they must be of 64, or -1"
    ):
        co.mixed_gemm(co.quantize_activations(activations(2, K), block=128), packed)
    with pytest.raises(ValueError, match=r"\(2, 100\); \[\.\.\., 200\] is expected"):
        co.mixed_gemm(co.quantize_activations(activations(2, 100), block=64), packed)
    with pytest.raises(ValueError, match="act order"):
        co.mixed_gemm(
            co.quantize_activations(activations(2, K), block=64), co.reorder(weight(perm=True))
        )
    with pytest.raises(ValueError, match="act order"):
        co.mixed_gemm(
            co.quantize_activations(activations(2, K), block=64, perm=torch.arange(K).int()), packed
        )


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"x": 3}, TypeError, ["x", "int", "torch.Tensor"]),
        (
            {"x": torch.zeros(2, K, dtype=torch.float64)},
            TypeError,
            ["x", "float64", "float32, float16, bfloat16"],
        ),
        ({"x": torch.tensor(1.0)}, ValueError, ["x", "()", "[..., K]"]),
        ({"x": torch.zeros(2, 0)}, ValueError, ["x", "(2, 0)", "K at least 1"]),
        ({"x": torch.zeros(2, K, device="meta")}, ValueError, ["meta", "cpu and cuda"]),
        ({"block": 8}, ValueError, ["block", "8", "16, 32, 64, 128 and -1"]),
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
def test_quantize_activations_refuses(
    change: Change, error: type[Exception], words: list[str]
) -> None:
    arguments: Change = {"x": activations(2, K), **change}
    with pytest.raises(error) as caught:
        co.quantize_activations(**arguments)
    for word in words:
        assert word in str(caught.value)


def test_dequantize_refuses() -> None:
    with pytest.raises(
        TypeError, match=r"dtype is torch\.int8; supported are float32, float16, bfloat16"
    ):
        co.dequantize(co.reorder(weight()), torch.int8)
    with pytest.raises(TypeError, match=r"dtype is torch\.float64"):
        co.dequantize(weight(), torch.float64)
    with pytest.raises(TypeError, match="weight is a Tensor; a PackedWeight or a QuantizedWeight"):
        co.dequantize(torch.zeros(2, 2))


def test_too_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (activations_module, gemm):
        monkeypatch.setattr(module, "MAX_M", 8)
    packed = co.reorder(weight())
    co.mixed_gemm(activations(2, 4, K), packed, exact=True)
    with pytest.raises(ValueError, match="x has 9 rows; at most 8"):
        co.mixed_gemm(activations(3, 3, K), packed, exact=True)
    with pytest.raises(ValueError, match="x has 9 rows; at most 8"):
        co.quantize_activations(activations(9, K))


# ---- bits that do not depend on M, and kernels of earlier architectures


INVARIANT_MS = (0, 1, 3, 17, 64, 129, 1000, 8192)


@pytest.mark.parametrize("act_quant", ["none", "token", "block"])
@pytest.mark.parametrize("shape", [(4096, 4096), (28672, 4096), (192, 640)])
def test_a_batch_invariant_product_is_planned_alike_for_every_m(
    shape: tuple[int, int], act_quant: str
) -> None:
    n, k = shape
    for bits in (4, 8):
        packed = sized(n, k, bits)
        for device in ("sm_80", "sm_90", "sm_120"):
            plans = {
                m: co.explain(m, packed, act_quant, device=device, batch_invariant=True)
                for m in INVARIANT_MS
            }
            ((kernel, slices),) = {(plans[m].kernel, plans[m].slices) for m in plans if m > 32}
            for m in plans:
                if plans[m].kernel == "wgmma_decode":  # with the same bits
                    assert m <= (32 if act_quant == "none" and n <= 6144 else 16)
                    assert plans[m].cluster == slices
                else:
                    assert (plans[m].kernel, plans[m].slices) == (kernel, slices)
            free = [co.explain(m, packed, act_quant, device=device) for m in INVARIANT_MS]
            assert len({(plan.kernel, plan.slices) for plan in free}) > 1 or n != 4096


def test_explain_takes_the_kernels_of_an_earlier_architecture() -> None:
    packed = sized(4096, 4096, 4)
    for m in (1, 64, 4096):
        for act_quant in ("none", "block"):
            old = co.explain(m, packed, act_quant, device="sm_90", architecture=80)
            assert old.device == "sm_90"
            assert old.kernel == co.explain(m, packed, act_quant, device="sm_80").kernel
    assert (
        co.explain(4096, packed, device="sm_90").kernel
        != co.explain(4096, packed, device="sm_90", architecture=89).kernel
    )
    with pytest.raises(ValueError, match="architecture is 90; the GPU is sm_80"):
        co.explain(1, packed, device="sm_80", architecture=90)
    with pytest.raises(
        ValueError, match=r"architecture 75 \(.*mma_gemm_a16.*\); kernels run on sm_80 and later"
    ):
        co.explain(1, packed, device="sm_80", architecture=75)


@pytest.mark.parametrize("act_quant", ["none", "block"])
def test_batch_invariance_on_a_cpu(act_quant: str) -> None:
    packed = co.reorder(weight(kind="zeros", bias=True))
    random = torch.Generator().manual_seed(0)
    x, residual = torch.randn(33, K, generator=random), torch.randn(33, N, generator=random)
    whole = co.mixed_gemm(
        x, packed, None, "silu", act_quant, residual=residual, batch_invariant=True
    )
    assert whole.shape == (33, N)
    for rows in (slice(0, 1), slice(4, 21), slice(32, 33)):
        y = co.mixed_gemm(
            x[rows], packed, None, "silu", act_quant, residual=residual[rows], batch_invariant=True
        )
        assert torch.equal(y, whole[rows])
    quantized = co.quantize_activations(x, 64)
    y = co.mixed_gemm(quantized, packed, batch_invariant=True)
    assert torch.equal(
        y[5:6], co.mixed_gemm(co.quantize_activations(x[5:6], 64), packed, batch_invariant=True)
    )
    assert co.mixed_gemm(x[:0], packed, batch_invariant=True).shape == (0, N)
