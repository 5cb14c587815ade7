"""Gated weights, gate and up packed as one: order, products, gradients and files, on a CPU."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from op_cases import INF, NAN, activations, product, same, weight
from safetensors.torch import save_file
from torch import Tensor

import cutlass_ops as co
from cutlass_ops import _C, reference
from cutlass_ops.cli.describe import describe_packed
from cutlass_ops.files.packed_file import info as info_module
from cutlass_ops.files.packed_file import packed_info
from cutlass_ops.files.verify import diff_packed, verify_packed
from cutlass_ops.ops import products
from cutlass_ops.weights import formats
from cutlass_ops.weights.packed_weight import pack_codes
from cutlass_ops.weights.weight import rows_of

Pair = tuple[co.QuantizedWeight, co.QuantizedWeight]

#: None, a name, or a clamp: all that there are.
ACTIVATIONS: list[Any] = [None, *reference.ACTIVATIONS, ("clamp", -3.0, 2.5)]


def book(name: str, n: int, k: int) -> co.QuantizedWeight:
    bits = 4 if len(formats.BOOKS[name]) == 16 else 8
    random = torch.Generator().manual_seed(n)
    return co.quantize(torch.randn(n, k, generator=random), bits, book=name)


def pair(n: int = 40, k: int = 200, bias: str = "", **options: Any) -> Pair:
    """Gate and up, with other codes, scales and biases; ``bias`` names those that have one."""
    whole = weight(n=2 * n, k=k, bias=True, **options)
    gate, up = rows_of(whole, slice(n)), rows_of(whole, slice(n, None))
    return (
        replace(gate, bias=gate.bias if "gate" in bias else None),
        replace(up, bias=up.bias if "up" in bias else None),
    )


def composed(
    x: Tensor, both: Pair, activation: Any = None, residual: Tensor | None = None
) -> Tensor:
    """The product of its two factors, each of fp64 sums."""
    gate, up = (product(x, w) + (0.0 if w.bias is None else w.bias.double()) for w in both)
    y = reference.activate(gate, activation) * up
    return y if residual is None else y + residual.double()


KINDS: dict[str, Callable[[int, int], Pair]] = {
    "int4": lambda n, k: pair(n, k),
    "int4 zeros": lambda n, k: pair(n, k, kind="zeros", group_size=32),
    "int4 act order": lambda n, k: pair(n, k, kind="zeros", perm=True),
    "int4 offsets": lambda n, k: pair(n, k, kind="offsets", group_size=-1),
    "int2": lambda n, k: pair(n, k, bits=2, group_size=128),
    "int2 zeros": lambda n, k: pair(n, k, bits=2, kind="zeros"),
    "int8": lambda n, k: pair(n, k, bits=8, group_size=128),
    "int8 zeros": lambda n, k: pair(n, k, bits=8, kind="zeros"),
    "nf4": lambda n, k: (book("nf4", n, k), book("nf4", n, k)),
    "e4m3": lambda n, k: (book("e4m3", n, k), book("e4m3", n, k)),
}


# ---- the packed order


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), [(8, 33), (24, 200), (1000, 129)])
def test_unpack_has_the_rows_of_gate_and_then_those_of_up(kind: str, n: int, k: int) -> None:
    gate, up = KINDS[kind](n, k)
    packed = co.reorder([gate, up], gated=True)
    assert (packed.n, packed.k, packed.rows, packed.shape) == (n, k, 2 * n, (n, k))
    assert packed.gated
    whole = packed.unpack()
    for part in ("codes", "scales", "zeros", "offsets"):
        a, b, found = (getattr(w, part) for w in (gate, up, whole))
        assert (found is None) == (a is None)
        assert found is None or torch.equal(found, torch.cat([a, b]))
    for part in ("perm", "book"):
        a, found = getattr(gate, part), getattr(whole, part)
        assert found is None if a is None else torch.equal(found, a.to(found.dtype))


def test_rows_are_eight_of_gate_and_eight_of_up() -> None:
    gate, up = pair(24, 128)
    packed = co.reorder([gate, up], gated=True)
    order = [
        row for i in range(0, 24, 8) for part in (0, 24) for row in range(part + i, part + i + 8)
    ]
    rows = torch.cat([gate.codes, up.codes])[order]
    assert torch.equal(packed.codes, pack_codes(rows, 4))
    assert torch.equal(packed.eights.unpack().codes, rows)
    assert packed.eights.codes is packed.codes
    assert not packed.eights.gated


@pytest.mark.parametrize("biased", ["", "gate", "up", "gate and up"])
def test_the_bias_is_in_the_order_of_the_rows(biased: str) -> None:
    both = pair(16, 100, biased)
    packed = co.reorder(both, gated=True)
    if not biased:
        assert packed.bias is None
        return
    a, b = (torch.full((16,), -0.0) if w.bias is None else w.bias for w in both)
    assert packed.bias is not None
    expected = torch.cat([a[:8], b[:8], a[8:], b[8:]])
    assert torch.equal(packed.bias, expected)
    assert torch.equal(packed.bias.signbit(), expected.signbit())
    assert torch.equal(packed.unpack().bias, torch.cat([a, b]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: pair(12), r"gate is \[12, 200\] and up \[12, 200\]; .* a multiple of 8"),
        (lambda: (pair(16)[0], pair(24)[1]), r"gate is \[16, 200\] and up \[24, 200\]; .* same N"),
        (lambda: pair()[0], "gated is True, and weight is QuantizedWeight"),
        (lambda: [pair()[0]], "weight is 1 weights; a sequence of gate and up"),
        (lambda: [*pair(), pair()[0]], "weight is 3 weights"),
        (lambda: (pair()[0], pair(k=100)[1]), "cannot be packed as one"),
        (lambda: (pair(perm=True)[0], pair()[1]), "perm is"),
        (
            lambda: (pair(perm=True)[0], replace(pair()[1], perm=torch.arange(200))),
            r"act orders \(perm\) differ",
        ),
    ],
)
def test_weights_that_are_no_pair_of_gate_and_up_are_refused(
    make: Callable[[], Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        co.reorder(make(), gated=True)


def test_a_packed_weight_of_an_odd_size_is_refused() -> None:
    packed = co.reorder(pair(), gated=True)
    with pytest.raises(ValueError, match=r"n is 42 .* multiple of 8"):
        replace(packed, n=42)
    with pytest.raises(ValueError, match=r"bias has shape \(40,\); \(80,\) is expected"):
        replace(packed, bias=torch.zeros(40))


@pytest.mark.parametrize("move", [copy.deepcopy, lambda w: pickle.loads(pickle.dumps(w))])
def test_copies_stay_gated(move: Callable[[co.PackedWeight], co.PackedWeight]) -> None:
    packed = co.reorder(pair(bias="gate"), gated=True)
    x = activations(3, 200)
    expected = co.mixed_gemm(x, packed, activation="silu")
    assert packed.eights.n == 80
    moved = move(packed)
    assert "eights" not in vars(moved)
    assert torch.equal(co.mixed_gemm(x, moved, activation="silu"), expected)
    assert packed.to("meta").gated


# ---- products


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), [(8, 33), (24, 200), (1000, 129)])
def test_products_are_those_of_the_reference(kind: str, n: int, k: int) -> None:
    packed = co.reorder(KINDS[kind](n, k), gated=True)
    whole = packed.unpack()
    modes = ("none",) if whole.book is not None else ("none", "token", "block")
    for m, act_quant, symmetric in [
        (m, mode, symmetric) for m in (0, 1, 7) for mode in modes for symmetric in (True, False)
    ]:
        x = torch.randn(m, k, generator=torch.Generator().manual_seed(m)).bfloat16()
        options: dict[str, Any] = {"act_quant": act_quant, "act_symmetric": symmetric}
        y = co.mixed_gemm(x, packed, activation="silu", exact=True, **options)
        expected = reference.mixed_gemm(x, whole, activation="silu", gated=True, **options)
        assert y.shape == (m, n)
        assert same(y, expected)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize("biased", ["", "gate", "up", "gate and up"])
def test_products_are_exact(activation: Any, biased: str) -> None:
    both = pair(bias=biased)
    packed = co.reorder(both, gated=True)
    x, residual = activations(2, 3, 200), activations(2, 3, 40)
    y = co.mixed_gemm(x, packed, activation=activation, residual=residual)
    gate, up = (co.mixed_gemm(x, co.reorder(w)) for w in both)
    assert torch.equal(y, reference.activate(gate, activation) * up + residual)
    if activation in (None, *reference.CLAMPS) or isinstance(activation, tuple):
        expected = composed(x.view(6, 200), both, activation).float().view(2, 3, 40) + residual
        assert torch.equal(y, expected)


@pytest.mark.parametrize("m", [5, 40, 200])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_factors_are_not_rounded(m: int, dtype: torch.dtype) -> None:
    """Also where torch multiplies many rows."""
    both = pair(64, 512, "gate")
    packed = co.reorder(both, gated=True)
    x = activations(m, 512, dtype=dtype)
    y = co.mixed_gemm(x, packed, activation="relu")
    expected = composed(x, both, "relu")
    assert torch.equal(y, expected.float().to(dtype))
    gate, up = (co.mixed_gemm(x, co.reorder(w)) for w in both)
    assert not torch.equal(y, gate.relu() * up), "nothing is tested"


def test_a_bias_is_given_gate_first() -> None:
    both = pair()
    bias = torch.arange(80) / 4 - 5
    x = activations(3, 200)
    y = co.mixed_gemm(x, co.reorder(both, gated=True), bias, "relu")
    own = co.reorder(
        [replace(w, bias=b) for w, b in zip(both, bias.chunk(2), strict=True)], gated=True
    )
    assert torch.equal(y, co.mixed_gemm(x, own, activation="relu"))
    with pytest.raises(ValueError, match=r"bias has shape \(40,\); \(80,\) is expected"):
        co.mixed_gemm(x, co.reorder(both, gated=True), bias[:40])
    with pytest.raises(ValueError, match=r"residual has shape \(3, 80\); \(3, 40\) is expected"):
        co.mixed_gemm(x, own, residual=torch.zeros(3, 80))


def test_quantised_activations_and_options() -> None:
    both = pair(kind="zeros", bias="up")
    packed, whole = co.reorder(both, gated=True), co.reorder(both, gated=True).unpack()
    x, residual = torch.randn(4, 200), torch.randn(4, 40)
    qa = co.quantize_activations(x, block=64, symmetric=False)
    options: dict[str, Any] = {"activation": "gelu", "residual": residual}
    y = co.mixed_gemm(qa, packed, out_dtype=torch.float16, **options)
    expected = reference.mixed_gemm(
        x,
        whole,
        act_quant="block",
        act_symmetric=False,
        gated=True,
        out_dtype=torch.float16,
        **options,
    )
    assert same(y, expected)
    whole_m = co.mixed_gemm(x.repeat(50, 1), packed, batch_invariant=True)
    assert torch.equal(whole_m[:4], co.mixed_gemm(x, packed))
    one = co.mixed_gemm(x[:1], packed, activation="gelu")
    assert torch.equal(co.mixed_gemm(x, packed, activation="gelu")[:1], one)


def test_overflow_and_what_is_not_finite() -> None:
    gate = co.QuantizedWeight(
        torch.full((8, 32), 9, dtype=torch.uint8), torch.ones(8, 1), group_size=32
    )
    packed = co.reorder([gate, gate], gated=True)
    x = torch.full((3, 32), 16.0, dtype=torch.float16)  # 512 * 512
    x[1, 5], x[2, 5] = NAN, INF
    y = co.mixed_gemm(x, packed, activation="relu")
    assert bool((y[0] == INF).all())
    assert bool(y[1:].isnan().all())
    limited = co.mixed_gemm(x, packed, activation="relu", saturate=True)
    assert bool((limited[0] == 65504).all())
    assert bool(limited[1:].isnan().all())


def test_dequantized_rows_are_gate_and_then_up() -> None:
    both = pair(kind="zeros", perm=True)
    packed = co.reorder(both, gated=True)
    expected = torch.cat([co.dequantize(w) for w in both])
    assert torch.equal(co.dequantize(packed), expected)
    assert torch.equal(co.dequantize(packed.unpack()), expected)


# ---- the reference


def test_the_reference_is_the_composition() -> None:
    both = pair(bias="gate and up", kind="zeros")
    whole = co.reorder(both, gated=True).unpack()
    x, residual = activations(3, 200), activations(3, 40)
    y = reference.mixed_gemm(
        x, whole, activation="silu", residual=residual, gated=True, compute_dtype=torch.float64,
        out_dtype=torch.float64,
    )  # fmt: skip
    torch.testing.assert_close(y, composed(x, both, "silu", residual), rtol=0, atol=0)
    with pytest.raises(ValueError, match="an even N"):
        reference.mixed_gemm(x, weight(n=41), gated=True)
    with pytest.raises(ValueError, match=r"residual has shape \(3, 80\); \(3, 40\)"):
        reference.mixed_gemm(x, whole, residual=torch.zeros(3, 80), gated=True)


# ---- gradients and torch.compile


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=str)
@pytest.mark.parametrize(
    ("act_quant", "compiled"),
    [("none", False), ("token", False), ("block", False), ("none", True), ("block", True)],
)
def test_gradients_are_those_of_the_composition(
    activation: Any, act_quant: str, compiled: bool
) -> None:
    both = pair()
    packed, values = (
        co.reorder(both, gated=True),
        co.dequantize(co.reorder(both, gated=True), torch.float32),
    )
    random = torch.Generator().manual_seed(3)
    x, bias, residual = (torch.randn(*s, generator=random) for s in ((5, 200), (80,), (5, 40)))
    grad = torch.randn(5, 40, generator=random)
    given = [tensor.requires_grad_() for tensor in (x, bias, residual)]

    def run(x: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        return co.mixed_gemm(x, packed, bias, activation, act_quant, residual=residual)

    call = torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run
    found = torch.autograd.grad(call(*given), given, grad)
    # Straight through the quantiser: its values, and the gradient of x.
    seen = x
    if act_quant != "none":
        qa = co.quantize_activations(x.detach(), block=-1 if act_quant == "token" else 64)
        seen = x + (qa.dequantize() - x).detach()
    gate, up = (seen @ values.t() + bias).chunk(2, -1)
    y = reference.activate(gate, activation) * up + residual
    for a, b in zip(found, torch.autograd.grad(y, given, grad), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * float(b.abs().max()))


def test_gradients_through_panels_of_the_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = co.reorder(pair(100 * 8), gated=True)
    x = activations(3, 200).requires_grad_()
    grad = activations(3, 800)
    found = []
    for values in (1 << 26, 128 * 200):
        monkeypatch.setattr(products, "_PANEL_VALUES", values)
        found.append(torch.autograd.grad(co.mixed_gemm(x, packed, activation="relu"), x, grad)[0])
    assert products.panel_rows(packed) == 128
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-3)
    assert x.grad is None


def test_saturated_outputs_have_no_gradient() -> None:
    packed = co.reorder(pair(), gated=True)
    x = activations(2, 200, dtype=torch.float16)
    x[0] *= 100
    residual = torch.zeros(2, 40, dtype=torch.float16, requires_grad=True)
    x.requires_grad_()
    y = co.mixed_gemm(x, packed, residual=residual, saturate=True)
    of_x, of_residual = torch.autograd.grad(y.float().sum(), (x, residual))
    limited = y.abs() == 65504
    assert bool(limited.any())
    assert not bool(limited.all())
    kept = torch.where(limited, 0.0, 1.0)
    assert torch.equal(of_residual, kept.half())
    free = x.detach().float().requires_grad_()
    (expected,) = torch.autograd.grad((co.mixed_gemm(free, packed) * kept).sum(), free)
    torch.testing.assert_close(of_x, expected.half(), rtol=2**-10, atol=0)


@pytest.mark.parametrize("act_quant", ["none", "block"])
def test_compiled_products_are_the_eager_ones(act_quant: str) -> None:
    packed = co.reorder(pair(bias="gate"), gated=True)
    x, residual = torch.randn(2, 3, 200), torch.randn(2, 3, 40)

    def run(x: Tensor) -> tuple[Tensor, Tensor]:
        y = co.mixed_gemm(x, packed, activation="silu", act_quant=act_quant, residual=residual)
        return y, co.dequantize(packed)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=True)
    for a, b in zip(compiled(x), run(x), strict=True):
        assert torch.equal(a, b)
    qa = co.quantize_activations(x, block=64)

    def quantized(x: Tensor) -> Tensor:
        return co.mixed_gemm(qa, packed, activation="silu") + x

    compiled = torch.compile(quantized, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(residual), quantized(residual))


# ---- operators without gated weights


def test_others_refuse_a_gated_weight_by_name() -> None:
    packed = co.reorder(pair(bits=8, group_size=-1), gated=True)
    x = torch.zeros(1, 200, dtype=torch.int8)
    for taker, call in {
        "embedding": lambda: co.embedding(torch.zeros(1, dtype=torch.int64), packed),
        "linear_int8": lambda: co.linear_int8(x, packed, x_scale=1.0, y_scale=1.0),
        "a layer of experts": lambda: co.PackedExperts(packed, 1, 40),
        "row_panels": lambda: packed.row_panels(0, 40),
        "MixedEmbedding": lambda: co.nn.MixedEmbedding(packed),
        "replace_linears": lambda: co.nn.replace_linears(
            torch.nn.Sequential(torch.nn.Linear(200, 40)), {"0": packed}
        ),
    }.items():
        with pytest.raises(ValueError, match=rf"gated, .* which {taker} does not take; reorder"):
            call()
    with pytest.raises(ValueError, match="has no kernel; one of 2 dimensions is expected"):
        co.mixed_conv2d(torch.zeros(1, 200, 3, 3), packed)


# ---- which kernels run


@pytest.mark.parametrize("act_quant", ["none", "token", "block"])
def test_explain_names_the_kernel_that_multiplies(act_quant: str) -> None:
    packed = co.reorder(pair(64, 4096, bits=4, group_size=128), gated=True)
    plain = packed.eights
    slices = set()
    for m, gpu in [(m, gpu) for m in (1, 16, 64, 4096) for gpu in ("sm_80", "sm_90")]:
        found = co.explain(m, packed, act_quant, device=gpu, activation="silu")
        other = co.explain(m, plain, act_quant, device=gpu)
        assert (found.kernel, found.tile, found.slices) == (other.kernel, other.tile, other.slices)
        launches = [name for name in other.launches if name != "splitk_reduce"]
        splits = "splitk_reduce" in other.launches
        # Hopper's kernels make the outputs themselves.
        fused = not splits and not found.kernel.startswith("mma_")
        assert list(found.launches) == launches + ["gate_sums"] * (not fused)
        slices.add((splits, fused))
        sums = -(-m * 128 * 4 // 256) * 256
        assert found.workspace == other.workspace + (0 if splits or fused else sums)
        added = co.explain(
            m, packed, act_quant, device=gpu, activation="silu", residual=torch.zeros(m, 64)
        )
        assert list(added.launches) == [*launches, "gate_sums"]
    assert slices == {(True, False), (False, True)}, "nothing is tested"
    with pytest.raises(ValueError, match=r"residual has shape \(3, 128\)"):
        co.explain(3, packed, residual=torch.zeros(3, 128))


@pytest.fixture
def without_bfloat16() -> Iterator[None]:
    """No kernels for bf16: torch multiplies many rows."""
    _C.use_cpu_instruction_set("scalar")
    yield
    _C.use_cpu_instruction_set(_C.cpu_instruction_sets()[0])


@pytest.mark.usefixtures("without_bfloat16")
def test_explain_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = co.reorder(pair(), gated=True)
    assert co.explain(3, packed).kernel.startswith("cpu_")
    monkeypatch.setattr(_C, "cpu_multiplies_bfloat16", lambda: True)
    many = co.explain(200, packed, dtype=torch.bfloat16)
    assert many.kernel.startswith("cpu_")
    assert many.exact  # the factors are fp32
    assert not co.explain(200, packed.eights, dtype=torch.bfloat16).exact, "nothing is tested"


# ---- files


def stored(path: Path, name: str = "mlp.gate_up") -> co.PackedWeight:
    found = co.load_packed(path)[name]
    assert isinstance(found, co.PackedWeight)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_says_that_a_weight_is_gated(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    packed = co.reorder(KINDS[kind](24, 100), gated=True)
    co.save_packed(
        path, {"mlp.gate_up": packed, "mlp.down": co.reorder(weight()), "norm": torch.ones(3)}
    )
    found = stored(path)
    assert (found.gated, found.shape) == (True, (24, 100))
    for part, tensor in packed.tensors().items():
        assert torch.equal(found.tensors()[part], tensor)
    assert not stored(path, "mlp.down").gated
    info = packed_info(path)
    assert info.layout == ("cutlass_ops.slab64", "4")
    assert dict(info.gated) == {"mlp.gate_up": 24}
    assert verify_packed(path).problems == []


def test_versions_of_files_without_gated_weights_stay(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    co.save_packed(path, {"a": co.reorder(weight())})
    assert packed_info(path).layout[1] == "2"
    co.save_packed(path, {"a": co.reorder_experts([weight()], gated=True)})
    assert packed_info(path).layout[1] == "3"


def test_a_reader_of_an_older_version_refuses_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "w.safetensors"
    co.save_packed(path, {"a": co.reorder(pair(), gated=True)})
    monkeypatch.setattr(formats, "LAYOUT_VERSIONS", (1, 2, 3))
    with pytest.raises(co.CheckpointError, match=r"version '4'; known is .* versions 1 to 3"):
        co.load_packed(path)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"a": 41}, "a multiple of 8 is expected"),
        ({"a": True}, "a multiple of 8 is expected"),
        ({"a": 0}, "a multiple of 8 is expected"),
        ({"a": 48}, "says 48 outputs of a matrix; the weight has 80 rows"),
        ({"b": 40}, "says 40 outputs of a matrix; the weight has no rows"),
        ({"e": 32}, "says 32 outputs of a matrix; the weight has 64 rows"),
        ([], "a JSON list; an object is expected"),
    ],
)
def test_a_file_with_false_sizes_is_refused(
    said: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "w.safetensors"
    experts = co.reorder_experts([weight(n=64)])
    co.save_packed(path, {"a": co.reorder(pair(), gated=True), "e": experts})
    read = info_module.read_header

    def lying(file: Path) -> Any:
        metadata, specs = read(file)
        return {**metadata, "gated": json.dumps(said)}, specs

    monkeypatch.setattr(info_module, "read_header", lying)
    with pytest.raises(co.CheckpointError, match=message):
        packed_info(path)


def test_verify_and_diff_know_gated_weights(tmp_path: Path) -> None:
    first, second, third = (tmp_path / f"{i}.safetensors" for i in range(3))
    both = pair(20 * 8, 100)
    packed = co.reorder(both, gated=True)
    co.save_packed(first, {"a": packed})
    co.save_packed(second, {"a": packed.eights})
    changed = both[1].codes.clone()
    changed[3, 4] ^= 1
    co.save_packed(third, {"a": co.reorder([both[0], replace(both[1], codes=changed)], gated=True)})
    assert diff_packed(first, second).changed == {"a": ["gated is True and False"]}
    (change,) = diff_packed(first, third).changed["a"]
    assert change.endswith("the first at [163, 4]")  # of up's row 3


def test_directories_have_gated_weights(tmp_path: Path) -> None:
    co.save_packed(tmp_path / "model.safetensors", {"a": co.reorder(pair(), gated=True)})
    (tmp_path / "config.json").write_text("{}")
    assert stored(tmp_path, "a").gated
    (tensor,) = describe_packed(packed_info(tmp_path))["tensors"]
    assert tensor["note"].endswith(", gated")


def test_verify_finds_no_matrix_of_a_checkpoint_in_a_gated_weight(tmp_path: Path) -> None:
    folder, path = tmp_path / "float", tmp_path / "w.safetensors"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file({"a.weight": torch.randn(80, 200)}, folder / "model.safetensors")
    co.save_packed(path, {"a": co.reorder(pair(), gated=True)})
    found = verify_packed(path, co.load_checkpoint(folder)).problems
    assert found == ["a: holds gate and up packed as one; the checkpoint has one matrix"]
