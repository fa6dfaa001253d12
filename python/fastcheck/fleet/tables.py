"""The small tables of a node: its sites, ranks, events and meta files, made anew from the log."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Optional

from fastcheck.log.reader import read_event_lines, read_sites_and_meta
from fastcheck.record.site import Site

from .schema import RECORD_FORMAT, site_id

__all__ = ["COORDINATES", "rank_row", "site_row", "small_tables"]

COORDINATES = ("dp", "tp", "pp", "ep", "cp")


def small_tables(
    directory: str, ranks: Iterable[int], node: str
) -> dict[str, list[dict[str, Any]]]:
    """The rows of each of the small tables."""
    sites: dict[int, dict[str, Any]] = {}
    made: dict[str, list[dict[str, Any]]] = {"ranks": [], "events": [], "meta": []}
    for rank in ranks:
        known, meta = read_sites_and_meta(directory, rank)
        for position, site in sorted(known.items()):
            sites.setdefault(site_id(site), site_row(position, site))
        made["ranks"].append(rank_row(rank, node, meta))
        text = json.dumps(meta)
        made["meta"].append({"rank": rank, "format": RECORD_FORMAT, "text": text})
        made["events"] += _events(directory, rank, known)
    return {"sites": list(sites.values()), **made}


def site_row(position: int, site: Site) -> dict[str, Any]:
    """A row of the table of sites. ``position``: the order in which the site was first seen."""
    return {"site": site_id(site), "position": position, "name": str(site), **site.to_dict()}


def rank_row(rank: int, node: str, meta: dict[str, Any]) -> dict[str, Any]:
    """A row of the table of ranks, from what the meta file holds; None where it is unknown."""
    place = meta.get("placement")
    place = place if isinstance(place, dict) else {}
    at = place.get("coordinates")
    at = at if isinstance(at, dict) else {}
    return {
        "rank": rank,
        "node": node,
        "host": _text(place.get("host") or meta.get("host")),
        "device": _text(place.get("device")),
        "serial": _text(place.get("serial")),
        "world_size": _number(place.get("world_size")),
        **{name: _number(at.get(name)) for name in COORDINATES},
        "replica_group": _text(place.get("replica_group")),
        "pid": _number(meta.get("pid")),
        "created": _text(meta.get("created")),
    }


def _events(directory: str, rank: int, sites: dict[int, Site]) -> list[dict[str, Any]]:
    # An event written again (its verdict changed) stands for the earlier one.
    latest: dict[tuple[Any, ...], dict[str, Any]] = {}
    for line in read_event_lines(directory, rank)[0]:
        step, seq, number = (_number(line.get(name)) for name in ("step", "seq", "site"))
        if step is None or number is None:
            continue
        site = sites.get(number)
        latest[step, seq, number] = {
            "rank": rank,
            "step": step,
            "site": number if site is None else site_id(site),
            "seq": seq,
            "verdict": _text(line.get("verdict_name")),
            "counted": bool(line.get("counted")),
            "name": f"site {number}" if site is None else str(site),
            "reason": _text(line.get("reason")),
        }
    return list(latest.values())


def _text(value: Any) -> Optional[str]:
    return None if value is None else str(value)


def _number(value: Any) -> Optional[int]:
    is_one = isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 62
    return value if is_one else None
