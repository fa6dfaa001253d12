"""Given: the batch of a step, and where it has rows, tokens and padding."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Callable, Optional

import numpy as np
import torch

from fastcheck.utils.torch.flatten import flatten, map_tensors

#: Names of tensors that hold targets.
TARGETS = r"label|target|\by\b"
#: Names of masks of padding.
MASKS = r"(attention|attn|pad|padding|input|token|\W)_?mask\W*$"

_Change = Callable[[str, torch.Tensor], torch.Tensor]


class Given:
    """The batch of a step. ``tensors``: those in it, by the names of flatten(). ``rows``: their
    number, 0 where it is not known, for the reason ``why_no_rows``. ``length``: of the padded
    sequences, with ``mask`` the name of the tensor that says which tokens are real, by the value
    ``real``; 0 without such a tensor. ``trained``: the names of those that need a gradient.
    """

    def __init__(self, batch: Any, model: torch.nn.Module) -> None:
        self.batch = batch
        pairs = flatten(batch, "batch")
        self.tensors = {name: tensor.detach() for name, tensor in pairs}
        self.trained = [name for name, tensor in pairs if tensor.requires_grad]
        self.rows, self.why_no_rows = self._rows(model)
        self.mask, self.real = self._mask()
        #: [rows, tokens], True where a token is real; empty without a mask.
        self.is_real = self.tensors.get(self.mask, torch.empty(0, 0)) == self.real
        self.length = self.is_real.shape[1]

    def _rows(self, model: torch.nn.Module) -> tuple[int, str]:
        """Dimension 0 of all tensors of the batch, unless a module has it elsewhere."""
        if not self.tensors:
            return 0, "no tensors are known in the batch: dicts, lists, dataclasses are looked into"
        tensors = {name: t for name, t in self.tensors.items() if t.dim()}
        wide = [t for t in tensors.values() if t.dim() > 1]
        sizes = {t.shape[0]: name for name, t in tensors.items() if t.shape[0] > 1}
        if not sizes or (wide and all(t.shape[0] == 1 for t in wide)):  # sequences packed into one
            return 0, "the batch has fewer than two rows"
        if len(sizes) > 1:
            said = ", ".join(f"{name} {size}" for size, name in sizes.items())
            return 0, f"where the batch has its rows is not known: dimension 0 of {said}"
        other = (name for name in tensors if not re.search(MASKS, name))
        if pairs := next((name for name in other if _is_of_pairs(tensors[name])), ""):
            return 0, f"{pairs} may have an entry for every pair of rows"
        # One number for each row says that these are dimension 0, whatever a module takes; growing
        # ones may be times.
        flat = [t for t in tensors.values() if t.dim() == 1]
        has_rows_first = not all(bool((t[1:] > t[:-1]).all()) for t in flat)
        for path, module in () if has_rows_first else model.named_modules():
            if getattr(module, "batch_first", True) is False:
                name = f"{type(module).__name__} {path}".strip()
                return 0, f"{name} has its rows in another dimension (batch_first=False)"
        return next(iter(sizes)), ""

    def _mask(self) -> tuple[str, int]:
        for name, tensor in self.tensors.items():
            is_mask = tensor.dim() == 2 and tensor.shape[0] == self.rows and tensor.shape[1] > 1
            if is_mask and re.search(MASKS, name) and bool(((tensor == 0) | (tensor == 1)).all()):
                real = self.real_value(tensor)
                if real is not None:
                    return name, real
        return "", 1

    @staticmethod
    def real_value(mask: torch.Tensor) -> Optional[int]:
        """The value for a real token: the first or last token of every row is real."""
        first, last = (set(mask[:, i].int().tolist()) for i in (0, -1))
        if len(first) == len(last) == 1 and first != last:
            return 1
        values = first if len(first) == 1 else last
        return values.pop() if len(values) == 1 else None

    def why_no_padding(self) -> str:
        """The reason why tokens can't be added or taken away, or ``""``."""
        if not self.mask:
            return "the batch has no padding mask ([rows, tokens], 0 and 1)"
        for name, tensor in self.tensors.items():
            is_of_pairs = tensor.dim() > 2 and tensor.shape[1] in (1, self.length)
            if is_of_pairs and self.length in tensor.shape[2:]:
                return f"{name} may have an entry for every pair of tokens"
        return ""

    def map(self, change: _Change, pick: Callable[[Any], Any] = lambda value: value) -> Any:
        """The batch with each of its tensors replaced by ``change(name, tensor)``, and what holds
        none by what ``pick`` makes of it.
        """
        names = iter(self.tensors)
        return map_tensors(self.batch, lambda _: change(n := next(names), self.tensors[n]), pick)

    def take_rows(self, index: Sequence[int]) -> Any:
        """The batch with these rows only, in this order; of lists of one entry for each row too."""
        where = torch.tensor(index)

        def take(name: str, tensor: torch.Tensor) -> torch.Tensor:
            has_rows = tensor.dim() and tensor.shape[0] == self.rows
            return tensor.index_select(0, where.to(tensor.device)) if has_rows else tensor

        def pick(value: Any) -> Any:
            if isinstance(value, np.ndarray) and value.ndim and len(value) == self.rows:
                return value[list(index)]
            if type(value) is list and len(value) == self.rows:
                return [value[i] for i in index]
            return value

        return self.map(take, pick)

    def named(self, pattern: str) -> str:
        """The first tensor of this name with an entry for each token, or ``""``."""
        shape = (self.rows, self.length)
        names = [name for name, t in self.tensors.items() if tuple(t.shape[:2]) == shape]
        return next((name for name in names if re.search(pattern, name)), "")

    def ignored(self, targets: torch.Tensor) -> Any:
        """The value of a target that does not count: where the mask hides tokens, if it is a single
        value.
        """
        hidden = set(targets[~self.is_real].flatten().tolist())
        return hidden.pop() if len(hidden) == 1 else -100

    def without_first_target(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Targets in which none counts for a row's first token: it may be taken for the target that
        the token before it has to predict.
        """
        real = self.is_real
        if not re.search(TARGETS, name) or tensor.shape[:2] != real.shape:
            return tensor
        tensor = tensor.clone()
        tensor[real & (real.cumsum(1) == 1)] = self.ignored(tensor)
        return tensor

    def real_tokens(self, batch: Any) -> list[torch.Tensor]:
        """The mask of a batch of this form, [rows, tokens] of True where a token is real; and what
        is left of it where a step cuts off the columns that are hidden in every row.
        """
        mask = dict(flatten(batch, "batch")).get(self.mask)
        if mask is None:
            return []
        real = mask == self.real
        columns = real.any(0).nonzero().flatten()
        if not len(columns) or len(columns) == real.shape[1]:
            return [real]
        return [real, real[:, int(columns[0]) : int(columns[-1]) + 1]]


def _is_of_pairs(tensor: torch.Tensor) -> bool:
    """True if it is the matrix of a graph: square, and symmetric but for a scale of its rows."""
    if tensor.dim() != 2 or tensor.shape[0] != tensor.shape[1]:
        return False
    if tensor.layout != torch.strided:
        return True
    is_scaled = tensor.is_floating_point() and bool((tensor == 0).any())  # not integers
    edges = tensor != 0 if is_scaled else tensor
    return torch.equal(edges, edges.t()) and not bool((edges == edges[0, 0]).all())
