"""Which module tells the library that a model belongs to of its packed layers."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from torch import nn

#: Classes of models that have a configuration, and our modules for each.
_LIBRARIES = (
    ("transformers.modeling_utils", "PreTrainedModel", "hf_quantizer"),
    ("diffusers.models.modeling_utils", "ModelMixin", "diffusers_quantizer"),
)


def quantizer_module(model: nn.Module) -> Any:
    """What tells a model of transformers or diffusers of its packed layers (``attach``); None for other models.

    Raises:
        ValueError: a model that another method quantised.
    """
    for library, base, name in _LIBRARIES:
        # A model's library is imported.
        if library in sys.modules and isinstance(model, getattr(sys.modules[library], base)):
            quantizer = import_module(f"cutlass_ops.integrations.{name}")
            quantizer.check_method(model)
            return quantizer
    return None
