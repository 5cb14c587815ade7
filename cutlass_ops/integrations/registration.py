"""Registration with transformers, diffusers, PEFT and huggingface_hub, as soon as
they are imported.

transformers finds quantisation methods only by name in its tables, and has no entry points for
packages to add to them. So ``import cutlass_ops`` watches for the import of the module that holds
those tables, before or after, and adds the method "cutlass_ops" then:
``AutoModelForCausalLM.from_pretrained`` takes a directory that ``cutlass-ops reorder`` wrote, and
neither package makes the import of the other slower. Packed layers are registered with PEFT's LoRA
in the same way, and functions that pack the layers of a model write them into its configuration.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

from ..nn.quantizer_module import add_library

#: Modules of other packages, and the warning for the case that our module cannot add to their
#: tables.
_TABLES = {
    "transformers.quantizers.auto": (
        "hf_quantizer",
        "this transformers cannot load packed models of cutlass_ops",
    ),
    "diffusers.quantizers.auto": (
        "diffusers_quantizer",
        "this diffusers cannot load packed models of cutlass_ops",
    ),
    "peft.tuners.lora.model": ("peft_lora", "this peft cannot train packed models of cutlass_ops"),
    "huggingface_hub.hub_mixin": (
        "hub_mixin",
        "this huggingface_hub saves packed modules as if they were float ones",
    ),
}


def _register(table: str) -> None:
    module, problem = _TABLES[table]
    try:
        import_module(f"cutlass_ops.integrations.{module}")
    except (ImportError, AttributeError) as error:
        # A warning only: the user imports the other package and may not use packed models.
        warnings.warn(f"{problem}: {error}", stacklevel=2)


class _Watch(MetaPathFinder):
    """A finder that loads nothing itself; it runs :func:`_register` right after a module with
    tables was imported.
    """

    def __init__(self, tables: set[str]) -> None:
        self.tables = tables

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self.tables:
            return None
        self.tables.remove(name)  # before the search below comes here again
        if not self.tables:
            sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            _register(name)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def register_when_imported() -> None:
    """Register with other packages, now or as soon as their tables are imported.

    The environment variable ``CUTLASS_OPS_IMPORT_HOOKS`` set to 0 leaves this out.

    Raises:
        ValueError: the variable is neither 0 nor 1.
    """
    hooks = os.environ.get("CUTLASS_OPS_IMPORT_HOOKS", "1")
    if hooks not in ("0", "1"):
        raise ValueError(
            f"CUTLASS_OPS_IMPORT_HOOKS is {hooks!r} in the environment; it must be 0 or 1"
        )
    if hooks == "0":
        return
    for table in _TABLES.keys() & sys.modules.keys():
        _register(table)
    if absent := _TABLES.keys() - sys.modules.keys():
        sys.meta_path.insert(0, _Watch(absent))


add_library(
    "transformers.modeling_utils", "PreTrainedModel", "cutlass_ops.integrations.hf_quantizer"
)
add_library(
    "diffusers.models.modeling_utils", "ModelMixin", "cutlass_ops.integrations.diffusers_quantizer"
)
