"""Which module tells the library that a model belongs to of its packed layers."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from torch import nn

#: By the module and the name of the class of a library's models: the name of our module for it.
_LIBRARIES: dict[tuple[str, str], str] = {}


def add_library(library: str, base: str, quantizer: str) -> None:
    """Name the module that writes the configuration of a library's models.

    Args:
        library, base: the module and the name of the class of models.
        quantizer: a module with ``check_method`` and ``attach``, each of a model; imported when
            such a model is packed.
    """
    _LIBRARIES[library, base] = quantizer


def quantizer_module(model: nn.Module) -> Any:
    """What tells a model of transformers or diffusers of its packed layers (``attach``); None
    for other models.

    Raises:
        ValueError: a model that another method quantised.
    """
    for (library, base), name in _LIBRARIES.items():
        # A model's library is imported.
        if library in sys.modules and isinstance(model, getattr(sys.modules[library], base)):
            quantizer = import_module(name)
            quantizer.check_method(model)
            return quantizer
    return None
