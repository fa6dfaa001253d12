"""Errors of fastcheck's own: each function of the package that a training calls raises one, and the
training has to go on as without fastcheck, or to stop at its NaN.

    make accuracy SUITE="own_errors [--every N]"     writes bench/results/own_errors.json

A function raises at the beginning of its first call after the third step, at the end of that
call, or at the beginning of a later one; each time in a process of its own. Losses, weights, hooks,
modes and what the program has raised have to be those of the same program without fastcheck; one
that makes a NaN stops, or goes on where what looks for it is switched off. Where two ranks train
together, a function raises on one of them or on both, and neither may wait for the other in vain;
the NaN is the second's. Exit status 1 otherwise.

Left out are the functions that stand directly around those of torch, and hand on to one that
catches what it calls: an error that is raised in them, and not in what they call, is the program's.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import inspect
import itertools
import multiprocessing
import operator
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Callable, NamedTuple, Optional, TypeVar

import torch
import torch._dynamo  # the first optimizer imports it, in each process
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import fastcheck
import harness
from fakes import fake_device
from fastcheck.utils.torch.sharding import local

PACKAGE = f"{Path(fastcheck.__file__).parent}/"
PROCESSES = multiprocessing.get_context("fork")
STEPS, FIRST, NAN = 14, 3, 9
SECONDS = 120.0  # that a program may take

# Functions around those of torch, and of a stop: (file, name).
AROUND = {
    "utils/torch/patching.py": ("Listeners.__iter__",),
    "utils/torch/optimizer_steps.py": (
        "around_steps.<locals>.begins",
        "around_steps.<locals>.ends",
    ),
    "monitor/hooks/optimizers.py": (
        "_after_update",
        "_asked_of_engine",
        "_backward.<locals>.run",
        "_before_update",
        "_clip.<locals>.clip",
        "_gradients_of",
        "_group.<locals>.group",
        "_present",
        "_present.<locals>.<listcomp>",
        "_scale.<locals>.scale",
        "_schedule.<locals>.step",
        "_step.<locals>.step",
        "_tell",
        "_unscale.<locals>.unscale_",
        "_update.<locals>.update",
        "tell_step_end",
    ),
    "monitor/hooks/step_watcher.py": ("StepWatcher.guarded", "StepWatcher.scaler_step_left"),
    "monitor/hooks/module_observer.py": (
        "ForwardHook.__call__",
        "ForwardPreHook.__call__",
        "ModuleObserver.deliver",
        "ModuleObserver.gradient_came",
        "_ModuleHook._attend",
        "_gradient_came",
    ),
    "monitor/distributed/agreement.py": (
        "RankAgreement.boundary",
        "RankAgreement.finish",
        "RankAgreement._guarded",
    ),
    "monitor/distributed/replicas.py": (
        "ReplicaCheck.boundary",
        "ReplicaCheck.finish",
        "ReplicaCheck._guarded",
    ),
    "monitor/session/stop_handler.py": (
        "StepBoundary.__call__",
        "StepBoundary._compare",
        "StepBoundary.finish",
        "StopHandler.__call__",
        "StopHandler.__call__.<locals>.<listcomp>",
        "StopHandler._made_by",
        "StopHandler._report",
        "StopHandler._sink",
        "StopHandler._stop",
        "StopHandler._stop_if_agreed",
        "StopHandler.at_step_boundary",
        "raise_stop",
    ),
    "report/error.py": ("OverflowDetected.__init__",),
}


class Program(NamedTuple):
    """A training. ``nan``: what makes one, or None."""

    options: dict[str, Any]
    nan: Optional[str] = None
    is_scaled: bool = False
    has_log: bool = False
    is_on_device: bool = False
    wrap: Optional[Callable[..., nn.Module]] = None

    @property
    def ranks(self) -> int:
        return 1 if self.wrap is None else 2


PROGRAMS = {
    "module level": Program({}),
    "op level": Program({"level": "op"}),
    "GradScaler, log": Program({}, is_scaled=True, has_log=True),
    "NaN in a loss": Program({}, "loss"),
    "NaN in a batch, log": Program({}, "batch", has_log=True),
    "NaN in a loss, op level": Program({"level": "op"}, "loss"),
    "fake accelerator": Program({}, is_on_device=True),
    "NaN in a loss, fake accelerator": Program({}, "loss", is_on_device=True),
    "DDP": Program({}, wrap=DistributedDataParallel),
    "NaN in a batch, DDP, log": Program({}, "batch", has_log=True, wrap=DistributedDataParallel),
    "NaN in a loss, FSDP2": Program({}, "loss", wrap=fully_shard),
}


class OwnError(RuntimeError):
    """What a function of fastcheck raises."""


class Result(NamedTuple):
    """What a program has come to."""

    losses: list[float]
    weights: list[float]
    state: dict[str, int]
    raised: str = ""
    stop: str = ""


class Function(NamedTuple):
    """A function of the package, by its place."""

    file: str
    name: str
    line: int


class Error(NamedTuple):
    """An error in a function, at the beginning or the end ("call", "return") of a call, on some
    ranks.
    """

    function: Function
    event: str
    number: int
    ranks: tuple[int, ...]


#: Told of a call or a return of a function.
See = Callable[[CodeType, str], None]
_T = TypeVar("_T")


def train(
    rank: int, program: Program, watch: Callable[[bool], None], folder: Optional[str]
) -> Result:
    """Trains a model; ``watch`` is called with True from the step on in which functions may raise.
    ``folder``: None: without fastcheck.
    """
    device = fake_device.load().name() if program.is_on_device else "cpu"
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(
        nn.Linear(8, 16), nn.LayerNorm(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 1)
    ).to(device)
    model = model if program.wrap is None else program.wrap(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=program.is_scaled)
    losses, raised, stop = [], "", ""
    monitor = None
    if folder is not None:
        logs = {"log_dir": folder} if program.has_log else {"log_dir": None}
        monitor = fastcheck.install(model, overflow_nums=1, **logs, **program.options)
    try:
        try:
            for step in range(STEPS):
                if step == FIRST:
                    watch(True)
                generator = torch.Generator().manual_seed(step + STEPS * rank)
                x = torch.randn(16, 8, generator=generator).to(device)
                y = x.sum(1, keepdim=True)
                is_bad = step == NAN and rank == program.ranks - 1
                if is_bad and program.nan == "batch":
                    x[3, 2] = float("nan")
                with torch.autocast("cpu", dtype=torch.float16, enabled=program.is_scaled):
                    output = model(x).float()
                if is_bad and program.nan == "loss":
                    output = (output * 0).log()
                loss = (output - y).square().mean()
                losses.append(loss.item())
                optimizer.zero_grad()
                scaler.scale(loss).backward()
                if program.is_scaled:
                    scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                scheduler.step()
        finally:
            watch(False)
            if monitor is not None:
                monitor.remove()
    except fastcheck.OverflowDetected as error:
        raised, stop = type(error).__name__, str(error)
    except Exception as error:
        raised = type(error).__name__
    state = {
        "gradients are recorded": int(torch.is_grad_enabled()),
        "modes": torch._C._len_torch_dispatch_stack(),
        "hooks": sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()),
    }
    weights = [local(w).double().sum().item() for w in model.parameters()]
    return Result(losses, weights, state, raised, stop)


def function_of(code: CodeType) -> Optional[Function]:
    """None: another's, or a generator, which raises where nobody waits for it."""
    if code.co_flags & inspect.CO_GENERATOR or not code.co_filename.startswith(PACKAGE):
        return None
    return Function(code.co_filename[len(PACKAGE) :], code.co_qualname, code.co_firstlineno)


def observed(rank: int, program: Program, see: See, folder: str) -> Result:
    """The result of a program, of which ``see`` is told each call and return of a function."""
    is_seen = False

    def profile(frame: FrameType, event: str, argument: object) -> None:
        if is_seen and event in ("call", "return"):
            see(frame.f_code, event)

    def watch(is_on: bool) -> None:
        nonlocal is_seen
        is_seen = is_on

    threading.setprofile(profile)  # of the thread that takes in what a device has recorded
    sys.setprofile(profile)
    try:
        return train(rank, program, watch, folder)
    finally:
        sys.setprofile(None)


def calls_of(rank: int, program: Program, folder: str) -> Counter[Function]:
    """How often a program calls each function of the package."""
    calls: Counter[CodeType] = Counter()

    def count(code: CodeType, event: str) -> None:
        calls[code] += event == "call"

    observed(rank, program, count, folder)
    found: Counter[Function] = Counter()
    for code, number in calls.items():
        function = function_of(code)
        if function is not None:
            found[function] += number
    return +found


def with_error(rank: int, program: Program, error: Error, folder: str) -> Result:
    """The result of a program in which a function raises once."""
    left = error.number if rank in error.ranks else 0

    def fail(code: CodeType, event: str) -> None:
        nonlocal left
        is_it = event == error.event and code.co_firstlineno == error.function.line
        if left and is_it and function_of(code) == error.function:
            left -= 1
            if left == 0:
                raise OwnError("an error of fastcheck's own")

    return observed(rank, program, fail, folder)


def errors(calls: Sequence[Counter[Function]]) -> Iterator[Error]:
    """The errors to raise, one at a time. ``calls``: those of each rank."""
    turns = itertools.cycle([(0,), (1,), (0, 1)])
    for function, count in functools.reduce(operator.or_, calls).items():
        if function.name in AROUND.get(function.file, ()):
            continue
        callers = tuple(rank for rank, of_rank in enumerate(calls) if of_rank[function])
        for event, number in (("call", 1), ("return", 1), ("call", count // 2)):
            of_turn = tuple(rank for rank in next(turns) if rank in callers)
            if number > 1 or count // 2 != number or event == "return":
                yield Error(function, event, number, of_turn or callers)
        next(turns)


def apart(ranks: int, work: Callable[[int], _T]) -> list[Optional[_T]]:
    """What each rank computes, in a process of its own; None: nothing, or not in time."""

    def run(rank: int, sender: Connection) -> None:
        with contextlib.redirect_stderr(None), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if ranks > 1:
                meeting, patience = f"file://{folder}/meeting", timedelta(seconds=SECONDS)
                dist.init_process_group(
                    "gloo", meeting, rank=rank, world_size=ranks, timeout=patience
                )
            sender.send(work(rank))

    deadline, receivers, processes = time.monotonic() + SECONDS, [], []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(ranks):
            receiver, sender = PROCESSES.Pipe(duplex=False)
            process = PROCESSES.Process(target=run, args=(rank, sender), daemon=True)
            process.start()
            sender.close()
            receivers.append(receiver)
            processes.append(process)
        try:
            return [_received(receiver, deadline) for receiver in receivers]
        finally:
            for process in processes:
                process.kill()
                process.join()


def _received(receiver: Connection, deadline: float) -> Any:
    try:
        left = max(0.0, deadline - time.monotonic())
        return receiver.recv() if receiver.poll(left) else None
    except EOFError:
        return None


def differences(
    program: Program,
    error: Error,
    plain: Sequence[Result],
    stopped: Sequence[Result],
    found: Sequence[Optional[Result]],
) -> Iterator[str]:
    """What is not as it has to be, of each rank. ``plain``: without fastcheck; ``stopped``: without
    an error.
    """
    texts = [" ".join(result.stop.split()) for result in found if result is not None]
    is_told = any("no longer observes" in text or "can't agree" in text for text in texts)
    for rank, result in enumerate(found):
        allowed = ["", "OverflowDetected"] if program.nan else [""]
        if program.nan and len(found) > 1:
            allowed.append("RuntimeError")  # of a collective that the other rank has left
        if result is None:
            yield f"rank {rank} ended without a result"
        elif result.raised not in allowed:
            yield f"rank {rank} raised {result.raised}"
        else:
            if result.state != plain[rank].state:
                yield f"rank {rank} has {result.state}, not {plain[rank].state}"
            end = NAN if program.nan else STEPS
            if result.losses[:end] != plain[rank].losses[:end]:
                yield f"rank {rank} has other losses"
            if not program.nan and result.weights != plain[rank].weights:
                yield f"rank {rank} has other weights"
            headline = result.stop.partition("\n")[0]
            is_same = not result.stop or headline == stopped[rank].stop.partition("\n")[0]
            # Another rank's report can't tell of an error that it knows nothing of.
            is_others = len(error.ranks) < len(found) and f"rank {error.ranks[0]}" not in headline
            if not (is_same or is_told or is_others):
                yield f"rank {rank} stopped at {headline!r} and does not tell of the error"


def run(name: str, every: int, folder: str) -> dict[str, Any]:
    program = PROGRAMS[name]
    alone = partial(apart, program.ranks)

    def whole(work: Callable[[int], _T]) -> list[_T]:
        results = [result for result in alone(work) if result is not None]
        if len(results) < program.ranks:
            raise RuntimeError(f"{name} ended without a result")
        return results

    plain = whole(lambda rank: train(rank, program, lambda is_on: None, None))
    calls = whole(lambda rank: calls_of(rank, program, f"{folder}/calls"))
    stopped = whole(lambda rank: train(rank, program, lambda is_on: None, f"{folder}/whole"))
    count, unstopped, wrong = 0, 0, []
    for error in list(errors(calls))[::every]:
        work = partial(with_error, program=program, error=error, folder=f"{folder}/{count}")
        found: list[Optional[Result]] = alone(work)
        where = f" on {error.ranks}" if program.ranks > 1 else ""
        for text in differences(program, error, plain, stopped, found):
            place = f"{error.function.file}: {error.function.name}"
            wrong.append(f"{place}, {error.event} {error.number}{where}: {text}")
        count += 1
        unstopped += bool(program.nan and any(r is not None and not r.raised for r in found))
    return {
        "program": name,
        "functions": len(functools.reduce(operator.or_, calls)),
        "errors": count,
        "went_on_at_the_nan": unstopped,
        "wrong": wrong,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--every", type=int, default=1, metavar="N", help="every Nth error alone")
    parser.add_argument("--only", choices=PROGRAMS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = [options.only] if options.only else list(PROGRAMS)
    with tempfile.TemporaryDirectory() as folder:
        rows = [run(name, options.every, f"{folder}/{at}") for at, name in enumerate(names)]
    columns = ("program", "functions", "errors", "went_on_at_the_nan")
    lines = [[*(str(row[column]) for column in columns), str(len(row["wrong"]))] for row in rows]
    print(harness.table((*columns, "wrong"), lines))
    for row in rows:
        for text in row["wrong"]:
            print(f"{row['program']}: {text}")
    print(Path(harness.write_results("own_errors", rows)).name)
    sys.exit(any(row["wrong"] for row in rows))


if __name__ == "__main__":
    main()
