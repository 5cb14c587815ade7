"""What :func:`cutlass_ops.mixed_gemm` would launch, without launching it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import _C, reference
from ..weights.packed_weight import PackedWeight
from . import arguments, gemm, native, products
from .activations import MAX_M, QuantizedActivations
from .call import Call

#: Architecture -> multiprocessors and largest shared memory of a block, of a GPU that is not there
#: (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"; multiprocessors
#: of A100, RTX 3090, RTX 4090, H200, B200, RTX 5090). On Hopper, where it counts, the memory
#: bandwidth in GB/s of an H200, 2 x 3.2 GHz x 6144 bits.
_KNOWN_DEVICES: dict[int, tuple[int, ...]] = {
    80: (108, 166912),
    86: (82, 101376),
    89: (128, 101376),
    90: (132, 232448, 4916),
    100: (148, 232448),
    120: (170, 101376),
}


@dataclass(frozen=True)
class Explanation:
    """How a product would be launched.

    Attributes:
        device: "cpu" or the GPU's architecture, "sm_90".
        kernel: the kernel's name, and in ``csrc/kernels`` its file's; on a CPU that of its
            instruction set; "torch.matmul" for an x that is not quantised and, on a GPU, is
            fp32, or on a CPU has many rows of bf16 and no kernel for them.
        launches: the files in ``csrc/kernels`` of the kernels that run, in order:
            quantize_activations (unless `kernel` quantises x itself), upcast_activations or
            compensate_zeros, weight_colsum (where terms of zero points are needed and not
            kept), `kernel`, splitk_reduce or, for a gated weight, gate_sums; for
            "torch.matmul" dequantize, for each panel. Empty without rows of x.
        tile: output features and rows of x that a cluster (a CTA, where there are no clusters)
            computes at a time.
        grid: CTAs along x and y.
        cluster: CTAs of a cluster.
        threads: threads of a CTA.
        shared_memory: dynamic shared memory of a CTA, in bytes.
        stages: tiles of K, of weights, that are in flight.
        slices: slices that K is cut into.
        tail_tiles: the last tiles of the result, where K of these alone is cut and the kernel adds
            up the slices itself; 0 where that of all tiles is, and splitk_reduce adds up.
        workspace: bytes of scratch memory.
        exact: whether neither weights nor quantised activations are rounded to 16 bits.
        why: the reason for the kernel.
    """

    device: str
    kernel: str
    launches: tuple[str, ...]
    tile: tuple[int, int]
    grid: tuple[int, int]
    cluster: int
    threads: int
    shared_memory: int
    stages: int
    slices: int
    tail_tiles: int
    workspace: int
    exact: bool
    why: str

    def __str__(self) -> str:
        if not self.tile[0]:
            return f"{self.device}: {self.kernel} ({self.why})"
        clusters = f" in clusters of {self.cluster}" if self.cluster > 1 else ""
        tail = f" of the last {self.tail_tiles} tiles" if self.tail_tiles else ""
        return (
            f"{self.device}: {', '.join(self.launches) or self.kernel}; "
            f"tile {self.tile[0]} features x {self.tile[1]} rows, grid {self.grid[0]} x "
            f"{self.grid[1]}{clusters}, "
            f"{self.threads} threads, {self.shared_memory} bytes of shared memory, "
            f"{self.stages} stages, "
            f"{self.slices} slice{'s' if self.slices > 1 else ''} of K{tail}, {self.workspace} "
            f"bytes of workspace ({self.why})"
        )


def _device(device: torch.device | str) -> _C.Device | None:
    """The GPU that ``device`` names; None for the CPU."""
    if isinstance(device, str) and device.startswith("sm_"):
        number = device.removeprefix("sm_").rstrip("a")
        if not number.isdigit() or int(number) not in _KNOWN_DEVICES:
            known = ", ".join(f"sm_{a}" for a in _KNOWN_DEVICES)
            raise ValueError(f"device is {device!r}; of GPUs that are not there, {known} are known")
        return _C.Device(int(number), *_KNOWN_DEVICES[int(number)])
    device = torch.device(device)
    if device.type == "cpu":
        return None
    arguments.check_device(device)
    with torch.cuda.device(device):
        return _C.current_device()


def _memory(x: Tensor, plain: bool, batch_invariant: bool) -> tuple[int, int]:
    """The address and the row stride at which a kernel sees x ``[..., K]``; address 0 of a copy,
    whose rows are aligned.
    """
    k = x.shape[-1]
    if plain:
        rows, stride = _C.rows_of(tuple(x.shape), x.stride(), k)
        if rows > 0:
            return x.data_ptr(), stride
    if batch_invariant:
        return 0, k
    try:
        matrix = x if x.dim() == 2 else x.view(-1, k)
    except RuntimeError:  # x.reshape() copies
        return 0, k
    return (matrix.data_ptr(), matrix.stride(0)) if native.has_rows(matrix) else (0, k)


def explain(
    x: Tensor | QuantizedActivations | int,
    weight: PackedWeight,
    act_quant: str = "none",
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    act_symmetric: bool = True,
    *,
    bias: Tensor | None = None,
    activation: reference.Activation = None,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    saturate: bool = False,
    batch_invariant: bool = False,
    architecture: int = 0,
    exact: bool = False,
) -> Explanation:
    """Say how :func:`mixed_gemm` would be launched with these arguments, without running it.

    Args:
        x: the x that :func:`mixed_gemm` would get, of which the shape, the dtype and the place in
            memory matter; or the number of rows of a contiguous x.
        weight: the weight; its sizes and format matter, and whether :meth:`PackedWeight.sum_codes`
            keeps its column sums.
        dtype: dtype of x, where x is a number of rows: fp16 if None.
        device: "cpu", a GPU of this machine, or "sm_80", "sm_86", "sm_89", "sm_90", "sm_100",
            "sm_120" for one that need not be there. The weight's own device if None.
        act_quant, act_symmetric, bias, activation, residual: as in :func:`mixed_gemm`.
        out_dtype, saturate, batch_invariant, architecture, exact: as in :func:`mixed_gemm`.

    Raises:
        TypeError, ValueError: an argument that :func:`mixed_gemm` would refuse, or a dtype
            that is not x's.
    """
    if not isinstance(weight, PackedWeight):
        raise TypeError(
            f"weight is a {type(weight).__name__}; a PackedWeight (see "
            "cutlass_ops.reorder) is expected"
        )
    if weight.kernel_size:
        raise ValueError(reference.CONVOLUTION.format(weight.kernel_size))
    if act_quant not in native.ACT_QUANT:
        raise ValueError(f"act_quant is {act_quant!r}; supported are 'none', 'token' and 'block'")
    reference.check_activation(activation)
    if isinstance(x, int):
        shape: tuple[int, ...] = (x, weight.k)
        dtype = torch.float16 if dtype is None else dtype
    else:
        if isinstance(x, Tensor):
            arguments.check_float("x", x, weight.device)
            columns = x.shape[-1] if x.shape else 0
        elif isinstance(x, QuantizedActivations):
            columns = gemm.check_quantized(x, weight)
        else:
            raise TypeError(
                f"x is a {type(x).__name__}; a torch.Tensor, QuantizedActivations or a number of "
                "rows is expected"
            )
        shape = tuple(x.shape)
        if columns != weight.k:
            raise ValueError(f"x has shape {shape}; [..., {weight.k}] is expected")
        if dtype is not None and dtype != x.dtype:
            raise ValueError(f"dtype is {dtype}; x has dtype {x.dtype}")
        dtype = x.dtype
    m = math.prod(shape[:-1])
    if not 0 <= m <= MAX_M:
        raise ValueError(f"m is {m}; 0 to {MAX_M} is supported")
    for name, given in (("dtype", dtype), ("out_dtype", out_dtype)):
        if given is not None and given not in native.DATA_TYPES:
            raise TypeError(
                f"{name} is {given}; supported are {arguments.dtype_names(native.DATA_TYPES)}"
            )
    if weight.book is not None and (act_quant != "none" or isinstance(x, QuantizedActivations)):
        kind = "number of rows" if isinstance(x, int) else type(x).__name__
        raise ValueError(
            f"{reference.BOOK_NEEDS_FLOATS}; act_quant is {act_quant!r} and x a {kind}"
        )
    if bias is not None:
        arguments.check_bias(bias, weight)
    if residual is not None:
        arguments.check_residual(residual, weight, (*shape[:-1], weight.n))

    gpu = _device(weight.device if device is None else device)
    if (
        isinstance(x, Tensor)
        and dtype is torch.float32
        and torch.is_autocast_enabled(x.device.type)
    ):
        dtype = torch.get_autocast_dtype(x.device.type)
        x = torch.empty_like(x, dtype=dtype, device="meta")
    if not isinstance(x, QuantizedActivations):
        named = native.split_activation(activation)
        choice = (batch_invariant, architecture, exact)
        call = Call(
            bias, *named, residual, out_dtype or dtype, saturate, act_quant, act_symmetric, *choice
        )
        compute = products.panel_type(m, weight, gpu is not None, dtype, call)
        if compute is not None:
            return _panels(m, weight, gpu, compute, batch_invariant)
    if gpu is None:
        nothing, why = (0, 0), "the bits are the reference's"
        floats = not isinstance(x, QuantizedActivations) and act_quant == "none"
        order = "sums have another order than the reference's"
        rounds = floats and products.rounds_weight_on_cpu(m, weight, dtype, call)
        if rounds:
            why = f"the CPU's products of bf16 with the weight's values, rounded to it: {order}"
        elif floats and products.uses_bfloat16_on_cpu(m, weight, dtype, call):
            why = f"the CPU's products of bf16: {order}"
        elif floats and _C.cpu_fuses(m, exact or batch_invariant):
            why = f"a product and its sum are rounded once: {order}"
        return Explanation(
            "cpu", _C.cpu_kernel(), (), nothing, nothing, 1, 0, 0, 0, 1, 0, 0, not rounds, why
        )
    quantized, ptr, stride = None, 0, weight.k
    if isinstance(x, QuantizedActivations):
        quantized, act_quant, act_symmetric = products.native_quantized(x), "none", True
        if m == 0:  # as mixed_gemm has it
            dtype = torch.float16
    elif isinstance(x, Tensor):
        plain = type(x) in arguments.TENSORS and not (x.requires_grad and torch.is_grad_enabled())
        plain = (
            plain and bias is None and activation is None and residual is None and out_dtype is None
        )
        plain = plain and not (saturate or batch_invariant or architecture or exact)
        ptr, stride = _memory(x, plain, batch_invariant)
    weight.check_sums()
    plan = _C.plan(
        weight.native,
        m,
        native.DATA_TYPES[out_dtype or dtype],
        ptr,
        native.DATA_TYPES[dtype],
        stride,
        quantized,
        native.ACT_QUANT[act_quant],
        act_symmetric,
        batch_invariant,
        architecture,
        exact,
        gpu,
        residual is not None,
    )
    return Explanation(
        f"sm_{gpu.architecture}",
        plan.kernel,
        tuple(plan.launches) if m else (),
        (plan.block_n, plan.block_m),
        plan.grid,
        plan.cluster_size,
        plan.threads,
        plan.shared_bytes,
        plan.stages,
        plan.slices,
        plan.tail_tiles,
        plan.workspace,
        not plan.rounds,
        plan.why,
    )


def _panels(
    m: int, weight: PackedWeight, gpu: Any, compute: torch.dtype, batch_invariant: bool
) -> Explanation:
    """What :func:`products.panel_gemm` does with m rows, on a CPU if gpu is None."""
    products.check_panels(batch_invariant)
    nothing, exact = (0, 0), compute is torch.float32
    scratch = (
        (4 if exact else 2)
        * weight.k
        * products.panel_rows(weight, products.panel_values(gpu is not None))
    )
    reason = "a CPU multiplies many rows faster so" if gpu is None else "no kernel takes an fp32 x"
    why = (
        f"{reason}: the weight is dequantised in panels of rows for torch's "
        f"{str(compute).removeprefix('torch.')} product"
    )
    name, launches = (
        ("cpu", ()) if gpu is None else (f"sm_{gpu.architecture}", ("dequantize",) if m else ())
    )
    return Explanation(
        name, "torch.matmul", launches, nothing, nothing, 1, 0, 0, 0, 1, 0, scratch, exact, why
    )
