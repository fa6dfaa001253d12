"""The module of the kernels by itself: ``PYTHON any_python.py .../fastcheck/_kernels.abi3.so``.

Needs neither torch nor numpy. Reads buffers of every dtype by their addresses and prints one line:
the Python, the kernel, and a digest of the records, which every Python has to give.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.machinery
import importlib.util
import math
import platform
import struct
import sys
from array import array
from typing import Any

RECORD_BYTES = 192
FULL = 3
COUNT = 6_000


def load(path: str) -> Any:
    loader = importlib.machinery.ExtensionFileLoader("fastcheck._kernels", path)
    spec = importlib.util.spec_from_file_location("fastcheck._kernels", path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def words(count: int) -> array[int]:
    """Pseudo-random bits: NaN, infinities and subnormals are among them."""
    state, found = 1, array("Q")
    for _ in range(count):
        state = (state * 0x5851F42D4C957F2D + 0x14057B7EF767814F) % 2**64
        found.append(state ^ (state >> 29))
    return found


def read(
    module: Any, address: int, code: int, size: tuple[int, ...], stride: tuple[int, ...]
) -> bytes:
    record = (ctypes.c_uint8 * RECORD_BYTES)()
    module.records([(address, code, size, stride)], FULL, False, 1, ctypes.addressof(record))
    return bytes(record)


def check_values(module: Any, codes: dict[str, int]) -> None:
    """Known values, by another way than the digest's."""
    values = array("f", [1.0, -2.5, 0.0, math.inf, math.nan, 8.0])
    record = read(module, values.buffer_info()[0], codes["float32"], (len(values),), (1,))
    field = module.record_layout()
    counts = [
        struct.unpack_from("<q", record, field[name][0])[0]
        for name in ("numel", "nan_count", "posinf_count", "neginf_count", "zero_count")
    ]
    assert counts == [6, 1, 1, 0, 1], counts
    try:
        module.records("no tensors", FULL, False, 1, 0)
    except TypeError:
        return
    raise AssertionError("an argument of another type raised nothing")


def main() -> None:
    module = load(sys.argv[1])
    raw = words(2 * COUNT)  # as many as complex128 takes
    address = raw.buffer_info()[0]
    codes = {name: code for code, name, _, _ in module.dtype_table()}
    digest = hashlib.sha256()
    for name, code in codes.items():
        if name == "bool":
            flags = (ctypes.c_uint8 * COUNT)(*(word & 1 for word in raw[:COUNT]))
            at = ctypes.addressof(flags)
        else:
            at = address
        for size, stride in [((COUNT,), (1,)), ((60, 100), (1, 60)), ((COUNT // 3,), (3,))]:
            digest.update(read(module, at, code, size, stride))
    check_values(module, codes)
    where = f"Python {platform.python_version()}, {module.cpu_isa()}, {len(codes)} dtypes"
    print(f"{where}: {digest.hexdigest()[:16]}")


if __name__ == "__main__":
    main()
