"""Keeps what a few operators near the loss have saved for backward, whose derivative may be
infinite: backward frees it, and a stop at a gradient comes after that.

A healthy step walks the last nodes of each graph, and holds some small tensors of them until it is
over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Optional

import torch

from fastcheck.utils.torch.own_operators import unobserved

# Of one graph, but of leaves. What is farther from the loss lies in a module, whose call can run
# again.
_MOST_NODES = 36
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


#: What is read of the nodes of a type: the name of each value, its attribute, and the one that
#: tells whether hooks have packed it (None: it is a number).
_Attributes = tuple[tuple[str, str, Optional[str]], ...]
# By type, as torch makes few of them; a program may define more.
_known: dict[type, Optional[_Attributes]] = {}
_MOST_TYPES = 512
_LEAF = "AccumulateGrad"


def _attributes(kind: type) -> Optional[_Attributes]:
    """None: a leaf. Empty: nothing is read of it."""
    found: Optional[_Attributes] = None
    if kind.__name__ != _LEAF:
        raw = {name: f"_raw_saved_{name}" for name in SAVED.get(kind.__name__, ())}
        found = tuple(
            (name, f"_saved_{name}", packed if hasattr(kind, packed) else None)
            for name, packed in raw.items()
        )
    if len(_known) < _MOST_TYPES:
        _known[kind] = found
    return found


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
        nodes: list[tuple[Any, _Attributes]] = []
        for node in waiting:
            kind = type(node)
            attributes = _known[kind] if kind in _known else _attributes(kind)
            if attributes:
                nodes.append((node, attributes))
            if len(waiting) < _MOST_NODES:
                for following, _ in node.next_functions:
                    if following is None or following in met:
                        continue
                    kind = type(following)
                    if (_known[kind] if kind in _known else _attributes(kind)) is not None:
                        met.add(following)
                        waiting.append(following)
        if nodes and self._size < _MOST_BYTES:
            with unobserved():
                found = [self._saved_by(node, attributes) for node, attributes in nodes]
            self._graphs.append(sorted((s for s in found if s.values), key=lambda s: -s.order))

    def _saved_by(self, node: Any, attributes: _Attributes) -> SavedByNode:
        values = self._saved(node, attributes)
        needs_gradient = tuple([following is not None for following, _ in node.next_functions])
        return SavedByNode(node.name(), node._sequence_nr(), needs_gradient, values)

    def _saved(self, node: Any, attributes: _Attributes) -> dict[str, Any]:
        """Empty where it is too much, or where hooks have packed it, whose unpacking may run a
        program's code.
        """
        values: dict[str, Any] = {}
        size = 0
        for name, saved, packed in attributes:
            if packed and getattr(getattr(node, packed), "unpack_hook", True) is not None:
                return {}
            try:
                value = getattr(node, saved)
            except RuntimeError:  # it was written in place
                return {}
            if isinstance(value, torch.Tensor):
                size += value.nbytes
                # Without the graph, which would live as long.
                value = value.detach()
            if value is not None:
                values[name] = value
        if self._size + size > _MOST_BYTES:
            return {}
        self._size += size
        return values
