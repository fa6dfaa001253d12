"""Reads what an optimizer keeps of a weight that its update has broken: moments that are 0 there,
or that are finite.
"""

from __future__ import annotations

from typing import Optional

import torch

from fastcheck.report.stop_report import MadeBy
from fastcheck.statistics.functions import stats
from fastcheck.utils.text.layout import listed
from fastcheck.utils.torch.own_operators import no_grad, unobserved
from fastcheck.utils.torch.readable import can_hold_nonfinite, can_read

#: The beginning of the name of an operand that is part of an optimizer's state.
STATE = "state "


def search_state(
    optimizer: torch.optim.Optimizer, weight: torch.Tensor, name: str
) -> Optional[MadeBy]:
    """The state that ``optimizer`` has of ``weight``, which is not finite and has this name, where
    that tells of the update. Makes the host wait for a device.
    """
    state = optimizer.state.get(weight)
    if not isinstance(state, dict) or not can_read(weight):
        return None
    with unobserved(), no_grad():
        is_bad = ~weight.isfinite()
        held = {
            f"{STATE}{key}": value
            for key, value in state.items()
            if torch.is_tensor(value) and value.shape == weight.shape
            if can_hold_nonfinite(value) and can_read(value)
        }
        zero = {key: value for key, value in held.items() if torch.equal(value == 0, is_bad)}
        # A bad gradient leaves its NaN in the state: that tells nothing.
        if not zero and (not is_bad.all() or not all(v.isfinite().all() for v in held.values())):
            return None
        records = tuple((key, stats(value).record) for key, value in (zero or held).items())
    of = f"the state that {type(optimizer).__name__} has of {name}"
    if zero:
        which = listed([key.removeprefix(STATE) for key in zero], 5)
        how = (
            f"{which} in {of} {'is' if len(zero) == 1 else 'are'} 0 in those {int(is_bad.sum()):,} "
        )
        how += (
            f"of {is_bad.numel():,} elements that are not finite in the weight, and in no others."
        )
        groups = (g for g in optimizer.param_groups if any(p is weight for p in g["params"]))
        how += " Its eps is 0." if any(group.get("eps") == 0 for group in groups) else ""
        return MadeBy("", how, inputs=records)
    if not records:
        return None
    return MadeBy("", f"{of} is finite, and no element of the weight is.", inputs=records)
