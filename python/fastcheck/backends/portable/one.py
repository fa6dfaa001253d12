"""Reads one tensor of any size into one record, in chunks within a bound on temporary memory."""

from __future__ import annotations

from typing import Optional

import torch

from fastcheck.record.format import Depth

from . import checksum as sum64
from . import values
from .constants import constant, counting
from .formats import TILE, VALUE_CELLS, Format
from .traversal import Traversal

#: The most that the temporaries of one call take on the device at any moment.
TEMPORARY_BYTES = 16 * 1024 * 1024


def usable(bound: int) -> int:
    """The part of ``bound`` that is planned for: allocators round sizes up, by up to a quarter."""
    return bound * 13 // 16


def count_bytes(form: Format) -> int:
    """Temporary bytes per component of counting, beside the bits themselves."""
    return len(form.boundaries) + 1


def sum_bytes(form: Format) -> int:
    """Temporary bytes per component of extremes and sums: three or four float64, masks, and values
    in a wider dtype.
    """
    wide = form.is_float and form.info.component_bytes == 8
    is_converted = form.info.kind == "u8" or form.info.component_bytes == 1
    return (32 if wide else 24) + 2 + (8 if is_converted else 0)


def checksum_bytes(form: Format) -> int:
    """Temporary bytes per component of the checksum: a state of both halves is an eighth of the
    bits, and four are held at once; the mask of existing words is a quarter.
    """
    return form.info.component_bytes


def _capacity(cost: int, bound: int) -> int:
    """Components of a chunk, whole tiles."""
    return max(1, usable(bound) // (cost * TILE)) * TILE


def write_values(x: Traversal, cells: torch.Tensor, numel: int, depth: int, bound: int) -> None:
    """The value fields of ``x`` into ``cells``, int64 (>= 14,), a record's own memory.

    Dense memory is passed over once for each of counts, sums and checksum, in chunks as long as
    the temporaries of each allow: launches cost more here than reading again.
    """
    form, out = x.format, cells[:VALUE_CELLS]
    if x.components == 0:
        empty = form.empty_cells(depth >= Depth.STATS)
        if depth >= Depth.FULL:
            empty[13] = sum64.empty()
        out.copy_(constant(tuple(empty), torch.int64, cells.device))
        return
    _write_counts(x, out, numel, bound)
    if depth >= Depth.STATS:
        _write_sums(x, out, bound)
    if depth >= Depth.FULL:
        _write_checksum(x, out, bound)


def _write_counts(x: Traversal, cells: torch.Tensor, numel: int, bound: int) -> None:
    form = x.format
    size = _capacity(form.info.component_bytes + count_bytes(form), bound)
    is_first, padding = True, 0
    for chunk, padded in x.chunks(size):
        row = padded.view(1, -1)
        if is_first:
            values.count(row, form, 0, VALUE_CELLS, out=cells.view(-1, 1))
            is_first = False
        else:
            cells.add_(values.count(row, form, 0, VALUE_CELLS).view(-1))
        padding += padded.numel() - chunk.numel()
        del chunk, padded, row
    if padding:
        # Zero bits were counted as components and as zeros: cells 0 and 4.
        cells[0:8:4].sub_(padding)
    if form.info.components == 2:
        cells[:1].fill_(numel)


def _write_sums(x: Traversal, cells: torch.Tensor, bound: int) -> None:
    form = x.format
    size = _capacity(form.info.component_bytes + sum_bytes(form), bound)
    so_far: Optional[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = None
    for chunk, _ in x.chunks(size, unit=0):
        row = chunk.view(1, -1)
        left_out = values.nonfinite_mask(row, form) if form.is_float else None
        low, high = values.chunk_extremes(row, form, left_out)
        sums = values.sums(row, form, left_out)
        if so_far is None:
            so_far = low, high, sums
        else:
            torch.minimum(so_far[0], low, out=so_far[0])
            torch.maximum(so_far[1], high, out=so_far[1])
            so_far[2].add_(sums)
        del chunk, _, row, left_out
    assert so_far is not None
    low, high, sums = so_far
    if sums.shape[0] == 4:
        sums = values.finite_sum(sums)
    numbers = cells.view(torch.float64)
    ends = numbers if form.is_float else cells
    ends[8:9].copy_(low)
    ends[9:10].copy_(high)
    numbers[10:13].copy_(sums[:, 0])
    if form.is_float:
        numbers[8:13].add_(0.0)  # a zero is stored as +0.0
    elif form.info.name == "uint64":
        cells[8:10].bitwise_xor_(form.lowest)


def _write_checksum(x: Traversal, cells: torch.Tensor, bound: int) -> None:
    form = x.format
    component_bytes = form.info.component_bytes
    device = cells.device
    width = sum64.row_words(component_bytes)
    tile_words = 64 * width
    # A power of two: the upper half of a chain's number is the same for the whole of a chunk.
    most = _capacity(2 * component_bytes + checksum_bytes(form), bound)
    size = 1 << (most.bit_length() - 1)
    missing = -(-x.components * component_bytes // 4)  # the words that follow
    totals: Optional[torch.Tensor] = None
    number = 0
    for _, padded in x.chunks(size, TILE):
        words = sum64.words_of(padded, component_bytes)
        tiles = words.shape[0]
        numbers = counting(tiles * 4 * width, torch.int32, device).view(tiles, 4, width)
        state = sum64.start(numbers, number)
        there = None
        if missing < tiles * tile_words:
            held = missing - (tiles - 1) * tile_words
            there = counting(tile_words, torch.int32, device).lt(held).view(1, 4, 16, width)
        rows = sum64.rows_of(missing, width)
        sums = sum64.chain_sums(words, state, there, rows).sum(-1)
        totals = sums if totals is None else totals.add_(sums)
        number += tiles * 4 * width
        missing -= tiles * tile_words
        del _, padded, words, state
    assert totals is not None
    lengths = sum64.length_terms(x.components * component_bytes)
    totals.add_(constant(lengths, torch.int64, device))
    cells[13:14].copy_(sum64.join(totals))
