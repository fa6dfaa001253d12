"""Counts the GPU instructions of the record kernels: csrc/cuda, compiled for sm_90, as SASS.

    python bench/instructions.py     writes bench/results/instructions.json, prints a Markdown table

Needs nvcc. nvdisasm is taken from PATH or Triton, else from an environment of its own
(environments.py). What is counted is the way of a warp through a whole, ordinary, aligned tile:
the shortest one through the control flow graph that loads the tile, takes its votes and folds its
sums. Loops are counted as often as they run.

Nothing runs on a GPU: these are issue slots, not times. An H100 SXM (132 multiprocessors, 4
schedulers of 32 lanes each, 1.755 GHz) has 29.7 T of them a second. At 90% of its memory bandwidth
of 3.35 TB/s, 1.5 T 16-bit components pass a second: about 20 slots each, and 39 for a 32-bit one.

Most instructions do not get every slot: integers and logic, for one, have half as many lanes as the
schedulers. The limit of a kernel is that of its busiest pipe, as a fraction of a pure read of the
same memory: an upper bound, since it takes the pipes to be busy without a gap.
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

SOURCES = ("records_floats", "records_bytes", "exponents", "record_and_exponents")
NVCC_FLAGS = ("-std=c++17", "-fmad=false", "-arch=sm_90", f"-I{harness.ROOT / 'csrc'}", "-cubin")
DEPTHS = ("health", "stats", "full")
WITH_EXPONENTS = "full, with exponents"
COLUMNS = (*DEPTHS, "exponents", WITH_EXPONENTS)
ROWS = 4  # of a batch
BATCHES = 4  # of a run
TILE = 4096
# Shuffles of a batch of four rows, by bytes of a component: as many steps as 32 components, a
# block, have threads that are to find its largest.
BLOCK_EXCHANGES = {4: 12, 2: 8, 1: 8}


class Turn(NamedTuple):
    """Of the innermost loop of a record kernel."""

    batches: int
    loads: int
    votes: int
    first_loads: int  # of a pass, ahead of the loop


PAIR = Turn(batches=2, loads=8, votes=2, first_loads=4)
# One batch: whether it has something small, and whether the window holds it.
COUNTED = Turn(batches=1, loads=4, votes=2, first_loads=0)


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
#: Functions of the cubins: kernels of other formats take as long to read as these.
ARE_COUNTED = "|".join(form.mangled for form in FORMATS.values())
IS_COUNTED = re.compile(rf"^(?!.*OneTensor).*({ARE_COUNTED})")
#: Those for the only tensor of a launch, which are as long.
IS_OF_ONE = re.compile(r"OneTensor")
TILE_VOTES = 1  # whether something is not finite
TILE_FOLDS = 6  # shuffles: a float64 of each thread through three levels


class Pipe(NamedTuple):
    """Part of a multiprocessor of compute capability 9.0, and the opcodes that it executes."""

    lanes: int  # threads whose instruction it takes in a clock
    opcodes: str


# Lanes: CUDA C++ Programming Guide, "Throughput of Native Arithmetic Instructions". Opcodes: Nsight
# Compute, Kernel Profiling Guide, "Pipelines". IMAD is for one half of the FMA pipe.
PIPES = {
    "issue": Pipe(128, r".*"),
    "FMA": Pipe(128, r"F(ADD|MUL|FMA)|H(ADD2|MUL2|FMA2)|IMAD|IDP"),
    "FMA heavy": Pipe(64, r"IMAD|IDP"),
    "ALU": Pipe(
        64,
        r"[FHV]\w*MNMX\w*|LOP3|PLOP3|SHF|LEA|PRMT|IADD3|VIADD|VIMNMX3?|[IF]SETP|F?SEL|VOTE|R2P|MOV|CS2R",
    ),
    "LSU": Pipe(32, r"LD[GSC]?|STS?|SHFL"),
    "FP64": Pipe(64, r"DADD|DMUL|DFMA"),
    # F2FP, which makes two float16 of e4m3fn: no guide names its pipe, and this is the narrowest.
    "XU": Pipe(16, r"F2FP?|F2I|I2F|MUFU|POPC|FLO"),
    "control": Pipe(128, r"BRA|BREAK|BSSY|BSYNC|YIELD|NOP|WARPSYNC|U[A-Z]+\d?|S2U?R"),
}
MULTIPROCESSORS, CLOCK = 132, 1.755e9  # of both
BYTES_PER_SECOND = {"H100": 0.9 * 3.35e12, "H200": 0.9 * 4.8e12}


def budget(pipe: str, size: int, card: str = "H100") -> float:
    """Slots of a pipe for a component of so many bytes, while it comes from memory."""
    return PIPES[pipe].lanes * MULTIPROCESSORS * CLOCK * size / BYTES_PER_SECOND[card]


Kernels = dict[str, list[machine_code.Block]]


def components_of(form: Format) -> int:
    """Of a batch, those of a thread."""
    return ROWS * (8 if form.size == 1 else 16 // form.size)


def batch_loop(
    kernels: Kernels, dtype: str, depth: str
) -> tuple[list[machine_code.Block], dict[int, set[int]], int, str]:
    """The blocks and loops of a kernel, which of them takes batches, and what loads."""
    form = FORMATS[dtype]
    if depth == WITH_EXPONENTS:
        part, turn = "record_and_exponents_kernel", COUNTED
    else:
        part, turn = f"DepthE{DEPTHS.index(depth) + 1}E", PAIR
    (blocks,) = (b for name, b in kernels.items() if form.mangled in name and part in name)
    loops = machine_code.loops(blocks)
    load = rf"@?LDG\.E\.{64 if form.size == 1 else 128}\.CONSTANT"
    # The innermost loop that loads as many vectors, a batch at a time, whatever lies around it.
    able = [
        head
        for head, body in loops.items()
        if sum(blocks[i].count(load) for i in body) >= turn.loads
        and any(blocks[i].count(load) >= ROWS for i in body)
    ]
    inner = min(able, key=lambda head: len(loops[head]))
    return blocks, loops, inner, load


def sums_behind_loads(kernels: Kernels, dtype: str, depth: str) -> list[float]:
    """Of each batch in the loop of pairs, how much of its sums follow on all loads of the next
    batch, as the instructions lie in memory: what hides these loads."""
    blocks, loops, inner, load = batch_loop(kernels, dtype, depth)
    sums, loads = 0, []
    for opcode in (opcode for i in sorted(loops[inner]) for opcode in blocks[i].opcodes):
        sums += re.match(r"@?(FADD|FFMA|DADD|DFMA)", opcode) is not None
        if re.match(load, opcode):
            loads.append(sums)
    assert len(loads) == PAIR.loads
    batch = sums / PAIR.batches
    return [1 - (loads[PAIR.loads // 2 * (i + 1) - 1] - i * batch) / batch for i in range(2)]


def opcodes(kernels: Kernels, dtype: str, depth: str) -> collections.Counter[str]:
    """What a warp executes for one whole tile."""
    form = FORMATS[dtype]
    blocks, loops, inner, load = batch_loop(kernels, dtype, depth)
    turn = COUNTED if depth == WITH_EXPONENTS else PAIR
    via = max(loops[inner], key=lambda i: blocks[i].count(load))
    if turn is COUNTED:
        # Where a batch is added to the histograms. Emptying them takes exchanges too.
        via = max(loops[inner], key=lambda i: blocks[i].count("LOP3") - 9 * blocks[i].count("SHFL"))
    # From the inside: batches, passes where there are several, tiles, chunks.
    around = sorted((head for head in loops if via in loops[head]), key=lambda h: len(loops[h]))
    sums = depth != "health"
    folds = form.folds if sums else 0
    # The maxima of blocks of a batch that is counted.
    exchanges = BLOCK_EXCHANGES[form.size] if turn is COUNTED else 0
    folds, loads = folds + exchanges, turn.first_loads + turn.loads
    turns = [(inner, {"VOTEU?": turn.votes, load: turn.loads, "SHFL": exchanges})]
    if form.passes > 1:
        turns.append((around[1], {"VOTEU?": turn.votes, load: loads, "SHFL": folds}))
    votes = turn.votes + TILE_VOTES + (form.votes if sums else 0)
    shuffles = folds + TILE_FOLDS if sums else 0
    turns.append((around[-2], {"VOTEU?": votes, load: loads, "SHFL": shuffles}))
    counts = [
        machine_code.shortest_turn(blocks, head, loops[head], via, needs) for head, needs in turns
    ]
    # A turn of an outer loop holds one of the inner one.
    total = counts[-1].copy()
    for _ in range(BATCHES // turn.batches * form.passes - 1):
        total.update(counts[0])
    for _ in range(form.passes - 1):
        total.update(counts[1] - counts[0])
    return total


def exponent_opcodes(kernels: Kernels, dtype: str) -> collections.Counter[str]:
    """Those of a batch that the window of the exponent kernel holds, of a whole tile; without what
    empties the registers once in some thousand components of a thread."""
    form = FORMATS[dtype]
    (blocks,) = (b for n, b in kernels.items() if form.mangled in n and "16exponents_kernel" in n)
    loops = machine_code.loops(blocks)
    load = rf"LDG\.E\.{64 if form.size == 1 else 128}\.CONSTANT"
    (via,) = (i for i, block in enumerate(blocks) if block.count(load) >= 4)
    head = min((head for head in loops if via in loops[head]), key=lambda h: len(loops[h]))
    # A shift makes the word of a component's bin, in each of three histograms.
    needs = {"VOTEU?": 1, r"SHF\.": 3 * components_of(form)}
    return machine_code.shortest_turn(blocks, head, loops[head], via, needs)


def per_component(kernels: Kernels, dtype: str, depth: str) -> collections.Counter[str]:
    """Issue slots of each opcode, without its modifiers, for one component."""
    if depth == "exponents":
        counts, share = exponent_opcodes(kernels, dtype), 1 / components_of(FORMATS[dtype])
    else:
        counts, share = opcodes(kernels, dtype, depth), 32 / TILE
    total: collections.Counter[str] = collections.Counter()
    for opcode, n in counts.items():
        total[opcode.lstrip("@").split(".")[0]] += n * share
    return total


def slots_of(counts: collections.Counter[str], pipe: str) -> float:
    return sum(n for opcode, n in counts.items() if re.fullmatch(PIPES[pipe].opcodes, opcode))


def limit(counts: collections.Counter[str], size: int, card: str) -> tuple[float, str]:
    """The most that a kernel can reach of a pure read, and the pipe that it is bound by."""
    reach = {
        pipe: budget(pipe, size, card) / slots
        for pipe in PIPES
        if (slots := slots_of(counts, pipe))
    }
    pipe = min(reach, key=reach.__getitem__)
    return (1.0, "memory") if reach[pipe] >= 1 else (reach[pipe], pipe)


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
            kernels |= machine_code.kernels(cubin, program, IS_COUNTED)
    return kernels


def measure() -> list[dict[str, Any]]:
    kernels = compiled()
    rows = []
    for dtype, form in FORMATS.items():
        for depth in COLUMNS:
            counts = per_component(kernels, dtype, depth)
            rows.append(
                {
                    "dtype": dtype,
                    "depth": depth,
                    "slots": round(counts.total(), 2),
                    "budget": round(budget("issue", form.size), 1),
                    "pipes": {pipe: round(slots_of(counts, pipe), 2) for pipe in PIPES},
                    "limits": {
                        card: {"of_a_pure_read": round(reach, 2), "by": pipe}
                        for card in BYTES_PER_SECOND
                        for reach, pipe in [limit(counts, form.size, card)]
                    },
                    "opcodes": {opcode: round(n, 2) for opcode, n in counts.most_common()},
                }
            )
    return rows


def as_table(rows: list[dict[str, Any]], card: str) -> str:
    lines = []
    for dtype, form in FORMATS.items():
        cells = [
            f"{row['slots']:.1f}: {limit['of_a_pure_read']:.2f} ({limit['by']})"
            for row in rows
            if row["dtype"] == dtype
            for limit in [row["limits"][card]]
        ]
        lines.append([dtype, *cells, f"{budget('issue', form.size, card):.0f}"])
    return harness.table([card, *COLUMNS, "budget"], lines)


def main() -> None:
    if shutil.which("nvcc") is None:
        raise SystemExit("instructions.py needs nvcc, and there is none on PATH")
    version = subprocess.run(["nvcc", "--version"], check=True, capture_output=True, text=True)
    rows = measure()
    for card in BYTES_PER_SECOND:
        print(as_table(rows, card))
    harness.write_results("instructions", rows, nvcc=version.stdout.strip().splitlines()[-1])


if __name__ == "__main__":
    main()
