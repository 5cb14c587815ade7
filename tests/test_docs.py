"""The documentation: its Python runs as printed, its links lead somewhere, and its examples run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from imports import import_or_skip

import cutlass_ops
import cutlass_ops.nn

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


def blocks(name: str, language: str) -> list[str]:
    found = re.findall(
        rf"^```{language}\n(.*?)^```", (ROOT / name).read_text(), re.DOTALL | re.MULTILINE
    )
    assert found
    return found


@pytest.mark.parametrize(
    "name", ["README.md", "docs/index.md", "docs/getting-started.md", "docs/convolution.md"]
)
def test_python_runs_as_printed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks marked ``python``, one after another, as a reader would paste them; ``py`` needs
    a model or a GPU.
    """
    monkeypatch.chdir(tmp_path)
    exec(compile("\n".join(blocks(name, "python")), name, "exec"), {})


@pytest.mark.filterwarnings("ignore")  # of tiny models
def test_lines_for_users_of_other_libraries_run_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("transformers", "gguf"):
        import_or_skip(package)
    from gguf_model_files import write_model
    from hf_models import tiny, write_dialect

    tiny().save_pretrained(tmp_path / "model-float")
    for name, dialect in (("bnb", "bitsandbytes nf4"), ("awq", "awq"), ("gptq", "gptq")):
        write_dialect(tmp_path / f"model-{name}", dialect)
    write_model(tmp_path / "model.gguf", "llama")
    monkeypatch.chdir(tmp_path)
    exec(compile("\n".join(blocks("docs/coming-from.md", "python")), "coming-from.md", "exec"), {})


@pytest.mark.filterwarnings("ignore")  # of tiny models
def test_lines_for_directories_of_ranks_run_as_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import_or_skip("transformers")
    from cli_runs import run
    from hf_models import tiny

    tiny().save_pretrained(tmp_path / "model-float")
    monkeypatch.chdir(tmp_path)
    for target in (["ranks", "--tp", "2"], ["whole"]):
        assert run("reorder", "model-float", "-o", *target, "--bits", "8").exit_code == 0
    here: dict[str, Any] = {}
    exec(
        compile("\n".join(blocks("docs/checkpoints.md", "python")), "checkpoints.md", "exec"), here
    )
    whole = cutlass_ops.load_packed("whole")
    gate, up, down = (whole[f"{here['layer']}.{name}_proj"] for name in ("gate", "up", "down"))
    h = cutlass_ops.mixed_gemm(here["x"], gate, activation="silu")
    expected = cutlass_ops.mixed_gemm(h * cutlass_ops.mixed_gemm(here["x"], up), down)
    torch.testing.assert_close(here["y"], expected, rtol=1e-4, atol=1e-5)


def test_models_seen_are_those_of_the_tests() -> None:
    import_or_skip("transformers")
    import expert_models
    import hf_models
    import quantized_models

    page = (ROOT / "docs" / "checkpoints.md").read_text()
    seen = set(
        re.findall(r"\w+", page[page.index("## Models seen") : page.index("## Experts")].lower())
    )
    for families in (expert_models.FAMILIES, hf_models.FAMILIES, quantized_models.FAMILIES):
        assert {family.lower() for family in families} <= seen


def test_cpp_compiles_as_printed() -> None:
    command = [
        "c++",
        "-std=c++17",
        "-fsyntax-only",
        "-Wall",
        "-Wextra",
        "-Werror",
        f"-I{ROOT}/csrc/include",
        "-xc++",
        "-",
    ]
    source = "\n".join(blocks("docs/cpp-api.md", "cpp"))
    done = subprocess.run(command, input=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_only_lists_have_lines_that_begin_with_a_number(page: Path) -> None:
    """Markdown makes an item of a list of such a line."""
    numbers = [0, *map(int, re.findall(r"(?m)^ *(\d+)\. ", page.read_text()))]
    assert all(b in (1, a + 1) for a, b in pairwise(numbers))


@pytest.mark.parametrize("page", PAGES[1:], ids=lambda page: page.name)
def test_formulas_become_mathml(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hook of the site handles every command of TeX in the pages."""
    markdown = import_or_skip("markdown")
    import_or_skip("latex2mathml")
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import pages

    extensions = ["tables", "pymdownx.superfences", "pymdownx.arithmatex"]
    settings = {"pymdownx.arithmatex": {"generic": True}}
    html = markdown.markdown(page.read_text(), extensions=extensions, extension_configs=settings)
    formulas = html.count('class="arithmatex"')
    drawn = re.findall(r"<math.*?</math>", pages.on_page_content(html), re.DOTALL)
    assert len(drawn) == formulas
    assert not any("\\" in formula for formula in drawn)


def test_every_public_name_is_in_the_python_api() -> None:
    words = set(re.findall(r"\w+", (ROOT / "docs" / "python-api.md").read_text()))
    assert {*cutlass_ops.__all__, *cutlass_ops.nn.__all__, "CutlassOpsConfig"} <= words


def test_a_role_of_a_docstring_becomes_a_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import pages

    html = '<h2 id="cutlass_ops.explain"></h2>:func:<code>explain</code> :meth:<code>other</code>'
    link = '<a href="#cutlass_ops.explain"><code>explain</code></a> <code>other</code>'
    assert pages.on_page_content(html) == f'<h2 id="cutlass_ops.explain"></h2>{link}'


def test_tables_of_formats_and_hardware_are_the_same_in_the_readme() -> None:
    tables = re.findall(
        r"(?m)^\| (?:activations x weights|hardware) (?:.*\n)(?:\|.*\n)+",
        (ROOT / "README.md").read_text(),
    )
    assert len(tables) == 2
    assert all(table in (ROOT / "docs" / "kernels.md").read_text() for table in tables)


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_bytes()) <= 8192


#: Runs programs one after another, and prints a line of JSON for each: what it printed, its error.
RUN = """
import contextlib, io, json, runpy, sys, traceback
for path in sys.argv[1:]:
    error = ""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            runpy.run_path(path, run_name="__main__")
        except BaseException:
            error = traceback.format_exc()
    print(json.dumps([out.getvalue(), error]))
"""


@pytest.fixture(scope="module")
def runs() -> dict[Path, tuple[str, str]]:
    """What each example printed, and its error. One process runs all, so that torch, diffusers and
    transformers are imported once.
    """
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", RUN, *EXAMPLES],
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {"PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(EXAMPLES, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.stem)
def test_examples_run(example: Path, runs: dict[Path, tuple[str, str]]) -> None:
    for package in ("diffusers", "transformers", "onnxruntime", "onnx"):
        if package in example.read_text():
            import_or_skip(package)
    printed, error = runs[example]
    assert not error
    assert printed.count("\n") >= 2


@pytest.mark.filterwarnings("ignore")  # of tiny models
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda notebook: notebook.stem)
def test_notebooks_run(
    notebook: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    """Cells of code, one after another; the file holds no outputs, which would grow old."""
    for package in ("peft", "transformers"):
        import_or_skip(package)
    cells = [c for c in json.loads(notebook.read_text())["cells"] if c["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in cells)
    monkeypatch.chdir(tmp_path)
    exec(compile("\n".join("".join(c["source"]) for c in cells), notebook.name, "exec"), {})
    assert capsys.readouterr().out.count("\n") >= 2
