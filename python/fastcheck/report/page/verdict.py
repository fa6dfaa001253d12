"""The verdict of a page as HTML: the stop report with what to try, or that nothing was found.

It stands in the page as text, so that it can be read without the script.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Optional

from fastcheck.report.advice.choose import advise
from fastcheck.report.render import headline, report_sections
from fastcheck.report.stop_report import StopReport
from fastcheck.utils.text.numbers import format_steps

from .collect import Collected
from .shell import text_html

__all__ = ["healthy_html", "title_of", "verdict_html"]

_WIDTH = 96
_TITLES = {
    "what": "What",
    "where": "Where",
    "replay": "Run again",
    "when": "When",
    "numbers": "Numbers",
    "inputs": "Inputs",
    "spread": "Spread",
    "trend": "Trend",
    "dump": "Dump",
    "log": "Log",
}


def verdict_html(report: StopReport) -> str:
    """The report's headline, what to try, and its other sections."""
    parts = [f'<p class="headline bad">{text_html(headline(report))}</p>', "<h3>Try</h3>", "<ol>"]
    for item in advise(report):
        code = f"<pre><code>{text_html(item.code)}</code></pre>" if item.code else ""
        parts.append(f"<li>{text_html(item.text)}{code}</li>")
    parts.append("</ol>")
    for label, lines in report_sections(report, _WIDTH):
        if label in _TITLES and (label != "log" or report.log_path is not None):
            parts.append(_section(_TITLES[label], lines, is_open=label in ("what", "where")))
    return "\n".join(parts)


def healthy_html(found: Collected, harmless: int) -> str:
    """Of a log without a counted event."""
    bad = len(found.bad)
    if not found.records:
        text = "This log holds no records."
    elif harmless or bad:
        text = (
            f"No event is counted. {bad:,} records hold a NaN or an infinity, "
            f"{harmless:,} of them with a verdict."
        )
    else:
        text = "Every number that was read is finite."
    steps = sorted({int(step) for step in found.rows.columns()["last_step"].tolist()})
    last = f" up to {format_steps(steps[-1:])}" if steps else ""
    more = f"{found.records:,} records of {found.rows.count:,} tensors{last}."
    return f'<p class="headline good">{text_html(text)}</p>\n<p>{text_html(more)}</p>'


def title_of(found: Collected, report: Optional[StopReport]) -> str:
    """The page's title."""
    if report is not None:
        return headline(report)
    return f"fastcheck: {found.directory}"


def _section(title: str, lines: Iterable[str], is_open: bool) -> str:
    text = text_html("\n".join(lines))
    opened = " open" if is_open else ""
    return (
        f"<details{opened}><summary>{title}</summary>"
        f'<div class="scrolling" tabindex="0" role="region" aria-label="{title}">'
        f"<pre>{text}</pre></div></details>"
    )
