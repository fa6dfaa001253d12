"""Losses of a kind that is known by its graph (contrastive, variational, of preferences, of actor
and critic), one part of which contradicts another.

Reads tensors that the graph of the loss has saved, and waits for a device.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Callable, Optional

import torch

from .nodes import (
    VIEWS,
    Edge,
    axis_of,
    before_views,
    factor_of,
    kind_of,
    leaf_of,
    match,
    operand_of,
    saved_by,
    shape_of,
    signed,
)
from .targets import are_distributions

CRITERIA = ("MseLoss", "SmoothL1Loss", "HuberLoss")
_OF_PROBABILITIES = ("LogSoftmax", "Logsumexp", "Log")
_LINEAR = ("Addmm", "Mm", "Convolution")
# Fewer rows may have equal targets by chance.
_LEAST_ROWS = 16
# Logarithms of the likelihood of what was drawn: of a class, and of a normal distribution.
_OF_CLASSES = (
    ("Gather", "LogSoftmax"),
    ("Gather", ("Sub", "x:*", ("Logsumexp", "x:*"))),
    ("Neg", "NllLoss"),
)
_OF_NORMALS = (
    "Sub",
    ("Sub", ("Add", ("Pow", ("Div", "*", "-")), ("Pow", ("Div", ("d:Sub", "*", "-"), "-"))), "-"),
    "Log",
)
_UNUSED = "is all that is made of that mean, and what is drawn has no gradient"
_OF_NORMAL = ("Sub", ("Sub", ("Div", ("Neg", ("Pow", ("Sub", "-", "*"))))))


def contrastive(node: Any) -> str:
    """Names a cross entropy of similarities whose targets or classes can't be meant."""
    found = match(node, ("NllLoss", "l:LogSoftmax"))
    if found is None or axis_of(found["l"])[0] != 1:
        return ""
    rows, made = shape_of(found["l"]), _unscaled(found["l"].next_functions[0][0])
    target = saved_by(node, "target")
    if len(rows) != 2 or target is None or target.shape != rows[:1] or rows[0] < 4:
        return ""
    if kind_of(made) == "Cat":
        return _with_positive(made)
    sides = _factors(made)
    if sides is None or rows[0] != rows[1]:
        return ""
    if sides[0] == sides[1]:
        own = torch.arange(rows[0], device=target.device)
        if not bool((target == own).any()):
            return (
                f"cross entropy is given the product of {list(shape_of(sides[0][0]))} with its own "
                "transposition, and no target is on its diagonal, where the similarity of each "
                "sample with itself counts as that with another"
            )
    elif all(leaf_of(side) is None for side, _ in sides) and bool((target == target[0]).all()):
        return (
            f"cross entropy is given the product of two sides of {rows[0]} samples each, and each "
            f"target is {int(target[0])}: all samples are to be like one"
        )
    return ""


def _with_positive(cat: Any) -> str:
    """Looks at similarities before which those of the positives were put."""
    parts = [child for child, _ in cat.next_functions]
    if len(parts) != 2 or None in parts:
        return ""
    first, rest = _through_views(parts[0]), _unscaled(parts[1])
    product = match(first, ("Sum", "m:Mul"))
    sides, size = _factors(rest), shape_of(rest)
    if product is None or sides is None or len(size) != 2 or size[0] != size[1]:
        return ""
    if {before_views(edge) for edge in product["m"].next_functions} != set(sides):
        return ""
    return (
        "cross entropy is given the similarity of each positive before a product that holds it "
        f"once more, on the diagonal of {list(size)}, so that no positive gets more than half of "
        "the probability"
    )


def _unscaled(node: Any) -> Any:
    """The node before products with one number, and views."""
    while True:
        node = _through_views(node)
        if _number(node) is None:
            return node
        node = operand_of(node)


def _through_views(node: Any) -> Any:
    return before_views((node, 0))[0]


def _number(node: Any) -> Optional[float]:
    """The number that this node multiplies its only operand with; None: it is no such node."""
    kind = kind_of(node)
    if kind == "Neg":
        return -1.0
    factor = factor_of(node)
    if factor is None or factor.is_complex():
        return None
    number = float(factor)
    return number if kind == "Mul" else 1 / number if number else None


def _factors(node: Any) -> Optional[list[Edge]]:
    """Both sides of a product of two matrices that both have a graph."""
    if kind_of(node) not in ("Mm", "Bmm"):
        return None
    sides = [before_views(edge) for edge in node.next_functions]
    return sides if all(side is not None for side, _ in sides) else None


def terms(node: Any) -> Iterator[tuple[Edge, int]]:
    """Yields the terms of which a loss is the sum or the mean, each with its sign."""
    waiting: list[tuple[Edge, int]] = [((node, 0), 1)]
    # A sum of very many terms is not looked at to its end.
    for _ in range(1000):
        if not waiting:
            return
        (term, place), sign = waiting.pop()
        kind = kind_of(term)
        children = list(term.next_functions) if term is not None else []
        if kind in ("Add", "Sub", "Rsub") and len(children) >= 1:
            signs = (sign, sign if kind == "Add" else -sign)
            signs = (-sign, sign) if kind == "Rsub" else signs
            waiting += [(c, s) for c, s in zip(children, signs) if c[0] is not None]
        elif kind in ("Mean", "Sum", "View", "Squeeze", "Unsqueeze", "Expand"):
            waiting.append((children[0], sign))
        elif factor := _number(term):
            child = next(c for c in children if c[0] is not None)
            waiting.append((child, sign if factor > 0 else -sign))
        elif term is not None:
            yield (term, place), sign


def _users(nodes: Collection[Any]) -> dict[Edge, list[Any]]:
    """The nodes that are given each tensor."""
    users: dict[Edge, list[Any]] = {}
    for node in nodes:
        for edge in node.next_functions:
            if edge[0] is not None:
                users.setdefault(edge, []).append(node)
    return users


def variational(nodes: Collection[Any], roots: Sequence[torch.Tensor]) -> str:
    """Names what contradicts the divergence of N(mean, exp(log-variance)) from N(0, 1) in a loss:
    its sign, the standard deviation that samples have, or that there are none.
    """
    has_exponential = any(kind_of(node) == "Exp" for node in nodes)
    for root in roots if has_exponential else ():
        of = list(terms(root.grad_fn))
        normals = [f for node in nodes if (f := match(node, _OF_NORMALS)) is not None]
        users = _users(nodes) if normals else {}
        # The divergence, of three terms, may be a loss of its own.
        for found in normals if len(of) > 3 * len(normals) else ():
            if len(users[found["d"].next_functions[0]]) == 1:
                return _UNUSED
        signs = dict(of)
        for (node, _), sign in of if len(of) > 3 else ():
            logarithm = node.next_functions[0] if kind_of(node) == "Exp" else None
            if logarithm is None or signs.get(logarithm) != -sign:
                continue
            means = [
                square.next_functions[0]
                for (square, _), own in of
                if _is_square(square) and own == sign and square.next_functions[0] != logarithm
            ]
            if len(means) == 1:
                if sign < 0:
                    return "is subtracted, so that the loss is least where it is largest"
                return _sampled(_users(nodes), means[0], logarithm)
    return ""


def _is_square(node: Any) -> bool:
    return type(node).__name__ == "PowBackward0" and node._saved_exponent == 2


def _sampled(users: dict[Edge, list[Any]], mean: Edge, logarithm: Edge) -> str:
    """Looks at what is made of the mean beside its square."""
    others = [user for user in users[mean] if not _is_square(user)]
    if not others:
        return _UNUSED
    for user in others:
        edges = list(user.next_functions)
        noise = [e for e in edges if e != mean] if kind_of(user) == "Add" else []
        product = noise[0][0] if len(noise) == 1 and kind_of(noise[0][0]) == "Mul" else None
        if product is None or (deviation := operand_of(product)) is None:
            continue
        share = _exponent(deviation, logarithm)
        if share is not None and abs(share - 0.5) > 1e-6:
            return (
                f"has the variance exp(logvar), and noise is multiplied by exp({share:g} * logvar)"
                ", not by its root exp(0.5 * logvar)"
            )
    return ""


def _exponent(node: Any, logarithm: Edge) -> Optional[float]:
    """``c`` where a node is exp(c * logarithm); None: it is none."""
    root = 1.0
    if kind_of(node) == "Sqrt":
        node, root = node.next_functions[0][0], 0.5
    if kind_of(node) != "Exp":
        return None
    edge, share = node.next_functions[0], root
    while edge != logarithm:
        factor = _number(edge[0])
        if factor is None:
            return None
        share *= factor
        edge = next(child for child in edge[0].next_functions if child[0] is not None)
    return share


def trained_advantage(nodes: Collection[Any]) -> str:
    """Names an advantage with a gradient that weighs logarithms of probabilities, where the value
    in it is trained by a loss of its own.
    """
    users: dict[Edge, list[Any]] = {}
    for node in nodes:
        edges = list(node.next_functions) if kind_of(node) == "Mul" else []
        if len(edges) != 2 or any(child is None for child, _ in edges):
            continue
        for weighed, weight in (edges, edges[::-1]):
            advantage = _advantage(weight)
            if advantage is None or not _is_likelihood(weighed[0]):
                continue
            users = users or _users(nodes)
            value = advantage[0].next_functions[1]
            if any(map(_is_criterion, users[advantage] + users[value])):
                return "the logarithm of a probability"
    return ""


def _is_criterion(node: Any) -> bool:
    return kind_of(node) in CRITERIA or _is_square(node)


def _advantage(edge: Edge) -> Optional[Edge]:
    """The difference of returns and of what a linear layer returns, before it is normalised."""
    for _ in range(8):
        node, _place = edge
        kind: str = kind_of(node)
        edges: Sequence[Any] = () if node is None else node.next_functions
        is_scaled = kind == "Neg" or (kind == "Div" and edges[0][0] is not None)
        is_centred = match(node, ("Sub", "x:*", ("Mean", "x:*"))) is not None
        if is_scaled or is_centred or VIEWS.fullmatch(kind):
            edge = edges[0]
        else:
            is_value = kind == "Sub" and kind_of(_through_views(edges[1][0])) in _LINEAR
            return edge if is_value else None
    return None


def _is_likelihood(node: Any) -> bool:
    """True for the logarithm of the probability of what was drawn, or its ratio to an old one."""
    node = _plain(node)
    ratio = match(node, ("Exp", ("Sub", "x:*", "-")))
    node = _plain(ratio["x"]) if ratio else node
    return any(match(node, pattern) for pattern in (*_OF_CLASSES, _OF_NORMAL))


def _plain(node: Any) -> Any:
    while kind_of(node) in ("Neg", "Sum") or (node and VIEWS.fullmatch(kind_of(node))):
        node = node.next_functions[0][0]
    return node


def trained_target(node: Any, trains: Callable[[Any], bool]) -> str:
    """Names a criterion of the value of an action whose target, a reward and the value of the next
    state, is trained, too.
    """
    edges = [child for child, _ in node.next_functions] if kind_of(node) in CRITERIA else []
    if len(edges) < 2 or None in edges[:2]:
        return ""
    for value, target in (edges[:2], edges[1::-1]):
        value, target = _through_views(value), _through_views(target)
        if kind_of(value) != "Gather" or kind_of(_through_views(operand_of(value))) not in _LINEAR:
            continue
        pairs = [child for child, _ in target.next_functions] if kind_of(target) == "Add" else []
        following = [child for child in pairs if child is not None]
        if len(following) != 1 or None not in pairs:
            continue
        made = following[0]
        while kind_of(made) in ("Mul", "Squeeze", "Unsqueeze") and operand_of(made) is not None:
            made = operand_of(made)
        if kind_of(made) in ("Max", "Amax", "Gather") and trains(made) and trains(value):
            return f"{kind_of(made).lower()}()"
    return ""


def nothing_preferred(node: Any) -> str:
    """Names the logarithm of a sigmoid that is given 0 in each element."""
    given = saved_by(node, "self") if kind_of(node) == "LogSigmoid" else None
    is_zero = given is not None and given.numel() > 1 and not bool(given.any())
    return f"{given.numel()} elements" if given is not None and is_zero else ""


def trained_reference(node: Any, held_by: Callable[[Any], frozenset[int]]) -> str:
    """Names the logarithm of a sigmoid of a difference of differences, of the results of two models
    that are both trained. ``held_by``: the trained parameters that a node is made of.
    """
    if kind_of(node) != "LogSigmoid":
        return ""
    given = node.next_functions[0][0]
    while given is not None and _number(given) is not None:
        given = operand_of(given)
    found = match(given, ("Sub", ("Sub", "a:*", "b:*"), ("Sub", "c:*", "d:*")))
    if found is None:
        return ""
    a, b, c, d = (held_by(found[key]) for key in "abcd")
    is_paired = (a == b and c == d) or (a == c and b == d)
    other = c if a == b else b
    return "two models" if is_paired and a and other and not a & other else ""


def turned(nodes: Collection[Any], roots: Sequence[torch.Tensor]) -> dict[str, str]:
    """The forms of a cross entropy that is all of a loss, and whose sign is turned; and of a loss
    of a policy that makes its entropy smaller.
    """
    forms = {}
    for root in roots if any(kind_of(node) in _OF_PROBABILITIES for node in nodes) else ():
        of = list(terms(root.grad_fn))
        if len(of) == 1 and _is_turned(*of[0]):
            forms["turned"] = ""
        entropies = [sign for (node, _), sign in of if _is_entropy(node)]
        policies = [node for (node, _), _ in of if _weighs_likelihood(node)]
        if entropies == [-1] and policies:
            forms["entropy"] = ""
    return forms


def _is_turned(edge: Edge, sign: int) -> bool:
    """True for -1 times a cross entropy, or for the mean logarithm of probabilities of targets."""
    node, _ = edge
    if kind_of(node) == "NllLoss":
        return sign < 0 and kind_of(node.next_functions[0][0]) == "LogSoftmax"
    if match(node, ("Mul", "LogSoftmax", "-")) is None or sign < 0:
        return False
    target = saved_by(node, "other")
    is_whole = target is not None and tuple(target.shape) == shape_of(node)
    return is_whole and target is not None and are_distributions(target, -1)


def _is_entropy(node: Any) -> bool:
    """True for the product of probabilities and their logarithms, that is below 0."""
    logarithms = "l:LogSoftmax", ("Clamp", "l:Sub"), ("Log", "p:Softmax")
    softmax = ("Softmax", "*")
    for logarithm in logarithms:
        pairs = ((softmax, logarithm), (logarithm, softmax), ("Exp", logarithm), (logarithm, "Exp"))
        if any(match(node, ("Mul", *pair)) for pair in pairs):
            return True
    return False


def _weighs_likelihood(node: Any) -> bool:
    """True for the logarithm of a likelihood times numbers without a graph."""
    made = operand_of(node) if kind_of(node) == "Mul" else None
    return made is not None and _is_likelihood(made)


def one_class(roots: Sequence[torch.Tensor]) -> str:
    """Names the class of all targets, where an averaged cross entropy of several classes, of what a
    layer returns, is the only loss.
    """
    node = roots[0].grad_fn if len(roots) == 1 else None
    found = match(node, ("n:NllLoss", "l:LogSoftmax"))
    if found is None or kind_of(_through_views(operand_of(found["l"]))) not in _LINEAR:
        return ""
    dimension, shape = axis_of(found["l"])
    target = saved_by(found["n"], "target")
    if target is None or len(shape) != 2 or shape[dimension] < 3:
        return ""
    if found["n"]._saved_weight is not None:
        return ""
    counted = target[target != signed(found["n"]._saved_ignore_index)]
    if counted.numel() < _LEAST_ROWS or not bool((counted == counted[0]).all()):
        return ""
    return f"{counted.numel()} targets of {shape[dimension]} classes: all are {int(counted[0])}"


def given_targets(nodes: Collection[Any]) -> str:
    """Names the last column of the input of a layer, if it holds the targets of a criterion: that
    of a table has the label, and that of a window what comes last.
    """
    kinds = (*CRITERIA, "L1Loss", "BinaryCrossEntropy", "BinaryCrossEntropyWithLogits", "NllLoss")
    targets = [t for n in nodes if kind_of(n) in kinds and (t := _row_of(n)) is not None]
    inputs = [
        given
        for node in nodes
        if kind_of(node) == "Addmm" and node.next_functions[1][0] is None
        if (given := saved_by(node, "mat1")) is not None and given.shape[1] > 1
    ]
    for target, given in itertools.product(targets, inputs):
        if len(given) != len(target) or given.device != target.device:
            continue
        is_varied = bool((target != target[0]).any())
        if is_varied and bool((given[:, -1] == target.to(given.dtype)).all()):
            return f"the last column of {given.shape[1]}"
    return ""


def _row_of(node: Any) -> Optional[torch.Tensor]:
    """The targets of a criterion, one for each row."""
    target = saved_by(node, "target")
    if target is None or target.dim() not in (1, 2) or target.numel() != len(target):
        return None
    return target.flatten() if len(target) >= _LEAST_ROWS else None
