"""Keeps what a few operators near the loss have saved for backward, whose derivative may be
infinite: backward frees it, and a stop at a gradient comes after that.

A healthy step walks the last nodes of each graph, and holds some small tensors of them until it is
over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fastcheck.utils.torch.own_operators import no_grad, unobserved

# Of one graph. What is farther from the loss lies in a module, whose call can run again.
_MOST_NODES = 48
# Of one step.
_MOST_BYTES = 16 << 20

#: By the name of a node, the attributes that tell whether its derivative is finite.
SAVED: Mapping[str, tuple[str, ...]] = {
    "AcosBackward0": ("self",),
    "AcoshBackward0": ("self",),
    "AsinBackward0": ("self",),
    "AddcdivBackward0": ("tensor1", "tensor2"),
    "AtanhBackward0": ("self",),
    "DivBackward0": ("self", "other"),
    "ErfinvBackward0": ("self",),
    "Exp2Backward0": ("result",),
    "ExpBackward0": ("result",),
    "Expm1Backward0": ("result",),
    "HypotBackward0": ("self", "other"),
    "LinalgEighBackward0": ("eigenvalues",),
    "LinalgSvdBackward0": ("S",),
    "Log10Backward0": ("self",),
    "Log1PBackward0": ("self",),
    "Log2Backward0": ("self",),
    "LogBackward0": ("self",),
    "LogSoftmaxBackward0": ("result",),
    "LogitBackward0": ("self", "eps"),
    "MulBackward0": ("self", "other"),
    "PowBackward0": ("self", "exponent"),
    "PowBackward1": ("self", "exponent"),
    "ReciprocalBackward0": ("result",),
    "RsqrtBackward0": ("result",),
    "SoftmaxBackward0": ("result",),
    "SqrtBackward0": ("result",),
}


class SavedByNode(NamedTuple):
    """What a node has saved: tensors and numbers by name. ``order``: its sequence number;
    ``needs_gradient``: by operand.
    """

    name: str
    order: int
    needs_gradient: tuple[bool, ...]
    values: dict[str, Any]

    def is_node(self, node: Any) -> bool:
        """Whether this is of ``node``, on the thread that has made it."""
        return int(node._sequence_nr()) == self.order and str(node.name()) == self.name


class Derivatives:
    """Of one step. Every method expects the session's lock to be held."""

    def __init__(self) -> None:
        self._graphs: list[list[SavedByNode]] = []
        self._size = 0

    @property
    def graphs(self) -> Sequence[Sequence[SavedByNode]]:
        """In the order of the calls of backward(); the nodes in that in which backward runs."""
        return self._graphs

    def clear(self) -> None:
        """The step is over."""
        if self._graphs:
            self._graphs, self._size = [], 0

    def note(self, roots: Sequence[torch.Tensor]) -> None:
        """backward() begins at these."""
        waiting = [root.grad_fn for root in roots if root.grad_fn is not None]
        met = set(waiting)
        nodes: list[tuple[Any, tuple[str, ...]]] = []
        for node in waiting:
            names = SAVED.get(type(node).__name__)
            if names is not None:
                nodes.append((node, names))
            if len(waiting) < _MOST_NODES:
                for following, _ in node.next_functions:
                    if following is not None and following not in met:
                        met.add(following)
                        waiting.append(following)
        if nodes and self._size < _MOST_BYTES:
            with unobserved(), no_grad():
                found = [self._saved_by(node, names) for node, names in nodes]
            self._graphs.append(sorted((s for s in found if s.values), key=lambda s: -s.order))

    def _saved_by(self, node: Any, names: tuple[str, ...]) -> SavedByNode:
        needs_gradient = tuple(following is not None for following, _ in node.next_functions)
        values = self._saved(node, names)
        return SavedByNode(node.name(), node._sequence_nr(), needs_gradient, values)

    def _saved(self, node: Any, names: tuple[str, ...]) -> dict[str, Any]:
        """Empty where it is too much, or where hooks have packed it, whose unpacking may run a
        program's code.
        """
        values: dict[str, Any] = {}
        size = 0
        for name in names:
            raw = getattr(node, f"_raw_saved_{name}", None)
            if raw is not None and getattr(raw, "unpack_hook", True) is not None:
                return {}
            try:
                value = getattr(node, f"_saved_{name}")
            except RuntimeError:  # it was written in place
                return {}
            if isinstance(value, torch.Tensor):
                # Without the graph, which would live as long.
                value = value.detach()
                size += value.nbytes
            if value is not None:
                values[name] = value
        if self._size + size > _MOST_BYTES:
            return {}
        self._size += size
        return values
