"""An incident: an op that made or read something non-finite, as the observer reports it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from ._api_names import spell_call
from ._extension import extension

__all__ = ["Fed", "Incident"]

# observer::Direction::kOptimizer
_OPTIMIZER = 2


class Fed(NamedTuple):
    """A non-finite tensor that the op read: its record, and whether an observed op has made it."""

    seq: int
    is_arrival: bool
    is_collective: bool


class Incident:
    """Numbers of the observer, spelt when they are asked for."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self._raw = raw
        self.fed = [Fed(*one) for one in raw["fed"]]
        #: The records of what came out, and whether each is non-finite.
        self.made: list[tuple[int, bool]] = raw["made"]
        #: A scalar argument is itself infinite: bit 0 +Inf, bit 1 -Inf; or is at least the largest
        #: number of something that was made: bits 2 and 3.
        self.infinite_scalars: int = raw["infinite_scalars"]
        self.is_recompute: bool = raw["is_recompute"]
        self.is_optimizer: bool = raw["direction"] == _OPTIMIZER
        #: It was left out by a filter, and nobody knows what it made of what it read.
        self.is_unseen: bool = raw["is_unseen"]
        #: The first record that the forward made of what ran in backward; -1: not known.
        self.forward_seq: int = raw["forward_seq"]
        #: Where Python was, in backward where its forward was if that is known; empty when nobody
        #: asked.
        self.line: str = raw["forward_line"] or raw["line"]
        #: The call of torch's Python API that it is part of, if those are numbered.
        self.api = spell_call(raw["api"])

    @property
    def bad_seqs(self) -> list[int]:
        """The non-finite records that it is about."""
        return [seq for seq, is_bad in self.made if is_bad] + [one.seq for one in self.fed]

    @property
    def op(self) -> str:
        """The op that ran, as the dispatcher names it."""
        return extension.op_observer().op_name(self._raw["op"])

    @property
    def inputs(self) -> list[tuple[str, int]]:
        """What it read: the names of the arguments, and the records."""
        observer, op = extension.op_observer(), self._raw["op"]
        return [(observer.argument_name(op, at), seq) for at, seq in self._raw["inputs"]]

    def __str__(self) -> str:
        """The op, and the node of autograd that it is part of."""
        node = self._raw["node"]
        return f"{self.op} (in {node})" if node else self.op
