"""monitor.watch.parameters(): the numbers of each parameter, as the last step has them."""

from __future__ import annotations

from typing import Optional

import numpy as np

from fastcheck.record.site import SiteTable

from .signals import RMS, Signals

__all__ = ["PARAMETERS_DTYPE", "parameter_table"]

#: monitor.watch.parameters(), one row per parameter; NaN: not known.
PARAMETERS_DTYPE = np.dtype(
    [
        ("parameter", "U160"),
        ("weight_norm", "<f8"),
        ("gradient_norm", "<f8"),
        ("usual_gradient_norm", "<f8"),
    ]
)
_ROLES = ("param", "param_grad")


def parameter_table(
    sites: SiteTable, signals: Optional[Signals], medians: np.ndarray
) -> np.ndarray:
    """Rows of PARAMETERS_DTYPE, in the order in which parameters were read. ``medians``: of the rms
    of each site, in log2.
    """
    rows: dict[str, list[float]] = {}
    for at, number in enumerate(() if signals is None else signals.sites.tolist()):
        site = sites[number]
        if signals is None or site.role not in _ROLES or not signals.is_read[-1, at]:
            continue
        size = float(signals.numel[-1, at]) ** 0.5
        norm = 2.0 ** float(signals.levels[RMS, -1, at]) * size
        row = rows.setdefault(site.key.removesuffix(".main_grad"), [np.nan] * 3)
        if site.role == "param":
            row[0] = norm
        else:
            row[1:] = norm, 2.0 ** float(medians[number]) * size
    return np.array([(key, *row) for key, row in rows.items()], PARAMETERS_DTYPE)
