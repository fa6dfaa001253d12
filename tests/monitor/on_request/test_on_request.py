"""OnRequest: op level, or a dump, of the next steps of a running program."""

from __future__ import annotations

import gc
import json
import os
import signal
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable, Optional

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

import fastcheck
from fastcheck.log.reader import read_log
from fastcheck.monitor.on_request import asking
from fastcheck.utils.torch.mode_stack import take_off
from support.processes import run_code
from support.programs.training import Apply, Net, batches

pytestmark = [
    pytest.mark.usefixtures("fresh_start", "op_observer"),
    pytest.mark.filterwarnings("ignore:on request"),
]

ASKED = signal.SIGUSR1


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    """No handler, mode or monitor is left behind."""
    yield
    signal.signal(ASKED, signal.SIG_DFL)


def nothing(step: int) -> None:
    pass


def ask(step: int, *at: int) -> None:
    """The signal, in this thread, if the step is one of these."""
    if step in at:
        signal.raise_signal(ASKED)


class Run:
    """A small training run that can be asked."""

    def __init__(self, tmp_path: Path, **options: Any) -> None:
        torch.manual_seed(0)
        self.place = tmp_path / "more"
        self.model = nn.Sequential(Net(dropout=0.5), Apply())
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        more = {"signal": "SIGUSR1", "steps": 2, "dir": self.place, **options.pop("more", {})}
        request = fastcheck.OnRequest(**more)
        self.monitor = fastcheck.install(self.model, on_request=request, **options)

    def train(
        self,
        steps: int,
        within: Callable[[int], None] = nothing,
        scaler: Optional[torch.amp.GradScaler] = None,
    ) -> list[float]:
        losses = []
        for step, x in enumerate(batches(steps)):
            self.optimizer.zero_grad()
            loss = self.model(x).square().mean()
            within(step)
            if scaler is None:
                loss.backward()
                self.optimizer.step()
            else:
                scaler.scale(loss).backward()
                scaler.step(self.optimizer)
                scaler.update()
            losses.append(float(loss.detach()))
        return losses

    def steps(self, name: str) -> list[int]:
        """Those in a log under the place."""
        return sorted(set(read_log(self.place / name).records["step"].tolist()))

    @property
    def summary(self) -> str:
        return " ".join(self.monitor.summary().split())


def bare(steps: int) -> list[float]:
    torch.manual_seed(0)
    model = Net(dropout=0.5)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for x in batches(steps):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


class TestOpLevel:
    def test_of_the_next_steps(self, tmp_path: Path) -> None:
        run = Run(tmp_path)
        assert run.train(7, lambda step: ask(step, 2)) == bare(7)
        assert run.steps("step3-op") == [3, 4]
        assert any(site.op for site in read_log(run.place / "step3-op").sites.values())
        assert sorted(set(run.monitor.records()["step"].tolist())) == list(range(7))
        assert "on request, steps 3 to 4 were observed at op level: " in run.summary
        assert f"0 events, in {run.place}/step3-op (fastcheck show" in run.summary
        assert len(os.listdir(run.place)) == 1

    def test_reads_what_a_run_at_op_level_reads(self, tmp_path: Path) -> None:
        run = Run(tmp_path)
        run.train(5, lambda step: ask(step, 1))
        run.monitor.remove()
        asked = read_log(run.place / "step2-op")
        whole = Run(tmp_path, level="op", more={"level": "dump"})
        whole.train(5)
        records, sites = whole.monitor.records(), whole.monitor.sites
        expected = [
            (str(sites[int(record["site"])]), int(record["checksum"]))
            for record in records[records["step"] == 3]
        ]
        read = [
            (str(asked.sites[int(record["site"])]), int(record["checksum"]))
            for record in asked.records[asked.records["step"] == 3]
        ]
        # What the loop does after its update belongs to that step, and was not asked for any more.
        assert len(read) > 100 and read == expected[: len(read)]
        assert len(expected) - len(read) <= 3

    def test_leaves_the_records_of_the_modules_as_they_are(self, tmp_path: Path) -> None:
        records = []
        for name, at in (("asked", 2), ("not", -1)):
            run = Run(tmp_path / name)
            run.train(6, lambda step: ask(step, at))  # noqa: B023  # called within the same turn
            run.monitor.remove()
            records.append(run.monitor.records().tobytes())
        assert records[0] == records[1]

    def test_of_a_batch_that_overflows(self, tmp_path: Path) -> None:
        run = Run(tmp_path, overflow_nums=-1)
        run.model[1].function = lambda x: torch.log(x - x.detach() - 1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run.train(4, lambda step: ask(step, 0))
        events = read_log(run.place / "step1-op").events
        assert any(event.site.op == "aten.log" for event in events)
        assert "(fastcheck show" in run.summary

    def test_of_a_run_that_stops_then(self, tmp_path: Path, monkeypatch: Any) -> None:
        """What was read until then is on disk when the stop is raised."""
        monkeypatch.chdir(tmp_path)
        run = Run(tmp_path)

        def within(step: int) -> None:
            ask(step, 1)
            if step == 2:
                run.model[1].function = lambda x: torch.log(x - x.detach() - 1)

        with pytest.raises(fastcheck.OverflowDetected) as caught:
            run.train(5, within)
        assert caught.value.step == 3
        assert run.steps("step2-op") == [2, 3]
        assert any(e.site.op == "aten.log" for e in read_log(run.place / "step2-op").events)
        run.model[1].function = lambda x: x
        run.train(3, lambda step: ask(step, 0))
        assert run.steps("step5-op") == [5, 6]

    def test_again(self, tmp_path: Path) -> None:
        """A request while another one is carried out is met after it."""
        run = Run(tmp_path)
        assert run.train(12, lambda step: ask(step, 1, 3, 8)) == bare(12)
        assert [run.steps(f"step{n}-op") for n in (2, 4, 9)] == [[2, 3], [4, 5], [9, 10]]
        assert sorted(os.listdir(run.place)) == ["step2-op", "step4-op", "step9-op"]

    def test_the_end_of_the_run_ends_it(self, tmp_path: Path) -> None:
        run = Run(tmp_path, more={"steps": 5})
        run.train(4, lambda step: ask(step, 1))
        run.monitor.remove()
        assert "steps 2 to 3 were observed" in run.summary
        assert run.steps("step2-op") == [2, 3]
        assert run.train(2) and run.steps("step2-op") == [2, 3]

    def test_when_no_step_follows(self, tmp_path: Path) -> None:
        run = Run(tmp_path)
        run.train(2, lambda step: ask(step, 1))
        run.monitor.remove()
        assert "on request, no step was (none followed) observed" in run.summary

    def test_with_a_scaler(self, tmp_path: Path) -> None:
        run = Run(tmp_path)
        run.train(5, lambda step: ask(step, 1), torch.amp.GradScaler("cpu", init_scale=2.0))
        assert run.steps("step2-op") == [2, 3]

    def test_where_the_loop_ends_its_steps(self, tmp_path: Path) -> None:
        """Two updates a step: only monitor.step() ends one."""
        run = Run(tmp_path)
        data = batches(12)
        run.monitor.step()
        for step in range(6):
            for _ in range(2):
                run.model(next(data)).square().mean().backward()
                run.optimizer.step()
            ask(step, 1)
            run.monitor.step()
        assert len(os.listdir(run.place)) == 1
        (name,) = os.listdir(run.place)
        assert len(run.steps(name)) == 2

    def test_every_step_of_a_run_that_observes_few(self, tmp_path: Path) -> None:
        run = Run(tmp_path, every=4)
        run.train(6, lambda step: ask(step, 1))
        assert run.steps("step2-op") == [2, 3]


def _calls(step: Path) -> list[str]:
    return (step / "rank0" / "calls.jsonl").read_text().splitlines()


class TestDump:
    def test_of_the_next_steps(self, tmp_path: Path) -> None:
        run = Run(tmp_path, more={"level": "dump", "tensors": True})
        assert run.train(7, lambda step: ask(step, 2)) == bare(7)
        place = run.place / "step3-dump"
        assert sorted(os.listdir(place)) == ["step3", "step4"]
        for step in (3, 4):
            index = (place / f"step{step}" / "rank0" / "index.json").read_text()
            assert '"is_complete": true' in index
        names = {json.loads(line).get("module") for line in _calls(place / "step3")}
        assert {"0.blocks.0.a", "0.head"} <= names
        assert f"on request, steps 3 to 4 were observed by a dump, in {place}" in run.summary
        assert not _get_current_dispatch_mode_stack()

    def test_at_op_level(self, tmp_path: Path) -> None:
        run = Run(tmp_path, level="op", more={"level": "dump"})
        assert run.train(4, lambda step: ask(step, 1)) == bare(4)
        assert sorted(os.listdir(run.place / "step2-dump")) == ["step2", "step3"]

    def test_twice_in_one_place(self, tmp_path: Path) -> None:
        for _ in range(2):
            run = Run(tmp_path, more={"level": "dump", "steps": 1})
            run.train(3, lambda step: ask(step, 0))
        assert sorted(os.listdir(run.place)) == ["step1-dump", "step1-dump-2"]

    def test_within_a_mode(self, tmp_path: Path) -> None:
        """It would take the dump's mode off in the place of its own."""

        class Other(TorchDispatchMode):
            def __torch_dispatch__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                return func(*args, **(kwargs or {}))

        run = Run(tmp_path, more={"level": "dump"})
        with Other():
            losses = run.train(4, lambda step: ask(step, 1))
        assert losses == bare(4)
        assert "not observed: a dump can't begin within another mode" in run.summary

    @pytest.mark.parametrize("ends_by", ["stop", "remove", "thread"])
    def test_of_a_run_that_ends_then(self, tmp_path: Path, monkeypatch: Any, ends_by: str) -> None:
        monkeypatch.chdir(tmp_path)
        run = Run(tmp_path, more={"level": "dump", "steps": 9})

        def within(step: int) -> None:
            ask(step, 1)
            if step == 2 and ends_by == "stop":
                run.model[1].function = lambda x: torch.log(x - x.detach() - 1)

        if ends_by == "stop":
            with pytest.raises(fastcheck.OverflowDetected):
                run.train(5, within)
        else:
            run.train(4, within)
        if ends_by == "thread":
            thread = threading.Thread(target=run.monitor.remove)
            thread.start()
            thread.join()
        else:
            run.monitor.remove()
            assert not _get_current_dispatch_mode_stack()
        index = (run.place / "step2-dump" / "step3" / "rank0" / "index.json").read_text()
        assert '"is_complete": true' in index
        calls = (run.place / "step2-dump" / "step3" / "rank0" / "calls.jsonl").stat().st_size
        run.model[1].function = lambda x: x
        run.train(2)
        assert (run.place / "step2-dump/step3/rank0/calls.jsonl").stat().st_size == calls
        for mode in _get_current_dispatch_mode_stack():  # of the thread that is gone
            take_off(mode)


@pytest.mark.parametrize("level", ["op", "dump"])
def test_of_a_compiled_model(tmp_path: Path, level: str) -> None:
    """It runs compiled again afterwards."""
    ran: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        def run_graph(*args: Any) -> Any:
            ran.append(len(losses))
            return graph(*args)

        return run_graph

    losses: list[float] = []
    run = Run(tmp_path, more={"level": level})
    run.model[0] = torch.compile(run.model[0], backend=backend)

    def within(step: int) -> None:
        ask(step, 2)
        losses.append(0.0)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of hooks on all modules, by torch
        assert run.train(7, within) == bare(7)
    assert "steps 3 to 4 were observed" in run.summary
    assert set(ran) == ({0, 1, 2, 5, 6} if level == "dump" else set(range(7)))
    torch._dynamo.reset()


class TestFile:
    def test_that_is_touched(self, tmp_path: Path, monkeypatch: Any) -> None:
        monkeypatch.setattr(asking, "_SECONDS", 0.0)
        file = tmp_path / "ask"
        file.touch()
        os.utime(file, (1, 1))
        run = Run(tmp_path, more={"signal": None, "file": file})

        def within(step: int) -> None:
            if step in (2, 7):
                os.utime(file, (step, step))

        assert run.train(12, within) == bare(12)
        assert sorted(os.listdir(run.place)) == ["step3-op", "step8-op"]

    def test_that_appears_and_goes(self, tmp_path: Path, monkeypatch: Any) -> None:
        monkeypatch.setattr(asking, "_SECONDS", 0.0)
        file = tmp_path / "ask"
        run = Run(tmp_path, more={"signal": None, "file": file, "steps": 1})

        def within(step: int) -> None:
            if step == 2:
                file.touch()
            if step == 5:
                file.unlink()

        run.train(8, within)
        assert os.listdir(run.place) == ["step3-op"]

    def test_is_looked_at_once_in_a_second(self, tmp_path: Path, monkeypatch: Any) -> None:
        now = [0.0]
        monkeypatch.setattr(asking.time, "monotonic", lambda: now[0])
        file = asking.TouchedFile(str(tmp_path / "ask"))
        looked = []
        monkeypatch.setattr(asking, "_modified", lambda path: looked.append(path))
        for tick in range(50):
            now[0] = tick / 20
            assert not file.take()
        assert len(looked) == 2


class TestSignal:
    def test_calls_the_former_handler_and_puts_it_back(self, tmp_path: Path) -> None:
        calls: list[int] = []
        before = signal.signal(ASKED, lambda number, frame: calls.append(number))
        try:
            mine = signal.getsignal(ASKED)
            run = Run(tmp_path)
            run.train(2, lambda step: ask(step, 0))
            assert calls == [ASKED]
            run.monitor.remove()
            assert signal.getsignal(ASKED) is mine
        finally:
            signal.signal(ASKED, before)

    def test_is_left_to_whoever_has_it_now(self, tmp_path: Path) -> None:
        run = Run(tmp_path)
        ours = signal.getsignal(ASKED)
        signal.signal(ASKED, lambda number, frame: ours(number, frame))
        try:
            theirs = signal.getsignal(ASKED)
            run.monitor.remove()
            assert signal.getsignal(ASKED) is theirs
            signal.raise_signal(ASKED)  # nothing happens
        finally:
            signal.signal(ASKED, signal.SIG_DFL)

    @pytest.mark.parametrize("first", [0, 1])
    def test_of_two_monitors(self, tmp_path: Path, first: int) -> None:
        runs = [Run(tmp_path / "0"), Run(tmp_path / "1")]
        runs.insert(0, runs.pop(first))
        for run in runs:
            run.monitor.remove()
        assert signal.getsignal(ASKED) is signal.SIG_DFL

    def test_of_a_model_that_is_deleted(self, tmp_path: Path) -> None:
        run = Run(tmp_path)
        run.train(1)
        del run
        gc.collect()
        assert signal.getsignal(ASKED) is signal.SIG_DFL

    def test_outside_of_the_main_thread(self, tmp_path: Path) -> None:
        model, caught = Net(), []

        def install() -> None:
            try:
                fastcheck.install(model, on_request=fastcheck.OnRequest(signal=ASKED))
            except fastcheck.ConfigError as error:
                caught.append(str(error))

        thread = threading.Thread(target=install)
        thread.start()
        thread.join()
        assert "signal=SIGUSR1 can't be handled" in caught[0] and "main thread" in caught[0]
        assert not model._forward_hooks
        assert signal.getsignal(ASKED) is signal.SIG_DFL

    def test_that_no_program_handles(self) -> None:
        with pytest.raises(fastcheck.ConfigError, match="signal=SIGKILL can't be handled"):
            fastcheck.install(Net(), on_request=fastcheck.OnRequest(signal="SIGKILL"))


class TestErrors:
    def test_a_place_that_cannot_be_written(self, tmp_path: Path) -> None:
        (tmp_path / "more").write_text("a file")
        run = Run(tmp_path)
        with pytest.warns(fastcheck.FastcheckWarning, match="not observed: the log can't be"):
            losses = run.train(4, lambda step: ask(step, 1))
        assert losses == bare(4)
        assert "what was asked for was not observed" in run.summary

    def test_another_monitor_at_op_level(self, tmp_path: Path) -> None:
        other = fastcheck.install(Net(), level="op")
        run = Run(tmp_path)
        with pytest.warns(fastcheck.FastcheckWarning, match='level="op" is installed already'):
            assert run.train(4, lambda step: ask(step, 1)) == bare(4)
        other.remove()

    @pytest.mark.parametrize("level", ["op", "dump"])
    def test_within_the_observation(self, tmp_path: Path, monkeypatch: Any, level: str) -> None:
        from fastcheck.monitor.on_request import running

        def fail(*args: Any) -> None:
            raise RuntimeError("a defect")

        kind = running.OpLevelSteps if level == "op" else running.StepDumps
        monkeypatch.setattr(kind, "next_step", fail)
        run = Run(tmp_path, more={"level": level})
        with pytest.warns(fastcheck.FastcheckWarning, match="not observed: a defect"):
            assert run.train(6, lambda step: ask(step, 1)) == bare(6)
        assert not _get_current_dispatch_mode_stack()

    def test_warnings_that_are_errors(self, tmp_path: Path) -> None:
        run = Run(tmp_path)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert run.train(6, lambda step: ask(step, 1)) == bare(6)
        assert "steps 2 to 3 were observed" in run.summary

    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({}, "nothing can make the request"),
            ({"signal": "SIGNOTHING"}, "signal is none of this system"),
            ({"signal": 4000}, "signal is none of this system"),
            ({"signal": True}, "signal is none of this system"),
            ({"file": 3}, "file is not a path"),
            ({"file": "a", "level": "module"}, "level"),
            ({"file": "a", "steps": 0}, "steps must be an int >= 1"),
            ({"file": "a", "dir": ""}, "dir is not a path"),
            ({"file": "a", "tensors": 1}, "tensors must be a bool"),
            ({"file": "a", "tensors": True}, "is for a dump"),
        ],
    )
    def test_of_options(self, options: dict[str, Any], text: str) -> None:
        with pytest.raises(fastcheck.ConfigError, match=text):
            fastcheck.OnRequest(**options)

    def test_op_level_at_op_level(self) -> None:
        with pytest.raises(fastcheck.ConfigError, match="observed anyway"):
            fastcheck.install(Net(), level="op", on_request=fastcheck.OnRequest(file="a"))
        with pytest.raises(fastcheck.ConfigError, match=r"must be a fastcheck\.OnRequest"):
            fastcheck.install(Net(), on_request="SIGUSR1")  # type: ignore[arg-type]  # also seen by mypy


PROGRAM = """
import os, signal, sys, time, torch, fastcheck
from support.programs.training import Net, batches

from fastcheck.monitor.on_request import asking
from fastcheck.utils.torch.mode_stack import take_off

asking._SECONDS = 0.05
how, file = sys.argv[1:]
def losses(model, is_asked):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    asked = time.monotonic()
    for step, x in enumerate(batches(100_000)):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        yield loss.item()
        if step == 2 and is_asked and not os.fork():  # another process asks
            if how == "file":
                open(file, "w").close()
            else:
                os.kill(os.getppid(), signal.SIGUSR1)
            os._exit(0)

torch.manual_seed(0)
model = Net()
options = {"file": file} if how == "file" else {"signal": "SIGUSR1"}
monitor = fastcheck.install(model, on_request=fastcheck.OnRequest(steps=2, **options))
seen = []
for loss in losses(model, True):
    seen.append(loss)
    if "on request" in monitor.summary() or len(seen) == 99_000:
        break
    if len(seen) > 3:
        time.sleep(0.01)
monitor.remove()
torch.manual_seed(0)
other = losses(Net(), False)
assert seen == [next(other) for _ in seen]
os.wait()
print(os.listdir("fastcheck_request"), len(seen))
"""


@pytest.mark.parametrize("how", ["file", "signal"])
def test_by_another_process(tmp_path: Path, how: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(f"import os\nos.chdir({str(tmp_path)!r})\n{PROGRAM}")
    done = run_code(
        f"import sys, runpy; sys.argv = ['p', {how!r}, {str(tmp_path / 'ask')!r}]\n"
        f"runpy.run_path({str(program)!r}, run_name='__main__')"
    )
    assert done.returncode == 0, done.stderr
    assert "-op']" in done.stdout
