"""Value bytes that the portable backend writes for CPU tensors, and their check against the
reference.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fastcheck.backends.portable import backend as portable
from support.helpers import assert_same
from support.records.reference import DEPTHS, DTYPES, VALUE_BYTES

ALL = sorted(DTYPES)
DEFAULT = portable.TEMPORARY_BYTES
SMALL = 400_000  # chunks of a few tiles, whatever the dtype
FILLED = 0xEE


def slots_for(count: int) -> torch.Tensor:
    """Slots that were used before, and one more on either side."""
    return torch.full((count + 2, 192), FILLED, dtype=torch.uint8)


def taken(slots: torch.Tensor) -> list[bytes]:
    """The value bytes between the outer slots; nothing else may have been written."""
    assert (slots[[0, -1]] == FILLED).all()
    assert (slots[:, VALUE_BYTES:] == FILLED).all()
    return [row.numpy().tobytes()[:VALUE_BYTES] for row in slots[1:-1]]


def observed(x: torch.Tensor, depth: str = "full", **options: Any) -> bytes:
    slots = slots_for(1)
    portable.observe(x, slots, 1, DEPTHS[depth], **options)
    return taken(slots)[0]


def observed_list(xs: Sequence[torch.Tensor], depth: str = "full", **options: Any) -> list[bytes]:
    slots = slots_for(len(xs))
    portable.observe_list(xs, slots, 1, DEPTHS[depth], **options)
    return taken(slots)


def check(actual: bytes, wanted: bytes, note: object = "") -> None:
    """Value bytes against a reference record, sums within their tolerance."""
    assert_same(actual + wanted[VALUE_BYTES:], wanted, note, determinism="sums")
