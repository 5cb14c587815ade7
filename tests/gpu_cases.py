"""The kernels against the specification, on a GPU.

The oracle is fp64 over the dequantised operands. Where scales are powers of two and activations
small integers, every product and every partial sum is a multiple of one power of two and below 2^24
times it: fp32 adds those without rounding in any order, so the kernels must give the oracle's very
values. With other scales each element must be within the rounding of fp32 sums, never a mean.

Before each call torch's allocator is left with blocks full of NaN of the sizes that the
call will request.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import cutlass_ops as co
from cutlass_ops import reference
from cutlass_ops.weights import formats

NAN, INF = math.nan, math.inf

GPU = "cuda"

HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32

TYPE_NAMES = {HALF: "fp16", BFLOAT: "bf16", FLOAT: "fp32"}

#: kind -> act_quant, act_symmetric
ACTIVATION_KINDS = {
    "floats": ("none", True),
    "token": ("token", True),
    "token-asym": ("token", False),
    "block": ("block", True),
    "block-asym": ("block", False),
}


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


def make_weight(
    fmt: Format, n: int, k: int, *, exact: bool, bias: bool = False, perm: bool = False
) -> co.QuantizedWeight:
    """Random codes. Scales of both signs: 1/4, 1/2 and 1 if ``exact``, any if not; the
    same for offsets.
    """
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
        zeros=integers(0, 1 << fmt.bits, vector, rng).to(torch.uint8)
        if fmt.kind == "zeros"
        else None,
        offsets=offsets.to(fmt.scale_dtype) if fmt.kind == "offsets" else None,
        bits=fmt.bits,
        group_size=fmt.group_size,
        bias=torch.randn(n, generator=rng, device=GPU).to(fmt.scale_dtype) if bias else None,
        perm=torch.randperm(k, generator=rng, device=GPU) if perm else None,
    )


def make_floats(m: int, k: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(m, k, generator=generator(m, k), device=GPU).to(dtype)


def make_exact_floats(
    m: int, k: int, dtype: torch.dtype, act_quant: str, symmetric: bool, block: int
) -> Tensor:
    """Small integers, which quantisers leave as they are: each block's range makes its
    scale exactly 1.
    """
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


def oracle(
    x: Tensor, qw: co.QuantizedWeight, act_quant: str = "none", symmetric: bool = True
) -> Tensor:
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


def poison(*sizes: int) -> None:
    """Leave free blocks of so many bytes full of NaN (in any type) in torch's allocator, for the
    next call to get.
    """
    blocks = [
        torch.full((size,), 0xFF, dtype=torch.uint8, device=GPU)
        for size in sizes
        for _ in range(2)
        if size
    ]
    del blocks


def multiply(
    x: Tensor | co.QuantizedActivations, packed: co.PackedWeight, **options: Any
) -> Tensor:
    """mixed_gemm into poisoned memory."""
    dtype = options.get("out_dtype") or x.dtype
    m = math.prod(x.shape[:-1])
    itemsize = torch.empty(0, dtype=dtype).element_size()
    poison(m * packed.n * itemsize, co.explain(x, packed, **options).workspace)
    return co.mixed_gemm(x, packed, **options)


def is_exact(
    y: Tensor, x: Tensor | co.QuantizedActivations, packed: co.PackedWeight, **options: Any
) -> bool:
    """Whether the product y keeps the integers of its operands, or may round weights and
    activations to its own dtype.
    """
    if y.dtype != x.dtype:
        return True
    return co.explain(x, packed, **options).exact


def assert_close(y: Tensor, exact: Tensor, rounded: bool = False) -> None:
    """Check every element to within the rounding of its type and of fp32 sums (and, for fp32, the
    whole to within 1e-6).

    With `rounded` operands, weights and values of int8 activations have y's type: then 6.7 standard
    deviations of the sum of their errors, for a row of x and a row of the weight of their size (six
    are passed once in 5e8 elements: that is seen).
    """
    assert y.shape == exact.shape
    error = (y.double() - exact).abs()
    rms = exact.square().mean().sqrt()
    if y.dtype == FLOAT:
        assert error.norm() <= 1e-6 * exact.norm(), (
            f"relative Frobenius error {error.norm() / exact.norm():.3g}"
        )
    unit = {HALF: 2.0**-10, BFLOAT: 2.0**-7 if rounded else 2.0**-8, FLOAT: 0.0}[y.dtype]
    sums = 1e-5 * rms
    if rounded:
        # A few elements of a column are a poor estimate of its size: 16 more, twice as large as the
        # mean of the whole, are added.
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
        pytest.fail(
            f"{int(differs.sum())} of {a.numel()} differ, first at {first}: {a[first]} is "
            f"not {b[first]}"
        )


def same_bits(a: Tensor, b: Tensor) -> bool:
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    )


def cached_allocator() -> bool:
    return os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING") != "1"


def compensates(m: int, packed: co.PackedWeight, act_quant: str) -> bool:
    return "correction" in co.explain(m, packed, act_quant, act_symmetric=False).why


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "padded rows": lambda x: torch.nn.functional.pad(x, (0, 16), value=NAN)[:, : x.shape[1]],
    "misaligned start": lambda x: torch.nn.functional.pad(x, (3, 13), value=NAN)[
        :, 3 : 3 + x.shape[1]
    ],
    "odd stride": lambda x: torch.nn.functional.pad(x, (0, 5), value=NAN)[:, : x.shape[1]],
    "every other row": lambda x: torch.stack([x, torch.full_like(x, NAN)], 1).flatten(0, 1)[::2],
    "transposed": lambda x: x.t().contiguous().t(),
    "every other column": lambda x: torch.stack([x, torch.full_like(x, NAN)], 2).flatten(1)[:, ::2],
    "expanded": lambda x: x[:1].expand(x.shape[0], -1),
    "three dimensions, transposed": lambda x: (
        x.view(2, -1, x.shape[1]).transpose(0, 1).contiguous().transpose(0, 1)
    ),
}
