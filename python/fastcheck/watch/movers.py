"""The order in which tensors left their ranges: what moved first."""

from __future__ import annotations

from typing import Optional

import numpy as np

from fastcheck.record.site import SiteTable

from .columns import Columns
from .event import Mover
from .signals import GRADIENT, INPUT, NAMES, Signals

#: The observed steps in which a first mover is looked for; install(every=10) observes one step in
#: ten.
PAST = 64
#: A signal that is inside again for so many steps has come back.
GAP = 2
_MOST = 5
#: Stands for a step that never came.
NEVER = -(2**40)


class Movers:
    """Remembers since when each signal is outside of its range. One row for each of NAMES."""

    def __init__(self, sites: SiteTable) -> None:
        self._sites = sites
        #: The number of observed steps, in which ages are compared.
        self.now = 0
        never, nothing = np.full((len(NAMES), 1), NEVER), np.zeros((len(NAMES), 1), np.int64)
        self._of = Columns(
            # The step of the training at which each signal left, and by how many spreads.
            left_at=nothing,
            score=np.zeros((len(NAMES), 1)),
            since=never,
            last=never,
            # The place of each tensor in the order of its last step.
            place=np.zeros(1, np.int64),
            phase=np.zeros(1, np.int8),
        )

    def begin(self, signals: Signals) -> None:
        """Takes in the next steps."""
        of, sites = self._of, signals.sites
        of.grow(int(sites.max()) + 1)
        of["place"][sites] = np.arange(len(sites))
        of["phase"][sites] = signals.phases

    def add(self, signals: Signals, k: int, scores: np.ndarray, outside: np.ndarray) -> None:
        """Notes what is outside in step ``k`` of the signals, which has begun. ``scores`` and
        ``outside``: of their levels.
        """
        of, sites = self._of, signals.sites
        for row in np.flatnonzero(outside[:, k].any(axis=1)).tolist():
            out = sites[outside[row, k]]
            has_come_back = of["last"][row, out] < self.now - GAP
            began = out[has_come_back]
            of["since"][row, began] = self.now
            of["left_at"][row, began] = signals.steps[k]
            of["score"][row, began] = scores[row, k, outside[row, k]][has_come_back]
            of["last"][row, out] = self.now

    def first(self, loss: Optional[Mover]) -> tuple[Mover, ...]:
        """The movers that are outside of their range, or were a moment ago, and left it last within
        PAST steps: the first mover first, each module once. ``loss``: since when the loss is
        outside.
        """
        of, now = self._of, self.now
        rows, sites = np.nonzero((of["last"] >= now - GAP) & (of["since"] >= now - PAST))
        since = of["left_at"][rows, sites]
        phases = of["phase"][sites]
        order = np.lexsort((of["place"][sites], phases, since))
        movers: list[Mover] = []
        seen: set[tuple[str, int]] = set()
        is_loss_due = loss is not None
        for at in order.tolist():
            site, phase = self._sites[int(sites[at])], int(phases[at])
            score = float(of["score"][rows[at], sites[at]])
            mover = Mover(int(since[at]), site, NAMES[rows[at]], score, phase == INPUT)
            # The loss comes before the gradients of its step.
            is_later = loss is not None and (mover.step, phase) >= (loss.step, GRADIENT)
            if loss is not None and is_loss_due and is_later:
                movers.append(loss)
                is_loss_due = False
            if (site.module, phase) not in seen:
                seen.add((site.module, phase))
                movers.append(mover)
            if len(movers) >= _MOST:
                break
        if loss is not None and is_loss_due:
            movers.append(loss)
        return tuple(movers[:_MOST])

    def order_of(self, mover: Mover) -> tuple[int, int]:
        """The phase of the mover's tensor, and its place in the order of a step."""
        if mover.site is None:
            return GRADIENT, -1  # the loss comes before all gradients
        return self.order_of_site(self._sites.intern(mover.site))

    def order_of_site(self, number: int) -> tuple[int, int]:
        """The phase and the place of a site, as it was last read."""
        return int(self._of["phase"][number]), int(self._of["place"][number])
