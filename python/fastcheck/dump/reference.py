"""``Dumper(reference="cpu")``: runs every operator again on the CPU and measures the difference.

Each kind of operator has its own standard: what only moves or chooses values is equal to the bit,
and everything else is within the thresholds of its dtype. Where the terms of a result cancel, its
error is relative to them: to a result that is 0 in theory every rounding is large. What can't be
run again is listed with the reason: operators that draw random numbers, work in place, communicate,
or have no kernel on the CPU.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Callable

import torch

from fastcheck.record.format import DTYPES
from fastcheck.statistics.elements import compare_elements
from fastcheck.statistics.thresholds import EXACT, make_thresholds, rounding_unit
from fastcheck.utils.torch.own_operators import no_grad, unobserved
from fastcheck.utils.torch.run_on_device import Elsewhere, compute

from .dump_writer import DumpSession
from .rounding import movement

if TYPE_CHECKING:
    from fastcheck.utils.torch.operators import OpInfo

    from .op_call import OpCall

__all__ = ["Reference"]

_CODES = {info.name: info.code for info in DTYPES}
_KEPT = 1000


class Reference:
    """``dtype``: ``"same"``, ``"float64"``, or ``"auto"``: float64 for operators
    that run on the CPU anyway, where the same computation would give the same result.
    """

    def __init__(self, session: DumpSession, dtype: str) -> None:

        self._session = session
        self._dtype = dtype
        self._compare: Callable[[torch.Tensor, torch.Tensor], Any] = compare_elements
        self._thresholds = make_thresholds()

    def take(
        self, number: int, call: OpCall, args: Any, kwargs: Any, made: Sequence[torch.Tensor]
    ) -> None:
        """``number``: of the call's line in the index."""
        info = call.info
        reason = call.skipped or info.why_once(args, kwargs) or _why_not_again(info, made)
        expected: list[torch.Tensor] = []
        is_wide = self._dtype == "float64" or (
            self._dtype == "auto" and all(tensor.is_cpu for tensor in made)
        )
        if not reason:
            with unobserved(), no_grad():
                expected, reason = _compute_elsewhere(info, call.func, args, kwargs, is_wide)
        if not reason and [tuple(t.shape) for t in expected] != [tuple(t.shape) for t in made]:
            reason = "the CPU returns tensors of other shapes"
        with self._session.lock:
            if reason:
                self._session.leave_out(call.info.name, reason)
                return
            with unobserved(), no_grad():
                movements = functools.lru_cache(maxsize=None)(
                    lambda: movement(info, call.func, args, kwargs)
                )
                for position, (ours, theirs) in enumerate(zip(made, expected)):
                    self._compare_output(number, call, position, ours, theirs, is_wide, movements)

    def _compare_output(
        self,
        number: int,
        call: OpCall,
        position: int,
        actual: torch.Tensor,
        expected: torch.Tensor,
        is_wide: bool,
        movements: Callable[[], Sequence[float]],
    ) -> None:
        floats = actual.is_floating_point() or actual.is_complex()
        if is_wide and not floats:
            # The index of a maximum may differ where two values round to one number.
            self._session.leave_out(call.info.name, "integers, of an op that was run in float64")
            return
        dtype = str(actual.dtype)[6:]
        if dtype not in _CODES:
            self._session.leave_out(call.info.name, f"nothing is known of {dtype}")
            return
        # Rounded to the dtype of the op, which also overflows where the exact result does.
        found = self._compare(actual, expected.to(actual.dtype))
        allowed = EXACT if call.info.moves_values else self._thresholds[_CODES[dtype]]
        error = math.inf if found.nonfinite else found.distance
        is_different = (
            error > allowed.error
            or found.largest > allowed.largest
            or (allowed.error == 0 and found.differing > 0)
        )
        unit, cancels = rounding_unit(_CODES[dtype]), False
        if is_different and not found.nonfinite and unit and allowed is not EXACT:
            by_output = movements()
            summed = by_output[position] / unit if position < len(by_output) else 0.0
            cancels = found.euclidean <= unit * summed
            if cancels:
                is_different, error = False, found.euclidean / summed
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
            "allowed": unit if cancels else allowed.error,
            "is_different": is_different,
            "cancels": cancels,
            **dataclasses.asdict(found),
        }
        self._session.add_reference(line)
        if is_different and len(self._session.differences) < _KEPT:
            self._session.differences.append(line)


def _compute_elsewhere(
    info: OpInfo, func: Any, args: Any, kwargs: Any, is_wide: bool
) -> tuple[list[torch.Tensor], str]:
    there = Elsewhere(torch.device("cpu"), torch.float64 if is_wide else None)
    try:
        # Not detached by hand: nothing is recorded below autograd.
        moved = there.moved(info, args, kwargs)
    except Exception as error:
        return [], f"its arguments can't be taken to the CPU: {error}"
    return compute(info, func, *moved, where="on the CPU")


def _why_not_again(info: OpInfo, made: Sequence[torch.Tensor]) -> str:
    """Why the op can't run again; empty where it can."""
    if info.is_in_place:
        return "in place: its inputs are gone"
    if not made:
        return "it returns no tensor"
    return ""
