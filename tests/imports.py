"""Packages that only some tests need."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest


def import_or_skip(name: str) -> Any:
    """Import a module of another package, or skip the test or file with the reason
    that Python gives.

    ``pytest.importorskip`` gives one reason, whether the package is missing or one that
    it needs itself.
    """
    try:
        return import_module(name)
    except ImportError as error:
        pytest.skip(
            f"{name} cannot be imported: {type(error).__name__}: {error}", allow_module_level=True
        )
