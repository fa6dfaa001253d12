"""WatchEvent: something unusual at one step, with what left its range first."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Optional, Union

from fastcheck.errors import ConfigError, FastcheckWarning, choice, printable
from fastcheck.notebook import block_html, fields_html, guarded_html, table_html
from fastcheck.record.site import Site

#: The kinds of events, and what each means.
KINDS: Mapping[str, str] = {
    "loss_spike": "the loss jumped above its range, or stays above it",
    "gradient_spike": "the norm of all gradients jumped above its range",
    "explosion": "a tensor grew by orders of magnitude from one step to the next",
    "headroom": "a tensor is about to leave the range of its dtype",
    "loss_scale": "the loss scale falls, or many steps are skipped",
    "precision": "most of a gradient has become subnormal or zero, or a tensor is saturated",
    "dead": "an activation has become zero, or the same everywhere",
    "update": "updates, or that of a parameter, became much larger or smaller",
    "settings": "a number of the optimizer or of clipping was changed a lot, or is unusual",
    "batch": "the model's input left its range",
    "invariant": "something does not hold that does in a healthy training (docs/invariants.md)",
}

#: Names for several kinds in ``monitor.watch.on()``.
GROUPS: Mapping[str, tuple[str, ...]] = {"spike": ("loss_spike", "gradient_spike", "explosion")}


class WatchWarning(FastcheckWarning):
    """An event of ``install(watch=)`` that calls for a look: a loss spike, a forecast overflow."""

    __module__ = "fastcheck"


class SpikeWarning(WatchWarning):
    """The warning of ``loss_spike`` and ``explosion``."""

    __module__ = "fastcheck"


class PrecisionWarning(WatchWarning):
    """The warning of ``headroom``, ``precision`` and ``loss_scale``: what a dtype does not hold."""

    __module__ = "fastcheck"


_WARNINGS: Mapping[str, type[WatchWarning]] = {
    **dict.fromkeys(("loss_spike", "explosion"), SpikeWarning),
    **dict.fromkeys(("headroom", "precision", "loss_scale"), PrecisionWarning),
}


@dataclass(frozen=True)
class Mover:
    """A signal that left its range: since which step, by how many robust standard deviations.
    ``is_batch``: the tensor is what the step trains on.
    """

    step: int
    site: Optional[Site]
    signal: str
    score: float
    is_batch: bool = False

    def __str__(self) -> str:
        place = "the loss" if self.site is None else str(self.site)
        return f"{place} ({self.signal}, step {self.step:,})"


# The fields that are written as they are, in order.
_FIELDS = (
    "step",
    "rank",
    "kind",
    "site",
    "value",
    "reference",
    "score",
    "is_warning",
    "cause",
    "interval",
)


@dataclass(frozen=True)
class WatchEvent:
    """An event of the watch. ``site``: the tensor; None: a number of the whole step. ``value``:
    what was seen, and ``reference`` what is usual there, both as the text names them. ``score``: in
    robust standard deviations, NaN where the rule has none. ``movers``: what left its range within
    the last 64 steps, first mover first. ``cause``: ``"data"``, ``"loss"``, ``"optimizer"``,
    ``"layer"``, ``"gradient"``, ``"precision"``, ``"hardware"``, or "" where the records do not
    tell.
    ``interval``: of a forecast, in how many steps at the earliest and at the latest. ``batch``:
    what the step of the first mover (without a first mover: of the event) trained on, if
    ``monitor.step(batch_id=)`` or ``monitor.batch()`` named it.
    """

    step: int
    kind: str
    site: Optional[Site]
    value: float
    reference: float
    score: float
    text: str
    is_warning: bool
    rank: int = 0
    movers: tuple[Mover, ...] = ()
    cause: str = ""
    interval: Optional[tuple[float, float]] = None
    batch: Union[int, str, None] = None

    @property
    def first_mover(self) -> Optional[Mover]:
        """The mover that left its range first."""
        return self.movers[0] if self.movers else None

    def is_of(self, kind: str) -> bool:
        """True if ``on(kind, ...)`` is about it."""
        if kind == "warning":
            return self.is_warning
        return self.kind in GROUPS.get(kind, (kind,))

    @property
    def warning_class(self) -> type[WatchWarning]:
        """The class of the warning that it gives, if it warns."""
        return _WARNINGS.get(self.kind, WatchWarning)

    def __str__(self) -> str:
        return printable(self.text)

    def _repr_html_(self) -> str:
        """HTML for notebooks: the text, the numbers, and what moved. Never raises."""
        return guarded_html(self, lambda: _watch_event_html(self))

    def to_dict(self) -> dict[str, Any]:
        """The fields, ready for JSON."""
        fields = {name: getattr(self, name) for name in _FIELDS}
        fields["site"] = None if self.site is None else self.site.to_dict()
        if self.batch is not None:
            fields["batch"] = self.batch
        fields["movers"] = [
            {
                "step": mover.step,
                "site": None if mover.site is None else str(mover.site),
                "signal": mover.signal,
                "score": mover.score,
            }
            for mover in self.movers
        ]
        return {**fields, "text": self.text}


def _watch_event_html(event: WatchEvent) -> str:
    interval = event.interval
    fields: list[tuple[str, object]] = [
        ("step", event.step),
        ("rank", event.rank or None),
        ("kind", f"{event.kind}: {KINDS.get(event.kind, '')}"),
        ("site", event.site),
        ("value", event.value),
        ("usual", event.reference),
        ("score", event.score if event.score == event.score else None),
        ("warns", event.is_warning),
        ("cause", event.cause),
        ("batch", event.batch),
        ("in steps", None if interval is None else f"{interval[0]:.0f} to {interval[1]:.0f}"),
    ]
    moved = [
        ["the loss" if m.site is None else str(m.site), m.signal, m.step, m.score]
        for m in event.movers
    ]
    table = table_html(["left its range, first mover first", "signal", "step", "score"], moved)
    return block_html(event.text, fields_html(fields), table)


def check_kind(kind: object) -> str:
    """``kind``, if events have it, or one of GROUPS, or ``"warning"``; else ConfigError."""
    return choice("kind", kind, [*KINDS, *GROUPS, "warning"])


def check_callback(callback: object) -> None:
    """ConfigError if it can't be called with one argument, as far as its signature is known."""
    if callable(callback):
        try:
            inspect.signature(callback).bind(None)
            return
        except ValueError:  # built-in, without a signature
            return
        except TypeError:
            pass
    raise ConfigError(f"watch.on() needs a callable that takes the WatchEvent, got {callback!r}")
