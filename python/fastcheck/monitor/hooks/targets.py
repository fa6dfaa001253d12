"""Targets of a criterion that can't be what the criterion expects.

Reads tensors that the graph of the loss has saved, and waits for a device.
"""

from __future__ import annotations

from typing import Any

import torch

from fastcheck.utils.torch.own_operators import no_grad, unobserved

from .nodes import kind_of, match, saved_by

# Labels are smoothed beyond 0 and 1 at times, but not so far.
_BEYOND = 0.5
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


def are_distributions(target: torch.Tensor, dimension: int) -> bool:
    """True if these are probabilities that add up to 1 over a dimension, as targets do and weights
    or rewards do not.
    """
    rows = target.sum(dimension, dtype=torch.float64)
    return bool((target >= 0).all() & ((rows - 1).abs() < 1e-3).all())
