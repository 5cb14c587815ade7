"""The PEP 517 backend: scikit-build-core, plus the CUTLASS headers when the build is going
to compile CUDA.

pip builds in an isolated environment without the packages that are installed elsewhere. The package
`nvidia-cutlass` provides the headers there, but depends on scipy and networkx, so a build without
CUDA must not require it.
"""

from __future__ import annotations

import os
import shutil
from typing import Any

from scikit_build_core.build import *  # noqa: F403  (the hooks of PEP 517 and PEP 660)
from scikit_build_core.build import get_requires_for_build_editable as _requires_editable
from scikit_build_core.build import get_requires_for_build_wheel as _requires_wheel

CUTLASS = "nvidia-cutlass>=4.2"


def _cutlass(config_settings: dict[str, Any] | None) -> list[str]:
    settings = config_settings or {}
    mode = settings.get("cmake.define.CUTLASS_OPS_CUDA", os.environ.get("CUTLASS_OPS_CUDA", "AUTO"))
    path = settings.get("cmake.define.CUTLASS_PATH", os.environ.get("CUTLASS_PATH"))
    nvcc = os.environ.get("CUDACXX") or shutil.which("nvcc")  # as CMake looks for it
    return [CUTLASS] if nvcc and not path and mode != "OFF" else []


def get_requires_for_build_wheel(config_settings: dict[str, Any] | None = None) -> list[str]:
    """Return what a wheel build needs beyond `build-system.requires`."""
    return [*_requires_wheel(config_settings), *_cutlass(config_settings)]


def get_requires_for_build_editable(config_settings: dict[str, Any] | None = None) -> list[str]:
    """Return what an editable build needs beyond `build-system.requires`."""
    return [*_requires_editable(config_settings), *_cutlass(config_settings)]
