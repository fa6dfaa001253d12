"""Benches and accuracy suites import what exists, at their beginning and within functions."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.paths import ROOT, TESTS

BENCH = ROOT / "bench"
#: Measured beside fastcheck, each in an environment of its own.
TOOLS = {"msprobe", "transformers", "triton"}


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None and node.level == 0, "a bench is no package"
            yield node.module


def exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


@pytest.mark.parametrize("folder", [BENCH, TESTS / "accuracy"], ids=lambda folder: folder.name)
def test_every_import_exists(folder: Path) -> None:
    wanted = {(path.name, name) for path in folder.glob("*.py") for name in imports(path)}
    outside = {(path, name) for path, name in wanted if name.partition(".")[0] not in TOOLS}
    assert outside
    assert {(path, name) for path, name in outside if not exists(name)} == set()
