"""Fuzzes every reader for a given number of seconds: ``python tests/lab/fuzz_readers.py 3600``.

Prints how often each command returned which exit code and, at the end, each kind of failure once,
with the seed that makes it again (``--seed N``, then one example of each case). Exit code 1 when
there was one.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import os
import random
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

import torch

sys.path.insert(0, os.fspath(Path(__file__).resolve().parent.parent))

from support.fuzzing.corpus import Case, cases, run_mutated
from support.fuzzing.limits import limited_memory

MORE_BYTES = 1 << 29


def failure(case: Case, seed: int) -> tuple[str, str]:
    """(where it failed, the error) of one example; two empty strings when it passed."""
    out = io.StringIO()
    try:
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(out),
            warnings.catch_warnings(),
            limited_memory(MORE_BYTES),
        ):
            warnings.simplefilter("error")
            run_mutated(case, random.Random(seed).randrange)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        inner = [frame for frame in frames if "fastcheck" in frame.filename] or list(frames)
        where = f"{case.name}: {type(error).__name__} in {inner[-1].filename}:{inner[-1].lineno}"
        return where, str(error)[:200]
    return "", ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seconds", type=float, nargs="?", default=3600.0)
    parser.add_argument("--seed", type=int, help="this one only")
    parser.add_argument("--case", help="this one only")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = [c for c in cases(Path(place)) if options.case in (None, c.name)]
        seed = random.randrange(1 << 32) if options.seed is None else options.seed
        counts: collections.Counter[str] = collections.Counter()
        first: dict[str, tuple[int, str]] = {}
        examples = 0
        end = time.monotonic() + options.seconds
        while time.monotonic() < end:
            for case in made:
                where, error = failure(case, seed)
                examples += 1
                if where:
                    counts[where] += 1
                    first.setdefault(where, (seed, error))
            if options.seed is not None:
                break
            seed += 1
    print(f"{examples:,} examples, {sum(counts.values()):,} failures")
    for where, count in counts.most_common():
        print(f"{count:,} times {where} (seed {first[where][0]}): {first[where][1]}")
    return 1 if counts else 0


if __name__ == "__main__":
    sys.exit(main())
