"""Where a record comes from: the site, and the table that gives each site its number."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Optional

__all__ = ["Site", "SiteTable"]

# A run that makes up new labels for ever (a dict keyed by step) must not grow the table for ever.
_MAX_SITES = 65536


@dataclass(frozen=True)
class Site:
    """One place in the model that tensors pass; the step and the call belong to the record instead.

    ``module`` is the dotted path in the installed model, "" for the model itself. ``direction`` is
    ``forward``, ``backward`` or ``optimizer``. ``role`` is ``input``, ``output``, ``grad_input``,
    ``grad_output``, ``param``, ``param_grad``, ``buffer``, ``optimizer_state``, ``collective`` or
    ``loss``. ``index`` counts the tensors of this role in one call, and ``label`` is how this one
    is spelt: ``output[0]``, ``output.logits``, ``weight``.
    """

    module: str
    module_type: str
    direction: str
    role: str
    index: int
    label: str
    op: Optional[str] = None

    def __str__(self) -> str:
        if self.role == "loss":
            return f"{self.direction} · {self.label}"
        name = f"{self.module} ({self.module_type})" if self.module else self.module_type
        label = self.label
        if self.role in ("grad_input", "grad_output", "param_grad"):
            label = f"gradient of {label}"
        elif self.role in ("param", "buffer", "optimizer_state"):
            label = f"{self.role.replace('_', ' ')} {label}"
        op = f" · {self.op}" if self.op else ""
        return f"{name}{op} · {self.direction} · {label}"

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, ready for JSON."""
        return vars(self).copy()

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Site:
        """The inverse of to_dict(); keys that a later version added are ignored."""
        return cls(**{name: fields[name] for name in cls.__dataclass_fields__ if name in fields})


_REST = Site("", f"more than {_MAX_SITES - 1} sites", "forward", "output", 0, "one of the rest")


class SiteTable:
    """Numbers sites in the order in which they are first met; the same site always gets the same
    number.

    Holds 65536 at most: from then on new sites share the last number, whose site says so.
    """

    def __init__(self) -> None:
        self._sites: list[Site] = []
        self._numbers: dict[Site, int] = {}

    def intern(self, site: Site) -> int:
        """The number of ``site``."""
        number = self._numbers.get(site)
        if number is not None:
            return number
        if len(self._sites) >= _MAX_SITES - 1:
            if len(self._sites) == _MAX_SITES - 1:
                self._sites.append(_REST)
            return _MAX_SITES - 1
        number = self._numbers[site] = len(self._sites)
        self._sites.append(site)
        return number

    def __getitem__(self, number: int) -> Site:
        return self._sites[number]

    def __iter__(self) -> Iterator[Site]:
        return iter(self._sites)

    def __len__(self) -> int:
        return len(self._sites)
