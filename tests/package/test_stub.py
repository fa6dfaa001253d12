"""_C.pyi and _kernels.pyi agree with the compiled modules: the same names, and of _C the same
parameters and defaults.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import fastcheck
from fastcheck import _C, _kernels

STUB = ast.parse((Path(fastcheck.__file__).parent / "_C.pyi").read_text())
FUNCTIONS = {node.name: node for node in STUB.body if isinstance(node, ast.FunctionDef)}
CLASSES = {node.name: node for node in STUB.body if isinstance(node, ast.ClassDef)}
METHODS = [
    (cls.name, node.name, node)
    for cls in CLASSES.values()
    for node in cls.body
    if isinstance(node, ast.FunctionDef)
]


def stub_parameters(node: ast.FunctionDef) -> list[tuple[str, str]]:
    """(name, default as source, "" when there is none)."""
    names = [argument.arg for argument in node.args.args]
    defaults = ["", *[""] * len(names), *[ast.unparse(value) for value in node.args.defaults]]
    return list(zip(names, defaults[-len(names) :] if names else []))


def compiled_parameters(function: object) -> list[tuple[str, str]]:
    """The same, out of the first line of a pybind11 docstring."""
    line = (function.__doc__ or "").strip().splitlines()[0]
    inside = re.fullmatch(r"\w+\((.*)\) -> .*", line)
    assert inside, line
    tree = ast.parse(f"def f({inside[1]}): ...").body[0]
    assert isinstance(tree, ast.FunctionDef)
    return stub_parameters(tree)


def test_names() -> None:
    public = {name for name in dir(_C) if not name.startswith("_")}
    assert public == {*FUNCTIONS, *CLASSES}


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_function_parameters(name: str) -> None:
    assert compiled_parameters(getattr(_C, name)) == stub_parameters(FUNCTIONS[name])


# Of a slot of CPython's own, such as __enter__, the extension gives no parameters.
SAID = [method for method in METHODS if method[1] in ("__init__", "__len__") or method[1][0] != "_"]


@pytest.mark.parametrize(("cls", "name", "node"), SAID, ids=[f"{c}.{n}" for c, n, _ in SAID])
def test_method_parameters(cls: str, name: str, node: ast.FunctionDef) -> None:
    compiled = compiled_parameters(getattr(getattr(_C, cls), name))
    assert compiled[1:] == stub_parameters(node)[1:]


@pytest.mark.parametrize("cls", sorted(CLASSES))
def test_methods(cls: str) -> None:
    compiled = {name for name, value in vars(getattr(_C, cls)).items() if callable(value)}
    compiled = {name for name in compiled if not name.startswith("_pybind")} - {"__new__"}
    stub = {name for owner, name, _ in METHODS if owner == cls}
    if "__new__" in stub:
        stub.discard("__new__")
    elif "__init__" not in stub:
        with pytest.raises(TypeError, match=r"No constructor|cannot create"):
            getattr(_C, cls)()
        compiled.discard("__init__")
    assert compiled == stub


KERNELS = ast.parse((Path(fastcheck.__file__).parent / "_kernels.pyi").read_text())
KERNEL_FUNCTIONS = {node.name: node for node in KERNELS.body if isinstance(node, ast.FunctionDef)}


def test_names_of_the_kernels() -> None:
    public = {name for name in dir(_kernels) if not name.startswith("_")}
    assert public == {*KERNEL_FUNCTIONS, "table"}


@pytest.mark.parametrize("name", sorted(KERNEL_FUNCTIONS))
def test_how_many_arguments_a_kernel_takes(name: str) -> None:
    count = len(KERNEL_FUNCTIONS[name].args.posonlyargs)
    for wrong in {count - 1, count + 1} - {-1}:
        with pytest.raises(TypeError, match=rf"expected {count} arguments, got a tuple of {wrong}"):
            getattr(_kernels, name)(*[object()] * wrong)


def test_return_types_that_can_be_tried() -> None:
    assert isinstance(_kernels.cpu_isa(), str)
    assert isinstance(_kernels.compiler(), str)
    assert isinstance(_C.torch_version(), str)
    isas = _kernels.cpu_isas()
    assert [tuple(map(type, row)) for row in isas] == [(str, bool, str)] * len(isas)
    assert {type(row) for row in _kernels.dtype_table()} == {tuple}
    assert {tuple(map(type, row)) for row in _kernels.dtype_table()} == {(int, str, int, int)}
    assert {tuple(map(type, row)) for row in _kernels.record_layout().values()} == {(int, int)}


def test_every_annotation_is_there() -> None:
    for node in [*FUNCTIONS.values(), *(method for _, _, method in METHODS)]:
        assert node.returns is not None
        for argument in node.args.args:
            assert argument.arg in ("self", "cls") or argument.annotation is not None
