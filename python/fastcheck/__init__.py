"""Finds the first non-finite tensor of a PyTorch training run and stops there, without a host sync.

Every tensor is read once, on its device.

    import fastcheck
    monitor = fastcheck.install(model, overflow_nums=1)

The subpackages (rooms) are layers; ``docs/design.md`` lists them. Any of them may import
``errors``, ``extension``, ``notebook`` and ``_version``.
"""

from __future__ import annotations

from fastcheck import callbacks
from fastcheck.comparison.compare import compare
from fastcheck.dump.dumper import Dumper
from fastcheck.monitor.install import install
from fastcheck.monitor.monitor import Monitor
from fastcheck.monitor.named_tensors import observe
from fastcheck.monitor.rerun import rerun
from fastcheck.monitor.reruns import Rerun
from fastcheck.monitor.session.options import Filter, Log, OnRequest, Stop, Training
from fastcheck.proving.prove import prove
from fastcheck.proving.ranks import Ranks
from fastcheck.proving.relation import Relation
from fastcheck.proving.result import Proof
from fastcheck.receipts import Arrival, Receipt, receipt
from fastcheck.record.event import Event
from fastcheck.record.exponents import Exponents, Share
from fastcheck.record.format import RECORD_DTYPE, Depth, DeviceMode, Flag, Verdict
from fastcheck.record.precision import PrecisionAdvice
from fastcheck.record.site import Site
from fastcheck.report.error import OverflowDetected
from fastcheck.reproducibility.environment import environment
from fastcheck.reproducibility.inventory import inventory
from fastcheck.reproducibility.seeds import Seeds, seed_all
from fastcheck.resuming import Resumption
from fastcheck.sealing import NonFiniteWeightsError, Seal, Verification, seal, verify
from fastcheck.statistics.functions import checksum, exponents, found_nonfinite, stats
from fastcheck.statistics.stats import Stats, StatsList
from fastcheck.substitution.bisect import Bisection, bisect
from fastcheck.substitution.override import Override, override
from fastcheck.verdict.allowed import allow_nonfinite
from fastcheck.verdict.benign import benign
from fastcheck.watch.event import PrecisionWarning, SpikeWarning, WatchEvent, WatchWarning
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

__all__ = [
    "RECORD_DTYPE",
    "Arrival",
    "Bisection",
    "CompareError",
    "ConfigError",
    "Depth",
    "DeviceMode",
    "Dumper",
    "Event",
    "Exponents",
    "ExtensionError",
    "FastcheckError",
    "FastcheckWarning",
    "Filter",
    "Flag",
    "LearningRateWarning",
    "Log",
    "LogError",
    "Monitor",
    "NonFiniteWeightsError",
    "OnRequest",
    "OverflowDetected",
    "Override",
    "PrecisionAdvice",
    "PrecisionWarning",
    "Proof",
    "Ranks",
    "Receipt",
    "Relation",
    "Rerun",
    "Resumption",
    "Seal",
    "Seeds",
    "Share",
    "Site",
    "SpikeWarning",
    "Stats",
    "StatsList",
    "Stop",
    "Training",
    "UnsealedCheckpointWarning",
    "UnsupportedTensorError",
    "Verdict",
    "Verification",
    "Watch",
    "WatchEvent",
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
    "verify",
]
