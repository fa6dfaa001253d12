"""Counts the GPU instructions of the record kernels: csrc/cuda, compiled for sm_90, as SASS.

    python bench/instructions.py     writes bench/results/instructions.json, prints a Markdown table

Needs nvcc. nvdisasm is taken from PATH or Triton, else from an environment of its own
(environments.py). What is counted is the way of a warp through a whole, ordinary, aligned tile:
the shortest one through the control flow graph that loads the tile, takes its votes and folds its
sums. Loops are counted as often as they run.

Nothing runs on a GPU: these are issue slots, not times. An H100 SXM (132 multiprocessors, 4
schedulers of 32 lanes each, 1.755 GHz) has 29.7 T of them a second. At 90% of its memory bandwidth
of 3.35 TB/s, 1.5 T 16-bit components pass a second: about 20 slots each, and 39 for a 32-bit one.
"""

from __future__ import annotations

import collections
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import environments
import harness
import machine_code

SOURCES = ("records_floats", "records_bytes", "exponents")
NVCC_FLAGS = ("-std=c++17", "-fmad=false", "-arch=sm_90", f"-I{harness.ROOT / 'csrc'}", "-cubin")
DEPTHS = ("health", "stats", "full")
PAIRS = 2  # of batches of four rows, in a run: a turn of the innermost loop
PAIR_VOTES = 2
PAIR_LOADS = 8
FIRST_LOADS = 4  # of a pass, ahead of that loop
TILE = 4096


class Format(NamedTuple):
    source: str
    mangled: str  # part of the kernels' names
    size: int  # bytes of a component
    passes: int
    votes: int  # on whether a tile is scaled
    folds: int  # shuffles of a pass that folds its runs


FORMATS = {
    "float32": Format("records_floats", "IjLi8ELi23E", 4, 2, 2, 6),
    "bfloat16": Format("records_floats", "ItLi8ELi7E", 2, 1, 2, 18),
    "float16": Format("records_floats", "ItLi5ELi10E", 2, 1, 0, 18),
    "float8_e4m3fn": Format("records_bytes", "IhLi4ELi3E", 1, 1, 0, 18),
}
TILE_VOTES = 1  # whether something is not finite
TILE_FOLDS = 30  # shuffles: three float64 through five levels
# Issue slots for a component of 4, 2 and 1 bytes.
BUDGET = {n: 132 * 4 * 32 * 1.755e9 / (0.9 * 3.35e12 / n) for n in (4, 2, 1)}

Kernels = dict[str, list[machine_code.Block]]


def pair_loop(
    kernels: Kernels, dtype: str, depth: str
) -> tuple[list[machine_code.Block], dict[int, set[int]], int, str]:
    """The blocks and loops of a kernel, which of them takes pairs of batches, and what loads."""
    form = FORMATS[dtype]
    end = f"DepthE{DEPTHS.index(depth) + 1}E"
    (blocks,) = (b for name, b in kernels.items() if form.mangled in name and end in name)
    loops = machine_code.loops(blocks)
    load = rf"@?LDG\.E\.{64 if form.size == 1 else 128}\.CONSTANT"
    # The innermost loop that loads as many vectors, whatever lies around it.
    within = {head: sum(blocks[i].count(load) for i in body) for head, body in loops.items()}
    pair = min((h for h in loops if within[h] >= PAIR_LOADS), key=lambda h: len(loops[h]))
    return blocks, loops, pair, load


def sums_behind_loads(kernels: Kernels, dtype: str, depth: str) -> list[float]:
    """Of each batch in the loop of pairs, how much of its sums follow on all loads of the next
    batch, as the instructions lie in memory: what hides these loads."""
    blocks, loops, pair, load = pair_loop(kernels, dtype, depth)
    sums, loads = 0, []
    for opcode in (opcode for i in sorted(loops[pair]) for opcode in blocks[i].opcodes):
        sums += re.match(r"@?(FADD|FFMA|DADD|DFMA)", opcode) is not None
        if re.match(load, opcode):
            loads.append(sums)
    assert len(loads) == PAIR_LOADS
    batch = sums / PAIR_VOTES
    return [1 - (loads[PAIR_LOADS // 2 * (i + 1) - 1] - i * batch) / batch for i in range(2)]


def opcodes(kernels: Kernels, dtype: str, depth: str) -> collections.Counter[str]:
    """What a warp executes for one whole tile."""
    form = FORMATS[dtype]
    blocks, loops, pair, load = pair_loop(kernels, dtype, depth)
    via = max(loops[pair], key=lambda i: blocks[i].count(load))
    # From the inside: pairs of batches, passes where there are several, tiles, chunks.
    around = sorted((head for head in loops if via in loops[head]), key=lambda h: len(loops[h]))
    sums = depth != "health"
    folds = form.folds if sums else 0
    turns = [(pair, {"VOTEU?": PAIR_VOTES, load: PAIR_LOADS})]
    if form.passes > 1:
        loads = FIRST_LOADS + PAIR_LOADS
        turns.append((around[1], {"VOTEU?": PAIR_VOTES, load: loads, "SHFL": folds}))
    votes = PAIR_VOTES + TILE_VOTES + (form.votes if sums else 0)
    loads = FIRST_LOADS + PAIR_LOADS
    shuffles = folds + TILE_FOLDS if sums else 0
    turns.append((around[-2], {"VOTEU?": votes, load: loads, "SHFL": shuffles}))
    counts = [
        machine_code.shortest_turn(blocks, head, loops[head], via, needs) for head, needs in turns
    ]
    # A turn of an outer loop holds one of the inner one.
    total = counts[-1].copy()
    for _ in range(PAIRS * form.passes - 1):
        total.update(counts[0])
    for _ in range(form.passes - 1):
        total.update(counts[1] - counts[0])
    return total


def slots(kernels: Kernels, dtype: str, depth: str) -> float:
    """Issue slots for one component of a whole tile."""
    return opcodes(kernels, dtype, depth).total() * 32 / TILE


def exponent_slots(kernels: Kernels, dtype: str) -> float:
    """Issue slots for one component of a batch that the window of the exponent kernel holds, of a
    whole tile; without what empties the registers once in some thousand components of a thread.
    """
    form = FORMATS[dtype]
    (blocks,) = (b for n, b in kernels.items() if form.mangled in n and "exponents_kernel" in n)
    loops = machine_code.loops(blocks)
    load = rf"LDG\.E\.{64 if form.size == 1 else 128}\.CONSTANT"
    (via,) = (i for i, block in enumerate(blocks) if block.count(load) >= 4)
    head = min((head for head in loops if via in loops[head]), key=lambda h: len(loops[h]))
    components = 4 * (8 if form.size == 1 else 16 // form.size)
    # A shift makes the word of a component's bin, in each of three histograms.
    needs = {"VOTEU?": 1, "SHF": 3 * components}
    turn = machine_code.shortest_turn(blocks, head, loops[head], via, needs)
    return turn.total() / components


def compiled() -> Kernels:
    kernels: Kernels = {}
    program = machine_code.nvdisasm()
    if program is None:
        python = environments.make(environments.NVDISASM, torch=None)
        found = python.parent.parent.glob("lib/python*/site-packages/nvidia/*/bin/nvdisasm")
        program = str(next(found))
    with tempfile.TemporaryDirectory() as scratch:
        for name in SOURCES:
            cubin = Path(scratch, f"{name}.cubin")
            source = harness.ROOT / "csrc" / "cuda" / f"{name}.cu"
            subprocess.run(["nvcc", *NVCC_FLAGS, "-o", str(cubin), str(source)], check=True)
            kernels |= machine_code.kernels(cubin, program)
    return kernels


def measure() -> list[dict[str, Any]]:
    kernels = compiled()
    rows = []
    for dtype, form in FORMATS.items():
        for depth in DEPTHS:
            counts = opcodes(kernels, dtype, depth)
            by_name: collections.Counter[str] = collections.Counter()
            for opcode, n in counts.items():
                by_name[opcode.lstrip("@").split(".")[0]] += n
            rows.append(
                {
                    "dtype": dtype,
                    "depth": depth,
                    "slots": round(counts.total() * 32 / TILE, 2),
                    "budget": round(BUDGET[form.size], 1),
                    "opcodes": {op: round(n * 32 / TILE, 2) for op, n in by_name.most_common()},
                }
            )
        rows.append(
            {
                "dtype": dtype,
                "depth": "exponents",
                "slots": round(exponent_slots(kernels, dtype), 2),
                "budget": round(BUDGET[form.size], 1),
            }
        )
    return rows


def as_table(rows: list[dict[str, Any]]) -> str:
    lines = []
    for dtype, form in FORMATS.items():
        of = {row["depth"]: f"{row['slots']:.1f}" for row in rows if row["dtype"] == dtype}
        columns = (*DEPTHS, "exponents")
        lines.append([dtype, *(of[column] for column in columns), f"{BUDGET[form.size]:.0f}"])
    return harness.table(["dtype", *DEPTHS, "exponents", "budget"], lines)


def main() -> None:
    if shutil.which("nvcc") is None:
        raise SystemExit("instructions.py needs nvcc, and there is none on PATH")
    version = subprocess.run(["nvcc", "--version"], check=True, capture_output=True, text=True)
    rows = measure()
    print(as_table(rows))
    harness.write_results("instructions", rows, nvcc=version.stdout.strip().splitlines()[-1])


if __name__ == "__main__":
    main()
