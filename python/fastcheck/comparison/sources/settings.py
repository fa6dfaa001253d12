"""Results of environment() and inventory(), from memory or from the JSON that a user kept of them,
as a side of a comparison: settings alone, no tensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Optional

from ..block import Block, Kind, Phase
from ..names import NameTable, Renaming

__all__ = ["SettingsSource", "read_settings", "settings_kind"]

_KINDS = {"environment": Kind.ENVIRONMENT, "inventory": Kind.INVENTORY}
# No result of these is as long; a JSON of another kind may be, and is not read whole.
_LONGEST = 256 * 1024 * 1024


def settings_kind(value: object) -> Optional[Kind]:
    """The kind of a dictionary that says of itself what it is."""
    said = value.get("fastcheck") if isinstance(value, Mapping) else None
    return _KINDS.get(said) if isinstance(said, str) else None


def read_settings(path: str) -> Optional[dict[str, Any]]:
    """The dictionary in a JSON file that environment() or inventory() made; None when it is
    anything else.
    """
    try:
        with open(path, encoding="utf-8") as file:
            found = json.loads(file.read(_LONGEST))
    except (OSError, ValueError):
        return None
    return found if settings_kind(found) is not None else None


class SettingsSource:
    """One result of environment() or inventory()."""

    def __init__(self, title: str, value: Mapping[str, Any]) -> None:
        kind = settings_kind(value)
        assert kind is not None
        self.title = title
        self.kind = kind
        self.notes: list[str] = []
        # The same form as the other side's, whichever of them went through a file.
        plain = json.loads(json.dumps(dict(value), default=str))
        phase = Phase.ENVIRONMENT if kind is Kind.ENVIRONMENT else Phase.HYPERPARAMETERS
        self.settings: dict[Phase, Any] = {phase: plain}

    def places(self) -> list[tuple[int, int]]:
        return []

    def is_cut(self, step: int, rank: int) -> bool:
        return False

    def block(
        self, step: int, rank: int, names: NameTable, renaming: Renaming, is_first: bool
    ) -> Block:
        raise NotImplementedError("settings have no tensors")
