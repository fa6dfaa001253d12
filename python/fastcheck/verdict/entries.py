"""The entries of a step's journal: what the hooks have seen, in order, judged when the records are
there.

On the CPU a record is there when the hook asks for it, and an entry is judged at once. On any other
device the entries wait for their records. Entries are judged in the same order on every device.

An entry holds numbers, calls and flags. ``seq`` is the sequence number of the record of a tensor,
and ``role`` its role where the kind of the entry leaves it open; of tensors that were read in one
call ``first_seq`` is the number of the first, and ``roles`` are those of all. csrc/torch/hooks
makes InnerInput, Output and Gradient too.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Callable, NamedTuple, Union, final

import numpy as np

from fastcheck.calls.module_calls import Call

from .incident import Incident

#: Records that show an overflow, by sequence number.
Records = Mapping[int, np.void]
NO_RECORDS: Records = {}

# ---- At module level: the tensors of modules -----------------------------------------------------


class Batch(NamedTuple):
    """An input of an outermost module.

    ``since``: the next sequence number when the last pass through the module ended; ``is_data``: it
    can't have been computed in this step; ``needs_gradient``: as activations do that another rank
    has sent.
    """

    seq: int
    call: Call
    since: int
    is_data: bool
    has_excluded: bool
    needs_gradient: bool


class InnerInput(NamedTuple):
    """An input of a submodule that no observed module returned. ``after_gap``: earlier steps passed
    unread.
    """

    seq: int
    call: Call
    after_gap: bool


class Output(NamedTuple):
    """An output of a module."""

    seq: int
    call: Call


class Recomputed(NamedTuple):
    """A tensor that activation checkpointing computed again in backward."""

    seq: int
    call: Call
    role: str


class Named(NamedTuple):
    """A tensor that observe() has named. ``call``: of the name, within that of the module that was
    running.
    """

    seq: int
    call: Call
    after_gap: bool
    has_excluded: bool


class Gradient(NamedTuple):
    """The gradient of the tensor whose record has the number ``tensor_seq``."""

    seq: int
    call: Call
    role: str
    tensor_seq: int
    is_scaled: bool


class Returned(NamedTuple):
    """The return of a module. ``is_complete``: all that it returned was read, and there was any;
    ``ended_by``: the exception that left it, of an outermost call.
    """

    call: Call
    is_complete: bool
    ended_by: str = ""


# ---- At module level: the loss, and what is stored -----------------------------------------------


class Loss(NamedTuple):
    """The loss: what backward() is called on, or monitor.step(loss=) is given. ``is_scaled``: it
    carries a scale of the user's own, or is made of derivatives that carry a loss scale. Also at op
    level, where no observed operator has made it.
    """

    seq: int
    is_scaled: bool
    thread: int


class LossKnown(NamedTuple):
    """The loss is the tensor of this record, which was read before (the criterion's output)."""

    seq: int


class GradientNorm(NamedTuple):
    """The norm of all gradients, as clipping has computed it."""

    seq: int
    is_scaled: bool


class Stored(NamedTuple):
    """Parameters and buffers."""

    first_seq: int
    roles: Sequence[str]
    thread: int


class UsedGradients(NamedTuple):
    """Gradients of parameters, just before the optimizer uses them. ``before``: by site, the
    records of gradients that were read when backward() had ended, and have changed since.
    """

    first_seq: int
    roles: Sequence[str]
    is_scaled: bool
    before: Mapping[int, int]


class UnusedGradients(NamedTuple):
    """Gradients of parameters when backward() has ended. ``may_change``: this training loop changes
    or skips gradients by itself.
    """

    first_seq: int
    roles: Sequence[str]
    is_scaled: bool
    may_change: bool


class OptimizerState(NamedTuple):
    """The optimizer's state of parameters: ``is_after`` an update of gradients whose squares are
    beyond their dtype, or before its first update.
    """

    first_seq: int
    roles: Sequence[str]
    is_after: bool


# ---- At op level ---------------------------------------------------------------------------------


class Operator(NamedTuple):
    """An operator read or wrote a non-finite tensor, or such a tensor has reached a place where it
    counts. ``is_scaled``: the step's gradients carry a loss scale; ``is_filtered``: not every
    operator of every step is read.
    """

    incident: Incident
    is_scaled: bool
    is_filtered: bool


class Entered(NamedTuple):
    """An argument of the model. ``is_collective``: a collective wrote it; ``sources``: the records
    that it was known by which are bad, or may be.
    """

    seq: int
    is_collective: bool
    sources: tuple[int, ...] = ()


class ArgumentKnown(NamedTuple):
    """An argument of the model, with this site, that an observed operator wrote."""

    seq: int
    site: int


class OpStored(NamedTuple):
    """A parameter or a buffer, before its first use."""

    seq: int
    role: str


class Compiled(NamedTuple):
    """A tensor written by compiled code that is an input, an output or a gradient of the module
    ``name``.
    """

    seq: int
    role: str
    name: str
    is_scaled: bool


class NamedResult(NamedTuple):
    """A tensor that observe() has named. ``source``: the record of the operator that made it; -1:
    no observed operator has.
    """

    seq: int
    role: str
    source: int
    is_scaled: bool


# ---- What the training loop does -----------------------------------------------------------------


@final
class Moment(enum.Enum):
    """A moment of a step at which findings are settled."""

    #: The step is over. May come again for the same step, after more records.
    CLOSED = enum.auto()
    #: Nothing will be added to the step any more.
    ENDED = enum.auto()
    #: An update is due: what is non-finite until now must not be silent.
    UPDATE_DUE = enum.auto()
    #: The optimizer uses gradients that loss scaling might have skipped.
    SCALED_USED = enum.auto()
    #: The training loop has left an update out, as loss scaling does.
    UPDATE_LEFT_OUT = enum.auto()
    #: An update under loss scaling of the user's own. Gradients that were not finite at the update
    #: have been judged there: what is still held belongs to an iteration that was skipped.
    OWN_SCALE_UPDATED = enum.auto()
    #: Tensors that were made until now have met all that reads them, as a rule.
    ALL_READ = enum.auto()


class ScaleDecided(NamedTuple):
    """Loss scaling has decided whether the update is skipped. ``words``: the records of the
    scaler's own found_inf, where it lives on a device.
    """

    skipped: bool
    words: Sequence[int] = ()


class GradientsUsed(NamedTuple):
    """The optimizer uses gradients that were read, as these records, when backward() had ended."""

    seqs: Sequence[int]


# ---- The journal ---------------------------------------------------------------------------------


class Task:
    """Something to be done when all entries before it have been judged."""

    __slots__ = ()

    def run(self, bad: Records) -> None:
        """``bad``: of the part of the step that it is in."""
        raise NotImplementedError


class Note(Task):
    """Calls ``function(*args)``."""

    __slots__ = ("args", "function")

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.function = function
        self.args = args

    def run(self, bad: Records) -> None:
        self.function(*self.args)


#: One of the tuples above, which rules judge.
Seen = Union[
    Union[Batch, InnerInput, Output, Recomputed, Named, Gradient, Returned, Loss, LossKnown],
    Union[GradientNorm, Stored, UsedGradients, UnusedGradients, OptimizerState, GradientsUsed],
    Union[Operator, Entered, ArgumentKnown, OpStored, Compiled, NamedResult],
]
Entry = Union[Seen, Moment, ScaleDecided, Task]


class GraphReplay:
    """A replay of a captured graph, in the place of the entries of the capture."""

    __slots__ = ()

    def entries(self, bad: Records) -> Iterator[Entry]:
        """Gives them the records of the replay. ``bad``: of the part of the step that it is in."""
        raise NotImplementedError


Written = Union[Entry, Call, GraphReplay]


class Journal:
    """A part of one step's journal. A call stands for its outputs and its return."""

    __slots__ = ("due", "entries", "unread")

    def __init__(self) -> None:
        self.entries: list[Written] = []
        # The entries that matter even where no record is non-finite.
        self.due: list[Union[Entry, GraphReplay]] = []
        # Numbers of tensors that are in the entries, and have no record.
        self.unread: list[int] = []

    def add_due(self, *entries: Union[Entry, GraphReplay]) -> None:
        self.entries += entries
        self.due += entries


def expanded(written: Written, bad: Records = NO_RECORDS) -> Iterator[Entry]:
    """The entries that stand for what is written in a journal."""
    if isinstance(written, GraphReplay):
        yield from written.entries(bad)
        return
    if isinstance(written, (tuple, Moment, Task)):
        yield written
        return
    for seq in written.outputs:
        if seq >= written.outputs_seq:  # no module had read it before
            yield Output(seq, written)
    yield Returned(written, written.is_complete)
