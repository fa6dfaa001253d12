"""Masks that torch's attention is given, and that do not mask what they are meant to.

One call of each kind is looked at: the first that has a mask; those of scaled_dot_product_attention
in the graphs of losses. The host waits for a device then.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch.nn import MultiheadAttention

from fastcheck.utils.torch.own_operators import no_grad, unobserved
from fastcheck.utils.torch.readable import can_read_now

from .nodes import axis_of, kind_of, match, saved_by

# The places of the masks among the arguments of MultiheadAttention.
_PLACES = {"key_padding_mask": 3, "attn_mask": 5}
# The number of tokens that are attended to, and of those that are masked, from which on they tell.
_TOKENS = 4
_ADDED = "is 0 and 1 in {}, and is added to the scores: it masks nothing. Give it as bool"
_INVERTED = "rules out all tokens but one number, which padding has: it is inverted."


class Masks:
    """Looks at the masks of the first calls of torch's attention. ``is_on``: the model has some."""

    def __init__(self, is_on: bool) -> None:
        # The masks that were not met.
        self._left = set(_PLACES) if is_on else set()
        # The last arguments of the model that may be tokens.
        self._tokens: list[weakref.ref[torch.Tensor]] = []

    @property
    def is_on(self) -> bool:
        """True while calls are to be looked at."""
        return bool(self._left)

    def given(self, tensors: Iterable[torch.Tensor]) -> None:
        """The model is called with these."""
        wholes = (t for t in tensors if type(t) is torch.Tensor and not t.is_floating_point())
        self._tokens = [weakref.ref(t) for t in wholes if t.dim() == 2]

    def called(
        self, module: MultiheadAttention, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> str:
        """The fault of the masks of this call; empty: none is known."""
        found = ""
        for name, place in _PLACES.items():
            mask = args[place] if len(args) > place else kwargs.get(name)
            if name in self._left and isinstance(mask, torch.Tensor) and can_read_now(mask):
                self._left.discard(name)
                if mask.requires_grad:  # a bias that is learned
                    continue
                with unobserved(), no_grad():
                    found = found or self._fault(name, mask.detach())
        return found

    def _fault(self, name: str, mask: torch.Tensor) -> str:
        if mask.is_floating_point():
            if _is_added(mask):
                return f"{name} {_ADDED.format(mask.dtype)}, True where attention is not allowed"
            mask = mask == -torch.inf
        mask = mask.bool()
        if name == "attn_mask":
            is_square = mask.dim() == 2 and mask.shape[0] == mask.shape[1] > 1
            if is_square and torch.equal(mask, torch.ones_like(mask).tril()):
                return (
                    "attn_mask rules out what is at and below the diagonal: each position sees "
                    "later ones alone, and the last none. True means not allowed: a causal mask is "
                    "torch.ones(n, n, dtype=torch.bool).triu(1)"
                )
            return ""
        if any(_hides_tokens(mask, tokens()) for tokens in self._tokens):
            return f"{name} {_INVERTED} True means not attended to, as tokens == padding is"
        return ""


def _is_added(mask: torch.Tensor) -> bool:
    """True for a mask of 0 and 1, both of which are there."""
    return bool(((mask == 0) | (mask == 1)).all() & mask.any() & (mask == 0).any())


def fault_of_masks(nodes: Collection[Any]) -> str:
    """The fault of the masks that scaled_dot_product_attention was given in this graph, of which
    embeddings have saved the tokens, or of what multiplies the scores of a softmax; empty: none is
    known.
    """
    if any(map(_multiplies_scores, nodes)):
        return (
            "a softmax is 0 and 1, and multiplies the scores: it masks nothing, for exp(0) is 1. "
            "Use scores.masked_fill(mask == 0, -torch.inf)"
        )
    called = [node for node in nodes if kind_of(node).startswith("ScaledDotProduct")]
    masks = [saved_by(n, name) for n in called for name in ("attn_mask", "attn_bias")]
    tokens = [saved_by(n, "indices") for n in nodes if masks and kind_of(n) == "Embedding"]
    for mask in masks:
        if mask is None or mask.requires_grad:
            continue
        what = "of scaled_dot_product_attention"
        if _is_added(mask):
            return f"{what} {_ADDED.format(mask.dtype)}, True where attention is allowed"
        # One row for all queries of a sample.
        rows = mask[:, 0, 0] if mask.dim() == 4 and mask.shape[1:3] == (1, 1) else None
        hidden = None if rows is None else rows == -torch.inf
        if hidden is not None and any(_hides_tokens(hidden, each) for each in tokens):
            return f"{what} {_INVERTED} True means attended to here, as tokens != padding is"
    return ""


def _multiplies_scores(node: Any) -> bool:
    """True for a softmax of a product with a mask of 0 and 1, which is no ReLU by hand: that leaves
    nothing below 0.
    """
    made: Any = node.next_functions[0][0] if kind_of(node) in ("Softmax", "LogSoftmax") else None
    while match(made, ("Mul|Div", "Mul", "-")):
        made = made.next_functions[0][0]
    edges = [child for child, _ in made.next_functions] if kind_of(made) == "Mul" else [made]
    mask = saved_by(made, "self" if edges[0] is None else "other") if None in edges else None
    result = saved_by(node, "result")
    if mask is None or result is None or not _is_added(mask):
        return False
    dimension, shape = axis_of(node)
    masked = (mask == 0).expand(shape)
    is_alike = masked == masked.narrow(dimension, 0, 1)
    at_0 = torch.where(masked, result, -torch.inf).amax(dimension, keepdim=True)
    return not bool(is_alike.all()) and bool(((result < at_0) & ~masked).any())


def _hides_tokens(mask: torch.Tensor, tokens: Any) -> bool:
    """True if the tokens that are attended to are one number, and what is masked is not."""
    if tokens is None or tokens.is_floating_point() or not can_read_now(tokens):
        return False
    if tokens.shape != mask.shape:
        tokens = tokens.t()
    if tokens.shape != mask.shape or tokens.device != mask.device:
        return False
    seen, masked = tokens[~mask], tokens[mask]
    if min(len(seen), len(masked)) < _TOKENS:
        return False
    is_one = bool((seen == seen[0]).all()) and not bool((masked == seen[0]).any())
    # Padding is at one end of the rows.
    steps = (~mask).int().diff(dim=1)
    is_at_end = bool((steps >= 0).all()) or bool((steps <= 0).all())
    is_long = int((~mask).sum(1).max()) > 1
    return is_one and is_at_end and is_long and len(masked.unique()) >= _TOKENS
