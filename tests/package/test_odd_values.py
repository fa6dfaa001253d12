"""Options of the public functions that are given what they are not for: an error of fastcheck's,
never one of an array, a tensor or a generator. NumPy's ints and bools are as good as Python's.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable

import numpy as np
import pytest
import torch
from torch import nn

import fastcheck
from fastcheck import Dumper, Filter, Log, OnRequest, Ranks, Stop, Training

pytestmark = pytest.mark.usefixtures("op_observer")

Call = Callable[..., Any]


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU())


def of_monitor(name: str, **others: Any) -> Call:
    """A method of a new monitor."""

    def call(**given: Any) -> None:
        with fastcheck.install(model()) as monitor:
            getattr(monitor, name)(**others, **given)

    return call


def install(**given: Any) -> None:
    fastcheck.install(model(), **given).remove()


def prove(**given: Any) -> None:
    fastcheck.prove(lambda one, x: one(x).sum(), torch.ones(4, 2), model=model(), **given)


def rerun(**given: Any) -> None:
    fastcheck.rerun(lambda: None, model=model(), **given)


def compare(**given: Any) -> None:
    fastcheck.compare({"a": torch.ones(2)}, {"a": torch.ones(2)}, **given)


def receipt(**given: Any) -> None:
    fastcheck.receipt(model(), **given)


def arrival(**given: Any) -> None:
    own = model()
    fastcheck.verify(own, fastcheck.receipt(own), **given)


def seal(**given: Any) -> None:
    fastcheck.seal("model.pt", model(), **given)


def bisect(**given: Any) -> None:
    fastcheck.bisect(lambda override: None, lambda result: 1.0, dtype=torch.float64, **given)


#: A call, and options of it that take no tensor, no array of numbers.
CALLS: tuple[tuple[str, Call, str], ...] = (
    (
        "install",
        install,
        "overflow_nums level sync record log_dir include exclude every stats_every",
    ),
    ("install", install, "stop log filter training sinks on_request watch"),
    ("Stop", Stop, "count within action max_skipped max_lag protect_weights replay dump style"),
    ("Stop", Stop, "report find_operator"),
    ("Filter", Filter, "ops roles steps"),
    ("Training", Training, "optimizer scaler process_group reset_overflow_status"),
    ("Log", Log, "dir"),
    ("OnRequest", OnRequest, "file signal level steps dir tensors"),
    ("Watch", fastcheck.Watch, "threshold window warm_up horizon skip_above"),
    ("Dumper", lambda **given: Dumper("dump", **given), "step enable tensors reference level ops"),
    ("Dumper", lambda **given: Dumper("dump", **given), "modules first last from_log model record"),
    ("Dumper", lambda **given: Dumper("dump", **given), "order memory overwrite"),
    ("advice", of_monitor("advice"), "tolerance formats"),
    ("begin_at", of_monitor("begin_at"), "step"),
    ("report", of_monitor("report"), "path"),
    ("report", of_monitor("report", path="report.html"), "style"),
    (
        "compare",
        compare,
        "rename accept exact thresholds ask_all csv progress trust loss_drift html",
    ),
    ("inventory", lambda **given: fastcheck.inventory(model(), **given), "optimizer"),
    ("seed_all", fastcheck.seed_all, "seed"),
    ("receipt", receipt, "before vocabulary ranks"),
    ("seal", seal, "step nonfinite together resume"),
    ("arrival", arrival, "map accept trust"),
    ("prove", prove, "optimizer relations also html"),
    ("Ranks", lambda **given: Ranks(**{"wrap": nn.Identity, **given}), "wrap count shares_rows"),
    ("rerun", rerun, "optimizer scaler also runs level deterministic process_group"),
    ("override", fastcheck.override, "ops modules device dtype random"),
    ("bisect", bisect, "ops modules device by"),
    (
        "benign",
        lambda **given: fastcheck.benign(**{"pattern": "x", "reason": "y", **given}),
        "output",
    ),
)
ODD: dict[str, Callable[[], Any]] = {
    "array": lambda: np.array([1.5, 2]),
    "array without dimensions": lambda: np.array(1.5),
    "tensor": lambda: torch.tensor([1.5, 2]),
    "tensor without dimensions": lambda: torch.tensor(1.5),
    "generator": lambda: (x for x in (1.5, None)),
    "bytes": lambda: b"x",
    "list": lambda: [None],
    "int": lambda: -(10**30),
    "dtype": lambda: torch.int8,
    "object": object,
}


@pytest.mark.parametrize("value", ODD)
@pytest.mark.parametrize(
    ("call", "option"),
    [
        pytest.param(call, option, id=f"{name}-{option}")
        for name, call, options in CALLS
        for option in options.split()
    ],
)
def test_what_an_option_is_not_for_is_fastcheck_s_error(
    call: Call, option: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(fastcheck.FastcheckError):
        call(**{option: ODD[value]()})
    assert not list(tmp_path.iterdir())


THREE, YES = np.int64(3), np.bool_(True)


@pytest.mark.parametrize(
    ("call", "given"),
    [
        (install, {"overflow_nums": THREE, "every": THREE, "stats_every": THREE, "watch": YES}),
        (Stop, {"within": THREE, "max_skipped": THREE, "max_lag": THREE, "protect_weights": YES}),
        (Stop, {"replay": YES, "report": YES, "find_operator": YES}),
        (Log, {"dir": "log", "limit": np.int64(1 << 20), "history": THREE}),
        (Filter, {"steps": np.arange(3)}),
        (Filter, {"steps": [THREE]}),
        (OnRequest, {"signal": "SIGUSR1", "steps": THREE, "level": "dump", "tensors": YES}),
        (Training, {"scaler": np.float32(2), "reset_overflow_status": YES}),
        (fastcheck.Watch, {"horizon": THREE}),
        (lambda **given: Dumper("dump", **given), {"step": THREE, "enable": YES, "tensors": YES}),
        (lambda **given: Dumper("dump", **given), {"overwrite": YES}),
        (of_monitor("begin_at"), {"step": THREE}),
        (compare, {"exact": YES, "ask_all": YES, "trust": YES, "loss_drift": np.float64(0.5)}),
        (receipt, {"vocabulary": THREE, "ranks": THREE}),
        (seal, {"step": THREE, "together": np.bool_(False), "resume": YES}),
        (lambda **given: Ranks(nn.Identity, **given), {"count": THREE, "shares_rows": YES}),
        (rerun, {"runs": THREE, "deterministic": YES}),
        (fastcheck.override, {"device": "cpu", "random": YES}),
    ],
)
def test_numbers_of_numpy_are_numbers(
    call: Call, given: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    call(**given)


def test_a_group_of_options_holds_numbers_of_python() -> None:
    assert type(Stop(within=THREE).within) is int and Stop(replay=YES).replay is True
    assert Filter(steps=np.arange(2)).steps == (0, 1)


@pytest.mark.parametrize("path", ["\0", "", "s3://bucket/report.html"])
def test_a_page_is_a_file_of_this_machine(path: str) -> None:
    with pytest.raises(fastcheck.ConfigError, match="page's path"):
        of_monitor("report")(path=path)


@pytest.mark.parametrize("value", ["1", None, [1.0], np.ones(2), torch.ones(1)])
def test_the_threshold_of_bisect_is_a_number(value: Any) -> None:
    match = "found no operator" if value is None else "threshold is no number"
    with pytest.raises(fastcheck.ConfigError, match=match):
        bisect(threshold=value)


def test_what_would_prove_or_verify_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(fastcheck.ConfigError, match="relations"):
        prove(relations=[])
    for given in ({"map": "vllm"}, {"accept": ("dtype",)}):
        with pytest.raises(fastcheck.ConfigError, match="receipt"):
            fastcheck.verify(tmp_path / "model.pt", **given)  # type: ignore[call-overload]  # a wrong call
