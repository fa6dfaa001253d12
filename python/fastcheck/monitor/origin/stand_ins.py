"""Numbers in place of lost ones: of weights that hold NaN or Inf since an update, for a call that
is run again. A weight is known by its record alone, and gets as many numbers of the same mean and
deviation, within the same range, and as many zeros, the last ones: a row that is 0 whole, as of
what was pruned or added, is often what a quotient can't do with. That of one element, or of equal
elements, is what it was.
"""

from __future__ import annotations

from typing import Optional

import torch

from fastcheck.monitor.session.session import Session
from fastcheck.record.statistics import RecordStatistics, statistics_of
from fastcheck.utils.torch.readable import can_hold_nonfinite, can_read

_ROLES = ("param", "buffer")


def replace_lost(
    module: torch.nn.Module, path: str, step: int, session: Session, seed: int
) -> Optional[int]:
    """Replaces the parameters and buffers of ``module``, which are copies, that are not finite, by
    numbers drawn for their records of this step or of the last step before. The count; None: of
    one of them no such record is in memory. Makes the host wait for a device.
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    stored = [*module.named_parameters(), *module.named_buffers()]
    lost = {
        f"{path}.{name}" if path else name: tensor
        for name, tensor in stored
        if can_hold_nonfinite(tensor) and can_read(tensor) and not tensor.isfinite().all()
    }
    for name, tensor in lost.items():
        known = _last_finite(name, step, session)
        if known is None or known.components != tensor.numel():
            return None
        tensor.data.copy_(_numbers(known, generator).view(tensor.shape))
    return len(lost)


def _last_finite(name: str, step: int, session: Session) -> Optional[RecordStatistics]:
    with session.event_store.lock:
        stored = [n for n, s in enumerate(session.sites) if s.role in _ROLES and s.key == name]
        history = session.event_store.archive.history
        records = [record for site in stored for record in history.of_site(site, 0)]
    known = [statistics_of(record) for record in records if record["step"] <= step]
    finite = [one for one in known if one.rms is not None and not one.nonfinite_count]
    return max(finite, key=lambda one: one.seq, default=None)


def _numbers(known: RecordStatistics, generator: torch.Generator) -> torch.Tensor:
    """Numbers of the host, in float64."""
    assert known.mean is not None and known.rms is not None
    deviation = max(0.0, known.rms**2 - known.mean**2) ** 0.5
    drawn = torch.randn(known.components, generator=generator, dtype=torch.float64, device="cpu")
    drawn = (known.mean + deviation * drawn).clamp(known.min, known.max)
    drawn[known.components - known.zero_count :] = 0
    return drawn
