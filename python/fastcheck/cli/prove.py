"""``fastcheck prove``: computes a training step in ways that must agree."""

from __future__ import annotations

import argparse
import json
from typing import Any

_DESCRIPTION = """\
Computes one training step in ways that must agree (rows in another order, more padding,
micro-batches, checkpointing, ...), and names the first place where it does not. TARGET is a file or
module and a function of it that takes nothing and returns model, batch and step, and the optimizer
where there is one."""

_EPILOG = """\
examples:
  fastcheck prove train.py:step
  fastcheck prove package.module:step --relations permuted padded
  fastcheck prove train.py:step --json

exit codes:
  0  no relation differs
  1  a relation differs
  2  wrong usage, or no such step"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "prove",
        help="whether a training step agrees with itself: in a batch, padded, checkpointed, ...",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("target", metavar="TARGET", help="train.py:step, or package.module:step")
    parser.add_argument("--relations", nargs="+", metavar="NAME", help="only these relations")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of text")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Exit code 1 when a relation differs."""
    from fastcheck.proving.prove import prove
    from fastcheck.proving.target import load

    target = load(options.target)
    proof = prove(
        target.step,
        target.batch,
        model=target.model,
        optimizer=target.optimizer,
        relations=options.relations or "auto",
    )
    print(json.dumps(proof.to_dict(), indent=1) if options.json else proof)
    return 0 if proof else 1
