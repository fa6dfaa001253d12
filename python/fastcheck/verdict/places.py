"""The places where a non-finite value counts (the loss, a model's output, ...), by number."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["HOST", "RANKS", "Place", "Places"]


class Place(NamedTuple):
    """``kind``: output, loss, gradient, update, state, host or ranks. ``clause`` ends a reason:
    "it reached the loss".
    """

    kind: str
    clause: str

    @property
    def may_be_negative_infinity(self) -> bool:
        """Whether a -Inf is an ordinary value there: the logarithm of a probability of 0."""
        return self.kind in ("output", "host", "ranks")


#: What the observer itself sees: kHostPlace and kRanksPlace of csrc/torch/op_level/incident.h.
HOST = Place("host", "the host read it")
RANKS = Place("ranks", "it was sent to other ranks")


class Places:
    """Places by number, each once."""

    def __init__(self) -> None:
        self._places = [HOST, RANKS]
        self._numbers = {HOST: 0, RANKS: 1}

    def number(self, kind: str, clause: str) -> int:
        """The number of a place, which is added if it is new."""
        place = Place(kind, clause)
        number = self._numbers.get(place)
        if number is None:
            number = self._numbers[place] = len(self._places)
            self._places.append(place)
        return number

    def __getitem__(self, number: int) -> Place:
        return self._places[number]
