"""The dtype of a record in NumPy: format version 1, byte for byte that of ``csrc/core/record.h``.

``docs/record-format.md`` specifies every field. Needs neither torch nor the compiled extension, so
that a log can be read anywhere.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

RECORD_VERSION = 1
RECORD_BYTES = 192
#: The largest number of a step that a record holds.
MAX_STEP = 2**63 - 1

#: Records whose first ``VALUE_BYTES`` bytes are equal are equal; identity follows.
VALUE_BYTES = 112

#: One record. ``min`` and ``max`` are typed by the tensor's dtype: :func:`extremes` reads them;
#: here they are float64, which is what floating-point and complex tensors hold.
RECORD_DTYPE = np.dtype(
    [
        ("numel", "<i8"),
        ("nan_count", "<i8"),
        ("posinf_count", "<i8"),
        ("neginf_count", "<i8"),
        ("zero_count", "<i8"),
        ("subnormal_count", "<i8"),
        ("negative_count", "<i8"),
        ("saturated_count", "<i8"),
        ("min", "<f8"),
        ("max", "<f8"),
        ("sum", "<f8"),
        ("abs_sum", "<f8"),
        ("sum_sq", "<f8"),
        ("checksum", "<u8"),
        ("seq", "<i8"),
        ("step", "<i8"),
        ("call", "<i4"),
        ("site", "<i4"),
        ("flags", "<u4"),
        ("version", "<u2"),
        ("dtype", "u1"),
        ("order", "u1"),
        ("depth", "u1"),
        ("device_mode", "u1"),
        ("reserved", "V46"),
    ]
)
assert RECORD_DTYPE.itemsize == RECORD_BYTES

#: A record as one field: NumPy copies RECORD_DTYPE field by field, in several times the time.
BYTES_DTYPE = np.dtype(f"V{RECORD_BYTES}")

#: A row of a device's black box (csrc/cuda/launch.h): a record, the device address of the slot that
#: it was written to, and the number of its stretch of launches; 0: the row is empty.
BOX_DTYPE = np.dtype([("record", RECORD_DTYPE), ("slot", "<u8"), ("stretch", "<u8")])


NONFINITE_COUNTS = ("nan_count", "posinf_count", "neginf_count")
#: Counts of finite components. One component may be in several of them.
FINITE_COUNTS = ("zero_count", "subnormal_count", "negative_count", "saturated_count")
#: The counts of a record, in the order of its first eight 64-bit cells.
COUNTS = ("numel", *NONFINITE_COUNTS, *FINITE_COUNTS)


def offset_of(field: str) -> int:
    assert RECORD_DTYPE.fields is not None
    return RECORD_DTYPE.fields[field][1]


class Depth(enum.IntEnum):
    """The part of a record that is computed: HEALTH, the eight counts; STATS, also ``min``,
    ``max``, ``sum``, ``abs_sum`` and ``sum_sq``; FULL, also the checksum. A field that the depth
    does not cover is zero bytes.
    """

    HEALTH = 1  #: the eight counts
    STATS = 2  #: and min, max, sum, abs_sum, sum_sq
    FULL = 3  #: and the checksum


#: Depths by the names that options take.
DEPTHS = {depth.name.lower(): depth for depth in Depth}


class Order(enum.IntEnum):
    """The rule by which the elements were traversed."""

    STORAGE = 0  #: as they lie in memory: any dense tensor
    LOGICAL = 1  #: row-major


#: Orders by the names that options take.
ORDERS = {order.name.lower(): order for order in Order}


class DeviceMode(enum.IntEnum):
    """The way in which the device stores a result that is out of the format's range: IEEE, as an
    infinity; SATURATING, as the largest finite number.
    """

    IEEE = 0
    SATURATING = 1
    UNKNOWN = 2


class Flag(enum.IntFlag):
    """Bits of a record's ``flags``; bits 8 to 11 hold the :class:`Verdict`."""

    NONFINITE = 1  #: the tensor has a NaN or an infinity
    RECOMPUTE = 2  #: seen while activation checkpointing ran a forward again
    SCALED = 4  #: a gradient, or a loss, that carries a loss scale
    EVENT = 8  #: counted as an overflow event
    ANEW = 16  #: a loss: the gradients of those before it in the step were thrown away


VERDICT_SHIFT = 8
VERDICT_MASK = 0xF << VERDICT_SHIFT


class Verdict(enum.IntEnum):
    """The host's verdict on a non-finite record (``docs/design.md``, overflow counting).

    ORIGIN: everything that it was computed from was finite. ARRIVED: no observed module or operator
    made it. PROPAGATED: it follows from an event that was reported. UNRESOLVED: what is made of it
    will decide. ABSORBED: nothing that lasts or leaves was made of it. SCALED: a scaled gradient of
    a step that loss scaling skips. INTENDED and BENIGN: written on purpose, or allowed. NONE: the
    record is finite, or was not judged.
    """

    NONE = 0
    ORIGIN = 1
    ARRIVED = 2
    PROPAGATED = 3
    INTENDED = 4
    ABSORBED = 5
    UNRESOLVED = 6
    SCALED = 7
    BENIGN = 8


@dataclass(frozen=True)
class DTypeInfo:
    """A row of the table in ``csrc/core/dtypes.h``.

    ``components`` is how many counted components an element has: 2 for complex. ``kind`` is the
    type of ``min`` and ``max``: ``"f8"``, ``"i8"`` or ``"u8"``.
    """

    code: int
    name: str
    components: int
    component_bytes: int
    kind: str


DTYPES: tuple[DTypeInfo, ...] = (
    DTypeInfo(0, "float64", 1, 8, "f8"),
    DTypeInfo(1, "float32", 1, 4, "f8"),
    DTypeInfo(2, "float16", 1, 2, "f8"),
    DTypeInfo(3, "bfloat16", 1, 2, "f8"),
    DTypeInfo(4, "float8_e4m3fn", 1, 1, "f8"),
    DTypeInfo(5, "float8_e5m2", 1, 1, "f8"),
    DTypeInfo(6, "complex64", 2, 4, "f8"),
    DTypeInfo(7, "complex128", 2, 8, "f8"),
    DTypeInfo(8, "int8", 1, 1, "i8"),
    DTypeInfo(9, "int16", 1, 2, "i8"),
    DTypeInfo(10, "int32", 1, 4, "i8"),
    DTypeInfo(11, "int64", 1, 8, "i8"),
    DTypeInfo(12, "uint8", 1, 1, "u8"),
    DTypeInfo(13, "uint16", 1, 2, "u8"),
    DTypeInfo(14, "uint32", 1, 4, "u8"),
    DTypeInfo(15, "uint64", 1, 8, "u8"),
    DTypeInfo(16, "bool", 1, 1, "u8"),
)


def extremes(record: np.void) -> tuple[float, float]:
    """``min`` and ``max`` of one record in their own type: float, or int for integer dtypes."""
    kind = DTYPES[int(record["dtype"])].kind
    low, high = np.frombuffer(record.tobytes(), dtype="<" + kind, count=2, offset=64)
    return low.item(), high.item()


def nonfinite(records: np.ndarray) -> np.ndarray:
    """A boolean array of the records that hold a NaN or an infinity."""
    counts = records["nan_count"] + records["posinf_count"] + records["neginf_count"]
    return counts != 0


def is_nonfinite(record: np.void) -> bool:
    """nonfinite() of one record."""
    return bool(record["nan_count"] or record["posinf_count"] or record["neginf_count"])


def overflowed(records: np.ndarray) -> np.ndarray:
    """A boolean array of the records that show an overflow: nonfinite() or, of a device that
    saturates, holding its dtype's largest finite magnitude.
    """
    saturating = records["device_mode"] == int(DeviceMode.SATURATING)
    return nonfinite(records) | (saturating & (records["saturated_count"] != 0))


class Identity(NamedTuple):
    """The fields of a record that the host knows before the device has written the values."""

    seq: int
    step: int
    call: int
    site: int
    flags: int
    dtype: int
    order: int
    depth: int


def identify(records: np.ndarray, identities: ArrayLike, mode: DeviceMode) -> None:
    """Completes records of which a device wrote only the value fields, in place.

    ``identities``: for each record a row of numbers in the order of Identity's fields.
    """
    fields = Identity._fields
    numbers = np.asarray(identities, np.int64).reshape(len(records), len(fields))
    for field, column in zip(fields, numbers.T):
        records[field] = column
    records["flags"] |= nonfinite(records).astype(np.uint32) * np.uint32(Flag.NONFINITE)
    records["version"] = RECORD_VERSION
    records["device_mode"] = int(mode)
