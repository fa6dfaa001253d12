"""Reads many tensors into as many records, in a few launches for each dtype.

The raw bits of tensors of one dtype are laid end to end, each filled up to whole segments; a chunk
of segments is read at once, and what each segment gives is added to the record of its tensor. The
arrangement depends on sizes alone: it is worked out once for a list, and kept on the device.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Optional

import torch

from fastcheck.record.format import Depth

from . import checksum as sum64
from . import values
from .constants import counting, stream_key, upload, zeros
from .formats import FORMATS, TILE, VALUE_CELLS, Format
from .one import checksum_bytes, count_bytes, sum_bytes, usable, write_values
from .traversal import Traversal

#: Arrangements kept. A training run has an arrangement for each optimizer, and for each kind of
#: list.
_KEPT = 64


@dataclass(frozen=True)
class _Batch:
    """Tensors of one dtype that are read together, in segments of ``width`` components.

    On the device, one entry for each segment: ``index``, the row of its tensor; ``held``, how many
    components are not padding; ``held_words`` likewise; ``first``, the number of its first chain.
    None where nothing is padded, or the depth does not need it. ``owners``: the row of each member;
    ``spread``: (members, longest), which segments are its own, the first again and again behind the
    last. None where a member is one segment.
    """

    form: Format
    members: tuple[int, ...]
    padding: tuple[int, ...]  # components behind each member
    width: int
    index: torch.Tensor
    held: Optional[torch.Tensor]
    held_words: Optional[torch.Tensor]
    first: torch.Tensor
    owners: torch.Tensor
    spread: Optional[torch.Tensor]
    rows: int  # of the longest chain
    counted: int  # segments at a time
    summed: int


@dataclass(frozen=True)
class _ListPlan:
    """``alone``: rows that are read one by one. ``template``: int64 (n, 14), what is known from the
    sizes. ``lengths``: int64 (2, n), the lengths' part of the checksums of the batches.
    """

    alone: tuple[int, ...]
    batches: tuple[_Batch, ...]
    template: torch.Tensor
    lengths: torch.Tensor


def write_list_values(
    xs: Sequence[Traversal], numels: Sequence[int], rows: torch.Tensor, depth: int, bound: int
) -> None:
    """The value fields of each of ``xs`` into int64 (n, >= 14) ``rows``."""
    shapes = tuple((x.format.info.name, x.components, numel) for x, numel in zip(xs, numels))
    plan = _plan(rows.device, stream_key(rows.device), depth, bound, shapes)
    cells = rows[:, :VALUE_CELLS]
    cells.copy_(plan.template)
    lengths = plan.lengths.clone() if plan.batches and depth >= Depth.FULL else plan.lengths
    for batch in plan.batches:
        _read(batch, xs, cells, lengths, depth)
    if plan.batches and depth >= Depth.FULL:
        cells[:, 13].add_(sum64.join(lengths))
    for position in plan.alone:
        write_values(xs[position], rows[position], numels[position], depth, bound)


def _read(
    batch: _Batch, xs: Sequence[Traversal], cells: torch.Tensor, lengths: torch.Tensor, depth: int
) -> None:
    fill = zeros(batch.width, batch.form.bits, cells.device)
    pieces = []
    for member, padding in zip(batch.members, batch.padding):
        pieces.append(xs[member].whole())
        if padding:
            pieces.append(fill[:padding])
    chunk = (torch.cat(pieces) if len(pieces) > 1 else pieces[0]).view(-1, batch.width)
    del pieces
    segments = chunk.shape[0]
    for start in range(0, segments, batch.counted):
        part = slice(start, start + batch.counted)
        counts = values.count(chunk[part], batch.form, 1, 8)
        cells[:, 1:8].index_add_(0, batch.index[part], counts.t())
    if depth >= Depth.STATS:
        totals = torch.zeros((4, cells.shape[0]), dtype=torch.float64, device=cells.device)
        ends = [
            _add_sums(batch, chunk, slice(start, start + batch.summed), totals)
            for start in range(0, segments, batch.summed)
        ]
        _put_extremes(batch, ends, cells)
        if batch.form.is_float and batch.form.info.component_bytes == 8:
            values.finite_sum(totals)
        cells.view(torch.float64)[:, 10:13].add_(totals[:3].t())
    if depth >= Depth.FULL:
        lengths.index_add_(1, batch.index, _chain_sums(batch, chunk))


def _add_sums(
    batch: _Batch, chunk: torch.Tensor, part: slice, totals: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest and the largest of each segment."""
    form, chunk, index = batch.form, chunk[part], batch.index[part]
    filled = chunk
    if batch.held is not None:
        # Padding stands for a component that is there. An infinity in its place would be an
        # overflow to a device that saturates.
        padding = counting(batch.width, torch.int32, chunk.device).ge(batch.held[part])
        filled = torch.where(padding, chunk[:, :1], chunk)
        del padding
    left_out = values.nonfinite_mask(filled, form) if form.is_float else None
    sums = values.sums(chunk, form, left_out)
    totals[: sums.shape[0]].index_add_(1, index, sums)
    del sums
    return values.chunk_extremes(filled, form, left_out)


def _put_extremes(
    batch: _Batch, ends: Sequence[tuple[torch.Tensor, torch.Tensor]], cells: torch.Tensor
) -> None:
    # Not by scatter_reduce_(): torch_npu computes that on the host, and waits.
    numbers = cells.view(torch.float64) if batch.form.is_float else cells
    wide = torch.empty((len(batch.members), 2), dtype=numbers.dtype, device=cells.device)
    for column, parts in enumerate(zip(*ends)):
        end = torch.cat(parts) if len(parts) > 1 else parts[0]
        if batch.spread is not None:
            own = end.index_select(0, batch.spread.view(-1)).view(batch.spread.shape)
            end = own.amax(-1) if column else own.amin(-1)
        wide[:, column].copy_(end)  # torch_npu's to(float64) gives float32
    # The cells begin as +0.0 and 0, which leaves a zero of either sign as +0.0.
    numbers[:, 8:10].index_add_(0, batch.owners, wide)


def _chain_sums(batch: _Batch, chunk: torch.Tensor) -> torch.Tensor:
    size = batch.form.info.component_bytes
    row = sum64.row_words(size)
    words = sum64.words_of(chunk.view(-1), size)
    inside = counting(4 * row, torch.int32, chunk.device).view(4, row)
    there = None
    if batch.held_words is not None:
        places = counting(64 * row, torch.int32, chunk.device).view(4, 16, row)
        there = places.lt(batch.held_words.view(-1, 1, 1, 1))
    state = sum64.start(batch.first.view(-1, 1, 1).add(inside), 0)
    return sum64.chain_sums(words, state, there, batch.rows)


# ---- The arrangement -----------------------------------------------------------------------------


@functools.lru_cache(maxsize=_KEPT)
def _plan(
    device: torch.device,
    stream: int,  # what is copied without waiting may be read on this stream only
    depth: int,
    bound: int,
    shapes: tuple[tuple[str, int, int], ...],
) -> _ListPlan:
    width = TILE if depth >= Depth.FULL else values.GROUP
    groups: dict[str, list[int]] = {}
    alone: list[int] = []
    for position, (name, components, _) in enumerate(shapes):
        # uint64 would need further operators to be ordered, which a list does not run.
        if components > _limit(name, depth, bound, width) or (name == "uint64" and components):
            alone.append(position)
        elif components:
            groups.setdefault(name, []).append(position)
    members = [
        part
        for name, positions in groups.items()
        for part in _parts(positions, shapes, _limit(name, depth, bound, width), width)
    ]
    template = torch.tensor(
        [_known(shape, depth, width) for shape in shapes], dtype=torch.int64
    ).view(-1, VALUE_CELLS)
    lengths = torch.zeros((2, len(shapes)), dtype=torch.int64)
    for position in (p for part in members for p in part):
        form = _form(shapes[position][0])
        size = shapes[position][1] * form.info.component_bytes
        lengths[:, position] = torch.tensor(sum64.length_terms(size))
    tables = [_segments(part, shapes, width) for part in members]
    spreads = [_spread(part, table[0]) for part, table in zip(members, tables)]
    known = (template, lengths, *tables, *spreads)
    sent = iter(_sent(known, device))
    on_device = next(sent), next(sent), [next(sent) for _ in tables], list(sent)
    batches = [
        _batch(part, shapes, width, table, own, spread, depth, bound)
        for part, table, own, spread in zip(members, tables, *on_device[2:])
    ]
    return _ListPlan(tuple(alone), tuple(batches), *on_device[:2])


def _sent(tables: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """The int64 ``tables`` on ``device``, in one copy."""
    sent = upload(torch.cat([table.flatten() for table in tables]), device)
    parts = torch.split(sent, [table.numel() for table in tables])
    return [part.view(table.shape) for part, table in zip(parts, tables)]


def _form(name: str) -> Format:
    return FORMATS[getattr(torch, name)]


def _limit(name: str, depth: int, bound: int, width: int) -> int:
    """Components of a batch, padding included.

    The bits end to end, and once more where tensors don't lie flat; beside them the temporaries of
    what the depth reads last. What it reads before that goes over the batch in several parts.
    """
    form = _form(name)
    size = 2 * form.info.component_bytes
    cost = {
        Depth.HEALTH: size + count_bytes(form),
        Depth.STATS: size + sum_bytes(form),
        Depth.FULL: size + checksum_bytes(form),
    }[Depth(depth)]
    return max(1, usable(bound) // (cost * width)) * width


def _parts(
    positions: Sequence[int], shapes: Sequence[tuple[str, int, int]], limit: int, width: int
) -> list[tuple[int, ...]]:
    """``positions`` in order, cut so that none has more than ``limit`` components."""
    parts: list[list[int]] = []
    used = limit
    for position in positions:
        taken = -(-shapes[position][1] // width) * width
        if used + taken > limit:
            parts.append([])
            used = 0
        parts[-1].append(position)
        used += taken
    return [tuple(part) for part in parts]


def _known(shape: tuple[str, int, int], depth: int, width: int) -> list[int]:
    """The value cells before anything is read: numel, and what padding adds."""
    name, components, numel = shape
    form = _form(name)
    cells = form.empty_cells(depth >= Depth.STATS)
    if components == 0:
        cells[13] = sum64.empty() if depth >= Depth.FULL else 0
        return cells
    cells[0] = numel
    cells[4] = -(-components % width)
    cells[8:10] = [0, 0]
    return cells


def _segments(
    part: Sequence[int], shapes: Sequence[tuple[str, int, int]], width: int
) -> torch.Tensor:
    """int64 (4, segments): row, components held, words held, number of the first chain."""
    rows = []
    for position in part:
        name, components, _ = shapes[position]
        size = _form(name).info.component_bytes
        for number, start in enumerate(range(0, components, width)):
            held = min(width, components - start)
            rows.append((position, held, -(-held * size // 4), number * 4 * sum64.row_words(size)))
    return torch.tensor(rows, dtype=torch.int64).t()


def _spread(part: Sequence[int], rows: torch.Tensor) -> torch.Tensor:
    """int64 (members, longest + 1): the row of each member, and its segments."""
    of_row: dict[int, list[int]] = {position: [] for position in part}
    for segment, row in enumerate(rows.tolist()):
        of_row[row].append(segment)
    longest = max(map(len, of_row.values()))
    return torch.tensor(
        [[row, *own, *own[:1] * (longest - len(own))] for row, own in of_row.items()]
    )


def _batch(
    part: tuple[int, ...],
    shapes: Sequence[tuple[str, int, int]],
    width: int,
    host: torch.Tensor,
    table: torch.Tensor,
    spread: torch.Tensor,
    depth: int,
    bound: int,
) -> _Batch:
    form = _form(shapes[part[0]][0])
    components = host.shape[1] * width
    left = usable(bound) - components * form.info.component_bytes
    padding = tuple(-shapes[position][1] % width for position in part)
    narrow = table[1:].to(torch.int32)  # the dtype of what they are compared with and added to
    has_words_missing = bool(host[2].min() < width * form.info.component_bytes // 4)
    return _Batch(
        form=form,
        members=part,
        padding=padding,
        width=width,
        index=table[0].contiguous(),
        held=narrow[0].view(-1, 1) if any(padding) and depth >= Depth.STATS else None,
        held_words=narrow[1] if has_words_missing and depth >= Depth.FULL else None,
        first=narrow[2],
        owners=spread[:, 0].contiguous(),
        spread=spread[:, 1:].contiguous() if spread.shape[1] > 2 else None,
        rows=sum64.rows_of(int(host[2].max()), sum64.row_words(form.info.component_bytes)),
        counted=max(1, left // (count_bytes(form) * width)),
        # The bits once more, with their padding filled.
        summed=max(1, left // ((sum_bytes(form) + form.info.component_bytes) * width)),
    )
