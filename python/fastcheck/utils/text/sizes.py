"""Parses sizes in bytes, such as ``"200MB"``."""

from __future__ import annotations

import re

from fastcheck.errors import ConfigError, explain

LEAST_LIMIT_BYTES = 64 * 1024


_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS.update({"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40})


def parse_bytes(value: str | int | None) -> int | None:
    """``"1GB"``, ``"500 MB"``, ``"2GiB"`` or a number of bytes; None is no limit. ConfigError when
    it is none of these.
    """
    size: int | None = None
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    elif isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value)
        if match and match.group(2).upper() in _UNITS:
            size = int(float(match.group(1)) * _UNITS[match.group(2).upper()])
    if size is None or size < LEAST_LIMIT_BYTES:
        raise ConfigError(
            explain(
                "limit is not a size that fastcheck can use",
                expected='65536 bytes or more: a number, a text ("512MiB"), or None',
                got=repr(value),
                hint='limit="1GB"',
            )
        )
    return size


def format_bytes(size: float) -> str:
    """``512 B``, ``188 KB``, ``1.9 GB``: powers of 1000, as disks have them."""
    number, unit = float(size), "B"
    for larger in ("KB", "MB", "GB", "TB"):
        if abs(number) < 999.5:
            break
        number, unit = number / 1000, larger
    few = abs(number) >= 9.95 or unit == "B"
    return f"{number:.0f} {unit}" if few else f"{number:.1f} {unit}"
