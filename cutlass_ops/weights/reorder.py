"""Quantised weights to packed ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from . import formats
from .eights import in_eights, join_codes, join_vectors
from .packed_weight import PackedWeight, group_vector_positions, pack_codes
from .weight import QuantizedWeight, not_finite, rows_of


def reorder(
    weight: QuantizedWeight | Sequence[QuantizedWeight], *, gated: bool = False
) -> PackedWeight:
    """Put a weight into the order in which the kernels read it.

    ``reorder(w).unpack()`` is w again, bit for bit. A weight on a GPU is packed there, on that
    device's current stream: its codes are not copied, whatever their strides (those of several
    weights are first copied into one tensor). Whether all values are finite is checked first, which
    waits for the GPU; nothing else does. Other weights, and those that a package built without
    kernels gets, are packed by the host's cores.

    Weights that multiply the same x (query, key and value; gate and up) may be given as a sequence:
    they are packed as one, their rows one after another, so that one launch serves all. The
    products are slices of the result,

        q, k, v = mixed_gemm(x, reorder([wq, wk, wv])).split([wq.n, wk.n, wv.n], dim=-1)

    With ``gated`` the two weights of a gated MLP are packed so that :func:`mixed_gemm` returns
    ``activation(gate product) * up product``, rounded once:

        h = mixed_gemm(x, reorder([gate, up], gated=True), activation="silu")

    Args:
        weight: any quantised weight ``[N, K]``, or a convolution's, or several matrices with the
            same K, device, format (bits, group size, zero points or offsets or neither, code book),
            act order, and dtypes of scales, offsets and biases. Where only some have a bias, the
            others get one of -0.0, which changes no sum.
        gated: ``weight`` is gate and up, in this order, of the same N, a multiple of 8.

    Returns:
        The packed weight, on the same device; N is the sum of the parts', or with ``gated`` that of
        each, and ``unpack()`` has the rows of gate before those of up. The bias of a single weight
        is its own tensor.

    Raises:
        TypeError: not QuantizedWeights.
        ValueError: no weights, or weights that differ in a field that they must share, which the
            message names. Scales, offsets, a code book or codes that are not finite. ``gated`` and
            not two matrices of the same N, or N no multiple of 8.
    """
    if gated:
        return _gated(weight)
    if isinstance(weight, Sequence):
        weight = one_weight(weight)
    if not isinstance(weight, QuantizedWeight):
        raise TypeError(
            f"weight is a {type(weight).__name__}; a QuantizedWeight, or several in a "
            "sequence, is expected"
        )
    if problem := not_finite(weight):
        raise ValueError(f"the weight cannot be packed: {problem}")
    n, k, bits, device = weight.n, weight.k, weight.bits, weight.device
    n_pad, taps = formats.padded_rows(n), weight.taps
    position = group_vector_positions(n, device)
    codes = weight.codes
    if taps > 1:
        by_tap = codes.new_full(
            (n, taps, formats.padded_k(k, taps) // taps), formats.midpoint(bits)
        )
        by_tap[:, :, : k // taps] = codes.view(n, taps, -1)
        codes = by_tap.flatten(1)
    grouped_taps = 1 if weight.group_size == -1 else taps

    def vector(rows: Tensor) -> Tensor:
        out = rows.new_zeros(
            grouped_taps, formats.padded_groups(k, weight.group_size, taps) // grouped_taps, n_pad
        )
        by_tap = rows.t().view(grouped_taps, -1, n)
        out[:, : by_tap.shape[1], position] = by_tap
        return out.flatten(0, 1)

    zeros = None
    if weight.zeros is not None:
        zeros = vector((weight.zeros.to(torch.int16) - formats.midpoint(bits)).to(torch.int8))
    return PackedWeight(
        codes=pack_codes(codes, bits),
        scales=vector(weight.scales),
        zeros=zeros,
        offsets=None if weight.offsets is None else vector(weight.offsets),
        bias=None if weight.bias is None else weight.bias.contiguous(),
        perm=None if weight.perm is None else weight.perm.to(torch.int32).contiguous(),
        book=None if weight.book is None else weight.book.contiguous(),
        n=n,
        k=k,
        bits=bits,
        group_size=weight.group_size,
        kernel_size=weight.kernel_size,
    )


def _gated(pair: Any) -> PackedWeight:
    if not isinstance(pair, Sequence) or len(pair) != 2:
        what = f"{len(pair)} weights" if isinstance(pair, Sequence) else type(pair).__name__
        raise ValueError(
            f"gated is True, and weight is {what}; a sequence of gate and up is expected"
        )
    whole = one_weight(pair)
    gate, up = pair
    if gate.n != up.n or gate.n % formats.GATED_ROWS:
        raise ValueError(
            f"gate is {list(gate.shape)} and up {list(up.shape)}; as gated weights, the same N, "
            f"a multiple of {formats.GATED_ROWS}, is expected"
        )
    return join_gated(
        *(reorder(rows_of(whole, rows)) for rows in (slice(gate.n), slice(gate.n, None)))
    )


def join_gated(gate: PackedWeight, up: PackedWeight) -> PackedWeight:
    """The gated weight of two packed ones, which have the same form, act order and code book, and N
    a multiple of 8; what :func:`reorder` makes of the weights they were packed from.
    """
    n = gate.n
    joined: dict[str, Any] = {"codes": join_codes(gate.codes, up.codes, n, gate.bits)}
    for part in ("scales", "zeros", "offsets"):
        if (vector := getattr(gate, part)) is not None:
            joined[part] = join_vectors(vector, getattr(up, part), n)
    if gate.bias is not None and up.bias is not None:
        joined["bias"] = in_eights(torch.cat((gate.bias, up.bias)))
    return replace(gate, gated=True, **joined)


def one_weight(weights: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """One weight with the rows of all, as :func:`reorder` joins them."""
    for i, weight in enumerate(weights):
        if not isinstance(weight, QuantizedWeight):
            raise TypeError(
                f"weights[{i}] is a {type(weight).__name__}; a QuantizedWeight is expected"
            )
    if not weights:
        raise ValueError("no weight is given; at least one is expected")
    first = weights[0]
    whole: dict[str, Any] = {}
    if any(weight.kernel_size for weight in weights):
        raise ValueError(
            "weights of convolutions are packed one by one; a sequence of matrices is expected"
        )
    # Tensors last, so that the message names different group sizes rather than shapes of scales.
    for name in sorted(
        (f.name for f in fields(first)), key=lambda name: isinstance(getattr(first, name), Tensor)
    ):
        parts = [getattr(weight, name) for weight in weights]
        if name == "bias" and any(part is not None for part in parts):
            dtype = next(part.dtype for part in parts if part is not None)
            parts = [
                w.scales.new_full((w.n,), -0.0, dtype=dtype) if w.bias is None else w.bias
                for w in weights
            ]
        for i, (weight, part) in enumerate(zip(weights, parts, strict=True)):
            if common_form(part) != common_form(parts[0]):
                raise ValueError(
                    f"weights[{i}] ({list(weight.shape)}) and weights[0] ({list(first.shape)}) "
                    "cannot be packed as one: "
                    f"{name} is {common_form(part)} and {common_form(parts[0])}"
                )
            if (
                name == "perm"
                and part is not None
                and not torch.equal(part.long(), parts[0].long())
            ):
                raise ValueError(
                    f"weights[{i}] and weights[0] cannot be packed as one: their act "
                    "orders (perm) differ"
                )
            if name == "book" and part is not None and not torch.equal(part, parts[0]):
                raise ValueError(
                    f"weights[{i}] and weights[0] cannot be packed as one: their code books differ"
                )
        if isinstance(parts[0], Tensor) and name not in ("perm", "book"):
            whole[name] = torch.cat(parts)
    return replace(first, **whole)


def common_form(part: Any) -> Any:
    """What a field of weights that are packed as one must share: all but rows and values."""
    if not isinstance(part, Tensor):
        return part
    columns = f" of {part.shape[1]} columns" if part.dim() == 2 else ""
    return f"{str(part.dtype).removeprefix('torch.')}{columns} on {part.device}"
