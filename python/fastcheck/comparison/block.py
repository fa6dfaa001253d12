"""Block: the tensors of one step of one rank, as records. Every source yields its side as Blocks.

The Record is the common form: a log has it already, a tensor is read once into a Record, and the
statistics of an msprobe dump fill the fields that they correspond to.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Callable, NamedTuple, Optional

import numpy as np
import torch

from fastcheck.record.format import RECORD_DTYPE, Depth, offset_of

from .names import NameTable, Renaming

#: A count of a record that is unknown in this source. (An unknown sum is NaN.)
UNKNOWN_COUNT = -1
#: A ``nan_count`` of a record that has NaN or infinities whose counts are unknown.
SOME = -2


#: The names of the two sides, in the order of the arguments of compare().
SIDES = ("actual", "reference")


class Phase(enum.IntEnum):
    """The questions, in the order of cause and effect."""

    ENVIRONMENT = 0
    HYPERPARAMETERS = 1
    BATCHES = 2
    WEIGHTS = 3  #: before the first step; of checkpoints all there are
    FORWARD = 4
    LOSS = 5
    GRADIENTS = 6
    UPDATE = 7  #: weights after a step, optimizer states
    #: Not a question: BATCHES if everything before it in its step agrees, else FORWARD.
    ARRIVED = 8


class Kind(enum.Enum):
    """The kind of a source; only sources of one family can be compared."""

    LOG = "record log"
    DUMP = "dump"
    MSPROBE = "msprobe dump"
    CHECKPOINT = "checkpoint"
    ENVIRONMENT = "environment"
    INVENTORY = "inventory"

    @property
    def family(self) -> str:
        return "run" if self in (Kind.LOG, Kind.DUMP, Kind.MSPROBE) else self.value


class Extra(NamedTuple):
    """The data of a tensor that its record does not have. ``load`` fetches the values, row-major or
    not, from memory or disk; None where there are only statistics.
    """

    shape: Optional[tuple[int, ...]] = None
    requires_grad: Optional[bool] = None
    crc32: Optional[str] = None
    load: Optional[Callable[[], torch.Tensor]] = None
    #: The reason why the tensor can't be read, when it can't.
    problem: str = ""


@dataclass(frozen=True)
class Block:
    """The tensors of one step of one rank, in the order in which they were recorded.

    ``names`` are numbers of a NameTable, ``phases`` values of Phase, ``records`` of RECORD_DTYPE;
    all of one length, as ``extras`` where there are any.
    """

    step: int
    rank: int
    names: np.ndarray
    phases: np.ndarray
    records: np.ndarray
    extras: Optional[Sequence[Extra]] = None

    @classmethod
    def of(cls, step: int, rank: int, tensors: Iterable[tuple[int, int, np.void, Extra]]) -> Block:
        """A block of tensors, each with its number, phase, record and the rest."""
        held = list(tensors)
        numbers = np.array([number for number, *_ in held], np.int64)
        phases = np.array([phase for _, phase, *_ in held], np.uint8)
        records = np.array([record for _, _, record, _ in held], RECORD_DTYPE)
        return cls(step, rank, numbers, phases, records, [extra for *_, extra in held])

    def after(self, earlier: Block) -> Block:
        """The tensors of ``earlier`` and then these, by their records alone."""
        names = np.concatenate([earlier.names, self.names])
        phases = np.concatenate([earlier.phases, self.phases])
        records = np.concatenate([earlier.records, self.records])
        return Block(self.step, self.rank, names, phases, records)

    def __len__(self) -> int:
        return len(self.records)

    def extra(self, index: int) -> Extra:
        return _NOTHING if self.extras is None else self.extras[index]


_NOTHING = Extra()


class Source:
    """A side of a comparison."""

    title: str
    kind: Kind
    notes: list[str]
    #: Nested dictionaries that are compared key by key, by the question that they answer.
    settings: dict[Phase, Any]
    #: The rates and thresholds that change by plan, by name: from which step on, and to what.
    schedules: Mapping[str, Sequence[tuple[int, float]]] = MappingProxyType({})
    #: The number of modules that ran inside torch.compile, as far as the source records it.
    compiled_modules = 0
    #: The attributes of each module that are numbers, by path, as far as the source records them.
    modules: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
    #: The classes of the modules that were observed, by path, as far as the source records them.
    classes: Mapping[str, str] = MappingProxyType({})
    #: The paths of the modules that were called, as far as the source records them.
    called: frozenset[str] = frozenset()
    #: The state that each optimizer began from, as far as the source records it.
    optimizer_states: Sequence[Mapping[str, Any]] = ()
    #: The options that say what was read, as far as the source records them.
    options: Mapping[str, Any] = MappingProxyType({})
    #: The warnings of the run on its settings and the order of its calls: the step and the text.
    warned: Sequence[tuple[int, str]] = ()
    #: True if names were chosen, so that what lies between them is not there.
    is_partial = False

    def places(self) -> list[tuple[int, int]]:
        """The (step, rank) that there are blocks of, sorted."""
        return []

    def block(
        self, step: int, rank: int, names: NameTable, renaming: Renaming, is_first: bool
    ) -> Block:
        """Reads one block. ``is_first``: it is the first that is compared, so that its parameters
        are initial weights rather than the outcome of an update.
        """
        raise NotImplementedError("there are no blocks")

    def is_cut(self, step: int, rank: int) -> bool:
        """True if the block may lack its end: the source ends within this step."""
        return False

    def is_updated(self, step: int, rank: int) -> bool:
        """False if the source ends within this step, before an optimizer has updated."""
        return True


#: Counts and extremes. Not the sums: some backends add them up in an order of their own.
BYTES_BEFORE_SUMS = offset_of("sum")


def leading_bytes(records: np.ndarray, size: int) -> np.ndarray:
    """The first bytes of each record, to be compared. Shares their memory."""
    kind = np.dtype(
        {
            "names": ["first"],
            "formats": [np.dtype((np.void, size))],
            "offsets": [0],
            "itemsize": RECORD_DTYPE.itemsize,
        }
    )
    return records.view(kind)["first"]


def same_bits(actual: Block, ours: np.ndarray, reference: Block, theirs: np.ndarray) -> np.ndarray:
    """A boolean array of the pairs: True where they are equal to the bit by their records:
    checksum, counts, extremes, and shape where it is known. (A CRC32 takes longer to compute.)
    """
    left, right = actual.records[ours], reference.records[theirs]
    same: np.ndarray = leading_bytes(left, BYTES_BEFORE_SUMS) == leading_bytes(
        right, BYTES_BEFORE_SUMS
    )
    same &= left["checksum"] == right["checksum"]
    # Not the order: for contiguous tensors both rules are the same sequence.
    same &= (left["dtype"] == right["dtype"]) & (left["depth"] == right["depth"])
    same &= left["depth"] == Depth.FULL
    if actual.extras is not None and reference.extras is not None:
        for pair in np.flatnonzero(same).tolist():
            mine, other = actual.extras[int(ours[pair])], reference.extras[int(theirs[pair])]
            if None not in (mine.shape, other.shape) and mine.shape != other.shape:
                same[pair] = False
    return same
