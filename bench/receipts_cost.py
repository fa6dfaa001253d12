"""receipt() of a model of bfloat16 weights and verify() of another one, beside a pure read of as
much memory.

    python bench/receipts_cost.py [--rounds N]

Writes bench/results/receipts_cost.json; exit status 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys

import torch

import fastcheck
import harness
from pure_read import PureRead

#: In all, of matrices of 4096 columns.
BYTES = harness.size(2**30, 2**22)
LAYERS = harness.size(32, 2)
#: Of a pure read, with one thread.
BAR = 0.8


def _read(read: PureRead, memory: torch.Tensor, _: int) -> int:
    return read(memory)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    memory = torch.randn(BYTES // 2, generator=torch.Generator().manual_seed(1)).bfloat16()
    weights = {
        f"layers.{number}.weight": part.view(-1, 4096)
        for number, part in enumerate(memory.chunk(LAYERS))
    }
    receipt = fastcheck.receipt(weights)
    assert fastcheck.verify(weights, receipt)
    rows, bars = [], []
    for threads in harness.threads_to_try():
        torch.set_num_threads(threads)
        read = PureRead(threads, memory)
        cases: dict[str, harness.Case] = {
            "pure read": functools.partial(_read, read, memory),
            "receipt": lambda _: fastcheck.receipt(weights),
            "verify": lambda _: fastcheck.verify(weights, receipt),
        }
        # Threads of the case before still spin.
        seconds = harness.time_rounds(cases, rounds, pause_seconds=0.01)
        for case in ("receipt", "verify"):
            share = harness.ratio(seconds["pure read"], seconds[case])
            rows.append(
                {
                    "case": case,
                    "threads": threads,
                    "seconds": harness.spread(seconds[case]),
                    "fraction_of_pure_read": share,
                }
            )
            print(f"{case}, {threads} thread(s): {harness.with_spread(share)} of a pure read")
            if threads == 1 and not harness.IS_SMOKE:
                bars.append(harness.bar(f"{case}, of a pure read", share["median"], at_least=BAR))
    size = len(json.dumps(receipt.to_dict())) / LAYERS
    print(f"{size:.0f} bytes of JSON a tensor")
    harness.print_bars(bars)
    harness.write_results("receipts_cost", rows, bars=bars, json_bytes_a_tensor=size)
    return 0 if all(bar["is_met"] for bar in bars) else 1


if __name__ == "__main__":
    sys.exit(main())
