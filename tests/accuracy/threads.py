"""Stress test on the CPU: four threads train a model each, observed in five ways.

    make accuracy SUITE="threads [--seconds 600]"     writes bench/results/threads.json

A way is a process for each of three switch intervals of the interpreter (5 ms, 0.1 ms, 10 us),
which share its seconds. A process may not crash; no thread may raise, no monitor may count an
event, steps of a model may not differ in what is read, and every loss has to equal that of the same
training without fastcheck. Exit status 1 otherwise.
"""

from __future__ import annotations

import argparse
import faulthandler
import multiprocessing
import sys
import tempfile
import threading
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the first optimizer imports it, in each process
from torch import nn

import fastcheck
import harness

# Keywords of install(); a dump is of all threads, by one of them.
WAYS: dict[str, dict[str, Any]] = {
    "module": {},
    "op": {"level": "op"},
    "call": {"sync": "call"},
    "watch": {"watch": True},
    "dump": {},
}
# This process computes nothing: what is forked from it has no thread to miss.
PROCESSES = multiprocessing.get_context("fork")
INTERVALS = harness.size((5e-3, 1e-4, 1e-5), (1e-5,))
STEPS = harness.size(60, 15)  # of each model


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(16), nn.MultiheadAttention(16, 2, batch_first=True)
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x), self.norm(x), self.norm(x), need_weights=False)[0]
        return x + self.last(torch.nn.functional.gelu(self.first(x)))


class Training:
    """One model, always the same; random numbers are its own."""

    def __init__(self, number: int) -> None:
        torch.manual_seed(number)
        self.model = nn.Sequential(nn.Linear(8, 16), Block(), Block(), nn.Linear(16, 4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 0.01)
        self.generator = torch.Generator().manual_seed(number)
        self.losses: list[torch.Tensor] = []
        self.error = ""

    def step(self) -> None:
        self.optimizer.zero_grad()
        loss = self.model(torch.randn(2, 3, 8, generator=self.generator)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.detach())

    def train(self) -> None:
        try:
            for _ in range(STEPS):
                self.step()
        except BaseException:
            self.error = traceback.format_exc()


def together(trainings: list[Training]) -> None:
    threads = [threading.Thread(target=training.train) for training in trainings]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def one_round(way: str, expected: list[list[torch.Tensor]], folder: str) -> list[str]:
    """What was wrong. Op level has one monitor in a process."""
    trainings = [Training(number) for number in range(len(expected))]
    observed = {"op": trainings[:1], "dump": []}.get(way, trainings)
    monitors = [
        fastcheck.install(one.model, overflow_nums=-1, log_dir=None, **WAYS[way])
        for one in observed
    ]
    if way == "dump":
        with fastcheck.Dumper(folder, overwrite=True):
            together(trainings)
    else:
        together(trainings)
    wrong = [one.error for one in trainings if one.error]
    for number, (training, losses) in enumerate(zip(trainings, expected)):
        if not all(map(torch.equal, training.losses, losses)):
            wrong.append(f"model {number} has other losses")
    for monitor in monitors:
        monitor.flush()
        steps = monitor.records()["step"]
        counts = {int((steps == step).sum()) for step in range(STEPS - 8, STEPS)}
        if len(counts) != 1 and way != "op":  # which reads the operators of all threads
            wrong.append(f"steps of the same model have {sorted(counts)} records")
        if monitor.event_count:
            wrong.append(str(monitor.events[0]))
        monitor.remove()
    return wrong


def work(way: str, interval: float, seconds: float) -> dict[str, Any]:
    faulthandler.enable()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    alone = [Training(number) for number in range(4)]
    for training in alone:
        training.train()
    expected = [training.losses for training in alone]
    sys.setswitchinterval(interval)
    end, rounds, wrong = time.monotonic() + seconds, 0, []
    with tempfile.TemporaryDirectory() as folder:
        while not wrong and (not rounds or time.monotonic() < end):
            wrong = one_round(way, expected, folder)
            rounds += 1
    return {"rounds": rounds, "wrong": wrong}


def run(way: str, interval: float, seconds: float) -> dict[str, Any]:
    receiver, sender = PROCESSES.Pipe(duplex=False)
    process = PROCESSES.Process(
        target=lambda: sender.send(work(way, interval, seconds)), daemon=True
    )
    process.start()
    sender.close()
    try:
        found = receiver.recv()
    except EOFError:  # it has ended without a result
        process.join()
        found = {"rounds": 0, "wrong": [f"exit status {process.exitcode}"]}
    return {"way": way, "switch_interval_s": interval, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0, help="of each way")
    options = parser.parse_args()
    rows = [run(way, each, options.seconds / len(INTERVALS)) for way in WAYS for each in INTERVALS]
    lines = [[row["way"], f"{row['switch_interval_s']:g} s", str(row["rounds"])] for row in rows]
    print(harness.table(("way", "switch interval", "rounds"), lines))
    for row in rows:
        for text in row["wrong"]:
            print(f"{row['way']}, {row['switch_interval_s']:g} s: {text}")
    print(Path(harness.write_results("threads", rows, steps=STEPS)).name)
    sys.exit(any(row["wrong"] for row in rows))


if __name__ == "__main__":
    main()
