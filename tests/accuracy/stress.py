"""Stress test on the fake accelerator: 8 threads train random models under random monitors for a
minute, on 2 devices and 4 streams.

    make accuracy SUITE="stress [--seconds 60] [--seed 0]"     writes bench/results/stress.json

Forwards raise in the middle, streams change between layers and stall, NaNs appear, monitors are
removed by other threads or freed with their models, rings are so small that they overflow, and one
model is called by all threads of its device. Every observed tensor is copied; afterwards each
record has to equal the CPU kernel's record of the copy (all but the three sums, which a device adds
up in another order). No record may be missing but those that the rings count as lost, every stop
has to name the damaged module, and in the end no thread, session, segment or byte of the devices
may be left. Exit status 1 otherwise.

Needs g++ for the fake accelerator, built on first use.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import os
import queue
import random
import tempfile
import threading
import time
import traceback
import warnings
from collections import Counter
from typing import Any, Callable, Optional

import torch
from torch import nn

import fastcheck
import harness
from accuracy.stress_checks import (
    Failures,
    check_count,
    check_records,
    held_bytes,
    key_of,
    left_over,
    reference,
    value_bytes,
)
from accuracy.stress_models import Book, ServedBook, Trouble, go_on, make_model
from fakes import fake_device
from fastcheck.monitor.session import session as session_module
from fastcheck.record.format import Depth
from fastcheck.ring.device import DeviceRing

fake: Any = fake_device.load()

THREADS = 8
STREAMS = 2  # of each device
HANG_SECONDS = 120
SERVED_CALLS = 150  # at most, by each thread: all copies are kept to the end


class Shared:
    """The state that the threads share."""

    def __init__(self, seconds: float, seed: int) -> None:
        self.seed = seed
        self.deadline = time.monotonic() + seconds
        self.failures = Failures()
        self.streams = [
            [fake.Stream(device=index) for _ in range(STREAMS)]
            for index in range(fake.device_count())
        ]
        #: Installed monitors, which any thread may remove.
        self.victims: queue.SimpleQueue[fastcheck.Monitor] = queue.SimpleQueue()
        self.served = [self._served(index) for index in range(fake.device_count())]

    @staticmethod
    def _served(index: int) -> tuple[nn.Sequential, ServedBook, fastcheck.Monitor]:
        book = ServedBook()
        model = make_model(book, 2, 9, torch.device(fake.name(), index)).eval()
        fake.synchronize(index)
        return model, book, fastcheck.install(model, overflow_nums=-1)

    def check_served(self, tally: Counter[str]) -> None:
        """Each tensor has as many records as it had calls."""
        for _, book, monitor in self.served:
            monitor.flush()
            records, missing = check_count(monitor, self.failures)
            outputs = [r for r in records if key_of(monitor, r)[0] == "output"]
            copies = book.copies.values()
            wanted = Counter(value_bytes(reference(copy, Depth.FULL)) for copy in copies)
            found = Counter(map(value_bytes, outputs))
            if found - wanted or (not missing and wanted - found):
                self.failures.add("records of the served model", f"{len(found - wanted)} unknown")
            tally["records of the served models"] += len(records)
            monitor.remove()
        self.served.clear()


class Worker:
    """One thread: installs, trains, is stopped, checks and removes, in a loop."""

    def __init__(self, number: int, shared: Shared) -> None:
        self.random = random.Random(f"{shared.seed}-{number}")
        self.shared, self.failures = shared, shared.failures
        self.index = number % fake.device_count()
        self.device = torch.device(fake.name(), self.index)
        self.streams = shared.streams[self.index]
        self.tally: Counter[str] = Counter()
        self.thread = threading.Thread(target=self.run, name=f"stress-{number}", daemon=True)

    def run(self) -> None:
        while time.monotonic() < self.shared.deadline:
            try:
                with fake.stream(self.random.choice(self.streams)):
                    if self.random.random() < 0.1:
                        self.serve()
                    else:
                        self.episode()
                    fake.synchronize(self.index)  # before memory that two streams used goes back
                self.remove_others()
            except Exception:
                self.failures.add("an unexpected error", traceback.format_exc())

    def remove_others(self) -> None:
        """Removes other threads' monitors. Their stops are raised here, not in training."""
        with contextlib.suppress(queue.Empty, fastcheck.OverflowDetected):
            while True:
                monitor = self.shared.victims.get_nowait()
                self.tally["removed by another thread"] += 1
                monitor.remove()

    def serve(self) -> None:
        model, _, monitor = self.shared.served[self.index]
        for _ in range(5):
            if self.tally["served calls"] < SERVED_CALLS:
                self.tally["served calls"] += 1
                x = torch.randn(self.random.choice((1, 40)), 9)
                with torch.no_grad():
                    model(x.to(self.device))
        if self.random.random() < 0.2:
            monitor.step()

    def episode(self) -> None:
        """One model, from install() to its end."""
        rng, tally, book = self.random, self.tally, Book()
        on_host = rng.random() < 0.1
        width = rng.choice((1, 3, 17, 64, 200))
        device = torch.device("cpu") if on_host else self.device
        model = make_model(book, rng.randint(1, 4), width, device)
        model.to(rng.choice((torch.float32, torch.float32, torch.bfloat16, torch.float64)))
        monitor = fastcheck.install(
            model,
            record=rng.choice(("full", "full", "full", "stats", "health")),
            sync=rng.choice(("never", "never", "never", "step", "call")),
            stop=fastcheck.Stop(max_lag=rng.choice((1, 2, None))),
            log_dir=tempfile.mkdtemp(dir=".") if rng.random() < 0.2 else None,
        )
        tally["monitors"] += 1
        if rng.random() < 0.1:
            self.shared.victims.put(monitor)
        damaged = self.train(model, book, monitor, on_host)
        with contextlib.suppress(fastcheck.OverflowDetected):
            monitor.flush()
        fake.synchronize(self.index)
        if damaged and not monitor.events and not monitor._session.removed:
            self.failures.add("a NaN went unnoticed", damaged)
        records, missing = check_count(monitor, self.failures)
        check_records(monitor, records, book, self.failures)
        tally["records"] += len(records)
        tally["records lost by full rings, and counted"] += missing
        if rng.random() < 0.7:
            with contextlib.suppress(fastcheck.OverflowDetected):
                monitor.remove()
        else:
            tally["died with their models"] += 1

    def train(
        self, model: nn.Sequential, book: Book, monitor: fastcheck.Monitor, on_host: bool
    ) -> Optional[str]:
        """Trains; returns the path of the damaged module, if any."""
        rng, tally = self.random, self.tally
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        closes = monitor.step if rng.random() < 0.2 else None
        damaged: Optional[str] = None
        try:
            for _ in range(rng.randint(1, 8)):
                if not on_host:
                    go_on(rng.choice(self.streams))
                self.arm(model, on_host, may_damage=damaged is None)
                try:
                    self.step(model, optimizer, book, closes)
                    tally["steps"] += 1
                except ValueError:
                    tally["raised in a forward"] += 1
                finally:
                    damaged = damaged or next((m.path for m in model if was_damaged(m)), None)
            monitor.flush()
        except fastcheck.OverflowDetected as stop:
            tally["stops"] += 1
            if stop.culprit.site.module != damaged:
                self.failures.add("a stop named another module", f"{stop}\nnot {damaged}")
        return damaged

    def arm(self, model: nn.Sequential, on_host: bool, may_damage: bool) -> None:
        for report_internal_error in model:
            if isinstance(report_internal_error, Trouble):
                report_internal_error.todo = None
                chance = self.random.random()
                if chance < 0.05:
                    report_internal_error.todo = "raise"
                elif chance < 0.08 and may_damage:
                    report_internal_error.todo, may_damage = "nan", False
                elif chance < 0.25 and not on_host:
                    report_internal_error.todo = self.random.choice(self.streams)

    def step(
        self,
        model: nn.Sequential,
        optimizer: torch.optim.Optimizer,
        book: Book,
        closes: Optional[Callable[..., None]],
    ) -> None:
        first: Any = model[0]
        rows = self.random.choice((1, 2, 30, 700))
        x = torch.randn(rows, first.in_features, dtype=first.weight.dtype).to(first.weight.device)
        book.keep("input", "", "input[0]", book.next_call(""), x)
        self.keep_stored(model, book, "param")
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        self.keep_stored(model, book, "param_grad")
        optimizer.step()
        if closes is not None:
            book.keep("loss", "", "loss", 0, loss)
            closes(loss=loss)
        book.step += 1

    @staticmethod
    def keep_stored(model: nn.Sequential, book: Book, role: str) -> None:
        for name, parameter in model.named_parameters():
            path, _, label = name.rpartition(".")
            value = parameter if role == "param" else parameter.grad
            assert value is not None
            book.keep(role, path, label, 0, value)


def was_damaged(module: nn.Module) -> bool:
    return isinstance(module, Trouble) and module.has_damaged


def ring_of_any_size(*args: Any) -> DeviceRing:
    """A ring of random size, often too small for a step."""
    slots, segments = random.choice(((1024, 64), (16, 4), (8, 2)))
    return DeviceRing(*args, segment_slots=slots, max_segments=segments)


def disturb(shared: Shared) -> None:
    """Slows streams down or stalls them, until the time is over."""
    rng = random.Random(shared.seed)
    while time.monotonic() < shared.deadline:
        stream = rng.choice(rng.choice(shared.streams))
        fake.set_delay(rng.choice((0, 0, 5, 40)), stream)
        if rng.random() < 0.2:
            with fake.held(stream):
                time.sleep(0.02)
        time.sleep(0.05)
    for streams in shared.streams:
        for stream in streams:
            fake.set_delay(0, stream)


def run(seconds: float, seed: int) -> tuple[Counter[str], Failures]:
    random.seed(seed)
    torch.manual_seed(seed)
    module: Any = session_module
    module.DeviceRing = ring_of_any_size
    before = held_bytes(fake)
    shared = Shared(seconds, seed)
    failures = shared.failures
    warnings.simplefilter("always", fastcheck.FastcheckWarning)

    def warned(message: Any, category: Any, *_: Any, **__: Any) -> None:
        # Another thread may have removed the monitor whose step is closed here.
        if category is fastcheck.FastcheckWarning and "after remove()" not in str(message):
            failures.add("a warning", message)

    warnings.showwarning = warned
    workers = [Worker(number, shared) for number in range(THREADS)]
    for worker in workers:
        worker.thread.start()
    disturb(shared)
    tally: Counter[str] = Counter()
    for worker in workers:
        worker.thread.join(max(0.0, shared.deadline + HANG_SECONDS - time.monotonic()))
        tally.update(worker.tally)
        if worker.thread.is_alive():
            failures.add("a thread hangs", worker.thread.name)
    if failures.counts["a thread hangs"]:
        faulthandler.dump_traceback(all_threads=True)
        return tally, failures
    while not shared.victims.empty():
        with contextlib.suppress(fastcheck.OverflowDetected):
            shared.victims.get().remove()
    shared.check_served(tally)
    del workers, worker
    for name, count in left_over().items():
        if count:
            failures.add(f"left over: {name}", count)
    after = held_bytes(fake)
    if after != before:
        failures.add("left over: memory", f"{before} bytes before, {after} after")
    return tally, failures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    here = os.getcwd()
    with tempfile.TemporaryDirectory() as directory:
        os.chdir(directory)  # where stops write their logs
        try:
            tally, failures = run(arguments.seconds, arguments.seed)
        finally:
            os.chdir(here)
    rows = [{"case": name, "count": count} for name, count in sorted(tally.items())]
    print(harness.table(["what", "how often"], [[r["case"], f"{r['count']:,}"] for r in rows]))
    harness.write_results(
        "stress",
        rows,
        seconds=arguments.seconds,
        seed=arguments.seed,
        threads=THREADS,
        failures=dict(failures.counts),
    )
    if failures.counts:
        print(f"\nFAILED: {dict(failures.counts)}", flush=True)
        os._exit(1)  # a thread that hangs would hold up the interpreter's end
    print("\nNothing failed.")


if __name__ == "__main__":
    main()
