"""Collects what records lack about an update: learning rates, None gradients, which modules ran.

Most updates are like the one before. A *close look* examines each parameter; any other update is
only compared with the last close look, list by list.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple, Optional

import numpy as np
import torch
from torch.nn.modules.batchnorm import _NormBase

from fastcheck.calls.module_calls import ModuleNode
from fastcheck.calls.stored import StoredTensor, parameter_ids
from fastcheck.utils.torch.readable import has_memory, is_materialised
from fastcheck.utils.torch.sharding import local
from fastcheck.verdict.step import Step

#: Updates in a row that have to agree before a warning; also the interval at which parameters that
#: no optimizer holds are looked for.
UPDATES = 10
# Updates without a close look, where nothing seems to have changed. A bias whose gradient was
# noise and is no longer, for one, looks as it did before.
_GLANCES = 100


class Watch:
    """The updates of one optimizer, as the last close look found them."""

    __slots__ = ("all_zero", "glances", "gradients", "is_close", "parameters", "rates", "zero")

    def __init__(self) -> None:
        self.parameters: Sequence[int] = ()
        self.gradients: Sequence[int] = ()
        self.rates: Sequence[bool] = ()
        self.glances = 0
        #: Whether every update is to be looked at closely. Set where the records arrive, which on
        #: a device is some updates later.
        self.is_close = True
        #: Of each gradient, in the order in which they were read: how many zeros are all of it,
        #: and, as one byte, whether all of it was 0.
        self.all_zero = np.zeros(0, np.int64)
        self.zero = b""


class ParameterDetails(NamedTuple):
    """Of each parameter, by the number of its site."""

    parameters: list[int]
    #: Trained, and at a learning rate that is not 0.
    is_live: list[bool]
    has_gradient: list[bool]
    #: Other ranks hold the rest of it.
    is_part: list[bool]


class UpdateInfo:
    """One update: the sequence numbers of its records, and what they lack."""

    __slots__ = (
        "buffers",
        "calls",
        "close",
        "early_gradients",
        "first",
        "first_gradient",
        "first_stray",
        "is_certain",
        "is_training",
        "stop",
        "watch",
    )

    def __init__(self, watch: Watch, *, is_certain: bool) -> None:
        self.watch = watch
        #: Whether an update is about to be applied; unknown where a training loop only ends a step
        #: by monitor.step().
        self.is_certain = is_certain
        #: Parameters and buffers, then gradients, then parameters with a gradient that no
        #: optimizer holds.
        self.first = self.first_gradient = self.first_stray = self.stop = 0
        #: The records of gradients that were read before they were clipped.
        self.early_gradients: Sequence[int] = ()
        self.close: Optional[ParameterDetails] = None
        #: Sites of the buffers that may be constants: the same list while they are the same.
        self.buffers: list[int] = []
        self.is_training: list[bool] = []
        #: How often the module of each has been called.
        self.calls: list[int] = []


class UpdateWatcher:
    """Makes the Looks. Every method expects the session's lock to be held."""

    def __init__(
        self, nodes: Sequence[ModuleNode], optimizers: Optional[Sequence[torch.optim.Optimizer]]
    ) -> None:
        self._nodes = nodes
        self._given = optimizers or ()
        self._watches: weakref.WeakKeyDictionary[torch.optim.Optimizer, Watch] = (
            weakref.WeakKeyDictionary()
        )
        self._watch_of_none = Watch()
        self._looks = 0
        # The optimizer, the step, and how many updates it had had by then.
        self._last = (0, -1, 0)
        self._buffers_read: list[int] = []
        self._buffers: list[int] = []
        self._buffer_nodes: list[ModuleNode] = []

    def begin(self, optimizer: Optional[torch.optim.Optimizer], step: Step) -> Optional[UpdateInfo]:
        """A Look at the update that is about to be applied. None for the second call of a step()
        that calls that of its base class.
        """
        last, self._last = self._last, (id(optimizer), step.index, step.update_count)
        if last == self._last:
            return None
        if optimizer is None:
            return UpdateInfo(self._watch_of_none, is_certain=False)
        watch = self._watches.get(optimizer)
        if watch is None:
            watch = self._watches[optimizer] = Watch()
        self._looks += 1
        return UpdateInfo(watch, is_certain=True)

    def has_turn_for_strays(self, look: UpdateInfo) -> bool:
        """Whether this is an update in which parameters that no optimizer holds are read."""
        return look.is_certain and self._looks % UPDATES == 0

    def unowned_parameters(self, parameters: Sequence[StoredTensor]) -> list[StoredTensor]:
        """Those with a gradient that no optimizer holds which has stepped or was given."""
        optimizers = (*self._watches, *self._given)
        held = {key for optimizer in optimizers for key in parameter_ids(optimizer)}
        return [
            stored
            for stored in parameters
            if id(stored[2]) not in held and stored[2].requires_grad and stored[2].grad is not None
        ]

    def look_at_parameters(
        self,
        look: UpdateInfo,
        optimizer: Optional[torch.optim.Optimizer],
        parameters: Sequence[StoredTensor],
        parameters_read: Sequence[int],
        gradients_read: Sequence[int],
    ) -> None:
        """``..._read``: the sites of what was read. Looks closely where anything is new."""
        watch = look.watch
        rates = [] if optimizer is None else [_is_still(group) for group in optimizer.param_groups]
        watch.glances += 1
        if (
            not watch.is_close
            and watch.glances < _GLANCES
            and watch.gradients == gradients_read
            and watch.parameters == parameters_read
            and watch.rates == rates
        ):
            return
        watch.parameters, watch.gradients, watch.rates = parameters_read, gradients_read, rates
        watch.glances = 0
        look.close = ParameterDetails([], [], [], [])
        still = _still(optimizer) if any(rates) and optimizer is not None else ()
        for node, name, parameter in parameters:
            # Of a copy in few bits the optimizer may hold the original, which moves unseen.
            is_copy = optimizer is None and parameter.dtype.itemsize < 4
            look.close.parameters.append(node.site("param", name, 0))
            # Under FSDP1 a parameter that is all on other ranks has no elements here.
            has_elements = is_materialised(parameter) and parameter.numel() > 0
            is_trained = parameter.requires_grad and has_elements
            look.close.is_live.append(is_trained and id(parameter) not in still and not is_copy)
            main = getattr(parameter, "main_grad", None)
            look.close.has_gradient.append(parameter.grad is not None or main is not None)
            look.close.is_part.append(local(parameter) is not parameter)

    def look_at_buffers(self, look: UpdateInfo, buffers_read: list[int]) -> None:
        """``buffers_read``: the sites of the buffers that were read."""
        if buffers_read != self._buffers_read:
            self._know_buffers(buffers_read)
        look.buffers = self._buffers
        for node in self._buffer_nodes:
            module = node.module()
            look.is_training.append(module is not None and module.training)
            look.calls.append(node.total_calls if node.is_callable else look.first)

    def _know_buffers(self, buffers_read: list[int]) -> None:
        self._buffers_read, self._buffers, self._buffer_nodes = buffers_read, [], []
        read = set(buffers_read)
        for node in self._nodes:
            module = node.module()
            # Statistics may stand still for as long as they like.
            if module is None or isinstance(module, _NormBase):
                continue
            for name in module._buffers:
                site = node.site("buffer", name, 0)
                if site in read:
                    self._buffers.append(site)
                    self._buffer_nodes.append(node)


class StaleCopies:
    """Optimizers that hold a copy of the model's parameters in place of these."""

    def __init__(self) -> None:
        # Updates without a gradient, of each that may be one.
        self._updates: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = (
            weakref.WeakKeyDictionary()
        )

    def look_at(
        self, optimizer: torch.optim.Optimizer, parameters: Sequence[StoredTensor]
    ) -> Optional[str]:
        """``optimizer``, which holds no parameter of the model, is about to step. What to warn of,
        once: it has stepped several times with the shapes of all trained parameters, and its own
        have no gradients while theirs do.
        """
        held = [p for group in optimizer.param_groups for p in group["params"]]
        count = self._updates.get(optimizer, 0)
        if count >= UPDATES or any(p.grad is not None for p in held):
            return None
        trained = [p for _, _, p in parameters if p.requires_grad]
        has_gradients = bool(trained) and all(p.grad is not None for p in trained)
        if not has_gradients or Counter(map(_form, held)) != Counter(map(_form, trained)):
            return None
        memory = {p.untyped_storage().data_ptr() for p in trained if has_memory(p)}
        if any(has_memory(p) and p.untyped_storage().data_ptr() in memory for p in held):
            return None  # other objects for the same values
        count = self._updates[optimizer] = count + 1
        if count < UPDATES:
            return None
        return (
            f"an optimizer that holds none of the model's parameters: those of "
            f"{type(optimizer).__name__} have the same shapes, and had no gradients in {count} "
            "updates, while the model's had. Was it made before the model was copied, converted or "
            "replaced? Give it the parameters of the model that is trained"
        )


def _form(parameter: torch.Tensor) -> tuple[int, ...]:
    return tuple(parameter.shape)


def _still(optimizer: torch.optim.Optimizer) -> set[int]:
    """The parameters whose learning rate is 0, or on a device, where asking would wait."""
    groups = filter(_is_still, optimizer.param_groups)
    return {id(parameter) for group in groups for parameter in group["params"]}


def _is_still(group: dict[str, object]) -> bool:
    rate = group.get("lr")
    if isinstance(rate, torch.Tensor) and not rate.is_cpu:
        return True
    return rate is not None and not rate
