"""``fastcheck doctor --device`` on the fake accelerator: passes there, and names the check that a
broken backend fails. `make test-fake-device` runs it with the portable backend and the CUDA one.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator
from typing import Any, Callable

import pytest
import torch

from fakes import fake_device
from fastcheck import selftest
from fastcheck.backends import table
from fastcheck.backends.backend import Backend
from fastcheck.cli.main import main
from fastcheck.selftest import (
    FAILED,
    NOT_CHECKABLE,
    PASSED,
    CheckResult,
    find_device,
    run_checks,
)
from fastcheck.utils.torch.streams import DeviceStreams
from support.sampling import IS_WHOLE

pytestmark = [pytest.mark.fake_accelerator, pytest.mark.fake_cuda]


fake: Any = fake_device.load()
NAME = fake.name()


@pytest.fixture(autouse=True)
def _default_stream() -> Iterator[None]:
    yield
    fake.set_sync_debug_mode("default")
    fake.synchronize()


def one(name: str, monkeypatch: pytest.MonkeyPatch) -> CheckResult:
    monkeypatch.setattr(selftest, "CHECKS", {name: selftest.CHECKS[name]})
    (outcome,) = run_checks(find_device(NAME))
    return outcome


def test_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--device", f"{NAME}:1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["device"]["device"] == f"{NAME}:1"
    assert found["device"]["name"] == "fake device 1"
    details = {check["name"]: check["detail"] for check in found["checks"]}
    assert details.keys() == selftest.CHECKS.keys()
    assert {check["status"] for check in found["checks"]} == {PASSED}
    assert 'set_sync_debug_mode("error") raised nothing' in details["no-wait"]
    assert "of earlier work was still queued" in details["no-wait"]
    assert main(["doctor", "--device", f"{NAME}:7"]) == 2
    assert f"device '{NAME}:7' can't be tested here: " in capsys.readouterr().err


# --- broken backends -----------------------------------------------------------------------------

# Which backend is broken, or reads a device without streams, makes no difference.
of_one_backend = pytest.mark.skipif(
    not IS_WHOLE and os.environ.get("FASTCHECK_TEST_KERNELS") != "cuda",
    reason="make test-fake-cuda runs it, make test-release with both backends",
)


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

        def observe_list(
            xs: Any, slots: Any, first: int, depth: int, logical: bool = False
        ) -> None:
            true.observe_list(xs, slots, first, depth, logical=logical)
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


@of_one_backend
@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("values", reading(word(1, lambda n: n.clamp_(max=0))), "nan_count: got 0"),
        ("values", reading(word(13, lambda c: c.bitwise_xor_(1))), "checksum: got"),
        ("values", reading(word(8, lambda low: low.bitwise_xor_(1))), "min: got"),
        (
            "values",
            reading(word(11, lambda s: s.view(torch.float64).mul_(1 + 1e-5))),
            "abs_sum: got",
        ),
        (
            "values",
            lambda true: {"observe_list": lambda *args, logical=False: true.observe_list(*args)},
            "transposed",
        ),
        ("no-wait", waiting(lambda: torch.ones((), device=NAME).item()), "set_sync_debug_mode"),
        ("no-wait", waiting(wait_for_an_event), "returned only after"),
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
    outcome = one(name, monkeypatch)
    assert outcome.status == FAILED
    assert said in outcome.detail


def test_a_device_without_a_watch_is_still_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.delattr(fake, "set_sync_debug_mode")
        detail = one("no-wait", patch).detail
        assert f"torch.{NAME} has no watch for waits" in detail and "still queued" in detail
        breaking(patch, waiting(wait_for_an_event))
        (outcome,) = run_checks(find_device(NAME))
        assert outcome.status == FAILED


def test_a_stream_that_is_never_busy_leaves_the_watch_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(selftest, "_enqueue_work", lambda *_: None)
    monkeypatch.setattr(DeviceStreams, "is_done", lambda *_: True)
    assert one("no-wait", monkeypatch).status == PASSED
    with monkeypatch.context() as patch:
        patch.delattr(fake, "set_sync_debug_mode")
        (outcome,) = run_checks(find_device(NAME))
    assert outcome.status == NOT_CHECKABLE and "as soon as it was queued" in outcome.detail


@of_one_backend
def test_a_device_without_streams_is_not_checkable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selftest, "streams_of", lambda device: None)
    states = {outcome.name: outcome.status for outcome in run_checks(find_device(NAME))}
    assert states == {"values": PASSED, "no-wait": NOT_CHECKABLE, "install": NOT_CHECKABLE}
