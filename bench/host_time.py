"""Host time for each observed tensor: hooks, session, journal and ring, without computing records.

    python bench/host_time.py [--rounds N]     writes bench/results/host_time.json, prints a table

Device cases run on the fake accelerator of the tests (built on first use, needs g++), with a stub
of the backend that launches nothing, so that only the runtime's bookkeeping is timed.
bench/drain.py times what the drain's thread does with the records afterwards. On the CPU the
compiled extension reads tensors of 64 elements, and the reading is part of the time.

What is measured is the processor time of the process, in which other programs of the machine count
only by what they take of the caches: gradients of a device come on a thread of their own.

A round of the hooks is one step through 500 modules that return one existing tensor each: a call is
one new tensor, two hooks, and one input that was read before as an output. Empty hooks are timed
beside it and subtracted. "session" is one reading on the path of unusual cases, without hooks. In
the training cases each module is one multiplication, and each call has two observed tensors: an
output and its gradient.

And a whole step of small models, hooks included: forward, backward, an update, all in the nearest
caches. What a monitor with default options adds to it is fitted by a line over the number of
modules: what a module with its two parameters and gradients costs, and what a step costs besides.
On the fake accelerator that is the time of the thread that trains, and of the thread that judges
what the device has recorded; only the one that trains can hold a device up, unless both want
Python's lock. Beside it, which no other program of the machine changes: how many functions of
Python, and of C that Python calls, the thread that trains goes through in a step.

Last, what install(on_request=) adds to an optimizer's step while nothing is asked for: it looks for
a file, and at a flag that a signal sets."""

from __future__ import annotations

import argparse
import dataclasses
import gc
import sys
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any, Callable, Optional

import numpy as np
import torch
from torch import nn

import fastcheck
import harness
from fastcheck import _C
from fastcheck.calls.stored import TensorBatch
from fastcheck.monitor.session.session import Session
from fastcheck.record.format import RECORD_BYTES, Depth
from fastcheck.verdict.entries import Loss

TENSORS = harness.size(500, 20)
NUMEL = 64

# The project's bars, in microseconds for each observed tensor, and their cases.
# From C++: one call into the extension for all tensors, their reading included.
BARS = {
    "hooks, less empty hooks": 2.0,
    "training, less empty hooks": 2.0,
    "list": 2.0,
    "extension, list": 1.0,
}

Run = Callable[[], object]


class Give(nn.Module):
    """Returns its own tensor, whatever its input is."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self.tensor = tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tensor


class Multiply(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 1


class Residual(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.1 * super().forward(x)


def chain(modules: Sequence[nn.Module], device: str) -> nn.Sequential:
    model = nn.Sequential(*modules)
    model.register_parameter("weight", nn.Parameter(torch.ones(1, device=device)))
    return model


def with_empty_hooks(model: nn.Module, *, gradients: bool) -> nn.Module:
    """Registers hooks as fastcheck does, which do nothing."""

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        pass

    def after(module: nn.Module, args: Any, kwargs: Any, output: torch.Tensor) -> None:
        if gradients:
            output.register_hook(backward)

    def backward(gradient: torch.Tensor) -> None:
        pass

    for module in model.modules():
        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(after, with_kwargs=True, always_call=True)
    return model


# Accepts any arguments and does nothing, in C like a real backend's function.
nothing = "".format


def some_records(count: int) -> torch.Tensor:
    """The records of so many tensors of finite numbers, a row of bytes for each."""
    slots = torch.zeros(count * RECORD_BYTES, dtype=torch.uint8)
    for at in range(count):
        _C.observe(torch.randn(NUMEL), slots, at, int(Depth.FULL), 0, 0, 0, at, 0)
    return slots.view(count, RECORD_BYTES)


def launch_nothing(session: Session, lists: bool = False) -> None:
    """Replaces the backends of a session's devices by stubs. ``lists``: as those that read a list
    in one launch, so that small tensors wait for each other.
    """
    for device, ring in session.rings.of.items():
        ring.backend = dataclasses.replace(ring.backend, observe=nothing, observe_list=nothing)
        for segment in ring._free:  # what no kernel writes
            segment.slots.copy_(some_records(len(segment.slots)))
        if lists:
            session.level.let_wait(device.type)


class Observed:
    """A monitor on a model, with its device's backend replaced by one that launches nothing."""

    def __init__(self, model: nn.Module, run: Run) -> None:
        self.monitor = fastcheck.install(
            model, record="health", stop=fastcheck.Stop(max_lag=None), overflow_nums=-1
        )
        self.session: Session = self.monitor._session
        run()
        self.settle()
        launch_nothing(self.session)

    def settle(self) -> None:
        """Between two rounds: the drain has taken in the step, and the next one is open."""
        self.monitor.step()
        self.monitor.flush()
        with self.session.lock:
            self.session.begin_step_if_closed()


def cases_on(device: str) -> tuple[dict[str, Run], Callable[[], None]]:
    """The cases, each over all tensors, and the clean-up after each of them."""
    tensors = [torch.randn(NUMEL).to(device) for _ in range(TENSORS)]
    given = [chain(list(map(Give, tensors)), device) for _ in range(3)]
    trained = [chain([Multiply() for _ in tensors], device) for _ in range(3)]
    x, leaf = tensors[-1], torch.randn(NUMEL).to(device).requires_grad_()

    def forward(model: nn.Module) -> Run:
        def run() -> None:
            with torch.no_grad():
                model(x)

        return run

    def train(model: nn.Module) -> Run:
        def run() -> None:
            model(leaf).sum().backward()

        return run

    cases = {
        "no hooks": forward(given[0]),
        "empty hooks": forward(with_empty_hooks(given[1], gradients=False)),
        "hooks": forward(given[2]),
        "training, no hooks": train(trained[0]),
        "training, empty hooks": train(with_empty_hooks(trained[1], gradients=True)),
        "training": train(trained[2]),
    }
    monitors = [Observed(given[2], cases["hooks"]), Observed(trained[2], cases["training"])]
    session = monitors[0].session
    check(monitors, device)

    def one_by_one() -> None:
        for tensor in tensors:
            with session.lock:
                seq, is_bad = session.level.observe(tensor, 0, 0, 0)
                session.level.saw(Loss(seq, False, 0), is_bad)

    batch = TensorBatch()
    assert all(batch.add(tensor, 0, "param") for tensor in tensors)
    batch.stored_count = TENSORS
    cases |= {"session": one_by_one, "list": lambda: session.level.observe_list(batch)}
    if device == "cpu":
        slots = torch.zeros(TENSORS * RECORD_BYTES, dtype=torch.uint8)
        cases["extension"] = lambda: [
            _C.observe(t, slots, k, 1, 0, 0, 0, k, 0) for k, t in enumerate(tensors)
        ]
        cases["extension, list"] = lambda: _C.observe_list(
            tensors, slots, 0, 1, batch.sites, 0, 0, 0
        )

    def settle() -> None:
        leaf.grad = None
        for monitor in monitors:
            monitor.settle()

    return cases, settle


def check(monitors: Sequence[Observed], device: str) -> None:
    """Correctness first: each tensor of a step has a record, under a site of its own."""
    forward, training = (monitor.monitor.records() for monitor in monitors)
    for records, least in ((forward, TENSORS), (training, 2 * TENSORS)):
        assert len(set(records["site"][records["numel"] == NUMEL])) >= least, device


def measure(device: str, rounds: int, fake: Any) -> list[dict[str, Any]]:
    cases, settle = cases_on(device)
    names = list(cases)
    seconds = {name: np.empty(rounds) for name in names}
    for index in range(-3, rounds):  # three to warm up; the order rotates
        shift = index % len(names)
        for name in names[shift:] + names[:shift]:
            # Launches stay queued: their kernels would run on the cores of the host.
            with fake.held():
                start = time.process_time()
                cases[name]()
                seconds[name][max(index, 0)] = time.process_time() - start
            settle()
    microseconds = {
        name: 1e6 * values / (2 * TENSORS if name.startswith("training") else TENSORS)
        for name, values in seconds.items()
    }
    for name in ("hooks", "training"):
        empty = microseconds["empty hooks" if name == "hooks" else f"{name}, empty hooks"]
        microseconds[f"{name}, less empty hooks"] = microseconds[name] - empty
    return [
        {
            "device": device,
            "case": name,
            "microseconds": harness.spread(values),
            "bar": BARS.get(name),
            "is_met": bool(np.median(values) <= BARS[name]) if name in BARS else None,
        }
        for name, values in microseconds.items()
    ]


# Modules in the models of which whole steps are timed, and steps in a round: so many the watch
# judges together.
MODULES = harness.few((2, 10, 40, 100))
STEPS = harness.size(128, 2)


def whole_steps(device: str, rounds: int) -> dict[int, dict[str, np.ndarray]]:
    """Microseconds of a step, by the number of modules and by case."""
    return {modules: whole_step(device, modules, rounds) for modules in MODULES}


def training(
    device: str, modules: int, observed: bool, clips: bool = False
) -> tuple[Run, Optional[fastcheck.Monitor]]:
    """A step of a small model, after its first, and the monitor that it has if it is observed.
    ``clips``: its gradients are clipped.
    """
    torch.manual_seed(0)
    model = nn.Sequential(*(Residual(8, 8) for _ in range(modules))).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    x, y = torch.randn(2, 4, 8).to(device)

    def step() -> None:
        (model(x) - y).square().mean().backward()
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    monitor = fastcheck.install(model) if observed else None
    step()
    if monitor is not None and device != "cpu":
        monitor.flush()
        launch_nothing(monitor._session, lists=True)
    return step, monitor


def calls_of_step(device: str, modules: int, observed: bool, clips: bool = False) -> int:
    """The calls of a step of this thread: the fewest of some steps, for others judge what has
    waited.
    """
    gc.collect()
    step, _ = training(device, modules, observed, clips)
    counts: list[int] = []

    def count(frame: FrameType, event: str, argument: object) -> None:
        counts[-1] += event in ("call", "c_call")

    for _ in range(harness.size(40, 3)):
        counts.append(0)
        sys.setprofile(count)
        try:
            step()
        finally:
            sys.setprofile(None)
    return min(counts[2:])


def whole_step(device: str, modules: int, rounds: int) -> dict[str, np.ndarray]:
    judging: list[float] = []

    def trained(observed: bool) -> Callable[[int], object]:
        step, monitor = training(device, modules, observed)

        def steps(index: int) -> None:
            before = drain_time(monitor)
            for _ in range(STEPS):
                step()
            if monitor is not None:
                judging.append(drain_time(monitor) - before)

        return steps

    cases = {"plain": trained(False), "plain again": trained(False), "monitor": trained(True)}
    seconds = harness.time_rounds(cases, rounds, warmup=2, clock=time.thread_time)
    seconds["judging thread"] = np.array(judging[-len(seconds["monitor"]) :])
    return {case: 1e6 * each / STEPS for case, each in seconds.items()}


def drain_time(monitor: Optional[fastcheck.Monitor]) -> float:
    """Seconds of processor time of the thread that takes in what a device has recorded."""
    thread = None if monitor is None else monitor._session.drain._thread
    if thread is None or thread.ident is None:
        return 0.0
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))


def fitted(microseconds: dict[int, dict[str, np.ndarray]]) -> dict[str, float]:
    """What a module adds to a step, and what a step costs besides."""
    added = [float(np.median(each["monitor"] - each["plain"])) for each in microseconds.values()]
    slope, fixed = np.polyfit(list(microseconds), added, 1) if len(added) > 1 else (0.0, added[0])
    return {"module": float(slope), "step": float(fixed)}


def requests_cost(rounds: int) -> np.ndarray:
    """Microseconds that on_request= adds to a step; a value for each pair of steps, with and
    without, side by side.
    """
    requests = fastcheck.OnRequest(file="asked_for", signal="SIGUSR2")
    models = [nn.Linear(8, 8), nn.Linear(8, 8)]  # observed for as long as they live
    steps = []
    for model, on_request in zip(models, (None, requests)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        fastcheck.install(model, on_request=on_request)
        model(torch.ones(1, 8)).sum().backward()
        steps.append(optimizer.step)
    seconds = np.empty((rounds, 2))
    for index in range(-10, rounds):  # ten to warm up
        for which in (0, 1) if index % 2 else (1, 0):
            start = time.process_time()
            steps[which]()
            seconds[max(index, 0), which] = time.process_time() - start
    return 1e6 * (seconds[:, 1] - seconds[:, 0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=41)
    rounds = harness.size(parser.parse_args().rounds, 1)
    from fakes import fake_device

    fake = fake_device.load()
    torch.set_num_threads(1)
    devices = ("cpu", fake.name())
    # First: an optimizer's step tells every monitor.
    calls = {
        device: {
            "plain": calls_of_step(device, 2, False),
            "monitor": calls_of_step(device, 2, True),
            "plain, 100 clipped": calls_of_step(device, 100, False, clips=True),
            "monitor, 100 clipped": calls_of_step(device, 100, True, clips=True),
        }
        for device in devices
    }
    gc.collect()
    measured = {device: whole_steps(device, rounds // 3 + 1) for device in devices}
    rows = [row for device in (fake.name(), "cpu") for row in measure(device, rounds, fake)]
    lines = [
        [
            row["device"],
            row["case"],
            harness.with_spread(row["microseconds"]),
            "" if row["bar"] is None else f"{row['bar']:g}: {'met' if row['is_met'] else 'missed'}",
        ]
        for row in rows
    ]
    print(harness.table(["device", "case", "us for each observed tensor", "bar"], lines))
    steps = {
        device: {
            modules: {case: harness.spread(values) for case, values in each.items()}
            for modules, each in of_device.items()
        }
        for device, of_device in measured.items()
    }
    added = {device: fitted(of_device) for device, of_device in measured.items()}
    for device, of_modules in steps.items():
        table = [
            [str(modules), *(harness.with_spread(each, 0) for each in of_cases.values())]
            for modules, of_cases in of_modules.items()
        ]
        print(harness.table([f"modules, us a step on {device}", *of_modules[MODULES[0]]], table))
        module, step = added[device]["module"], added[device]["step"]
        print(f"a monitor adds {module:.1f} us a module (bar 8) and {step:.0f} us a step (bar 150)")
        counts = calls[device]
        print(f"a step of two modules: {counts['plain']} calls, {counts['monitor']} with a monitor")
        clipped = [counts[f"{name}, 100 clipped"] for name in ("plain", "monitor")]
        print("of 100 modules that clips its gradients: {} calls, {}".format(*clipped))
    requests = harness.spread(requests_cost(50 * rounds))
    print(f"on_request= adds {harness.with_spread(requests)} us to a step")
    harness.write_results(
        "host_time",
        rows,
        rounds=rounds,
        tensors=TENSORS,
        numel=NUMEL,
        threads=1,
        on_request_microseconds=requests,
        whole_steps=steps,
        calls_of_step=calls,
        added_microseconds=added,
    )


if __name__ == "__main__":
    main()
