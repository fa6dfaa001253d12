"""Rerun: what came of running a step several times from the same state, as data and as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Optional

from fastcheck.record.site import Site

_NAMED = 5
_STEPS = {
    "forward": "in the forward pass",
    "backward": "in the backward pass",
    "optimizer": "in what the optimizer was given",
    "after": "after the step",
}


@dataclass(frozen=True)
class Difference:
    """A tensor that is not the same in two runs of a step.

    ``site``: its place. ``call``: which call of the module or operator, counted from 0. ``phase``:
    ``"forward"``, ``"backward"``, ``"optimizer"`` (gradients and weights as the optimizer was given
    them) or ``"after"`` (what the step left). ``place``: how many tensors of the run come before
    it. ``rank``: whose tensor it is. ``run``: the number of the run, from 1, that differs from run
    1. ``values``: what was read of it in both runs: ``checksum``, ``abs_max``, ``nonfinite``; None
    where the run has no such tensor.
    """

    site: Site
    call: int
    phase: str
    place: int
    rank: int
    run: int
    values: tuple[Optional[dict[str, Any]], Optional[dict[str, Any]]]

    @property
    def is_input(self) -> bool:
        """Whether it is what the model was given."""
        return self.site.role == "input" and self.site.module == ""

    def to_json(self) -> dict[str, Any]:
        """The fields by name, ready for JSON."""
        return {**vars(self), "site": self.site.to_dict()}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> Difference:
        """The inverse of to_json(), after JSON."""
        first, other = fields["values"]
        return cls(**{**fields, "site": Site.from_dict(fields["site"]), "values": (first, other)})

    def __str__(self) -> str:
        call = f", call {self.call}" if self.call else ""
        first, other = self.values
        if first is None or other is None:
            which = 1 if other is None else self.run
            found = f"only run {which} has it"
        elif first["checksum"] != other["checksum"]:
            found = f"checksum {first['checksum']:016x} in run 1, {other['checksum']:016x} in run "
            found += f"{self.run}; abs max {first['abs_max']:.6g} and {other['abs_max']:.6g}"
        else:
            found = f"{first['numel']} elements in run 1, {other['numel']} in run {self.run}"
        return f"{self.site}{call}: {found}"


@dataclass(frozen=True)
class Rerun:
    """What fastcheck.rerun() found; ``str()`` of it is a report.

    ``runs``: how often this rank ran the step. ``tensors``: how many tensors of the first run were
    compared. ``differences``: those of this rank, first ones first, of the runs that are not the
    majority. ``first``: the earliest difference of all ranks, in the order of the program.
    ``odd_runs``: the numbers, from 1, of the runs of that rank that differ from most others; empty
    if no two runs are equal. ``is_each_time``: no two are. ``cause``: ``""`` (identical),
    ``"hardware"``, ``"program"``, ``"input"`` (the step was given other data) or ``"unknown"``.
    ``why``: the reason for the cause. ``errors``: runs that raised, by number, with the error.
    """

    identical: bool
    runs: int
    tensors: int
    first: Optional[Difference]
    differences: tuple[Difference, ...]
    odd_runs: tuple[int, ...]
    is_each_time: bool
    cause: str
    why: str
    rank: int
    ranks: int
    errors: tuple[tuple[int, str], ...] = ()
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return render_rerun(self)


def earliest(found: Sequence[Optional[Difference]]) -> Optional[Difference]:
    """The first of these in the order of the program; of two in one place that of the lower
    rank.
    """
    known = [one for one in found if one is not None]
    return min(known, key=lambda one: (one.place, one.rank)) if known else None


def render_rerun(rerun: Rerun) -> str:
    """The report."""
    where = f" on each of {rerun.ranks} ranks" if rerun.ranks > 1 else ""
    if rerun.identical:
        lines = [
            f"The step was run {rerun.runs} times from the same state{where}: {rerun.tensors:,} "
            "tensors, all with the same bits.",
            "What is wrong with this step is the program or its data, unless the machine computes "
            "the same wrong bits each time.",
        ]
        return "\n".join([*lines, *rerun.notes])
    lines = [f"The step was run {rerun.runs} times from the same state{where}, with other bits."]
    if rerun.first is not None:
        of_rank = f"on rank {rerun.first.rank}, " if rerun.ranks > 1 else ""
        lines.append(f"First that differs, {of_rank}{_STEPS[rerun.first.phase]}: {rerun.first}")
    lines += [f"Run {number} raised {error}" for number, error in rerun.errors]
    if rerun.is_each_time:
        lines.append("No two runs are equal: it comes back each time.")
    elif rerun.odd_runs:
        odd = ", ".join(map(str, rerun.odd_runs))
        others = rerun.runs - len(rerun.odd_runs)
        lines.append(f"It came in run {odd}; the other {others} are equal.")
    lines.append(f"Cause: {rerun.cause}. {rerun.why}")
    own = [one for one in rerun.differences if one != rerun.first]
    if own:
        lines.append(f"Also, on rank {rerun.rank}:" if rerun.ranks > 1 else "Also:")
        lines += [f"  {one}" for one in own[:_NAMED]]
        if len(own) > _NAMED:
            lines.append(f"  and {len(own) - _NAMED:,} more")
    return "\n".join([*lines, *rerun.notes])
