"""Tests of install(watch=): warnings, callbacks, log, summary; training is as without it."""

from __future__ import annotations

import gc
import json
import math
import re
import warnings
import weakref
from pathlib import Path
from typing import Any, Optional

import numpy as np
import pytest
import torch
from torch import nn

import fastcheck
from fastcheck.monitor import watching
from fastcheck.monitor.distributed.replicas import ReplicaMismatch
from fastcheck.watch.watcher import Watcher
from support.page_data import PageData
from support.paths import ROOT
from support.processes import run_code, run_python
from support.warned import warned

#: Warmed up after a few steps, so that the tests are short.
WATCH = fastcheck.Watch(window=32, warm_up=16)


def train(
    watch: Any = WATCH,
    steps: int = 45,
    spoil: Optional[int] = None,
    log_dir: Optional[Path] = None,
    on: Any = None,
) -> Any:
    """A run whose batch is a thousand times too large at one step. The monitor, losses, weights."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monitor = fastcheck.install(model, watch=watch, record="stats", log_dir=log_dir)
    if on is not None:
        monitor.watch.on(*on)
    losses = []
    for step in range(steps):
        x = torch.randn(32, 8)
        loss = (model(x) - (1000 if step == spoil else 1) * x[:, :4]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    monitor.remove()
    return monitor, losses, [p.detach().clone() for p in model.parameters()]


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(50, 8), nn.Linear(9, 1)

    def forward(self, words: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(torch.cat([self.table(words), more], 1))
        return out


@pytest.mark.parametrize("level", ["module", "op"])
def test_a_batch_is_all_that_the_model_is_given(level: str) -> None:
    """Zeros beside words that vary, which no infinity can be in."""
    torch.manual_seed(0)
    model = Words()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with warned() as texts, fastcheck.install(model, level=level):
        for _ in range(16):
            words = torch.randint(50, (32,))
            optimizer.zero_grad()
            (model(words, torch.zeros(32, 1)) - words[:, None] / 50).square().mean().backward()
            optimizer.step()
    assert not texts


@pytest.mark.filterwarnings("ignore::fastcheck.WatchWarning")
@pytest.mark.parametrize(("losses", "optimizers"), [(1, 1), (2, 2)])
def test_a_loss_that_jumps_alone_is_no_cause_in_the_data(losses: int, optimizers: int) -> None:
    torch.manual_seed(0)
    models = [nn.Linear(8, 8), nn.Linear(8, 4)]
    both = [p for model in models for p in model.parameters()]
    held = [both] if optimizers == 1 else [list(model.parameters()) for model in models]
    steps = [torch.optim.SGD(parameters, lr=1e-6) for parameters in held]
    with fastcheck.install(*models, watch=WATCH, record="stats") as monitor:
        for step in range(40):
            for part in range(losses):
                x = torch.randn(32, 8)
                y = models[1](models[0](x)) - (1e5 if step == 35 else 1) * x[:, :4]
                y.square().mean().backward()
                if losses == optimizers:
                    steps[part].step()
            if losses != optimizers:
                for optimizer in steps:
                    optimizer.step()
            for optimizer in steps:
                optimizer.zero_grad()
    spikes = [e for e in monitor.watch.events if e.kind in ("loss_spike", "explosion")]
    assert {e.kind for e in spikes} == {"loss_spike", "explosion"}
    for event in spikes:
        assert (event.step, event.cause) == (35, "loss")
        assert "look at its targets, whether they belong to the inputs, and" in event.text


def test_training_is_bit_identical() -> None:
    with pytest.warns(fastcheck.WatchWarning):
        watched = train(spoil=35)
    plain = train(watch=False, spoil=35)
    assert watched[1] == plain[1]
    assert all(torch.equal(a, b) for a, b in zip(watched[2], plain[2]))


def test_a_healthy_run_warns_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monitor, _, _ = train(steps=80)
    assert [event for event in monitor.watch.events if event.is_warning] == []


def test_a_spike_is_warned_of_at_the_users_line() -> None:
    with pytest.warns(fastcheck.WatchWarning) as caught:
        monitor, _, _ = train(spoil=35)
    first = next(one for one in caught if "the loss is" in str(one.message))
    assert first.filename == __file__
    event = monitor.watch.events[0]
    assert (event.kind, event.step, event.cause) == ("loss_spike", 35, "loss")
    assert "the loss is" in monitor.summary()


def test_warnings_have_the_class_of_their_group() -> None:
    with pytest.warns(fastcheck.WatchWarning) as caught:
        train(spoil=35)
    assert {one.category for one in caught} == {fastcheck.SpikeWarning}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", fastcheck.SpikeWarning)
        train(spoil=35)
    of = {kind: make_event(kind).warning_class for kind in ("headroom", "batch")}
    assert of == {"headroom": fastcheck.PrecisionWarning, "batch": fastcheck.WatchWarning}


def make_event(kind: str) -> fastcheck.types.WatchEvent:
    return fastcheck.types.WatchEvent(5, kind, None, 2.0, 1.0, 1.0, "x", True)


@pytest.mark.filterwarnings("ignore::fastcheck.WatchWarning")
class TestCallbacks:
    @pytest.mark.parametrize("kind", ["loss_spike", "warning"])
    def test_one_is_called_with_the_event(self, kind: str) -> None:
        seen: list[Any] = []
        monitor, _, _ = train(spoil=35, on=(kind, seen.append))
        assert seen[0] is monitor.watch.events[0]

    def test_of_another_kind_none_is(self) -> None:
        seen: list[Any] = []
        train(spoil=35, on=("headroom", seen.append))
        assert seen == []

    def test_what_it_raises_leaves_the_training_loop(self) -> None:
        def stop(event: fastcheck.types.WatchEvent) -> None:
            raise KeyError(event.kind)

        with pytest.raises(KeyError, match="loss_spike"):
            train(spoil=35, on=("loss_spike", stop))

    def test_spike_is_several_kinds(self) -> None:
        seen: list[Any] = []
        monitor, _, _ = train(spoil=35, on=("spike", seen.append))
        spikes = ("loss_spike", "gradient_spike", "explosion")
        assert seen == [event for event in monitor.watch.events if event.kind in spikes]
        assert len({event.kind for event in seen}) >= 2

    def test_it_may_lower_the_learning_rate(self) -> None:
        torch.manual_seed(0)
        model = nn.Linear(8, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def lower(event: fastcheck.types.WatchEvent) -> None:
            for group in optimizer.param_groups:
                group["lr"] /= 2

        rates = []
        with fastcheck.install(model, watch=WATCH, record="stats") as monitor:
            monitor.watch.on("loss_spike", lower)
            for step in range(40):
                optimizer.zero_grad()
                x = torch.randn(32, 8) * (1000 if step == 35 else 1)
                model(x).square().mean().backward()
                rates.append(optimizer.param_groups[0]["lr"])
                optimizer.step()
        assert rates[:36] == [0.01] * 36 and rates[37:] == [0.005] * 3

    def test_what_is_no_kind_or_callback_is_refused(self) -> None:
        monitor, losses, _ = train(spoil=35, on=("loss_spike", lambda event: None))
        with pytest.raises(fastcheck.ConfigError, match="unknown kind"):
            monitor.watch.on("spikes", print)
        for callback in (3, lambda: None, lambda event, step: None):
            with pytest.raises(fastcheck.ConfigError, match="takes the WatchEvent"):
                monitor.watch.on("loss_spike", callback)
        monitor.watch.on("loss_spike", lambda event, step=0: None)
        assert len(losses) == 45


@pytest.mark.filterwarnings("ignore::fastcheck.WatchWarning")
def test_the_log_holds_the_events(tmp_path: Path) -> None:
    monitor, _, _ = train(spoil=35, log_dir=tmp_path)
    lines = (tmp_path / "watch-rank0.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    assert [one["kind"] for one in found] == [event.kind for event in monitor.watch.events]
    assert found[0]["movers"] and found[0]["text"] == str(monitor.watch.events[0])
    shown = run_python("-m", "fastcheck", "show", str(tmp_path))
    assert "the loss is" in shown.stdout
    shown = run_python("-m", "fastcheck", "show", str(tmp_path), "--json")
    assert json.loads(shown.stdout)["watch"][0]["kind"] == "loss_spike"


def test_a_changed_setting_of_the_optimizer_is_an_event() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    with fastcheck.install(model, record="stats", watch=True) as monitor:
        for step in range(4):
            if step == 2:
                optimizer.param_groups[0]["betas"] = (0.9, 0.5)
            model(torch.ones(4, 2)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    (event,) = monitor.watch.events
    assert (event.kind, event.step, event.value) == ("settings", 2, 0.5)


def test_an_error_in_the_watch_switches_only_it_off(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Watcher, *steps: Any) -> Any:
        raise ValueError("no such column")

    monkeypatch.setattr(Watcher, "add", fail)
    monitor, losses, _ = train(steps=5)
    assert len(losses) == 5
    assert "the watch is switched off: ValueError: no such column" in monitor.summary()
    assert len(np.unique(monitor.records()["step"])) == 5


def test_the_last_step_is_judged(tmp_path: Path) -> None:
    with pytest.warns(fastcheck.WatchWarning):
        monitor, _, _ = train(steps=36, spoil=35, log_dir=tmp_path)
    assert monitor.watch.events[0].step == 35
    assert "the loss is" in (tmp_path / "watch-rank0.jsonl").read_text()


@pytest.mark.filterwarnings("ignore::fastcheck.WatchWarning")
def test_the_page_of_a_stop_has_the_events_of_the_steps_that_waited(tmp_path: Path) -> None:
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with (
        pytest.raises(fastcheck.OverflowDetected),
        fastcheck.install(model, watch=WATCH, log_dir=str(tmp_path)) as _,
    ):
        for step in range(45):
            x = torch.randn(32, 8)
            if step == 40:
                x[0, 0] = math.nan
            loss = (model(x) - (1000 if step == 35 else 1) * x[:, :4]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    watched = PageData((tmp_path / "report.html").read_text()).header["watched"]
    assert (watched[0]["step"], watched[0]["kind"]) == (35, "loss_spike")


@pytest.mark.parametrize(("few", "together"), [(1 << 13, 128), (64, 64)])
def test_more_steps_are_judged_together_of_few_records(
    few: int, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.collect()  # what other tests have left is judged before
    counts: list[int] = []
    monkeypatch.setattr(Watcher, "add", lambda self, *steps: counts.append(len(steps)) or [])
    monkeypatch.setattr(watching, "_SECONDS", math.inf)
    monkeypatch.setattr(watching, "_FEW_RECORDS", few)
    train(steps=130)
    assert counts == [together] * (128 // together) + [2]


@pytest.mark.parametrize("is_with_batches", [False, True])
def test_a_model_that_is_deleted_takes_no_events_along(
    is_with_batches: bool, tmp_path: Path
) -> None:
    """Steps wait for the watch when the garbage collector takes the model and its monitor."""
    model = nn.Linear(8, 4)
    monitor = fastcheck.install(model, watch=WATCH, log_dir=tmp_path)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(37):
        if is_with_batches:
            monitor.batch(f"batch {step}")
        x = torch.randn(32, 8)
        loss = (model(x) - (1000 if step == 35 else 1) * x[:, :4]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    session, watch = weakref.ref(monitor._session), monitor.watch
    with pytest.warns(fastcheck.WatchWarning, match="step 35: the loss is"):
        del model, monitor, optimizer, loss
        gc.collect()
    assert session() is None
    assert watch.warning_count == sum(event.is_warning for event in watch.events) > 0
    lines = (tmp_path / "watch-rank0.jsonl").read_text().splitlines()
    (spike,) = [event for event in map(json.loads, lines) if event["kind"] == "loss_spike"]
    assert spike.get("batch") == ("batch 35" if is_with_batches else None)


def test_a_callback_that_holds_the_model_is_collected_with_it() -> None:
    model = nn.Linear(8, 4)
    monitor = fastcheck.install(model, watch=WATCH)
    monitor.watch.on("spike", lambda event, held=(model, monitor): None)
    model(torch.randn(32, 8)).square().mean().backward()
    monitor.step()
    session = weakref.ref(monitor._session)
    del model, monitor
    gc.collect()
    assert session() is None


@pytest.mark.parametrize("action", ["always", "error"])
def test_the_end_of_the_process_warns_of_the_steps_that_wait(action: str) -> None:
    """Without remove(): nothing else runs any more that could judge them."""
    ended = run_code(
        "import warnings, torch, fastcheck\n"
        f"warnings.simplefilter({action!r})\n"
        "model = torch.nn.Linear(8, 4)\n"
        "optimizer = torch.optim.SGD(model.parameters(), 0.01)\n"
        "monitor = fastcheck.install(model, watch=fastcheck.Watch(window=32, warm_up=16))\n"
        "for step in range(37):\n"
        "    x = torch.randn(32, 8)\n"
        "    loss = (model(x) - (1000 if step == 35 else 1) * x[:, :4]).square().mean()\n"
        "    optimizer.zero_grad()\n"
        "    loss.backward()\n"
        "    optimizer.step()\n"
        "print(repr(monitor.watch))\n"
    )
    assert "SpikeWarning: step 35: the loss is" in ended.stderr
    assert "Traceback" not in ended.stderr and "0 events" not in ended.stdout


def test_a_record_without_statistics_is_refused() -> None:
    with pytest.raises(fastcheck.ConfigError, match="nothing to watch"):
        fastcheck.install(nn.Linear(2, 2), watch=WATCH, record="health")
    monitor = fastcheck.install(nn.Linear(2, 2), record="health")
    with pytest.raises(fastcheck.ConfigError, match='record="health"'):
        monitor.watch  # noqa: B018  # the property raises


@pytest.mark.filterwarnings("ignore::fastcheck.SpikeWarning")
def test_a_plain_install_watches() -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    with fastcheck.install(model) as monitor:
        for step in range(100):
            optimizer.zero_grad()
            loss = model(torch.randn(64, 8)).square().mean()
            (loss * (1000 if step == 80 else 1)).backward()
            optimizer.step()
    found = [event for event in monitor.watch.events if event.kind == "loss_spike"]
    assert [(event.step, event.is_warning) for event in found] == [(80, True)]
    assert "warning of the watch" in monitor.summary()


@pytest.mark.filterwarnings("ignore::fastcheck.SpikeWarning")
@pytest.mark.parametrize(("factor", "steps"), [(1, []), (4, [12])])
def test_a_jump_of_the_loss_in_the_first_steps(factor: float, steps: list[int]) -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    with fastcheck.install(model) as monitor:
        for step in range(30):
            optimizer.zero_grad()
            loss = (model(torch.ones(4, 8)) - 2).square().mean()
            (loss * (factor**2 if step == 12 else 1) + 1).backward()
            optimizer.step()
    found = [event for event in monitor.watch.events if event.kind == "loss_spike"]
    assert [event.step for event in found] == steps
    assert not any(event.cause or event.movers for event in found)


@pytest.mark.filterwarnings("ignore::fastcheck.WatchWarning")
@pytest.mark.parametrize(
    ("unscales", "threshold", "found"),
    # What the program has done with the gradients before its first update is not known.
    [(False, 1.0, [1]), (True, 1.0, []), (False, 4096.0, [])],
    ids=["scaled", "unscaled", "a threshold that is scaled too"],
)
def test_gradients_that_are_clipped_before_they_are_unscaled(
    unscales: bool, threshold: float, found: list[int]
) -> None:
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
    with fastcheck.install(model) as monitor:
        for _ in range(4):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(4, 8)).square().mean()).backward()
            if unscales:
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), threshold)
            scaler.step(optimizer)
            scaler.update()
    assert [event.step for event in monitor.watch.events if event.kind == "settings"] == found


def test_steps_that_are_judged_together_have_the_settings_of_their_time() -> None:
    model = nn.Linear(8, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    with fastcheck.install(model) as monitor:
        for step in range(40):
            optimizer.zero_grad()
            model(torch.ones(4, 8)).square().mean().backward()
            if step == 21:
                optimizer.param_groups[0]["eps"] = 1e-4
            optimizer.step()
    assert [event.step for event in monitor.watch.events if event.kind == "settings"] == [21]


def test_steps_of_many_records_are_judged_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    together, add = [], Watcher.add

    def count(self: Watcher, *steps: Any) -> Any:
        together.append(len(steps))
        return add(self, *steps)

    monkeypatch.setattr(Watcher, "add", count)
    monkeypatch.setattr(watching, "_SECONDS", math.inf)
    monkeypatch.setattr(watching, "_MOST_RECORDS", 50)
    train(watch=True, steps=20)
    assert together == [3] * 6 + [2]


@pytest.mark.filterwarnings("ignore::fastcheck.WatchWarning")
def test_at_op_level_what_is_made_after_an_update_is_of_the_next_step() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with fastcheck.install(model, level="op", record="stats") as monitor:
        for step in range(40):
            x = torch.randn(32, 4) * (1e6 if step == 35 else 1)
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        scaled = [
            int(record["step"])
            for record in monitor.records()
            if monitor.sites[record["site"]].op == "aten.mul.Tensor" and record["max"] > 1e5
        ]
    event = next(event for event in monitor.watch.events if event.kind == "explosion")
    assert (event.step, str(event.site)) == (35, "0 (Linear) · aten.addmm · forward · output")
    assert set(scaled) == {35}


def test_without_the_option_there_is_no_watch() -> None:
    monitor, _, _ = train(watch=False, steps=2)
    with pytest.raises(fastcheck.ConfigError, match="watch=True"):
        monitor.watch  # noqa: B018  # the property raises


@pytest.mark.parametrize("watch", ["yes", 3, fastcheck.Watch])
def test_what_is_no_option_is_refused(watch: Any) -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(fastcheck.ConfigError, match="watch must be True"):
        fastcheck.install(model, watch=watch)
    assert not model._forward_hooks


@pytest.mark.filterwarnings("ignore::fastcheck.WatchWarning")
def test_the_program_of_the_page_goes_back_to_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "docs" / "after-a-spike.md").read_text("utf-8")
    blocks = re.findall(r"^```(?:python)?\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(compile(blocks[0], "after-a-spike.md", "exec"), {})
    assert capsys.readouterr().out.split() == blocks[1].split()


@pytest.mark.filterwarnings("ignore::fastcheck.WatchWarning")
def test_sinks_have_the_number_of_events() -> None:
    class Sink:
        def __init__(self) -> None:
            self.rows: list[dict[str, float]] = []

        def log(self, values: dict[str, float], step: int) -> None:
            self.rows.append(dict(values))

    torch.manual_seed(0)
    model, sink = nn.Linear(8, 4), Sink()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    with fastcheck.install(model, watch=WATCH, record="stats", sinks=sink):
        for step in range(40):
            optimizer.zero_grad()
            (model(torch.randn(32, 8)).square().mean() * (1e4 if step == 35 else 1)).backward()
            optimizer.step()
    found = [row["fastcheck/watch_warnings"] for row in sink.rows]
    assert found[:35] == [0.0] * 35 and found[-1] == 1.0
    assert sink.rows[-1]["fastcheck/watch_events"] >= 1.0
    assert len(sink.rows[-1]) <= 50


@pytest.mark.filterwarnings("ignore::fastcheck.WatchWarning")
def test_a_tensor_that_is_observed_by_name_is_held_to_the_rules_of_activations() -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    with fastcheck.install(model, watch=WATCH, record="stats") as monitor:
        for step in range(40):
            optimizer.zero_grad()
            y = model(torch.randn(32, 8))
            fastcheck.observe("attn.logits", y.detach() * (1e6 if step == 35 else 1))
            y.square().mean().backward()
            optimizer.step()
    (event,) = [event for event in monitor.watch.events if event.kind == "explosion"]
    assert event.step == 35 and "attn.logits" in str(event.site)


@pytest.mark.filterwarnings("ignore:replicas differ")
@pytest.mark.filterwarnings("ignore::fastcheck.WatchWarning")
def test_a_spike_near_replicas_that_differ_comes_from_the_machine() -> None:
    class Check:
        def boundary(self, step: int) -> Any:
            found = ReplicaMismatch(step, "weight", False, (0, 1), False, {0: 1, 1: 2})
            return found if step == 30 else None

        finish = boundary

    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    with fastcheck.install(model, watch=WATCH, record="stats") as monitor:
        monitor._boundary.checks = [Check()]  # type: ignore[list-item]  # without other ranks
        for step in range(40):
            optimizer.zero_grad()
            (model(torch.randn(32, 8)).square().mean() * (1e4 if step == 35 else 1)).backward()
            optimizer.step()
    event = next(one for one in monitor.watch.events if one.kind == "loss_spike")
    assert (event.step, event.cause) == (35, "hardware")
    assert "the ranks had different weights at step 30" in event.text


@pytest.mark.parametrize("name", ["updates", "moments", "rerun"])
def test_options_that_are_gone_are_refused(name: str) -> None:
    with pytest.raises(TypeError, match=name):
        fastcheck.Watch(**{name: True})


@pytest.mark.filterwarnings("ignore::fastcheck.WatchWarning")
def test_targets_that_a_criterion_is_given_are_data() -> None:
    torch.manual_seed(0)
    model, criterion = nn.Linear(8, 4), nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    with fastcheck.install(model, criterion, watch=WATCH, record="stats") as monitor:
        for step in range(40):
            optimizer.zero_grad()
            target = torch.randn(32, 4) * (100 if step == 35 else 1)
            criterion(model(torch.randn(32, 8)).flatten(), target.flatten()).backward()
            optimizer.step()
    found = {event.kind: event for event in monitor.watch.events if event.step == 35}
    assert {"gradient_spike", "batch"} <= set(found)
    assert {event.cause for event in found.values()} == {"data"}
    mover = found["gradient_spike"].first_mover
    assert mover is not None and mover.site is not None and mover.site.module == "MSELoss"


@pytest.mark.parametrize(
    ("updates", "is_zero", "warns"), [(3, True, 1), (1, True, 0), (3, False, 0)]
)
def test_a_checkpoint_whose_moments_are_all_0(updates: int, is_zero: bool, warns: int) -> None:
    def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()

    model = nn.Linear(4, 2)
    first, second = (torch.optim.Adam(model.parameters()) for _ in range(2))
    train(model, first, updates)
    second.load_state_dict(first.state_dict())
    for state in second.state.values() if is_zero else ():
        state["exp_avg"].zero_()
        state["exp_avg_sq"].zero_()
    monitor = fastcheck.install(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", fastcheck.WatchWarning)
        train(model, second, 4)
        monitor.remove()
    told = [str(one.message) for one in caught if "its whole state is 0" in str(one.message)]
    assert len(told) == warns
    assert all("at update 3 and" in one and "(Adam: exp_avg, exp_avg_sq)" in one for one in told)


@pytest.mark.parametrize(("betas", "warns"), [((0.9, 0.5), True), ((0.9, 0.7), False)])
def test_betas_that_were_wrong_from_the_first_step(betas: tuple[float, float], warns: bool) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), betas=betas)
    monitor = fastcheck.install(model, watch=WATCH)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fastcheck.WatchWarning)
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.ones(3, 4)).sum().backward()
            optimizer.step()
        monitor.remove()
    found = [event for event in monitor.watch.events if event.kind == "settings"]
    assert [event.is_warning for event in found] == [True] * warns
    if found:
        assert (found[0].step, found[0].value, found[0].cause) == (0, 0.5, "optimizer")
        assert "Adam's beta2 is 0.5" in found[0].text
