"""Codes in 32-bit words, as one code a byte; the C++ tests have every shape."""

from __future__ import annotations

import pytest
import torch

from cutlass_ops.checkpoints.words import unpack_along_k, unpack_along_n

AWQ = (0, 2, 4, 6, 1, 3, 5, 7)


def words(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64).to(torch.int32)


def test_golden_words() -> None:
    assert unpack_along_k(words(0x76543210)[None], 8, 4).tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert unpack_along_k(words(0x03020100)[None], 3, 8).tolist() == [[0, 1, 2]]
    assert unpack_along_n(words(0x75316420)[None], AWQ).t().tolist() == [[0, 1, 2, 3, 4, 5, 6, 7]]


def test_views_are_read_where_they_lie() -> None:
    stored = torch.randint(-(2**31), 2**31, (6, 40), generator=torch.Generator().manual_seed(0)).to(torch.int32)
    for view in (stored.t(), stored[::2, 3:33:5], stored[:, :1]):
        assert torch.equal(unpack_along_k(view, 8 * view.shape[1], 4), unpack_along_k(view.clone(), 8 * view.shape[1], 4))
        assert torch.equal(unpack_along_n(view, AWQ), unpack_along_n(view.clone(), AWQ))


def test_what_is_refused() -> None:
    with pytest.raises(TypeError, match="int64"):
        unpack_along_k(torch.zeros(1, 1, dtype=torch.int64), 8, 4)
    with pytest.raises(TypeError, match=r"\[4\]"):
        unpack_along_n(torch.zeros(4, dtype=torch.int32), AWQ)
    with pytest.raises(ValueError, match="9 codes of 4 bits take 2 words"):
        unpack_along_k(torch.zeros(1, 1, dtype=torch.int32), 9, 4)
    with pytest.raises(ValueError, match="permutation"):
        unpack_along_n(torch.zeros(1, 1, dtype=torch.int32), (0,) * 8)
