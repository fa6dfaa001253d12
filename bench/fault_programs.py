"""The programs of bench/fault_injection.py, run with one fault in one operator call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, Callable, NamedTuple, Optional

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fastcheck
import healthy_models
from healthy_transformers import TRANSFORMERS

__all__ = ["COUNT", "PROGRAMS", "STEPS", "Call", "Fault", "consequences", "observed"]

PROGRAMS = {**healthy_models.MODELS, **TRANSFORMERS}
#: Faults are put into steps 1 to STEPS - 2, so that what lasts is read again.
STEPS = 5
#: An optimizer's count of steps, which is no tensor that module level reads.
COUNT = "count of steps"


class Call(NamedTuple):
    """One run of one operator in a step, counted from 0 in its pass."""

    op: str
    direction: str
    number: int


class Fault(NamedTuple):
    call: Call
    value: float
    step: int
    element: int  # modulo the number of elements


class Faulty(TorchDispatchMode):
    """Counts the operators of a step as the observer does, and sets an element of one result."""

    def __init__(self) -> None:
        super().__init__()
        self.fault: Optional[Fault] = None
        self.is_updating = False
        self.seen: Counter[tuple[str, str]] = Counter()
        self.calls: list[Call] = []

    def begin_step(self, fault: Optional[Fault]) -> None:
        self.fault = fault
        self.seen.clear()
        self.calls = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.replace("::", ".")
        if func._overloadname != "default":
            name += f".{func._overloadname}"
        direction = "optimizer" if self.is_updating else "forward"
        if torch._C._current_graph_task_id() != -1:
            direction = "backward"
        call = Call(name, direction, self.seen[name, direction])
        self.seen[name, direction] += 1
        self.calls.append(call)
        outputs = out if isinstance(out, (tuple, list)) else (out,)
        first = next((one for one in outputs if isinstance(one, torch.Tensor)), None)
        fault = self.fault
        if fault is not None and call == fault.call and first is not None:
            if first.is_floating_point() and first.numel():
                memory = first.detach().numpy()
                memory.flat[fault.element % memory.size] = fault.value
        return out


def run(name: str, fault: Optional[Fault], mode: Faulty, watch: Callable[[Any, Any], None]) -> None:
    """Trains the program for some steps; ``watch(loss, optimizer)`` before and after each update."""
    torch.manual_seed(0)
    model = PROGRAMS[name]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    watch(model, optimizer)
    with mode:
        for step in range(STEPS):
            mode.begin_step(fault if fault is not None and step == fault.step else None)
            optimizer.zero_grad()
            try:
                loss = model()
            except (RuntimeError, ValueError, IndexError):  # of torch, for a value that is not finite
                watch(torch.full((), float("nan")), optimizer)
                return
            loss.backward()
            watch(loss, optimizer)
            mode.is_updating = True
            optimizer.step()
            mode.is_updating = False
            watch(loss, optimizer)


def observed(name: str, fault: Optional[Fault], level: str) -> Any:
    """(the monitor after the run, the calls of the fault's step, or of the last one)."""
    mode = Faulty()
    monitors: list[Any] = []
    calls: list[Call] = []
    step = [0]

    def watch(first: Any, optimizer: Any) -> None:
        if not monitors:
            monitors.append(
                fastcheck.install(first, level=level, record="stats", overflow_nums=-1)
            )
            return
        if fault is None or mode.fault is not None:
            calls[:] = mode.calls
        step[0] += 1

    run(name, fault, mode, watch)
    monitors[0].remove()
    return monitors[0], calls


def consequences(name: str, fault: Fault) -> list[str]:
    """The names of what lasts or leaves and is not finite in the run without fastcheck, of the first
    time that anything is.
    """
    mode = Faulty()
    models: list[Any] = []
    found: list[str] = []

    def watch(first: Any, optimizer: Any) -> None:
        if not models:
            models.append(first)
            return
        if not found:
            tensors = [("loss", first), *lasting(models[0], optimizer)]
            found.extend(k for k, t in tensors if not bool(torch.isfinite(t.detach()).all()))

    run(name, fault, mode, watch)
    return found


def lasting(model: Any, optimizer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, their gradients and optimizer state, all by the parameter's name, the state's count
    of steps as COUNT, and buffers (but those of masks).
    """
    for name, parameter in model.named_parameters():
        yield name, parameter
        if parameter.grad is not None:
            yield name, parameter.grad
        for state in optimizer.state.get(parameter, {}).values():
            if isinstance(state, torch.Tensor):
                yield (name if state.dim() else COUNT), state
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point() and "mask" not in name:
            yield name, buffer
