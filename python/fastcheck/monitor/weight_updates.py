"""Detects weights that do not move and missing or zero gradients, by checksums before each update.

UpdateWatcher notes what records lack, on the host: learning rates, None gradients, which modules
ran. Most updates are like the update before: a *close look* examines each parameter, and any other
update is only compared with the last close look, list by list. The rest is decided where the
records arrive, in NumPy. Once every weight has moved, an update is only checked for gradients that
are all 0 and were not before. docs/guide.md lists the cases without a warning.
"""

from __future__ import annotations

import math
import operator
import re
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import starmap
from types import MappingProxyType
from typing import Callable, NamedTuple, Optional

import numpy as np
import torch
from torch.nn.modules.batchnorm import _NormBase

from fastcheck.calls.module_calls import ModuleNode
from fastcheck.calls.stored import StoredTensor, parameter_ids, parameter_states
from fastcheck.log.history import History, joined
from fastcheck.record.format import DTYPES, RECORD_DTYPE, Depth, Flag
from fastcheck.record.site import SiteTable
from fastcheck.record.statistics import component_counts
from fastcheck.statistics.functions import stats
from fastcheck.utils.text.layout import listed
from fastcheck.utils.torch.own_operators import no_grad, unobserved
from fastcheck.utils.torch.readable import can_read, has_memory, may_wait
from fastcheck.utils.torch.sharding import local
from fastcheck.utils.torch.transforms import unwrapped
from fastcheck.verdict.step import Step
from fastcheck.watch.columns import Columns

from .zero_gradients import where_zero

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


def _read(tensors: Sequence[Optional[torch.Tensor]], sites: Sequence[int]) -> np.ndarray:
    """The records of those of these tensors that can be read, of these sites."""
    records = []
    with unobserved(), no_grad():
        for tensor, site in zip(tensors, sites):
            values = None if tensor is None else unwrapped(local(tensor))
            if values is not None and can_read(values) and has_memory(values):
                records.append(stats(values).record.copy())
                records[-1]["site"] = site
    return np.array(records, RECORD_DTYPE)


def _still(optimizer: torch.optim.Optimizer) -> set[int]:
    """The parameters whose learning rate is 0, or on a device, where asking would wait."""
    groups = filter(is_still, optimizer.param_groups)
    return {id(parameter) for group in groups for parameter in group["params"]}


def is_still(group: dict[str, object]) -> bool:
    rate = group.get("lr")
    if type(rate) is not float and isinstance(rate, torch.Tensor) and not rate.is_cpu:
        return True
    return rate is not None and not rate


class ConstantBuffers:
    """Arrays with a place for each buffer of the last Look."""

    def __init__(self) -> None:
        self._last = UpdateInfo(ObservedUpdates(), is_certain=False)
        self._sites = np.zeros(0, np.int64)
        # The row of each buffer's record among those of an update.
        self._rows = np.zeros(0, np.int64)
        self._last_row = 0
        self._is_known = np.zeros(0, np.bool_)
        self._checksums = np.zeros(0, np.uint64)
        self._numel = np.zeros(0, np.int64)
        # The number of updates in which its module ran and it stayed the same. The last updates, in
        # which every module ran and nothing changed, are counted apart.
        self._constant = np.zeros(0, np.int64)
        self._quiet_updates = 0

    def weigh(self, look: UpdateInfo, records: np.ndarray) -> np.ndarray:
        """The sites of those that this update finds changed. ``records``: of parameters and
        buffers.
        """
        last = self._last
        if (
            not look.written
            and last.buffers is look.buffers
            and last.is_training == look.is_training
            and all(map(operator.lt, last.calls, look.calls))
            and self._last_row < len(records)
            and records["checksum"][self._rows].tobytes() == self._checksums.tobytes()
        ):
            self._quiet_updates += 1
            self._last = look
            return self._sites[:0]
        row_of = {site: row for row, site in enumerate(records["site"].tolist())}
        if not all(site in row_of for site in look.buffers):
            return self._sites[:0]
        calls, was_training = self._know(look.buffers)
        self._last = look
        self._rows = np.array([row_of[site] for site in look.buffers], np.int64)
        self._last_row = int(self._rows.max())
        sums, numel = records["checksum"][self._rows], records["numel"][self._rows]
        # Statistics may be on for training alone.
        self._constant[np.array(look.is_training) != was_training] = 0
        is_same = (sums == self._checksums) & self._is_known
        is_sudden = ~is_same & (self._constant >= UPDATES) & (numel == self._numel)
        if look.written is not None:
            # A program may set what it likes between passes.
            is_written = np.isin(self._sites, list(look.written))
            is_sudden &= is_written
            # A running maximum is written to in every pass, though it may stay the same.
            self._constant[is_written] = 0
        self._constant[~is_same] = 0
        # A module that did not run had no occasion to change its buffers.
        self._constant += is_same & (np.array(look.calls) > calls)
        self._checksums, self._numel = sums, numel
        self._is_known[:] = True
        return self._sites[is_sudden]

    def _know(self, buffers: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Makes a place for each of these; what is known of the old parameters stays known. How
        often the module of each had been called by the last Look, and whether it was training.
        """
        self._constant += self._quiet_updates
        self._quiet_updates = 0
        last = self._last
        place_of = {site: place for place, site in enumerate(last.buffers)}
        old = np.array([place_of.get(site, -1) for site in buffers], np.int64)

        def moved(column: np.ndarray) -> np.ndarray:
            kept = np.zeros(len(buffers), column.dtype)
            kept[old >= 0] = column[old[old >= 0]]
            return kept

        self._sites = np.array(buffers, np.int64)
        self._is_known, self._constant = moved(self._is_known), moved(self._constant)
        self._checksums, self._numel = moved(self._checksums), moved(self._numel)
        return moved(np.array(last.calls, np.int64)), moved(np.array(last.is_training, np.bool_))


# Updates where nothing of what an optimizer holds has moved: perhaps it does nothing yet, on
# purpose.
UPDATES_OF_NONE = 100

_NAMED = 5
_FULL = int(Depth.FULL)  # NumPy is slow to compare with an enum
# A gradient smaller than this many roundings of the largest gradient of the update is what
# cancellation has left of a sum that is 0 in truth (of a bias before a normalisation, of the keys'
# bias in attention): it need not move anything.
_ROUNDINGS = 8
_EPSILON = {"float64": 2.0**-52, "float16": 2.0**-10, "bfloat16": 2.0**-7, "complex128": 2.0**-52}
_SPACING = np.array([_EPSILON.get(info.name, 2.0**-23) for info in DTYPES])


# A gradient that is such a part of the largest of the update is less than the rounding of sums that
# are 0 in truth, and has vanished on its way; and the updates in which it never was more.
_FAINT, _FAINT_UPDATES = 1e-14, 48

# Modules that add their bias to a product with their weight.
_ADDED = re.compile(r"(?:Linear|Conv\dd|ConvTranspose\dd)$")

# Columns of a table by site. ``first_alike``: the first parameter whose path is the same but for
# its numbers; and, of that one, whether one of them had a gradient and then none (``is_left``), and
# whether one without had one after that, or after its module was not called (``is_uncalled``):
# ``is_chosen``, as where a router chooses among them.
_NUMBERS = ("parameter", "idle", "idle_alone", "no_gradient", "first_alike", "faint")
_FLAGS = (
    *("is_parameter", "is_known", "is_pending", "has_moved", "is_left", "is_chosen"),
    *("is_uncalled", "has_had_gradient", "was_strong", "is_added", "is_said"),
)

#: Texts of warnings, in which ``{names}`` stands for the parameters or buffers.
_UNMOVED = (
    f"weights that don't move: {{names}} kept every bit for at least {UPDATES} updates although "
    "gradient and learning rate were not 0. Either updates are smaller than the spacing of the "
    "dtype (16-bit weights need a float32 master copy), or something writes old values back"
)
_CAUSES_OF_ZERO = (
    "Possible causes: a dead activation, an operator whose derivative is 0 (round, sign, clamp "
    "beyond its limits, nearest sampling, ReLU in a second derivative, softmax over one element, a "
    "backward of your own), a factor that is 0 throughout (both matrices of LoRA, a weight of the "
    "loss), a result of which the loss uses another part (an index, a mask), a term of the loss at "
    "its bound (a margin, free bits), float16 gradients that underflow, NaN that was replaced by 0."
)
# Weights that multiply the state of a recurrent layer, by name, and why they alone have 0.
_RECURRENT = re.compile(r"weight_hh_l\d+(?:_reverse)?")
_CAUSE_OF_STATE = (
    "The state that it multiplies is 0 wherever the loss reads what is made of it, as where that "
    "is output[:, -1] of a bidirectional layer: its backward direction has taken one step there, "
    "from a state of 0. Take h_n, which has the last state of each direction."
)
_FAINT_TEXT = (
    f"gradients that vanish: those of {{names}} were not 0, but never more than {_FAINT:g} of "
    f"the largest of an update, in {_FAINT_UPDATES} updates. Possible causes: many layers of "
    "sigmoid or tanh, or small initial weights, without residual connections or norms between "
    "them; a factor that is next to 0"
)
_NONE = f"no gradient: {{names}} had grad=None in {UPDATES} updates of an optimizer in a row"
_NONE_OF_SOME = (
    _NONE + ". Check "
    "whether the branch is detached, runs under no_grad(), is within a reentrant checkpoint "
    "none of whose inputs requires a gradient (use_reentrant=False), is used as an index or in "
    "a comparison alone (argmax, topk: pass the gradient straight through, as z + (q - "
    "z).detach() does), goes through a backward of your own that returns None, or is never "
    "called; where that is intended, set requires_grad=False"
)
_NONE_AT_ALL = (
    _NONE + ", and so "
    "had every weight that it trains. backward() may have been called on a tensor that has "
    "none of them in its graph: one that was cut from it (detach(), no_grad()) or made anew "
    "(torch.tensor(), .item(), NumPy), or of what has no derivative (argmax, a comparison), "
    "and given requires_grad; or the loss is that of another model, or of a copy; or zero_grad() "
    "was called between backward() and the update"
)
_NO_BACKWARD = (
    _NONE + ", and so "
    "had every weight that it trains: backward() was not called. Call loss.backward() before "
    "optimizer.step(): without parentheses it does nothing"
)
_STRAY = (
    "weights that don't move: no optimizer that has stepped holds {names}: there were "
    f"gradients, and every bit was kept for {UPDATES} updates."
)
_FORGOTTEN = _STRAY + " Give an optimizer these parameters, or freeze them with requires_grad=False"
_REPLACED = (
    _STRAY + " An optimizer holds what has their shape and is in no model: they "
    "may have replaced it since the optimizer was made, as where forward() or a new head "
    "assigns an nn.Parameter. Make the optimizer after that, or write into the parameter in "
    "place, under no_grad()"
)
_SUDDEN = (
    f"a buffer that had been constant has changed: {{names}}, after at least {UPDATES} updates "
    "without a change, in a forward pass. An in-place operator may have written to it"
)


@dataclass(eq=False)
class StalledWeights:
    """``settle`` is called with the ledger's lock held, where an update's records are on the host;
    the rest by any thread.
    """

    _sites: SiteTable
    _history: History
    _trouble: Callable[[str, Exception], None]
    _warn: Callable[[str], None]

    def __post_init__(self) -> None:
        self._table = Columns(
            **dict.fromkeys(_NUMBERS, np.zeros(1, np.int32)),
            **dict.fromkeys(_FLAGS, np.zeros(1, np.bool_)),
            weight=np.full(1, -1, np.int32),
            checksum=np.zeros(1, np.uint64),
        )
        self._known_sites = 0
        self._parameter_of: dict[tuple[str, str], int] = {}
        # The first parameter of which a module's weight is made, by module: itself, as a rule.
        self._weight_of: dict[str, int] = {}
        self._alike: dict[str, int] = {}
        self._losses: set[int] = set()
        # Updates without any gradient, at a loss of 0, that are let pass.
        self._patience: float = UPDATES_OF_NONE
        self._stray_checksums: dict[int, int] = {}
        self._buffers = ConstantBuffers()
        #: All warnings, for summary().
        self.notes: list[str] = []
        self.is_on = True

    def settle(self, look: UpdateInfo, records: np.ndarray) -> None:
        """The records of the look are here, or those that are left of them. Never raises."""
        self._guarded(self._settle, look, records)

    def _guarded(self, method: Callable[..., None], *args: object) -> None:
        """Calls it while nothing has failed."""
        try:
            if self.is_on:
                method(*args)
        except Exception as error:
            self.is_on = False
            self._trouble("whether weights move", error)

    def _settle(self, look: UpdateInfo, records: np.ndarray) -> None:
        if look.close is not None or look.buffers or look.stop > look.first_stray:
            self._know_sites()
        if records.size < look.stop - look.first:  # of a step too large to be held
            look.watch.is_close = True
            return
        if records.size and records["depth"][0] < _FULL:  # in this step all are counts alone
            return
        gradients_at, strays_at = look.first_gradient - look.first, look.first_stray - look.first
        stored, gradients = records[:gradients_at], records[gradients_at:strays_at]
        if look.early_gradients:
            early = self._early_records(look.early_gradients)
            if len(early) < len(look.early_gradients):
                look.watch.is_close = True
                return
            gradients = joined([early, gradients]) if len(gradients) else early
        if look.close is None:
            self._glance(look.watch, gradients)
        else:
            self._weigh_parameters(look, stored)
            look.watch.is_close = self._weigh_gradients(look, look.close, gradients)
        if look.buffers:
            self._warn_about(self._buffers.weigh(look, stored), _SUDDEN)
        if strays_at < records.size:
            strays = records[strays_at:]
            now = dict(zip(strays["site"].tolist(), strays["checksum"].tolist()))
            self._weigh_strays(now, look.replaced)

    def settle_read(
        self, look: UpdateInfo, parameters: Sequence[torch.Tensor], sites: Sequence[int]
    ) -> None:
        """The same where neither these, which are on the host, nor their gradients have records:
        reads them in an update that is looked at closely, and the gradients in one of ten others.
        ``sites``: those of the parameters. Called with the ledger's lock held. Never raises.
        """
        if look.close is not None or look.has_turn_for_strays:
            self._guarded(self._settle_read, look, parameters, sites)

    def _settle_read(
        self, look: UpdateInfo, parameters: Sequence[torch.Tensor], sites: Sequence[int]
    ) -> None:
        self._know_sites()
        gradients = _read([parameter.grad for parameter in parameters], sites)
        if look.close is None:
            self._glance(look.watch, gradients)
        else:
            self._weigh_parameters(look, _read(parameters, sites))
            look.watch.is_close = self._weigh_gradients(look, look.close, gradients)

    def _glance(self, watch: ObservedUpdates, gradients: np.ndarray) -> None:
        counts = gradients["zero_count"]
        is_like = counts.size == watch.all_zero.size
        if not is_like or (counts >= watch.all_zero).tobytes() != watch.zero:
            watch.is_close = True

    def _early_records(self, numbers: Sequence[int]) -> np.ndarray:
        records = self._history.between(min(numbers), max(numbers) + 1)
        if records["seq"].tolist() == numbers:
            return records
        of = dict(zip(records["seq"].tolist(), range(len(records))))
        return records[[of[number] for number in numbers if number in of]]

    def _know_sites(self) -> None:
        table, known, total = self._table, self._known_sites, len(self._sites)
        if known == total:
            return
        self._known_sites = total
        table.grow(total)
        for number in range(known, total):
            site = self._sites[number]
            if site.role == "param":
                table["is_parameter"][number] = True
                table["parameter"][number] = number
                path = re.sub(r"\d+", "*", site.key)
                table["first_alike"][number] = self._alike.setdefault(path, number)
                self._parameter_of[site.module, site.label] = number
                owner = re.sub(r"(^|\.)parametrizations\.weight$", "", site.module)
                if owner != site.module or site.label.startswith("weight"):
                    self._weight_of.setdefault(owner, number)
            elif site.role == "loss":
                self._losses.add(number)
        for number in range(known, total):
            site = self._sites[number]
            if site.role == "param_grad":
                label = site.label[:-10] if site.label.endswith(".main_grad") else site.label
                parameter = self._parameter_of.get((site.module, label), number)
                table["parameter"][number] = parameter
            elif site.role == "param" and site.label == "bias":
                table["weight"][number] = self._weight_of.get(site.module, -1)
                table["is_added"][number] = bool(_ADDED.match(site.module_type))

    def _weigh_parameters(self, look: UpdateInfo, records: np.ndarray) -> None:
        """Finds the parameters that have moved since the last close look, and warns about those
        that stay.
        """
        table = self._table
        chosen = np.flatnonzero(table["is_parameter"][records["site"]])
        sites, sums = records["site"][chosen], records["checksum"][chosen]
        is_same = table["is_known"][sites] & (table["checksum"][sites] == sums)
        has_moved = ~is_same & table["is_known"][sites]
        table["checksum"][sites], table["is_known"][sites] = sums, True
        moved, idle = sites[has_moved], sites[is_same & table["is_pending"][sites]]
        table["is_pending"][sites] = False
        # A weight that has moved once, and moves no more, may have converged.
        table["has_moved"][moved] = True
        if len(moved):
            table["idle"][idle] += 1
        elif look.is_certain:
            table["idle_alone"][idle] += 1
        if len(idle):
            total = table["idle"] + table["idle_alone"]
            late = (table["idle"] >= UPDATES) | (total >= UPDATES_OF_NONE)
            self._warn_about(np.flatnonzero(late & ~table["has_moved"]), _UNMOVED)

    def _weigh_gradients(
        self, look: UpdateInfo, close: ParameterDetails, gradients: np.ndarray
    ) -> bool:
        """Finds the parameters that are due to move, and those that lack a gradient. Returns
        whether the next update has to be looked at as closely.
        """
        table = self._table
        held = np.array(close.parameters, np.int64)
        # An update with a bad gradient may be skipped: by a scaler, by the optimizer itself, or by
        # the guard. Whether it will is not known before it is over; it is left out.
        if not len(held) or (gradients["flags"] & int(Flag.NONFINITE)).any():
            return True
        of, dtypes = table["parameter"][gradients["site"]], gradients["dtype"]
        look.watch.all_zero = component_counts(gradients)
        all_zero = gradients["zero_count"] >= look.watch.all_zero
        look.watch.zero = all_zero.tobytes()
        if not all_zero.all():
            self._patience = math.inf
        elif self._patience and self._loss_is_zero():
            # A margin that each example meets has no gradient, nor has a reward before the first.
            self._patience -= 1
            return True
        is_nonzero, is_read, is_felt = np.zeros((3, len(table["weight"])), np.bool_)
        is_nonzero[of[~all_zero]] = True
        is_read[of] = True
        low, high = np.abs(gradients["min"]), np.abs(gradients["max"])
        largest = np.maximum(low, high)
        noise = _ROUNDINGS * _SPACING[dtypes] * np.max(largest, initial=0.0)
        is_felt[of[~all_zero & (largest > noise)]] = True
        is_strong = largest >= _FAINT * np.max(largest, initial=0.0)
        table["was_strong"][of[is_strong]] = True
        is_live = np.array(close.is_live) & table["is_parameter"][held]
        has_gradient = np.array(close.has_gradient)
        is_pending = table["is_pending"][held] = is_live & is_felt[held]
        # A gradient that reaches a weight reaches its bias: a sum of it that is 0 has cancelled, as
        # where the loss is of differences.
        weight = table["weight"][held]
        is_cancelled = (weight >= 0) & is_nonzero[weight]
        is_zero = is_read[held] & ~is_nonzero[held] & ~np.array(close.is_part) & ~is_cancelled
        # A loss of derivatives of the output has none of a bias that is only added to it.
        is_added = table["is_added"][held] & is_cancelled
        lacks = is_live & ((~has_gradient & ~is_added) | is_zero)
        first, has_none = table["first_alike"][held], is_live & ~has_gradient
        table["is_left"][first[has_none & table["has_had_gradient"][held]]] = True
        is_reached = is_live & has_gradient
        # A module that nothing calls has no part in the loss, as where a model grows, or has a head
        # that this training leaves alone, or whose weights it adds times 0, so that all ranks have
        # gradients of them; but one layer of many may have been forgotten.
        count = len(is_read)
        alike = np.bincount(first[is_live], minlength=count)
        is_forgotten = 2 * np.bincount(first[is_live & ~lacks], minlength=count) > alike
        is_uncalled = lacks & ~np.array(close.is_called) & ~is_forgotten[first]
        was_left = (table["no_gradient"][held] > 0) & table["is_left"][first]
        table["is_chosen"][first[is_reached & (was_left | table["is_uncalled"][held])]] = True
        table["is_uncalled"][held] = is_uncalled
        table["has_had_gradient"][held[is_reached]] = True
        table["no_gradient"][held[lacks]] += 1
        table["no_gradient"][held[is_uncalled | (is_live & ~lacks)]] = 0
        is_left_out = has_none & table["is_chosen"][first]
        updates = np.where(is_left_out, 0, table["no_gradient"][held])
        # The terms of the gradient of a bias may cancel.
        is_faint = is_live & is_nonzero[held] & ~table["was_strong"][held] & (weight < 0)
        table["faint"][held[is_faint]] += 1
        if look.is_certain:
            zero = held[(updates >= UPDATES) & has_gradient & ~table["is_said"][held]]
            if len(zero):
                self._warn_about(zero, self._text_of_zero(zero, look))
            self._warn_about(held[is_faint & (table["faint"][held] >= _FAINT_UPDATES)], _FAINT_TEXT)
            is_all = not (has_gradient & is_live).any()
            text = _NONE_AT_ALL if is_all else _NONE_OF_SOME
            if is_all and not look.has_backward:
                text = _NO_BACKWARD
            self._warn_about(held[(updates >= UPDATES) & ~has_gradient], text)
        is_open = (is_pending & ~table["has_moved"][held]) | ((updates > 0) & (updates < UPDATES))
        return bool(((is_open | is_faint) & ~table["is_said"][held]).any())

    def _text_of_zero(self, parameters: np.ndarray, look: UpdateInfo) -> str:
        through = {look.without_derivative.get(int(site)) for site in parameters}
        known = sorted(operators for operators in through if operators is not None)
        is_state = all(_RECURRENT.fullmatch(self._sites[int(site)].label) for site in parameters)
        causes = _CAUSE_OF_STATE if is_state else _CAUSES_OF_ZERO
        if len(known) == len(through):
            remedies = dict.fromkeys(one.remedy for one in known)
            causes = (
                "In the graph of the loss each way to them leads through "
                f"{' or '.join(one.operators for one in known)}, whose derivative is 0: "
                f"{'; or '.join(remedies)}."
            )
        modules = {self._sites[int(site)].module for site in parameters}
        where = where_zero(self._history.last_step(), self._sites, modules)
        what = f"gradients that are all 0: of {{names}}, in {UPDATES} updates in a row."
        return f"{what} {causes}{where}"

    def _loss_is_zero(self) -> bool:
        losses = self._history.latest_of(self._losses)
        return len(losses) > 0 and not losses["abs_sum"].any()

    def compare_strays(
        self, sites: Sequence[int], parameters: Sequence[torch.Tensor], replaced: Collection[int]
    ) -> None:
        """Reads parameters that no optimizer holds, where an update does not: waits for a device,
        until they were told of. Called with the ledger's lock held. Never raises.
        """
        self._guarded(self._compare_strays, sites, parameters, replaced)

    def _compare_strays(
        self, sites: Sequence[int], parameters: Sequence[torch.Tensor], replaced: Collection[int]
    ) -> None:
        self._know_sites()
        new = [at for at, site in enumerate(sites) if not self._table["is_said"][site]]
        if new and may_wait():
            sums = checksums([parameters[at] for at in new])
            self._weigh_strays({sites[at]: one for at, one in zip(new, sums)}, replaced)

    def _weigh_strays(self, now: dict[int, int], replaced: Collection[int]) -> None:
        """``now``: the checksums, by site."""
        before, self._stray_checksums = self._stray_checksums, now
        unmoved = [site for site, checksum in now.items() if before.get(site) == checksum]
        for sites, text in (
            ([site for site in unmoved if site in replaced], _REPLACED),
            ([site for site in unmoved if site not in replaced], _FORGOTTEN),
        ):
            self._warn_about(np.array(sites, np.int64), text)

    def _warn_about(self, sites: np.ndarray, text: str) -> None:
        said = self._table["is_said"]
        new = [int(site) for site in sites if not said[site]]
        if not new:
            return
        said[new] = True
        names = listed([self._sites[site].key for site in new], _NAMED)
        text = text.replace("{names}", names)
        self.notes.append(text)
        self._warn(text)
