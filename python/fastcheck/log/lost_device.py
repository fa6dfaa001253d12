"""That a device was lost, as a field of the meta file of a log."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_KEY = "lost_device"


def lost_to_meta(message: str, step: int) -> dict[str, Any]:
    """The field: what the device reported, in which step."""
    return {_KEY: {"message": message, "step": step}}


def lost_lines(metas: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """A line for each rank whose device was lost, by the meta files of the ranks."""
    lines = []
    for rank, meta in sorted(metas.items()):
        lost = meta.get(_KEY)
        if isinstance(lost, dict) and isinstance(lost.get("step"), int):
            of_rank = f" of rank {rank}" if len(metas) > 1 else ""
            lines.append(
                f"the device{of_rank} was lost in step {lost['step']:,}: {lost.get('message')}"
            )
    return lines
