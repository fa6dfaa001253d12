"""install(dump_on_overflow=...): what a stop leaves of its culprit, and the script that runs it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable

import pytest
import torch
from torch import nn

import fastcheck
import ranks_harness
from dumping import calls, index, place, values
from fastcheck._logread import read_log
from fastcheck.cli import main
from op_level import model_with, train
from training import Net, batches, poison, stopped

pytestmark = pytest.mark.usefixtures("op_observer")

NAN, INF = float("nan"), float("inf")
FOLDER = Path("dump")


def roots(x: torch.Tensor) -> torch.Tensor:
    y = x.abs() + 1
    return torch.sqrt(-y)


def watch(model: nn.Module, **options: Any) -> fastcheck.Monitor:
    """At op level, where each operator is seen."""
    return fastcheck.install(
        model, level="op", sync="call", **{"dump_on_overflow": FOLDER, **options}
    )


def stop_of(function: Callable[[torch.Tensor], torch.Tensor]) -> fastcheck.OverflowDetected:
    model = model_with(function)
    with watch(model):
        return stopped(train, model, 1)


def script(step: int = 0, *options: str) -> tuple[int, str]:
    """Exit status and output of the script, in a process that has neither fastcheck nor this file
    imported.
    """
    told = subprocess.run(
        [sys.executable, str(place(FOLDER, step) / "replay.py"), *options],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(Path(__file__).parent), "PATH": ""},
        check=False,
    )
    assert not told.stderr
    return told.returncode, told.stdout


def said(stop: fastcheck.OverflowDetected) -> str:
    """The message, in one line."""
    return " ".join(str(stop).split())


def entry(step: int = 0, part: str = "in", position: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = calls(FOLDER, step)[-1][part][position]
    return found


def test_an_operator() -> None:
    stop = stop_of(roots)
    dump = stop.report.dump
    assert dump is not None and dump.path == str(place(FOLDER)) and dump.notes == ()
    assert f"{place(FOLDER)} holds what aten.sqrt #0 in 1 (Apply) read and made" in str(stop)
    [line] = calls(FOLDER)
    assert (line["op"], line["module"], line["direction"]) == ("aten.sqrt", "1", "forward")
    value = values(FOLDER)
    read, made = value(entry()), value(entry(part="out"))
    assert bool((read < 0).all()) and bool(made.isnan().all())
    assert script() == (
        0,
        "output: 32 NaN, 0 +Inf, 0 -Inf; in the run: 32 NaN, 0 +Inf, 0 -Inf\nnon-finite again\n",
    )


def test_it_is_a_dump_like_any_other() -> None:
    stop_of(roots)
    about = index(FOLDER)
    assert about["is_complete"] and "aten.sqrt" in about["culprit"]
    view = read_log(place(FOLDER))
    assert view.meta[0]["environment"]["versions"]["torch"] == torch.__version__
    assert [int(n) for n in view.records["nan_count"]] == [0, 32]
    assert main(["show", str(FOLDER / "step0")]) == 0
    assert fastcheck.compare(FOLDER, FOLDER).is_identical


def test_what_is_finite_now_is_said() -> None:
    stop_of(roots)
    path = place(FOLDER) / "replay.py"
    path.write_text(path.read_text().replace("'sqrt'", "'abs'"))
    status, said = script()
    assert status == 1 and "it does not come out non-finite again" in said


def test_what_it_writes_over_is_dumped_as_it_was() -> None:
    def poke(x: torch.Tensor) -> torch.Tensor:
        y = x.t() * 0 + 3
        y.div_(y - 3).mul_(0)
        return y.t() + 1

    stop_of(poke)
    [line] = calls(FOLDER)
    assert (line["op"], line["ran"]) == ("aten.div_.Tensor", "aten.div_.Tensor")
    value = values(FOLDER)
    assert bool((value(entry()) == 3).all()) and bool(value(entry(part="out")).isposinf().all())
    assert entry()["stride"] == [1, 8]
    assert "output: 0 NaN, 32 +Inf, 0 -Inf; in the run: 0 NaN, 32 +Inf" in script()[1]


def test_the_random_numbers_are_those_that_it_drew() -> None:
    """A part of them overflows, on either side."""

    def draw(x: torch.Tensor) -> torch.Tensor:
        torch.rand(3)
        y = torch.normal(x * 0, torch.full_like(x, 3e38))
        torch.rand(5)
        return y - y

    stop_of(draw)
    assert calls(FOLDER)[0]["ran"] == "aten.normal.Tensor_Tensor"
    found, was = script()[1].splitlines()[0].split("; in the run: ")
    assert found == f"output: {was}" and "0 +Inf" not in was and "0 -Inf" not in was


def test_an_infinity_that_something_made_a_nan_of_later() -> None:
    """The operator that made it has long returned, and its memory was written to since."""

    def late(x: torch.Tensor) -> torch.Tensor:
        y = x * 0 + 1
        z = y / 0
        y.fill_(7)
        kept = z + 0
        z.fill_(2)
        return kept - kept

    stop = stop_of(late)
    assert stop.culprit.site.op == "aten.div.Tensor"
    value = values(FOLDER)
    assert bool((value(entry()) == 1).all()) and bool(value(entry(part="out")).isposinf().all())
    assert script()[0] == 0


def test_a_backward() -> None:
    model = model_with(lambda x: torch.sqrt(x * 0))
    with watch(model):
        stop = stopped(train, model, 1)
    [line] = calls(FOLDER)
    assert (line["op"], line["direction"]) == ("aten.sqrt", "backward")
    assert line["ran"] in str(stop) and script()[0] == 0


def test_the_step_that_was_stopped_is_run_again_for_it() -> None:
    model = model_with(lambda x: x)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    monitor = fastcheck.install(model, dump_on_overflow=str(FOLDER))

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    for number, x in enumerate(batches(3)):
        model[1].function = roots if number == 2 else lambda x: x
        before = [p.detach().clone() for p in model.parameters()]
        if number < 2:
            monitor.run(step, x)
            continue
        stop = stopped(monitor.run, step, x)
    assert all(map(torch.equal, before, model.parameters()))
    assert stop.culprit.site.op is None and "aten.sqrt #0 in 1 (Apply) at step 2" in str(stop)
    assert f"python {place(FOLDER, 2)}" in str(stop)
    assert script(2)[0] == 0
    # Where it is caught, in a step that never stopped by itself.
    replay = monitor.replay(step, x)
    assert "a dump of step 2 is there already" in str(replay.stop)


class Halves(nn.Module):
    """Divides by how many there are above 9, given under a name."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor, *, extra: dict[str, Any]) -> dict[str, torch.Tensor]:
        self.get_buffer("calls").add_(1)
        return {"y": self.weight * x.sub_(1).relu_() * self.get_buffer("calls") / extra["n"]}


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.halves = Halves()
        self.extra: dict[str, Any] = {"n": torch.ones(())}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.halves(self.first(x), extra={"n": torch.ones(())})
        y: torch.Tensor = self.halves(self.first(x) + 1, extra=self.extra)["y"]
        return y


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_module_where_the_op_level_cannot_run(direction: str) -> None:
    """Another monitor at op level is there already; the second of two calls is the bad one."""
    model = Holder()
    other = fastcheck.install(Net(), level="op", overflow_nums=-1)
    monitor = fastcheck.install(model, dump_on_overflow=FOLDER)

    def step(x: torch.Tensor) -> None:
        y = model(x)
        if direction == "backward":
            y.register_hook(lambda gradient: gradient * INF)
        y.sum().backward()

    if direction == "forward":
        model.extra["n"] = torch.zeros(())
    stop = stopped(monitor.run, step, torch.ones(4, 8))
    other.remove()
    assert "is installed already" in said(stop)
    told = script()
    assert told[0] == 0, told
    assert all(
        line.split(": ", 1)[1].split("; in the run: ")[0] == line.split("; in the run: ")[1]
        for line in told[1].splitlines()[:-1]
    )


def test_a_batch_that_was_bad_is_dumped_with_the_module_that_it_was_given_to() -> None:
    model = Net()
    monitor = fastcheck.install(model, dump_on_overflow=FOLDER)
    x = poison(torch.ones(4, 8))
    stop = stopped(monitor.run, lambda x: model(x).sum().backward(), x)
    assert f"{place(FOLDER)} holds what Net (the model) read and made" in str(stop)
    stored, forward = calls(FOLDER)
    assert {"kind": "stored", "module": ""}.items() <= stored.items()
    assert int(values(FOLDER)(forward["in"][0]).isnan().sum()) == 1
    # Whoever replays by hand is told too, of what another module's run has left.
    shutil.rmtree(FOLDER)
    assert f"{place(FOLDER)} holds what Net" in str(monitor.replay(model, x))
    assert script() == (
        0,
        "output: 4 NaN, 0 +Inf, 0 -Inf; in the run: 4 NaN, 0 +Inf, 0 -Inf\nnon-finite again\n",
    )


def test_a_weight_that_was_bad_from_the_start() -> None:
    model = Net()
    with torch.no_grad():
        model.head.weight[0, 0] = NAN
    with watch(model):
        stop = stopped(model, torch.ones(2, 8))
    assert "no script: it is stored in the model" in said(stop)
    [line] = calls(FOLDER)
    assert line["kind"] == "stored" and int(values(FOLDER)(line["in"][0]).isnan().sum()) == 1


def test_a_module_that_cannot_be_pickled_leaves_its_values() -> None:
    model = model_with(lambda x: x)
    monitor = fastcheck.install(model, dump_on_overflow=FOLDER)
    stop = stopped(monitor.run, model, poison(torch.ones(4, 8)))
    assert "no script: the module can't be pickled" in said(stop)
    assert index(FOLDER)["is_complete"] and len(calls(FOLDER)) == 2


@torch.library.custom_op("fastcheck_test::log_of", mutates_args=())
def log_of(x: torch.Tensor, base: float) -> torch.Tensor:
    return torch.log(x) / base


def test_an_operator_that_is_unknown_elsewhere() -> None:
    stop_of(lambda x: log_of(-x.abs() - 1, INF))
    assert calls(FOLDER)[0]["op"] == "fastcheck_test.log_of"
    assert 'float("inf")' in (place(FOLDER) / "replay.py").read_text()
    status, text = script()
    assert status == 2 and "import what registers it" in text
    path = place(FOLDER) / "replay.py"
    path.write_text(f"import test_dump_on_overflow\n{path.read_text()}")
    assert script()[0] == 0


# What can't be had


def test_without_the_step_nothing_is_dumped_and_the_message_says_why() -> None:
    model = Net()
    fastcheck.install(model, dump_on_overflow=FOLDER)
    stop = stopped(model, poison(torch.ones(4, 8)))
    assert "nothing was dumped: the step is not known: run it by monitor.run(step" in said(stop)
    assert not FOLDER.exists()


def test_what_does_not_come_again_is_said() -> None:
    model = model_with(lambda x: x)
    source = iter([NAN, 1.0, 1.0])
    model[1].function = lambda x: x * next(source)
    monitor = fastcheck.install(model, dump_on_overflow=FOLDER)
    stop = stopped(monitor.run, model, torch.ones(4, 8))
    assert "nothing was dumped: run again, 1 was finite" in said(stop)
    assert "run again, the step was finite: what made it" in said(stop)


def test_weights_that_are_gone_are_said() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = fastcheck.install(model, dump_on_overflow=FOLDER)

    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()
        optimizer.step()
        model.head.weight.data[0, 0] = NAN
        monitor.step(loss=torch.full((), NAN))

    stop = stopped(monitor.run, step, torch.ones(4, 8))
    assert "the weights of the step are gone" in said(stop)
    assert f"{place(FOLDER)} holds parameter weight of head (Linear)" in said(stop)


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


@pytest.mark.parametrize("name", ["others_of", "op_script", "environment"])
def test_an_error_in_dumping_never_hides_the_stop(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("of dumping")

    monkeypatch.setattr(f"fastcheck.dump.on_stop.{name}", fail)
    stop = stop_of(roots)
    assert stop.culprit.site.op == "aten.sqrt"
    # What could be written is a dump that can be read.
    assert read_log(place(FOLDER)).records["nan_count"].max() == 32
    assert ("of dumping" in str(stop)) == (name != "environment")


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
    with watch(model, action="warn"), pytest.warns(fastcheck.FastcheckWarning) as caught:
        train(model, 2)
    told = [str(one.message) for one in caught]
    assert f"dump: {place(FOLDER)} holds what aten.sqrt #0" in told[0]
    assert len(told) > 1 and not any("dump:" in text for text in told[1:])


def test_under_a_function_a_warning_names_it() -> None:
    model, events = model_with(roots), list[Any]()
    with watch(model, action=events.append), pytest.warns(fastcheck.FastcheckWarning) as caught:
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
        ({"dump_on_overflow": 3}, "is not a path"),
        ({"overflow_nums": -1}, "nothing does"),
        ({"level": "op"}, 'only with sync="call"'),
        ({"action": "warn"}, "none is"),
        ({"dump_on_overfow": "dump"}, "did you mean 'dump_on_overflow'"),
    ],
)
def test_options_that_leave_nothing_to_dump(options: dict[str, Any], said: str) -> None:
    with pytest.raises((fastcheck.ConfigError, TypeError), match=said):
        fastcheck.install(Net(), **{"dump_on_overflow": "dump", **options})


def on_ranks(rank: int, directory: str, options: dict[str, Any], is_run: bool = True) -> str:
    model = model_with(roots)
    monitor = fastcheck.install(model, dump_on_overflow=directory, log_dir=directory, **options)
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
    assert all(f"{tmp_path}/step3/rank0 holds what aten.sqrt #0" in text for text in told)
    ranks = [(p / "calls.jsonl").is_file() for p in sorted((tmp_path / "step3").iterdir())]
    assert ranks == [True, True]


@pytest.mark.parametrize("is_run", [True, False])
def test_several_ranks_are_not_run_again_and_say_so(is_run: bool, tmp_path: Path) -> None:
    told = ranks_harness.values(
        ranks_harness.run_ranks(on_ranks, str(tmp_path), {}, is_run, world_size=2)
    )
    assert all("nothing was dumped: several ranks" in text for text in told)


def test_records_are_those_without_it() -> None:
    """What it copies is no operator of the run."""

    def run(**options: Any) -> list[tuple[Any, ...]]:
        torch.manual_seed(0)
        model = Net(dropout=0.5)
        with fastcheck.install(model, level="op", sync="call", **options) as monitor:
            train(model, 2, optimizer=torch.optim.Adam(model.parameters()))
            return [(r["site"], r["call"], r["checksum"]) for r in monitor.records()]

    assert run() == run(dump_on_overflow=FOLDER)
