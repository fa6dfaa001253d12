"""Writes replay.py beside a dump of a stop: a script that runs the call again."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fastcheck.dump.storage.shards import Slot
from fastcheck.errors import printable

SCRIPT = "replay.py"
RANDOM = "random.pt"


class UnsupportedArgumentError(Exception):
    """An argument that a script can't hold."""


class TensorSpec:
    """A tensor of the dump, as the script loads it."""

    def __init__(self, tensor: torch.Tensor, slot: Slot) -> None:
        self.slot = slot
        self.dtype = str(tensor.dtype)[6:]
        self.shape = tuple(tensor.shape)
        self.stride = None if tensor.is_contiguous() else tuple(tensor.stride())

    def __str__(self) -> str:
        fields = (*self.slot, self.dtype, self.shape, self.stride)
        return f"value(device, {', '.join(map(repr, fields))})"


def op_script(
    title: str,
    func: Any,
    args: Any,
    kwargs: Mapping[str, Any],
    tensors: Sequence[tuple[str, torch.Tensor, TensorSpec]],
    written: Sequence[torch.Tensor],
    expected: Sequence[tuple[str, int, int, int]],
) -> str:
    """``tensors``: what the call reads, with labels; ``written``: those that it writes.
    ``expected``: of each output its label and how many NaN, +Inf and -Inf it had.

    Raises UnsupportedArgumentError.
    """
    names: dict[int, str] = {}
    lines = []
    for label, tensor, spec in tensors:
        if id(tensor) not in names:
            names[id(tensor)] = f"t{len(names)}"
            lines.append(f"{names[id(tensor)]} = {spec}  # {printable(label)}")
    space, _, base = func._schema.name.partition("::")
    arguments = [_argument_text(value, names) for value in args]
    arguments += [f"{name}={_argument_text(value, names)}" for name, value in kwargs.items()]
    operator = f"operator({space!r}, {base!r}, {func._overloadname!r})"
    lines += [
        "put_back_generators()",
        f"result = {operator}({', '.join(arguments)})",
        f"return outputs([{', '.join(names[id(tensor)] for tensor in written)}], result)",
    ]
    # Not str.format(): the text is a program, and a title may hold anything.
    parts = {
        "@TITLE": printable(title).replace("\\", "\\\\").replace('"', "'"),  # in a docstring
        "@RUN\n": "".join(f"    {line}\n" for line in lines),
        "@EXPECTED\n": "".join(f"    {row!r},\n" for row in expected),
        "@DEVICE": repr(str(tensors[0][1].device) if tensors else "cpu"),
        "@RANDOM": repr(RANDOM),
    }
    return re.sub("|".join(parts), lambda mark: parts[mark.group()], _TEMPLATE)


def _argument_text(value: Any, names: Mapping[int, str]) -> str:
    if isinstance(value, torch.Tensor):
        return names[id(value)]
    if value is None or isinstance(value, (bool, int, str)):
        return repr(value)
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else f'float("{value}")'
    if isinstance(value, complex):
        return f"complex({_argument_text(value.real, names)}, {_argument_text(value.imag, names)})"
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return str(value)
    if isinstance(value, torch.device):
        return "device"
    if isinstance(value, torch.Generator):
        return "None"  # the state that it was in is not known; that of the default generator is
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_argument_text(item, names) for item in value)}]"
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        raise UnsupportedArgumentError(f"an argument is symbolic: {value}")
    raise UnsupportedArgumentError(f"an argument is a {type(value).__name__}")


_TEMPLATE = '''\
"""@TITLE

Runs that one call again, on the same inputs and random state, and checks whether its result is
non-finite again: exit status 0 if it does, 1 if not, 2 if it can't be run. Needs
torch, and what registers the operator where that is not torch itself.

    python replay.py [--device DEVICE]
"""

import argparse
import json
import random
import sys
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent

# Counts for each output in the run: NaN, +Inf, -Inf.
EXPECTED = [
@EXPECTED
]


def run(device):
@RUN


def value(device, file, key, dtype, shape, stride):
    """A tensor of a safetensors file: https://github.com/huggingface/safetensors (Format)."""
    with open(HERE / file, "rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        begin, end = json.loads(opened.read(size))[key]["data_offsets"]
        opened.seek(8 + size + begin)
        raw = bytearray(opened.read(end - begin))
    flat = torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    made = flat.view(getattr(torch, dtype)).reshape(shape)
    if stride is not None:
        strided = torch.empty_strided(shape, stride, dtype=made.dtype)
        try:
            made = strided.copy_(made)
        except RuntimeError:  # its elements overlap (an expanded tensor): row-major is as good
            pass
    return made.to(device)


def put_back_generators():
    kept = torch.load(HERE / @RANDOM, weights_only=True)
    torch.set_rng_state(kept["torch"])
    for name, states in kept["devices"].items():
        module = getattr(torch, name, None)
        if module is not None and module.is_available() and module.device_count() >= len(states):
            module.set_rng_state_all(states)
    version, numbers, gauss = kept["python"]
    random.setstate((version, tuple(numbers), gauss))
    if "numpy" in sys.modules:
        kind, numbers, *rest = kept["numpy"]
        sys.modules["numpy"].random.set_state((kind, numbers.numpy().astype("uint32"), *rest))


def operator(space, name, overload):
    try:
        return getattr(getattr(getattr(torch.ops, space), name), overload)
    except AttributeError:
        print(f"{space}::{name} is unknown here: import what registers it, at the top of this file")
        sys.exit(2)


def flat(value):
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    elif not isinstance(value, (list, tuple)):
        value = list(getattr(value, "__dict__", {}).values())
    return [tensor for item in value for tensor in flat(item)]


def outputs(written, result):
    known = {id(tensor) for tensor in written}
    return written + [tensor for tensor in flat(result) if id(tensor) not in known]


def count(tensor):
    if tensor is None:
        return 0, 0, 0
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if not tensor.is_floating_point():
        return 0, 0, 0
    # Every narrower format widens to float64 exactly.
    wide = tensor.detach().cpu().to(torch.float64)
    return int(wide.isnan().sum()), int(wide.isposinf().sum()), int(wide.isneginf().sum())


def main():
    parser = argparse.ArgumentParser(description="@TITLE")
    parser.add_argument("--device", default=@DEVICE, help="default: %(default)s, as in the run")
    made = run(torch.device(parser.parse_args().device))
    is_bad = False
    for (label, *was), tensor in zip(EXPECTED, made):
        found = count(tensor)
        is_bad = is_bad or any(found)
        said = "{} NaN, {} +Inf, {} -Inf"
        print(f"{label}: {said.format(*found)}; in the run: {said.format(*was)}")
    print("non-finite again" if is_bad else "finite: it does not come out non-finite again")
    return 0 if is_bad else 1


if __name__ == "__main__":
    sys.exit(main())
'''
