"""The cost of the check for weights that do not move, per optimizer update.

    python bench/movement.py [--rounds N]     writes bench/results/movement.json, prints a table

optimizer.step() of a model of small Linears and BatchNorms, with a constant buffer each, under
install(model), on the CPU, where everything is judged within the call. Updates with the check and
with the check switched off alternate. Beside them are the update without fastcheck, and the whole
training step with forward and backward.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import torch
from torch import nn

import fastcheck
import harness

PARAMETERS = harness.few((48, 192))
WIDTH = 64
UPDATES = harness.size(
    100, 10
)  # a round: so that each has one update whose parameters are asked one by one


class Training:
    """A model in training: every weight moves, and every gradient is there."""

    def __init__(self, count: int) -> None:
        torch.manual_seed(count)
        layers: list[nn.Module] = []
        for _ in range(count // 4):
            linear = nn.Linear(WIDTH, WIDTH)
            linear.register_buffer("mask", torch.ones(WIDTH))
            layers += [linear, nn.BatchNorm1d(WIDTH)]
        self.model = nn.Sequential(*layers)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.x, self.target = torch.randn(2, 8, WIDTH)

    def backward(self) -> None:
        self.optimizer.zero_grad()
        (self.model(self.x) - self.target).square().mean().backward()


class Watched(Training):
    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.monitor = fastcheck.install(self.model, overflow_nums=-1)
        stalled_weights = self.monitor._core.state.stalled_weights
        assert stalled_weights is not None  # record="full" is the default
        self.stalled_weights = stalled_weights


def measure(count: int, rounds: int) -> dict[str, Any]:
    plain, watched = Training(count), Watched(count)
    names = ("no fastcheck", "no watch", "watch", "step")
    seconds = {name: np.zeros(rounds) for name in names}

    def update(training: Training, name: str, index: int) -> None:
        start = time.perf_counter()
        training.backward()
        middle = time.perf_counter()
        training.optimizer.step()
        end = time.perf_counter()
        if index >= 0:
            seconds[name][index] += (end - middle) / UPDATES
            if name == "watch":
                seconds["step"][index] += (end - start) / UPDATES

    for index in range(-1, rounds):
        for turn in range(3 * UPDATES):
            name = names[(turn + turn // 3) % 3]
            watched.stalled_weights.is_on = name == "watch"
            update(plain if name == "no fastcheck" else watched, name, index)
    assert not watched.stalled_weights.notes  # a healthy run, or another path is timed
    watched.monitor.remove()
    cost = seconds["watch"] - seconds["no watch"]
    reading = seconds["no watch"] - seconds["no fastcheck"]
    return {
        "parameters": count,
        "rounds": rounds,
        "watch_microseconds": harness.spread(1e6 * cost),
        "reading_microseconds": harness.spread(1e6 * reading),
        "share_of_reading": harness.ratio(cost, reading),
        "share_of_step": harness.ratio(cost, seconds["step"]),
    }


def as_table(rows: list[dict[str, Any]]) -> str:
    return harness.table(
        ["parameters", "us an update", "us of the reading", "of the reading", "of the step"],
        [
            [
                str(row["parameters"]),
                harness.with_spread(row["watch_microseconds"]),
                harness.with_spread(row["reading_microseconds"]),
                f"{row['share_of_reading']['median']:.1%}",
                f"{row['share_of_step']['median']:.2%}",
            ]
            for row in rows
        ],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rounds = harness.size(arguments.rounds, 1)
    rows = [measure(count, rounds) for count in PARAMETERS]
    print(as_table(rows))
    harness.write_results("movement", rows, threads=1)


if __name__ == "__main__":
    main()
