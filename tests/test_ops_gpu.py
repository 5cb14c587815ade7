"""Kernels against the specification, on a GPU: the grid of formats and shapes."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from gpu_cases import (
    ACTIVATION_KINDS,
    BFLOAT,
    FLOAT,
    GPU,
    HALF,
    TYPE_NAMES,
    Format,
    assert_close,
    assert_same,
    block_of,
    cached_allocator,
    generator,
    integers,
    is_exact,
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

#: Tokens for each height of tile that the kernels have: up to 16, 32, 64, and more.
EVERY_TILE = ((1, 3, 16), (17, 32), (33, 64), (65, 129, 300))


# ---- running and comparing


@pytest.mark.skipif(not cached_allocator(), reason="torch's allocator does not cache")
def test_the_next_allocation_gets_the_poisoned_memory() -> None:
    # a cached block that fits better would be taken before the poisoned ones
    torch.cuda.empty_cache()
    for shape in ((1, 32), (33, 1000), (4097, 192)):
        poison(math.prod(shape) * 4)
        assert torch.empty(shape, device=GPU).isnan().all()


# ---- the grid


@dataclass(frozen=True)
class Case:
    """One weight, one kind of activations, one M of each height of tile."""

    fmt: Format
    n: int
    k: int
    activations: str
    x_dtype: torch.dtype
    out_dtype: torch.dtype
    rows: tuple[int, ...] = (1, 17, 64, 129)

    def __str__(self) -> str:
        types = f"{TYPE_NAMES[self.x_dtype]}-{TYPE_NAMES[self.out_dtype]}"
        return (
            f"{self.fmt}-{self.activations}-{types}-n{self.n}-k{self.k}-"
            f"m{'.'.join(map(str, self.rows))}"
        )


def grid(seed: int) -> list[Case]:
    """Each format with each kind of activations once; sizes and types drawn by lot."""
    rng = random.Random(seed)
    cases = []
    for bits in (4, 8):
        for kind in ("symmetric", "zeros", "offsets"):
            for group_size in (16, 32, 64, 128, 256, -1):
                for activations in ("fp16", "bf16", *list(ACTIVATION_KINDS)[1:]):
                    x_dtype = {"fp16": HALF, "bf16": BFLOAT}.get(activations) or rng.choice(
                        (HALF, BFLOAT, FLOAT)
                    )
                    k = rng.choices((576, 1536, 100, 7, 7392, 8256, 10944), (8, 6, 4, 2, 1, 1, 1))[
                        0
                    ]
                    cases.append(
                        Case(
                            Format(bits, kind, group_size, rng.choice((HALF, BFLOAT, FLOAT))),
                            rng.choice((32, 192, 576, 1000)),
                            k,
                            activations if activations in ACTIVATION_KINDS else "floats",
                            x_dtype,
                            rng.choice((HALF, BFLOAT, FLOAT, FLOAT)),
                            tuple(rng.choice(some) for some in EVERY_TILE),
                        )
                    )
    return cases


def named(cases: list[Case]) -> list[Any]:
    return [pytest.param(case, id=str(case)) for case in cases]


@pytest.mark.parametrize("case", named(grid(1)))
def test_power_of_two_scales_give_exact_products(case: Case) -> None:
    act_quant, symmetric = ACTIVATION_KINDS[case.activations]
    qw = make_weight(case.fmt, case.n, case.k, exact=True)
    packed = co.reorder(qw)
    for m in case.rows:
        x = make_exact_floats(
            m, case.k, case.x_dtype, act_quant, symmetric, formats.activation_block(qw.group_size)
        )
        exact = oracle(x, qw, act_quant, symmetric)
        y = multiply(x, packed, act_quant=act_quant, act_symmetric=symmetric, out_dtype=FLOAT)
        assert_same(y, exact.float())
        assert torch.equal(y.double(), exact), "the oracle's own values must fit fp32"


@pytest.mark.parametrize("m", [3, 17, 40, 70, 300])
@pytest.mark.parametrize("activations", ["token-asym", "block-asym"])
@pytest.mark.parametrize("group_size", [16, 32, 64, 128, -1])
def test_the_largest_integers_are_exact(group_size: int, activations: str, m: int) -> None:
    """Codes up to 255 away from their zero point on both sides: sums of 256 products
    almost reach 2^24.
    """
    n, k = 192, 256
    act_quant, symmetric = ACTIVATION_KINDS[activations]
    rng = generator(group_size, m)
    codes = integers(0, 256, (n, k), rng).to(torch.uint8)
    codes[::3] = 0
    groups = formats.group_count(k, group_size)
    zeros = integers(0, 2, (n, groups), rng).mul(255).to(torch.uint8)
    qw = co.QuantizedWeight(
        codes, torch.ones(n, groups, device=GPU), zeros, bits=8, group_size=group_size
    )
    x = integers(0, 256, (m, k), rng)
    x[::2] = 255  # a block's zero point is -128, its codes are 127
    x[:, :: 16 if group_size == 16 else 32] = 255
    width = k if group_size == -1 else group_size
    exact = (
        x[:, None].double() * (codes.double() - zeros.repeat_interleave(width, 1).double())
    ).sum(-1)
    y = multiply(
        x.half(), co.reorder(qw), act_quant=act_quant, act_symmetric=symmetric, out_dtype=FLOAT
    )
    assert torch.equal(y.double(), exact)


@pytest.mark.parametrize("case", named(grid(2)))
def test_any_scales_within_tolerance(case: Case) -> None:
    act_quant, symmetric = ACTIVATION_KINDS[case.activations]
    qw = make_weight(case.fmt, case.n, case.k, exact=False)
    packed = co.reorder(qw)
    for m in case.rows:
        x = make_floats(m, case.k, case.x_dtype)
        y = multiply(
            x, packed, act_quant=act_quant, act_symmetric=symmetric, out_dtype=case.out_dtype
        )
        assert y.dtype == case.out_dtype
        exact = is_exact(y, x, packed, act_quant=act_quant, act_symmetric=symmetric)
        assert_close(y, oracle(x, qw, act_quant, symmetric), not exact)
        if act_quant != "none":
            qa = co.quantize_activations(x, block_of(act_quant, qw.group_size), symmetric)
            again = multiply(qa, packed, out_dtype=case.out_dtype)
            assert_close(again, oracle(x, qw, act_quant, symmetric), not exact)
            # A few rows may be another kernel's where it quantises them, which sums
            # in another order.
            assert m <= 16 or same_bits(again, y)


LARGE = [
    # The longest K of each kind of kernel: sums of many groups.
    Case(Format(4, "zeros", 32), 576, 10944, "floats", HALF, FLOAT, (3, 65)),
    Case(Format(4, "symmetric", -1), 576, 10944, "floats", BFLOAT, FLOAT, (3, 65)),
    Case(Format(8, "symmetric", -1, BFLOAT), 192, 10944, "token", BFLOAT, FLOAT, (3, 65)),
    Case(Format(8, "zeros", 128), 192, 10944, "token-asym", HALF, FLOAT, (3, 65)),
    Case(Format(4, "offsets", 128), 1000, 8256, "block-asym", HALF, FLOAT, (17, 129)),
    # The most tokens of each row of decode_gemm, which for more than 8 wants a weight of 2^26
    # to 2^27 elements.
    Case(Format(4, "zeros", 64), 1000, 1536, "block-asym", BFLOAT, FLOAT, (6, 8)),
    Case(Format(4, "offsets", 128), 17024, 4096, "floats", HALF, HALF, (8, 12)),
    # A block's share of x that takes long to quantise: a longer ring of weights.
    Case(Format(4), 192, 65536, "block", HALF, FLOAT, (1, 3)),
    Case(Format(4, "zeros", 128), 192, 65536, "token-asym", BFLOAT, FLOAT, (1,)),
    # Many tokens: enough tiles that K is not split.
    Case(Format(4), 576, 576, "floats", HALF, HALF, (4097,)),
    Case(Format(8, "offsets", 32), 576, 576, "floats", BFLOAT, FLOAT, (4097,)),
    Case(Format(4), 576, 1536, "block", HALF, FLOAT, (4097,)),
    Case(Format(8, "symmetric", -1), 576, 1536, "token", BFLOAT, HALF, (4097,)),
    Case(Format(4, "zeros", 128), 576, 1536, "block", HALF, FLOAT, (4097,)),
    Case(Format(8, "zeros", 64), 576, 576, "block-asym", BFLOAT, BFLOAT, (4097,)),
    Case(Format(4, "symmetric", 64), 4096, 576, "token", HALF, HALF, (4097,)),
    Case(Format(4, "offsets", 32), 4096, 576, "block", HALF, FLOAT, (4097,)),
    Case(Format(8, "zeros", -1), 1000, 1536, "token-asym", HALF, BFLOAT, (4097,)),
    Case(Format(8, "offsets", 256), 1000, 1536, "token", HALF, FLOAT, (64, 1000)),
    # On an H200's 66 clusters: tiles of a last wave whose K is cut, and, for 60 tokens, tiles
    # of 512 features.
    Case(Format(4), 17152, 2048, "block-asym", HALF, FLOAT, (100,)),
    Case(Format(8, "symmetric", -1), 17152, 2048, "token", HALF, HALF, (100,)),
    Case(Format(4, "zeros", 128), 17408, 2048, "floats", BFLOAT, FLOAT, (100,)),
    Case(Format(4), 17152, 2048, "block", HALF, FLOAT, (60,)),
    Case(Format(4, "zeros", 128), 17200, 2048, "token", HALF, FLOAT, (60,)),
    Case(Format(4, "symmetric", -1), 17152, 2048, "token", BFLOAT, FLOAT, (60,)),
    # Too few tiles for a wave: two split-K slices, which the kernel adds itself, of tiles with
    # BLOCK_M = 128 and 144.
    Case(Format(8, "zeros", 256), 8192, 16500, "floats", BFLOAT, FLOAT, (128,)),
    Case(Format(8), 8150, 16384, "floats", HALF, HALF, (129,)),
    # One wave of tiles of 144 tokens, the last of whose features are none.
    Case(Format(4), 16832, 392, "floats", HALF, HALF, (129,)),
    Case(Format(4, "zeros", 256), 16832, 392, "floats", BFLOAT, FLOAT, (144,)),
    Case(Format(8, "symmetric", -1, BFLOAT), 16832, 392, "floats", BFLOAT, BFLOAT, (144,)),
    Case(Format(8, "zeros", 128, FLOAT), 16832, 392, "floats", HALF, FLOAT, (129,)),
    # Tiles of 208 tokens, in halves: one wave, of features and tokens that are none; a second half
    # of 12 tokens, and of none; tiles of a last wave whose K is cut.
    Case(Format(4), 16832, 392, "floats", HALF, HALF, (200,)),
    Case(Format(8, "zeros", 128, FLOAT), 16832, 392, "floats", HALF, FLOAT, (200,)),
    Case(Format(8), 4060, 2056, "floats", HALF, HALF, (700, 740, 832)),
    Case(Format(4, "zeros", 256), 4060, 2056, "floats", BFLOAT, BFLOAT, (700, 740, 832)),
    Case(Format(8, "symmetric", -1, BFLOAT), 8150, 4104, "floats", BFLOAT, BFLOAT, (1030,)),
    Case(Format(4, "zeros", 128), 8192, 4104, "floats", HALF, FLOAT, (1030,)),
    # A tied head: Q8_0 is 8 bits in groups of 32 with fp16 scales.
    Case(Format(8, "symmetric", 32), 49152, 576, "floats", HALF, FLOAT, (1, 65)),
    Case(Format(8, "symmetric", 32), 49152, 576, "block", HALF, FLOAT, (1, 65)),
]

#: Shapes of wgmma_decode: one, two, four or eight blocks that share K; warpgroups that share the
#: row panels, or take turns at K tiles, of which there may be fewer; a ring of stages that wraps,
#: or is filled once; unequal shares.
CUTS = [
    (33, 8),
    (1000, 4096),
    (2112, 1544),
    (4096, 4096),
    (9000, 640),
    (9056, 2048),
    (28672, 1024),
    (17000, 4096),
]


def check_small_batches(
    fmt: Format,
    n: int,
    k: int,
    dtype: torch.dtype,
    ms: Sequence[int],
    act_quant: str = "none",
    symmetric: bool = True,
) -> None:
    """Exact products where x and the weight are exact; within the tolerance, and the same bits
    again, where they are not.
    """
    int8 = act_quant != "none"
    for exact in (True, False):
        qw = make_weight(fmt, n, k, exact=exact)
        packed = co.reorder(qw)
        for m in ms:
            x = (
                make_exact_floats(m, k, dtype, act_quant, symmetric, 128)
                if exact
                else make_floats(m, k, dtype)
            )
            if int8 and not exact:
                x[1::2, :: max(k // 3, 1)] *= 300  # outliers
            y = multiply(x, packed, act_quant=act_quant, act_symmetric=symmetric, out_dtype=FLOAT)
            want = oracle(x, qw, act_quant, symmetric)
            if exact:
                assert_same(y, want.float())
                continue
            assert_close(y, want)
            assert same_bits(
                multiply(x, packed, act_quant=act_quant, act_symmetric=symmetric, out_dtype=FLOAT),
                y,
            )
            if int8:
                codes = co.quantize_activations(x, block_of(act_quant, fmt.group_size), symmetric)
                assert_close(multiply(codes, packed, out_dtype=FLOAT), want)


@pytest.mark.parametrize(("n", "k"), CUTS)
@pytest.mark.parametrize("dtype", [HALF, BFLOAT], ids=TYPE_NAMES.get)
@pytest.mark.parametrize(
    ("bits", "kind", "group_size"),
    [(4, "symmetric", 128), (4, "zeros", 256), (8, "symmetric", -1), (8, "zeros", 128)],
)
def test_small_batches_of_floats(
    bits: int, kind: str, group_size: int, dtype: torch.dtype, n: int, k: int
) -> None:
    check_small_batches(Format(bits, kind, group_size, dtype), n, k, dtype, (1, 5, 9, 16, 24))


@pytest.mark.parametrize("dtype", [HALF, BFLOAT], ids=TYPE_NAMES.get)
@pytest.mark.parametrize(("kind", "group_size"), [("symmetric", 128), ("zeros", 256)])
def test_few_rows_of_floats_and_many_features(
    kind: str, group_size: int, dtype: torch.dtype
) -> None:
    """On an H200, 34 tiles of 512 features for 66 clusters; the last reaches beyond N."""
    check_small_batches(Format(4, kind, group_size, dtype), 17000, 392, dtype, (33, 64))


@pytest.mark.parametrize(
    ("bits", "kind", "group_size", "dtype"),
    [
        (4, "symmetric", 128, HALF),
        (4, "zeros", 256, BFLOAT),
        (4, "zeros", -1, HALF),
        (8, "symmetric", -1, BFLOAT),
        (8, "zeros", 128, HALF),
        (8, "symmetric", 384, HALF),
    ],
)
def test_tiles_of_96_and_208_tokens_of_floats(
    bits: int, kind: str, group_size: int, dtype: torch.dtype
) -> None:
    """On an H200 one wave, the last of whose features are none."""
    check_small_batches(
        Format(bits, kind, group_size, dtype), 16832, 392, dtype, (72, 96, 200, 208)
    )


@pytest.mark.parametrize(("n", "k"), CUTS)
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize(
    ("bits", "kind", "group_size", "scales", "act_quant"),
    [
        (4, "symmetric", 128, HALF, "block"),
        (4, "zeros", 256, BFLOAT, "block"),
        (4, "zeros", 128, FLOAT, "token"),
        (8, "symmetric", -1, BFLOAT, "token"),
        (8, "symmetric", 128, HALF, "block"),
        (8, "symmetric", 384, FLOAT, "block"),
    ],
)
def test_small_batches_of_int8(
    bits: int,
    kind: str,
    group_size: int,
    scales: torch.dtype,
    act_quant: str,
    symmetric: bool,
    n: int,
    k: int,
) -> None:
    check_small_batches(
        Format(bits, kind, group_size, scales), n, k, HALF, (1, 5, 9, 16, 24), act_quant, symmetric
    )


@pytest.mark.parametrize(
    ("bits", "kind", "group_size", "scales", "act_quant"),
    [
        (4, "symmetric", 128, HALF, "block"),
        (4, "zeros", 256, BFLOAT, "block"),
        (4, "zeros", 128, FLOAT, "token"),
        (8, "symmetric", 128, HALF, "block"),
        (8, "symmetric", 256, FLOAT, "token"),
        (8, "symmetric", -1, BFLOAT, "token"),
    ],
)
def test_tiles_of_144_int8_tokens(
    bits: int, kind: str, group_size: int, scales: torch.dtype, act_quant: str
) -> None:
    """On an H200 one wave, the last of whose features are none."""
    check_small_batches(
        Format(bits, kind, group_size, scales), 16832, 392, HALF, (129, 144), act_quant
    )


@pytest.mark.parametrize(
    ("kind", "group_size", "act_quant"),
    [
        ("symmetric", 128, "none"),
        ("zeros", 256, "none"),
        ("symmetric", 128, "block"),
        ("zeros", 128, "block"),
        ("symmetric", 128, "token"),
        ("symmetric", -1, "token"),
    ],
)
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(("n", "k"), [(64, 256), (100, 1032), (320, 136)])
def test_few_features(
    n: int, k: int, bits: int, kind: str, group_size: int, act_quant: str
) -> None:
    """Clusters along M, the second CTA of whose last one has some rows, or none."""
    fmt = Format(bits, kind, group_size, HALF)
    check_small_batches(fmt, n, k, HALF, (40, 129, 360, 1000, 2304, 60007), act_quant)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", [HALF, BFLOAT])
@pytest.mark.parametrize(
    ("n", "k", "group_size", "act_quant"),
    [
        (64, 256, 128, "block"),
        (100, 264, 128, "block"),
        (128, 56, -1, "token"),
        (64, 256, 128, "token"),
        (72, 136, 128, "token"),
    ],
)
def test_tiles_that_quantise_their_own_x(
    n: int, k: int, group_size: int, act_quant: str, dtype: torch.dtype, bits: int
) -> None:
    """Their bits are those of the product with the quantiser's codes, of which two K tiles with one
    scale a row are two blocks with the same scale; rows with NaN and with zeros alone are among
    them.
    """
    fmt = Format(bits, "symmetric", group_size, dtype)
    packed = co.reorder(make_weight(fmt, n, k, exact=False))
    for m in (20001, 31999):
        x = make_floats(m, k, dtype) * torch.rand(m, 1, device=GPU).to(dtype)
        x[m // 2] = 0
        x[m // 3, k - 1] = float("nan")
        x[m // 4, 0], x[m // 4, k - 1] = 3e4, 4e4
        assert "quantize_activations" not in co.explain(x, packed, act_quant).launches
        codes = co.quantize_activations(x, 128 if act_quant == "block" else -1)
        if act_quant == "token" and k > 128:
            scales = codes.scales.repeat(2, 1)
            codes = replace(codes, scales=scales, block=128)
        y = multiply(x, packed, act_quant=act_quant)
        want = multiply(codes, packed)
        assert torch.equal(y.isnan(), want.isnan())
        assert y[m // 3].isnan().all()
        assert torch.equal(y.nan_to_num(), want.nan_to_num())


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize(("bits", "scales"), [(4, HALF), (8, BFLOAT), (8, FLOAT)])
@pytest.mark.parametrize(
    ("n", "k", "ms"), [(16832, 392, (200, 256)), (17000, 4104, (1000,)), (4060, 28680, (200,))]
)
def test_block_m_256_of_int8(
    n: int, k: int, ms: tuple[int, ...], bits: int, scales: torch.dtype, symmetric: bool
) -> None:
    """On an H200 one wave, the last of whose features are none; waves with a stream-K tail; and
    four split-K slices.
    """
    fmt = Format(bits, "symmetric", -1, scales)
    check_small_batches(fmt, n, k, HALF, ms, "token", symmetric)
    packed = co.reorder(make_weight(fmt, n, k, exact=False))
    for m in ms:
        x = make_floats(m, k, HALF)
        y = multiply(x, packed, act_quant="token", act_symmetric=symmetric, out_dtype=FLOAT)
        for out_dtype in (HALF, BFLOAT):
            rounded = multiply(
                x, packed, act_quant="token", act_symmetric=symmetric, out_dtype=out_dtype
            )
            assert same_bits(rounded, y.to(out_dtype))


@pytest.mark.parametrize("case", named(LARGE))
def test_large_shapes(case: Case) -> None:
    test_any_scales_within_tolerance(case)


@pytest.mark.parametrize("m", [4, 16])
@pytest.mark.parametrize(("bits", "scale_dtype"), [(8, FLOAT), (8, HALF), (4, HALF)])
def test_small_weights_and_floats_of_one_sign_keep_their_precision(
    bits: int, scale_dtype: torch.dtype, m: int
) -> None:
    """Codes near zero: the bias that a decoder adds and subtracts must not outweigh the result."""
    center = 2 ** (bits - 1)
    codes = torch.randint(
        center - bits // 4, center + bits // 4 + 1, (576, 4096), dtype=torch.uint8
    )
    scales = (torch.rand(576, 32) * 0.01 + 0.005).to(scale_dtype)
    weight = co.QuantizedWeight(codes, scales, None, None, bits=bits, group_size=128)
    x = torch.randn(m, 4096).abs().half().cuda()
    want = reference.mixed_gemm(
        x, weight.to("cuda"), out_dtype=FLOAT, compute_dtype=torch.float64
    ).double()
    error = co.mixed_gemm(x, co.reorder(weight).to("cuda"), out_dtype=FLOAT).double() - want
    assert error.norm() <= 1e-6 * want.norm()


@pytest.mark.parametrize("m", [32, 64, 96, 128, 176])  # a kernel each, for its range of rows
@pytest.mark.parametrize("act_quant", ["token", "block"])
@pytest.mark.parametrize("fmt", [Format(4), Format(8), Format(4, "zeros")], ids=str)
def test_zero_points_are_exact_with_weights_of_one_sign(
    fmt: Format, act_quant: str, m: int
) -> None:
    """Sums of a group's weights of any size, up to 128 times the largest weight."""
    n, k = 16896 if m > 32 else 1 << 17, 256
    qw = make_weight(fmt, n, k, exact=True)
    qw.codes[0::5] = 0
    qw.codes[1::5] = (1 << fmt.bits) - 1
    qw.codes[2::5] |= 1 << (fmt.bits - 1)
    qw.codes[3::5] &= (1 << (fmt.bits - 1)) - 1
    x = make_exact_floats(m, k, HALF, act_quant, False, 128)
    y = multiply(x, co.reorder(qw), act_quant=act_quant, act_symmetric=False, out_dtype=FLOAT)
    assert_same(y, oracle(x, qw, act_quant, False).float())


@pytest.mark.parametrize("m", [32, 64, 96, 128, 176])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_the_largest_integers_with_zero_points_are_exact(bits: int, m: int) -> None:
    """Codes 255 away from their zero points, and weights of the largest codes: sums reach 255 *
    128 * 128, almost 2^22.
    """
    n, k, block = 16896 if m > 32 else 1 << 17, 256, 128
    qw = make_weight(Format(bits), n, k, exact=True)
    qw.codes[0::2], qw.codes[1::2] = 0, (1 << bits) - 1
    codes = torch.full((m, k), -128, dtype=torch.int8, device=GPU)
    codes[1::2] = 127
    zeros = (-1 - codes[:, ::block]).contiguous()
    stride = -(-m // 16) * 16
    qa = co.QuantizedActivations(
        codes=reference.activation_order(codes, zeros, block),
        scales=torch.ones(k // block, stride, device=GPU),
        zeros=torch.nn.functional.pad(zeros.t(), (0, stride - m)).contiguous(),
        block=block,
        k=k,
        shape=torch.Size((m, k)),
        dtype=FLOAT,
        perm=None,
    )
    want = (2 * codes.double() + 1) @ reference.dequantize_weight(qw, torch.float64).t()
    assert_same(multiply(qa, co.reorder(qw)), want.float())


@pytest.mark.parametrize("m", [8, 24, 40, 64, 96, 128, 176])
@pytest.mark.parametrize("act_quant", ["token", "block"])
@pytest.mark.parametrize("fmt", [Format(4), Format(8), Format(4, "zeros")], ids=str)
def test_zero_points_keep_small_values_next_to_outliers(
    fmt: Format, act_quant: str, m: int
) -> None:
    """Nearly all codes are the zero point or next to it: sums of codes are many times as large as
    the result without zero points.
    """
    qw = make_weight(fmt, 16896, 2048, exact=False)
    x = make_floats(m, 2048, HALF)
    x[:, 3::128] *= 100
    # they are zero except at the outliers
    qw.codes[:, 3::128] = qw.zeros if fmt.kind == "zeros" else 1 << (fmt.bits - 1)
    y = multiply(x, co.reorder(qw), act_quant=act_quant, act_symmetric=False, out_dtype=FLOAT)
    assert_close(y, oracle(x, qw, act_quant, False))


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(("n", "m"), [(19072, 33), (4224, 48), (18944, 128)])
def test_launches_end_where_a_cta_has_no_rows_of_the_weight(n: int, m: int, bits: int) -> None:
    """The first CTA of the last cluster has all remaining rows of the weight. A warp of the second
    CTA, which has nothing to copy, fell two phases behind the others in one of some thousand
    launches, and waited for ever.
    """
    packed = [
        co.reorder(make_weight(Format(bits, "symmetric", 32), n, 3584, exact=False))
        for _ in range(4)
    ]
    x = make_floats(m, 3584, HALF)
    for weight in packed:
        co.mixed_gemm(x, weight, act_quant="token")
    graph, done = torch.cuda.CUDAGraph(), torch.cuda.Event()
    with torch.cuda.graph(graph):
        for i in range(100):
            co.mixed_gemm(x, packed[i % 4], act_quant="token")
    for _ in range(100):
        graph.replay()
    done.record()
    deadline = time.monotonic() + 20
    while not done.query():
        assert time.monotonic() < deadline, "a launch does not end"
        time.sleep(0.01)
