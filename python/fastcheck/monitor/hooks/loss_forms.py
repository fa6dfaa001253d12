"""Forms in the graph of a loss that a healthy one has not: a softmax of a softmax, an output that
was broadcast against its target, weights that no module holds.

The graph is walked where backward() is called, in a few updates. No tensor is read, but on the CPU
the labels of a cross entropy.
"""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from typing import Any, Optional

import torch

from fastcheck.utils.torch.memory_ref import MemoryRef
from fastcheck.utils.torch.own_operators import no_grad, unobserved
from fastcheck.utils.torch.readable import can_read, has_memory

_MOST_NODES = 20_000
_LOOKS = 5
# Nodes whose result has the elements of what they are given.
_VIEWS = re.compile(
    "View|UnsafeView|ReshapeAlias|Transpose|T|Permute|Squeeze|Unsqueeze|Slice|Select|Index|Alias|"
    "Clone|ToCopy|Expand"
)
# Nodes between a loss and the difference that it is made of.
_OF_LOSS = re.compile("Mean|Sum|Pow|Abs|Mul|Div|Sqrt|Add|Expand|(Mse|SmoothL1|Huber)Loss")
# Of a criterion's node: what it is, and what it is not to be given.
_TWICE = {
    "LogSoftmax": ("log_softmax, of which cross entropy is made,", "Softmax"),
    "BinaryCrossEntropyWithLogits": ("binary cross entropy with logits", "Sigmoid"),
    "NllLoss": ("the negative log likelihood, which takes logarithms,", "Softmax"),
}
# Labels of fewer rows may be of one class by chance.
_LABELS = 8


class LossForms:
    """Looks at the graph of a loss now and then."""

    def __init__(self) -> None:
        # The leaves that nothing holds, as of the last look, and the versions of their values.
        self._strays: list[tuple[MemoryRef, int]] = []
        self._last = (0, 0)

    def is_due(self, look: int, turn: int) -> bool:
        """Whether this is the first loss of one of the first looks, or of a turn of it."""
        before, self._last = self._last, (look, turn)
        return 0 < look <= _LOOKS and self._last != before

    def look(self, roots: Sequence[torch.Tensor], held: Container[int]) -> dict[str, str]:
        """The forms of these losses, each with what is known of it. ``held``: the ids of parameters
        of modules and optimizers.
        """
        forms: dict[str, str] = {}
        strays: list[torch.Tensor] = []
        waiting = [(root.grad_fn, True) for root in roots if root.grad_fn is not None]
        met = {node for node, _ in waiting}
        while waiting and len(met) < _MOST_NODES:
            node, is_of_loss = waiting.pop()
            if hasattr(node, "variable"):
                strays += [node.variable] if id(node.variable) not in held else []
                continue
            kind = _kind(node)
            if kind in _TWICE:
                what, given = _TWICE[kind]
                if _kind(_behind(node)) == given:
                    forms["given_twice"] = f"{what} is given the result of {given.lower()}"
            if kind == "NllLoss" and (label := _one_label(node)):
                forms["one_label"] = label
            if is_of_loss and (shapes := _broadcast(node)):
                forms["broadcast"] = shapes
            is_of_loss = is_of_loss and _OF_LOSS.fullmatch(kind) is not None
            for child, _ in node.next_functions:
                if child is not None and child not in met:
                    met.add(child)
                    waiting.append((child, is_of_loss))
        kept = [stray for stray in strays if self._is_kept(stray)]
        self._strays = [(MemoryRef(stray), stray._version) for stray in strays if has_memory(stray)]
        if kept:
            forms["unregistered"] = f"{len(kept)}, the first of shape {tuple(kept[0].shape)}"
        return forms

    def _is_kept(self, leaf: torch.Tensor) -> bool:
        """Whether it was there in the look before, and nothing has written to it since."""
        return any(ref.is_of(leaf) and leaf._version == version for ref, version in self._strays)


def _kind(node: Any) -> str:
    """``Div`` of ``DivBackward0``."""
    return "" if node is None else re.sub(r"(2D)?Backward\d*$", "", str(node.name()))


def _behind(node: Any) -> Any:
    """The node that has made the elements that this one is given first."""
    node = node.next_functions[0][0]
    while node is not None and _VIEWS.fullmatch(_kind(node)):
        node = node.next_functions[0][0]
    return node


def _broadcast(node: Any) -> str:
    """The shapes of what a module has returned, [n, 1], and of its difference from a target,
    [n, n]; "": the node is no such difference.
    """
    (child, at), *rest = node.next_functions or ((None, 0),)
    if _kind(node) not in ("Sub", "Rsub", "Expand") or any(other is not None for other, _ in rest):
        return ""
    if child is None or hasattr(child, "variable") or _VIEWS.fullmatch(_kind(child)):
        return ""
    before, after = _shape(child, at), _shape(node, 0)
    is_square = len(before) == 2 and before[1] == 1 < before[0] and after == before[:1] * 2
    return f"{before} became {after}" if is_square else ""


def _shape(node: Any, at: int) -> tuple[int, ...]:
    metadata = getattr(node, "_input_metadata", ())
    return tuple(metadata[at].shape) if at < len(metadata) else ()


def _one_label(node: Any) -> str:
    """The label that all rows have; "": they have several, or are not read."""
    labels: Optional[torch.Tensor] = getattr(node, "_saved_target", None)
    if labels is None or not labels.is_cpu or labels.numel() < _LABELS or not can_read(labels):
        return ""
    with unobserved(), no_grad():
        label = int(labels.flatten()[0])
        return str(label) if bool((labels == label).all()) else ""
