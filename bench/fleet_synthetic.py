"""Writes the Parquet files of a fleet of any size without training, healthy or with one fault.

    python bench/fleet_synthetic.py DIRECTORY --ranks 64 --sites 100 --steps 50 --fault scale

Ranks are shards x replicas, eight to a host. Three sites in ten are weights: the replicas of a
shard hold the same bits, another number each step. The rms of an activation is 2 ** (level of the
site and shard + walk over the steps + noise of the row), the noise normal with a sigma of NOISE in
log2, and in one row of a thousand four times as large. In each fleet one step is a loss spike of
all ranks, and a hundredth of the rank-steps are odd batches, which move all activations of the
rank by up to 0.1.
"""

from __future__ import annotations

import argparse
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from fastcheck.fleet.collector import rank_row, site_row
from fastcheck.fleet.schema import (
    FLOAT_COLUMNS,
    RECORD_COLUMNS,
    record_table,
    rounded,
    small_table,
    table_bytes,
)
from fastcheck.fleet.store import Folder
from fastcheck.record.site import Site

RANKS_PER_HOST = 8
NOISE = 0.02
FAULTS = ("bitflip", "scale", "nan", "drift", "host", "stuck")
_WEIGHTS = 0.3
_NUMEL = 1 << 20
_ROWS = 1 << 20
_FILE_ROWS = 1 << 24


@dataclass(frozen=True)
class Fault:
    """What is wrong in a fleet: ``ranks`` from ``step`` on at ``site`` (its number)."""

    kind: str
    ranks: tuple[int, ...]
    site: int
    step: int


@dataclass(frozen=True)
class Shape:
    """The size of a fleet. ``shards``: ranks of a model copy."""

    ranks: int
    sites: int
    steps: int
    shards: int = 8

    @property
    def weights(self) -> int:
        """How many of the sites are weights, which come last."""
        return int(self.sites * _WEIGHTS)


def choose_fault(shape: Shape, kind: str, seed: int) -> Fault:
    """A fault of this kind at a place that ``seed`` decides; it begins in the first half."""
    rng = np.random.default_rng([seed, zlib.crc32(kind.encode())])
    rank = int(rng.integers(shape.ranks))
    step = int(rng.integers(1, max(shape.steps // 2, 2)))
    activations = shape.sites - shape.weights
    site = int(rng.integers(activations))
    ranks: tuple[int, ...] = (rank,)
    if kind == "bitflip":
        site = activations + int(rng.integers(shape.weights))
    if kind == "host":
        first = rank // RANKS_PER_HOST * RANKS_PER_HOST
        ranks = tuple(range(first, min(first + RANKS_PER_HOST, shape.ranks)))
    return Fault(kind, ranks, site, step)


def sites_of(shape: Shape) -> list[Site]:
    """Activations, then weights."""
    made = []
    for number in range(shape.sites):
        is_weight = number >= shape.sites - shape.weights
        place = number - (shape.sites - shape.weights) if is_weight else number
        path = f"blocks.{place // 4}.{('attn.qkv', 'attn.proj', 'mlp.fc1', 'mlp.fc2')[place % 4]}"
        if is_weight:
            made.append(Site(path, "Linear", "optimizer", "param", 0, "weight"))
        else:
            made.append(Site(path, "Linear", "forward", "output", 0, "output"))
    return made


class _Numbers:
    """The statistics of all rows, a block of sites of one step at a time."""

    def __init__(self, shape: Shape, faults: Sequence[Fault], seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.shape, self.faults = shape, faults
        self.shard = np.arange(shape.ranks) % shape.shards
        self.level = rng.normal(0, 2, (shape.sites, 1)) + rng.normal(
            0, 0.05, (shape.sites, shape.shards)
        )
        self.walk = np.cumsum(rng.normal(0, 0.01, (shape.steps, shape.sites)), axis=0)
        spike = int(rng.integers(shape.steps))
        self.walk[spike, : shape.sites - shape.weights] += 1.0
        odd = rng.random((shape.steps, shape.ranks)) < 0.01
        self.batch = np.where(odd, rng.uniform(-0.1, 0.1, odd.shape), 0.0).astype(np.float32)
        self.keys = rng.integers(1, 1 << 62, (shape.sites, shape.shards), dtype=np.int64)

    def block(
        self, rng: np.random.Generator, step: int, first: int, end: int
    ) -> dict[str, np.ndarray]:
        """Float columns, nan_count and checksum of sites ``first`` to ``end``: sites by ranks."""
        shape = self.shape
        shift = (self.level[first:end, self.shard] + self.walk[step, first:end, None]).astype(
            np.float32
        )
        is_weight = np.arange(first, end) >= shape.sites - shape.weights
        size = shift.shape
        noise = rng.standard_normal(size, dtype=np.float32) * np.float32(NOISE)
        noise[rng.integers(0, 1000, size, dtype=np.uint16) == 0] *= 4
        noise += self.batch[step]
        detail = rng.standard_normal((3, *size), dtype=np.float32) * np.float32(0.05)
        if is_weight.any():
            # Replicas have equal values.
            weights = np.flatnonzero(is_weight)
            same = rng.standard_normal((4, len(weights), shape.shards), dtype=np.float32)
            noise[weights] = same[0][:, self.shard] * np.float32(0.001)
            for part, values in zip(detail, same[1:]):
                part[weights] = values[:, self.shard] * np.float32(0.05)
        rms = np.exp2(shift + noise)
        columns = {
            "rms": rms,
            "max": rms * (5 + detail[0]),
            "min": -rms * (5 + detail[1]),
            "mean": rms * detail[2],
            "mean_abs": rms * np.float32(0.8) * (1 + detail[0] * detail[1]),
        }
        key = self.keys[first:end] ^ np.int64((step + 1) * 0x5851F42D4C957F2D % (1 << 62))
        columns["checksum"] = np.where(is_weight[:, None], key[:, self.shard], 0)
        columns["nan_count"] = np.zeros(size, np.int64)
        for fault in self.faults:
            if step >= fault.step:
                self._spoil(fault, columns, step, first, end)
        return columns

    def _spoil(
        self, fault: Fault, columns: dict[str, np.ndarray], step: int, first: int, end: int
    ) -> None:
        ranks = list(fault.ranks)
        sites = [fault.site]
        if fault.kind == "host":
            # One site in five, as a slow clock or a bad link of the host would.
            sites = list(range(fault.site % 5, self.shape.sites - self.shape.weights, 5))
        for site in sites:
            if not first <= site < end:
                continue
            at = site - first, ranks
            if fault.kind == "bitflip":
                columns["checksum"][at] ^= 1 << 33
            elif fault.kind == "nan" and step == fault.step:
                columns["nan_count"][at] = 1
            elif fault.kind in ("scale", "host", "drift"):
                factor = 1.01 ** (step - fault.step) if fault.kind == "drift" else 1.2
                for name in FLOAT_COLUMNS:
                    columns[name][at] *= np.float32(factor)


def write_fleet(
    folder: Folder,
    shape: Shape,
    faults: Sequence[Fault] = (),
    seed: int = 0,
    run: str = "synthetic",
    file_rows: int = _FILE_ROWS,
) -> int:
    """Writes the files of a run; returns their bytes. One file has at most ``file_rows`` rows, but
    holds a step at least.
    """
    numbers, sites = _Numbers(shape, faults, seed), sites_of(shape)
    # Sorted by the site's id, as a collector sorts them.
    order = np.argsort([row["site"] for row in map(site_row, range(len(sites)), sites)])
    ids = np.array([row["site"] for row in map(site_row, range(len(sites)), sites)])[order]
    ranks = np.arange(shape.ranks, dtype=np.int32)
    block = max(_ROWS // shape.ranks, 1)
    per_file = max(file_rows // (shape.ranks * shape.sites), 1)
    total = 0
    for span in range(0, shape.steps, 100):
        for first in range(span, min(span + 100, shape.steps), per_file):
            tables = []
            for step in range(first, min(first + per_file, span + 100, shape.steps)):
                rng = np.random.default_rng([seed, step])
                # Blocks of the generator's own order, which puts weights together.
                made = _whole_step(numbers, rng, step, block)
                tables.append(_step_table(made, order, ids, ranks, step, faults))
            total += _write(folder, run, span, first, tables)
    for kind, rows in _small_rows(shape, sites).items():
        data = table_bytes(small_table(kind, rows))
        folder.write(f"run={run}/{kind}/node=all.parquet", data)
    return total


def _whole_step(
    numbers: _Numbers, rng: np.random.Generator, step: int, block: int
) -> dict[str, np.ndarray]:
    parts = [
        numbers.block(rng, step, first, min(first + block, numbers.shape.sites))
        for first in range(0, numbers.shape.sites, block)
    ]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _step_table(
    made: dict[str, np.ndarray],
    order: np.ndarray,
    ids: np.ndarray,
    ranks: np.ndarray,
    step: int,
    faults: Sequence[Fault],
) -> Any:
    kept = np.ones(len(ranks), bool)
    for fault in faults:
        if fault.kind == "stuck" and step >= fault.step:
            kept[list(fault.ranks)] = False
    count = int(kept.sum())
    size = len(order) * count
    zero64, zero32 = np.zeros(size, np.int64), np.zeros(size, np.int32)
    rows = {name: zero64 if kind == "int64" else zero32 for name, kind in RECORD_COLUMNS.items()}
    rows["step"] = np.full(size, step, np.int64)
    rows["site"] = np.repeat(ids, count)
    rows["rank"] = np.tile(ranks[kept], len(order))
    rows["dtype"] = np.full(size, 3, np.int32)
    rows["numel"] = np.full(size, _NUMEL, np.int64)
    for name, values in made.items():
        column = values[order][:, kept].reshape(-1)
        rows[name] = rounded(column) if name in ("mean", "mean_abs", "rms") else column
    rows["flags"] = (rows["nan_count"] > 0).astype(np.int32)
    rows["verdict"] = (rows["nan_count"] > 0).astype(np.int32)
    return record_table(rows)


def _write(folder: Folder, run: str, span: int, first: int, tables: Sequence[Any]) -> int:
    import pyarrow

    data = table_bytes(pyarrow.concat_tables(tables))
    name = f"run={run}/step={span:06d}-{span + 99:06d}/part-{first:06d}.parquet"
    folder.write(name, data)
    return int(data.size)


def _small_rows(shape: Shape, sites: list[Site]) -> dict[str, list[dict[str, Any]]]:
    ranks = []
    for rank in range(shape.ranks):
        shard = rank % shape.shards
        placed = {
            "host": f"host{rank // RANKS_PER_HOST:04d}",
            "device": "synthetic",
            "serial": f"S{rank:05d}",
            "world_size": shape.ranks,
            "coordinates": {"dp": rank // shape.shards, "tp": shard},
            "replica_group": f"tp={shard}",
        }
        ranks.append(rank_row(rank, f"{rank // RANKS_PER_HOST:04d}", {"placement": placed}))
    return {
        "sites": [site_row(number, site) for number, site in enumerate(sites)],
        "ranks": ranks,
        "events": [],
        "meta": [],
    }


def kinds(count: int) -> Iterator[str]:
    """``count`` kinds of faults in turn."""
    for number in range(count):
        yield FAULTS[number % len(FAULTS)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory")
    for name, size in (("ranks", 64), ("sites", 100), ("steps", 50), ("shards", 8), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--fault", choices=FAULTS, action="append", default=[])
    options = parser.parse_args()
    shape = Shape(options.ranks, options.sites, options.steps, options.shards)
    faults = [choose_fault(shape, kind, options.seed) for kind in options.fault]
    size = write_fleet(Folder(options.directory), shape, faults, options.seed)
    rows = shape.ranks * shape.sites * shape.steps
    print(json.dumps({"bytes": size, "rows": rows, "faults": [asdict(fault) for fault in faults]}))


if __name__ == "__main__":
    main()
