"""Detects the shape inference of torch's pipeline stages, which runs on uninitialised data."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Optional

_PIPELINING = "torch.distributed.pipelining.stage"
# Of torch 2.5 to 2.12, and of later ones.
_FUNCTIONS = frozenset(
    ("_shape_inference", "_forward_metadata_inference", "_backward_metadata_inference")
)


def is_dry_run() -> bool:
    """Whether this thread is within a pipeline stage's inference of shapes."""
    if _PIPELINING not in sys.modules:
        return False
    frame: Optional[FrameType] = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in _FUNCTIONS and frame.f_globals.get("__name__") == _PIPELINING:
            return True
        frame = frame.f_back
    return False
