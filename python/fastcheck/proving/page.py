"""Writes the result of prove() as one HTML file, which loads nothing."""

from __future__ import annotations

import os
from typing import Union

from fastcheck._version import __version__
from fastcheck.report.page.container import (
    Container,
    headline_html,
    page_html,
    table_html,
    text_html,
    write_html,
)
from fastcheck.utils.text.layout import Table
from fastcheck.utils.text.numbers import to_json

from .result import UNIT, Proof, score_text

_HEADER = ("relation", "state", "score", "seconds", "first place, or what was seen")


def write_proof(path: Union[str, os.PathLike[str]], proof: Proof) -> int:
    """Writes the page to ``path``, which it replaces; returns its size in bytes.

    Raises:
        LogError: the file can't be written.
    """
    rows = [
        (one.relation, one.state, score_text(one.score), f"{one.seconds:.1f}", one.text)
        for one in proof.outcomes
    ]
    verdict = (
        f"{headline_html(proof.headline, 'good' if proof else 'bad', ())}<p>{text_html(UNIT)}</p>"
        '<div class="scrolling" tabindex="0" role="region" aria-label="Relations">'
        f"{table_html(Table(_HEADER, rows, left=2, note=1), 'Relations')}</div>"
    )
    header = {"format": 1, "kind": "proof", "fastcheck": __version__, **proof.to_dict()}
    data = Container().to_text(to_json(header))
    title = f"fastcheck: {proof.subject}"
    return write_html(path, page_html(title, proof.subject, verdict, data))
