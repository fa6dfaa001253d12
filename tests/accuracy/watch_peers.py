"""The rules of other systems for loss spikes, written from their definitions, for watch.py.

Each takes the losses or the norms of the gradients of all steps, and returns the steps at which it
raises an alarm.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

__all__ = ["PEERS"]


def olmo_core(values: Sequence[float]) -> list[int]:
    """StabilityMonitorCallback of OLMo-core: above the mean by 6 standard deviations of the last
    128 values, once there are so many.
    """
    found = []
    for step in range(128, len(values)):
        window = values[step - 128 : step]
        deviation = statistics.pstdev(window)
        if deviation > 1e-10 and values[step] > statistics.fmean(window) + 6 * deviation:
            found.append(step)
    return found


def llm_foundry(losses: Sequence[float]) -> list[int]:
    """KillLossSpike of LLM Foundry: at least twice the mean of a window (5 % of the run, at least
    100 steps), five times in a row.
    """
    size = max(100, len(losses) // 20)
    found, in_a_row = [], 0
    for step in range(size, len(losses)):
        is_high = losses[step] >= 2 * statistics.fmean(losses[step - size : step])
        in_a_row = in_a_row + 1 if is_high else 0
        if in_a_row == 5:
            found.append(step)
    return found


def zclip(norms: Sequence[float]) -> list[int]:
    """ZClip: exponential averages (0.97) of mean and variance after 25 steps, z above 2.5. A value
    above enters the averages as one of z = 2.5^2 / z, as far above as its excess is large
    (reciprocal clipping: Kumar et al., 2025).
    """
    warm_up, alpha, limit = 25, 0.97, 2.5
    found: list[int] = []
    mean = statistics.fmean(norms[:warm_up])
    variance = statistics.pvariance(norms[:warm_up])
    for step in range(warm_up, len(norms)):
        deviation = math.sqrt(variance) + 1e-6
        value = norms[step]
        score = (value - mean) / deviation
        if score > limit:
            found.append(step)
            value = mean + deviation * limit**2 / score
        mean = alpha * mean + (1 - alpha) * value
        variance = alpha * variance + (1 - alpha) * (value - mean) ** 2
    return found


#: By name: the rule, and which column of the table of steps it looks at.
PEERS = {
    "OLMo-core, loss": (olmo_core, "loss"),
    "OLMo-core, gradient norm": (olmo_core, "gradient_norm"),
    "LLM Foundry, loss": (llm_foundry, "loss"),
    "ZClip, gradient norm": (zclip, "gradient_norm"),
}
