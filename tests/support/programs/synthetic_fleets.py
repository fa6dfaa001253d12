"""The fleets that ``bench/fleet_synthetic.py`` makes, for tests."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

from support.paths import ROOT

_NAME = "fleet_synthetic"


def generator() -> Any:
    """The bench's module."""
    if _NAME not in sys.modules:
        spec = importlib.util.spec_from_file_location(_NAME, ROOT / "bench" / f"{_NAME}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[_NAME] = module
        spec.loader.exec_module(module)
    return sys.modules[_NAME]
