"""Forms in the graph of a loss that a healthy graph has not.

Only the types of torch's nodes, their edges, their numbers, the shapes of what they have made and
the parameters that they lead to are looked at, and what some criteria have saved of their targets,
where no function of the program unpacks it: it may compute it again. A node of an autograd.Function
has attributes that the program chose.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Callable, Optional

import torch

from fastcheck.monitor.weights.updates import NoDerivative
from fastcheck.utils.torch.memory_ref import MemoryRef
from fastcheck.utils.torch.own_operators import no_grad, unobserved
from fastcheck.utils.torch.readable import can_read_now

from .axes import last_sample, mixed, moved, over_samples, padded
from .masks import fault_of_masks
from .nodes import (
    VIEWS,
    axis_of,
    factor_of,
    is_normalised,
    kind_of,
    leaf_of,
    maker_of,
    match,
    operand_of,
    saved_by,
    shape_of,
)
from .objectives import (
    contrastive,
    given_targets,
    nothing_preferred,
    one_class,
    trained_advantage,
    trained_reference,
    trained_target,
    turned,
    variational,
)
from .since_last_look import SinceLastLook
from .targets import are_distributions, counts_padding, token_targets, wrong_targets

_MOST_NODES = 20_000
_LOOKS = 5
# The rule of a criterion's node: the form, what the criterion is, and what it is not to be given.
_NOT_GIVEN = {
    "LogSoftmax": (
        "given_twice",
        "log_softmax, of which cross entropy is made,",
        ("Softmax", "Sigmoid", "Tanh"),
    ),
    "BinaryCrossEntropyWithLogits": (
        "given_twice",
        "binary cross entropy with logits",
        ("Sigmoid", "Softmax", "Tanh", "Relu"),
    ),
    "NllLoss": ("given_probabilities", "the negative log likelihood", ("Softmax",)),
    "Sigmoid": ("applied_twice", "a sigmoid", ("Sigmoid",)),
    "Softmax": ("applied_twice", "a softmax", ("Softmax",)),
}
# The numbers that a function returns, and the largest difference of two of them.
_RANGES = {"Sigmoid": ("from 0 to 1", 1), "Tanh": ("from -1 to 1", 2)}
# Cosines times less than this are hardly logits.
_LEAST_SCALE = 0.5
_OF_LIKELIHOOD = ("Sub", "Div", "Neg", "Exp")
_OF_LOGITS = ("LogSoftmax", "BinaryCrossEntropyWithLogits")
_STRAIGHT = "pass the gradient straight through, as x + (round(x) - x).detach() does"
_SAMPLE = "sample so that the gradient passes, as mean + std * torch.randn_like(std) does"
# Operators whose derivative is 0 everywhere.
_WITHOUT_DERIVATIVE = {
    **{name: NoDerivative(name.lower(), _STRAIGHT) for name in ("Round", "Floor", "Ceil")},
    **{name: NoDerivative(name.lower(), _STRAIGHT) for name in ("Trunc", "Sign")},
    **{name: NoDerivative(name.lower(), _SAMPLE) for name in ("Bernoulli", "Poisson")},
    "Normal": NoDerivative("torch.normal", _SAMPLE),
}
_OF_ITSELF = NoDerivative(
    "the difference of a tensor and itself",
    "detach() one of the two, such as the log-probability of the old policy",
)
_CLAMPED = NoDerivative(
    "clamp, of which all that it was given is beyond the limits",
    "use a function that has a derivative there, as a sigmoid, or leave it unbounded in the loss",
)
_LIMITS = {"min": -math.inf, "max": math.inf}
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


def classes_of(roots: Sequence[torch.Tensor]) -> int:
    """The number of classes of the averaged cross entropy, without weights, that is the only loss,
    of what a layer returns (a margin loss multiplies cosines by 30 or 64); 0: it is none.
    """
    node = roots[0].grad_fn if len(roots) == 1 else None
    found = match(node, ("n:NllLoss", "l:LogSoftmax"))
    if found is None or found["n"]._saved_reduction != 1 or found["n"]._saved_weight is not None:
        return 0
    if kind_of(maker_of(found["l"])) not in _LINEAR:
        return 0
    dimension, shape = axis_of(found["l"])
    return shape[dimension]


class LossForms:
    """Looks now and then in the graph of a loss for a softmax of a softmax, for a cross entropy
    of logits that is given probabilities or one class, for a criterion of log-probabilities that is
    given none, for classes that a softmax was not taken over, for a normalisation of one element,
    for the square of what was broadcast, for weights that are made anew, and for a part that was
    there before.

    ``known``: the numbers of all parameters of the models and the optimizers; ``held``: of the
    optimizers alone.
    """

    def __init__(
        self,
        known: Callable[[], Collection[int]],
        held: Callable[[], Collection[int]],
        models: Callable[[], Sequence[torch.nn.Module]],
    ) -> None:
        self._last = (-1, 0)
        # Where several optimizers take turns, the loss of each is compared with its own.
        self._since: defaultdict[int, SinceLastLook] = defaultdict(
            lambda: SinceLastLook(models, known)
        )
        #: True once the program has asked for derivatives with respect to data.
        self.derives_by_data = False
        self._known = known
        self._held = held
        # The number of the newest node that was marked.
        self._newest = -1
        #: The parameters in the last graph that nothing with a derivative leads to, by number, with
        #: what leads to them; the numbers of the others in it.
        self.without_derivative: dict[int, NoDerivative] = {}
        self.with_derivative: set[int] = set()
        # The weights of the look before that are not among these.
        self._strange: list[MemoryRef] = []

    def is_due(self, look: int, turn: int) -> bool:
        """True if this is the first loss of one of the first looks, or of a turn of it."""
        before, self._last = self._last, (look, turn)
        return look < _LOOKS and self._last != before

    def look(self, roots: Sequence[torch.Tensor]) -> dict[str, str]:
        """The forms of these losses, each with what is known of it."""
        with unobserved(), no_grad():
            return self._forms(roots)

    def _forms(self, roots: Sequence[torch.Tensor]) -> dict[str, str]:
        forms: dict[str, str] = {}
        weights: list[torch.nn.Parameter] = []
        waiting = [root.grad_fn for root in roots if root.grad_fn is not None]
        met = set(waiting)
        flat: dict[Any, NoDerivative] = {}
        while waiting and len(met) < _MOST_NODES:
            node = waiting.pop()
            if self._was_there(node):
                is_copy = kind_of(node) == "ToCopy"
                is_cast = is_copy and leaf_of(node.next_functions[0][0]) is not None
                about = "holds a part that was in it at least ten updates before"
                forms["old_cast" if is_cast else "earlier_loss"] = about
            if (without := _flat(node)) is not None:
                flat[node] = without
            form, what, not_to_be = _NOT_GIVEN.get(kind_of(node), ("", "", ()))
            if given := _given(node, not_to_be):
                forms[form] = f"{what} is given {given}"
            for form, check in _CHECKS:
                if what := check(node):
                    forms.setdefault(form, what)
            if (weight := _weight_of(node)) is not None:
                weights.append(weight)
            for child, _ in node.next_functions:
                if child is not None and child not in met:
                    met.add(child)
                    waiting.append(child)
        forms.update(token_targets(met))
        forms.update(self._since[self._last[1]].compare(roots, met, self.derives_by_data))
        self._look_at_objective(forms, roots, met)
        if mask := fault_of_masks(met):
            forms["mask"] = mask
        if padding := counts_padding(met):
            forms["padding"] = padding
        if made := self._made_anew(weights):
            forms["made_in_forward"] = made
        for root in roots:
            sides = _similarities(root.grad_fn)
            if sides and all(map(self._trains, sides)):
                forms["alike"] = ""
            if _has_constant(root.grad_fn):
                forms["constant_term"] = ""
        self._mark(roots)
        self._know_derivatives(roots, met if not waiting else (), flat)
        return forms

    def _look_at_objective(
        self, forms: dict[str, str], roots: Sequence[torch.Tensor], nodes: Collection[Any]
    ) -> None:
        """Looks at losses of a kind that is known."""
        found = {
            "variational": variational(nodes, roots),
            "advantage": trained_advantage(nodes),
            "one_class": one_class(roots),
            "given_targets": given_targets(nodes),
        }
        forms.update({form: what for form, what in found.items() if what})
        forms.update(turned(nodes, roots))
        for node in nodes:
            if target := trained_target(node, self._trains):
                forms["trained_target"] = target
            if models := trained_reference(node, self._trained_by):
                forms["trained_reference"] = models
            # Before the first update a policy is its reference.
            if self._last[0] and (elements := nothing_preferred(node)):
                forms["nothing_preferred"] = elements

    def _trained_by(self, node: Any) -> frozenset[int]:
        """The parameters of optimizers that this node is made of."""
        leaves = (leaf_of(made) for made in _reached([node]))
        return frozenset(map(id, leaves)) & frozenset(self._held())

    def _mark(self, roots: Sequence[torch.Tensor]) -> None:
        """Marks the nodes next to the losses."""
        waiting = deque(root.grad_fn for root in roots if root.grad_fn is not None)
        marked = 0
        while waiting and marked < _MARKED:
            node: Any = waiting.popleft()
            if not hasattr(node, "variable") and _MARK not in node.metadata:
                node.metadata[_MARK] = self._last[0]
                self._newest = max(self._newest, node._sequence_nr())
                marked += 1
                waiting.extend(child for child, _ in node.next_functions if child is not None)

    def _was_there(self, node: Any) -> bool:
        """True for a node that was marked in an earlier look: losses of one look, as those of two
        optimizers that take turns, may share a part.
        """
        is_old = not hasattr(node, "variable") and node._sequence_nr() <= self._newest
        return is_old and node.metadata.get(_MARK, self._last[0]) < self._last[0]

    def _trains(self, node: Any) -> bool:
        """True if an optimizer holds a parameter that this node is made of."""
        held = self._held()
        return any(id(leaf_of(made)) in held for made in _reached([node]))

    def _know_derivatives(
        self, roots: Sequence[torch.Tensor], met: Collection[Any], flat: Mapping[Any, NoDerivative]
    ) -> None:
        """``met``: all nodes of the graph; ``flat``: those without a derivative."""
        first = [root.grad_fn for root in roots if root.grad_fn is not None]
        reached = _reached(first, flat) if flat else met
        self.with_derivative = {id(v) for n in reached if (v := leaf_of(n)) is not None}
        others = {id(v) for n in met if flat and (v := leaf_of(n)) is not None}
        operators, remedies = (
            (dict.fromkeys(each) for each in zip(*flat.values())) if flat else ((), ())
        )
        through = NoDerivative(" or ".join(operators), "; or ".join(remedies))
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


def _reached(nodes: Sequence[Any], flat: Collection[Any] = ()) -> set[Any]:
    """The nodes that a derivative leads to which is not known to be 0."""
    waiting: list[Any] = [node for node in nodes if node not in flat]
    met = set(waiting)
    while waiting:
        for child, _ in waiting.pop().next_functions:
            if child is not None and child not in met and child not in flat:
                met.add(child)
                waiting.append(child)
    return met


def _flat(node: Any) -> Optional[NoDerivative]:
    """An operator whose derivative is 0 everywhere, or, on the CPU, at all that it was given; None:
    it is none.
    """
    kind = kind_of(node)
    if kind in ("Clamp", "ClampMin", "ClampMax"):
        read, limits = saved_by(node, "self"), [getattr(node, f"_saved_{n}", None) for n in _LIMITS]
        if read is None or not read.is_cpu or any(torch.is_tensor(limit) for limit in limits):
            return None
        low, high = (n if limit is None else limit for n, limit in zip(_LIMITS.values(), limits))
        return _CLAMPED if bool(((read < low) | (read > high)).all()) else None
    if kind == "Sub" and getattr(node, "_saved_alpha", 0) == 1:
        first, second = node.next_functions
        is_same = first[0] is not None and first == second
        return _OF_ITSELF if is_same else None
    return _WITHOUT_DERIVATIVE.get(kind)


def _given(node: Any, kinds: Sequence[str]) -> str:
    """Names what a criterion is given, if it is of one of these kinds; empty: it is none."""
    made = maker_of(node) if kinds else None
    kind = kind_of(made)
    if "Softmax" in kinds and match(made, ("Exp", "LogSoftmax")):
        return "the result of exp(log_softmax)"
    if kind not in kinds:
        return ""
    about = ""
    if kind_of(node) == "LogSoftmax" and kind in _RANGES:
        numbers, width = _RANGES[kind]
        dimension, shape = axis_of(node)
        about = f", numbers {numbers}: no probability is above {_most(width, shape[dimension])}"
    elif kind == "Relu":
        about = ", no number below 0: no probability is below 0.5"
    return f"the result of {kind.lower()}{about}"


def _most(width: float, classes: int) -> str:
    """The largest probability that a softmax makes of numbers that differ so far at most."""
    return f"{1 / (1 + (classes - 1) * math.exp(-width)):.2g}"


def _dropped(node: Any) -> str:
    """Names a criterion that is given the result of a dropout, which on the CPU is a product with 0
    and one number.
    """
    _, what, _ = _NOT_GIVEN.get(kind_of(node), ("", "", ()))
    made = maker_of(node) if kind_of(node) in _OF_LOGITS else None
    noise = saved_by(made, "other") if match(made, ("Mul", "*", "-")) else None
    if noise is None or tuple(noise.shape) != shape_of(made):
        return f"{what} is given the result of dropout" * (kind_of(made) == "NativeDropout")
    most = noise.max()
    is_either = (noise == 0) | (noise == most)
    is_noise = bool((most > 1) & (noise == 0).any() & is_either.all())
    return f"{what} is given the result of dropout" * is_noise


def _clamped(node: Any) -> str:
    """Names a criterion of probabilities that is given a layer's result after clamp(); empty: it is
    none.
    """
    made = node.next_functions[0][0] if kind_of(node) == "BinaryCrossEntropy" else None
    is_clamped = kind_of(made) in ("Clamp", "Hardtanh") and kind_of(maker_of(made)) in _LINEAR
    return "binary cross entropy is given the result of a layer after clamp()" * is_clamped


def _narrow(node: Any) -> str:
    """Names a criterion that is given numbers of a narrow range; empty: it is none."""
    given = made = node.next_functions[0][0] if kind_of(node) == "LogSoftmax" else None
    while kind_of(made) in ("MaskedFill", "Where"):
        made = operand_of(made)
    factor = saved_by(made, "other") if match(made, ("Mul|Div", ("Mm", "*", "*"))) else None
    if factor is None or factor.numel() != 1 or not all(map(is_normalised, _sides(made))):
        return ""
    scale = abs(float(factor)) if kind_of(made) == "Mul" else 1 / abs(float(factor))
    if not 0 < scale < _LEAST_SCALE:
        return ""
    what = f"cross entropy is given cosines times {scale:.2g}"
    if made is not given:
        return what  # how many classes are left is not known
    dimension, shape = axis_of(node)
    return f"{what}: no probability is above {_most(2 * scale, shape[dimension])}"


def _sides(node: Any) -> list[Any]:
    """The nodes that have made both sides of the matrix product that a node is given."""
    sides = [side for side, _ in node.next_functions[0][0].next_functions]
    for place, side in enumerate(sides):
        while kind_of(side) in ("T", "Transpose", "Permute"):
            side = side.next_functions[0][0]
        sides[place] = side
    return sides


def _no_logarithm(node: Any) -> str:
    """Names a criterion of logarithms of probabilities, or of rates, that is given others; empty:
    it is none.
    """
    if kind_of(node).endswith("CtcLoss"):
        given = maker_of(node)
        what = _LINEAR.get(kind_of(given), "a softmax" if kind_of(given) == "Softmax" else "")
        return f"ctc_loss is given the result of {what} as input" if what else ""
    # poisson_nll_loss(): exp(input) - target * input.
    rate = match(node, ("Sub", ("Exp", "x:Exp|Softplus"), ("Mul", "-", "x:*")))
    if rate is not None:
        return f"poisson_nll_loss is given the result of {kind_of(rate['x']).lower()} as input"
    # kl_div() is the sum of xlogy(target, target) - target * input, or, with log_target=True, of
    # exp(target) * (target - input).
    found = match(node, ("Mean|Sum", ("Sub", "-|Xlogy", ("t:Mul", "-", "x:*"))))
    exponential = match(node, ("Mean|Sum", ("t:Mul", "-", ("Sub", "-", "x:LogSoftmax"))))
    target = saved_by((found or exponential or {}).get("t"), "self")
    if target is None:
        return ""
    if found is None:
        is_exponential = bool((target >= 1).all()) and are_distributions(target.log(), -1)
        return "kl_div with log_target=True is given probabilities as target" * is_exponential
    given = found["x"]
    while VIEWS.fullmatch(kind_of(given)) or match(given, ("Mul|Div", "*", "-")):
        given = given.next_functions[0][0]
    kind, dimension = kind_of(given), 1 if kind_of(given) == "Convolution" else -1
    if kind == "Softmax":
        dimension = axis_of(given)[0]
    elif kind not in _LINEAR:
        return ""
    classes = shape_of(given)[dimension]
    rows = target.sum(dtype=torch.float64) * classes / target.numel()
    is_target = math.isclose(rows, 1, rel_tol=1e-3) and bool((target >= 0).all())
    return f"kl_div is given the result of {_LINEAR.get(kind, 'a softmax')} as input" * is_target


def _many_hot(node: Any) -> str:
    """Names the targets of a cross entropy that is given some for each class, if they are 0 and 1
    and most rows have several 1; empty: they are not.
    """
    found = match(node, ("Neg", ("s:Sum", ("m:Mul", "l:LogSoftmax", "-"))))
    target = saved_by(found["m"], "other") if found and not shape_of(found["s"]) else None
    if found is None or target is None or tuple(target.shape) != shape_of(found["l"]):
        return ""
    if not bool(((target == 0) | (target == 1)).all()):
        return ""
    dimension, shape = axis_of(found["l"])
    counts = target.sum(dimension, dtype=torch.float64).flatten()
    count = int((counts > 1).sum())
    rows = len(counts)
    return f"in {count} of {rows} rows of {shape[dimension]} classes" if 2 * count > rows else ""


def never_negative(root: torch.Tensor, is_scaled: bool) -> str:
    """Names the criterion that this loss is, perhaps averaged or divided, if it is one that is
    never below 0 as it is meant. ``is_scaled``: a GradScaler has multiplied it.
    """
    node = root.grad_fn
    if is_scaled and kind_of(node) == "Mul":
        node = operand_of(node)
    while kind_of(node) in ("Div", "Mean", "Sum", "Where"):
        node = operand_of(node)
    # -p of the label is a loss, too.
    is_meant = kind_of(node) == "NllLoss" and kind_of(operand_of(node)) in ("Softmax", "Exp")
    return "" if is_meant else _NEVER_NEGATIVE.get(kind_of(node), "")


def _weight_of(node: Any) -> Optional[torch.nn.Parameter]:
    """The parameter that this node transposes, as a linear layer does, or convolves with."""
    place = {"T": 0, "Convolution": 1}.get(kind_of(node))
    child = None if place is None else node.next_functions[place][0]
    weight = getattr(child, "variable", None)
    return weight if type(weight) is torch.nn.Parameter else None


def _constant(node: Any) -> str:
    """Names a function of one element, whose result is always the same; empty: it is none."""
    kind = kind_of(node)
    if kind in ("NllLoss", "BinaryCrossEntropy", "MseLoss"):
        child = node.next_functions[0][0] if kind == "NllLoss" else maker_of(node)
        is_log = kind == "NllLoss"
        if kind_of(child) == ("LogSoftmax" if is_log else "Softmax"):
            dimension, shape = axis_of(child)
            if shape[dimension] == 1 and is_log:
                return "cross entropy is given one class: it is 0 whatever the logit is"
            if shape[dimension] == 1:
                return "the criterion is given a softmax over one element: it is 1 whatever that is"
    elif kind == "NativeLayerNorm":
        if math.prod(node._saved_normalized_shape) == 1:
            return f"layer_norm {_ONE}"
    elif kind == "NativeGroupNorm" and node._saved_HxW * node._saved_C == node._saved_group:
        return f"group_norm {_ONE}"
    return ""


def _across(node: Any) -> str:
    """The dimensions, where one of the classes of each row is taken, or each row is multiplied by
    probabilities, and the softmax before that was over another dimension. A square may be read both
    ways.
    """
    kind, edges = kind_of(node), [child for child, _ in node.next_functions]
    made: Any = next((child for child in edges if child is not None), None)
    made = made.next_functions[0][0] if match(node, ("NllLoss", "Log")) else made
    rows = match(node, ("NllLoss", ("Index", "m:LogSoftmax|Softmax")))
    if rows is not None and shape_of(rows["m"])[1:] == shape_of(made)[1:]:
        made = rows["m"]
    shape, place = shape_of(made), -1
    if kind.endswith("CtcLoss"):
        what, made = "ctc_loss has its", maker_of(node)
    elif kind == "NllLoss":
        what, place = "the negative log likelihood has its", 1
    elif kind == "Gather" and shape_of(node)[-1:] == (1,):
        what = "gather takes one of the"
        is_of_row = axis_of(node)[0] == len(shape) - 1 and match(made, "LogSoftmax")
        made = made if is_of_row and axis_of(made)[0] == 0 else None
    elif kind == "Mul" and None in edges:
        what = "probabilities are multiplied with the"
    else:
        return ""
    is_of_samples = kind == "Mul" and kind_of(made) == "Softmax" and len(shape) > 2
    if kind_of(made) not in ("LogSoftmax", "Softmax" if kind == "NllLoss" or is_of_samples else ""):
        return ""
    dimension, own = axis_of(made)
    if is_of_samples:
        if dimension:
            return ""
        place = 1
    if sorted(own) != sorted(shape) or len(own) < 2 or 1 in (own[dimension], len(shape)):
        return ""
    if own[dimension] == shape[place] or (own == shape and dimension == range(len(own))[place]):
        return ""
    if kind == "Mul" and not _are_rows(
        saved_by(node, "self" if edges[0] is None else "other"), made, place
    ):
        return ""
    return (
        f"{what} {shape[place]} classes in dimension {range(len(shape))[place]} of {list(shape)}, "
        f"and {kind_of(made).lower().replace('logs', 'log_s')} was taken over dimension "
        f"{dimension} of {list(own)}"
    )


def _are_rows(target: Optional[torch.Tensor], made: Any, place: int) -> bool:
    """True if this target adds up to 1 over the dimension ``place``, and not over what the softmax
    was taken over.
    """
    dimension, shape = axis_of(made)
    if target is None or tuple(target.shape) != shape:
        return False
    return are_distributions(target, place) and not are_distributions(target, dimension)


def _broadcast(node: Any) -> str:
    """The shapes, where the magnitude or the square of a difference or sum, of N x 1 results and a
    tensor without a graph, is averaged or added up and is N x N; or a product of N and of N x 1
    numbers, perhaps the first of two that are added.
    """
    inner: Any = node.next_functions[0][0] if kind_of(node) in ("Mean", "Sum") else None
    while (term := _term_of(inner)) is not None:
        inner = term
    # PowBackward1 has an exponent that is a tensor.
    is_square = type(inner).__name__ == "PowBackward0" and inner._saved_exponent == 2
    is_size = is_square or kind_of(inner) == "Abs"
    inner = inner.next_functions[0][0] if is_size else inner
    kind, shape = kind_of(inner), _without_ones(shape_of(inner))
    if kind not in (("Sub", "Rsub", "Add") if is_size else ("Mul",)):
        return ""
    edges = [child for child, _ in inner.next_functions]
    made = [child for child in edges if child is not None]
    if len(made) != 1 or len(shape) != 2 or shape[0] != shape[1] or shape[0] < 2:
        return ""
    of, column, row = _without_ones(shape_of(made[0])), (shape[0], 1), (shape[0],)
    maker: Any = made[0]
    while VIEWS.fullmatch(kind_of(maker)):
        before = maker.next_functions[0][0]
        if _without_ones(shape_of(before)) != of:
            break
        maker = before
    if is_size:
        # A view may be there for that: x[:, None] - y.
        is_so = of == column and not VIEWS.fullmatch(kind_of(maker))
        if of == row and kind_of(maker) in ("Squeeze", "Select", "View"):
            is_so = _without_ones(shape_of(maker.next_functions[0][0])) == column
        # Magnitudes of all pairs are part of an energy distance, squares of them have one mean.
        is_so |= of == row and is_square
        what = "sum" if kind == "Add" else "difference"
        after = ", and the square or magnitude of that"
    else:
        other = saved_by(inner, "self" if edges[0] is None else "other")
        is_so = other is not None and {of, _without_ones(tuple(other.shape))} == {row, column}
        is_so = is_so and not (of == column and VIEWS.fullmatch(kind_of(maker)))
        what, after = "product", ", and that"
    return (
        f"the {what} of a result of shape {list(shape_of(made[0]))} and of a tensor without a "
        f"graph was broadcast to {list(shape_of(inner))}{after}"
    ) * is_so


def _term_of(node: Any) -> Any:
    """The operand of a sum or a choice of terms of a loss, or of a term times a number, that is
    first, or alone has the shape of the result; None: it is none of these.
    """
    if kind_of(node) in ("Mul", "Div") and match(node, ("*", "Pow|Abs", "-")):
        factor = saved_by(node, "other")
        return node.next_functions[0][0] if factor is not None and factor.numel() == 1 else None
    terms = ("Mul|Neg|Pow|Abs", "Mul|Pow|Abs|Sub")
    is_sum = match(node, ("Add|Sub", *terms)) or match(node, ("Where", *terms))
    if is_sum is not None or kind_of(node) in ("Neg", "Minimum"):
        return node.next_functions[0][0]
    # The logarithm of a likelihood: -(x - mean)^2 / (2 * variance) - log(deviation) - c; or
    # exp(x) - target * x.
    if kind_of(node) not in ("Sub", "Div"):
        return None
    children = [child for child, _ in node.next_functions]
    whole = [child for child in children if child and shape_of(child) == shape_of(node)]
    is_likelihood = len(whole) == 1 and kind_of(whole[0]) in ("Sub", "Div", "Neg", "Mul")
    return whole[0] if is_likelihood and kind_of(children[0]) in _OF_LIKELIHOOD else None


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape without the dimensions of one element that it begins with."""
    return tuple(itertools.dropwhile(lambda size: size == 1, shape))


def _focal_mean(node: Any) -> str:
    """Names a criterion that was averaged before 1 - exp(-loss) weighs it, as a focal loss does."""
    weight = ("Pow", ("Rsub", ("Exp", ("Neg", "loss:*"))))
    orders = ((weight, "loss:*"), (("Mul", weight), "loss:*"), ("loss:*", weight))
    found = next((f for order in orders if (f := match(node, ("Mul", *order)))), None)
    loss = found["loss"] if found else None
    if loss is None or shape_of(loss) or not loss.next_functions:
        return ""
    is_mean = kind_of(loss) == "Mean" or getattr(loss, "_saved_reduction", 0) == 1
    rows = shape_of(loss.next_functions[0][0])
    rows = rows[:1] + rows[2:] if kind_of(loss).startswith("NllLoss") else rows
    return "1 - exp(-loss)" * (is_mean and math.prod(rows) > 1)


def _itself(node: Any) -> str:
    """Names a function of the difference of a tensor and itself that should not be constant."""
    difference: Any = node.next_functions[0][0] if kind_of(node) == "Exp" else None
    if _flat(difference) is _OF_ITSELF:
        return f"the exponential of {_OF_ITSELF.operators}, which is 1 without a gradient"
    sides = match(difference, ("Sub", "a:*", "b:*"))
    if sides and kind_of(sides["a"]) == kind_of(sides["b"]):
        ratios = saved_by(node, "result")
        if ratios is not None and ratios.numel() > 1 and bool((ratios == 1).all()):
            return (
                "the exponential of the difference of two results with a gradient, which are the "
                f"same: it is 1 in each of {ratios.numel()} elements"
            )
    found = match(node, ("Sub", ("Add", ("Norm", ("Add", "s:Sub"))), "*"))
    if found and _flat(found["s"]) is _OF_ITSELF:
        return "a triplet whose anchor and positive are one tensor: their distance has no gradient"
    if kind_of(node) in ("MseLoss", "SmoothL1Loss", "HuberLoss"):
        given = [saved_by(node, name) for name in ("self", "target")]
        places = [None if g is None else (g.data_ptr(), g.shape, g.stride()) for g in given]
        if None not in places and places[0] == places[1]:
            return "the distance of a tensor and itself, which is 0 without a gradient"
    return ""


def _similarities(loss: Any) -> Optional[list[Any]]:
    """Both operands of each similarity by the cosine of which a loss consists, that it makes as
    large as it can. None: it has other terms, or a side without a graph.
    """
    sides: list[Any] = []
    waiting = [(loss, 1)]
    while waiting:
        node, sign = waiting.pop()
        kind = kind_of(node)
        children = [] if node is None else [child for child, _ in node.next_functions]
        with_graph = [child for child in children if child is not None]
        factors: list[Any] = []
        if kind == "Sum" and kind_of(children[0]) == "Mul":
            factors = [child for child, _ in children[0].next_functions]
        if factors and all(map(is_normalised, factors)):
            if sign > 0:
                return None
            sides += factors
        elif kind == "MseLoss" and sign > 0 and all(map(is_normalised, children)):
            sides += children
        elif kind in ("Mean", "Sum", "View", "Squeeze", "Neg", "Rsub"):
            waiting.append((children[0], -sign if kind in ("Neg", "Rsub") else sign))
        elif kind in ("Mul", "Div") and len(with_graph) == 1:
            factor = factor_of(node)
            if factor is None:
                return None
            waiting.append((with_graph[0], sign if float(factor) > 0 else -sign))
        elif kind in ("Add", "Sub") and with_graph:
            signs = (sign, sign if kind == "Add" else -sign)
            waiting += [(child, own) for child, own in zip(children, signs) if child is not None]
        else:
            return None
    return sides


def has_no_second(roots: Sequence[torch.Tensor], results: Sequence[Any]) -> bool:
    """True if ``roots`` are derivatives that lead through ReLU, and ``results``, the derivatives of
    these, are 0.
    """
    if not all(isinstance(made, torch.Tensor) and made.grad_fn is not None for made in results):
        return False
    nodes = _reached([root.grad_fn for root in roots if root.grad_fn is not None])
    if not any(kind_of(node) in ("ThresholdBackward", "LeakyReluBackward") for node in nodes):
        return False
    with unobserved(), no_grad():
        return all(can_read_now(made) and not bool(made.any()) for made in results)


def is_output(root: torch.Tensor) -> bool:
    """True if these are the numbers of a linear layer or a convolution, or their sum."""
    node: Any = root.grad_fn
    while kind_of(node) in ("Sum", "Mean") or VIEWS.fullmatch(kind_of(node)):
        node = node.next_functions[0][0]
    return kind_of(node) in _LINEAR


def sum_of(root: torch.Tensor) -> Any:
    """The node of the sum that this loss is, perhaps multiplied or divided; None: it is none."""
    node = root.grad_fn
    while kind_of(node) in ("Mul", "Div"):
        node = operand_of(node)
    return node if kind_of(node) == "Add" else None


def _has_constant(node: Any) -> bool:
    """True if something that has no graph is added to a loss."""
    while match(node, ("Add|Sub", "*", "*")):
        node = node.next_functions[0][0]
    return any(match(node, ("Add|Sub", *edges)) for edges in (("*", "-"), ("-", "*")))


#: The forms that one node shows, each with what names it.
_CHECKS: tuple[tuple[str, Callable[[Any], str]], ...] = (
    ("no_logarithm", _no_logarithm),
    ("many_hot", _many_hot),
    ("dropped", _dropped),
    ("narrow", _narrow),
    ("clamped", _clamped),
    ("one_element", _constant),
    ("other_dimension", _across),
    ("across_samples", mixed),
    ("moved", moved),
    ("last_sample", last_sample),
    ("padded", padded),
    ("over_samples", over_samples),
    ("broadcast", _broadcast),
    ("focal_mean", _focal_mean),
    ("contrastive", contrastive),
    ("of_itself", _itself),
    ("wrong_targets", wrong_targets),
)
