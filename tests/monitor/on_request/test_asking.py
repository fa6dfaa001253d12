"""OnRequest: by a file, by a signal, by another process, and what goes wrong."""

from __future__ import annotations

import gc
import os
import signal
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import fastcheck
from fastcheck.monitor import on_request
from support.processes import run_code
from support.programs.asked import ASKED, Run, ask, bare
from support.programs.training import Net

pytestmark = [
    pytest.mark.usefixtures("fresh_start", "op_observer", "no_handler_left"),
    pytest.mark.filterwarnings("ignore:on request"),
]


class TestFile:
    def test_that_is_touched(self, tmp_path: Path, monkeypatch: Any) -> None:
        monkeypatch.setattr(on_request, "_SECONDS", 0.0)
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
        monkeypatch.setattr(on_request, "_SECONDS", 0.0)
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
        monkeypatch.setattr(on_request.time, "monotonic", lambda: now[0])
        file = on_request.TouchedFile(str(tmp_path / "ask"))
        looked = []
        monkeypatch.setattr(on_request, "_modified", lambda path: looked.append(path))
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
        from fastcheck.monitor import on_request

        def fail(*args: Any) -> None:
            raise RuntimeError("a defect")

        kind = on_request.OpLevelSteps if level == "op" else on_request.StepDumps
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

from fastcheck.monitor import on_request
from fastcheck.utils.torch.transforms import take_off

on_request._SECONDS = 0.05
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
