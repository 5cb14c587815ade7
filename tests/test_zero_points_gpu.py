"""Zero points and single weights, on a GPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from gpu_cases import (
    ACTIVATION_KINDS,
    BFLOAT,
    FLOAT,
    GPU,
    HALF,
    NAN,
    TYPE_NAMES,
    Format,
    assert_close,
    assert_same,
    block_of,
    compensates,
    make_exact_floats,
    make_floats,
    make_weight,
    multiply,
    oracle,
    poison,
    same_bits,
)

import cutlass_ops as co
from cutlass_ops import reference
from cutlass_ops.weights import formats

pytestmark = pytest.mark.gpu

# ---- zero points that are corrected for many blocks at once
# (csrc/include/cutlass_ops/zero_compensation.h)


@pytest.fixture
def hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("corrections are for sm_90a")


@pytest.mark.usefixtures("hopper")
# Tiles of K: fewer than a window has; one window; one and one more tile; two windows of int4 and
# one of int8; short last ones. All tiles of tokens: 96, 128, 144 and 176. The K of the last is cut.
@pytest.mark.parametrize(
    ("k", "m"),
    [
        (576, 130),
        (1920, 400),
        (1920, 1000),
        (2048, 530),
        (2176, 700),
        (4096, 130),
        (4096, 192),
        (4096, 200),
        (4096, 300),
        (4224, 192),
        (4300, 130),
        (4300, 200),
        (8320, 192),
        (8320, 300),
    ],
)
@pytest.mark.parametrize("act_quant", ["token", "block"])
@pytest.mark.parametrize(
    "fmt",
    [
        Format(4),
        Format(8),
        Format(4, "zeros", 256, BFLOAT),
        Format(8, "symmetric", -1, FLOAT),
        Format(4, "symmetric", 512, FLOAT),
    ],
    ids=str,
)
def test_corrections_of_zero_points(fmt: Format, act_quant: str, k: int, m: int) -> None:
    packed = co.reorder(qw := make_weight(fmt, 17000, k, exact=True))
    has_blocks = act_quant == "block" or fmt.group_size != -1
    assert compensates(m, packed, act_quant) == has_blocks
    x = make_exact_floats(m, k, HALF, act_quant, False, 128)
    asymmetric: dict[str, Any] = {"act_quant": act_quant, "act_symmetric": False}
    want = oracle(x, qw, act_quant, False)
    for dtype in (HALF, BFLOAT):
        assert_same(multiply(x, packed, out_dtype=dtype, **asymmetric), want.to(dtype))
    qw = make_weight(fmt, 17000, k, exact=False)
    packed = co.reorder(qw)
    for x in (make_floats(m, k, HALF), torch.nn.functional.gelu(make_floats(m, k, BFLOAT)) * 1e-3):
        want = oracle(x, qw, act_quant, False)
        y = multiply(x, packed, **asymmetric)
        assert_close(y, want)
        assert same_bits(y, multiply(x, packed, **asymmetric))
        qa = co.quantize_activations(x, block_of(act_quant, 128), False)
        assert same_bits(y, co.mixed_gemm(qa, packed))
        residual = make_floats(m, 17000, FLOAT)
        y = multiply(x, packed, activation="relu", residual=residual, **asymmetric)
        assert_close(y, want.relu() + residual.double())


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("k", "m"),
    [
        (130, 100),
        (576, 130),
        (1920, 400),
        (2176, 700),
        (4096, 65),
        (4224, 192),
        (4300, 200),
        (8320, 300),
    ],
)
@pytest.mark.parametrize(
    "fmt",
    [
        Format(8, "zeros"),
        Format(8, "zeros", 256, BFLOAT),
        Format(8, "zeros", -1, FLOAT),
        Format(4, "zeros", 256, FLOAT),
    ],
    ids=str,
)
def test_zero_points_of_weights_are_compensated(fmt: Format, k: int, m: int) -> None:
    block: dict[str, Any] = {"act_quant": "block"}
    if fmt.bits == 4:  # with fewer rows zero points are subtracted from the codes
        m = max(m, 129)
    packed = co.reorder(qw := make_weight(fmt, 17000, k, exact=True))
    x = make_exact_floats(m, k, HALF, "block", True, 128)
    assert "correction" in co.explain(x, packed, **block).why
    want = oracle(x, qw, "block")
    for dtype in (HALF, BFLOAT):
        assert_same(multiply(x, packed, out_dtype=dtype, **block), want.to(dtype))
    assert same_bits(multiply(x, packed, **block), multiply(x, packed, exact=True, **block))
    packed = co.reorder(qw := make_weight(fmt, 17000, k, exact=False))
    # Values of one sign: sums of codes are large.
    for x in (
        make_floats(m, k, HALF),
        make_floats(m, k, BFLOAT).abs() * 1e-3,
        make_floats(m, k, HALF).relu(),
    ):
        want = oracle(x, qw, "block")
        y = multiply(x, packed, **block)
        assert_close(y, want)
        assert same_bits(y, multiply(x, packed, **block))
        qa = co.quantize_activations(x, 128)
        assert same_bits(y, co.mixed_gemm(qa, packed))
        residual = make_floats(m, 17000, FLOAT)
        y = multiply(x, packed, activation="relu", residual=residual, **block)
        assert_close(y, want.relu() + residual.double())
    for other in (
        {"out_dtype": FLOAT},
        {"batch_invariant": True},
        {"exact": True},
        {"act_quant": "token"},
    ):
        assert "correction" not in co.explain(x, packed, **(block | other)).why


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("act_quant", ["token", "block"])
@pytest.mark.parametrize("bits", [4, 8])
def test_corrections_hold_fp32s_precision(bits: int, act_quant: str) -> None:
    """Where nothing but the zero points is left of y, results of 16 bits show all of it."""
    n, k, m = 17000, 4096, 300
    fmt = Format(bits, "symmetric", 128, FLOAT)
    qw = make_weight(fmt, n, k, exact=False)
    x = make_floats(m, k, HALF).abs() * 0.01
    x[:, ::128], x[:, 1::128] = 30, 30  # nearly all codes are the zero point
    # and the weights of the others sum to zero
    opposite = qw.codes[:, ::128].int().clamp(min=1)
    qw.codes[:, ::128], qw.codes[:, 1::128] = opposite, (1 << bits) - opposite
    packed = co.reorder(qw)
    assert compensates(m, packed, act_quant)
    want = oracle(x, qw, act_quant, False)
    y = multiply(x, packed, act_quant=act_quant, act_symmetric=False, out_dtype=HALF).double()
    # The contribution of zero points if all weights of a row have one sign; with random weights it
    # is a sixtieth of it.
    most = 30 / 255 * 128 * reference.dequantize_weight(qw, torch.float64).abs().sum(1).max()
    assert (y - want).abs().max() <= 2.0**-10 * want.abs().max() + 3e-8 * most


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("act_quant", ["token", "block"])
def test_corrections_with_rows_of_nan(act_quant: str) -> None:
    packed = co.reorder(make_weight(Format(8), 17000, 4096, exact=False))
    assert compensates(300, packed, act_quant)
    x = make_floats(300, 4096, HALF)
    want = multiply(x, packed, act_quant=act_quant, act_symmetric=False)
    x[7, 5], x[200, 2000] = NAN, math.inf
    want[7], want[200] = NAN, NAN
    assert_same(multiply(x, packed, act_quant=act_quant, act_symmetric=False), want)


@pytest.mark.parametrize("activations", ACTIVATION_KINDS)
@pytest.mark.parametrize("shape", [(0, 576), (2, 0, 576)], ids=str)
def test_no_rows(shape: tuple[int, ...], activations: str) -> None:
    act_quant, symmetric = ACTIVATION_KINDS[activations]
    packed = co.reorder(make_weight(Format(), 192, 576, exact=True))
    x = torch.empty(shape, dtype=HALF, device=GPU)
    y = co.mixed_gemm(
        x,
        packed,
        act_quant=act_quant,
        act_symmetric=symmetric,
        residual=x.new_empty(*shape[:-1], 192),
    )
    assert (y.shape, y.dtype, y.device) == ((*shape[:-1], 192), HALF, packed.device)
    if act_quant != "none":
        qa = co.quantize_activations(x, block_of(act_quant, 128), symmetric)
        assert co.mixed_gemm(qa, packed).shape == y.shape


# ---- one weight at a time


FORMATS = [
    Format(4, "symmetric", 128, HALF),
    Format(4, "zeros", 32, HALF),
    Format(4, "offsets", 64, FLOAT),
    Format(4, "zeros", 256, BFLOAT),
    Format(4, "offsets", 128, HALF),
    Format(8, "symmetric", 32, HALF),
    Format(8, "zeros", -1, FLOAT),
    Format(8, "offsets", 32, BFLOAT),
    Format(8, "symmetric", 128, BFLOAT),
    Format(8, "zeros", 64, HALF),
]


@pytest.mark.parametrize("tokens", [1, 16, 32, 64, 128])
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_one_hot_floats_give_the_decoded_weight(fmt: Format, tokens: int) -> None:
    n, k = 200, 576
    qw = make_weight(fmt, n, k, exact=False)
    packed = co.reorder(qw)
    values = reference.dequantize_weight(qw, FLOAT).t()
    for dtype in (HALF, BFLOAT):
        hot = torch.eye(k, dtype=dtype, device=GPU)
        starts = range(0, k, 97) if tokens == 1 else range(0, k, tokens)
        for start in starts:
            rows = slice(start, min(start + tokens, k))
            assert_same(multiply(hot[rows], packed, out_dtype=FLOAT), values[rows])
        rows = slice(0, tokens)
        assert_same(multiply(hot[rows], packed, exact=True), values[rows].to(dtype))
        # Where weights may be rounded they are rounded once, from a value that is not itself
        # rounded to fp32.
        whole = reference.dequantize_weight(qw, torch.float64).t()[rows]
        half_unit = {HALF: 2.0**-11, BFLOAT: 2.0**-8}[dtype]
        assert (
            (multiply(hot[rows], packed).double() - whole).abs()
            <= half_unit * 1.001 * whole.abs() + 2.0**-25
        ).all()


@pytest.mark.parametrize("tokens", [1, 16, 32, 64, 128])
@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("fmt", FORMATS, ids=str)
def test_one_hot_codes_give_the_decoded_weight(fmt: Format, symmetric: bool, tokens: int) -> None:
    n, k, zero = 200, 576, 0 if symmetric else -77
    qw = make_weight(fmt, n, k, exact=False)
    packed = co.reorder(qw)
    values = reference.dequantize_weight(qw, FLOAT).t()
    block = formats.activation_block(fmt.group_size)
    codes = torch.eye(k, dtype=torch.int8, device=GPU) + zero
    zeros = torch.full((k, formats.group_count(k, block)), zero, dtype=torch.int8, device=GPU)
    ordered = reference.activation_order(codes, None if symmetric else zeros, block)
    blocks = formats.padded_k(k) // block
    for start in range(0, k, 97 if tokens == 1 else tokens):
        rows = slice(start, min(start + tokens, k))
        m = rows.stop - rows.start
        stride = -(-m // 16) * 16
        qa = co.QuantizedActivations(
            codes=ordered[rows].clone(),
            scales=torch.ones(blocks, stride, device=GPU),
            zeros=None
            if symmetric
            else torch.full((blocks, stride), zero, dtype=torch.int8, device=GPU),
            block=block,
            k=k,
            shape=torch.Size((m, k)),
            dtype=FLOAT,
            perm=None,
        )
        assert_same(multiply(qa, packed), values[rows])


@pytest.mark.parametrize("scale_dtype", [HALF, BFLOAT, FLOAT], ids=TYPE_NAMES.get)
@pytest.mark.parametrize("group_size", [16, 32, 64, 128, 256, -1])
@pytest.mark.parametrize("kind", ["symmetric", "zeros", "offsets"])
@pytest.mark.parametrize("bits", [4, 8])
def test_dequantize_is_the_reference_bit_for_bit(
    bits: int, kind: str, group_size: int, scale_dtype: torch.dtype
) -> None:
    for n, k in ((192, 576), (1000, 100), (33, 7)):
        for perm in (False, True):
            qw = make_weight(
                Format(bits, kind, group_size, scale_dtype), n, k, exact=False, perm=perm
            )
            packed, on_cpu = co.reorder(qw), qw.to("cpu")
            for dtype in (HALF, BFLOAT, FLOAT):
                poison(n * k * torch.empty(0, dtype=dtype).element_size())
                y = co.dequantize(packed, dtype)
                expected = reference.dequantize_weight(on_cpu, dtype)
                assert_same(y.cpu(), expected)
                assert same_bits(y.cpu(), expected)


def test_packing_on_the_gpu_and_moving_there_are_the_same() -> None:
    qw = make_weight(Format(4, "zeros", 32), 200, 700, exact=False, bias=True, perm=True)
    there, moved = co.reorder(qw), co.reorder(qw.to("cpu")).to(GPU)
    for name, tensor in there.tensors().items():
        assert torch.equal(tensor, moved.tensors()[name]), name
    back = moved.unpack()
    assert back.device.type == "cuda"
    assert torch.equal(back.codes, qw.codes)
