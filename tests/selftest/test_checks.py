"""Tests of ``fastcheck selftest`` on the CPU: it passes, and names the check that a broken backend
fails. tests/selftest/test_device.py has the same for an accelerator.
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
from fastcheck import _C, _kernels
from fastcheck.cli.main import main
from fastcheck.errors import ConfigError
from fastcheck.record.format import RECORD_DTYPE, Depth
from fastcheck.selftest import checks as selftest_checks
from fastcheck.selftest import training
from fastcheck.selftest.oracle import differences, oracle
from fastcheck.selftest.run import (
    CHECKS,
    FAILED,
    NOT_CHECKABLE,
    PASSED,
    Outcome,
    begin,
    find_device,
)
from fastcheck.selftest.tensors import dtype_rows, layouts, special, values
from fastcheck.statistics import functions
from support.helpers import tensor_of
from support.processes import run_code
from support.records.reference import DTYPES, record
from support.records.vectors import PATH, pattern

QUICK = tuple(name for name in CHECKS if name != "throughput")


def one(name: str) -> Outcome:
    report = begin("cpu", [name])
    (outcome,) = report.run()
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


@pytest.mark.parametrize("name", QUICK)
def test_passes(name: str) -> None:
    outcome = one(name)
    assert outcome.status == (NOT_CHECKABLE if name == "no-sync" else PASSED), outcome.detail


def test_throughput_has_medians_and_spread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "LARGEST_ON_CPU", 1 << 18)
    outcome = one("throughput")
    assert outcome.status == PASSED
    assert set(outcome.figures["seconds"]) == {"copy", "health", "full"}
    assert all(len(rounds) == 5 for rounds in outcome.figures["seconds"].values())
    assert "of the copy's" in outcome.detail and " to " in outcome.detail


def test_passes_without_the_extension() -> None:
    arguments = ["selftest", "--json", *(word for name in QUICK for word in ("--check", name))]
    code = f"import sys; from fastcheck.cli.main import main; sys.exit(main({arguments}))"
    done = run_code(code, env={"FASTCHECK_NO_EXTENSION": "1"})
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert found["device"]["backend"] == "portable"
    assert {c["name"] for c in found["checks"] if c["status"] != "passed"} == {"kernels", "no-sync"}


def test_draws_no_random_number_and_leaves_the_kernel() -> None:
    before = torch.get_rng_state(), _kernels.cpu_isa()
    for name in ("values", "kernels", "install"):
        one(name)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert _kernels.cpu_isa() == before[1]


# --- and fails where something is ----------------------------------------------------------------

BREAKS: dict[str, tuple[str, dict[str, Callable[..., Any]], str]] = {
    "a NaN is missed": (
        "special-values",
        {"record_list": changed("nan_count", lambda n, _: max(0, n - 1))},
        "nan_count: got",
    ),
    "a subnormal is flushed": (
        "special-values",
        {"record_list": changed("subnormal_count", lambda n, _: 0)},
        "subnormal",
    ),
    "a minimum is rounded": (
        "values",
        {
            "record_list": changed(
                "min", lambda x, row: np.nextafter(x, 0) if row["dtype"] == 0 else x
            )
        },
        "min: got",
    ),
    "a sum is off by 1e-5": (
        "values",
        {"record_list": changed("abs_sum", lambda x, _: x * (1 + 1e-5))},
        "abs_sum: got",
    ),
    "a NaN for a sum": (
        "values",
        {"record_list": changed("sum", lambda x, row: np.nan if row["numel"] > 4096 else x)},
        "sum: got nan",
    ),
    "a checksum of a tail": (
        "values",
        {"record_list": changed("checksum", lambda x, row: x ^ (row["numel"] == 4097))},
        "4097 components of any bits: checksum",
    ),
    "a depth computes too much": (
        "values",
        {"record_list": lambda true, x, depth, logical: true(x, int(Depth.FULL), logical)},
        "at depth health",
    ),
    "one tensor is read unlike a list": (
        "values",
        {"record": lambda true, x, depth, logical: true(x[1:], depth, logical)},
        "numel",
    ),
    "order is ignored": (
        "layouts",
        {"record_list": lambda true, x, depth, logical: true(x, depth, False)},
        "transposed",
    ),
    "strides are ignored": (
        "layouts",
        {"record_list": lambda true, x, *rest: true([y.contiguous() for y in x], *rest)},
        "transposed",
    ),
    "no flag": (
        "found-nonfinite",
        {"found_nonfinite": lambda true, x: torch.tensor(0.0)},
        "got 0.0, expected 1.0",
    ),
    "a flag for a large value": (
        "found-nonfinite",
        {"found_nonfinite": lambda true, x: true(x) + float(x[-1].abs().max() > 1e30)},
        "got 1.0, expected 0.0",
    ),
    "one kernel differs": (
        "kernels",
        {
            "record_list": lambda true, *args: (
                true(*args) + (_kernels.cpu_isa() != "scalar" and args[1] == 3)
            )
        },
        "and scalar differ",
    ),
    "callers get in each other's way": (
        "streams",
        {"record": lambda true, x, depth, logical: true(x.flip(0), depth, logical)},
        "checksum",
    ),
    "records claim that the CPU saturates": (
        "overflow-mode",
        {"record": lambda true, *args: changed("device_mode", lambda m, _: 1)(true, *args)[0]},
        "records have SATURATING",
    ),
    "reading raises": (
        "values",
        {"record_list": lambda true, *args: 1 // 0},
        "ZeroDivisionError in test_checks.py:",
    ),
}


@pytest.mark.parametrize("fault", BREAKS)
def test_names_what_is_broken(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, changes, said = BREAKS[fault]
    monkeypatch.setattr(functions, "extension", Broken(**changes))
    outcome = one(name)
    assert outcome.status == FAILED
    assert said in outcome.detail


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"overflow_nums": -1}, "did not stop the run"),
        ({"exclude": "faulty"}, "named ('head', "),
    ],
)
def test_install_that_does_not_stop_or_names_another(
    options: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        training, "install", lambda *a, **kw: fastcheck.install(*a, **{**kw, **options})
    )
    outcome = one("install")
    assert outcome.status == FAILED and said in outcome.detail, outcome.detail


def test_install_that_stops_a_healthy_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def armed(model: Any, **options: Any) -> Any:
        model.faulty.register_forward_pre_hook(lambda module, _: setattr(module, "armed", True))
        return fastcheck.install(model, **options)

    monkeypatch.setattr(training, "install", armed)
    outcome = one("install")
    assert outcome.status == FAILED and "before any fault" in outcome.detail


def test_a_dtype_that_the_device_lacks_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    copy_to = selftest_checks.copy_to

    def without_float64(x: torch.Tensor, device: torch.device) -> torch.Tensor:
        if x.dtype == torch.float64:
            raise RuntimeError("float64 is not supported")
        return copy_to(x, device)

    monkeypatch.setattr(selftest_checks, "copy_to", without_float64)
    outcome = one("values")
    assert outcome.status == PASSED and "(not on this device: float64)" in outcome.detail


# --- the oracle ----------------------------------------------------------------------------------


def test_oracle_has_the_fixed_vectors() -> None:
    for kind, dtype, count, seed, wanted in json.loads(PATH.read_text())["vectors"]:
        got = oracle(tensor_of(pattern(kind, dtype, count, seed), dtype))
        want = np.zeros(1, RECORD_DTYPE)
        want.view(np.uint8)[:112] = np.frombuffer(bytes.fromhex(wanted), np.uint8)
        want["dtype"], want["depth"] = DTYPES[dtype].code, 3
        assert differences(got, want[0], exact_sums=False) == [], (kind, dtype, count, seed)


def test_oracle_agrees_with_the_reference_on_views() -> None:
    for row in dtype_rows():
        for what, x in layouts(row):
            for order in ("storage", "logical"):
                want = np.frombuffer(record(x, order=order), RECORD_DTYPE)[0]
                got = oracle(x, logical=order == "logical")
                assert differences(got, want, exact_sums=False) == [], (what, order)


def test_samples_hold_what_they_say() -> None:
    for row in dtype_rows():
        samples = [*values(row), *special(row), *layouts(row)]
        assert {s.tensor.numel() for s in samples} >= {0, 4096 // row.components}
        if row.kind == "f8":
            found = np.array([oracle(s.tensor) for s in samples])
            for name in ("nan", "zero", "subnormal", "negative", "saturated"):
                assert found[f"{name}_count"].any(), (row.name, name)


# --- the command ---------------------------------------------------------------------------------


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["selftest", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_report(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--device", "cpu", "--check", "overflow-mode", "--check", "no-sync")
    assert code == 0
    assert "1 passed, 0 failed, 1 not checkable here" in out
    block = out[out.index("```text") :]
    for line in ("fastcheck selftest: 1 passed", "torch", "cpu kernel", "overflow-mode   passed: "):
        assert line in block
    assert block.rstrip().endswith("```")


def test_report_holds_no_path_and_no_name(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "--device", "cpu", "--check", "overflow-mode")
    for private in (socket.gethostname(), os.getcwd(), sys.prefix, os.path.expanduser("~")):
        assert private not in out


def test_failure_is_exit_code_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(functions, "extension", Broken(**BREAKS["no flag"][1]))
    arguments = ("--device", "cpu", "--check", "found-nonfinite", "--check", "overflow-mode")
    code, out, _ = run(capsys, *arguments)
    assert code == 1
    assert "1 passed, 1 failed: found-nonfinite" in out
    code, out, _ = run(capsys, *arguments, "--json")
    assert code == 1
    found = json.loads(out)
    assert found["passed"] is False
    assert [(c["name"], c["status"]) for c in found["checks"]] == [
        ("found-nonfinite", "failed"),
        ("overflow-mode", "passed"),
    ]
    assert set(found) >= {"versions", "device", "seconds", "dtypes_not_on_this_device"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--device", "cuda:99"), "can't be tested here"),
        (("--device", "mlu"), "torch_mlu can't be imported"),
        (("--device", "cup"), "did you mean 'cpu'?"),
        (("--device", "meta"), "torch finds no meta device"),
        (("--check", "value"), "did you mean 'values' or"),
        (("--nonsense",), "unrecognized"),
    ],
)
def test_wrong_usage_is_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    code, _, err = run(capsys, *arguments)
    assert code == 2 and said in err


def test_device_is_found() -> None:
    assert find_device("cpu") == find_device("cpu:0") == torch.device("cpu")
    with pytest.raises(ConfigError, match="expected: 'cpu'"):
        find_device("xpu")


def test_help_lists_every_check(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--help")
    assert code == 0
    assert all(name in " ".join(out.split()).replace("- ", "-") for name in CHECKS)
    assert "2  wrong usage, or no such device here" in out
