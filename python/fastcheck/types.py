"""Results and enums: the types of what fastcheck's functions return and what its files hold.

A program names them in annotations and compares with their members; it makes none itself.
"""

from __future__ import annotations

import typing as _typing

from .comparison.compare import Comparison
from .errors import no_attribute as _no_attribute
from .log.step_table import StepRow
from .monitor.distributed.replicas import ReplicaMismatch
from .monitor.reruns import Rerun
from .proving.result import Outcome, Place, Proof
from .record.event import Event
from .record.exponents import Exponents, Share
from .record.format import RECORD_DTYPE, DeviceMode, Flag, Verdict
from .record.precision import PrecisionAdvice
from .record.site import Site
from .report.stop_report import StopReport
from .reproducibility.seeds import Seeds
from .sealing.arrival import Arrival
from .sealing.receipts import Receipt
from .sealing.resuming import Resumption
from .sealing.seal import Seal, Verification
from .statistics.stats import Stats, StatsList
from .substitution.bisect import Bisection
from .substitution.override import Override
from .watch.event import WatchEvent

__all__ = [
    "RECORD_DTYPE",
    "Arrival",
    "Bisection",
    "Comparison",
    "DeviceMode",
    "Event",
    "Exponents",
    "Flag",
    "Outcome",
    "Override",
    "Place",
    "PrecisionAdvice",
    "Proof",
    "Receipt",
    "ReplicaMismatch",
    "Rerun",
    "Resumption",
    "Seal",
    "Seeds",
    "Share",
    "Site",
    "Stats",
    "StatsList",
    "StepRow",
    "StopReport",
    "Verdict",
    "Verification",
    "WatchEvent",
]

if not _typing.TYPE_CHECKING:  # which would take any name for an attribute

    def __getattr__(name: str) -> _typing.NoReturn:
        """Called for names that are not there."""
        raise _no_attribute(__name__, name, __all__)
