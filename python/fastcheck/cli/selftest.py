"""``fastcheck selftest``: prints the results of the checks on this machine's device."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from fastcheck.utils.text.layout import paint, section, to_ascii, wants_ascii, wants_color, wrap
from fastcheck.utils.text.numbers import to_json

_WIDTH = 88

_DESCRIPTION = """\
Reads difficult tensors on a device and compares the records with the CPU's; looks for waits of the
host, uses streams, stops a small training run, and compares the time of reading with that of a
copy, in less than two minutes. The block at the end can be pasted into an issue: it contains no
path and no name of host or user."""

_EPILOG = """\
What can't be found out on a device is "not checkable here", with the reason: that is no failure.

exit codes:
  0  every check passed that can be made here
  1  a check failed: fastcheck does not keep what it promises on this device
  2  wrong usage, or no such device here"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "selftest",
        help="whether fastcheck keeps its promises on this machine's device",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--device",
        help="npu, mlu, cuda, cpu or another of torch's, npu:1 for the second one (default: the "
        "accelerator, without one the CPU)",
    )
    parser.add_argument(
        "--check",
        action="append",
        default=[],
        metavar="NAME",
        help="only this check (may be given several times): values, special-values, layouts, "
        "found-nonfinite, kernels, no-sync, streams, overflow-mode, install, throughput",
    )
    parser.add_argument("--json", action="store_true", help="one JSON document instead of text")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Exit code 1 when a check failed, else 0."""
    from fastcheck.selftest.run import begin

    report = begin(options.device, options.check)
    if options.json:
        for _ in report.run():
            pass
        print(json.dumps(to_json(_document(report)), allow_nan=False, indent=1))
        return 1 if report.failed else 0
    color = wants_color(sys.stdout)
    _print(section("versions", _pairs(report.versions), color))
    _print(["", *section("device", _pairs(report.device), color), ""])
    for outcome in report.run():
        _print(section("check", _lines(outcome, color), color))
    verdict = _result_line(report)
    _print(["", *section("result", [paint(verdict, _style(report), color)], color)])
    _print(["", *section("paste", ["this into an issue:"], color), "", *_block(report, verdict)])
    return 1 if report.failed else 0


def _print(lines: list[str]) -> None:
    text = "\n".join(lines)
    print(to_ascii(text) if wants_ascii(sys.stdout) else text, flush=True)


def _pairs(entries: dict[str, str]) -> list[str]:
    widest = max(len(name) for name in entries)
    return [f"{name:<{widest}}  {value}" for name, value in entries.items()]


def _lines(outcome: Any, color: bool) -> list[str]:
    style = {"passed": "green", "FAILED": "red"}.get(outcome.status, "yellow")
    head = f"{outcome.name:<16}{paint(outcome.status, style, color)}  {outcome.seconds:.1f} s"
    texts = [outcome.detail] if outcome.status == "passed" else [outcome.about, outcome.detail]
    return [head, *(line for text in texts for line in wrap(text, _WIDTH - 10, "  "))]


def _style(report: Any) -> str:
    return "red" if report.failed else "green"


def _result_line(report: Any) -> str:
    from fastcheck.selftest.run import NOT_CHECKABLE, PASSED

    counts = {
        status: sum(outcome.status == status for outcome in report.outcomes)
        for status in (PASSED, NOT_CHECKABLE)
    }
    text = f"{counts[PASSED]} passed, {len(report.failed)} failed"
    if counts[NOT_CHECKABLE]:
        text += f", {counts[NOT_CHECKABLE]} not checkable here"
    if report.failed:
        text += ": " + ", ".join(outcome.name for outcome in report.failed)
    return f"{text}  ({report.seconds:.0f} s)"


def _block(report: Any, verdict: str) -> list[str]:
    lines = ["```text", "fastcheck selftest: " + verdict]
    lines += _pairs({**report.versions, **report.device})
    for outcome in report.outcomes:
        lines.append(f"{outcome.name:<16}{outcome.status}: {outcome.detail}")
    return [*lines, "```"]


def _document(report: Any) -> dict[str, Any]:
    return {
        "versions": report.versions,
        "device": report.device,
        "checks": [
            {
                "name": outcome.name,
                "about": outcome.about,
                "status": outcome.status.lower(),
                "detail": outcome.detail,
                "seconds": outcome.seconds,
                **({"figures": outcome.figures} if outcome.figures else {}),
            }
            for outcome in report.outcomes
        ],
        "dtypes_not_on_this_device": report.subject.missing,
        "seconds": report.seconds,
        "passed": not report.failed,
    }
