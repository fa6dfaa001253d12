"""What the tests of trainers share: a mark for those that only `make test-trainers` runs, as they
cost seconds each, and a GradScaler on the CPU.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

IS_LAB = os.environ.get("FASTCHECK_TRAINERS") == "1"

in_lab = pytest.mark.skipif(not IS_LAB, reason="only in make test-trainers")


def scaled_on_cpu(run: Any, init_scale: float) -> Any:
    """A transformers.Trainer with a GradScaler, which Accelerate leaves out on a CPU."""
    run.accelerator.native_amp = True
    run.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
    return run
