"""The names that fastcheck/__init__.py exports: complete, sorted, and nothing else."""

from __future__ import annotations

import ast
import inspect
import operator
import re
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import fastcheck

SOURCE = ast.parse(Path(fastcheck.__file__).read_text())


both = pytest.mark.parametrize("module", [fastcheck, fastcheck.types], ids=lambda it: it.__name__)


@both
def test_all_is_sorted_and_has_no_repeats(module: Any) -> None:
    """Constants, then classes, then the rest, each in the order of the alphabet."""

    def rank(name: str) -> tuple[int, str]:
        return (0 if name.isupper() else 1 if name[0].isupper() else 2), name

    assert list(module.__all__) == sorted(set(module.__all__), key=rank)


@both
def test_everything_in_all_is_there(module: Any) -> None:
    for name in module.__all__:
        assert hasattr(module, name), name


def test_a_name_has_one_place() -> None:
    assert not set(fastcheck.__all__) & set(fastcheck.types.__all__)


def test_each_argument_begins_a_line_of_its_docstring() -> None:
    """An editor that fills paragraphs joins them."""
    seen = 0
    for function in (getattr(fastcheck, name) for name in fastcheck.__all__):
        text = inspect.getdoc(function) or ""
        if callable(function) and "\nArgs:" in text:
            described = set(
                re.findall(r"\w+", " ".join(re.findall(r"^    (\w[^:]*):", text, re.M)))
            )
            assert inspect.signature(function).parameters.keys() - {"unknown"} <= described, (
                function
            )
            seen += 1
    assert seen > 15


def test_dir_lists_the_public_names() -> None:
    assert dir(fastcheck) == sorted(fastcheck.__all__)


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("checksm", "did you mean 'checksum'?"),
        ("Verdict", "it is fastcheck.types.Verdict"),
        ("qqqqqq", "no attribute 'qqqqqq'"),
        ("_stats", "no attribute '_stats'"),
        ("types.Verdct", "did you mean 'Verdict'?"),
        ("callbacks.Huggingface", "did you mean 'HuggingFace'?"),
    ],
)
def test_a_name_that_is_not_there(name: str, hint: str) -> None:
    with pytest.raises(AttributeError) as caught:
        operator.attrgetter(name)(fastcheck)
    assert str(caught.value).endswith(hint)


def test_everything_public_is_in_all() -> None:
    public = {
        name
        for name, value in vars(fastcheck).items()
        if not name.startswith("_")
        and not isinstance(value, types.ModuleType)
        and name != "annotations"
    }
    modules = {"callbacks", "types"}  # what else users name
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


@both
def test_everything_public_has_a_docstring(module: Any) -> None:
    for name in module.__all__:
        value = getattr(module, name)
        if isinstance(value, (type, types.FunctionType)):
            doc = value.__doc__ or ""
            assert len(doc) > 20, name
            assert not doc.startswith(f"{name}("), name  # a dataclass's generated one


@both
def test_public_members_have_a_docstring(module: Any) -> None:
    without = [
        f"{name}.{member}"
        for name in module.__all__
        if isinstance(getattr(module, name), type)
        for member, value in vars(getattr(module, name)).items()
        if not member.startswith("_")
        and isinstance(value, (property, classmethod, staticmethod, types.FunctionType))
        and not inspect.getdoc(value)
    ]
    assert without == []


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
