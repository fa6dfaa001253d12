"""Calls of CUDA in steps of a real torch.cuda program with fastcheck, where no device is.

torch's CUDA build and the kernels stand on the libraries of cuda_stub.py: nothing is computed, and
every call is recorded with its thread. Prints the calls of a step, and fails where fastcheck adds a
wait, an allocation or a context to one. torch raises an error at each wait, so that what fastcheck
reads on the host in a few steps of a run (docs/invariants.md) is left out.
"""

from __future__ import annotations

import collections
import ctypes
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from typing import Callable

import torch
from torch import nn

import fastcheck
from fastcheck.backends import cuda

STEPS, FIRST = 30, 12
KINDS = {
    "launches": {"cudaLaunchKernel", "__cudaLaunchKernel", "cudaLaunchKernelExC"},
    "copies and fills": {"cudaMemcpyAsync", "cudaMemsetAsync"},
    "events": {"cudaEventRecord", "cudaEventRecordWithFlags", "cudaStreamWaitEvent"},
    "queries": {"cudaEventQuery", "cudaStreamQuery", "cudaStreamIsCapturing"},
    "waits": {
        *("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize"),
        *("cudaMemcpy", "cudaMemset"),
    },
    "allocations": {
        *("cudaMalloc", "cudaMallocAsync", "cudaHostAlloc", "cudaHostRegister"),
        *("cudaFree", "cudaFreeHost", "cudaStreamCreateWithPriority", "cudaStreamCreateWithFlags"),
    },
    "contexts": {"cuDevicePrimaryCtxRetain", "cuCtxSetCurrent", "cuCtxCreate"},
}
Calls = dict[str, int]

library = ctypes.CDLL("libcudart.so.13")
text = ctypes.create_string_buffer(1 << 20)


def take() -> Calls:
    """The calls of each kind since the last time, of all threads."""
    library.stub_take(text, len(text))
    of_kind: collections.Counter[str] = collections.Counter()
    for line in text.value.decode().splitlines():
        _, function, calls = line.split()
        for kind, functions in KINDS.items():
            of_kind[kind] += int(calls) * (function in functions)
    return of_kind


def training(reads_loss: bool) -> tuple[nn.Module, Callable[[], None]]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True, activation="gelu")
    model = nn.Sequential(
        nn.Embedding(100, 64), nn.TransformerEncoder(layer, 4), nn.Linear(64, 100)
    )
    model.cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.zeros(2, 16, dtype=torch.int64, device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()  # type: ignore[no-untyped-call]  # torch has it untyped
        optimizer.step()
        if reads_loss:
            loss.item()

    return model, step


#: Monitors, by the name that is printed.
INSTALL: dict[str, Callable[[nn.Module], object]] = {
    "module": fastcheck.install,
    "op": lambda model: fastcheck.install(model, level="op"),
}


def measure(name: str) -> tuple[Calls, float]:
    """The most of each kind in a step, and the processor time of one, in milliseconds."""
    model, step = training(name == "loss.item()")
    if name in INSTALL:
        torch.cuda.set_sync_debug_mode("error")
        INSTALL[name](model)
    most: Calls = collections.Counter()
    seconds = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", fastcheck.FastcheckWarning)
        for number in range(STEPS):
            take()
            start = time.process_time()
            step()
            seconds.append(time.process_time() - start)
            if number >= FIRST:
                most |= take()  # of two counts the larger
    said = [str(each.message) for each in caught]
    assert not any("no longer" in text for text in said), said
    return most, 1e3 * statistics.median(seconds[FIRST:])


def main() -> None:
    """One case in a process: slots of records are memory that nothing has written to, zeros."""
    if len(sys.argv) > 1:
        assert torch.version.cuda is not None and cuda.cuda_problem() is None, cuda.cuda_problem()
        print(json.dumps(measure(sys.argv[1])), flush=True)
        # torch 2.13 may abort at exit, where its thread of autograd has not yet let go of the graph
        # of the last backward(): that holds a Python context.
        os._exit(0)
    print("calls of a step, at most: " + ", ".join(KINDS) + "; ms of the host")
    results = {}
    for name in ("without", *INSTALL, "loss.item()"):
        command = [*sys.orig_argv, name]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        calls, milliseconds = json.loads(done.stdout.splitlines()[-1])
        results[name] = {kind: calls.get(kind, 0) for kind in KINDS}
        print(f"{name}: {list(results[name].values())}, {milliseconds:.1f}", flush=True)
    for name in INSTALL:
        for kind in ("waits", "allocations", "contexts"):
            assert results[name][kind] == results["without"][kind], (name, kind)
        assert results[name]["launches"] > results["without"]["launches"], name
    assert results["loss.item()"]["waits"] > 0, "a wait is not seen"


if __name__ == "__main__":
    main()
