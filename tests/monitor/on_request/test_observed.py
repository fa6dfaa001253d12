"""OnRequest: op level, or a dump, of the next steps of a running program."""

from __future__ import annotations

import json
import os
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

import fastcheck
from fastcheck.log.reader import read_log
from fastcheck.utils.torch.transforms import take_off
from support.programs.asked import Run, ask, bare
from support.programs.training import batches
from support.trackers import Kept

pytestmark = [
    pytest.mark.usefixtures("fresh_start", "op_observer", "no_handler_left"),
    pytest.mark.filterwarnings("ignore:on request"),
]


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

    @pytest.mark.parametrize("options", [{}, {"sinks": Kept()}], ids=["alone", "with sinks"])
    def test_of_a_run_that_stops_then(
        self, tmp_path: Path, monkeypatch: Any, options: dict[str, Any]
    ) -> None:
        """What was read until then is on disk when the stop is raised."""
        monkeypatch.chdir(tmp_path)
        run = Run(tmp_path, **options)

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
        run.monitor.remove()
        assert all(len(sink.alerts) == 1 for sink in options.values())

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
