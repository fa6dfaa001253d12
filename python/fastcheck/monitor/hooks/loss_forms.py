"""Forms in the graph of a loss that a healthy graph has not.

Only the types of torch's nodes, their edges, their numbers, the shapes of what they have made and
the parameters that they lead to are looked at, and the targets of what may be kl_div(): a tensor
that a node has saved may be unpacked by a function of the program or computed again, and a node of
an autograd.Function has attributes that the program chose.
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Callable, Optional

import torch

from fastcheck.utils.torch.memory_ref import MemoryRef
from fastcheck.utils.torch.own_operators import no_grad, unobserved
from fastcheck.utils.torch.readable import can_read

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
# Operators whose derivative is 0 everywhere.
_WITHOUT_DERIVATIVE = {
    "Round": "round",
    "Floor": "floor",
    "Ceil": "ceil",
    "Trunc": "trunc",
    "Sign": "sign",
    "Bernoulli": "bernoulli",
    "Normal": "torch.normal",
    "Poisson": "poisson",
}
_LINEAR = {"Addmm": "a linear layer", "Mm": "a linear layer", "Convolution": "a convolution"}
# A mark on nodes of the graph of a loss, in what torch lets a program keep with a node.
_MARK, _MARKED = "fastcheck: the graph of an earlier loss", 16
# Criteria that are never below 0, where they are given what they are for.
_OF_TARGETS = (
    "a binary cross entropy, which is never below 0 if all targets are from 0 to 1: look at the "
    "targets (a mask of 0 and 255, labels of -1 and 1)"
)
_OF_LOGARITHMS = (
    "a negative log likelihood, which is never below 0 if it is given logarithms of probabilities: "
    "log_softmax may be missing"
)
_NEVER_NEGATIVE = {
    "BinaryCrossEntropy": _OF_TARGETS,
    "BinaryCrossEntropyWithLogits": _OF_TARGETS,
    "NllLoss": _OF_LOGARITHMS,
    "CtcLoss": _OF_LOGARITHMS,
}
_ONE = "normalises one element at a time: it returns its bias, or 0, whatever it is given"


class LossForms:
    """Looks now and then in the graph of a loss for a softmax of a softmax, for a cross entropy
    of logits that is given probabilities or one class, for a criterion of log-probabilities that is
    given none, for classes that a softmax was not taken over, for a normalisation of one element,
    for the square of what was broadcast, for weights that are made anew, and for a part that was
    there before.

    ``known``: the numbers of all parameters of the models and the optimizers.
    """

    def __init__(self, known: Callable[[], Collection[int]]) -> None:
        self._last = (0, 0)
        self._known = known
        # The number of the newest node that was marked.
        self._newest = -1
        #: The parameters in the last graph that nothing with a derivative leads to, by number, with
        #: what leads to them; the numbers of the others in it.
        self.without_derivative: dict[int, str] = {}
        self.with_derivative: set[int] = set()
        # The weights of the look before that are not among these.
        self._strange: list[MemoryRef] = []

    def is_due(self, look: int, turn: int) -> bool:
        """True if this is the first loss of one of the first looks, or of a turn of it."""
        before, self._last = self._last, (look, turn)
        return 0 < look <= _LOOKS and self._last != before

    def look(self, roots: Sequence[torch.Tensor]) -> dict[str, str]:
        """The forms of these losses, each with what is known of it."""
        forms: dict[str, str] = {}
        weights: list[torch.nn.Parameter] = []
        waiting = [root.grad_fn for root in roots if root.grad_fn is not None]
        met = set(waiting)
        flat: dict[Any, str] = {}
        while waiting and len(met) < _MOST_NODES:
            node = waiting.pop()
            if self._was_there(node):
                is_cast = _kind(node) == "ToCopy" and _leaf(node.next_functions[0][0]) is not None
                forms["old_cast" if is_cast else "earlier_loss"] = ""
            if bare := _no_logarithm(node):
                forms["no_logarithm"] = bare
            if what := _flat(node):
                flat[node] = what
            if _kind(node) == "Exp" and "itself" in _flat(node.next_functions[0][0]):
                forms["ratio_of_itself"] = ""
            form, what, given = _NOT_GIVEN.get(_kind(node), ("", "", ""))
            if form and _kind(_behind(node)) == given:
                forms[form] = f"{what} is given the result of {given.lower()}"
            if constant := _constant(node):
                forms["one_element"] = constant
            if dimensions := _across(node):
                forms["other_dimension"] = dimensions
            if shapes := _broadcast(node):
                forms["broadcast"] = shapes
            if (weight := _weight_of(node)) is not None:
                weights.append(weight)
            for child, _ in node.next_functions:
                if child is not None and child not in met:
                    met.add(child)
                    waiting.append(child)
        if made := self._made_anew(weights):
            forms["made_in_forward"] = made
        self._mark(roots)
        self._know_derivatives(roots, met if not waiting else (), flat)
        return forms

    def _mark(self, roots: Sequence[torch.Tensor]) -> None:
        """Marks the nodes next to the losses."""
        waiting = deque(root.grad_fn for root in roots if root.grad_fn is not None)
        marked = 0
        while waiting and marked < _MARKED:
            node: Any = waiting.popleft()
            if not hasattr(node, "variable") and _MARK not in node.metadata:
                node.metadata[_MARK] = True
                self._newest = max(self._newest, node._sequence_nr())
                marked += 1
                waiting.extend(child for child, _ in node.next_functions if child is not None)

    def _was_there(self, node: Any) -> bool:
        """True for a node that was marked in an earlier look."""
        is_old = not hasattr(node, "variable") and node._sequence_nr() <= self._newest
        return is_old and _MARK in node.metadata

    def _know_derivatives(
        self, roots: Sequence[torch.Tensor], met: Collection[Any], flat: Mapping[Any, str]
    ) -> None:
        """``met``: all nodes of the graph; ``flat``: those without a derivative."""
        reached = _reached(roots, flat) if flat else met
        self.with_derivative = {id(v) for n in reached if (v := _leaf(n)) is not None}
        others = {id(v) for n in met if flat and (v := _leaf(n)) is not None}
        through = " or ".join(dict.fromkeys(flat.values()))
        self.without_derivative = dict.fromkeys(others - self.with_derivative, through)

    def _made_anew(self, weights: Sequence[torch.nn.Parameter]) -> str:
        """Names the weights that others than the models and the optimizers hold, beside weights of
        these, if they are other ones than those of the look before.
        """
        known = self._known()
        strange = [weight for weight in weights if id(weight) not in known]
        before, self._strange = self._strange, [MemoryRef(weight) for weight in strange]
        is_new = before and not any(ref.is_of(weight) for ref in before for weight in strange)
        if not is_new or not strange or len(strange) == len(weights):
            return ""
        shapes = ", ".join(dict.fromkeys(str(list(weight.shape)) for weight in strange[:3]))
        return f"{len(strange)} of {len(weights)} weight matrices ({shapes})"


def _leaf(node: Any) -> Optional[torch.Tensor]:
    return getattr(node, "variable", None)


def _reached(roots: Sequence[torch.Tensor], flat: Collection[Any]) -> set[Any]:
    """The nodes that a derivative leads to which is not known to be 0."""
    waiting: list[Any] = [root.grad_fn for root in roots if root.grad_fn not in flat]
    met = set(waiting)
    while waiting:
        for child, _ in waiting.pop().next_functions:
            if child is not None and child not in met and child not in flat:
                met.add(child)
                waiting.append(child)
    return met


def _flat(node: Any) -> str:
    """Names an operator whose derivative is 0 everywhere; empty: it is none."""
    kind = _kind(node)
    if kind == "Sub" and getattr(node, "_saved_alpha", 0) == 1:
        first, second = node.next_functions
        is_same = first[0] is not None and first == second
        return "the difference of a tensor and itself" if is_same else ""
    return _WITHOUT_DERIVATIVE.get(kind, "")


def _no_logarithm(node: Any) -> str:
    """Names a criterion of logarithms of probabilities that is given others; empty: it is none."""
    kind = _kind(node)
    if kind.endswith("CtcLoss"):
        given = _behind(node)
        what = _LINEAR.get(_kind(given), "a softmax" if _kind(given) == "Softmax" else "")
        return f"ctc_loss is given the result of {what}" if what else ""
    if kind not in ("Mean", "Sum"):
        return ""
    # kl_div() is the sum of xlogy(target, target) - target * input.
    difference = node.next_functions[0][0]
    if _kind(difference) != "Sub":
        return ""
    entropy, (product, _) = difference.next_functions
    if _kind(product) != "Mul" or _kind(entropy[0]) not in ("NoneType", "Xlogy"):
        return ""
    given = product.next_functions[1][0]
    while given is not None and _VIEWS.fullmatch(_kind(given)):
        given = given.next_functions[0][0]
    is_softmax = _kind(given) == "Softmax"
    if is_softmax and _are_distributions(product, _shape(given)[_dimension(given)]):
        return "kl_div is given the result of a softmax"
    return ""


def _are_distributions(product: Any, classes: int) -> bool:
    """True if the first factor is probabilities that add up to 1 for each ``classes`` of them, as
    targets do and weights or rewards do not. Waits for a device.
    """
    if getattr(product._raw_saved_self, "unpack_hook", True) is not None:
        return False  # a hook has packed it
    target = product._saved_self
    if not target.numel() or not can_read(target):
        return False
    with unobserved(), no_grad():
        rows = float(target.sum(dtype=torch.float64)) * classes / target.numel()
        return math.isclose(rows, 1, rel_tol=1e-3) and bool((target >= 0).all())


def never_negative(root: torch.Tensor, is_scaled: bool) -> str:
    """Names the criterion that this loss is, perhaps averaged or divided, if it is one that is
    never below 0 as it is meant. ``is_scaled``: a GradScaler has multiplied it.
    """
    node = root.grad_fn
    if is_scaled and _kind(node) == "Mul":
        node = _operand(node)
    while _kind(node) in ("Div", "Mean", "Sum", "Where"):
        node = _operand(node)
    # -p of the label is a loss, too.
    is_meant = _kind(node) == "NllLoss" and _kind(_operand(node)) in ("Softmax", "Exp")
    return "" if is_meant else _NEVER_NEGATIVE.get(_kind(node), "")


def _operand(node: Any) -> Any:
    """The node of its only operand with a graph; None: it has several."""
    children = [child for child, _ in node.next_functions if child is not None]
    return children[0] if len(children) == 1 else None


def _kind(node: Any) -> str:
    """``Div`` of ``DivBackward0``. Nodes of an autograd.Function have no number."""
    return re.sub(r"(2D)?Backward\d+$", "", type(node).__name__)


def _weight_of(node: Any) -> Optional[torch.nn.Parameter]:
    """The parameter that this node transposes, as a linear layer does, or convolves with."""
    place = {"T": 0, "Convolution": 1}.get(_kind(node))
    child = None if place is None else node.next_functions[place][0]
    weight = getattr(child, "variable", None)
    return weight if type(weight) is torch.nn.Parameter else None


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
        if _kind(child) == "LogSoftmax" and _shape(child)[_dimension(child) :][:1] == (1,):
            return "cross entropy is given one class: it is 0 whatever the logit is"
    elif kind in ("BinaryCrossEntropy", "MseLoss"):
        child = _behind(node)
        if _kind(child) == "Softmax" and _shape(child)[_dimension(child) :][:1] == (1,):
            return "the criterion is given a softmax over one element: it is 1 whatever that is"
    elif kind == "NativeLayerNorm":
        if math.prod(node._saved_normalized_shape) == 1:
            return f"layer_norm {_ONE}"
    elif kind == "NativeGroupNorm" and node._saved_HxW * node._saved_C == node._saved_group:
        return f"group_norm {_ONE}"
    return ""


def _across(node: Any) -> str:
    """The dimensions, where the negative log likelihood takes one of the numbers of each row, and
    the softmax before it was taken over each column. A square may be read both ways.
    """
    if _kind(node).endswith("CtcLoss"):
        return _across_columns(node)
    if _kind(node) != "NllLoss":
        return ""
    made = node.next_functions[0][0]
    if _kind(made) == "Log":
        made = made.next_functions[0][0]
    shape = _shape(made)
    if _kind(made) not in ("LogSoftmax", "Softmax") or len(shape) < 2 or shape[0] == shape[1]:
        return ""
    dimension = range(len(shape))[_dimension(made)]
    if dimension == 1:
        return ""
    return (
        f"the negative log likelihood has its {shape[1]} classes in dimension 1 of {list(shape)}, "
        f"and {_kind(made).lower().replace('logs', 'log_s')} was taken over dimension {dimension}"
    )


def _across_columns(node: Any) -> str:
    """The same of a ctc_loss, whose classes are in the last dimension, however it was turned."""
    made, shape = _behind(node), _shape(node.next_functions[0][0])
    own = _shape(made)
    if _kind(made) != "LogSoftmax" or not shape or sorted(own) != sorted(shape):
        return ""
    if own[_dimension(made)] == shape[-1]:
        return ""
    return (
        f"ctc_loss has its {shape[-1]} classes in the last dimension of {list(shape)}, and "
        f"log_softmax was taken over dimension {range(len(own))[_dimension(made)]} of {list(own)}"
    )


def _broadcast(node: Any) -> str:
    """The shapes, where the magnitude or the square of a difference is averaged or added up that is
    N x N, of N x 1 results and a tensor without a graph.
    """
    if _kind(node) not in ("Mean", "Sum"):
        return ""
    square = node.next_functions[0][0]
    is_square = _kind(square) == "Pow" and square._saved_exponent == 2
    if not is_square and _kind(square) != "Abs":
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


def _dimension(node: Any) -> int:
    """The dimension of a softmax, of which torch shows a negative one as an unsigned number."""
    saved: int = node._saved_dim
    return saved - 2**64 if saved >= 2**63 else saved


def _shape(node: Any) -> tuple[int, ...]:
    """The shape of the first result of a node; empty where it is not known."""
    made = getattr(node, "_input_metadata", ())
    return tuple(made[0].shape) if made else ()
