"""Run nvcc (or ccache nvcc) and fail when a kernel spills registers or ptxas warns that it serialised wgmma.

CMake puts this in front of every nvcc call (`CUDA_COMPILER_LAUNCHER`). nvcc is called with `-Xptxas -v`; what
ptxas says of every kernel goes to a file beside the object, `NAME.cu.o.ptxas.txt`, and one line of it to the
terminal.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

# ptxas -v names a kernel, then its properties, then its registers, each on a line of its own.
FUNCTION = re.compile(r"Function properties for '?([\w$.]+)")
ARCHITECTURE = re.compile(r" for '(sm_\w+)'")
SPILL = re.compile(r"(\d+) bytes spill (?:stores|loads)")
REGISTERS = re.compile(r"Used (\d+) registers")
WARNING = re.compile(r"\(C75\d\d\)")  # C7508 to C7514: wgmma serialised, or its registers moved
VERBOSE = re.compile(r"^(ptxas info\s+: |\s*\d+ bytes (stack frame|gmem))")


def demangle(text: str) -> str:
    """Return `text` with the C++ names in it readable, where a demangler is installed."""
    tool = shutil.which("cu++filt") or shutil.which("c++filt")
    return subprocess.run([tool], input=text, capture_output=True, text=True).stdout if tool else text


def faults(report: str) -> list[str]:
    """Return a line for each register spill and each C75xx warning in what ptxas printed."""
    found = []
    function = architecture = "?"
    for line in report.splitlines():
        if match := ARCHITECTURE.search(line):
            architecture = match[1]
        if match := FUNCTION.search(line):
            function = match[1]
        if any(int(size) for size in SPILL.findall(line)):
            found.append(f"{architecture}: {function}: {line.strip()}")
        if WARNING.search(line):
            found.append(line.strip())
    return found


def main(command: list[str]) -> int:
    """Run the command, report, and return the exit status: nvcc's own, or 1 for a fault."""
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, errors="replace")
    lines = done.stderr.splitlines(keepends=True)
    sys.stderr.write("".join(line for line in lines if not VERBOSE.match(line)))
    if done.returncode or "-o" not in command:
        return done.returncode
    output = Path(command[command.index("-o") + 1])
    found = faults(done.stderr)
    registers = [int(count) for count in REGISTERS.findall(done.stderr)]
    if registers:
        Path(f"{output}.ptxas.txt").write_text(demangle(done.stderr))
        print(f"{output.stem}: {len(registers)} kernels, at most {max(registers)} registers", flush=True)
    if found:
        output.unlink(missing_ok=True)
        sys.stderr.write(demangle("".join(f"error: {output.stem}: {fault}\n" for fault in found)))
        sys.stderr.write("A kernel spills registers, or ptxas serialised wgmma: the build fails.\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
