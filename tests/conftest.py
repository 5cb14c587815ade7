"""What every test shares: `gpu` tests are skipped, with the reason, where they cannot run."""

from __future__ import annotations

import functools

import pytest
import torch


@functools.cache
def why_no_gpu() -> str | None:
    """Return why kernels cannot run here, or None when they can."""
    from cutlass_ops import _C

    if not _C.built_with_cuda:
        return "cutlass_ops was built without CUDA"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no CUDA device"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and (reason := why_no_gpu()):
        for item in marked:
            item.add_marker(pytest.mark.skip(reason=reason))
