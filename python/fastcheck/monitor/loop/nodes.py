"""Nodes of an autograd graph: what kind each is, what it was given and what it has saved."""

from __future__ import annotations

import functools
import re
from typing import Any, Optional

import torch

from fastcheck.utils.torch.readable import can_read_now, is_unpacked_by_torch

#: The node of a tensor, and its number among the results of that.
Edge = tuple[Any, int]
# Nodes whose result has the elements of what they are given.
VIEWS = re.compile(
    "View|UnsafeView|ReshapeAlias|Transpose|T|Permute|Squeeze|Unsqueeze|Slice|Select|Index|Alias|"
    "Clone|ToCopy|Expand"
)

_NORM = ("norm:LinalgVectorNorm|Norm", "x:*")


def kind_of(node: Any) -> str:
    """``Div`` of ``DivBackward0``. Nodes of an autograd.Function have no number."""
    return _without_number(type(node).__name__)


@functools.lru_cache(maxsize=1024)
def _without_number(name: str) -> str:
    return re.sub(r"(2D)?Backward\d+$", "", name)


def leaf_of(node: Any) -> Optional[torch.Tensor]:
    return getattr(node, "variable", None)


def operand_of(node: Any) -> Any:
    """The node of its only operand with a graph; None: it has several."""
    children = [child for child, _ in node.next_functions if child is not None]
    return children[0] if len(children) == 1 else None


def maker_of(node: Any) -> Any:
    """The node that has made the elements that this node is given first."""
    return before_views(node.next_functions[0])[0]


def before_views(edge: Edge) -> Edge:
    """The node that has made the elements of a result, and the number of that result."""
    node, place = edge
    while node is not None and VIEWS.fullmatch(kind_of(node)):
        node, place = node.next_functions[0]
    return node, place


def factor_of(node: Any) -> Optional[torch.Tensor]:
    """The number that a node multiplies its only operand with, or divides it by; None: it does
    neither, or the number is not held.
    """
    if kind_of(node) not in ("Mul", "Div") or operand_of(node) is None:
        return None
    factor = saved_by(node, "self" if node.next_functions[0][0] is None else "other")
    return factor if factor is not None and factor.numel() == 1 else None


def shape_of(node: Any) -> tuple[int, ...]:
    """The shape of the first result of a node; empty where it is not known."""
    made = getattr(node, "_input_metadata", ())
    try:
        return tuple(made[0].shape) if made else ()
    except RuntimeError:  # a nested tensor with strides has no shape
        return ()


def signed(number: int) -> int:
    """A number of a node that torch shows as an unsigned one where it is negative."""
    return number - 2**64 if number >= 2**63 else number


def axis_of(node: Any) -> tuple[int, tuple[int, ...]]:
    """The dimension of a softmax, or of gather(), and the shape of its result."""
    shape = shape_of(node) or (0,)
    return range(len(shape))[signed(node._saved_dim)], shape


def match(node: Any, pattern: Any) -> Optional[dict[str, Any]]:
    """The named nodes of a graph that is like ``pattern``; None: it is not. A pattern is the kinds
    of a node (``Mean|Sum``; ``*``: any; ``-``: no graph), perhaps after a name and a colon, or a
    tuple of that and the patterns of what the node was given. One name is one node.
    """
    head, *edges = pattern if isinstance(pattern, tuple) else (pattern,)
    name, _, kinds = head.rpartition(":")
    kind = "-" if node is None else kind_of(node)
    if kind not in kinds.split("|") and (kinds != "*" or node is None):
        return None
    given = [] if node is None else [child for child, _ in node.next_functions]
    found = {name: node}
    if len(given) < len(edges):
        return None
    for child, edge in zip(given, edges):
        inner = match(child, edge)
        if inner is None or any(found.get(key, of) is not of for key, of in inner.items() if key):
            return None
        found.update(inner)
    return found


def is_normalised(node: Any) -> Optional[tuple[int, ...]]:
    """The dimensions over which the norm was taken by which this node divides what it is the norm
    of; None: it is no such division.
    """
    norms = ("Clone|Expand", ("ClampMin", _NORM)), ("Clone|Expand|ClampMin", _NORM), _NORM
    found = next((f for norm in norms if (f := match(node, ("Div", "x:*", norm)))), None)
    if found is None:
        return None
    count = len(shape_of(found["x"])) or 1  # a number has a dimension, too
    chosen = getattr(found["norm"], "_saved_dim", None) or range(count)
    return tuple(range(count)[signed(dimension)] for dimension in chosen)


def saved_by(node: Any, name: str) -> Optional[torch.Tensor]:
    """A tensor that a node has saved; None: code of the program would unpack it, it was freed, or
    it can't be read.
    """
    if not is_unpacked_by_torch(getattr(node, f"_raw_saved_{name}", None)):
        return None
    try:
        tensor = getattr(node, f"_saved_{name}")
    except RuntimeError:
        return None
    is_whole = isinstance(tensor, torch.Tensor) and tensor.numel() > 0 and can_read_now(tensor)
    return tensor if is_whole else None
