"""Where the repository and its tests are."""

from __future__ import annotations

import os
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
ROOT = TESTS.parent
#: Where tests keep what they compile, by the hash of all that goes into it. A folder that outlives
#: the clone is right for .ci/run, which begins with a fresh one.
BUILD = Path(os.environ.get("FASTCHECK_TEST_BUILD") or ROOT / "build")
