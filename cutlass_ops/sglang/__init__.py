"""Our kernels in SGLang: a plugin that SGLang finds by the entry point of ``sglang.srt.plugins``.

:func:`register` adds the ``quantization_config`` of packed directories to SGLang's registry
(``directory.py``), and hooks on the configurations of AWQ, GPTQ and compressed-tensors
(``linear.py``): SGLang has no list of kernels that a plugin can extend, but it lets a plugin change
what a function returns. Layers that our kernels do not take stay with SGLang's kernels, and one
line in its log says why.

Settings are keys of ``--json-model-override-args '{"cutlass_ops": {...}}'``:

===========  =====================================================================================
act_quant    how x is quantised: "none" (the default), "token" or "block". Checkpoints that say
             that activations are 8-bit integers have "token" as their default, packed directories
             what they say.
===========  =====================================================================================
"""

from __future__ import annotations

from .directory import CutlassOpsConfig, named_as_the_model
from .engine import MISSING, logger
from .linear import take_layers

if MISSING is None:
    from .engine import CPU_QUANTIZATION_METHODS, QUANTIZATION_METHODS, HookRegistry, HookType

_LOAD = "sglang.srt.model_loader.loader.DefaultModelLoader.load_weights_only"


def register() -> None:
    """Let SGLang read packed directories and use our kernels; called in each of its processes.

    Where this SGLang lacks what is needed, a warning says so and SGLang runs as without the plugin.
    """
    if MISSING is not None:
        logger.warning("cutlass_ops does not serve this version of SGLang: %s", MISSING)
        return
    # the second is for CPUs with AMX
    for methods in (QUANTIZATION_METHODS, CPU_QUANTIZATION_METHODS):
        methods[CutlassOpsConfig.get_name()] = CutlassOpsConfig
    HookRegistry.register(_LOAD, named_as_the_model, HookType.BEFORE)
    take_layers()
