"""Notes at each update what records lack, on the host: learning rates, gradients that
are None, which modules ran.

Most updates are like the update before: a *close look* examines each parameter, and any other
update is only compared with the last close look, list by list. Once every weight has moved, an
update is only checked for gradients that are all 0 and were not before. docs/guide.md lists the
cases without a warning.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Collection, Mapping, Sequence
from itertools import starmap
from types import MappingProxyType
from typing import NamedTuple, Optional

import numpy as np
import torch
from torch.nn.modules.batchnorm import _NormBase

from fastcheck.calls.module_calls import ModuleNode
from fastcheck.calls.stored import StoredTensor, parameter_ids, parameter_states
from fastcheck.statistics.functions import stats
from fastcheck.utils.torch.own_operators import no_grad, unobserved
from fastcheck.utils.torch.readable import can_read, has_memory
from fastcheck.utils.torch.sharding import local
from fastcheck.utils.torch.transforms import unwrapped
from fastcheck.verdict.step import Step

#: Updates in a row that have to agree before a warning; also the interval at which parameters that
#: no optimizer holds are looked for.
UPDATES = 10
# Updates without a close look, where nothing seems to have changed. A bias whose gradient was
# noise and is no longer, for example, looks as it did before.
_GLANCES = 100


class ObservedUpdates:
    """The updates of one optimizer, as the last close look found them."""

    def __init__(self) -> None:
        self.parameters: Sequence[int] = ()
        self.gradients: Sequence[int] = ()
        self.rates: Sequence[bool] = ()
        #: The number of calls of each parameter's module until then, by the parameter's site.
        self.calls: dict[int, int] = {}
        self.glances = 0
        #: True if every update is to be looked at closely. Set where the records arrive, which on a
        #: device is some updates later.
        self.is_close = True
        #: The number of zeros that would be all of a gradient, in the order in which gradients were
        #: read, and, as one byte each, if all of it was 0.
        self.all_zero = np.zeros(0, np.int64)
        self.zero = b""


class NoDerivative(NamedTuple):
    """Operators whose derivative is 0, and what to do instead."""

    operators: str
    remedy: str


class ParameterDetails(NamedTuple):
    """Details of each parameter; ``parameters`` holds the numbers of their sites."""

    parameters: list[int]
    #: Trained, and at a learning rate that is not 0.
    is_live: list[bool]
    has_gradient: list[bool]
    #: Other ranks hold the rest of it.
    is_part: list[bool]
    #: Its module may have been called since the last close look.
    is_called: list[bool]


class UpdateInfo:
    """An update: the sequence numbers of its records, and what they lack."""

    #: True if parameters that no optimizer holds are read in this update.
    has_turn_for_strays = False
    #: Parameters and buffers, then gradients, then parameters with a gradient that no optimizer
    #: holds.
    first = first_gradient = first_stray = stop = 0
    #: The records of gradients that were read before they were clipped.
    early_gradients: Sequence[int] = ()
    close: Optional[ParameterDetails] = None
    #: False if no backward() was called so far.
    has_backward = True
    #: Operators that alone lead to a parameter in the graph of the loss, and have a derivative of
    #: 0, by site.
    without_derivative: Mapping[int, NoDerivative] = MappingProxyType({})
    #: Sites of parameters that no optimizer holds, of the shape of one that is held and is in no
    #: model.
    replaced: Collection[int] = ()
    #: Sites of the buffers that may be constants: the same list while they are the same.
    buffers: Sequence[int] = ()
    is_training: Sequence[bool] = ()
    #: The number of calls of the module of each.
    calls: Sequence[int] = ()
    #: Sites of those that a forward pass has written to; None: not known.
    written: Optional[set[int]] = None

    def __init__(self, watch: ObservedUpdates, *, is_certain: bool) -> None:
        self.watch = watch
        #: True if an update is about to be applied; unknown if a training loop only ends a step by
        #: monitor.step().
        self.is_certain = is_certain


class UpdateWatcher:
    """Makes the Looks. Every method expects the session's lock to be held."""

    def __init__(
        self, nodes: Sequence[ModuleNode], optimizers: Optional[Sequence[torch.optim.Optimizer]]
    ) -> None:
        self._nodes = nodes
        self._given = optimizers or ()
        self._watches: weakref.WeakKeyDictionary[torch.optim.Optimizer, ObservedUpdates] = (
            weakref.WeakKeyDictionary()
        )
        self._watch_of_none = ObservedUpdates()
        self._looks = 0
        # The optimizer, the step, and how many updates it had had by then.
        self._last = (0, -1, 0)
        self._buffers_read: list[int] = []
        self._buffers: list[int] = []
        #: The modules and names of the buffers that may be constants.
        self.places: list[tuple[ModuleNode, str]] = []
        # The versions of the buffers where a pass begins, and the sites of those that passes have
        # changed since the last update; None: no pass has ended.
        self._versions: list[tuple[int, int]] = []
        self._written: Optional[set[int]] = None

    def begin(self, optimizer: Optional[torch.optim.Optimizer], step: Step) -> Optional[UpdateInfo]:
        """A Look at the update that is about to be applied. None for the second call of a step()
        that calls that of its base class, and where nothing is left of the gradients.
        """
        last, self._last = self._last, (id(optimizer), step.index, step.update.count)
        if last == self._last or step.update.is_clipped_away:
            return None
        if optimizer is None:
            return UpdateInfo(self._watch_of_none, is_certain=False)
        watch = self._watches.get(optimizer)
        if watch is None:
            watch = self._watches[optimizer] = ObservedUpdates()
        self._looks += 1
        look = UpdateInfo(watch, is_certain=True)
        look.has_turn_for_strays = self._looks % UPDATES == 0
        return look

    def unowned_parameters(self, parameters: Sequence[StoredTensor]) -> list[StoredTensor]:
        """The parameters with a gradient that no optimizer holds which has stepped or was given."""
        optimizers = (*self._watches, *self._given)
        held = {key for optimizer in optimizers for key in parameter_ids(optimizer)}
        return [
            stored
            for stored in parameters
            if id(stored[2]) not in held and stored[2].requires_grad and stored[2].grad is not None
        ]

    def replaced(
        self, strays: Sequence[StoredTensor], parameters: Sequence[StoredTensor]
    ) -> set[int]:
        """The sites of those of ``strays`` that may have come into the model in place of what an
        optimizer holds: ``parameters``, those of the model, are not it.
        """
        own = {id(parameter) for _, _, parameter in parameters}
        groups = (g for optimizer in (*self._watches, *self._given) for g in optimizer.param_groups)
        shapes = {tuple(p.shape) for g in groups for p in g["params"] if id(p) not in own}
        return {node.site("param", n, 0) for node, n, p in strays if tuple(p.shape) in shapes}

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
        rates = [] if optimizer is None else list(map(is_still, optimizer.param_groups))
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
        is_live, has_gradient, is_part = parameter_states(parameters)
        if optimizer is None:
            # It may hold the original of a copy in few bits, which moves unseen.
            is_wide = [parameter.dtype.itemsize >= 4 for _, _, parameter in parameters]
            is_live = list(map(operator.and_, is_live, is_wide))
        elif any(rates):
            still = _still(optimizer)
            moves = [id(parameter) not in still for _, _, parameter in parameters]
            is_live = list(map(operator.and_, is_live, moves))
        # Their sites are known, unless one could not be read.
        sites = list(parameters_read)
        if len(sites) < len(parameters):
            sites = [node.site("param", name, 0) for node, name, _ in parameters]
        before, calls = watch.calls, [node.total_calls for node, _, _ in parameters]
        watch.calls = dict(zip(sites, calls))
        is_called = [
            before.get(site) != count
            or not (node.is_callable and node.enabled and node.is_selected)
            for (node, _, _), site, count in zip(parameters, sites, calls)
        ]
        if len(self._watches) == 1 and not any(has_gradient):
            is_called = [True] * len(sites)  # functions of torch.func may stand for the modules
        look.close = ParameterDetails(sites, is_live, has_gradient, is_part, is_called)

    def look_at_buffers(self, look: UpdateInfo, buffers_read: list[int]) -> None:
        """``buffers_read``: the sites of the buffers that were read."""
        if buffers_read != self._buffers_read:
            self._know_buffers(buffers_read)
        look.buffers = self._buffers
        is_training: list[bool] = []
        calls: list[int] = []
        for node, _ in self.places:
            module = node.module()
            is_training.append(module is not None and module.training)
            calls.append(node.total_calls if node.is_callable else look.first)
        look.is_training, look.calls = is_training, calls
        look.written, self._written = self._written, None

    def pass_began(self) -> None:
        """A forward enters the observed modules from outside."""
        self._versions = list(starmap(_version, self.places))

    def pass_ended(self) -> None:
        """The forward has left them."""
        now = starmap(_version, self.places)
        written = self._written = self._written or set()
        for site, (was, before), (held, after) in zip(self._buffers, self._versions, now):
            if was == held and before != after:
                written.add(site)

    def _know_buffers(self, buffers_read: list[int]) -> None:
        self._buffers_read, self._buffers = buffers_read, []
        self.places, self._versions = [], []
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
                    self.places.append((node, name))


def _version(node: ModuleNode, name: str) -> tuple[int, int]:
    """Numbers of a buffer, of which the first changes where it is replaced, and the second where it
    is written to.
    """
    module = node.module()
    buffer = None if module is None else module._buffers.get(name)
    if buffer is None or buffer.is_inference():
        return id(buffer), 0
    return id(buffer), buffer._version


def checksums(parameters: Sequence[torch.Tensor]) -> list[int]:
    """The checksum of each tensor, 0 where it can't be read; waits for a device."""
    values = (unwrapped(local(parameter)) for parameter in parameters)
    with unobserved(), no_grad():
        return [
            int(stats(v).record["checksum"]) if can_read(v) and has_memory(v) else 0 for v in values
        ]


def _still(optimizer: torch.optim.Optimizer) -> set[int]:
    """The parameters whose learning rate is 0, or on a device, where asking would wait."""
    groups = filter(is_still, optimizer.param_groups)
    return {id(parameter) for group in groups for parameter in group["params"]}


def is_still(group: dict[str, object]) -> bool:
    rate = group.get("lr")
    if type(rate) is not float and isinstance(rate, torch.Tensor) and not rate.is_cpu:
        return True
    return rate is not None and not rate


# Updates where nothing of what an optimizer holds has moved: perhaps it does nothing yet, on
# purpose.
UPDATES_OF_NONE = 100
