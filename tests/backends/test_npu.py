"""Ascend NPUs (the fake accelerator, renamed, with the interface of torch_npu): the overflow mode
of each chip.
"""

from __future__ import annotations

import ctypes
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import fastcheck
from fastcheck.backends import complete_records, npu, table
from fastcheck.backends.table import backend_for
from fastcheck.backends.triton import backend as triton
from fastcheck.record.format import Depth
from fastcheck.types import RECORD_DTYPE, DeviceMode
from support.devices import ascend
from support.devices.ascend import DEVICES, Net, loop, too_large, use_chip
from support.helpers import doctors_row
from support.programs.training import poison, stopped, where

pytestmark = [pytest.mark.fake_npu, pytest.mark.usefixtures("fresh_npu")]

#: Chips in each mode that they have: name, environment, mode.
CHIPS = [
    ("Ascend910A", {}, DeviceMode.SATURATING),
    ("Ascend910A", {"INF_NAN_MODE_ENABLE": "1"}, DeviceMode.SATURATING),
    ("Ascend910B1", {}, DeviceMode.IEEE),
    ("Ascend910B1", {"INF_NAN_MODE_FORCE_DISABLE": "1"}, DeviceMode.SATURATING),
    ("Ascend950DT", {}, DeviceMode.IEEE),
    ("Ascend950DT", {"INF_NAN_MODE_FORCE_DISABLE": "1"}, DeviceMode.IEEE),
]


class TestMode:
    @pytest.mark.parametrize(("name", "variables", "mode"), CHIPS)
    def test_as_torch_npu_tells_it(
        self, name: str, variables: Any, mode: DeviceMode, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        use_chip(monkeypatch, name, **variables)
        assert backend_for(torch.device("npu", 0)).device_mode is mode
        model = Net()
        monitor = fastcheck.install(model, overflow_nums=-1)
        loop(model, 2)
        monitor.flush()
        read = monitor.records()
        is_on_host = [monitor.sites[int(site)].role == "learning_rate" for site in read["site"]]
        assert set(read["device_mode"][~np.array(is_on_host)]) == {int(mode)}
        row = complete_records.record(torch.ones(3, device="npu"), Depth.HEALTH, False)
        assert row.cpu().numpy().view(RECORD_DTYPE)["device_mode"][0] == int(mode)

    @pytest.mark.parametrize(
        ("name", "is_off", "mode"),
        [
            ("Ascend910A", False, DeviceMode.SATURATING),
            ("Ascend910ProB", False, DeviceMode.SATURATING),
            ("Ascend910B", False, DeviceMode.SATURATING),  # of the first generation
            ("Ascend310P3", False, DeviceMode.SATURATING),
            ("Ascend910B1", False, DeviceMode.IEEE),
            ("Ascend910B2C", True, DeviceMode.SATURATING),
            ("Ascend910_9391", False, DeviceMode.IEEE),
            ("Ascend910_9391", True, DeviceMode.SATURATING),
            ("Ascend950DT", True, DeviceMode.IEEE),
            ("Ascend1234", False, DeviceMode.UNKNOWN),
        ],
    )
    def test_an_old_torch_npu_is_judged_by_its_chip(
        self, name: str, is_off: bool, mode: DeviceMode, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        use_chip(monkeypatch, name)
        monkeypatch.delattr(torch.npu, "utils")
        if is_off:
            monkeypatch.setenv("INF_NAN_MODE_FORCE_DISABLE", "1")
        assert npu.overflow_mode(DEVICES[0]) is mode

    def test_each_device_is_asked_where_cann_is(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """torch_npu sets the mode of one device and reports it for all."""
        use_chip(monkeypatch, "Ascend910B1", INF_NAN_MODE_FORCE_DISABLE="1")
        answers = {0: (0, 0), 1: (0, 1)}  # device: status, mode

        def ask(answer: Any) -> int:
            status, answer._obj.value = answers[ascend.fake.current_device()]
            return status

        runtime = SimpleNamespace(aclrtGetDeviceSatMode=ask)
        monkeypatch.setattr(ctypes, "CDLL", lambda name: runtime)
        modes = [backend_for(device).device_mode for device in DEVICES]
        assert modes == [DeviceMode.SATURATING, DeviceMode.IEEE]
        assert backend_for(DEVICES[1]).overflow_status is None
        for answers[1] in ((0, 2), (507, 1)):  # "undefined", and an error
            assert npu.overflow_mode(DEVICES[1]) is DeviceMode.SATURATING
        assert ascend.fake.current_device() == 0

    def test_whichever_kernels_read(self, monkeypatch: pytest.MonkeyPatch) -> None:
        use_chip(monkeypatch, "Ascend910A")
        monkeypatch.setattr(table, "_of_type", lambda kind, index: triton.triton_backend(kind))
        backend = backend_for(torch.device("npu", 0))
        assert (backend.name, backend.device_mode) == ("triton", DeviceMode.SATURATING)
        assert backend.overflow_status is not None

    def test_variables_that_torch_npu_refuses(self, monkeypatch: pytest.MonkeyPatch) -> None:
        use_chip(monkeypatch, "Ascend910B1", INF_NAN_MODE_ENABLE="0")
        assert npu.overflow_mode(DEVICES[0]) is DeviceMode.IEEE

    def test_without_a_word_from_torch_npu_it_is_unknown(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
        backend = backend_for(torch.device("npu", 0))
        assert backend.device_mode is DeviceMode.UNKNOWN
        assert backend.overflow_status is None
        model = Net()
        monitor = fastcheck.install(model)
        loop(model, 1)
        assert "npu:0 does to a result" in monitor.summary()

    def test_in_inf_nan_mode_nothing_is_added(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The largest number is a number like others, and no status word is read."""
        chip = use_chip(monkeypatch, "Ascend910B1")
        model = Net()
        monitor = fastcheck.install(model)
        loop(model, 3, 1, lambda x: poison(x, ascend.SATURATED))
        monitor.flush()
        assert monitor.events == ()
        assert "saturates" not in monitor.summary()
        assert "overflow_status" not in {site.role for site in monitor.sites}
        stop = stopped(loop, model, 9, 1, too_large(chip))
        assert where(stop.culprit) == ("hole", "output", "output", "origin")


def test_doctor_says_what_torch_npu_sees(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = "read by Triton or the portable backend"
    assert doctors_row("npu", capsys) == (True, f"{len(DEVICES)} devices, {read}")

    def broken() -> bool:
        raise RuntimeError("drvMngGetConsoleLogLevel failed.\nAnd a page of the driver's")

    monkeypatch.setattr(torch.npu, "is_available", broken)
    assert doctors_row("npu", capsys) == (False, "drvMngGetConsoleLogLevel failed")
    monkeypatch.delattr(torch, "npu")
    assert doctors_row("npu", capsys) == (False, "torch_npu is not loaded")
