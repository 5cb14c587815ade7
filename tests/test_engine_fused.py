"""Fused layers of a packed directory in different formats: a rank's product is that of its
rows and columns.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import cutlass_ops as co
from cutlass_ops.engines.directory import PackedLinear
from cutlass_ops.engines.fused import FusedLinear
from cutlass_ops.engines.layers import Engine
from cutlass_ops.files.packed_config import WeightFormat

K = 128
HEADS = {"q": 128, "k": 64, "v": 64}


@pytest.fixture
def engine() -> SimpleNamespace:
    """The engine's properties: ``rank``, and whether it is batch invariant and makes random
    weights.
    """
    return SimpleNamespace(rank=0, invariant=False, random=False)


def method_of(engine: SimpleNamespace, forms: list[WeightFormat | None]) -> FusedLinear:
    class Linear(PackedLinear):
        pass

    Linear.engine = Engine(
        name="an engine",
        logger=SimpleNamespace(info_once=lambda *arguments: None),
        settings=dict,
        is_cuda=lambda: False,
        batch_invariant=lambda: engine.invariant,
        random_weights=lambda: engine.random,
        rank=lambda layer: engine.rank,
        kv_place=lambda layer, rank, ranks: (rank // 2, ranks // 2),
    )

    class Fused(FusedLinear):
        linear = Linear

    return Fused(forms, "m.qkv_proj", {})


def weights() -> dict[str, Any]:
    """Query, key and value: packed in two formats, and floats."""
    generator = torch.Generator().manual_seed(6)
    values = {name: torch.randn(rows, K, generator=generator) for name, rows in HEADS.items()}
    return {
        "q": co.reorder(co.quantize(values["q"], 4, 64, symmetric=False)),
        "k": co.reorder(co.quantize(values["k"], 8, 32)),
        "v": values["v"],
    }


def form_of(packed: co.PackedWeight) -> WeightFormat:
    dtypes = tuple(
        (part, tensor.dtype) for part, tensor in packed.tensors().items() if part != "codes"
    )
    return WeightFormat(packed.bits, packed.group_size, dtypes)


def made(
    engine: SimpleNamespace, sizes: list[int], k: int, ranks: int = 1
) -> tuple[FusedLinear, Any]:
    stored = weights()
    method = method_of(engine, [form_of(stored["q"]), form_of(stored["k"]), None])
    layer = torch.nn.Module()
    method.create_weights(layer, k, sizes, K, sum(sizes) * ranks, torch.float32)
    return method, layer


def load(layer: Any, *, left_out: str = "") -> None:
    for shard, weight in weights().items():
        tensors = {"weight": weight} if shard == "v" else weight.tensors()
        for name, tensor in tensors.items():
            if f"{shard}.{name}" != left_out:
                parameter = layer.get_parameter(name)
                parameter.weight_loader(parameter, tensor, shard)


@pytest.mark.parametrize("rank", range(4))
def test_a_rank_multiplies_its_rows_of_each_part(rank: int, engine: SimpleNamespace) -> None:
    engine.rank = rank
    method, layer = made(engine, [32, 32, 32], K, ranks=4)
    load(layer)
    method.process_weights_after_loading(layer)
    method.process_weights_after_loading(layer)  # a second time changes nothing
    stored = weights()
    rows = {
        "q": slice(32 * rank, 32 * (rank + 1)),
        **{name: slice(32 * (rank // 2), 32 * (rank // 2 + 1)) for name in "kv"},
    }
    whole = {
        name: weight if name == "v" else co.dequantize(weight, torch.float32)
        for name, weight in stored.items()
    }
    dense = torch.cat([whole[name][rows[name]] for name in "qkv"])
    x, bias = torch.randn(3, K), torch.randn(96)
    torch.testing.assert_close(
        method.apply(layer, x, bias),
        torch.nn.functional.linear(x, dense, bias),
        rtol=1e-5,
        atol=1e-4,
    )
    assert set(layer._parameters) == {"qweight"}


def test_columns_of_a_rank(engine: SimpleNamespace) -> None:
    engine.rank = 1
    method, layer = made(engine, list(HEADS.values()), K // 2)
    load(layer)
    method.process_weights_after_loading(layer)
    dense = [
        weight if name == "v" else co.dequantize(weight, torch.float32)
        for name, weight in weights().items()
    ]
    x = torch.randn(2, K // 2)
    torch.testing.assert_close(
        method.apply(layer, x), x @ torch.cat(dense)[:, K // 2 :].t(), rtol=1e-5, atol=1e-4
    )


@pytest.mark.parametrize(
    ("left_out", "line"),
    [
        ("k.scales", r"\[1\]: the files lack 'scales' of its part 0"),
        ("v.weight", ": the files lack 'weight' of its part 2"),
    ],
)
def test_a_tensor_that_the_files_lack_is_named(
    left_out: str, line: str, engine: SimpleNamespace
) -> None:
    method, layer = made(engine, list(HEADS.values()), K)
    load(layer, left_out=left_out)
    with pytest.raises(ValueError, match=rf"m\.qkv_proj{line}"):
        method.process_weights_after_loading(layer)


@pytest.mark.parametrize("random", [True, False])
def test_only_an_engine_that_makes_random_weights_loads_none(
    random: bool, engine: SimpleNamespace
) -> None:
    engine.random = random
    method, layer = made(engine, list(HEADS.values()), K)
    if random:
        for part in layer.modules():
            if "scales" in part._parameters:
                part.scales.data.fill_(1)
        method.process_weights_after_loading(layer)
    else:
        with pytest.raises(ValueError, match="the files lack"):
            method.process_weights_after_loading(layer)


def test_tensors_of_another_format_or_size_are_refused(engine: SimpleNamespace) -> None:
    _, layer = made(engine, list(HEADS.values()), K)
    parameter = layer.get_parameter("zeros")
    with pytest.raises(
        ValueError,
        match=r"m\.qkv_proj\.zeros is there for its part 1, whose format has no such tensor",
    ):
        parameter.weight_loader(parameter, torch.zeros(1), "k")
    with pytest.raises(ValueError, match=r"several of the fused layers in one tensor \(None\)"):
        parameter.weight_loader(parameter, torch.zeros(1))
    parameter = layer.get_parameter("weight")
    with pytest.raises(ValueError, match=r"weight is \(64, 64\); \(64, 128\) is expected"):
        parameter.weight_loader(parameter, torch.zeros(64, 64), "v")


def test_an_engine_with_other_parts_is_refused(engine: SimpleNamespace) -> None:
    with pytest.raises(ValueError, match=r"m\.qkv_proj has 2 parts in an engine; its files have 3"):
        made(engine, [128, 128], K)


def test_floats_are_refused_in_batch_invariant_mode(engine: SimpleNamespace) -> None:
    engine.invariant = True
    with pytest.raises(
        ValueError,
        match=r"m\.qkv_proj is packed only in part, and products of floats are not batch invariant",
    ):
        made(engine, list(HEADS.values()), K)
