"""The kernels against the specification, on a GPU.

The oracle is fp64 over the dequantised operands. Where scales are powers of two and activations small integers, every product
and every partial sum is a multiple of one power of two and below 2^24 times it: fp32 adds those without rounding in any order,
so the kernels must give the oracle's very values. With other scales each element must be within the rounding of fp32 sums,
never a mean.

Before each call torch's allocator is left with blocks full of NaN of the sizes that the call will request.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import cutlass_ops as co
from cutlass_ops import _C, reference
from cutlass_ops.ops import gemm
from cutlass_ops.weights import formats

pytestmark = pytest.mark.gpu

NAN, INF = math.nan, math.inf
GPU = "cuda"
HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32
TYPE_NAMES = {HALF: "fp16", BFLOAT: "bf16", FLOAT: "fp32"}
#: Tokens for each height of tile that the kernels have: up to 16, 32, 64, and more.
EVERY_TILE = ((1, 3, 16), (17, 32), (33, 64), (65, 129, 300))

#: kind -> act_quant, act_symmetric
ACTIVATION_KINDS = {
    "floats": ("none", True),
    "token": ("token", True),
    "token-asym": ("token", False),
    "block": ("block", True),
    "block-asym": ("block", False),
}


# ---- operands


@dataclass(frozen=True)
class Format:
    """How a weight is stored."""

    bits: int = 4
    kind: str = "symmetric"  # or zeros, offsets
    group_size: int = 128
    scale_dtype: torch.dtype = HALF

    def __str__(self) -> str:
        return f"w{self.bits}-{self.kind}-g{self.group_size}-{TYPE_NAMES[self.scale_dtype]}"


def generator(*seed: int) -> torch.Generator:
    return torch.Generator(GPU).manual_seed(random.Random(str(seed)).getrandbits(32))


def integers(low: int, high: int, shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    return torch.randint(low, high, shape, generator=rng, device=GPU)


def make_weight(fmt: Format, n: int, k: int, *, exact: bool, bias: bool = False, perm: bool = False) -> co.QuantizedWeight:
    """Random codes. Scales of both signs: 1/4, 1/2 and 1 if ``exact``, any if not; the same for offsets."""
    rng = generator(fmt.bits, n, k, exact)
    vector = (n, formats.group_count(k, fmt.group_size))
    signs = 1 - 2 * integers(0, 2, vector, rng)
    if exact:
        scales = signs * 2.0 ** integers(-2, 1, vector, rng)
        offsets = integers(-6, 7, vector, rng) / 4
    else:
        scales = signs * torch.rand(vector, generator=rng, device=GPU).mul(0.02).add(0.001)
        offsets = torch.randn(vector, generator=rng, device=GPU) * 0.05
    return co.QuantizedWeight(
        codes=integers(0, 1 << fmt.bits, (n, k), rng).to(torch.uint8),
        scales=scales.to(fmt.scale_dtype),
        zeros=integers(0, 1 << fmt.bits, vector, rng).to(torch.uint8) if fmt.kind == "zeros" else None,
        offsets=offsets.to(fmt.scale_dtype) if fmt.kind == "offsets" else None,
        bits=fmt.bits,
        group_size=fmt.group_size,
        bias=torch.randn(n, generator=rng, device=GPU).to(fmt.scale_dtype) if bias else None,
        perm=torch.randperm(k, generator=rng, device=GPU) if perm else None,
    )


def make_floats(m: int, k: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(m, k, generator=generator(m, k), device=GPU).to(dtype)


def make_exact_floats(m: int, k: int, dtype: torch.dtype, act_quant: str, symmetric: bool, block: int) -> Tensor:
    """Small integers, which quantisers leave as they are: each block's range makes its scale exactly 1."""
    x = integers(-4, 5, (m, k), generator(m, k)).to(dtype)
    if act_quant == "none":
        return x
    step = k if act_quant == "token" else block
    if symmetric:
        x[:, ::step] = 127  # amax 127: scale 1
        return x
    x[:, ::step] = -55  # hi - lo = 255: scale 1, zero point -73
    x[:, 1::step] = 200
    if k % step == 1:  # a block of one column cannot span a range
        x[:, -1] = 255
    return x


def block_of(act_quant: str, group_size: int) -> int:
    return -1 if act_quant == "token" else formats.activation_block(group_size)


def oracle(x: Tensor, qw: co.QuantizedWeight, act_quant: str = "none", symmetric: bool = True) -> Tensor:
    """The product of the dequantised operands in fp64, without bias."""
    columns = torch.arange(qw.k, device=GPU) if qw.perm is None else qw.perm
    values = x[:, columns].double()
    if act_quant != "none":
        block = block_of(act_quant, qw.group_size)
        codes, scales, zeros = reference.quantize_activations(x[:, columns], block, symmetric)
        per_column = torch.arange(qw.k, device=GPU) // (qw.k if block == -1 else block)
        values = codes.double()
        if zeros is not None:
            values -= zeros.double()[:, per_column]
        values *= scales.double()[:, per_column]
    return values @ reference.dequantize_weight(qw, torch.float64)[:, columns].t()


# ---- running and comparing


def poison(*sizes: int) -> None:
    """Leave free blocks of so many bytes full of NaN (in any type) in torch's allocator, for the next call to get."""
    blocks = [torch.full((size,), 0xFF, dtype=torch.uint8, device=GPU) for size in sizes for _ in range(2) if size]
    del blocks


def multiply(x: Tensor | co.QuantizedActivations, packed: co.PackedWeight, **options: Any) -> Tensor:
    """mixed_gemm into poisoned memory."""
    dtype = options.get("out_dtype") or x.dtype
    m = math.prod(x.shape[:-1])
    itemsize = torch.empty(0, dtype=dtype).element_size()
    poison(m * packed.n * itemsize, co.explain(x, packed, **options).workspace)
    return co.mixed_gemm(x, packed, **options)


def is_exact(y: Tensor, x: Tensor | co.QuantizedActivations, packed: co.PackedWeight, **options: Any) -> bool:
    """Whether the product y keeps the integers of its operands, or may round weights and activations to its own dtype."""
    if y.dtype != x.dtype:
        return True
    return co.explain(x, packed, **options).exact


def assert_close(y: Tensor, exact: Tensor, rounded: bool = False) -> None:
    """Every element within what its type and fp32 sums allow (and, for fp32, the whole within 1e-6).

    With `rounded` operands, weights and values of int8 activations have y's type: then 6.7 standard deviations of the sum of
    their errors, for a row of x and a row of the weight of their size (six are passed once in 5e8 elements: that is seen).
    """
    assert y.shape == exact.shape
    error = (y.double() - exact).abs()
    rms = exact.square().mean().sqrt()
    if y.dtype == FLOAT:
        assert error.norm() <= 1e-6 * exact.norm(), f"relative Frobenius error {error.norm() / exact.norm():.3g}"
    unit = {HALF: 2.0**-10, BFLOAT: 2.0**-7 if rounded else 2.0**-8, FLOAT: 0.0}[y.dtype]
    sums = 1e-5 * rms
    if rounded:
        # A few elements of a column say little of its size: 16 more, twice as large as the whole's, are added.
        columns = (exact.square().sum(0) + 16 * (2 * rms).square()) / (len(exact) + 16)
        size = (columns * exact.square().mean(1, keepdim=True)).sqrt() / rms
        sums = {HALF: 1.9e-3, BFLOAT: 1.5e-2}[y.dtype] * size
    excess = error - (unit * exact.abs() + sums)
    worst = divmod(int(excess.argmax()), y.shape[-1])
    assert not excess.isnan().any(), f"NaN, first at {tuple(excess.isnan().nonzero()[0].tolist())}"
    assert excess[worst] <= 0, f"at {worst}: {y[worst]} is not {exact[worst]}; rms {rms:.3g}"


def assert_same(a: Tensor, b: Tensor) -> None:
    """Equal in dtype, shape and value; NaN equal to NaN. The message has the first difference."""
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    differs = (a != b) & ~(a.isnan() & b.isnan())
    if differs.any():
        first = tuple(differs.nonzero()[0].tolist())
        pytest.fail(f"{int(differs.sum())} of {a.numel()} differ, first at {first}: {a[first]} is not {b[first]}")


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def cached_allocator() -> bool:
    return os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING") != "1"


@pytest.mark.skipif(not cached_allocator(), reason="torch's allocator does not cache")
def test_poison_is_what_the_next_tensor_gets() -> None:
    torch.cuda.empty_cache()  # a cached block that fits better would be taken before the poisoned ones
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
        return f"{self.fmt}-{self.activations}-{types}-n{self.n}-k{self.k}-m{'.'.join(map(str, self.rows))}"


def grid(seed: int) -> list[Case]:
    """Each format with each kind of activations once; sizes and types drawn by lot."""
    rng = random.Random(seed)
    cases = []
    for bits in (4, 8):
        for kind in ("symmetric", "zeros", "offsets"):
            for group_size in (32, 64, 128, 256, -1):
                for activations in ("fp16", "bf16", *list(ACTIVATION_KINDS)[1:]):
                    x_dtype = {"fp16": HALF, "bf16": BFLOAT}.get(activations) or rng.choice((HALF, BFLOAT, FLOAT))
                    k = rng.choices((576, 1536, 100, 7, 7392, 8256, 10944), (8, 6, 4, 2, 1, 1, 1))[0]
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
        x = make_exact_floats(m, case.k, case.x_dtype, act_quant, symmetric, formats.activation_block(qw.group_size))
        exact = oracle(x, qw, act_quant, symmetric)
        y = multiply(x, packed, act_quant=act_quant, act_symmetric=symmetric, out_dtype=FLOAT)
        assert_same(y, exact.float())
        assert torch.equal(y.double(), exact), "the oracle's own values must fit fp32"


@pytest.mark.parametrize("m", [3, 17, 40, 70, 300])
@pytest.mark.parametrize("activations", ["token-asym", "block-asym"])
@pytest.mark.parametrize("group_size", [32, 64, 128, -1])
def test_the_largest_integers_are_exact(group_size: int, activations: str, m: int) -> None:
    """Codes up to 255 away from their zero point on both sides: sums of 256 products almost reach 2^24."""
    n, k = 192, 256
    act_quant, symmetric = ACTIVATION_KINDS[activations]
    rng = generator(group_size, m)
    codes = integers(0, 256, (n, k), rng).to(torch.uint8)
    codes[::3] = 0
    groups = formats.group_count(k, group_size)
    zeros = integers(0, 2, (n, groups), rng).mul(255).to(torch.uint8)
    qw = co.QuantizedWeight(codes, torch.ones(n, groups, device=GPU), zeros, bits=8, group_size=group_size)
    x = integers(0, 256, (m, k), rng)
    x[::2] = 255  # a block's zero point is -128, its codes are 127
    x[:, ::32] = 255
    width = k if group_size == -1 else group_size
    exact = (x[:, None].double() * (codes.double() - zeros.repeat_interleave(width, 1).double())).sum(-1)
    y = multiply(x.half(), co.reorder(qw), act_quant=act_quant, act_symmetric=symmetric, out_dtype=FLOAT)
    assert torch.equal(y.double(), exact)


@pytest.mark.parametrize("case", named(grid(2)))
def test_any_scales_within_tolerance(case: Case) -> None:
    act_quant, symmetric = ACTIVATION_KINDS[case.activations]
    qw = make_weight(case.fmt, case.n, case.k, exact=False)
    packed = co.reorder(qw)
    for m in case.rows:
        x = make_floats(m, case.k, case.x_dtype)
        y = multiply(x, packed, act_quant=act_quant, act_symmetric=symmetric, out_dtype=case.out_dtype)
        assert y.dtype == case.out_dtype
        exact = is_exact(y, x, packed, act_quant=act_quant, act_symmetric=symmetric)
        assert_close(y, oracle(x, qw, act_quant, symmetric), not exact)
        if act_quant != "none":
            qa = co.quantize_activations(x, block_of(act_quant, qw.group_size), symmetric)
            again = multiply(qa, packed, out_dtype=case.out_dtype)
            assert_close(again, oracle(x, qw, act_quant, symmetric), not exact)
            # A few rows may be another kernel's where it quantises them, which sums in another order.
            assert m <= 16 or same_bits(again, y)


LARGE = [
    # The longest K of each kind of kernel: sums of many groups.
    Case(Format(4, "zeros", 32), 576, 10944, "floats", HALF, FLOAT, (3, 65)),
    Case(Format(4, "symmetric", -1), 576, 10944, "floats", BFLOAT, FLOAT, (3, 65)),
    Case(Format(8, "symmetric", -1, BFLOAT), 192, 10944, "token", BFLOAT, FLOAT, (3, 65)),
    Case(Format(8, "zeros", 128), 192, 10944, "token-asym", HALF, FLOAT, (3, 65)),
    Case(Format(4, "offsets", 128), 1000, 8256, "block-asym", HALF, FLOAT, (17, 129)),
    # The most tokens of each row of decode_gemm, which for more than 8 wants a weight of 2^26 to 2^27 elements.
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
    # On an H200's 66 clusters: tiles of a last wave whose K is cut, and, for 60 tokens, tiles of 512 features.
    Case(Format(4), 17152, 2048, "block-asym", HALF, FLOAT, (100,)),
    Case(Format(8, "symmetric", -1), 17152, 2048, "token", HALF, HALF, (100,)),
    Case(Format(4, "zeros", 128), 17408, 2048, "floats", BFLOAT, FLOAT, (100,)),
    Case(Format(4), 17152, 2048, "block", HALF, FLOAT, (60,)),
    Case(Format(4, "zeros", 128), 17200, 2048, "token", HALF, FLOAT, (60,)),
    Case(Format(4, "symmetric", -1), 17152, 2048, "token", BFLOAT, FLOAT, (60,)),
    # Too few tiles for a wave: two split-K slices, which the kernel adds itself, of tiles with BLOCK_M = 128 and 144.
    Case(Format(8, "zeros", 256), 8192, 16500, "floats", BFLOAT, FLOAT, (128,)),
    Case(Format(8), 8150, 16384, "floats", HALF, HALF, (129,)),
    # One wave of tiles of 144 tokens, the last of whose features are none.
    Case(Format(4), 16832, 392, "floats", HALF, HALF, (129,)),
    Case(Format(4, "zeros", 256), 16832, 392, "floats", BFLOAT, FLOAT, (144,)),
    Case(Format(8, "symmetric", -1, BFLOAT), 16832, 392, "floats", BFLOAT, BFLOAT, (144,)),
    Case(Format(8, "zeros", 128, FLOAT), 16832, 392, "floats", HALF, FLOAT, (129,)),
    # Tiles of 208 tokens, in halves: one wave, of features and tokens that are none; a second half of 12 tokens, and of none;
    # tiles of a last wave whose K is cut.
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


#: What wgmma_decode does with a weight: one block, two, four or eight that share K; warpgroups that share its row panels, or
#: take turns at tiles of K, of which there may be fewer; a ring of stages that turns, or is filled once; unequal shares.
CUTS = [(33, 8), (1000, 4096), (2112, 1544), (4096, 4096), (9000, 640), (9056, 2048), (28672, 1024), (17000, 4096)]


def check_small_batches(
    fmt: Format,
    n: int,
    k: int,
    dtype: torch.dtype,
    ms: Sequence[int],
    act_quant: str = "none",
    symmetric: bool = True,
) -> None:
    """Exact products where x and the weight are exact; within the tolerance, and the same bits again, where they are not."""
    int8 = act_quant != "none"
    for exact in (True, False):
        qw = make_weight(fmt, n, k, exact=exact)
        packed = co.reorder(qw)
        for m in ms:
            x = make_exact_floats(m, k, dtype, act_quant, symmetric, 128) if exact else make_floats(m, k, dtype)
            if int8 and not exact:
                x[1::2, :: max(k // 3, 1)] *= 300  # outliers
            y = multiply(x, packed, act_quant=act_quant, act_symmetric=symmetric, out_dtype=FLOAT)
            want = oracle(x, qw, act_quant, symmetric)
            if exact:
                assert_same(y, want.float())
                continue
            assert_close(y, want)
            assert same_bits(multiply(x, packed, act_quant=act_quant, act_symmetric=symmetric, out_dtype=FLOAT), y)
            if int8:
                codes = co.quantize_activations(x, block_of(act_quant, fmt.group_size), symmetric)
                assert_close(multiply(codes, packed, out_dtype=FLOAT), want)


@pytest.mark.parametrize(("n", "k"), CUTS)
@pytest.mark.parametrize("dtype", [HALF, BFLOAT], ids=TYPE_NAMES.get)
@pytest.mark.parametrize(
    ("bits", "kind", "group_size"), [(4, "symmetric", 128), (4, "zeros", 256), (8, "symmetric", -1), (8, "zeros", 128)]
)
def test_small_batches_of_floats(bits: int, kind: str, group_size: int, dtype: torch.dtype, n: int, k: int) -> None:
    check_small_batches(Format(bits, kind, group_size, dtype), n, k, dtype, (1, 5, 9, 16, 24))


@pytest.mark.parametrize("dtype", [HALF, BFLOAT], ids=TYPE_NAMES.get)
@pytest.mark.parametrize(("kind", "group_size"), [("symmetric", 128), ("zeros", 256)])
def test_few_rows_of_floats_and_many_features(kind: str, group_size: int, dtype: torch.dtype) -> None:
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
def test_tiles_of_96_and_208_tokens_of_floats(bits: int, kind: str, group_size: int, dtype: torch.dtype) -> None:
    """On an H200 one wave, the last of whose features are none."""
    check_small_batches(Format(bits, kind, group_size, dtype), 16832, 392, dtype, (72, 96, 200, 208))


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
    bits: int, kind: str, group_size: int, scales: torch.dtype, act_quant: str, symmetric: bool, n: int, k: int
) -> None:
    check_small_batches(Format(bits, kind, group_size, scales), n, k, HALF, (1, 5, 9, 16, 24), act_quant, symmetric)


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
def test_tiles_of_144_int8_tokens(bits: int, kind: str, group_size: int, scales: torch.dtype, act_quant: str) -> None:
    """On an H200 one wave, the last of whose features are none."""
    check_small_batches(Format(bits, kind, group_size, scales), 16832, 392, HALF, (129, 144), act_quant)


@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize(("bits", "scales"), [(4, HALF), (8, BFLOAT), (8, FLOAT)])
@pytest.mark.parametrize(("n", "k", "ms"), [(16832, 392, (200, 256)), (17000, 4104, (1000,)), (4060, 28680, (200,))])
def test_block_m_256_of_int8(n: int, k: int, ms: tuple[int, ...], bits: int, scales: torch.dtype, symmetric: bool) -> None:
    """On an H200 one wave, the last of whose features are none; waves with a stream-K tail; and four split-K slices."""
    fmt = Format(bits, "symmetric", -1, scales)
    check_small_batches(fmt, n, k, HALF, ms, "token", symmetric)
    packed = co.reorder(make_weight(fmt, n, k, exact=False))
    for m in ms:
        x = make_floats(m, k, HALF)
        y = multiply(x, packed, act_quant="token", act_symmetric=symmetric, out_dtype=FLOAT)
        for out_dtype in (HALF, BFLOAT):
            rounded = multiply(x, packed, act_quant="token", act_symmetric=symmetric, out_dtype=out_dtype)
            assert same_bits(rounded, y.to(out_dtype))


@pytest.mark.parametrize("case", named(LARGE))
def test_large_shapes(case: Case) -> None:
    test_any_scales_within_tolerance(case)


@pytest.mark.parametrize("m", [4, 16])
@pytest.mark.parametrize(("bits", "scale_dtype"), [(8, FLOAT), (8, HALF), (4, HALF)])
def test_small_weights_and_floats_of_one_sign_keep_their_precision(bits: int, scale_dtype: torch.dtype, m: int) -> None:
    """Codes near zero: what a decoder adds to them and takes away again must not outweigh the result."""
    center = 2 ** (bits - 1)
    codes = torch.randint(center - bits // 4, center + bits // 4 + 1, (576, 4096), dtype=torch.uint8)
    scales = (torch.rand(576, 32) * 0.01 + 0.005).to(scale_dtype)
    weight = co.QuantizedWeight(codes, scales, None, None, bits=bits, group_size=128)
    x = torch.randn(m, 4096).abs().half().cuda()
    want = reference.mixed_gemm(x, weight.to("cuda"), out_dtype=FLOAT, compute_dtype=torch.float64).double()
    error = co.mixed_gemm(x, co.reorder(weight).to("cuda"), out_dtype=FLOAT).double() - want
    assert error.norm() <= 1e-6 * want.norm()


@pytest.mark.parametrize("m", [32, 64, 96, 128, 176])  # a kernel each, for as many rows as it wants
@pytest.mark.parametrize("act_quant", ["token", "block"])
@pytest.mark.parametrize("fmt", [Format(4), Format(8), Format(4, "zeros")], ids=str)
def test_zero_points_are_exact_with_weights_of_one_sign(fmt: Format, act_quant: str, m: int) -> None:
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
@pytest.mark.parametrize("bits", [4, 8])
def test_the_largest_integers_with_zero_points_are_exact(bits: int, m: int) -> None:
    """Codes 255 away from their zero points, and weights of the largest codes: sums reach 255 * 128 * 128, almost 2^22."""
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
def test_zero_points_keep_small_values_next_to_outliers(fmt: Format, act_quant: str, m: int) -> None:
    """Nearly all codes are the zero point or next to it: sums of codes are many times what is left without zero points."""
    qw = make_weight(fmt, 16896, 2048, exact=False)
    x = make_floats(m, 2048, HALF)
    x[:, 3::128] *= 100
    qw.codes[:, 3::128] = qw.zeros if fmt.kind == "zeros" else 1 << (fmt.bits - 1)  # they are zero except at the outliers
    y = multiply(x, co.reorder(qw), act_quant=act_quant, act_symmetric=False, out_dtype=FLOAT)
    assert_close(y, oracle(x, qw, act_quant, False))


# ---- zero points that are corrected for many blocks at once (csrc/include/cutlass_ops/zero_compensation.h)


@pytest.fixture
def hopper() -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("corrections are for sm_90a")


def corrects(m: int, packed: co.PackedWeight, act_quant: str) -> bool:
    return "correction" in co.explain(m, packed, act_quant, act_symmetric=False).why


@pytest.mark.usefixtures("hopper")
# Tiles of K: fewer than a window has; one window; one and one more tile; two windows of int4 and one of int8; short last ones.
# All tiles of tokens: 96, 128, 144 and 176. The K of the last is cut.
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
    assert corrects(m, packed, act_quant) == has_blocks
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
    ("k", "m"), [(130, 100), (576, 130), (1920, 400), (2176, 700), (4096, 65), (4224, 192), (4300, 200), (8320, 300)]
)
@pytest.mark.parametrize(
    "fmt",
    [Format(8, "zeros"), Format(8, "zeros", 256, BFLOAT), Format(8, "zeros", -1, FLOAT), Format(4, "zeros", 256, FLOAT)],
    ids=str,
)
def test_zero_points_of_weights_are_compensated(fmt: Format, k: int, m: int) -> None:
    block: dict[str, Any] = {"act_quant": "block"}
    if fmt.bits == 4:  # of fewer rows zero points are taken from the codes
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
    for x in (make_floats(m, k, HALF), make_floats(m, k, BFLOAT).abs() * 1e-3, make_floats(m, k, HALF).relu()):
        want = oracle(x, qw, "block")
        y = multiply(x, packed, **block)
        assert_close(y, want)
        assert same_bits(y, multiply(x, packed, **block))
        qa = co.quantize_activations(x, 128)
        assert same_bits(y, co.mixed_gemm(qa, packed))
        residual = make_floats(m, 17000, FLOAT)
        y = multiply(x, packed, activation="relu", residual=residual, **block)
        assert_close(y, want.relu() + residual.double())
    for other in ({"out_dtype": FLOAT}, {"batch_invariant": True}, {"exact": True}, {"act_quant": "token"}):
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
    opposite = qw.codes[:, ::128].int().clamp(min=1)  # and what the others are multiplied by adds up to nothing
    qw.codes[:, ::128], qw.codes[:, 1::128] = opposite, (1 << bits) - opposite
    packed = co.reorder(qw)
    assert corrects(m, packed, act_quant)
    want = oracle(x, qw, act_quant, False)
    y = multiply(x, packed, act_quant=act_quant, act_symmetric=False, out_dtype=HALF).double()
    # What zero points come to where all weights of a row have one sign; sums of random ones come to a sixtieth.
    most = 30 / 255 * 128 * reference.dequantize_weight(qw, torch.float64).abs().sum(1).max()
    assert (y - want).abs().max() <= 2.0**-10 * want.abs().max() + 3e-8 * most


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("act_quant", ["token", "block"])
def test_corrections_with_rows_of_nan(act_quant: str) -> None:
    packed = co.reorder(make_weight(Format(8), 17000, 4096, exact=False))
    assert corrects(300, packed, act_quant)
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
    y = co.mixed_gemm(x, packed, act_quant=act_quant, act_symmetric=symmetric, residual=x.new_empty(*shape[:-1], 192))
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
        # Where weights may be rounded they are rounded once, from a value that is not itself rounded to fp32.
        whole = reference.dequantize_weight(qw, torch.float64).t()[rows]
        half_unit = {HALF: 2.0**-11, BFLOAT: 2.0**-8}[dtype]
        assert ((multiply(hot[rows], packed).double() - whole).abs() <= half_unit * 1.001 * whole.abs() + 2.0**-25).all()


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
            zeros=None if symmetric else torch.full((blocks, stride), zero, dtype=torch.int8, device=GPU),
            block=block,
            k=k,
            shape=torch.Size((m, k)),
            dtype=FLOAT,
            perm=None,
        )
        assert_same(multiply(qa, packed), values[rows])


@pytest.mark.parametrize("scale_dtype", [HALF, BFLOAT, FLOAT], ids=TYPE_NAMES.get)
@pytest.mark.parametrize("group_size", [32, 64, 128, 256, -1])
@pytest.mark.parametrize("kind", ["symmetric", "zeros", "offsets"])
@pytest.mark.parametrize("bits", [4, 8])
def test_dequantize_is_the_reference_bit_for_bit(bits: int, kind: str, group_size: int, scale_dtype: torch.dtype) -> None:
    for n, k in ((192, 576), (1000, 100), (33, 7)):
        for perm in (False, True):
            qw = make_weight(Format(bits, kind, group_size, scale_dtype), n, k, exact=False, perm=perm)
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


# ---- the quantiser


def special_rows(k: int, dtype: torch.dtype) -> Tensor:
    """Rows that quantisers get wrong, on the CPU; each is also the pattern of its blocks."""
    rng = torch.Generator().manual_seed(k)
    info = torch.finfo(dtype)
    plain = torch.randn(k, generator=rng)
    ramp = torch.linspace(-1, 1, k)
    rows = [
        plain,
        plain * 1000,
        torch.zeros(k),
        -torch.zeros(k),
        torch.full((k,), 3.7),
        torch.full((k,), -0.1),
        plain.abs(),
        -plain.abs(),
        torch.randint(-127, 128, (k,), generator=rng) * 0.5,  # ties
        torch.randint(0, 511, (k,), generator=rng) * 0.5,
        ramp * info.max,  # hi - lo overflows for bf16 and fp32
        ramp * info.max / 2,
        plain * info.tiny,  # subnormal
        ramp * 2.0**-100,
        ramp * 2.0**-101,
        torch.where(torch.arange(k) % 37 == 3, 1e4, plain),
        torch.where(torch.arange(k) == k // 2, NAN, plain),
        torch.where(torch.arange(k) == k - 1, INF, plain),
        torch.where(torch.arange(k) == 0, -INF, plain),
        torch.where(torch.arange(k) < k // 2, NAN, 0.0),
    ]
    return torch.stack([row.float() for row in rows]).to(dtype)


def assert_quantized_as_on_the_cpu(x: Tensor, on_cpu: Tensor, block: int, symmetric: bool, perm: Tensor | None = None) -> None:
    m, k = on_cpu.shape
    k_pad = formats.padded_k(k)
    poison(m * k_pad, (k_pad // 32) * (m + 15) * 4)
    qa = co.quantize_activations(x, block, symmetric, perm)
    cpu = co.quantize_activations(on_cpu, block, symmetric, None if perm is None else perm.cpu())
    assert_same(qa.scales[:, :m].cpu(), cpu.scales[:, :m])
    if symmetric:
        assert qa.zeros is None
    else:
        assert qa.zeros is not None
        assert cpu.zeros is not None
        assert_same(qa.zeros[:, :m].cpu(), cpu.zeros[:, :m])
    assert_same(qa.codes.cpu(), cpu.codes)  # with the padding
    assert (qa.block, qa.k, qa.shape, qa.dtype) == (block, k, x.shape, x.dtype)
    # And what the specification says, not only what the CPU path makes of it.
    codes, scales, zeros = reference.quantize_activations(
        on_cpu if perm is None else on_cpu[:, perm.cpu().long()], block, symmetric
    )
    got = qa.natural()
    assert_same(got[0].cpu(), codes)
    assert_same(got[1].cpu(), scales)
    if zeros is not None:
        assert got[2] is not None
        assert_same(got[2].cpu(), zeros)


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("block", [32, 64, 128, -1])
@pytest.mark.parametrize("dtype", [HALF, BFLOAT, FLOAT], ids=TYPE_NAMES.get)
def test_quantizer_is_the_reference_bit_for_bit(dtype: torch.dtype, block: int, symmetric: bool) -> None:
    for k in (576, 128, 100, 33, 7, 1, 4224):  # 4224: a token's range and codes are two passes
        on_cpu = special_rows(k, dtype)
        assert_quantized_as_on_the_cpu(on_cpu.to(GPU), on_cpu, block, symmetric)


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("block", [32, 128, -1])
@pytest.mark.parametrize("dtype", [HALF, BFLOAT, FLOAT], ids=TYPE_NAMES.get)
def test_quantizer_rounds_every_value_as_the_reference(dtype: torch.dtype, block: int, symmetric: bool) -> None:
    # Many ranges and values: a reciprocal or product that is fused or approximate shows in some of them.
    rng = torch.Generator().manual_seed(3)
    on_cpu = (torch.randn(300, 1536, generator=rng) * torch.rand(300, 1, generator=rng).exp2() * 3).to(dtype)
    assert_quantized_as_on_the_cpu(on_cpu.to(GPU), on_cpu, block, symmetric)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "padded rows": lambda x: torch.nn.functional.pad(x, (0, 16), value=NAN)[:, : x.shape[1]],
    "misaligned start": lambda x: torch.nn.functional.pad(x, (3, 13), value=NAN)[:, 3 : 3 + x.shape[1]],
    "odd stride": lambda x: torch.nn.functional.pad(x, (0, 5), value=NAN)[:, : x.shape[1]],
    "every other row": lambda x: torch.stack([x, torch.full_like(x, NAN)], 1).flatten(0, 1)[::2],
    "transposed": lambda x: x.t().contiguous().t(),
    "every other column": lambda x: torch.stack([x, torch.full_like(x, NAN)], 2).flatten(1)[:, ::2],
    "expanded": lambda x: x[:1].expand(x.shape[0], -1),
    "three dimensions, transposed": lambda x: x.view(2, -1, x.shape[1]).transpose(0, 1).contiguous().transpose(0, 1),
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("k", [576, 100, 7])
def test_quantizer_reads_strided_rows(k: int, view: str) -> None:
    for dtype in (HALF, FLOAT):
        x = VIEWS[view](make_floats(10, k, dtype))
        for block in (32, 128, -1):
            for symmetric in (True, False):
                qa = co.quantize_activations(x, block, symmetric)
                plain = co.quantize_activations(x.reshape(-1, k).cpu(), block, symmetric)
                assert_same(qa.codes.cpu(), plain.codes)
                assert_same(qa.scales[:, :10].cpu(), plain.scales[:, :10])


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("block", [32, 64, 128, -1])
def test_quantizer_gathers_in_act_order(block: int, symmetric: bool) -> None:
    for k in (576, 100, 4224):
        perm = torch.randperm(k, generator=generator(k), device=GPU).int()
        on_cpu = special_rows(k, HALF)
        assert_quantized_as_on_the_cpu(on_cpu.to(GPU), on_cpu, block, symmetric, perm)


def assert_same_activations(found: co.QuantizedActivations, expected: co.QuantizedActivations) -> None:
    m = math.prod(expected.shape[:-1])
    assert (found.block, found.k, found.shape, found.dtype) == (expected.block, expected.k, expected.shape, expected.dtype)
    assert_same(found.codes, expected.codes)  # with the padding
    assert_same(found.scales[:, :m], expected.scales[:, :m])
    assert (found.zeros is None) == (expected.zeros is None)
    if found.zeros is not None and expected.zeros is not None:
        assert_same(found.zeros[:, :m], expected.zeros[:, :m])


#: M, K: rows that are one piece a lane, several, too long for the registers, and of columns that vectors do not fit.
FUSED_SHAPES = ((1, 576), (300, 4096), (5, 8192), (700, 1040), (3, 17408), (2, 30000), (9, 100), (2, 7))


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("block", [32, 128, -1])
@pytest.mark.parametrize("dtype", [HALF, BFLOAT, FLOAT], ids=TYPE_NAMES.get)
def test_fused_quantisers_are_the_unfused_ones_bit_for_bit(dtype: torch.dtype, block: int, symmetric: bool) -> None:
    for m, k in FUSED_SHAPES:
        x, other = make_floats(m, k, dtype), make_floats(m + 1, k, dtype)[1:]
        x[0, : k // 3] *= 50
        x[m // 2] = x[m // 2] * 1e-4 if m > 1 else x[0]
        weight = make_floats(1, k, dtype)[0]
        for perm in (None, torch.randperm(k, generator=generator(k), device=GPU).int()):
            options: dict[str, Any] = {"block": block, "symmetric": symmetric, "perm": perm}
            y, _ = reference.rms_norm(x, weight, 1e-6)
            poison(m * formats.padded_k(k))
            assert_same_activations(co.rms_norm_quantize(x, weight, **options), co.quantize_activations(y, **options))
            y, total = reference.rms_norm(x, weight, 1e-5, other)
            qa, stream = co.rms_norm_quantize(x, weight, 1e-5, other, **options)
            assert_same(stream, total)
            assert_same_activations(qa, co.quantize_activations(y, **options))
            # A CPU finds the same bits: the order of the sum is part of the specification.
            on_cpu, total_on_cpu = reference.rms_norm(x.cpu(), weight.cpu(), 1e-5, other.cpu())
            assert_same(stream.cpu(), total_on_cpu)
            assert_same(y.cpu(), on_cpu)
            y = reference.silu_mul(x, other)
            assert_same_activations(co.silu_mul_quantize(x, other, **options), co.quantize_activations(y, **options))


@pytest.mark.parametrize("symmetric", [True, False], ids=["sym", "asym"])
@pytest.mark.parametrize("block", [64, 128, -1])
def test_an_x_that_leaves_the_cache_first_is_quantised_as_its_parts_are(block: int, symmetric: bool) -> None:
    m, k = 1700, 4096
    x, other, weight = make_floats(m, k, HALF), make_floats(m + 1, k, HALF)[1:], make_floats(1, k, HALF)[0]
    options: dict[str, Any] = {"block": block, "symmetric": symmetric}
    functions: list[Callable[[Tensor, Tensor], co.QuantizedActivations]] = [
        lambda x, other: co.quantize_activations(x, **options),
        lambda x, other: co.silu_mul_quantize(x, other, **options),
        lambda x, other: co.rms_norm_quantize(x, weight, 1e-6, other, **options)[0],
    ]
    for quantize in functions:
        whole = quantize(x, other)
        parts = [quantize(*rows) for rows in zip(x.split(m // 2), other.split(m // 2), strict=True)]
        for found, *expected in zip(whole.natural(), *(part.natural() for part in parts), strict=True):
            if found is not None:
                assert_same(found, torch.cat(expected))


@pytest.mark.parametrize("dtype", [HALF, BFLOAT], ids=TYPE_NAMES.get)
def test_silu_of_every_value(dtype: torch.dtype) -> None:
    values = torch.arange(-(1 << 15), 1 << 15, device=GPU, dtype=torch.int16).view(dtype)
    gate = torch.where(values.isfinite(), values, 0.0).view(-1, 32)
    for up in (torch.ones_like(gate), make_floats(*gate.shape, dtype)):
        for symmetric in (True, False):
            y = torch.nn.functional.silu(gate) * up  # what models compute
            assert_same_activations(co.silu_mul_quantize(gate, up, 32, symmetric), co.quantize_activations(y, 32, symmetric))


@pytest.mark.parametrize("block", [64, -1])
def test_fused_quantisers_let_no_nan_pass_for_a_number(block: int) -> None:
    for k in (576, 100):
        for bad in (NAN, INF, -INF):
            x, other, weight = make_floats(6, k, HALF), make_floats(7, k, HALF)[:6], make_floats(1, k, HALF)[0]
            x[1, 3] = bad
            other[4, k - 1] = bad
            norm, total = reference.rms_norm(x, weight, 1e-6, other)
            qa, stream = co.rms_norm_quantize(x, weight, 1e-6, other, block)
            assert_same(stream, total)
            assert_same_activations(qa, co.quantize_activations(norm, block))
            assert_same_activations(
                co.silu_mul_quantize(x, other, block), co.quantize_activations(reference.silu_mul(x, other), block)
            )


def test_fused_quantisers_read_strided_rows_and_both_halves_of_one_product() -> None:
    for k in (576, 100):
        both = make_floats(10, 2 * k, HALF)
        gate, up = both.chunk(2, -1)
        y = reference.silu_mul(gate.contiguous(), up.contiguous())
        assert_same_activations(co.silu_mul_quantize(gate, up), co.quantize_activations(y))
        for view in VIEWS:
            x, other = VIEWS[view](make_floats(10, k, HALF)), VIEWS[view](make_floats(20, k, HALF)[10:])
            weight = make_floats(1, k, HALF)[0]
            norm, total = reference.rms_norm(x.reshape(-1, k), weight, 1e-6, other.reshape(-1, k))
            qa, stream = co.rms_norm_quantize(x, weight, 1e-6, other)
            assert_same(stream, total.view(x.shape))
            assert_same_activations(qa, co.quantize_activations(norm.view(x.shape)))


@pytest.mark.parametrize("m", [17, 33, 129, 200, 300, 513])
@pytest.mark.parametrize("block", [128, -1])
@pytest.mark.parametrize("fmt", [Format(4), Format(8), Format(8, group_size=-1)], ids=str)
def test_what_lies_behind_the_last_row_changes_nothing(fmt: Format, block: int, m: int) -> None:
    n, k = 4096, 1024
    packed = co.reorder(make_weight(fmt, n, k, exact=False))
    for symmetric in (True, False):
        qa = co.quantize_activations(make_floats(m, k, HALF), block, symmetric)
        rows = qa.codes.untyped_storage().nbytes() // k
        assert rows == (m if m > 512 else 1 << (m - 1).bit_length())
        alone = co.mixed_gemm(replace(qa, codes=qa.codes.clone()), packed)
        for left in (0, -128, 127):
            qa.codes.as_strided((rows, k), (k, 1))[m:] = left
            assert_same(multiply(qa, packed), alone)


# ---- operands of other forms


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("activations", ACTIVATION_KINDS)
def test_products_of_strided_operands(activations: str, view: str) -> None:
    act_quant, symmetric = ACTIVATION_KINDS[activations]
    for k in (576, 100):
        # Offsets: one kernel for every view of x.
        packed = co.reorder(make_weight(Format(4, "offsets", 32), 200, k, exact=False))
        for m in (10, 70):
            x = VIEWS[view](make_floats(m, k, HALF))
            residual = VIEWS[view](make_floats(m, 200, BFLOAT))
            options: dict[str, Any] = {"act_quant": act_quant, "act_symmetric": symmetric}
            y = multiply(x, packed, residual=residual, **options)
            assert y.shape == (*x.shape[:-1], 200)
            clone = x.reshape(-1, k).clone()
            copied = multiply(clone, packed, residual=residual.reshape(-1, 200).clone(), **options)
            # A kernel that quantises x itself may cut K in another way than after the quantiser.
            if co.explain(x, packed, **options).launches == co.explain(clone, packed, **options).launches:
                assert same_bits(y.view(-1, 200), copied)
            else:
                assert_close(y.view(-1, 200), copied.double(), rounded=True)


#: Of x [8, K]: what _C.product takes as it is, and what it leaves to be copied.
SHAPED = {
    "vector": (lambda x: x[3], True),
    "one row": (lambda x: x[5:6], True),
    "three dimensions": (lambda x: x.view(2, 4, -1), True),
    "ones among them": (lambda x: x.view(1, 2, 1, 4, 1, -1), True),
    "every other row": (lambda x: x.view(2, 4, -1)[:, ::2], True),
    "last rows": (lambda x: x.view(2, 4, -1)[:, -1:], True),
    "the same row": (lambda x: x[2].expand(3, -1), False),
    "overlapping rows": (lambda x: x.view(-1).as_strided((3, x.shape[1]), (x.shape[1] // 2, 1)), False),
    "part of both dimensions": (lambda x: x.view(2, 4, -1)[:, :3], False),
    "transposed": (lambda x: x.view(2, 4, -1).transpose(0, 1), False),
    "columns apart": (lambda x: x.t().contiguous().t(), False),
}


@pytest.mark.parametrize("shaped", SHAPED)
@pytest.mark.parametrize("activations", ACTIVATION_KINDS)
def test_plain_products_are_those_of_every_other_call(activations: str, shaped: str) -> None:
    act_quant, symmetric = ACTIVATION_KINDS[activations]
    options: dict[str, Any] = {"act_quant": act_quant, "act_symmetric": symmetric}
    view, taken = SHAPED[shaped]
    packed = co.reorder(make_weight(Format(), 200, 576, exact=False, bias=True))
    for dtype in (HALF, BFLOAT, FLOAT)[: 2 if act_quant == "none" else 3]:
        x = view(make_floats(8, 576, dtype))
        assert (_C.product(packed.native, x, act_quant, symmetric) is not None) == taken
        y = co.mixed_gemm(x, packed, **options)
        assert (y.shape, y.dtype) == ((*x.shape[:-1], 200), dtype)
        assert same_bits(y, co.mixed_gemm(x, packed, **options, out_dtype=dtype))


def test_the_fast_path_returns_none_for_wrong_arguments() -> None:
    packed = co.reorder(make_weight(Format(), 200, 576, exact=False))
    x = make_floats(3, 576, HALF)
    other = co.reorder(make_weight(Format(), 200, 576, exact=False).to("cpu"))
    assert _C.product(packed.native, x, "none", True) is not None
    for weight, bad, act_quant, symmetric in (
        (packed, x[:, :-1], "none", True),
        (packed, x[:0], "none", True),
        (packed, x[0, 0], "none", True),
        (packed, x.cpu(), "none", True),
        (packed, x.float(), "none", True),
        (packed, x.double(), "block", True),
        (packed, x, "row", True),
        (packed, x, None, True),
        (packed, x, "block", 1),
        (other, x.cpu(), "none", True),
    ):
        assert _C.product(weight.native, bad, act_quant, symmetric) is None


@pytest.mark.parametrize("m", [3, 20, 40, 70])
@pytest.mark.parametrize("activations", ACTIVATION_KINDS)
@pytest.mark.parametrize("bits", [4, 8])
def test_act_order(bits: int, activations: str, m: int) -> None:
    act_quant, symmetric = ACTIVATION_KINDS[activations]
    for k in (576, 100):
        qw = make_weight(Format(bits, "zeros", 64), 200, k, exact=False, perm=True)
        packed = co.reorder(qw)
        x = make_floats(m, k, HALF)
        y = multiply(x, packed, act_quant=act_quant, act_symmetric=symmetric, out_dtype=FLOAT)
        assert_close(y, oracle(x, qw, act_quant, symmetric))
        if act_quant != "none":
            qa = co.quantize_activations(x, block_of(act_quant, 64), symmetric, packed.perm)
            assert same_bits(multiply(qa, packed, out_dtype=FLOAT), y)


# ---- options

EPILOGUES: dict[Any, Callable[[Tensor], Tensor]] = {
    None: lambda v: v,
    "relu": lambda v: v.clamp(min=0),
    "relu6": lambda v: v.clamp(0, 6),
    "gelu": torch.nn.functional.gelu,
    "silu": torch.nn.functional.silu,
    ("clamp", -1.5, 0.25): lambda v: v.clamp(-1.5, 0.25),
}


@pytest.mark.parametrize("n", [192, 33])  # whole and broken 16-byte stores
@pytest.mark.parametrize("out_dtype", [HALF, BFLOAT, FLOAT], ids=TYPE_NAMES.get)
@pytest.mark.parametrize("activations", ["floats", "block"])
@pytest.mark.parametrize("activation", EPILOGUES, ids=str)
def test_bias_then_activation_then_residual(activation: Any, activations: str, out_dtype: torch.dtype, n: int) -> None:
    act_quant, _ = ACTIVATION_KINDS[activations]
    for m, k in ((3, 576), (70, 100)):  # K in several parts, and one tile of K, which cannot be split
        qw = make_weight(Format(), n, k, exact=False)
        packed = co.reorder(qw)
        x = make_floats(m, k, HALF)
        x = (x / oracle(x, qw, act_quant).std()).to(HALF)  # sums of about 1: where activations bend
        total = oracle(x, qw, act_quant)
        for bias_dtype, residual_dtype in ((HALF, FLOAT), (BFLOAT, HALF), (FLOAT, BFLOAT), (None, HALF), (HALF, None)):
            bias = None if bias_dtype is None else make_floats(1, n, bias_dtype)[0]
            residual = None if residual_dtype is None else make_floats(m, n, residual_dtype)
            y = multiply(
                x, packed, bias=bias, activation=activation, act_quant=act_quant, residual=residual, out_dtype=out_dtype
            )
            exact = EPILOGUES[activation](total if bias is None else total + bias.double())
            assert_close(y, exact if residual is None else exact + residual.double())


def test_the_weights_own_bias() -> None:
    qw = make_weight(Format(), 192, 576, exact=False, bias=True)
    assert qw.bias is not None
    x = make_floats(5, 576, HALF)
    assert_close(multiply(x, co.reorder(qw), out_dtype=FLOAT), oracle(x, qw) + qw.bias.double())


@pytest.mark.parametrize("m", [1, 300])
@pytest.mark.parametrize("n", [192, 33])
def test_overflow_is_infinite_or_saturates(n: int, m: int) -> None:
    codes = torch.zeros(n, 128, dtype=torch.uint8, device=GPU) + 8
    codes[::2, 0], codes[1::2, 0] = 9, 7  # one and minus one
    scales = torch.full((n, 1), 2.0, device=GPU)
    packed = co.reorder(co.QuantizedWeight(codes, scales, group_size=-1))
    sign = torch.where(torch.arange(n, device=GPU) % 2 == 0, 1.0, -1.0).expand(m, n)
    x = torch.zeros(m, 128, dtype=HALF, device=GPU)
    x[:, 0] = 40000
    for act_quant in ("none", "block"):
        assert_same(multiply(x, packed, act_quant=act_quant), (sign * INF).half())
        assert_same(multiply(x, packed, act_quant=act_quant, saturate=True), (sign * 65504).half())
        assert_same(multiply(x, packed, act_quant=act_quant, saturate=True, out_dtype=FLOAT).sign(), sign)
    for dtype in (BFLOAT, FLOAT):
        largest = torch.finfo(dtype).max
        residual = sign * largest
        wide = torch.zeros(m, 128, dtype=BFLOAT, device=GPU)
        wide[:, 0] = 2.0**126
        assert_same(multiply(wide, packed, residual=residual, out_dtype=dtype), (sign * INF).to(dtype))
        assert_same(multiply(wide, packed, residual=residual, out_dtype=dtype, saturate=True), residual.to(dtype))
    # NaN is not saturated away.
    x[:, 1] = NAN
    assert multiply(x, packed, saturate=True).isnan().all()


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("activation", [None, "relu", "relu6", "gelu", "silu", ("clamp", -1.0, 1.0)], ids=str)
@pytest.mark.parametrize("activations", ACTIVATION_KINDS)
def test_a_row_with_nan_or_infinity_is_nan_and_no_other(activations: str, activation: Any, bad: float) -> None:
    act_quant, symmetric = ACTIVATION_KINDS[activations]
    options: dict[str, Any] = {"activation": activation, "act_quant": act_quant, "act_symmetric": symmetric}
    for fmt in (Format(4), Format(8, "zeros", 32), Format(4, "offsets", 64)):
        packed = co.reorder(make_weight(fmt, 192, 576, exact=False))
        for m in (4, 70):
            x = make_floats(m, 576, HALF)
            clean = multiply(x, packed, **options)
            for column in (0, 131, 575):
                spoilt = x.clone()
                spoilt[m // 2, column] = bad
                y = multiply(spoilt, packed, **options)
                assert y[m // 2].isnan().all()
                others = torch.arange(m, device=GPU) != m // 2
                assert same_bits(y[others], clean[others])


# ---- the same bits every time; streams; graphs; devices

RUNS = [
    pytest.param(Format(bits, kind, group_size), activations, m, id=f"w{bits}-{kind}-g{group_size}-{activations}-m{m}")
    for bits, kind, group_size in ((4, "symmetric", 128), (4, "zeros", 32), (8, "offsets", 128))
    for activations in ("floats", "token", "block-asym")
    for m in (1, 40, 300)
]


@pytest.mark.parametrize(("fmt", "activations", "m"), RUNS)
def test_every_run_and_every_stream_give_the_same_bits(fmt: Format, activations: str, m: int) -> None:
    act_quant, symmetric = ACTIVATION_KINDS[activations]
    packed = co.reorder(make_weight(fmt, 1000, 1536, exact=False))
    x = make_floats(m, 1536, HALF)
    options: dict[str, Any] = {"act_quant": act_quant, "act_symmetric": symmetric, "out_dtype": FLOAT}
    first = multiply(x, packed, **options)
    assert not first.isnan().any()
    for _ in range(5):
        assert same_bits(multiply(x, packed, **options), first)
    streams = [torch.cuda.Stream() for _ in range(3)]
    found = []
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found.append(co.mixed_gemm(x, packed, **options))
    torch.cuda.synchronize()
    for y in found:
        assert same_bits(y, first)


@pytest.mark.parametrize("activations", ACTIVATION_KINDS)
def test_runs_on_the_current_stream(activations: str) -> None:
    act_quant, symmetric = ACTIVATION_KINDS[activations]
    packed = co.reorder(make_weight(Format(), 192, 576, exact=False))
    x = make_floats(5, 576, HALF)
    expected = co.mixed_gemm(x, packed, act_quant=act_quant, act_symmetric=symmetric)
    late = torch.full_like(x, NAN)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # some 10 ms in which any other stream would read NaN
        late.copy_(x)
        y = co.mixed_gemm(late, packed, act_quant=act_quant, act_symmetric=symmetric)
        late.fill_(NAN)  # and after the product, not before
    stream.synchronize()
    assert same_bits(y, expected)


# decode_gemm (3) and wgmma_decode (16) read weights before they wait for their predecessor, and the quantiser of 16 tokens lets
# its successor start before it waits itself; M = 40 has split-K slices and splitk_reduce.
@pytest.mark.parametrize(
    ("m", "act_quant"),
    [(3, "block"), (16, "none"), (16, "block"), (16, "token"), (17, "block"), (40, "block"), (40, "none")],
)
def test_back_to_back_products_that_feed_each_other(m: int, act_quant: str) -> None:
    # Kernels may start before their predecessor ends (programmatic dependent launch); they must still read what it wrote.
    packed = co.reorder(make_weight(Format(8, "symmetric", 128), 1536, 1536, exact=False))
    options: dict[str, Any] = {"act_quant": act_quant, "activation": ("clamp", -2.0, 2.0)}

    def chain(pause: bool) -> Tensor:
        y = make_floats(m, 1536, HALF)
        for _ in range(20):
            y = co.mixed_gemm(y, packed, residual=y, **options)
            if pause:
                torch.cuda.synchronize()
        return y

    assert same_bits(chain(pause=False), chain(pause=True))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("activations", ACTIVATION_KINDS)
def test_never_synchronizes(activations: str) -> None:
    act_quant, symmetric = ACTIVATION_KINDS[activations]
    packed = co.reorder(make_weight(Format(4, "zeros", 32), 200, 700, exact=False))
    x = make_floats(5, 700, HALF)
    bias = make_floats(1, 200, HALF)[0]
    torch.cuda.set_sync_debug_mode("error")
    try:
        co.mixed_gemm(x, packed, bias, "silu", act_quant, symmetric)
        if act_quant != "none":
            co.mixed_gemm(co.quantize_activations(x, block_of(act_quant, 32), symmetric), packed)
        co.dequantize(packed)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("group_size", [32, 128, -1])
@pytest.mark.parametrize("kind", ["symmetric", "zeros", "offsets"])
@pytest.mark.parametrize("bits", [4, 8])
def test_fp32_as_it_is(bits: int, kind: str, group_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In panels, with the epilogue of every other product, captured in a CUDA graph, and with gradients."""
    n, k = 200, 576
    monkeypatch.setattr(gemm, "_PANEL_VALUES", 70 * k)
    for perm in (False, True):
        qw = make_weight(Format(bits, kind, group_size), n, k, exact=False, bias=True, perm=perm)
        packed = co.reorder(qw)
        for m in (0, 1, 17, 300):
            x = make_floats(m, k, FLOAT)
            y = multiply(x, packed)
            assert y.dtype == FLOAT
            assert qw.bias is not None
            if m:
                assert_close(y, oracle(x, qw) + qw.bias.double())
    residual = make_floats(300, n, HALF)
    y = co.mixed_gemm(x, packed, activation="silu", residual=residual, out_dtype=BFLOAT)
    z = oracle(x, qw) + qw.bias.double()
    assert_close(y, z * z.sigmoid() + residual.double())
    x[3, 5] = NAN
    assert co.mixed_gemm(x, packed).isnan().all(1).nonzero().tolist() == [[3]]
    wide = torch.zeros(7, 2 * k, device=GPU)
    wide[:, :k] = make_floats(7, k, FLOAT)
    assert same_bits(co.mixed_gemm(wide[:, :k], packed), co.mixed_gemm(wide[:, :k].contiguous(), packed))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = co.mixed_gemm(x, packed)
    x.copy_(make_floats(300, k, FLOAT) * 2)
    graph.replay()
    assert same_bits(captured, co.mixed_gemm(x, packed))
    assert co.explain(x, packed).launches == ("dequantize",)


@pytest.mark.parametrize("book", ["nf4", "mxfp4"])
def test_fp32_as_it_is_with_a_code_book(book: str) -> None:
    qw = co.quantize(torch.randn(200, 576, generator=generator(3), device=GPU), 4, 32, book=book)
    x = make_floats(17, 576, FLOAT)
    assert_close(multiply(x, co.reorder(qw)), oracle(x, qw))


@pytest.mark.parametrize("m", [1, 300])
@pytest.mark.parametrize("activations", ACTIVATION_KINDS)
def test_graph_capture_and_replay_with_new_inputs(activations: str, m: int) -> None:
    act_quant, symmetric = ACTIVATION_KINDS[activations]
    packed = co.reorder(make_weight(Format(4, "zeros", 64), 576, 1536, exact=False))
    bias = make_floats(1, 576, HALF)[0]
    x = make_floats(m, 1536, HALF)
    residual = make_floats(m, 576, HALF)

    def run() -> tuple[Tensor, Tensor]:
        y = co.mixed_gemm(x, packed, bias, "silu", act_quant, symmetric, residual=residual)
        if act_quant == "none":
            return y, co.dequantize(packed)
        qa = co.quantize_activations(x, block_of(act_quant, 64), symmetric)
        return y, co.mixed_gemm(qa, packed, bias, "silu", residual=residual)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for seed in range(3):
        x.copy_(torch.randn(m, 1536, generator=generator(seed), device=GPU))
        residual.copy_(torch.randn(m, 576, generator=generator(seed, 1), device=GPU))
        for y in captured:
            y.fill_(NAN)
        graph.replay()
        for got, expected in zip(captured, run(), strict=True):
            assert same_bits(got, expected)


@pytest.mark.parametrize("act_quant", ["none", "block"])
@pytest.mark.parametrize(("n", "k"), [(17152, 2048), (27136, 8192)])
def test_replays_of_split_k_tiles(n: int, k: int, act_quant: str) -> None:
    # A replay finds in the workspace what the one before left there, and must wait for its split-K slices. On 66 clusters the
    # tail is one tile, or 40, whose last slices are computed two by a cluster.
    packed = co.reorder(make_weight(Format(8), n, k, exact=False))
    if co.explain(100, packed, act_quant).tail_tiles == 0:
        pytest.skip("this GPU's waves leave no tiles over")
    x = make_floats(100, k, HALF)
    assert_close(co.mixed_gemm(x, packed, act_quant=act_quant), oracle(x, packed.unpack(), act_quant))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        co.mixed_gemm(x, packed, act_quant=act_quant)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = co.mixed_gemm(x, packed, act_quant=act_quant)
    for seed in range(5):
        x.copy_(torch.randn(100, k, generator=generator(seed), device=GPU))
        graph.replay()
        got = y.clone()
        assert same_bits(got, co.mixed_gemm(x, packed, act_quant=act_quant))


def test_two_devices() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU")
    qw = make_weight(Format(4, "zeros", 32), 200, 700, exact=False)
    x = make_floats(5, 700, HALF)
    expected = {act: co.mixed_gemm(x, co.reorder(qw), act_quant=act) for act in ("none", "token", "block")}
    packed = co.reorder(qw).to("cuda:1")
    assert torch.cuda.current_device() == 0
    for act, y in expected.items():
        other = co.mixed_gemm(x.to("cuda:1"), packed, act_quant=act)
        assert other.device == torch.device("cuda:1")
        assert torch.equal(other.cpu(), y.cpu())
    assert torch.equal(co.dequantize(packed).cpu(), co.dequantize(co.reorder(qw)).cpu())
    assert torch.cuda.current_device() == 0
    with pytest.raises(ValueError, match="x is on cuda:0; the weight is on cuda:1"):
        co.mixed_gemm(x, packed)


# ---- torch.library and torch.compile


@pytest.mark.parametrize("activations", ACTIVATION_KINDS)
def test_compile_with_any_number_of_rows(activations: str) -> None:
    act_quant, symmetric = ACTIVATION_KINDS[activations]
    first = co.reorder(make_weight(Format(4, "zeros", 64), 576, 576, exact=False, bias=True))
    second = co.reorder(make_weight(Format(8, "offsets", 64), 192, 576, exact=False))

    def layer(x: Tensor) -> Tensor:
        y = co.mixed_gemm(x, first, activation="silu", act_quant=act_quant, act_symmetric=symmetric, residual=x)
        if act_quant == "none":
            return co.mixed_gemm(y, second, out_dtype=FLOAT)
        qa = co.quantize_activations(y, block_of(act_quant, 64), symmetric)
        return co.mixed_gemm(qa, second, out_dtype=FLOAT)

    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        from torch._dynamo.backends.debugging import aot_eager

        graphs.append(graph)
        return aot_eager(graph, inputs)

    run = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    for m in (5, 3, 33, 300):
        x = make_floats(m, 576, HALF)
        assert same_bits(run(x), layer(x))
    assert len(graphs) == 1


def opcheck_samples() -> Iterator[tuple[Any, tuple[Any, ...]]]:
    library = torch.ops.cutlass_ops
    packed = co.reorder(make_weight(Format(4, "zeros", 64), 200, 700, exact=False, perm=True))
    parts = (packed.codes, packed.scales, packed.zeros, packed.offsets, packed.bias, packed.perm)
    fields = (*parts, packed.n, packed.k, packed.bits, packed.group_size, packed.book)
    x = make_floats(5, 700, HALF)
    bias, residual = make_floats(1, 200, FLOAT)[0], make_floats(5, 200, HALF)
    qa = co.quantize_activations(x, 64, False, packed.perm)
    yield library.mixed_gemm, (x, *fields, None, None, 0.0, 0.0, None, FLOAT, False, "none", True, False, 0, False)
    yield library.mixed_gemm, (x, *fields, bias, "clamp", -1.0, 1.0, residual, BFLOAT, True, "block", False, True, 80, False)
    end = (bias, "silu", 0.0, 0.0, residual, HALF, False, False, 0, False)
    yield library.gemm_quantized, (qa.codes, qa.scales, qa.zeros, 64, qa.dtype, *fields, *end)
    # The padding of scales is not written: it is as long as the result needs, whatever it holds.
    yield library.quantize_activations, (make_floats(16, 700, HALF), packed.perm, 64, False)
    yield library.rms_norm_quantize, (make_floats(16, 640, HALF), make_floats(1, 640, HALF)[0], 1e-6, None, None, 64, False)
    total = (make_floats(16, 700, HALF), make_floats(1, 700, HALF)[0], 1e-6, make_floats(16, 700, HALF), packed.perm, -1, True)
    yield library.rms_norm_quantize, total
    yield library.silu_mul_quantize, (make_floats(16, 640, HALF), make_floats(16, 640, HALF), None, 128, True)
    yield library.dequantize, (*fields, HALF)


def test_opcheck() -> None:
    for op, args in opcheck_samples():
        torch.library.opcheck(op.default, args)


# ---- bits that do not depend on M, and kernels of earlier architectures


@pytest.mark.parametrize("fmt", [Format(4), Format(8), Format(4, "zeros", 64), Format(4, "offsets")], ids=str)
@pytest.mark.parametrize("activations", ACTIVATION_KINDS)
def test_a_row_has_the_same_bits_whatever_m_is(activations: str, fmt: Format) -> None:
    act_quant, symmetric = ACTIVATION_KINDS[activations]
    options: dict[str, Any] = {"act_quant": act_quant, "act_symmetric": symmetric, "batch_invariant": True}
    for n, k in ((320, 4096), (9000, 512), (200, 700)):
        packed = co.reorder(make_weight(fmt, n, k, exact=False, bias=True))
        x = make_floats(1000, k, HALF)
        whole = co.mixed_gemm(x, packed, **options)
        want = oracle(x, packed.unpack(), act_quant, symmetric) + packed.unpack().bias.double()  # type: ignore[union-attr]
        assert_close(whole, want, not is_exact(whole, x, packed, **options))
        for m in (1, 3, 17, 64, 129, 1000):
            for start in {0, 1000 - m, (1000 - m) // 3}:
                assert same_bits(co.mixed_gemm(x[start : start + m], packed, **options), whole[start : start + m])
        wide = torch.nn.functional.pad(x, (3, 2), value=NAN)[:, 3:-2]  # rows that do not start on 16 bytes
        assert same_bits(co.mixed_gemm(wide[7:8], packed, **options), whole[7:8])
        if act_quant != "none":
            qa = co.quantize_activations(x[5:40], block_of(act_quant, fmt.group_size), symmetric)
            assert same_bits(co.mixed_gemm(qa, packed, batch_invariant=True), whole[5:40])


@pytest.mark.parametrize("act_quant", ["none", "token"])
def test_batch_invariant_products_split_k_for_more_rows_than_a_grid_is_high(act_quant: str) -> None:
    m, n, k = 70_001, 64, 2048
    packed = co.reorder(make_weight(Format(), n, k, exact=False))
    assert co.explain(m, packed, act_quant, batch_invariant=True).slices > 1
    x = make_floats(m, k, HALF)
    y = co.mixed_gemm(x, packed, act_quant=act_quant, batch_invariant=True)
    for row in (0, 65_535, m - 1):
        alone = co.mixed_gemm(x[row : row + 1], packed, act_quant=act_quant, batch_invariant=True)
        assert same_bits(y[row : row + 1], alone)


@pytest.mark.parametrize("fmt", [Format(4), Format(8, "zeros")], ids=str)
@pytest.mark.parametrize("activations", ACTIVATION_KINDS)
def test_kernels_of_an_earlier_architecture(activations: str, fmt: Format) -> None:
    act_quant, symmetric = ACTIVATION_KINDS[activations]
    options: dict[str, Any] = {"act_quant": act_quant, "act_symmetric": symmetric}
    packed = co.reorder(make_weight(fmt, 520, 712, exact=True))
    for m in (1, 40, 300):
        x = make_exact_floats(m, 712, HALF, act_quant, symmetric, 128)
        y = co.mixed_gemm(x, packed, out_dtype=FLOAT, architecture=80, **options)
        assert_same(y, oracle(x, packed.unpack(), act_quant, symmetric).float())
        assert (
            co.explain(m, packed, **options, architecture=80).kernel == co.explain(m, packed, **options, device="sm_80").kernel
        )


# ---- what runs, and what does not


@pytest.mark.filterwarnings("ignore")  # the profiler's own
def test_explain_tells_what_runs() -> None:
    major, minor = torch.cuda.get_device_capability()
    packed = co.reorder(make_weight(Format(), 192, 576, exact=True))
    for activations in ACTIVATION_KINDS:
        act_quant, symmetric = ACTIVATION_KINDS[activations]
        for m in (1, 20, 40, 300):
            here = co.explain(m, packed, act_quant, act_symmetric=symmetric)
            assert here.device == f"sm_{major}{minor}"
            assert here == co.explain(m, packed, act_quant, device="cuda:0", act_symmetric=symmetric)
            assert here == co.explain(m, packed.to("cpu"), act_quant, device=GPU, act_symmetric=symmetric)
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                co.mixed_gemm(make_floats(m, 576, HALF), packed, act_quant=act_quant, act_symmetric=symmetric)
                torch.cuda.synchronize()
            ran = {event.key for event in profile.key_averages()}
            if ran:  # a profiler that another tool (compute-sanitizer) keeps out sees nothing
                assert any(here.kernel in name for name in ran), ran
                assert any("quantize_" in name for name in ran) == ("quantize_activations" in here.launches), ran
                assert any("splitk_reduce" in name for name in ran) == ("splitk_reduce" in here.launches), ran


def test_workspace_is_torchs_and_as_large_as_explain_says() -> None:
    plain, short = (co.reorder(make_weight(fmt, 1000, 1536, exact=True)) for fmt in (Format(), Format(4, "offsets", 64)))
    for m, act_quant, packed in ((1, "none", plain), (34, "block", plain), (300, "token", plain), (300, "block", short)):
        x = make_floats(m, 1536, HALF)
        co.mixed_gemm(x, packed, act_quant=act_quant)
        torch.cuda.synchronize()
        free = torch.cuda.mem_get_info()[0]
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        y = co.mixed_gemm(x, packed, act_quant=act_quant)
        needed = torch.cuda.max_memory_allocated() - before
        assert needed <= y.nbytes + co.explain(m, packed, act_quant).workspace + 2 * 512  # rounded up to 512 each
        torch.cuda.synchronize()
        if cached_allocator() and "PYTEST_XDIST_WORKER" not in os.environ:  # other workers take memory meanwhile
            assert torch.cuda.mem_get_info()[0] == free


REFUSED: dict[str, tuple[Callable[[Tensor, co.PackedWeight], Any], type[Exception], str]] = {
    "fp32 as it is, batch_invariant": (
        lambda x, w: co.mixed_gemm(x.float(), w, batch_invariant=True),
        ValueError,
        "batch_invariant is True and x is float32 with act_quant='none'",
    ),
    "x on the CPU": (lambda x, w: co.mixed_gemm(x.cpu(), w), ValueError, "x is on cpu; the weight is on cuda:0"),
    "weight on the CPU": (lambda x, w: co.mixed_gemm(x, w.to("cpu")), ValueError, "x is on cuda:0; the weight is on cpu"),
    "codes on the CPU": (
        lambda x, w: co.mixed_gemm(co.quantize_activations(x.cpu()), w),
        ValueError,
        "x is on cpu; the weight is on cuda:0",
    ),
    "bias on the CPU": (lambda x, w: co.mixed_gemm(x, w, torch.zeros(192)), ValueError, "bias is on cpu"),
    "residual on the CPU": (lambda x, w: co.mixed_gemm(x, w, residual=torch.zeros(5, 192)), ValueError, "residual is on cpu"),
    "bias of another length": (
        lambda x, w: co.mixed_gemm(x, w, x.new_zeros(191)),
        ValueError,
        "bias has shape (191,); (192,) is expected",
    ),
    "a second bias": (
        lambda x, w: co.mixed_gemm(x, replace(w, bias=x.new_zeros(192)), x.new_zeros(192)),
        ValueError,
        "a bias is given, but the weight has one already",
    ),
    "residual of another shape": (
        lambda x, w: co.mixed_gemm(x, w, residual=x.new_zeros(4, 192)),
        ValueError,
        "residual has shape (4, 192); (5, 192) is expected",
    ),
    "x of another width": (lambda x, w: co.mixed_gemm(x[:, 1:], w), ValueError, "x has shape (5, 575); [..., 576] is expected"),
    "another block": (
        lambda x, w: co.mixed_gemm(co.quantize_activations(x, 32), w),
        ValueError,
        "blocks of 32; beside weights in groups of 128",
    ),
    "double": (lambda x, w: co.mixed_gemm(x.double(), w), TypeError, "x has dtype float64"),
    "misaligned codes": (
        lambda x, w: co.mixed_gemm(x, replace(w, codes=torch.cat([w.codes[:1], w.codes])[1:])),
        ValueError,
        "codes starts at an address that is no multiple of 16 bytes",
    ),
    "misaligned scales": (
        lambda x, w: co.dequantize(
            replace(w, scales=torch.cat([w.scales.flatten()[:1], w.scales.flatten()])[1:].view_as(w.scales))
        ),
        ValueError,
        "scales starts at an address that is no multiple of 16 bytes",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refuses_before_anything_is_launched(what: str) -> None:
    call, error, message = REFUSED[what]
    packed = co.reorder(make_weight(Format(), 192, 576, exact=True))
    x = make_floats(5, 576, HALF)
    expected = co.mixed_gemm(x, packed)
    with pytest.raises(error) as caught:
        call(x, packed)
    assert message in str(caught.value)
    torch.cuda.synchronize()
    assert same_bits(co.mixed_gemm(x, packed), expected)
