"""Facts from an operator's schema, and the tensors among its arguments and results."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

# Operators that work in place, and without regard for what was there.
_OVERWRITING = re.compile(
    r"aten\.(copy|fill|zero|normal|uniform|bernoulli|random|exponential|log_normal|cauchy|geometric"
    r"|_foreach_copy|_foreach_zero|set)_"
)


# Operators that work in place on what describes the memory.
_METADATA = re.compile(
    r"aten\.((detach|t|transpose|squeeze|unsqueeze|swapaxes|swapdims|as_strided|set|resize|resize_as"
    r"|requires_grad|rename|_coalesced)_|set_data)"
)


# Their results are elements of their arguments: nothing is rounded.
_MOVING = re.compile(
    r"aten\.(amax|amin|cat|clamp|clone|constant_pad_nd|copy|embedding|flip|gather|index|index_select"
    r"|masked_fill|masked_select|max|max_pool2d_with_indices|maximum|min|minimum|neg"
    r"|reflection_pad[12]d|relu|repeat|repeat_interleave|replication_pad[12]d|roll|select_scatter"
    r"|slice_scatter|sort|stack|take|topk|tril|triu|where)"
)


# An operator of c10d and its argument that receives.
_RECEIVED = re.compile(r"c10d\.(\w+ output(?!_split_sizes)\w*|recv\w* tensors)")
# Copies a rank's part into memory that a collective is to fill, and returns all of it.
_ROOM_FOR_COLLECTIVE = "fsdp.all_gather_copy_in"
# Operators that are given what a collective is still writing, or is to write.
_GIVEN_UNFINISHED = frozenset(
    (
        "_c10d_functional.wait_tensor",
        "_c10d_functional._wrap_tensor_autograd",
        _ROOM_FOR_COLLECTIVE,
    )
)


_RANDOM = getattr(torch.Tag, "nondeterministic_seeded", None)


class OpInfo:
    """The properties of one overload of an operator, from its schema."""

    def __init__(self, func: Any) -> None:
        schema = func._schema
        space, _, base = schema.name.partition("::")
        plain = f"{space}.{base}"
        #: ``aten.add.Tensor``: namespace, name and overload, as messages and logs have it.
        self.name = f"{plain}.{schema.overload_name}" if schema.overload_name else plain
        self.arguments = [argument.name for argument in schema.arguments]
        self.position = {name: place for place, name in enumerate(self.arguments)}
        written = [
            place
            for place, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        is_metadata = _METADATA.fullmatch(plain) is not None
        is_out = any(schema.arguments[place].is_out for place in written)
        # Schemas of c10d have as read what they receive.
        received = [name for name in self.arguments if _RECEIVED.fullmatch(f"{plain} {name}")]
        #: Arguments that it writes, by place.
        self.written = frozenset(
            () if is_metadata else (*written, *(self.position[name] for name in received))
        )
        #: True if it doesn't read before what it writes.
        self.overwrites = is_out or bool(received) or _OVERWRITING.fullmatch(plain) is not None
        self.is_in_place = bool(written)
        returned = schema.returns
        #: Returns other shapes of what it is given, and reads nothing.
        self.is_view = is_metadata or (
            bool(returned)
            and all(
                output.alias_info is not None and not output.alias_info.is_write
                for output in returned
            )
        )
        #: Returns memory that holds nothing yet.
        self.is_allocation = plain.startswith(("aten.empty", "aten.new_empty")) or plain in (
            "aten.resize_",
            "aten._efficientzerotensor",
        )
        #: Moves or chooses values, and computes none.
        self.moves_values = _MOVING.fullmatch(plain) is not None
        #: Looks at the shape of what it is given, never at the values.
        self.ignores_values = (
            plain.startswith("aten.new_") or base.endswith("_like") or plain in _GIVEN_UNFINISHED
        )
        self.is_random = _RANDOM is not None and _RANDOM in getattr(func, "tags", ())
        is_functional = space.startswith("_c10d_functional")
        self.is_collective = is_functional or space in ("c10d", "c10d_functional", "symm_mem")
        #: Returns before its results are written.
        self.is_unfinished = plain == _ROOM_FOR_COLLECTIVE or (
            (is_functional or space == "c10d") and base != "wait_tensor"
        )

    def draws(self, args: Any, kwargs: Any) -> bool:
        """True if this call of it draws random numbers: attention is marked as random for the sake
        of its dropout, which may be off.
        """
        place = self.position.get("dropout_p")
        if place is None:
            return self.is_random
        given = args[place] if place < len(args) else kwargs.get("dropout_p", 0.0)
        return self.is_random and given != 0.0

    def why_once(self, args: Any, kwargs: Any) -> str:
        """The reason why a second run of this call would show nothing; empty where it would."""
        if self.is_view:
            return "a view: it computes nothing"
        if self.is_allocation:
            return "it allocates memory and computes nothing"
        if self.is_collective:
            return "it communicates"
        return "it draws random numbers" if self.draws(args, kwargs) else ""


@functools.cache
def op_info(func: Any) -> OpInfo:
    return OpInfo(func)


_MAX_ITEMS = 64
_MAX_DEPTH = 6
_MAX_TEXT = 200


def tensors_of(value: Any, label: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of an op's argument or result: itself, or those in a list or tuple."""
    if isinstance(value, torch.Tensor):
        yield label, value
    elif isinstance(value, (list, tuple)):
        for position, item in enumerate(value):
            yield from tensors_of(item, f"{label}[{position}]")


def inputs_of(info: OpInfo, args: Any, kwargs: Any) -> list[tuple[int, str, torch.Tensor]]:
    """The tensors among an operator's arguments: (place in the schema, label, tensor)."""
    inputs = []
    for place, value in enumerate(args):
        if isinstance(value, torch.Tensor):
            inputs.append((place, info.arguments[place], value))
        elif isinstance(value, (list, tuple)):
            for label, tensor in tensors_of(value, info.arguments[place]):
                inputs.append((place, label, tensor))
    for name, value in kwargs.items():
        for label, tensor in tensors_of(value, name):
            inputs.append((info.position.get(name, len(args)), label, tensor))
    return inputs


def outputs_of(info: OpInfo, args: Any, kwargs: Any, result: Any) -> list[torch.Tensor]:
    """The tensors that an operator has written in place, then the other tensors that it
    returned.
    """
    outputs = []
    if info.written:
        outputs = [t for place, _, t in inputs_of(info, args, kwargs) if place in info.written]
    written = {id(tensor) for tensor in outputs}
    outputs += [tensor for _, tensor in tensors_of(result, "") if id(tensor) not in written]
    return outputs


def others_of(info: OpInfo, args: Any, kwargs: Any) -> dict[str, Any]:
    """The arguments of an operator that are not tensors, by name."""
    named = [(info.arguments[place], value) for place, value in enumerate(args)]
    named += list(kwargs.items())
    return {
        name: plain_value(value)
        for name, value in named
        if not isinstance(value, torch.Tensor)
        and not (
            isinstance(value, (list, tuple)) and any(isinstance(v, torch.Tensor) for v in value)
        )
    }


def describe_tensor(tensor: torch.Tensor) -> dict[str, Any]:
    """The fields of the dump's index for a tensor, beside its record. A dimension whose size varies
    within a nested tensor is -1.
    """
    made: dict[str, Any] = {"dtype": str(tensor.dtype)[6:], "shape": _sizes(tensor)}
    if tensor.is_nested:
        made["layout"] = "nested" if tensor.layout is torch.strided else str(tensor.layout)[6:]
    elif tensor.layout is torch.strided and not tensor.is_contiguous():
        made["stride"] = list(tensor.stride())
    elif tensor.layout is not torch.strided:
        made["layout"] = str(tensor.layout)[6:]
    if not tensor.is_cpu:
        made["device"] = str(tensor.device)
    if tensor.requires_grad:
        made["requires_grad"] = True
    return made


def _sizes(tensor: torch.Tensor) -> list[int]:
    if not tensor.is_nested:
        # A size may be a symbol when it is traced.
        return [size if type(size) is int else -1 for size in tensor.shape]
    sizes = []
    for dimension in range(tensor.dim()):
        try:
            size = tensor.size(dimension)
        except RuntimeError:  # irregular
            size = -1
        sizes.append(size if type(size) is int else -1)
    return sizes


def plain_value(value: Any, depth: int = 0) -> Any:
    """``value`` without tensors, which are listed by themselves; what is long is cut short."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return value if len(value) <= _MAX_TEXT else value[:_MAX_TEXT] + "..."
    if isinstance(value, torch.Tensor):
        return "a tensor"
    if depth < _MAX_DEPTH and isinstance(value, (list, tuple)):
        items = [plain_value(item, depth + 1) for item in value[:_MAX_ITEMS]]
        return items if len(value) <= _MAX_ITEMS else [*items, f"... {len(value)} in all"]
    if depth < _MAX_DEPTH and isinstance(value, Mapping):
        return {
            str(key): plain_value(item, depth + 1) for key, item in list(value.items())[:_MAX_ITEMS]
        }
    if isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format)):
        return str(value).replace("torch.", "")
    if isinstance(value, complex):
        return str(value)
    # Not repr(): a configuration object's may be long, or hold an address, which no two runs share.
    return type(value).__name__
