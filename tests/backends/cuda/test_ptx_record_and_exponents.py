"""The CUDA kernels that count exponents in the pass of a record, as compiled for a GPU.

The tests of test_record_and_exponents.py over nvcc's PTX, in whole runs (``LONG`` of
tests/fakes/ptx_on_cpu).
"""

from __future__ import annotations

import pytest

from backends.cuda import test_ptx
from backends.cuda.test_ptx import compiled
from backends.cuda.test_record_and_exponents import (
    test_layouts,
    test_sizes,
    test_the_window_moves_between_tiles_of_a_share,
    test_whole_tiles_that_are_read_again,
)
from support.sampling import IS_WHOLE

__all__ = [
    "compiled",
    "test_layouts",
    "test_sizes",
    "test_the_window_moves_between_tiles_of_a_share",
    "test_whole_tiles_that_are_read_again",
]

pytestmark = [
    test_ptx.pytestmark,
    pytest.mark.skipif(not IS_WHOLE, reason="make test-release runs this"),
]
