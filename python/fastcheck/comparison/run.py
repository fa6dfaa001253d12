"""Compares two sides block by block: one step of one rank is in memory, aligned and measured."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Callable, Optional

import numpy as np
import torch

from fastcheck.comparison.over_time import SAME_LOSS, LossPair, loss_of
from fastcheck.log.step_table import loss_of_step, numbers_in
from fastcheck.record.format import DTYPES, Depth, Flag
from fastcheck.record.site import GIVEN_LOSS, GRAD_LOSS
from fastcheck.statistics.elements import compare_elements
from fastcheck.statistics.functions import crc32
from fastcheck.statistics.thresholds import BY_COARSENESS, COARSENESS, Threshold, coarser_of

from . import measure
from .align import Alignment, align, missing_of, uneven_calls
from .block import Block, Kind, Phase, Source
from .earlier import causes_of
from .layout import Layout, gather
from .measure import MEASURED, PairState, Parameters, judge_updates, measure_records
from .names import Name, NameTable, Renaming
from .noise import Drift, excuse, excuse_parts, excuse_small, sizes_in_step
from .origin import Origin, is_permuted, rounding_limit
from .pairs import Pairs
from .relation import find_parts, relation_of
from .row import Row, make_row
from .split import (
    PASSED,
    Split,
    has_role,
    only,
    wholes_of,
    with_calls_together,
    with_losses_of_steps,
    with_strays,
    without_role,
)
from .tally import COMPUTED, KEPT_ROWS, KEPT_STEPS, Found, Tally


def inherited_formats(
    codes: np.ndarray, is_exact: np.ndarray, before: Optional[int]
) -> tuple[np.ndarray, Optional[int]]:
    """The code, by pair, of the coarsest dtype among itself and what was computed before it with
    other last bits: a float32 that is made of bfloat16 carries the rounding of bfloat16.

    ``before`` is that of the steps before; the second result is the same for the steps after.
    """
    own = COARSENESS[codes]
    start = 0 if before is None else COARSENESS[before]
    reached = np.maximum.accumulate(np.r_[start, np.where(is_exact, 0, own)])
    # A tensor that holds no rounding inherits none.
    inherits = (reached[:-1] > own) & (own > 0)
    formats: np.ndarray = np.where(inherits, BY_COARSENESS[reached[:-1]], codes)
    return formats, int(BY_COARSENESS[reached[-1]]) if reached[-1] else before


# The number of pairs that are shown after the first difference.
_TRAIL = 8
# The number of pairs whose relation is looked for: each costs some passes over both tensors.
_RELATED = 100
_FLOAT32 = next(code for code, info in enumerate(DTYPES) if info.name == "float32")
# Statistics that went through text in float32, as msprobe's do.
_GIVEN_BY_STATISTICS = 1e-5
#: The most that a few elements whose update rounding has turned round make of an update's size, and
#: of what rounding makes of a parameter.
_TURNED, _TURNED_LIMITS = 0.01, 10
#: Two runs of one program are no more than this many times as far apart as two others.
_REPEATS = 4.0
#: Sums in another order are this many times as far apart as rounding one number makes them.
_SUMMED = 10.0
#: Dtypes whose sums are this much more exact than a threshold.
_FINE = [code for code, info in enumerate(DTYPES) if info.name in ("float32", "float64")]
# The factor that the loss of a step was multiplied by.
_SCALE = Name("", "optimizer", "loss_scale", "loss scale")

RowSink = Callable[[Row], None]


def _path(name: Name) -> str:
    return f"{name.module}.{name.label}" if name.role == "param" and name.module else str(name)


def differing_names(
    runner: BlockComparison, places: Iterable[tuple[int, int, int]]
) -> dict[Name, float]:
    """The largest error of each name that is not equal to the bit in some of these steps."""
    errors: dict[Name, float] = {}

    def take(compared: Pairs) -> None:
        for index in np.flatnonzero(compared.states != PairState.SAME).tolist():
            name = runner.names[int(compared.names[index])]
            errors[name] = max(errors.get(name, 0.0), float(compared.errors[index]))

    runner.observer, runner.judges_operators = take, False
    for step, other, rank in places:
        runner.compare(step, other, rank)
    return errors


@dataclass(eq=False)
class BlockComparison:
    """Compares the blocks of two sources into a Tally."""

    _actual: Source
    _reference: Source
    _renaming: Renaming
    thresholds: Sequence[Threshold]
    _accept: frozenset[str]
    _sink: Optional[RowSink] = None

    def __post_init__(self) -> None:
        self._of_reference = self._renaming.of_reference()
        self.names = NameTable()
        self.tally = Tally()
        # A run's batches and first weights are given; a checkpoint's weights were computed.
        self._given = (Phase.BATCHES, Phase.WEIGHTS) if self._actual.kind.family == "run" else ()
        kinds = (self._actual.kind, self._reference.kind)
        self.compares_parts = kinds[0] is not kinds[1] and Kind.MSPROBE in kinds
        #: Called with each step that was compared.
        self.observer: Optional[Callable[[Pairs], None]] = None
        self._last_step: dict[int, int] = {}
        # The coarsest dtype, by rank, of what was not equal to the bit in the steps before.
        self.coarsest: dict[int, Optional[int]] = {}
        #: The parameters that updates by noise have moved until now, by rank.
        self.drifts: dict[int, Drift] = defaultdict(lambda: Drift(self._actual, self._reference))
        # The largest error, by rank, of what the step before computed, and whether it was exact.
        self.last_computed: dict[int, tuple[float, bool]] = {}
        #: The names, by rank, of what the last step that was equal to the bit has computed.
        self.computed_before: dict[int, np.ndarray] = {}
        #: The last step, by rank, that was equal to the bit.
        self.equal_step: dict[int, Pairs] = {}
        #: The split of the batch, when the two sides split it in different ways.
        self.split: Optional[Split] = None
        #: The layout of tensors that are in other parts, on ranks or in modules.
        self.layout: Optional[Layout] = None
        #: True if learning rates are compared: those of groups have one record.
        self.reads_rates = True
        #: True if operators of another schedule are left out.
        self.judges_operators = True
        #: The largest error between two runs of the reference's program, by name.
        self.unsteady: dict[Name, float] = {}
        # The parameters of the step before, by rank.
        self.parameters: dict[int, Parameters] = {}

    def compare(self, step: int, other: int, rank: int) -> None:
        """Compares a step of one rank of ``actual`` with the step ``other`` of ``reference``."""
        is_first = rank not in self._last_step
        names = self.names
        ours = self._actual.block(step, rank, names, self._renaming, is_first)
        theirs = self._reference.block(other, rank, names, self._of_reference, is_first)
        if not self.reads_rates:
            ours, theirs = (without_role(block, "learning_rate", names) for block in (ours, theirs))
        if is_first:
            ours, theirs = (
                self._carried(self._actual, ours, theirs, self._renaming),
                self._carried(self._reference, theirs, ours, self._of_reference),
            )
        sums: frozenset[int] = frozenset()
        if self.layout is not None:
            ours, theirs, sums = self._together(self.layout, step, other)
        elif self.split is not None:
            own = self.split.ranks
            ours = self._whole(self._actual, ours, own[0], self._renaming, self.split)
            theirs = self._whole(self._reference, theirs, own[1], self._of_reference, self.split)
        ours, theirs = self._without_recomputed(ours, theirs)
        if self._actual.kind is self._reference.kind is Kind.LOG:
            ours, theirs = self._without_scales(ours, theirs)
        losses = [self.loss_of(ours), self.loss_of(theirs)]
        ours, theirs = with_losses_of_steps((ours, theirs), losses, names)
        ours, theirs, merged = with_calls_together((ours, theirs), names)
        self.tally.counts["merged"] += merged
        pairs = align(ours, theirs, names)
        self.tally.counts["reordered"] += pairs.reordered
        self.tally.counts["moved"] += pairs.moved
        for place, like in pairs.lookalikes:
            self.tally.lookalikes[str(names[int(ours.names[place])])] = str(
                names[int(theirs.names[like])]
            )
        compared = _Step(self, ours, theirs, pairs, self._last_step.get(rank, other), sums)
        compared.take()
        self._note_missing(ours, theirs, pairs, compared)
        self._last_step[rank] = other

    def _without_recomputed(self, *sides: Block) -> tuple[Block, Block]:
        """The blocks without what activation checkpointing has computed again on one side alone; of
        either side the tally gets what was computed otherwise then.
        """
        kept = []
        for side, block in zip(("actual", "reference"), sides):
            again = (block.records["flags"] & int(Flag.RECOMPUTE)) != 0
            for number in np.unique(block.names[again]).tolist() if again.any() else ():
                again[block.names == number] &= self.names[number].direction == "forward"
            kept.append(np.flatnonzero(~again))
            columns = (block.names, block.records["call"], block.records["checksum"])
            made = list(zip(*(c.tolist() for c in columns))) if again.any() else []
            first = {made[place] for place in kept[-1].tolist()} if made else set()
            calls = {one[:2] for one in first}
            for place in np.flatnonzero(again & (block.records["depth"] == Depth.FULL)).tolist():
                if made[place] not in first and made[place][:2] in calls:
                    name = f"{self.names[made[place][0]]} at step {block.step:,} of {side}"
                    self.tally.note("recomputed", name)
        ours, theirs = sides
        if (len(kept[0]) < len(ours)) != (len(kept[1]) < len(theirs)):
            ours, theirs = (only(block, which) for block, which in zip(sides, kept))
        return ours, theirs

    def _without_scales(self, *sides: Block) -> tuple[Block, Block]:
        """The blocks with what passes between modules in backward divided by the loss scale, where
        the two sides have other ones. A checksum can't be.
        """
        scales = [self._scale_of(block) for block in sides]
        if scales[0] == scales[1] or not all(scale is None or scale > 0 for scale in scales):
            return sides[0], sides[1]
        mine, other = ("none" if scale is None else f"{scale:,g}" for scale in scales)
        self.tally.note("scales", f"is {mine} in actual and {other} in reference")
        made = []
        for block, scale in zip(sides, scales):
            block = without_role(block, "loss_scale", self.names)
            if None in scales:
                block = without_role(block, "found_inf", self.names)
            records = block.records.copy()
            carry = (records["flags"] & int(Flag.SCALED)) != 0
            passed = [has_role(block, role, self.names) for role in ("grad_input", "grad_output")]
            carry &= passed[0] | passed[1]
            for field in ("min", "max", "sum", "abs_sum", "sum_sq"):
                records[field][carry] /= (scale or 1.0) ** (2 if field == "sum_sq" else 1)
            records["depth"][carry] = np.minimum(records["depth"][carry], Depth.STATS)
            made.append(Block(block.step, block.rank, block.names, block.phases, records))
        return made[0], made[1]

    def _carried(self, source: Source, block: Block, other: Block, renaming: Renaming) -> Block:
        """The block with buffers as the step before has left them, where ``other`` has them once
        more: a log begins with its buffers, and has them after each step.
        """
        if source.kind is not Kind.LOG:
            return block
        numbers, counts = np.unique(other.names, return_counts=True)
        wanted = {
            number
            for number, count in zip(numbers.tolist(), counts.tolist())
            if self.names[number].role == "buffer" and count > (block.names == number).sum()
        }
        steps = [s for s, rank in source.places() if rank == block.rank and s < block.step]
        for step in reversed(steps if wanted else []):
            earlier = source.block(step, block.rank, self.names, renaming, False)
            names, last = np.unique(earlier.names[::-1], return_index=True)
            chosen = np.sort(len(earlier) - 1 - last[np.isin(names, list(wanted))])
            found = only(earlier, chosen)
            found.phases[:] = Phase.WEIGHTS
            block = block.after(found)
            wanted -= set(found.names.tolist())
            if not wanted:
                break
        return block

    def _whole(
        self, source: Source, block: Block, ranks: Sequence[int], renaming: Renaming, split: Split
    ) -> Block:
        blocks = [block] + [
            source.block(block.step, rank, self.names, renaming, False)
            for rank in ranks
            if rank != block.rank and (block.step, rank) in source.places()
        ]
        wholes = wholes_of(split, blocks, [self.loss_of(block) for block in blocks], self.names)
        whole, strays = with_strays(wholes, self.names)
        for name, rank in strays.items():
            side = "actual" if source is self._actual else "reference"
            self.tally.note("strays", f"{name} on rank {rank} of {side}")
        return whole

    def _together(
        self, layout: Layout, step: int, other: int
    ) -> tuple[Block, Block, frozenset[int]]:
        """The tensors of all ranks, grouped by name."""
        is_first = not self._last_step
        sides = []
        for source, at, renamings in zip(
            (self._actual, self._reference), (step, other), layout.renamings
        ):
            there = set(source.places())
            blocks = [
                source.block(at, rank, self.names, renaming, is_first)
                for rank, renaming in renamings.items()
                if (at, rank) in there
            ]
            if self.split is not None:
                losses = [self.loss_of(block) for block in blocks]
                blocks = wholes_of(self.split, blocks, losses, self.names)
            sides.append(blocks)
        gathered = gather(layout, sides[0], sides[1], self.names)
        self.tally.counts["absent"] += gathered.absent
        self.tally.counts["merged"] += gathered.merged
        self.tally.note("padded", *gathered.padded)
        self.tally.note("grouped", *gathered.notes)
        return gathered.ours, gathered.theirs, gathered.sums

    def loss_of(self, block: Block) -> Optional[float]:
        """The loss of a step from the step table; None if it was not recorded separately."""
        parts: dict[str, list[int]] = {"": [], GIVEN_LOSS: [], GRAD_LOSS: []}
        for index in np.flatnonzero(block.phases == Phase.LOSS).tolist():
            name = self.names[int(block.names[index])]
            if name.role == "loss":
                kind = next(k for k in (GIVEN_LOSS, GRAD_LOSS, "") if name.label.startswith(k))
                parts[kind].append(index)
        scale = self._scale_of(block)
        plain, given, grad = (numbers_in(block.records[indices]) for indices in parts.values())
        return loss_of_step(plain, given, grad, scale)

    def _scale_of(self, block: Block) -> Optional[float]:
        scales = block.records[block.names == self.names.number(_SCALE)]
        return float(scales["max"][-1]) if len(scales) else None

    def _note_missing(self, ours: Block, theirs: Block, pairs: Alignment, compared: _Step) -> None:
        paired = set(compared.names.tolist())
        for state, block, index, phase in missing_of(
            (self._actual, self._reference), ours, theirs, pairs
        ):
            name = self.names[int(block.names[index])]
            # msprobe dumps no call of the module that is not in another.
            of_root = self.compares_parts and name.role in PASSED and not (name.module or name.op)
            is_operator = compared.are_gradients_alike and name.op and name.direction != "optimizer"
            _, is_part = compared.in_parts.get(int(block.names[index]), (0.0, False))
            if of_root or is_operator or is_part:
                self.tally.counts["rescheduled"] += bool(is_operator)
                self.tally.miss(state, str(name), phase, block.step, True)
                continue
            self.tally.states[phase][state] += 1
            is_alone = int(block.names[index]) not in paired
            self.tally.miss(state, str(name), phase, block.step, is_alone=is_alone)
            sides = (block, index), None
            left, right = sides if state is PairState.ONLY_ACTUAL else sides[::-1]
            self._report(make_row(self.names, block.step, phase, state, 0.0, 0, left, right))
            if self._actual.kind is Kind.CHECKPOINT and (twin := self._tied_to(block, index)):
                self.tally.note("tied", f"{name} is {twin}")
        mine = self._loaders(ours, pairs.only_ours)
        other = self._loaders(theirs, pairs.only_theirs)
        for wholes, parts, of in (
            (mine, other, ("reference", "actual")),
            (other, mine, ("actual", "reference")),
        ):
            for part, whole, place in find_parts(wholes, parts) if wholes and parts else ():
                text = f"{part} of {of[0]} is {place} of {whole} of {of[1]}"
                self.tally.note("parts_of", text)

    def _tied_to(self, block: Block, index: int) -> str:
        """The name of another tensor of the block that is equal to the bit, and no constant."""
        own, others = block.records[index], block.records
        alike = (others["checksum"] == own["checksum"]) & (others["numel"] == own["numel"])
        alike &= (others["dtype"] == own["dtype"]) & (own["min"] != own["max"])
        alike[index] = False
        return str(self.names[int(block.names[np.argmax(alike)])]) if alike.any() else ""

    def _loaders(self, block: Block, which: np.ndarray) -> dict[str, Callable[[], torch.Tensor]]:
        if block.extras is None or self._actual.kind is not Kind.CHECKPOINT:
            return {}
        loaders = {
            str(self.names[int(block.names[i])]): block.extra(i).load for i in which.tolist()
        }
        return {name: load for name, load in loaders.items() if load is not None}

    def _report(self, row: Row) -> None:
        self.tally.keep(row)
        if self._sink is not None:
            self._sink(row)


class _Step(Pairs):
    """Measures and judges the pairs of two blocks."""

    def __init__(
        self,
        run: BlockComparison,
        ours: Block,
        theirs: Block,
        aligned: Alignment,
        before: int,
        sums: frozenset[int],
    ) -> None:
        super().__init__(run.names, ours, theirs, aligned, before, run.thresholds)
        self._run, self._sums = run, sums
        self._turned, self._beyond = np.zeros((2, len(self.states)), bool)
        if run._given:
            is_exact = aligned.same | np.isin(self.phases, run._given)
            self.formats, run.coarsest[self.rank] = inherited_formats(
                self.formats, is_exact, run.coarsest.get(self.rank)
            )
        #: True if the gradients of all parameters are equal but for rounding.
        self.are_gradients_alike = False
        #: The error of the sum of a gradient that one side has in parts, by number of the name, and
        #: whether something tells the order of its elements.
        self.in_parts: dict[int, tuple[float, bool]] = {}

    def take(self) -> None:
        """Measures the pairs that are not equal to the bit, and adds all pairs to the tally."""
        tally = self._run.tally
        open_pairs = np.flatnonzero(~self.aligned.same)
        if len(open_pairs):
            self._measure(open_pairs)
        self._settle_arrived()
        self._judge_sums()
        self._judge_given()
        self._judge_updates()
        self._excuse_schedule()
        self._excuse_unsteady()
        self._excuse()
        inexact = (self.states != PairState.SAME) & (self.has_bits | (self.errors > 0))
        settled = (self.states == PairState.SAME) | (self.states == PairState.UNREADABLE)
        without_bits = ~(self.has_bits | settled)
        tally.counts["without_bits"] += int(without_bits.sum())
        depth = np.minimum(self.left["depth"], self.right["depth"])
        tally.counts["without_statistics"] += int((without_bits & (depth < Depth.STATS)).sum())
        is_counted = self._is_counted()
        for phase in np.unique(self.phases).tolist():
            here = self.phases == phase
            states, counts = np.unique(self.states[here & is_counted], return_counts=True)
            for state, count in zip(states.tolist(), counts.tolist()):
                tally.states[Phase(phase)][PairState(state)] += count
            self._note(tally.firsts.different, phase, here & (self.states == PairState.DIFFERENT))
            self._note(tally.firsts.inexact, phase, here & inexact)
            self._note(tally.firsts.nonfinite, phase, here & (self.reasons == measure.NONFINITE))
            self._note_growth(Phase(phase), here)
        self._trace(
            inexact
            & ~np.isin(
                self.reasons, (measure.IN_PARTS, measure.SCHEDULE, measure.RESIZED, measure.SCALED)
            )
        )
        self._keep_rows()
        self._keep_losses()
        given = (self.phases == Phase.BATCHES) & self.has_bits
        batches = self.names[given], self.left[given], self.right[given]
        tally.batches[self.rank].keep(self.step, *batches)
        if tally.unchanged is not None:
            for index, is_same in enumerate((self.states == PairState.SAME).tolist()):
                name = str(self.name(index))
                tally.unchanged[name] = is_same and tally.unchanged.get(name, True)
        computed = np.isin(self.phases, COMPUTED[:3])
        self._run.last_computed[self.rank] = self._summed_up(computed)
        if self._run.observer is not None:
            self._run.observer(self)

    def _is_counted(self) -> np.ndarray:
        """A boolean array: all but earlier readings of the same first weight."""
        _, last = np.unique(self.names[::-1], return_index=True)
        is_counted: np.ndarray = self.phases != Phase.WEIGHTS
        is_counted[len(self.names) - 1 - last] = True
        return is_counted

    # Measuring

    def _measure(self, which: np.ndarray) -> None:
        run = self._run
        readable = (self.left["version"][which] > 0) & (self.right["version"][which] > 0)
        for index in which[~readable].tolist():
            self.set(index, PairState.UNREADABLE, 0.0, measure.UNREADABLE)
        which = which[readable]
        left, right = self.left[which], self.right[which]
        measured = measure_records(left, right, run.thresholds, self.formats[which])
        self.states[which], self.errors[which] = measured.states, measured.errors
        self.reasons[which] = measured.reasons
        if self.ours.extras is not None and self.theirs.extras is not None:
            for index in which.tolist():
                self._measure_more(index)
        for index in which[left["dtype"] != right["dtype"]].tolist():
            both = [DTYPES[int(side["dtype"][index])].name for side in (self.left, self.right)]
            run.tally.dtypes[both[0], both[1]] += 1
            if "dtype" not in run._accept and self.states[index] <= PairState.REORDERED:
                self.set(index, PairState.DIFFERENT, self.errors[index], measure.DTYPE)
        self._relate(which[self.states[which] == PairState.DIFFERENT])

    def _relate(self, which: np.ndarray) -> None:
        """Finds the relation of pairs that differ: by their values, where these are there; of
        weights by their checksums.
        """
        tally = self._run.tally
        has_values = self.ours.extras is not None and self.theirs.extras is not None
        if not has_values:
            which = which[self.phases[which] == Phase.WEIGHTS]
        held = {
            int(record["checksum"]): place
            for place, record in enumerate(self.theirs.records if len(which) else ())
            # of equal elements: zeros are no sign of the weight that they come from
            if record["depth"] == Depth.FULL and record["min"] != record["max"]
        }
        for index in which.tolist():
            place = held.get(int(self.left["checksum"][index]))
            is_elsewhere = place is not None and self.name(index) != (
                name := self._run.names[int(self.theirs.names[place])]
            )
            if is_elsewhere:
                self.relations[index] = f"it is what {_path(name)} is in reference"
            if self.phases[index] == Phase.WEIGHTS:
                own = _path(self.name(index))
                tally.elsewhere[own] = _path(name) if is_elsewhere else ""
            mine, other = self.extras(index)
            if mine.load is None or other.load is None or tally.counts["related"] >= _RELATED:
                continue
            tally.counts["related"] += 1
            if is_elsewhere:
                continue
            scales = self._scales_of(index) if self.left["dtype"][index] != _FLOAT32 else {}
            self.relations[index] = relation_of(mine.load().cpu(), other.load().cpu(), scales)

    def _scales_of(self, index: int) -> dict[str, torch.Tensor]:
        """Floats of the actual side alone whose name begins with that of a tensor, or that of its
        module.
        """
        own = str(self.name(index))
        module = own.rpartition(".")[0]
        scales = {}
        for place in self.aligned.only_ours.tolist():
            name, extra = str(self.table[int(self.ours.names[place])]), self.ours.extra(place)
            is_near = name.startswith(own) or (module and name.rpartition(".")[0] == module)
            if is_near and extra.load is not None:
                scale = extra.load().cpu()
                if scale.is_floating_point():
                    scales[name] = scale
        return scales

    def _measure_more(self, index: int) -> None:
        """Compares a pair by shape, by CRC32, by the elements themselves, where they are there."""
        mine, other = self.extras(index)
        if mine.shape is not None and other.shape is not None and mine.shape != other.shape:
            self.set(index, PairState.DIFFERENT, float("inf"), measure.SHAPE)
            return
        if self.left["dtype"][index] == self.right["dtype"][index]:
            sums = [
                side.crc32 or (f"{crc32(side.load()):08x}" if needed and side.load else None)
                for side, needed in ((mine, other.crc32), (other, mine.crc32))
            ]
            if sums[0] is not None and sums[0] == sums[1]:
                self.set(index, PairState.SAME, 0.0, 0)
                return
        if mine.load is None or other.load is None:
            return
        left, right = mine.load(), other.load()
        if left.is_complex() != right.is_complex():
            return
        elements = compare_elements(left, right)
        if not elements.differing and left.dtype == right.dtype and crc32(left) == crc32(right):
            # Equal row by row: only how they lie in memory differs.
            self.set(index, PairState.SAME, 0.0, 0)
            return
        self.elements[index] = elements
        allowed = self._run.thresholds[int(self.formats[index])]
        error = elements.distance
        if elements.nonfinite:
            self.set(index, PairState.DIFFERENT, float("inf"), measure.NONFINITE)
        elif error > allowed.error or (allowed.error == 0 and elements.differing):
            self.set(index, PairState.DIFFERENT, error, measure.ELEMENTS)
        elif elements.largest > allowed.largest:
            self.set(index, PairState.DIFFERENT, error, measure.LARGEST)
        else:
            self.set(index, PairState.CLOSE, error, 0)

    # Judging

    def _settle_arrived(self) -> None:
        """A float that a criterion reads may be a target or something computed between the modules:
        it counts as given while nothing computed before it in this step differs.
        """
        arrived = np.flatnonzero(self.phases == Phase.ARRIVED)
        if not len(arrived):
            return
        computed = np.isin(self.phases, COMPUTED[:3])
        bad = np.flatnonzero(computed & (self.states != PairState.SAME))
        first_bad = int(bad[0]) if len(bad) else len(self.phases)
        self.phases[arrived[arrived < first_bad]] = Phase.BATCHES
        self.phases[arrived[arrived > first_bad]] = Phase.FORWARD

    def _judge_sums(self) -> None:
        """Marks a sum of parts of several ranks as different if the tensors computed next
        differ.
        """
        is_sum = np.isin(self.names, list(self._sums))
        for phase in (Phase.FORWARD, Phase.GRADIENTS) if is_sum.any() else ():
            here = np.flatnonzero(self.phases == phase)
            for index in here[is_sum[here]].tolist():
                after = here[(here > index) & ~is_sum[here]]
                if len(after) and self.states[after[0]] == PairState.DIFFERENT:
                    self.set(
                        index, PairState.DIFFERENT, float(self.errors[after[0]]), measure.UNREDUCED
                    )

    def _judge_given(self) -> None:
        given = np.isin(self.phases, self._run._given)
        given &= (self.states == PairState.CLOSE) | (self.states == PairState.REORDERED)
        if "dtype" in self._run._accept:
            given &= self.left["dtype"] == self.right["dtype"]
        known = np.isin(np.arange(len(given)), list(self.elements)) | self.has_bits
        given &= known | (self.errors > _GIVEN_BY_STATISTICS)
        reordered = given & (self.states == PairState.REORDERED)
        for phase in self.phases[reordered & self._is_counted()].tolist():
            self._run.tally.given_reordered[Phase(phase)] += 1
        if "order" in self._run._accept:
            given &= ~reordered
        self.states[given] = PairState.DIFFERENT
        self.reasons[given & (self.reasons == 0)] = measure.GIVEN

    def _judge_updates(self) -> None:
        """Compares the updates of parameters that are within the thresholds of their own size."""
        run, rank = self._run, self.rank
        stored = np.flatnonzero(np.isin(self.phases, [int(Phase.WEIGHTS), int(Phase.UPDATE)]))
        is_parameter = [self.name(index).role == "param" for index in stored.tolist()]
        where = stored[np.array(is_parameter, bool)]
        arrays = (self.names, self.left, self.right, self.formats)
        now = Parameters(*(array[where] for array in arrays))
        before, run.parameters[rank] = run.parameters.get(rank), now
        if before is None or not run._given or run.tally.unchanged is not None:
            return
        wanted = (self.phases[where] == Phase.UPDATE) & np.isin(
            self.states[where], [int(PairState.CLOSE), int(PairState.REORDERED)]
        )
        if not wanted.any():
            return
        updates = judge_updates(before, now, _FLOAT32)
        self._turned[where] = updates.ratios < _TURNED
        self._beyond[where] = updates.beyond
        for which, reason in ((updates.still, measure.STILL), (updates.apart, measure.UPDATED)):
            for place in np.flatnonzero(which & wanted).tolist():
                ratio = float(updates.ratios[place])
                self.set(int(where[place]), PairState.DIFFERENT, ratio, reason)

    def _excuse_unsteady(self) -> None:
        """Leaves out what two runs of the reference's program do not agree in either."""
        unsteady = self._run.unsteady
        for index in np.flatnonzero(self.states != PairState.SAME).tolist() if unsteady else ():
            name = self.name(index)
            if self.errors[index] <= _REPEATS * unsteady.get(name, -1.0):
                self._leave_out(index, "unsteady", measure.UNSTEADY, float(self.errors[index]))

    def _excuse(self) -> None:
        """Excuses what isn't comparable, and what rounding noise explains, up to the first
        difference.
        """
        run = self._run
        first = run.tally.first(run.tally.firsts.different, COMPUTED)
        if not run._given or (first is not None and first.key[0] < self.step):
            return
        if run.compares_parts:
            run.tally.counts["parts"] += excuse_parts(self)
        drift = run.drifts[self.rank]
        if run.split is not None:
            run.tally.note("small", *excuse_small(self, drift))
        run.tally.note("cancelled", *excuse(self, drift, COMPUTED))

    def _excuse_schedule(self) -> None:
        """Leaves out what differs where the gradients of all parameters agree: operators that come
        in another order, once more, or between casts, up to the first that makes other numbers of
        the same inputs; and gradients of what modules take and return that one side has in parts,
        if their sums and the loss agree too.
        """
        run, tally = self._run, self._run.tally
        has_missing = len(self.aligned.only_ours) + len(self.aligned.only_theirs) > 0
        if not has_missing and (self.states == PairState.SAME).all():
            return
        names = [self.table[n] for n in self.names.tolist()]
        grads = np.array([name.role == "param_grad" for name in names], bool)
        if not grads.any() or not run.judges_operators or not self._has_all_gradients():
            return
        left, right, errors = self.left[grads], self.right[grads], self.errors[grads]
        codes = coarser_of(left["dtype"], right["dtype"])
        limits = np.array([rounding_limit(int(code)) for code in codes])
        _, is_small = sizes_in_step(left, right, codes)
        is_known = (left["depth"] >= Depth.STATS) & (right["depth"] >= Depth.STATS)
        is_alike = is_known & (self.states[grads] != PairState.DIFFERENT)
        is_alike = (is_alike & (errors <= _SUMMED * limits)) | (
            self.states[grads] == PairState.SAME
        )
        self.are_gradients_alike = bool((is_alike | is_small).all())
        if not self.are_gradients_alike:
            return
        limits = np.where(np.isin(codes, _FINE), _SUMMED, 1) * limits
        if has_missing and bool(((errors <= limits) | is_small).all()):
            self._find_parts()
            for part, (_, is_told) in self.in_parts.items():
                tally.note("in_parts", name := str(self.table[part]))
                tally.noted["untold"].pop(name, None)
                if not is_told:
                    tally.note("untold", name)
        differs = (self.states == PairState.DIFFERENT) | (self.states == PairState.REORDERED)
        resizing = self._resizing()
        criteria = self._criteria() if differs.any() and self._has_same_loss() else set()
        is_faulty = is_resized = False
        for index in np.flatnonzero(differs & (self.reasons != measure.NONFINITE)).tolist():
            name, number = names[index], int(self.names[index])
            if name.op and name.direction != "optimizer":
                is_faulty |= self.reasons[index] in MEASURED and self._has_same_inputs(names, index)
                if is_faulty:  # what comes later may follow from it
                    continue
                self.excused[index] = float(self.errors[index])
                self.set(index, PairState.CLOSE, 0.0, measure.SCHEDULE)
                tally.counts["rescheduled"] += 1
            elif (
                self.reasons[index] == measure.NUMEL
                and name.role in PASSED
                and (is_resized or name.module in resizing)
            ):
                is_resized = True
                self._leave_out(index, "resized", measure.RESIZED)
            elif (
                name.module in criteria
                and name.role in ("output", "grad_output")
                and self.states[index] == PairState.DIFFERENT
            ):
                self._leave_out(index, "scaled", measure.SCALED)
            elif number in self.in_parts:
                self.set(index, PairState.CLOSE, self.in_parts[number][0], measure.IN_PARTS)

    def _leave_out(self, index: int, kind: str, reason: int, error: float = 0.0) -> None:
        """Excuses a pair, and notes its name among those of this kind."""
        self.set(index, PairState.CLOSE, error, reason)
        self._run.tally.note(kind, str(self.name(index)))

    def _resizing(self) -> set[str]:
        """The modules that read another number of elements, or what one side alone has, where the
        loss agrees. What passes between modules from the first of them on is excused: the rows of
        an expert to which no token goes are in no gradient.
        """
        numbers = [
            self.names[self.reasons == measure.NUMEL],
            self.ours.names[self.aligned.only_ours],
            self.theirs.names[self.aligned.only_theirs],
        ]
        if not len(numbers[0]) or not self._has_same_loss():
            return set()
        read = (self.table[number] for number in np.concatenate(numbers).tolist())
        return {name.module for name in read if name.role == "input"}

    def _criteria(self) -> set[str]:
        """The modules that return a loss, which the program may divide or sum before backward()."""
        losses = np.unique(self.names[self.phases == Phase.LOSS]).tolist()
        return {name.module for name in map(self.table.__getitem__, losses) if name.module}

    def _has_same_inputs(self, names: Sequence[Name], index: int) -> bool:
        """True if this is an output of an operator whose inputs, which stand right before it, are
        equal to the bit: no schedule has made it another.
        """
        inputs: list[int] = []
        for place in range(index - 1, -1, -1):
            is_call = names[place][:2] == names[index][:2] and names[place].op == names[index].op
            if not is_call or (inputs and names[place].role != "input"):
                break
            if names[place].role == "input":
                inputs.append(place)
        return names[index].role == "output" and bool((self.states[inputs] == PairState.SAME).all())

    def _has_all_gradients(self) -> bool:
        """True if the last gradient of each parameter, which the optimizer reads, has a partner."""
        for block, paired in ((self.ours, self.aligned.ours), (self.theirs, self.aligned.theirs)):
            last = {number: place for place, number in enumerate(block.names.tolist())}
            wanted = [place for n, place in last.items() if self.table[n].role == "param_grad"]
            if not np.isin(wanted, paired).all():
                return False
        return True

    def _find_parts(self) -> None:
        """Finds gradients of what modules take and return that come another number of times on the
        two sides, as where backward() is called for each part of a loss, and have the same sum: of
        their values, or of all elements, if the loss agrees too. Which does not tell their order:
        the gradients of parameters do that are computed from it.
        """
        names = [self.table[number] for number in self.theirs.names.tolist()]
        ends = {name: place for place, name in enumerate(names)}
        # A bias has the sum of all rows, whatever their order.
        trained = {n.module for n in ends if n.role == "param_grad" and "bias" not in n.label}
        outputs = [n for n in ends if n.role == "grad_output" and n.module in trained]
        read = max((ends[name] for name in outputs), default=-1)
        is_same_loss = self._has_same_loss()
        blocks = self.ours, self.theirs
        for number, *places in uneven_calls(*blocks):
            name = self.table[number]
            sides = [block.records[at] for block, at in zip(blocks, places)]
            records = np.concatenate(sides)
            if name.op or name.role not in PASSED[2:] or records["depth"].min() < Depth.STATS:
                continue
            sums = [float(side["sum"].sum()) for side in sides]
            size = max(float(side["abs_sum"].sum()) for side in sides)
            limit = _SUMMED * max(rounding_limit(int(code)) for code in records["dtype"])
            error = abs(sums[0] - sums[1]) / size if size else 0.0
            extras = [
                [block.extra(at) for at in own.tolist()] for block, own in zip(blocks, places)
            ]
            loads = [[extra.load for extra in side if extra.load] for side in extras]
            shapes = {extra.shape for side in extras for extra in side}
            has_values = len(shapes) == 1 and list(map(len, loads)) == list(map(len, extras))
            if has_values:
                mine, other = (torch.stack([load() for load in side]).sum(0) for side in loads)
                error = compare_elements(mine, other).distance
            if error <= limit and (has_values or is_same_loss):
                self.in_parts[number] = error, has_values or ends[name] <= read

    def _has_same_loss(self) -> bool:
        losses = self._losses()
        return losses is not None and losses.error <= SAME_LOSS

    def _losses(self) -> Optional[LossPair]:
        """The losses of the step, where both sides have recorded it separately."""
        mine, other = (self._run.loss_of(block) for block in (self.ours, self.theirs))
        return None if mine is None or other is None else LossPair(self.step, mine, other)

    # Adding to the tally

    def _trace(self, inexact: np.ndarray) -> None:
        """Notes the first computed tensor that is not equal to the bit, and what follows it."""
        origins, rank = self._run.tally.origins, self.rank
        computed = np.isin(self.phases, COMPUTED)
        is_update = self.phases == Phase.UPDATE
        drift = self._run.drifts[rank]
        # Rounding noise moves some parameters as far as an update does.
        for index in np.flatnonzero(is_update & (self.states == PairState.CLOSE)).tolist():
            computed[index] &= not drift.may_move(self.name(index))
        is_update &= computed
        origin = origins.get(rank)
        if origin is not None:
            if origin.is_open:
                reads = is_update
                if origin.is_parameters_gradient:
                    reads = is_update & (self.states != PairState.SAME)
                else:
                    # Adam's first updates have a sign by rounding where a gradient is nearly 0.
                    turned = is_update & self._turned & (self.errors > origin.limit)
                    turned &= self.errors <= _TURNED_LIMITS * origin.limit
                    origin.turned = int(turned.sum())
                    is_update = is_update & ~turned
                self._follow(origin, is_update, int(reads.sum()))
                origin.is_updated |= bool(is_update.any())
                # The first update of Adam is the same for gradients with other last bits.
                origin.is_open = origin.is_parameters_gradient and not reads.any()
            return
        firsts = {phase: np.flatnonzero(inexact & (self.phases == phase)) for phase in COMPUTED}
        keys = {
            self.key(int(phase), int(where[0])): int(where[0])
            for phase, where in firsts.items()
            if len(where)
        }
        if not keys:
            self._run.computed_before[rank] = self.names[computed]
            self._run.equal_step[rank] = self
            return
        key = min(keys)
        index = keys[key]
        code = int(self.formats[index])
        left, right, state = self.left[index], self.right[index], PairState(self.states[index])
        origin = origins[rank] = Origin(
            key,
            self.row(index),
            rounding_limit(code, index in self.elements),
            self.name(index).role == "param_grad",
            is_permuted(left, right, state, code),
            bool(self._beyond[index]),
            is_late=(is_late := self.names[index] in self._run.computed_before.get(rank, ())),
            causes=list(causes_of(self, index, self._run.equal_step[rank])) if is_late else [],
            alike=(alike := self._alike(index))[0],
            is_alone=alike[1] == 1,
            is_open=key[1] != Phase.UPDATE,
        )
        after = computed & (np.arange(len(computed)) != index)
        if origin.is_open:
            after &= ~is_update & (np.arange(len(computed)) > index)
        self._follow(origin, after, 0 if origin.is_parameters_gradient else int(after.sum()))

    def _alike(self, index: int) -> tuple[int, int]:
        """The number of tensors of its role that are equal to the bit, and of all others."""
        role, here = self.name(index).role, self.phases == self.phases[index]
        same = [
            state == PairState.SAME
            for n, state in zip(self.names[here].tolist(), self.states[here].tolist())
            if self.table[n].role == role
        ]
        return sum(same), len(same) - sum(same)

    def _follow(self, origin: Origin, which: np.ndarray, readers: int) -> None:
        where = np.flatnonzero(which)
        worst = None
        if len(where):
            ranked = np.lexsort((self.errors[where], self.states[where] == PairState.DIFFERENT))
            worst = self.row(int(where[ranked[-1]]))
        origin.follow(readers, worst)

    def _note(self, table: dict[Phase, Found], phase: int, which: np.ndarray) -> None:
        where = np.flatnonzero(which)
        if not len(where):
            return
        first = int(where[0])
        key = self.key(phase, first)
        before = table.get(Phase(phase))
        if before is not None and before.key <= key:
            return
        computed = np.isin(self.phases, COMPUTED)
        # Parameters are read a step later than they are made.
        beside = computed & ((self.phases == Phase.UPDATE) == (phase == Phase.UPDATE))
        after = np.flatnonzero(beside & (np.arange(len(beside)) > first))[:_TRAIL]
        beside[first:] = False
        last = str(self.name(int(np.flatnonzero(beside)[-1]))) if beside.any() else ""
        error, exact = self._summed_up(beside)
        count = int(beside.sum())
        if phase == Phase.UPDATE:
            count += len(computed)
            before_error, before_exact = self._run.last_computed.get(self.rank, (0.0, True))
            error, exact = max(error, before_error), exact and before_exact
        trail = tuple(self.row(index) for index in after.tolist())
        has_places = phase in (Phase.FORWARD, Phase.LOSS, Phase.GRADIENTS)
        alone = self._alone_before(phase, first) if has_places else ((), ())
        calls = self.other_order(first) if phase == Phase.FORWARD else None
        row = self.row(first)
        table[Phase(phase)] = Found(key, row, error, exact, trail, count, alone, last, calls)

    def _alone_before(self, phase: int, first: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Outputs, or gradients, of one side alone before this pair; and what its module reads."""
        phase = Phase.FORWARD if phase == Phase.LOSS else phase
        found = []
        for block, only_here, matched in (
            (self.ours, self.aligned.only_ours, self.aligned.ours),
            (self.theirs, self.aligned.only_theirs, self.aligned.theirs),
        ):
            is_before = (only_here < matched[first]) & (block.phases[only_here] == phase)
            names = [self.table[number] for number in block.names[only_here[is_before]].tolist()]
            own = self.name(first).module
            shown = [
                n
                for n in names
                if phase == Phase.GRADIENTS
                or n.role == "output"
                or (n.role == "input" and n.module == own)
            ]
            found.append(tuple(dict.fromkeys(map(str, shown))))
        return found[0], found[1]

    def _summed_up(self, which: np.ndarray) -> tuple[float, bool]:
        errors, states = self.errors[which], self.states[which]
        if not len(errors):
            return 0.0, True
        return float(errors.max()), bool((states == PairState.SAME).all())

    def _note_growth(self, phase: Phase, here: np.ndarray) -> None:
        where = np.flatnonzero(here)
        worst = int(where[np.argmax(self.errors[where])])
        error = float(self.errors[worst])
        name = str(self.name(worst))
        if phase in COMPUTED:
            self._run.tally.grow(self.step_of(phase, worst), error, name)
        before = self._run.tally.firsts.worst.get(phase)
        if error > (0.0 if before is None else before.row.error):
            key = self.key(int(phase), worst)
            self._run.tally.firsts.worst[phase] = Found(key, self.row(worst), 0.0, False)

    def _keep_rows(self) -> None:
        run, tally = self._run, self._run.tally
        if run._sink is not None:
            for index in np.flatnonzero(self.states != PairState.SAME).tolist():
                run._sink(self.row(index))
        kept = np.flatnonzero(self.states > PairState.CLOSE)
        room = KEPT_ROWS - len(tally.rows)
        tally.counts["rows"] += len(kept[room:])
        tally.rows += [self.row(index) for index in kept[:room].tolist()]

    def _keep_losses(self) -> None:
        """The loss of the step, of the lowest rank."""
        step, losses = self.step, self._run.tally.losses
        if step in losses or len(losses) >= KEPT_STEPS:
            return
        if (known := self._losses()) is not None:
            losses[step] = known
            return
        for index in np.flatnonzero(self.phases == Phase.LOSS).tolist()[::-1]:
            if self.name(index).direction == "forward":
                mine, other = (loss_of(side[index]) for side in (self.left, self.right))
                if mine is not None and other is not None:
                    losses[step] = LossPair(step, mine, other)
                    return
