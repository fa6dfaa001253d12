"""The lines of a program in which an operator is written, in the functions that run and in those
that they call, as far as names tell without running code what is called.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import itertools
import linecache
import re
import sysconfig
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch

from fastcheck.report.stop_report import MadeBy
from fastcheck.utils.torch.frames import is_of_program, program_frames

from .assignments import Frame
from .local_variables import source_of

_MOST_FUNCTIONS = 100
_MOST_SOURCE = 80
_MOST_PLACES = 3
_MOST_WRAPPERS = 8
_LIBRARIES = re.compile(
    rf"{re.escape(sysconfig.get_paths()['stdlib'])}|[/\\](?:site|dist)-packages[/\\]"
)
#: Operators of Python, by the names of autograd.
_BINARY: Mapping[str, type[ast.operator]] = {
    "add": ast.Add,
    "bmm": ast.MatMult,
    "div": ast.Div,
    "mm": ast.MatMult,
    "mul": ast.Mult,
    "pow": ast.Pow,
    "reciprocal": ast.Div,
    "rsub": ast.Sub,
    "sub": ast.Sub,
}
#: Functions by other names that call an operator.
_CALLED_BY = {
    "acos": ("arccos",),
    "asin": ("arcsin",),
    "lgamma": ("log_prob",),
    "linalg_vector_norm": ("norm", "vector_norm", "normalize"),
    "log": ("log_prob",),
    "log_softmax": ("cross_entropy", "crossentropyloss"),
    "nll_loss": ("cross_entropy", "crossentropyloss"),
    "norm": ("normalize",),
    "pow": ("square",),
    "xlogy": ("log_prob",),
}
#: Operators that make NaN or Inf of finite numbers where data is computed.
_OF_DATA = ("div", "log", "log2", "log10", "sqrt", "rsqrt", "std", "angle")
#: In place of an operator: what writes to gradients, and to weights.
_GRADIENT, _WEIGHT = "grad", "weight"
_NO_WRITES = (
    *("zero_", "detach_", "requires_grad_", "share_memory_", "unscale_"),
    *("clip_grad_norm_", "clip_grad_value_"),
)
#: An exponent whose power is a root or a quotient.
_OF_ROOT = re.compile(r"-|0?\.\d")
#: A small number, or the name of one.
_EPS = re.compile(r"^(?:[\d.]+(?:e-\d+)?|.*\beps\w*|.*tiny)$")
_OF_NEGINF = ("div", "log", "log2", "log10")


class _Source(NamedTuple):
    """A function that runs or is called. ``names``: what they stand for, as far as is known.
    ``line``: that which runs; 0: all may have run.
    """

    code: CodeType
    names: Mapping[str, Any]
    line: int = 0


def with_lines(made: MadeBy) -> MadeBy:
    """Adds the places where an operator is written whose line is not known: in the program's
    functions that run and in those that they call, of one that ran in forward without the modules
    that are observed.
    """
    kind, suffix, _ = made.operator.partition("Backward")
    if made.line or not suffix:
        return made
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", kind).lower()
    functions = _running_functions()
    # The line of the variable may be the very one.
    assigned = r" (?:assigned at|which runs from) (.+):([\d or]+) in (\w+|<\w+>)"
    place = re.search(assigned, made.variable)
    known = place[2].split(" or ") if place else ()
    if place and not made.variable.startswith("the result is used in "):
        functions = _until(functions, path=place[1], name=place[3])
    written = _Search((name,), with_modules=made.is_backward).places(functions)
    is_known = any(re.search(rf":(?:{'|'.join(known)}) in ", place) for place in written if known)
    return made if is_known else replace(made, written=written)


def lines_of_data(is_loud: bool) -> tuple[str, ...]:
    """The places where NaN or Inf may be made of finite numbers, in the program's functions that
    run and in those that they call. ``is_loud``: not -Inf alone.
    """
    return _of_data(is_loud).places(_running_functions())


def lines_behind(
    frame: Frame, statements: Iterable[tuple[int, int]], is_loud: bool
) -> tuple[str, ...]:
    """The places of ``lines_of_data`` in the functions that these statements of a function call;
    none where the statements themselves may have made it.
    """
    function, search = _running(frame), _of_data(is_loud)
    wanted = {line for first, last in statements for line in range(first, last + 1)}
    nodes = [(node, one) for node, one in _expressions(function) if node.lineno in wanted]
    if any(search.line_of(node, one, function) for node, one in nodes):
        return ()
    calls = [search.called(one.func, function) for one, _ in nodes if isinstance(one, ast.Call)]
    return search.places(itertools.chain.from_iterable(calls))


def lines_of_update(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """The places where the step of an optimizer, if it is the program's code, may make NaN or Inf
    of finite numbers.
    """
    return _of_data(is_loud=True).places(_functions(type(optimizer).step, optimizer))


def lines_of_gradients() -> tuple[str, ...]:
    """The places where the program writes to gradients, in the functions that run and in those
    that they call.
    """
    return _Search((_GRADIENT,), with_modules=False).places(_running_functions())


def lines_of_hooks(parameter: torch.Tensor) -> tuple[str, ...]:
    """The places where NaN or Inf may be made of finite numbers, in hooks on a parameter."""
    hooks = getattr(parameter, "_backward_hooks", None) or {}
    functions = (one for hook in hooks.values() for one in _functions(hook, None))
    return _of_data(is_loud=True).places(functions)


def function_at(place: str) -> str:
    """The name of the autograd.Function that the statement at this place (``/train.py:12 in step``)
    applies, while it runs; empty: none, as far as is known.
    """
    for function in _running_functions():
        path = function.code.co_filename
        if not place.startswith(f"{path}:{function.line} in "):
            continue
        for node, statement in _expressions(function):
            first, last = _lines_of(statement)
            called = node.func if isinstance(node, ast.Call) else None
            if not isinstance(called, ast.Attribute) or called.attr != "apply":
                continue
            owner = _value(called.value, function.names) if first <= function.line <= last else None
            if isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
                return owner.__name__
    return ""


def lines_of_backward(function: type[torch.autograd.Function]) -> tuple[str, ...]:
    """The places where NaN or Inf may be made of finite numbers, in the backward of a Function;
    none where the program applies none outside of its modules.
    """
    applied = _Search(("apply",), with_modules=False).places(_running_functions())
    functions = _functions(function.backward, None) if applied else ()
    return _of_data(is_loud=True).places(functions)


def lines_of_weights(name: str) -> tuple[str, ...]:
    """The places where the program writes to a tensor of this name, or else to any but gradients,
    in place, in the functions that run, as far as they have run in an earlier call, and in those
    that they call: of this name in modules, too.
    """
    functions = [one._replace(line=0) for one in _running_functions()]
    named = _Search((_WEIGHT,), with_modules=True, written=name).places(functions)
    return named or _Search((_WEIGHT,), with_modules=False).places(functions)


def _of_data(is_loud: bool) -> _Search:
    operators = _OF_DATA if is_loud else _OF_NEGINF
    return _Search(operators, with_modules=False, with_guarded=False)


def _until(functions: Iterable[_Source], path: str, name: str) -> Iterator[_Source]:
    """The first of these functions, up to the one that holds the result: none around it made it."""
    for function in functions:
        yield function
        if (function.code.co_filename, function.code.co_name) == (path, name):
            return


def _running_functions() -> Iterator[_Source]:
    return map(_running, program_frames())


class _Search:
    """A search for these operators. ``with_modules``: in observed modules, too. ``with_guarded``:
    also where what they read has an eps or was clamped. ``written``: the name of what is written;
    empty: any.
    """

    def __init__(
        self,
        operators: tuple[str, ...],
        with_modules: bool,
        with_guarded: bool = True,
        written: str = "",
    ) -> None:
        names = {name for one in operators for name in (one, *_CALLED_BY.get(one, ()))}
        # MSELoss is a module of mse_loss.
        self._names = names | {name.replace("_", "") for name in names}
        self._kinds = tuple(_BINARY[name] for name in operators if name in _BINARY)
        self._with_modules = with_modules
        self._with_guarded = with_guarded
        self._written = re.compile(rf"\b{re.escape(written)}\b")

    def places(self, functions: Iterable[_Source]) -> tuple[str, ...]:
        """Returns the places in these functions, each with those that it calls: in as many of the
        first as have no more than three.
        """
        found: dict[tuple[str, int], str] = {}
        met: set[CodeType] = set()
        for function in functions:
            more = {**found, **dict(sorted(self._places_in(function, met)))}
            if len(more) > _MOST_PLACES:
                break
            found = more
        return tuple(found.values())

    def _places_in(
        self, function: _Source, met: set[CodeType]
    ) -> Iterator[tuple[tuple[str, int], str]]:
        waiting = [function]
        for function in waiting:
            path, name = function.code.co_filename, function.code.co_name
            if function.code in met or len(met) >= _MOST_FUNCTIONS or _LIBRARIES.search(path):
                continue
            met.add(function.code)
            for node, statement in _expressions(function):
                line = self.line_of(node, statement, function)
                if line:
                    source = source_of(linecache.getlines(path), *_lines_of(statement))
                    yield (path, line), f"{path}:{line} in {name}: {source[:_MOST_SOURCE]}"
                if isinstance(node, ast.Call):
                    waiting += self.called(node.func, function)

    def line_of(self, node: ast.expr, statement: ast.stmt, function: _Source) -> int:
        """The line of an expression that applies one of the operators, else 0."""
        for kind, writes in _WRITES.items():
            if kind in self._names:
                is_named = self._written.search(ast.unparse(node)) is not None
                return node.end_lineno or 0 if is_named and writes(node, statement) else 0
        if isinstance(node, ast.BinOp):
            is_it = self._is_operator(node.op, node.right) and not _is_text(node.left)
            if isinstance(node.op, ast.Pow) and not self._with_guarded:
                is_it = _OF_ROOT.match(ast.unparse(node.right)) is not None
            # Autograd's name of 1 / x is that of a reciprocal.
            is_other = self._names == {"div"} and isinstance(node.left, ast.Constant)
            return (node.left.end_lineno or 0) if is_it and not is_other else 0
        if isinstance(statement, ast.AugAssign) and node is statement.target:
            return node.lineno if self._is_operator(statement.op, statement.value) else 0
        if not isinstance(node, ast.Call):
            return 0
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        module = _value(node.func, function.names)
        if issubclass(type(module), torch.nn.Module):
            name = type(module).__name__.lower()
        read = (
            *node.args[:2],
            *([node.func.value] if isinstance(node.func, ast.Attribute) else ()),
        )
        is_root = name == "pow" and node.args and not self._with_guarded
        is_it = name.rstrip("_") in self._names
        is_it |= bool(is_root and _OF_ROOT.match(ast.unparse(node.args[-1])))
        is_it &= all(map(self._is_open, read))
        return (node.func.end_lineno or 0) if is_it else 0

    def _is_operator(self, operator: ast.operator, right: ast.expr) -> bool:
        # A quotient by a number that is written there is as finite as what it divides.
        is_scaled = isinstance(operator, ast.Div) and isinstance(right, ast.Constant)
        is_tensor = not (is_scaled or _is_text(right))
        return isinstance(operator, self._kinds) and is_tensor and self._is_open(right)

    def _is_open(self, read: ast.expr) -> bool:
        """False for ``x + 1e-8`` and ``x.clamp(min=1)``, where these count."""
        if isinstance(read, ast.BinOp):
            parts = ast.unparse(read.left), ast.unparse(read.right)
            is_guarded = isinstance(read.op, ast.Add) and any(map(_EPS.search, parts))
        else:
            is_guarded = isinstance(read, ast.Call) and "clamp" in ast.unparse(read.func)
        return self._with_guarded or not is_guarded

    def called(self, called: ast.expr, function: _Source) -> Iterator[_Source]:
        """The functions of a program that an expression calls, as far as is known: of a module
        also those of the modules within it.
        """
        value, owner = _value(called, function.names), None
        if isinstance(called, ast.Attribute) and isinstance(value, (FunctionType, classmethod)):
            owner = _value(called.value, function.names)
            owner = None if isinstance(owner, ModuleType) else owner
        if issubclass(type(value), torch.nn.Module):
            is_left_out = value.__dict__.get("_forward_hooks") and not self._with_modules
            for module in () if is_left_out else value.modules():
                yield from _functions(inspect.getattr_static(type(module), "forward", None), module)
        elif value is None and isinstance(called, ast.Name):  # a function within this one
            for code in function.code.co_consts:
                if isinstance(code, CodeType) and code.co_name == called.id:
                    yield _Source(code, function.names)
        else:
            yield from _functions(value, owner)


def _is_text(read: ast.expr) -> bool:
    """True for ``"=" * 20`` and for what text is joined to, as far as is written there."""
    if isinstance(read, ast.BinOp):
        return _is_text(read.left) or _is_text(read.right)
    is_text = isinstance(read, ast.Constant) and isinstance(read.value, (str, bytes))
    return is_text or isinstance(read, ast.JoinedStr)


def _writes_gradient(node: ast.expr, statement: ast.stmt) -> bool:
    """True for ``p.grad = x``, ``p.grad /= n`` and ``p.grad.mul_(x)``."""
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        is_cleared = isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant)
        return node.attr == _GRADIENT and not is_cleared
    return ".grad." in _in_place(node)


def _writes_weight(node: ast.expr, statement: ast.stmt) -> bool:
    """True for ``p.copy_(x)`` and ``p.data = x``."""
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        return node.attr == "data"
    written = _in_place(node)
    return written != "" and ".grad." not in written


def _in_place(node: ast.expr) -> str:
    """The method that an expression calls, with its tensor, if it writes in place; else empty."""
    name = getattr(node.func, "attr", "") if isinstance(node, ast.Call) else ""
    is_it = name.endswith("_") and not name.startswith("_") and name not in _NO_WRITES
    return ast.unparse(node.func) if isinstance(node, ast.Call) and is_it else ""


_WRITES = {_GRADIENT: _writes_gradient, _WEIGHT: _writes_weight}


def _functions(value: Any, owner: Any) -> Iterator[_Source]:
    """The function behind a callable, if it is the program's. ``owner``: its first argument."""
    for _ in range(_MOST_WRAPPERS):
        kind = type(value)
        if kind in (staticmethod, classmethod):
            value = value.__func__
        elif kind is functools.partial:
            value = value.func
        elif kind is MethodType:
            value, owner = value.__func__, value.__self__
        elif kind is FunctionType and "__wrapped__" in value.__dict__:
            value = value.__dict__["__wrapped__"]
        elif kind is not FunctionType:
            value, owner = inspect.getattr_static(kind, "__call__", None), value
        else:
            break
    if type(value) is not FunctionType or not is_of_program(value.__code__, value.__globals__):
        return
    code = value.__code__
    names = {}
    for name, cell in zip(code.co_freevars, value.__closure__ or ()):
        with contextlib.suppress(ValueError):  # it is empty
            names[name] = cell.cell_contents
    if code.co_argcount and owner is not None:
        names[code.co_varnames[0]] = owner
    yield _Source(code, ChainMap(names, value.__globals__))


def _running(frame: Frame) -> _Source:
    return _Source(frame.f_code, ChainMap(dict(frame.f_locals), frame.f_globals), frame.f_lineno)


def _value(expression: ast.expr, names: Mapping[str, Any]) -> Any:
    """Looks up names, attributes and constant keys without running code; None: not known."""
    if isinstance(expression, ast.Name):
        return names.get(expression.id)
    key: Any
    if isinstance(expression, ast.Attribute):
        owner, key = _value(expression.value, names), expression.attr
    elif isinstance(expression, ast.Subscript) and isinstance(expression.slice, ast.Constant):
        owner, key = _value(expression.value, names), expression.slice.value
    else:
        return None
    if issubclass(type(owner), torch.nn.Module):
        modules = owner.__dict__.get("_modules")
        module = modules.get(str(key)) if isinstance(modules, dict) else None
        if module is not None:
            return module
    if isinstance(expression, ast.Attribute):
        return None if owner is None else inspect.getattr_static(owner, key, None)
    with contextlib.suppress(LookupError, TypeError):
        return owner[key] if type(owner) in (dict, list, tuple) else None
    return None


def _expressions(function: _Source) -> Iterator[tuple[ast.expr, ast.stmt]]:
    """The expressions of a function, each with its statement; not those of functions within it."""
    waiting: list[tuple[ast.AST, Any]] = [(one, one) for one in _body(function)]
    for node, statement in waiting:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        if 0 < function.line < statement.lineno:
            continue
        if isinstance(node, ast.expr):
            yield node, statement
        children = ast.iter_child_nodes(node)
        waiting += ((n, n if isinstance(n, ast.stmt) else statement) for n in children)


def _lines_of(statement: ast.stmt) -> tuple[int, int]:
    """The first line and the last, of a statement with a body that before the body."""
    first = statement.lineno
    body = getattr(statement, "body", None)
    return first, max(first, body[0].lineno - 1) if body else statement.end_lineno or first


def _body(function: _Source) -> list[ast.stmt]:
    """The statements of a function; none where its source is not known."""
    code = function.code
    bodies = _bodies("".join(linecache.getlines(code.co_filename)))
    return bodies.get((code.co_name, code.co_firstlineno), [])


@functools.lru_cache(maxsize=8)
def _bodies(text: str) -> dict[tuple[str, int], list[ast.stmt]]:
    """The statements of each function in a file, by its name and first line, as its code has it."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return {}
    bodies = {("<module>", line): tree.body for line in (0, 1)}  # 0 from Python 3.11 on
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = min(one.lineno for one in (node, *node.decorator_list))
            bodies[node.name, first] = node.body
        elif isinstance(node, ast.Lambda):
            body = ast.copy_location(ast.Expr(node.body), node.body)
            bodies.setdefault(("<lambda>", node.lineno), []).append(body)
    return bodies
