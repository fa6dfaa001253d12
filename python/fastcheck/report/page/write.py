"""Writes the page of a log: one HTML file that loads nothing."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
from dataclasses import replace
from typing import Optional, Union

from fastcheck.errors import LogError, explain
from fastcheck.report.from_log import report_from_log
from fastcheck.report.stop_report import StopReport
from fastcheck.utils.names.style import STYLES

from .collect import collect, newest_log
from .document import page_data
from .evidence import event_of
from .verdict import healthy_html, text_html, title_of, verdict_html

__all__ = ["newest_log", "page_of_log", "write_page"]

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


def page_of_log(
    log: Union[str, os.PathLike[str]],
    style: str = STYLES[0],
    name: Optional[str] = None,
    report: Optional[StopReport] = None,
) -> str:
    """The page of a log directory, or of the newest log right below ``log``, as HTML. ``style``:
    how the verdict names tensors. ``name``: what stands for the log's path in it, where the log
    does not stay. ``report``: that of the stop, which holds more than the log; None: it is built
    from the log.

    Raises:
        LogError: there is no log, or it can't be read.
    """
    found = collect(newest_log(os.fspath(log)))
    view = found.evidence.view(found.directory, found.sites_of, found.meta)
    report = report or report_from_log(view, event_of(view), style)
    found.directory = found.directory if name is None else name
    if report is not None:
        report = replace(report, log_path=None if name else found.directory)
        verdict = verdict_html(report)
    else:
        verdict = healthy_html(found, len(view.events))
    script, sheet = _asset("page.js"), _asset("page.css")
    header, arrays = page_data(found, view.events)
    return _PAGE.format(
        policy=_POLICY.format(script=_digest(script), style=_digest(sheet)),
        title=text_html(title_of(found, report)),
        style=sheet,
        log=text_html(os.path.basename(os.path.abspath(found.directory))),
        verdict=verdict,
        header=header,
        arrays=arrays,
        script=script,
    )


def write_page(
    log: Union[str, os.PathLike[str]],
    path: Union[str, os.PathLike[str]],
    style: str = STYLES[0],
    name: Optional[str] = None,
    report: Optional[StopReport] = None,
) -> int:
    """Writes the page of ``log`` (see page_of_log()) to ``path``, which it replaces as a whole;
    returns its size in bytes.

    Raises:
        LogError: the log can't be read, or the file can't be written.
    """
    data = page_of_log(log, style, name, report).encode()
    place = os.fspath(path)
    part = f"{place}.{os.getpid()}.part"
    try:
        with open(part, "wb") as file:
            file.write(data)
        os.replace(part, place)
    except OSError as error:
        raise LogError(
            explain(
                "the page can't be written",
                expected="a file that can be created, and room for it",
                got=f"{place}: {error.strerror or error}",
            )
        ) from error
    finally:
        with contextlib.suppress(OSError):
            os.unlink(part)
    return len(data)


def _asset(name: str) -> str:
    with open(os.path.join(_ASSETS, name), encoding="utf-8", newline="") as file:
        return file.read()


def _digest(text: str) -> str:
    """For the page's policy: W3C Content Security Policy Level 3, section 2.3.1."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
