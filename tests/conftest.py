"""Markers, the hypothesis profile, and fixtures that put global state back."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Optional

import hypothesis
import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import fastcheck
from fastcheck._op_mode import CallMode

# No deadline: a slow machine is not a defect. What fails is printed so that it can be replayed.
hypothesis.settings.register_profile(
    "fastcheck", deadline=None, max_examples=60, print_blob=True, database=None
)
hypothesis.settings.load_profile("fastcheck")


# The fake accelerator, once loaded, is that of the whole process, so it has a run of its own
# (`make test-fake-device`).
collect_ignore = []
if os.environ.get("FASTCHECK_FAKE_DEVICE") != "1":
    collect_ignore += [
        "test_compat_device.py",
        "test_cuda_binding.py",
        "test_cuda_install.py",
        "test_devices.py",
        "test_dump_device.py",
        "test_fake_device.py",
        "test_fake_device_torch.py",
        "test_op_async.py",
        "test_fake_graphs.py",
        "test_graph_ends.py",
        "test_graph_parts.py",
        "test_graphs.py",
        "test_op_device.py",
        "test_mlu.py",
        "test_npu.py",
        "test_npu_saturation.py",
        "test_movement_device.py",
        "test_override_device.py",
        "test_protect_device.py",
        "test_selftest_device.py",
        "test_triton_device.py",
    ]
elif os.environ.get("FASTCHECK_TEST_KERNELS") == "cuda":
    import cuda_on_fake

    cuda_on_fake.use()  # before test modules ask for a backend


# torch_npu takes the place of the fake accelerator, and needs an environment of its own.
if os.environ.get("FASTCHECK_FAKE_ACL") != "1":
    collect_ignore += ["test_torch_npu.py", "test_torch_npu_overflow.py"]


class _Elsewhere(pytest.Module):
    """A file of ``collect_ignore`` that was named on the command line: pytest ignores none of
    those.
    """

    def collect(self) -> Any:
        pytest.skip("has a run of its own, see the Makefile", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: Any) -> Optional[pytest.Module]:
    """Its import would give every other file of the run the fake accelerator."""
    if module_path.name not in collect_ignore:
        return None
    module: pytest.Module = _Elsewhere.from_parent(parent, path=module_path)
    return module


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "gpu: needs a CUDA device; without one skipped, or failed if FASTCHECK_REQUIRE_GPU=1",
    )


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is None or torch.cuda.is_available():
        return
    if os.environ.get("FASTCHECK_REQUIRE_GPU") == "1":
        pytest.fail("FASTCHECK_REQUIRE_GPU=1, but torch finds no CUDA device", pytrace=False)
    pytest.skip("no CUDA device")


@pytest.fixture
def op_observer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For tests of level="op": a seed, a place for the log of a stop, and no run left behind."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    yield
    observer = fastcheck._C.op_observer()
    observer.stop(observer.run())
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, CallMode):
            mode.close()


@pytest.fixture
def torch_threads() -> Iterator[None]:
    """Lets a test call torch.set_num_threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
