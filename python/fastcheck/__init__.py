"""Finds the first non-finite tensor of a PyTorch training run and stops there, without a host sync.

Every tensor is read once, on its device.

    import fastcheck
    monitor = fastcheck.install(model, overflow_nums=1)

``fastcheck.types`` has the types of results. The subpackages (rooms) are layers;
``docs/design.md`` lists them. Any of them may import ``errors``, ``extension``, ``notebook`` and
``_version``.
"""

from __future__ import annotations

import typing as _typing

from fastcheck import callbacks, types
from fastcheck.comparison.compare import compare
from fastcheck.dump.dumper import Dumper
from fastcheck.monitor.install import install
from fastcheck.monitor.monitor import Monitor
from fastcheck.monitor.named_tensors import observe
from fastcheck.monitor.rerun import rerun
from fastcheck.monitor.session.options import Filter, Log, OnRequest, Stop, Training
from fastcheck.proving.case import Relation
from fastcheck.proving.prove import prove
from fastcheck.proving.ranks import Ranks
from fastcheck.report.error import OverflowDetected
from fastcheck.reproducibility.environment import environment
from fastcheck.reproducibility.inventory import inventory
from fastcheck.reproducibility.seeds import seed_all
from fastcheck.sealing.receipts import receipt
from fastcheck.sealing.seal import NonFiniteWeightsError, seal, verify
from fastcheck.statistics.functions import checksum, exponents, found_nonfinite, stats
from fastcheck.substitution.bisect import bisect
from fastcheck.substitution.override import override
from fastcheck.verdict.allowed import allow_nonfinite
from fastcheck.verdict.benign import benign
from fastcheck.watch.event import PrecisionWarning, SpikeWarning, WatchWarning
from fastcheck.watch.options import Watch

from ._version import __version__
from .errors import (
    CompareError,
    ConfigError,
    ExtensionError,
    FastcheckError,
    FastcheckWarning,
    LearningRateWarning,
    LogError,
    UnsealedCheckpointWarning,
    UnsupportedTensorError,
)
from .errors import no_attribute as _no_attribute

__all__ = [
    "CompareError",
    "ConfigError",
    "Dumper",
    "ExtensionError",
    "FastcheckError",
    "FastcheckWarning",
    "Filter",
    "LearningRateWarning",
    "Log",
    "LogError",
    "Monitor",
    "NonFiniteWeightsError",
    "OnRequest",
    "OverflowDetected",
    "PrecisionWarning",
    "Ranks",
    "Relation",
    "SpikeWarning",
    "Stop",
    "Training",
    "UnsealedCheckpointWarning",
    "UnsupportedTensorError",
    "Watch",
    "WatchWarning",
    "__version__",
    "allow_nonfinite",
    "benign",
    "bisect",
    "callbacks",
    "checksum",
    "compare",
    "environment",
    "exponents",
    "found_nonfinite",
    "install",
    "inventory",
    "observe",
    "override",
    "prove",
    "receipt",
    "rerun",
    "seal",
    "seed_all",
    "stats",
    "types",
    "verify",
]

if not _typing.TYPE_CHECKING:  # which would take any name for an attribute

    def __dir__() -> list[str]:
        return sorted(__all__)

    def __getattr__(name: str) -> _typing.NoReturn:
        """Called for names that are not there."""
        if name in types.__all__:
            what = f"module {__name__!r} has no attribute {name!r}"
            raise AttributeError(f"{what}: it is {types.__name__}.{name}")
        raise _no_attribute(__name__, name, __all__)
