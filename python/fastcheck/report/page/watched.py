"""The events of ``install(watch=)`` of a log, for its page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Optional

from fastcheck.errors import printable
from fastcheck.log.reader import read_watch
from fastcheck.record.site import Site
from fastcheck.utils.text.numbers import to_json

from .collect import Collected

__all__ = ["watched_events"]

_MOST = 500
# A forecast beyond it is no place on an axis.
_MOST_STEPS = 1 << 53


def watched_events(found: Collected) -> dict[str, Any]:
    """``watched``: the first events by step, where there are more than 500 those that warn first;
    ``watch_count``: how many there are. What is no such event is left out.
    """
    lines = [line for line in read_watch(found.directory) if _is_whole(line)]
    if not lines:
        return {"watched": [], "watch_count": 0}
    chosen = sorted(lines, key=lambda line: not line.get("is_warning"))[:_MOST]
    row_of = {(rank, str(site)): row for (rank, site), row in found.row_of.items()}
    shown = [_event_fields(line, row_of) for line in sorted(chosen, key=lambda one: one["step"])]
    return {"watched": shown, "watch_count": len(lines)}


def _is_whole(line: Mapping[str, Any]) -> bool:
    return (
        type(line["step"]) is int
        and abs(line["step"]) < _MOST_STEPS
        and type(line.get("rank")) is int
        and isinstance(line.get("kind"), str)
    )


def _event_fields(line: Mapping[str, Any], row_of: Mapping[tuple[int, str], int]) -> dict[str, Any]:
    rank, where = line["rank"], _site_text(line.get("site"))
    return {
        "step": line["step"],
        "rank": rank,
        "kind": printable(line["kind"]),
        "row": row_of.get((rank, where), -1),
        "where": printable(where),
        "value": _number(line.get("value")),
        "reference": _number(line.get("reference")),
        "score": _number(line.get("score")),
        "is_warning": line.get("is_warning") is True,
        "cause": printable(str(line.get("cause") or "")),
        "interval": _interval(line["step"], line.get("interval")),
        "mover": _mover(rank, line.get("movers"), row_of),
        "text": printable(line["text"]),
    }


def _site_text(fields: Any) -> str:
    try:
        return "" if fields is None else str(Site.from_dict(fields))
    except (AttributeError, TypeError):
        return ""


def _mover(
    rank: int, movers: Any, row_of: Mapping[tuple[int, str], int]
) -> Optional[dict[str, Any]]:
    """The first mover."""
    first = movers[0] if isinstance(movers, list) and movers else None
    if not isinstance(first, dict) or type(first.get("step")) is not int:
        return None
    site = first.get("site")
    name = site if isinstance(site, str) else "the loss"
    text = f"{name} ({first.get('signal')}, step {first['step']:,})"
    return {
        "row": row_of.get((rank, name), -1),
        "step": first["step"],
        "text": printable(text),
    }


def _interval(step: int, interval: Any) -> Optional[list[float]]:
    """The steps between which a forecast lies, of the numbers of steps from here."""
    if not isinstance(interval, list) or len(interval) != 2:
        return None
    ends = [float(_number(end) or 0) for end in interval]
    if any(end != end for end in ends):
        return None
    return [float(max(min(step + end, _MOST_STEPS), -_MOST_STEPS)) for end in ends]


def _number(value: Any) -> Any:
    """For JSON: text for what is not finite, None for what is no number."""
    if isinstance(value, str):
        return value if value in ("nan", "inf", "-inf") else None
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return to_json(float(value) if abs(value) < 1e308 or isinstance(value, float) else "inf")
