"""``explain`` against what a profiler saw: kernels, grids, threads, clusters and shared memory of
products over all kernels.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_cases import Format, make_weight
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import cutlass_ops as co
from cutlass_ops import _C

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]  # the profiler's own

GPU, HALF = torch.device("cuda"), torch.float16
#: Static shared memory of a kernel, at most: the profiler counts it in.
_STATIC_BYTES = 4096
#: Names of kernels in a file that is not called after them.
_KERNELS = {
    "quantize_activations": (
        "quantize_blocks",
        "quantize_rows",
        "quantize_row_parts",
        "quantize_any_rows",
    ),
    "upcast_activations": ("upcast_activations", "gather_activations"),
}


def book(n: int, k: int, group_size: int = 64) -> co.QuantizedWeight:
    plain = make_weight(Format(4, "symmetric", group_size), n, k, exact=False)
    codebook = torch.linspace(-1, 1, 16, device=GPU)
    return co.QuantizedWeight(
        plain.codes, plain.scales, bits=4, group_size=group_size, book=codebook
    )


def plain(
    bits: int = 4, kind: str = "symmetric", group_size: int = 128
) -> Callable[[int, int], co.QuantizedWeight]:
    return lambda n, k: make_weight(Format(bits, kind, group_size), n, k, exact=False)


#: Weight, m, n, k, options; the kernels are those of a GPU of sm_90 and 132 SMs.
PROBLEMS: dict[
    str, tuple[Callable[[int, int], co.QuantizedWeight], int, int, int, dict[str, Any]]
] = {
    "decode_gemm": (plain(), 1, 4096, 4096, {}),
    "decode_gemm, int8": (plain(8), 1, 1000, 4096, {}),
    "decode_gemm quantises": (plain(8, "zeros"), 1, 4096, 4096, {"act_quant": "block"}),
    "decode_gemm, offsets": (plain(4, "offsets", 32), 7, 1000, 4096, {"exact": True}),
    "wgmma_decode_fold16, offsets": (plain(4, "offsets", 32), 7, 1000, 4096, {}),
    "wgmma_decode_fold16 quantises": (
        plain(4, "symmetric", 32),
        16,
        4096,
        4096,
        {"act_quant": "block"},
    ),
    "wgmma_decode_fold16, one CTA per SM": (
        plain(8, "symmetric", 64),
        16,
        14336,
        4096,
        {"act_quant": "block"},
    ),
    "decode_gemm, code book": (book, 1, 14336, 4096, {}),
    "wgmma_decode": (plain(), 16, 4096, 4096, {}),
    "wgmma_decode, 32 rows": (plain(), 32, 4096, 4096, {}),
    "wgmma_decode, code book": (book, 16, 4096, 4096, {}),
    "wgmma_decode quantises": (
        plain(4, "zeros"),
        16,
        4096,
        4096,
        {"act_quant": "block", "act_symmetric": False},
    ),
    "wgmma_decode, one CTA per SM": (plain(8), 16, 14336, 4096, {}),
    "wgmma_decode after the quantiser": (plain(), 8, 4096, 4096, {"act_quant": "token"}),
    "wgmma_gemm_a16": (plain(), 64, 4096, 4096, {}),
    "wgmma_gemm_a16, four warpgroups": (plain(), 64, 28672, 4096, {}),
    "wgmma_gemm_a16, tail": (plain(8, "zeros"), 1000, 8192, 8192, {}),
    "wgmma_gemm_a16, large": (plain(), 4096, 4096, 4096, {"out_dtype": torch.float32}),
    "wgmma_gemm_a8, blocks": (plain(), 300, 4096, 4096, {"act_quant": "block"}),
    "wgmma_gemm_a8, rows": (plain(8), 129, 4096, 4096, {"act_quant": "token"}),
    "wgmma_gemm_a8, zero points": (
        plain(4, "zeros"),
        512,
        4096,
        4096,
        {"act_quant": "block", "act_symmetric": False},
    ),
    "wgmma_gemm_a8, column sums": (
        plain(8),
        1000,
        4096,
        4096,
        {"act_quant": "token", "act_symmetric": False},
    ),
    "wgmma_gemm_a8, zero points of weights": (
        plain(8, "zeros"),
        300,
        4096,
        4096,
        {"act_quant": "block"},
    ),
    "wgmma_gemm_a8, all of K": (
        plain(8, "symmetric", -1),
        1024,
        4096,
        4096,
        {"act_quant": "token"},
    ),
    "wgmma_fold16": (plain(4, "offsets", 32), 777, 4096, 4096, {}),
    "wgmma_fold16, int8": (plain(8, "symmetric", 32), 100, 4096, 4096, {}),
    "wgmma_fold16, int8 x": (plain(4, "symmetric", 64), 300, 4096, 4096, {"act_quant": "block"}),
    "wgmma_fold16, code book": (book, 300, 4096, 4096, {}),
    "mma_gemm_a16": (plain(), 100, 4096, 4096, {"architecture": 80}),
    "mma_gemm_a16, int8": (plain(8), 300, 4096, 4096, {"architecture": 80}),
    "mma_gemm_a16, exact": (plain(4, "offsets", 32), 20, 4096, 4096, {"exact": True}),
    "mma_gemm_a8": (plain(), 16, 4096, 4096, {"architecture": 80, "act_quant": "block"}),
    "mma_gemm_a8, exact": (
        plain(8, "zeros"),
        100,
        4096,
        4096,
        {"exact": True, "act_quant": "token", "act_symmetric": False},
    ),
    "book_gemm_a16": (book, 4, 4096, 4096, {"architecture": 80}),
    "batch-invariant": (plain(), 5, 4096, 4096, {"batch_invariant": True}),
}


def launches(run: Callable[[], object], trace: Path) -> list[dict[str, Any]]:
    """The kernels that ``run`` starts, in order, as Kineto traces them."""
    run()  # one-time work is done before
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(trace))
    events = [
        event
        for event in json.loads(trace.read_text())["traceEvents"]
        if event.get("cat") == "kernel"
    ]
    return sorted(events, key=lambda event: event["ts"])


def check(
    x: Tensor | co.QuantizedActivations, packed: co.PackedWeight, trace: Path, **options: Any
) -> co.Explanation:
    explanation = co.explain(x, packed, **options)
    ran = launches(lambda: co.mixed_gemm(x, packed, **options), trace)
    if not ran:
        pytest.skip("the profiler sees nothing: another tool (compute-sanitizer) keeps it out")
    # torch's own copies of x stand before.
    ran = [event for event in ran if "cutlass_ops" in event["name"]]
    assert len(ran) == len(explanation.launches), (
        [event["name"] for event in ran],
        explanation.launches,
    )
    for event, name in zip(ran, explanation.launches, strict=True):
        assert any(kernel in event["name"] for kernel in _KERNELS.get(name, (name,))), (
            event["name"],
            name,
        )
    seen = next(
        event["args"]
        for event, name in zip(ran, explanation.launches, strict=True)
        if name == explanation.kernel
    )
    assert list(seen["grid"]) == [*explanation.grid, 1]
    assert list(seen["block"]) == [explanation.threads, 1, 1]
    assert (
        explanation.shared_memory
        <= seen["shared memory"]
        <= explanation.shared_memory + _STATIC_BYTES
    )
    if "cluster" in seen:
        assert list(seen["cluster"]) == [explanation.cluster, 1, 1]
    return explanation


@pytest.mark.parametrize("name", PROBLEMS)
def test_explain_says_what_the_profiler_sees(name: str, tmp_path: Path) -> None:
    make, m, n, k, options = PROBLEMS[name]
    packed = co.reorder(make(n, k))
    x = torch.randn(m, k, dtype=HALF, device=GPU)
    explanation = check(x, packed, tmp_path / "trace.json", **options)
    hopper = (
        torch.cuda.get_device_capability() == (9, 0)
        and torch.cuda.get_device_properties(0).multi_processor_count == 132
    )
    if hopper and name != "batch-invariant":
        assert name.startswith(explanation.kernel)


def test_explain_says_what_the_profiler_sees_of_any_x(tmp_path: Path) -> None:
    packed, zeros = co.reorder(plain()(4096, 4096)), co.reorder(plain(4, "zeros")(4096, 4096))
    wide = torch.randn(64, 8192, dtype=HALF, device=GPU)
    for x in (
        wide[:, :4096],  # as it is
        wide[:, 4:4100],  # rows that do not start on 16 bytes are copied
        torch.randn(4096, 64, dtype=HALF, device=GPU).t(),
        wide.view(4, 16, 8192)[:, ::2, :4096],
    ):
        check(x, packed, tmp_path / "trace.json")
    for symmetric in (True, False):
        for block in (128, -1):
            quantized = co.quantize_activations(
                torch.randn(300, 4096, dtype=HALF, device=GPU), block, symmetric
            )
            check(quantized, zeros, tmp_path / "trace.json")
            check(quantized, co.reorder(plain(4, "offsets")(4096, 4096)), tmp_path / "trace.json")


def test_the_device_has_the_memory_bandwidth_of_its_card() -> None:
    """In GB/s, of clock and bus width: 2 x 2619 MHz x 5120 bits, 2 x 3201 MHz x 6144 bits; an H200
    with a clock of 3134 MHz was seen, too.
    """
    known = {"NVIDIA H100 80GB HBM3": 3352, "NVIDIA H200": 4916}
    found = _C.current_device().memory_bandwidth
    assert found > 0
    assert found == pytest.approx(known.get(torch.cuda.get_device_name(0), found), rel=0.03)
