"""The cost of a dump: a training step with records of every operator, or with all values on disk.

    python bench/dump.py [--rounds N] [--threads N ...] [--directory DIR]
    writes bench/results/dump.json

The step is that of bench/train_step.py (6 layers, width 512, batch 8, sequence 128, AdamW). Steps
with and without a Dumper alternate, on two identically initialised models; each dump overwrites the
one before. For values the disk's own speed is measured beside it: the same number of bytes, written
in pieces of 16 MiB to one file in the same directory, in the same round. Both are timed up to the
return of fsync, for a dump of each of its files.

Memory: the peak of the resident set of a process that takes two steps with a Dumper, less that of
one that takes them without.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch

import fastcheck
import harness
from fastcheck.dump.storage.files import read_index
from transformer import Trainer

MODES: dict[str, dict[str, Any]] = {
    "records of ops": {},
    "records of modules": {"level": "module"},
    "statistics of ops": {"record": "stats"},
    "values of modules": {"level": "module", "tensors": True},
    "values of ops": {"tensors": True},
}
HEADER = [
    "",
    "threads",
    "times a step without",
    "records",
    "MB of values",
    "MB/s",
    "disk MB/s",
    "MiB extra",
]
PIECE = 16 * 1024 * 1024
# The bar for the memory of a dump of values.
ALLOWED_BYTES = 512 * 1024 * 1024
STEPS_OF_MEMORY = 2


def write_plain(path: Path, count: int) -> None:
    """Writes the same bytes without a dump: the speed of the disk."""
    piece = os.urandom(PIECE)
    with open(path, "wb") as file:
        for start in range(0, count, PIECE):
            file.write(piece[: min(PIECE, count - start)])
        file.flush()
        os.fsync(file.fileno())


def settle(place: Path) -> None:
    """Waits until all files below the directory are on the disk."""
    for path in place.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.close(descriptor)


def peak_bytes() -> int:
    """The peak resident memory of this process. getrusage would include its parent's."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no VmHWM: the memory can be measured on Linux only")


def take_steps(name: str, directory: Path, threads: int) -> None:
    """Runs in a process of its own, and prints its peak."""
    torch.set_num_threads(threads)
    trainer = Trainer()
    for index in range(STEPS_OF_MEMORY):
        with fastcheck.Dumper(
            directory, enable=name != "none", overwrite=True, **MODES.get(name, {})
        ):
            trainer.step(index)
    print(peak_bytes())


def peak_of(name: str, directory: Path) -> int:
    options = ["--memory-of", name, "--directory", directory]
    options += ["--threads", torch.get_num_threads()]
    return int(harness.output_of(__file__, *options))


def measure(name: str, options: dict[str, Any], rounds: int, directory: Path) -> dict[str, Any]:
    plain, watched = Trainer(), Trainer()
    place = directory / name.replace(" ", "-")

    def dumped(index: int) -> None:
        with fastcheck.Dumper(place, overwrite=True, **options):
            watched.step(index)
        if options.get("tensors"):
            settle(place)

    cases: dict[str, harness.Case] = {"none": plain.step, "dump": dumped}
    dumped(0)
    plain.step(0)
    index = read_index(str(place / "step0" / "rank0"))
    size = index.get("tensors", {}).get("bytes", 0)
    if size:
        cases["disk"] = lambda _: write_plain(directory / "plain", size)
    seconds = harness.time_rounds(cases, rounds)
    same = all(map(torch.equal, plain.model.parameters(), watched.model.parameters()))
    row: dict[str, Any] = {
        "mode": name,
        "threads": torch.get_num_threads(),
        "times_none": harness.ratio(seconds["dump"], seconds["none"]),
        "seconds": harness.spread(seconds["dump"]),
        "seconds_none": harness.spread(seconds["none"]),
        "calls": index["calls"],
        "records": index["records"],
        "bytes_of_values": size,
        "extra_memory_bytes": peak_of(name, place) - peak_of("none", place),
        "allowed_memory_bytes": ALLOWED_BYTES,
        "identical_weights": same,
    }
    shutil.rmtree(place)
    if size:
        row["disk_bytes_per_second"] = harness.spread(size / seconds["disk"])
        row["values_bytes_per_second"] = harness.spread(size / (seconds["dump"] - seconds["none"]))
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--directory", help="where to dump to; a temporary one when left out")
    parser.add_argument(
        "--modes",
        nargs="*",
        default=harness.size(list(MODES), ["values of modules"]),
        choices=list(MODES),
    )
    parser.add_argument("--threads", nargs="*", type=int, default=harness.threads_to_try())
    parser.add_argument("--memory-of", choices=["none", *MODES], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory_of:
        take_steps(options.memory_of, Path(options.directory), options.threads[0])
        return
    rows = []
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        for threads in options.threads:
            torch.set_num_threads(threads)
            for name in options.modes:
                rows.append(measure(name, MODES[name], options.rounds, Path(directory)))
                harness.write_results("dump", rows)
    print(
        harness.table(
            HEADER,
            [
                [
                    row["mode"],
                    str(row["threads"]),
                    harness.with_spread(row["times_none"], 2),
                    f"{row['records']:,}",
                    f"{row['bytes_of_values'] / 1e6:,.0f}",
                    *(
                        f"{row[key]['median'] / 1e6:,.0f}" if key in row else ""
                        for key in ("values_bytes_per_second", "disk_bytes_per_second")
                    ),
                    f"{row['extra_memory_bytes'] / 2**20:,.0f}",
                ]
                for row in rows
            ],
        )
    )


if __name__ == "__main__":
    main()
