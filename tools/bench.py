#!/usr/bin/env python3
"""Time the public calls on a GPU, torch's matmuls and the peers that are installed, in one process.

    tools/bench.py                                 the shapes and rows of docs/performance.md
    tools/bench.py --host                          CPU time of eager calls
    tools/bench.py --architecture 80 --no-peers    the kernels for sm_80, on a later GPU
    tools/bench.py --shapes 4096:4096 --ms 1,16,4096 --formats w4a16,w4a8-block --out results.json

A time is the median over replays of a CUDA graph that walks through copies of the weight which
together exceed three times the L2 cache, so that no copy is found there: a burst of 40 ms, after a
rest. It is one whole call as a user makes it: fp16 in, fp16 out, the quantisation of the
activations included. Data are random. Weights are in groups of 128 unless their name says otherwise
(-g64, -g32, -g16), of nf4 in groups of 64, of mxfp4 of 32; "channel" has one scale a row. -zp: zero
points of the weight; -offsets: real ones; -asym: zero points of the activations. Scales are fp16;
those of nf4, q4_k (4 bits, groups of 32, offsets) and q6_k (8 bits, groups of 16) are fp32, as
bitsandbytes' and GGUF's are.

floor: the larger of the weight's bytes over the bandwidth at which this process read memory, and
the operations over the tensor cores' datasheet rate (sm_90 alone); for what only moves memory, the
bytes that must move over that bandwidth. Peers: torch's fp16 product, its int8 product (no
quantisation, no group scales), and humming, bitsandbytes and vLLM, if installed.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

import cutlass_ops as co
from cutlass_ops.weights.packed_weight import pack_codes, unpack_codes

COLD_BYTES = 3 * (64 << 20)
#: After some 50 ms of large products an H200 lowers its clock by up to a quarter, for later calls
#: too: each call is timed for less than that, after a rest.
BURST_MILLISECONDS, REST_SECONDS = 40, 0.1
#: Dense tensor-core operations per clock and SM (NVIDIA H100 Tensor Core GPU
#: Architecture, whitepaper).
RATES = {(9, 0): {16: 4096, 8: 8192}}


class Format(NamedTuple):
    """A kind of weight, and what mixed_gemm does with the activations."""

    bits: int
    group_size: int
    options: dict[str, Any]
    #: "zeros": integer zero points (AWQ, GPTQ); "offsets": real ones (GGUF's Q4_1 and Q4_K, MNN)
    shift: str = ""
    book: str | None = None
    #: of scales and offsets
    scale_type: torch.dtype = torch.float16

    @property
    def weight(self) -> tuple[int, int, str, str | None, torch.dtype]:
        """What ``packed_weight`` takes."""
        return self.bits, self.group_size, self.shift, self.book, self.scale_type


NONE, BLOCK, TOKEN = ({"act_quant": mode} for mode in ("none", "block", "token"))
ASYMMETRIC_BLOCK, ASYMMETRIC_TOKEN = (
    BLOCK | {"act_symmetric": False},
    TOKEN | {"act_symmetric": False},
)
FORMATS = {
    "w4a16": Format(4, 128, NONE),
    "w8a16": Format(8, 128, NONE),
    "w4a8-block": Format(4, 128, BLOCK),
    "w8a8-block": Format(8, 128, BLOCK),
    "w4a8-token": Format(4, 128, TOKEN),
    "w8a8-token": Format(8, 128, TOKEN),
    "w8a8-channel": Format(8, -1, TOKEN),
    "w4a8-block-asym": Format(4, 128, ASYMMETRIC_BLOCK),
    "w8a8-block-asym": Format(8, 128, ASYMMETRIC_BLOCK),
    "w8a8-channel-asym": Format(8, -1, ASYMMETRIC_TOKEN),
    "nf4": Format(4, 64, NONE, book="nf4", scale_type=torch.float32),
    "w4a16-zp": Format(4, 128, NONE, "zeros"),
    "w8a16-zp": Format(8, 128, NONE, "zeros"),
    "w4a8-block-zp": Format(4, 128, BLOCK, "zeros"),
    "w8a8-block-zp": Format(8, 128, BLOCK, "zeros"),
    "w8a8-channel-zp": Format(8, -1, TOKEN, "zeros"),
    "w4a16-g64": Format(4, 64, NONE),
    "w8a16-g64": Format(8, 64, NONE),
    "w4a8-block-g64": Format(4, 64, BLOCK),
    "w8a8-block-g64": Format(8, 64, BLOCK),
    "w4a16-g32": Format(4, 32, NONE),
    "w8a16-g32": Format(8, 32, NONE),
    "w4a16-g16": Format(4, 16, NONE),
    "w2a16": Format(2, 128, NONE),
    "w2a16-g32": Format(2, 32, NONE),
    "w8a16-g16": Format(8, 16, NONE),
    "w4a16-g32-offsets": Format(4, 32, NONE, "offsets"),
    "w4a8-block-g32": Format(4, 32, BLOCK),
    "w8a8-block-g32": Format(8, 32, BLOCK),
    "w8a8-block-g16": Format(8, 16, BLOCK),
    "w4a8-block-g32-offsets": Format(4, 32, BLOCK, "offsets"),
    "fp8": Format(8, 128, NONE, book="e4m3"),
    "mxfp4": Format(4, 32, NONE, book="mxfp4"),
    "q4_k": Format(4, 32, NONE, "offsets", scale_type=torch.float32),
    "q6_k": Format(8, 16, NONE, scale_type=torch.float32),
}
#: What only moves memory, once for each shape: 4 bits to fp16 or back, or codes to the
#: packed order or back.
PACKS = ("pack-4", "pack-8", "unpack-4", "unpack-8")
MOVES = (
    "awq-dequantize",
    "nf4-quantize",
    "fp4-quantize",
    "nf4-dequantize",
    "fp4-dequantize",
    "dequantize",
    *PACKS,
)
#: Products by AWQ tensors as they are stored, in groups of 128 (of fewer where K is no multiple).
AWQ_GEMM = "awq-gemm"
Call = Callable[[], torch.Tensor]


def graph_time(calls: list[Call]) -> float:
    """Median microseconds of one call; the calls run in turn."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:  # the first calls load kernels
            call()
        start.record()
        for call in calls:
            call()
        stop.record()
        stream.synchronize()
        once = max(start.elapsed_time(stop), 1e-3)  # milliseconds
        rounds = max(1, min(64, int(3 / once)))
        replays = max(5, min(15, int(BURST_MILLISECONDS / (rounds * once))))
        graph = torch.cuda.CUDAGraph()
        # torch.cuda.graph collects garbage first, which takes longer than most rows
        graph.capture_begin()
        for _ in range(rounds):
            for call in calls:
                call()
        graph.capture_end()
        stream.synchronize()
        time.sleep(REST_SECONDS)
        times = []
        for _ in range(replays + 1):
            start.record()
            graph.replay()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop))
    return statistics.median(times[1:]) / (rounds * len(calls)) * 1e3


def kernel_time(calls: list[Call], rounds: int = 20) -> float:
    """Mean microseconds of a call's kernels without the gaps between them, for calls that a
    graph cannot capture.
    """
    for call in calls:
        call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(rounds):
            for call in calls:
                call()
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in profile.key_averages()) / (
        rounds * len(calls)
    )


def copies(nbytes: int) -> int:
    """The number of copies of a weight that together exceed the L2 cache."""
    return max(1, min(64, -(-COLD_BYTES // nbytes)))


def read_bandwidth() -> float:
    """Bytes a second at which a reduction reads 4 GB."""
    data = torch.randn(1 << 30, device="cuda")
    return 4 * data.numel() / graph_time([lambda: data.sum()]) * 1e6


def heading(bandwidth: float) -> dict[str, Any]:
    """Device, versions and commit of the results; printed too."""
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, cwd=Path(__file__).parent
    )
    result = {
        "device": torch.cuda.get_device_name(),
        "clock_mhz": torch.cuda.clock_rate(),
        "read_tb_per_s": round(bandwidth / 1e12, 2),
        "torch": torch.__version__,
        "cutlass_ops": co.__version__,
        "commit": commit.stdout.strip() if commit.returncode == 0 else None,
    }
    print(
        f"{result['device']}, {result['clock_mhz']} MHz, reads {result['read_tb_per_s']} TB/s, "
        f"torch {torch.__version__}"
    )
    return result


def random_weight(
    n: int, k: int, bits: int, group_size: int, shift: str, scale_type: torch.dtype
) -> co.QuantizedWeight:
    """Uniform codes and positive scales; zero points of a few codes about the middle, or as
    many scales as offsets.
    """
    generator = torch.Generator("cuda").manual_seed(n + k + bits)
    codes = torch.randint(0, 2**bits, (n, k), dtype=torch.uint8, generator=generator, device="cuda")
    scales = (
        torch.rand(
            n, 1 if group_size == -1 else -(-k // group_size), generator=generator, device="cuda"
        )
        * 0.01
        + 0.005
    ).to(scale_type)
    zeros = torch.randint(
        2 ** (bits - 1) - 3,
        2 ** (bits - 1) + 4,
        scales.shape,
        dtype=torch.uint8,
        generator=generator,
        device="cuda",
    )
    shifts: dict[str, Any] = {}
    if shift == "zeros":
        shifts["zeros"] = zeros
    elif shift == "offsets":
        shifts["offsets"] = (scales.float() * (2 ** (bits - 1) - zeros.float())).to(scale_type)
    return co.QuantizedWeight(codes, scales, bits=bits, group_size=group_size, **shifts)


def random_book_weight(
    n: int, k: int, bits: int, group_size: int, book: str, scale_type: torch.dtype
) -> co.QuantizedWeight:
    """A code book's codes of normal weights."""
    generator = torch.Generator("cuda").manual_seed(n + k)
    rows = torch.randn(min(n, 512), k, generator=generator, device="cuda").to(scale_type)
    return co.quantize(
        rows.repeat(-(-n // len(rows)), 1)[:n], bits=bits, group_size=group_size, book=book
    )


@lru_cache(maxsize=4)  # formats that differ in their activations share a weight
def packed_weight(
    n: int,
    k: int,
    bits: int,
    group_size: int = 128,
    shift: str = "",
    book: str | None = None,
    scale_type: torch.dtype = torch.float16,
) -> co.PackedWeight:
    """A random weight on the GPU."""
    weight = (
        random_book_weight(n, k, bits, group_size, book, scale_type)
        if book
        else random_weight(n, k, bits, group_size, shift, scale_type)
    )
    return co.reorder(weight.to("cuda"))


def awq_tensors(
    n: int, k: int, count: int
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Random weights as AutoAWQ stores them: codes, scales, zero points."""

    def words(rows: int) -> torch.Tensor:
        return torch.randint(-(2**31), 2**31, (rows, n // 8), device="cuda").int()

    groups = k // math.gcd(k, 128)
    return [
        (words(k), torch.rand(groups, n, device="cuda").half() * 0.01 + 0.005, words(groups))
        for _ in range(count)
    ]


def vllm_kernel(name: str) -> Callable[..., torch.Tensor] | None:
    """One of vLLM's kernels, if they are loaded."""
    kernel: Callable[..., torch.Tensor] | None = (
        getattr(torch.ops._C, name, None) if hasattr(torch.ops, "_C") else None
    )
    return kernel


def moves(
    name: str, n: int, k: int, with_peers: bool
) -> tuple[list[Call], dict[str, list[Call]], float]:
    """Memory-bound calls, the peers' equivalents, and the bytes that must be moved."""
    count = copies(n * k // 2)
    torch.manual_seed(n + k)
    nbytes = 2.5 * n * k
    if name == "awq-dequantize":
        awq = awq_tensors(n, k, count)
        theirs = vllm_kernel("awq_dequantize") if with_peers else None
        others = {} if theirs is None else {"vllm": [partial(theirs, *w, 0, 0, 0) for w in awq]}
        return [partial(co.awq_dequantize, *w) for w in awq], others, nbytes
    if name == "dequantize":
        return (
            [partial(co.dequantize, copy.deepcopy(packed_weight(n, k, 4))) for _ in range(count)],
            {},
            nbytes,
        )
    kind, verb = name.split("-")
    if name in PACKS:
        bits = int(verb)
        codes = [
            torch.randint(1 << bits, (n, k), device="cuda", dtype=torch.uint8)
            for _ in range(copies(n * k))
        ]
        nbytes = n * k * (1 + bits / 8)
        if kind == "pack":
            return [partial(pack_codes, c, bits) for c in codes], {}, nbytes
        return [partial(unpack_codes, pack_codes(c, bits), n, k, bits) for c in codes], {}, nbytes
    floats = [torch.randn(n, k, device="cuda").half() for _ in range(min(count, copies(2 * n * k)))]
    nbytes += n * k / 16
    others: dict[str, list[Call]] = {}
    try:
        import bitsandbytes.functional as bnb
    except ImportError:
        with_peers = False
    if verb == "quantize":
        if with_peers:  # on the default stream: no graph takes it
            quantize = torch.ops.bitsandbytes.quantize_4bit
            others["bitsandbytes"] = [partial(quantize, x, 64, kind, torch.uint8) for x in floats]
        return [partial(co.quantize_4bit, x, 64, kind) for x in floats], others, nbytes
    flat = [co.quantize_4bit(floats[i % len(floats)], 64, kind) for i in range(count)]
    ours: list[Call] = [partial(co.dequantize_4bit, *values, (n, k), 64, kind) for values in flat]
    if not with_peers:
        return ours, others, nbytes
    states = [
        bnb.quantize_4bit(floats[i % len(floats)], blocksize=64, quant_type=kind)
        for i in range(count)
    ]
    others["bitsandbytes"] = [partial(bnb.dequantize_4bit, *state) for state in states]
    return ours, others, nbytes


def measure_move(name: str, n: int, k: int, bandwidth: float, with_peers: bool) -> dict[str, Any]:
    """One row of results."""
    calls, others, nbytes = moves(name, n, k, with_peers)
    us, timer = graph_time(calls), kernel_time if name.endswith("-quantize") else graph_time
    row: dict[str, Any] = {
        "format": name,
        "n": n,
        "k": k,
        "m": 0,
        "us": round(us, 2),
        "tb_per_s": round(nbytes / us / 1e6, 2),
    }
    row |= {
        "floor_us": round(nbytes / bandwidth * 1e6, 2),
        "peers_us": {p: round(timer(c), 2) for p, c in others.items()},
    }
    versus = "".join(f"  {t / us:5.2f} x {p}" for p, t in row["peers_us"].items())
    share = row["floor_us"] / us
    print(
        f"{name:16s} {n:5d} x {k:5d} {us:9.2f} us {row['tb_per_s']:7.2f} TB/s  floor / time "
        f"{share:4.2f}{versus}",
        flush=True,
    )
    torch.cuda.empty_cache()
    return row


class Peer(NamedTuple):
    """A peer's product of the same size."""

    make: Callable[[], Any]  #: a copy of the weight
    call: Callable[[torch.Tensor, Any], torch.Tensor]  #: by the activations
    nbytes: int  #: of a copy


def peers(name: str, packed: co.PackedWeight) -> dict[str, Peer]:
    """The installed peers that support the format."""
    form = FORMATS[name]
    bits, group_size, options = form[:3]
    dense = co.dequantize(packed, torch.float16)
    found = {"torch fp16": Peer(dense.clone, lambda x, w: x @ w.t(), dense.nbytes)}
    if name == "nf4":
        try:
            import bitsandbytes as bnb
        except ImportError:
            return found
        found["bitsandbytes"] = Peer(
            lambda: bnb.functional.quantize_4bit(dense, blocksize=64, quant_type="nf4"),
            lambda x, w: bnb.matmul_4bit(x, w[0].t(), w[1]),
            packed.nbytes,
        )
        return found
    if name.startswith("w8a8"):
        codes = torch.randint(-127, 128, dense.shape, device="cuda", dtype=torch.int8)
        rows: dict[int, torch.Tensor] = {}

        def int8(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            m = max(32, x.shape[0])  # the peer needs 32 rows
            if m not in rows:
                rows[m] = torch.randint(-127, 128, (m, x.shape[1]), device="cuda", dtype=torch.int8)
            return torch._int_mm(rows[m], w.t())

        found["torch int8"] = Peer(codes.clone, int8, codes.nbytes)
    # humming's scales are those of x.
    if options.get("act_symmetric", True) and not form.shift and form.scale_type == torch.float16:
        try:
            from humming.layer import HummingLayer
        except ImportError:
            return found

        def layer() -> HummingLayer:
            config: dict[str, Any] = {}
            if options["act_quant"] != "none":
                config = {"dtype": "int8"} | (
                    {"group_size": group_size} if options["act_quant"] == "block" else {}
                )
            made = HummingLayer(
                shape_n=packed.n,
                shape_k=packed.k,
                weight_config={"dtype": f"uint{bits}"}
                | ({"group_size": group_size} if group_size > 0 else {}),
                input_config=config,
                torch_dtype=torch.half,
            ).cuda()
            made.load_from_unquantized(dense)
            made.transform()
            return made

        found["humming"] = Peer(layer, lambda x, made: made(x), packed.nbytes)
    return found


def product_floor(m: int, n: int, k: int, nbytes: int, bandwidth: float, bits: int) -> float:
    """Microseconds in which the weight can be read and the tensor cores multiply
    activations of ``bits``.
    """
    floor = nbytes / bandwidth * 1e6
    properties = torch.cuda.get_device_properties(0)
    if rate := RATES.get((properties.major, properties.minor), {}).get(bits):
        clock = torch.cuda.clock_rate() * 1e6
        floor = max(floor, 2 * m * n * k / (rate * properties.multi_processor_count * clock) * 1e6)
    return floor


def product_row(
    name: str, n: int, k: int, m: int, us: float, floor: float, kernel: str
) -> dict[str, Any]:
    """One row of results, without peers."""
    row: dict[str, Any] = {"format": name, "n": n, "k": k, "m": m, "us": round(us, 2)}
    row |= {
        "tops": round(2 * m * n * k / us / 1e6, 1),
        "floor_us": round(floor, 2),
        "kernel": kernel,
        "peers_us": {},
    }
    return row


def print_product(row: dict[str, Any]) -> None:
    """The same as a line of text, with the best peer."""
    others = {p: t for p, t in row["peers_us"].items() if t is not None}
    best = min(others, key=lambda p: others[p]) if others else None
    us = row["us"]
    versus = f"{others[best] / us:5.2f} x {best}" if best else ""
    print(
        f"{row['format']:16s} {row['n']:5d} x {row['k']:5d}  m {row['m']:5d} {us:9.2f} us "
        f"{row['tops']:7.1f} TOPS"
        f"  floor / time {row['floor_us'] / us:4.2f}  {versus}",
        flush=True,
    )


def measure_awq_gemm(
    n: int, k: int, ms: list[int], bandwidth: float, with_peers: bool
) -> list[dict[str, Any]]:
    """A row of results for each M of products by unreordered AWQ tensors."""
    rows = []
    nbytes = sum(t.nbytes for t in awq_tensors(n, k, 1)[0])
    theirs = vllm_kernel("awq_gemm") if with_peers else None
    for m in ms:
        torch.manual_seed(m)
        x = torch.randn(m, k, device="cuda").half()
        awq = awq_tensors(n, k, copies(nbytes) if m <= 256 else min(2, copies(nbytes)))
        us = graph_time([partial(co.awq_gemm, x, *w) for w in awq])
        row = product_row(
            AWQ_GEMM, n, k, m, us, product_floor(m, n, k, nbytes, bandwidth, 16), "awq_gemm"
        )
        if with_peers:  # on the default stream: no graph takes it
            dense = co.awq_dequantize(*awq[0])
            row["peers_us"]["torch fp16"] = round(
                graph_time(
                    [
                        partial(torch.matmul, x, dense.clone())
                        for _ in range(min(len(awq), copies(dense.nbytes)))
                    ]
                ),
                2,
            )
        if theirs:
            # 8: split-K slices
            row["peers_us"]["vllm"] = round(graph_time([partial(theirs, x, *w, 8) for w in awq]), 2)
        rows.append(row)
        print_product(row)
        torch.cuda.empty_cache()
    return rows


def measure(
    name: str, n: int, k: int, ms: list[int], bandwidth: float, architecture: int, with_peers: bool
) -> list[dict[str, Any]]:
    """A row of results for each M."""
    options = FORMATS[name].options | {"architecture": architecture}
    packed = packed_weight(n, k, *FORMATS[name].weight)

    def fresh() -> co.PackedWeight:
        weight = copy.deepcopy(packed)
        if not options.get("act_symmetric", True):
            weight.sum_codes()
        return weight

    ours = Peer(fresh, lambda x, w: co.mixed_gemm(x, w, **options), packed.nbytes)
    others = peers(name, packed) if with_peers else {}
    made: dict[str, list[Any]] = {who: [] for who in ("ours", *others)}
    rows = []
    for m in ms:
        torch.manual_seed(m)
        x = torch.randn(m, k, device="cuda").half()

        def timed(who: str, peer: Peer, x: torch.Tensor = x) -> float:
            count = copies(peer.nbytes) if len(x) <= 256 else min(2, copies(peer.nbytes))
            while len(made[who]) < count:
                made[who].append(peer.make())
            return round(graph_time([partial(peer.call, x, w) for w in made[who][:count]]), 2)

        floor = product_floor(
            m, n, k, packed.nbytes, bandwidth, 16 if options["act_quant"] == "none" else 8
        )
        row = product_row(
            name, n, k, m, timed("ours", ours), floor, co.explain(m, packed, **options).kernel
        )
        for who, peer in others.items():
            try:
                row["peers_us"][who] = timed(who, peer)
            except Exception as error:  # a failing peer is recorded
                row["peers_us"][who] = None
                print(f"{who}: {error!r:.150}", file=sys.stderr)
        rows.append(row)
        print_product(row)
    made.clear()
    torch.cuda.empty_cache()
    return rows


def host_time(call: Call, calls: int = 500, repeats: int = 9) -> float:
    """Microseconds of CPU time of one eager call: the median of runs that start with an idle GPU
    and do not wait for it.
    """
    times = []
    for _ in range(repeats + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:]) / calls * 1e6


def measure_host() -> list[dict[str, Any]]:
    """CPU time of eager calls on a weight so small that the GPU keeps up, and of
    torch's linear layer.
    """
    n = k = 512
    rows = []

    def add(name: str, m: int, call: Call) -> None:
        rows.append({"call": name, "m": m, "host_us": round(host_time(call), 2)})
        print(f"{name:32s} m {m:4d}  {rows[-1]['host_us']:6.2f} us of CPU time", flush=True)

    with torch.inference_mode():
        for m in (1, 64):
            x = torch.randn(m, k, device="cuda").half()
            for name, form in FORMATS.items():
                options, packed = form.options, packed_weight(n, k, *form.weight)
                add(f"mixed_gemm {name}", m, partial(co.mixed_gemm, x, packed, **options))
                if "asym" not in name:
                    add(f"MixedLinear {name}", m, partial(co.MixedLinear(packed, **options), x))
            add("quantize_activations", m, partial(co.quantize_activations, x))
            add(
                "torch.nn.Linear fp16",
                m,
                partial(torch.nn.Linear(k, n, device="cuda", dtype=torch.half), x),
            )
    return rows


def main() -> None:
    """Run the measurements that the arguments select and write their results."""
    known = (*FORMATS, AWQ_GEMM, *MOVES)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default="4096:4096,28672:4096,8192:28672", help="N:K,...")
    parser.add_argument("--ms", default="1,16,64,256,1024,4096")
    parser.add_argument(
        "--formats", default="w4a16,w8a16,w4a8-block,w8a8-block", help=", ".join(known)
    )
    parser.add_argument(
        "--architecture", type=int, default=0, help="as in mixed_gemm: 80 for the kernels for sm_80"
    )
    parser.add_argument("--no-peers", action="store_true", help="time only this package")
    parser.add_argument("--host", action="store_true", help="CPU time of eager calls instead")
    parser.add_argument("--out", type=Path, help="a JSON file")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("there is no GPU here")
    if unknown := set(arguments.formats.split(",")) - {*known}:
        parser.error(f"unknown formats: {', '.join(sorted(unknown))}; known are {', '.join(known)}")
    if arguments.host:
        rows = measure_host()
        if arguments.out:
            named = {
                "device": torch.cuda.get_device_name(),
                "torch": torch.__version__,
                "host_rows": rows,
            }
            arguments.out.write_text(json.dumps(named, indent=1) + "\n")
        return
    bandwidth = read_bandwidth()
    result = heading(bandwidth) | {"architecture": arguments.architecture, "rows": []}
    for shape in arguments.shapes.split(","):
        n, k = map(int, shape.split(":"))
        for name in arguments.formats.split(","):
            ms = list(map(int, arguments.ms.split(",")))
            if name in MOVES:
                result["rows"].append(measure_move(name, n, k, bandwidth, not arguments.no_peers))
            elif name == AWQ_GEMM:
                result["rows"] += measure_awq_gemm(n, k, ms, bandwidth, not arguments.no_peers)
            else:
                result["rows"] += measure(
                    name, n, k, ms, bandwidth, arguments.architecture, not arguments.no_peers
                )
            if arguments.out:
                arguments.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
