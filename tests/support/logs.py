"""Helpers shared by the tests of the log."""

from __future__ import annotations

import numpy as np

from fastcheck.record.site import SiteTable
from support.records import record_builder as build


def site_table(count: int = 4) -> SiteTable:
    sites = SiteTable()
    for index in range(count):
        sites.intern(build.site(f"layers.{index}"))
    return sites


def as_bytes(records: np.ndarray) -> list[bytes]:
    return [record.tobytes() for record in records]
