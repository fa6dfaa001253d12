"""Sinks: what is written, on which thread, and what happens if a sink fails or blocks."""

from __future__ import annotations

import gc
import math
import threading
from typing import Any

import pytest
import torch
from torch import nn

import fastcheck
from fastcheck.monitor.sinks import connection
from support.programs.training import Apply, Net, chain, poison, stopped, train
from support.trackers import Kept

pytestmark = pytest.mark.usefixtures("fresh_start")


class Slow(Kept):
    def __init__(self) -> None:
        super().__init__()
        self.is_asked, self.may_write = threading.Event(), threading.Event()

    def log(self, scalars: dict[str, float], step: int) -> None:
        self.is_asked.set()
        self.may_write.wait()
        super().log(scalars, step)


def test_each_step_is_written_with_the_numbers_of_the_table() -> None:
    sink, model = Kept(), Net()
    with fastcheck.install(model, sinks=sink) as monitor:
        losses = train(model, 4)
        table = monitor.step_table()
    assert [step for step, _ in sink.rows] == [0, 1, 2, 3]
    assert sink.column("loss") == losses == [row.loss for row in table]
    assert sink.column("gradient_norm") == [row.gradient_norm for row in table]
    assert sink.column("learning_rate") == [0.01] * 4
    assert sink.column("events") == sink.column("skipped_steps") == [0.0] * 4
    records = monitor.records()
    assert sink.column("tensors_read") == [float((records["step"] == n).sum()) for n in range(4)]
    read = records[records["step"] == 1]["numel"].sum() * 4 + 4  # the learning rate is a float64
    assert sink.rows[1][1]["fastcheck/gigabytes_read"] == pytest.approx(read / 1e9)


def test_the_names_are_few_and_the_same_for_any_model() -> None:
    names = []
    for model in (Net(), nn.Sequential(*(nn.Linear(8, 8) for _ in range(60)))):
        sink = Kept()
        with fastcheck.install(model, sinks=[sink]):
            train(model, 1)
        names.append(set(sink.rows[0][1]))
    assert names[0] == names[1] and len(names[0]) <= 50
    assert all(name.startswith("fastcheck/") for name in names[0])


def test_a_thread_writes_and_training_does_not_wait() -> None:
    sink, model = Slow(), Net()
    with fastcheck.install(model, sinks=sink):
        train(model, 5)
        assert sink.rows == []
        sink.may_write.set()
    assert len(sink.rows) == 5 and sink.threads == {"fastcheck-sinks"}


def test_losses_and_weights_are_the_same() -> None:
    def run(**options: Any) -> tuple[list[float], list[torch.Tensor]]:
        torch.manual_seed(0)
        model = Net(dropout=0.1)
        with fastcheck.install(model, **options):
            losses = train(model, 4)
        return losses, [p.detach() for p in model.parameters()]

    losses, weights = run()
    again, others = run(sinks=Kept())
    assert losses == again and all(map(torch.equal, weights, others))


def test_a_sink_that_fails_is_switched_off_and_the_others_go_on() -> None:
    class Full:
        calls = 0

        def log(self, scalars: dict[str, float], step: int) -> None:
            self.calls += 1
            raise OSError("No space left on device")

    full, sink, model = Full(), Kept(), Net()
    with (
        pytest.warns(fastcheck.FastcheckWarning, match="sink Full: OSError: No space") as caught,
        fastcheck.install(model, sinks=[full, sink]) as monitor,
    ):
        train(model, 3)
    assert full.calls == 1 and len(sink.rows) == 3
    assert len([w for w in caught if "sink" in str(w.message)]) == 1
    assert "no longer writes to the sink Full" in monitor.summary()


def test_a_process_that_may_have_no_more_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    sink, model = Kept(), Net()
    monkeypatch.setattr(threading.Thread, "start", start)
    with (
        pytest.warns(fastcheck.FastcheckWarning, match="sink Kept: RuntimeError: can't start"),
        fastcheck.install(model, sinks=sink) as monitor,
    ):
        train(model, 3)
    assert not sink.rows and len(monitor.step_table()) == 3
    assert "no longer observes" not in monitor.summary()


def test_a_warning_that_is_an_error_ends_nothing() -> None:
    """The thread goes on."""

    class Full:
        def log(self, scalars: dict[str, float], step: int) -> None:
            raise OSError("No space left on device")

    sink, model = Kept(), Net()
    with fastcheck.install(model, sinks=[Full(), sink]):
        train(model, 3)
    assert len(sink.rows) == 3


def test_a_stop_is_an_alert_with_the_report() -> None:
    sink = Kept()
    model = chain(fc=nn.Linear(8, 8), hole=Apply(), out=nn.Linear(8, 8))

    def before(step: int) -> None:
        model.hole.function = poison if step == 2 else Apply().function

    with fastcheck.install(model, sinks=sink) as monitor:
        stop = stopped(train, model, 5, before_step=before)
    ((title, text, step),) = sink.alerts
    assert title == f"fastcheck: {stop.culprit.site}, step 2" and text == str(stop) and step == 2
    assert [step for step, _ in sink.rows] == [0, 1, 2]
    assert sink.column("events") == [0, 0, monitor.event_count]
    assert sink.column("findings")[2] == len(monitor.events) > 0
    bad = sink.column("nonfinite_tensors")
    assert bad[:2] == [0, 0] and bad[2] is not None and bad[2] > 0


def test_a_stop_that_the_end_of_the_run_delivers_is_written() -> None:
    """remove() raises it: the alert is written before that."""
    sink, model = Kept(), Net()
    monitor = fastcheck.install(model, sinks=sink, sync="never")
    x = torch.randn(4, 8)
    loss = model(x).square().mean()
    with pytest.raises(fastcheck.OverflowDetected):
        monitor.step(loss * float("inf"))
    monitor.remove()
    assert len(sink.alerts) == 1


def test_skipped_steps_are_counted() -> None:
    sink, model = Kept(), nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126)
    with fastcheck.install(model, sinks=sink):
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(1e3 * model(torch.ones(2, 8)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
    assert sink.column("skipped_steps") == [1, 2, 3]
    assert sink.column("loss_scale") == [2.0**126, 2.0**125, 2.0**124]


@pytest.mark.parametrize(
    ("value", "bits"), [(16376.0, 2.0), (65504.0, None)], ids=["a value", "a mask"]
)
def test_headroom_is_that_of_the_narrowest_tensor(value: float, bits: Any) -> None:
    hole, sink = Apply(lambda x: poison(x.half(), value)), Kept()
    model = chain(fc=nn.Linear(1, 1), hole=hole)
    with fastcheck.install(model, sinks=sink):
        model(torch.zeros(2, 1))
        torch.optim.SGD(model.parameters(), lr=0.01).step()  # closes the step
    found = sink.column("headroom_bits")[0]
    if bits is None:
        assert found is not None and found > 10, "the largest number itself is a mask"
    else:
        assert found == pytest.approx(math.log2(65504 / value))
        name, text, _ = sink.texts[0]
        assert name == "fastcheck/least_headroom"
        assert text.startswith("hole (Apply) · forward · output") and text.endswith(": 2.0 bits")


def test_rows_that_find_no_room_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "_MOST", 2)
    sink, model = Slow(), Net()
    monitor = fastcheck.install(model, sinks=sink)
    train(model, 2)
    sink.is_asked.wait()
    train(model, 6)
    sink.may_write.set()
    with pytest.warns(fastcheck.FastcheckWarning, match="steps were not written"):
        monitor.remove()
    assert 3 <= len(sink.rows) < 8
    assert f"{8 - len(sink.rows)} steps were not written" in monitor.summary()


def test_a_sink_that_hangs_does_not_keep_remove(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection.SinkWriter.close, "__defaults__", (0.05,))
    release, model = threading.Event(), Net()

    class Hanging:
        def log(self, scalars: dict[str, float], step: int) -> None:
            release.wait()

    monitor = fastcheck.install(model, sinks=Hanging())
    train(model, 2)
    with pytest.warns(fastcheck.FastcheckWarning, match="while the process runs"):
        monitor.remove()
    release.set()


def test_the_sink_may_ask_the_monitor() -> None:
    """remove() waits for the thread without the lock that this takes."""
    texts, model = [], Net()

    class Asking:
        def log(self, scalars: dict[str, float], step: int) -> None:
            texts.append(monitor.summary())

    monitor = fastcheck.install(model, sinks=Asking())
    train(model, 2)
    monitor.remove()
    assert len(texts) == 2


def test_a_model_that_is_dropped_takes_the_thread_along() -> None:
    before = set(threading.enumerate())
    model = Net()
    fastcheck.install(model, sinks=Kept())
    train(model, 3)
    (thread,) = set(threading.enumerate()) - before
    assert thread.name == "fastcheck-sinks"
    del model
    while thread.is_alive():
        gc.collect()  # what the thread is still writing holds the model
        thread.join(0.1)
