"""Keeps a bad update out of the weights without a host sync, by ``found_inf`` of fused optimizers.

torch's fused optimizers read an attribute ``found_inf``, a 0-dim float32 tensor on the device, and
leave parameters and state alone where it is 1: that is how GradScaler skips their updates. Here it
is set for one step at a time, from the gradients that this very step is about to use.

The kernels compare with exactly 1, and step counts go back by ``found_inf``. So the word is always
0 or 1, also where GradScaler adds up one per device to 2, which torch alone would not skip.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Callable, Optional

import torch
from torch import Tensor
from torch.optim import Optimizer

from fastcheck.errors import UnsupportedTensorError
from fastcheck.extension import status
from fastcheck.utils.torch.own_operators import no_grad
from fastcheck.utils.torch.versions import is_compiling

#: The classes with fused kernels, and where the step() is defined that hands them found_inf.
_FUSED_CLASSES = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad)
_FUSED_MODULES = frozenset(f"torch.optim.{name}" for name in ("adam", "adamw", "sgd", "adagrad"))

#: Device types whose fused kernels are known to look at found_inf, and a type whose kernels take it
#: and don't look. Every other device is tried once, by learn().
_HONOURED_ON = frozenset({"cpu", "cuda", "xpu"})
_IGNORED_ON = frozenset({"mps"})
#: Optimizers that look at it on the host: torch_npu's SGD would make every update wait (2.13).
_HOST_LOOKS = frozenset({(torch.optim.SGD, "npu")})
_tried: dict[tuple[type, str], bool] = {}

_ABSENT: Any = object()


@dataclass(eq=False)
class _Update:
    """An optimizer step under way, shared by all guards of the process."""

    word: Tensor
    #: The attribute before: the GradScaler's tensor, say, or _ABSENT.
    previous: Any
    #: The parameters whose momentum buffer this step makes.
    momentum_starts: list[Tensor]
    #: Keys of the guards that have yet to see this step end.
    holders: set[int] = field(default_factory=set)


_under_way: weakref.WeakKeyDictionary[Optimizer, _Update] = weakref.WeakKeyDictionary()
_keys = itertools.count()


class UpdateGuard:
    """Lets updates with a non-finite gradient be skipped, by the optimizer itself and on the
    device.

    Args:
        found_nonfinite: takes tensors of one device and returns a new 0-dim float32 tensor there,
            1.0 where any of them holds a NaN or an infinity, else 0.0.
        combine: called with the word and the optimizer before the step reads it; may change the
            word in place, in stream order, to 0.0 or 1.0 (a MAX over ranks). With it, a rank
            whose gradients are all None takes part too.

    Never synchronises. Not thread-safe: one optimizer is stepped by one thread at a time.
    """

    def __init__(
        self,
        found_nonfinite: Callable[[Sequence[Tensor]], Tensor],
        combine: Optional[Callable[[Tensor, Optimizer], None]] = None,
    ) -> None:
        self._found_nonfinite = found_nonfinite
        self._combine = combine
        self._key = next(_keys)
        #: The reason why the last before_update() left its step unguarded and what to do; None: it
        #: did not.
        self.why_unguarded: Optional[str] = None
        self._finalizer = weakref.finalize(self, _let_go, self._key)
        self._finalizer.atexit = False

    @staticmethod
    def learn(devices: Iterable[torch.device]) -> None:
        """Tries each fused class on each device, which synchronises: for install()."""
        for device in devices:
            for kind in _FUSED_CLASSES:
                _try(kind, device)

    @staticmethod
    def scaler_found_inf(optimizer: Optimizer) -> Any:
        """``optimizer.found_inf`` as if there were no guards: a GradScaler's, or None."""
        word = getattr(optimizer, "found_inf", None)
        update = None if word is None else _under_way.get(optimizer)
        if update is None or word is not update.word:
            return word
        return None if update.previous is _ABSENT else update.previous

    def before_update(self, optimizer: Optimizer) -> Optional[Tensor]:
        """Sets ``optimizer.found_inf`` for the step that begins now, or for what a step does with
        the gradients that its closure has just made.

        Returns:
            The word that decides it, 0-dim float32 on the device, 1.0: skipped. It includes what a
            GradScaler had found. None where the step is unguarded or has no gradients;
            ``why_unguarded`` tells which.
        """
        update = _under_way.get(optimizer)
        if update is not None and self._key in update.holders:
            # A step that raised never came to its post-hook.
            _put_back(optimizer, update)
            update = None
        self.why_unguarded = _why_not(optimizer)
        if self.why_unguarded is not None:
            return None
        is_first = update is None
        with no_grad():
            if update is None:
                update = self._begin(optimizer)
            if update is None:
                return None
            if self._combine is not None:
                self._combine(update.word, optimizer)
        update.holders.add(self._key)
        if is_first:
            _under_way[optimizer] = update
            holder: Any = optimizer  # the attribute is a convention, which no class declares
            holder.found_inf = update.word
        return update.word

    def after_update(self, optimizer: Optimizer) -> None:
        """Puts the attribute back as it was. Does nothing after an unguarded step."""
        update = _under_way.get(optimizer)
        if update is None or self._key not in update.holders:
            return
        update.holders.discard(self._key)
        if update.holders:
            return
        _put_back(optimizer, update)
        if update.momentum_starts:
            with no_grad():
                _start_momentum(optimizer, update)

    def close(self) -> None:
        """Takes the attribute back from steps that raised: after this nothing is left of it.

        Also when the guard itself is gone. Without it a leftover 1.0 would skip every later update.
        """
        self._finalizer()

    def _begin(self, optimizer: Optimizer) -> Optional[_Update]:
        gradients = gradients_by_device(optimizer)
        if not gradients and self._combine is None:
            return None
        self.why_unguarded = _device_problem(_torch_class(optimizer), gradients)
        if self.why_unguarded is not None:
            return None
        try:
            word = self._word(optimizer, gradients)
        except UnsupportedTensorError as error:
            self.why_unguarded = f"its gradients can't be read: {error}"
            return None
        given = getattr(optimizer, "found_inf", None)
        if isinstance(given, Tensor):
            # Made 1.0 from any number that is not zero; theirs is left as it is.
            word.logical_or_(given.reshape(()).to(word.device, non_blocking=True))
        elif given:
            word.fill_(1.0)
        previous = vars(optimizer).get("found_inf", _ABSENT)
        return _Update(word, previous, _momentum_starts(optimizer))

    def _word(self, optimizer: Optimizer, gradients: dict[torch.device, list[Tensor]]) -> Tensor:
        words = [self._found_nonfinite(tensors) for tensors in gradients.values()]
        if not words:
            parameters = (p for group in optimizer.param_groups for p in group["params"])
            device = next((p.device for p in parameters), torch.device("cpu"))
            return torch.zeros((), dtype=torch.float32, device=device)
        for other in words[1:]:
            words[0].logical_or_(other.to(words[0].device, non_blocking=True))
        return words[0]


def gradients_by_device(optimizer: Optimizer) -> dict[torch.device, list[Tensor]]:
    """The gradients that the step will use, by device: the values of sparse gradients, the local
    shard of DTensors.
    """
    ordinary = status.module and status.module.gradients_in(optimizer.param_groups)
    if ordinary:
        return {ordinary[0].device: ordinary}
    gradients: dict[torch.device, list[Tensor]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is None:
                continue
            if type(gradient) is not Tensor and hasattr(gradient, "to_local"):
                gradient = gradient.to_local()
            if gradient.layout is torch.sparse_coo:
                gradient = gradient._values()
            gradients.setdefault(gradient.device, []).append(gradient)
    return gradients


def has_step_of_torch(optimizer: Optimizer) -> bool:
    """True if its class keeps the ``step()`` of an optimizer of torch.optim."""
    module: str = inspect.unwrap(type(optimizer).step).__module__
    return module.startswith("torch.optim.")


def _momentum_starts(optimizer: Optimizer) -> list[Tensor]:
    # Fused SGD allocates its momentum buffers uninitialised and has the kernel fill them, which
    # returns before that where it skips. Adam and Adagrad start theirs from values.
    if not isinstance(optimizer, torch.optim.SGD):
        return []
    return [
        parameter
        for group in optimizer.param_groups
        if group["momentum"] != 0
        for parameter in group["params"]
        if parameter.grad is not None and _momentum_buffer(optimizer, parameter) is None
    ]


def _momentum_buffer(optimizer: Optimizer, parameter: Tensor) -> Optional[Tensor]:
    # Not state[parameter]: a defaultdict, which would make an entry.
    buffer: Optional[Tensor] = optimizer.state.get(parameter, {}).get("momentum_buffer")
    return buffer


def _start_momentum(optimizer: Optimizer, update: _Update) -> None:
    """Zeroes the new momentum buffers where the step was skipped; else not a bit of them changes.

    Zeros given to the kernel beforehand would take it off its first-step path: dampening would
    apply to the first gradient, and -0.0 would become +0.0.
    """
    skipped = update.word != 0
    for parameter in update.momentum_starts:
        buffer = _momentum_buffer(optimizer, parameter)
        if buffer is not None:
            buffer.masked_fill_(skipped.to(buffer.device, non_blocking=True), 0.0)


def _put_back(optimizer: Optimizer, update: _Update) -> None:
    if _under_way.get(optimizer) is update:
        del _under_way[optimizer]
    if vars(optimizer).get("found_inf", _ABSENT) is not update.word:
        return  # someone has set it or taken it away since: theirs stays
    holder: Any = optimizer
    if update.previous is _ABSENT:
        del holder.found_inf
    else:
        holder.found_inf = update.previous


def _let_go(key: int) -> None:
    for optimizer, update in list(_under_way.items()):
        if key in update.holders:
            update.holders.discard(key)
            if not update.holders:
                _put_back(optimizer, update)


@functools.lru_cache(maxsize=64)
def _is_fused(step: Callable[..., Any]) -> bool:
    """True if it is a step() of torch's that hands found_inf to fused kernels."""
    return inspect.unwrap(step).__module__ in _FUSED_MODULES


def _why_not(optimizer: Optimizer) -> Optional[str]:
    """The reason that keeps the optimizer, or this step of it, from being guarded, whatever its
    devices.
    """
    if is_compiling():
        return 'its step is being compiled; use sync="step"'
    name = type(optimizer).__name__
    if not _is_fused(type(optimizer).step):
        return _contract_problem(optimizer, name)
    for index, group in enumerate(optimizer.param_groups):
        if group.get("foreach"):
            return _not_fused(name, index, "its foreach implementation")
        if not group.get("fused"):
            return _not_fused(name, index, "its foreach or plain implementation")
    return None


def _not_fused(name: str, index: int, what: str) -> str:
    return (
        f"parameter group {index} of {name} runs {what}, which can skip an update only on the "
        'host; pass fused=True to the optimizer (for all its groups), or use sync="step"'
    )


def _contract_problem(optimizer: Optimizer, name: str) -> Optional[str]:
    """The reason why a step() that is not one of torch's can't be guarded: it does not declare that
    it reads found_inf, or takes a grad_scaler. None if it can.
    """
    # The attribute of the class itself is read where it inherits from a fused optimizer: their
    # __init__ sets it for torch's step(), which this class has replaced.
    inherits = isinstance(optimizer, _FUSED_CLASSES)
    declared = getattr(
        type(optimizer) if inherits else optimizer, "_step_supports_amp_scaling", False
    )
    if not declared:
        if type(optimizer).__module__.startswith("torch.optim"):
            return (
                f"{name} has no fused implementation, which alone can skip an update on the "
                'device; use sync="step", or Adam, AdamW, SGD or Adagrad with fused=True'
            )
        return (
            f"{name} has a step() of its own; where that leaves everything alone for "
            "self.found_inf == 1, say so by _step_supports_amp_scaling = True on the class, else "
            'use sync="step"'
        )
    if "grad_scaler" in inspect.signature(type(optimizer).step).parameters:
        return f'{name} takes a grad_scaler argument instead of reading found_inf; use sync="step"'
    return None


def _torch_class(optimizer: Optimizer) -> type[Optimizer]:
    """The class of torch whose fused kernels the optimizer runs; Optimizer where none is known."""
    if not _is_fused(type(optimizer).step):
        return Optimizer
    return next((base for base in _FUSED_CLASSES if isinstance(optimizer, base)), Optimizer)


def _try(kind: type[Optimizer], device: torch.device) -> None:
    key = (kind, device.type)
    if device.type in _HONOURED_ON | _IGNORED_ON or key in _HOST_LOOKS:
        return
    if key not in _tried:
        _tried[key] = _honours_found_inf(kind, device)


def _honours_found_inf(kind: Any, device: torch.device) -> bool:
    """True if the fused kernel of ``kind`` leaves one element alone. Synchronises."""
    parameter = torch.nn.Parameter(torch.ones(1, device=device))
    parameter.grad = torch.ones(1, device=device)
    optimizer = kind([parameter], lr=1.0, fused=True)
    optimizer.found_inf = torch.ones((), device=device)
    try:
        with no_grad():
            # Without its hooks, which are for the steps of the training loop.
            inspect.unwrap(kind.step)(optimizer)
        return parameter.item() == 1.0
    except RuntimeError:  # no such kernel: the optimizer's own step is going to say so
        return False


def _device_problem(kind: type, devices: Iterable[torch.device]) -> Optional[str]:
    types = {device.type for device in devices}
    for name in sorted(types):
        if name in _IGNORED_ON or not _tried.get((kind, name), True):
            return f'the fused kernel of {name} does not look at found_inf; use sync="step"'
        if (kind, name) in _HOST_LOOKS:
            return f'{name} reads found_inf on the host, and would wait for it; use sync="step"'
    if "cpu" in types and len(types) > 1:
        return (
            "it updates parameters on the CPU and on an accelerator, where one would have to wait "
            'for the other; give each an optimizer of its own, or use sync="step"'
        )
    return None
