"""``fastcheck compare``: prints the first difference between two logs, dumps or checkpoints."""

from __future__ import annotations

import argparse
import sys

from fastcheck.errors import ConfigError
from fastcheck.utils.text.layout import wants_ascii, wants_color

from .console import print_json, progress, show_sections

HELP = "two logs, dumps or checkpoints: what differs first"

DESCRIPTION = """\
Compares two runs, dumps, checkpoints, environments or inventories: ACTUAL, and the REFERENCE that
it should agree with. Answers in order whether they agree in environment, hyper-parameters, batches,
initial weights, forward, loss, gradients and update, and stops at the first "no", with the first
step and the first tensor that differ.

What can be compared:
  record logs      directories that install(log_dir=...) or a stop has written
  dumps            of fastcheck.Dumper: a directory, a step or a rank in it; against a log, too
  checkpoints      of torch, safetensors or NumPy, or a directory of them
  msprobe dumps    dump_path, a step or rank in it, or a dump.json; against a log, too
  settings         the JSON of fastcheck.environment() or fastcheck.inventory()"""

EPILOG = """\
examples:
  fastcheck compare runs/npu/log runs/gpu/log         where do these two runs part?
  fastcheck compare A B --accept environment          they ran on different machines
  fastcheck compare A B --exact                       the same machine: equal to the bit, or not?
  fastcheck compare a.safetensors b.pt --csv all.csv  every pair that differs, with its measures
  fastcheck compare ms.npz pt.pth --rename mindspore  gamma is weight, moving_mean is running_mean
  fastcheck compare A B --all --html diff.html        a page to open in a browser
  fastcheck compare A B --rename names.json           {"encoder.layers.*": "blocks.*"}
  fastcheck compare A B --threshold bfloat16=0.05     allow more of one dtype
  fastcheck compare A B --steps 3:7                   two iterations: what changed, what did not
  fastcheck compare A B --steps 0-:6-                 A continues B from its step 6 on
  fastcheck compare A B --json | python -m json.tool  strict JSON: "nan" and "inf" are strings

what may be accepted: environment, hyper-parameters, batches, weights, dtype, order (only a checksum
differs: another order of the same numbers, or some last bits; batches and weights in another memory
layout), missing

Files are read without running code that they contain; --trust allows that for .pt files.

exit codes: 0 they agree, but for what --accept names; 1 they differ; 2 wrong usage, a side that
can't be read, or nothing in common"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("actual", help="the side in question")
    parser.add_argument("reference", help="the side that it should agree with")
    parser.add_argument(
        "--rename",
        metavar="FILE",
        help="JSON of names in ACTUAL and what they are in REFERENCE; or mindspore, megatron, vllm",
    )
    parser.add_argument(
        "--accept",
        action="append",
        default=[],
        metavar="WHAT",
        help="what may differ (below); may be given several times",
    )
    parser.add_argument(
        "--exact",
        action="store_true",
        help="equal to the bit, or different, where both sides have checksums or values",
    )
    parser.add_argument(
        "--threshold",
        action="append",
        default=[],
        metavar="DTYPE=ERROR",
        help="relative error that is still equal for this dtype; may be given several times",
    )
    parser.add_argument(
        "--steps",
        metavar="A:B",
        help="step A of ACTUAL with step B of REFERENCE; several: 3:7,4:8; from there on: 6-:0-",
    )
    parser.add_argument(
        "--repeat",
        metavar="PATH",
        help="a second run of REFERENCE's program: leave out what is not deterministic",
    )
    parser.add_argument(
        "--loss-drift",
        type=float,
        default=0.01,
        metavar="ERROR",
        help="relative difference at which two losses have drifted apart (default: 0.01)",
    )
    parser.add_argument("--all", action="store_true", help="go on after the first no")
    parser.add_argument(
        "--csv", metavar="FILE", help="write every pair that is not equal to the bit"
    )
    parser.add_argument(
        "--html", metavar="FILE", help="write a page with a heat map of the difference"
    )
    parser.add_argument("--json", action="store_true", help="one JSON document instead of text")
    parser.add_argument(
        "--trust", action="store_true", help="allow .pt files to run code that they contain"
    )


def run(options: argparse.Namespace) -> int:
    """Exit code 0 when the two agree, 1 when they differ."""
    # Here: it imports torch, which `fastcheck --help` can do without.
    from fastcheck.comparison.compare import compare
    from fastcheck.comparison.render import sections

    with progress("comparing", "blocks") as show_progress:
        comparison = compare(
            options.actual,
            options.reference,
            rename=options.rename,
            accept=options.accept,
            exact=options.exact,
            thresholds=_thresholds(options.threshold),
            ask_all=options.all,
            csv=options.csv,
            progress=show_progress,
            trust=options.trust,
            steps=options.steps,
            repeat=options.repeat,
            loss_drift=options.loss_drift,
            html=options.html,
        )
    if options.json:
        print_json("compare", comparison.to_dict())
    else:
        show_sections(sections(comparison, wants_color(sys.stdout), wants_ascii(sys.stdout)))
    return 0 if comparison.agrees else 1


def _thresholds(given: list[str]) -> dict[str, float]:
    thresholds = {}
    for text in given:
        dtype, _, error = text.partition("=")
        try:
            thresholds[dtype] = float(error)
        except ValueError:
            raise ConfigError(
                "invalid --threshold", expected="DTYPE=ERROR, as bfloat16=0.05", got=text
            ) from None
    return thresholds
