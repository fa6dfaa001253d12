"""A proof as one HTML file, which loads nothing."""

from __future__ import annotations

import os
from typing import Union

from fastcheck._version import __version__
from fastcheck.report.page.container import (
    Container,
    page_html,
    table_html,
    text_html,
    write_html,
)
from fastcheck.utils.text.layout import Table
from fastcheck.utils.text.numbers import to_json

from .result import Proof, score_text

_HEADER = ("relation", "state", "score", "seconds", "first place, or what was seen")
_UNIT = (
    "A score is a difference over the noise of its tensor, measured by moving each weight by one "
    "ulp; up to 10 is noise."
)


def write_proof(path: Union[str, os.PathLike[str]], proof: Proof) -> int:
    """Writes the page to ``path``, which it replaces; returns its size in bytes.

    Raises:
        LogError: the file can't be written.
    """
    rows = [
        (
            outcome.relation,
            outcome.state,
            score_text(outcome.score),
            f"{outcome.seconds:.1f}",
            outcome.text,
        )
        for outcome in proof.outcomes
    ]
    verdict = (
        f'<p class="headline {"good" if proof else "bad"}">{text_html(proof.headline)}</p>'
        f"<p>{text_html(_UNIT)}</p>"
        '<div class="scrolling" tabindex="0" role="region" aria-label="Relations">'
        f"{table_html(Table(_HEADER, rows, left=2, note=1), 'Relations')}</div>"
    )
    header = {"format": 1, "kind": "proof", "fastcheck": __version__, **proof.to_dict()}
    data = Container().to_text(to_json(header))
    name = proof.subject
    return write_html(path, page_html(f"fastcheck: {name}", name, verdict, data))
