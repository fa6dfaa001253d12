"""The Triton kernels as a compiler receives them, for one dtype: names and types of arguments, and
constants. Used ahead of time, without a device to specialise for (test_compilers.py, npu_lab.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from fastcheck.backends.portable.formats import FORMATS
from fastcheck.backends.triton import kernels, launch

KERNELS = {
    "whole": kernels.whole_kernel,
    "part": kernels.part_kernel,
    "fold": kernels.fold_kernel,
    "part_list": kernels.part_list_kernel,
    "fold_list": kernels.fold_list_kernel,
}
_POINTERS = dict.fromkeys(("words", "slot", "slots", "partials", "owners", "shapes"), "*i32")
_POINTERS["addresses"] = "*i64"


class Source(NamedTuple):
    kernel: Any
    types: dict[str, str]  # of what is no constant
    constants: dict[str, int]
    aligned: tuple[str, ...]  # pointers that the launcher may call divisible by 16


def source(name: str, dtype: str, target: launch.Target, depth: int = 3) -> Source:
    kernel = KERNELS[name]
    reader = launch.Reader(FORMATS[getattr(torch, dtype)], depth, target)
    constants = {name: n for name, n in reader.options.items() if name not in target.options}
    if name.startswith("fold"):
        constants["BLOCK"] = target.block
    else:
        constants["GROUPS"] = reader.groups
    tail = {"tail": f"*i{8 * reader.size}"}
    types = {
        argument: {**_POINTERS, **tail}.get(argument, "i32")
        for argument in kernel.arg_names
        if argument not in constants
    }
    return Source(kernel, types, constants, tuple(n for n in types if n in _POINTERS))
