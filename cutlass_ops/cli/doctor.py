"""``cutlass-ops doctor``."""

from __future__ import annotations

import platform
import warnings
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import typer
from rich.markup import escape

from .. import _C, reference
from ..ops import gemm
from ..ops.explain import explain
from ..ops.quantize import quantize
from ..version import __version__
from ..weights.reorder import reorder
from .common import FAILED, JsonOption, app, make_console, print_json, size_text


@app.command()
def doctor(as_json: JsonOption = False) -> None:
    """Say what this machine has, which kernels can run on it, and multiply once to see that they
    do.

    A missing GPU, driver or package is reported and is no failure. Exit status 1 if a product is
    wrong.
    """
    facts = _facts()
    devices = ["cpu"]
    if _C.built_with_cuda and facts["gpus"]:
        devices += [f"cuda:{index}" for index in range(len(facts["gpus"]))]
    facts["kernels"] = {device: _kernels(device) for device in devices}
    facts["self_test"] = {device: _self_test(device) for device in devices}
    failed = [
        result
        for tests in facts["self_test"].values()
        for result in tests.values()
        if result != "ok"
    ]
    facts["ok"] = not failed
    if as_json:
        print_json(facts)
    else:
        console = make_console()
        for key in (
            "cutlass_ops",
            "build",
            "cutlass",
            "python",
            "platform",
            "torch",
            "cuda_driver",
            "cuda_runtime",
        ):
            console.print(f"{key:14}{escape(facts[key])}", soft_wrap=True, highlight=False)
        for index, gpu in enumerate(facts["gpus"] or ["none"]):
            console.print(
                f"{f'gpu {index}' if facts['gpus'] else 'gpu':14}{escape(gpu)}",
                soft_wrap=True,
                highlight=False,
            )
        for note in facts["missing"]:
            console.print(
                f"{'missing':14}[yellow]{escape(note)}[/yellow]", soft_wrap=True, highlight=False
            )
        for device in devices:
            for name, kernel in facts["kernels"][device].items():
                result = facts["self_test"][device].get(name, "")
                colour = "green" if result == "ok" else "red"
                console.print(
                    f"{device:14}{name:12}{escape(kernel)}  [{colour}]{escape(result)}[/{colour}]",
                    soft_wrap=True,
                    highlight=False,
                )
    if failed:
        raise typer.Exit(FAILED)


#: The products that doctor tries: bits of the weights and act_quant.
_PRODUCTS = {
    "W4A16": (4, "none"),
    "W4A8 block": (4, "block"),
    "W4A8 token": (4, "token"),
    "W8A16": (8, "none"),
    "W8A8 block": (8, "block"),
    "W8A8 token": (8, "token"),
}


def _facts() -> dict[str, Any]:
    missing: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        # torch warns of a driver that is too old, and says that there is no GPU.
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    missing += [str(warning.message).strip() for warning in caught]
    gpus = []
    if available:
        for index in range(torch.cuda.device_count()):
            found = torch.cuda.get_device_properties(index)
            gpus.append(
                f"{found.name}, sm_{found.major}{found.minor}, {found.multi_processor_count} "
                "multiprocessors, "
                f"{size_text(found.total_memory)}"
            )
    elif not _C.built_with_cuda:
        missing.append("CUDA kernels: the package was built without nvcc; products run on the CPU")
    if torch.version.cuda is None:
        missing.append("CUDA in torch: this torch is for the CPU alone")
    elif not available:
        missing.append("a GPU that torch can use")
    build = f"CUDA for {_C.cuda_architectures}" if _C.built_with_cuda else "CPU alone"
    return {
        "cutlass_ops": __version__,
        "build": build,
        "cutlass": _C.cutlass_version or "not in this build",
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda or 'none'}",
        "cuda_driver": _cuda_version("driver", "cuDriverGetVersion", missing),
        "cuda_runtime": _cuda_version("runtime", "cudaRuntimeGetVersion", missing),
        "gpus": gpus,
        "missing": missing,
    }


def _cuda_version(module: str, function: str, missing: list[str]) -> str:
    """The highest CUDA version that the driver, or the runtime, supports; from cuda-python."""
    try:
        package = version("cuda-bindings")
        error, number = getattr(import_module(f"cuda.bindings.{module}"), function)()
    except (ImportError, PackageNotFoundError):
        if "cuda-python" not in " ".join(missing):
            missing.append(
                "cuda-python: pip install cuda-bindings tells the versions of driver and runtime"
            )
        return "unknown"
    except Exception as failure:  # cuda-python raises various types when a library is missing
        missing.append(f"CUDA {module}: {failure}")
        return "not found"
    if int(error) != 0:
        missing.append(f"CUDA {module}: {function} returned {error}")
        return "not found"
    if number == 0:
        missing.append(f"CUDA {module}: not installed")
        return "not found"
    return f"{number // 1000}.{number % 1000 // 10} (cuda-bindings {package})"


def _kernels(device: str) -> dict[str, str]:
    """The kernels for one row of x and for many, for each product."""
    names = {}
    for name, (bits, act_quant) in _PRODUCTS.items():
        weight = reorder(
            quantize(torch.zeros(64, 128, dtype=torch.float32, device="cpu"), bits=bits)
        ).to(device)
        found = []
        for m in (1, 4096):
            try:
                found.append(explain(m, weight, act_quant=act_quant).kernel)
            except (ValueError, RuntimeError) as error:
                found.append(f"none ({error})")
        names[name] = " / ".join(dict.fromkeys(found))
    return names


def _self_test(device: str) -> dict[str, str]:
    """Each product on odd sizes, against the reference in fp64 on the CPU: "ok"
    or what is wrong.
    """
    generator = torch.Generator("cpu").manual_seed(0)
    weight = torch.randn(192, 576, generator=generator, dtype=torch.float32, device="cpu")
    x = torch.randn(17, 576, generator=generator, dtype=torch.float32, device="cpu").half()
    results = {}
    for name, (bits, act_quant) in _PRODUCTS.items():
        quantized = quantize(weight, bits=bits, group_size=64, symmetric=False)
        expected = reference.mixed_gemm(
            x, quantized, act_quant=act_quant, out_dtype=torch.float32, compute_dtype=torch.float64
        )
        try:
            packed = reorder(quantized).to(device)
            y = gemm.mixed_gemm(
                x.to(device), packed, act_quant=act_quant, out_dtype=torch.float32
            ).cpu()
        except (ValueError, RuntimeError) as error:
            results[name] = f"failed: {error}"
            continue
        relative = float((y - expected).norm() / expected.norm())
        results[name] = "ok" if relative <= 1e-5 else f"wrong: relative error {relative:.3g}"
    return results
