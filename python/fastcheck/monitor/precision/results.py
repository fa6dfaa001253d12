"""monitor.advice(): which tensors may be stored in a narrower format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Optional

from fastcheck.errors import ConfigError, explain
from fastcheck.monitor.session.config import Config
from fastcheck.monitor.session.session import Session
from fastcheck.record.precision import PrecisionAdvice, candidates, check_tolerance

from .range_session import RangeSession


def check_level(record: str, level: str) -> None:
    """ConfigError if exponents are to be counted at op level."""
    if record == "range" and level == "op":
        raise ConfigError(
            explain(
                'record="range" is for module level',
                expected='level="module" with record="range", or level="op" without',
                got='record="range", level="op"',
            )
        )


def session_type_for(config: Config) -> type[Session]:
    """The type of a session at module level."""
    return RangeSession if config.record == "range" else Session


def advice_of(
    session: Optional[Session], tolerance: float, formats: Optional[Sequence[str]]
) -> list[PrecisionAdvice]:
    """As monitor.advice(). Takes the session's lock."""
    check_tolerance(tolerance)
    names = candidates(formats)
    if not isinstance(session, RangeSession):
        raise ConfigError(
            explain(
                "this monitor does not count exponents",
                expected='fastcheck.install(model, record="range")',
                got="a monitor with another record=",
            )
        )
    with session.lock:
        return session.precision_advice(tolerance, names)


class PrecisionResults:
    """What a Monitor of ``install(record="range")`` adds."""

    _session: Session

    def advice(
        self, tolerance: float = 0.001, formats: Optional[Sequence[str]] = None
    ) -> list[PrecisionAdvice]:
        """Of each tensor, the narrowest of float8, MXFP8, float16 and bfloat16 in which at most
        ``tolerance`` of its elements become zero and none overflows, the scale for that, or why it
        has to stay as it is (docs/precision.md). From the steps that were counted until now.

        ``formats``: other formats to try, among float8_e4m3fn, float8_e5m2, mxfp8_e4m3,
        mxfp8_e5m2, mxfp4, nvfp4, float16 and bfloat16, the most wanted first.

        Waits for the copies of counts from devices. Raises ConfigError without
        ``install(record="range")``, or if ``tolerance`` is not from 0 to below 1, or a format is
        unknown.
        """
        return advice_of(self._session, tolerance, formats)
