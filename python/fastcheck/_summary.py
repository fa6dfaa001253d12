"""The text of monitor.summary(): what was watched, what was found, where, and the last step in
numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from ._layout import section, stderr_is_ascii, table, to_ascii, wrap
from ._naming import module_name, tensor_name
from ._numbers import read, spell
from ._op_names import name_of
from ._record import Verdict
from ._style import row_name

if TYPE_CHECKING:
    from ._site import Site

_LAST_STEP_ROWS = 20


def summary(
    *,
    steps: int,
    records: int,
    sites: int,
    event_count: int,
    overflow_nums: int,
    verdict_counts: Mapping[Verdict, int],
    top_sites: Sequence[tuple[Site, int]] = (),
    last_step: Sequence[tuple[Site, np.void]] = (),
    log_path: str | None = None,
    notes: Sequence[str] = (),
    story: Sequence[tuple[str, Sequence[str]]] = (),
    harmless: Sequence[str] = (),
    scaling: Sequence[str] = (),
    unread: Sequence[str] = (),
    style: str = "fastcheck",
    width: int = 88,
    ascii_only: bool | None = None,
) -> str:
    """Plain text for a person. ``top_sites`` is (site, number of events), most first; ``last_step``
    is what the last finished step recorded, in device order (long ones are cut, non-finite records
    kept). ``story``: labelled lines on the first counted event; ``harmless``: a line for each kind
    of what was not counted; ``scaling``: what loss scaling did in the last steps;
    ``unread``: what op level could not observe.
    """
    body = width - 10
    total = "never stops" if overflow_nums < 0 else f"stops at {overflow_nums:,}"
    watched = [f"{steps:,} steps, {records:,} records of {sites:,} tensors"]
    found = [f"{event_count:,} counted overflow event{'s' if event_count != 1 else ''} ({total})"]
    rows = [
        [verdict.name.lower(), f"{count:,}"]
        for verdict, count in sorted(verdict_counts.items())
        if count and verdict is not Verdict.NONE
    ]
    if rows:
        found += table(["verdict", "tensors"], rows, width=body)
    blocks = [section("watched", watched), section("found", found)]
    blocks += [section(label, lines) for label, lines in story]
    if harmless:
        blocks.append(section("harmless", harmless))
    if scaling:
        blocks.append(section("scaling", scaling))
    if top_sites:
        named = [[_where(s, style), s.direction, f"{n:,}"] for s, n in top_sites]
        blocks.append(
            section("where", table(["tensor", "pass", "events"], named, left=2, width=body))
        )
    if last_step:
        blocks.append(section("last step", _last_step(last_step, body, style)))
    if unread:
        blocks.append(section("unread", unread))
    if log_path is not None:
        blocks.append(section("log", wrap(f"{log_path}   (fastcheck show {log_path})", body)))
    if notes:
        blocks.append(section("note", [line for note in notes for line in wrap(note, body)]))
    text = "\n\n".join("\n".join(block) for block in blocks)
    return to_ascii(text) if (stderr_is_ascii() if ascii_only is None else ascii_only) else text


def _where(site: Site, style: str) -> str:
    if style == "msprobe":
        # The calls of a site are counted together.
        return str(replace(name, call=None)) if (name := name_of(site)) else str(site)
    return f"{module_name(site)} {f'{site.op} ' if site.op else ''}{tensor_name(site)}"


def _last_step(pairs: Sequence[tuple[Site, np.void]], width: int, style: str) -> list[str]:
    readings = [(site, read(record)) for site, record in pairs]
    ranked = sorted(
        range(len(readings)),
        # Non-finite first, then the closest to the end of its format: what a reader looks for.
        key=lambda i: (
            -min(readings[i][1].nonfinite_count, 1),
            -(readings[i][1].range_used or 0.0),
            i,
        ),
    )
    shown = sorted(ranked[:_LAST_STEP_ROWS])
    rows = []
    for index in shown:
        site, reading = readings[index]
        name = row_name(site, reading.call, style)
        rows.append(
            [
                name,
                reading.dtype,
                f"{reading.nonfinite_count:,}",
                spell(reading.abs_max),
                spell(reading.rms),
            ]
        )
    lines = table(["tensor", "dtype", "NaN+Inf", "abs max", "rms"], rows, left=2, width=width)
    hidden = len(readings) - len(shown)
    if hidden:
        lines.append(f"and {hidden:,} more with smaller numbers")
    return lines
