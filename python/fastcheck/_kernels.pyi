"""The compiled kernels (``csrc/abi3/module.cpp``): no torch, for any Python from 3.9 on. Arguments
are positional only; addresses are integers, and what they point to has to stay until the call has
returned.

A tensor is (address, dtype code, sizes, strides in elements). ``threads``: at most so many read one
tensor. A workspace is (counters, partials, their bytes, table in pinned memory, its copy on the
device, their bytes), of ``csrc/cuda/launch.h``.

TypeError, ValueError: arguments that are not as described. RuntimeError: CUDA's error of a launch.
"""

from __future__ import annotations

_Tensors = list[tuple[int, int, tuple[int, ...], tuple[int, ...]]]
_Workspace = tuple[int, int, int, int, int, int, int]

table: object

def records(tensors: _Tensors, depth: int, logical: bool, threads: int, out: int, /) -> int: ...
def checksums(tensors: _Tensors, logical: bool, threads: int, out: int, /) -> None: ...
def exponents(tensors: _Tensors, logical: bool, threads: int, out: int, /) -> None: ...
def records_and_exponents(
    tensors: _Tensors, depth: int, logical: bool, threads: int, out: int, words: int, /
) -> None: ...
def cuda_device() -> int: ...
def cuda_is_capturing(stream: int, /) -> bool: ...
def cuda_exchange_capture_mode(mode: int, /) -> int: ...
def cuda_workspace(
    tensors: _Tensors, logical: bool, multiprocessors: int, /
) -> tuple[int, int, int]: ...
def cuda_records(
    tensors: _Tensors,
    logical: bool,
    depth: int,
    slots: int,
    multiprocessors: int,
    workspace: _Workspace,
    stream: int,
    /,
) -> None: ...
def cuda_found_nonfinite(
    tensors: _Tensors, found: int, multiprocessors: int, workspace: _Workspace, stream: int, /
) -> None: ...
def cuda_exponents_workspace(
    tensors: _Tensors, logical: bool, has_record: bool, multiprocessors: int, /
) -> tuple[int, int, int]: ...
def cuda_exponents(
    tensors: _Tensors,
    logical: bool,
    slot: int,
    words: int,
    multiprocessors: int,
    workspace: _Workspace,
    stream: int,
    /,
) -> None: ...
def cpu_isa() -> str: ...
def set_cpu_isa(name: str, /) -> None: ...
def cpu_isas() -> list[tuple[str, bool, str]]: ...
def compiler() -> str: ...
def record_layout() -> dict[str, tuple[int, int]]: ...
def dtype_table() -> list[tuple[int, str, int, int]]: ...
