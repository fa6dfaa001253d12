"""When the Triton backend is chosen, and what replaces it. Needs no device and no triton."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from typing import Any, Optional

import pytest
import torch
from torch import nn

import fastcheck
from fastcheck import _C, ConfigError
from fastcheck.backends import table
from fastcheck.backends import triton as package
from fastcheck.backends.triton import backend as triton
from fastcheck.cli.main import main
from support.helpers import assert_same, doctors_row
from support.records.reference import VALUE_BYTES


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("FASTCHECK_TRITON", raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(triton, "_given_up", {})
    monkeypatch.setattr(triton, "_lists_given_up", {})
    triton._unusable.cache_clear()
    table._of_type.cache_clear()
    yield
    triton._unusable.cache_clear()
    table._of_type.cache_clear()


def install_triton(monkeypatch: pytest.MonkeyPatch, backend: Optional[str]) -> None:
    """A triton whose driver finds this backend; None: that is not installed."""
    actual = importlib.import_module

    def find(name: str, package: Optional[str] = None) -> Any:
        if name != "triton":
            return actual(name, package)
        if backend is None:
            raise ModuleNotFoundError("No module named 'triton'", name="triton")
        target = types.SimpleNamespace(backend=backend)
        active = types.SimpleNamespace(get_current_target=lambda: target)
        driver = types.SimpleNamespace(active=active)
        return types.SimpleNamespace(runtime=types.SimpleNamespace(driver=driver))

    monkeypatch.setattr(triton.importlib, "import_module", find)


# --- when it is used -----------------------------------------------------------------------------


def test_importing_and_using_fastcheck_does_not_import_triton() -> None:
    code = (
        "import sys, torch, fastcheck\n"
        "fastcheck.stats(torch.ones(3)).sum\n"
        "from fastcheck.backends.table import backend_for\n"
        "assert backend_for(torch.device('cpu')).name == 'cpu'\n"
        "assert not any(name.split('.')[0] == 'triton' for name in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_devices_without_a_kernel_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for device_type in ("npu", "mlu", "xpu"):
        install_triton(monkeypatch, device_type)
        triton._unusable.cache_clear()
        assert triton.triton_problem(device_type) is None
        assert table._of_type(device_type).name == "triton"
        assert table._of_type(device_type).determinism == "sums"
    assert table._of_type("npu").device_mode == fastcheck.types.DeviceMode.UNKNOWN


def test_amd_is_read_and_nvidia_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    install_triton(monkeypatch, "cuda")
    assert triton.triton_problem("cuda") == "off by default; FASTCHECK_TRITON=on enables it"
    monkeypatch.setenv("FASTCHECK_TRITON", "on")
    assert triton.triton_problem("cuda") is None
    monkeypatch.delenv("FASTCHECK_TRITON")
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert triton.triton_problem("cuda") == "the triton that is installed is for cuda"
    install_triton(monkeypatch, "hip")
    triton._unusable.cache_clear()
    assert triton.triton_problem("cuda") is None


def test_off(monkeypatch: pytest.MonkeyPatch) -> None:
    install_triton(monkeypatch, "npu")
    monkeypatch.setenv("FASTCHECK_TRITON", "off")
    assert triton.triton_problem("npu") == "FASTCHECK_TRITON=off"
    assert table._of_type("npu").name == "portable"
    assert triton.remarks() == []  # nothing that one would wonder about


def test_a_bad_value_is_an_error_that_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTCHECK_TRITON", "atuo")
    with pytest.raises(ConfigError, match=r"auto, on, off\n.*'atuo'\n.*FASTCHECK_TRITON=auto"):
        triton.triton_problem("npu")
    with pytest.raises(ConfigError):
        table.backend_for(torch.device("cpu"))
    assert main(["doctor"]) == 1


@pytest.mark.parametrize(
    ("backend", "reason"),
    [(None, "triton is not installed"), ("cuda", "the triton that is installed is for cuda")],
)
def test_without_a_triton_for_the_device_the_portable_backend_reads(
    monkeypatch: pytest.MonkeyPatch, backend: Optional[str], reason: str
) -> None:
    install_triton(monkeypatch, backend)
    assert table._of_type("npu").name == "portable"
    assert triton.remarks() == [f"npu tensors are not read by the Triton kernels: {reason}"]
    # no warning about a device without a guarantee
    assert table._of_type("privateuseone").name == "portable"
    assert len(triton.remarks()) == 1


# --- where it fails ------------------------------------------------------------------------------


class Launches:
    """Stands in for the module that launches."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.tried: list[torch.dtype] = []

    def reads(self, dtype: torch.dtype) -> bool:
        return dtype != torch.float64

    def target_of(self, device: torch.device) -> Any:
        return types.SimpleNamespace(takes_lists=False)

    def launch_record(self, tensor: torch.Tensor, *_: Any, **__: Any) -> None:
        self.tried.append(tensor.dtype)
        raise self.error


def failing(monkeypatch: pytest.MonkeyPatch, error: Exception) -> Launches:
    launches = Launches(error)
    monkeypatch.setitem(importlib.sys.modules, "fastcheck.backends.triton.launch", launches)
    monkeypatch.setattr(package, "launch", launches, raising=False)
    return launches


def check(slot: torch.Tensor, x: torch.Tensor, logical: bool = False) -> None:
    wanted = _C.record(x, 3, logical).numpy().tobytes()
    actual = slot.numpy().tobytes()[:VALUE_BYTES] + wanted[VALUE_BYTES:]
    assert_same(actual, wanted, determinism="sums")


def test_what_a_compiler_refuses_is_read_by_the_portable_backend(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Dtype by dtype, and each is tried once."""
    launches = failing(monkeypatch, RuntimeError("ub overflow\nand a page of the compiler's"))
    entry = triton.triton_backend("cpu")
    slots = torch.zeros(4, 192, dtype=torch.uint8)
    xs = [torch.randn(5000), torch.arange(70), torch.randn(9, 7).t(), torch.randn(3).double()]
    entry.observe_list(xs, slots, 0, 3)
    for slot, x in zip(slots, xs):
        check(slot, x)
    slots.zero_()
    entry.observe_list(xs[2:3], slots, 1, 3, logical=True)
    check(slots[1], xs[2], logical=True)
    assert launches.tried == [torch.float32, torch.int64]
    assert triton.remarks() == [
        f"{name} tensors on cpu are not read by the Triton kernels: "
        "they failed there (RuntimeError: ub overflow)"
        for name in ("float32", "int64")
    ]


def test_memory_that_runs_out_says_nothing_of_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB"))
    slots = torch.zeros(1, 192, dtype=torch.uint8)
    with pytest.raises(torch.OutOfMemoryError):
        triton.triton_backend("cpu").observe(torch.ones(3), slots, 0, 3)
    assert triton.remarks() == []


def test_the_summary_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(3, 3)
    monitor = fastcheck.install(model)
    try:
        model(torch.ones(2, 3))
        assert "Triton" not in monitor.summary()
        triton._given_up["npu", None] = "triton is not installed"
        said = re.sub(r"\s+", " ", monitor.summary())
        assert "npu tensors are not read by the Triton kernels: triton is not installed" in said
    finally:
        monitor.remove()


def test_doctor_has_a_row(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the accelerator that torch finds, whichever this machine has."""
    monkeypatch.setattr(torch._C, "_get_accelerator", lambda: torch.device("cpu"))
    assert doctors_row("triton", capsys) == (
        False,
        "torch finds no accelerator for it",
    )
    monkeypatch.setattr(torch._C, "_get_accelerator", lambda: torch.device("xpu"))
    install_triton(monkeypatch, "cuda")
    assert doctors_row("triton", capsys) == (False, "the triton that is installed is for cuda")
