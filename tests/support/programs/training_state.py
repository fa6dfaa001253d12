"""All that a training step may change, to the bit: two of them are compared."""

from __future__ import annotations

import copy
import random
from typing import Any, Optional

import numpy as np
import torch

__all__ = ["same", "state_of"]


def state_of(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, scaler: Any, **more: Any
) -> dict[str, Any]:
    """A copy of the weights, gradients, states and generators, and of ``more``."""
    gradients: list[Optional[torch.Tensor]] = [p.grad for p in model.parameters()]
    return copy.deepcopy(
        {
            "model": {name: value.clone() for name, value in model.state_dict().items()},
            "grads": [None if one is None else one.clone() for one in gradients],
            "optimizer": optimizer.state_dict(),
            "scaler": scaler.state_dict(),
            "rng": (torch.get_rng_state(), random.getstate(), np.random.get_state()),
            **more,
        }
    )


def same(a: Any, b: Any) -> bool:
    """Whether two of these are equal to the bit."""
    if isinstance(a, torch.Tensor):
        return bool(torch.equal(a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(np.array_equal(a, b))
