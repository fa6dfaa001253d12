"""Rules for activations and gradients that have become zero, the same everywhere, subnormal, or as
large as their dtype or their function allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fastcheck.record.format import DTYPES
from fastcheck.record.site import SiteTable
from fastcheck.utils.text.numbers import format_number

from .numbers import Reading
from .signals import ACTIVATION, GRADIENT, StepSignals

__all__ = ["IS_FLOAT", "LOSS_STEPS", "Stuck", "StuckTensors", "grouped", "others"]

_ZERO = 0.99
# Of tensors that are stuck from the same step on an event names its own, and so many others: a
# thousand layers are no thousand lines.
_NAMED = 3
# In so many steps in a row.
_STUCK_STEPS = 50
# A gradient underflows: most of it is zero, and much more than it was in its first steps.
_UNDERFLOW, _RISE = 0.9, 0.3
# Of its elements that are not zero so many are subnormal.
_SUBNORMAL = 0.5
#: What shows that precision is lost has to last for so many steps. So do elements at the largest
#: number of a dtype, of which there were none.
LOSS_STEPS = 10
_FIRST = 16
# A tensor with fewer elements may well be all zero by chance.
_LEAST_ELEMENTS = 32
# Of a tanh the mean of 1 - x^2, of a sigmoid that of x(1 - x), both proportional to the derivative:
# at most a quarter of the elements of a tanh is then within 0.9, a ninth of those of a sigmoid
# within 0.1 and 0.9 (Markov's inequality).
_FUNCTIONS = {"Tanh": 1, "Sigmoid": 2}
_TANH_END, _SIGMOID_END = 0.05, 0.01

_ROWS = ("underflow", "subnormal", "dead", "constant", "saturated", "ends")
# Of these the dtype is the cause.
_LOSSES = ("underflow", "subnormal", "saturated")
_STEPS = np.array([LOSS_STEPS, LOSS_STEPS, _STUCK_STEPS, _STUCK_STEPS, LOSS_STEPS, _STUCK_STEPS])
#: By code of the dtype.
IS_FLOAT = np.array([one.name.startswith(("float", "bfloat")) for one in DTYPES])


class Stuck(NamedTuple):
    """A tensor that is newly stuck: its number, what of it, the sentence, and the cause, if the
    rule knows that.
    """

    site: int
    reading: Reading
    text: str
    cause: str


class StuckTensors:
    """Of one rank, whose sites are found in ``sites`` by number. A tensor that was never otherwise
    is not reported.
    """

    def __init__(self, sites: SiteTable) -> None:
        self._sites = sites
        self._functions = np.zeros(0, np.int8)
        self._seen = np.zeros(0, np.int64)
        # In how many steps in a row, by rule.
        self._counts = np.zeros((len(_ROWS), 0), np.int64)
        # Means over the first steps: shares of zeros, of subnormals, of saturated elements, and
        # whether the function was at its ends.
        self._usual = np.zeros((4, 0))
        self._has_lived = np.zeros((2, 0), bool)

    def grow(self, count: int) -> None:
        """Makes room for the numbers below ``count``."""
        held = len(self._seen)
        more = count - held
        if more <= 0:
            return
        more = max(more, held, 64)
        known = range(held, min(held + more, len(self._sites)))
        new = np.zeros(more, np.int8)
        self._functions = np.concatenate([self._functions, new])
        for number in known:
            site = self._sites[number]
            if site.role == "output":
                self._functions[number] = _FUNCTIONS.get(site.module_type, 0)
        for name in ("_seen", "_counts", "_usual", "_has_lived"):
            old = getattr(self, name)
            setattr(self, name, np.pad(old, [(0, 0)] * (old.ndim - 1) + [(0, more)]))

    def add(self, signals: StepSignals) -> list[Stuck]:
        """One step: the tensors that are newly stuck. ``reading.is_warning``: if it was the first
        of its kind in a while.
        """
        sites = signals.sites
        self.grow(len(self._sites))
        is_large = signals.numel >= _LEAST_ELEMENTS
        is_zero = signals.zero_share >= _ZERO
        is_constant = ~is_zero & signals.is_equal
        is_activation = (signals.phases == ACTIVATION) & is_large
        is_gradient = (signals.phases == GRADIENT) & is_large
        is_float = IS_FLOAT[signals.dtypes]
        is_at_end = self._is_at_end(signals)
        nonzero = np.maximum(1.0 - signals.zero_share, 1e-9)
        subnormal = np.minimum(signals.subnormal_share / nonzero, 1.0)
        shares = np.stack([signals.zero_share, subnormal, signals.saturated_share, is_at_end])
        seen = self._seen[sites]
        usual = self._usual[:, sites]
        is_known = seen >= _FIRST
        if not is_known.all():
            self._usual[:, sites] += np.where(is_known, 0.0, shares / _FIRST)
        is_zeroed = signals.zero_share >= np.maximum(_UNDERFLOW, usual[0] + _RISE)
        holds = np.stack(
            [
                is_gradient & signals.is_narrow & is_known & is_zeroed,
                is_gradient
                & is_float
                & is_known
                & (subnormal >= np.maximum(_SUBNORMAL, usual[1] + _RISE)),
                is_activation & is_zero,
                is_activation & is_constant,
                (is_activation | is_gradient)
                & is_float
                & is_known
                & (signals.saturated_share > 0)
                & (usual[2] == 0),
                is_activation & is_at_end & is_known & (usual[3] < 0.5),
            ]
        )
        counts = self._counts[:, sites]
        counts = np.where(holds, counts + 1, 0)
        self._counts[:, sites] = counts
        is_new = counts == _STEPS[:, None]
        found: list[Stuck] = []
        if is_new.any():
            is_new[2:4] &= self._has_lived[:, sites]
            for row, at in np.argwhere(is_new).tolist():
                found.append(_found(signals, int(at), _ROWS[row], float(subnormal[at])))
        self._has_lived[:, sites] |= np.stack([~is_zero, ~is_constant & ~is_zero])
        self._seen[sites] = seen + 1
        return found

    def _is_at_end(self, signals: StepSignals) -> np.ndarray:
        """Whether most of a tanh is near -1 and 1, or of a sigmoid near 0 and 1."""
        found = np.zeros(len(signals.sites), bool)
        codes = self._functions[signals.sites]
        at = np.flatnonzero(codes)
        if len(at):
            with np.errstate(invalid="ignore"):
                square = np.exp2(2 * signals.values[1, at])
                mean = signals.sums[at] / np.maximum(signals.numel[at], 1)
                is_tanh = 1 - square <= _TANH_END
                is_sigmoid = mean - square <= _SIGMOID_END
            found[at] = np.where(codes[at] == _FUNCTIONS["Tanh"], is_tanh, is_sigmoid)
        return found


def grouped(stuck: Sequence[Stuck], sites: SiteTable) -> list[Stuck]:
    """Those of one step: one of each kind, the first, whose text names others."""
    groups: dict[tuple[str, bool], list[Stuck]] = {}
    for one in stuck:
        groups.setdefault((one.reading.kind, one.reading.is_warning), []).append(one)
    return [
        first._replace(text=first.text + others([one.site for one in more], sites))
        for first, *more in groups.values()
    ]


def others(numbers: Sequence[int], sites: SiteTable) -> str:
    """The end of the text of an event that these tensors have too."""
    if not numbers:
        return ""
    named = ", ".join(str(sites[number]) for number in numbers[:_NAMED])
    left = len(numbers) - _NAMED
    return f". So with {named}" + (f" and {left:,} more tensors" if left > 0 else "")


def _found(signals: StepSignals, at: int, row: str, subnormal: float) -> Stuck:
    zero, dtype = float(signals.zero_share[at]), DTYPES[int(signals.dtypes[at])].name
    kind, share = ("saturated" if row == "ends" else row), zero
    if row == "underflow":
        text = f"{zero:.1%} of its elements are zero now: values too small for {dtype}"
    elif row == "subnormal":
        share = subnormal
        text = f"{share:.1%} of its elements that are not zero are subnormal now: values near the "
        text += f"smallest of {dtype}, with fewer bits"
    elif row == "dead":
        text = f"{zero:.1%} of its elements have been zero for {_STUCK_STEPS} steps"
    elif row == "constant":
        text = f"all its elements have been equal for {_STUCK_STEPS} steps"
    elif row == "saturated":
        share = float(signals.saturated_share[at])
        text = f"{format_number(share * float(signals.numel[at]))} of its elements have been at "
        text += f"the largest {dtype}, {format_number(float(signals.abs_max[at]))}, for "
        text += f"{LOSS_STEPS} steps: larger values may have been cut to it"
    else:
        share = float(np.exp2(2 * signals.values[1, at]))
        text = f"nearly all its elements have been at the ends of the function for {_STUCK_STEPS} "
        text += "steps, where its gradient is nearly 0"
    warns = row not in ("subnormal", "ends")
    cause = "precision" if row in _LOSSES else ""
    return Stuck(int(signals.sites[at]), Reading(kind, share, 0.0, np.nan, warns), text, cause)
