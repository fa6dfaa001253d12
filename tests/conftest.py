"""Markers, the hypothesis profile, and fixtures that put global state back."""

from __future__ import annotations

import gc
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
        "test_fake_device_processes.py",
        "test_fake_device_torch.py",
        "test_op_async.py",
        "test_op_async_beside.py",
        "test_fake_graphs.py",
        "test_graph_ends.py",
        "test_graph_parts.py",
        "test_graphs.py",
        "test_op_device.py",
        "test_mlu.py",
        "test_npu.py",
        "test_npu_ops.py",
        "test_npu_ops_status.py",
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
def fresh_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A seed, and a folder of the test's own: a stop writes its log there."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)


def _close_call_modes() -> None:
    """Those that a stop has left."""
    for mode in _get_current_dispatch_mode_stack():
        if isinstance(mode, CallMode):
            mode.close()


@pytest.fixture
def op_observer(fresh_start: None) -> Iterator[None]:
    """For tests of level="op": no run is left behind."""
    yield
    observer = fastcheck._C.op_observer()
    observer.stop(observer.run())
    _close_call_modes()


@pytest.fixture
def torch_threads() -> Iterator[None]:
    """Lets a test call torch.set_num_threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def one_thread(fresh_start: None, torch_threads: None) -> None:
    """As a fake device's kernels have: some CPU kernels' sums depend on the number of threads."""
    torch.set_num_threads(1)


@pytest.fixture
def fake_accelerator(one_thread: None) -> Iterator[Any]:
    """The fake accelerator, on which nothing is left to run afterwards."""
    import fake_device

    fake: Any = fake_device.load()
    yield fake
    fake.settle()


@pytest.fixture
def cuda_on_fake_device(fake_accelerator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CUDA backend reads the fake accelerator's tensors."""
    import cuda_on_fake
    from fastcheck import backends

    monkeypatch.setattr(backends, "_of_type", backends._of_type)  # put back as it is now
    cuda_on_fake.use()


@pytest.fixture
def graphs_on_fake_device(cuda_on_fake_device: None, fake_accelerator: Any) -> Iterator[None]:
    """That, and graphs and their memory are gone afterwards."""
    yield
    gc.collect()
    fake_accelerator.empty_cache()


@pytest.fixture
def fresh_npu(fake_accelerator: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The fake accelerator as an NPU, of whose chip nobody knows afterwards."""
    import ascend

    yield
    fake_accelerator.settle()
    monkeypatch.undo()
    ascend.forget_modes()


@pytest.fixture(
    params=[("Ascend910A", {}), ("Ascend910B1", {"INF_NAN_MODE_FORCE_DISABLE": "1"})],
    ids=["910A", "910B-off"],
)
def saturating_chip(request: Any, fresh_npu: None, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Each NPU that saturates, as an ascend.Chip."""
    import ascend

    name, variables = request.param
    return ascend.use_chip(monkeypatch, name, **variables)


@pytest.fixture
def computing(saturating_chip: Any) -> Iterator[Any]:
    """Within the test every operator overflows as on that chip: an ascend.Computing."""
    import ascend

    with ascend.Computing(saturating_chip) as mode:
        yield mode
        _close_call_modes()  # they lie above it on the stack


@pytest.fixture
def nothing_compiled(fresh_start: None) -> Iterator[None]:
    """Neither before nor afterwards."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    gc.collect()  # models and their monitors are cycles
