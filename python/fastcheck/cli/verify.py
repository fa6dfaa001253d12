"""``fastcheck verify``: compares a checkpoint with its seal."""

from __future__ import annotations

import argparse

from fastcheck.errors import printable
from fastcheck.utils.text.layout import to_ascii, wants_ascii, wrap
from fastcheck.utils.text.numbers import and_more, worded

from .console import print_json

_WIDTH = 88
_SHOWN = 20

HELP = "whether a checkpoint holds the weights that were sealed, and finite ones"

DESCRIPTION = """\
Reads a checkpoint (a file, or a directory of files such as that of shards) and compares its tensors
with the seal beside it, which fastcheck.seal() or a trainer's callback wrote when it was saved."""

EPILOG = """\
examples:
  fastcheck verify out/checkpoint-100
  fastcheck verify model.safetensors --json

exit codes:
  0  every sealed tensor exists and is equal to the bit, and all tensors are finite
  1  a tensor differs, is missing, or holds NaN or infinities
  2  wrong usage, no seal, or a file that can't be read"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("checkpoint", help="a checkpoint file, or a directory of them")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of text")
    parser.add_argument(
        "--trust",
        action="store_true",
        help="load files that torch.load reads only by running code that they contain",
    )


def run(options: argparse.Namespace) -> int:
    """Exit code 1 when the checkpoint is not as it was sealed, or not finite."""
    import sys

    from fastcheck.sealing.seal import verify

    verification = verify(options.checkpoint, trust=options.trust)
    if options.json:
        print_json("verify", verification.to_dict())
        return 0 if verification else 1
    step = "" if verification.step is None else f" after step {verification.step:,}"
    lines = wrap(f"{verification.path}: sealed{step} as {verification.verdict}", _WIDTH)
    equal = verification.equal
    text = f"{equal:,} {worded('tensor[ is|s are]', equal)} equal to the bit"
    lines += wrap(text, _WIDTH, "  ")
    for title, rows in (
        ("differing", [f"{key}: {what}" for key, what in verification.differing.items()]),
        ("missing", list(verification.missing)),
        (
            "not finite",
            [f"{key}: {count:,} NaN or Inf" for key, count in verification.nonfinite.items()],
        ),
        ("notes", list(verification.notes)),
    ):
        if rows:
            lines.append(f"{title}:")
            for row in rows[:_SHOWN]:
                lines += wrap(row, _WIDTH, "  ", "    ")
            lines += [f"  {line}" for line in and_more(len(rows) - _SHOWN, "more (--json has all)")]
    lines.append("verified" if verification else "NOT VERIFIED")
    text = printable("\n".join(lines), keep="\n")
    print(to_ascii(text) if wants_ascii(sys.stdout) else text)
    return 0 if verification else 1
