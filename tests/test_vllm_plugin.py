"""What the plugin does when vLLM calls it, with vLLM's tables in miniature."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cutlass_ops import vllm as plugin


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, list[Any]]]:
    """vLLM's lists of kernels, where the plugin looks for them."""
    lists: dict[str, dict[str, list[Any]]] = {
        name: {"cuda": ["theirs"], "cpu": ["theirs"]} for name in ("_POSSIBLE_KERNELS", "_POSSIBLE_INT8_KERNELS")
    }

    def register_linear_kernel(kernel: Any, platform: str, kind: str) -> None:
        lists["_POSSIBLE_KERNELS" if kind == "mp" else "_POSSIBLE_INT8_KERNELS"][platform].append(kernel)

    for name, value in {
        "MISSING": None,
        "vllm_linear": SimpleNamespace(**lists),
        "register_linear_kernel": register_linear_kernel,
        "register_quantization_config": lambda name: lambda config: config,
        "PlatformEnum": SimpleNamespace(CUDA="cuda", CPU="cpu"),
        "take_experts": lambda: None,
    }.items():
        monkeypatch.setattr(plugin, name, value, raising=False)
    return lists


def test_our_kernels_come_first_and_once(tables: dict[str, dict[str, list[Any]]]) -> None:
    plugin.register()
    plugin.register()
    ours = [plugin.CutlassOpsLinearKernel, plugin.CutlassOpsInt8LinearKernel]
    for kernel, platforms in zip(ours, tables.values(), strict=True):
        assert platforms == {"cuda": [kernel, "theirs"], "cpu": [kernel, "theirs"]}


@pytest.mark.parametrize("exists", [True, False])
def test_amx_is_requested_where_torch_can(exists: bool, tables: object, monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[None] = []
    monkeypatch.delattr(torch.cpu, "_init_amx", raising=False)
    if exists:
        monkeypatch.setattr(torch.cpu, "_init_amx", lambda: requests.append(None), raising=False)
    plugin.register()
    assert len(requests) == exists
