"""Every file, folder and link that the documentation and the comments name exists."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import fastcheck
from support.paths import ROOT

PAGES = [
    path
    for pattern in ("*.md", "docs/*.md", "bench/*.md", "tests/accuracy/*.md", "tests/fakes/*/*.md")
    for path in sorted(ROOT.glob(pattern))
]
SUFFIXES = {
    "python": ["*.py", "*.pyi"],
    "csrc": ["*.h", "*.cpp", "*.cu", "*.cuh", "*.cmake"],
    "bench": ["*.py", "*.sh", "*.cpp", "*.h", "*.cu"],
    "wheels": ["*.py", "*.sh"],
    "tests/accuracy": ["*.py"],
    "tests/fakes": ["*.py", "*.cpp", "*.h", "*.cu"],
    "tests/lab": ["*.py", "*.sh", "*.cu"],
    "tests/support": ["*.py"],
}
SOURCES = [
    ROOT / "Makefile",
    ROOT / "CMakeLists.txt",
    *(
        path
        for folder, kinds in SUFFIXES.items()
        for kind in kinds
        for path in (ROOT / folder).rglob(kind)
    ),
]

# A path may be written from the root of the repository, or from one of these.
BASES = ["", "python/fastcheck", "csrc", "csrc/torch", "tests/fakes"]
EXTENSIONS = r"(?:py|pyi|md|h|cpp|cu|cuh|sh|json|txt|cmake)"
# A file in a folder, a folder of the repository, and a source file alone in backticks.
FILE = re.compile(rf"(?<![\w./~<{{$*-])(?:[\w.-]+/)+[\w-]+\.{EXTENSIONS}\b(?![/*{{<]|\.in\b)")
FOLDER = re.compile(r"(?<![\w./~-])(?:csrc|tests|python/fastcheck)(?:/\w+)+/?(?![\w./*{-])")
ALONE = re.compile(r"`([\w-]+\.(?:py|h|cpp|cu|cuh|sh))`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)

# Of other projects, written by fastcheck where it runs, or in an example.
ELSEWHERE = {"npu_sys_ctrl.cpp", "acl_rt.h", "replay.py", "model.py", "train.py", "zero_to_fp32.py"}
OUTSIDE = re.compile(r"^(?:bench/results|torch|c10|ATen|pybind11|dump|step\d*|proc\d*|fused)/")
NAMES = {
    path.name
    for folder in ("python", "csrc", "tests", "bench", "docs", "wheels")
    for path in (ROOT / folder).rglob("*")
}


def exists(name: str, beside: Path) -> bool:
    return any((base / name).exists() for base in (beside, *(ROOT / base for base in BASES)))


def missing(path: Path) -> Iterator[str]:
    text = path.read_text().replace("$root/", "")
    for pattern in (FILE, FOLDER):
        for found in pattern.finditer(text):
            name = found[0].rstrip("/.")
            if not OUTSIDE.match(name) and not exists(name, path.parent):
                yield name
    yield from (name for name in ALONE.findall(text) if name not in NAMES | ELSEWHERE)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    titles = (re.sub(r"[^\w\- ]", "", title.lower()) for title in HEADING.findall(page.read_text()))
    return {title.strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_path_that_a_page_names_exists(path: Path) -> None:
    assert sorted(set(missing(path))) == []


def test_every_path_that_a_source_file_names_exists() -> None:
    wrong = {str(path.relative_to(ROOT)): sorted(set(missing(path))) for path in SOURCES}
    assert {path: names for path, names in wrong.items() if names} == {}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    wrong = []
    for target in LINK.findall(page.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        to = (page.parent / name).resolve() if name else page
        if not to.exists() or (anchor and anchor not in anchors(to)):
            wrong.append(target)
    assert wrong == []


def test_the_design_lists_every_room() -> None:
    text = (ROOT / "docs" / "design.md").read_text()
    rooms = {path.parent.name for path in (ROOT / "python" / "fastcheck").glob("*/__init__.py")}
    assert {room for room in rooms if f"`{room}/`" not in text} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_prose_wraps_at_120_columns(page: Path) -> None:
    """Rows of tables can't be wrapped, and code is as its tools format it."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert [line for line in prose.splitlines() if len(line) > 120 and line[0] != "|"] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_public_name_of_a_page_exists(page: Path) -> None:
    # Not of a file name (model.pt.fastcheck.json), nor the placeholder fastcheck.X.
    names = set(re.findall(r"(?<![\w./-])fastcheck\.([A-Za-z_]\w*)", page.read_text())) - {
        "X",
        "json",
    }
    submodules = {path.stem for path in (ROOT / "python" / "fastcheck").iterdir()}
    assert {
        name for name in names if not hasattr(fastcheck, name) and name not in submodules
    } == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_code_of_a_page_gives_parameters_that_exist(page: Path) -> None:
    code = re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    wrong = []
    for block in code:
        if block.startswith(">>>"):
            continue
        for call in (node for node in ast.walk(ast.parse(block)) if isinstance(node, ast.Call)):
            function = call.func
            if isinstance(function, ast.Attribute) and ast.unparse(function.value) == "fastcheck":
                parameters = inspect.signature(getattr(fastcheck, function.attr)).parameters
                if any(one.kind is one.VAR_KEYWORD for one in parameters.values()):
                    continue
                given = {keyword.arg for keyword in call.keywords}
                wrong += [f"{function.attr}({name}=)" for name in given - set(parameters)]
    assert wrong == []


@pytest.mark.parametrize("kind", ["Stop", "Log", "Filter", "Training", "OnRequest"])
def test_the_table_of_options_has_those_of_each_group(kind: str) -> None:
    guide = (ROOT / "docs" / "guide.md").read_text()
    row = next(
        line for line in guide.splitlines() if re.match(rf"\| `\w+=fastcheck\.{kind}\(", line)
    )
    options = {option.name for option in dataclasses.fields(getattr(fastcheck, kind))}
    assert options <= {*re.findall(r"`(\w+)`", row), "dir"}
