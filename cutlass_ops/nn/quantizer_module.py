"""The module that writes a model's packed layers into the configuration of the model's library."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from torch import nn

#: Our module for a library, by the module and the name of the class of the library's models.
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
    """The module whose ``attach`` describes packed layers in the configuration of a model of
    transformers or diffusers; None for other models.

    Raises:
        ValueError: a model that another method quantised.
    """
    for (library, base), name in _LIBRARIES.items():
        # The library of an existing model is imported.
        if library in sys.modules and isinstance(model, getattr(sys.modules[library], base)):
            quantizer = import_module(name)
            quantizer.check_method(model)
            return quantizer
    return None
