"""Registration with transformers, diffusers, PEFT and huggingface_hub when they are imported."""

from __future__ import annotations

import sys

import pytest
from hf_models import imported
from imports import import_or_skip

from cutlass_ops.integrations import registration

transformers = import_or_skip("transformers")


def test_registered_where_transformers_is_imported_already(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.quantizers import auto

    tables = (auto.AUTO_QUANTIZER_MAPPING, auto.AUTO_QUANTIZATION_CONFIG_MAPPING)
    for table in tables:
        monkeypatch.delitem(table, "cutlass_ops")
    # it does not import
    monkeypatch.setitem(sys.modules, "cutlass_ops.integrations.hf_quantizer", None)
    with pytest.warns(
        UserWarning, match="this transformers cannot load packed models of cutlass_ops"
    ):
        registration.register_when_imported()
    monkeypatch.delitem(sys.modules, "cutlass_ops.integrations.hf_quantizer")
    registration.register_when_imported()
    assert all("cutlass_ops" in table for table in tables)


def test_one_import_hook_serves_every_table_and_goes_with_the_last() -> None:
    done = imported("""
(hook,) = (finder for finder in sys.meta_path if finder not in before)
hook.tables &= {"huggingface_hub.hub_mixin", "transformers.quantizers.auto"}  # installed
assert "transformers" not in sys.modules
import huggingface_hub.hub_mixin
assert "cutlass_ops.integrations.hub_mixin" in sys.modules and hook in sys.meta_path
import transformers.quantizers.auto as tables
assert "cutlass_ops" in tables.AUTO_QUANTIZER_MAPPING
assert "cutlass_ops" in tables.AUTO_QUANTIZATION_CONFIG_MAPPING
assert "cutlass_ops.integrations.hf_quantizer" in sys.modules and hook not in sys.meta_path
""")
    assert done.returncode == 0, done.stderr


def test_an_unknown_choice_of_import_hooks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUTLASS_OPS_IMPORT_HOOKS", "off")
    with pytest.raises(
        ValueError,
        match="CUTLASS_OPS_IMPORT_HOOKS is 'off' in the environment; it must be 0 or 1",
    ):
        registration.register_when_imported()
