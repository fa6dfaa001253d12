"""Fuzzes every reader for a given number of seconds: ``python tests/lab/fuzz_readers.py 3600``.

Prints the number of examples of each case with the exit codes of its commands and the seconds of
its slowest example, then each kind of failure once, with the seed that makes it again (``--seed N
--case CASE``). A failure is an exception, a warning, an exit code that is not documented, a control
character in the output, or an example that takes longer than LONGEST. Exit code 1 when there was
one.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import os
import random
import re
import signal
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, os.fspath(Path(__file__).resolve().parent.parent))

from support.fuzzing.corpus import Case, cases, run_mutated
from support.fuzzing.limits import limited_memory

MORE_BYTES = 1 << 29
LONGEST = 60.0
_STEERING = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


class TookTooLong(BaseException):
    """Not an Exception, which the product might report as an error of the file."""


def _too_long(*_: object) -> None:
    raise TookTooLong(f"longer than {LONGEST:.0f} s")


class Example(NamedTuple):
    """``where`` it failed, with which ``error``; both are empty when it passed."""

    codes: tuple[int, ...] = ()
    where: str = ""
    error: str = ""


def run_example(case: Case, seed: int) -> Example:
    out = io.StringIO()
    signal.setitimer(signal.ITIMER_REAL, LONGEST)
    try:
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(out),
            warnings.catch_warnings(),
            limited_memory(MORE_BYTES),
        ):
            warnings.simplefilter("error")
            codes = tuple(run_mutated(case, random.Random(seed).randrange))
    except (Exception, TookTooLong) as error:
        frames = traceback.extract_tb(error.__traceback__)
        inner = [frame for frame in frames if "fastcheck" in frame.filename] or list(frames)
        where = f"{case.name}: {type(error).__name__} in {inner[-1].filename}:{inner[-1].lineno}"
        return Example((), where, str(error)[:200])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    if not set(codes) <= {0, 1, 2}:
        return Example(codes, f"{case.name}: exit code", str(codes))
    if found := _STEERING.search(out.getvalue()):
        start = max(0, found.start() - 40)
        return Example(codes, f"{case.name}: control character", repr(out.getvalue()[start:][:120]))
    return Example(codes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seconds", type=float, nargs="?", default=3600.0)
    parser.add_argument("--seed", type=int, help="this one only")
    parser.add_argument("--case", help="this one only")
    options = parser.parse_args()
    torch.set_num_threads(1)
    signal.signal(signal.SIGALRM, _too_long)
    with tempfile.TemporaryDirectory() as place:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = [c for c in cases(Path(place)) if options.case in (None, c.name)]
        seed = random.randrange(1 << 32) if options.seed is None else options.seed
        codes = {case.name: collections.Counter[int]() for case in made}
        slowest = {case.name: (0.0, 0) for case in made}
        counts: collections.Counter[str] = collections.Counter()
        first: dict[str, tuple[int, str]] = {}
        began = time.monotonic()
        examples = 0
        while time.monotonic() < began + options.seconds:
            for case in made:
                start = time.monotonic()
                example = run_example(case, seed)
                examples += 1
                codes[case.name].update(example.codes)
                slowest[case.name] = max(slowest[case.name], (time.monotonic() - start, seed))
                if example.where:
                    counts[example.where] += 1
                    if counts[example.where] == 1:
                        first[example.where] = seed, example.error
                        print(f"{example.where} (seed {seed}): {example.error}", flush=True)
            if options.seed is not None:
                break
            seed += 1
    seconds = time.monotonic() - began
    failures = f"{sum(counts.values()):,} failures of {len(counts)} kinds"
    print(f"{examples:,} examples in {seconds:,.0f} s, {failures}")
    for name, found in codes.items():
        ended = ", ".join(f"exit {code}: {count:,}" for code, count in sorted(found.items()))
        longest, at = slowest[name]
        print(f"  {name:20} {ended}; slowest {longest:.2f} s (seed {at})")
    for where, count in counts.most_common():
        print(f"{count:,} times {where} (seed {first[where][0]}): {first[where][1]}")
    return 1 if counts else 0


if __name__ == "__main__":
    sys.exit(main())
