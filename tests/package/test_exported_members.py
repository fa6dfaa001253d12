"""The names that fastcheck/__init__.py exports: complete, sorted, and nothing else."""

from __future__ import annotations

import ast
import subprocess
import sys
import types
from pathlib import Path

import fastcheck

SOURCE = ast.parse(Path(fastcheck.__file__).read_text())


def test_all_is_sorted_and_has_no_repeats() -> None:
    """Constants, then classes, then the rest, each in the order of the alphabet."""

    def rank(name: str) -> tuple[int, str]:
        return (0 if name.isupper() else 1 if name[0].isupper() else 2), name

    assert list(fastcheck.__all__) == sorted(set(fastcheck.__all__), key=rank)


def test_everything_in_all_is_there() -> None:
    for name in fastcheck.__all__:
        assert hasattr(fastcheck, name), name


def test_everything_public_is_in_all() -> None:
    public = {
        name
        for name, value in vars(fastcheck).items()
        if not name.startswith("_")
        and not isinstance(value, types.ModuleType)
        and name != "annotations"
    }
    modules = {"callbacks"}  # the only package that users name
    assert public | modules == {name for name in fastcheck.__all__ if not name.startswith("_")}


def test_init_only_imports_and_exports() -> None:
    allowed = (ast.Import, ast.ImportFrom, ast.Assign, ast.Expr, ast.If, ast.Try)
    for node in SOURCE.body:
        assert isinstance(node, allowed), ast.unparse(node)
        if isinstance(node, ast.Expr):
            assert isinstance(node.value, ast.Constant), ast.unparse(node)


def test_public_classes_call_themselves_public_names() -> None:
    for name in fastcheck.__all__:
        value = getattr(fastcheck, name)
        if isinstance(value, type) and issubclass(value, Exception):
            assert value.__module__ == "fastcheck", name
            assert repr(value) == f"<class 'fastcheck.{name}'>"


def test_everything_public_has_a_docstring() -> None:
    for name in fastcheck.__all__:
        value = getattr(fastcheck, name)
        if isinstance(value, (type, types.FunctionType)):
            doc = value.__doc__ or ""
            assert len(doc) > 20, name
            assert not doc.startswith(f"{name}("), name  # a dataclass's generated one


def test_it_is_typed() -> None:
    assert (Path(fastcheck.__file__).parent / "py.typed").exists()


def test_import_loads_nothing_heavy() -> None:
    code = (
        "import sys; import torch, numpy; before = set(sys.modules); import fastcheck;"
        "print(*sorted({name.split('.')[0] for name in set(sys.modules) - before}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {
        "pandas",
        "pyarrow",
        "plotly",
        "matplotlib",
        "tensorboard",
        "rich",
        "transformers",
        "pytest",
    }
    assert not heavy & set(done.stdout.split())
