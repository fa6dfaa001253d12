"""The logs that ``bench/synthetic_log.py`` makes, for tests."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from support.paths import ROOT


def write(directory: Path, sites: int, steps: int, ranks: int = 1, **options: Any) -> None:
    """Writes a log of so many sites, steps and ranks; ``options`` of write_log() in the bench."""
    spec = importlib.util.spec_from_file_location("synthetic", ROOT / "bench" / "synthetic_log.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for rank in range(ranks):
        module.write_log(str(directory), sites, steps, rank, **options)
