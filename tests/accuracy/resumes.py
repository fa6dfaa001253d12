"""Resumes of plain loops, Hugging Face's Trainer, Accelerate, Lightning and FSDP2 on two ranks: 40
with something that did not come back, and 40 clean ones.

    make accuracy SUITE=resumes

Writes bench/results/resumes.json. A fault is named where verify(path, resume=) or the comparison of
the first steps names the part that it is in; of the first steps the first "no" counts. A clean
resume may not be accused by either. The exit status is 1 where fewer than 38 are named, or one is
accused.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import multiprocessing
import os
import pickle
import socket
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import fastcheck
import harness
from accuracy import resumes_programs

#: By program and fault what has to be named: ``differing`` begins with it, or the first
#: question that the first steps answer with "no".
FAULTS: dict[str, dict[str, str]] = {
    "plain": {
        "moments of one weight": "optimizer.state",
        "scheduler": "scheduler",
        "random numbers": "random.torch",
        "loader begins anew": "batches",
        "one weight": "weights",
        "evaluation mode": "forward",
        "not clipped": "hyper-parameters",
        "a buffer that no state_dict has": "initial weights",
    },
    "accelerate": {
        "moments": "optimizer.state",
        "scheduler": "scheduler",
        "one weight": "weights",
        "no batch skipped": "batches",
        "another seed of the loader": "batches",
        "label smoothing": "forward criterion",
        "not clipped": "hyper-parameters",
        "two micro-batches": "loss",
    },
    "huggingface": {
        "moments": "optimizer.state",
        "scheduler": "scheduler",
        "one weight": "weights",
        "no batch skipped": "batches",
        "another seed of the loader": "batches",
        "random numbers": "forward",
        "not clipped": "hyper-parameters",
        "two micro-batches": "batches",
    },
    "lightning": {
        "moments": "optimizer.state",
        "scheduler": "scheduler",
        "one weight": "weights",
        "another batch": "forward net · forward · input.x",
        "learning rate": "optimizer.param_groups",
        "label smoothing": "forward net.criterion",
        "not clipped": "hyper-parameters",
        "frozen": "gradients",
    },
    "fsdp2": {
        "moments on one rank": "optimizer.state",
        "steps of Adam": "optimizer.state",
        "one shard": "shards",
        "learning rate": "optimizer.param_groups",
        "random numbers on one rank": "random.torch",
        "the other rank's batches": "batches",
        "sums are not divided": "loss",
        "evaluation mode": "forward",
    },
}
_SGD, _PERSISTENT = {"optimizer": "SGD"}, {"mean": True, "persistent": True}
#: Options of healthy programs.
CLEAN: dict[str, list[dict[str, Any]]] = {
    "plain": [
        {},
        {"dropout": 0.3},
        _SGD,
        {"optimizer": "Adagrad", "schedule": "cosine"},
        {"micro": 2, "dropout": 0.1},
        {"batch_norm": True},
        _PERSISTENT,
        {"dtype": torch.bfloat16, "dropout": 0.1},
    ],
    # It restores the generators before its loader draws from them: none with dropout.
    "accelerate": [
        {},
        _SGD,
        {"schedule": "cosine"},
        {"micro": 2},
        {"batch_norm": True},
        _PERSISTENT,
        {"optimizer": "RMSprop"},
        {"optimizer": "NAdam", "micro": 2},
    ],
    "huggingface": [
        {},
        {"dropout": 0.3},
        {"optimizer": "sgd"},
        {"schedule": "cosine"},
        {"micro": 2, "dropout": 0.1},
        {"batch_norm": True},
        _PERSISTENT,
        {"optimizer": "adafactor", "schedule": "constant"},
    ],
    # It restores no generator: none with dropout.
    "lightning": [
        {},
        _SGD,
        {"schedule": "cosine"},
        {"micro": 2},
        {"batch_norm": True},
        _PERSISTENT,
        {"optimizer": "RMSprop"},
        {"optimizer": "NAdam", "micro": 2},
    ],
    "fsdp2": [
        {},
        {"dropout": 0.3},
        _SGD,
        {"schedule": "cosine"},
        {"optimizer": "RMSprop"},
        {"optimizer": "Adagrad", "dropout": 0.1},
        {"dtype": torch.bfloat16},
        {"dtype": torch.float64, "dropout": 0.1},
    ],
}


class Outcome(NamedTuple):
    """What is said of one resume: the names of ``differing``; the questions that the first steps
    answer with "no", each with the tensor that is first (None: they were not compared); the text.
    """

    differing: list[str]
    no: list[str] | None
    text: str


def options_of(program: str, fault: str) -> dict[str, Any]:
    if fault in ("random numbers", "random numbers on one rank", "evaluation mode"):
        return {"dropout": 0.3}
    return {"mean": True} if fault == "a buffer that no state_dict has" else {}


def outcome(train: Any, options: dict[str, Any], fault: str, place: Path) -> Outcome:
    """Trains, and resumes with the fault."""
    train(place, False, options, "")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = train(place, True, options, fault)
    steps = found.first_steps
    no = None
    if steps is not None:
        first = {one.question: one.found for one in steps.answers if one.answer == "no"}
        no = [f"{what} {one.row.name if one else ''}" for what, one in first.items()]
    said = [
        str(one.message) for one in told if issubclass(one.category, fastcheck.FastcheckWarning)
    ]
    return Outcome(list(found.differing), no, "\n".join([str(found), *said]))


Job = tuple[str, dict[str, Any], str]


def jobs_of(program: str) -> list[Job]:
    faults = harness.few(FAULTS[program])
    return [
        *((program, options_of(program, fault), fault) for fault in faults),
        *((program, options, "") for options in harness.few(CLEAN[program])),
    ]


def run(jobs: Sequence[Job], place: Path) -> list[Outcome]:
    found = []
    for number, (program, options, fault) in enumerate(jobs):
        folder = place / str(number)
        folder.mkdir(exist_ok=True)
        with contextlib.redirect_stdout(io.StringIO()):
            found.append(outcome(getattr(resumes_programs, program), options, fault, folder))
    return found


def on_rank(rank: int, place: str, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    found = run(jobs_of("fsdp2"), Path(place))
    gathered: list[Any] = [None, None]
    dist.all_gather_object(gathered, found)
    if rank == 0:
        with open(Path(place) / "outcomes.pickle", "wb") as file:
            pickle.dump(gathered, file)
    dist.destroy_process_group()


def on_two_ranks(place: Path) -> list[Outcome]:
    """What either rank is told."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=on_rank, args=(rank, str(place), port)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    with open(place / "outcomes.pickle", "rb") as file:
        outcomes = pickle.load(file)
    return [
        Outcome(
            [name for one in both for name in one.differing],
            None if None in (both[0].no, both[1].no) else max((one.no for one in both), key=len),
            "\n".join(one.text for one in both),
        )
        for both in zip(*outcomes)
    ]


def is_right(program: str, fault: str, found: Outcome) -> bool:
    if found.no is None:
        return False
    if not fault:
        return not found.differing and not found.no
    part = FAULTS[program][fault]
    is_named = any(f"{name}.".startswith(f"{part}.") for name in found.differing)
    return is_named or any(one.startswith(part) for one in found.no[:1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", choices=("", *FAULTS))
    only = parser.parse_args().only
    rows: list[dict[str, Any]] = []
    for program in FAULTS:
        if only not in ("", program):
            continue
        with tempfile.TemporaryDirectory() as temporary:
            place, jobs = Path(temporary), jobs_of(program)
            found = on_two_ranks(place) if program == "fsdp2" else run(jobs, place)
        for (_, options, fault), one in zip(jobs, found):
            shown = {key: str(value) for key, value in options.items()}
            is_good = is_right(program, fault, one)
            rows.append(
                {
                    "program": program,
                    "fault": fault,
                    "options": shown,
                    "right": is_good,
                    "differing": one.differing[:3],
                    "first_steps": one.no,
                }
            )
            print(
                f"{program:12} {fault or 'clean':34} {'right' if is_good else 'WRONG'}", flush=True
            )
            if not is_good:
                print(one.text)
    named = [row["right"] for row in rows if row["fault"]]
    clean = [row["right"] for row in rows if not row["fault"]]
    print(
        f"{sum(named)} of {len(named)} faults named, {clean.count(False)} of {len(clean)} accused"
    )
    harness.write_results("resumes", rows)
    return 0 if all(clean) and len(named) - sum(named) <= 2 else 1


if __name__ == "__main__":
    sys.exit(main())
