"""Reads results of environment() and inventory() as a side of a comparison."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Optional

from fastcheck.comparison.block import Block, Kind, Phase
from fastcheck.comparison.names import NameTable, Renaming
from fastcheck.utils.reading import read_json

__all__ = ["SettingsSource", "read_settings", "settings_kind"]

_KINDS = {"environment": Kind.ENVIRONMENT, "inventory": Kind.INVENTORY}
# No result of these is as long; a JSON of another kind may be, and is not read whole.
_MAX_BYTES = 256 * 1024 * 1024


def settings_kind(value: object) -> Optional[Kind]:
    """The kind that a dictionary's "fastcheck" entry names."""
    kind = value.get("fastcheck") if isinstance(value, Mapping) else None
    return _KINDS.get(kind) if isinstance(kind, str) else None


def read_settings(path: str) -> Optional[dict[str, Any]]:
    """The dictionary in a JSON file that environment() or inventory() made; None when it is
    anything else.
    """
    try:
        found = read_json(path, _MAX_BYTES)
    except (OSError, ValueError):
        return None
    return found if settings_kind(found) is not None else None


class SettingsSource:
    """One result of environment() or inventory()."""

    compiled_modules = 0
    is_partial = False

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
