"""monitor.watch.parameters(): the numbers of each parameter, as the last step has them."""

from __future__ import annotations

from typing import Optional

import numpy as np

from fastcheck.record.site import SiteTable

from .gradient_rules import GradientRules
from .signals import GRADIENT, WEIGHT, StepSignals
from .update_rules import UpdateRules

__all__ = ["PARAMETERS_DTYPE", "parameter_table"]

#: monitor.watch.parameters(), one row per parameter; NaN: not known.
PARAMETERS_DTYPE = np.dtype(
    [
        ("parameter", "U160"),
        ("weight_norm", "<f8"),
        ("gradient_norm", "<f8"),
        ("usual_gradient_norm", "<f8"),
        ("update_ratio", "<f8"),
        ("lost_updates", "<f8"),
        ("reduction", "<f8"),
        ("eps", "<f8"),
    ]
)


def parameter_table(
    sites: SiteTable,
    signals: Optional[StepSignals],
    medians: np.ndarray,
    gradients: GradientRules,
    updates: UpdateRules,
) -> np.ndarray:
    """Rows of PARAMETERS_DTYPE, in the order in which parameters were read. ``medians``: of the rms
    of each site, in log2.
    """
    rows: dict[str, dict[str, float]] = {}
    if signals is not None:
        with np.errstate(all="ignore"):
            size = np.sqrt(signals.numel)
            norms = 2.0 ** signals.values[1] * size
            usual = 2.0 ** medians[signals.sites] * size
        for at in np.flatnonzero((signals.phases == WEIGHT) | (signals.phases == GRADIENT)):
            number = int(signals.sites[at])
            site, norm = sites[number], float(norms[at])
            if site.role == "param":
                rows.setdefault(site.key, {})["weight_norm"] = norm
            elif site.role == "param_grad":
                row = rows.setdefault(site.key.removesuffix(".main_grad"), {})
                row |= {"gradient_norm": norm, "usual_gradient_norm": float(usual[at])}
                row |= {"eps": gradients.epsilon_of(number)}
    of_updates = {
        "update_ratio": updates.ratios,
        "lost_updates": updates.shares,
        "reduction": updates.reductions.ratios,
    }
    for name, last in of_updates.items():
        for number, value in last.items():
            rows.setdefault(sites[number].key, {})[name] = value
    names = PARAMETERS_DTYPE.names or ()
    return np.array(
        [(key, *(row.get(name, np.nan) for name in names[1:])) for key, row in rows.items()],
        PARAMETERS_DTYPE,
    )
