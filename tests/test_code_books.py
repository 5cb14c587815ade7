"""4-bit code books: codes and values by hand, against bitsandbytes' own, and from quantisation to
product.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from imports import import_or_skip
from torch import Tensor

import cutlass_ops as co
from cutlass_ops import _C, reference
from cutlass_ops.ops import library
from cutlass_ops.weights import formats

HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32
DTYPES = (HALF, BFLOAT, FLOAT)


def randn(*shape: int, dtype: torch.dtype = FLOAT) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def codes_of(packed: Tensor, count: int) -> Tensor:
    flat = packed.reshape(-1)
    return torch.stack((flat >> 4, flat & 15), 1).reshape(-1)[:count]


@pytest.fixture(scope="module")
def bnb() -> Any:
    """bitsandbytes.functional, whose CPU path is compared with."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHDYNAMO_DISABLE", "1")  # it compiles plain torch at every new shape
        return import_or_skip("bitsandbytes.functional")


# ---- by hand


def test_nf4_codes_by_hand() -> None:
    # The values of the book itself, times an absmax of 2; then packed two a byte, the even one
    # high.
    packed, absmax = co.quantize_4bit(2 * torch.tensor(formats.NF4), 32)
    assert absmax.tolist() == [2.0]
    assert packed.shape == (8, 1)
    assert packed.flatten().tolist() == [0x01, 0x23, 0x45, 0x67, 0x89, 0xAB, 0xCD, 0xEF]


def test_fp4_codes_by_hand() -> None:
    # In twelfths: 0, 1/16, 8, 12, 4, 6, 2, 3, then their negatives; minus zero is zero.
    values = [0.0, 0.0625, 8, 12, 4, 6, 2, 3, -0.0, -0.0625, -8, -12, -4, -6, -2, -3]
    packed, absmax = co.quantize_4bit(torch.tensor(values), 64, "fp4")
    assert absmax.tolist() == [12.0]
    assert packed.flatten().tolist() == [0x01, 0x23, 0x45, 0x67, 0x09, 0xAB, 0xCD, 0xEF]
    # Too small for a magnitude, the sign stays.
    assert codes_of(co.quantize_4bit(torch.tensor([1.0, -0.001]), 32, "fp4")[0], 2).tolist() == [
        3,
        8,
    ]


def e2m1(value: float) -> int:
    """The code of the nearest E2M1 value; halfway, the one with an even mantissa."""
    magnitudes = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    distances = [abs(abs(value) - magnitude) for magnitude in magnitudes]
    nearest = [code for code in range(8) if distances[code] == min(distances)]
    return min(nearest, key=lambda code: code % 2) + 8 * (value < 0)


@pytest.mark.parametrize("exponent", [-102, -24, 0, 100, 125])
def test_mxfp4_codes_by_hand(exponent: int) -> None:
    # Every multiple of 1/4 up to the largest value that the scale 1 is for, and its negative;
    # times a power of two.
    quarters = [i / 4 for i in range(32)] + [-i / 4 for i in range(32)]
    weight = torch.tensor([quarters[:32], quarters[32:]]).mul(2.0**exponent)
    found = co.quantize(weight, group_size=32, book="mxfp4")
    assert found.scales.dtype == BFLOAT
    assert found.scales.flatten().tolist() == [2.0**exponent] * 2
    assert found.codes.flatten().tolist() == [e2m1(v) for v in quarters]
    for tiny in (0.0, 2.0**-101, -(2.0**-126)):
        found = co.quantize(torch.full((1, 7), tiny), group_size=32, book="mxfp4")
        assert found.scales.tolist() == [[1.0]]
        assert (found.codes % 8).tolist() == [[0] * 7]
    # With 17 columns, the last group's zeros beyond K do not count.
    assert co.quantize(torch.full((1, 17), 5.0), group_size=32, book="mxfp4").codes.tolist() == [
        [6] * 17
    ]


def test_mxfp4_is_refused_where_it_is_not_defined() -> None:
    with pytest.raises(ValueError, match="group_size is 64; mxfp4 has groups of 32"):
        co.quantize(randn(4, 64), group_size=64, book="mxfp4")
    with pytest.raises(ValueError, match="NaN, inf or a range beyond fp32 in row 1, group 0"):
        co.quantize(torch.tensor([[1.0], [math.inf]]), group_size=32, book="mxfp4")
    with pytest.raises(ValueError, match="quant_type is 'mxfp4'; supported are 'nf4', 'fp4'"):
        co.quantize_4bit(randn(4, 64), quant_type="mxfp4")


@pytest.mark.parametrize("dtype", DTYPES)
def test_mxfp4_from_quantisation_to_product(dtype: torch.dtype, tmp_path: Path) -> None:
    weight = co.quantize(randn(70, 200, dtype=dtype), group_size=32, book="mxfp4")
    co.save_packed(tmp_path / "w.safetensors", {"w": co.reorder(weight)})
    packed = co.load_packed(tmp_path / "w.safetensors")["w"]
    values = reference.dequantize_weight(weight, FLOAT)
    assert torch.equal(co.dequantize(packed, FLOAT), values)
    x = randn(5, 200, dtype=dtype)
    expected = x.double() @ values.double().t()
    found = co.mixed_gemm(x, packed, out_dtype=FLOAT).double()
    assert float((found - expected).abs().max()) < 1e-4


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_limits_belong_to_the_smaller_code(quant_type: str) -> None:
    if quant_type == "nf4":
        book = torch.tensor(formats.NF4)
        cuts, below, above = (book[1:] + book[:-1]) / 2, range(15), range(1, 16)
    else:
        cuts, below, above = (
            torch.tensor(formats.FP4_CUTS),
            formats.FP4_ORDER[:-1],
            formats.FP4_ORDER[1:],
        )
    up = torch.nextafter(cuts, torch.tensor(2.0))
    one = torch.ones(1)  # absmax 1: v is x
    assert codes_of(
        co.quantize_4bit(torch.cat((cuts, one)), 32, quant_type)[0], len(cuts)
    ).tolist() == list(below)
    assert codes_of(
        co.quantize_4bit(torch.cat((up, one)), 32, quant_type)[0], len(cuts)
    ).tolist() == list(above)


def test_a_custom_code_book_rounds_to_the_nearest_value_and_ties_to_the_smaller() -> None:
    book = torch.tensor(
        [3.0, -1.0, 0.5, 1.0, -0.5, 2.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0, 0.0]
    )
    x = torch.tensor([1.0, 0.75, 0.76, -0.25, 0.2, -1.0])
    packed, absmax = co.quantize_4bit(x, 32, code=book)
    assert codes_of(packed, 6).tolist() == [3, 2, 3, 4, 15, 1]
    assert absmax.tolist() == [1.0]
    assert co.dequantize_4bit(packed, absmax, (6,), 32, dtype=FLOAT, code=book).tolist() == [
        1.0,
        0.5,
        1.0,
        -0.5,
        0.0,
        -1.0,
    ]


@pytest.mark.parametrize(("quant_type", "zero"), [("nf4", 7), ("fp4", 0)])
def test_zero_blocks_and_odd_lengths(quant_type: str, zero: int) -> None:
    x = torch.zeros(64 + 33)
    x[:32] = 1.0
    packed, absmax = co.quantize_4bit(x, 32, quant_type)
    assert absmax.tolist() == [1.0, 0.0, 0.0, 0.0]
    assert packed.shape == (49, 1)
    assert codes_of(packed, 98)[32:].tolist() == [zero] * 66  # the last is the padding's
    y = co.dequantize_4bit(packed, absmax, (97,), 32, quant_type)
    assert torch.equal(y, x.half())


def test_nan_never_becomes_a_number() -> None:
    x = torch.ones(3, 64)
    x[0, 5], x[1, 6] = math.nan, math.inf
    for quant_type in formats.CODE_BOOKS:
        packed, absmax = co.quantize_4bit(x, 64, quant_type)
        assert absmax.isfinite().tolist() == [False, False, True]
        y = co.dequantize_4bit(packed, absmax, (3, 64), 64, quant_type)
        assert y.isfinite().any(1).tolist() == [False, False, True]
        # As in the kernels, NaN is above no limit: the first code of the ascending values, of FP4's
        # magnitudes zero.
        codes = codes_of(packed, 3 * 64).view(3, 64)
        assert codes[0].tolist() == [0] * 64
        assert codes[1, 6] == 0


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_tensors_larger_than_a_piece_of_work(quant_type: str) -> None:
    """More than 2^20 elements: codes and absmax are right at every position from the first to the
    last.
    """
    codes = torch.randint(
        0, 16, ((1 << 20) + 2 * 4096 + 7,), generator=torch.Generator().manual_seed(0)
    )
    codes[::32] = formats.CODE_BOOKS[quant_type].index(1.0)  # each block has its absmax
    count = len(codes)
    absmax = 1.0 + torch.arange(-(-count // 32)) % 97
    values = (
        torch.tensor(formats.CODE_BOOKS[quant_type])[codes] * absmax.repeat_interleave(32)[:count]
    )
    packed, found = co.quantize_4bit(values, 32, quant_type)
    assert torch.equal(found, absmax)
    assert torch.equal(co.dequantize_4bit(packed, absmax, (count,), 32, quant_type, FLOAT), values)
    both = torch.nn.functional.pad(codes, (0, 1)).view(-1, 2)
    assert torch.equal(
        co.dequantize_4bit(
            (both[:, 0] << 4 | both[:, 1]).byte(), absmax, (count,), 32, quant_type, FLOAT
        ),
        values,
    )


def test_an_empty_tensor() -> None:
    packed, absmax = co.quantize_4bit(torch.zeros(0, 8), 64)
    assert (packed.shape, absmax.shape) == ((0, 1), (0,))
    assert co.dequantize_4bit(packed, absmax, (0, 8)).shape == (0, 8)


# ---- against bitsandbytes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_bitsandbytes_has_the_same_codes_and_values(
    bnb: Any, quant_type: str, dtype: torch.dtype
) -> None:
    book = bnb.get_4bit_type(quant_type, device="cpu")
    assert torch.equal(reference.code_book(quant_type), book)
    cuts = torch.tensor(formats.FP4_CUTS)
    for count in (1, 64, 577, 4096 * 3 + 1000):
        x = randn(count, dtype=dtype)
        for blocksize in formats.FLAT_BLOCK_SIZES:
            packed, absmax = co.quantize_4bit(x, blocksize, quant_type)
            theirs, state = bnb.quantize_4bit(x, blocksize=blocksize, quant_type=quant_type)
            assert packed.shape == theirs.shape
            assert torch.equal(absmax, state.absmax)
            if quant_type == "nf4":
                assert torch.equal(packed, theirs)
            else:
                # On the CPU it has a zero of either sign, and limits that are midpoints: in the
                # last places they are others.
                a, b = codes_of(packed, count), codes_of(theirs, count)
                differ = book[a.int()] != book[b.int()]
                scaled = (x.float() / absmax.repeat_interleave(blocksize)[:count])[differ].abs()
                assert ((scaled[:, None] - cuts).abs().amin(1) < 1e-6).all()
                assert differ.sum() <= 0.01 * count
            values = co.dequantize_4bit(
                theirs, state.absmax, (count,), blocksize, quant_type, dtype
            )
            assert torch.equal(values, bnb.dequantize_4bit(theirs, state).view(-1))


def test_bitsandbytes_has_the_same_double_quantisation(bnb: Any) -> None:
    assert torch.equal(reference.dynamic_map(), bnb.create_dynamic_map())
    x = randn(1003 * 64)
    packed, absmax = co.quantize_4bit(x)
    nested = co.NestedAbsmax.quantize(absmax)
    theirs, state = bnb.quantize_4bit(x, blocksize=64, quant_type="nf4", compress_statistics=True)
    assert torch.equal(packed, theirs)
    assert torch.equal(nested.absmax, state.state2.absmax)
    assert torch.equal(nested.offset, state.offset)
    # Its CPU path looks codes up in a table that sometimes misses the nearest value slightly.
    near = (nested.code[nested.codes.int()] - nested.code[state.absmax.int()]).abs()
    assert (near > 0).sum() < 10
    assert near.max() < 0.02
    same = nested._replace(codes=state.absmax)
    values = co.dequantize_4bit(packed, same, (1003, 64), 64, "nf4", HALF)
    assert torch.equal(values, bnb.dequantize_4bit(theirs, state).half().view(1003, 64))


def test_double_quantisation_by_hand() -> None:
    # 256 values of 1 and one of 3: offset 259 / 257; the second block is its difference alone,
    # code 255 (value 1).
    absmax = torch.tensor([1.0] * 256 + [3.0])
    nested = co.NestedAbsmax.quantize(absmax)
    assert nested.code[[0, 127, 255]].tolist() == [nested.code.min().item(), 0.0, 1.0]
    assert nested.codes[-1] == 255
    assert torch.equal(nested.dequantize()[-1], (absmax[-1] - nested.offset) + nested.offset)
    assert (nested.dequantize() - absmax).abs().max() < 1e-3


def test_double_quantisation_of_any_magnitude() -> None:
    absmax = torch.rand(600, generator=torch.Generator().manual_seed(0)) + 0.5
    codes, largest, _, offset = reference.quantize_absmax(absmax)
    for scale in (2.0**-60, 2.0**-20, 2.0**40):
        found = reference.quantize_absmax(absmax * scale)
        assert torch.equal(found[0], codes)
        assert torch.equal(found[1], largest * scale)
        assert torch.equal(found[3], offset * scale)
    # Equal values have no differences: the code of 0.
    assert reference.quantize_absmax(torch.full((300,), 0.5))[0].tolist() == [127] * 300


def test_double_quantisation_halfway_takes_the_smaller_value() -> None:
    book = reference.dynamic_map()
    cuts = (book[:-1] + book[1:]) / 2
    for code, cut in enumerate(cuts.tolist()):
        # The mean is 0 and the largest difference 1: a value is looked up as it is.
        codes, largest, _, offset = reference.quantize_absmax(torch.tensor([1.0, -1.0, cut, -cut]))
        assert (offset, largest.item()) == (0, 1)
        assert codes[:3].tolist() == [255, 0, code]


# ---- from quantisation to product


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize(
    ("n", "k", "group_size"), [(70, 200, 64), (64, 576, 32), (33, 300, 128), (5, 96, -1)]
)
def test_a_weight_from_quantisation_to_product(
    quant_type: str, n: int, k: int, group_size: int, tmp_path: Path
) -> None:
    weight = randn(n, k, dtype=HALF)
    qw = co.quantize(weight, group_size=group_size, book=quant_type)
    book = torch.tensor(formats.CODE_BOOKS[quant_type])
    per_column = torch.arange(k) // (k if group_size == -1 else group_size)
    expected = book[qw.codes.int()] * qw.scales.float()[:, per_column]
    assert torch.equal(co.dequantize(qw, FLOAT), expected)
    assert (expected - weight.float()).abs().max() <= 0.17 * weight.abs().max()
    packed = co.reorder(qw)
    assert torch.equal(co.dequantize(packed, FLOAT), expected)
    co.save_packed(tmp_path / "w.safetensors", {"w": packed})
    read = co.load_packed(tmp_path / "w.safetensors")["w"]
    assert isinstance(read, co.PackedWeight)
    assert read.tensors().keys() == {"codes", "scales", "book"}
    back = read.unpack()
    assert back.book is not None
    for a, b in ((back.codes, qw.codes), (back.scales, qw.scales), (back.book, book)):
        assert torch.equal(a, b)
    x = randn(3, k, dtype=HALF)
    values = book.half().double()[qw.codes.int()] * qw.scales.double()[:, per_column]
    y = co.mixed_gemm(x, read, out_dtype=FLOAT)
    torch.testing.assert_close(y.double(), x.double() @ values.t(), rtol=1e-5, atol=1e-4)
    y = torch.ops.cutlass_ops.mixed_gemm(
        x,
        *library.weight_fields(read),
        None,
        None,
        0.0,
        0.0,
        None,
        FLOAT,
        False,
        "none",
        True,
        False,
        0,
        False,
    )
    torch.testing.assert_close(y.double(), x.double() @ values.t(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_flat_storage_and_a_weight_agree(quant_type: str) -> None:
    weight = randn(40, 192, dtype=HALF)
    packed, absmax = co.quantize_4bit(weight, 64, quant_type)
    qw = co.QuantizedWeight.from_flat(
        packed, absmax, (40, 192), 64, reference.code_book(quant_type)
    )
    direct = co.quantize(weight, group_size=64, book=quant_type)
    assert qw.group_size == 64
    assert torch.equal(qw.codes, direct.codes)
    assert torch.equal(qw.scales, direct.scales.float())


@pytest.mark.parametrize("group_size", [32, 64, 128, 256])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
def test_bitsandbytes_has_the_same_weight(bnb: Any, quant_type: str, group_size: int) -> None:
    weight = randn(24, 512)
    qw = co.quantize(weight, group_size=group_size, book=quant_type)
    packed, state = bnb.quantize_4bit(weight, blocksize=group_size, quant_type=quant_type)
    theirs = codes_of(packed, weight.numel()).view(weight.shape)
    assert torch.equal(qw.scales, state.absmax.view(qw.scales.shape))
    if quant_type == "fp4":  # its CPU path gives small negative weights the zero of the other sign
        assert torch.equal(qw.codes & 7, theirs & 7)
        assert torch.equal(co.dequantize(qw, FLOAT), bnb.dequantize_4bit(packed, state))
    else:
        assert torch.equal(qw.codes, theirs)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_weight_with_a_custom_code_book(dtype: torch.dtype) -> None:
    book = torch.tensor(formats.NF4)[torch.randperm(16, generator=torch.Generator().manual_seed(0))]
    weight = randn(40, 200, dtype=dtype)
    qw = co.quantize(weight, group_size=64, book=book)
    named = co.quantize(weight, group_size=64, book="nf4")
    assert qw.book is not None
    assert torch.equal(qw.book, book)
    assert torch.equal(qw.scales, named.scales)
    assert torch.equal(co.dequantize(qw, FLOAT), co.dequantize(named, FLOAT))
    assert torch.equal(co.dequantize(co.reorder(qw), FLOAT), co.dequantize(named, FLOAT))
    # With another book each weight still gets the nearest of all sixteen values.
    book = torch.linspace(-1, 1, 16) ** 3
    qw = co.quantize(weight, group_size=-1, book=book)
    scaled = weight.float() / weight.float().abs().amax(1, keepdim=True)
    errors = (scaled[..., None] - book).abs()
    chosen = errors.gather(2, qw.codes.long()[..., None])[..., 0]
    assert (chosen <= errors.amin(2) + 1e-6).all()


@pytest.mark.parametrize(
    ("book", "error", "message"),
    [
        (
            "af4",
            ValueError,
            f"book is 'af4'; supported are {', '.join(map(repr, formats.BOOKS))}, and a "
            "tensor of 16 values",
        ),
        ([0.0] * 16, TypeError, "book is a list; a name or a tensor of 16 values is expected"),
        (torch.zeros(16, dtype=HALF), TypeError, "code has dtype float16; supported is float32"),
        (torch.zeros(15), ValueError, r"code has shape \(15,\); \(16,\) is expected"),
        (torch.tensor([math.nan] * 16), ValueError, "book has values that are not finite"),
    ],
)
def test_code_books_that_are_refused(book: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        co.quantize(randn(4, 64), book=book)


@pytest.mark.parametrize(
    ("shape", "blocksize", "group_size"),
    [
        ((6, 96), 64, 32),
        ((4, 192), 128, 64),
        ((3, 256), 4096, -1),
        ((8, 16), 64, -1),
        ((1, 100), 32, 32),
        ((2, 640), 256, 128),
    ],
)
def test_flat_blocks_that_straddle_rows(
    shape: tuple[int, int], blocksize: int, group_size: int
) -> None:
    weight = randn(*shape)
    packed, absmax = co.quantize_4bit(weight, blocksize)
    qw = co.QuantizedWeight.from_flat(packed, absmax, shape, blocksize, reference.code_book("nf4"))
    assert qw.group_size == group_size
    assert torch.equal(
        co.dequantize(qw, FLOAT), co.dequantize_4bit(packed, absmax, shape, blocksize, dtype=FLOAT)
    )


# ---- as operators of torch


def test_opcheck() -> None:
    x = randn(5, 33, dtype=HALF)
    packed, absmax = co.quantize_4bit(x)
    torch.library.opcheck(torch.ops.cutlass_ops.quantize_4bit.default, (x, 64, "fp4", None))
    arguments = (packed, absmax, None, None, None, [5, 33], 64, "nf4", HALF, None)
    torch.library.opcheck(torch.ops.cutlass_ops.dequantize_4bit.default, arguments)


def test_compile() -> None:
    def round_trip(x: Tensor) -> Tensor:
        packed, absmax = co.quantize_4bit(x)
        return co.dequantize_4bit(packed, absmax, x.shape, dtype=x.dtype) + 1

    x = randn(6, 64)
    assert torch.equal(
        torch.compile(round_trip, fullgraph=True, backend="aot_eager")(x), round_trip(x)
    )


# ---- refusals


def test_invalid_arguments_are_refused() -> None:
    x = randn(4, 64)
    packed, absmax = co.quantize_4bit(x)
    with pytest.raises(ValueError, match="blocksize is 48; supported are 32, 64"):
        co.quantize_4bit(x, 48)
    with pytest.raises(ValueError, match="quant_type is 'af4'; supported are 'nf4', 'fp4'"):
        co.quantize_4bit(x, quant_type="af4")
    with pytest.raises(TypeError, match="x has dtype float64"):
        co.quantize_4bit(x.double())
    with pytest.raises(ValueError, match="code has 15 elements"):
        co.quantize_4bit(x, code=torch.zeros(15))
    with pytest.raises(
        ValueError, match=r"packed has 128 elements; a tensor of shape \(4, 65\) takes 130"
    ):
        co.dequantize_4bit(packed, absmax, (4, 65))
    with pytest.raises(
        ValueError,
        match=r"absmax has 4 elements; a tensor of shape \(4, 64\) in blocks of 32 takes 8",
    ):
        co.dequantize_4bit(packed, absmax, (4, 64), 32)
    with pytest.raises(TypeError, match="packed has dtype int8"):
        co.dequantize_4bit(packed.view(torch.int8), absmax, (4, 64))
    with pytest.raises(ValueError, match="blocks straddle rows in pieces of 4 columns"):
        co.QuantizedWeight.from_flat(
            *co.quantize_4bit(randn(4, 100)), (4, 100), 64, reference.code_book("nf4")
        )
    with pytest.raises(ValueError, match="bits is 8; 'nf4' has 16 values"):
        co.quantize(x, bits=8, book="nf4")
    qw = co.quantize(x, group_size=64, book="nf4")
    with pytest.raises(ValueError, match="act_quant is 'token'"):
        co.mixed_gemm(x, co.reorder(qw), act_quant="token")
    with pytest.raises(ValueError, match="both book and zeros"):
        co.QuantizedWeight(
            qw.codes,
            qw.scales,
            zeros=torch.zeros(4, 1, dtype=torch.uint8),
            group_size=64,
            book=qw.book,
        )
    with pytest.raises(ValueError, match=r"book has shape \(16,\); \(256,\) is expected"):
        co.QuantizedWeight(qw.codes, qw.scales, bits=8, group_size=64, book=qw.book)
    with pytest.raises(ValueError, match="their code books differ"):
        co.reorder([qw, co.quantize(x, group_size=64, book="fp4")])
    with pytest.raises(
        ValueError, match=r"multiplied by floats .*act_quant is 'token' and x a number of rows"
    ):
        co.explain(1, co.reorder(qw), act_quant="token", device="sm_90")
    for m in (1, 300):
        assert co.explain(m, co.reorder(qw), dtype=torch.float32, device="sm_90").launches == (
            "dequantize",
        )


def test_formats_are_those_of_the_native_module() -> None:
    assert [known.name for known in formats.FORMATS] == list(_C.Format.__members__)
