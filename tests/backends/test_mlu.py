"""install() on a Cambricon MLU (the fake accelerator, renamed): it works as elsewhere, and the
summary shows that the overflow mode is unknown.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fastcheck
from fakes import fake_device
from fastcheck.backends.portable.constants import stream_key
from fastcheck.backends.table import backend_for
from fastcheck.types import DeviceMode
from fastcheck.utils.torch.streams import stream_handle
from support.helpers import doctors_row
from support.programs.training import (
    assert_stops_with_the_culprit,
    batches,
    deep,
    poison,
    without_waiting,
)

fake: Any = fake_device.load("mlu")

pytestmark = [pytest.mark.fake_mlu, pytest.mark.usefixtures("fake_accelerator")]


@pytest.mark.parametrize("sync", ["never", "step", "call"])
def test_install_stops_with_the_culprit(sync: str) -> None:
    assert_stops_with_the_culprit("mlu", sync)


def test_install_waits_for_nothing() -> None:
    model = deep(6).to("mlu")
    monitor = fastcheck.install(model, stop=fastcheck.Stop(max_lag=None), record="health")
    train = without_waiting(model, [x.to("mlu") for x in batches(4)])
    train()
    monitor.flush()
    fake.synchronize()
    before = fake.counters()
    train()
    spent = fake.counters() - before
    assert spent.synchronisations == spent["blocking_copy"] == 0


def test_records_say_that_the_mode_is_unknown() -> None:
    backend = backend_for(torch.device("mlu", 1))
    assert backend.device_mode is DeviceMode.UNKNOWN
    assert backend.overflow_status is None
    model = deep(1).to("mlu:1")
    monitor = fastcheck.install(model)
    with torch.no_grad():
        model.tail.function = lambda x: poison(x, torch.finfo(x.dtype).max)
        model(torch.ones(2, 8, device="mlu:1"))
    monitor.flush()
    assert set(monitor.records()["device_mode"]) == {int(DeviceMode.UNKNOWN)}
    # Whether that number is a result or an overflow is unknown there.
    assert monitor.events == ()
    said = " ".join(monitor.summary().split())
    assert "what mlu:1 does to a result that does not fit its format is not known" in said


def test_doctor_says_how_many_there_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read = "read by Triton or the portable backend"
    assert doctors_row("mlu", capsys) == (True, f"{fake.device_count()} devices, {read}")
    monkeypatch.setattr(fake, "device_count", lambda: 1)
    assert doctors_row("mlu", capsys) == (True, f"1 device, {read}")
    monkeypatch.setattr(fake, "is_available", lambda: False)
    assert doctors_row("mlu", capsys) == (False, "torch_mlu sees no device")


class TestStreamHandle:
    def test_of_streams_that_tell_it(self) -> None:
        handles = [stream_handle(fake.Stream("mlu")) for _ in range(2)]
        assert 0 not in handles
        assert len(set(handles)) == 2

    def test_of_torch_mlu(self) -> None:
        """Its streams raise where torch asks, and have an attribute of their own."""

        class Stream:
            mlu_stream = 0x1234

            @property
            def native_handle(self) -> int:
                raise RuntimeError("getStreamNativeHandle is not supported")

        assert stream_handle(Stream()) == 0x1234

    def test_of_an_older_torch(self) -> None:
        assert stream_handle(SimpleNamespace(npu_stream=7)) == 7
        assert stream_handle(SimpleNamespace()) == 0

    def test_streams_without_a_number_are_told_apart(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """What the portable backend keeps per stream is not shared by two."""
        current = SimpleNamespace(mlu_stream=11)
        monkeypatch.setattr(fake, "current_stream", lambda device=None: current)
        first = stream_key(torch.device("mlu", 0))
        current = SimpleNamespace(mlu_stream=12)
        assert [first, stream_key(torch.device("mlu", 0))] == [11, 12]
