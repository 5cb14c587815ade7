#!/usr/bin/env python3
"""Run the GPU tests under NVIDIA's compute-sanitizer and summarise the findings.

    tools/sanitize.py                                    every tool, C++ tests and Python tests
    tools/sanitize.py --tool racecheck --only python -k one_hot      some of pytest's alone
    tools/sanitize.py --jobs 12                          the Python tests dealt among 12 processes

The tools: memcheck (accesses out of bounds), racecheck (races in shared memory), initcheck (reads
of bytes that nobody wrote) and synccheck (barriers used wrongly). initcheck runs the C++ tests
alone: torch's allocator hands out memory that was written before.

Seen on an H200: 1888 Python tests take two minutes under synccheck with seven processes, 1300 two
and a half under memcheck with six; 310 of small experts and convolutions 90 s under racecheck with
14, where -k helps. The 196 C++ tests take 40 s on an H100 under the other tools, and 210 s under
racecheck with nine processes of 28 (GTEST_TOTAL_SHARDS).

The exit status is 0 when every run passed its tests, executed at least one, and no tool found
anything; 1 when not; 2 when nothing could be run.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
PROGRAM = "cutlass_ops_cuda_tests"
FOUND_SOMETHING = 86  # compute-sanitizer's exit status when it reports an error
# Not fit: tests of what torch's cache says of memory, or of a GPU's memory that the sanitizer takes
# a part of; torch.compile brings kernels of other compilers; torch.profiler takes the interface
# that the sanitizer needs; the doctor's cuda-bindings asks the driver for functions that it lacks,
# which memcheck counts as errors.
FIT = (
    "not compile and not explain_tells and not workspace_is and not doctor and not "
    "memory_is_bounded"
)

# racecheck reports wgmma_gemm_a16, wgmma_gemm_a8 and wgmma_fold16, of matrices, images and experts,
# and wgmma_decode_fold16 with one CTA on an SM, where a CTA fills a stage again: the bulk copy of
# weights, or the stores of scales by the functions below, against the reads of what the stage held
# before. It is no race. A warp's reads are one instruction of all its lanes, which are converged,
# as the wgmma and its wait around them are .sync.aligned and no branch between them depends on the
# lane; only then lane 0 or 1 arrives at the barrier that the copying warp waits for (and those
# functions wait for what that warp copies). The tool takes the arrival as one of that lane alone.
# In wgmma_fold16, and where warps quantise x in a stage, a __syncwarp() orders the lanes' reads
# before the arrival by PTX's memory model, too; the compiler leaves a NOP of it, which the tool
# does not see. Builds with -lineinfo (RelWithDebInfo) name the functions by which these races are
# known.
KNOWN_WRITE = re.compile(
    r"cute::SM90_BULK_COPY_G2S::copy\(|cutlass_ops::bulk_copy_multicast\("
    r"|cutlass_ops::hopper::StageColumns<.*::quantize\("
    r"|void cutlass_ops::(hopper::prepare_(pixels|x_rows|weight_scales)<"
    r"|<unnamed>::wgmma_gemm_a8<.* in hopper_producers\.cuh:)"
)
KNOWN_READ = re.compile(
    r"(?:void )?cutlass_ops::(load_shared\(|RowPair<.*::load[<(]|StoredGroup<.*::load<|"
    r"hopper::(StoredScales::load\(|StageColumns<)"
    r"|<unnamed>::(Stored|Raw)Weights<)"
)
# synccheck alone is at odds with wgmma_fold16 of 32 rows, whose CTAs have 640 threads: it says that
# mbarriers were not initialised which thread 0 initialises, as in all instances of that source,
# before the cluster's barrier, and the launch then fails. Without the tool results are exact,
# memcheck finds nothing, and it is the same with 11 panels for 12 and with 40 registers for the 32
# of the loading warps. The cause is not known.
LEFT_OUT = {
    "synccheck": [
        f"{format}ELb{narrow}ELi32E"
        for format in ("4Int4", "4Int8", "4E4m3", "8Codebook")
        for narrow in (0, 1)
    ]
}
# Above its own limit racecheck warns that it counted no further, which counts as a finding.
LIMITS = {"NV_COMPUTE_SANITIZER_MAX_RACECHECK_HAZARDS": "100000000"}
RACE = re.compile(r"Race reported between (\w+) access at (.+)((?:\n=+ +and \w+ access at .+)+)")
ACCESS = re.compile(r"and (\w+) access at (.+)")


def known_races(text: str) -> tuple[int, int]:
    """Return how many races racecheck's output describes, and how many of them are
    known not to be any.
    """

    def is_known(first: str, place: str, others: str) -> bool:
        kinds = {"Write": KNOWN_WRITE, "Read": KNOWN_READ}
        other = "Read" if first == "Write" else "Write"
        return kinds[first].match(place) is not None and all(
            kind == other and kinds[kind].match(place) for kind, place in ACCESS.findall(others)
        )

    races = RACE.findall(text)
    return len(races), sum(is_known(*race) for race in races)


PYTEST = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-m", "gpu and not slow"]
# memcheck and synccheck keep some 200 MB of the GPU's memory a test. A process runs so many tests,
# and an H100 has memory for three processes, an H200 for six.
MOST_TESTS = 80
# The last line a tool prints. racecheck: "RACECHECK SUMMARY: 2 hazards displayed (1
# error, 1 warning)".
SUMMARY = re.compile(r"SUMMARY: (\d+) (?:errors?|hazards?)")
# The last line of pytest ("3 passed, 1 skipped in 2s") and of GoogleTest ("[  PASSED  ] 3 tests.").
PASSED = re.compile(r"(\d+) passed|\[  PASSED  \] (\d+) tests?")


@dataclass(frozen=True)
class Run:
    """One program under one tool."""

    tool: str
    name: str
    command: list[str]
    environment: dict[str, str]

    def execute(self) -> Outcome:
        """Run it, echoing what it prints behind its name, and read the counts from that."""
        # Kernels of other libraries are not ours to check, and slow. initcheck must see
        # who else writes.
        kernels = (
            [] if self.tool == "initcheck" else ["--kernel-name", "kernel_substring=cutlass_ops"]
        )
        for name in LEFT_OUT.get(self.tool, []):
            kernels += ["--kernel-name-exclude", f"kernel_substring={name}"]
        command = [
            "compute-sanitizer",
            "--tool",
            self.tool,
            "--error-exitcode",
            str(FOUND_SOMETHING),
        ]
        if self.tool == "memcheck":
            # tests ask for what CUDA refuses: a device that is not there
            command += ["--report-api-errors", "no"]
        command += [
            "--print-limit",
            "1000" if self.tool == "racecheck" else "20",
            *kernels,
            *self.command,
        ]
        print(f"== {self.tool}, {self.name}: {' '.join(command)}", flush=True)
        start = time.monotonic()
        text = ""
        with subprocess.Popen(
            command,
            cwd=ROOT,
            env={**LIMITS, **os.environ, **self.environment},
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                sys.stdout.write(f"[{self.tool}, {self.name}] {line}")
                text += line
        passed = sum(int(a or b) for a, b in PASSED.findall(text))
        summaries = SUMMARY.findall(text)
        findings = sum(map(int, summaries)) if summaries else None
        status = process.returncode
        described, known = known_races(text) if self.tool == "racecheck" else (0, 0)
        # All that was found must be described to be known.
        if known and known == described == findings:
            print(
                f"== {known} of racecheck's reports are known not to be races (KNOWN_READ)",
                flush=True,
            )
            findings, status = 0, 0 if status == FOUND_SOMETHING else status
        return Outcome(
            self,
            status=status,
            tests=passed,
            findings=findings,
            seconds=time.monotonic() - start,
        )


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run. `findings` is None when the tool printed no summary."""

    run: Run
    status: int
    tests: int
    findings: int | None
    seconds: float

    @property
    def verdict(self) -> str:
        """Return "clean", or what is wrong."""
        if self.findings is None:
            return f"the tool gave no summary (exit status {self.status})"
        if self.findings:
            return "FOUND SOMETHING"
        if self.status:
            return f"tests failed (exit status {self.status})"
        return "clean" if self.tests else "no test was executed"


def cpp_program() -> Path | None:
    """Return the newest build of the C++ tests, if there is one."""
    built = sorted(ROOT.glob(f"build/*/tests/cpp/{PROGRAM}"), key=lambda path: path.stat().st_mtime)
    return built[-1] if built else None


def python_tests(select: str) -> list[str]:
    """Return the identifiers of the GPU tests that pytest -k selects."""
    command = [*PYTEST, "-qq", "--collect-only", "-k", select]
    listed = subprocess.run(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, check=False
    ).stdout
    return [line for line in listed.splitlines() if "::" in line and not line.startswith("ERROR")]


def python_runs(
    tool: str,
    name: str,
    select: str,
    environment: dict[str, str],
    jobs: int,
    folder: Path,
    most: int | None = None,
) -> list[Run]:
    """Return runs of pytest on the tests that -k selects, dealt among ``jobs`` processes, or more,
    of ``most`` tests each.
    """
    if jobs == 1 and not most:
        return [Run(tool, name, [*PYTEST, "-k", select], environment)]
    tests = python_tests(select)
    parts = max(jobs, -(-len(tests) // most)) if most else jobs
    planned = []
    for part in range(min(parts, len(tests))):
        # The names of all tests are too long for a command line.
        names = folder / f"{name}-{part}".replace(", ", "-")
        names.write_text("\n".join(tests[part::parts]))
        planned.append(Run(tool, f"{name} {part + 1}/{parts}", [*PYTEST, f"@{names}"], environment))
    return planned


def runs(tool: str, only: str | None, select: str, jobs: int, folder: Path) -> list[Run]:
    """Return the programs to run under a tool."""
    planned = []
    program = cpp_program()
    if only != "python" and program:
        planned.append(Run(tool, "C++", [str(program)], {}))
    if only != "cpp" and tool != "initcheck":
        select = f"({select}) and {FIT}" if select else FIT
        if tool == "memcheck":
            # Without torch's cache each tensor is a separate allocation, so an access one
            # byte out of bounds is found. A CUDA graph cannot be captured that way; those
            # tests run with the cache.
            uncached = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
            planned += python_runs(
                tool, "Python", f"{select} and not graph", uncached, jobs, folder, MOST_TESTS
            )
            planned += python_runs(tool, "Python, graphs", f"{select} and graph", {}, jobs, folder)
        else:
            most = MOST_TESTS if tool == "synccheck" else None
            planned += python_runs(tool, "Python", select, {}, jobs, folder, most)
    return planned


def main() -> int:
    """Run the selected tools and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tool", action="append", choices=TOOLS, help="one of the tools; may be repeated"
    )
    parser.add_argument(
        "--only", choices=("cpp", "python"), help="only the C++ or only the Python tests"
    )
    parser.add_argument(
        "-k",
        default="",
        metavar="EXPRESSION",
        help="of the Python tests, those that pytest -k selects",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        help="processes that the Python tests are dealt among, and that run at once",
    )
    arguments = parser.parse_args()
    if arguments.jobs < 1:
        parser.error(f"--jobs is {arguments.jobs}; at least 1 is expected")
    # Expected values are computed on the CPU, by threads that would wait for each other otherwise.
    threads = max(1, (os.cpu_count() or 1) // arguments.jobs)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    if not shutil.which("compute-sanitizer"):
        print("compute-sanitizer is not on PATH; it comes with the CUDA toolkit", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        planned = [
            run
            for tool in arguments.tool or TOOLS
            for run in runs(tool, arguments.only, arguments.k, arguments.jobs, Path(folder))
        ]
        if not planned:
            print(
                f"nothing to run: no build/*/tests/cpp/{PROGRAM} (CUTLASS_OPS_TESTS=ON builds it)",
                file=sys.stderr,
            )
            return 2
        with ThreadPoolExecutor(arguments.jobs) as pool:
            outcomes = list(pool.map(Run.execute, planned))
    print(f"\n{'tool':<11}{'tests':<22}{'executed':>8}{'findings':>10}{'seconds':>9}  verdict")
    for outcome in outcomes:
        findings = "?" if outcome.findings is None else outcome.findings
        print(
            f"{outcome.run.tool:<11}{outcome.run.name:<22}{outcome.tests:>8}{findings:>10}"
            f"{outcome.seconds:>9.1f}  {outcome.verdict}"
        )
    return 0 if all(outcome.verdict == "clean" for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
