"""The CUDA kernels that count exponents, as compiled for a GPU (tests/fakes/ptx_on_cpu).

The tests of test_exponents.py and test_record_and_exponents.py once more, over nvcc's PTX, for the
compute capabilities of FASTCHECK_CUDA_ARCHS.
"""

from __future__ import annotations

from backends.cuda.test_exponents import (
    test_alignment,
    test_layouts,
    test_sizes,
    test_the_window_moves_with_the_numbers,
)
from backends.cuda.test_ptx import compiled, pytestmark
from backends.cuda.test_record_and_exponents import test_layouts as test_layouts_of_both
from backends.cuda.test_record_and_exponents import test_sizes as test_sizes_of_both
from backends.cuda.test_record_and_exponents import (
    test_the_window_moves_between_tiles_of_a_share,
    test_whole_tiles_that_are_read_again,
)

__all__ = [
    "compiled",
    "pytestmark",
    "test_alignment",
    "test_layouts",
    "test_layouts_of_both",
    "test_sizes",
    "test_sizes_of_both",
    "test_the_window_moves_between_tiles_of_a_share",
    "test_the_window_moves_with_the_numbers",
    "test_whole_tiles_that_are_read_again",
]
