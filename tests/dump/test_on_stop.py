"""install(stop=Stop(dump=...)): the dump of a stop's culprit, and the script that runs it again."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import fastcheck
from fastcheck.cli.main import main
from fastcheck.log.reader import read_log
from support.paths import ROOT, TESTS
from support.processes import run_python
from support.programs.dumping import calls, index, place, values
from support.programs.op_level import model_with, train
from support.programs.stops_with_dumps import FOLDER, roots, said, stop_of, watch
from support.programs.training import Net, batches, poison, stopped

pytestmark = pytest.mark.usefixtures("op_observer")

NAN, INF = float("nan"), float("inf")


def script(step: int = 0, *options: str) -> tuple[int, str]:
    """Exit status and output of the script, in a process that has neither fastcheck nor this file
    imported.
    """
    told = run_python(
        place(FOLDER, step) / "replay.py",
        *options,
        env={"PYTHONPATH": f"{TESTS}{os.pathsep}{ROOT}", "PATH": ""},
        is_fresh=True,
    )
    assert not told.stderr
    return told.returncode, told.stdout


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
    monitor = fastcheck.install(model, stop=fastcheck.Stop(dump=str(FOLDER)))

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


def test_where_the_op_level_cannot_run_nothing_is_dumped() -> None:
    """Another monitor at op level is there already."""
    model = model_with(roots)
    other = fastcheck.install(Net(), level="op", overflow_nums=-1)
    monitor = fastcheck.install(model, stop=fastcheck.Stop(dump=FOLDER))
    stop = stopped(monitor.run, lambda x: model(x).sum().backward(), torch.ones(4, 8))
    other.remove()
    assert "is installed already" in said(stop)
    assert "nothing was dumped: no operator was found that made it" in said(stop)
    assert not FOLDER.exists()


def test_a_batch_that_was_bad_is_not_dumped() -> None:
    model = Net()
    monitor = fastcheck.install(model, stop=fastcheck.Stop(dump=FOLDER))
    x = poison(torch.ones(4, 8))
    stop = stopped(monitor.run, lambda x: model(x).sum().backward(), x)
    assert "nothing was dumped: no operator has made it, it came in from outside" in said(stop)
    assert not FOLDER.exists()


def test_a_weight_that_was_bad_from_the_start() -> None:
    model = Net()
    with torch.no_grad():
        model.head.weight[0, 0] = NAN
    with watch(model):
        stop = stopped(model, torch.ones(2, 8))
    assert "no script: it is stored in the model" in said(stop)
    [line] = calls(FOLDER)
    assert line["kind"] == "stored" and int(values(FOLDER)(line["in"][0]).isnan().sum()) == 1


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
    path.write_text(f"import tests.dump.test_on_stop\n{path.read_text()}")
    assert script()[0] == 0
