"""Stop reports of every kind."""

from __future__ import annotations

from typing import Any

from fastcheck.record.format import Verdict
from fastcheck.report.render import WIDTH, _short_sections, headline, report_sections
from fastcheck.report.stop_report import StopReport
from fastcheck.utils.text.layout import GUTTER, section, wrap
from support.records import record_builder as build


def full_report(**fields: Any) -> StopReport:
    inputs = (
        (build.site("layers.2", "Block"), build.record("float16", low=-333.0, high=612.0)),
        (build.site(role="param", label="qkv.weight"), build.record(low=-4.2, high=3.5, rms=0.021)),
    )
    return build.report(
        before=build.grown("float16", 1204.0, 1.18, 20, 40),
        inputs=inputs,
        log_path="fastcheck_log/20250101-120000-77",
        weights_intact=True,
        **fields,
    )


def text_of(report: StopReport, width: int = WIDTH) -> str:
    """What the text of a stop and its page say of it."""
    short = dict(_short_sections(report, width - GUTTER, 99))
    sections = {**dict(report_sections(report, width - GUTTER)), "try": short["try"]}
    sections["log"] = sections.pop("log", short["log"])
    blocks = ["\n".join(section(label, lines)) for label, lines in sections.items()]
    return "\n\n".join(["\n".join(wrap(headline(report), width)), *blocks])


def all_reports() -> list[StopReport]:
    """One report for each way through the advice."""
    reports = [full_report(), full_report(scale=65536.0), build.report()]
    shapes = [
        {"nan_count": 5},
        {"posinf_count": 5},
        {"neginf_count": 5},
        {"nan_count": 5, "posinf_count": 1, "saturated_count": 2},
    ]
    roles = [
        ("forward", "output"),
        ("forward", "input"),
        ("backward", "grad_input"),
        ("backward", "grad_output"),
        ("optimizer", "param"),
        ("optimizer", "param_grad"),
        ("forward", "buffer"),
        ("optimizer", "optimizer_state"),
        ("forward", "loss"),
    ]
    kinds = ["float16", "float32", "bfloat16", "float8_e4m3fn", "complex64"]
    inputs = (
        (build.site("", "Net", role="input", label="input[0]"),
         build.record("float16", high=900.0, negative_count=3, zero_count=4)),
    )  # fmt: skip
    for direction, role in roles:
        for kind in kinds:
            for number, shape in enumerate(shapes):
                for verdict in (Verdict.ORIGIN, Verdict.ARRIVED, Verdict.PROPAGATED):
                    where = build.site(
                        "" if number % 2 else "blocks.0.norm",
                        "LayerNorm",
                        direction=direction,
                        role=role,
                        label="weight" if "param" in role else "output[0]",
                    )
                    what = build.record(kind, step=number * 3, **shape)
                    before = build.grown(kind, 2.0, 1.9 - 0.3 * number, 6, number * 3 - 1)
                    scale = (None, 0.5, 1024.0, None)[number]
                    reports.append(
                        build.report(where, what, verdict, before, inputs=inputs, scale=scale)
                    )
    return reports
