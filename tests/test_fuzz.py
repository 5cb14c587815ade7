"""tools/fuzz.py: a short run, and that it finds the faults that it looks for."""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path
from types import ModuleType

import pytest

from cutlass_ops.files import verify

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def fuzz() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fuzz", ROOT / "tools" / "fuzz.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fuzz"] = module  # its dataclasses look for it
    spec.loader.exec_module(module)
    return module


def test_hundreds_of_random_cases(fuzz: ModuleType, tmp_path: Path) -> None:
    models = fuzz.honest_models(load=False)
    found = [fuzz.one(models, 11, index, tmp_path / "work", 0) for index in range(200)]
    assert [result for result in found if result[1] == "FAILED"] == []
    assert {name for name, _, _ in found} == set(models)
    assert sum(what == "read" for _, what, _ in found) > 20


def test_a_case_is_reproducible(fuzz: ModuleType) -> None:
    model = fuzz.Model({"a.json": b'{"b": [1, 2]}', "c": bytes(100)})
    first, again = (fuzz.damaged(model, random.Random(5)) for _ in range(2))
    assert first == again
    assert first.files != model.files


def test_fuzz_reports_a_verify_that_misses_a_difference(
    fuzz: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = fuzz.packed()["packed 2"]
    content = bytearray(model.files["model.safetensors"])
    content[-1] ^= 1
    case = fuzz.Case(model.files | {"model.safetensors": bytes(content)})
    (tmp_path / "good").mkdir()
    assert fuzz.check(model, case, tmp_path / "good", False) == "read"
    monkeypatch.setattr(fuzz, "verify_packed", lambda path: verify.Verified())
    (tmp_path / "blind").mkdir()
    with pytest.raises(fuzz.Wrong, match="verify finds nothing"):
        fuzz.check(model, case, tmp_path / "blind", False)


def test_fuzz_reports_changed_values(fuzz: ModuleType, tmp_path: Path) -> None:
    model = fuzz.models()["gptq"]
    fuzz.write(tmp_path, model.files)
    name = "model.layers.0.mlp.up_proj"
    values = fuzz.load_checkpoint(tmp_path).entries[name].values()
    fuzz.read(tmp_path, {name: values})
    with pytest.raises(fuzz.Wrong, match="has other values"):
        fuzz.read(tmp_path, {name: values + 1})
