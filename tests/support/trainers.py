"""What `make test-trainers` runs and CI does not: variants that cost seconds each."""

from __future__ import annotations

import os

import pytest

IS_LAB = os.environ.get("FASTCHECK_TRAINERS") == "1"

in_lab = pytest.mark.skipif(not IS_LAB, reason="only in make test-trainers")
