"""The same bits every time, on streams, in graphs and on every device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_cases import (
    ACTIVATION_KINDS,
    BFLOAT,
    FLOAT,
    GPU,
    HALF,
    NAN,
    Format,
    assert_close,
    assert_same,
    block_of,
    generator,
    is_exact,
    make_exact_floats,
    make_floats,
    make_weight,
    multiply,
    oracle,
    same_bits,
)
from torch import Tensor

import cutlass_ops as co
from cutlass_ops.ops import products

pytestmark = pytest.mark.gpu

# ---- the same bits every time; streams; graphs; devices


RUNS = [
    pytest.param(
        Format(bits, kind, group_size),
        activations,
        m,
        id=f"w{bits}-{kind}-g{group_size}-{activations}-m{m}",
    )
    for bits, kind, group_size in ((4, "symmetric", 128), (4, "zeros", 32), (8, "offsets", 128))
    for activations in ("floats", "token", "block-asym")
    for m in (1, 40, 300)
]


@pytest.mark.parametrize(("fmt", "activations", "m"), RUNS)
def test_every_run_and_every_stream_give_the_same_bits(
    fmt: Format, activations: str, m: int
) -> None:
    act_quant, symmetric = ACTIVATION_KINDS[activations]
    packed = co.reorder(make_weight(fmt, 1000, 1536, exact=False))
    x = make_floats(m, 1536, HALF)
    options: dict[str, Any] = {
        "act_quant": act_quant,
        "act_symmetric": symmetric,
        "out_dtype": FLOAT,
    }
    first = multiply(x, packed, **options)
    assert not first.isnan().any()
    for _ in range(5):
        assert same_bits(multiply(x, packed, **options), first)
    streams = [torch.cuda.Stream() for _ in range(3)]
    found = []
    for stream in streams:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            found.append(co.mixed_gemm(x, packed, **options))
    torch.cuda.synchronize()
    for y in found:
        assert same_bits(y, first)


@pytest.mark.parametrize("activations", ACTIVATION_KINDS)
def test_runs_on_the_current_stream(activations: str) -> None:
    act_quant, symmetric = ACTIVATION_KINDS[activations]
    packed = co.reorder(make_weight(Format(), 192, 576, exact=False))
    x = make_floats(5, 576, HALF)
    expected = co.mixed_gemm(x, packed, act_quant=act_quant, act_symmetric=symmetric)
    late = torch.full_like(x, NAN)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # some 10 ms in which any other stream would read NaN
        late.copy_(x)
        y = co.mixed_gemm(late, packed, act_quant=act_quant, act_symmetric=symmetric)
        late.fill_(NAN)  # and after the product, not before
    stream.synchronize()
    assert same_bits(y, expected)


# decode_gemm (3) and wgmma_decode (16) read weights before they wait for their predecessor, and the
# quantiser of 16 tokens lets its successor start before it waits itself; M = 40 has split-K slices
# and splitk_reduce.
@pytest.mark.parametrize(
    ("m", "act_quant"),
    [
        (3, "block"),
        (16, "none"),
        (16, "block"),
        (16, "token"),
        (17, "block"),
        (40, "block"),
        (40, "none"),
    ],
)
def test_back_to_back_products_that_feed_each_other(m: int, act_quant: str) -> None:
    # Kernels may start before their predecessor ends (programmatic dependent launch); they must
    # still read what it wrote.
    packed = co.reorder(make_weight(Format(8, "symmetric", 128), 1536, 1536, exact=False))
    options: dict[str, Any] = {"act_quant": act_quant, "activation": ("clamp", -2.0, 2.0)}

    def chain(pause: bool) -> Tensor:
        y = make_floats(m, 1536, HALF)
        for _ in range(20):
            y = co.mixed_gemm(y, packed, residual=y, **options)
            if pause:
                torch.cuda.synchronize()
        return y

    assert same_bits(chain(pause=False), chain(pause=True))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("activations", ACTIVATION_KINDS)
def test_never_synchronizes(activations: str) -> None:
    act_quant, symmetric = ACTIVATION_KINDS[activations]
    packed = co.reorder(make_weight(Format(4, "zeros", 32), 200, 700, exact=False))
    x = make_floats(5, 700, HALF)
    bias = make_floats(1, 200, HALF)[0]
    torch.cuda.set_sync_debug_mode("error")
    try:
        co.mixed_gemm(x, packed, bias, "silu", act_quant, symmetric)
        if act_quant != "none":
            co.mixed_gemm(co.quantize_activations(x, block_of(act_quant, 32), symmetric), packed)
        co.dequantize(packed)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("group_size", [32, 128, -1])
@pytest.mark.parametrize("kind", ["symmetric", "zeros", "offsets"])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_fp32_as_it_is(
    bits: int, kind: str, group_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In panels, with the epilogue of every other product, captured in a CUDA graph,
    and with gradients.
    """
    n, k = 200, 576
    monkeypatch.setattr(products, "_PANEL_VALUES", 70 * k)
    for perm in (False, True):
        qw = make_weight(Format(bits, kind, group_size), n, k, exact=False, bias=True, perm=perm)
        packed = co.reorder(qw)
        for m in (0, 1, 17, 300):
            x = make_floats(m, k, FLOAT)
            y = multiply(x, packed)
            assert y.dtype == FLOAT
            assert qw.bias is not None
            if m:
                assert_close(y, oracle(x, qw) + qw.bias.double())
    residual = make_floats(300, n, HALF)
    y = co.mixed_gemm(x, packed, activation="silu", residual=residual, out_dtype=BFLOAT)
    z = oracle(x, qw) + qw.bias.double()
    assert_close(y, z * z.sigmoid() + residual.double())
    x[3, 5] = NAN
    assert co.mixed_gemm(x, packed).isnan().all(1).nonzero().tolist() == [[3]]
    wide = torch.zeros(7, 2 * k, device=GPU)
    wide[:, :k] = make_floats(7, k, FLOAT)
    assert same_bits(
        co.mixed_gemm(wide[:, :k], packed), co.mixed_gemm(wide[:, :k].contiguous(), packed)
    )
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = co.mixed_gemm(x, packed)
    x.copy_(make_floats(300, k, FLOAT) * 2)
    graph.replay()
    assert same_bits(captured, co.mixed_gemm(x, packed))
    assert co.explain(x, packed).launches == ("dequantize",)


@pytest.mark.parametrize("book", ["nf4", "mxfp4"])
def test_fp32_as_it_is_with_a_code_book(book: str) -> None:
    qw = co.quantize(torch.randn(200, 576, generator=generator(3), device=GPU), 4, 32, book=book)
    x = make_floats(17, 576, FLOAT)
    assert_close(multiply(x, co.reorder(qw)), oracle(x, qw))


@pytest.mark.parametrize("m", [1, 300])
@pytest.mark.parametrize("activations", ACTIVATION_KINDS)
def test_graph_capture_and_replay_with_new_inputs(activations: str, m: int) -> None:
    act_quant, symmetric = ACTIVATION_KINDS[activations]
    packed = co.reorder(make_weight(Format(4, "zeros", 64), 576, 1536, exact=False))
    bias = make_floats(1, 576, HALF)[0]
    x = make_floats(m, 1536, HALF)
    residual = make_floats(m, 576, HALF)

    def run() -> tuple[Tensor, Tensor]:
        y = co.mixed_gemm(x, packed, bias, "silu", act_quant, symmetric, residual=residual)
        if act_quant == "none":
            return y, co.dequantize(packed)
        qa = co.quantize_activations(x, block_of(act_quant, 64), symmetric)
        return y, co.mixed_gemm(qa, packed, bias, "silu", residual=residual)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for seed in range(3):
        x.copy_(torch.randn(m, 1536, generator=generator(seed), device=GPU))
        residual.copy_(torch.randn(m, 576, generator=generator(seed, 1), device=GPU))
        for y in captured:
            y.fill_(NAN)
        graph.replay()
        for got, expected in zip(captured, run(), strict=True):
            assert same_bits(got, expected)


@pytest.mark.parametrize("act_quant", ["none", "block"])
@pytest.mark.parametrize(("n", "k"), [(17152, 2048), (27136, 8192)])
def test_replays_of_split_k_tiles(n: int, k: int, act_quant: str) -> None:
    # A replay finds the previous one's data in the workspace, and must wait for its own split-K
    # slices. On 66 clusters the tail is one tile, or 40, whose last slices are computed two by a
    # cluster.
    packed = co.reorder(make_weight(Format(8), n, k, exact=False))
    if co.explain(100, packed, act_quant).tail_tiles == 0:
        pytest.skip("this GPU's waves leave no tiles over")
    x = make_floats(100, k, HALF)
    assert_close(
        co.mixed_gemm(x, packed, act_quant=act_quant), oracle(x, packed.unpack(), act_quant)
    )
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        co.mixed_gemm(x, packed, act_quant=act_quant)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = co.mixed_gemm(x, packed, act_quant=act_quant)
    for seed in range(5):
        x.copy_(torch.randn(100, k, generator=generator(seed), device=GPU))
        graph.replay()
        got = y.clone()
        assert same_bits(got, co.mixed_gemm(x, packed, act_quant=act_quant))


def test_two_devices() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU")
    qw = make_weight(Format(4, "zeros", 32), 200, 700, exact=False)
    x = make_floats(5, 700, HALF)
    expected = {
        act: co.mixed_gemm(x, co.reorder(qw), act_quant=act) for act in ("none", "token", "block")
    }
    packed = co.reorder(qw).to("cuda:1")
    assert torch.cuda.current_device() == 0
    for act, y in expected.items():
        other = co.mixed_gemm(x.to("cuda:1"), packed, act_quant=act)
        assert other.device == torch.device("cuda:1")
        assert torch.equal(other.cpu(), y.cpu())
    assert torch.equal(co.dequantize(packed).cpu(), co.dequantize(co.reorder(qw)).cpu())
    assert torch.cuda.current_device() == 0
    with pytest.raises(ValueError, match="x is on cuda:0; the weight is on cuda:1"):
        co.mixed_gemm(x, packed)


# ---- bits that do not depend on M, and kernels of earlier architectures


@pytest.mark.parametrize(
    "fmt",
    [
        *(Format(bits, kind) for bits in (4, 8) for kind in ("symmetric", "zeros", "offsets")),
        *(Format(4, kind, group) for kind in ("symmetric", "zeros") for group in (16, 32, 64)),
    ],
    ids=str,
)
@pytest.mark.parametrize("activations", ACTIVATION_KINDS)
def test_a_row_has_the_same_bits_whatever_m_is(activations: str, fmt: Format) -> None:
    act_quant, symmetric = ACTIVATION_KINDS[activations]
    options: dict[str, Any] = {
        "act_quant": act_quant,
        "act_symmetric": symmetric,
        "batch_invariant": True,
    }
    for n, k in ((320, 4096), (9000, 512), (200, 700)):
        packed = co.reorder(make_weight(fmt, n, k, exact=False, bias=True))
        x = make_floats(1000, k, HALF)
        whole = co.mixed_gemm(x, packed, **options)
        want = oracle(x, packed.unpack(), act_quant, symmetric) + packed.unpack().bias.double()
        assert_close(whole, want, not is_exact(whole, x, packed, **options))
        for m in (1, 3, 16, 17, 64, 129, 1000):
            for start in {0, 1000 - m, (1000 - m) // 3}:
                assert same_bits(
                    co.mixed_gemm(x[start : start + m], packed, **options), whole[start : start + m]
                )
        # rows that do not start on 16 bytes
        wide = torch.nn.functional.pad(x, (3, 2), value=NAN)[:, 3:-2]
        assert same_bits(co.mixed_gemm(wide[7:8], packed, **options), whole[7:8])
        if act_quant != "none":
            qa = co.quantize_activations(x[5:40], block_of(act_quant, fmt.group_size), symmetric)
            assert same_bits(co.mixed_gemm(qa, packed, batch_invariant=True), whole[5:40])


@pytest.mark.parametrize("name", ["nf4", "e4m3"])
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (2000, 8192), (14336, 1024)])
def test_up_to_4097_rows_have_the_same_bits(n: int, k: int, name: str) -> None:
    weight = make_floats(n, k, HALF) / 64
    packed = co.reorder(co.quantize(weight, 4 if name == "nf4" else 8, 64, book=name))
    x = make_floats(4097, k, HALF)
    whole = co.mixed_gemm(x, packed, activation="silu", batch_invariant=True)
    for m in (1, 2, 7, 16, 17, 33, 100, 128, 500, 2048):
        y = co.mixed_gemm(x[4097 - m :], packed, activation="silu", batch_invariant=True)
        assert same_bits(y, whole[4097 - m :])


@pytest.mark.parametrize("act_quant", ["none", "token"])
def test_batch_invariant_products_split_k_for_more_rows_than_a_grid_is_high(act_quant: str) -> None:
    m, n, k = 70_001, 64, 2048
    packed = co.reorder(make_weight(Format(), n, k, exact=False))
    assert co.explain(m, packed, act_quant, batch_invariant=True).slices > 1
    x = make_floats(m, k, HALF)
    y = co.mixed_gemm(x, packed, act_quant=act_quant, batch_invariant=True)
    for row in (0, 65_535, m - 1):
        alone = co.mixed_gemm(x[row : row + 1], packed, act_quant=act_quant, batch_invariant=True)
        assert same_bits(y[row : row + 1], alone)


@pytest.mark.parametrize("fmt", [Format(4), Format(8, "zeros")], ids=str)
@pytest.mark.parametrize("activations", ACTIVATION_KINDS)
def test_kernels_of_an_earlier_architecture(activations: str, fmt: Format) -> None:
    act_quant, symmetric = ACTIVATION_KINDS[activations]
    options: dict[str, Any] = {"act_quant": act_quant, "act_symmetric": symmetric}
    packed = co.reorder(make_weight(fmt, 520, 712, exact=True))
    for m in (1, 40, 300):
        x = make_exact_floats(m, 712, HALF, act_quant, symmetric, 128)
        y = co.mixed_gemm(x, packed, out_dtype=FLOAT, architecture=80, **options)
        assert_same(y, oracle(x, packed.unpack(), act_quant, symmetric).float())
        assert (
            co.explain(m, packed, **options, architecture=80).kernel
            == co.explain(m, packed, **options, device="sm_80").kernel
        )
