"""install(stop=Stop(dump=...)): which stops write a dump, the reason in the message of one that
does not, and a run that it does not change.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fastcheck
from fastcheck.log.reader import read_log
from support.programs.dumping import place
from support.programs.op_level import model_with, train
from support.programs.stops_with_dumps import FOLDER, roots, said, stop_of, watch
from support.programs.training import Net, batches, poison, stopped
from support.ranks import ranks_harness

pytestmark = pytest.mark.usefixtures("op_observer")

NAN = float("nan")


def test_without_the_step_nothing_is_dumped_and_the_message_says_why() -> None:
    model = Net()
    fastcheck.install(model, stop=fastcheck.Stop(dump=FOLDER))
    stop = stopped(model, poison(torch.ones(4, 8)))
    assert "nothing was dumped: the step is not known: run it by monitor.run(step" in said(stop)
    assert not FOLDER.exists()


def test_what_does_not_come_again_is_said() -> None:
    model = model_with(lambda x: x)
    source = iter([NAN, 1.0, 1.0])
    model[1].function = lambda x: x * next(source)
    monitor = fastcheck.install(model, stop=fastcheck.Stop(dump=FOLDER))
    stop = stopped(monitor.run, model, torch.ones(4, 8))
    assert "nothing was dumped: no operator was found that made it" in said(stop)
    assert "run again, the step was finite: the cause" in said(stop)


def test_weights_that_are_gone_are_said() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()
        model.head.weight.data[0, 0] = NAN
        monitor.step(loss=torch.full((), NAN))

    monitor = fastcheck.install(model, stop=fastcheck.Stop(dump=FOLDER))
    stop = stopped(monitor.run, step, torch.ones(4, 8))
    assert (
        "the step was not run again: what was found is stored, and what was there before it is"
        in said(stop)
    )
    monitor.remove()
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = fastcheck.install(model, stop=fastcheck.Stop(dump=FOLDER), exclude="head")
    stop = stopped(monitor.run, step, torch.ones(4, 8))
    assert "the weights of the step are gone" in said(stop)
    assert "run again, head.weight was non-finite before the step began" in said(stop)
    assert "No observed weight holds NaN or Inf now" in said(stop)


def test_a_step_that_is_there_is_left_alone() -> None:
    stop_of(roots)
    before = (place(FOLDER) / "calls.jsonl").read_bytes()
    stop = stop_of(lambda x: torch.log(x * 0 - 1))
    assert f"nothing was dumped: a dump of step 0 is there already: {place(FOLDER)}" in said(stop)
    assert (place(FOLDER) / "calls.jsonl").read_bytes() == before


def test_a_directory_that_cannot_be_made_does_not_hide_the_stop() -> None:
    FOLDER.write_text("a file")
    stop = stop_of(roots)
    assert stop.culprit.site.op == "aten.sqrt"
    assert f"the dump failed: {FOLDER}" in said(stop) and "Not a directory" in said(stop)


@pytest.mark.parametrize(
    "name",
    [
        "dump.on_stop.stop_dumper.others_of",
        "dump.on_stop.stop_dumper.op_script",
        "reproducibility.environment.environment",
    ],
)
def test_an_error_in_dumping_never_hides_the_stop(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("of dumping")

    monkeypatch.setattr(f"fastcheck.{name}", fail)
    stop = stop_of(roots)
    assert stop.culprit.site.op == "aten.sqrt"
    # What could be written is a dump that can be read.
    assert read_log(place(FOLDER)).records["nan_count"].max() == 32
    assert ("of dumping" in str(stop)) == (not name.endswith("environment"))


# When


def test_only_what_stops_the_run_is_dumped() -> None:
    model = model_with(lambda x: x)
    with watch(model, overflow_nums=2):
        train(model, 1)
        model[1].function = roots
        stopped(train, model, 3)
    assert sorted(path.name for path in FOLDER.iterdir()) == ["step2"]


def test_under_a_warning_the_first_is_dumped_and_named() -> None:
    model = model_with(roots)
    with (
        watch(model, stop=fastcheck.Stop(dump=FOLDER, action="warn")),
        pytest.warns(fastcheck.FastcheckWarning) as caught,
    ):
        train(model, 2)
    told = [str(one.message) for one in caught]
    assert f"dump: {place(FOLDER)} holds what aten.sqrt #0" in told[0]
    assert len(told) > 1 and not any("dump:" in text for text in told[1:])


def test_under_a_function_a_warning_names_it() -> None:
    model, events = model_with(roots), list[Any]()
    with (
        watch(model, stop=fastcheck.Stop(dump=FOLDER, action=events.append)),
        pytest.warns(fastcheck.FastcheckWarning) as caught,
    ):
        train(model, 1)
    assert events and len(caught) == 1
    assert f"{place(FOLDER)} holds what aten.sqrt #0" in str(caught[0].message)


def test_training_is_bit_identical() -> None:
    def run(watched: bool) -> tuple[list[float], torch.Tensor]:
        torch.manual_seed(1)
        model = Net(dropout=0.5)
        optimizer = torch.optim.Adam(model.parameters())
        if not watched:
            return train(model, 3, optimizer=optimizer), torch.rand(1)
        with watch(model):
            return train(model, 3, optimizer=optimizer), torch.rand(1)

    plain, watched = run(False), run(True)
    assert plain[0] == watched[0] and torch.equal(plain[1], watched[1])
    assert not FOLDER.exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"overflow_nums": -1}, "has no effect"),
        ({"level": "op"}, 'requires sync="call"'),
        ({"stop": fastcheck.Stop(dump="dump", action="warn")}, 'requires action="raise"'),
    ],
)
def test_options_that_leave_nothing_to_dump(options: dict[str, Any], said: str) -> None:
    with pytest.raises(fastcheck.ConfigError, match=said):
        fastcheck.install(Net(), **{"stop": fastcheck.Stop(dump="dump"), **options})


def on_ranks(rank: int, directory: str, options: dict[str, Any], is_run: bool = True) -> str:
    model = model_with(roots)
    monitor = fastcheck.install(
        model, stop=fastcheck.Stop(dump=directory), log_dir=directory, **options
    )
    for number, x in enumerate(batches(9)):
        model[1].function = roots if number == 3 else lambda x: x

        def step(x: torch.Tensor) -> None:
            model(x).sum().backward()
            monitor.step()

        try:
            monitor.run(step, x) if is_run else step(x)
        except fastcheck.OverflowDetected as stop:
            return said(stop)
    return "no stop"


def test_several_ranks_have_a_directory_each(tmp_path: Path) -> None:
    options = {"level": "op", "sync": "call", "record": "stats"}
    told = ranks_harness.values(
        ranks_harness.run_ranks(on_ranks, str(tmp_path), options, world_size=2)
    )
    # One of them prints the report.
    assert any(f"{tmp_path}/step3/rank0 holds what aten.sqrt #0" in text for text in told)
    ranks = [(p / "calls.jsonl").is_file() for p in sorted((tmp_path / "step3").iterdir())]
    assert ranks == [True, True]


@pytest.mark.parametrize("is_run", [True, False])
def test_several_ranks_are_not_run_again_and_say_so(is_run: bool, tmp_path: Path) -> None:
    told = ranks_harness.values(
        ranks_harness.run_ranks(on_ranks, str(tmp_path), {}, is_run, world_size=2)
    )
    assert any("nothing was dumped: several ranks" in text for text in told)


def test_records_are_those_without_it() -> None:
    """What it copies is no operator of the run."""

    def run(**options: Any) -> list[tuple[Any, ...]]:
        torch.manual_seed(0)
        model = Net(dropout=0.5)
        with fastcheck.install(model, level="op", sync="call", **options) as monitor:
            train(model, 2, optimizer=torch.optim.Adam(model.parameters()))
            return [(r["site"], r["call"], r["checksum"]) for r in monitor.records()]

    assert run() == run(stop=fastcheck.Stop(dump=FOLDER))
