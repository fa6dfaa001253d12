"""Writes the page of a dump: the operators around the culprit, and the script to run it again."""

from __future__ import annotations

import os
from typing import Any, Union

from fastcheck._version import __version__
from fastcheck.dump.storage.files import places_in
from fastcheck.errors import LogError, explain, printable
from fastcheck.report.page.container import Container
from fastcheck.report.page.shell import page_html, text_html, write_html

from .operators import DumpedCalls, collect_calls

__all__ = ["dump_page", "write_dump_page"]

_SCRIPT = "replay.py"
_MOST_SCRIPT = 1 << 18
_MOST_PLACES = 20


def dump_page(path: Union[str, os.PathLike[str]]) -> str:
    """The page of a dump, of a step of one, or of a rank of a step, as HTML. Of several steps and
    ranks it shows the first that has a culprit, and names the others.

    Raises:
        LogError: there is no dump, or it can't be read.
    """
    places = [place for _, _, place in sorted(places_in(os.fspath(path)))]
    if not places:
        raise LogError(
            explain(
                "there is no dump here",
                expected="a directory that Dumper or Stop(dump=) has written",
                got=os.fspath(path),
            )
        )
    found = collect_calls(places[0])
    for place in places[1:]:
        if found.culprit is not None:
            break
        other = collect_calls(place)
        found = other if other.culprit is not None else found
    header: dict[str, Any] = {
        "format": 1,
        "kind": "dump",
        "fastcheck": __version__,
        "culprit": found.culprit,
        "reason": found.reason,
        "calls": found.calls,
    }
    name = os.path.relpath(found.place, os.path.dirname(os.path.abspath(os.fspath(path))))
    verdict = _verdict(found, [place for place in places if place != found.place])
    return page_html(f"fastcheck: {name}", name, verdict, Container().to_text(header))


def write_dump_page(
    path: Union[str, os.PathLike[str]], target: Union[str, os.PathLike[str]]
) -> int:
    """Writes the page to ``target``, which it replaces; returns its size in bytes. Raises as
    dump_page() does, and LogError where the file can't be written.
    """
    return write_html(target, dump_page(path))


def _verdict(found: DumpedCalls, others: list[str]) -> str:
    style = "good" if found.culprit is None else "bad"
    parts = [f'<p class="headline {style}">{text_html(_headline(found))}</p>']
    parts += [f"<p>{text_html(line)}</p>" for line in _notes(found)]
    if others:
        names = "\n".join(others[:_MOST_PLACES])
        more = len(others) - _MOST_PLACES
        names += f"\nand {more:,} more" if more > 0 else ""
        parts.append(_details("Other steps and ranks of this dump", names))
    parts.append(_replay(found.place))
    return "\n".join(parts)


def _headline(found: DumpedCalls) -> str:
    if found.culprit is None:
        if found.compared:
            return f"All is finite, and all {found.compared:,} outputs agree with the reference."
        return "Everything that this dump holds is finite."
    call = next(one for one in found.calls if one["number"] == found.culprit)
    name = " · ".join(filter(None, (call["module"], call["op"] or call["kind"], call["direction"])))
    what = {
        "made": "made the first value that is not finite, of finite inputs",
        "read": "is the first that read or returned a value that is not finite",
        "different": "is the first whose result differs from the reference",
    }[found.reason]
    return f"Call {found.culprit:,}, {name}, {what}."


def _notes(found: DumpedCalls) -> list[str]:
    lines = [printable(found.place)]
    shown = found.last - found.first + 1
    if shown < found.count:
        lines.append(
            f"Calls {found.first:,} to {found.last:,} of {found.count:,} are on this page; "
            f"{found.count - shown:,} are left out. `fastcheck show` has the records of all."
        )
    else:
        calls = "1 call" if found.count == 1 else f"{found.count:,} calls, all of them"
        lines.append(f"{calls} on this page.")
    if found.compared:
        lines.append(
            f"{found.different:,} of {found.compared:,} compared outputs differ from the "
            "reference. The dump holds the distances, beside each output, not the other values."
        )
    if found.without_histogram:
        lines.append(
            f"{found.without_histogram:,} stored tensors have no histogram: they are damaged, or "
            "beyond the 512 MiB of values that are read for a page."
        )
    if not found.index.get("is_complete"):
        lines.append("The dump has no end: it was interrupted.")
    return lines


def _replay(place: str) -> str:
    path = os.path.join(place, _SCRIPT)
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            text = file.read(_MOST_SCRIPT)
    except OSError:
        why = "A script that runs a call again is written where a run is stopped (Stop(dump=))."
        return f"<p>{why}</p>"
    command = f"python {printable(path)}"
    return (
        "<h3>Run the call again</h3>"
        f"<pre><code>{text_html(command)}</code></pre>"
        f"{_details(_SCRIPT, text)}"
    )


def _details(title: str, text: str) -> str:
    label = text_html(title)
    return (
        f"<details><summary>{label}</summary>"
        f'<div class="scrolling" tabindex="0" role="region" aria-label="{label}">'
        f"<pre>{text_html(text)}</pre></div></details>"
    )
