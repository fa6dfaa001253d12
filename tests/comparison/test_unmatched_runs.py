"""compare() of record logs with different names, calls, steps or dtypes, of logs with gaps, and of
unusable sides and options.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fastcheck
from support.programs.compare_runs import answers, log_run
from support.programs.training import Net


def test_names_that_differ_are_mapped(tmp_path: Path) -> None:
    class Renamed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.blocks = self.blocks, nn.ModuleList()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.body:
                x = self.dropout(block(x))
            return self.head(x)

    actual = log_run(tmp_path / "actual", model=Renamed)
    reference = log_run(tmp_path / "reference")
    unmapped = fastcheck.compare(actual, reference)
    assert not unmapped.agrees
    assert {one.name.split(" ")[0].split(".")[0] for one in unmapped.missing} == {"body", "blocks"}
    assert any(
        "body.0.a · optimizer · body.0.a.weight is blocks.0.a" in note for note in unmapped.notes
    )
    mapping = tmp_path / "names.json"
    for rename in ({"body.*": "blocks.*"}, {"body": "blocks"}):
        mapping.write_text(json.dumps(rename))
        assert fastcheck.compare(actual, reference, rename=mapping).is_identical, rename
    with pytest.raises(fastcheck.ConfigError, match="did you mean 'body'"):
        fastcheck.compare(actual, reference, rename={"body": "blocks", "bodi": "blocks"})


def test_missing_and_extra_calls_are_tolerated_and_named(tmp_path: Path) -> None:
    class Twice(nn.Module):
        """Its middle layer runs once more in step 1, for nothing."""

        def __init__(self, extra: bool) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)
            self.extra, self.calls = extra, 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if self.extra and self.calls == 2:
                with torch.no_grad():
                    self.a(x * 7)
            return self.b(self.a(x))

    actual = log_run(tmp_path / "actual", model=lambda: Twice(True))
    reference = log_run(tmp_path / "reference", model=lambda: Twice(False))
    comparison = fastcheck.compare(actual, reference)
    assert {(one.name, one.count, one.first_step) for one in comparison.missing} == {
        ("a · forward · output[0]", 1, 1),
        ("a · forward · input[0]", 1, 1),
    }
    assert answers(comparison)["forward"] == "partly" and not comparison.agrees
    assert comparison.first is None  # the right calls were put together
    assert fastcheck.compare(actual, reference, accept="missing").agrees


def test_a_run_that_ends_earlier_agrees_as_far_as_it_goes(tmp_path: Path) -> None:
    actual = log_run(tmp_path / "actual", steps=3)
    reference = log_run(tmp_path / "reference", steps=5)
    comparison = fastcheck.compare(actual, reference)
    assert comparison.is_identical and comparison.steps == (0, 1, 2)
    assert "only reference has steps 3 to 4: not compared" in comparison.notes
    segment = Path(actual) / "records-rank0-000000.bin"
    data = segment.read_bytes()
    segment.write_bytes(data[: len(data) - 10 * 192 - 7])  # killed within step 2
    assert fastcheck.compare(actual, reference).is_identical


def test_a_log_without_checksums_agrees_as_far_as_the_statistics_tell(tmp_path: Path) -> None:
    runs = [log_run(tmp_path / name, record="stats") for name in ("actual", "reference")]
    comparison = fastcheck.compare(*runs)
    assert comparison.verdict == "equal"
    assert "as far as the statistics tell" in comparison["forward"].text
    full = log_run(tmp_path / "full")
    assert fastcheck.compare(runs[0], full).verdict == "equal"


def test_a_wider_dtype_is_named_and_may_be_accepted(tmp_path: Path) -> None:
    actual = log_run(tmp_path / "actual", dtype=torch.bfloat16)
    reference = log_run(tmp_path / "reference")
    comparison = fastcheck.compare(actual, reference)
    found = comparison["batches"].found
    assert found is not None and found.row.reason == "other dtypes"
    accepted = fastcheck.compare(actual, reference, accept="dtype")
    assert answers(accepted)["initial weights"] == "yes"
    assert any("are bfloat16 in actual and float32 in reference" in n for n in accepted.notes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accept": "enviroment"}, "did you mean 'environment'"),
        ({"thresholds": {"bf16": 0.1}}, "expected: a dtype"),
        ({"thresholds": {"bfloat16": -1}}, "a relative error of 0 or more"),
        ({"rename": "mindspoor"}, "did you mean 'mindspore'"),
        ({"rename": "nowhere.json"}, "the mapping file can't be read"),
        ({"rename": {"a": "b.*"}}, r"more \* on the right"),
        ({"rename": {"": "b"}}, "is no pair of names"),
        ({"rename": {"a": 1}}, '"name in reference", or a list'),
        ({"rename": [("a", "b")]}, r"rename= is not a path[^$]*a mapping"),
        ({"accept": 3}, "accept= must be a string or a list of strings"),
        ({"csv": 3}, "csv= is not a path"),
        ({"html": ["a"]}, "html= is not a path"),
        ({"loss_drift": "much"}, r"loss_drift= must be 0 or more"),
        ({"progress": 1}, "progress= can't be called"),
        ({"exact": "yes"}, "exact= must be a bool"),
        ({"ask_all": torch.ones(2)}, "ask_all= must be a bool"),
        ({"trust": "no"}, "trust= must be a bool"),
    ],
)
def test_options_that_cannot_be_used_say_so(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    log = log_run(tmp_path / "log", steps=1)
    with pytest.raises(fastcheck.ConfigError, match=message):
        fastcheck.compare(log, log, **options)


def test_sides_that_cannot_be_compared_say_so(tmp_path: Path) -> None:
    log = log_run(tmp_path / "log", steps=1)
    for other, message in (
        (tmp_path / "nothing", "is not there"),
        (tmp_path, "different kinds|side cannot be compared"),
        ({"a": torch.ones(2)}, "different kinds"),
        (fastcheck.environment(), "different kinds"),
        (3, r"side cannot be compared[^$]*hint: +give torch.as_tensor"),
    ):
        if other == tmp_path:
            other = tmp_path / "empty"
            other.mkdir()
        with pytest.raises(fastcheck.CompareError, match=message):
            fastcheck.compare(other, log)
    near = "there is no '.*logg'; did you mean 'log'"
    with pytest.raises(fastcheck.CompareError, match=near) as caught:
        fastcheck.compare(tmp_path / "logg", log)
    assert str(tmp_path) in str(caught.value)
    with pytest.raises(fastcheck.CompareError, match=r"no '\S+/nowhere'; beside it: empty, log$"):
        fastcheck.compare(tmp_path / "nowhere" / "log", log)
    (tmp_path / "runs" / "new").mkdir(parents=True)
    with pytest.raises(fastcheck.CompareError, match="run'; did you mean 'runs'"):
        fastcheck.compare(tmp_path / "run" / "new", log)
    with pytest.raises(fastcheck.CompareError, match="nothing in common"):
        fastcheck.compare({"a": torch.ones(2)}, {"b": torch.ones(2)})


def test_a_log_limit_that_has_evicted_the_beginning_is_said(tmp_path: Path) -> None:
    """Wherever in a step the oldest segment that is left begins."""
    log = fastcheck.Log(tmp_path / "limited", limit=64 * 1024)
    limited = log_run(tmp_path / "limited", steps=12, log=log)
    whole = log_run(tmp_path / "whole", steps=12)
    segments = sorted(Path(limited).glob("records-rank0-*.bin"))
    firsts = set()
    while len(segments) > 2:
        comparison = fastcheck.compare(limited, whole)
        assert comparison.is_identical, str(comparison)
        assert comparison.steps[0] > 0 and comparison.steps[-1] == 11
        assert any("the log's limit has evicted" in note for note in comparison.notes)
        firsts.add(comparison.steps[0])
        segments.pop(0).unlink()
    assert len(firsts) > 2
