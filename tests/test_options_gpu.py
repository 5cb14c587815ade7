"""Options of mixed_gemm, other forms of its operands, and refusals, on a GPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from gpu_cases import (
    ACTIVATION_KINDS,
    BFLOAT,
    FLOAT,
    GPU,
    HALF,
    INF,
    NAN,
    TYPE_NAMES,
    VIEWS,
    Format,
    assert_close,
    assert_same,
    block_of,
    cached_allocator,
    generator,
    integers,
    make_floats,
    make_weight,
    multiply,
    oracle,
    same_bits,
)
from torch import Tensor

import cutlass_ops as co
from cutlass_ops import _C, reference

pytestmark = pytest.mark.gpu

# ---- operands of other forms


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("activations", ACTIVATION_KINDS)
def test_products_of_strided_operands(activations: str, view: str) -> None:
    act_quant, symmetric = ACTIVATION_KINDS[activations]
    for k in (576, 100):
        # Offsets: one kernel for every view of x.
        packed = co.reorder(make_weight(Format(4, "offsets", 32), 200, k, exact=False))
        for m in (10, 70):
            x = VIEWS[view](make_floats(m, k, HALF))
            residual = VIEWS[view](make_floats(m, 200, BFLOAT))
            options: dict[str, Any] = {"act_quant": act_quant, "act_symmetric": symmetric}
            y = multiply(x, packed, residual=residual, **options)
            assert y.shape == (*x.shape[:-1], 200)
            clone = x.reshape(-1, k).clone()
            copied = multiply(clone, packed, residual=residual.reshape(-1, 200).clone(), **options)
            # A kernel that quantises x itself may cut K in another way than after the quantiser.
            if (
                co.explain(x, packed, **options).launches
                == co.explain(clone, packed, **options).launches
            ):
                assert same_bits(y.view(-1, 200), copied)
            else:
                assert_close(y.view(-1, 200), copied.double(), rounded=True)


#: Views of x [8, K] that _C.product reads directly, and views that must be copied.
SHAPED = {
    "vector": (lambda x: x[3], True),
    "one row": (lambda x: x[5:6], True),
    "three dimensions": (lambda x: x.view(2, 4, -1), True),
    "ones among them": (lambda x: x.view(1, 2, 1, 4, 1, -1), True),
    "every other row": (lambda x: x.view(2, 4, -1)[:, ::2], True),
    "last rows": (lambda x: x.view(2, 4, -1)[:, -1:], True),
    "the same row": (lambda x: x[2].expand(3, -1), False),
    "overlapping rows": (
        lambda x: x.view(-1).as_strided((3, x.shape[1]), (x.shape[1] // 2, 1)),
        False,
    ),
    "part of both dimensions": (lambda x: x.view(2, 4, -1)[:, :3], False),
    "transposed": (lambda x: x.view(2, 4, -1).transpose(0, 1), False),
    "columns apart": (lambda x: x.t().contiguous().t(), False),
}


@pytest.mark.parametrize("shaped", SHAPED)
@pytest.mark.parametrize("activations", ACTIVATION_KINDS)
def test_plain_products_are_those_of_every_other_call(activations: str, shaped: str) -> None:
    act_quant, symmetric = ACTIVATION_KINDS[activations]
    options: dict[str, Any] = {"act_quant": act_quant, "act_symmetric": symmetric}
    view, taken = SHAPED[shaped]
    packed = co.reorder(make_weight(Format(), 200, 576, exact=False, bias=True))
    for dtype in (HALF, BFLOAT, FLOAT)[: 2 if act_quant == "none" else 3]:
        x = view(make_floats(8, 576, dtype))
        y = co.mixed_gemm(x, packed, **options)
        assert (_C.product(packed, x, act_quant, symmetric, None) is not None) == taken
        assert (y.shape, y.dtype) == ((*x.shape[:-1], 200), dtype)
        assert same_bits(y, co.mixed_gemm(x, packed, **options, out_dtype=dtype))


def test_the_fast_path_returns_none_for_wrong_arguments() -> None:
    packed = co.reorder(make_weight(Format(), 200, 576, exact=False))
    x = make_floats(3, 576, HALF)
    other = co.reorder(make_weight(Format(), 200, 576, exact=False).to("cpu"))
    assert _C.product(packed, x, "none", True, None) is None
    assert packed.native is not other.native
    assert _C.product(packed, x, "none", True, None) is not None
    for weight, bad, act_quant, symmetric in (
        (packed, x[:, :-1], "none", True),
        (packed, x[:0], "none", True),
        (packed, x[0, 0], "none", True),
        (packed, x.cpu(), "none", True),
        (packed, x.float(), "none", True),
        (packed, x.double(), "block", True),
        (packed, x, "row", True),
        (packed, x, None, True),
        (packed, x, "block", 1),
    ):
        assert _C.product(weight, bad, act_quant, symmetric, None) is None


@pytest.mark.parametrize("m", [3, 20, 40, 70])
@pytest.mark.parametrize("activations", ACTIVATION_KINDS)
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_act_order(bits: int, activations: str, m: int) -> None:
    act_quant, symmetric = ACTIVATION_KINDS[activations]
    for k in (576, 100):
        qw = make_weight(Format(bits, "zeros", 64), 200, k, exact=False, perm=True)
        packed = co.reorder(qw)
        x = make_floats(m, k, HALF)
        y = multiply(x, packed, act_quant=act_quant, act_symmetric=symmetric, out_dtype=FLOAT)
        assert_close(y, oracle(x, qw, act_quant, symmetric))
        if act_quant != "none":
            qa = co.quantize_activations(x, block_of(act_quant, 64), symmetric, packed.perm)
            assert same_bits(multiply(qa, packed, out_dtype=FLOAT), y)


# ---- options


@pytest.mark.parametrize("n", [192, 33])  # whole and broken 16-byte stores
@pytest.mark.parametrize("out_dtype", [HALF, BFLOAT, FLOAT], ids=TYPE_NAMES.get)
@pytest.mark.parametrize("activations", ["floats", "block"])
@pytest.mark.parametrize(
    "activation", [None, *reference.ACTIVATIONS, ("clamp", -1.5, 0.25)], ids=str
)
def test_bias_then_activation_then_residual(
    activation: Any, activations: str, out_dtype: torch.dtype, n: int
) -> None:
    act_quant, _ = ACTIVATION_KINDS[activations]
    # K in several parts, and one tile of K, which cannot be split
    for m, k in ((3, 576), (70, 100)):
        qw = make_weight(Format(), n, k, exact=False)
        packed = co.reorder(qw)
        x = make_floats(m, k, HALF)
        x = (x / oracle(x, qw, act_quant).std()).to(HALF)  # sums of about 1: where activations bend
        total = oracle(x, qw, act_quant)
        for bias_dtype, residual_dtype in (
            (HALF, FLOAT),
            (BFLOAT, HALF),
            (FLOAT, BFLOAT),
            (None, HALF),
            (HALF, None),
        ):
            bias = None if bias_dtype is None else make_floats(1, n, bias_dtype)[0]
            residual = None if residual_dtype is None else make_floats(m, n, residual_dtype)
            y = multiply(
                x,
                packed,
                bias=bias,
                activation=activation,
                act_quant=act_quant,
                residual=residual,
                out_dtype=out_dtype,
            )
            exact = reference.activate(total if bias is None else total + bias.double(), activation)
            assert_close(y, exact if residual is None else exact + residual.double())


@pytest.mark.parametrize("out_dtype", [HALF, BFLOAT], ids=TYPE_NAMES.get)
@pytest.mark.parametrize("dtype", [HALF, BFLOAT], ids=TYPE_NAMES.get)
@pytest.mark.parametrize("group_size", [32, 128])
def test_residuals_beside_every_tile(
    group_size: int, dtype: torch.dtype, out_dtype: torch.dtype
) -> None:
    n, k = 328, 256  # a broken row panel, whole 16-byte stores
    qw = make_weight(Format(4, "symmetric", group_size, out_dtype), n, k, exact=True)
    packed, values = co.reorder(qw), co.dequantize(qw, FLOAT).double()
    rng = generator(group_size)
    for m in (20, 40, 70, 100, 130, 150, 300, 1100):
        x = integers(-4, 5, (m, k), rng).to(out_dtype)
        total = x.double() @ values.T
        whole = make_floats(m + 1, n + 8, dtype) * 100
        # Rows from a multiple of 16 bytes on, and others.
        views = (
            whole[:m, 8:],
            whole[:m, :n].contiguous(),
            whole[:m, 1 : n + 1],
            whole.view(-1)[: m * (n + 1)].view(m, n + 1)[:, :n],
        )
        for residual in views:
            y = multiply(x, packed, residual=residual)
            assert same_bits(y, (total.float() + residual.float()).to(out_dtype))
            clamped = multiply(x, packed, activation=("clamp", -9.0, 20.0), residual=residual)
            exact = total.float().clamp(-9, 20) + residual.float()
            assert same_bits(clamped, exact.to(out_dtype))


def test_the_sum_with_its_residual_saturates() -> None:
    packed = co.reorder(make_weight(Format(4, "symmetric", 128), 192, 256, exact=True))
    for m in (5, 300):
        x = make_floats(m, 256, HALF).sign() * 2
        residual = torch.full((m, 192), 65504.0, device=GPU, dtype=HALF)
        y = multiply(x, packed, residual=residual, saturate=True)
        total = multiply(x, packed, out_dtype=FLOAT)
        assert same_bits(y, (total + residual.float()).clamp(max=65504).half())
        assert (y == 65504).any()
    assert (y < 65504).any()


def test_the_weights_own_bias() -> None:
    qw = make_weight(Format(), 192, 576, exact=False, bias=True)
    assert qw.bias is not None
    x = make_floats(5, 576, HALF)
    assert_close(multiply(x, co.reorder(qw), out_dtype=FLOAT), oracle(x, qw) + qw.bias.double())


@pytest.mark.parametrize("m", [1, 300])
@pytest.mark.parametrize("n", [192, 33])
def test_overflow_is_infinite_or_saturates(n: int, m: int) -> None:
    codes = torch.zeros(n, 128, dtype=torch.uint8, device=GPU) + 8
    codes[::2, 0], codes[1::2, 0] = 9, 7  # one and minus one
    scales = torch.full((n, 1), 2.0, device=GPU)
    packed = co.reorder(co.QuantizedWeight(codes, scales, group_size=-1))
    sign = torch.where(torch.arange(n, device=GPU) % 2 == 0, 1.0, -1.0).expand(m, n)
    x = torch.zeros(m, 128, dtype=HALF, device=GPU)
    x[:, 0] = 40000
    for act_quant in ("none", "block"):
        assert_same(multiply(x, packed, act_quant=act_quant), (sign * INF).half())
        assert_same(multiply(x, packed, act_quant=act_quant, saturate=True), (sign * 65504).half())
        assert_same(
            multiply(x, packed, act_quant=act_quant, saturate=True, out_dtype=FLOAT).sign(), sign
        )
    for dtype in (BFLOAT, FLOAT):
        largest = torch.finfo(dtype).max
        residual = sign * largest
        wide = torch.zeros(m, 128, dtype=BFLOAT, device=GPU)
        wide[:, 0] = 2.0**126
        assert_same(
            multiply(wide, packed, residual=residual, out_dtype=dtype), (sign * INF).to(dtype)
        )
        assert_same(
            multiply(wide, packed, residual=residual, out_dtype=dtype, saturate=True),
            residual.to(dtype),
        )
    # NaN is not saturated away.
    x[:, 1] = NAN
    assert multiply(x, packed, saturate=True).isnan().all()


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize(
    "activation", [None, *reference.ACTIVATIONS, ("clamp", -1.0, 1.0)], ids=str
)
@pytest.mark.parametrize("activations", ACTIVATION_KINDS)
def test_a_row_with_nan_or_infinity_is_nan_and_no_other(
    activations: str, activation: Any, bad: float
) -> None:
    act_quant, symmetric = ACTIVATION_KINDS[activations]
    options: dict[str, Any] = {
        "activation": activation,
        "act_quant": act_quant,
        "act_symmetric": symmetric,
    }
    for fmt in (Format(4), Format(8, "zeros", 32), Format(4, "offsets", 64)):
        packed = co.reorder(make_weight(fmt, 192, 576, exact=False))
        for m in (4, 70):
            x = make_floats(m, 576, HALF)
            clean = multiply(x, packed, **options)
            for column in (0, 131, 575):
                spoilt = x.clone()
                spoilt[m // 2, column] = bad
                y = multiply(spoilt, packed, **options)
                assert y[m // 2].isnan().all()
                others = torch.arange(m, device=GPU) != m // 2
                assert same_bits(y[others], clean[others])


# ---- torch.library and torch.compile


@pytest.mark.parametrize("activations", ACTIVATION_KINDS)
def test_compile_with_any_number_of_rows(activations: str) -> None:
    act_quant, symmetric = ACTIVATION_KINDS[activations]
    first = co.reorder(make_weight(Format(4, "zeros", 64), 576, 576, exact=False, bias=True))
    second = co.reorder(make_weight(Format(8, "offsets", 64), 192, 576, exact=False))

    def layer(x: Tensor) -> Tensor:
        y = co.mixed_gemm(
            x, first, activation="silu", act_quant=act_quant, act_symmetric=symmetric, residual=x
        )
        if act_quant == "none":
            return co.mixed_gemm(y, second, out_dtype=FLOAT)
        qa = co.quantize_activations(y, block_of(act_quant, 64), symmetric)
        return co.mixed_gemm(qa, second, out_dtype=FLOAT)

    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        from torch._dynamo.backends.debugging import aot_eager

        graphs.append(graph)
        return aot_eager(graph, inputs)

    run = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    for m in (5, 3, 33, 300):
        x = make_floats(m, 576, HALF)
        assert same_bits(run(x), layer(x))
    assert len(graphs) == 1


def opcheck_samples() -> Iterator[tuple[Any, tuple[Any, ...]]]:
    library = torch.ops.cutlass_ops
    packed = co.reorder(make_weight(Format(4, "zeros", 64), 200, 700, exact=False, perm=True))
    parts = (packed.codes, packed.scales, packed.zeros, packed.offsets, packed.bias, packed.perm)
    fields = (*parts, packed.n, packed.k, packed.bits, packed.group_size, packed.book, packed.gated)
    x = make_floats(5, 700, HALF)
    bias, residual = make_floats(1, 200, FLOAT)[0], make_floats(5, 200, HALF)
    qa = co.quantize_activations(x, 64, False, packed.perm)
    yield (
        library.mixed_gemm,
        (x, *fields, None, None, 0.0, 0.0, None, FLOAT, False, "none", True, False, 0, False),
    )
    yield (
        library.mixed_gemm,
        (
            x,
            *fields,
            bias,
            "clamp",
            -1.0,
            1.0,
            residual,
            BFLOAT,
            True,
            "block",
            False,
            True,
            80,
            False,
        ),
    )
    end = (bias, "silu", 0.0, 0.0, residual, HALF, False, False, 0, False)
    yield library.gemm_quantized, (qa.codes, qa.scales, qa.zeros, 64, qa.dtype, *fields, *end)
    # The padding of scales is not written: it is as long as the result needs, whatever it holds.
    yield library.quantize_activations, (make_floats(16, 700, HALF), packed.perm, 64, False)
    yield (
        library.rms_norm_quantize,
        (make_floats(16, 640, HALF), make_floats(1, 640, HALF)[0], 1e-6, None, None, 64, False),
    )
    total = (
        make_floats(16, 700, HALF),
        make_floats(1, 700, HALF)[0],
        1e-6,
        make_floats(16, 700, HALF),
        packed.perm,
        -1,
        True,
    )
    yield library.rms_norm_quantize, total
    yield (
        library.silu_mul_quantize,
        (make_floats(16, 640, HALF), make_floats(16, 640, HALF), None, 128, True),
    )
    yield library.dequantize, (*fields, HALF)


def test_opcheck() -> None:
    for op, args in opcheck_samples():
        torch.library.opcheck(op.default, args)


# ---- kernels that run, and refusals


@pytest.mark.filterwarnings("ignore")  # the profiler's own
def test_explain_names_the_kernels_that_run() -> None:
    major, minor = torch.cuda.get_device_capability()
    packed = co.reorder(make_weight(Format(), 192, 576, exact=True))
    for activations in ACTIVATION_KINDS:
        act_quant, symmetric = ACTIVATION_KINDS[activations]
        for m in (1, 20, 40, 300):
            here = co.explain(m, packed, act_quant, act_symmetric=symmetric)
            assert here.device == f"sm_{major}{minor}"
            assert here == co.explain(
                m, packed, act_quant, device="cuda:0", act_symmetric=symmetric
            )
            assert here == co.explain(
                m, packed.to("cpu"), act_quant, device=GPU, act_symmetric=symmetric
            )
            with torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CUDA]
            ) as profile:
                co.mixed_gemm(
                    make_floats(m, 576, HALF), packed, act_quant=act_quant, act_symmetric=symmetric
                )
                torch.cuda.synchronize()
            ran = {event.key for event in profile.key_averages()}
            if ran:  # a profiler that another tool (compute-sanitizer) keeps out sees nothing
                assert any(here.kernel in name for name in ran), ran
                assert any("quantize_" in name for name in ran) == (
                    "quantize_activations" in here.launches
                ), ran
                assert any("splitk_reduce" in name for name in ran) == (
                    "splitk_reduce" in here.launches
                ), ran


def test_workspace_is_torchs_and_as_large_as_explain_says() -> None:
    plain, short = (
        co.reorder(make_weight(fmt, 1000, 1536, exact=True))
        for fmt in (Format(), Format(4, "offsets", 64))
    )
    for m, act_quant, packed in (
        (1, "none", plain),
        (34, "block", plain),
        (300, "token", plain),
        (300, "block", short),
    ):
        x = make_floats(m, 1536, HALF)
        co.mixed_gemm(x, packed, act_quant=act_quant)
        torch.cuda.synchronize()
        free = torch.cuda.mem_get_info()[0]
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        y = co.mixed_gemm(x, packed, act_quant=act_quant)
        needed = torch.cuda.max_memory_allocated() - before
        # rounded up to 512 each
        assert needed <= y.nbytes + co.explain(m, packed, act_quant).workspace + 2 * 512
        torch.cuda.synchronize()
        # other workers take memory meanwhile
        if cached_allocator() and "PYTEST_XDIST_WORKER" not in os.environ:
            assert torch.cuda.mem_get_info()[0] == free


REFUSED: dict[str, tuple[Callable[[Tensor, co.PackedWeight], Any], type[Exception], str]] = {
    "fp32 as it is, batch_invariant": (
        lambda x, w: co.mixed_gemm(x.float(), w, batch_invariant=True),
        ValueError,
        "batch_invariant is True and x is float32 with act_quant='none'",
    ),
    "x on the CPU": (
        lambda x, w: co.mixed_gemm(x.cpu(), w),
        ValueError,
        "x is on cpu; the weight is on cuda:0",
    ),
    "weight on the CPU": (
        lambda x, w: co.mixed_gemm(x, w.to("cpu")),
        ValueError,
        "x is on cuda:0; the weight is on cpu",
    ),
    "codes on the CPU": (
        lambda x, w: co.mixed_gemm(co.quantize_activations(x.cpu()), w),
        ValueError,
        "x is on cpu; the weight is on cuda:0",
    ),
    "bias on the CPU": (
        lambda x, w: co.mixed_gemm(x, w, torch.zeros(192)),
        ValueError,
        "bias is on cpu",
    ),
    "residual on the CPU": (
        lambda x, w: co.mixed_gemm(x, w, residual=torch.zeros(5, 192)),
        ValueError,
        "residual is on cpu",
    ),
    "bias of another length": (
        lambda x, w: co.mixed_gemm(x, w, x.new_zeros(191)),
        ValueError,
        "bias has shape (191,); (192,) is expected",
    ),
    "a second bias": (
        lambda x, w: co.mixed_gemm(x, replace(w, bias=x.new_zeros(192)), x.new_zeros(192)),
        ValueError,
        "a bias is given, but the weight has one already",
    ),
    "residual of another shape": (
        lambda x, w: co.mixed_gemm(x, w, residual=x.new_zeros(4, 192)),
        ValueError,
        "residual has shape (4, 192); (5, 192) is expected",
    ),
    "x of another width": (
        lambda x, w: co.mixed_gemm(x[:, 1:], w),
        ValueError,
        "x has shape (5, 575); [..., 576] is expected",
    ),
    "another block": (
        lambda x, w: co.mixed_gemm(co.quantize_activations(x, 32), w),
        ValueError,
        "blocks of 32; beside weights in groups of 128",
    ),
    "double": (lambda x, w: co.mixed_gemm(x.double(), w), TypeError, "x has dtype float64"),
    "misaligned codes": (
        lambda x, w: co.mixed_gemm(x, replace(w, codes=torch.cat([w.codes[:1], w.codes])[1:])),
        ValueError,
        "codes starts at an address that is no multiple of 16 bytes",
    ),
    "misaligned scales": (
        lambda x, w: co.dequantize(
            replace(
                w,
                scales=torch.cat([w.scales.flatten()[:1], w.scales.flatten()])[1:].view_as(
                    w.scales
                ),
            )
        ),
        ValueError,
        "scales starts at an address that is no multiple of 16 bytes",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_refuses_before_anything_is_launched(what: str) -> None:
    call, error, message = REFUSED[what]
    packed = co.reorder(make_weight(Format(), 192, 576, exact=True))
    x = make_floats(5, 576, HALF)
    expected = co.mixed_gemm(x, packed)
    with pytest.raises(error) as caught:
        call(x, packed)
    assert message in str(caught.value)
    torch.cuda.synchronize()
    assert same_bits(co.mixed_gemm(x, packed), expected)
