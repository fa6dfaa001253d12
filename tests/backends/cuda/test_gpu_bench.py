"""bench/gpu.py runs to its end: on the fake accelerator, with the real kernels, tiny tensors and a
clock that means nothing. There it reads records and waits as on a GPU, where each run is dear.
"""

from __future__ import annotations

import sys
import time
import types
from typing import Any

import pytest
import torch

import gpu
from fakes import fake_device

fake: Any = fake_device.load()
NAME = fake.name()

pytestmark = [pytest.mark.fake_hooks, pytest.mark.usefixtures("cuda_on_fake_device")]


class Event:
    def __init__(self, enable_timing: bool) -> None:
        self.seconds = 0.0

    def record(self) -> None:
        self.seconds = time.perf_counter()

    def synchronize(self) -> None:
        fake.synchronize()

    def elapsed_time(self, end: Event) -> float:
        return max(1e-3, 1e3 * (end.seconds - self.seconds))


def test_all_of_it_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    properties = types.SimpleNamespace(total_memory=2**30)
    for name, stand_in in {
        "_sleep": lambda cycles: None,
        "Event": Event,
        "synchronize": fake.synchronize,
        "current_device": lambda: 0,
        "get_device_properties": lambda index: properties,
        "get_device_name": lambda: "fake",
        "get_device_capability": lambda: (9, 0),
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(gpu.table.cuda, "cuda_problem", lambda: None)
    monkeypatch.setattr(gpu, "cuda", torch.device(NAME))
    streams = gpu.streams_of(torch.device(NAME, 0))
    monkeypatch.setattr(gpu, "streams_of", lambda device: streams)
    monkeypatch.setattr(gpu, "triton_beside", lambda entry, rounds: [])
    monkeypatch.setattr(gpu, "MIB", 2**14)
    monkeypatch.setattr(gpu, "SIZES_BYTES", (2**16,))
    monkeypatch.setattr(gpu, "CACHE_BYTES", 2**17)
    for name in ("device_seconds", "host_seconds"):
        timed = getattr(gpu, name)
        monkeypatch.setattr(gpu, name, lambda call, _, rounds, timed=timed: timed(call, 2, rounds))
    writings: list[dict[str, Any]] = []
    monkeypatch.setattr(
        gpu.harness,
        "write_results",
        lambda name, rows, **more: writings.append({"rows": list(rows), **more}),
    )
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--rounds", "1"])
    gpu.main()
    # A run that is out of time has left what was there.
    assert [bool(each["rows"]) for each in writings] == [False, False, True, True]
    assert writings[0]["first"] and writings[0]["bars"] and not writings[0]["small"]
    written = writings[-1]
    cases = {row["case"] for row in written["rows"]}
    assert cases >= {"copy", "full", "found_nonfinite", "exponents", "record and exponents"}
    assert {row["depth"] for row in written["first"]} >= {"full", "record and exponents"}
    assert any(row["case"] == "DeviceRing.observe" for row in written["small"])
    assert "float32" in capsys.readouterr().out
