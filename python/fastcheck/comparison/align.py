"""Matches the tensors of two blocks: by name, then repeated calls of a name in their order.

The order of different names is ignored: threads may change it from run to run. Calls of one name
with bit-identical contents are matched whatever their order; the others are aligned as a diff
aligns lines, with the least total distance between their statistics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from fastcheck.record.format import Depth, Flag

from .block import BYTES_BEFORE_SUMS, Block, Phase, Source, same_bits
from .measure import PairState
from .names import NameTable

# The first of two modules that read one tensor in two threads has it recorded as its input, and its
# gradient with it.
_READ = ("input", "grad_input")
# Above this many cells the calls of one name are matched in their order, extra calls at the end.
_MAX_CELLS = 1_000_000


#: Relative differences of norms: of the same tensor that was rounded otherwise, and of others.
_ROUNDED, _REORDERED = 1e-5, 1e-3


@dataclass(frozen=True)
class Alignment:
    """``ours[i]`` of the actual block belongs to ``theirs[i]`` of the reference, in the
    reference's order; ``same[i]``: equal to the bit. ``reordered`` counts pairs that came in
    another order among the calls of their name, ``moved`` inputs found under another name.
    ``lookalikes``: pairs of what is left over that are equal to the bit, perhaps renamed.
    """

    ours: np.ndarray
    theirs: np.ndarray
    same: np.ndarray
    only_ours: np.ndarray
    only_theirs: np.ndarray
    reordered: int = 0
    moved: int = 0
    lookalikes: tuple[tuple[int, int], ...] = ()


def align(actual: Block, reference: Block, names: NameTable) -> Alignment:
    """Matches two blocks. Cost: that of sorting the names, where calls are as many and equal."""
    if np.array_equal(actual.names, reference.names):
        ours = theirs = np.arange(len(actual))
    else:
        ours, theirs = _by_occurrence(actual.names, reference.names)
    same = same_bits(actual, ours, reference, theirs)
    reordered = 0
    doubtful = _doubtful(actual, reference, theirs, same)
    if len(doubtful):
        keep = ~np.isin(reference.names[theirs], doubtful)
        parts = [(ours[keep], theirs[keep])]
        groups = zip(_groups(actual.names, doubtful), _groups(reference.names, doubtful))
        for mine, other in groups:
            pairs, swapped = _align_calls(actual, mine, reference, other)
            reordered += swapped
            parts.append((mine[pairs[:, 0]], other[pairs[:, 1]]))
        ours = np.concatenate([part[0] for part in parts])
        theirs = np.concatenate([part[1] for part in parts])
    only_ours = _unmatched(len(actual), ours)
    only_theirs = _unmatched(len(reference), theirs)
    moved = 0
    lookalikes: tuple[tuple[int, int], ...] = ()
    if len(only_ours) and len(only_theirs):
        equal = _by_content(actual, only_ours, reference, only_theirs)
        is_input = [names[int(actual.names[index])].role in _READ for index, _ in equal]
        extra = np.array([p for p, yes in zip(equal, is_input) if yes], np.int64).reshape(-1, 2)
        lookalikes = tuple(pair for pair, yes in zip(equal, is_input) if not yes)
        moved = len(extra)
        ours = np.concatenate([ours, extra[:, 0]])
        theirs = np.concatenate([theirs, extra[:, 1]])
        only_ours = _unmatched(len(actual), ours)
        only_theirs = _unmatched(len(reference), theirs)
    order = np.argsort(theirs, kind="stable")
    ours, theirs = ours[order], theirs[order]
    has_changed = bool(len(doubtful) or moved)
    same = same_bits(actual, ours, reference, theirs) if has_changed else same[order]
    return Alignment(
        ours,
        theirs,
        same,
        _without_repeated(actual, only_ours, names),
        _without_repeated(reference, only_theirs, names),
        reordered,
        moved,
        lookalikes,
    )


def _by_occurrence(left: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The n-th of a name with the n-th of that name."""
    mine, other = (names * np.int64(1 << 32) + _occurrence(names) for names in (left, right))
    _, ours, theirs = np.intersect1d(mine, other, assume_unique=True, return_indices=True)
    return ours, theirs


def _occurrence(names: np.ndarray) -> np.ndarray:
    """The number of elements of the same name before each element."""
    order = np.argsort(names, kind="stable")
    ordered = names[order]
    starts = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]]) if len(names) else order
    lengths = np.diff(np.r_[starts, len(names)])
    within = np.arange(len(names)) - np.repeat(starts, lengths)
    result = np.empty(len(names), np.int64)
    result[order] = within
    return result


def _doubtful(actual: Block, reference: Block, theirs: np.ndarray, same: np.ndarray) -> np.ndarray:
    """Names whose calls may belong together in another way: several, and not all equal."""
    several = np.flatnonzero((_counts(actual, reference) > 1).any(0))
    unequal = np.unique(reference.names[theirs[~same]])
    return np.union1d(_uneven(actual, reference), np.intersect1d(several, unequal))


def uneven_calls(actual: Block, reference: Block) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """The names that both blocks have, another number of times, each with its places in them."""
    names = _uneven(actual, reference)
    return zip(names.tolist(), _groups(actual.names, names), _groups(reference.names, names))


def _uneven(actual: Block, reference: Block) -> np.ndarray:
    counts = _counts(actual, reference)
    return np.flatnonzero(counts.all(0) & (counts[0] != counts[1]))


def _counts(*blocks: Block) -> np.ndarray:
    """The number of calls of each name in each block."""
    end = 1 + max(int(block.names.max(initial=0)) for block in blocks)
    return np.array([np.bincount(block.names, minlength=end) for block in blocks])


def _groups(names: np.ndarray, wanted: np.ndarray) -> Iterator[np.ndarray]:
    """The places of each of the names, in order."""
    order = np.argsort(names, kind="stable")
    ordered = names[order]
    starts = np.searchsorted(ordered, wanted, "left")
    ends = np.searchsorted(ordered, wanted, "right")
    return (order[start:end] for start, end in zip(starts.tolist(), ends.tolist()))


def _align_calls(
    actual: Block, mine: np.ndarray, reference: Block, other: np.ndarray
) -> tuple[np.ndarray, int]:
    """Positions in ``mine`` and ``other`` that belong together, and how many came in another
    order.
    """
    sides = (actual, mine), (reference, other)
    contents = ([_content(block, at) for at in places.tolist()] for block, places in sides)
    pairs = _equal(*contents)
    latest, swapped = -1, 0
    for _, position in pairs:
        swapped += position < latest
        latest = max(latest, position)
    left = _unmatched(len(mine), np.array([pair[0] for pair in pairs], np.int64))
    right = _unmatched(len(other), np.array([pair[1] for pair in pairs], np.int64))
    if len(left) and len(right):
        closest = _closest(actual.records[mine[left]], reference.records[other[right]])
        pairs += [(int(left[i]), int(right[j])) for i, j in closest]
        swapped += sum(after[1] < before[1] for before, after in zip(closest, closest[1:]))
    return np.array(pairs, np.int64).reshape(-1, 2), swapped


def _content(block: Block, index: int) -> object:
    """A key that is equal for equal bits; None where the record has no checksum."""
    record = block.records[index]
    if record["depth"] == Depth.FULL:
        return record.tobytes()[:BYTES_BEFORE_SUMS], int(record["checksum"]), int(record["dtype"])
    crc32 = block.extra(index).crc32
    return None if crc32 is None else (crc32, int(record["dtype"]), block.extra(index).shape)


def _closest(left: np.ndarray, right: np.ndarray) -> list[tuple[int, int]]:
    """All of the shorter side in order, each with a member of the longer, at the least total
    distance: dynamic programming over how far each side has got.
    """
    rows, columns = len(left), len(right)
    if 1 < rows == columns and rows * columns <= _MAX_CELLS:
        return _in_any_order(_distance(left, right))
    if rows == columns or rows * columns > _MAX_CELLS:
        return [(i, i) for i in range(min(rows, columns))]
    if rows > columns:
        return [(i, j) for j, i in _closest(right, left)]
    distance = _distance(left, right)
    best = np.full((rows + 1, columns + 1), np.inf)
    best[0] = 0.0
    for i in range(1, rows + 1):
        # Row i may not take a column before i, nor so late that rows after it find none.
        for j in range(i, columns - rows + i + 1):
            best[i, j] = min(best[i, j - 1], best[i - 1, j - 1] + distance[i - 1, j - 1])
    pairs = []
    i, j = rows, columns
    while i:
        if best[i, j] == best[i, j - 1]:
            j -= 1
        else:
            i, j = i - 1, j - 1
            pairs.append((i, j))
    return pairs[::-1]


def _in_any_order(distance: np.ndarray) -> list[tuple[int, int]]:
    """Each with the nearest of the other side, where these are all different and at the level of
    rounding, and those of the same number are not: branches that came in another order. Else in
    order.
    """
    count = len(distance)
    nearest = distance.argmin(1)
    in_order = np.diagonal(distance).max()
    if len(set(nearest.tolist())) == count:
        apart = distance[np.arange(count), nearest].max()
        if apart <= _ROUNDED and in_order > _REORDERED:
            return [(i, int(j)) for i, j in enumerate(nearest)]
    return [(i, i) for i in range(count)]


def _distance(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """The relative difference of the norms, from 0 to 1; 1 for another size or dtype."""
    with np.errstate(all="ignore"):
        a = np.sqrt(left["sum_sq"])[:, None]
        b = np.sqrt(right["sum_sq"])[None, :]
        apart = np.abs(a - b) / np.maximum(np.maximum(a, b), np.finfo(np.float64).tiny)
    apart = np.where(np.isfinite(apart), apart, 1.0)
    unlike = (left["numel"][:, None] != right["numel"]) | (left["dtype"][:, None] != right["dtype"])
    return np.where(unlike, 1.0, apart)


def _by_content(
    actual: Block, mine: np.ndarray, reference: Block, other: np.ndarray
) -> list[tuple[int, int]]:
    """The pairs, among what is left over, that are equal to the bit."""
    keys = (
        [(key := _content(block, at)) and (key, int(block.phases[at])) for at in left.tolist()]
        for block, left in ((actual, mine), (reference, other))
    )
    return [(int(mine[i]), int(other[j])) for i, j in _equal(*keys)]


def _equal(mine: Sequence[object], other: Sequence[object]) -> list[tuple[int, int]]:
    """Positions of equal keys, each once, in order; None is the key of nothing."""
    places: dict[object, list[int]] = {None: []}
    for position in reversed(range(len(other))):
        if other[position] is not None:
            places.setdefault(other[position], []).append(position)
    return [(at, places[key].pop()) for at, key in enumerate(mine) if places.get(key)]


def _unmatched(size: int, taken: np.ndarray) -> np.ndarray:
    free = np.ones(size, bool)
    free[taken] = False
    return np.flatnonzero(free)


def _without_repeated(block: Block, indices: np.ndarray, names: NameTable) -> np.ndarray:
    """The indices without recomputed calls of activation checkpointing, which are not extra calls,
    and without inputs that were read elsewhere already: in eager mode a tensor is read once, where
    it is made.
    """
    again = (block.records["flags"][indices] & int(Flag.RECOMPUTE)) != 0
    kept: np.ndarray = indices[~again]
    inputs = [i for i in kept.tolist() if names[int(block.names[i])].role in _READ]
    if not inputs:
        return kept
    others = np.setdiff1d(np.arange(len(block)), inputs).tolist()
    made = {_content(block, index) for index in others} - {None}
    copies = [index for index in inputs if _content(block, index) in made]
    return np.setdiff1d(kept, copies)


def missing_of(
    sources: tuple[Source, Source], ours: Block, theirs: Block, pairs: Alignment
) -> Iterator[tuple[PairState, Block, int, Phase]]:
    """Yields the tensors that one side lacks: state, the block that has the tensor, position in it,
    and phase. ``sources``: actual and reference.
    """
    actual, reference = sources
    sides = (
        (PairState.ONLY_ACTUAL, ours, pairs.only_ours, pairs.ours, reference, theirs.step),
        (PairState.ONLY_REFERENCE, theirs, pairs.only_theirs, pairs.theirs, actual, ours.step),
    )
    for state, block, indices, matched, other, step in sides:
        end = len(block)
        if other.is_cut(step, block.rank):
            # The other side ends within this step: what it didn't come to is not missing. A stop
            # before the update reads weights that the other side reads then.
            is_stored = np.isin(block.phases[matched], [int(Phase.WEIGHTS), int(Phase.UPDATE)])
            matched_there = matched[~is_stored | other.is_updated(step, block.rank)]
            end = int(matched_there.max()) if len(matched_there) else 0
        # A log has first weights twice: before the forward, and before the update.
        weights = set(block.names[matched[block.phases[matched] == Phase.WEIGHTS]].tolist())
        for index in indices.tolist():
            phase = Phase(int(block.phases[index]))
            phase = Phase.FORWARD if phase is Phase.ARRIVED else phase
            if index > end or (phase is Phase.WEIGHTS and int(block.names[index]) in weights):
                continue
            yield state, block, index, phase
