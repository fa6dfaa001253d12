"""Remarks of a comparison, and whether its sides can be equal to the bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Optional

from .block import Phase, Source
from .nested_diff import Setting
from .tally import Tally

__all__ = ["expects_bits", "notes_of"]


def expects_bits(
    actual: Source, reference: Source, settings: Mapping[Phase, Optional[list[Setting]]]
) -> bool:
    """Whether both sides were computed by the same code: environments that are known and equal, and
    as many modules compiled. If not, rounding may differ anywhere.
    """
    if actual.kind.family != "run":
        return True
    return settings.get(Phase.ENVIRONMENT) == [] and (
        actual.compiled_modules == reference.compiled_modules
    )


def notes_of(tally: Tally, actual: Source, reference: Source) -> list[str]:
    """What belongs into a report beside its answers."""
    found = []
    if tally.reordered:
        found.append(
            f"{tally.reordered:,} calls came in another order among the calls of their module"
        )
    if tally.moved:
        found.append(f"{tally.moved:,} inputs were read by another module first, equal to the bit")
    if tally.lookalikes:
        mine, other = next(iter(tally.lookalikes.items()))
        found.append(
            f"{len(tally.lookalikes):,} names only in actual hold what names only in reference "
            f"hold: {mine} is {other}, ... If they are renamed, give rename= (--rename FILE)"
        )
    for (mine, other), count in tally.dtypes.items():
        found.append(f"{count:,} tensors are {mine} in actual and {other} in reference")
    if tally.parts:
        found.append(
            f"{tally.parts:,} gradients of inputs differ and are not held against each other: "
            "msprobe has what one module adds to a gradient, fastcheck the whole of it"
        )
    if tally.cancelled:
        found.append(
            f"{len(tally.cancelled):,} gradients are sums whose terms cancel, "
            f"{next(iter(tally.cancelled))} first: their error is relative to what was summed"
        )
    if not tally.has_bits:
        found.append(
            "not all tensors have checksums or values on both sides: of the others, the "
            "statistics are compared"
        )
    return found + _seeds(actual, reference) + _compiled(actual, reference)


def _compiled(actual: Source, reference: Source) -> list[str]:
    counts = (actual.compiled_modules, reference.compiled_modules)
    if counts[0] == counts[1]:
        return []
    return [
        f"{counts[0]:,} modules ran compiled in actual and {counts[1]:,} in reference: equality to "
        "the bit is not expected"
    ]


def _seeds(actual: Source, reference: Source) -> list[str]:
    """A note, not a setting: a run without random numbers is the same under any seed."""
    seeds = []
    for side in (actual, reference):
        environment = side.settings.get(Phase.ENVIRONMENT)
        where = environment.get("where") if isinstance(environment, dict) else None
        seeds.append(where.get("initial_seed") if isinstance(where, dict) else None)
    if None in seeds or seeds[0] == seeds[1]:
        return []
    return [f"torch's seeds are {seeds[0]} in actual and {seeds[1]} in reference"]
