"""Checks of ``fastcheck selftest`` that time or train: host waits, ``install()``, throughput."""

from __future__ import annotations

import contextlib
import functools
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Any, Callable

import torch
from torch import nn

from fastcheck.errors import first_line
from fastcheck.monitor.install import install
from fastcheck.report.error import OverflowDetected
from fastcheck.statistics.functions import found_nonfinite, stats
from fastcheck.utils.torch.streams import DeviceStreams

from .checks import Fault, NotCheckable, Subject

__all__ = ["Throughput", "check_install", "check_no_sync", "measure_throughput"]

_BUSY_SECONDS = 0.5
_NAN_BITS = 0x7FC00000

#: Elements of the tensor whose reading is timed: more than a cache holds.
LARGEST_ON_CPU = 16 << 20
LARGEST_ON_DEVICE = 64 << 20


# ---- no wait ------------------------------------------------------------------------------------


def check_no_sync(subject: Subject) -> str:
    """the host is not made to wait: by the device's own watch for it, and behind a busy stream"""
    if subject.device.type == "cpu":
        raise NotCheckable("the CPU computes in the caller's thread: there is nothing to wait for")
    streams = subject.streams
    if streams is None:
        raise NotCheckable(f"torch.{subject.device.type} has no streams and events")
    tensors = [torch.full((n,), 1.5, device=subject.device) for n in (70, 5000, 100_000)]

    def observe() -> None:
        stats(tensors)
        stats(tensors[1], depth="health")
        found_nonfinite(tensors)

    observe()  # the first time copies constants there
    subject.synchronize()
    parts = []
    if hasattr(subject.module, "set_sync_debug_mode"):
        try:
            with _watched(subject.module):
                observe()
        except RuntimeError as error:
            raise Fault(f'under set_sync_debug_mode("error"): {first_line(error)}') from error
        parts.append('set_sync_debug_mode("error") raised nothing')
    else:
        parts.append(f"torch.{subject.device.type} has no watch for waits")
    subject.synchronize()
    parts.append(_behind_busy_stream(subject, streams, observe))
    return "; ".join(parts)


def _behind_busy_stream(
    subject: Subject, streams: DeviceStreams, observe: Callable[[], None]
) -> str:
    """A call that waits for the device returns after the earlier work is done. A busy host may be
    late once: it has three tries, with more and more work.
    """
    late = False
    seconds = _BUSY_SECONDS
    for _ in range(3):
        done = streams.new_event()
        _enqueue_work(subject, seconds)
        done.record(streams.current())
        was_busy = not streams.is_done(done)
        observe()
        is_busy = not streams.is_done(done)
        subject.synchronize()
        if is_busy:
            return f"returned while {seconds:g} s of earlier work was still queued"
        late = late or was_busy
        seconds *= 2
    if late:
        raise Fault(f"returned only after {seconds / 2:g} s of work that was queued before it")
    return "not checkable behind a busy stream: work for seconds was done as soon as it was queued"


@contextlib.contextmanager
def _watched(module: Any) -> Iterator[None]:
    before = module.get_sync_debug_mode() if hasattr(module, "get_sync_debug_mode") else "default"
    module.set_sync_debug_mode("error")
    try:
        yield
    finally:
        module.set_sync_debug_mode(before)


def _enqueue_work(subject: Subject, seconds: float) -> None:
    """Puts so many seconds of matrix products on the current stream: large ones, since queues are
    short.
    """
    size = 256
    while True:
        x = torch.full((size, size), 1e-3, device=subject.device)
        each = _seconds(subject, functools.partial(torch.matmul, x, x))
        if each > 0.005 or size >= 8192:
            break
        size *= 2
    for _ in range(min(int(seconds / each) + 1, 400)):
        torch.matmul(x, x)


# ---- install() ----------------------------------------------------------------------------------


class _Faulty(nn.Module):
    """Passes its input on; armed, with the bits of a NaN in it: no arithmetic, so that it is one on
    a device that saturates too."""

    def __init__(self) -> None:
        super().__init__()
        self.armed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1.0
        if self.armed:
            with torch.no_grad():
                x.view(torch.int32).view(-1)[3:4].fill_(_NAN_BITS)
        return x


def check_install(subject: Subject) -> str:
    """a model trains without an event, then a module makes a NaN: the run stops, and names it"""
    if subject.device.type != "cpu" and subject.streams is None:
        raise NotCheckable(f"install() reads nothing of torch.{subject.device.type}: no streams")
    parts = []
    for sync in ("never", "step") if subject.device.type != "cpu" else ("never",):
        with tempfile.TemporaryDirectory(prefix="fastcheck-selftest-") as folder:
            late = _stop(subject, sync, folder)
        parts.append(f'sync="{sync}": stopped {late} steps after the fault')
    return "; ".join(parts)


def _model() -> tuple[nn.Sequential, _Faulty]:
    """Weights by formula: no random number is drawn of the caller's."""
    model, faulty = nn.Sequential(), _Faulty()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        for i in range(4):
            model.add_module(f"layer{i}", nn.Linear(32, 32))
            model.add_module(f"act{i}", nn.Tanh())
        model.add_module("faulty", faulty)
        model.add_module("head", nn.Linear(32, 1))
        for number, parameter in enumerate(model.parameters()):
            ramp = torch.linspace(-0.3, 0.3, parameter.numel()).sin()
            parameter.copy_(ramp.roll(7 * number).view_as(parameter))
    return model, faulty


def _stop(subject: Subject, sync: str, folder: str) -> int:
    """How many steps after the fault the run was stopped."""
    healthy, patience = 5, 10
    model, faulty = _model()
    model.to(subject.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    monitor = install(model, sync=sync, log_dir=folder)
    x = torch.linspace(-1, 1, 16 * 32).view(16, 32).to(subject.device)
    step = 0
    try:
        for step in range(healthy + patience):
            faulty.armed = step == healthy
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
        monitor.flush()
    except OverflowDetected as stop:
        if step < healthy:
            raise Fault(f"stopped at step {step}, before any fault: {first_line(stop)}") from stop
        where = (stop.culprit.site.module, stop.culprit.site.role, stop.step)
        if where != ("faulty", "output", healthy):
            raise Fault(f"named {where}, expected ('faulty', 'output', {healthy})") from stop
        return step - healthy
    finally:
        with contextlib.suppress(OverflowDetected):  # of a later step, stopped already
            monitor.remove()
    raise Fault(f"a NaN in step {healthy} did not stop the run by step {step}")


# ---- throughput ---------------------------------------------------------------------------------


class Throughput:
    """Seconds of each of several rounds, by what was timed."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.seconds: dict[str, list[float]] = {}

    def __str__(self) -> str:
        copy = statistics.median(self.seconds["copy"])
        parts = [f"copy of {self.size_bytes >> 20} MiB {self.size_bytes / copy / 1e9:.3g} GB/s"]
        for name, seconds in self.seconds.items():
            if name != "copy":
                rates = sorted(self.size_bytes / s / 1e9 for s in seconds)
                middle = statistics.median(rates)
                parts.append(
                    f"{name} {middle:.3g} GB/s ({rates[0]:.3g} to {rates[-1]:.3g}), "
                    f"{copy * middle * 1e9 / self.size_bytes:.2f} of the copy's"
                )
        return "; ".join(parts)


def measure_throughput(subject: Subject, rounds: int = 5) -> Throughput:
    """float32 read at depths health and full, and a copy of it on the device, by turns

    Measured by the host's clock between two synchronisations, so that launching counts too. Nothing
    is expected of it.
    """
    elements = 1 << 18
    largest = LARGEST_ON_CPU if subject.device.type == "cpu" else LARGEST_ON_DEVICE
    while True:  # a slow device's tensor is smaller
        x = torch.full((elements,), 1.25, device=subject.device)
        seconds = _seconds(subject, functools.partial(stats, x))
        if elements >= largest or seconds > 0.05:
            break
        elements *= 4
    to = torch.empty_like(x)
    timed: dict[str, Callable[[], Any]] = {
        "copy": lambda: to.copy_(x),
        "health": lambda: stats(x, depth="health"),
        "full": lambda: stats(x),
    }
    calls = {name: _calls_to_time(subject, run) for name, run in timed.items()}
    found = Throughput(4 * elements)
    found.seconds = {name: [] for name in timed}
    for _ in range(rounds):
        for name, run in timed.items():
            found.seconds[name].append(_seconds(subject, run, calls[name], warm_up=False))
    return found


def _calls_to_time(subject: Subject, run: Callable[[], Any]) -> int:
    """So many that they take some 20 ms."""
    return max(1, min(200, int(0.02 / _seconds(subject, run))))


def _seconds(
    subject: Subject, run: Callable[[], Any], calls: int = 1, warm_up: bool = True
) -> float:
    """What one call takes."""
    if warm_up:
        run()
    subject.synchronize()
    begin = time.perf_counter()
    for _ in range(calls):
        run()
    subject.synchronize()
    return (time.perf_counter() - begin) / calls
