"""Every error that fastcheck raises on purpose, in one tree, and the shape of their messages.

FastcheckError
├── ConfigError             (also ValueError)   an option of install(), or of the command line
├── UnsupportedTensorError  (also TypeError)    a tensor that fastcheck can't read
├── ExtensionError          (also ImportError)  the compiled extension is missing or unfit
├── LogError                                    a log that can't be opened, or isn't one
├── CompareError                                two things that can't be compared, or one of them
└── OverflowDetected                            the run was stopped, and why

None of them is a RuntimeError: training loops that retry after "CUDA out of memory" catch
RuntimeError, and would swallow the stop.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._report import StopReport
    from ._verdict import Event

__all__ = [
    "CompareError",
    "ConfigError",
    "ExtensionError",
    "FastcheckError",
    "FastcheckWarning",
    "LogError",
    "OverflowDetected",
    "UnsupportedTensorError",
    "did_you_mean",
    "explain",
    "near_matches",
]


class FastcheckError(Exception):
    """Root of everything fastcheck raises on purpose."""

    __module__ = "fastcheck"


class ConfigError(FastcheckError, ValueError):
    """An option has a value that fastcheck can't use. Nothing was installed."""

    __module__ = "fastcheck"


class UnsupportedTensorError(FastcheckError, TypeError):
    """A tensor whose dtype, layout or kind fastcheck can't read (sparse, quantised, meta, ...)."""

    __module__ = "fastcheck"


class ExtensionError(FastcheckError, ImportError):
    """The compiled extension is missing, or was built for another version of torch."""

    __module__ = "fastcheck"


class LogError(FastcheckError):
    """A log that can't be created or read. Not an OSError: the cause is in ``__cause__``."""

    __module__ = "fastcheck"


class CompareError(FastcheckError):
    """What compare() was given can't be compared: it is not there, damaged, of another kind than
    the other side, or has nothing in common with it.
    """

    __module__ = "fastcheck"


class OverflowDetected(FastcheckError):  # noqa: N818  (a stop asked for, not a mistake)
    """Training was stopped at a non-finite number. ``str()`` of it is the whole stop report.

    Survives pickling, so that a launcher can pass it on from a worker process.
    """

    __module__ = "fastcheck"

    def __init__(self, report: StopReport) -> None:
        # args holds the report itself, so that BaseException.__reduce__ rebuilds the same object.
        super().__init__(report)
        self.report = report

    @property
    def culprit(self) -> Event:
        """The event that is blamed; it has ``.site``, ``.record``, ``.verdict`` and ``.reason``."""
        return self.report.culprit

    @property
    def step(self) -> int:
        """The step it happened in, counted from 0 at install()."""
        return self.report.step

    @property
    def events(self) -> tuple[Event, ...]:
        """All events of that step, in the order in which the device made them."""
        return self.report.events

    @property
    def log_path(self) -> str | None:
        """The directory with the records of the last steps; None when it couldn't be written."""
        return self.report.log_path

    def __str__(self) -> str:
        from ._report import render

        try:
            return render(self.report)
        except Exception as error:  # a fault in the layout must not hide what was found
            culprit = self.culprit
            return (
                f"non-finite numbers at {culprit.site}, step {self.step}: {culprit.reason} "
                f"(the full report failed: {type(error).__name__}: {error})"
            )

    def __repr__(self) -> str:
        return f"OverflowDetected(step={self.step}, site={str(self.culprit.site)!r})"


class FastcheckWarning(UserWarning):
    """What fastcheck says without stopping the run: an event under action="warn", a log that
    stopped.
    """

    __module__ = "fastcheck"


def explain(what: str, *, expected: str, came: str, do: str = "") -> str:
    """Spells an error the way all of fastcheck's are: what, what was expected, what came, what to
    do.
    """
    lines = [what, f"  expected: {expected}", f"  came:     {came}"]
    if do:
        lines.append(f"  do:       {do}")
    return "\n".join(lines)


def near_matches(name: str, candidates: Iterable[str], limit: int = 3) -> list[str]:
    """Those of ``candidates`` that ``name`` was probably meant to be, most likely first.

    Looks at the spelling as a whole and, for dotted paths, at the last part too.
    """
    pool = list(dict.fromkeys(candidates))
    lowered = name.lower()
    by_lower: dict[str, str] = {}
    for candidate in pool:
        by_lower.setdefault(candidate.lower(), candidate)
    ratios = {
        candidate: difflib.SequenceMatcher(None, lowered, lower).ratio()
        for lower, candidate in by_lower.items()
    }
    close = [candidate for candidate, ratio in ratios.items() if ratio >= 0.6]
    found = sorted(close, key=lambda candidate: -ratios[candidate])[:limit]
    tail = lowered.rsplit(".", 1)[-1].strip("*?")
    for candidate in pool:
        if len(found) >= limit:
            break
        last = candidate.lower().rsplit(".", 1)[-1]
        related = bool(tail) and (
            tail in candidate.lower()
            or (len(last) > 2 and last in lowered)
            or difflib.SequenceMatcher(None, tail, last).ratio() >= 0.75
        )
        if related and candidate not in found:
            found.append(candidate)
    return found[:limit]


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """``"did you mean 'x' or 'y'?"``, or an empty string when nothing is near."""
    found = near_matches(name, candidates)
    if not found:
        return ""
    quoted = [repr(candidate) for candidate in found]
    listed = quoted[0] if len(quoted) == 1 else ", ".join(quoted[:-1]) + " or " + quoted[-1]
    return f"did you mean {listed}?"
