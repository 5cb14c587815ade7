"""Our kernels in vLLM: a plugin that vLLM finds by the entry point of ``vllm.general_plugins``.

vLLM asks a list of kernels, in turn, whether they take a quantised linear layer. :func:`register`
puts ours first (``linear.py``). The layers of AWQ, GPTQ and compressed-tensors checkpoints come
with parameters that are described by their attributes (``input_dim``, ``output_dim``,
``packed_dim``), so that one reader serves all of them. ``experts.py`` does the same for layers of
experts, ``awq.py`` for linear layers of AWQ in batch-invariant mode, and ``directory.py`` loads
what ``cutlass-ops reorder`` wrote. ``checkpoint.py`` packs GGUF files and other checkpoints that
vLLM does not read. ``gated.py`` has products of gate and up apply the activation that follows. What
our kernels do not take stays with vLLM's, and one line in its log says why.

Settings are keys of ``--additional-config '{"cutlass_ops": {...}}'``, which is part of vLLM's key
of compiled graphs:

===========  =====================================================================================
act_quant    how x is quantised: "none" (the default), "token" or "block". Checkpoints that say
             that activations are 8-bit integers have "token" as their default, packed directories
             what they say.
===========  =====================================================================================
"""

from __future__ import annotations

import torch

from .checkpoint import take_checkpoints
from .directory import CutlassOpsConfig
from .experts import take_experts
from .gated import take_gated_mlps
from .linear import MISSING, CutlassOpsInt8LinearKernel, CutlassOpsLinearKernel, logger

if MISSING is None:
    from vllm.model_executor.kernels import linear as vllm_linear
    from vllm.model_executor.kernels.linear import register_linear_kernel
    from vllm.model_executor.layers.quantization import register_quantization_config
    from vllm.platforms import PlatformEnum


def _request_amx() -> None:
    """Ask the operating system for the CPU's matrix registers (AMX), where torch can.

    Linux kills a process that uses them without permission. torch requests it before its first
    matrix product, and vLLM's attention on a CPU relies on that; but our kernels compute the
    products before it.
    """
    request = getattr(torch.cpu, "_init_amx", None)
    if request is not None:
        request()


def register() -> None:
    """Put our kernels first in vLLM's lists; called in each of its processes,
    harmless when repeated.

    Where this vLLM lacks what is needed, or the order of its kernels cannot be changed, a warning
    says so and vLLM runs as without the plugin.
    """
    if MISSING is not None:
        logger.warning("cutlass_ops does not serve this version of vLLM: %s", MISSING)
        return
    _request_amx()
    for kernel, kind, name in (
        (CutlassOpsLinearKernel, "mp", "_POSSIBLE_KERNELS"),
        (CutlassOpsInt8LinearKernel, "int8", "_POSSIBLE_INT8_KERNELS"),
    ):
        kernels = getattr(vllm_linear, name, None)
        if not isinstance(kernels, dict):
            logger.warning(
                "cutlass_ops does not serve this version of vLLM: its linear kernels have no %s",
                name,
            )
            continue
        for platform in (PlatformEnum.CUDA, PlatformEnum.CPU):
            if kernel not in kernels.get(platform, []):
                register_linear_kernel(kernel, platform, kind)
                kernels[platform].insert(0, kernels[platform].pop())
    register_quantization_config("cutlass_ops")(CutlassOpsConfig)
    take_experts()
    take_gated_mlps()
    take_checkpoints()
