"""Run nvcc (or ccache nvcc) and fail when a kernel spills registers or loses operands, or ptxas
warns that it serialised wgmma.

CMake puts this in front of every nvcc call (`CUDA_COMPILER_LAUNCHER`). nvcc is called with
`-Xptxas -v`; what ptxas says of every kernel goes to a file next to the object,
`NAME.cu.o.ptxas.txt`, and one line of it to the terminal.

wgmma reads operands in registers while the warp goes on. ptxas 13.0 was seen to take such registers
for free once the instruction was issued, and to load the next operands into them: wrong products,
and no warning. Where the toolkit's cuobjdump is at hand, the instructions are searched for that.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

# ptxas -v names a kernel, then its properties, then its registers, each on a separate line.
FUNCTION = re.compile(r"Function properties for '?([\w$.]+)")
ARCHITECTURE = re.compile(r" for '(sm_\w+)'")
SPILL = re.compile(r"(\d+) bytes spill (?:stores|loads)")
REGISTERS = re.compile(r"Used (\d+) registers")
WARNING = re.compile(r"\(C75\d\d\)")  # C7508 to C7514: wgmma serialised, or its registers moved
VERBOSE = re.compile(r"^(ptxas info\s+: |\s*\d+ bytes (stack frame|gmem))")

# What cuobjdump -sass prints: a kernel's name; an address and an instruction.
KERNEL = re.compile(r"^\s*Function : (\S+)")
INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", re.MULTILINE)
# wgmma with an operand in four registers; "gsb0" ends a group. Then the wait until so many
# groups are left.
PRODUCT = re.compile(r"GMMA\S* R\d+, R(\d+), gdesc")
GROUPS_LEFT = re.compile(r"^WARPGROUP\.DEPBAR\.LE gsb0, (0x[0-9a-f]+)")
JUMP = re.compile(r"^(@\S+ )?BRA\b.*?(0x[0-9a-f]+)")
LEAVES = re.compile(r"^(BRA|EXIT|RET)\b")  # without a condition
WRITES = re.compile(r"^(?:@\S+ )?(?!BAR|WARPSYNC|NANOSLEEP)([A-Z0-9_.]+) (?:U?P\w, )?R(\d+)\b")


def demangle(text: str) -> str:
    """Return `text` with the C++ names in it readable, where a demangler is installed."""
    tool = shutil.which("cu++filt") or shutil.which("c++filt")
    return (
        subprocess.run([tool], input=text, capture_output=True, text=True).stdout if tool else text
    )


def faults(report: str) -> list[str]:
    """Return a line for each register spill and each C75xx warning in ptxas's output."""
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


def kernels(sass: Iterable[str]) -> Iterator[tuple[str, list[tuple[int, str]]]]:
    """Yield the name of each kernel with a product, and its instructions and their addresses."""
    name, lines = "", []
    for line in itertools.chain(sass, ["Function : the end"]):
        if match := KERNEL.match(line):
            text = "".join(lines)
            if "GMMA" in text:
                yield (
                    name,
                    [
                        (int(address, 16), instruction)
                        for address, instruction in INSTRUCTION.findall(text)
                    ],
                )
            name, lines = match[1], []
        else:
            lines.append(line)


def written(text: str) -> set[int]:
    """Return the registers that an instruction writes."""
    if not (match := WRITES.match(text)):
        return set()
    operation, first = match[1], int(match[2])
    count = (
        4
        if re.search(r"\.128|LDSM.*\.4", operation)
        else 2
        if re.search(r"\.64|WIDE|^CS2R$|LDSM.*\.2", operation)
        else 1
    )
    return set(range(first, first + count))


def lost_operands(body: list[tuple[int, str]]) -> list[str]:
    """Return the instructions that write a register which a product in flight reads; loops are
    gone through twice.
    """
    places = {address: i for i, (address, _) in enumerate(body)}
    found: dict[int, str] = {}

    def go(first: int, last: int, groups: list[set[int]]) -> list[set[int]]:
        """Go from groups in flight, of which the last is not ended, to those after
        the instructions.
        """
        for i in range(first, last):
            text = body[i][1]
            if "GMMA" in text:
                if match := PRODUCT.search(text):
                    groups[-1] |= set(range(int(match[1]), int(match[1]) + 4))
                if "gsb0" in text:
                    groups.append(set())
            elif match := GROUPS_LEFT.match(text):
                ended = len(groups) - 1 - int(match[1], 16)
                groups = groups[max(ended, 0) :]
            elif LEAVES.match(text):
                groups = [set()]
            elif any(groups) and written(text) & set().union(*groups):
                found[i] = text
        return groups

    go(0, len(body), [set()])
    for i, (_, text) in enumerate(body):
        if match := JUMP.match(text):
            start = places.get(int(match[2], 16), i)
            if any("GMMA" in text for _, text in body[start:i]):
                go(start, i, go(start, i, [set()]))
    return [found[i] for i in sorted(found)]


def operand_faults(output: Path, compiler: list[str]) -> list[str]:
    """Return a line for each kernel that loses operands; none without cuobjdump on PATH or next
    to the compiler.
    """
    folders = os.pathsep.join(str(Path(part).parent) for part in compiler)
    tool = shutil.which("cuobjdump") or shutil.which("cuobjdump", path=folders)
    if not tool:
        return []
    with subprocess.Popen(
        [tool, "-sass", str(output)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        return [
            f"{name}: {lost[0]}: a product in flight reads what this writes"
            for name, body in kernels(process.stdout)
            if (lost := lost_operands(body))
        ]


def main(command: list[str]) -> int:
    """Run the command, report, and return the exit status: nvcc's own, or 1 for a fault."""
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, errors="replace")
    lines = done.stderr.splitlines(keepends=True)
    sys.stderr.write("".join(line for line in lines if not VERBOSE.match(line)))
    if done.returncode or "-o" not in command:
        return done.returncode
    output = Path(command[command.index("-o") + 1])
    found = faults(done.stderr) + operand_faults(output, command[:2])
    registers = [int(count) for count in REGISTERS.findall(done.stderr)]
    if registers:
        Path(f"{output}.ptxas.txt").write_text(demangle(done.stderr))
        print(
            f"{output.stem}: {len(registers)} kernels, at most {max(registers)} registers",
            flush=True,
        )
    if found:
        output.unlink(missing_ok=True)
        sys.stderr.write(demangle("".join(f"error: {output.stem}: {fault}\n" for fault in found)))
        sys.stderr.write(
            "A kernel spills registers or loses operands, or ptxas serialised wgmma: the "
            "build fails.\n"
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
