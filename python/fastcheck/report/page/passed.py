"""How the overflow of the first event's step spread: the tensors that it passed, and from which
others of them each came.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastcheck.record.event import Event
from fastcheck.record.format import VERDICT_MASK, VERDICT_SHIFT

from .collect import Collected

__all__ = ["passed_places"]

_MOST = 400
# How the reason of a verdict ends, where it is another finding's (verdict/findings.py).
_FOLLOWS = "it follows from "


def passed_places(found: Collected, events: Sequence[Event]) -> dict[str, Any]:
    """The tensors of the first event's step that overflowed, in the order of the device.

    Each has the numbers of the places that it came from: ``read``, what the operator that made it
    had read, as op level records it; else ``follows``, which finding the verdict derives it from.
    """
    first, records = found.evidence.first, found.evidence.spread()
    if first is None:
        return {"count": 0, "places": []}
    of_step = {
        int(event.record["seq"]): event
        for event in events
        if (event.rank, event.step) == (first.rank, first.step)
    }
    shown = records[:_MOST]
    number_of = {int(seq): number for number, seq in enumerate(shown["seq"].tolist())}
    # The first of those with one name: the verdict names tensors, not calls.
    named: dict[str, int] = {}
    for seq, found_event in of_step.items():
        if seq in number_of:
            named.setdefault(str(found_event.site), number_of[seq])
    rows = found.rows.find(first.rank, shown["site"])
    places = []
    for number, (record, row) in enumerate(zip(shown, rows.tolist())):
        seq = int(record["seq"])
        event = of_step.get(seq)
        read = [] if event is None else [number_of.get(seq) for _, seq in event.inputs]
        cause = None if event is None else named.get(event.reason.partition(_FOLLOWS)[2])
        verdict = (int(record["flags"]) & VERDICT_MASK) >> VERDICT_SHIFT
        places.append(
            {
                "row": row,
                "seq": seq,
                "call": int(record["call"]),
                "verdict": verdict if event is None else int(event.verdict),
                "counts": [int(record[f"{kind}_count"]) for kind in ("nan", "posinf", "neginf")],
                "read": sorted({one for one in read if one is not None and one != number}),
                "follows": [] if cause is None or cause == number else [cause],
            }
        )
    return {"count": len(records), "places": places}
