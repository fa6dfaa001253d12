"""Detects weights that do not move and gradients that are missing or 0, by the checksums of
consecutive updates: in NumPy, where the records arrive.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Callable, Optional

import numpy as np
import torch

from fastcheck.log.history import History, joined
from fastcheck.record.format import DTYPES, Depth, Flag
from fastcheck.record.site import SiteTable
from fastcheck.record.statistics import component_counts
from fastcheck.statistics.functions import stats
from fastcheck.utils.text.layout import listed
from fastcheck.utils.torch.own_operators import no_grad, unobserved
from fastcheck.utils.torch.readable import can_read, has_memory, may_wait
from fastcheck.utils.torch.sharding import local
from fastcheck.utils.torch.transforms import unwrapped
from fastcheck.watch.columns import Columns

from .buffers import ConstantBuffers
from .updates import (
    UPDATES,
    UPDATES_OF_NONE,
    ObservedUpdates,
    ParameterDetails,
    UpdateInfo,
    checksums,
)
from .zero_gradients import where_zero

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
    "dtype (16-bit weights need a float32 master copy), or something writes old values back, or "
    "the optimizer is not one of torch's and leaves them out"
)
_CAUSES_OF_ZERO = (
    "Possible causes: a dead activation, an operator whose derivative is 0 (round, sign, clamp "
    "beyond its limits, nearest sampling, ReLU in a second derivative, softmax over one element, a "
    "backward of your own), a factor that is 0 throughout (both matrices of LoRA, a weight of the "
    "loss, dropout with p=1), a result of which the loss uses another part (an index, a mask), a "
    "term of the loss at its bound (a margin, free bits), float16 gradients that underflow, NaN "
    "that was replaced by 0."
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
    "and given requires_grad; or a backward of your own returns None; or the loss is that of "
    "another model, or of a copy; or zero_grad() was called between backward() and the update"
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


def _read(tensors: Sequence[Optional[torch.Tensor]], sites: Sequence[int]) -> np.ndarray:
    """The records of those of these tensors that can be read, of these sites."""
    with unobserved(), no_grad():
        held = [(site, unwrapped(local(t))) for site, t in zip(sites, tensors) if t is not None]
        read = [(site, values) for site, values in held if can_read(values) and has_memory(values)]
        records = stats([values for _, values in read]).numpy()
    records["site"] = [site for site, _ in read]
    return records
