"""Targets of a criterion that can't be what the criterion expects.

Reads tensors that the graph of the loss has saved, and waits for a device.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

import torch

from fastcheck.utils.torch.own_operators import no_grad, unobserved

from .nodes import kind_of, match, saved_by

# Labels are smoothed beyond 0 and 1 at times, but not so far.
_BEYOND = 0.5
# Operators whose result has at each place what was made of that place.
_BY_PLACE = re.compile(
    "LogSoftmax|Addmm|Mm|Add|Mul|Div|NativeLayerNorm|FusedRmsNorm|NativeDropout|Gelu|Relu|Silu|Tanh|"
    "View|UnsafeView|ReshapeAlias|Transpose|Permute|Clone|ToCopy|Alias"
)
# Labels of fewer tokens may be equal by chance.
_LEAST_TOKENS = 16
# Criteria of targets that are 1 or -1: the pattern of the graph, what ``t`` has saved of the
# target, the sign of 1 there, and what comes of 0.
_SIGNED: tuple[tuple[str, Any, str, int, str], ...] = (
    ("soft_margin_loss", "t:SoftMarginLoss", "target", 1, "has no gradient"),
    (
        "margin_ranking_loss",
        ("ClampMin", ("Add", ("t:Mul", "-", ("Sub", "*", "*")))),
        "self",
        -1,
        "has no gradient",
    ),
)
# The same of two terms, each chosen by a condition: whether the second is chosen throughout.
_CHOSEN: tuple[tuple[str, Any, bool, str], ...] = (
    (
        "hinge_embedding_loss",
        ("Add", ("t:Where", ("ClampMin", ("Sub", "-", "x:*"))), ("u:Where", "x:*")),
        True,
        "adds both terms up",
    ),
    (
        "cosine_embedding_loss",
        ("Add", ("t:Where", ("Sub", "-", "x:*")), ("u:Where", ("ClampMin", ("Sub", "x:*")))),
        False,
        "adds nothing",
    ),
)


def wrong_targets(node: Any) -> str:
    """Names a criterion that is given targets of another kind; empty: it is none."""
    kind = kind_of(node)
    with unobserved(), no_grad():
        if kind.startswith("BinaryCrossEntropy"):
            return _beyond_one(node)
        for name, pattern, saved, one, what in _SIGNED if kind != "Add" else ():
            found = match(node, pattern)
            target = saved_by(found["t"], saved) if found else None
            if target is not None and _is_mixed(target == 0) and bool((target * one >= 0).all()):
                return _signed(name, what)
        for name, pattern, is_whole, what in _CHOSEN if kind == "Add" else ():
            found = match(node, pattern) or {}
            first, second = (saved_by(found.get(key), "condition") for key in "tu")
            if first is None or second is None or not _is_mixed(first):
                continue
            if bool((second == is_whole).all()):
                return _signed(name, what)
    return ""


def _is_mixed(condition: torch.Tensor) -> bool:
    return bool(condition.any() & ~condition.all())


def _signed(name: str, what: str) -> str:
    return f"{name} is given a target of 0, which is neither its 1 nor its -1, and {what} there"


def _beyond_one(node: Any) -> str:
    # A loss that is not averaged may be masked later, and a weight of 0 is a mask.
    target = saved_by(node, "target")
    if target is None or not node._saved_reduction or node._saved_weight is not None:
        return ""
    least, most = map(float, target.aminmax())
    if least >= -_BEYOND and most <= 1 + _BEYOND:
        return ""
    return (
        f"a binary cross entropy is given targets from {least:g} to {most:g}, and not from 0 to 1"
    )


def unshifted(nodes: Collection[Any]) -> bool:
    """True if a cross entropy in this graph is given as targets what the embedding was given, each
    place of which leads to the same place of the results, while attention looks at a place and
    earlier ones alone.
    """
    given = [node for node in nodes if kind_of(node) == "Embedding"]
    losses = [node for node in nodes if given and kind_of(node) == "NllLoss"]
    with unobserved(), no_grad():
        return any(_copies(node, given) for node in losses) and any(map(_is_causal, nodes))


def _copies(loss: Any, given: Collection[Any]) -> bool:
    """True if the targets, but for those that are ignored, are the numbers of each embedding of as
    many, and one leads to the loss place by place.
    """
    target = saved_by(loss, "target")
    if target is None:
        return False
    tokens = [(node, saved_by(node, "indices")) for node in given]
    known = [(n, t) for n, t in tokens if t is not None and t.dim() > 1]
    like = {n: t for n, t in known if t.numel() == target.numel()}
    if not like or any(t.device != target.device for t in like.values()):
        return False
    # torch shows a negative one as an unsigned number.
    counts = target.flatten() != (loss._saved_ignore_index + 2**63) % 2**64 - 2**63
    labels = target.flatten()[counts]
    if labels.numel() < _LEAST_TOKENS or bool((labels == labels[0]).all()):
        return False
    if not all(bool((t.flatten()[counts] == labels).all()) for t in like.values()):
        return False
    waiting = [loss]
    met = set(waiting)
    while waiting:
        for child, _ in waiting.pop().next_functions:
            if child in like:
                return True
            if child is not None and child not in met and _BY_PLACE.fullmatch(kind_of(child)):
                met.add(child)
                waiting.append(child)
    return False


def _is_causal(node: Any) -> bool:
    """True for attention in which no place looks at a later place."""
    kind = kind_of(node)
    if kind.startswith("ScaledDotProduct"):
        if getattr(node, "_saved_is_causal", False):
            return True
        mask = saved_by(node, "attn_mask")
        # A place that can't be looked at has -Inf, or False.
        weights = None if mask is None else mask if mask.dtype == torch.bool else mask.exp()
    else:
        weights = saved_by(node, "result") if kind in ("Softmax", "SafeSoftmax") else None
    if weights is None or weights.dim() < 2 or weights.shape[-1] != weights.shape[-2]:
        return False
    first = weights[(0,) * (weights.dim() - 2)]
    return len(first) > 1 and not bool(first.triu(1).any())


def are_distributions(target: torch.Tensor, dimension: int) -> bool:
    """True if these are probabilities that add up to 1 over a dimension, as targets do and weights
    or rewards do not.
    """
    rows = target.sum(dimension, dtype=torch.float64)
    return bool((target >= 0).all() & ((rows - 1).abs() < 1e-3).all())
