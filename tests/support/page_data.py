"""Reads the data of a report's page, independently of the page's own script."""

from __future__ import annotations

import base64
import json
import re
import zlib
from typing import Any

import numpy as np


class PageData:
    """``header``, and the arrays as float64 with NaN where a value is missing, by name."""

    def __init__(self, page: str) -> None:
        self.header: dict[str, Any] = json.loads(inflated(page, "header"))
        data = inflated(page, "arrays")
        self.arrays = {
            name: _decoded(data[place["offset"] : place["offset"] + place["bytes"]], place)
            for name, place in self.header["arrays"].items()
        }
        columns = len(self.header["axis"]["starts"])
        bits = np.unpackbits(self.arrays.get("seen", np.zeros(0)).astype(np.uint8).reshape(-1))
        rows = len(self.header["rows"]["site"])
        self.seen = bits[: rows * columns].reshape(rows, columns).astype(bool)

    def low(self, name: str) -> np.ndarray:
        """The plane of the smallest values, which is left out where it is that of the largest."""
        found: np.ndarray = self.arrays.get(f"{name}.low", self.arrays[f"{name}.high"])
        return found


def inflated(page: str, name: str) -> bytes:
    """The header, which is JSON, or the arrays."""
    found = re.search(f'<script type="text/plain" id="{name}">([A-Za-z0-9+/=]*)</script>', page)
    assert found is not None
    return zlib.decompress(base64.b64decode(found[1]), -15)


def _decoded(data: bytes, place: dict[str, Any]) -> np.ndarray:
    shape = place["rows"], place["columns"]
    raw = np.frombuffer(data, np.uint8)
    if place["kind"] == "f64":
        words = raw.reshape(8, -1).T.copy().view("<u8").reshape(shape)
        return np.bitwise_xor.accumulate(words, axis=1).view("<f8")
    if place["kind"] == "linear":
        low, high = (np.array(place[end])[:, None] for end in ("low", "high"))
        values = low + (high - low) * raw.reshape(shape) / place["levels"]
        return np.where(raw.reshape(shape) == 255, np.nan, values)
    if place["kind"] == "u8":
        return raw.reshape(shape).astype(np.float64)
    cells = shape[0] * shape[1]
    zigzag = raw[:cells].astype(np.int32) | raw[cells : 2 * cells].astype(np.int32) << 8
    steps = ((zigzag >> 1) ^ -(zigzag & 1)).reshape(shape)
    codes = np.cumsum(steps, axis=1).astype(np.int16)
    values = np.where(codes == -32767, 0.0, np.exp2(codes / place["per_octave"]))
    if place["has_missing"]:
        missing = np.unpackbits(raw[2 * cells :])[:cells].reshape(shape).astype(bool)
        values = np.where(missing, np.nan, values)
    return values
