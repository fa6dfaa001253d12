"""Counts, extremes and sums of a chunk of raw bits, in ATen operations on its device.

A chunk is (segments, components): one record for each segment, no value ever comes to the host.
What is padding in a segment is zero bits, counted as zeros here and taken off by the caller, and
left out of the extremes by ``padding``, a mask.
"""

from __future__ import annotations

import functools
from typing import Optional

import torch

from .constants import constant
from .formats import FORMATS, Format

#: Components summed side by side before anything is widened: 128 words of eight flags each, so
#: that no byte passes 255.
GROUP = 1024

#: Sums of float64 are taken twice where a partial sum may overflow: 2^64 components fit below it.
_DOWN = 2.0**-64


def padded_length(components: int) -> int:
    """The next length that :func:`count` takes."""
    unit = 8 if components <= GROUP else GROUP
    return -(-components // unit) * unit


def count(
    chunk: torch.Tensor, form: Format, first: int, stop: int, out: Optional[torch.Tensor] = None
) -> torch.Tensor:
    """int64 (stop - first, segments): value cells [first, stop). The first eight are counts, the
    others come out as zero.

    One comparison gives a byte of 0 or 1 for each component and boundary. Eight of them are one
    64-bit word, and sums of up to 255 words add the bytes side by side.
    """
    bounds, weights = _tables(chunk.device, form.info.name)
    segments = chunk.shape[0]
    words = chunk.ge(bounds).view(torch.int64)
    if words.shape[-1] > GROUP // 8:
        words = words.view(len(form.boundaries), segments, -1, GROUP // 8)
    else:
        words = words.unsqueeze(2)
    flags = words.sum(-1).view(torch.uint8)
    del words
    if flags.shape[-1] > GROUP // 2:  # widened by itself where that is less than weighing it all
        flags = flags.sum(-1, keepdim=True)
    weighted = weights[first:stop] * flags
    return weighted.sum((1, 3)) if out is None else torch.sum(weighted, (1, 3), out=out)


@functools.cache
def _tables(device: torch.device, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Boundaries (k, 1, 1) in the bits' dtype, weights int64 (value cells, k, 1, 1)."""
    form = FORMATS[getattr(torch, name)]
    bounds = constant(form.boundaries, form.bits, device).view(-1, 1, 1)
    return bounds, constant(form.weights, torch.int64, device).view(len(form.weights), -1, 1, 1)


def nonfinite_mask(chunk: torch.Tensor, form: Format) -> torch.Tensor:
    """bool, the shape of ``chunk``: NaN or infinite, by the bits."""
    return chunk.bitwise_and(-1 - form.lowest).gt(form.largest)


def chunk_extremes(
    chunk: torch.Tensor, form: Format, left_out: Optional[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(segments,) smallest and largest where not ``left_out``: float64, or the bits of an integer.

    uint64 comes with its highest bit turned over, which makes its order that of int64.
    """
    values = _values(chunk, form)
    low: float
    high: float
    if form.is_float:
        low, high = float("inf"), -float("inf")
    elif values.dtype == torch.int64:
        low, high = (1 << 63) - 1, -(1 << 63)
    else:
        limits = torch.iinfo(values.dtype)
        low, high = limits.max, limits.min
    if left_out is None:
        return values.amin(-1), values.amax(-1)
    least = constant(low, values.dtype, chunk.device)
    greatest = constant(high, values.dtype, chunk.device)
    smallest = torch.where(left_out, least, values).amin(-1)
    return smallest, torch.where(left_out, greatest, values).amax(-1)


def sums(chunk: torch.Tensor, form: Format, left_out: Optional[torch.Tensor]) -> torch.Tensor:
    """float64 (3, segments): sum, abs_sum and sum_sq; a fourth row for float64, see
    :func:`finite_sum`.
    """
    is_wide = form.is_float and form.info.component_bytes == 8
    values = torch.empty(
        (4 if is_wide else 3, *chunk.shape), dtype=torch.float64, device=chunk.device
    )
    x = values[0]
    if form.info.name == "uint64":
        x.copy_(chunk)
        x.add_(chunk.lt(0), alpha=2.0**64)
    else:
        x.copy_(_values(chunk, form))
        if left_out is not None and form.is_float:
            x.masked_fill_(left_out, 0)
    torch.abs(x, out=values[1])
    torch.mul(x, x, out=values[2])
    if is_wide:
        torch.mul(x, _DOWN, out=values[3])
    return values.sum(-1)


def finite_sum(totals: torch.Tensor) -> torch.Tensor:
    """float64 (3, segments) of the four rows of float64 input.

    Partial sums that overflow to both signs would make a NaN of a sum that is finite; the fourth
    row, of scaled components, cannot overflow, and is exact enough wherever the first row did.
    """
    plain = totals[0]
    is_finite = plain.sub(plain).eq(0)
    plain.copy_(torch.where(is_finite, plain, totals[3] * (1 / _DOWN)))
    return totals[:3]


def _values(chunk: torch.Tensor, form: Format) -> torch.Tensor:
    """The components' values in a dtype that every device orders and converts."""
    info = form.info
    if form.is_float:
        values = chunk.view(form.dtype)
        return values.to(torch.float32) if info.component_bytes == 1 else values
    if info.name == "bool":
        return chunk.ne(0).view(torch.uint8)
    if info.name == "uint8":
        return chunk.view(torch.uint8)
    if info.name == "uint16":
        return chunk.to(torch.int32).bitwise_and_(0xFFFF)
    if info.name == "uint32":
        return chunk.to(torch.int64).bitwise_and_(0xFFFFFFFF)
    if info.name == "uint64":
        return chunk.bitwise_xor(form.lowest)
    return chunk
