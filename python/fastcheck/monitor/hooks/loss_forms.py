"""Forms in the graph of a loss that a healthy one has not: a softmax of a softmax, a cross entropy
of logits that is given probabilities.

The graph is walked where backward() is called, in a few updates. Only the types of its nodes and
their edges are looked at: what a node has saved may be unpacked by a function of the program or
computed again, and a node of an autograd.Function has attributes that the program chose.
"""

from __future__ import annotations

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
# Of a criterion's node: the form, what the criterion is, and what it is not to be given.
_NOT_GIVEN = {
    "LogSoftmax": ("given_twice", "log_softmax, of which cross entropy is made,", "Softmax"),
    "BinaryCrossEntropyWithLogits": ("given_twice", "binary cross entropy with logits", "Sigmoid"),
    "NllLoss": ("given_probabilities", "the negative log likelihood", "Softmax"),
}


class LossForms:
    """Looks at the graph of a loss now and then."""

    def __init__(self) -> None:
        self._last = (0, 0)

    def is_due(self, look: int, turn: int) -> bool:
        """Whether this is the first loss of one of the first looks, or of a turn of it."""
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
            for child, _ in node.next_functions:
                if child is not None and child not in met:
                    met.add(child)
                    waiting.append(child)
        return forms


def _kind(node: Any) -> str:
    """``Div`` of ``DivBackward0``. Nodes of an autograd.Function have no number."""
    return re.sub(r"(2D)?Backward\d+$", "", type(node).__name__)


def _behind(node: Any) -> Any:
    """The node that has made the elements that this one is given first."""
    node = node.next_functions[0][0]
    while node is not None and _VIEWS.fullmatch(_kind(node)):
        node = node.next_functions[0][0]
    return node
