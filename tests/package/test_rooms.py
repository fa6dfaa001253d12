"""Each room's __init__.py names its folders, files that exist, and the rooms that it imports.
Docstrings begin with a noun or a verb, and comments with their subject.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.paths import ROOT

PACKAGE = ROOT / "python" / "fastcheck"
ROOMS = sorted(path.parent for path in PACKAGE.rglob("__init__.py") if path.parent != PACKAGE)
#: Files of the package's root, which any room may import.
ANYWHERE = {"", "_version", "errors", "extension", "notebook"}
#: A docstring that begins with one of these words is half a sentence, or speaks of something else.
NOT_FIRST = re.compile(
    r"(above|also|are|as|at|because|before|behind|below|beside|between|by|does|during|for|from|has|"
    r"how|if|in|into|is|it|its|never|no|none|not|nothing|of|on|outside|over|per|since|that|their|"
    r"these|they|this|those|through|to|under|until|up|upon|what|when|where|which|while|who|whose|"
    r"why|with|within|without)"
    r"\b",
    re.IGNORECASE,
)

HALF_A_SENTENCE = re.compile(r"\s*#:? (As|How|Of|That of|Those|What|Whether|Which)\b")


def name_of(room: Path) -> str:
    return ".".join(room.relative_to(PACKAGE).parts)


def imports_of(file: Path) -> Iterator[str]:
    """Dotted paths within the package: of modules, or of names in them."""
    package = file.parent.relative_to(PACKAGE).parts
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom):
            module = (node.module or "").split(".")
            if node.level:
                module = [*package[: len(package) - node.level + 1], *filter(None, module)]
            elif module[0] == "fastcheck":
                module = module[1:]
            else:
                continue
            yield from (".".join([*module, alias.name]) for alias in node.names)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("fastcheck."):
                    yield alias.name.partition(".")[2]


def room_of(dotted: str) -> str:
    """The innermost folder on a path; empty for the package's root."""
    room = PACKAGE
    for part in dotted.split("."):
        if not (room / part / "__init__.py").is_file():
            break
        room = room / part
    return "" if room == PACKAGE else name_of(room)


def imported_rooms(room: Path) -> set[str]:
    """Rooms outside of ``room``: by their first name, or two names where the first is its own."""
    name = name_of(room)
    found = set()
    for file in room.rglob("*.py"):
        for dotted in imports_of(file):
            other = room_of(dotted)
            if other != name and not other.startswith(name + "."):
                parts = other.split(".")
                found.add(".".join(parts[: 2 if parts[0] == name.split(".")[0] else 1]))
    return found - ANYWHERE


def documentation(room: Path) -> str:
    return ast.get_docstring(ast.parse((room / "__init__.py").read_text("utf-8"))) or ""


@pytest.mark.parametrize("room", ROOMS, ids=name_of)
def test_the_last_paragraph_lists_what_is_imported(room: Path) -> None:
    last = documentation(room).split("\n\n")[-1]
    assert last.startswith("Imports "), "the last paragraph begins with Imports"
    listed = set(re.findall(r"``([\w.]+)``", last))
    assert listed == imported_rooms(room), f"update the docstring of {name_of(room)}/__init__.py"


@pytest.mark.parametrize("room", ROOMS, ids=name_of)
def test_folders_are_named_and_files_exist(room: Path) -> None:
    named = set(re.findall(r"``(\w+)``", documentation(room)))
    folders = {path.parent.name for path in room.glob("*/__init__.py")}
    assert folders <= named
    names = {path.stem for path in room.iterdir()} | {path.name for path in ROOMS}
    assert named <= names


def documented(file: Path) -> Iterator[tuple[str, str]]:
    """Each docstring of a file, with the place of it."""
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text:
                name = getattr(node, "name", "the module")
                yield f"{file.relative_to(PACKAGE).as_posix()}, {name}: {text}", text


def test_docstrings_begin_with_a_noun_or_a_verb() -> None:
    docstrings = [pair for file in sorted(PACKAGE.rglob("*.py")) for pair in documented(file)]
    assert len(docstrings) > 1000
    odd = [place for place, text in docstrings if NOT_FIRST.match(text)]
    assert not odd, "say what the thing is or does:\n" + "\n".join(odd)


def test_comments_begin_with_their_subject() -> None:
    odd = []
    for file in sorted(PACKAGE.rglob("*.py")):
        before = ""
        for number, line in enumerate(file.read_text("utf-8").splitlines(), 1):
            if HALF_A_SENTENCE.match(line) and not before.lstrip().startswith("#"):
                odd.append(f"{file.relative_to(PACKAGE).as_posix()}:{number}: {line.strip()}")
            before = line
    assert not odd, "say what the thing is or does:\n" + "\n".join(odd)


def test_a_class_name_has_one_meaning() -> None:
    """But for the classes of other tools, whose names their users know."""
    files: dict[str, list[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        if path.parent.name != "compat" or path.name.startswith("_"):
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.ClassDef):
                    files.setdefault(node.name, []).append(path.relative_to(PACKAGE).as_posix())
    assert {name: paths for name, paths in files.items() if len(paths) > 1} == {}
