"""Another layout: what one side has in parts, on several ranks or in several modules, is put
together before it is compared: tensor parallel against whole, FSDP, pipeline stages, fused weights.

Records of parts add up to that of the whole: counts and extremes exactly, sums but for rounding.
The checksum of the whole is not that of its parts.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Optional

import numpy as np
import torch

from fastcheck.comparison.block import Block, Extra, Phase, Source
from fastcheck.comparison.names import VOCABULARY, Name, NameTable, Renaming
from fastcheck.comparison.nested_diff import by_name
from fastcheck.comparison.split import merged
from fastcheck.record.format import RECORD_DTYPE, Depth
from fastcheck.statistics.functions import stats

from .relation import group_counts

#: Read by each of the modules that are fused on the other side: the same tensor.
_READ = ("input", "grad_input")
_WEIGHTS = ("param", "")
#: Roles of tensors that each rank has of its own.
_OF_RANKS = ("skipped_update", "grad_norm")
#: The change of a sum by another order of adding up, relative to the sum of magnitudes.
_ROUNDING = 1e-4


@dataclass(frozen=True)
class Layout:
    """``ranks``: those of actual and of reference. ``renamings``: that of each rank, of both.
    ``stages``: the pipeline stage of each rank, where there are several.
    """

    ranks: tuple[Sequence[int], Sequence[int]]
    renamings: tuple[Mapping[int, Renaming], Mapping[int, Renaming]]
    stages: tuple[Mapping[int, int], Mapping[int, int]]
    #: Into how many groups the parts of fused tensors are divided, by module without its numbers.
    groups: dict[str, int] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The text of a note that says which parts are put together."""
        sides = zip(("actual", "reference"), self.ranks)
        spread = [f"ranks {list(ranks)} of {side}" for side, ranks in sides if len(ranks) > 1]
        return " and ".join(spread) or "the parts of fused modules"

    def settings(self, side: int, value: Any) -> Any:
        """The description of optimizers, with the parameters of all ranks by their names in the
        comparison.
        """
        own = self.renamings[side]
        described = value.get("optimizers") if isinstance(value, Mapping) else None
        if described is None:
            return value
        is_by_rank = isinstance(described, Mapping)
        parts = [
            by_name(described[f"rank {rank}"] if is_by_rank else described, renaming)
            for rank, renaming in own.items()
            if not is_by_rank or f"rank {rank}" in described
        ]
        for part in parts[1:]:
            _join(parts[0], part)
        return {"optimizers": parts[0]}


def _join(whole: Any, part: Any) -> None:
    """Adds to the groups of a rank the parameters of those of another."""
    for mine, other in zip(whole, part):
        for group, added in zip(mine.get("groups", ()), other.get("groups", ())):
            if isinstance(group.get("parameters"), dict):
                group["parameters"].update(added.get("parameters", {}))


def find_layout(
    actual: Source, reference: Source, starts: tuple[int, int], renamings: tuple[Renaming, Renaming]
) -> Optional[Layout]:
    """The layout that the first step shows; None where both sides hold the same parts under the
    same names.
    """
    sides = (actual, reference)
    ranks = [
        [rank for step, rank in source.places() if step == start]
        for source, start in zip(sides, starts)
    ]
    has_parts = any(renaming.has_parts for renaming in renamings)
    if not all(ranks) or (ranks[0] == ranks[1] == [0] and not has_parts):
        return None
    names = NameTable()
    blocks = [
        {rank: source.block(start, rank, names, renaming, True) for rank in own}
        for source, start, own, renaming in zip(sides, starts, ranks, renamings)
    ]
    lowest = [_sizes(side[min(side)], names, _WEIGHTS) for side in blocks]
    if not (has_parts and lowest[0] != lowest[1]) and not _is_spread(blocks, names):
        return None
    held = [{rank: _held(names, block) for rank, block in side.items()} for side in blocks]
    stages, firsts = zip(
        *(
            _stages(own, _most(other.values()), getattr(source, "coordinates", {}))
            for source, own, other in zip(sides, held, held[::-1])
        )
    )
    by_rank = [
        {rank: renaming.of_stage(*first.get(rank, ("", 0))) for rank in own}
        for renaming, first, own in zip(renamings, firsts, ranks)
    ]
    return Layout((ranks[0], ranks[1]), (by_rank[0], by_rank[1]), (stages[0], stages[1]))


def _is_spread(blocks: Sequence[Mapping[int, Block]], names: NameTable) -> bool:
    """True if ranks hold other parameters than each other, or parts of those of the other side; or,
    of the same batch, parts of what the other side's rank has computed whole.
    """
    held = [[_sizes(block, names, _WEIGHTS) for block in side.values()] for side in blocks]
    if any(sizes.keys() != side[0].keys() for side in held for sizes in side):
        return True
    if _differ(held[0][0], held[1][0]):
        return True
    firsts = [next(iter(side.values())) for side in blocks]
    given = [block.records["numel"][block.phases == Phase.BATCHES].tolist() for block in firsts]
    made = [_sizes(block, names, ("output", "grad_output")) for block in firsts]
    is_alike = blocks[0].keys() == blocks[1].keys() and len(blocks[0]) > 1
    return is_alike and given[0] == given[1] and _differ(made[0], made[1])


def _differ(mine: Mapping[int, int], other: Mapping[int, int]) -> bool:
    return any(size != other[number] for number, size in mine.items() if number in other)


def _sizes(block: Block, names: NameTable, roles: tuple[str, ...]) -> dict[int, int]:
    """Elements of each tensor of these roles, by number of the name."""
    return {
        number: int(size)
        for number, size in zip(block.names.tolist(), block.records["numel"].tolist())
        if names[number].role in roles and not names[number].op
    }


class _RankParameters(NamedTuple):
    """The parameters of a rank: the numbers of the layers below each path that has numbered layers,
    and the names of the others.
    """

    layers: Mapping[str, set[int]]
    others: frozenset[str]


def _stages(
    own: Mapping[int, _RankParameters],
    most: Mapping[str, int],
    coordinates: Mapping[int, Mapping[str, Any]],
) -> tuple[dict[int, int], dict[int, tuple[str, int]]]:
    """The pipeline stage of each rank; and where each stage counts its layers from 0, their path
    and the number in the model of the first. ``most``: how many layers the other side may have.
    """
    for path in {path for parameters in own.values() for path in parameters.layers}:
        held = {rank: parameters.layers.get(path, set()) for rank, parameters in own.items()}
        begins = {rank: min(numbers) for rank, numbers in held.items() if numbers}
        if len(set(begins.values())) > 1:
            return {rank: begins.get(rank, rank) for rank in own}, {}
        known = {rank: coordinates.get(rank, {}).get("pp") for rank in own}
        kinds = list(dict.fromkeys(parameters.others for parameters in own.values()))
        if None not in known.values():
            stage_of = {rank: int(stage or 0) for rank, stage in known.items()}
        elif len(kinds) == 1:
            continue
        else:  # the first has the embedding, the last the head
            stage_of = {rank: rank for rank in own}
            if sum(map(len, held.values())) > most.get(path, 0):
                stage_of = {
                    rank: kinds.index(parameters.others) for rank, parameters in own.items()
                }
        counts = {stage: len(held[rank]) for rank, stage in stage_of.items()}
        firsts = {
            rank: (path, sum(n for other, n in counts.items() if other < stage))
            for rank, stage in stage_of.items()
        }
        return stage_of, firsts
    return {}, {}


def _held(names: NameTable, block: Block) -> _RankParameters:
    layers: dict[str, set[int]] = defaultdict(set)
    others = set()
    for number in np.unique(block.names).tolist():
        if names[number].role in _WEIGHTS:
            path = f"{names[number].module}.{names[number].label}".lstrip(".")
            match = re.match(r"([^\d]*?)\.(\d+)\.", path)
            if match is None:
                others.add(path)
            else:
                layers[match.group(1)].add(int(match.group(2)))
    return _RankParameters(layers, frozenset(others))


def _most(held: Iterable[_RankParameters]) -> dict[str, int]:
    """The number of layers below each path, if each rank has others."""
    counts: dict[str, int] = defaultdict(int)
    for parameters in held:
        for path, numbers in parameters.layers.items():
            counts[path] += len(numbers)
    return counts


# ---- putting together ---------------------------------------------------------------------------


_Way = tuple[int, list[torch.Tensor]]


class _Piece(NamedTuple):
    """A record of a side: its place in the block of a rank, and in the tensor."""

    block: Block
    place: int
    part: tuple[int, ...]

    @property
    def record(self) -> Any:
        return self.block.records[self.place]

    @property
    def extra(self) -> Extra:
        return self.block.extra(self.place)


_Pieces = dict[tuple[int, int], list[_Piece]]


class GatheredBlocks(NamedTuple):
    """Both blocks. ``sums``: numbers of the names of which each rank of one side has a part of a
    sum. ``merged``: how many are compared by the sums of records. ``absent``: how many activations
    one layout does not have. ``notes``: on the order of parts.
    """

    ours: Block
    theirs: Block
    sums: frozenset[int]
    merged: int
    absent: int
    notes: list[str]
    padded: list[str]


def gather(
    layout: Layout, ours: Sequence[Block], theirs: Sequence[Block], names: NameTable
) -> GatheredBlocks:
    """Puts the tensors of all ranks of each side together, as the other side has them."""
    sides = [
        _pieces(blocks, names, stages) for blocks, stages in zip((ours, theirs), layout.stages)
    ]
    leading = 0 if len(ours) < len(theirs) else 1
    keys = list(sides[leading])
    keys += [key for key in sides[1 - leading] if key not in sides[leading]]
    trained = [{key[0] for key in side if names[key[0]].role == "param_grad"} for side in sides]
    both = {
        ".".join(parts[:length])
        for parts in (names[number].module.split(".") for number in trained[0] & trained[1])
        for length in range(len(parts) + 1)
    }
    gathered: tuple[list[_Whole], list[_Whole]] = ([], [])
    sums, notes, absent = set(), [], 0
    padded: list[str] = []
    firsts = [next(iter(own.values())) for own in layout.renamings]
    met = [renaming.has_met_wholes for renaming in firsts]
    has_groups = all(renaming.has_groups for renaming in firsts)
    for key in keys:
        pieces = [side.get(key, []) for side in sides]
        name = names[key[0]]
        if not all(pieces):
            if name.role not in ("param", "param_grad", "buffer", "loss") and name.module in both:
                absent += 1
                continue
            for own, held in zip(gathered, pieces):
                if held:
                    own.append(_Whole(key[0], held, next(iter(_sizes_of(held)))))
            continue
        pair = _as_large(pieces[0], pieces[1])
        wholes = [_Whole(key[0], held, how) for held, how in zip(pieces, pair)]
        is_weight = name.role in ("param", "param_grad", "")
        is_padded = bool(VOCABULARY.search(f"{name.module}.{name.label}"))
        is_padded &= wholes[0].record["numel"] != wholes[1].record["numel"]
        if is_padded and (text := _cut(wholes, is_weight, met)):
            padded.append(f"{text} of {name}")
        groups = _load(wholes, layout.groups.get(_kind(name)), is_weight, has_groups)
        if groups > 1 and _kind(name) not in layout.groups:
            notes.append(f"{name} has its parts in {groups:,} groups")
        if name.role in _WEIGHTS and wholes[0].record["checksum"] == wholes[1].record["checksum"]:
            layout.groups.setdefault(_kind(name), groups)
        if any(whole.is_torn for whole in wholes):
            if name.role in _OF_RANKS:
                continue
            if _add_up(wholes):
                sums.add(key[0])
        for own, whole in zip(gathered, wholes):
            own.append(whole)
    blocks = [_block(side[0], own) for side, own in zip((ours, theirs), gathered)]
    count = sum(mine.is_merged or other.is_merged for mine, other in zip(*gathered))
    return GatheredBlocks(blocks[0], blocks[1], frozenset(sums), count, absent, notes, padded)


def _pieces(blocks: Sequence[Block], names: NameTable, stages: Mapping[int, int]) -> _Pieces:
    """Records of all ranks and of all parts, by name and number of the call."""
    pieces: _Pieces = {}
    for block in blocks:
        counts: dict[int, int] = defaultdict(int)
        for index, number in enumerate(block.names.tolist()):
            name = names[number]
            if name.op:  # operators of two layouts are others
                continue
            key = (names.number(name._replace(part=())) if name.part else number, counts[number])
            counts[number] += 1
            held = pieces.setdefault(key, [])
            if name.part and name.role in _READ and any(piece.block is block for piece in held):
                continue
            held.append(_Piece(block, index, name.part))
    return _of_ends(pieces, names, stages) if len(set(stages.values())) > 1 else pieces


def _of_ends(all_pieces: _Pieces, names: NameTable, stages: Mapping[int, int]) -> _Pieces:
    """Leaves out what a module around all stages reads and returns between them: it begins in the
    first and ends in the last.
    """
    held: dict[str, set[int]] = defaultdict(set)
    for (number, _), pieces in all_pieces.items():
        held[names[number].module] |= {stages[piece.block.rank] for piece in pieces}
    first, last = min(stages.values()), max(stages.values())
    kept: _Pieces = {}
    for key, pieces in all_pieces.items():
        name = names[key[0]]
        if len(held[name.module]) > 1 and name.role in (*_READ, "output", "grad_output"):
            end = first if name.role in _READ else last
            pieces = [piece for piece in pieces if stages[piece.block.rank] == end]
        if pieces:
            kept[key] = pieces
    return kept


_ONE, _ALL, _DISTINCT = "one", "all", "distinct"


def _sizes_of(pieces: Sequence[_Piece]) -> dict[str, int]:
    """The elements of the whole, if each rank has all of it, if each has another part of it, and if
    those that are equal to the bit count once; the likeliest first.
    """
    by_rank: dict[int, int] = defaultdict(int)
    distinct: dict[Any, int] = {}
    contents: dict[int, list[Any]] = defaultdict(list)
    for piece in pieces:
        record, rank = piece.record, piece.block.rank
        by_rank[rank] += int(record["numel"])
        content = (piece.part, int(record["checksum"]), int(record["numel"]))
        distinct[content] = int(record["numel"])
        contents[rank].append(content)
    sizes = set(by_rank.values())
    totals = {_ALL: sum(by_rank.values()), _DISTINCT: sum(distinct.values())}
    if len(sizes) == 1:
        first, *others = contents.values()
        is_alike = all(other == first for other in others)
        single = {_ONE: sizes.pop()}
        totals = {**single, **totals} if is_alike else {**totals, **single}
    return totals


def _as_large(mine: Sequence[_Piece], other: Sequence[_Piece]) -> tuple[str, str]:
    """The way to take the pieces of each side that makes both of one size; the likeliest of each
    where none does.
    """
    ours, theirs = _sizes_of(mine), _sizes_of(other)
    fitting = [
        (i + j, (one, two))
        for i, (one, size) in enumerate(ours.items())
        for j, (two, as_large) in enumerate(theirs.items())
        if size == as_large
    ]
    return min(fitting)[1] if fitting else (next(iter(ours)), next(iter(theirs)))


class _Whole:
    """The pieces of one tensor on one side, and what they are together."""

    def __init__(self, number: int, pieces: Sequence[_Piece], how: str) -> None:
        self.number, self.phase = number, int(pieces[0].block.phases[pieces[0].place])
        self.is_taken = False
        lowest = pieces[0].block.rank
        self.pieces = list(pieces)
        if how == _ONE:
            self.pieces = [piece for piece in pieces if piece.block.rank == lowest]
        elif how == _DISTINCT:
            known = {(p.part, int(p.record["checksum"])): p for p in reversed(pieces)}
            self.pieces = list(known.values())[::-1]
        #: Each rank has as many elements as the whole, and other elements.
        self.others = [piece for piece in pieces if piece not in self.pieces and how == _ONE]
        checksums = {int(piece.record["checksum"]) for piece in pieces}
        self.is_torn = bool(self.others) and len(self.pieces) == 1 and len(checksums) > 1
        if len(self.pieces) == 1:
            self.record, self.extra = self.pieces[0].record, self.pieces[0].extra
        else:
            self.record = merged(np.array([piece.record for piece in self.pieces], RECORD_DTYPE))
            self.extra = Extra()

    @property
    def is_merged(self) -> bool:
        """True if its record is that of several, which does not tell their order."""
        return len(self.pieces) > 1 and self.extra.load is None

    def take(self, tensor: torch.Tensor) -> None:
        """Takes the values of a tensor, and its record."""
        self.is_taken = True
        self.record = stats(tensor, record="full", order="logical").record
        self.extra = Extra(shape=tuple(tensor.shape), load=lambda: tensor)


def _kind(name: Name) -> str:
    """The module or weight, of all layers alike."""
    return re.sub(r"\d+", "*", name.module or name.label)


def _load(wholes: Sequence[_Whole], known: Optional[int], is_weight: bool, has_groups: bool) -> int:
    """Puts the values of both sides together, where they are there: the parts of a fused tensor in
    the groups ``known``, or in those in which both sides are equal. Returns their number.
    ``has_groups``: whether there may be several groups on a rank.
    """
    pieces = [piece for whole in wholes for piece in whole.pieces]
    if len(pieces) == 2 or any(piece.extra.load is None for piece in pieces):
        return 1
    if any(whole.is_taken for whole in wholes):
        return 1
    ways = [_joined(whole.pieces, is_weight) for whole in wholes]
    shape = next((shape for shape in ways[0] if shape in ways[1]), None)
    if shape is None:
        _stack(wholes, ways)
        return 1
    dims, rows = zip(*(way[shape] for way in ways))
    for groups in [known] if known else _groups(wholes, rows, dims, has_groups):
        tensors = [_in_groups(parts, dim, groups) for parts, dim in zip(rows, dims)]
        for whole, tensor in zip(wholes, tensors):
            whole.take(tensor)
        if wholes[0].record["checksum"] == wholes[1].record["checksum"]:
            return groups
    if not known:
        for whole, parts, dim in zip(wholes, rows, dims):
            whole.take(torch.cat(parts, dim))
    return known or 1


def _cut(wholes: Sequence[_Whole], is_weight: bool, met: Sequence[bool]) -> str:
    """Takes off what one of the two has behind the rows of the vocabulary, which are columns of
    what is computed; "" where that is no padding. ``met``: of each, whether its side has the names
    of fused modules, and so pads: rows that a side without them has more are a loss of the other
    where they are not all alike.
    """
    (large, pads), (small, _) = sorted(
        zip(wholes, (met[0] and not met[1], met[1] and not met[0])),
        key=lambda pair: -int(pair[0].record["numel"]),
    )
    extra = int(large.record["numel"] - small.record["numel"])
    if any(piece.extra.load is None for whole in wholes for piece in whole.pieces):
        if large.record["zero_count"] < extra:
            return ""
        record = large.record.copy()
        record["numel"] -= extra
        record["zero_count"] -= extra
        record["depth"], record["checksum"] = min(Depth.STATS, record["depth"]), 0
        large.record, large.extra = record, Extra()
        return f"{extra:,} zeros"
    ways = [_joined(whole.pieces, is_weight) for whole in (large, small)]
    for longer, (dim, parts) in ways[0].items():
        for shape, (own, rows) in ways[1].items():
            at = 0 if is_weight else len(shape) - 1
            if len(longer) != len(shape) or (*longer[:at], *longer[at + 1 :]) != (
                *shape[:at],
                *shape[at + 1 :],
            ):
                continue
            whole = torch.cat(parts, dim)
            rest = whole.narrow(at, shape[at], longer[at] - shape[at])
            if not pads and not torch.equal(rest, rest.narrow(at, 0, 1).expand_as(rest)):
                return ""
            large.take(whole.narrow(at, 0, shape[at]))
            small.take(torch.cat(rows, own))
            return f"{longer[at] - shape[at]:,} {'rows' if is_weight else 'columns'}"
    return ""


def _stack(wholes: Sequence[_Whole], ways: Sequence[Mapping[tuple[int, ...], _Way]]) -> None:
    """Puts values together whose shapes differ by a dimension: one expert below the other."""
    for mine, (dim, parts) in ways[0].items():
        for other, (own, rows) in ways[1].items():
            if math.prod(mine) == math.prod(other) and len(mine) != len(other):
                shape = max(mine, other, key=len)
                wholes[0].take(torch.cat(parts, dim).reshape(shape))
                wholes[1].take(torch.cat(rows, own).reshape(shape))
                return


def _joined(pieces: Sequence[_Piece], is_weight: bool) -> dict[tuple[int, ...], _Way]:
    """The dimension along which the parts follow each other, and the parts, each of all ranks; by
    shape of the whole. Parts are rows of a weight, and columns of what is computed.
    """
    by_part: dict[tuple[int, ...], list[torch.Tensor]] = defaultdict(list)
    for piece in sorted(pieces, key=lambda piece: piece.part):
        assert piece.extra.load is not None
        by_part[piece.part].append(piece.extra.load().cpu())
    ways: dict[tuple[int, ...], _Way] = {}
    dims = max(min(held[0].dim() for held in by_part.values()), 1)
    of_parts = 0 if is_weight else dims - 1
    for of_ranks in range(dims) if is_weight else reversed(range(dims)):
        try:
            parts = [
                torch.cat(held, of_ranks) if len(held) > 1 else held[0] for held in by_part.values()
            ]
            whole = torch.cat(parts, of_parts) if len(parts) > 1 else parts[0]
        except RuntimeError:  # their shapes do not fit
            continue
        ways.setdefault(tuple(whole.shape), (of_parts, parts))
    return ways


def _groups(
    wholes: Sequence[_Whole],
    rows: Sequence[list[torch.Tensor]],
    dims: Sequence[int],
    has_groups: bool,
) -> list[int]:
    """The numbers of groups to try: parts may follow each other within each rank, or each head."""
    in_parts = [place for place, parts in enumerate(rows) if len(parts) > 1]
    if len(in_parts) != 1:
        return [1]
    (place,) = in_parts
    sizes = [part.shape[dims[place]] for part in rows[place]]
    ranks = len(wholes[1 - place].pieces)
    counts = group_counts(sizes, ranks)
    return counts if has_groups else [count for count in counts if count in (1, ranks)]


def _in_groups(parts: list[torch.Tensor], dim: int, groups: int) -> torch.Tensor:
    if len(parts) == 1:
        return parts[0]
    split = [part.reshape(*part.shape[:dim], groups, -1, *part.shape[dim + 1 :]) for part in parts]
    return torch.cat(split, dim + 1).flatten(dim, dim + 1)


def _add_up(wholes: Sequence[_Whole]) -> bool:
    """Takes the sum over ranks that differ, where that is what the other side has; the rank that is
    farthest from the other side where it is not.
    """
    torn, other = sorted(wholes, key=lambda whole: not whole.is_torn)
    if other.is_torn:
        return False
    records = np.array([piece.record for piece in (*torn.pieces, *torn.others)], RECORD_DTYPE)
    target = other.record
    allowed = _ROUNDING * float(records["abs_sum"].sum())
    off = np.abs(records["sum"] - target["sum"])
    if abs(records["sum"].sum() - target["sum"]) <= allowed < off.min() / 10:
        loads = [piece.extra.load for piece in (*torn.pieces, *torn.others)]
        if other.extra.load is not None:
            values = [load().cpu() for load in loads if load is not None]
            if len(values) == len(loads):
                torn.take(torch.stack(values).sum(0))
                return True
        record = target.copy()
        record["sum"], record["depth"], record["checksum"] = records["sum"].sum(), Depth.STATS, 0
        torn.record, torn.extra = record, Extra(shape=torn.extra.shape)
        return True
    apart = off + np.abs(np.sqrt(records["sum_sq"]) - np.sqrt(target["sum_sq"]))
    chosen = [*torn.pieces, *torn.others][int(np.argmax(apart))]
    torn.record, torn.extra = chosen.record, chosen.extra
    return False


def _block(first: Block, wholes: Iterable[_Whole]) -> Block:
    tensors = ((whole.number, whole.phase, whole.record, whole.extra) for whole in wholes)
    made = Block.of(first.step, first.rank, tensors)
    return replace(made, extras=None) if first.extras is None else made
