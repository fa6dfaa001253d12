"""The position of the next record in a ring."""

from __future__ import annotations

from fastcheck.extension import compiled


class Cursor:
    """``seq``: the number of the next record. ``slot``: the slot of the host ring that a record of
    a CPU tensor goes to.
    """

    __slots__ = ("seq", "slot")

    def __init__(self) -> None:
        self.seq = 0
        self.slot = 0


def new_cursor() -> Cursor:
    """The extension's (csrc/torch/hooks/call.h), which its recorder moves too, or the one above."""
    module = compiled()
    cursor: Cursor = Cursor() if module is None else module.Cursor()
    return cursor
