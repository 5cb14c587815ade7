"""Blocks along K, rows that are processed together, and functions of elements."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ..weights import formats

#: Elements of a temporary tensor: 4 MB of fp32 stay in the cache, which is several times as fast as
#: one pass over all rows.
CHUNK = 1 << 20
FLOAT_TYPES = (torch.float16, torch.bfloat16, torch.float32)
#: Elements that fill vectors of torch's kernels on any CPU; up to how many take one thread; and how
#: many at least it gives to each of several (ATen's GELU_MIN_ELEMENTS_FOR_MULTI_THREADING and
#: GRAIN_SIZE).
_ELEMENTS_AT_ONCE, _ELEMENTS_OF_ONE_THREAD, _ELEMENTS_OF_A_THREAD = 64, 16384, 32768


def in_blocks(x: Tensor, size: int) -> Tensor:
    """``[R, K]`` as ``[R, B, size]``, zeros after K; size -1 is one block, as is one beyond the
    padded K, which it becomes.
    """
    k = x.shape[1]
    size = k if size == -1 else min(size, formats.padded_k(k))
    count = formats.group_count(k, size)
    missing = count * size - k
    return (F.pad(x, (0, missing)) if missing else x).reshape(x.shape[0], count, size)


def row_chunks(rows: int, elements_per_row: int, least: int = 64) -> Iterator[slice]:
    """Slices of the rows whose temporaries have about ``CHUNK`` elements, of at least ``least``
    rows.
    """
    step = max(least, CHUNK // elements_per_row)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def check_block(block: int) -> None:
    """Raise unless ``block`` is a number of columns, or -1."""
    if block != -1 and block < 1:
        raise ValueError(
            f"block is {block!r}; a number of columns, or -1 (one block a row), is expected"
        )


def check_matrix(name: str, x: Tensor, types: tuple[torch.dtype, ...]) -> None:
    """Raise unless x is a matrix of one of ``types``."""
    if x.dtype not in types:
        accepted = ", ".join(str(t).removeprefix("torch.") for t in types)
        raise TypeError(
            f"{name} has dtype {str(x.dtype).removeprefix('torch.')}; supported are {accepted}"
        )
    if x.dim() != 2 or x.shape[1] == 0:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; a matrix with columns is expected")


def quotient(a: float | Tensor, b: float | Tensor, like: Tensor) -> Tensor:
    """``a / b``, rounded once.

    torch computes ``number / tensor`` as ``reciprocal(tensor) * number`` and, on CUDA,
    ``tensor / number`` as ``tensor * (1 / number)``: two roundings, other codes. With tensors on
    both sides it divides.
    """
    numerator = a if isinstance(a, Tensor) else like.new_full((), a)
    denominator = b if isinstance(b, Tensor) else like.new_full((), b)
    return torch.div(numerator, denominator)


def of_each(function: Callable[[Tensor], Tensor], y: Tensor) -> Tensor:
    """A function of each element whose bits depend on that element alone.

    On a CPU torch computes as many elements as fill its vectors at a time, and what is left of a
    thread's part one by one, by another approximation of the exponential. So each call here has
    whole vectors for each of its threads, whether torch gives a part to all of them, as for GELU,
    or to as few as have enough elements.
    """
    if y.device.type != "cpu" or not y.numel():
        return function(y)
    rest, parts, most = y.reshape(-1), [], torch.get_num_threads()
    while (count := rest.numel()) > _ELEMENTS_OF_ONE_THREAD:
        threads = min(most, -(-count // _ELEMENTS_OF_A_THREAD))
        whole = count - count % (_ELEMENTS_AT_ONCE * math.lcm(threads, most))
        if whole <= (threads - 1) * _ELEMENTS_OF_A_THREAD:  # fewer threads would have parts of it
            whole = _ELEMENTS_OF_ONE_THREAD
        parts.append(function(rest[:whole]))
        rest = rest[whole:]
    if count:
        parts.append(function(F.pad(rest, (0, -count % _ELEMENTS_AT_ONCE)))[:count])
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(y.shape)


def rounded_up(scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Positive finite fp32 scales as the nearest values of ``dtype`` that are not smaller."""
    nearest = scales.to(dtype)
    if dtype == torch.float32:
        return nearest
    # The bits of positive floats are ordered as integers, so the next larger value is
    # the next integer.
    above = (nearest.view(torch.int16) + 1).view(dtype)
    return torch.where(nearest.float() < scales, above, nearest)
