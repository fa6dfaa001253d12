"""An incident: an operator call that read or wrote a non-finite tensor, as the C++ observer reports
it; and the places where such a value counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fastcheck.extension import extension
from fastcheck.utils.names.api import format_call

# observer::Direction::kOptimizer
_OPTIMIZER = 2


class Destination(NamedTuple):
    """``kind``: output, buffer, weight, loss, gradient, update, state, host, ranks or
    integers. ``clause`` ends a reason: "it reached the loss".
    """

    kind: str
    clause: str

    @property
    def may_be_negative_infinity(self) -> bool:
        """True if a -Inf is an ordinary value there: the logarithm of a probability of 0."""
        return self.kind in ("output", "host", "ranks")

    @property
    def may_be_infinite(self) -> bool:
        """True if only a NaN counts: an infinity becomes the largest integer, as a rule, and a
        buffer may hold one on purpose.
        """
        return self.kind in ("integers", "buffer")


#: Places that the observer itself sees, numbered as in csrc/torch/op_level/incident.h (kHostPlace,
#: ...).
HOST = Destination("host", "the host read it")
RANKS = Destination("ranks", "it was sent to other ranks")
INTEGERS = Destination("integers", "it was converted to integers, which have no NaN")


class NonfiniteInput(NamedTuple):
    """A non-finite tensor that the op read. ``seq``: the sequence number of its record;
    ``is_arrival``: no observed op wrote it; ``is_collective``: a collective did. Where several
    records describe parts of it, ``also`` are the others, and ``read`` is its own, by which later
    ops know it; -1: one describes it.
    """

    seq: int
    is_arrival: bool
    is_collective: bool
    also: Sequence[int] = ()
    read: int = -1


class Incident:
    """The observer's numbers; names are looked up when a property is read."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self._raw = raw
        self.nonfinite_inputs = [NonfiniteInput(*fields) for fields in raw["fed"]]
        #: The sequence numbers of the outputs' records, and whether each is non-finite.
        self.made: list[tuple[int, bool]] = raw["made"]
        #: A scalar argument is itself infinite: bit 0 +Inf, bit 1 -Inf; or is at least the largest
        #: number of something that was made: bits 2 and 3. Bit 4: one is NaN.
        self.infinite_scalars: int = raw["infinite_scalars"]
        self.is_recompute: bool = raw["is_recompute"]
        self.is_optimizer: bool = raw["direction"] == _OPTIMIZER
        #: A filter left the op out: its outputs have no records.
        self.is_unseen: bool = raw["is_unseen"]
        #: It read pinned memory, of which there is no record.
        self.reads_in_flight: bool = raw["reads_in_flight"]
        #: The number of the place that its inputs have reached; -1: it is an op like others.
        self.place: int = raw["place"]
        #: The first record of the op's forward, in backward; -1: not known.
        self.forward_seq: int = raw["forward_seq"]
        #: The line of Python, in backward that of the forward where known; empty where no lines are
        #: recorded.
        self.line: str = raw["forward_line"] or raw["line"]
        #: The call of torch's Python API that it is part of, if those are numbered.
        self.api = format_call(raw["api"])

    @property
    def bad_seqs(self) -> list[int]:
        """The sequence numbers of its non-finite inputs and outputs."""
        fed = [
            seq
            for argument in self.nonfinite_inputs
            for seq in (argument.seq, *argument.also, argument.read)
        ]
        return [seq for seq, is_bad in self.made if is_bad] + [seq for seq in fed if seq >= 0]

    @property
    def op(self) -> str:
        """The op that ran, as the dispatcher names it."""
        return extension.op_observer().op_name(self._raw["op"])

    @property
    def inputs(self) -> list[tuple[str, int]]:
        """The names of the arguments that hold tensors, and the sequence numbers of their
        records: on a device those of the tensors that they are parts of.
        """
        observer, op = extension.op_observer(), self._raw["op"]
        return [
            (observer.argument_name(op, at) + (", a part of this" if is_part else ""), seq)
            for at, seq, is_part in self._raw["inputs"]
        ]

    def __str__(self) -> str:
        """The op, and the node of autograd that it is part of."""
        node = self._raw["node"]
        return f"{self.op} (in {node})" if node else self.op
