"""explain: the kernels that would run, and why."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from op_cases import INF, NAN, Change, K, N, activations, product, sized, weight
from torch import Tensor

import cutlass_ops as co
from cutlass_ops import _C, reference
from cutlass_ops.ops import products
from cutlass_ops.ops.call import Call


def test_explain_on_the_cpu() -> None:
    explanation = co.explain(3, co.reorder(weight()))
    assert explanation.device == "cpu"
    assert explanation.kernel == _C.cpu_kernel()
    assert explanation.launches == ()
    assert str(explanation) == f"cpu: {_C.cpu_kernel()} (the bits are the reference's)"


@pytest.mark.parametrize(
    "device", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_120"]
)
@pytest.mark.parametrize("act_quant", ["none", "token", "block"])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_explain_a_gpu_that_is_not_there(bits: int, act_quant: str, device: str) -> None:
    packed = co.reorder(weight(bits))
    for m in (0, 1, 17, 64, 65, 4097):
        explanation = co.explain(
            m, packed, act_quant=act_quant, dtype=torch.bfloat16, device=device
        )
        assert explanation.device == device.rstrip("a")
        decodes = explanation.kernel in ("decode_gemm", "wgmma_decode_fold16")
        assert decodes == (explanation.device == "sm_90" and m <= 16)
        # Weights in groups of 64 are rounded to x's dtype on Hopper from 17 rows on, and of fewer
        # by one of the kernels.
        rounds = explanation.kernel in ("wgmma_fold16", "wgmma_decode_fold16")
        assert rounds or explanation.device != "sm_90" or m <= 16
        assert explanation.exact != rounds
        assert (
            decodes
            or rounds
            or explanation.kernel.endswith("_a16" if act_quant == "none" else "_a8")
        )
        assert co.explain(
            m, packed, act_quant=act_quant, dtype=torch.bfloat16, device=device, exact=True
        ).exact
        itself = explanation.kernel == "decode_gemm" or (decodes and act_quant == "block")
        quantizes = act_quant != "none" and not itself
        launches = ["quantize_activations"] * quantizes + [explanation.kernel]
        launches += ["splitk_reduce"] * (explanation.slices > 1 and explanation.tail_tiles == 0)
        assert explanation.launches == (tuple(launches) if m else ())
        assert min(explanation.tile) >= 8
        assert explanation.slices >= 1
        # The quantiser's codes, k_pad bytes a row, are in the workspace.
        assert explanation.workspace >= (m * 256 if quantizes else 0)
        for part in (explanation.kernel, f"{explanation.tile[1]} rows", explanation.why):
            assert part in str(explanation)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"act_quant": "row"}, ValueError, ["act_quant", "'row'", "'token'"]),
        ({"dtype": torch.int8}, TypeError, ["dtype", "int8", "float16"]),
        ({"dtype": torch.float32, "x": -1}, ValueError, ["m is -1", "16777216"]),
        ({"dtype": torch.float32, "x": (1 << 24) + 1}, ValueError, ["m is 16777217", "16777216"]),
        ({"x": -1}, ValueError, ["m is -1", "16777216"]),
        ({"x": (1 << 24) + 1}, ValueError, ["m is 16777217", "16777216"]),
        ({"x": (1 << 24) + 1, "device": "cpu"}, ValueError, ["m is 16777217", "16777216"]),
        ({"x": -1, "device": "cpu"}, ValueError, ["m is -1", "16777216"]),
        ({"x": 1 << 40}, ValueError, ["m is 1099511627776", "16777216"]),
        ({"x": 2.0}, TypeError, ["x is a float", "number of rows"]),
        ({"device": "sm_75"}, ValueError, ["'sm_75'", "sm_80", "sm_120"]),
        ({"device": "sm_x"}, ValueError, ["'sm_x'", "sm_80"]),
        ({"device": "meta"}, ValueError, ["meta", "cpu and cuda"]),
        (
            {"x": activations(3, K), "dtype": torch.bfloat16},
            ValueError,
            ["torch.bfloat16", "x has dtype torch.float32"],
        ),
        ({"x": activations(3, 8)}, ValueError, ["x has shape (3, 8)", str(K)]),
        ({"out_dtype": torch.int8}, TypeError, ["out_dtype", "int8", "float16"]),
        ({"activation": "tanh"}, ValueError, ["tanh"]),
        ({"bias": torch.zeros(3)}, ValueError, ["bias has shape (3,)"]),
        ({"residual": torch.zeros(3)}, ValueError, ["residual has shape (3,)"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_explain_refuses_invalid_arguments(
    change: Change, error: type[Exception], words: list[str]
) -> None:
    arguments: Change = {"x": 3, "weight": co.reorder(weight()), "device": "sm_90", **change}
    with pytest.raises(error) as caught:
        co.explain(**arguments)
    for word in words:
        assert word in str(caught.value)


def aligned(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    """A tensor whose memory starts on 16 bytes."""
    memory = torch.zeros(math.prod(shape) + 8, dtype=dtype)
    return memory[-memory.data_ptr() % 16 // memory.element_size() :][: math.prod(shape)].view(
        shape
    )


def test_explain_takes_what_the_product_takes() -> None:
    packed = co.reorder(weight())
    x = aligned(2, 3, K)
    of_rows = co.explain(6, packed, device="sm_90")
    assert co.explain(x, packed, device="sm_90") == of_rows
    end: Change = {
        "bias": torch.zeros(N),
        "activation": "gelu",
        "residual": torch.zeros(2, 3, N),
        "saturate": True,
    }
    assert co.explain(x, packed, device="sm_90", **end) == of_rows
    assert co.explain(x.bfloat16(), packed, device="sm_90") == co.explain(
        6, packed, dtype=torch.bfloat16, device="sm_90"
    )
    assert co.explain(x, packed).kernel == _C.cpu_kernel()
    # Quantised before, they are not quantised again.
    many = aligned(300, K)
    for block in (64, -1):
        quantized = co.quantize_activations(many, block=block)
        before = co.explain(quantized, packed, device="sm_90", exact=True)
        after = co.explain(
            many, packed, "token" if block == -1 else "block", device="sm_90", exact=True
        )
        assert after.launches == ("quantize_activations", *before.launches)
        assert (before.kernel, before.grid, before.shared_memory) == (
            after.kernel,
            after.grid,
            after.shared_memory,
        )
    rounded = co.explain(quantized, packed, device="sm_90")
    assert rounded.launches[:2] == ("upcast_activations", "wgmma_fold16")
    assert not rounded.exact
    assert co.explain(torch.zeros(0, K, dtype=torch.float16), packed, device="sm_90").launches == ()


def test_explain_sees_how_x_lies_in_memory() -> None:
    packed = co.reorder(co.quantize(torch.randn(192, 512), bits=4, group_size=128))

    def upcasts(x: Tensor, **options: Any) -> bool:
        explanation = co.explain(x, packed, device="sm_90", **options)
        assert explanation.kernel == "wgmma_gemm_a16"
        return "upcast_activations" in explanation.launches

    wide = aligned(64, 1024)
    assert not upcasts(wide[:, :512])
    assert not upcasts(wide[:, 8:520])
    assert upcasts(wide[:, 4:516])  # rows do not start on 16 bytes
    assert upcasts(aligned(64, 516)[:, :512])
    assert not upcasts(aligned(512, 64).t())  # is copied
    # and so is an x that is no matrix
    assert not upcasts(aligned(64, 1, 1024)[:, :, 4:516].transpose(0, 1).expand(2, 64, 512))
    assert not upcasts(wide[:, 4:516], batch_invariant=True)
    assert upcasts(wide.view(4, 16, 1024)[..., 4:516])
    assert not upcasts(wide[:1, 4:516].expand(64, 512))  # rows that overlap are copied, too
    assert not upcasts(wide[:2, 4:516].expand(32, 2, 512).transpose(0, 1))
    # One row of three dimensions keeps its stride without other options, and has none as a matrix.
    row, large = aligned(1, 1, 28673)[..., :28672], sized(8192, 28672, 4)
    assert co.explain(row, large, device="sm_90").kernel == "decode_gemm"
    assert co.explain(row, large, device="sm_90", exact=True) == co.explain(
        1, large, device="sm_90"
    )


def test_explain_casts_as_autocast_does() -> None:
    packed = co.reorder(weight())
    x = aligned(40, K, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        assert co.explain(x, packed, device="sm_90") == co.explain(
            40, packed, dtype=torch.bfloat16, device="sm_90"
        )
    assert co.explain(x, packed, device="sm_90").kernel == "torch.matmul"


def test_explain_says_that_fp32_is_multiplied_by_torch() -> None:
    packed = sized(28672, 4096, 4)
    found = co.explain(5, packed, dtype=torch.float32, device="sm_90")
    assert (found.kernel, found.launches, found.exact) == ("torch.matmul", ("dequantize",), True)
    assert found.workspace == 4 * (1 << 26)
    assert str(found).startswith("sm_90: torch.matmul (no kernel takes an fp32 x")
    assert co.explain(0, packed, dtype=torch.float32, device="sm_90").launches == ()
    for act_quant in ("token", "block"):
        assert co.explain(5, packed, act_quant, torch.float32, "sm_90").launches[-1] != "dequantize"
    with pytest.raises(
        ValueError, match="batch_invariant is True and x is float32 with act_quant='none'"
    ):
        co.explain(5, packed, dtype=torch.float32, device="sm_90", batch_invariant=True)
    quantized = co.quantize_activations(torch.zeros(5, 4096))
    assert co.explain(quantized, packed, device="sm_90").kernel != "torch.matmul"
    assert (
        co.explain(quantized, packed, device="sm_90", batch_invariant=True).kernel != "torch.matmul"
    )


# What a GPU does with an fp32 x that is not quantised, on the CPU.
@pytest.mark.parametrize("values", [70 * K, 1 << 26])
@pytest.mark.parametrize("kind", ["symmetric", "zeros", "offsets", "perm"])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_panels_of_the_weight_give_the_product(
    bits: int, kind: str, values: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    qw = weight(bits, "zeros" if kind == "perm" else kind, 64, n=200, perm=kind == "perm")
    packed, x = co.reorder(qw), activations(6, K)
    monkeypatch.setattr(products, "_PANEL_VALUES", values)
    monkeypatch.setattr(products, "_CPU_PANEL_VALUES", values // torch.get_num_threads())
    assert [rows.stop - rows.start for rows, _ in products.panels(packed, torch.float16)] == (
        [64, 64, 64, 8] if values < 1 << 26 else [200]
    )
    exact = product(x, qw)
    found = products.panel_gemm(x, packed, (2, 3, 200), Call(), torch.float32)
    assert torch.equal(found.double().view(6, 200), exact)
    bias, residual = activations(200), activations(6, 200)
    call = Call(bias, "clamp", -40.0, 24.5, residual, torch.float16, saturate=True, exact=True)
    found = products.panel_gemm(x, packed, (6, 200), call, torch.float32)
    expected = (exact + bias).clamp(-40, 24.5) + residual
    assert found.dtype == torch.float16
    assert torch.equal(found.double(), expected.half().double())


def test_panels_of_rows_that_are_not_finite_or_not_there() -> None:
    packed = co.reorder(weight(n=200))
    call = Call(activation="relu")
    x = activations(3, K)
    x[0, 3], x[2, 5] = NAN, INF
    y = products.panel_gemm(x, packed, (3, 200), call, torch.float32)
    assert y[[0, 2]].isnan().all()
    assert y[1].isfinite().all()
    assert products.panel_gemm(x[:0], packed, (0, 200), call, torch.float32).shape == (0, 200)
    with pytest.raises(ValueError, match="batch_invariant is True"):
        products.panel_gemm(x, packed, (3, 200), call._replace(batch_invariant=True), torch.float32)


# What a CPU does with many rows of an x that is not quantised.
@pytest.mark.parametrize("kind", ["symmetric", "zeros", "offsets", "perm"])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_many_rows_on_a_cpu(bits: int, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    qw = weight(bits, "zeros" if kind == "perm" else kind, 64, n=200, perm=kind == "perm")
    packed, bias = co.reorder(qw), activations(200)
    monkeypatch.setattr(products, "_CPU_PANEL_VALUES", 70 * K)  # four panels
    relative = {torch.float32: 0, torch.float16: 2**-10, torch.bfloat16: 2**-8}
    for dtype, rows in (
        (torch.float32, 128),
        (torch.float32, 5),
        (torch.float16, 128),
        (torch.bfloat16, 128),
        (torch.bfloat16, 32),
    ):
        x = torch.randn(rows, K, generator=torch.Generator().manual_seed(rows)).to(dtype)
        for given in (None, bias.to(dtype), bias):
            for more in (
                {},
                {"out_dtype": torch.float32},
                {"activation": "relu"},
                {"residual": torch.zeros(rows, 200)},
            ):
                y = co.mixed_gemm(x, packed, given, **more)
                exact = co.explain(x, packed, bias=given, **more).exact
                values = reference.dequantize_weight(
                    qw, torch.float64 if exact else torch.bfloat16
                ).double()
                expected = x.double() @ values.t() + (0 if given is None else given.double())
                absolute = 1e-5 * expected.square().mean().sqrt()
                expected = expected.relu() if "activation" in more else expected
                assert y.dtype == more.get("out_dtype", dtype)
                assert (
                    (y.double() - expected).abs() <= relative[y.dtype] * expected.abs() + absolute
                ).all()
        for keeps in ("exact", "batch_invariant"):
            y = co.mixed_gemm(x, packed, **{keeps: True})
            assert torch.equal(y, reference.mixed_gemm(x, qw))
            assert torch.equal(y[:4], co.mixed_gemm(x[:4], packed))


def test_many_rows_on_a_cpu_round_a_code_book_to_their_dtype_first() -> None:
    qw = reference.quantize_weight_book(torch.randn(200, K), 64, "nf4")
    packed = co.reorder(qw)
    for dtype in (torch.float16, torch.bfloat16):
        x = torch.randn(128, K, generator=torch.Generator().manual_seed(1)).to(dtype)
        y = co.mixed_gemm(x, packed, out_dtype=torch.float32)
        expected = reference.mixed_gemm(x, qw, out_dtype=torch.float32)
        if not co.explain(x, packed, out_dtype=torch.float32).exact:  # AMX's rounded weights
            assert qw.book is not None
            rounded = replace(qw, book=qw.book.to(dtype).float())
            expected = x.float() @ reference.dequantize_weight(rounded, dtype).float().T
        assert (y - expected).norm() <= 1e-6 * expected.norm()


def test_many_rows_on_a_cpu_that_are_not_finite() -> None:
    packed = co.reorder(weight(n=200))
    for dtype in (torch.bfloat16, torch.float32):
        x = activations(128, K).to(dtype)
        x[0, 3], x[7, 5] = NAN, INF
        y = co.mixed_gemm(x, packed)
        assert y[[0, 7]].isnan().all()
        assert y[1:7].isfinite().all()


def test_explain_says_what_a_cpu_does_with_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_C, "cpu_multiplies_bfloat16", lambda: True)
    for name in ("cpu_uses_bfloat16", "cpu_rounds_weight"):
        monkeypatch.setattr(_C, name, lambda *_: False)  # no kernel for it
    packed, wide, bfloat16 = sized(4096, 4096, 4), sized(64, 128, 8), torch.bfloat16
    for m, packed_weight, dtype, options, by_torch in (
        (128, packed, bfloat16, {}, True),
        (_C.cpu_panel_rows_of_bfloat16, packed, bfloat16, {}, True),
        (_C.cpu_panel_rows, wide, bfloat16, {}, True),
        (_C.cpu_panel_rows - 1, wide, bfloat16, {}, False),
        (128, packed, torch.float32, {}, False),
        (128, packed, torch.float16, {}, False),
        (128, packed, bfloat16, {"out_dtype": torch.float32}, False),
        (128, packed, bfloat16, {"bias": torch.zeros(4096)}, False),
        (128, packed, bfloat16, {"activation": "relu"}, False),
        (128, packed, bfloat16, {"exact": True}, False),
        (128, packed, bfloat16, {"batch_invariant": True}, False),
        (128, packed, bfloat16, {"act_quant": "block"}, False),
    ):
        found = co.explain(m, packed_weight, dtype=dtype, **options)
        assert (found.device, found.launches) == ("cpu", ())
        assert found.kernel == ("torch.matmul" if by_torch else _C.cpu_kernel())
        assert found.exact != by_torch
        values = min(2**20 * torch.get_num_threads(), packed_weight.rows * packed_weight.k)
        assert found.workspace == (2 * values if by_torch else 0)
    for m, options in ((4, {}), (5, {"exact": True}), (5, {"batch_invariant": True})):
        assert co.explain(m, packed, dtype=torch.float32, **options).why == (
            "the bits are the reference's"
        )
    several = co.explain(_C.cpu_fused_rows, packed, dtype=torch.float32)
    assert ("another order" in several.why) == (_C.cpu_kernel() != "cpu_scalar")


@pytest.mark.skipif(_C.built_with_cuda, reason="this build has CUDA kernels")
def test_a_build_without_kernels_says_so() -> None:
    with pytest.raises(RuntimeError, match="no CUDA kernels"):
        co.explain(3, co.reorder(weight()), device="cuda")
    with pytest.raises(ValueError, match="no CUDA kernels"):
        _C.current_device()
