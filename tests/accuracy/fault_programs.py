"""The programs of fault_injection.py, run with one fault in one operator call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any, Callable, NamedTuple, Optional

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fastcheck
from accuracy import healthy_models
from accuracy.healthy_transformers import TRANSFORMERS

__all__ = ["PROGRAMS", "STEPS", "Call", "Fault", "Lasting", "consequences", "observed"]

PROGRAMS = {**healthy_models.MODELS, **TRANSFORMERS}
#: Faults are put into steps 1 to STEPS - 2, so that what lasts is read again.
STEPS = 5


class Call(NamedTuple):
    """One run of one operator in a step, counted from 0 in its pass."""

    op: str
    direction: str
    number: int


class Lasting(NamedTuple):
    """What lasts or leaves. ``name``: of the parameter that it belongs to, or of the buffer."""

    kind: str  # loss, parameter, gradient, buffer, state
    name: str


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
        if fault is None or call != fault.call or first is None:
            return out
        if first.is_floating_point() and first.numel():
            memory = first.detach().numpy()
            memory.flat[fault.element % memory.size] = fault.value
        return out


def run(name: str, fault: Optional[Fault], mode: Faulty, watch: Callable[[Any, Any], None]) -> None:
    """Trains for some steps. ``watch(model, optimizer)`` is called, then ``watch(loss, optimizer)``
    before and after each update.
    """
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
            except (
                RuntimeError,
                ValueError,
                IndexError,
            ):  # of torch, for a value that is not finite
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
            monitors.append(fastcheck.install(first, level=level, record="stats", overflow_nums=-1))
            return
        if fault is None or mode.fault is not None:
            calls[:] = mode.calls
        step[0] += 1

    run(name, fault, mode, watch)
    monitors[0].remove()
    return monitors[0], calls


def consequences(name: str, fault: Fault) -> list[Lasting]:
    """What lasts or leaves and is not finite in the run without fastcheck, at the first time that
    anything is.
    """
    mode = Faulty()
    models: list[Any] = []
    found: list[Lasting] = []

    def watch(first: Any, optimizer: Any) -> None:
        if not models:
            models.append(first)
            return
        if not found:
            tensors = [(Lasting("loss", ""), first), *lasting(models[0], optimizer)]
            found.extend(what for what, t in tensors if not bool(torch.isfinite(t.detach()).all()))

    run(name, fault, mode, watch)
    return found


def lasting(model: Any, optimizer: Any) -> Iterator[tuple[Lasting, torch.Tensor]]:
    """Buffers of masks are left out: their infinities are meant. A shared parameter comes by each
    of its names.
    """
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield Lasting("parameter", name), parameter
        if parameter.grad is not None:
            yield Lasting("gradient", name), parameter.grad
        for state in optimizer.state.get(parameter, {}).values():
            if isinstance(state, torch.Tensor):
                yield Lasting("state", name), state
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point() and "mask" not in name:
            yield Lasting("buffer", name), buffer
