"""install() with CUDA graphs on a GPU: whole steps, parts of them, two graphs at once, and
torch.compile's own.

What a graph has to leave is held to the CPU's records of the tensors themselves. On the fake
accelerator the same is tested further (test_graphs.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import fastcheck
from fastcheck import _C
from fastcheck.backends import table
from fastcheck.record.format import Depth
from support.programs.graphs import WARM_UP, Training, assert_records_what_is_there, said
from support.programs.stats_every import whole_steps
from support.programs.training import Net, batches, deep, stopped

pytestmark = pytest.mark.gpu

NAME = "cuda"


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    assert table.cuda.cuda_problem() is None
    torch.manual_seed(0)
    yield
    torch.cuda.synchronize()


def guarded(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, fused=True, capturable=True)


def installed(model: Any, shape: Any = (16, 64), **options: Any) -> tuple[Training, Any]:
    training = Training(model, NAME, guarded, shape)
    stop, log = fastcheck.Stop(protect_weights=True), fastcheck.Log(None, history=1000)
    options = {"overflow_nums": -1, "stop": stop, "log": log, **options}
    monitor = fastcheck.install(training.model, **options)
    training.warm_up()
    return training, monitor


def test_a_whole_step_replayed_100_times() -> None:
    assert_records_what_is_there(*installed(Net(64)), 100)


@pytest.mark.skipif(not hasattr(torch.accelerator, "Graph"), reason="torch has it from 2.13 on")
def test_the_graph_of_any_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphs.new_graph", lambda device: torch.accelerator.Graph())
    assert_records_what_is_there(*installed(Net(64)), 20)


def test_many_records_need_several_blocks() -> None:
    training, monitor = installed(deep(150), (4, 8))
    assert_records_what_is_there(training, monitor, 5)
    per_step = sum(monitor.records()["step"] == monitor.step_index)
    assert per_step > 1024


def test_replays_make_nothing_wait() -> None:
    training, monitor = installed(Net(64), stop=fastcheck.Stop(max_lag=None, protect_weights=True))
    training.capture()
    steps = [x.to(NAME) for x in batches(20, 16, 64)]
    training.run(steps)
    monitor.flush()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for x in steps:
            training.x.copy_(x)
            training.graph.replay()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    monitor.flush()
    assert monitor.step_index == WARM_UP + 40 - 1


def test_replays_that_every_leaves_out_leave_no_record() -> None:
    training, monitor = installed(Net(64), every=3)
    training.capture()
    training.run([x.to(NAME) for x in batches(10, 16, 64)])
    monitor.flush()
    assert set(monitor.records()["step"]) == {0, 3, 6, 9}


def test_replays_between_have_the_counts_alone() -> None:
    training, monitor = installed(Net(64), stats_every=3)
    training.capture()
    training.run([x.to(NAME) for x in batches(10, 16, 64)])
    monitor.flush()
    assert whole_steps(monitor) == {0, 3, 6, 9}
    records = monitor.records()
    assert not records["sum"][records["depth"] == Depth.HEALTH].any()


def test_training_stays_bit_identical() -> None:
    def run(is_observed: bool) -> list[Any]:
        torch.manual_seed(0)
        training = Training(Net(64), NAME, guarded, (16, 64))
        if is_observed:
            fastcheck.install(training.model)
        training.warm_up()
        training.capture()
        losses = training.run([x.to(NAME) for x in batches(30, 16, 64)])
        return [x.tolist() for x in (*losses, *training.model.parameters())]

    assert run(True) == run(False)


@pytest.mark.parametrize("sync", ["never", "step"])
def test_a_stop_names_the_replay(sync: Any) -> None:
    training, _ = installed(Net(64), overflow_nums=1, sync=sync)
    training.capture()
    steps = [x.to(NAME) for x in batches(20, 16, 64)]
    steps[7][1, 2] = float("nan")
    assert stopped(lambda: training.run(steps)).step == 7 + WARM_UP


def test_two_graphs_at_once() -> None:
    """Each on a stream of its own, replayed without waiting for the other."""
    both = [installed(deep(6), (4, 8)) for _ in range(2)]
    for training, _ in both:
        training.capture()
    steps = [[x.to(NAME) for x in batches(40, 4, 8, seed=k)] for k in range(2)]
    steps[0][11][0, 0] = steps[1][23][0, 0] = float("nan")
    streams = [torch.cuda.Stream() for _ in both]
    torch.cuda.synchronize()
    for index in range(40):
        for (training, _), stream, xs in zip(both, streams, steps):
            with torch.cuda.stream(stream):
                training.x.copy_(xs[index])
                training.graph.replay()
    for (_, monitor), xs, bad in zip(both, steps, (11, 23)):
        monitor.flush()
        inputs = {
            int(record["step"]): record.tobytes()[:112]
            for record in monitor.records()
            if (site := monitor.sites[int(record["site"])]).role == "input" and not site.module
        }
        for index, x in enumerate(xs):
            wanted = bytes(_C.record(x.cpu()).numpy())[:112]
            assert inputs[WARM_UP + index] == wanted, index
        assert {event.step for event in monitor.events} == {WARM_UP + bad}


def test_forward_and_backward_alone() -> None:
    """Every replay is followed by an optimizer step in Python."""
    training, monitor = installed(Net(64))
    training.capture(training.backward)

    def step() -> None:
        training.graph.replay()
        training.optimizer.step()

    steps = [x.to(NAME) for x in batches(20, 16, 64)]
    steps[6][0, 0] = float("inf")
    training.run(steps, step)
    monitor.flush()
    counts = dict.fromkeys(range(WARM_UP, WARM_UP + 20), 0)
    for step_number, _, _ in said(monitor):
        counts[step_number] += 1
    assert len(set(counts.values())) == 1
    assert {event.step for event in monitor.events} == {WARM_UP + 6}


def test_a_monitor_that_is_removed_leaves_the_graph_alone() -> None:
    training, monitor = installed(Net(64))
    training.capture()
    training.run([x.to(NAME) for x in batches(3, 16, 64)])
    monitor.remove()
    del monitor
    torch.cuda.empty_cache()
    others = [torch.zeros(1024, 192, dtype=torch.uint8, device=NAME) for _ in range(40)]
    training.run([x.to(NAME) for x in batches(10, 16, 64)])
    torch.cuda.synchronize()
    assert not any(bool(other.any()) for other in others)


def test_an_exception_in_a_capture() -> None:
    training, monitor = installed(Net(64))

    def fails() -> None:
        training.model(training.x)
        raise KeyError("within")

    with pytest.raises(KeyError, match="within"):
        training.capture(fails)
    training.graph = None
    training.optimizer.zero_grad()
    training.run([x.to(NAME) for x in batches(5, 16, 64)], training.step)
    monitor.flush()
    assert {step for step, _, _ in said(monitor)} == set(range(WARM_UP, WARM_UP + 5))


def test_the_graphs_of_torch_compile() -> None:
    """mode="reduce-overhead": what modules take and return is the CPU's record in every step."""
    model = Net(64).to(NAME)
    monitor = fastcheck.install(
        model,
        overflow_nums=-1,
        stop=fastcheck.Stop(protect_weights=True),
        log=fastcheck.Log(None, history=100),
    )
    compiled: Any = torch.compile(model, mode="reduce-overhead")
    optimizer = guarded(model.parameters())
    wanted = []
    for step, x in enumerate(batches(12, 16, 64)):
        if step == 9:
            x[3, 4] = float("nan")
        torch.compiler.cudagraph_mark_step_begin()
        optimizer.zero_grad()
        output = compiled(x.to(NAME))
        wanted.append((x, output.detach().cpu()))
        output.square().mean().backward()
        optimizer.step()
    monitor.flush()
    found = {}
    for record in monitor.records():
        site = monitor.sites[int(record["site"])]
        if not site.module and site.role in ("input", "output"):
            found[int(record["step"]), site.role] = record.tobytes()[:112]
    for step, tensors in enumerate(wanted):
        for role, tensor in zip(("input", "output"), tensors):
            assert found[step, role] == bytes(_C.record(tensor).numpy())[:112], (step, role)
    assert {event.step for event in monitor.events} == {9}
