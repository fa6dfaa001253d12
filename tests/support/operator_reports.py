"""Stop reports of single operators, and their advice as one text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import fastcheck
from fastcheck.report.advice.choose import advise
from fastcheck.report.stop_report import StopReport
from support.records import record_builder as build


def advice_of(report: StopReport) -> str:
    return " ".join(f"{item.text} {item.code}" for item in advise(report))


def said(stop: fastcheck.OverflowDetected) -> str:
    return " ".join(str(stop).split())


def operator_report(
    op: str,
    inputs: dict[str, Any],
    *,
    backward: bool = False,
    ran: str = "",
    direction: str = "forward",
    dtype: str = "float32",
    numel: int = 8,
    **counts: Any,
) -> StopReport:
    direction, role = ("backward", "grad_input") if backward or ran else (direction, "output")
    label = f"grad_input[0] ({op})" if backward else role
    op = ran or op
    where = build.site("net", "Net", op=op, direction=direction, role=role, label=label)
    what = build.record(dtype, numel=numel, step=5, **counts)
    read = tuple((replace(where, role="input", label=name), one) for name, one in inputs.items())
    return build.report(where, what, inputs=read)


def of(low: float = 0.1, high: float = 1.0, numel: int = 8, **fields: Any) -> Any:
    return build.record(fields.pop("dtype", "float32"), numel=numel, low=low, high=high, **fields)


ZERO = of(0.0, 1.0, zero_count=2)
WEIGHT = build.site("fc", "Linear", direction="optimizer", role="param", label="weight")
