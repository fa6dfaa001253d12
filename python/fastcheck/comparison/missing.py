"""Which tensors of a step have no partner on the other side."""

from __future__ import annotations

from collections.abc import Iterator

from .align import Alignment
from .block import Block, Phase, Source
from .measure import State

__all__ = ["missing_of"]


def missing_of(
    sources: tuple[Source, Source], ours: Block, theirs: Block, pairs: Alignment
) -> Iterator[tuple[State, Block, int, Phase]]:
    """State, block, position in it and question of each. ``sources``: actual and reference."""
    actual, reference = sources
    sides = (
        (State.ONLY_ACTUAL, ours, pairs.only_ours, pairs.ours, reference, theirs.step),
        (State.ONLY_REFERENCE, theirs, pairs.only_theirs, pairs.theirs, actual, ours.step),
    )
    for state, block, indices, matched, other, step in sides:
        end = len(block)
        if other.is_cut(step, block.rank):
            # The other side ends within this step: what it didn't come to is not missing.
            end = int(matched.max()) if len(matched) else 0
        # A log has first weights twice: before the forward, and before the update.
        weights = set(block.names[matched[block.phases[matched] == Phase.WEIGHTS]].tolist())
        for index in indices.tolist():
            phase = Phase(int(block.phases[index]))
            phase = Phase.FORWARD if phase is Phase.ARRIVED else phase
            if index > end or (phase is Phase.WEIGHTS and int(block.names[index]) in weights):
                continue
            yield state, block, index, phase
