"""Targets of a criterion that can't be what the criterion expects.

Reads tensors that the graph of the loss has saved, and waits for a device.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any, Optional

import torch

from .nodes import Edge, kind_of, match, saved_by, shape_of, signed

# Labels are smoothed beyond 0 and 1 at times, but not so far.
_BEYOND = 0.5
# Operators whose result has at each place what was made of that place.
_BY_PLACE = re.compile(
    "LogSoftmax|Addmm|Mm|Add|Mul|Div|NativeLayerNorm|FusedRmsNorm|NativeDropout|Gelu|Relu|Silu|Tanh|"
    "View|UnsafeView|ReshapeAlias|Transpose|Permute|Clone|ToCopy|Alias"
)
_RECURRENT = ("CudnnRnn", "MkldnnRnnLayer")
# The most nodes of one step of a recurrent layer.
_MOST_OF_STEP = 64
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
    if kind.startswith("BinaryCrossEntropy"):
        return _beyond_one(node)
    if kind == "CtcLoss":
        return _blank(node)
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


def _blank(node: Any) -> str:
    target, blank = saved_by(node, "targets"), node._saved_blank
    if target is None:
        return ""
    # A tensor on some devices, which nothing has packed either.
    lengths = list(map(int, node._saved_target_lengths))
    rows = target if target.dim() == 2 else torch.split(target, lengths)
    labels = torch.cat([row[:length] for row, length in zip(rows, lengths)])
    count = int((labels == blank).sum())
    what = f"ctc_loss is given its blank, {blank}, as {count} of {len(labels)} labels"
    return f"{what}, though that stands for no label" if count else ""


def token_targets(nodes: Collection[Any]) -> dict[str, str]:
    """The forms of a language model whose targets are what the embedding was given, where each
    place of that leads to the same place of the results: attention, or a recurrent layer, looks at
    a place and earlier ones alone (``unshifted``); or the targets are one place on, and attention
    looks at that (``sees_next``).
    """
    given = [node for node in nodes if kind_of(node) == "Embedding"]
    losses = [node for node in nodes if given and kind_of(node) == "NllLoss"]
    if not losses:
        return {}
    weights = [made for node in nodes if (made := _attended(node)) is not None]
    is_causal = any(not bool(each.triu(1).any()) for each in weights)
    by_steps = not weights
    if (is_causal or by_steps) and any(_copies(node, given, by_steps=by_steps) for node in losses):
        return {"unshifted": ""}
    lengths = {length for node in given for length in shape_of(node)[:-1]}
    of_tokens = [each for each in weights if len(each) in lengths and not is_causal]
    sees = any(bool((each.diagonal(1) != 0).all()) for each in of_tokens)
    if sees and any(_copies(node, given, dim) for node in losses for dim in (0, 1)):
        return {"sees_next": ""}
    return {}


def _copies(
    loss: Any, given: Collection[Any], shifted: Optional[int] = None, by_steps: bool = False
) -> bool:
    """True if the targets, but for those that are ignored, are the numbers of each embedding of as
    many, and one leads to the loss place by place. ``shifted``: the dimension of these in which the
    targets are one place on; ``by_steps``: through a recurrent layer.
    """
    like, labels = _labels(loss, given)
    for tokens in like.values():
        known, counts = labels, labels != _ignored(loss)
        if shifted is not None:
            length = tokens.shape[shifted] - 1
            known = labels.view_as(tokens).narrow(shifted, 0, length)
            counts = counts.view_as(tokens).narrow(shifted, 0, length)
            tokens = tokens.narrow(shifted, 1, length)
        known = known[counts]
        if known.numel() < _LEAST_TOKENS or bool((known == known[0]).all()):
            return False
        if not bool((tokens.reshape(counts.shape)[counts] == known).all()):
            return False
    waiting = list(loss.next_functions) if like else []
    met = set()
    is_reached, has_layer = False, not by_steps
    while waiting:
        node, place = waiting.pop()
        if node is None or node in met:
            continue
        met.add(node)
        is_reached |= node in like
        layer = _read_by_steps(node) if by_steps and not place else None
        has_layer |= layer is not None
        if layer is not None:
            waiting.append(layer)
        elif _BY_PLACE.fullmatch(kind_of(node)):
            waiting.extend(node.next_functions)
    return is_reached and has_layer


def _read_by_steps(node: Any) -> Optional[Edge]:
    """The tensor that a recurrent layer of one direction has read, whose results for each step
    ``node`` has made; None: it is none.
    """
    kind = kind_of(node)
    if kind in _RECURRENT:
        return None if node._saved_bidirectional else node.next_functions[0]
    steps = [child for child, _ in node.next_functions] if kind == "Stack" else []
    if len(steps) < 3 or None in steps:
        return None
    # Step 1 reads element 1 of the input, and what step 0 has returned.
    read = [_unbound(steps[place], steps[place - 1]) for place in (1, 2)]
    layer: Any = next(iter(read[0]), (None, 0))[0]
    return layer.next_functions[0] if read == [{(layer, 1)}, {(layer, 2)}] else None


def _unbound(step: Any, before: Any) -> set[Edge]:
    """The elements of unbind() that lead to a step, but for those that led to the one before."""
    waiting, met, found = [step], {step, before}, set()
    while waiting and len(met) < _MOST_OF_STEP:
        for child, place in waiting.pop().next_functions:
            if kind_of(child) == "Unbind":
                found.add((child, place))
            elif child is not None and child not in met:
                met.add(child)
                waiting.append(child)
    return found


def _labels(loss: Any, given: Collection[Any]) -> tuple[dict[Any, torch.Tensor], torch.Tensor]:
    """The numbers that each embedding of as many was given, and the targets, in one row."""
    target = saved_by(loss, "target")
    if target is None:
        return {}, torch.empty(0)
    tokens = [(node, saved_by(node, "indices")) for node in given]
    known = [(n, t) for n, t in tokens if t is not None and t.dim() > 1]
    like = {n: t for n, t in known if t.numel() == target.numel() and t.device == target.device}
    return like, target.flatten()


def _ignored(loss: Any) -> int:
    return signed(loss._saved_ignore_index)


def _padding(embedding: Any) -> int:
    return signed(getattr(embedding, "_saved_padding_idx", -1))


def counts_padding(nodes: Collection[Any]) -> str:
    """The number of targets of a cross entropy that are one number where an embedding was given its
    padding, and, but for once a row, nowhere else; empty: they are not.
    """
    given = [n for n in nodes if kind_of(n) == "Embedding" and _padding(n) >= 0]
    losses = [node for node in nodes if given and kind_of(node) == "NllLoss"]
    for loss in losses:
        like, labels = _labels(loss, given)
        is_whole = loss._saved_reduction and loss._saved_weight is None
        for node, tokens in like.items() if is_whole else ():
            is_padding = tokens.flatten() == _padding(node)
            padding, others = labels[is_padding], labels[~is_padding]
            if len(padding) < _LEAST_TOKENS or not bool((padding == padding[0]).all()):
                continue
            others = others == padding[0]
            if int(padding[0]) != _ignored(loss) and int(others.sum()) <= len(tokens):
                return f"{len(padding)} of {len(labels)} targets"
    return ""


def _attended(node: Any) -> Optional[torch.Tensor]:
    """The share of each place that each place of a first sample takes in attention, or 0 and other
    numbers; None: it is none.
    """
    kind = kind_of(node)
    if kind.startswith("ScaledDotProduct"):
        key, shape = saved_by(node, "key"), shape_of(node)
        if key is None or key.shape[-2:-1] != shape[-2:-1]:
            return None
        places = shape[-2]
        masks = [saved_by(node, name) for name in ("attn_mask", "attn_bias")]
        mask = next((each for each in masks if each is not None), None)
        whole = torch.ones(places, places)
        if getattr(node, "_saved_is_causal", False):
            whole = whole.tril()
        # A place that can't be looked at has -Inf, or False.
        made = whole if mask is None else mask if mask.dtype == torch.bool else mask.exp()
        weights: Optional[torch.Tensor] = made.expand(*made.shape[:-2], places, places)
    else:
        weights = saved_by(node, "result") if kind in ("Softmax", "SafeSoftmax") else None
    if weights is None or weights.dim() < 2 or weights.shape[-1] != weights.shape[-2]:
        return None
    first = weights[(0,) * (weights.dim() - 2)]
    return first if len(first) > 1 else None


def are_distributions(target: torch.Tensor, dimension: int) -> bool:
    """True if these are probabilities that add up to 1 over a dimension, as targets do and weights
    or rewards do not.
    """
    rows = target.sum(dimension, dtype=torch.float64)
    return bool((target >= 0).all() & ((rows - 1).abs() < 1e-3).all())
