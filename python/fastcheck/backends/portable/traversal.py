"""A tensor's raw bits in traversal order (docs/record-format.md, section 3), chunk by chunk.

Dense memory is read in place, as one flat view of integers. Everything else is copied row by row,
never more than a chunk at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Optional

import torch

from fastcheck.utils.torch.readable import is_dense

from .constants import constant, zeros
from .formats import FORMATS, LOGICAL, STORAGE, TILE, Format
from .values import padded_length


@dataclass(frozen=True)
class Traversal:
    """``bits``: signed integers, one per component, contiguous and flat when ``is_flat``, else of
    any strides, to be read row-major. ``flips``: sign bits to turn over in (real, imaginary) parts.
    """

    bits: torch.Tensor
    format: Format
    is_flat: bool
    flips: Optional[tuple[int, int]]

    @property
    def components(self) -> int:
        return self.bits.numel()

    def chunks(self, size: int, unit: int = 1) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yields pairs of flat tensors, which may be views: ``size`` components (the last chunk is
        shorter), and the same followed by zero bits, up to the length that :func:`padded_length`
        and ``unit`` give. Without zero bits where ``unit`` is 0.
        """
        total = self.components
        for start in range(0, total, size):
            stop = min(total, start + size)
            count = stop - start
            wanted = -(-padded_length(count) // unit) * unit if unit else count
            if self.is_flat and self.flips is None:
                # A whole tensor needs no slice of itself.
                chunk = self.bits if count == total else self.bits[start:stop]
                yield chunk, pad(chunk, wanted)
                del chunk
                continue
            new = torch.empty if wanted == count else torch.zeros
            padded = new(wanted, dtype=self.bits.dtype, device=self.bits.device)
            chunk = padded[:count]
            _copy_range(self.bits, start, stop, chunk)
            if self.flips is not None:
                self._flip(chunk)
            yield chunk, padded
            del chunk, padded  # before the next is allocated

    def whole(self) -> torch.Tensor:
        """All of it, flat. May be a view."""
        if self.is_flat and self.flips is None:
            return self.bits
        out = torch.empty(self.components, dtype=self.bits.dtype, device=self.bits.device)
        _copy_range(self.bits, 0, self.components, out)
        if self.flips is not None:
            self._flip(out)
        return out

    def _flip(self, chunk: torch.Tensor) -> None:
        assert self.flips is not None
        if self.format.info.components == 2:
            signs = constant(self.flips, chunk.dtype, chunk.device)
            chunk.view(-1, 2).bitwise_xor_(signs)
        else:
            chunk.bitwise_xor_(self.flips[0])


def pad(chunk: torch.Tensor, wanted: int) -> torch.Tensor:
    """``chunk`` followed by zero bits, ``wanted`` components in all."""
    missing = wanted - chunk.numel()
    if missing == 0:
        return chunk
    return torch.cat((chunk, zeros(TILE, chunk.dtype, chunk.device)[:missing]))


def order_of(tensor: torch.Tensor, logical: bool) -> int:
    """The rule by which ``tensor`` is read. Resolving a lazy view would make it dense."""
    if logical:
        return LOGICAL
    is_dense_storage = tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg()
    return STORAGE if is_dense_storage or is_dense(tensor) else LOGICAL


def dtype_and_order(tensor: torch.Tensor, logical: bool = False) -> tuple[int, int]:
    """The dtype code and the order of the record of ``tensor``. Host only."""
    return FORMATS[tensor.dtype].info.code, order_of(tensor, logical)


def traverse(tensor: torch.Tensor, logical: bool = False) -> Traversal:
    """The bits of a readable tensor, outside autograd. Moves no data."""
    form = FORMATS[tensor.dtype]
    order = order_of(tensor, logical)
    x = tensor.detach()
    flips = None
    if x.is_conj() or x.is_neg():
        # Resolving would copy the whole tensor: its memory is read as it is, the signs turned over.
        flips = (form.lowest if x.is_neg() else 0, form.lowest if x.is_neg() != x.is_conj() else 0)
        if order == STORAGE and not is_dense(x):
            x = _as_resolving_would_lay_it_out(x)
        if x.is_neg():
            x = torch._neg_view(x)
        if x.is_conj():
            x = x.conj()
    is_flat = x.is_contiguous() or (order == STORAGE and is_dense(x))
    if is_flat and x.dim() != 1:
        x = x.as_strided((x.numel(),), (1,))
    if form.info.components == 2:
        x = torch.view_as_real(x)
    bits = x.view(form.bits)
    return Traversal(bits.view(-1) if is_flat else bits, form, is_flat, flips)


def _as_resolving_would_lay_it_out(x: torch.Tensor) -> torch.Tensor:
    """``x`` permuted so that its row-major order is that of the dense copy torch would make."""
    strides = torch.empty_like(x, device="meta").stride()
    return x.permute(sorted(range(x.dim()), key=lambda axis: (-strides[axis], axis)))


def _copy_range(x: torch.Tensor, start: int, stop: int, out: torch.Tensor) -> None:
    """Elements [start, stop) of ``x`` in row-major order into the flat ``out``."""
    if stop - start == x.numel():
        out.view(x.shape).copy_(x)
        return
    row = x.numel() // x.shape[0]
    first, last = -(-start // row), stop // row  # the whole rows between
    if first > last:  # inside one row
        _copy_range(x[last], start - last * row, stop - last * row, out)
        return
    if start < first * row:
        head = first * row - start
        _copy_range(x[first - 1], row - head, row, out[:head])
        out = out[head:]
    if first < last:
        whole = (last - first) * row
        out[:whole].view(last - first, *x.shape[1:]).copy_(x[first:last])
        out = out[whole:]
    if stop > last * row:
        _copy_range(x[last], 0, stop - last * row, out)
