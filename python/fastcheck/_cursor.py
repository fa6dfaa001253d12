"""Where the next record goes."""

from __future__ import annotations

from ._extension import compiled

__all__ = ["Cursor", "new_cursor"]


class Cursor:
    """The number of the next record, and the slot of the host's ring that one of the host goes
    to.
    """

    __slots__ = ("seq", "slot")

    def __init__(self) -> None:
        self.seq = 0
        self.slot = 0


def new_cursor() -> Cursor:
    """The extension's (csrc/torch/hook_call.h), which its recorder moves too, or the one above."""
    module = compiled()
    cursor: Cursor = Cursor() if module is None else module.Cursor()
    return cursor
