"""Counts the GPU instructions for one component: instructions.cu for sm_90, read as SASS.

    python bench/instructions.py     writes bench/results/instructions.json, prints a Markdown table

Needs nvcc. nvdisasm is taken from PATH, else from an environment of its own (environments.py).
Nothing runs on a GPU: these are issue slots, not times. An H100 SXM (132 multiprocessors, 4
schedulers of 32 lanes each, 1.755 GHz) has 29.7 T of them a second. At 90% of its memory bandwidth
of 3.35 TB/s, 1.5 T 16-bit components pass a second: about 20 slots each, and 39 for a 32-bit one.
The integer pipe takes half a warp a cycle: its instructions count twice.
"""

from __future__ import annotations

import collections
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import environments
import harness

SOURCE = Path(__file__).with_name("instructions.cu")
DTYPES = {"float32": 4, "bfloat16": 8, "float16": 8}  # components in a thread's 16 bytes
DEPTHS = ("health", "stats", "full")
BUDGET = {name: 132 * 4 * 32 * 1.755e9 / (0.9 * 3.35e12 / (16 / n)) for name, n in DTYPES.items()}

# The pipe of an opcode, if it is 16 lanes wide instead of 32: CUDA programming guide,
# "Arithmetic instructions", compute capability 9.0 (64 results a cycle and multiprocessor).
INTEGER_PIPE = ("SHF", "LOP3", "IADD3", "VIMNMX", "VIMNMX3", "LEA", "ISETP", "SEL", "PRMT", "PLOP3")
MULTIPLY_PIPE = ("IMAD",)


def nvdisasm() -> str:
    found = shutil.which("nvdisasm")
    if found:
        return found
    python = environments.make(environments.NVDISASM, torch=None)
    return str(next(python.parent.parent.glob("lib/python*/site-packages/nvidia/*/bin/nvdisasm")))


def opcodes(rows: int, count_each: bool, scratch: Path) -> dict[str, collections.Counter[str]]:
    """Opcodes by kernel name."""
    cubin = scratch / "instructions.cubin"
    command = [
        "nvcc",
        "-arch=sm_90",
        "-std=c++17",
        "-O3",
        "-fmad=false",
        "-cubin",
        "-diag-suppress=177",
    ]
    command += [f"-DROWS={rows}", f"-I{harness.ROOT / 'csrc'}", "-o", str(cubin), str(SOURCE)]
    if count_each:
        command.append("-DCOUNT_EACH")
    subprocess.run(command, check=True)
    listing = subprocess.run(
        [nvdisasm(), "-c", str(cubin)], check=True, capture_output=True, text=True
    ).stdout
    kernels: dict[str, collections.Counter[str]] = {}
    current: collections.Counter[str] = collections.Counter()
    for line in listing.splitlines():
        start = re.match(r"\.text\.(\w+):", line)
        if start:
            current = kernels.setdefault(start.group(1), collections.Counter())
        found = re.match(r"\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9]+)", line)
        if found and found.group(1) != "NOP":
            current[found.group(1)] += 1
    return kernels


def measure() -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for counts, count_each in (("by extremes", False), ("each component", True)):
            short, long = (opcodes(n, count_each, Path(scratch)) for n in (16, 32))
            for name, per_row in DTYPES.items():
                for depth in DEPTHS:
                    kernel = f"{name}_{depth}"
                    per_component = {
                        opcode: (long[kernel][opcode] - short[kernel][opcode]) / (16 * per_row)
                        for opcode in long[kernel]
                    }
                    rows.append(summary(name, depth, counts, per_component, short[kernel]))
    return rows


def summary(
    name: str, depth: str, counts: str, per: dict[str, float], short: collections.Counter[str]
) -> dict[str, Any]:
    slots = sum(per.values())
    return {
        "dtype": name,
        "depth": depth,
        "counts": counts,
        "slots": round(slots, 2),
        "budget": round(BUDGET[name], 1),
        "integer_pipe_slots": round(2 * sum(per.get(op, 0) for op in INTEGER_PIPE), 2),
        "multiply_pipe_slots": round(2 * sum(per.get(op, 0) for op in MULTIPLY_PIPE), 2),
        # The instructions of a thread once per 16 rows: seeds, finish_chain, addresses, stores.
        "once_per_thread": round(short.total() - slots * 16 * DTYPES[name]),
        "opcodes": {
            op: round(n, 2) for op, n in sorted(per.items(), key=lambda p: -p[1]) if n > 0.005
        },
    }


def as_table(rows: list[dict[str, Any]]) -> str:
    lines = []
    for name in DTYPES:
        for counts in ("by extremes", "each component"):
            cells = []
            for depth in DEPTHS:
                (row,) = (
                    r
                    for r in rows
                    if (r["dtype"], r["counts"], r["depth"]) == (name, counts, depth)
                )
                cells.append(f"{row['slots']:.1f} ({row['integer_pipe_slots']:.1f})")
            lines.append([name, counts, *cells, f"{BUDGET[name]:.0f}"])
    header = ["dtype", "counted", *(f"{d}: slots (integer pipe)" for d in DEPTHS), "budget"]
    return harness.table(header, lines)


def main() -> None:
    if shutil.which("nvcc") is None:
        raise SystemExit("instructions.py needs nvcc, and there is none on PATH")
    version = subprocess.run(["nvcc", "--version"], check=True, capture_output=True, text=True)
    rows = measure()
    print(as_table(rows))
    harness.write_results("instructions", rows, nvcc=version.stdout.strip().splitlines()[-1])


if __name__ == "__main__":
    main()
