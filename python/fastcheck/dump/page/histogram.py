"""Histogram of a stored tensor's values."""

from __future__ import annotations

from typing import Any, Optional

import torch

__all__ = ["BINS", "value_histogram"]

BINS = 40


def value_histogram(values: torch.Tensor) -> Optional[dict[str, Any]]:
    """``low`` and ``high``: the smallest and the largest finite value; ``counts``: of BINS
    intervals of equal width between them, one where all are equal. None without a finite value.

    ``values`` on the host, of any dtype; of complex numbers both parts are counted.
    """
    if values.is_complex():
        values = torch.view_as_real(values)
    flat = values.detach().reshape(-1).to(torch.float64)
    finite = flat[torch.isfinite(flat)]
    if not finite.numel():
        return None
    low, high = float(finite.min()), float(finite.max())
    if low == high:
        return {"low": low, "high": high, "counts": [finite.numel()]}
    # Halved: the distance of the two ends of float64 is no float64.
    share = (finite / 2 - low / 2) / (high / 2 - low / 2)
    bins = (share * BINS).to(torch.int64).clamp_(0, BINS - 1)
    counts = torch.bincount(bins, minlength=BINS)
    return {"low": low, "high": high, "counts": counts.tolist()}
