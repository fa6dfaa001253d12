"""The parts of a monitor are given what they need when they are made (monitor/core.py), and are
small.
"""

from __future__ import annotations

import ast
import functools
import textwrap
from collections.abc import Iterator

import pytest

from support.paths import ROOT
from support.processes import run_python

PACKAGE = ROOT / "python" / "fastcheck"
ROOMS = ("monitor", "verdict", "watch")
FILES = sorted(path for room in ROOMS for path in (PACKAGE / room).rglob("*.py"))
MOST_ATTRIBUTES = 15


@functools.cache
def all_trees() -> dict[str, ast.Module]:
    """Of each file; not parsed where tests are only collected, which each process does."""
    return {
        path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text("utf-8")) for path in FILES
    }


def functions_of(trees: dict[str, ast.Module]) -> set[str]:
    """The names of functions and methods that name nothing else: no property, no value."""
    functions, values = set(), set()
    for node in (node for tree in trees.values() for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef):
            is_plain = all(
                "perty" not in (mark := ast.unparse(each)) and "setter" not in mark
                for each in node.decorator_list
            )
            (functions if is_plain else values).add(node.name)
        elif isinstance(node, ast.arg):
            values.add(node.arg)
        elif isinstance(node, (ast.Attribute, ast.Name)) and isinstance(node.ctx, ast.Store):
            values.add(node.attr if isinstance(node, ast.Attribute) else node.id)
    return functions - values


def is_of_self(target: ast.expr) -> bool:
    return (
        isinstance(target, ast.Attribute)
        and isinstance(target.value, ast.Name)
        and target.value.id == "self"
    )


def slots_of(trees: dict[str, ast.Module]) -> Iterator[str]:
    """Attributes for a function that comes later: a self.attribute typed as a Callable that holds
    a lambda or None, and a function that is put into the attribute of another object.
    """
    functions = functions_of(trees)
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.AnnAssign) and is_of_self(node.target):
                is_late = isinstance(node.value, ast.Lambda) or (
                    isinstance(node.value, ast.Constant) and node.value.value is None
                )
                if "Callable" in ast.unparse(node.annotation) and is_late:
                    yield f"{name}:{node.lineno}: {ast.unparse(node)}"
            elif isinstance(node, ast.Assign):
                value = node.value
                is_function = isinstance(value, ast.Lambda) or (
                    isinstance(value, (ast.Attribute, ast.Name))
                    and (value.attr if isinstance(value, ast.Attribute) else value.id) in functions
                )
                others = [t for t in node.targets if isinstance(t, ast.Attribute)]
                if is_function and any(not is_of_self(target) for target in others):
                    yield f"{name}:{node.lineno}: {ast.unparse(node)}"


def attributes_of(made: ast.ClassDef) -> set[str]:
    """Those that a class declares, and those that its methods assign to ``self``; no properties."""
    found = set()
    for node in ast.walk(made):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_of_self(node):
            found.add(node.attr)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id if node in made.body else "")
    return found - {""} - {part.name for part in made.body if isinstance(part, ast.FunctionDef)}


def test_no_function_is_put_into_a_part_that_was_made() -> None:
    assert list(slots_of(all_trees())) == []


@pytest.mark.parametrize(
    "code",
    [
        "self.deliver: Callable[[], None] = lambda: None",
        "self.check: Optional[Callable[[], bool]] = None",
        "session.deliver = self.stops",
        "session.describe = lambda: {}",
        "store.on_change = stops",
    ],
)
def test_a_slot_is_found(code: str) -> None:
    body = textwrap.indent(f"def stops(self):\n    {code}", "    ")
    assert len(list(slots_of({"x.py": ast.parse(f"class Part:\n{body}")}))) == 1


def test_install_and_the_monitor_use_no_private_part_of_one_another() -> None:
    found = {
        ast.unparse(node)
        for node in ast.walk(all_trees()["monitor/install.py"])
        if isinstance(node, ast.Attribute) and node.attr.startswith("_")
    } - {"type(model).__name__"}
    # A monitor whose hooks could not be attached goes without waiting for other ranks.
    assert found == {"monitor._remove", "model._forward_pre_hooks"}


#: Tables of arrays, and how many there may be.
LARGE = {
    "watch/signals.py: Signals": 28,
    "watch/view.py: StepsView": 21,
}


def test_classes_are_small() -> None:
    large = [
        f"{name}: {node.name} has {len(attributes_of(node))} attributes"
        for name, tree in all_trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        and len(attributes_of(node)) > LARGE.get(f"{name}: {node.name}", MOST_ATTRIBUTES)
    ]
    assert large == []


def test_a_nan_passes_few_files() -> None:
    """From the hook that read it to the exception; the bars are those of the bench."""
    told = run_python(ROOT / "bench/path.py", env={"FASTCHECK_BENCH_SMOKE": "1"})
    assert told.returncode == 0, told.stdout + told.stderr
