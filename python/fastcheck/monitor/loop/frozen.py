"""A parameter that was frozen, and that its optimizer goes on changing; an optimizer all of whose
parameters are frozen.
"""

from __future__ import annotations

from typing import Optional

import torch

from fastcheck.monitor.weights.updates import checksums
from fastcheck.utils.torch.own_operators import no_grad, unobserved
from fastcheck.utils.torch.readable import can_read_now

_LOOKS = 5


class Frozen:
    """Looks at a parameter of an optimizer that requires no gradient, and has one of 0, as
    zero_grad(set_to_none=False) leaves it: momentum and weight decay go on with that. Reads it and
    its gradient, five times at most, and waits for a device then.
    """

    def __init__(self) -> None:
        self._looks = 0
        # The number of the parameter, and its checksum at the last look.
        self._last = (0, 0)

    def look(self, optimizer: torch.optim.Optimizer) -> Optional[torch.Tensor]:
        """The parameter, if it has changed since the last look."""
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        found = next((p for p in parameters if not p.requires_grad and p.grad is not None), None)
        if found is None or self._looks == _LOOKS:
            return None
        if not (can_read_now(found) and can_read_now(found.grad)):
            return None
        self._looks += 1
        with unobserved(), no_grad():
            has_gradient = bool(found.grad.any())
        (now,) = checksums([found])
        last, self._last = self._last, (0, 0) if has_gradient else (id(found), now)
        return found if last[0] == self._last[0] != 0 and last[1] != now else None


def of_frozen(optimizer: torch.optim.Optimizer) -> str:
    """Names an optimizer none of whose parameters requires a gradient; empty: one does."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not parameters or any(p.requires_grad for p in parameters):
        return ""
    return f"{type(optimizer).__name__}, {len(parameters)} parameters"
