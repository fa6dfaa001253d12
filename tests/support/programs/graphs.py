"""Helpers shared by the tests of captured graphs on the fake accelerator and on a GPU: training on
a fixed input buffer, with a graph and without.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Callable, Optional

import numpy as np
import torch
from torch import nn

from fastcheck import _C
from support.programs.training import batches

WARM_UP = 2


@contextmanager
def capturing(graph: Any, device: str, stream: Any = None) -> Iterator[None]:
    """Captures what is done within it, on a stream of its own."""
    module = getattr(torch, device)
    with ExitStack() as stack:
        if device == "cuda" and isinstance(graph, torch.cuda.CUDAGraph):
            stack.enter_context(torch.cuda.graph(graph, stream=stream))
        else:
            stack.enter_context(module.stream(stream or module.Stream()))
            stack.enter_context(graph)
        yield


def new_graph(device: str) -> Any:
    return torch.cuda.CUDAGraph() if device == "cuda" else torch.accelerator.Graph()


def batches_on(device: str, count: int, *bad: int, seed: int = 3) -> list[torch.Tensor]:
    """Batches, with a NaN in these."""
    found = list(batches(count, seed=seed))
    for index in bad:
        found[index][1, 2] = float("nan")
    there = [x.to(device) for x in found]
    getattr(torch, device).synchronize()
    return there


def guarded(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01, fused=True)


class Training:
    """A model, and one step of it that takes its batch from a fixed place."""

    def __init__(
        self,
        model: nn.Module,
        device: str,
        optimizer: Optional[Callable[[Any], torch.optim.Optimizer]] = None,
        shape: Sequence[int] = (4, 8),
    ) -> None:
        self.device = device
        self.module: Any = getattr(torch, device)
        self.model = model.to(device)
        make = optimizer or (lambda parameters: torch.optim.SGD(parameters, lr=0.01))
        self.optimizer = make(self.model.parameters())
        self.x = torch.zeros(*shape, device=device)
        self.loss = torch.zeros((), device=device)
        self.graph: Any = None
        self.stream: Any = None

    def backward(self) -> None:
        self.optimizer.zero_grad()
        loss = self.model(self.x).square().mean()
        loss.backward()
        self.loss.copy_(loss.detach())

    def step(self) -> None:
        self.backward()
        self.optimizer.step()

    def warm_up(self, step: Optional[Callable[[], None]] = None, count: int = WARM_UP) -> None:
        """On a stream of its own, as torch asks for."""
        self.stream = self.module.Stream()
        self.stream.wait_stream(self.module.current_stream())  # what zeroes x may be under way
        with self.module.stream(self.stream):
            for x in batches(count, *self.x.shape, seed=77):
                self.x.copy_(x)
                (step or self.step)()
        self.module.synchronize()

    def capture(self, step: Optional[Callable[[], None]] = None) -> Any:
        self.graph = new_graph(self.device)
        with capturing(self.graph, self.device, self.stream):
            (step or self.step)()
        return self.graph

    def run(
        self, data: Sequence[torch.Tensor], step: Optional[Callable[[], object]] = None
    ) -> list[torch.Tensor]:
        """A replay (or a step) for each batch; the losses, on the device."""
        losses = []
        for x in data:
            self.x.copy_(x)
            (step or self.graph.replay)()
            losses.append(self.loss.clone())
        return losses


def of_replays(monitor: Any) -> np.ndarray:
    """The records, without the numbers that the host reads where it runs a step itself."""
    numbers = ("learning_rate", "loss_scale")
    sites = [k for k, site in enumerate(monitor.sites) if site.role in numbers]
    records: np.ndarray = monitor.records()
    return records[~np.isin(records["site"], sites)]


def said(monitor: Any, first_step: int = WARM_UP) -> list[tuple[int, str, bytes]]:
    """The records from this step on, without the fields that differ between two equal runs."""
    records = of_replays(monitor)
    records = records[records["step"] >= first_step].copy()
    sites = [str(monitor.sites[int(site)]) for site in records["site"]]
    records["site"] = records["seq"] = 0
    return [(int(r["step"]), site, r.tobytes()) for site, r in zip(sites, records)]


def assert_records_what_is_there(training: Training, monitor: Any, replays: int) -> None:
    """What each of so many replays leaves are the CPU's records of what it left in memory: of the
    batch, of the output and of every gradient, byte for byte, under the number of its step. One
    batch in ten has an infinity.
    """
    kept: list[dict[tuple[str, str], torch.Tensor]] = []
    outputs: list[torch.Tensor] = []
    head = [module for module in training.model.modules() if isinstance(module, nn.Linear)][-1]
    handle = head.register_forward_hook(lambda module, args, output: outputs.append(output))
    training.capture()
    handle.remove()
    names = {id(p): name for name, p in training.model.named_parameters()}
    path = next(name for name, module in training.model.named_modules() if module is head)
    first = monitor.step_index + 1
    for index, x in enumerate(batches(replays, *training.x.shape, seed=11)):
        if index % 10 == 4:
            x.view(-1)[3] = float("inf")
        training.x.copy_(x)
        training.graph.replay()
        there = {("input", ""): training.x, ("output", path): outputs[0]}
        for p in training.model.parameters():
            assert p.grad is not None
            there["param_grad", names[id(p)]] = p.grad
        kept.append({key: tensor.detach().clone() for key, tensor in there.items()})
    monitor.flush()
    sites = list(monitor.sites)
    found: dict[tuple[int, str, str], bytes] = {}
    for record in monitor.records():
        site = sites[int(record["site"])]
        name = f"{site.module}.{site.label}" if site.role == "param_grad" else site.module
        found[int(record["step"]), site.role, name] = record.tobytes()[:112]
    for index, there in enumerate(kept):
        for (role, name), tensor in there.items():
            wanted = bytes(_C.record(tensor.cpu()).numpy())[:112]
            assert found[first + index, role, name] == wanted, (index, role, name)
    bad = {first + index for index in range(replays) if index % 10 == 4}
    assert {event.step for event in monitor.events} == bad
    assert monitor.event_count == len(bad)
