"""Reads every tensor of a training run once, on the device it lives on, without making the host
wait, and names the first place where the numbers went wrong in time to stop.

    import fastcheck
    monitor = fastcheck.install(model, overflow_nums=1)
"""

from __future__ import annotations

from ._bisect import Bisection, bisect
from ._compare import compare
from ._environment import environment
from ._errors import (
    CompareError,
    ConfigError,
    ExtensionError,
    FastcheckError,
    FastcheckWarning,
    LogError,
    OverflowDetected,
    UnsupportedTensorError,
)
from ._install import install
from ._inventory import inventory
from ._monitor import Monitor
from ._op_rules import benign
from ._ops import checksum, crc32, found_nonfinite, stats
from ._override import Override, override
from ._record import RECORD_DTYPE, Depth, DeviceMode, Flag, Order, Verdict
from ._seeds import Seeds, seed_all
from ._site import Site
from ._stats import Stats, StatsList
from ._verdict import Event
from ._version import __version__
from .dump import Dumper

__all__ = [
    "RECORD_DTYPE",
    "Bisection",
    "CompareError",
    "ConfigError",
    "Depth",
    "DeviceMode",
    "Dumper",
    "Event",
    "ExtensionError",
    "FastcheckError",
    "FastcheckWarning",
    "Flag",
    "LogError",
    "Monitor",
    "Order",
    "OverflowDetected",
    "Override",
    "Seeds",
    "Site",
    "Stats",
    "StatsList",
    "UnsupportedTensorError",
    "Verdict",
    "__version__",
    "benign",
    "bisect",
    "checksum",
    "compare",
    "crc32",
    "environment",
    "found_nonfinite",
    "install",
    "inventory",
    "override",
    "seed_all",
    "stats",
]
