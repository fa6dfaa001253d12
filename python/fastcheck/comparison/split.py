"""Another split of the batch: into parts of a step (gradient accumulation), or over ranks. What the
optimizer reads, and the loss of the whole step, have to agree; outputs of modules can't. And a
module that is called for each part of what it reads: its calls are taken together.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Optional

import numpy as np
import torch

from fastcheck.comparison.align import uneven_calls
from fastcheck.comparison.block import Block, Extra, Kind, Phase, Source
from fastcheck.comparison.names import Name, NameTable, Renaming
from fastcheck.record.format import COUNTS, DTYPES, RECORD_DTYPE, Depth
from fastcheck.statistics.thresholds import BY_COARSENESS, COARSENESS

#: Roles whose tensors do not depend on how a batch is split.
_WHOLE = ("param", "param_grad", "grad_norm", "optimizer_state", "learning_rate")
#: The roles of tensors that pass between modules.
PASSED = ("input", "output", "grad_input", "grad_output")
_LOSS = Name("", "forward", "loss", "loss of the step, of all its parts")


@dataclass(frozen=True)
class Split:
    """``ranks``: those of actual and of reference. ``distinct``: whether ranks of a side that have
    the same part of the batch count once. ``text``: how the two are split.
    """

    ranks: tuple[Sequence[int], Sequence[int]]
    distinct: bool
    text: str


def find_split(
    actual: Source, reference: Source, starts: tuple[int, int], renaming: Renaming
) -> Optional[Split]:
    """The split that the first step shows; None where the inputs come in as many parts, or have
    other sizes.
    """
    kinds = (Kind.LOG, Kind.DUMP)
    if actual.kind not in kinds or reference.kind not in kinds:
        return None
    names = NameTable()
    ranks, sides = [], []
    for source, start, own in zip((actual, reference), starts, (renaming, renaming.of_reference())):
        present = [rank for step, rank in source.places() if step == start]
        blocks = [source.block(start, rank, names, own, True) for rank in present]
        ranks.append(present)
        sides.append(blocks)
    for distinct in (False, True):
        inputs = [_inputs(blocks, distinct) for blocks in sides]
        sizes = [{name: int(r["numel"].sum()) for name, r in side.items()} for side in inputs]
        if sizes[0] and sizes[0] == sizes[1]:
            break
    else:
        return None
    for name in sizes[0]:
        parts = [len(side[name]) for side in inputs]
        if parts[0] != parts[1]:
            texts = [
                _sizes_text(side[name]["numel"])
                + (f" on {len(own):,} ranks" if len(own) > 1 else "")
                for side, own in zip(inputs, ranks)
            ]
            text = f"{texts[0]} in actual and {texts[1]} in reference"
            return Split((ranks[0], ranks[1]), distinct, text)
    return None


def _sizes_text(sizes: np.ndarray) -> str:
    low, high = int(sizes.min()), int(sizes.max())
    span = f"{low:,}" if low == high else f"{low:,} to {high:,}"
    return f"{len(sizes):,} of {span} elements"


def _inputs(blocks: Sequence[Block], distinct: bool) -> dict[int, np.ndarray]:
    """Records of the batch, by number of the name. ``distinct``: of ranks that have the same, as in
    tensor parallel, the first alone.
    """
    records = defaultdict(list)
    known = []
    for block in blocks:
        given = block.phases == Phase.BATCHES
        contents = block.records["checksum"][given].tolist()
        if distinct and contents in known:
            continue
        known.append(contents)
        for number in np.unique(block.names[given]).tolist():
            records[number].append(block.records[given & (block.names == number)])
    return {number: np.concatenate(parts) for number, parts in records.items()}


def wholes_of(
    split: Split, blocks: Sequence[Block], losses: Sequence[Optional[float]], names: NameTable
) -> list[Block]:
    """A block of each rank, of what does not depend on the split; the first has the batch and the
    loss of all ranks. ``losses``: of each.
    """
    first = blocks[0]
    added = []
    for number, records in _inputs(blocks, split.distinct).items():
        name = names[number]._replace(label=f"{names[number].label}, all parts")
        added.append((names.number(name), Phase.BATCHES, merged(records), Extra()))
    # A pipeline stage may have none.
    with_loss = [(b.phases == Phase.LOSS).any() for b in blocks]
    known = [loss for loss in losses if loss is not None]
    if known and len(known) == sum(with_loss):
        coarsest = int(COARSENESS[first.records["dtype"]].max())
        record = _number(sum(known) / len(known), coarsest, first.records[0])
        added.append((names.number(_LOSS), Phase.LOSS, record, Extra()))
    wholes = [only(block, _whole_places(block, names)) for block in blocks]
    wholes[0] = wholes[0].after(Block.of(first.step, first.rank, added))
    return wholes


def with_strays(wholes: Sequence[Block], names: NameTable) -> tuple[Block, dict[str, int]]:
    """The block of the first rank, with the parameters of other ranks where these differ from its
    own, which replicas may not; and the names of these, each with its rank.
    """
    first, *others = wholes
    records = first.records.copy()
    strays: dict[str, int] = {}
    for other in others:
        for number in np.unique(other.names).tolist():
            own, its = (np.flatnonzero(block.names == number) for block in (first, other))
            for mine, theirs in zip(own, its) if names[number].role == "param" else ():
                record = other.records[theirs]
                is_known = first.records["depth"][mine] == record["depth"] == Depth.FULL
                if is_known and first.records["checksum"][mine] != record["checksum"]:
                    records[mine] = record
                    strays.setdefault(str(names[number]), other.rank)
    return Block(first.step, first.rank, first.names, first.phases, records), strays


def with_losses_of_steps(
    sides: tuple[Block, Block], losses: Sequence[Optional[float]], names: NameTable
) -> tuple[Block, Block]:
    """Both blocks, with the loss of the step where backward() was called another number of times:
    for each part of a loss, and for their sum.
    """
    if len({int((block.phases == Phase.LOSS).sum()) for block in sides}) == 1 or None in losses:
        return sides
    is_loss = [has_role(block, "loss", names) for block in sides]
    if 0 in (counts := [int(mask.sum()) for mask in is_loss]) or counts[0] == counts[1]:
        return sides
    blocks = []
    for block, loss, which in zip(sides, losses, is_loss):
        kept = np.flatnonzero(~which | (np.arange(len(block)) == np.argmax(which)))
        made = only(block, kept)
        place = int(np.flatnonzero(which[kept])[0])
        made.names[place] = names.number(_LOSS)
        code = int(COARSENESS[block.records["dtype"][which]].max())
        made.records[place] = _number(float(loss or 0.0), code, block.records[0])
        blocks.append(made)
    return blocks[0], blocks[1]


def with_calls_together(sides: tuple[Block, Block], names: NameTable) -> tuple[Block, Block, int]:
    """Both blocks, with what the calls of a module have read or made as one tensor where it is as
    many elements on both sides, in another number of calls; and how many tensors these are.
    """
    groups: tuple[list[np.ndarray], list[np.ndarray]] = [], []
    extras: tuple[dict[int, Extra], dict[int, Extra]] = {}, {}
    found = 0
    for number, *places in uneven_calls(*sides):
        name = names[number]
        sizes = {int(b.records["numel"][own].sum()) for b, own in zip(sides, places)}
        if name.op or name.role not in PASSED or len(sizes) > 1:
            continue
        records = [block.records[own] for block, own in zip(sides, places)]
        both = np.concatenate(records)
        is_given = sides[0].phases[places[0][0]] == Phase.BATCHES
        if is_given or both["depth"].min() < Depth.STATS or len(set(both["dtype"].tolist())) > 1:
            continue
        found += 1
        for side, other in ((0, 1), (1, 0)):
            if len(places[side]) > 1:
                groups[side].append(places[side])
                parts = [sides[side].extra(at) for at in places[side].tolist()]
                whole = sides[other].extra(int(places[other][0])).shape
                extras[side][int(places[side][-1])] = _in_one(parts, whole or ())
    ours, theirs = (_together(*side) for side in zip(sides, groups, extras))
    return ours, theirs, found


def _together(block: Block, groups: Sequence[np.ndarray], extras: Mapping[int, Extra]) -> Block:
    """The block with each of these groups of places as one, at its last."""
    if not groups:
        return block
    is_kept, records = np.ones(len(block), bool), block.records.copy()
    for places in groups:
        is_kept[places[:-1]] = False
        records[places[-1]] = merged(block.records[places])
    held = block.extras and [extras.get(at, extra) for at, extra in enumerate(block.extras)]
    return only(replace(block, records=records, extras=held), np.flatnonzero(is_kept))


def _in_one(parts: Sequence[Extra], whole: tuple[int, ...]) -> Extra:
    """The parts along the dimension in which they make a shape."""
    loads = [part.load for part in parts if part.load is not None]

    def joined(dim: int) -> torch.Tensor:
        return torch.cat([load() for load in loads], dim)

    shapes = [part.shape for part in parts if part.shape is not None]
    for dim in range(len(whole) if len(loads) == len(shapes) == len(parts) else 0):
        rest = {(*shape[:dim], *shape[dim + 1 :]) for shape in (whole, *shapes)}
        if len(rest) == 1 and sum(shape[dim] for shape in shapes) == whole[dim]:
            return Extra(whole, load=functools.partial(joined, dim))
    return Extra()


def without_role(block: Block, role: str, names: NameTable) -> Block:
    left_out = has_role(block, role, names)
    return only(block, np.flatnonzero(~left_out)) if left_out.any() else block


def has_role(block: Block, role: str, names: NameTable) -> np.ndarray:
    """A boolean array of what stands in the block: which tensors are of a role."""
    numbers = [n for n in np.unique(block.names).tolist() if names[n].role == role]
    return np.isin(block.names, numbers)


def only(block: Block, kept: np.ndarray) -> Block:
    """The block with what stands at these places alone."""
    extras = None if block.extras is None else [block.extras[i] for i in kept.tolist()]
    arrays = block.names[kept], block.phases[kept], block.records[kept]
    return Block(block.step, block.rank, *arrays, extras)


def _whole_places(block: Block, names: NameTable) -> np.ndarray:
    """The places of what a split leaves as it is: of a gradient the last that was read, which is
    the sum of all parts.
    """
    roles = {n: names[n].role for n in np.unique(block.names).tolist() if not names[n].op}
    wanted = [number for number, role in roles.items() if role in _WHOLE]
    sums = [number for number, role in roles.items() if role == "param_grad"]
    kept = np.isin(block.names, wanted)
    last = {number: place for place, number in enumerate(block.names.tolist())}
    is_last = np.zeros(len(block), bool)
    is_last[list(last.values())] = True
    return np.flatnonzero(kept & (is_last | ~np.isin(block.names, sums)))


def merged(records: np.ndarray) -> np.void:
    """The record of the parts taken together, without a checksum."""
    whole = records[:1].copy()
    for field in (*COUNTS, "sum", "abs_sum", "sum_sq"):
        whole[field] = records[field].sum()
    kind = DTYPES[int(records["dtype"][0])].kind
    whole["min"].view(kind)[0] = records["min"].copy().view(kind).min()
    whole["max"].view(kind)[0] = records["max"].copy().view(kind).max()
    whole["depth"], whole["checksum"] = min(Depth.STATS, records["depth"].min()), 0
    return whole[0]


def _number(value: float, coarseness: int, like: np.void) -> np.void:
    """A record of one number that carries the rounding of a dtype."""
    record = np.zeros(1, RECORD_DTYPE)
    record["version"], record["depth"], record["numel"] = like["version"], Depth.STATS, 1
    record["dtype"] = BY_COARSENESS[coarseness]
    record["nan_count"] = value != value
    for field in ("sum", "min", "max"):
        record[field] = value
    record["abs_sum"], record["sum_sq"] = abs(value), value * value
    return record[0]
