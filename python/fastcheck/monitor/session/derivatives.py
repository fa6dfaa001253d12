"""Keeps what a few operators near the loss have saved for backward, whose derivative or result may
be infinite: backward frees it, and a stop at a gradient, or on a device at the loss, comes after
that.

A healthy step walks the last nodes of each graph, and holds some small tensors of them until it is
over, on a device for three steps more, with those of the local variables that the program had then.
One table says what is read of an operator, and by what its backward multiplies a gradient.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Callable, NamedTuple, Optional

import torch

from fastcheck.extension import status
from fastcheck.utils.torch.held_frames import HeldFrame, held_frames
from fastcheck.utils.torch.own_operators import unobserved
from fastcheck.utils.torch.readable import is_unpacked_by_torch

# The most nodes of a graph, leaves left out. A node farther from the loss lies in a module, whose
# call can run again.
_MOST_NODES = 36
# The most bytes of a step.
_MOST_BYTES = 16 << 20
# The most frames whose local variables are held, and the most bytes of these in a step.
_MOST_FRAMES = 6
_MOST_LOCAL_BYTES = 4 << 20
# The most elements of a tensor that is copied.
_MOST_COPIED = 64

#: Values that are read of the nodes of a type: the name of each value, its attribute, and the
#: attribute that tells whether hooks have packed it (None: it is a number).
_Attributes = tuple[tuple[str, str, Optional[str]], ...]
# The fields of a SavedByNode.
_Saved = tuple[str, int, tuple[bool, ...], dict[str, Any], list[int]]


@functools.lru_cache(maxsize=512)  # torch has a few types of nodes; a program may define more
def _attributes(kind: type) -> _Attributes:
    """The attributes to read of a kind of node; empty: nothing is read of it."""
    if issubclass(kind, torch.autograd.function.BackwardCFunction):
        return ((FUNCTION, "_forward_cls", None),)
    factors = DERIVATIVES.get(kind.__name__)
    names = OPERANDS.get(kind.__name__, ()) if factors is None else factors.names
    raw = {name: f"_raw_saved_{name}" for name in names}
    return tuple(
        (name, f"_saved_{name}", packed if hasattr(kind, packed) else None)
        for name, packed in raw.items()
    )


#: The name of the class of a node of an autograd.Function, among the values of the node.
FUNCTION = "function"
# The address of the tensor that a copy was made of.
_AT = " at"


class SavedByNode(NamedTuple):
    """The tensors and numbers that a node has saved, by name. ``order``: its sequence number;
    ``needs_gradient``: by operand. ``versions``: of the tensors, when backward began.
    """

    name: str
    order: int
    needs_gradient: tuple[bool, ...]
    values: dict[str, Any]
    versions: list[int]

    @property
    def is_unchanged(self) -> bool:
        """True if no tensor of it was written since."""
        return _versions(self.values) == self.versions

    def address(self, name: str) -> int:
        """The address of the tensor of this name, as the operator has read it."""
        address = self.values.get(name + _AT)
        return int(self.values[name].data_ptr() if address is None else address)

    def is_node(self, node: Any) -> bool:
        """True if this is of ``node``, on the thread that has made it."""
        return int(node._sequence_nr()) == self.order and str(node.name()) == self.name

    def factors(self) -> list[Any]:
        """Tensors by which the node multiplies a gradient, as far as they are known."""
        known = DERIVATIVES.get(self.name)
        return [] if known is None else known.of(self)


class Factors(NamedTuple):
    """The attributes of a node that tell whether its derivative is finite, and the factors by which
    it multiplies a gradient, as far as these are kept: most nodes save no operand for a derivative
    that nobody needs.
    """

    names: tuple[str, ...]
    of: Callable[[SavedByNode], list[Any]]


def _quotient(saved: SavedByNode) -> list[Any]:
    other, dividend = saved.values.get("other"), saved.values.get("self")
    if other is None:
        return []
    return [1 / other, *([] if dividend is None else [dividend / other / other])]


def _power_of(saved: SavedByNode) -> list[Any]:
    x, exponent = saved.values.get("self"), saved.values.get("exponent")
    if x is None or exponent is None:
        return []
    factors = []
    # torch's derivative is 0 where the exponent is 0.
    if saved.needs_gradient[0]:
        is_constant = torch.as_tensor(exponent == 0)
        factors.append((x.pow(exponent - 1) * exponent).masked_fill(is_constant, 0))
    if len(saved.needs_gradient) > 1 and saved.needs_gradient[1]:
        factors.append((x.pow(exponent) * x.log()).masked_fill((x == 0) & (exponent >= 0), 0))
    return factors


def _differences(name: str) -> Factors:
    def between(values: Any) -> Any:
        diagonal = torch.eye(values.shape[-1], dtype=values.dtype, device=values.device)
        return 1 / (values[..., None, :] - values[..., :, None] + diagonal)

    return _of(name, between)


def _of(name: str, factor: Callable[[Any], Any]) -> Factors:
    def of_one(saved: SavedByNode) -> list[Any]:
        return [factor(saved.values[name])] if name in saved.values else []

    return Factors((name,), of_one)


def _of_both(
    factor: Callable[[Any, Any], Any], names: tuple[str, ...] = ("self", "other")
) -> Factors:
    def of_both(saved: SavedByNode) -> list[Any]:
        x, y = map(saved.values.get, names[:2])
        return [] if x is None or y is None else [factor(x, y)]

    return Factors(names, of_both)


def _logit(saved: SavedByNode) -> list[Any]:
    x = saved.values.get("self")
    return [] if x is None or "eps" in saved.values else [x.logit() / (x * (1 - x))]


def _logsumexp(saved: SavedByNode) -> list[Any]:
    x, y = map(saved.values.get, ("self", "result"))
    if x is None or y is None:
        return []
    if not saved.values["keepdim"]:
        # Negative numbers are kept as unsigned numbers.
        dims = sorted((d - 2**64 if d >= 2**63 else d) % x.dim() for d in saved.values["dim"])
        for dim in dims:
            y = y.unsqueeze(dim)
    return [(x - y).exp()]


def _of_angle(x: Any) -> Any:
    """The derivative of the angle: 0 of a real number, and of 0."""
    flat = torch.ones_like(x, dtype=torch.bool) if not x.is_complex() else x == 0
    return (x / x.abs().square()).masked_fill(flat, 0)


def _product(saved: SavedByNode) -> list[Any]:
    return [value for value in saved.values.values() if torch.is_tensor(value)]


def _soft_margin(x: Any, target: Any) -> Any:
    z = (-target * x).exp()
    return target * z / (1 + z)


def _xlogy(saved: SavedByNode) -> list[Any]:
    x, y = map(saved.values.get, ("self", "other"))
    if x is None or y is None:
        return []
    by_x = y.log().masked_fill((x == 0) & (y <= 0), 0)
    return [factor for factor, is_asked in zip((by_x, x / y), saved.needs_gradient) if is_asked]


def _logaddexp(x: Any, y: Any) -> Any:
    return 1 / (1 + (y - x).exp())


DECOMPOSITIONS = frozenset(("LinalgEighBackward0", "LinalgSvdBackward0"))
_INVERSE = _of("self", lambda x: 1 / x)
_POWER = Factors(("self", "exponent"), _power_of)
_RESULT = _of("result", lambda y: y)
# A target that is NaN makes the gradient NaN where its loss was left out, too: 0 * NaN.
_LOSS = ("self", "target")
_BOUNDED_DIFFERENCE = _of_both(lambda x, target: (x - target).clamp(-1, 1), _LOSS)
#: Derivatives by the name of a node.
DERIVATIVES: Mapping[str, Factors] = {
    "AcosBackward0": _of("self", lambda x: (1 - x * x).rsqrt()),
    "AcoshBackward0": _of("self", lambda x: (x * x - 1).rsqrt()),
    "AddcdivBackward0": _of_both(lambda x, y: x / y / y, ("tensor1", "tensor2")),
    "AngleBackward0": _of("self", _of_angle),
    "AsinBackward0": _of("self", lambda x: (1 - x * x).rsqrt()),
    "AtanhBackward0": _of("self", lambda x: 1 / (1 - x * x)),
    "BinaryCrossEntropyWithLogitsBackward0": _of_both(
        lambda x, t: x.sigmoid() - t, (*_LOSS, "weight", "pos_weight")
    ),
    "CoshBackward0": _of("self", torch.sinh),
    # The derivative of a class of probability 0 is exp(-Inf + Inf).
    "CtcLossBackward0": _of("log_probs", lambda x: x),
    "DivBackward0": Factors(("self", "other"), _quotient),
    "ErfinvBackward0": _of("self", lambda x: x.erfinv()),
    "Exp2Backward0": _RESULT,
    "ExpBackward0": _RESULT,
    "Expm1Backward0": _RESULT,
    "HuberLossBackward0": _BOUNDED_DIFFERENCE,
    "HypotBackward0": _of_both(lambda x, y: (x.abs() + y.abs()) / x.hypot(y)),
    "LgammaBackward0": _of("self", torch.digamma),
    "LinalgEighBackward0": _differences("eigenvalues"),
    "LinalgQrBackward0": _of("R", lambda r: 1 / r.diagonal(dim1=-2, dim2=-1)),
    "LinalgSvdBackward0": _differences("S"),
    "Log10Backward0": _INVERSE,
    "Log1PBackward0": _of("self", lambda x: 1 / (x + 1)),
    "Log2Backward0": _INVERSE,
    "LogBackward0": _INVERSE,
    "LogSoftmaxBackward0": _of("result", lambda y: y.exp()),
    "LogaddexpBackward0": _of_both(_logaddexp),
    "LogitBackward0": Factors(("self", "eps"), _logit),
    "LogsumexpBackward0": Factors(("self", "result", "dim", "keepdim"), _logsumexp),
    "MseLossBackward0": _of_both(lambda x, target: x - target, _LOSS),
    "MulBackward0": Factors(("self", "other"), _product),
    "PowBackward0": _POWER,
    "PowBackward1": _POWER,
    "ReciprocalBackward0": _of("result", lambda y: y * y),
    "RsqrtBackward0": _of("result", lambda y: y**3),
    "SinhBackward0": _of("self", torch.cosh),
    "SmoothL1LossBackward0": _BOUNDED_DIFFERENCE,
    "SoftMarginLossBackward0": _of_both(_soft_margin, _LOSS),
    "SoftmaxBackward0": _RESULT,
    "SqrtBackward0": _of("result", lambda y: 1 / y),
    "XlogyBackward0": Factors(("self", "other"), _xlogy),
}
#: Values that tell whether an operator has made NaN of finite numbers, of nodes not in the table.
OPERANDS: Mapping[str, tuple[str, ...]] = {
    "NllLossBackward0": ("total_weight", "reduction"),
    "NllLoss2DBackward0": ("total_weight", "reduction"),
    "StdBackward0": ("self", "result"),
}


def _saved_near(
    roots: Sequence[torch.Tensor],
    attributes_of: Callable[[type], _Attributes],
    most: int,
    room: int,
) -> tuple[list[_Saved], int]:
    """Reads what the nodes near these have saved, in the order in which backward runs, and its
    size, of at most ``room`` bytes: the extension's function (csrc/torch/hooks/last_nodes.h).
    """
    near: list[_Saved] = []
    size = 0
    waiting = [root.grad_fn for root in roots if root.grad_fn is not None]
    met = set(waiting)
    for node in waiting:
        values, nbytes = _saved_by(node, attributes_of(type(node)))
        if values and size + nbytes <= room:
            needs = tuple([child is not None for child, _ in node.next_functions])
            versions = _versions(values)
            near.append((node.name(), node._sequence_nr(), needs, values, versions))
            size += nbytes
        if len(waiting) < most:
            for following, _ in node.next_functions:
                is_leaf = type(following).__name__ == "AccumulateGrad"
                if following is not None and not is_leaf and following not in met:
                    met.add(following)
                    waiting.append(following)
    near.sort(key=operator.itemgetter(1), reverse=True)
    return near, size


def _saved_by(node: Any, attributes: _Attributes) -> tuple[dict[str, Any], int]:
    """The values, and their size. Empty where code of the program would unpack one."""
    values: dict[str, Any] = {}
    size = 0
    for name, saved, packed in attributes:
        if packed and not is_unpacked_by_torch(getattr(node, packed)):
            return {}, 0
        try:
            value = getattr(node, saved)
        except RuntimeError:  # it was written in place
            return {}, 0
        if isinstance(value, torch.Tensor):
            size += value.nbytes
            # Without the graph, which would live as long.
            value = value.detach()
        if value is not None:
            values[name] = value
    return values, size


def _hold(room: int) -> Any:
    module = status.module
    return None if module is None else module.HeldLocals(_MOST_FRAMES, min(room, _MOST_LOCAL_BYTES))


_near: Callable[..., tuple[list[_Saved], int]]
_near = _saved_near if status.module is None else status.module.saved_near


class _Graph(NamedTuple):
    step: int
    nodes: list[_Saved]
    nbytes: int
    frames: Any  # HeldLocals, or None


def _versions(values: Mapping[str, Any]) -> list[int]:
    tensors = (value for value in values.values() if isinstance(value, torch.Tensor))
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def _copy_written(nodes: Sequence[_Saved], is_first: bool) -> None:
    """Copies the small tensors of a device that something writes in place, as an update does a
    parameter: a stop comes after the next time. Those of a dtype are copied together. ``is_first``:
    nothing may have been written yet.
    """
    written: dict[Any, list[tuple[dict[str, Any], str]]] = {}
    for _, _, _, values, versions in nodes:
        if not (is_first or any(versions)):
            continue
        names = [name for name, value in values.items() if isinstance(value, torch.Tensor)]
        for number, name in enumerate(names):
            one = values[name]
            if (versions[number] or is_first) and not one.is_cpu and one.numel() <= _MOST_COPIED:
                is_plain = type(one) is torch.Tensor and one.layout is torch.strided
                kind = (
                    (one.device, one.dtype) if is_plain and one.element_size() > 1 else len(written)
                )
                written.setdefault(kind, []).append((values, name))
                versions[number] = 0
    for found in written.values():
        tensors = [values[name] for values, name in found]
        if len(found) == 1:
            copies = [tensors[0].clone()]
        else:
            sizes = [tensor.numel() for tensor in tensors]
            parts = torch.split(torch.cat([tensor.reshape(-1) for tensor in tensors]), sizes)
            copies = [part.view(tensor.shape) for part, tensor in zip(parts, tensors)]
        for (values, name), tensor, copy in zip(found, tensors, copies):
            values[name + _AT], values[name] = tensor.data_ptr(), copy


class Derivatives:
    """The graphs of the backward passes of the last steps. Every method expects the session's lock
    to be held.
    """

    def __init__(self) -> None:
        self._graphs: list[_Graph] = []
        self._first: Optional[int] = None

    def of(self, step: int) -> Sequence[Sequence[SavedByNode]]:
        """The graphs of a step in the order of the calls of backward(); the nodes in that in which
        backward runs, without those of which a tensor was written since.
        """
        return [
            [saved for node in graph.nodes if (saved := SavedByNode(*node)).is_unchanged]
            for graph in self._graphs
            if graph.step == step
        ]

    def frames(self, step: int) -> Iterator[HeldFrame]:
        """The frames of the program, as it called backward() in a step whose loss was on a device:
        innermost first.
        """
        for graph in self._graphs:
            if graph.step == step and graph.frames is not None:
                yield from held_frames(graph.frames.frames())

    def drop_before(self, step: int) -> None:
        """Releases the graphs of earlier steps."""
        while self._graphs and self._graphs[0].step < step:
            del self._graphs[0]

    def note(self, step: int, roots: Sequence[torch.Tensor], is_late: bool = True) -> None:
        """backward() begins at these. ``is_late``: a stop may come after other steps."""
        self._first = step if self._first is None else self._first
        is_first = step == self._first
        room = _MOST_BYTES
        for graph in self._graphs:
            room -= graph.nbytes if graph.step == step else 0
        if room > 0:
            with unobserved():
                nodes, nbytes = _near(roots, _attributes, _MOST_NODES, room)
                if is_late:
                    _copy_written(nodes, is_first)
                # On the host a stop comes while the program stands here.
                frames = None if roots[0].is_cpu else _hold(room - nbytes)
            if nodes or frames is not None:
                nbytes += 0 if frames is None else frames.nbytes
                self._graphs.append(_Graph(step, nodes, nbytes, frames))
