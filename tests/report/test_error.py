"""The error tree, the shape of messages, near matches, and OverflowDetected as an object."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace

import pytest

import fastcheck
from fastcheck import errors
from fastcheck.report import render as report
from support.records import record_builder as build
from support.reports import full_report

PUBLIC = [
    errors.ConfigError,
    errors.UnsupportedTensorError,
    errors.ExtensionError,
    errors.LogError,
    fastcheck.OverflowDetected,
]


@pytest.mark.parametrize("kind", PUBLIC)
def test_every_error_has_one_root_and_is_never_a_runtime_error(kind: type[Exception]) -> None:
    assert issubclass(kind, errors.FastcheckError)
    assert not issubclass(kind, RuntimeError)


@pytest.mark.parametrize("kind", [*PUBLIC, errors.FastcheckError, errors.FastcheckWarning])
def test_errors_are_public_under_the_name_that_a_traceback_prints(kind: type[Exception]) -> None:
    assert kind.__module__ == "fastcheck"
    assert getattr(fastcheck, kind.__name__) is kind


def test_errors_are_also_what_python_programs_expect() -> None:
    assert issubclass(errors.ConfigError, ValueError)
    assert issubclass(errors.UnsupportedTensorError, TypeError)
    assert issubclass(errors.ExtensionError, ImportError)
    assert not issubclass(errors.LogError, OSError)


def test_explain_says_expected_came_and_do() -> None:
    text = errors.explain("overflow_nums is wrong", expected="1 or more", got="0", hint="give 1")
    assert text.splitlines() == [
        "overflow_nums is wrong",
        "  expected: 1 or more",
        "  got:      0",
        "  hint:     give 1",
    ]


def test_near_matches_finds_misspelt_and_shifted_names() -> None:
    names = ["layers.0.attn", "layers.0.mlp", "layers.1.attn", "embed", "head"]
    assert errors.near_matches("layer.0.attn", names)[0] == "layers.0.attn"
    assert errors.near_matches("Embed", names)[0] == "embed"
    assert "layers.0.mlp" in errors.near_matches("mlp", names)
    assert "layers.0.attn" in errors.near_matches("*.attm", names)
    assert errors.near_matches("zzzz", names) == []


def test_did_you_mean() -> None:
    assert errors.did_you_mean("modul", ["module", "op"]) == "did you mean 'module'?"
    assert errors.did_you_mean("zzzz", ["module", "op"]) == ""
    several = errors.did_you_mean("attn", ["a.attn", "b.attn"])
    assert several == "did you mean 'a.attn' or 'b.attn'?"


def make_error() -> fastcheck.OverflowDetected:
    where = build.site()
    return fastcheck.OverflowDetected(
        build.report(
            where,
            before=build.grown("float16", 1200.0, 1.2, 20, 40),
            inputs=((build.site("layers.2", "Block"), build.record("float16", high=612.0)),),
            log_path="fastcheck_log/x",
        )
    )


def test_overflow_detected_carries_what_the_report_has() -> None:
    error = make_error()
    assert error.culprit.site.module == "layers.3.attn"
    assert int(error.culprit.record["nan_count"]) == 12
    assert (error.step, error.log_path, len(error.events)) == (41, "fastcheck_log/x", 1)
    assert str(error) == report.render(error.report)
    assert "step=41" in repr(error)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_overflow_detected_survives_pickling(protocol: int) -> None:
    error = make_error()
    copied = pickle.loads(pickle.dumps(error, protocol))
    assert type(copied) is fastcheck.OverflowDetected
    assert str(copied) == str(error)
    assert copied.culprit.site == error.culprit.site
    assert copied.culprit.record.tobytes() == error.culprit.record.tobytes()
    assert (copy.deepcopy(error).report.trend == error.report.trend).all()


def test_a_retry_loop_for_runtime_errors_does_not_swallow_it() -> None:
    with pytest.raises(fastcheck.OverflowDetected):
        try:
            raise make_error()
        except RuntimeError:
            pass


def test_a_fault_in_the_layout_still_names_the_culprit(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> str:
        raise ZeroDivisionError("in the layout")

    monkeypatch.setattr(report, "render", broken)
    text = str(make_error())
    assert "layers.3.attn" in text and "step 41" in text and "in the layout" in text


def test_the_rank_of_the_culprit_prints_the_report_and_the_others_two_lines(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stop = fastcheck.OverflowDetected(replace(full_report(rank=1), world_size=2))
    whole = report.render(stop.report)
    monkeypatch.setenv("RANK", "1")
    assert str(stop) == whole
    monkeypatch.setenv("RANK", "0")
    other = str(stop).splitlines()
    assert len(other) == 2
    assert other[0] == whole.splitlines()[0] and "step 41 on rank 1" in other[0]
    assert other[1].startswith("rank 1 prints the report; log of this rank: fastcheck_log/")
