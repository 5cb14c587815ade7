"""Packed embeddings: rows that are looked up are those of the dequantised weight, bit for bit; the
modules are the operator.
"""

from __future__ import annotations

import copy
import io
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import cutlass_ops as co
from cutlass_ops.ops import embedding as embedding_module

N, K = 200, 320
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def packed(
    bits: int = 8,
    group_size: int = 32,
    kind: str = "symmetric",
    k: int = K,
    scales: Any = torch.float16,
) -> co.PackedWeight:
    random = torch.Generator().manual_seed(bits + k)
    weight = torch.randn(N, k, generator=random).to(scales)
    if kind == "book":
        return co.reorder(
            co.quantize(weight, bits, group_size, book="nf4" if bits == 4 else "e4m3")
        )
    qw = co.quantize(weight, bits, group_size, symmetric=kind != "zeros")
    if kind == "offsets":
        qw = replace(qw, offsets=torch.randn(qw.scales.shape, generator=random))
    if kind == "act order":
        qw = replace(qw, perm=torch.randperm(k, generator=random))
    return co.reorder(qw)


def ids(*shape: int, device: Any = "cpu") -> Tensor:
    return torch.randint(0, N, shape, generator=torch.Generator().manual_seed(1)).to(device)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return (
        a.shape == b.shape
        and a.dtype == b.dtype
        and torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    )


@pytest.mark.parametrize("kind", ["symmetric", "zeros", "offsets", "book", "act order"])
@pytest.mark.parametrize("group_size", [16, 32, 64, 128, 256, -1])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_rows_are_those_of_the_dequantised_weight(bits: int, group_size: int, kind: str) -> None:
    if kind == "book" and bits == 2:
        pytest.skip("codes of 2 bits have no code book")
    for k, scales in ((K, torch.float16), (128, torch.bfloat16), (576, torch.float32)):
        weight = packed(bits, group_size, kind, k, scales)
        for dtype in DTYPES:
            # Every row, so that each place of a row panel is looked at.
            assert same_bits(
                co.embedding(torch.arange(N), weight, dtype), co.dequantize(weight, dtype)
            )


@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3), (2, 0, 3)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_any_shape_of_ids(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    weight, looked_up = packed(), ids(*shape).to(dtype)
    assert same_bits(co.embedding(looked_up, weight), co.dequantize(weight)[looked_up.long()])
    assert same_bits(co.embedding(ids(4, 6).t(), weight), co.dequantize(weight)[ids(4, 6).t()])


def test_looked_up_rows_have_no_bias() -> None:
    weight = packed()
    assert same_bits(
        co.embedding(ids(3), replace(weight, bias=torch.ones(N))), co.embedding(ids(3), weight)
    )


@pytest.mark.parametrize("wrong", [-1, N, N + 1, 255, 1 << 40])
def test_ids_out_of_range_are_refused_on_a_cpu(wrong: int) -> None:
    with pytest.raises(IndexError, match=rf"ids holds {wrong}; the weight has rows 0 to {N - 1}"):
        co.embedding(torch.tensor([0, wrong]), packed())


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"ids": [1]}, TypeError, "ids is a list"),
        ({"ids": torch.ones(2)}, TypeError, "ids has dtype float32; supported are int64, int32"),
        (
            {"ids": torch.ones(2, dtype=torch.int64, device="meta")},
            ValueError,
            "ids is on meta; the weight is on cpu",
        ),
        ({"weight": torch.ones(2, 2)}, TypeError, "weight is a Tensor"),
        (
            {"weight": co.reorder(co.quantize(torch.ones(8, 32, 3, 3), 8, 32))},
            ValueError,
            "a convolution's",
        ),
        ({"dtype": torch.float64}, TypeError, "dtype is torch.float64"),
        (
            {"weight": replace(packed(scales=torch.float32), bias=nn.Parameter(torch.ones(N)))},
            RuntimeError,
            "frozen",
        ),
    ],
)
def test_wrong_arguments_are_refused(
    change: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        co.embedding(**{"ids": ids(3), "weight": packed(), **change})


def test_no_more_memory_than_the_rows_is_allocated() -> None:
    """No temporary tensor grows with the number of the weight's rows."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        bytes = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **kwargs or {})
            for tensor in [result] if isinstance(result, Tensor) else []:
                if not any(
                    isinstance(a, Tensor)
                    and a.untyped_storage()._cdata == tensor.untyped_storage()._cdata
                    for a in args
                ):
                    self.bytes = max(self.bytes, tensor.nbytes)
            return result

    weight = co.reorder(co.quantize(torch.randn(6400, 128), 4, 32, symmetric=False))
    with Largest() as largest:  # under a mode the function is an operator
        embedding_module._look_up(torch.tensor([3, 6399]), weight, torch.float16)
    assert 0 < largest.bytes <= 2 * 128 * 8


# ---- modules


def head_and_embedding(kind: str = "offsets") -> nn.ModuleDict:
    head = co.MixedLinear(packed(kind=kind))
    return nn.ModuleDict(
        {"embed": co.nn.TiedEmbedding(head, torch.float32, padding_idx=3), "head": head}
    )


@pytest.mark.parametrize("tied", [False, True])
def test_a_module_equals_the_operator(tied: bool) -> None:
    weight = packed(kind="zeros")
    layer: Any = (
        co.nn.TiedEmbedding(co.MixedLinear(weight))
        if tied
        else co.nn.MixedEmbedding(weight, padding_idx=0)
    )
    assert same_bits(layer(ids(2, 3)), co.embedding(ids(2, 3), weight))
    assert same_bits(layer.dequantize(torch.float32), co.dequantize(weight, torch.float32))
    assert (layer.num_embeddings, layer.embedding_dim) == (N, K)
    assert not list(layer.parameters())
    assert not layer(ids(2)).requires_grad
    with pytest.raises(
        AttributeError, match=rf"{type(layer).__name__} has no 'weight'.*dequantize\(\)"
    ):
        _ = layer.weight
    assert f"{N}, {K}, dtype=float16" in repr(layer)


def test_the_padding_row_is_looked_up_as_others_are() -> None:
    weight = packed()
    assert same_bits(
        co.nn.MixedEmbedding(weight, padding_idx=7)(torch.tensor([7])), co.dequantize(weight)[7:8]
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_scale_is_rounded_to_the_dtype(dtype: torch.dtype) -> None:
    weight = packed()
    layer = co.nn.MixedEmbedding(weight, dtype, scale=50.596)
    rows = nn.functional.embedding(ids(9), co.dequantize(weight, dtype))
    assert same_bits(layer(ids(9)), rows * torch.tensor(50.596).to(dtype))


@pytest.mark.parametrize(
    ("cast", "dtype"),
    [
        (lambda m: m.half(), torch.float16),
        (lambda m: m.to(torch.bfloat16), torch.bfloat16),
        (lambda m: m.float(), torch.float32),
        (lambda m: m.to("cpu"), torch.float32),
    ],
)
@pytest.mark.parametrize("tied", [False, True])
def test_changes_of_dtype_change_the_result_alone(
    cast: Any, dtype: torch.dtype, tied: bool
) -> None:
    model: Any = (
        head_and_embedding()
        if tied
        else nn.ModuleDict({"embed": co.nn.MixedEmbedding(packed(kind="offsets"), torch.float32)})
    )
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    rows = cast(model)["embed"](ids(4))
    assert same_bits(rows, co.dequantize(packed(kind="offsets"), dtype)[ids(4)])
    assert {name: buffer.dtype for name, buffer in model.named_buffers()} == {
        n: b.dtype for n, b in before.items()
    }


def test_tied_tensors_are_there_once() -> None:
    model = head_and_embedding()
    state = model.state_dict()
    assert sorted(state) == [
        "embed.weight",
        "head.codes",
        "head.offsets",
        "head.scales",
        "head.weight",
    ]
    assert model.half()["embed"].packed.codes is model["head"].codes  # after a move as well
    copied = copy.deepcopy(model)
    assert copied["embed"].layer is copied["head"]
    assert copied["head"].codes is not model["head"].codes


@pytest.mark.parametrize("tied", [False, True])
def test_state_is_loaded_by_packed_layers_alone(tied: bool) -> None:
    def make(kind: str) -> Any:
        return (
            head_and_embedding(kind)
            if tied
            else nn.ModuleDict({"embed": co.nn.MixedEmbedding(packed(kind=kind), torch.float32)})
        )

    model = make("offsets")
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    state = torch.load(file)
    other = make("offsets")
    for buffer in other.buffers():
        buffer.zero_()
    other.load_state_dict(state)
    assert same_bits(other["embed"](ids(5)), model["embed"](ids(5)))
    with pytest.raises(RuntimeError, match=r"embed\.weight is of a packed weight"):
        make("zeros").load_state_dict(state, strict=False)
    floats = nn.ModuleDict({"embed": nn.Embedding(N, K)})
    with pytest.raises(RuntimeError, match=r"size mismatch for embed\.weight"):
        floats.load_state_dict(state, strict=False)
    with pytest.raises(
        RuntimeError, match=r"embed\.weight is a plain weight, and the layer is packed"
    ):
        model.load_state_dict(floats.state_dict(), strict=False)


def test_a_replaced_buffer_is_read() -> None:
    layer = co.nn.MixedEmbedding(packed())
    layer.scales = layer.scales * 2
    assert same_bits(layer(ids(3)), co.dequantize(packed())[ids(3)] * 2)


@pytest.mark.parametrize("weight", [torch.ones(2, 2), co.quantize(torch.ones(8, 32), 8, 32)])
def test_other_weights_are_refused(weight: Any) -> None:
    with pytest.raises(TypeError, match="a PackedWeight"):
        co.nn.MixedEmbedding(weight)
    with pytest.raises(TypeError, match="a MixedLinear or a MixedEmbedding is expected"):
        co.nn.TiedEmbedding(weight)
    with pytest.raises(ValueError, match="a convolution's"):
        co.nn.MixedEmbedding(co.reorder(co.quantize(torch.ones(8, 32, 3, 3), 8, 32)))
    with pytest.raises(TypeError, match=r"dtype is torch\.float64"):
        co.nn.MixedEmbedding(packed(), torch.float64)


@pytest.mark.parametrize("tied", [False, True])
def test_compiled_into_one_graph(tied: bool) -> None:
    weight = packed(kind="offsets")
    layer: Any = (
        co.nn.TiedEmbedding(co.MixedLinear(weight)) if tied else co.nn.MixedEmbedding(weight)
    )
    compiled = torch.compile(lambda x: layer(x) * 2, fullgraph=True, backend="aot_eager")
    for looked_up in (ids(3), ids(2, 5)):
        assert same_bits(compiled(looked_up), layer(looked_up) * 2)


def test_the_operator_has_a_schema_and_shapes() -> None:
    from cutlass_ops.ops.library import weight_fields

    args = (ids(2, 3), *weight_fields(packed(kind="zeros")), torch.bfloat16)
    torch.library.opcheck(torch.ops.cutlass_ops.embedding.default, args)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["symmetric", "zeros", "offsets", "book", "act order"])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_a_gpu_finds_the_same_bits_in_a_graph(bits: int, kind: str) -> None:
    if kind == "book" and bits == 2:
        pytest.skip("codes of 2 bits have no code book")
    on_cpu = packed(bits, 64, kind)
    weight, looked_up = on_cpu.to("cuda"), ids(2, 9, device="cuda")
    graph = torch.cuda.CUDAGraph()
    co.embedding(looked_up, weight)
    with torch.cuda.graph(graph):
        rows = co.embedding(looked_up, weight)
    for shift in (0, 1):
        looked_up.copy_((ids(2, 9) + shift) % N)
        graph.replay()
        assert same_bits(rows.cpu(), co.dequantize(on_cpu)[(ids(2, 9) + shift) % N])
        assert same_bits(rows, co.dequantize(weight)[looked_up])
