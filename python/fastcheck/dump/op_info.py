"""What is known of an operator, looked up once for each of the process. In step with
csrc/torch/observer/op_table.cpp, which says the same to the observer of ``level="op"``.
"""

from __future__ import annotations

import re
from typing import Any

import torch

__all__ = ["OpInfo", "op_info"]

# In place, and without regard for what was there.
_OVERWRITING = re.compile(
    r"aten\.(copy|fill|zero|normal|uniform|bernoulli|random|exponential|log_normal|cauchy|geometric"
    r"|_foreach_copy|_foreach_zero|set)_"
)
# In place on what describes the memory.
_METADATA = re.compile(
    r"aten\.((detach|t|transpose|squeeze|unsqueeze|swapaxes|swapdims|as_strided|set|resize|resize_as"
    r"|requires_grad|rename|_coalesced)_|set_data)"
)
_RANDOM = getattr(torch.Tag, "nondeterministic_seeded", None)


class OpInfo:
    """Of one overload of an operator."""

    def __init__(self, func: Any) -> None:
        schema = func._schema
        space, _, base = schema.name.partition("::")
        #: ``aten.add.Tensor``: namespace, name and overload, as messages and logs have it.
        self.name = f"{space}.{base}"
        if schema.overload_name:
            self.name += f".{schema.overload_name}"
        plain = f"{space}.{base}"
        self.namespace = space
        self.arguments = [argument.name for argument in schema.arguments]
        self.position = {name: place for place, name in enumerate(self.arguments)}
        written = [
            place
            for place, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        is_metadata = _METADATA.fullmatch(plain) is not None
        #: Arguments that it writes, by place.
        self.written = frozenset(() if is_metadata else written)
        is_out = any(schema.arguments[place].is_out for place in written)
        #: What it writes it doesn't read before.
        self.overwrites = is_out or _OVERWRITING.fullmatch(plain) is not None
        self.is_in_place = bool(written)
        returned = schema.returns
        #: Returns other shapes of what it is given, and reads nothing.
        self.is_view = is_metadata or (
            bool(returned)
            and all(one.alias_info is not None and not one.alias_info.is_write for one in returned)
        )
        #: Returns memory that holds nothing yet.
        self.is_allocation = plain.startswith(("aten.empty", "aten.new_empty")) or plain in (
            "aten.resize_",
            "aten._efficientzerotensor",
        )
        #: Looks at the shape of what it is given, never at the values.
        self.ignores_values = plain.startswith("aten.new_") or base.endswith("_like")
        self.is_random = _RANDOM is not None and _RANDOM in getattr(func, "tags", ())
        self.is_collective = space in ("c10d", "_c10d_functional", "c10d_functional", "symm_mem")

    def draws(self, args: Any, kwargs: Any) -> bool:
        """Whether this call of it draws random numbers: attention is marked as random for the sake
        of its dropout, which may be off.
        """
        place = self.position.get("dropout_p")
        if place is None:
            return self.is_random
        given = args[place] if place < len(args) else kwargs.get("dropout_p", 0.0)
        return self.is_random and given != 0.0

    def why_once(self, args: Any, kwargs: Any) -> str:
        """Why computing this call of it once more would say nothing; empty where it would."""
        if self.is_view:
            return "a view: it computes nothing"
        if self.is_allocation:
            return "it allocates memory and computes nothing"
        if self.is_collective:
            return "it communicates"
        return "it draws random numbers" if self.draws(args, kwargs) else ""


_known: dict[Any, OpInfo] = {}


def op_info(func: Any) -> OpInfo:
    """Of an OpOverload."""
    found = _known.get(func)
    if found is None:
        found = _known[func] = OpInfo(func)
    return found
