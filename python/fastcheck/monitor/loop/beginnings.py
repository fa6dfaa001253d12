"""The state that an optimizer begins with: its moments, and those of its scaler and scheduler."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from fastcheck.utils.torch.own_operators import no_grad, unobserved
from fastcheck.utils.torch.readable import can_hold_nonfinite, can_read_now

# A function of LambdaLR that returns less than this is hardly a factor, unless it is a warm-up, by
# which it would have grown to more than so many times its first value.
_LEAST_FACTOR, _WARM_UP = 0.01, 2.0
# Rates from which such a factor makes an ordinary rate.
_LARGE_RATE = 0.1


def updates_of(optimizer: torch.optim.Optimizer) -> int:
    """The number of updates that an optimizer says it has made; 0: it does not count, or on a
    device.
    """
    for state in optimizer.state.values():
        count = state.get("step") if isinstance(state, dict) else None
        if isinstance(count, torch.Tensor):
            return int(count) if count.is_cpu and count.numel() == 1 else 0
        return int(count) if isinstance(count, (int, float)) else 0
    return 0


def lost_moments(optimizer: torch.optim.Optimizer) -> str:
    """Names the moments of an optimizer, if all are 0; empty: they are not. Reads as a rule the
    first of them alone, and waits for a device then.
    """
    moments = [
        (name, value)
        for state in optimizer.state.values()
        for name, value in state.items()
        if name != "step" and torch.is_tensor(value) and can_hold_nonfinite(value)
    ]
    if not moments or not all(can_read_now(value) for _, value in moments):
        return ""
    with unobserved(), no_grad():
        if any(bool(value.any()) for _, value in moments):
            return ""
    names = ", ".join(dict.fromkeys(name for name, _ in moments))
    return f"{type(optimizer).__name__}: {names}"


def new_scale(scaler: Any) -> float:
    """The scale of a scaler that has none of its own yet; 0: a state was loaded."""
    # load_state_dict() writes both of these.
    is_new = getattr(scaler, "_init_growth_tracker", None) == 0
    return float(getattr(scaler, "_init_scale", 0.0)) if is_new else 0.0


def factor_of(scheduler: Any) -> float:
    """The factor by which a LambdaLR multiplies the rate of the first group; 0: it is none."""
    bases = getattr(scheduler, "base_lrs", None)
    if not isinstance(scheduler, LambdaLR) or not bases or not 0 < bases[0] < _LARGE_RATE:
        return 0.0
    return float(scheduler.optimizer.param_groups[0]["lr"]) / float(bases[0])


def small_factor(scheduler: Any, first: float) -> str:
    """Names a factor that can hardly be meant as one; empty: it is none. ``first``: at the first
    step.
    """
    factor = factor_of(scheduler)
    if not 0 < factor < min(_LEAST_FACTOR, _WARM_UP * first):
        return ""
    rate = float(scheduler.optimizer.param_groups[0]["lr"])
    return (
        f"by {factor:.3g} the {float(scheduler.base_lrs[0]):.3g} that it was made with: {rate:.3g}"
    )
