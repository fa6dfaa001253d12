"""Compares two sides block by block: one step of one rank is in memory, aligned and measured."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Callable, Optional

import numpy as np
import torch

from fastcheck.comparison.steps.course import Course
from fastcheck.comparison.steps.judging import judge
from fastcheck.comparison.steps.outcome import add_to_tally
from fastcheck.comparison.steps.pairs import Pairs
from fastcheck.comparison.steps.step import StepPairs
from fastcheck.comparison.steps.values import measure_pairs
from fastcheck.record.format import Depth, Flag

from .align import align, missing_of
from .block import SIDES, Block, Kind, Phase, Source
from .layout import Layout, gather
from .measure import PairState
from .names import Name, Renaming
from .relation import find_parts
from .row import make_row
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

#: The norm of clipped gradients is that of torch's clipping to this.
_CLIPPED = 1e-4


def differing_names(
    runner: BlockComparison, places: Iterable[tuple[int, int, int]]
) -> dict[Name, float]:
    """The largest error of each name that is not equal to the bit in some of these steps."""
    errors: dict[Name, float] = {}

    def take(compared: Pairs) -> None:
        for index in np.flatnonzero(compared.states != PairState.SAME).tolist():
            name = runner.names[int(compared.names[index])]
            errors[name] = max(errors.get(name, 0.0), float(compared.errors[index]))

    runner.course.observer, runner.course.judges_operators = take, False
    for step, other, rank in places:
        runner.compare(step, other, rank)
    return errors


def _multiplied(block: Block, which: np.ndarray, factor: float) -> Block:
    """The block with the statistics of some tensors multiplied. A checksum can't be."""
    records = block.records.copy()
    for field in ("min", "max", "sum", "abs_sum", "sum_sq"):
        records[field][which] *= factor ** (2 if field == "sum_sq" else 1)
    records["depth"][which] = np.minimum(records["depth"][which], Depth.STATS)
    return Block(block.step, block.rank, block.names, block.phases, records)


@dataclass(eq=False)
class BlockComparison:
    """Compares the blocks of two sources into a Tally."""

    course: Course
    _renaming: Renaming
    #: The layout of tensors that are in other parts, on ranks or in modules.
    layout: Optional[Layout] = None
    #: True if learning rates are compared: those of groups have one record.
    reads_rates: bool = True

    def __post_init__(self) -> None:
        self._of_reference = self._renaming.of_reference()
        self._actual, self._reference = self.course.sides
        self.names, self.tally = self.course.names, self.course.tally
        self._last_step: dict[int, int] = {}

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
        elif self.course.split is not None:
            own = self.course.split.ranks
            ours = self._whole(self._actual, ours, own[0], self._renaming, self.course.split)
            theirs = self._whole(
                self._reference, theirs, own[1], self._of_reference, self.course.split
            )
        ours, theirs = self._without_recomputed(ours, theirs)
        if self._actual.kind is self._reference.kind is Kind.LOG:
            ours, theirs = self._without_clipping(*self._without_scales(ours, theirs))
        losses = [self.course.loss_of(ours), self.course.loss_of(theirs)]
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
        before = self._last_step.get(rank, other)
        compared = StepPairs(self.course, ours, theirs, pairs, before, sums)
        if not pairs.same.all():
            measure_pairs(compared, np.flatnonzero(~pairs.same))
        judge(compared)
        add_to_tally(compared)
        if self.course.observer is not None:
            self.course.observer(compared)
        self._note_missing(compared)
        self._last_step[rank] = other

    def _without_recomputed(self, *sides: Block) -> tuple[Block, Block]:
        """The blocks without what activation checkpointing has computed again on one side alone; of
        either side the tally gets what was computed otherwise then.
        """
        kept = []
        for side, block in zip(SIDES, sides):
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
        scales = [self.course.scale_of(block) for block in sides]
        if scales[0] == scales[1] or not all(scale is None or scale > 0 for scale in scales):
            return sides[0], sides[1]
        mine, other = ("none" if scale is None else f"{scale:,g}" for scale in scales)
        self.tally.note("scales", f"is {mine} in actual and {other} in reference")
        made = []
        for block, scale in zip(sides, scales):
            block = without_role(block, "loss_scale", self.names)
            if None in scales:
                block = without_role(block, "found_inf", self.names)
            carry = (block.records["flags"] & int(Flag.SCALED)) != 0
            passed = [has_role(block, role, self.names) for role in ("grad_input", "grad_output")]
            made.append(_multiplied(block, carry & (passed[0] | passed[1]), 1 / (scale or 1.0)))
        return made[0], made[1]

    def _without_clipping(self, *sides: Block) -> tuple[Block, Block]:
        """The blocks with the gradients of parameters of one side multiplied by what clipping makes
        of them, if torch clips there, which are read before, and the other side clips by itself.
        """
        norms = [block.records[has_role(block, "grad_norm", self.names)] for block in sides]
        clips = int(len(norms[1]) > 0)
        if len(norms[1 - clips]) or not len(norms[clips]):
            return sides[0], sides[1]
        changes = self.course.sides[clips].schedules.get("clipping.threshold", ())
        limits = [value for step, value in changes if step <= sides[clips].step]
        norm = float(norms[clips]["max"][-1])
        if not limits or not norm > limits[-1] > 0:
            return sides[0], sides[1]
        other = sides[1 - clips]
        grads = other.records[has_role(other, "param_grad", self.names)]
        if abs(math.sqrt(grads["sum_sq"].sum()) / limits[-1] - 1) > _CLIPPED:
            return sides[0], sides[1]
        self.tally.note("clipped", SIDES[clips])
        made = list(sides)
        which = has_role(made[clips], "param_grad", self.names)
        made[clips] = _multiplied(made[clips], which, limits[-1] / (norm + 1e-6))
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
            # Its own readings come after the step.
            block.phases[np.isin(block.names, found.names)] = Phase.FORWARD
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
        wholes = wholes_of(
            split, blocks, [self.course.loss_of(block) for block in blocks], self.names
        )
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
            if self.course.split is not None:
                losses = [self.course.loss_of(block) for block in blocks]
                blocks = wholes_of(self.course.split, blocks, losses, self.names)
            sides.append(blocks)
        gathered = gather(layout, sides[0], sides[1], self.names)
        self.tally.counts["absent"] += gathered.absent
        self.tally.counts["merged"] += gathered.merged
        self.tally.note("padded", *gathered.padded)
        self.tally.note("grouped", *gathered.notes)
        return gathered.ours, gathered.theirs, gathered.sums

    def _note_missing(self, compared: StepPairs) -> None:
        ours, theirs, pairs = compared.ours, compared.theirs, compared.aligned
        paired = set(compared.names.tolist())
        for state, block, index, phase in missing_of(
            (self._actual, self._reference), ours, theirs, pairs
        ):
            name = self.names[int(block.names[index])]
            # msprobe dumps no call of the module that is not in another.
            of_root = (
                self.course.compares_parts and name.role in PASSED and not (name.module or name.op)
            )
            is_operator = compared.are_gradients_alike and name.op and name.direction != "optimizer"
            _, is_part = compared.in_parts.get(int(block.names[index]), (0.0, False))
            if of_root or is_operator or is_part:
                self.tally.counts["rescheduled"] += bool(is_operator)
                self.tally.miss(state, str(name), phase, block.step, True)
                continue
            self.tally.states[phase][state] += 1
            is_alone = int(block.names[index]) not in paired
            is_zero = bool(block.records["zero_count"][index] == block.records["numel"][index])
            self.tally.miss(state, str(name), phase, block.step, is_alone=is_alone, is_zero=is_zero)
            sides = (block, index), None
            left, right = sides if state is PairState.ONLY_ACTUAL else sides[::-1]
            self.course.report(make_row(self.names, block.step, phase, state, 0.0, 0, left, right))
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
