"""The stop report: its order, its numbers, its trend."""

from __future__ import annotations

import re
import sys
import warnings
from dataclasses import replace
from typing import Any

import pytest

from fastcheck.errors import FastcheckWarning
from fastcheck.monitor.session.stop_handler import call_back, raise_stop, warn_of
from fastcheck.record.format import Verdict
from fastcheck.record.statistics import statistics_of
from fastcheck.report.advice.choose import advise
from fastcheck.report.error import OverflowDetected
from fastcheck.report.render import brief, render
from fastcheck.report.summary import found_lines, last_step_lines, summary, where_lines
from fastcheck.utils.text.layout import Table, sparkline, table
from fastcheck.utils.text.numbers import format_number, format_share
from support.records import record_builder as build
from support.reports import all_reports, full_report, text_of


def section_of(text: str, label: str) -> str:
    """The lines of one section, without its label."""
    found = re.search(rf"(?ms)^{label} +(.*?)(?=^\S|\Z)", text)
    assert found is not None, f"no section {label} in\n{text}"
    return found.group(1)


# Order and content


def test_sections_come_in_the_order_in_which_one_asks() -> None:
    labels = re.findall(r"(?m)^([a-z]+)  ", text_of(full_report()))
    assert labels == ["what", "where", "when", "numbers", "inputs", "trend", "try", "log"]


def test_the_text_of_a_stop_has_25_lines_with_what_to_try() -> None:
    told = 0
    for report in all_reports():
        text = render(report, ascii_only=False)
        assert len(text.splitlines()) <= 25, text
        assert re.search(r"(?m)^try +1\. ", text), text
        numbers = re.findall(r"(?m)^(?:try)? +(\d)\. ", text)
        assert numbers == [str(n) for n in range(1, len(numbers) + 1)]
        told += len(numbers)
    assert told / len(all_reports()) > 2
    assert 'install(..., level="op")' in render(full_report(), ascii_only=False)
    labels = re.findall(r"(?m)^([a-z]+)  ", render(full_report(), ascii_only=False))
    assert labels == ["what", "where", "when", "inputs", "try", "log"]


def test_the_trend_gives_way_where_a_reason_is_long() -> None:
    grown = build.report(
        before=build.grown("float16", 1204.0, 1.18, 20, 40),
        reason="made here of what was read before it, and of nothing else that was seen. " * 13,
        log_path="fastcheck_log/20250101-120000-77",
    )
    text = render(grown)
    assert len(text.splitlines()) <= 25 and "try       1. " in text and "abs max grew" not in text
    assert "abs max grew" in render(replace(grown, culprit=full_report().culprit))


def test_a_cut_text_keeps_the_line_and_the_log() -> None:
    """However many tensors an operator has read."""
    long = [(build.site(f"layers.{n}.{'long' * 9}"), build.record()) for n in range(30)]
    report = replace(full_report(), inputs=tuple(long), weights_intact=None)
    report = replace(report, culprit=replace(report.culprit, line="train.py:12 in forward"))
    text = render(report, ascii_only=False)
    assert len(text.splitlines()) <= 25
    assert "line      train.py:12 in forward" in text and "\nlog  " in text
    assert re.search(r"and 2[68] more", text) and "\ntry       1. " in text


def test_the_headline_alone_says_what_where_and_when() -> None:
    headline = text_of(full_report()).splitlines()[0]
    assert headline == "12 NaN and 4 +Inf in output[0] of layers.3.attn (Attention) at step 41"


def test_a_tensor_that_an_operator_read_outside_the_model_is_no_batch_of_a_model() -> None:
    where = build.site("", "outside the model", role="input", label="src", op="aten.copy_")
    report = build.report(where, build.record(nan_count=1, step=2), Verdict.ARRIVED)
    headline = " ".join(text_of(report).split("\n\n")[0].split())
    assert headline == "1 NaN in src of aten.copy_ #0 in outside the model at step 2"


def test_what_gives_share_verdict_and_reason() -> None:
    what = section_of(text_of(full_report()), "what")
    assert "among 65,536 elements (0.02 %)" in what
    assert "origin, it began here: all that it was computed from was finite" in what


def test_where_and_when() -> None:
    text = text_of(full_report(rank=3))
    where = section_of(text, "where")
    assert "module    layers.3.attn (Attention)" in where
    assert "tensor    output[0], float16, 65,536 elements" in where
    assert "rank      3" in where
    when = section_of(text, "when")
    assert "step 41" in when and "forward" in when and "overflow_nums" not in when
    assert "No optimizer has updated a weight in this step" in when


def test_untouched_weights_are_claimed_only_when_known() -> None:
    text = text_of(build.report(before=build.grown("float16", 10.0, 1.2, 3, 40)))
    assert "No optimizer has updated a weight" not in text


def test_when_tells_the_call_and_which_event_of_how_many() -> None:
    what = build.record(nan_count=1, step=7, call=2)
    when = section_of(text_of(build.report(what=what, event_count=3, overflow_nums=3)), "when")
    assert "call 3 of this module" in when
    assert "overflow_nums=3: this was event 3" in when


def test_numbers_are_aligned_and_complete() -> None:
    numbers = section_of(text_of(full_report()), "numbers")
    rows = {line.split()[0]: line for line in numbers.splitlines() if line.strip()}
    assert re.search(r"NaN +12 ", rows["NaN"]) and "min" in rows["NaN"]
    assert "-60,000" in rows["NaN"] and "65,504" in rows["+Inf"]
    assert "100 % of float16's 65,504" in rows["-Inf"]
    assert re.search(r"finite +65,520", rows["finite"])
    found = [re.match(r".*?[\d,]+", rows[name]) for name in ("+Inf", "-Inf", "zeros")]
    assert all(found)
    ends = {one.end() for one in found if one is not None}
    assert len(ends) <= 2  # the first row carries no gutter in this cut


def test_numbers_without_statistics_say_how_to_get_them() -> None:
    what = build.record(nan_count=3, depth=1, step=4)
    numbers = section_of(text_of(build.report(what=what)), "numbers")
    assert "rms" not in numbers.splitlines()[4] and 'record="stats"' in numbers


def test_numbers_when_nothing_finite_is_left() -> None:
    what = build.record(numel=8, nan_count=8, step=4)
    text = text_of(build.report(what=what))
    assert "no finite element is left" in section_of(text, "numbers")
    assert "8 NaN among 8 elements (100 %)" in text


def test_a_tensor_of_one_element_has_no_share() -> None:
    what = build.record(numel=1, nan_count=1, step=4)
    assert section_of(text_of(build.report(what=what)), "what").startswith(
        "1 NaN, the only element."
    )


def test_complex_tensors_count_parts() -> None:
    what = build.record("complex64", numel=8, nan_count=3, step=4)
    assert "3 NaN among 16 real and imaginary parts" in text_of(build.report(what=what))


def test_inputs_show_producer_parameters_and_ranges() -> None:
    inputs = section_of(text_of(full_report()), "inputs")
    lines = inputs.splitlines()
    assert lines[0].split() == ["tensor", "dtype", "elements", "NaN+Inf", "min", "max", "rms"]
    assert "output[0] of layers.2" in lines[1] and "-333" in lines[1] and "612" in lines[1]
    assert "parameter layers.3.attn.qkv.weight" in lines[2] and "float32" in "".join(lines[2:4])


@pytest.mark.parametrize(
    ("role", "says"),
    [
        ("param", "stored in the model"),
        ("input", "no module or operator that fastcheck observes"),
        ("output", "not recorded"),
    ],
)
def test_no_inputs_is_said(role: str, says: str) -> None:
    report = build.report(build.site(role=role, label="x"))
    assert says in section_of(text_of(report), "inputs")


def test_long_input_lists_are_cut_and_say_so() -> None:
    many = tuple((build.site(f"m.{i}"), build.record()) for i in range(25))
    inputs = section_of(text_of(build.report(inputs=many)), "inputs")
    assert "and 15 more" in inputs and len(inputs.splitlines()) <= 14


def test_trend_has_a_sentence_a_table_and_a_plot() -> None:
    trend = section_of(text_of(full_report()), "trend")
    assert "abs max grew 23 times in 19 steps" in trend
    rows = re.findall(r"(?m)^ +(\d+) +[\d,.]+ +[\d,.]+ +\d+", trend)
    assert rows == ["21", "26", "31", "37", "38", "39", "40", "41"]
    assert re.search(r"41 +65,504 +311.2 +16  <- here", trend)
    assert re.search(r"abs max  ▁.*█× \(log scale\)", trend)


def test_trend_of_a_module_called_twice_a_step_has_a_call_column() -> None:
    before = [build.record("float16", step=s, call=c) for s in (39, 40) for c in (0, 1)]
    assert "call" in section_of(text_of(build.report(before=before)), "trend")


def test_no_trend_is_said() -> None:
    assert "no earlier record" in section_of(text_of(build.report()), "trend")


def test_log_gives_the_command_to_type() -> None:
    text = text_of(full_report())
    assert "fastcheck show fastcheck_log/20250101-120000-77 --step 41" in section_of(text, "log")
    assert "could not be written" in section_of(text_of(build.report()), "log")


def test_a_long_path_stays_whole_so_that_it_can_be_copied() -> None:
    path = "/scratch/" + "project_with_a_long_name/" * 5 + "log"
    log = section_of(text_of(build.report(log_path=path)), "log")
    assert log.count(path) == 1


def test_a_path_with_a_space_is_quoted() -> None:
    text = text_of(build.report(log_path="my logs/x"))
    assert "fastcheck show 'my logs/x' --step 41" in text


def test_every_report_renders_within_88_columns_with_advice() -> None:
    for report in all_reports():
        text = text_of(report)
        for line in text.splitlines():
            assert len(line) <= 88, line
            assert line == line.rstrip()
        assert "nan" not in section_of(text, "numbers").lower().replace("nan  ", "")
        assert 2 <= len(advise(report)) <= 6
        assert brief(report, ascii_only=False).splitlines()[0] in text.replace("\n", "\n")


def test_long_module_paths_stay_whole_in_where() -> None:
    path = "model." + ".".join(f"block_with_a_long_name_{i}" for i in range(6))
    text = text_of(build.report(build.site(path)))
    assert f"module    {path} (Attention)" in text


def test_plain_ascii_when_the_terminal_has_no_more() -> None:
    text = render(build.report(build.site("layers.é")), ascii_only=True)
    assert text.isascii() and "layers.\\xe9" in text


def test_ascii_is_chosen_from_the_encoding_of_standard_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Narrow:
        encoding = "latin-1"

        def write(self, text: str) -> int:
            return len(text)

    report = build.report(build.site("layers.é"))
    assert not render(report, ascii_only=False).isascii()
    monkeypatch.setattr(sys, "stderr", Narrow())
    assert render(report).isascii()


def test_a_report_has_no_colour() -> None:
    assert "\x1b" not in render(full_report())


# Numbers, sparkline, summary, sinks


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (-0.0, "0"),
        (65504.0, "65,504"),
        (1.5, "1.5"),
        (0.03125, "0.03125"),
        (-123456, "-123,456"),
        (3.4e38, "3.40e+38"),
        (-1e-7, "-1.00e-07"),
        (float("inf"), "inf"),
        (None, "-"),
        (2**63, "9.22e+18"),
    ],
)
def test_spell(value: Any, text: str) -> None:
    assert format_number(value) == text and len(text) <= 10


def test_shares_never_round_to_nothing_or_to_everything() -> None:
    assert format_share(1, 10**9) == "<0.01 %"
    assert format_share(10**9 - 1, 10**9) == ">99.99 %"
    assert format_share(5, 5) == "100 %" and format_share(0, 5) == "0 %"
    assert format_share(1, 0) == "-" and format_share(1, 3) == "33 %"


@pytest.mark.parametrize(
    ("dtype", "low", "high"),
    [("int64", -(2**63), 2**63 - 1), ("uint64", 0, 2**64 - 1), ("int8", -128, 127)],
)
def test_integer_extremes_are_read_in_their_own_type(dtype: str, low: int, high: int) -> None:
    reading = statistics_of(build.record(dtype, low=low, high=high))
    assert (reading.min, reading.max) == (low, high)


def test_sparkline_marks_the_bad_and_scales_the_rest() -> None:
    assert sparkline([1, 2, 3, None], [False, False, False, True]) == "▁▅█×"
    assert sparkline([1.0] * 3, [False] * 3) == "▁▁▁"
    assert sparkline([1, 10, 100, 1000], [False] * 4) == "▁▃▆█"
    assert sparkline([None, 5.0], [False, True], ascii_only=True) == " !"
    assert sparkline([], []) == ""


def test_sparkline_of_many_values_keeps_peaks_and_marks() -> None:
    values = [1.0] * 500
    values[123] = 9.0
    bad = [False] * 499 + [True]
    line = sparkline(values, bad, width=50)
    assert len(line) == 50 and line.count("█") == 1 and line.endswith("×")


def test_summary_says_what_was_found() -> None:
    verdicts = {Verdict.ORIGIN: 2, Verdict.PROPAGATED: 30, Verdict.UNRESOLVED: 0}
    last = [(build.site(f"m.{i}"), build.record(high=float(i))) for i in range(50)]
    blocks = [
        ("found", found_lines(2, -1, verdicts, 0, 78)),
        ("watch", []),
        ("where", where_lines([(build.site(), 2)], 78, "fastcheck")),
        ("last step", last_step_lines(last, 78, "fastcheck")),
    ]
    text = summary(blocks, ascii_only=False)
    assert "watch" not in text and "2 counted overflow events (never stops)" in text
    assert re.search(r"propagated +30", text) and "unresolved" not in text
    assert "layers.3.attn (Attention)" in text and "and 30 more" in text
    assert all(len(line) <= 88 for line in text.splitlines())


def test_raising_sink() -> None:
    report = full_report()
    with pytest.raises(OverflowDetected) as caught:
        raise_stop(report)
    assert caught.value.report is report


def test_console_sink_warns_once_for_each_event() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        warn_of(full_report())
        warn_of(build.report(what=build.record(nan_count=1, step=42)))
    assert [warning.category for warning in caught] == [FastcheckWarning] * 2
    text = str(caught[0].message)
    assert "layers.3.attn" in text and "step 41" in text and "try: " in text
    assert len(text.splitlines()) < 8


def test_callback_sink_hands_over_the_event_and_lets_errors_pass() -> None:
    got = []
    report = full_report()
    call_back(got.append, report)
    assert got == [report.culprit]

    def angry(_: object) -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        call_back(angry, report)


def test_names_that_have_no_room_stay_whole_and_apart() -> None:
    names = [
        f"{role}layers.{n}.attn.query.weight" for n in range(2) for role in ("", "gradient of ")
    ]
    rows = [[name, "float32", "1", "2"] for name in names]
    lines = table(["tensor", "dtype", "a", "b"], rows, left=2, width=40)
    assert [line for line in lines if "query" in line] == names
    assert len(lines) == 9 and len(set(lines[2::2])) == 1
    assert lines[2].endswith("float32  1  2") and max(map(len, lines)) <= 40
    short = table(["tensor", "a"], [["x", "1"], ["y", "2"]], width=40)
    assert short == ["tensor  a", "x       1", "y       2"]


def test_a_row_that_has_no_room_is_text() -> None:
    rows = [
        ["gradient of layers.0.attn.query.weight", "float32", "-3.86e+36"],
        ["x", "bfloat16", "1"],
    ]
    assert table(["tensor", "dtype", "rms before"], rows, left=2, width=28) == [
        "gradient of",
        "  layers.0.attn.query.weight",
        "  dtype float32,",
        "  rms before -3.86e+36",
        "x",
        "  dtype bfloat16,",
        "  rms before 1",
    ]
    steps = [["…", "", ""], ["4", "-3.86e+36", "<- here"]]
    noted = table(["step", "rms", ""], steps, left=0, width=20)
    assert noted == ["…", "step 4", "  rms -3.86e+36,", "  <- here"]


def test_no_line_is_wider_than_asked_for() -> None:
    reports = all_reports()
    for columns in (50, 60):
        for report in reports[:: len(reports) // 60]:
            for line in text_of(report, width=columns).splitlines():
                is_code = "fastcheck show" in line or line.startswith(" " * 15)
                # A name that has no room keeps a line to itself.
                is_name = " " not in line.strip()
                assert len(line) <= columns or is_code or is_name, line


def test_a_style_is_that_of_its_row_also_where_rows_take_two_lines() -> None:
    rows = [["a" * 30, "1"], ["b", "2"]]
    lines = Table(["tensor", "x" * 20], rows, width=40, styles={1: "bold"}).lines(color=True)
    assert ["\x1b" in line for line in lines] == [False, False, False, True]
