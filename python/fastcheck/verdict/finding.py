"""A finding: one non-finite record before its verdict is final."""

from __future__ import annotations

from typing import Optional

import numpy as np

from fastcheck.calls.module_calls import Call
from fastcheck.record.format import NONFINITE_COUNTS, Depth, DeviceMode, Flag, Verdict
from fastcheck.record.statistics import statistics_of

__all__ = ["Finding", "is_event", "saturated_signs"]

#: Where the largest finite number is taken for an overflow, on a device that saturates. A batch or
#: a weight may hold it on purpose: torch.finfo(dtype).min is a common mask.
_SATURABLE = frozenset({"output", "loss", "grad_input", "grad_output", "param_grad"})


def is_event(record: np.void, role: str) -> bool:
    """Whether a record that overflowed() is one to be judged, of a tensor in this role."""
    counts = (record[name] for name in NONFINITE_COUNTS)
    return role in _SATURABLE or any(counts)


class Finding:
    """One non-finite record of the open step. Its verdict may change until the step is settled."""

    def __init__(
        self, record: np.void, role: str, call: Optional[Call] = None, thread: int = 0
    ) -> None:
        self.record = record
        self.role = role
        self.call = call
        self.thread = thread
        self.seq = int(record["seq"])
        # Its place among the others: its sequence number, or that of the finding for which the
        # parameter was read.
        self.position = self.seq
        self.site = int(record["site"])
        self.blamed_site = self.site
        # Whose inputs and parameters explain it; None where nothing observed was read to make it.
        self.blamed_call = call if role == "output" else None
        self.verdict = Verdict.NONE
        self.reason = ""
        self.counted = False
        # It is in the batch that this rank was given, and came from no other rank.
        self.is_data = False
        # Covered by allow_nonfinite().
        self.is_allowed = False
        self.line = self.api = ""
        self.cause: Optional[Finding] = None
        # An infinity that a module read and returned finite values for: it did no harm there.
        self.is_absorbed = False
        # What an unresolved or scaled finding becomes when it turns out to matter.
        self.planned: Optional[tuple[Verdict, str]] = None
        # At module level: its consequences decide (pending.py).
        self.waits = False
        # The exception that ended the forward in which it was made.
        self.ended_by = ""

    @property
    def only_neginf(self) -> bool:
        """Every non-finite value is -Inf: a masked score and a log(0) look alike here. What
        saturated stands for an infinity of its sign, where the record has the extremes.
        """
        record = self.record
        if self.is_saturated and saturated_signs(record) != 2:
            return False
        return not record["nan_count"] and not record["posinf_count"]

    @property
    def is_saturated(self) -> bool:
        """Whether it holds values that a device saturates instead of returning an infinity."""
        is_saturating = self.record["device_mode"] == int(DeviceMode.SATURATING)
        return bool(is_saturating and self.record["saturated_count"])

    @property
    def mask_reason(self) -> str:
        """Why a finding with only_neginf is no event yet."""
        if self.is_saturated:
            return "all that saturated is negative, as in a mask"
        return "its only non-finite values are -Inf"

    @property
    def has_nan(self) -> bool:
        return bool(self.record["nan_count"])

    @property
    def is_mask(self) -> bool:
        """Nothing but zeros and -Inf, both of them: only ever written on purpose."""
        record = self.record
        zeros = int(record["zero_count"])
        # Complex tensors count each part, and never match: no mask is complex.
        masked = int(record["neginf_count"])
        if self.is_saturated:
            masked += int(record["saturated_count"])
        everything = zeros + masked == int(record["numel"])
        return self.only_neginf and zeros > 0 and everything

    @property
    def is_gradient(self) -> bool:
        return self.role in ("grad_input", "grad_output", "param_grad", "grad_norm")

    @property
    def is_confirmed(self) -> bool:
        """Non-finite beyond doubt: neither a possible mask nor a scaled gradient."""
        return self.verdict in (Verdict.ORIGIN, Verdict.ARRIVED, Verdict.PROPAGATED)

    @property
    def is_tentative(self) -> bool:
        """It may be a mask, or nothing was made of it yet."""
        return self.verdict is Verdict.UNRESOLVED and not self.is_gradient

    @property
    def is_pending(self) -> bool:
        """Whether it counts as soon as something that it led to lasts or leaves."""
        if not self.waits or self.planned is None:
            return False
        return self.verdict in (Verdict.UNRESOLVED, Verdict.ABSORBED)

    @property
    def is_unused(self) -> bool:
        """A gradient that no optimizer has used yet."""
        return self.verdict is Verdict.UNRESOLVED and self.role == "param_grad"

    @property
    def is_held_input(self) -> bool:
        """Whether it came in with the batch, and nothing has shown harm: a weight's gradient is
        made of it, even where the output is finite.
        """
        is_held = self.role == "input" and self.is_tentative and not self.waits
        return is_held and not self.only_neginf

    @property
    def root(self) -> Finding:
        """The finding that this one follows from, through any number of others."""
        finding = self
        while finding.cause is not None:
            finding = finding.cause
        return finding

    def detach(self) -> None:
        """Its step has ended: of what it follows from only the root stays in memory."""
        root = self.root
        self.cause = None if root is self else root

    def decide(self, verdict: Verdict, reason: str, cause: Optional[Finding] = None) -> None:
        self.verdict = verdict
        self.reason = reason
        self.cause = cause
        self.planned = None

    def hold(self, verdict: Verdict, reason: str, planned: Verdict, planned_reason: str) -> None:
        """A verdict for now, and the one that it becomes if it turns out to matter."""
        self.verdict = verdict
        self.reason = reason
        self.planned = (planned, planned_reason)

    def release(self) -> None:
        """The planned verdict takes effect."""
        if self.planned is not None:
            self.verdict, self.reason = self.planned
            self.planned = None

    @property
    def flags(self) -> int:
        """The bits for the record's flags word."""
        return (int(Flag.EVENT) if self.counted else 0) | (int(self.verdict) << 8)


def saturated_signs(record: np.void) -> int:
    """Of a record with saturated values, bit 0: the largest finite number is among them; bit 1: the
    lowest. 0: the record's depth has no extremes.
    """
    reading = statistics_of(record)
    form = reading.float_format
    if record["depth"] < Depth.STATS or form is None or reading.max is None or reading.min is None:
        return 0
    return int(reading.max >= form.max) | int(reading.min <= -form.max) << 1
