"""Sites (the places that records come from), the table that numbers them, their names in
messages; and the check of records that come from a file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Optional

import numpy as np

from fastcheck.record.format import (
    COUNTS,
    DTYPES,
    NONFINITE_COUNTS,
    RECORD_VERSION,
    VERDICT_MASK,
    VERDICT_SHIFT,
    Depth,
    DeviceMode,
    Order,
    Verdict,
)

#: Bounds the table of a run whose labels never repeat (a dict keyed by step).
MAX_SITES = 65536

_KINDS = {"param": "parameter ", "buffer": "buffer ", "optimizer_state": "optimizer state "}

#: Labels of role ``loss`` beside ``loss``, on which backward() was called: what monitor.step(loss=)
#: was given; a loss that carries a scale of the user's own; a loss that only autograd.grad() began
#: at.
GIVEN_LOSS = "given loss"
SCALED_LOSS = "scaled loss"
GRAD_LOSS = "loss of grad()"


@dataclass(frozen=True)
class Site:
    """A place in the model that tensors pass; the step and the call belong to the record instead.

    ``module`` is the dotted path in the installed model, "" for the model itself. ``direction`` is
    ``forward``, ``backward`` or ``optimizer``. ``role`` is ``input``, ``output``, ``grad_input``,
    ``grad_output``, ``param``, ``param_grad``, ``grad_norm``, ``buffer``, ``optimizer_state``,
    ``loss``, or a number of the step: ``loss_scale``, ``learning_rate``, ``found_inf``,
    ``skipped_update`` (1.0 where an optimizer skips its update, else 0.0). ``index`` counts the
    tensors of this role in one call; a gradient of a parameter has 1 where it is a shard, of which
    each rank holds another part.
    ``label`` is how this tensor is written: ``output[0]``, ``output.logits``, ``weight``.
    """

    module: str
    module_type: str
    direction: str
    role: str
    index: int
    label: str
    op: Optional[str] = None

    @property
    def is_stored(self) -> bool:
        """True if the tensor is a parameter, the gradient or the optimizer's state of a parameter,
        or a buffer.
        """
        return self.role in ("param", "param_grad", "buffer", "optimizer_state")

    @property
    def key(self) -> str:
        """The ``state_dict`` key of a stored tensor: ``3.weight``; of other tensors the label.

        The key is that of the first installed model. In those of further models the name of the
        model's class stands in front: ``CrossEntropyLoss.weight``.
        """
        return f"{self.module}.{self.label}" if self.is_stored and self.module else self.label

    @property
    def tensor_name(self) -> str:
        """The tensor in running text: ``output[0]``, ``gradient of output[0]``, ``parameter
        3.weight``, ``gradient of 3.weight``.
        """
        if self.role == "loss":
            return "the loss"
        if self.role == "param_grad" or (
            self.role in ("grad_input", "grad_output") and "grad" not in self.label
        ):
            return f"gradient of {self.key}"
        return _KINDS.get(self.role, "") + self.key

    @property
    def in_text(self) -> str:
        """The tensor with its module; of a stored tensor, and of the loss, its name alone."""
        is_alone = self.role in ("loss", "buffer", "param")
        return self.tensor_name if is_alone else str(self)

    def __str__(self) -> str:
        if self.role == "loss":
            return f"{self.direction} · {self.label}"
        name = f"{self.module} ({self.module_type})" if self.module else self.module_type
        op = f" · {self.op}" if self.op else ""
        return f"{name}{op} · {self.direction} · {self.tensor_name}"

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, ready for JSON."""
        return vars(self).copy()

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Site:
        """The inverse of to_dict(); keys that a later version added are ignored.

        Raises:
            TypeError: a field is missing, or of another type.
        """
        values = {}
        for name in cls.__dataclass_fields__:
            if name in fields:
                values[name] = value = fields[name]
                is_wanted = type(value) is (int if name == "index" else str)
                if not is_wanted and not (name == "op" and value is None):
                    raise TypeError(f"{name} of a site is {value!r:.80}")
        return cls(**values)


_REST = Site("", f"more than {MAX_SITES - 1} sites", "forward", "output", 0, "one of the rest")


class SiteTable:
    """Numbers sites in the order in which they are first met; the same site always gets the same
    number.

    Holds 65536 at most: all further sites share the last number.
    """

    def __init__(self) -> None:
        self._sites: list[Site] = []
        self._numbers: dict[Site, int] = {}

    def intern(self, site: Site) -> int:
        """The number of ``site``."""
        number = self._numbers.get(site)
        if number is not None:
            return number
        if len(self._sites) >= MAX_SITES - 1:
            if len(self._sites) == MAX_SITES - 1:
                self._sites.append(_REST)
            return MAX_SITES - 1
        number = self._numbers[site] = len(self._sites)
        self._sites.append(site)
        return number

    def to_dicts(self, first: int) -> list[dict[str, Any]]:
        """The sites from this number on, ready for JSON, with their numbers as ``id``."""
        new = self._sites[first:]
        return [{"id": number, **vars(site)} for number, site in enumerate(new, first)]

    def __getitem__(self, number: int) -> Site:
        return self._sites[number]

    def __iter__(self) -> Iterator[Site]:
        return iter(self._sites)

    def __len__(self) -> int:
        return len(self._sites)


#: The module type of what was computed outside of every observed module: a loss, an optimizer.
OUTSIDE = "outside the model"


def module_name(site: Site) -> str:
    """``layers.3.attn (Attention)``; the installed model itself has no path and is named by its
    type.
    """
    if (site.op and site.module_type == OUTSIDE) or not (site.module or site.module_type):
        return OUTSIDE
    return (
        f"{site.module} ({site.module_type})" if site.module else f"{site.module_type} (the model)"
    )


# More than any memory holds; below it the sums of counts do not overflow.
_MAX_NUMEL = 1 << 60
_COMPONENTS = np.array([info.components for info in DTYPES])


def is_valid(records: np.ndarray) -> np.ndarray:
    """A boolean array of the records that can have been written by this version.

    Checked are the fields that index or size something, and that the counts fit each other. A
    flipped bit of a value or a checksum can't be told from another value.
    """
    valid: np.ndarray = records["version"] == RECORD_VERSION
    codes = records["dtype"]
    valid &= codes < len(DTYPES)
    valid &= (records["depth"] >= min(Depth)) & (records["depth"] <= max(Depth))
    valid &= records["order"] <= max(Order)
    valid &= records["device_mode"] <= max(DeviceMode)
    valid &= ((records["flags"] & VERDICT_MASK) >> VERDICT_SHIFT) <= max(Verdict)
    valid &= (records["site"] >= 0) & (records["site"] < MAX_SITES)
    valid &= records["call"] >= 0
    numel = records["numel"]
    valid &= (numel >= 0) & (numel <= _MAX_NUMEL)
    components = np.where(valid, numel, 0) * _COMPONENTS[np.where(valid, codes, 0)]
    for name in COUNTS[1:]:
        valid &= (records[name] >= 0) & (records[name] <= components)
    bad = np.zeros(len(records), np.int64)
    for name in NONFINITE_COUNTS:
        bad += np.where(valid, records[name], 0)
    valid &= bad <= components
    return valid
