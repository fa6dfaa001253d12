"""Course of a comparison: what its steps go by, and what each hands on to the next."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Callable, Optional

import numpy as np

from fastcheck.comparison.block import Block, Kind, Phase, Source
from fastcheck.comparison.measure import Parameters
from fastcheck.comparison.names import Name, NameTable
from fastcheck.comparison.row import Row
from fastcheck.comparison.split import Split
from fastcheck.comparison.tally import Tally
from fastcheck.log.step_table import loss_of_step, numbers_in
from fastcheck.record.site import GIVEN_LOSS, GRAD_LOSS
from fastcheck.statistics.thresholds import Threshold

from .noise import Drift
from .pairs import Pairs

# The factor that the loss of a step was multiplied by.
_SCALE = Name("", "optimizer", "loss_scale", "loss scale")

RowSink = Callable[[Row], None]


@dataclass
class Handed:
    """Handed on by the steps of one rank. ``drift``: the parameters that updates by noise have
    moved until now.
    """

    drift: Drift
    #: The code of the coarsest dtype of what was not equal to the bit until now.
    coarsest: Optional[int] = None
    #: The largest error of what the step before computed, and whether it was exact.
    computed: tuple[float, bool] = (0.0, True)
    #: The names of what the last step that was equal to the bit has computed, and its pairs.
    equal_names: Sequence[int] = ()
    equal_step: Optional[Pairs] = None
    #: The numbers of the parameters of the first step.
    first_weights: Sequence[int] = ()
    #: The steps until now, with a hash of all parameters that either side had when it began.
    states: list[tuple[int, int, int]] = field(default_factory=list)
    #: The parameters of the step before.
    parameters: Optional[Parameters] = None


@dataclass(eq=False)
class Course:
    """``sides``: actual and reference; ``accept``: what may differ; ``sink``: takes each row."""

    sides: tuple[Source, Source]
    thresholds: Sequence[Threshold]
    accept: frozenset[str]
    sink: Optional[RowSink] = None
    names: NameTable = field(default_factory=NameTable)
    tally: Tally = field(default_factory=Tally)
    #: The split of the batch, when the two sides split it in different ways.
    split: Optional[Split] = None
    #: True if operators of another schedule are left out.
    judges_operators: bool = True
    #: The largest error between two runs of the reference's program, by name.
    unsteady: Mapping[Name, float] = field(default_factory=dict)
    #: Called with each step that was compared.
    observer: Optional[Callable[[Pairs], None]] = None

    def __post_init__(self) -> None:
        kinds = {side.kind for side in self.sides}
        #: True if one side's gradients are parts of the other's.
        self.compares_parts = len(kinds) > 1 and Kind.MSPROBE in kinds
        # A run's batches and first weights are given; a checkpoint's weights were computed.
        is_run = self.sides[0].kind.family == "run"
        self.given = (Phase.BATCHES, Phase.WEIGHTS) if is_run else ()
        self.has_ranks = is_run and len({rank for _, rank in self.sides[1].places()}) > 1
        #: A step, and the checksums of both sides' gradients of the lowest rank in it, by number.
        self.first_gradients: tuple[int, dict[int, tuple[int, int]]] = -1, {}
        #: By rank.
        self.handed: dict[int, Handed] = defaultdict(lambda: Handed(Drift(*self.sides)))

    def loss_of(self, block: Block) -> Optional[float]:
        """The loss of a step from the step table; None if it was not recorded separately."""
        parts: dict[str, list[int]] = {"": [], GIVEN_LOSS: [], GRAD_LOSS: []}
        for index in np.flatnonzero(block.phases == Phase.LOSS).tolist():
            name = self.names[int(block.names[index])]
            if name.role == "loss":
                kind = next(k for k in (GIVEN_LOSS, GRAD_LOSS, "") if name.label.startswith(k))
                parts[kind].append(index)
        scale = self.scale_of(block)
        plain, given, grad = (numbers_in(block.records[indices]) for indices in parts.values())
        return loss_of_step(plain, given, grad, scale)

    def scale_of(self, block: Block) -> Optional[float]:
        """The factor that the loss was multiplied by; None if there is none."""
        scales = block.records[block.names == self.names.number(_SCALE)]
        return float(scales["max"][-1]) if len(scales) else None

    def report(self, row: Row) -> None:
        """Keeps a row of the details."""
        self.tally.keep(row)
        if self.sink is not None:
            self.sink(row)
