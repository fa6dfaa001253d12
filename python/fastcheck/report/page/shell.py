"""What all pages have in common: one HTML file with its script, its style and its data."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import os
from html import escape
from typing import Union

from fastcheck.errors import LogError, explain, printable
from fastcheck.utils.private import create_private

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
    """Any text as HTML text."""
    return escape(printable(text, keep="\n"), quote=True)


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
    place = os.fspath(path)
    part = f"{place}.{os.getpid()}.part"
    try:
        with create_private(part) as file:
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
