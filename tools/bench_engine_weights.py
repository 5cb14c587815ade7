"""A loader of vLLM that makes random weights, for tools/bench_engine.py.

vLLM's own loader of random weights fills floating-point tensors only: packed weights stay as the
allocator left them, which is often zeros, and a GPU multiplies zeros faster. vLLM's workers import
this module because ``worker_extension_cls`` names a class of it, before they load a model.
"""

from __future__ import annotations

import re
import zlib
from typing import Any

import torch
from vllm.model_executor.model_loader import register_model_loader
from vllm.model_executor.model_loader.base_loader import BaseModelLoader

CODES = re.compile(r"weight_packed|qweight|qzeros|zero_point")


class Extension:
    """The extension of vLLM's workers, which adds nothing."""


def fill(name: str, values: torch.Tensor) -> None:
    """Write random codes, scales or weights, the same for each name and shape."""
    generator = torch.Generator(values.device)
    generator.manual_seed(zlib.crc32(f"{name} {tuple(values.shape)}".encode()))
    leaf = name.rpartition(".")[2]
    if values.is_floating_point():
        if "scale" in leaf:
            values.uniform_(0.002, 0.006, generator=generator)
        elif "norm" in name:
            values.fill_(1.0)
        elif "bias" in leaf:
            values.zero_()
        else:
            values.normal_(0.0, 0.02, generator=generator)
    elif CODES.search(leaf):
        values.random_(-(2**31), 2**31 - 1, generator=generator)
        # A code 0 becomes 8, so that the mean is the zero point: else all tokens are the same.
        not_zero = values | values >> 1 | values >> 2 | values >> 3
        values |= (~not_zero & 0x11111111) << 3
    else:  # order of the inputs and shapes, which vLLM computes or does not read
        values.zero_()


@register_model_loader("random")
class RandomLoader(BaseModelLoader):
    """Fills a model's tensors."""

    def download_model(self, model_config: Any) -> None:
        """Nothing: there are no files."""

    @torch.no_grad()
    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        """Fill the tensors as they are before vLLM or the plugin packs them."""
        for name, values in model.state_dict().items():
            fill(name, values)
