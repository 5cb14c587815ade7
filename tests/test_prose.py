"""Words: the repository's prose and names use the field's terms and no private ones."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SUFFIXES = {
    ".c",
    ".cpp",
    ".cu",
    ".cuh",
    ".h",
    ".inc",
    ".in",
    ".md",
    ".py",
    ".pyi",
    ".txt",
    ".cmake",
    ".toml",
    "",
}

# Regular expressions between word boundaries, and what to write instead. A blank also matches a
# line break and comment marks.
WORDS = {
    r"beside (int\d+|x|floats?|results of|outliers|such tiles|few \w+)": "with int8 weights; "
    "together "
    "with "
    "x",
    r"ask(s|ed) for": "issue (copies), request",
    r"under way": "in flight",
    r"ma(kes?|de) good": "compensates",
    r"the way out": "epilogue store",
    r"anew": "again, or leave out",
    r"likewise": "also, or leave out",
    r"(is|are|was|were|been|be|where|has|have) told( apart)?": "knows; distinct",
    r"of (its|their) own": "separate, or leave out",
    r"at that(?=[.,;:)])": "leave out",
    r"ha(s|ve|d) them": "say what has what",
    r"(parts|pieces) of k": "split-K slices",
    r"cut tiles?|tiles? (is|are) cut": "split-K tiles",
    r"dealt out": "partitioned",
    r"partials": "split-K workspace",
    r"slabs?": "row panel (the file layout is slab64)",
    r"widen(s|ed|ing)?": "upcast",
}

# Names, in words: let_successor_start and LetSuccessorStart alike.
NAMED = {
    r"let successor start|wait for predecessor|wait alone": "pdl_launch_dependents, pdl_wait",
    r"reduce splits": "splitk_reduce",
    r"leave tile": "store_tile",
    r"(?<!x\s)row sums|sum weights": "weight_colsum",
    r"k books?": "codebook",
}

# Words that are the language of Python, C++ or another field elsewhere, and private in kernels.
KERNEL_NAMES = {
    r"tokens": "rows of x, BLOCK_M",
    r"excess": "bias of the decoded code",
    r"beside": "together with; the name of what is called between",
}
KERNELS = ("csrc/device/", "csrc/dispatch/", "csrc/kernels/")

# Whole names, as they are written: longer ones say what starts.
WHOLE_NAMES = {r"kStart|kShift|kWindows?": "the algorithm's name in words"}

# Words of names of kernels, with their capitals: in small letters a place may be a pixel, and a
# book the code book of the sentence before.
CAPITALS = re.compile(r"(?:(?:Place|Feed|Cursor|(?<!Code)Book)(?![a-z])|\bShares\b)")

# A sentence begins with its subject. Its beginning is that of a paragraph of comment marks, quotes
# or list marks, or follows the end of another sentence.
SENTENCES = re.compile(
    r"(?:(?:^|\n)[ \t]*(?://+|#+|\"\"\"|[*-])?[ \t]*|[.:;!?)`][ \n\t/#*]+)"
    r"(?P<first>Of|Beside)(?=\s)"
)

# (path or its beginning, what was found): why it may stand there.
EXCEPTIONS: dict[tuple[str, str], str] = {
    ("csrc/kernels/route.cu", "tokens"): "of a mixture-of-experts layer",
    ("csrc/dispatch/expert_", "tokens"): "the same",
}

FOLDERS = ("csrc", "cutlass_ops", "tests", "tools", "docs", "examples", "cmake")
FILES = ("README.md", "CHANGELOG.md", "Makefile", "CMakeLists.txt")


def sources() -> list[Path]:
    inside = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*"))]
    files = [
        path
        for path in inside + [ROOT / name for name in FILES]
        if path.is_file() and path.suffix in SUFFIXES
    ]
    return [
        path for path in files if path != Path(__file__).resolve() and "results" not in path.parts
    ]


def expression(words: dict[str, str]) -> re.Pattern[str]:
    alternatives = "|".join(rf"(?:{word})" for word in words)
    return re.compile(
        rf"(?<![A-Za-z0-9])(?:{alternatives})(?![A-Za-z0-9])".replace(" ", r"(?:\s|[#*/|])+")
    )


PROSE, KERNEL_PROSE = expression(WORDS | NAMED), expression(WORDS | NAMED | KERNEL_NAMES)
WHOLE = re.compile(rf"\b(?:{'|'.join(WHOLE_NAMES)})\b")


def words(text: str) -> str:
    """``text`` in small letters, with a blank where a name goes on with a
    capital: the lines stay.
    """
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])|_", " ", text).lower()


def findings(name: str, text: str) -> list[str]:
    """``file:line: what`` for each word of ``text`` that has no exception; capitals and CamelCase
    are no exceptions.
    """
    kernel = name.startswith(KERNELS)
    found = []
    for where, pattern in (
        (text, WHOLE),
        (text, SENTENCES),
        (words(text), KERNEL_PROSE if kernel else PROSE),
        *([(text, CAPITALS)] if kernel else []),
    ):
        for match in pattern.finditer(where):
            group = pattern.groupindex.get("first", 0)
            what = " ".join(re.sub(r"[#*/|]", " ", match.group(group)).split())
            if not any(name.startswith(path) and what == phrase for path, phrase in EXCEPTIONS):
                found.append(f"{name}:{where.count(chr(10), 0, match.start(group)) + 1}: {what}")
    return found


def test_words_of_the_field() -> None:
    found = []
    for path in sources():
        name = path.relative_to(ROOT).as_posix()
        found += findings(name, path.read_text())
    assert not found, "\n".join(found)


def test_exceptions_are_used() -> None:
    for path, phrase in EXCEPTIONS:
        files = [file for file in sources() if file.relative_to(ROOT).as_posix().startswith(path)]
        assert any(phrase.lower() in " ".join(words(file.read_text()).split()) for file in files), (
            path,
            phrase,
        )


# Folders whose code has lines of at most 100 characters (ReflowComments is off, so clang-format
# does not see its comments).
SHORT_LINES = ("csrc", "cutlass_ops", "tests")


def long_lines(name: str, text: str) -> list[str]:
    """``file:line: characters`` for each line of more than 100 characters."""
    lines = enumerate(text.split("\n"), 1)
    return [f"{name}:{number}: {len(line)}" for number, line in lines if len(line) > 100]


def test_lines_have_at_most_100_characters() -> None:
    suffixes = {".py", ".h", ".cuh", ".cu", ".cpp", ".txt", ".inc"}
    found = []
    for folder in SHORT_LINES:
        for path in sorted((ROOT / folder).rglob("*")):
            name = path.relative_to(ROOT).as_posix()
            if path.is_file() and path.suffix in suffixes:
                found += long_lines(name, path.read_text())
    assert not found, "\n".join(found)


def test_long_lines() -> None:
    assert long_lines("a.py", "x" * 100 + "\n" + "é" * 101) == ["a.py:2: 101"]


BESIDE, BOOK = ("beside", "excess"), ("k book", "Book", "Place")


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("docs/a.md", "copies are under\nway", ["docs/a.md:1: under way"]),
        (
            "csrc/kernels/a.cu",
            "// what is asked\n  // for here\n",
            ["csrc/kernels/a.cu:1: asked for"],
        ),
        ("tools/a.py", "mask for\nslab64, beside the point", []),
        ("tools/a.py", "tokens", []),
        (
            "tools/a.py",
            "ROWS_PER_SLAB\nSlabs, PartsOfK",
            ["tools/a.py:1: slab", "tools/a.py:2: slabs", "tools/a.py:2: parts of k"],
        ),
        ("docs/a.md", "Likewise", ["docs/a.md:1: likewise"]),
        ("csrc/device/a.cuh", "\nTile::tokens", ["csrc/device/a.cuh:2: tokens"]),
        ("csrc/device/a.cuh", "kTokens, Tokens", ["csrc/device/a.cuh:1: tokens"] * 2),
        ("csrc/kernels/a.cu", "Beside, kExcess", [f"csrc/kernels/a.cu:1: {w}" for w in BESIDE]),
        ("csrc/kernels/a.cu", "kBook, kPlace", [f"csrc/kernels/a.cu:1: {w}" for w in BOOK]),
        ("csrc/kernels/a.cu", "kCodebook, CodeBook, kPlaces, kSharesBytes", []),
        (
            "tools/a.cpp",
            "LetSuccessorStart, ReduceSplits\nRowSums, kXRowSums",
            [
                "tools/a.cpp:1: let successor start",
                "tools/a.cpp:1: reduce splits",
                "tools/a.cpp:2: row sums",
            ],
        ),
        ("tools/a.cpp", "kStart, kStartTiles", ["tools/a.cpp:1: kStart"]),
        (
            "tools/a.cpp",
            "// Of experts.\n// Its sums. Beside\n// these, of x",
            ["tools/a.cpp:1: Of", "tools/a.cpp:2: Beside"],
        ),
        ("tools/a.py", '    """Of x.\n', ["tools/a.py:1: Of"]),
        ("docs/a.md", "- Of x\nOf y", ["docs/a.md:1: Of", "docs/a.md:2: Of"]),
    ],
)
def test_findings(name: str, text: str, found: list[str]) -> None:
    assert findings(name, text) == found
