"""``reference="cpu"``: every operator once more on the CPU, on the very same inputs, and how far
what it made is from that.

What can't be run again is listed with the reason: operators that draw random numbers, work in
place, communicate, or have no kernel on the CPU.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Callable

import torch

from .._record import DTYPES
from .elsewhere import Elsewhere, compute
from .records import quiet
from .session import DumpSession

if TYPE_CHECKING:
    from .op_calls import OpCall
    from .op_info import OpInfo

__all__ = ["Reference"]

_CODES = {info.name: info.code for info in DTYPES}
_KEPT = 1000


class Reference:
    """``dtype``: ``"same"``, ``"float64"``, or ``"auto"``: float64 for what runs on the CPU
    anyway, where the same once more would say nothing.
    """

    def __init__(self, session: DumpSession, dtype: str) -> None:
        from ..comparison.elements import compare_elements
        from ..comparison.thresholds import make_thresholds

        self._session = session
        self._dtype = dtype
        self._compare: Callable[[torch.Tensor, torch.Tensor], Any] = compare_elements
        self._thresholds = make_thresholds()

    def take(
        self, number: int, call: OpCall, args: Any, kwargs: Any, made: Sequence[torch.Tensor]
    ) -> None:
        """``number``: of the call's line in the index."""
        info = call.info
        reason = call.skipped or info.why_once(args, kwargs) or _reason(info, made)
        expected: list[torch.Tensor] = []
        is_wide = self._dtype == "float64" or (
            self._dtype == "auto" and all(tensor.is_cpu for tensor in made)
        )
        if not reason:
            with quiet(), torch.no_grad():
                expected, reason = _run(info, call.func, args, kwargs, is_wide)
        if not reason and [tuple(t.shape) for t in expected] != [tuple(t.shape) for t in made]:
            reason = "the CPU returns tensors of other shapes"
        with self._session.lock:
            if reason:
                self._session.leave_out(call.info.name, reason)
                return
            with quiet(), torch.no_grad():
                for position, (ours, theirs) in enumerate(zip(made, expected)):
                    self._compare_output(number, call, position, ours, theirs, is_wide)

    def _compare_output(
        self,
        number: int,
        call: OpCall,
        position: int,
        actual: torch.Tensor,
        expected: torch.Tensor,
        is_wide: bool,
    ) -> None:
        floats = actual.is_floating_point() or actual.is_complex()
        if is_wide and not floats:
            # An index of the largest may be another one, where two have rounded to one number.
            self._session.leave_out(call.info.name, "integers, of an op that was run in float64")
            return
        dtype = str(actual.dtype)[6:]
        if dtype not in _CODES:
            self._session.leave_out(call.info.name, f"nothing is known of {dtype}")
            return
        # Rounded as the op has to round: what overflows its format is no fault of the op.
        found = self._compare(actual, expected.to(actual.dtype))
        allowed = self._thresholds[_CODES[dtype]]
        error = math.inf if found.nonfinite else found.distance
        is_different = (
            error > allowed.error
            or found.largest > allowed.largest
            or (allowed.error == 0 and found.differing > 0)
        )
        name = call.name
        line: dict[str, Any] = {
            "n": number,
            "op": name.op,
            "ran": call.info.name,
            "call": name.call,
            "direction": name.direction,
            "module": name.module,
            "output": position,
            "dtype": dtype,
            "error": error,
            "allowed": allowed.error,
            "is_different": is_different,
            **dataclasses.asdict(found),
        }
        self._session.add_reference(line)
        if is_different and len(self._session.differences) < _KEPT:
            self._session.differences.append(line)


def _run(
    info: OpInfo, func: Any, args: Any, kwargs: Any, is_wide: bool
) -> tuple[list[torch.Tensor], str]:
    there = Elsewhere(torch.device("cpu"), torch.float64 if is_wide else None)
    try:
        # Not detached by hand: nothing is recorded below autograd.
        moved = there.moved(info, args, kwargs)
    except Exception as error:
        return [], f"its arguments can't be taken to the CPU: {error}"
    return compute(info, func, *moved, where="on the CPU")


def _reason(info: OpInfo, made: Sequence[torch.Tensor]) -> str:
    """Why the op can't be run again; empty where it can."""
    if info.is_in_place:
        return "in place: its inputs are gone"
    if not made:
        return "it returns no tensor"
    return ""
