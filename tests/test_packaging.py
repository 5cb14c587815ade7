"""The package as it is built and installed: its metadata, its stub, its build options, the
check of the kernels.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import warnings
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from conftest import moved
from imports import import_or_skip

import cutlass_ops
from cutlass_ops import _C

ROOT = Path(__file__).parent.parent


# --- cutlass_ops/_C.pyi ---------------------------------------------------------------------------


def signature(function: ast.FunctionDef) -> str:
    """Return names, types and result of a function, with the types as a stub writes them."""
    for argument in function.args.args[:1]:
        if argument.arg == "self":
            argument.annotation = None
    text = (
        f"({ast.unparse(function.args)}) -> {ast.unparse(function.returns or ast.Constant(None))}"
    )
    # pybind11 3 lists the types that convert to an int or a float.
    text = re.sub(
        r"typing\.Supports(Int|Float)( \| typing\.SupportsIndex)?", lambda m: m[1].lower(), text
    )
    # It also gives the length of an array.
    text = text.replace("collections.abc.", "")
    text = re.sub(r"typing\.Annotated\[(Sequence\[\w+\]), 'FixedSize\(\d+\)'\]", r"\1", text)
    return text.replace("cutlass_ops._C.", "")


def stub_members(body: list[ast.stmt]) -> dict[str, object]:
    """Return the names in a stub: functions with signatures, values and properties
    with types, classes.
    """
    members: dict[str, object] = {}
    for node in body:
        if isinstance(node, ast.ClassDef):
            members[node.name] = stub_members(node.body)
        elif isinstance(node, ast.FunctionDef):
            members[node.name] = (
                ast.unparse(node.returns) if node.decorator_list else signature(node)
            )
        elif isinstance(node, ast.AnnAssign):
            members[ast.unparse(node.target)] = ast.unparse(node.annotation)
    return members


def documented(docstring: str) -> ast.FunctionDef:
    """Return the function that the first line of a pybind11 docstring describes."""
    (function,) = ast.parse(f"def {docstring.splitlines()[0]}: ...").body
    assert isinstance(function, ast.FunctionDef)
    return function


def compiled_members(namespace: ModuleType | type) -> dict[str, object]:
    """Return the same of the compiled module."""
    if hasattr(namespace, "__members__"):  # an enum
        return dict.fromkeys(namespace.__members__, namespace.__name__)
    members: dict[str, object] = {}
    for name, value in vars(namespace).items():
        if name.startswith("_") and not (value.__doc__ or "").startswith(
            "__init__(self: cutlass_ops"
        ):
            continue
        if isinstance(value, type):
            members[name] = compiled_members(value)
        elif isinstance(value, property):
            members[name] = signature(documented(f"get{value.fget.__doc__}")).rpartition(" -> ")[2]
        elif callable(value):
            members[name] = signature(documented(value.__doc__))
        else:
            members[name] = type(value).__name__
    return members


def test_stub_equals_module() -> None:
    stub = ast.parse((ROOT / "cutlass_ops/_C.pyi").read_text())
    assert stub_members(stub.body) == compiled_members(_C)


# --- the package ----------------------------------------------------------------------------------


def test_import_needs_no_gpu() -> None:
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    code = "import cutlass_ops; print(cutlass_ops.__version__)"
    done = subprocess.run([sys.executable, "-c", code], env=hidden, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip()) == (0, cutlass_ops.__version__), done.stderr


def imported(code: str, *arguments: str) -> tuple[set[str], str]:
    """Return the names of all modules that are loaded after ``code``, and what it printed."""
    code += "\nimport sys; print(*sys.modules, sep='\\n', file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True
    )
    return set(done.stderr.split()), done.stdout


def test_version_is_printed_without_torch() -> None:
    code = f"import runpy; runpy.run_path({str(ROOT / 'cmake/cutlass-ops')!r})"
    if not list(importlib.metadata.distributions(name="cutlass_ops")):
        pytest.skip("the version is read from the metadata of an installed package")
    modules, printed = imported(code, "--version")
    assert printed == f"cutlass_ops {cutlass_ops.__version__}\n"
    assert not {"torch", "numpy", "cutlass_ops", "typer"} & modules


def test_import_loads_little_beyond_torch() -> None:
    """What only the command line, a dialect or an integration needs is imported
    where it is used.
    """
    new = (
        imported("import torch, cutlass_ops")[0]
        - imported("import torch, numpy.typing, safetensors")[0]
    )
    assert {
        name for name in new if name.partition(".")[0] not in ("cutlass_ops", "hmac", "secrets")
    } == set()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib is of Python 3.11")
def test_a_release_has_a_wheel_for_each_python() -> None:
    import tomllib

    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    named = [
        line.rpartition(" ")[2]
        for line in settings["project"]["classifiers"]
        if re.search(r":: 3\.\d", line)
    ]
    assert named[0] == settings["project"]["requires-python"].removeprefix(">=")
    builds = settings["tool"]["cibuildwheel"]["build"].split()
    assert builds == [f"cp{version.replace('.', '')}-*" for version in named]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib is of Python 3.11")
def test_the_oldest_transformers_is_the_extra_s() -> None:
    import tomllib

    import_or_skip("transformers")
    from cutlass_ops.integrations.hf_quantizer import OLDEST

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert extras["hf"] == [f"transformers>={OLDEST}"]


# --- the tests themselves -------------------------------------------------------------------------


def test_a_skip_names_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "half_installed.py").write_text("import its_own_dependency")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        pytest.skip.Exception, match=r"half_installed cannot be imported.*'its_own_dependency'"
    ):
        import_or_skip("half_installed")


@pytest.mark.parametrize(
    ("module", "category", "fails"),
    [
        ("cutlass_ops.integrations.registration", DeprecationWarning, True),
        ("test_hf", UserWarning, True),
        ("test_hf", DeprecationWarning, False),
        ("transformers.utils", UserWarning, False),
    ],
)
def test_warnings_that_fail_a_test(module: str, category: type[Warning], fails: bool) -> None:
    with warnings.catch_warnings(record=True), pytest.raises(category) if fails else nullcontext():
        warnings.warn_explicit("text", category, "file.py", 1, module, {})


def test_versions_other_than_the_constraints_are_listed() -> None:
    lines = [
        "# a comment",
        "pytest==0.1",
        f"numpy=={np.__version__}",
        "absent==1",
        "torch==0.1 ; python_version < '3'",
    ]
    assert list(moved("\n".join(lines))) == [f"pytest {pytest.__version__}, not 0.1"]


def configure(tmp_path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Configure the project with CMake where no nvcc can be found."""
    without_nvcc = {**os.environ, "CUDACXX": str(tmp_path / "no-nvcc")}
    command = ["cmake", "-S", str(ROOT), "-B", str(tmp_path / "build"), *options]
    return subprocess.run(command, env=without_nvcc, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("option", "status", "message"),
    [
        ("AUTO", 0, "building for the CPU alone (CUTLASS_OPS_CUDA=AUTO)"),
        ("OFF", 0, "building for the CPU alone (CUTLASS_OPS_CUDA=OFF)"),
        ("ON", 1, "CUTLASS_OPS_CUDA is ON, but no working nvcc was found"),
        ("maybe", 1, "CUTLASS_OPS_CUDA is 'maybe': it must be AUTO, ON or OFF"),
    ],
)
def test_cuda_option_without_nvcc(tmp_path: Path, option: str, status: int, message: str) -> None:
    done = configure(tmp_path, f"-DCUTLASS_OPS_CUDA={option}")
    assert (done.returncode, message in " ".join((done.stdout + done.stderr).split())) == (
        status,
        True,
    ), done.stderr


# --- cmake/nvcc_checked.py ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def nvcc_checked() -> ModuleType:
    spec = importlib.util.spec_from_file_location("nvcc_checked", ROOT / "cmake/nvcc_checked.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# What ptxas 13.0 prints with -v.
CLEAN = """\
ptxas info    : Compiling entry function '_Z4goodPf' for 'sm_80'
ptxas info    : Function properties for _Z4goodPf
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 8 registers, used 0 barriers, 360 bytes cmem[0]
"""
SPILL = """\
ptxas info    : Compiling entry function '_Z3badPf' for 'sm_90a'
ptxas info    : Function properties for _Z3badPf
    8 bytes stack frame, 0 bytes spill stores, 16 bytes spill loads
ptxas info    : Used 255 registers, used 0 barriers
"""
SERIALISED = (
    "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are "
    "serialized\n"
)


# What cuobjdump 13.0 prints with -sass: a loop of two groups of products, each waited for before
# the next operands come.
LOOP = """\
		Function : _Z4gemmPf
        /*0100*/                   LDS.128 R152, [R15] ;                              /* 0x1 */
        /*0110*/                   IGMMA.64x256x32.S8.S8 R24, R152, gdesc[UR20], R24 ;
        /*0120*/                   IGMMA.64x256x32.S8.S8 R24, R156, gdesc[UR20], R24, gsb0 ;
{}
        /*0140*/                   WARPGROUP.DEPBAR.LE gsb0, {} ;
        /*0150*/                   LDS.64 R158, [R15+0x200] ;
        /*0160*/              @!P1 BRA 0x{} ;
        /*0170*/                   EXIT ;
        /*0180*/                   MOV R152, R2 ;
"""


@pytest.mark.parametrize(
    ("between", "left", "to", "lost"),
    [
        ("/*0130*/ LDS.128 R160, [R15] ;", "0x0", "110", []),
        ("/*0130*/ STS.128 [R15], R152 ;", "0x0", "100", []),
        ("/*0130*/ ISETP.NE.AND P0, PT, R152, RZ, PT ;", "0x0", "100", []),
        ("/*0130*/ LDS.128 R156, [R15] ;", "0x0", "110", ["LDS.128 R156, [R15]"]),
        ("/*0130*/ @P0 IMAD.WIDE R150, R2, R3, R4 ;", "0x0", "110", []),
        (
            "/*0130*/ @P0 IMAD.WIDE R151, R2, R3, R4 ;",
            "0x0",
            "110",
            ["@P0 IMAD.WIDE R151, R2, R3, R4"],
        ),
        ("/*0130*/ LDS R160, [R15] ;", "0x1", "110", ["LDS.64 R158, [R15+0x200]"]),
        # The next turn's load comes before the wait for this turn's group.
        (
            "/*0130*/ LDS R160, [R15] ;",
            "0x1",
            "100",
            ["LDS.128 R152, [R15]", "LDS.64 R158, [R15+0x200]"],
        ),
    ],
)
def test_operands_in_flight_stay(
    nvcc_checked: ModuleType, between: str, left: str, to: str, lost: list[str]
) -> None:
    """Registers that a product reads may be written once its group was waited for."""
    [(name, body)] = nvcc_checked.kernels(LOOP.format(between, left, to).splitlines(keepends=True))
    assert name == "_Z4gemmPf"
    assert nvcc_checked.lost_operands(body) == lost


def test_an_object_that_loses_operands_fails_the_build(
    nvcc_checked: ModuleType,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """cuobjdump is asked where there is one."""
    sass = LOOP.format("/*0130*/ LDS.128 R156, [R15] ;", "0x0", "110")
    tool = tmp_path / "cuobjdump"
    tool.write_text(f"#!{sys.executable}\nprint({sass!r})\n")
    tool.chmod(0o755)
    output = tmp_path / "kernel.cu.o"
    command = [
        sys.executable,
        "-c",
        "import sys; open(sys.argv[-1], 'w').close()",
        "-o",
        str(output),
    ]
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert nvcc_checked.main(command) == 1
    assert (
        "LDS.128 R156, [R15]: a product in flight reads what this writes" in capfd.readouterr().err
    )
    assert not output.exists()


@pytest.mark.parametrize(
    ("printed", "nvcc_status", "status", "told"),
    [
        (CLEAN, 0, 0, "at most 8 registers"),
        (
            CLEAN + SPILL,
            0,
            1,
            "error: kernel.cu: sm_90a: bad(float*): 8 bytes stack frame, 0 bytes spill",
        ),
        (CLEAN + SERIALISED, 0, 1, "(C7510) Potential Performance Loss"),
        ("kernel.cu(1): error: expected a declaration\n", 2, 2, "expected a declaration"),
    ],
    ids=["clean", "spill", "serialised", "compile error"],
)
def test_kernels_are_checked(
    nvcc_checked: ModuleType,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    printed: str,
    nvcc_status: int,
    status: int,
    told: str,
) -> None:
    """A compiler that prints `printed` makes the build fail as it should, and leaves
    no object behind.
    """
    nvcc = tmp_path / "nvcc.py"
    nvcc.write_text(
        f"import sys; open(sys.argv[-1], 'w').close(); sys.stderr.write({printed!r}); "
        f"sys.exit({nvcc_status})"
    )
    output = tmp_path / "kernel.cu.o"
    assert nvcc_checked.main([sys.executable, str(nvcc), "-o", str(output)]) == status
    out, err = capfd.readouterr()
    assert told.replace("bad(float*)", nvcc_checked.demangle("_Z3badPf")) in out + err
    assert output.exists() == (status in (0, nvcc_status))
