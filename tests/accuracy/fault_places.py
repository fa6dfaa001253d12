"""Where a fault of fault_injection.py lies, and whether a monitor names that place."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

from accuracy.fault_programs import Call, Lasting
from fastcheck.record.format import VALUE_BYTES
from fastcheck.types import Verdict

__all__ = ["Expected", "expected_places", "how_named"]


class Expected(NamedTuple):
    """``seq``: of the record at op level, whose ``values`` are those of the faulty tensor.
    ``module``: that ran the operator, or its forward.
    """

    call: Call
    step: int
    seq: int
    module: str
    values: bytes


def expected_places(monitor: Any, step: int, calls: list[Call]) -> dict[Call, Expected]:
    """The record of the first output of each of these calls at op level.

    What ran in backward has the name of the forward operator, and its own in brackets: there the
    calls of an operator are told apart by their order.
    """
    records = monitor.records()
    made: dict[tuple[str, str], list[tuple[int, str, bytes]]] = {}
    for record in records[records["step"] == step]:
        site = monitor.sites[int(record["site"])]
        if site.op is None or site.role in ("input", "grad_output"):
            continue
        op = site.label.partition("(")[2].rstrip(")") or site.op
        made.setdefault((op, site.direction), []).append(
            (int(record["seq"]), site.module, values_of(record))
        )
    counts = Counter((call.op, call.direction) for call in calls)
    found = {}
    for call in calls:
        rows, count = made.get((call.op, call.direction), []), counts[call.op, call.direction]
        if rows and len(rows) % count == 0:
            found[call] = Expected(call, step, *rows[call.number * len(rows) // count])
    return found


def values_of(record: Any) -> bytes:
    """What is equal in two records of one tensor."""
    return bytes(record.tobytes()[:VALUE_BYTES])


def nearest_modules(monitor: Any, expected: Expected, found: list[Lasting]) -> set[str]:
    """Modules at whose boundary the fault is first seen: that of the operator, the next one that
    its result reached at op level, and of an update those of the parameters it wrote.
    """
    if expected.call.direction == "optimizer":
        return {what.name.rpartition(".")[0] for what in found}
    nearest = {expected.module}
    for event in monitor.events:
        site = event.site
        if int(event.record["seq"]) > expected.seq and site.module_type != "outside the model":
            nearest.add(site.module)
            if site.module != expected.module:
                # And those that contain it, but not the operator's.
                parts = site.module.split(".")
                containers = {".".join(parts[:n]) for n in range(1, len(parts))}
                nearest |= {c for c in containers if not f"{expected.module}.".startswith(f"{c}.")}
                break
    if all(what.kind == "gradient" for what in found):  # of one parameter, which may be shared
        nearest |= {what.name.rpartition(".")[0] for what in found[:2]}
    return nearest


def how_named(monitor: Any, level: str, expected: Expected, nearest: set[str], counts: bool) -> str:
    """ "exact", "silent", or what was reported instead. ``counts``: the fault has consequences."""
    first = next((event for event in monitor.events if event.counted), None)
    if first is None:
        return "nothing was counted" if counts else "silent"
    if level == "op":
        is_named = first.verdict in (Verdict.ORIGIN, Verdict.ABSORBED)
        is_named = is_named and int(first.record["seq"]) == expected.seq
    else:
        # What an update wrote is read when the next step begins.
        late = 1 if expected.call.direction == "optimizer" else 0
        is_same = values_of(first.record) == expected.values
        is_named = first.step == expected.step + late
        is_named = is_named and (is_same or first.site.module in nearest)
    if is_named:
        return "exact" if counts else "counted without a consequence"
    verdict = first.verdict.name.lower()
    return f"{verdict} at {first.site}, step {first.step}{'' if counts else ', no consequence'}"
