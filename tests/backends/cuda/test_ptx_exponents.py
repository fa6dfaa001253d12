"""The CUDA kernels that count exponents, as compiled for a GPU (tests/fakes/ptx_on_cpu).

The tests of test_exponents.py once more, over nvcc's PTX, for the compute capabilities of
FASTCHECK_CUDA_ARCHS.
"""

from __future__ import annotations

from backends.cuda import test_ptx
from backends.cuda.test_exponents import (
    test_alignment,
    test_layouts,
    test_sizes,
    test_the_window_moves_with_the_numbers,
)
from backends.cuda.test_ptx import compiled, of_what_is_compiled, pytestmark

__all__ = [
    "compiled",
    "of_what_is_compiled",
    "pytestmark",
    "test_alignment",
    "test_layouts",
    "test_sizes",
    "test_the_window_moves_with_the_numbers",
]

# A test of another name would be left out of all runs but whole ones.
assert {*test_ptx.__all__, *__all__} >= test_ptx.OF_A_DTYPE | test_ptx.OF_FLOAT32
