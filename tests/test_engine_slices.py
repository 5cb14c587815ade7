"""A rank's part of a packed weight is what packing the rank's rows and columns gives."""

import pytest
import torch

import cutlass_ops as co
from cutlass_ops.engines.layers import stored_weight
from cutlass_ops.engines.shards import LayerPart, Shards
from cutlass_ops.engines.slices import cut
from cutlass_ops.files.tensor_parallel import slice_weight, sliced_format
from cutlass_ops.weights.specs import packed_specs

PARTS = ("codes", "scales", "zeros", "offsets")
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def weight(n: int, k: int, bits: int, group_size: int, symmetric: bool) -> co.QuantizedWeight:
    values = torch.randn(n, k, generator=torch.Generator().manual_seed(n + k))
    return co.quantize(values, bits=bits, group_size=group_size, symmetric=symmetric)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    ("n", "k", "group_size", "style", "ranks"),
    [
        (256, 256, 128, "colwise", 2),
        (256, 256, 128, "rowwise", 2),
        (96, 128, 32, "colwise", 3),  # ends inside row panels
        (200, 384, -1, "colwise", 2),
        (64, 384, 64, "rowwise", 2),  # 192 columns: ends inside a tile
        (70, 384, 128, "rowwise", 2),  # and inside a group, which becomes 64
        (70, 384, -1, "rowwise", 3),
    ],
)
def test_a_cut_is_the_packed_slice(
    n: int, k: int, group_size: int, style: str, ranks: int, symmetric: bool, bits: int
) -> None:
    whole = weight(n, k, bits, group_size, symmetric)
    packed = co.reorder(whole)
    own_n, own_k, own_group = sliced_format(n, k, group_size, style, ranks)
    for rank in range(ranks):
        expected = co.reorder(slice_weight(whole, style, rank, ranks)).tensors()
        rows = slice(rank * own_n, (rank + 1) * own_n) if style == "colwise" else slice(0, n)
        columns = slice(rank * own_k, (rank + 1) * own_k) if style == "rowwise" else slice(0, k)
        for part, tensor in packed.tensors().items():
            sizes = (group_size, own_group)
            found = cut(part, tensor, (n, k), bits, sizes, rows, columns, "cpu")
            assert found.dtype == expected[part].dtype
            assert torch.equal(found, expected[part]), part


def test_whole_panels_and_tiles_are_not_copied() -> None:
    packed = co.reorder(weight(128, 256, 4, 128, True))
    arguments = ((128, 256), 4, (128, 128), slice(64, 128), slice(0, 256), "cpu")
    assert cut("codes", packed.codes, *arguments).data_ptr() == packed.codes[64 * 128 :].data_ptr()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("head", [64, 32])  # 32: heads end inside row panels
def test_ranks_share_keys_and_values(head: int, fused: bool) -> None:
    stored = [weight(rows, 128, 4, 32, False) for rows in (4 * head, 2 * head, 2 * head)]
    for rank in range(4):
        places = [(rank, 4), (rank // 2, 2), (rank // 2, 2)]
        shards = Shards(LayerPart([head] * 3, places, 128, slice(0, 128)), 4, (32, 32))
        rows = shards.padded(2).stop
        example = co.reorder(stored[0]).tensors()
        specs = packed_specs(rows, 128, 4, 32, {p: t.dtype for p, t in example.items()})
        parameters = {
            part: torch.nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)
            for part, (dtype, shape) in specs.items()
        }
        for part, parameter in parameters.items():
            if fused:
                shards.load(part, parameter, co.reorder(stored).tensors()[part])
            else:
                for name, one in zip("qkv", stored, strict=True):
                    shards.load(part, parameter, co.reorder(one).tensors()[part], name)
        tensors = {part: parameter.data for part, parameter in parameters.items()}
        parts = [rank, rank // 2, rank // 2]
        expected = [
            slice_weight(one, "colwise", part, one.n // head)
            for part, one in zip(parts, stored, strict=True)
        ]
        found = [packed.unpack() for packed in shards.weights(tensors)]
        assert len(found) == (1 if head == 64 else 3)
        for name in ("codes", "scales", "zeros"):
            both = [torch.cat([getattr(w, name) for w in ws]) for ws in (found, expected)]
            assert torch.equal(*both)


def test_a_stored_tensor_of_another_size_is_refused() -> None:
    shards = Shards(LayerPart([64], [(0, 1)], 128, slice(0, 128)), 4, (32, 32))
    codes = torch.nn.Parameter(torch.zeros(64 * 64, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(ValueError, match=r"codes is torch.uint8 \(8192,\).*\(4096,\)"):
        shards.load("codes", codes, torch.zeros(8192, dtype=torch.uint8))


def words(codes: torch.Tensor, bits: int) -> torch.Tensor:
    parts = codes.long().unflatten(-1, (-1, 32 // bits)) << torch.arange(0, 32, bits)
    return parts.sum(-1).to(torch.uint32).view(torch.int32)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("columns_first", [True, False])
@pytest.mark.parametrize("symmetric", [True, False])
def test_a_weight_is_read_as_it_is_stored(bits: int, columns_first: bool, symmetric: bool) -> None:
    one = weight(64, 128, bits, 32, symmetric)
    stored, scales, zeros = words(one.codes, bits), one.scales, None
    if one.zeros is not None:
        zeros = words(one.zeros.t(), bits).t()
    if columns_first:
        stored, scales = stored.t(), scales.t()
        zeros = None if zeros is None else zeros.t()
    read = stored_weight(stored, scales, zeros, bits, 32, columns_first, False)
    assert_same(read, one)


def test_a_weight_of_awq() -> None:
    one = weight(64, 128, 4, 32, False)
    assert one.zeros is not None
    turned = [
        words(part.t().unflatten(-1, (-1, 8))[..., AWQ_ORDER].flatten(-2), 4)
        for part in (one.codes, one.zeros)
    ]
    assert_same(stored_weight(turned[0], one.scales.t(), turned[1], 4, 32, True, True), one)


def assert_same(found: co.QuantizedWeight, expected: co.QuantizedWeight) -> None:
    assert torch.equal(found.codes, expected.codes)
    assert torch.equal(found.scales, expected.scales)
    assert (found.zeros is None) == (expected.zeros is None)
    assert found.zeros is None or torch.equal(found.zeros, expected.zeros)
