"""Nodes of a graph: their order, the names of their operators, and the tensors that they hold.

A tensor that was saved through hooks (activation checkpointing, ``save_on_cpu``) is left alone: to
unpack it may run a program's code.
"""

from __future__ import annotations

import re
from typing import Any, Optional

import torch

from fastcheck.utils.torch.readable import can_read

from .assignments import each

#: The beginning of the attributes in which a node keeps what its operator has read and made.
PREFIX = "_saved_"
#: A non-finite number that is found in a part of a larger graph may not be the first.
MOST_NODES = 20_000
#: Names of what operators have made beside their result, as their nodes keep it.
BESIDE_RESULT = re.compile(
    r"result|out|total_weight|log_?sum_?exp|save|reserve|philox|rng|log_alpha"
)
#: Operators that make a NaN or an infinity of one, and rarely of other numbers.
CARRIERS = frozenset(("Add", "Div", "Mean", "Mul", "Neg", "Sub", "Sum"))
#: The node of a function that torch.jit has compiled, and differentiates as a whole.
OF_SCRIPT = "DifferentiableGraphBackward"
# Operators that make no other numbers.
_VIEWS = frozenset(("Clone", "Select", "Squeeze", "Unsqueeze", "View"))


def order_of(node: Any) -> int:
    """Nodes in the order in which their operators ran, on one thread."""
    return int(node._sequence_nr())


def name_of(node: Any) -> str:
    return str(node.name()).rpartition("::")[2]  # a node of a compiled function has namespaces


def operator_of(name: str) -> str:
    """``Div`` of ``DivBackward0``."""
    return re.sub(r"Backward\d*$", "", name)


def named_operand(name: str, tensor: Optional[torch.Tensor]) -> str:
    """The name of an operand, with the node that made it."""
    node: Any = None if tensor is None else tensor.grad_fn
    while node is not None and operator_of(name_of(node)) in _VIEWS:
        node = node.next_functions[0][0]
    return name if node is None or hasattr(node, "variable") else f"{name} ({name_of(node)})"


def line_of(node: Any) -> str:
    """The line of Python of a node, which anomaly mode has the graph keep."""
    kept = node.metadata.get("traceback_") or ()
    pattern = re.compile(r'File "(.+)", line (\d+), in (.+)')
    for text in reversed(kept):
        match = pattern.search(text)
        if match and not re.search(r"[/\\](?:torch|fastcheck)[/\\]", match[1]):
            return f"{match[1]}:{match[2]} in {match[3]}"
    return ""


def saved_tensors(node: Any) -> dict[str, torch.Tensor]:
    """The tensors that the node holds, of those that its operator has read and made, by name. Empty
    where hooks have packed a tensor, where a tensor was changed or freed since, and with versions
    of torch that do not tell of hooks.
    """
    tensors: dict[str, torch.Tensor] = {}
    try:
        names = [name[len("_raw") :] for name in dir(node) if name.startswith("_raw_saved_")]
        for name in names:
            raw = getattr(node, f"_raw{name}")
            if any(getattr(saved, "unpack_hook", True) is not None for saved in each(raw)):
                return {}
        for name in names:
            attribute = name if name.startswith(PREFIX) and hasattr(node, name) else name[1:]
            value = getattr(node, attribute)
            label = name[len(PREFIX) :]
            many = isinstance(value, (tuple, list))
            for index, tensor in enumerate(each(value)):
                if isinstance(tensor, torch.Tensor):
                    tensors[f"{label}[{index}]" if many else label] = tensor
    except RuntimeError:
        return {}
    return tensors


def is_count(tensor: torch.Tensor) -> bool:
    """True if it holds integers that can be read, such as a count that a sum is divided by."""
    kind = tensor.dtype
    return not (kind.is_floating_point or kind.is_complex) and can_read(tensor)
