"""What the advice looks at, and what a piece of advice is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ._numbers import Reading, spell
from ._record import Verdict
from ._trend import Trend

if TYPE_CHECKING:
    from ._site import Site


@dataclass(frozen=True)
class Advice:
    """One thing to try; ``code``, if any, is shown on lines of its own."""

    text: str
    code: str = ""


@dataclass(frozen=True)
class Case:
    """What the rules look at."""

    site: Site
    reading: Reading
    verdict: Verdict
    step: int
    trend: Trend
    inputs: tuple[tuple[Site, Reading], ...]
    scale: float | None
    log_path: str | None

    @property
    def kind(self) -> str:
        """The module's path and type in lower case, to recognise attention, norms, losses, ..."""
        return f"{self.site.module} {self.site.module_type} {self.site.op or ''}".lower()

    @property
    def is_narrow(self) -> bool:
        form = self.reading.float_format
        return form is not None and form.is_narrow

    @property
    def limit(self) -> str:
        form = self.reading.float_format
        return spell(form.max) if form is not None else "?"

    @property
    def overflows_to_nan(self) -> bool:
        """The format has no Inf (float8_e4m3fn): what is too large becomes NaN."""
        form = self.reading.float_format
        return form is not None and not form.has_inf

    @property
    def has_nan(self) -> bool:
        return self.reading.nan_count > 0

    @property
    def only_neginf(self) -> bool:
        return self.reading.nonfinite_count == self.reading.neginf_count

    @property
    def read_inputs(self) -> list[tuple[Site, Reading]]:
        """The activations (not the parameters) that the module read."""
        return [(s, r) for s, r in self.inputs if s.role not in ("param", "buffer")]

    @property
    def input_abs_max(self) -> float | None:
        found = [float(r.abs_max) for _, r in self.read_inputs if r.abs_max is not None]
        return max(found, default=None)

    def is_like(self, *words: str) -> bool:
        return any(word in self.kind for word in words)
