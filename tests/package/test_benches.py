"""Benches work: all are in the list of bench/run.py, and run to their end in small. They and the
accuracy suites import what exists, at their beginning and within functions.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

import run
from support.paths import ROOT, TESTS
from support.processes import run_python
from support.sampling import IS_WHOLE

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
    wanted = {(path.name, name) for path in folder.rglob("*.py") for name in imports(path)}
    outside = {(path, name) for path, name in wanted if name.partition(".")[0] not in TOOLS}
    assert outside
    assert {(path, name) for path, name in outside if not exists(name)} == set()


def test_every_program_is_in_the_list() -> None:
    programs = {path.stem for path in BENCH.glob("*.py") if "__main__" in path.read_text()}
    programs |= {path.stem for path in BENCH.glob("*.cpp") if "int main(" in path.read_text()}
    assert programs == {bench.name for bench in run.BENCHES} | set(run.TOOLS)


@pytest.mark.parametrize("bench", [b for b in run.BENCHES if b.smoke_test], ids=lambda b: b.name)
def test_what_the_smoke_run_leaves_out_is_run_by_a_test(bench: run.Bench) -> None:
    assert f"{bench.name}.main()" in (ROOT / str(bench.smoke_test)).read_text()


def test_they_run_in_small(tmp_path: Path) -> None:
    # In whole runs alone: it builds the CUDA binding for a minute.
    left_out = set() if IS_WHOLE else {"launches"}
    names = {b.name for b in run.BENCHES if b.smoke_test is None} - left_out
    results = {path: path.stat().st_mtime_ns for path in (BENCH / "results").iterdir()}
    temporary = {"TMPDIR": str(tmp_path), "FASTCHECK_BENCH_CACHE": str(tmp_path)}
    done = run_python(BENCH / "run.py", "--smoke", *names, cwd=tmp_path, env=temporary)
    assert done.returncode == 0, done.stdout + done.stderr
    assert results == {path: path.stat().st_mtime_ns for path in (BENCH / "results").iterdir()}
