"""Forms in the graph of a loss that a healthy graph has not.

Only the types of torch's nodes, their edges, their numbers and the shapes of what they have made
are looked at: a tensor that a node has saved may be unpacked by a function of the program or
computed again, and a node of an autograd.Function has attributes that the program chose.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import torch

_MOST_NODES = 20_000
_LOOKS = 5
# Nodes whose result has the elements of what they are given.
_VIEWS = re.compile(
    "View|UnsafeView|ReshapeAlias|Transpose|T|Permute|Squeeze|Unsqueeze|Slice|Select|Index|Alias|"
    "Clone|ToCopy|Expand"
)
# The rule of a criterion's node: the form, what the criterion is, and what it is not to be given.
_NOT_GIVEN = {
    "LogSoftmax": ("given_twice", "log_softmax, of which cross entropy is made,", "Softmax"),
    "BinaryCrossEntropyWithLogits": ("given_twice", "binary cross entropy with logits", "Sigmoid"),
    "NllLoss": ("given_probabilities", "the negative log likelihood", "Softmax"),
    "Sigmoid": ("applied_twice", "a sigmoid", "Sigmoid"),
    "Softmax": ("applied_twice", "a softmax", "Softmax"),
}
_ONE = "normalises one element at a time: it returns its bias, or 0, whatever it is given"


class LossForms:
    """Looks now and then in the graph of a loss for a softmax of a softmax, for a cross entropy
    of logits that is given probabilities or one class, for a normalisation of one element, and for
    the square of what was broadcast.
    """

    def __init__(self) -> None:
        self._last = (0, 0)

    def is_due(self, look: int, turn: int) -> bool:
        """True if this is the first loss of one of the first looks, or of a turn of it."""
        before, self._last = self._last, (look, turn)
        return 0 < look <= _LOOKS and self._last != before

    def look(self, roots: Sequence[torch.Tensor]) -> dict[str, str]:
        """The forms of these losses, each with what is known of it."""
        forms: dict[str, str] = {}
        waiting = [root.grad_fn for root in roots if root.grad_fn is not None]
        met = set(waiting)
        while waiting and len(met) < _MOST_NODES:
            node = waiting.pop()
            form, what, given = _NOT_GIVEN.get(_kind(node), ("", "", ""))
            if form and _kind(_behind(node)) == given:
                forms[form] = f"{what} is given the result of {given.lower()}"
            if constant := _constant(node):
                forms["one_element"] = constant
            if shapes := _broadcast(node):
                forms["broadcast"] = shapes
            for child, _ in node.next_functions:
                if child is not None and child not in met:
                    met.add(child)
                    waiting.append(child)
        return forms


def _kind(node: Any) -> str:
    """``Div`` of ``DivBackward0``. Nodes of an autograd.Function have no number."""
    return re.sub(r"(2D)?Backward\d+$", "", type(node).__name__)


def _behind(node: Any) -> Any:
    """The node that has made the elements that this node is given first."""
    node = node.next_functions[0][0]
    while node is not None and _VIEWS.fullmatch(_kind(node)):
        node = node.next_functions[0][0]
    return node


def _constant(node: Any) -> str:
    """Names a function of one element, whose result is always the same; empty: it is none."""
    kind = _kind(node)
    if kind == "NllLoss":
        child = node.next_functions[0][0]
        if _kind(child) == "LogSoftmax" and _shape(child)[child._saved_dim :][:1] == (1,):
            return "cross entropy is given one class: it is 0 whatever the logit is"
    elif kind == "NativeLayerNorm":
        if math.prod(node._saved_normalized_shape) == 1:
            return f"layer_norm {_ONE}"
    elif kind == "NativeGroupNorm" and node._saved_HxW * node._saved_C == node._saved_group:
        return f"group_norm {_ONE}"
    return ""


def _broadcast(node: Any) -> str:
    """The shapes, where the square of a difference is averaged or added up that is N x N, of N x 1
    results and a tensor without a graph.
    """
    if _kind(node) not in ("Mean", "Sum"):
        return ""
    square = node.next_functions[0][0]
    if _kind(square) != "Pow" or square._saved_exponent != 2:
        return ""
    difference = square.next_functions[0][0]
    if _kind(difference) not in ("Sub", "Rsub"):
        return ""
    made = [one for one, _ in difference.next_functions if one is not None]
    shape = _shape(difference)
    if len(made) != 1 or len(shape) != 2 or shape[0] != shape[1] or shape[0] < 2:
        return ""
    # A view may be there for that: x[:, None] - y.
    of = _shape(made[0])
    is_column = of == (shape[0], 1) and not _VIEWS.fullmatch(_kind(made[0]))
    is_row = of == (shape[0],) and _kind(made[0]) in ("Squeeze", "Select", "View")
    is_row &= is_row and _shape(made[0].next_functions[0][0]) == (shape[0], 1)
    if not (is_column or is_row):
        return ""
    return (
        f"the difference of a result of shape {list(of)} and of a tensor without a graph was "
        f"broadcast to {list(shape)}"
    )


def _shape(node: Any) -> tuple[int, ...]:
    """The shape of the first result of a node; empty where it is not known."""
    made = getattr(node, "_input_metadata", ())
    return tuple(made[0].shape) if made else ()
