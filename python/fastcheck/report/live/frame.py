"""One picture of ``fastcheck top``: lines of styled text, no longer than the terminal is wide."""

from __future__ import annotations

import math
import unicodedata
from dataclasses import dataclass
from typing import Optional

from fastcheck.errors import printable
from fastcheck.record.statistics import statistics_of
from fastcheck.utils.text.layout import sparkline, to_ascii, wrap
from fastcheck.utils.text.numbers import format_bytes, format_number

from .state import SORTS, LiveState, SiteRow


def cell_count(text: str) -> int:
    """The number of cells that ``text`` takes."""
    return len(text) if text.isascii() else sum(map(_cells, text))


def fit_cells(text: str, width: int, cut_front: bool = False, mark: str = "…") -> str:
    """``text`` in exactly ``width`` cells: filled with spaces at its end, or cut with ``mark``
    at its end or front.
    """
    missing = width - cell_count(text)
    if missing >= 0:
        return text + " " * missing
    mark = mark[: max(width, 0)]
    kept, room = [], max(width, 0) - len(mark)
    for char in reversed(text) if cut_front else text:
        room -= _cells(char)
        if room < 0:
            break
        kept.append(char)
    part = "".join(reversed(kept) if cut_front else kept)
    padding = " " * (width - len(mark) - cell_count(part))
    return mark + part + padding if cut_front else part + mark + padding


def _cells(char: str) -> int:
    if unicodedata.combining(char):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


#: Pieces of text, each with a style of paint(), "" for none.
Line = list[tuple[str, str]]

_LABEL = 10
_SPARK, _LEAST_SPARK, _NUMBER = 32, 12, 9
_MOST_EVENTS, _EVENT_LINES, _MOST_RANKS = 5, 2, 8
_LEAST_ROWS = 3
#: Bits of headroom below which a row stands out, and below which it does so in red.
_NEAR, _VERY_NEAR = 3.0, 1.0
# The mark of a cut text, and the mark where only ASCII is printed.
_CUT = {False: "…", True: ".."}
_EVENT_STYLES = {"counted": "red", "warning": "yellow", "other": "", "watch": ""}
_NUMBERS = (
    ("loss", "loss"),
    ("scale", "scale"),
    ("lr", "learning_rate"),
    ("grad norm", "gradient_norm"),
)


@dataclass
class View:
    """The choices of the user. ``typing``: the filter is being typed; ``has_keys``: keys are read,
    and so the last line names them.
    """

    sort: str = SORTS[0]
    pattern: str = ""
    offset: int = 0
    typing: bool = False
    has_keys: bool = False

    def press(self, key: str, page: int) -> bool:
        """One key; ``page``: how many sites are shown. False if it ends the program."""
        if self.typing:
            self._type(key)
            return True
        moves = {"j": 1, "down": 1, "k": -1, "up": -1, "pagedown": page, "pageup": -page}
        if key in ("q", "Q"):
            return False
        if key in moves:
            self.offset = max(0, self.offset + moves[key])
        elif key == "home":
            self.offset = 0
        elif key == "s":
            self.sort = SORTS[(SORTS.index(self.sort) + 1) % len(SORTS)]
            self.offset = 0
        elif key == "/":
            self.typing, self.pattern, self.offset = True, "", 0
        elif key == "escape":
            self.pattern, self.offset = "", 0
        return True

    def _type(self, key: str) -> None:
        if key in ("enter", "escape"):
            self.typing = False
            self.pattern = self.pattern if key == "enter" else ""
        elif key == "backspace":
            self.pattern = self.pattern[:-1]
        elif len(key) == 1:
            self.pattern += key


@dataclass(frozen=True)
class Picture:
    """``lines``, and how many sites are among them."""

    lines: list[Line]
    shown: int

    def text(self, ascii_only: bool = False) -> str:
        """The lines without styles."""
        lines = ["".join(text for text, _ in line).rstrip() for line in self.lines]
        return "\n".join(map(to_ascii, lines) if ascii_only else lines)


def picture(
    state: LiveState,
    view: View,
    *,
    path: str,
    width: int,
    rows: Optional[int],
    height: Optional[int],
    wall: float,
    ascii_only: bool = False,
) -> Picture:
    """The state as lines of at most ``width`` cells. ``rows``: how many sites; None: as many as
    ``height`` lines have room for (20 without a height). ``wall``: seconds since the epoch.
    """
    lines = [_title(state, path, width, wall, _CUT[ascii_only])]
    lines += _numbers(state, width, ascii_only)
    lines += _ranks(state)
    lines += _cost(state)
    lines += _events(state, width)
    room = height - len(lines) - 3 - int(view.has_keys) if height is not None else 20
    count = rows if rows is not None else max(room, _LEAST_ROWS)
    chosen, total = state.rows(view.sort, view.pattern, view.offset, count)
    if not chosen and total:  # scrolled beyond the end
        view.offset = max(0, total - count)
        chosen, total = state.rows(view.sort, view.pattern, view.offset, count)
    lines += [[("", "")], *_sites(state, view, chosen, total, width, ascii_only)]
    if view.has_keys:
        lines.append(_keys(view))
    if height is not None and len(lines) > height:
        lines = [*lines[: height - 1], lines[-1]]
    return Picture([_clipped(line, width, _CUT[ascii_only]) for line in lines], len(chosen))


def waiting_picture(path: str, width: int) -> Picture:
    """The picture as long as there is no log."""
    line: Line = [("waiting for a run to begin: there is no log yet at", "dim")]
    return Picture([_clipped(line, width, "…"), [(fit_cells(printable(path), width, True), "")]], 0)


def _title(state: LiveState, path: str, width: int, wall: float, mark: str) -> Line:
    status, is_alive = state.status(wall)
    step = f"step {state.step:,}" if state.step >= 0 else "no step"
    right = f"{step} · "
    style = "green" if is_alive and status == "running" else "yellow"
    room = width - cell_count(right) - cell_count(status) - 2
    left = fit_cells(printable(path), max(room, 8), True, mark)
    return [(left, "bold"), ("  ", ""), (right, ""), (printable(status), style)]


def _label(name: str) -> tuple[str, str]:
    return name.ljust(_LABEL), "bold"


def _numbers(state: LiveState, width: int, ascii_only: bool) -> list[Line]:
    """Loss, scale, learning rate and norm, of the first rank that has them."""
    lines: list[Line] = []
    tables = [rank.steps.rows() for rank in state.ranks.values()]
    for label, name in _NUMBERS:
        rows = next((t for t in tables if any(getattr(r, name) is not None for r in t)), [])
        values = [getattr(row, name) for row in rows]
        if not values:
            continue
        bad = [value is not None and not math.isfinite(value) for value in values]
        room = max(min(_SPARK, width - _LABEL - _NUMBER - 4), 1)
        line = sparkline(values, bad, room, ascii_only)
        style = "red" if bad[-1] else ""
        skipped = sum(row.overflow for row in rows) if name == "scale" else 0
        note = f"  {skipped} of {len(rows)} updates skipped" if skipped else ""
        cell = format_number(values[-1]).rjust(_NUMBER)
        lines.append([_label(label), (cell, style), ("  " + line, ""), (note, "yellow")])
    return lines


def _ranks(state: LiveState) -> list[Line]:
    """One line a rank, where there are several."""
    if len(state.ranks) < 2:
        return []
    lines: list[Line] = []
    for rank in list(state.ranks.values())[:_MOST_RANKS]:
        last = rank.last
        loss = "-" if last is None else format_number(last.loss)
        bits = state.least_headroom(rank.rank)
        text = f"{rank.rank:>4}  step {rank.trends.step:,}  loss {loss}  least headroom "
        lines.append([_label("" if lines else "ranks"), (text, ""), (_bits(bits), _style(bits))])
    hidden = len(state.ranks) - len(lines)
    if hidden > 0:
        lines.append([_label(""), (f"and {hidden:,} more", "dim")])
    return lines


def _cost(state: LiveState) -> list[Line]:
    """The cost of the log: its size, and how fast it grows."""
    if state.step < 0:
        return []
    pace = state.pace()
    parts = []
    if pace.steps_per_second is not None:
        parts.append(f"{format_number(pace.steps_per_second)} steps/s")
    held = [rank for rank in state.ranks.values() if rank.records]
    if held:
        steps = max(max(rank.trends.step - rank.first_step + 1 for rank in held), 1)
        records = sum(rank.records for rank in held) / steps
        parts.append(f"{records:,.0f} records, {format_bytes(192 * records)} a step")
    grows = "" if pace.bytes_per_second is None else f", +{format_bytes(pace.bytes_per_second)}/s"
    parts.append(f"log {format_bytes(state.total_bytes)}{grows}")
    line: Line = [_label("cost"), (" · ".join(parts), "")]
    lines = [line]
    missed = sum(rank.missed_bytes for rank in state.ranks.values())
    damaged = sum(rank.damaged for rank in state.ranks.values())
    notes = [
        *([f"{format_bytes(missed)} went by unread"] if missed else []),
        *([f"{damaged:,} damaged records left out"] if damaged else []),
    ]
    if notes:
        lines.append([_label(""), (", ".join(notes), "dim")])
    return lines


def _events(state: LiveState, width: int) -> list[Line]:
    counts = state.event_counts()
    total = sum(counts.values())
    if not total:
        return [[_label("events"), ("none", "")]]
    named = {
        "counted": "counted",
        "other": "not counted",
        "warning": "warnings of the watch",
        "watch": "others of it",
    }
    style_of_warning = _EVENT_STYLES["warning"] if counts["warning"] else ""
    text = ", ".join(f"{counts[kind]:,} {name}" for kind, name in named.items() if counts[kind])
    lines: list[Line] = [
        [_label("events"), (text, "red" if counts["counted"] else style_of_warning)]
    ]
    for event in state.events(_MOST_EVENTS):
        rank = f"rank {event.rank}: " if len(state.ranks) > 1 and event.kind != "counted" else ""
        style = _EVENT_STYLES[event.kind]
        parts = wrap(rank + printable(event.text), width - _LABEL, rest="  ")
        if len(parts) > _EVENT_LINES:
            parts[_EVENT_LINES - 1 :] = [" ".join(parts[_EVENT_LINES - 1 :])]
        lines += [[_label(""), (part, style)] for part in parts]
    return lines


def _sites(
    state: LiveState, view: View, rows: list[SiteRow], total: int, width: int, ascii_only: bool
) -> list[Line]:
    which = f"{view.offset + 1:,}-{view.offset + len(rows):,} of {total:,}" if rows else "none"
    matching = f" matching {printable(view.pattern)}" if view.pattern else ""
    head: Line = [("sites", "bold"), (f"  {which}{matching}, by {view.sort}", "")]
    several = len(state.ranks) > 1
    has_rms = width >= 80
    spark = _SPARK if width >= 100 else _LEAST_SPARK
    fixed = 6 + 2 + _NUMBER + 2 + has_rms * (_NUMBER + 2) + several * 6 + spark + 2
    name = max(width - fixed, 12)
    header = (
        "site".ljust(name)
        + ("  rank" if several else "")
        + "    bits"
        + "  "
        + "abs max".rjust(_NUMBER)
    )
    header += ("  " + "rms".rjust(_NUMBER)) * has_rms + f"  {spark} steps"
    lines: list[Line] = [head, [(header, "dim")]]
    for row in rows:
        rank = state.ranks[row.rank]
        reading = statistics_of(rank.trends.last[row.site])
        style = _style(row.headroom)
        text = to_ascii(row.name) if ascii_only else row.name
        line: Line = [(fit_cells(text, name, True, _CUT[ascii_only]), style)]
        if several:
            line.append((f"{row.rank:>6}", ""))
        line.append((_bits(row.headroom).rjust(8), style))
        level = float(rank.trends.level[row.site])
        shown = "-" if math.isnan(level) else format_number(level)
        line.append(("  " + shown.rjust(_NUMBER), ""))
        if has_rms:
            line.append(("  " + format_number(reading.rms).rjust(_NUMBER), ""))
        values, bad = rank.trends.series(row.site)
        line.append(("  " + sparkline(values[-spark:], bad[-spark:], spark, ascii_only), style))
        lines.append(line)
    return lines


def _bits(bits: float) -> str:
    if bits == -math.inf:
        return "over"
    return f"{bits:.1f}" if math.isfinite(bits) else "-"


def _style(bits: float) -> str:
    if bits < _VERY_NEAR:
        return "red"
    return "yellow" if bits < _NEAR else ""


def _keys(view: View) -> Line:
    if view.typing:
        return [("filter: ", "bold"), (printable(view.pattern) + "_", ""), ("  Enter, Esc", "dim")]
    text = "q quit  j k scroll  s sort  / filter"
    return [(text + ("  Esc all sites" if view.pattern else ""), "dim")]


def _clipped(line: Line, width: int, mark: str) -> Line:
    """``line`` in at most ``width`` cells."""
    pieces: Line = []
    left = width
    for text, style in line:
        size = cell_count(text)
        if size > left:
            if left > 0:
                pieces.append((fit_cells(text, left, mark=mark), style))
            break
        pieces.append((text, style))
        left -= size
    return pieces
