"""Relations that give the step its batch in another form."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch

from .case import Case
from .computed import Computed, is_of_rows
from .relation import Relation


def _names(case: Case, modules: Sequence[torch.nn.Module]) -> str:
    paths = {module: path for path, module in case.model.named_modules()}
    first = modules[0]
    return f"{type(first).__name__} {paths.get(first, '')}".strip()


def _shared_by_rows(case: Case) -> str:
    """What lets one row reach another on purpose, as far as modules tell."""
    if case.learned.batch_norms:
        return f"depends on the batch by design: {_names(case, case.learned.batch_norms)}"
    for module in case.model.modules():
        if any("capacity" in name for name in vars(module)):
            return f"depends on the batch by design: capacity of {_names(case, [module])}"
    return ""


class _Rows(Relation):
    mixes_rows = True
    draws_alike = False

    def why_not(self, case: Case) -> str:
        if not case.given.rows:
            return "where the batch has its rows is not known: its tensors disagree"
        return "" if case.given.rows > 1 else "the batch has one row"


class Permuted(_Rows):
    """The rows of the batch in another order."""

    name = "rows in another order"

    def _order(self, case: Case) -> list[int]:
        # Halves change places too, and not only neighbours: a micro-batch gets other rows.
        # No row keeps its place.
        n = case.given.rows
        order = [*range(1, n, 2), *range(0, n, 2)]
        if n % 2:
            order[-2:] = reversed(order[-2:])
        return order

    def batch(self, case: Case) -> Any:
        return case.take_rows(self._order(case))

    def back(self, case: Case, computed: Computed) -> Computed:
        inverse = torch.tensor(self._order(case)).argsort()
        tensors = {
            key: tensor.index_select(0, inverse.to(tensor.device))
            if key in computed.rows
            else tensor
            for key, tensor in computed.tensors.items()
            if key in computed.rows or not is_of_rows(key)
        }
        return Computed(tensors, computed.rows)


class Alone(_Rows):
    """Every row of the batch replaced by its first, then by its last: the outputs of these rows
    stay what they were.
    """

    name = "rows do not reach each other"
    kinds = ("output",)

    def by_design(self, case: Case) -> str:
        return _shared_by_rows(case)

    def run(self, case: Case, base: Computed, sites: bool = False) -> Computed:
        first = case.compute(case.take_rows([0] * case.given.rows), sites=sites)
        last = case.compute(case.take_rows([case.given.rows - 1] * case.given.rows), sites=sites)
        return Computed(
            {
                key: torch.stack([tensor[0], last.tensors[key][0]])
                for key, tensor in first.tensors.items()
                if key in first.rows
                and key in last.rows
                and tensor.shape[1:] == last.tensors[key].shape[1:]
            },
            first.rows,
        )

    def reference(self, case: Case, base: Computed, sites: bool = False) -> Computed:
        tensors = {k: t[[0, -1]] for k, t in base.tensors.items() if k in base.rows}
        return Computed(tensors, base.rows)


class MicroBatches(_Rows):
    """The batch in two parts. Outputs are those of the whole; the gradient of the whole is the
    weighted sum of theirs, and the weights are found by least squares.
    """

    name = "micro-batches against the whole"
    kinds = ("output", "loss", "gradient")
    measured = ("loss", "gradient")

    def __init__(self) -> None:
        self._weights: tuple[float, float] = (0.0, 0.0)

    def by_design(self, case: Case) -> str:
        return _shared_by_rows(case)

    def run(self, case: Case, base: Computed, sites: bool = False) -> Computed:
        n = case.given.rows
        split = (n + 1) // 2
        self._weights = 0.0, 0.0
        parts = [
            case.compute(case.take_rows(rows), sites=sites)
            for rows in (range(split), range(split, n))
        ]
        self._weights = _fitted(base, parts)
        first, second = parts
        tensors = {}
        for key, tensor in first.tensors.items():
            other = second.tensors.get(key)
            if other is None:
                continue
            if key in first.rows:
                if tensor.shape[1:] == other.shape[1:]:
                    tensors[key] = torch.cat([tensor, other])
            elif key[0] in ("loss", "gradient", "backward parameter"):
                tensors[key] = self._weights[0] * tensor + self._weights[1] * other
        return Computed(tensors, first.rows)

    def note(self, case: Case) -> str:
        a, b = self._weights
        n = case.given.rows
        split = (n + 1) // 2
        counts = {"rows": (split, n - split)}
        for name, tensor in case.given.tensors.items():
            if tensor.dim() and tensor.shape[0] == n and not tensor.is_floating_point():
                if name == case.given.mask:
                    real = (tensor == case.given.real).sum(-1)
                    counts["real tokens"] = int(real[:split].sum()), int(real[split:].sum())
                elif bool((tensor == -100).any()):
                    used = (tensor[..., 1:] != -100).flatten(1).sum(-1)
                    counts["targets"] = int(used[:split].sum()), int(used[split:].sum())
        for what, (first, second) in reversed(counts.items()):
            total = first + second
            if total and abs(a - first / total) + abs(b - second / total) < 1e-3:
                return f"weights {a:.3f} and {b:.3f}: by {what}"
        if abs(a - 1) + abs(b - 1) < 1e-3:
            return "the loss is a sum: weights 1 and 1"
        return f"weights {a:.3f} and {b:.3f}"


def _fitted(base: Computed, parts: Sequence[Computed]) -> tuple[float, float]:
    """The weights with which the gradients of two parts make that of the whole."""
    aa = ab = bb = at = bt = 0.0
    for key, whole in base.tensors.items():
        if key[0] != "gradient" or any(key not in part.tensors for part in parts):
            continue
        a, b, t = (x.double().flatten() for x in (*(p.tensors[key] for p in parts), whole))
        aa, ab, bb = aa + float(a @ a), ab + float(a @ b), bb + float(b @ b)
        at, bt = at + float(a @ t), bt + float(b @ t)
    determinant = aa * bb - ab * ab
    if determinant <= 1e-9 * aa * bb or determinant == 0.0:
        return 0.5, 0.5
    return (at * bb - bt * ab) / determinant, (bt * aa - at * ab) / determinant


class Padded(_Rows):
    """More padding after each row: masked tokens, targets that are ignored."""

    name = "more padding"
    _tokens = 3
    _left = False

    def why_not(self, case: Case) -> str:
        reason = super().why_not(case)
        if reason or not case.given.mask:
            return reason or "the batch has no padding mask ([rows, tokens], 0 and 1)"
        limit = getattr(getattr(case.model, "config", None), "max_position_embeddings", None)
        if isinstance(limit, int) and case.given.length + self._tokens > limit:
            return f"the model takes {limit} tokens at most"
        if any(
            t.dim() > 2
            and t.shape[0] == case.given.rows
            and t.shape[1] == 1
            and case.given.length in t.shape[2:]
            for t in case.given.tensors.values()
        ):
            return "the batch has a mask of every pair of tokens"
        return ""

    def by_design(self, case: Case) -> str:
        return _shared_by_rows(case)

    def batch(self, case: Case) -> Any:
        mask = case.given.tensors[case.given.mask]
        config = getattr(case.model, "config", None)
        is_hidden = mask != case.given.real

        def longer(name: str, tensor: torch.Tensor) -> torch.Tensor:
            if tensor.dim() < 2 or tensor.shape[:2] != mask.shape:
                return tensor
            hidden = tensor[is_hidden]
            fill: Any = 0
            if name == case.given.mask:
                fill = 1 - case.given.real
            elif tensor.is_floating_point():
                fill = 0
            elif re.search(r"label|target|\by\b", name):
                is_one = hidden.numel() and bool((hidden == hidden.flatten()[0]).all())
                fill = hidden.flatten()[0] if is_one else -100
            elif re.search(r"position|segment|type", name):
                fill = 0
            elif hidden.numel():
                fill = hidden.flatten()[0]
            else:
                fill = getattr(config, "pad_token_id", None) or 0
            more = tensor.new_empty((tensor.shape[0], self._tokens, *tensor.shape[2:]))
            more = more.copy_(torch.as_tensor(fill).expand_as(more))
            return torch.cat([more, tensor] if self._left else [tensor, more], 1)

        return case.map_batch(longer)

    def back(self, case: Case, computed: Computed) -> Computed:
        longer = case.given.length + self._tokens
        start = self._tokens if self._left else 0
        tensors = dict(computed.tensors)
        for key in computed.rows:
            tensor = tensors[key]
            for dim in range(1, tensor.dim()):
                if tensor.shape[dim] == longer:
                    tensor = tensor.narrow(dim, start, case.given.length)
            tensors[key] = tensor
        kept = {k: t for k, t in tensors.items() if k in computed.rows or not is_of_rows(k)}
        return Computed(kept, computed.rows)
