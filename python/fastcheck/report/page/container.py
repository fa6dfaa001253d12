"""The container of every page: one HTML file with its script, its style and its data, which is a
JSON header and arrays, each deflated and in base64.

The arrays lie behind each other at the offsets that the header gives.
``frontend/src/container.ts`` reads both.

Kinds of arrays, all little endian, of ``rows`` x ``columns`` cells:

- ``f64``: each cell exclusive-or'd with the cell before it in its row, then the eight bytes of all
  cells apart: all lowest bytes, then all second bytes, ...
- ``log``: the code ``round(q * log2(value))`` as int16, -32767 for 0, its difference from the code
  before it in its row in zigzag, low bytes of all cells, then high bytes. A missing value repeats
  the code before it; ``missing`` is a bit of each cell, as numpy.packbits has them.
- ``linear``: uint8 from 0 to ``levels`` between ``low[row]`` and ``high[row]``, where only the ends
  are 0 and ``levels``, and 255 where the value is missing.
- ``u8``: as it is.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import zlib
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any, Union

import numpy as np

from fastcheck.errors import LogError, local_path, printable
from fastcheck.utils.private import write_private, writing
from fastcheck.utils.text.layout import Table

_ZERO, _LEAST, _MOST = -32767, -32000, 32000

_ASSETS = os.path.join(os.path.dirname(__file__), "assets")
# Nothing is loaded, and no script or style runs but those of this page.
_POLICY = (
    "default-src 'none'; script-src 'sha256-{script}'; style-src 'sha256-{style}'; "
    "base-uri 'none'; form-action 'none'"
)
_PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<header>
<h1>fastcheck <span id="log-name">{log}</span></h1>
<button type="button" id="theme">Dark</button>
</header>
<main>
<section id="verdict" aria-labelledby="verdict-title">
<h2 id="verdict-title">Verdict</h2>
{verdict}
</section>
<noscript><p>The pictures and tables of this page need JavaScript.</p></noscript>
<div id="app"></div>
</main>
<script type="text/plain" id="header">{header}</script>
<script type="text/plain" id="arrays">{arrays}</script>
<script>{script}</script>
</body>
</html>
"""


def text_html(text: str) -> str:
    return escape(printable(text, keep="\n"), quote=True)


def table_html(table: Table, title: str) -> str:
    """``title``: HTML, of its caption."""
    columns = len(table.header)

    def cell(tag: str, column: int, text: str) -> str:
        is_number = table.left <= column < columns - table.note
        return f"<{tag}{' class=number' if is_number else ''}>{text_html(text)}</{tag}>"

    head = "".join(
        cell("th", at, text) if text else "<td></td>" for at, text in enumerate(table.header)
    )
    rows = "".join(
        f"<tr>{''.join(cell('td', at, text) for at, text in enumerate(row))}</tr>"
        for row in table.rows
    )
    caption = f"<caption>{title}</caption>"
    return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def headline_html(text: str, kind: str, tries: Sequence[str], more: str = "") -> str:
    """The first lines of a verdict. ``kind``: "good", "bad" or ""; ``tries``: what to try;
    ``more``: a text below the headline.
    """
    head = f'<p class="headline{" " if kind else ""}{kind}">{text_html(text)}</p>'
    head += f"\n<p>{text_html(more)}</p>" if more else ""
    items = "".join(f"<li>{text_html(item)}</li>" for item in tries)
    return f"{head}\n<h3>Try</h3>\n<ol>{items}</ol>" if tries else head


def details_html(title: str, body: str, is_open: bool) -> str:
    """A section that opens and closes. ``title``, ``body``: HTML."""
    return (
        f"<details{' open' if is_open else ''}><summary>{title}</summary>"
        f'<div class="scrolling" tabindex="0" role="region" aria-label="{title}">'
        f"{body}</div></details>"
    )


def lines_html(lines: Iterable[str]) -> str:
    text = "\n".join(lines)
    return f"<pre>{text_html(text)}</pre>"


def page_html(title: str, name: str, verdict: str, data: tuple[str, str]) -> str:
    """``title``, ``name``: text; ``verdict``: HTML; ``data``: what Container.to_text() returned."""
    script, sheet = _asset("page.js"), _asset("page.css")
    header, arrays = data
    return _PAGE.format(
        policy=_POLICY.format(script=_digest(script), style=_digest(sheet)),
        title=text_html(title),
        style=sheet,
        log=text_html(name),
        verdict=verdict,
        header=header,
        arrays=arrays,
        script=script,
    )


def write_html(path: Union[str, os.PathLike[str]], page: str) -> int:
    """Writes the page to ``path``, which it replaces as a whole; returns its size in bytes. Like a
    log, it is readable by its owner alone.

    Raises:
        LogError: the file can't be written.
    """
    data = page.encode()
    place = local_path("the page's path", path)
    with writing(place, "the page", LogError):
        write_private(place, data)
    return len(data)


def _asset(name: str) -> str:
    with open(os.path.join(_ASSETS, name), encoding="utf-8", newline="") as file:
        return file.read()


def _digest(text: str) -> str:
    """The digest of a script or style for the page's policy: W3C Content Security Policy Level 3,
    section 2.3.1.
    """
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


class Container:
    """Arrays by name, to be written behind a header."""

    def __init__(self) -> None:
        self._arrays: dict[str, dict[str, Any]] = {}
        self._parts: list[bytes] = []
        self._size = 0

    def add_f64(self, name: str, values: np.ndarray) -> None:
        """Exact."""
        bits = np.ascontiguousarray(values, "<f8").view("<u8")
        changed = bits.copy()
        changed[:, 1:] ^= bits[:, :-1]
        planes = changed.reshape(-1, 1).view(np.uint8).T
        self._append(name, "f64", values, planes.tobytes())

    def add_log(self, name: str, values: np.ndarray, per_octave: int) -> None:
        """Values of at least 0; NaN is missing. Off by a factor of ``2 ** (0.5 / per_octave)`` at
        most.
        """
        missing = np.isnan(values)
        with np.errstate(divide="ignore", invalid="ignore"):
            codes = np.rint(np.log2(values) * per_octave)
        codes = np.clip(np.where(missing, 0, codes), _LEAST, _MOST).astype(np.int16)
        codes[values == 0] = _ZERO
        extra: dict[str, Any] = {"per_octave": per_octave, "has_missing": bool(missing.any())}
        if extra["has_missing"]:
            codes = np.take_along_axis(codes, _last_known(missing), axis=1)
        steps = codes.copy()
        steps[:, 1:] -= codes[:, :-1]  # wraps around, and so does the sum of the reader
        zigzag = ((steps << 1) ^ (steps >> 15)).astype("<u2").reshape(-1, 1).view(np.uint8)
        data = zigzag[:, 0].tobytes() + zigzag[:, 1].tobytes()
        if extra["has_missing"]:
            data += np.packbits(missing.reshape(-1)).tobytes()
        self._append(name, "log", values, data, **extra)

    def add_linear(self, name: str, values: np.ndarray, low: Any, high: Any, levels: int) -> None:
        """``low``, ``high``: the ends of each row, written with four digits; ``levels``: 254 at
        most. Off by ``0.5 / levels`` of their distance, and by these digits.
        """
        missing = np.isnan(values)
        ends = [np.broadcast_to(np.asarray(end, np.float64), (len(values),)) for end in (low, high)]
        low_row, high_row = (np.array([float(f"{v:.4g}") for v in end.tolist()]) for end in ends)
        wide = np.maximum(high_row - low_row, np.finfo(np.float64).tiny)
        share = (np.where(missing, 0, values) - low_row[:, None]) / wide[:, None]
        codes = np.rint(np.clip(share, 0, 1) * levels)
        codes = np.where(share > 0, np.maximum(codes, 1), 0)
        codes = np.where((share < 1) & (codes == levels), levels - 1, codes).astype(np.uint8)
        codes[missing] = 255
        ranges = {"low": low_row.tolist(), "high": high_row.tolist(), "levels": levels}
        self._append(name, "linear", values, codes.tobytes(), **ranges)

    def add_u8(self, name: str, values: np.ndarray) -> None:
        """Exact."""
        self._append(name, "u8", values, values.astype(np.uint8).tobytes())

    def to_text(self, header: dict[str, Any]) -> tuple[str, str]:
        """The header, to which the arrays' places are added as ``arrays``, and the arrays, both in
        base64. ``header`` is strict JSON; what could turn a line of the page round is escaped.
        """
        whole = {**_printable_data(header), "arrays": self._arrays}
        text = json.dumps(whole, allow_nan=False, separators=(",", ":")).encode()
        # The search for repetitions finds nothing but runs in codes with much noise: without it
        # they take less room, and a tenth of the time.
        return _packed([text], zlib.Z_DEFAULT_STRATEGY), _packed(self._parts, zlib.Z_RLE)

    def _append(self, name: str, kind: str, values: np.ndarray, data: bytes, **fields: Any) -> None:
        rows, columns = values.shape
        place = {"kind": kind, "rows": rows, "columns": columns, "offset": self._size, **fields}
        self._arrays[name] = {**place, "bytes": len(data)}
        self._parts.append(data)
        self._size += len(data)


def _printable_data(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {_printable_data(key): _printable_data(item) for key, item in value.items()}
    return [*map(_printable_data, value)] if isinstance(value, (list, tuple)) else value


def _packed(parts: Sequence[bytes], strategy: int) -> str:
    packer = zlib.compressobj(6, zlib.DEFLATED, -15, 9, strategy)
    data = b"".join([*map(packer.compress, parts), packer.flush()])
    return base64.b64encode(data).decode("ascii")


def _last_known(missing: np.ndarray) -> np.ndarray:
    """The column, for each cell, of the last known value up to it; the first if there is none."""
    columns = np.where(missing, 0, np.arange(missing.shape[1]))
    return np.maximum.accumulate(columns, axis=1)
