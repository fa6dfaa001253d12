"""All benches, one after the other: those that this machine can run.

    python bench/run.py              a process for each; tables also in bench/results/tables.md
    python bench/run.py --smoke      each in small, here or in a fork: whether it works, no figure
    python bench/run.py drain top    some of them

Exit status 1 when one failed. A bench that needs what is not here is left out, and named. Run it on
an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import os
import runpy
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Optional

HERE = Path(__file__).resolve().parent
COMPILER = os.environ.get("CXX", "g++")
GPU = "a GPU"


class Bench(NamedTuple):
    """A program of this folder. ``needs``: programs on PATH, or a GPU. ``in_smoke``: arguments of a
    smoke run, which needs no GPU. ``smoke_test``: runs the bench instead, with what it has built.
    ``has_fake_device``: loads the fake accelerator, which then is that of the whole process.
    """

    file: str
    title: str
    arguments: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    in_smoke: Optional[tuple[str, ...]] = None
    smoke_test: Optional[str] = None
    has_fake_device: bool = False

    @property
    def name(self) -> str:
        return Path(self.file).stem


BENCHES = (
    Bench("kernels.py", "One pass over 256 MiB", needs=(COMPILER,)),
    Bench("small.py", "Small tensors"),
    Bench("exponents.py", "Exponent counts", needs=(COMPILER,)),
    Bench("train_step.py", "A training step"),
    Bench("small_models.py", "A step of small models"),
    Bench("op_level.py", "Operators", needs=(COMPILER,)),
    Bench("path.py", "The path of a NaN"),
    Bench("reports.py", "Programs of public reports"),
    Bench("loops.py", "Three people's loops"),
    Bench("dump.py", "Dumps"),
    Bench("movement.py", "Weights that do not move"),
    Bench("watch_cost.py", "The watch"),
    Bench("top.py", "fastcheck top"),
    Bench("compare_logs.py", "Two logs compared"),
    Bench("receipts_cost.py", "Receipts of weights", needs=(COMPILER,)),
    Bench("report_page.py", "The page of a log"),
    Bench("fleet.py", "Fleets, with a fault and healthy", ("faults",)),
    Bench("fleet.py", "A large fleet", ("large",)),
    Bench("fleet.py", "The collector", ("collector",)),
    Bench("choices.py", "Choices of the record format", needs=(COMPILER,)),
    Bench(
        "collisions.cpp",
        "Checksum collisions (quick)",
        ("--quick",),
        needs=(COMPILER,),
        in_smoke=("--quick", "--only", "lengths"),
    ),
    Bench(
        "instructions.py",
        "GPU instructions a component",
        needs=("nvcc",),
        smoke_test="tests/backends/cuda/test_instructions.py",
    ),
    Bench(
        "ptx_instructions.py",
        "PTX instructions a launch",
        needs=("nvcc", COMPILER),
        smoke_test="tests/backends/cuda/test_instructions.py",
    ),
    Bench("portable.py", "The portable backend", needs=(COMPILER,), has_fake_device=True),
    Bench("host_time.py", "Host time for a tensor", needs=(COMPILER,), has_fake_device=True),
    Bench("launches.py", "Launches of a step", needs=(COMPILER,), has_fake_device=True),
    Bench("drain.py", "The drain", needs=(COMPILER,), has_fake_device=True),
    Bench(
        "reports.py",
        "Programs of public reports, on an accelerator",
        ("--device", "fake"),
        needs=(COMPILER,),
        has_fake_device=True,
    ),
    Bench(
        "gpu.py", "CUDA kernels", needs=(GPU,), smoke_test="tests/backends/cuda/test_gpu_bench.py"
    ),
    Bench(
        "gpu_train.py",
        "A training step on a GPU",
        needs=(GPU,),
        in_smoke=("--device", "cpu", "--tiny", "--rounds", "1"),
    ),
)
#: Programs of this folder that measure nothing by themselves.
TOOLS = ("compare", "fleet_synthetic", "run", "screenshots", "step_worker", "synthetic_log")


def reason_to_leave_out(bench: Bench, is_smoke: bool) -> Optional[str]:
    if is_smoke and bench.smoke_test is not None:
        return f"{bench.smoke_test} runs it"
    missing = [need for need in bench.needs if need != GPU and shutil.which(need) is None]
    if GPU in bench.needs and not (is_smoke and bench.in_smoke):
        import torch

        missing += [] if torch.cuda.is_available() else [GPU]
    return f"it needs {' and '.join(missing)}" if missing else None


def run_here(bench: Bench, arguments: Sequence[str]) -> None:
    """Runs a Python program in this process: importing torch for each would take as long as the
    benches in small.
    """
    sys.argv = [bench.file, *arguments]
    try:
        runpy.run_path(str(HERE / bench.file), run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise


def output(bench: Bench, arguments: Sequence[str], scratch: str, is_smoke: bool) -> Iterator[str]:
    """The lines that a program of its own process prints; C++ is compiled first. Raises
    CalledProcessError if it fails.
    """
    source = str(HERE / bench.file)
    program = [sys.executable, "-W", "ignore", source]
    if bench.file.endswith(".cpp"):
        program = [os.path.join(scratch, bench.name)]
        flags = ["-O1" if is_smoke else "-O3", "-march=native", "-std=c++17", "-pthread"]
        flags.append(f"-I{HERE.parent / 'csrc'}")
        subprocess.run([COMPILER, *flags, source, "-o", *program], check=True)
    with subprocess.Popen([*program, *arguments], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield from process.stdout
    if process.returncode != 0:
        raise subprocess.CalledProcessError(process.returncode, process.args)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = list(dict.fromkeys(bench.name for bench in BENCHES))
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}")
    parser.add_argument("--smoke", action="store_true", help="in small, to see that they work")
    options = parser.parse_args()
    unknown = set(options.names) - set(names)
    if unknown:
        parser.error(f"expected names of benches, got {', '.join(sorted(unknown))}")
    if options.smoke:
        os.environ["FASTCHECK_BENCH_SMOKE"] = "1"
    import harness  # reads the variable

    tables, failed = [], []

    def say(text: str) -> None:
        tables.append(text)
        print(text, end="", flush=True)

    say("# Benches\n\n" + "".join(f"- {k}: {v}\n" for k, v in harness.machine().items()))
    for bench in BENCHES:
        if options.names and bench.name not in options.names:
            continue
        say(f"\n## {bench.title} ({bench.file})\n\n")
        reason = reason_to_leave_out(bench, options.smoke)
        if reason is not None:
            say(f"{bench.file} is left out: {reason}\n")
            continue
        arguments = bench.in_smoke if options.smoke and bench.in_smoke else bench.arguments
        start = time.monotonic()
        try:
            if options.smoke and bench.has_fake_device:
                say(harness.output_of(HERE / bench.file, *arguments))
            elif options.smoke and bench.file.endswith(".py"):
                run_here(bench, arguments)
            else:
                with tempfile.TemporaryDirectory() as scratch:
                    for line in output(bench, arguments, scratch, options.smoke):
                        say(line)
        except (Exception, SystemExit):
            traceback.print_exc()
            failed.append(bench.title)
        print(f"({time.monotonic() - start:.1f} s)", flush=True)
    if not options.smoke and not options.names:
        harness.RESULTS.mkdir(parents=True, exist_ok=True)
        (harness.RESULTS / "tables.md").write_text("".join(tables))
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
