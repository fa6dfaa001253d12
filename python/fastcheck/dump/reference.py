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
from typing import Any, Callable, Optional

import torch

from fastcheck.calls.module_calls import ModuleNode
from fastcheck.calls.namer import Forward
from fastcheck.calls.selection import CallName
from fastcheck.record.format import DTYPES
from fastcheck.statistics.elements import compare_elements
from fastcheck.statistics.thresholds import EXACT, make_thresholds, rounding_unit
from fastcheck.utils.torch.operators import OpInfo, tensors_of
from fastcheck.utils.torch.own_operators import no_grad, unobserved
from fastcheck.utils.torch.run_on_device import Elsewhere, compute

from .dump_writer import DumpSession

_UNITS = {info.name: rounding_unit(info.code) for info in DTYPES}
#: Rounding errors of many additions grow beyond that of the terms.
_ACCUMULATED = 4.0
#: So many times smaller than an input is the sum of one, at least.
_REDUCED = 4
#: The most roundings that are counted as pointing one way.
_MOST = 8.0
_POINTWISE = getattr(torch.Tag, "pointwise", None)


@dataclasses.dataclass(eq=False)
class OpCall:
    """A call that is under way. ``skipped``: why the reference can't take it."""

    func: Any
    info: OpInfo
    name: CallName
    node: Optional[ModuleNode]
    forward: Optional[Forward]
    flags: int
    is_wanted: bool = True
    inputs: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    skipped: str = ""


def movement(info: OpInfo, func: Any, args: Any, kwargs: Any) -> Sequence[float]:
    """``||a - b||`` of each output for inputs that are off by a rounding unit; empty where it can't
    be computed, or where an operator works element by element and sums up nothing.
    """
    if _POINTWISE is not None and _POINTWISE in getattr(func, "tags", ()):
        return []
    outputs: list[list[torch.Tensor]] = []
    places: tuple[Elsewhere, ...] = (
        Elsewhere(torch.device("cpu"), torch.float64),
        _Moved(0),
        _Moved(None),
    )
    for there in places:
        try:
            taken = there.moved(info, args, kwargs)
        except Exception:
            return []
        results, reason = compute(info, func, *taken, where="on the CPU")
        if reason:
            return []
        outputs.append(results)
    given = [t for value in (*args, *kwargs.values()) for _, t in tensors_of(value, "")]
    largest = max((tensor.numel() for tensor in given), default=0)
    movements = []
    for exact, scattered, together in zip(outputs[0], outputs[1], outputs[2]):
        moved = _ACCUMULATED * _distance(exact, scattered)
        terms = largest / max(exact.numel(), 1)
        if terms >= _REDUCED:
            # Added up one after the other in a narrow dtype, their roundings may point one way.
            moved = max(moved, min(math.sqrt(terms), _MOST) * _distance(exact, together))
        movements.append(moved)
    return movements


def _distance(left: torch.Tensor, right: torch.Tensor) -> float:
    if left.shape != right.shape or not (left.is_floating_point() or left.is_complex()):
        return 0.0
    return float(torch.linalg.vector_norm(left - right))


class _Moved(Elsewhere):
    """Takes float tensors there with each element off by its dtype's rounding unit: in a direction
    of its own, or without ``seed`` all upwards.
    """

    def __init__(self, seed: Optional[int]) -> None:
        super().__init__(torch.device("cpu"), torch.float64)
        # A generator of its own: the program's are not touched.
        self._draw = None if seed is None else torch.Generator().manual_seed(seed)

    def _moved(self, value: Any, known: dict[int, torch.Tensor], written: frozenset[int]) -> Any:
        moved = None
        if isinstance(value, torch.Tensor) and id(value) not in known:
            moved = super()._moved(value, known, written)
            unit = _UNITS.get(str(value.dtype)[6:], 0.0)
            if unit and self._draw is not None:
                signs = torch.randint(0, 2, moved.shape, generator=self._draw) * 2 - 1
                known[id(value)] = moved * (1 + unit * signs)
            elif unit:
                known[id(value)] = moved * (1 + unit)
        return super()._moved(value, known, written)


_CODES = {info.name: info.code for info in DTYPES}
_KEPT = 1000


class Reference:
    """Compares calls with the CPU: in float64 where they run on the CPU anyway, where the same
    computation would give the same result.
    """

    def __init__(self, session: DumpSession) -> None:
        self._session = session
        self._thresholds = make_thresholds()

    def take(
        self, number: int, call: OpCall, args: Any, kwargs: Any, made: Sequence[torch.Tensor]
    ) -> None:
        """``number``: of the call's line in the index."""
        info = call.info
        reason = call.skipped or info.why_once(args, kwargs) or _why_not_again(info, made)
        expected: list[torch.Tensor] = []
        is_wide = all(tensor.is_cpu for tensor in made)
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
        difference = compare_elements(actual, expected.to(actual.dtype))
        allowed = EXACT if call.info.moves_values else self._thresholds[_CODES[dtype]]
        error = math.inf if difference.nonfinite else difference.distance
        is_different = (
            error > allowed.error
            or difference.largest > allowed.largest
            or (allowed.error == 0 and difference.differing > 0)
        )
        unit, cancels = rounding_unit(_CODES[dtype]), False
        if is_different and not difference.nonfinite and unit and allowed is not EXACT:
            by_output = movements()
            summed = by_output[position] / unit if position < len(by_output) else 0.0
            cancels = difference.euclidean <= unit * summed
            if cancels:
                is_different, error = False, difference.euclidean / summed
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
            **dataclasses.asdict(difference),
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
    """The reason why the op can't run again; empty where it can."""
    if info.is_in_place:
        return "in place: its inputs are gone"
    if not made:
        return "it returns no tensor"
    return ""
