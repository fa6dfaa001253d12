"""The Record's layout, flags and dtype codes are the same in C++, in NumPy, in the reference and in
docs/record-format.md.
"""

from __future__ import annotations

import re
import struct
from typing import Any

import numpy as np
import torch

import fastcheck
from fastcheck import _C, _kernels
from fastcheck.record import format as record_format
from fastcheck.record.format import Order
from support.paths import ROOT
from support.records.reference import (
    DEPTHS,
    LAYOUT,
    ORDERS,
    RECORD_BYTES,
    TABLE,
    VALUE_BYTES,
    fields,
    record,
)
from support.records.torch_dtypes import torch_dtype

PAGE = (ROOT / "docs" / "record-format.md").read_text()
NAMES = [*LAYOUT, "reserved"]
MIRROR: dict[str, tuple[Any, ...]] = dict(fastcheck.types.RECORD_DTYPE.fields or {})


def test_cpp_has_the_references_layout() -> None:
    layout = _kernels.record_layout()
    assert list(layout) == NAMES
    for name, (offset, code) in LAYOUT.items():
        assert layout[name] == (offset, struct.calcsize(code)), name
    assert layout["reserved"] == (146, 46)


def test_numpy_mirror_has_the_layout_of_cpp() -> None:
    dtype = fastcheck.types.RECORD_DTYPE
    assert dtype is record_format.RECORD_DTYPE
    assert dtype.names == tuple(NAMES)
    assert dtype.itemsize == RECORD_BYTES == record_format.RECORD_BYTES
    assert record_format.VALUE_BYTES == VALUE_BYTES
    assert record_format.RECORD_VERSION == 1
    for name, (offset, size) in _kernels.record_layout().items():
        field, at = MIRROR[name][:2]
        assert (at, field.itemsize) == (offset, size), name


def test_numpy_mirror_is_little_endian_and_of_the_right_kind() -> None:
    codes = {
        "<q": "<i8",
        "<Q": "<u8",
        "<d": "<f8",
        "<i": "<i4",
        "<I": "<u4",
        "<H": "<u2",
        "<B": "|u1",
    }
    for name, (_, code) in LAYOUT.items():
        if code == "8s":
            continue  # typed by the record's dtype
        field = MIRROR[name][0].newbyteorder("<")
        assert field == np.dtype(codes[code]), name
        assert field == MIRROR[name][0], name


def test_fields_do_not_overlap_and_leave_no_gap() -> None:
    at = 0
    for name, (offset, size) in sorted(_kernels.record_layout().items(), key=lambda item: item[1]):
        assert offset == at, name
        at += size
    assert at == RECORD_BYTES


def test_every_field_is_read_where_it_lies() -> None:
    """One distinct value per field, written by struct and read through NumPy."""
    raw = bytearray(RECORD_BYTES)
    for number, (offset, code) in enumerate(LAYOUT.values(), start=3):
        struct.pack_into("<d" if code == "8s" else code, raw, offset, number)
    scalar = np.frombuffer(bytes(raw), fastcheck.types.RECORD_DTYPE)[0]
    for number, name in enumerate(LAYOUT, start=3):
        assert scalar[name] == number, name


def test_dtype_table() -> None:
    rows = [(row.code, row.name, row.components, row.itemsize) for row in TABLE]
    assert _kernels.dtype_table() == rows
    assert [(i.code, i.name, i.components, i.component_bytes) for i in record_format.DTYPES] == rows
    kinds = {"float": "f8", "int": "i8", "uint": "u8", "bool": "u8"}
    assert [info.kind for info in record_format.DTYPES] == [kinds[row.kind] for row in TABLE]
    for row in TABLE:
        assert torch_dtype(row.name).itemsize == row.itemsize * row.components


def test_every_dtype_writes_its_code() -> None:
    for row in TABLE:
        rec = fields(_C.record(torch.zeros(3, dtype=torch_dtype(row.name))).numpy().tobytes())
        assert (rec["dtype"], rec["version"], rec["device_mode"]) == (row.code, 1, 0)
        assert (rec["seq"], rec["step"], rec["call"], rec["site"]) == (0, 0, 0, 0)


def test_enums() -> None:
    assert {d.name.lower(): int(d) for d in record_format.Depth} == DEPTHS
    assert {o.name.lower(): int(o) for o in Order} == ORDERS
    assert [m.name for m in fastcheck.types.DeviceMode] == ["IEEE", "SATURATING", "UNKNOWN"]
    assert [int(m) for m in fastcheck.types.DeviceMode] == [0, 1, 2]
    assert {f.name: int(f) for f in fastcheck.types.Flag} == {
        "NONFINITE": 1,
        "RECOMPUTE": 2,
        "SCALED": 4,
        "EVENT": 8,
        "ANEW": 16,
    }
    verdicts = [
        "none",
        "origin",
        "arrived",
        "propagated",
        "intended",
        "absorbed",
        "unresolved",
        "scaled",
        "benign",
    ]
    assert [v.name.lower() for v in fastcheck.types.Verdict] == verdicts
    assert [int(v) for v in fastcheck.types.Verdict] == list(range(9))
    assert record_format.VERDICT_SHIFT == 8 and record_format.VERDICT_MASK == 0xF00


def test_identity_fields_are_written_where_they_belong() -> None:
    slots = torch.full((3 * RECORD_BYTES,), 0xAB, dtype=torch.uint8)
    x = torch.tensor([1.0, float("nan")])
    identity = {"site": 7, "call": 5, "step": 1 << 40, "seq": (1 << 41) + 3}
    assert _C.observe(x, slots, 1, 2, **identity, flags=6) is True
    raw = slots.numpy().tobytes()
    assert raw[:RECORD_BYTES] == raw[2 * RECORD_BYTES :] == b"\xab" * RECORD_BYTES
    rec = raw[RECORD_BYTES : 2 * RECORD_BYTES]
    got = fields(rec)
    assert {name: got[name] for name in identity} == identity
    assert got["flags"] == 6 | 1
    assert rec[146:] == bytes(46)  # what was in the slot is gone
    assert rec[:VALUE_BYTES] == record(x, depth="stats")[:VALUE_BYTES]


def test_the_page_lists_the_layout_and_the_codes() -> None:
    offsets = {name: int(at) for at, name in re.findall(r"^\| (\d+) \| `(\w+)` \|", PAGE, re.M)}
    assert offsets == {name: offset for name, (offset, _) in LAYOUT.items()}
    assert "| 146 | reserved | 46 bytes |" in PAGE
    for row in TABLE[:8]:
        assert f"| {row.code} | {row.name} |" in PAGE
    assert "8 to 11 | int8, int16, int32, int64" in PAGE
    assert "12 to 15 | uint8, uint16, uint32, uint64" in PAGE
    assert "| 16 | bool |" in PAGE
    assert [row.name for row in TABLE[8:]] == [
        *("int8", "int16", "int32", "int64"),
        *("uint8", "uint16", "uint32", "uint64"),
        "bool",
    ]
