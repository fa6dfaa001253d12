"""Tests of ``fastcheck doctor --device`` on the CPU: it passes, and names the check that a broken
backend fails. tests/selftest/test_device.py has the same for an accelerator.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from typing import Any, Callable

import numpy as np
import pytest
import torch

import fastcheck
from fastcheck import _C, selftest
from fastcheck.backends.portable.formats import FORMATS
from fastcheck.cli.main import main
from fastcheck.record.format import RECORD_DTYPE, Depth
from fastcheck.selftest import (
    FAILED,
    NOT_CHECKABLE,
    PASSED,
    CheckResult,
    layouts,
    run_checks,
    sizes,
    special,
)
from fastcheck.statistics import functions
from support.processes import run_code
from support.records.reference import fields, record
from support.sampling import sample

CPU = torch.device("cpu")


def one(name: str, monkeypatch: pytest.MonkeyPatch) -> CheckResult:
    monkeypatch.setattr(selftest, "CHECKS", {name: selftest.CHECKS[name]})
    (outcome,) = run_checks(CPU)
    return outcome


class Broken:
    """The extension, with a method replaced by one that is given the true one's result."""

    def __init__(self, **changes: Callable[..., Any]) -> None:
        self.changes = changes

    def __getattr__(self, name: str) -> Any:
        true = getattr(_C, name)
        change = self.changes.get(name)
        if change is None:
            return true
        return lambda *args: change(true, *args)


def changed(field: str, change: Callable[[Any, np.ndarray], Any]) -> Callable[..., torch.Tensor]:
    """record_list with a field of each record replaced."""

    def record_list(true: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
        records = np.frombuffer(true(*args).numpy().tobytes(), RECORD_DTYPE).copy()
        for row in records:
            row[field] = change(row[field], row)
        return torch.from_numpy(records.view(np.uint8).reshape(-1, RECORD_DTYPE.itemsize))

    return record_list


# --- it passes where nothing is broken -----------------------------------------------------------


def test_passes_and_draws_no_random_number() -> None:
    before = torch.get_rng_state()
    outcomes = {outcome.name: outcome for outcome in run_checks(CPU)}
    states = {name: outcome.status for name, outcome in outcomes.items()}
    assert states == {"values": PASSED, "no-wait": NOT_CHECKABLE, "install": PASSED}, outcomes
    assert torch.equal(torch.get_rng_state(), before)


def test_samples_hold_what_they_say() -> None:
    for form in FORMATS.values():
        samples = [*sizes(form), *special(form), *layouts(form)]
        assert {s.tensor.numel() for s in samples} >= {0, 4096 // form.info.components}
        if form.is_float:
            found = [fields(record(s.tensor)) for s in samples]
            for name in ("nan", "zero", "subnormal", "negative", "saturated"):
                assert any(values[f"{name}_count"] for values in found), (form.info.name, name)
            [moderate] = [s for s in samples if "4097 components of moderate" in s.what]
            assert 2**-12 < fields(record(moderate.tensor))["max"] < 2**13


# --- and fails where something is ----------------------------------------------------------------

BREAKS: dict[str, tuple[dict[str, Callable[..., Any]], str]] = {
    "a NaN is missed": (
        {"record_list": changed("nan_count", lambda n, _: max(0, n - 1))},
        "nan_count: got",
    ),
    "a subnormal is flushed": (
        {"record_list": changed("subnormal_count", lambda n, _: 0)},
        "subnormal",
    ),
    "a minimum is rounded": (
        {
            "record_list": changed(
                "min", lambda x, row: np.nextafter(x, 0) if row["dtype"] == 0 else x
            )
        },
        "min: got",
    ),
    "a sum is off by its last bit": (
        {"record_list": changed("abs_sum", lambda x, _: np.nextafter(x, np.inf))},
        "abs_sum: got",
    ),
    "a NaN for a sum": (
        {"record_list": changed("sum", lambda x, row: np.nan if row["numel"] > 4096 else x)},
        "sum: got nan",
    ),
    "a checksum of a tail": (
        {"record_list": changed("checksum", lambda x, row: x ^ (row["numel"] == 4097))},
        "4097 components of any bits, record='full', order='storage': checksum",
    ),
    "a depth computes too much": (
        {"record_list": lambda true, x, depth, logical: true(x, int(Depth.FULL), logical)},
        "record='health'",
    ),
    "one tensor is read unlike a list": (
        {"record": lambda true, x, depth, logical: true(x[1:], depth, logical)},
        "numel",
    ),
    "order is ignored": (
        {"record_list": lambda true, x, depth, logical: true(x, depth, False)},
        "transposed, record='full', order='logical'",
    ),
    "strides are ignored": (
        {"record_list": lambda true, x, *rest: true([y.contiguous() for y in x], *rest)},
        "transposed",
    ),
    "records claim that the CPU saturates": (
        {"record_list": changed("device_mode", lambda m, _: 1)},
        "device_mode: got 1",
    ),
    "reading raises": (
        {"record_list": lambda true, *args: 1 // 0},
        "ZeroDivisionError in test_checks.py:",
    ),
}


@pytest.mark.parametrize("fault", sample(BREAKS, 5))
def test_names_what_is_broken(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changes, said = BREAKS[fault]
    monkeypatch.setattr(functions, "extension", Broken(**changes))
    outcome = one("values", monkeypatch)
    assert outcome.status == FAILED
    assert said in outcome.detail


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"overflow_nums": -1}, "did not stop the run"),
        ({"exclude": "faulty"}, "named ('', "),
    ],
)
def test_install_that_does_not_stop_or_names_another(
    options: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        selftest, "install", lambda *a, **kw: fastcheck.install(*a, **{**kw, **options})
    )
    outcome = one("install", monkeypatch)
    assert outcome.status == FAILED and said in outcome.detail, outcome.detail


def test_install_that_stops_a_healthy_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def armed(model: Any, **options: Any) -> Any:
        model.faulty.register_forward_pre_hook(lambda module, _: setattr(module, "armed", True))
        return fastcheck.install(model, **options)

    monkeypatch.setattr(selftest, "install", armed)
    outcome = one("install", monkeypatch)
    assert outcome.status == FAILED and "before any fault" in outcome.detail


def test_a_dtype_that_the_device_lacks_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    copy_to = selftest.copy_to

    def without_float64(x: torch.Tensor, device: torch.device) -> torch.Tensor:
        if x.dtype == torch.float64:
            raise RuntimeError("float64 is not supported")
        return copy_to(x, device)

    monkeypatch.setattr(selftest, "copy_to", without_float64)
    outcome = one("values", monkeypatch)
    assert outcome.status == PASSED and "(not on this device: float64)" in outcome.detail


# --- the command ---------------------------------------------------------------------------------


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["doctor", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_report_holds_the_checks_and_no_path_and_no_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = {name: selftest.CHECKS[name] for name in ("no-wait", "install")}
    monkeypatch.setattr(selftest, "CHECKS", kept)
    code, out, _ = run(capsys, "--device", "cpu")
    assert code == 0 and "fastcheck can be used here" in out
    for line in (
        f"no-wait     {NOT_CHECKABLE}",
        f"install     {PASSED}",
        "the same bits on every machine",
    ):
        assert line in out
    for private in (socket.gethostname(), os.getcwd(), sys.prefix, os.path.expanduser("~")):
        assert private not in out


def test_failure_is_exit_code_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(functions, "extension", Broken(**BREAKS["a NaN is missed"][0]))
    code, out, _ = run(capsys, "--device", "cpu")
    assert code == 1
    assert "values failed on cpu" in " ".join(out.split()) and "install     passed" in out
    code, out, _ = run(capsys, "--device", "cpu", "--json")
    assert code == 1
    found = json.loads(out)
    states = {check["name"]: check["status"] for check in found["checks"]}
    assert states == {"values": FAILED, "no-wait": NOT_CHECKABLE, "install": PASSED}
    assert found["device"]["device"] == "cpu" and len(found["problems"]) == 1


def test_passes_without_the_extension() -> None:
    code = "import sys; from fastcheck.cli.main import main; "
    code += "sys.exit(main(['doctor', '--device', 'cpu', '--json']))"
    done = run_code(code, env={"FASTCHECK_NO_EXTENSION": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["device"]["backend"] == "portable"
    states = {check["name"]: check["status"] for check in found["checks"]}
    assert states == {"values": NOT_CHECKABLE, "no-wait": NOT_CHECKABLE, "install": PASSED}


@pytest.mark.parametrize(
    ("device", "said"),
    [
        ("cuda:99", "device 'cuda:99' can't be tested here: "),
        ("mlu", "No module named 'torch_mlu'"),
        ("cup", "at start of device string: cup"),
        ("meta", "no data"),
        ("xpu", "device 'xpu' can't be tested here: "),
    ],
)
def test_a_device_that_is_not_there_is_exit_code_2(
    capsys: pytest.CaptureFixture[str], device: str, said: str
) -> None:
    code, _, err = run(capsys, "--device", device)
    assert code == 2 and said in err
