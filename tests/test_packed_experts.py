"""Packed experts: packing, their files, and the module."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from expert_cases import FORMATS, both, problem, weights
from imports import import_or_skip
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

import cutlass_ops as co
from cutlass_ops.cli import app
from cutlass_ops.files.packed_file import packed_info
from cutlass_ops.files.verify import diff_packed, verify_packed
from cutlass_ops.weights import formats
from cutlass_ops.weights.packed_experts import in_eights
from cutlass_ops.weights.weight import rows_of


def same(a: co.QuantizedWeight, b: co.QuantizedWeight) -> bool:
    parts = ("codes", "scales", "zeros", "offsets", "bias", "perm", "book")
    pairs = [(getattr(a, part), getattr(b, part)) for part in parts]
    return (a.bits, a.group_size) == (b.bits, b.group_size) and all(
        (x is None and y is None)
        or (x is not None and y is not None and x.dtype == y.dtype and torch.equal(x, y))
        for x, y in pairs
    )


# ---- packing


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize(("experts", "n", "k"), [(1, 64, 128), (3, 70, 96), (5, 128, 576)])
def test_experts_unpack_to_what_they_were(
    kind: str, experts: int, n: int, k: int, gated: bool
) -> None:
    given = weights(experts, n, k, **FORMATS[kind])
    packed = co.reorder_experts(given, gated)
    assert packed.shape == (experts, n, k)
    assert packed.weight.shape == (experts * formats.padded_rows(n), k)
    assert packed.gated == packed.to("meta").gated == copy.deepcopy(packed).gated == gated
    assert all(map(same, packed.unpack(), given))
    # Eight rows of gate, the eight of up for the same features, and so on; fewer at the end.
    half = n // 2
    eights = [
        (part + first, part + min(first + 8, half))
        for first in range(0, half, 8)
        for part in (0, half)
    ]
    order = [row for begin, end in eights for row in range(begin, end)]
    for e, weight in enumerate(given):
        alone, view = (
            co.reorder(rows_of(weight, torch.tensor(order)) if gated else weight),
            packed.expert(e),
        )
        assert {part: t.tolist() for part, t in view.tensors().items()} == {
            part: t.tolist() for part, t in alone.tensors().items()
        }
        assert (
            view.codes.untyped_storage().data_ptr()
            == packed.weight.codes.untyped_storage().data_ptr()
        )


def test_a_bias_an_act_order_and_offsets_are_each_experts_own() -> None:
    random = torch.Generator().manual_seed(0)
    given = [
        replace(
            weight,
            bias=torch.randn(70, generator=random),
            perm=torch.randperm(96, generator=random),
            offsets=torch.randn(70, 3, generator=random).half(),
        )
        for weight in weights(3, 70, 96)
    ]
    packed = co.reorder_experts(given)
    assert packed.perm is not None
    assert packed.perm.shape == (3, 96)
    assert all(map(same, packed.unpack(), given))
    assert packed.to("cpu") is packed
    on_meta = packed.to("meta")
    assert on_meta.shape == packed.shape
    assert on_meta.perm is not None
    assert on_meta.perm.is_meta
    copied = copy.deepcopy(packed)
    assert all(map(same, copied.unpack(), given))


def test_rows_of_gate_and_up_are_packed_for_a_layer() -> None:
    gate_up, down, x, ids, w = problem(4, 2)
    experts = co.reorder_experts(gate_up, gated=True), co.reorder_experts(down, gated=True)
    with pytest.raises(ValueError, match="down was packed with gated=True"):
        co.mixed_moe(x, *experts, ids, w)
    with pytest.raises(ValueError, match="down was packed with gated=True"):
        co.nn.MixedExperts(*experts)
    with pytest.raises(
        ValueError, match=r"weights\[0\] is \[35, 96\]; as many rows of gate as of up are expected"
    ):
        co.reorder_experts(weights(2, 35, 96), gated=True)
    with pytest.raises(ValueError, match="n is 35; an even number is expected"):
        co.PackedExperts(co.reorder(weights(1, 64, 96)[0]), 1, 35, gated=True)


def assert_same_tensors(found: co.PackedExperts, expected: co.PackedExperts) -> None:
    assert (found.shape, found.gated) == (expected.shape, expected.gated)
    assert found.tensors().keys() == expected.tensors().keys()
    for part, tensor in expected.tensors().items():
        assert found.tensors()[part].dtype == tensor.dtype
        assert torch.equal(found.tensors()[part], tensor), part


@pytest.mark.parametrize(("n", "k"), [(64, 128), (70, 96), (256, 200)])
@pytest.mark.parametrize("kind", [*FORMATS, "everything"])
def test_plain_rows_of_gate_and_up_are_brought_into_eights(kind: str, n: int, k: int) -> None:
    given = weights(3, n, k, **FORMATS.get(kind, {}))
    if kind == "everything":
        random = torch.Generator().manual_seed(0)
        terms = {
            "offsets": torch.randn(n, -(-k // 32), generator=random).half(),
            "bias": torch.randn(n, generator=random),
        }
        given = [
            replace(weight, **terms, perm=torch.randperm(k, generator=random)) for weight in given
        ]
    plain, expected = co.reorder_experts(given), co.reorder_experts(given, gated=True)
    assert_same_tensors(in_eights(plain), expected)
    assert_same_tensors(plain, co.reorder_experts(given))
    on_meta = in_eights(plain.to("meta"))
    assert on_meta.gated
    assert on_meta.weight.codes.is_meta


def plain_layer() -> tuple[co.PackedExperts, tuple[Any, ...], Tensor]:
    """gate_up without ``gated``, the other arguments of mixed_moe (x first), and its result."""
    gate_up, down, x, ids, w = problem(4, 2)
    packed = both(gate_up, down)
    return co.reorder_experts(gate_up), (x, packed[1], ids, w), co.mixed_moe(x, *packed, ids, w)


def calls(
    gate_up: co.PackedExperts, x: Tensor, *rest: Any
) -> tuple[Tensor, list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        y = co.mixed_moe(x, gate_up, *rest)
    return y, warned


def test_a_layer_of_plain_rows_converts_them_once_and_warns() -> None:
    gate_up, rest, expected = plain_layer()
    with torch.inference_mode():  # what is kept must serve training too
        y, warned = calls(gate_up, *rest)
    assert torch.equal(y, expected)
    (warning,) = warned
    assert warning.category is UserWarning
    assert warning.filename == __file__
    assert (
        "takes as much memory again, and host time at every call; reorder_experts(..., "
        "gated=True) avoids it" in str(warning.message)
    )
    other = co.PackedExperts(gate_up.weight, gate_up.experts, gate_up.n)  # of the same tensors
    for same_weight in (gate_up, other):
        y, warned = calls(same_weight, rest[0].clone().requires_grad_(), *rest[1:])
        assert (torch.equal(y, expected), warned) == (True, [])
        y.sum().backward()
    gate_up.weight.scales.mul_(2)  # another weight from now on
    doubled = co.reorder_experts(gate_up.unpack(), gated=True)
    assert torch.equal(calls(gate_up, *rest)[0], co.mixed_moe(rest[0], doubled, *rest[1:]))


def test_plain_rows_of_inference_tensors_are_converted_at_every_call() -> None:
    _, rest, expected = plain_layer()
    with torch.inference_mode():
        gate_up = co.reorder_experts(problem(4, 2)[0])
    for _ in range(2):
        y, (warning,) = calls(gate_up, *rest)
        assert torch.equal(y, expected)
        assert "at every call, as torch records no changes of inference tensors" in str(
            warning.message
        )


HINT = (
    r"not while a CUDA graph is captured or under torch.compile; "
    r"reorder_experts\(gate_up.unpack\(\), gated=True\) packs it"
)


def test_plain_rows_are_not_converted_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    gate_up, rest, expected = plain_layer()
    with monkeypatch.context() as patch:
        patch.setattr("cutlass_ops.ops.kept.captures", lambda _: True)
        with pytest.raises(RuntimeError, match=HINT):
            calls(gate_up, *rest)
    calls(gate_up, *rest)
    monkeypatch.setattr("cutlass_ops.ops.kept.captures", lambda _: True)
    y, warned = calls(gate_up, *rest)
    assert (torch.equal(y, expected), warned) == (True, [])


def test_plain_rows_are_not_converted_under_torch_compile() -> None:
    gate_up, (x, *rest), expected = plain_layer()
    compiled = torch.compile(
        lambda x: co.mixed_moe(x, gate_up, *rest), backend="aot_eager", fullgraph=True
    )
    with pytest.raises(RuntimeError, match=HINT):
        compiled(x)
    calls(gate_up, x, *rest)
    assert torch.equal(compiled(x), expected)


def test_a_module_holds_plain_rows_in_eights() -> None:
    gate_up, (x, down, ids, w), expected = plain_layer()
    layer = co.nn.MixedExperts(gate_up, down)
    assert torch.equal(layer(x, ids, w), expected)
    assert_same_tensors(layer.gate_up_proj.packed, co.reorder_experts(gate_up.unpack(), gated=True))
    assert (
        layer.state_dict().keys()
        == co.nn.MixedExperts(layer.gate_up_proj.packed, down).state_dict().keys()
    )


@pytest.mark.parametrize("assign", [False, True])
def test_states_of_earlier_versions_are_loaded(assign: bool) -> None:
    gate_up, (x, down, ids, w), expected = plain_layer()
    layer = co.nn.MixedExperts(gate_up, down)
    state = dict(layer.state_dict())
    for name in ("gate_up_proj", "down_proj"):
        mark = json.loads(bytes(state[name].tolist()))
        del mark["gated"]
        state[name] = torch.tensor(list(json.dumps(mark).encode()), dtype=torch.uint8)
    state |= {f"gate_up_proj.{part}": tensor for part, tensor in gate_up.tensors().items()}
    given = dict(state)
    other = co.nn.MixedExperts(co.reorder_experts(weights(5, 80, 96, 7)), down)
    other.load_state_dict(state, assign=assign)
    assert torch.equal(other(x, ids, w), expected)
    assert state == given


def test_experts_are_packed_one_after_another() -> None:
    held: list[int] = []

    class Lazy(Sequence[Any]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: Any) -> Any:
            held.append(index)
            return weights(1, 64, 128, seed=index)[0]

    packed = co.reorder_experts(Lazy())
    assert held == [0, 1, 2, 3]
    assert same(packed.unpack()[3], weights(1, 64, 128, seed=3)[0])


def test_experts_that_differ_are_refused() -> None:
    first = weights(1, 64, 128)[0]
    for other, message in (
        (
            weights(1, 65, 128)[0],
            r"weights\[1\] and weights\[0\] cannot .*: shape is \[65, 128\] and \[64, 128\]",
        ),
        (weights(1, 64, 128, bits=8, group_size=32)[0], "bits is 8 and 4"),
        (weights(1, 64, 128, bits=4, group_size=64)[0], "group_size is 64 and 32"),
        (replace(first, bias=torch.zeros(64)), "bias is float32 on cpu and None"),
        (replace(first, scales=first.scales * torch.nan), "scales.* is nan"),
    ):
        with pytest.raises(ValueError, match=message):
            co.reorder_experts([first, other])
    nf4, fp4 = weights(1, 64, 128, bits=4, group_size=64, book="nf4") + weights(
        1, 64, 128, bits=4, group_size=64, book="fp4"
    )
    with pytest.raises(ValueError, match="code books differ"):
        co.reorder_experts([nf4, fp4])
    with pytest.raises(ValueError, match="no weight is given"):
        co.reorder_experts([])
    with pytest.raises(TypeError, match="weights is a QuantizedWeight"):
        co.reorder_experts(cast(Any, first))
    with pytest.raises(TypeError, match=r"weights\[1\] is a Tensor"):
        co.reorder_experts([first, cast(Any, torch.zeros(64, 128))])
    packed = co.reorder_experts([first, first])
    with pytest.raises(ValueError, match="the weight has 128 rows; 3 experts of 64 features"):
        co.PackedExperts(packed.weight, 3, 64)
    with pytest.raises(IndexError, match="expert 2 of 2"):
        packed.expert(2)


# ---- files


@pytest.mark.parametrize("gated", [False, True])
def test_experts_in_a_file(tmp_path: Path, gated: bool) -> None:
    random = torch.Generator().manual_seed(0)
    given = [
        replace(w, bias=torch.randn(70, generator=random), perm=torch.randperm(96))
        for w in weights(3, 70, 96)
    ]
    linear = co.reorder(given[0])
    stored = {"a.experts": co.reorder_experts(given, gated), "b": linear, "c": torch.ones(3)}
    co.save_packed(tmp_path / "m.safetensors", stored)
    loaded = co.load_packed(tmp_path / "m.safetensors")
    experts = loaded["a.experts"]
    assert isinstance(experts, co.PackedExperts)
    assert experts.gated == gated
    assert packed_info(tmp_path / "m.safetensors").layout[1] == ("3" if gated else "2")
    assert isinstance(loaded["b"], co.PackedWeight)
    assert all(map(same, experts.unpack(), given))
    found = verify_packed(tmp_path / "m.safetensors")
    assert (found.problems, found.weights, found.tensors) == ([], 2, 1)
    other = co.reorder_experts([given[0], given[2], given[2]], gated)
    co.save_packed(tmp_path / "n.safetensors", {**stored, "a.experts": other})
    assert diff_packed(tmp_path / "m.safetensors", tmp_path / "m.safetensors").changed == {}
    changed = diff_packed(tmp_path / "m.safetensors", tmp_path / "n.safetensors").changed
    assert list(changed) == ["a.experts"]
    assert changed["a.experts"]
    assert all("[1] " in text for text in changed["a.experts"])


def test_a_file_without_gated_metadata_has_gate_rows_before_up_rows(tmp_path: Path) -> None:
    given, path = weights(2, 64, 96), tmp_path / "m.safetensors"
    co.save_packed(path, {"e": co.reorder_experts(given)})
    with safe_open(path, "pt") as file:
        facts = file.metadata()
    facts["experts"] = facts["experts"].replace(', "gated": false', "")
    save_file(load_file(path), path, facts)
    experts = co.load_packed(path)["e"]
    assert isinstance(experts, co.PackedExperts)
    assert not experts.gated
    assert all(map(same, experts.unpack(), given))


def test_experts_of_other_sizes_in_as_many_rows_differ(tmp_path: Path) -> None:
    for name, experts, n, gated in (
        ("a", 3, 128, False),
        ("b", 6, 64, False),
        ("c", 3, 127, False),
        ("d", 3, 128, True),
    ):
        packed = co.PackedExperts(co.reorder(weights(1, 384, 96)[0]), experts, n, gated=gated)
        co.save_packed(tmp_path / f"{name}.safetensors", {"e": packed})
    words = "experts, their rows and whether they are gated are (3, 128, False) and "
    for other, sizes in (
        ("b", "(6, 64, False)"),
        ("c", "(3, 127, False)"),
        ("d", "(3, 128, True)"),
    ):
        found = diff_packed(tmp_path / "a.safetensors", tmp_path / f"{other}.safetensors")
        assert (found.same, found.changed) == (0, {"e": [words + sizes]})


def test_experts_are_not_compared_with_one_matrix(tmp_path: Path) -> None:
    save_file({"m.weight": torch.randn(64, 128)}, tmp_path / "floats.safetensors")
    co.save_packed(tmp_path / "m.safetensors", {"m": co.reorder_experts(weights(2, 64, 128))})
    found = verify_packed(
        tmp_path / "m.safetensors", co.load_checkpoint(tmp_path / "floats.safetensors")
    )
    assert "m: holds 2 experts; the checkpoint has one matrix" in found.problems


def test_a_model_without_experts_is_not_loaded_with_packed_ones(tmp_path: Path) -> None:
    transformers = import_or_skip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=1, vocab_size=32
    )
    co.save_packed(
        tmp_path / "m.safetensors",
        {"model.layers.0.mlp.experts.down_proj": co.reorder_experts(weights(2, 64, 128))},
    )
    with pytest.raises(
        ValueError,
        match=r"experts\.down_proj' are packed experts; LlamaForCausalLM has none of that name",
    ):
        co.load_model(tmp_path / "m.safetensors", config=config)


def test_inspect_tells_experts_and_their_rows(tmp_path: Path) -> None:
    co.save_packed(tmp_path / "m.safetensors", {"e": co.reorder_experts(weights(3, 70, 96))})
    done = CliRunner().invoke(app, ["inspect", str(tmp_path / "m.safetensors"), "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.output)["tensors"][0]["shape"] == [3, 70, 96]


def rewritten(path: Path, change: Callable[[dict[str, str], dict[str, Tensor]], None]) -> None:
    with safe_open(path, "pt") as file:
        metadata, names = file.metadata(), file.keys()
        tensors = {name: file.get_tensor(name) for name in names}
    change(metadata, tensors)
    save_file(tensors, path, metadata)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            {"e": {"experts": 2, "n": 70}},
            "'experts' says 2 experts of 70 rows; the weight has 384 rows",
        ),
        ({"e": {"experts": 3, "n": 0}}, "experts and n of at least 1"),
        ({"e": {"experts": True, "n": 384}}, "experts and n of at least 1"),
        ({"e": {"experts": 3, "n": 70, "gated": 1}}, "n even where gated is true"),
        ({"e": {"experts": 6, "n": 63, "gated": True}}, "n even where gated is true"),
        ({"e": [3, 70]}, "experts and n of at least 1"),
        ({"f": {"experts": 3, "n": 70}}, "the weight has no rows"),
        ({"e": {"experts": 6, "n": 64}}, r"e.perm.*has shape \[3, 96\].*make it \[6, 96\]"),
        ({}, r"e.perm.*has shape \[3, 96\].*make it \[96\]"),
    ],
)
def test_a_file_with_false_numbers_of_experts_is_refused(
    tmp_path: Path, value: Any, message: str
) -> None:
    path = tmp_path / "m.safetensors"
    co.save_packed(
        path,
        {
            "e": co.reorder_experts(
                [replace(w, perm=torch.randperm(96)) for w in weights(3, 70, 96)]
            )
        },
    )
    rewritten(path, lambda metadata, _: metadata.update(experts=json.dumps(value)))
    with pytest.raises(co.CheckpointError, match=message):
        co.load_packed(path)


@pytest.mark.parametrize(
    ("row", "padding"),
    [(0, False), (69, False), (70, True), (127, True), (128, False), (198, True)],
)
def test_padding_of_a_bias_is_rows_from_n_on(tmp_path: Path, row: int, padding: bool) -> None:
    path = tmp_path / "m.safetensors"
    co.save_packed(
        path,
        {"e": co.reorder_experts([replace(w, bias=torch.ones(70)) for w in weights(2, 70, 96)])},
    )

    def change(_: Any, tensors: dict[str, Tensor]) -> None:
        tensors["e.bias"][row] = 3

    rewritten(path, change)
    assert ("e: bias has padding that is not zero" in verify_packed(path).problems) == padding


def test_an_act_order_and_padding_that_are_wrong_are_found(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    given = [replace(w, perm=torch.arange(96), bias=torch.ones(70)) for w in weights(3, 70, 96)]
    co.save_packed(path, {"e": co.reorder_experts(given)})

    def pad(_: Any, tensors: dict[str, Tensor]) -> None:
        tensors["e.bias"][127] = 1

    rewritten(path, pad)
    assert "e: bias has padding that is not zero" in verify_packed(path).problems

    def twice(_: Any, tensors: dict[str, Tensor]) -> None:
        tensors["e.perm"][2, 1] = 0

    rewritten(path, twice)
    with pytest.raises(co.CheckpointError, match=r"is not a permutation of 0 \.\. 95"):
        co.load_packed(path)


# ---- the module


def test_the_layer_equals_the_operator(tmp_path: Path) -> None:
    gate_up, down, x, ids, w = problem(9, 2)
    packed = both(gate_up, down)
    layer = co.nn.MixedExperts(*packed)
    expected = co.mixed_moe(x, *packed, ids, w)
    assert torch.equal(layer(x, ids, w), expected)
    # transformers' mark of other ranks' experts
    assert torch.equal(layer(x, ids.where(ids >= 0, 5), w), expected)
    assert (layer.num_experts, layer.hidden_dim, layer.intermediate_dim) == (5, 96, 40)
    assert set(layer.state_dict()) == {
        f"{part}{name}"
        for part in ("gate_up_proj", "down_proj")
        for name in (".codes", ".scales", "")
    }
    half = copy.deepcopy(layer).half()
    assert half.gate_up_proj.scales.dtype == torch.float32
    assert torch.equal(half(x, ids, w), expected)
    other = co.nn.MixedExperts(*both(gate_up[::-1], down[::-1]))
    assert not torch.equal(other(x, ids, w), expected)
    other.load_state_dict(layer.state_dict(), assign=True)
    assert torch.equal(other(x, ids, w), expected)
    layer.gate_up_proj.scales = layer.gate_up_proj.scales * 2
    assert not torch.equal(layer(x, ids, w), expected)
    co.set_activations(layer, "block", False)
    assert (layer.act_quant, layer.act_symmetric) == ("block", False)
    assert torch.equal(
        torch.compile(layer, backend="aot_eager", fullgraph=True)(x, ids, w), layer(x, ids, w)
    )
    assert "experts=5, out_features=80, in_features=96, bits=4" in str(layer)


def test_modules_that_do_not_fit_are_refused() -> None:
    gate_up, down, *_ = problem(1, 1)
    packed = both(gate_up, down)
    with pytest.raises(ValueError, match=r"gate_up is \[5, 80, 96\] and down \[5, 80, 96\]"):
        co.nn.MixedExperts(packed[0], packed[0])
    with pytest.raises(TypeError, match="packed is a PackedWeight"):
        co.nn.MixedExperts(cast(Any, packed[0].weight), packed[1])
    with pytest.raises(ValueError, match="act_quant is 'row'"):
        co.nn.MixedExperts(*packed, act_quant="row")
    with pytest.raises(ValueError, match="activation is 'tanh'"):
        co.nn.MixedExperts(*packed, activation=cast(Any, "tanh"))
