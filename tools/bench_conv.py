"""Time convolutions on a GPU beside torch's in fp16: static int8 ones and products by every plan,
or mixed ones in every mode.

    tools/bench_conv.py --kind static --out results/convolutions_h200.json
                        [--peers peers.json] [--layers linear]
    tools/bench_conv.py --kind mixed --out results/mixed_convolutions_h200.json

Layers are those of ResNet-50, Stable Diffusion 1.5 and XL with their decoder, YOLO, Whisper,
ConvNeXt, EfficientNet and a decoder of videos, depthwise ones, and products. A call is captured
many times in a CUDA graph, with inputs that L2 does not hold; the figure is the median of nine
replays. `peers.json` maps names of layers to microseconds by peer, measured on the same GPU. The
weights of products are in L2.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import cutlass_ops as co
from cutlass_ops import _C
from cutlass_ops.ops import conv_int8
from cutlass_ops.ops.call import Call
from cutlass_ops.reference.conv import Geometry

Extents = tuple[int, ...]

#: Bits of the weight, its group size, and act_quant.
MODES = {
    "W4A16": (4, 128, "none"),
    "W8A16": (8, 128, "none"),
    "W4A8 block": (4, 128, "block"),
    "W4A8 token": (4, 128, "token"),
    "W8A8 block": (8, 128, "block"),
    "W8A8 token": (8, -1, "token"),
    "W8A8 tensor": (8, -1, "tensor"),
}
#: Name, then batch, sizes of the image, channels in and out, kernel, stride, padding.
LAYERS: list[tuple[str, int, Extents, int, int, Extents, Extents, Extents]] = [
    ("resnet50 s1 3x3", 64, (56, 56), 64, 64, (3, 3), (1, 1), (1, 1)),
    ("resnet50 s2 3x3", 64, (28, 28), 128, 128, (3, 3), (1, 1), (1, 1)),
    ("resnet50 s2 3x3/2", 64, (56, 56), 128, 128, (3, 3), (2, 2), (1, 1)),
    ("resnet50 s3 3x3", 64, (14, 14), 256, 256, (3, 3), (1, 1), (1, 1)),
    ("resnet50 s4 3x3", 64, (7, 7), 512, 512, (3, 3), (1, 1), (1, 1)),
    ("resnet50 s1 1x1 up", 64, (56, 56), 64, 256, (1, 1), (1, 1), (0, 0)),
    ("resnet50 s1 1x1 down", 64, (56, 56), 256, 64, (1, 1), (1, 1), (0, 0)),
    ("resnet50 s4 1x1", 64, (7, 7), 2048, 512, (1, 1), (1, 1), (0, 0)),
    ("resnet50 stem", 64, (224, 224), 3, 64, (7, 7), (2, 2), (3, 3)),
    ("sd15 320", 2, (64, 64), 320, 320, (3, 3), (1, 1), (1, 1)),
    ("sd15 640", 2, (32, 32), 640, 640, (3, 3), (1, 1), (1, 1)),
    ("sd15 1280", 2, (16, 16), 1280, 1280, (3, 3), (1, 1), (1, 1)),
    ("sd15 2560 to 1280", 2, (16, 16), 2560, 1280, (3, 3), (1, 1), (1, 1)),
    ("sd15 1280 at 8", 2, (8, 8), 1280, 1280, (3, 3), (1, 1), (1, 1)),
    ("sdxl 320", 2, (128, 128), 320, 320, (3, 3), (1, 1), (1, 1)),
    ("sdxl 640", 2, (64, 64), 640, 640, (3, 3), (1, 1), (1, 1)),
    ("sdxl 1280", 2, (32, 32), 1280, 1280, (3, 3), (1, 1), (1, 1)),
    ("sdxl 960 to 320", 2, (128, 128), 960, 320, (3, 3), (1, 1), (1, 1)),
    ("vae 512 at 128", 1, (128, 128), 512, 512, (3, 3), (1, 1), (1, 1)),
    ("vae 512 at 256", 1, (256, 256), 512, 512, (3, 3), (1, 1), (1, 1)),
    ("vae 256 at 512", 1, (512, 512), 256, 256, (3, 3), (1, 1), (1, 1)),
    ("vae 128 at 1024", 1, (1024, 1024), 128, 128, (3, 3), (1, 1), (1, 1)),
    ("yolo 128 at 80", 16, (80, 80), 128, 128, (3, 3), (1, 1), (1, 1)),
    ("yolo 256 at 40", 16, (40, 40), 256, 256, (3, 3), (1, 1), (1, 1)),
    ("whisper conv2", 16, (1, 3000), 1280, 1280, (1, 3), (1, 2), (0, 1)),
    ("convnext down 2x2/2", 64, (28, 28), 192, 384, (2, 2), (2, 2), (0, 0)),
    ("efficientnet 1x1 up", 64, (28, 28), 40, 240, (1, 1), (1, 1), (0, 0)),
    ("efficientnet 1x1 down", 64, (14, 14), 672, 112, (1, 1), (1, 1), (0, 0)),
    ("3-D vae 256 at 60", 1, (13, 60, 90), 256, 256, (3, 3, 3), (1, 1, 1), (1, 1, 1)),
    ("depthwise 3x3, 112 x 32", 64, (112, 112), 32, 32, (3, 3), (1, 1), (1, 1)),
    ("depthwise 3x3/2, 112 x 96", 64, (112, 112), 96, 96, (3, 3), (2, 2), (1, 1)),
    ("depthwise 3x3, 56 x 144", 64, (56, 56), 144, 144, (3, 3), (1, 1), (1, 1)),
    ("depthwise 3x3, 28 x 192", 64, (28, 28), 192, 192, (3, 3), (1, 1), (1, 1)),
    ("depthwise 7x7, 56 x 96", 64, (56, 56), 96, 96, (7, 7), (1, 1), (3, 3)),
    ("depthwise 7x7, 28 x 192", 64, (28, 28), 192, 192, (7, 7), (1, 1), (3, 3)),
    *(
        (f"linear 4096 x 4096, {m} rows", 1, (1, m), 4096, 4096, (1, 1), (1, 1), (0, 0))
        for m in (1, 16, 64, 256, 1024, 4096)
    ),
    ("linear 1024 x 4096, 512 rows", 1, (1, 512), 4096, 1024, (1, 1), (1, 1), (0, 0)),
    ("linear 11008 x 4096, 2048 rows", 1, (1, 2048), 4096, 11008, (1, 1), (1, 1), (0, 0)),
]
#: Also timed with a zero point of x.
WITH_ZEROS = ("resnet50 s1 3x3", "resnet50 s3 3x3", "sdxl 640")
L2_BYTES = 192 * 2**20  # of inputs, more than L2 holds


def microseconds(call: Callable[[int], Any], inputs: int) -> float:
    """The time of one call, which is given the number of its input."""
    stream = torch.cuda.Stream()
    keep: list[Any] = []
    with torch.cuda.stream(stream):
        for i in range(inputs):
            call(i)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for i in range(inputs):
            call(i)
        end.record()
        end.synchronize()
        calls = max(
            inputs,
            min(
                400, math.ceil(1.5 / max(begin.elapsed_time(end) / inputs, 1e-3) / inputs) * inputs
            ),
        )
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(calls):
            keep.append(call(i % inputs))
            del keep[:-inputs]
    times = []
    for _ in range(9):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / calls)
    return sorted(times)[4]


def codes(*shape: int, dtype: torch.dtype = torch.int8) -> torch.Tensor:
    """Random ones."""
    return torch.randint(-128, 128, shape, dtype=torch.int8, device="cuda").view(dtype)


def layer(row: tuple[Any, ...], zero: int) -> dict[str, Any]:
    """Times of all plans, the chosen one first, and of torch's fp16."""
    name, batch, size, c, n, kernel, stride, padding = row
    groups = c if name.startswith("depthwise") else 1
    w = codes(n, c // groups, *kernel)
    matrix = (w.movedim(1, -1).flatten(1).int() + 128).to(torch.uint8)
    scales = torch.rand(n, 1, device="cuda") * 0.01 + 1e-3
    weight = co.reorder(
        co.QuantizedWeight(matrix, scales, bits=8, group_size=-1, kernel_size=kernel)
    )
    geometry = Geometry(stride, padding, (1, 1), groups)
    out = geometry.out(size, kernel)
    pixels = batch * math.prod(out)
    inputs = max(1, min(32, math.ceil(L2_BYTES / (batch * math.prod(size) * c + pixels * n))))
    dtype = torch.uint8 if zero else torch.int8
    xs = [codes(batch, *size, c, dtype=dtype).movedim(-1, 1) for _ in range(inputs)]
    bias = torch.randint(-999, 999, (n,), dtype=torch.int32, device="cuda")
    scales_of_xy, relu = conv_int8.Scales(0.03, zero, 50.0, 3), Call(bias, "relu", out_dtype=dtype)
    timed: list[dict[str, Any]] = []
    found: list[Any] = []
    while True:

        def choose(problem: _C.ConvProblem) -> _C.ConvPlan:
            found[:] = problem.plans(_C.current_device())
            return found[len(timed)]

        def call(i: int, choose: Callable[[Any], Any] = choose) -> torch.Tensor:
            return conv_int8.launch(xs[i], weight, geometry, scales_of_xy, relu, choose)

        call(0)
        plan = found[len(timed)]
        timed.append(
            {
                "kernel": plan.kernel,
                "block_m": plan.block_m,
                "block_n": plan.block_n,
                "cluster": plan.cluster_size,
                "turns": plan.turns,
                "windows": plan.windows,
                "slices": plan.slices,
                "us": round(microseconds(call, inputs), 2),
                "predicted_us": round(plan.predicted_clocks / 1755, 2),
            }
        )
        if len(timed) == len(found):
            break
    half = [x.to(torch.float16) for x in xs[: max(1, inputs // 2)]]
    wide = w.half().contiguous(memory_format=torch.channels_last)

    def in_fp16(i: int) -> torch.Tensor:
        if name.startswith("linear"):
            return F.linear(half[i].movedim(1, -1), wide.flatten(1))
        return F.conv2d(half[i], wide, None, stride, padding, 1, groups)

    fp16 = microseconds(in_fp16, len(half))
    operations = 2 * pixels * n * math.prod(kernel) * c // groups
    us = timed[0]["us"]
    return {
        "layer": name,
        "zero_point": zero,
        "us": us,
        "tops": round(operations / us * 1e-6, 1),
        "torch_fp16_us": round(fp16, 2),
        "plans": timed,
    }


def mixed(row: tuple[Any, ...]) -> dict[str, Any]:
    """Times of all modes that take a layer, quantiser included, and of torch's fp16; and the error
    of each, of the norm.
    """
    name, batch, size, c, n, kernel, stride, padding = row
    groups = c if name.startswith("depthwise") else 1
    convolve = {1: co.mixed_conv1d, 2: co.mixed_conv2d, 3: co.mixed_conv3d}[len(kernel)]
    in_fp16 = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[len(kernel)]
    w = torch.randn(n, c // groups, *kernel) / math.sqrt(c // groups * math.prod(kernel))
    half = w.cuda().half().movedim(1, -1).contiguous().movedim(-1, 1)
    pixels = batch * math.prod(
        Geometry(stride, padding, (1,) * len(kernel), groups).out(size, kernel)
    )
    inputs = max(1, min(32, math.ceil(L2_BYTES / (2 * (batch * math.prod(size) * c + pixels * n)))))
    xs = [torch.randn(batch, *size, c, device="cuda").half().movedim(-1, 1) for _ in range(inputs)]
    expected = in_fp16(xs[0].float(), half.float(), None, stride, padding, 1, groups)
    us, errors = {}, {}
    for mode, (bits, group_size, act_quant) in MODES.items():
        if groups > 1 and act_quant != "none":
            continue
        packed = co.reorder(co.quantize(w, bits=bits, group_size=group_size)).to("cuda")

        def call(
            i: int, packed: co.PackedWeight = packed, act_quant: str = act_quant
        ) -> torch.Tensor:
            return convolve(xs[i], packed, None, stride, padding, 1, groups, act_quant=act_quant)

        errors[mode] = round(((call(0) - expected).norm() / expected.norm()).item(), 5)
        us[mode] = round(microseconds(call, inputs), 2)
    fp16 = microseconds(lambda i: in_fp16(xs[i], half, None, stride, padding, 1, groups), inputs)
    return {
        "layer": name,
        "pixels": pixels,
        "torch_fp16_us": round(fp16, 2),
        "us": us,
        "error": errors,
    }


def mixed_rows(layers: list[tuple[Any, ...]]) -> Iterator[dict[str, Any]]:
    """The rows of mixed convolutions, printed as they are timed."""
    for row in layers:
        if row[0].startswith("linear"):
            continue
        line = mixed(row)
        ratios = ", ".join(
            f"{mode} {us / line['torch_fp16_us']:.2f}" for mode, us in line["us"].items()
        )
        print(
            f"{line['layer']:26} fp16 {line['torch_fp16_us']:8.1f} us; of that: {ratios}",
            flush=True,
        )
        yield line


def static_rows(
    layers: list[tuple[Any, ...]], peers: dict[str, dict[str, float]]
) -> Iterator[dict[str, Any]]:
    """The rows of static int8 layers, printed as they are timed."""
    layers = [row for row in layers if len(row[2]) == 2]
    for row, zero in [(row, 0) for row in layers] + [
        (row, 77) for row in layers if row[0] in WITH_ZEROS
    ]:
        line = layer(row, zero) | {"peers_us": peers.get(row[0], {})}
        best = min(plan["us"] for plan in line["plans"])
        print(f"{line['layer']:26} zero {zero:3} {line['us']:8.1f} us, best {best:8.1f}, "
            f"{line['tops']:6.0f} TOPS, "
              f"fp16 {line['torch_fp16_us']:.1f}, peers {line['peers_us']}",
              flush=True)  # fmt: skip
        for plan in line["plans"]:
            source = "windows, " if plan["windows"] else ""
            ctas = "slices of K" if plan["slices"] > 1 else "CTAs a cluster"
            tile = f"{source}{plan['block_m']} x {plan['block_n']}, {plan['cluster']} {ctas}"
            print(f"    {plan['kernel']:24} {tile:30} {plan['us']:8.1f} us", flush=True)
        yield line


def main() -> None:
    """Time every layer of a kind and write the results file."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kind", choices=("static", "mixed"), required=True)
    parser.add_argument("--out", type=Path, required=True, help="results file")
    parser.add_argument("--peers", type=Path, help="figures of peers of static layers")
    parser.add_argument("--commit", default="", help="of the kernels")
    parser.add_argument("--layers", default="", help="only those whose names have this in them")
    args = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(0)
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.float16)
    for _ in range(100):  # clocks settle
        a @ a
    layers = [row for row in LAYERS if args.layers in row[0]]
    peers = json.loads(args.peers.read_text()) if args.peers else {}
    rows = static_rows(layers, peers) if args.kind == "static" else mixed_rows(layers)
    result = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cutlass_ops": co.__version__,
        "commit": args.commit,
        "rows": list(rows),
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
