"""Relations that give the step its batch in another form."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Optional

import torch

from .case import Relation, TestedStep
from .given import MASKS, TARGETS
from .observer import Computed, in_double

_POSITIONS = r"position"
_SEGMENTS = r"segment|sequence_id|seq_idx|document|doc_id"


class _Rows(Relation):
    mixes_rows = True
    draws_alike = False

    def why_not(self, case: TestedStep) -> str:
        return case.given.why_no_rows

    def by_design(self, case: TestedStep) -> str:
        for path, module in case.model.named_modules():
            is_norm = module in case.learned.batch_norms
            if is_norm or any("capacity" in name for name in vars(module)):
                part = f"{'' if is_norm else 'capacity of '}{type(module).__name__} {path}"
                return f"depends on the batch by design: {part.strip()}"
        return ""


class Permuted(_Rows):
    """The rows of the batch in another order."""

    name = "rows in another order"

    def _order(self, case: TestedStep) -> list[int]:
        # Halves change places too, and not only neighbours: a micro-batch gets other rows.
        # No row keeps its place.
        n = case.given.rows
        order = [*range(1, n, 2), *range(0, n, 2)]
        if n % 2:
            order[-2:] = reversed(order[-2:])
        return order

    def batch(self, case: TestedStep) -> Any:
        return case.take_rows(self._order(case))

    def back(self, case: TestedStep, computed: Computed) -> Computed:
        inverse = torch.tensor(self._order(case)).argsort()
        return computed.map_rows(lambda t: t.index_select(0, inverse.to(t.device)))

    def by_design(self, case: TestedStep) -> str:
        return ""  # it has the same company


class Alone(_Rows):
    """Every row of the batch replaced by its first, then by its last: the outputs of these rows
    stay what they were.
    """

    name = "rows do not reach each other"
    kinds = ("output",)

    def run(self, case: TestedStep, base: Computed, sites: bool = False) -> Computed:
        n = case.given.rows
        parts = [case.compute(case.take_rows([row] * n), sites=sites) for row in (0, n - 1)]
        return joined([part.map_rows(lambda tensor: tensor[:1]) for part in parts], (0.0, 0.0))

    def reference(self, case: TestedStep, base: Computed, sites: bool = False) -> Computed:
        tensors = {k: t[[0, -1]] for k, t in base.tensors.items() if k in base.rows}
        return Computed(tensors, base.rows)


class Causal(_Rows):
    """The last token of each row replaced by that of another row: the outputs of the tokens before
    it stay.
    """

    name = "no token sees a later token"
    kinds = ("output",)

    def why_not(self, case: TestedStep) -> str:
        known = "" if self._ids(case) else "the batch has no integers [rows, tokens]"
        return super().why_not(case) or known

    def _ids(self, case: TestedStep) -> str:
        """The tensor of tokens: the integers that are neither mask, targets nor positions."""
        other = rf"{TARGETS}|mask|{_POSITIONS}|{_SEGMENTS}|type"
        shaped = {n: t for n, t in case.given.tensors.items() if t.dim() == 2}
        known = [n for n, t in shaped.items() if not (t.is_floating_point() or re.search(other, n))]
        return next((name for name in known if len(shaped[name]) == case.given.rows), "")

    def batch(self, case: TestedStep) -> Any:
        ids, tensor = self._ids(case), case.given.tensors[self._ids(case)].clone()
        last = torch.arange(len(tensor)), self._last(case)
        held = tensor[last]
        # A row whose successor ends with the same token gets one of its own tokens.
        tensor[last] = torch.where(held == held.roll(1), tensor[:, 0], held.roll(1))
        return case.map_batch(lambda name, kept: tensor if name == ids else kept)

    def _last(self, case: TestedStep) -> torch.Tensor:
        """The column of the last real token of each row."""
        columns = case.given.tensors[self._ids(case)].shape[1]
        real = case.given.is_real.cpu()
        if real.shape[1] != columns:  # no mask, or that of other tokens
            real = torch.ones(case.given.rows, columns, dtype=torch.bool)
        return (torch.arange(columns) * real).amax(1)

    def back(self, case: TestedStep, computed: Computed) -> Computed:
        last = self._last(case)
        tokens = case.given.tensors[self._ids(case)].shape[1]

        def before(tensor: torch.Tensor) -> Optional[torch.Tensor]:
            at = [d for d in range(1, tensor.dim()) if tensor.shape[d] == tokens]
            if not at:
                return None
            moved = tensor.clone().movedim(at[0], 1)
            moved[torch.arange(len(moved)), last] = 0
            return moved.movedim(1, at[0])

        return computed.map_rows(before)

    def reference(self, case: TestedStep, base: Computed, sites: bool = False) -> Computed:
        return self.back(case, base)


class MicroBatches(_Rows):
    """The batch in two parts. Outputs are those of the whole; the gradient of the whole is the
    weighted sum of theirs, and the weights are found by least squares.
    """

    name = "micro-batches against the whole"
    kinds = ("output", "loss", "gradient")
    measured = ("loss", "gradient")

    _weights = (0.0, 0.0)

    def run(self, case: TestedStep, base: Computed, sites: bool = False) -> Computed:
        rows, middle = range(case.given.rows), (case.given.rows + 1) // 2
        halves = [case.take_rows(half) for half in (rows[:middle], rows[middle:])]
        parts = [case.compute(half, sites=sites) for half in halves]
        self._weights = _fitted(base, parts)
        return joined(parts, self._weights)

    def note(self, case: TestedStep) -> str:
        (a, b), given = self._weights, case.given
        counted = {"rows": torch.ones(given.rows)}
        for name, tensor in given.tensors.items():
            if tensor.dim() and tensor.shape[0] == given.rows and not tensor.is_floating_point():
                if name == given.mask:
                    counted["real tokens"] = given.is_real
                elif bool((tensor == -100).any()):
                    counted["targets"] = (tensor[:, 1:] if tensor.dim() > 1 else tensor) != -100
        for what, counts in reversed(counted.items()):
            first, total = float(counts[: (given.rows + 1) // 2].sum()), float(counts.sum())
            if total and abs(a - first / total) + abs(b - 1 + first / total) < 1e-3:
                return f"weights {a:.3f} and {b:.3f}: by {what}"
        if abs(a - 1) + abs(b - 1) < 1e-3:
            return "the loss is a sum: weights 1 and 1"
        return f"weights {a:.3f} and {b:.3f}"


def joined(parts: Sequence[Computed], weights: Sequence[float]) -> Computed:
    """The results of some parts of the rows, put together: rows beside each other, and weighted
    sums, in which a gradient that a part does not have counts as zeros.
    """
    tensors = {}
    for key in {key: None for part in parts for key in part.tensors}:
        held = [(w, part.tensors[key]) for w, part in zip(weights, parts) if key in part.tensors]
        is_whole = len(held) == len(parts)
        if is_whole and key in parts[0].rows and len({tensor.shape[1:] for _, tensor in held}) == 1:
            tensors[key] = torch.cat([tensor for _, tensor in held])
        elif key[0] == "gradient" or (is_whole and key[0] == "loss"):
            tensors[key] = torch.stack([w * tensor for w, tensor in held]).sum(0)
    return Computed(tensors, parts[0].rows)


def _fitted(base: Computed, halves: Sequence[Computed]) -> tuple[float, float]:
    """The weights with which the gradients of two parts make that of the whole."""
    none = {k: torch.zeros_like(t) for k, t in base.tensors.items() if k[0] == "gradient"}
    if not none:
        return 0.5, 0.5
    held = [{**none, **computed.tensors} for computed in (*halves, base)]
    a, b, t = (torch.cat([in_double(tensors[k]).flatten().cpu() for k in none]) for tensors in held)
    parts = torch.stack([a, b])
    gram = parts @ parts.t()
    if not float(gram.det()) > 1e-9 * float(gram.diag().prod()):
        return 0.5, 0.5
    first, second = torch.linalg.solve(gram, parts @ t).tolist()
    return first, second


class Padded(_Rows):
    """More padding after each row: masked tokens, targets that are ignored."""

    name = "more padding"
    _tokens = 3
    _left = False

    def why_not(self, case: TestedStep) -> str:
        limit = getattr(getattr(case.model, "config", None), "max_position_embeddings", None)
        is_full = isinstance(limit, int) and case.given.length + self._tokens > limit
        reason = super().why_not(case) or case.given.why_no_padding()
        return reason or (f"the model takes {limit} tokens at most" if is_full else "")

    def batch(self, case: TestedStep) -> Any:
        is_real = case.given.is_real

        def longer(name: str, tensor: torch.Tensor) -> torch.Tensor:
            if tensor.dim() < 2 or tensor.shape[:2] != is_real.shape:
                return tensor
            hidden = tensor[~is_real]
            fill: Any = 0
            if re.search(MASKS, name):  # another mask hides other tokens
                real = case.given.real_value(tensor)
                fill = 1 - (case.given.real if real is None else real)
            elif re.search(TARGETS, name) and not tensor.is_floating_point():
                fill = case.given.ignored(tensor)
                if self._left:
                    tensor = case.given.without_first_target(name, tensor)
            elif not tensor.is_floating_point() and not re.search(r"position|segment|type", name):
                pad = getattr(getattr(case.model, "config", None), "pad_token_id", None) or 0
                fill = hidden.flatten()[0].item() if hidden.numel() else pad
            more = tensor.new_full((len(tensor), self._tokens, *tensor.shape[2:]), fill)
            return torch.cat([more, tensor] if self._left else [tensor, more], 1)

        return case.map_batch(longer)

    def back(self, case: TestedStep, computed: Computed) -> Computed:
        longer = case.given.length + self._tokens
        start = self._tokens if self._left else 0
        masks = case.given.real_tokens(case.given.batch)

        def cut(tensor: torch.Tensor) -> Optional[torch.Tensor]:
            if longer not in tensor.shape[1:]:
                # A tensor that is as wide as the rows are long is masked in the step as it is.
                is_clear = len(case.widths & {*tensor.shape[1:]}) < 2
                return case.without_hidden(tensor, masks, tensor.shape) if is_clear else None
            for dim in range(1, tensor.dim()):
                if tensor.shape[dim] == longer:
                    tensor = tensor.narrow(dim, start, case.given.length)
            return tensor

        return computed.map_rows(cut)


class LeftPadded(Padded):
    """More padding before each row, with the positions of its tokens as they were."""

    name = "left padding"
    _left = True

    def why_not(self, case: TestedStep) -> str:
        reason = super().why_not(case)
        return reason or ("" if case.given.named(_POSITIONS) else "the batch has no positions")

    def reference(self, case: TestedStep, base: Computed, sites: bool = False) -> Computed:
        return case.compute(case.map_batch(case.given.without_first_target), sites=sites)


class Packed(_Rows):
    """The real tokens of all rows as one row, whose positions restart. A tensor of segments, where
    the batch has such a tensor, gets another number for each row, and the mask of padding is all
    real; else there is none, and the restart of the positions says where a row begins.
    """

    name = "packed into one row"

    def why_not(self, case: TestedStep) -> str:
        named = case.given.named
        if reason := super().why_not(case) or case.given.why_no_padding():
            return reason
        if not named(_POSITIONS):
            return "the batch has no positions"
        is_known = named(_SEGMENTS) or getattr(case.model, "_supports_flash_attn", False)
        return "" if is_known else "neither segments in the batch nor a model that packs"

    def batch(self, case: TestedStep) -> Any:
        given, real = case.given, case.given.is_real

        def packed(name: str, tensor: torch.Tensor) -> Any:
            if tensor.dim() < 2 or tensor.shape[:2] != real.shape:
                return tensor
            if name == given.mask and not given.named(_SEGMENTS):
                return None
            return self._as_packed(case, name, tensor)[real][None]

        return case.map_batch(packed)

    def back(self, case: TestedStep, computed: Computed) -> Computed:
        real = case.given.is_real

        def unpacked(tensor: torch.Tensor) -> Optional[torch.Tensor]:
            at = [d for d in range(1, tensor.dim()) if tensor.shape[d] == int(real.sum())]
            if len(at) != 1 or tensor.shape[0] != 1:
                return None
            moved = tensor[0].movedim(at[0] - 1, 0)
            whole = moved.new_zeros((*real.shape, *moved.shape[1:]))
            whole[real.to(moved.device)] = moved
            return whole.movedim(1, at[0])

        return computed.map_rows(unpacked)

    def reference(self, case: TestedStep, base: Computed, sites: bool = False) -> Computed:
        batch = case.map_batch(lambda name, tensor: self._as_packed(case, name, tensor))
        return case.compute(batch, sites=sites)

    def _as_packed(self, case: TestedStep, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor in rows still, with the targets and the segments that it has when packed."""
        given = case.given
        if name == given.named(_SEGMENTS):
            numbers = torch.arange(1, given.rows + 1).to(tensor)[:, None].expand_as(tensor)
            return torch.where(given.is_real, numbers, tensor)
        return given.without_first_target(name, tensor)
