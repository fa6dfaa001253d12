"""The tables of a fleet: their columns, and how records become rows of at most 20 bytes.

Integers are signed, because engines other than DuckDB have no unsigned integers: a checksum is the
same 64 bits as an int64.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from fastcheck.errors import needed_module, printable
from fastcheck.record.format import COUNTS, VERDICT_MASK, VERDICT_SHIFT, Depth
from fastcheck.record.site import Site
from fastcheck.record.statistics import statistics_columns

#: The version of the tables; another meaning of a column is another number.
RECORD_FORMAT = 1
_ROW_GROUP = 1 << 20
_LARGEST_FLOAT32 = float(np.finfo(np.float32).max)
_LOW_FLAGS = 0xFF
# The exponent bits of a float32. All of them set: an infinity or NaN.
_EXPONENT = np.uint32(0x7F800000)

FLOAT_COLUMNS = ("min", "max", "mean", "mean_abs", "rms")
# Columns whose last bits are noise: these differ from row to row, and take a byte each.
_ROUNDED = ("mean", "mean_abs", "rms")
#: The coordinates of a rank in a device mesh.
COORDINATES = ("dp", "tp", "pp", "ep", "cp")
#: The columns that no row is without.
KEYS = {"step": "int64", "site": "int64", "rank": "int32", "call": "int32"}
#: The columns of the records by name, with their types.
RECORD_COLUMNS: dict[str, str] = {
    **KEYS,
    "dtype": "int32",
    "flags": "int32",
    "verdict": "int32",
    **dict.fromkeys(COUNTS, "int64"),
    **dict.fromkeys(FLOAT_COLUMNS, "float"),
    "checksum": "int64",
}
#: The columns of the small tables by table, with their types.
TABLES: dict[str, dict[str, str]] = {
    "sites": {
        "site": "int64",
        "position": "int32",
        "name": "string",
        **dict.fromkeys(("module", "module_type", "op", "direction", "role", "label"), "string"),
        "index": "int32",
    },
    "ranks": {
        "rank": "int32",
        **dict.fromkeys(("node", "host", "device", "serial"), "string"),
        "world_size": "int32",
        **dict.fromkeys(COORDINATES, "int32"),
        "replica_group": "string",
        "pid": "int32",
        "created": "string",
    },
    "events": {
        "rank": "int32",
        **dict.fromkeys(("step", "site", "seq"), "int64"),
        "verdict": "string",
        "counted": "bool",
        **dict.fromkeys(("name", "reason"), "string"),
    },
    "meta": {"rank": "int32", "format": "int32", "text": "string"},
}


def need(name: str, extra: str = "fleet") -> Any:
    """The module of this name.

    Raises:
        ConfigError: it is not installed.
    """
    return needed_module(name, "this command", f"pip install 'fastcheck[{extra}]'")


def site_id(site: Site) -> int:
    """64 bits, signed, that are the same on every rank: of all that tells the site from others."""
    fields = (site.module, site.op or "", site.direction, site.role, str(site.index), site.label)
    digest = hashlib.blake2b("\0".join(fields).encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def record_rows(rank: int, records: np.ndarray, sites: Mapping[int, Site]) -> dict[str, np.ndarray]:
    """Records of one rank as columns, in their order; a float is NaN where the record has none.

    min, max, mean, mean_abs and rms are rounded to float32, and the last three to 16 bits of it;
    what is beyond its range is its largest number. A checksum is kept of parameters, gradients,
    buffers and optimizer states, which other ranks may hold too, and 0 (null in a table) elsewhere.
    """
    numbers, places = np.unique(records["site"], return_inverse=True)
    ids, is_stored = [], []
    for number in numbers.tolist():
        site = sites.get(number)
        ids.append(number if site is None else site_id(site))
        is_stored.append(site is not None and site.is_stored)
    rows: dict[str, np.ndarray] = {
        "step": records["step"].astype(np.int64),
        "site": np.array(ids, np.int64)[places],
        "rank": np.full(len(records), rank, np.int32),
        "call": records["call"].astype(np.int32),
        "dtype": records["dtype"].astype(np.int32),
        "flags": (records["flags"] & _LOW_FLAGS).astype(np.int32),
        "verdict": ((records["flags"] & VERDICT_MASK) >> VERDICT_SHIFT).astype(np.int32),
    }
    rows.update({name: records[name].astype(np.int64) for name in COUNTS})
    columns = statistics_columns(records)
    for name in FLOAT_COLUMNS:
        values = np.clip(columns[name], -_LARGEST_FLOAT32, _LARGEST_FLOAT32)
        single = values.astype(np.float32)
        rows[name] = rounded(single) if name in _ROUNDED else single
    kept = np.array(is_stored, bool)[places] & (records["depth"] >= Depth.FULL)
    rows["checksum"] = np.where(kept, records["checksum"].view("<i8"), 0).astype(np.int64)
    return rows


def rounded(values: np.ndarray) -> np.ndarray:
    """float32 with 16 significant bits, to the nearest, ties to even, and never to an infinity:
    the lowest byte of each is 0. NaN stays NaN. Off by 2 ** -16 of a value at most.
    """
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    up = bits + np.uint32(0x7F) + ((bits >> np.uint32(8)) & np.uint32(1))
    up = np.where((up & _EXPONENT) == _EXPONENT, bits, up) & np.uint32(0xFFFFFF00)
    return np.where(np.isnan(values), np.float32(np.nan), up.view(np.float32))


def sorted_rows(pieces: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The rows of all pieces, at least one, sorted by step, site, rank and call."""
    rows = {name: np.concatenate([piece[name] for piece in pieces]) for name in RECORD_COLUMNS}
    order = np.lexsort((rows["call"], rows["rank"], rows["site"], rows["step"]))
    return {name: column[order] for name, column in rows.items()}


def record_table(rows: Mapping[str, np.ndarray]) -> Any:
    """``rows`` as an Arrow table; NaN, and a checksum of 0, become null."""
    arrow = need("pyarrow")
    schema = _schema(RECORD_COLUMNS)
    absent = {"checksum": rows["checksum"] == 0}
    arrays = [
        arrow.array(rows[name], type=kind, mask=absent.get(name), from_pandas=True)
        for name, kind in zip(schema.names, schema.types)
    ]
    return arrow.table(arrays, schema=schema)


def small_table(kind: str, rows: list[dict[str, Any]]) -> Any:
    """Rows of one of TABLES as an Arrow table; what a row lacks, or what its column can't hold, is
    null. Control characters in texts are escaped.
    """
    arrow = need("pyarrow")
    columns = TABLES[kind]
    made = {name: [_fitting(row.get(name), kind) for row in rows] for name, kind in columns.items()}
    return arrow.table(made, schema=_schema(columns))


def table_bytes(table: Any) -> Any:
    """A table as the bytes of a Parquet file, in an Arrow buffer: zstd, floats split into their
    bytes, and all else as dictionaries, which take no room where a value hardly changes.
    """
    arrow, parquet = need("pyarrow"), need("pyarrow.parquet")
    sink = arrow.BufferOutputStream()
    options: dict[str, Any] = {"compression": "zstd", "compression_level": 3}
    if "rms" in table.schema.names:
        plain = ("checksum", *FLOAT_COLUMNS)
        options["use_dictionary"] = [name for name in RECORD_COLUMNS if name not in plain]
        options["column_encoding"] = {
            "checksum": "PLAIN",
            **dict.fromkeys(FLOAT_COLUMNS, "BYTE_STREAM_SPLIT"),
        }
    parquet.write_table(table, sink, row_group_size=_ROW_GROUP, **options)
    return sink.getvalue()


def _fitting(value: Any, kind: str) -> Any:
    if value is not None and kind == "string":
        return printable(str(value))
    if value is not None and kind.startswith("int"):
        limit = 1 << (int(kind[len("int") :]) - 1)
        return value if -limit <= value < limit else None
    return value


def _schema(columns: Mapping[str, str]) -> Any:
    arrow = need("pyarrow")
    types = {kind: arrow.type_for_alias(kind) for kind in columns.values()}
    return arrow.schema([(name, types[kind]) for name, kind in columns.items()])
