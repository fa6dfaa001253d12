"""``fastcheck selftest`` on the fake accelerator: passes there, and names the check that a broken
backend fails. `make test-fake-device` runs it, with the portable backend and with the CUDA one.
"""

from __future__ import annotations

import collections
import dataclasses
import json
from collections.abc import Iterator
from typing import Any, Callable

import pytest
import torch

from fakes import fake_device
from fastcheck.backends import table
from fastcheck.backends.backend import Backend
from fastcheck.cli.main import main
from fastcheck.record.format import DeviceMode
from fastcheck.selftest import training
from fastcheck.selftest.run import (
    CHECKS,
    FAILED,
    NOT_CHECKABLE,
    PASSED,
    Outcome,
    begin,
    find_device,
)

pytestmark = [pytest.mark.fake_accelerator, pytest.mark.fake_cuda]


fake: Any = fake_device.load()
NAME = fake.name()
QUICK = tuple(name for name in CHECKS if name != "throughput")


@pytest.fixture(autouse=True)
def _default_stream() -> Iterator[None]:
    yield
    fake.set_sync_debug_mode("default")
    fake.synchronize()


def one(name: str) -> Outcome:
    report = begin(NAME, [name])
    (outcome,) = report.run()
    return outcome


@pytest.mark.parametrize("name", QUICK)
def test_passes(name: str) -> None:
    outcome = one(name)
    assert outcome.status == (NOT_CHECKABLE if name == "kernels" else PASSED), outcome.detail


def test_no_sync_saw_both_ways() -> None:
    detail = one("no-sync").detail
    assert 'set_sync_debug_mode("error") raised nothing' in detail
    assert "of earlier work was still queued" in detail


def test_the_accelerator_is_the_default_and_has_an_index() -> None:
    assert find_device(None) == torch.device(NAME, 0)
    assert find_device(f"{NAME}:1") == torch.device(NAME, 1)


def test_command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "LARGEST_ON_DEVICE", 1 << 18)
    chosen = ("overflow-mode", "throughput")
    arguments = [word for name in chosen for word in ("--check", name)]
    assert main(["selftest", "--device", f"{NAME}:1", "--json", *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["device"]["device"] == f"{NAME}:1"
    assert found["device"]["name"] == "fake device 1"
    assert [check["name"] for check in found["checks"]] == list(chosen)
    assert main(["selftest", "--device", f"{NAME}:7"]) == 2
    assert "torch finds 2 of them" in capsys.readouterr().err


# --- broken backends -----------------------------------------------------------------------------


def breaking(monkeypatch: pytest.MonkeyPatch, change: Callable[[Backend], dict[str, Any]]) -> None:
    """Puts fields of the device's backend in the place of its own."""
    true = table._of_type(NAME, None)
    broken = dataclasses.replace(true, **change(true))
    kept = table._of_type
    monkeypatch.setattr(
        table, "_of_type", lambda kind, index=None: broken if kind == NAME else kept(kind, index)
    )


def reading(change: Callable[[Any, int, int], None]) -> Callable[[Backend], dict[str, Any]]:
    """A backend that does something to the slots that it has written: slots, first, count."""

    def changed(true: Backend) -> dict[str, Any]:
        def observe(x: Any, slots: Any, index: int, depth: int) -> None:
            true.observe(x, slots, index, depth)
            change(slots, index, 1)

        def observe_list(xs: Any, slots: Any, first: int, depth: int) -> None:
            true.observe_list(xs, slots, first, depth)
            change(slots, first, len(xs))

        return {"observe": observe, "observe_list": observe_list}

    return changed


def word(column: int, change: Callable[[torch.Tensor], Any]) -> Callable[[Any, int, int], None]:
    """Changes one of the 64-bit words of each record."""

    def apply(slots: torch.Tensor, first: int, count: int) -> None:
        change(slots.view(torch.int64)[first : first + count, column])

    return apply


def waiting(how: Callable[[], Any]) -> Callable[[Backend], dict[str, Any]]:
    return reading(lambda *_: how())


def wait_for_an_event() -> None:
    """What set_sync_debug_mode does not see."""
    event = fake.Event()
    event.record(fake.current_stream())
    event.synchronize()


def on_default_stream(true: Backend) -> dict[str, Any]:
    def observe(x: Any, slots: Any, index: int, depth: int) -> None:
        with fake.stream(fake.default_stream()):
            true.observe(x, slots, index, depth)

    return {"observe": observe}


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("special-values", reading(word(1, lambda n: n.clamp_(max=0))), "nan_count: got 0"),
        ("values", reading(word(13, lambda c: c.bitwise_xor_(1))), "checksum: got"),
        ("values", reading(word(8, lambda low: low.bitwise_xor_(1))), "min: got"),
        (
            "values",
            reading(word(11, lambda s: s.view(torch.float64).mul_(1 + 1e-5))),
            "abs_sum: got",
        ),
        (
            "layouts",
            lambda true: {"observe_list_logical": true.observe_list},
            "transposed",
        ),
        (
            "found-nonfinite",
            lambda true: {"found_nonfinite": lambda xs: true.found_nonfinite(xs[:1])},
            "got 0.0, expected 1.0",
        ),
        ("no-sync", waiting(lambda: torch.ones((), device=NAME).item()), "set_sync_debug_mode"),
        ("no-sync", waiting(wait_for_an_event), "returned only after"),
        ("streams", on_default_stream, "got"),
        (
            "overflow-mode",  # the CUDA kernels write theirs into the record themselves
            lambda true: {"device_mode": DeviceMode.SATURATING},
            "SATURATING",
        ),
        (
            "install",
            reading(lambda slots, first, count: slots[first : first + count, 8:32].zero_()),
            "did not stop the run",
        ),
        ("values", waiting(lambda: 1 // 0), "ZeroDivisionError in test_device.py:"),
    ],
)
def test_names_what_is_broken(
    name: str,
    change: Callable[[Backend], dict[str, Any]],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    breaking(monkeypatch, change)
    # Streams that are as quick as the host would be in time by chance.
    fake.set_delay(1000 if name == "streams" else 0)
    try:
        outcome = one(name)
    finally:
        fake.set_delay(0)
    assert outcome.status == FAILED
    assert said in outcome.detail


def test_a_device_without_a_watch_is_still_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(fake, "set_sync_debug_mode")
    try:
        detail = one("no-sync").detail
        assert f"torch.{NAME} has no watch for waits" in detail and "still queued" in detail
        breaking(monkeypatch, waiting(wait_for_an_event))
        assert one("no-sync").status == FAILED
    finally:
        monkeypatch.undo()


def test_a_device_without_streams_is_not_checkable(monkeypatch: pytest.MonkeyPatch) -> None:
    from fastcheck.selftest import checks as selftest_checks

    monkeypatch.setattr(selftest_checks, "streams_of", lambda device: None)
    for name in ("no-sync", "streams", "install"):
        assert one(name).status == NOT_CHECKABLE
    assert one("overflow-mode").status == PASSED


def test_streams_use_memory_again_on_each() -> None:
    with fake.recorded_launches() as names:
        assert one("streams").status == PASSED
    fills = collections.Counter(n.split()[0] for n in names if n.endswith("aten::fill_.Scalar"))
    side = [count for stream, count in fills.items() if not stream.endswith(":0")]
    assert len(side) == 4 and min(side) >= 12, fills
