"""The CUDA kernels as compiled for a GPU (tests/fakes/ptx_on_cpu), against the CPU's Records.

The tests of test_kernels.py once more, over nvcc's PTX. FASTCHECK_CUDA_ARCHS says for which
compute capabilities (space-separated, e.g. "75 90 120"); one with every instruction by default.
The kernels of integers of more than one byte are compiled in whole runs (``make test-release``).
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from backends.cuda.test_kernels import (
    test_alignment,
    test_black_box,
    test_cuts,
    test_depths,
    test_found_nonfinite,
    test_layouts,
    test_long_list,
    test_mixed_list,
    test_scale_rule,
    test_sizes,
    test_slots_in_any_order,
    test_special_tiles,
    test_unlike_tiles_in_one_share,
    test_workspace_is_left_as_found,
)
from fakes import ptx_on_cpu
from fakes.cuda_on_cpu import driver
from support.records.reference import DTYPES
from support.sampling import IS_WHOLE

__all__ = [
    "test_alignment",
    "test_black_box",
    "test_cuts",
    "test_depths",
    "test_found_nonfinite",
    "test_layouts",
    "test_long_list",
    "test_mixed_list",
    "test_scale_rule",
    "test_sizes",
    "test_slots_in_any_order",
    "test_special_tiles",
    "test_unlike_tiles_in_one_share",
    "test_workspace_is_left_as_found",
]

#: Dtypes whose kernels are compiled in whole runs alone.
LONG = [name for name, row in DTYPES.items() if row.kind in ("int", "uint") and row.itemsize > 1]
ARCHS = os.environ.get("FASTCHECK_CUDA_ARCHS", "90").split()

pytestmark = pytest.mark.skipif(
    ptx_on_cpu.nvcc() is None or driver.compiler() is None, reason="no nvcc, or no C++ compiler"
)


@pytest.fixture(scope="module", params=ARCHS, autouse=True)
def compiled(request: pytest.FixtureRequest) -> Iterator[None]:
    with ptx_on_cpu.kernels(request.param):
        yield


@pytest.fixture(autouse=True)
def _is_compiled(request: pytest.FixtureRequest) -> None:
    if not IS_WHOLE and request.node.callspec.params.get("dtype") in LONG:
        pytest.skip("make test-release reads wider integers")
