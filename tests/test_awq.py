"""AWQ weights in AutoAWQ's own storage, on the CPU: codes by hand, values, and refusals."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import cutlass_ops as co
from cutlass_ops import reference


def pack(codes: Tensor) -> Tensor:
    """Codes ``[R, N]`` to words: nibble i is column [0, 2, 4, 6, 1, 3, 5, 7][i] of its eight."""
    columns = codes.long().view(codes.shape[0], -1, 8)[:, :, [0, 2, 4, 6, 1, 3, 5, 7]]
    words = (columns << torch.arange(0, 32, 4)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def weight(
    k: int, n: int, groups: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Packed codes, scales, packed zero points; and the values in fp64."""
    random = torch.Generator().manual_seed(k + n)
    codes = torch.randint(0, 16, (k, n), generator=random)
    zeros = torch.randint(0, 16, (groups, n), generator=random)
    scales = (torch.rand(groups, n, generator=random) * 0.02 - 0.002).to(dtype)
    group = torch.arange(k) // (k // groups)
    return (
        pack(codes),
        scales,
        pack(zeros),
        (codes - zeros[group]).double() * scales.double()[group],
    )


def test_the_order_of_a_word_by_hand() -> None:
    assert reference.awq_unpack(torch.tensor([[0x75316420]], dtype=torch.int32)).tolist() == [
        list(range(8))
    ]
    codes = torch.arange(8)[None]
    assert pack(codes).tolist() == [[0x75316420]]
    # with the sign bit
    assert torch.equal(reference.awq_unpack(pack(15 - codes)), (15 - codes).to(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("k", "n", "groups"), [(256, 64, 2), (100, 8, 5), (33, 24, 1), (7, 16, 7)])
def test_values_and_products(k: int, n: int, groups: int, dtype: torch.dtype) -> None:
    qweight, scales, qzeros, values = weight(k, n, groups, dtype)
    found = co.awq_dequantize(qweight, scales, qzeros)
    assert torch.equal(found, values.to(dtype))
    assert not found[found == 0].signbit().any()  # zero is +0, whatever the scale's sign
    x = torch.randn(2, 3, k, generator=torch.Generator().manual_seed(k)).to(dtype)
    y = co.awq_gemm(x, qweight, scales, qzeros)
    assert y.shape == (2, 3, n)
    exact = x.double() @ values
    unit = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}[dtype]
    assert ((y.double() - exact).abs() <= 2 * unit * (x.double().abs() @ values.abs())).all()


@pytest.mark.parametrize("name", ["awq_dequantize", "awq_gemm"])
def test_opcheck(name: str) -> None:
    qweight, scales, qzeros, _ = weight(64, 16, 2, torch.float16)
    x = (torch.randn(3, 64).half(),) if name == "awq_gemm" else ()
    torch.library.opcheck(
        getattr(torch.ops.cutlass_ops, name).default, (*x, qweight, scales, qzeros)
    )


def test_invalid_arguments_are_refused() -> None:
    qweight, scales, qzeros, _ = weight(64, 16, 2, torch.float16)
    with pytest.raises(TypeError, match="qweight has dtype int64"):
        co.awq_dequantize(qweight.long(), scales, qzeros)
    with pytest.raises(TypeError, match="scales has dtype float32"):
        co.awq_dequantize(qweight, scales.float(), qzeros)
    with pytest.raises(
        ValueError, match=r"scales has shape \(2, 8\); \[G, 16\] is expected, G a divisor of 64"
    ):
        co.awq_dequantize(qweight, scales[:, :8], qzeros)
    with pytest.raises(ValueError, match=r"scales has shape \(3, 16\)"):
        co.awq_dequantize(qweight, torch.ones(3, 16).half(), qzeros)
    with pytest.raises(ValueError, match=r"qzeros has shape \(1, 2\); \(2, 2\) is expected"):
        co.awq_dequantize(qweight, scales, qzeros[:1])
    with pytest.raises(ValueError, match=r"x has shape \(3, 32\); \[..., 64\] is expected"):
        co.awq_gemm(torch.zeros(3, 32).half(), qweight, scales, qzeros)
    with pytest.raises(TypeError, match="x has dtype bfloat16; supported are float16"):
        co.awq_gemm(torch.zeros(3, 64).bfloat16(), qweight, scales, qzeros)
