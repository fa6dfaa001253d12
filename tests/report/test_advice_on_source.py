"""Tests of the advice on the lines that have assigned a bad value."""

from __future__ import annotations

import pytest

from fastcheck.report.advice.source import on_source


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("x = (x - x.mean(0)) / x.std(0)", ["a std or var of one element", "it divides"]),
        ("y = torch.log(x)", ["log(0) is -Inf"]),
        ("y = x.log1p()", ["log(0) is -Inf"]),
        ("y = x ** 0.5", ["a root or power of a negative number"]),
        ("w = p.pow(-.4)", ["a root or power of a negative number"]),
        ("w = torch.pow(1 - p, 0.25)", ["a root or power of a negative number"]),
        ("y = x.exp()", ["exp of a large number"]),
        ("y = x.to(torch.float16)", ["a cast to float16"]),
        ("y = x.half()  # n/a", ["a cast to float16"]),
    ],
)
def test_what_it_does(source: str, said: list[str]) -> None:
    advice = on_source(source)
    assert advice is not None
    hints = advice.text.partition(": ")[2].split("; ")
    assert [hint.startswith(start) for hint, start in zip(hints, said)] == [True] * len(hints)
    assert len(hints) == len(said)


@pytest.mark.parametrize(
    "source",
    [
        'x = torch.load("data/x.pt")',
        "x = read('a/b",
        "for x, y in loader:  # of log(x) / 2; x = batch[0]",
        "y = x.logsumexp(-1)",
        "y = F.log_softmax(x, -1)",
        "y = x.bfloat16() + x.to(torch.bfloat16)",
        "y = x // 2",
        "y = x.pow(2) + torch.pow(x, 3) * 1.5",
    ],
)
def test_what_it_does_not(source: str) -> None:
    assert on_source(source) is None
