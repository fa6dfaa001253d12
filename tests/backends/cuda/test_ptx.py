"""The CUDA kernels as compiled for a GPU (tests/fakes/ptx_on_cpu), against the CPU's Records.

The tests of test_kernels.py once more, over nvcc's PTX. FASTCHECK_CUDA_ARCHS says for which
compute capabilities (space-separated, e.g. "75 90 120"); one with every instruction by default.
Other dtypes than float32 are compiled in whole runs (``make test-release``).
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

#: Tests of one dtype that take kernels of ``ptx_on_cpu.SAMPLE`` alone where it is float32.
OF_A_DTYPE = {
    "test_alignment",
    "test_cuts",
    "test_found_nonfinite",
    "test_layouts",
    "test_sizes",
    "test_special_tiles",
    "test_the_window_moves_with_the_numbers",
}
OF_FLOAT32 = {"test_black_box", "test_slots_in_any_order"}
ARCHS = os.environ.get("FASTCHECK_CUDA_ARCHS", "90").split()

pytestmark = pytest.mark.skipif(
    ptx_on_cpu.nvcc() is None or driver.compiler() is None, reason="no nvcc, or no C++ compiler"
)


@pytest.fixture(scope="module", params=ARCHS, autouse=True)
def compiled(request: pytest.FixtureRequest) -> Iterator[None]:
    with ptx_on_cpu.kernels(request.param):
        yield


@pytest.fixture(autouse=True)
def of_what_is_compiled(request: pytest.FixtureRequest) -> None:
    name, parameters = request.node.originalname, request.node.callspec.params.values()
    if IS_WHOLE or name in OF_FLOAT32 or (name in OF_A_DTYPE and "float32" in parameters):
        return
    pytest.skip("make test-release runs this")
