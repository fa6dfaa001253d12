"""The demo's model, text and tables; it claims nothing that did not happen.

The whole story is run by ``make demo``, whose exit code says whether it happened.
"""

from __future__ import annotations

import copy
import math
import pathlib
import re
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import fastcheck
from fastcheck.cli import demo
from fastcheck.cli.main import main as command_line
from support.records import record_builder as build

ACT = "blocks.2.mlp.act"


@pytest.fixture(autouse=True)
def own_folder(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, torch_threads: None
) -> Iterator[None]:
    """A stop writes fastcheck_log/ where it runs, and main() sets the number of threads."""
    monkeypatch.chdir(tmp_path)
    yield


@pytest.fixture(scope="module")
def text() -> torch.Tensor:
    return demo.standard_library_text()


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """So few steps that float16 holds out even without norm2."""
    monkeypatch.setattr(demo, "STEPS", 3)


@pytest.fixture
def steep(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same mistake in a few steps: without warm-up it doesn't take sixty."""
    monkeypatch.setattr(demo, "STEPS", 15)
    monkeypatch.setattr(demo, "PEAK_LR", 3e-2)
    monkeypatch.setattr(demo, "WARMUP_STEPS", 2)


def test_text_is_the_standard_library(text: torch.Tensor) -> None:
    assert text.dtype == torch.int64 and text.shape == (demo.TEXT_BYTES,)
    assert "def __init__(self" in bytes(text.tolist()).decode("ascii", "replace")


def test_bytes_beyond_ascii_share_the_last_token(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    (tmp_path / "b.py").write_bytes(b"\xc3\xa9")
    (tmp_path / "a.py").write_bytes(b"a" * demo.CONTEXT)
    assert demo.standard_library_text().tolist()[-3:] == [97, 127, 127]


def test_without_sources_it_says_so(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
    assert demo.main([]) == 1
    assert f"{tmp_path} has none" in capsys.readouterr().err


def test_targets_are_the_next_tokens(text: torch.Tensor) -> None:
    tokens, targets = demo.random_batch(text, torch.Generator().manual_seed(3))
    again, _ = demo.random_batch(text, torch.Generator().manual_seed(3))
    assert tokens.shape == targets.shape == (demo.BATCH, demo.CONTEXT)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert torch.equal(tokens, again)


def test_batches_reach_the_last_token() -> None:
    shortest = torch.arange(demo.CONTEXT + 1)
    _, targets = demo.random_batch(shortest, torch.Generator().manual_seed(0))
    assert (targets[:, -1] == demo.CONTEXT).all()


def test_the_cure_is_one_call(text: torch.Tensor) -> None:
    """Same seed, same weights: the two runs differ in the call of norm2, and in nothing else."""
    models = {}
    for norm_forgotten in (True, False):
        torch.manual_seed(0)
        models[norm_forgotten] = demo.GPT(norm_forgotten=norm_forgotten)
    for one, other in zip(models[True].state_dict().items(), models[False].state_dict().items()):
        assert one[0] == other[0] and torch.equal(one[1], other[1])
    tokens = text[None, : demo.CONTEXT]
    for norm_forgotten, model in models.items():
        calls: list[torch.nn.Module] = []
        for block in model.blocks:
            block.norm2.register_forward_hook(lambda module, *_, calls=calls: calls.append(module))
        assert model(tokens).shape == (1, demo.CONTEXT, demo.VOCABULARY)
        assert calls == ([] if norm_forgotten else [block.norm2 for block in model.blocks])


def test_attention_is_causal(text: torch.Tensor) -> None:
    torch.manual_seed(0)
    model = demo.GPT(norm_forgotten=False)
    tokens = text[None, : demo.CONTEXT].clone()
    before = model(tokens)
    tokens[0, 40] = (tokens[0, 40] + 1) % demo.VOCABULARY
    after = model(tokens)
    torch.testing.assert_close(before[:, :40], after[:, :40])
    assert not torch.allclose(before[:, 40:], after[:, 40:])


def test_healthy_run_is_recorded_step_by_step(short: None, text: torch.Tensor) -> None:
    run = demo.train(text, norm_forgotten=False, seed=0)
    assert run.stop is None and run.event_count == 0
    assert len(run.losses) == 3 and all(map(math.isfinite, run.losses))
    assert [len(values) for values in run.abs_max.values()] == [3] * len(run.abs_max)
    assert {ACT, "blocks.0.norm2", "head"} <= set(run.abs_max)


def test_abs_max_is_that_of_the_tensor() -> None:
    model = torch.nn.Linear(2, 2, bias=False)
    torch.nn.init.eye_(model.weight)
    monitor = fastcheck.install(model, overflow_nums=-1)
    for batch in ([[1.0, -7.0]], [[5.0, 2.0]], [[3.0, 4.0], [math.inf, 1.0]]):
        model(torch.tensor(batch))
        monitor.step()
    monitor.remove()
    assert demo.abs_max_of_outputs(monitor) == {"": [7.0, 5.0, math.inf]}


def test_same_seed_same_run(short: None, text: torch.Tensor) -> None:
    torch.set_num_threads(1)
    one = demo.train(text, norm_forgotten=True, seed=1)
    two = demo.train(text, norm_forgotten=True, seed=1)
    other = demo.train(text, norm_forgotten=True, seed=2)
    assert one == two
    assert one.losses != other.losses


# The watch tells of the growth before the stop.
@pytest.mark.filterwarnings("ignore::fastcheck.PrecisionWarning")
def test_mistake_overflows_and_cure_does_not(
    steep: None, text: torch.Tensor, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = demo.train(text, norm_forgotten=True, seed=0)
    assert broken.stop is not None
    assert broken.stop.culprit.site.module.startswith("blocks.2.mlp")
    assert broken.stop.culprit.verdict is fastcheck.types.Verdict.ORIGIN
    assert broken.stop.step == len(broken.losses) > 0
    assert f"step {broken.stop.step:3d}   stopped by fastcheck" in capsys.readouterr().out
    mended = demo.train(text, norm_forgotten=False, seed=0)
    assert mended.stop is None and len(mended.losses) == 15


def test_main_fails_when_nothing_overflows(short: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main([]) == 1
    out = capsys.readouterr().out
    assert "NO   without norm2, float16 overflows within 3 steps" in out
    assert "yes" not in out


def test_it_gives_no_warning(monkeypatch: pytest.MonkeyPatch, text: torch.Tensor) -> None:
    """Not in the ten updates after which weights that don't move are warned of either."""
    monkeypatch.setattr(demo, "STEPS", 12)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run = demo.train(text, norm_forgotten=True, seed=0)
    assert run.stop is None and len(run.losses) == 12
    assert [str(one.message) for one in caught] == []


@pytest.mark.filterwarnings("ignore::fastcheck.PrecisionWarning")
def test_main_tells_the_story(steep: None, capsys: pytest.CaptureFixture[str]) -> None:
    """Through the command line; too steep for ten healthy steps, so the exit code has to be 1."""
    assert command_line(["demo", "--seed", "0"]) == 1
    out = capsys.readouterr().out
    assert re.search(r"^1 \+Inf|^[0-9,]+ \+Inf", out, re.MULTILINE)
    assert [line[0] for line in out.splitlines() if re.match(r"\d\. [A-Z]", line)] == list("12345")
    assert "NO   without norm2 it trained for" in out
    assert "yes  fastcheck stopped it at its first overflow, in blocks.2.mlp" in out
    assert max(map(len, out.splitlines())) <= 100


def stop_at(step: int, **fields: Any) -> fastcheck.OverflowDetected:
    """A stop at the output of ACT; ``fields`` of its site replace the usual ones."""
    where = build.site(ACT, "SquaredReLU", **fields)
    return fastcheck.OverflowDetected(
        build.report(where, build.record("float16", step=step, posinf_count=1))
    )


def story() -> tuple[demo.Run, demo.Run]:
    """Two runs that pass every check."""
    stop = stop_at(40)
    losses = [5 - step / 40 for step in range(demo.STEPS)]
    broken = demo.Run(losses[:40], {ACT: [*[9.0] * 40, math.inf]}, 1, stop)
    return broken, demo.Run(losses, {ACT: [9.0] * demo.STEPS})


def test_every_check_passes() -> None:
    assert set(demo.checks(*story()).values()) == {True}


@pytest.mark.parametrize("which", range(5))
def test_each_check_can_fail(which: int) -> None:
    broken, mended = copy.deepcopy(story())
    if which == 0:
        broken.losses = broken.losses[::-1]
    elif which == 1:
        broken.stop = stop_at(40, direction="backward", role="grad_output")
    elif which == 2:
        mended.stop = broken.stop
    elif which == 3:
        mended.abs_max[ACT][50] = 30000.0
    else:
        mended.losses[40:] = [5.0] * (demo.STEPS - 40)
    kept = list(demo.checks(broken, mended).values())
    assert kept == [number != which for number in range(5)]


def test_checks_where_the_mended_run_fails_at_once() -> None:
    broken, _ = story()
    kept = demo.checks(broken, demo.Run(stop=broken.stop))
    assert list(kept.values()) == [True, True, False, False, False]


def test_chart_ends_at_the_overflow() -> None:
    broken, _ = story()
    broken.abs_max[ACT][0] = 1.0
    broken.abs_max[ACT][10] = 256.0  # half of float16's sixteen powers of two
    rows = demo.chart(broken, ACT).splitlines()
    steps = [int(row.split()[0]) for row in rows[1:]]
    assert steps == [0, 10, 20, 30, 37, 38, 39, 40]
    assert [rows[1].count("#"), rows[2].count("#"), rows[-1].count("#")] == [0, 20, demo.BAR_WIDTH]
    assert rows[-1].split()[:3] == ["40", "-", "inf"]
    assert len({len(row) for row in rows}) == 1
