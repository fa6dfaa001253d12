"""What a stop has left in a dump, and what it could not: a part of the stop report."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ._layout import wrap

__all__ = ["Dumped"]


@dataclass(frozen=True)
class Dumped:
    """``path``: the directory; None when nothing was written. ``what`` lies there. ``script``: runs
    that call again; None when it can't. ``notes``: what could not be had, and why.
    """

    path: str | None
    what: str = ""
    script: str | None = None
    notes: tuple[str, ...] = ()

    def lines(self, width: int) -> list[str]:
        """As the stop report has it."""
        found: list[str] = []
        if self.path is not None:
            again = "" if self.script is None else ". To run it again:"
            found = wrap(f"{self.path} holds {self.what}{again}", width)
        if self.path is not None and self.script is not None:
            script = os.path.join(self.path, self.script)
            found.append("  python " + (f"'{script}'" if " " in script else script))
        return found + [line for note in self.notes for line in wrap(note, width)]
