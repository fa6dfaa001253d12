"""The calls of backward() that one update follows: how many there are, and over how many targets
the cross entropy of each averages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import torch

from fastcheck.utils.torch.own_operators import no_grad, unobserved

from .nodes import kind_of, operand_of, saved_by

# The updates in which targets are counted, and the least ratio of the most to the fewest.
_LOOKS, _LEAST_RATIO = 3, 1.25
# The operators between a loss and its cross entropy at most.
_NEAR = 4
# The number of times that the calls have to be more than at first, in the same way.
_TIMES = 4


class BackwardCalls:
    """Counts calls of backward() from update to update. Reads the numbers of targets in three
    updates of a run, and waits for a device then.
    """

    def __init__(self) -> None:
        #: False once nothing more is looked for, as where the first update follows one call.
        self.is_on = True
        #: The classes of the cross entropy that the first loss is; 0: it is none.
        self.classes = 0
        #: Calls since the last update.
        self.calls = 0
        # The numbers of targets of these calls, each with what their mean is multiplied by; the
        # updates in which they were read.
        self._targets: list[Optional[list[torch.Tensor]]] = []
        self._looks = 0
        # The number of calls before the first update; the updates in a row that had it; the other
        # number that comes between, after how many of these, and how often.
        self._usual = self._row = self._other = self._distance = self._times = 0

    def backward_began(self, roots: Sequence[torch.Tensor]) -> None:
        self.calls += 1
        if self._looks < _LOOKS:
            count = _targets_of(roots[0].grad_fn) if len(roots) == 1 else None
            self._targets.append(count)

    def unequal_targets(self) -> str:
        """Names the numbers of targets of the calls, as an update comes, where they are not nearly
        the same.
        """
        calls, self._targets = self._targets, []
        known = [call for call in calls if call is not None]
        if len(calls) < 2 or len(known) < len(calls) or len(set(map(len, known))) > 1:
            return ""
        self._looks += 1
        with unobserved(), no_grad():
            numbers = [torch.stack([n.float() for n in each]).tolist() for each in zip(*known)]
        least, most = min(numbers[0]), max(numbers[0])
        is_alike = all(len(set(factors)) == 1 for factors in numbers[1:])
        return f"{least:g} to {most:g}" if is_alike and most >= _LEAST_RATIO * least > 0 else ""

    def left_over(self) -> str:
        """Takes in that an update comes, and names the numbers of calls, if at regular distances an
        update has more than the others.
        """
        calls, self.calls = self.calls, 0
        self._usual = self._usual or calls
        if calls == self._usual:
            self._row += 1
        elif self._usual < calls < 2 * self._usual:
            is_same = (self._other, self._distance) == (calls, self._row)
            self._times = self._times + 1 if is_same else 1
            self._other, self._distance, self._row = calls, self._row, 0
            if self._times == _TIMES and self._distance:
                return f"{self._usual}, and {calls} before one in {self._distance + 1} updates"
        else:
            # Fewer calls are an incomplete window that was used.
            self._usual, self._times = -1, 0
        self.is_on = self._usual != 1 and (self._usual >= 0 or self._looks < _LOOKS)
        return ""


def _targets_of(node: Any) -> Optional[list[torch.Tensor]]:
    """The number of targets over which the cross entropy averages that a loss is, and what that is
    multiplied by or divided by; None: it is none, or weighs classes, or they are not known.
    """
    factors: list[torch.Tensor] = []
    for _ in range(_NEAR):
        kind = "" if node is None else kind_of(node)
        if kind == "NllLoss":
            is_mean = node._saved_reduction == 1 and node._saved_weight is None
            count = saved_by(node, "total_weight") if is_mean else None
            return None if count is None else [count, *factors]
        if kind not in ("Div", "Mul"):
            return None
        saved = (saved_by(node, name) for name in ("other", "self"))
        factor = next((each for each in saved if each is not None and each.numel() == 1), None)
        if factor is None:
            return None
        factors.append(factor.detach().reshape(()))
        node = operand_of(node)
    return None
