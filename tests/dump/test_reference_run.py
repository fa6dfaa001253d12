"""Dumper(reference="cpu"): each op runs again on the CPU; differences are found, and ops that
cannot run again are listed with a reason.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fastcheck
from accuracy.compare_programs import PROGRAMS
from fastcheck.dump import reference
from support.programs.command_line import strict
from support.programs.dumping import calls, dumped_run, index, place
from support.programs.training import Net


def lines(directory: Path, step: int = 0) -> list[dict[str, Any]]:
    text = (place(directory, step) / "reference.jsonl").read_text()
    return [strict(line) for line in text.splitlines()]


@pytest.fixture
def library() -> Iterator[torch.library.Library]:
    with torch.library._scoped_library("fastcheck_test", "FRAGMENT") as made:
        yield made


def fast_gelu(library: torch.library.Library, by: float) -> Any:
    """A GELU whose float32 kernel is off by a relative error; its float64 kernel is right."""

    def kernel(x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.gelu(x)
        return y * (1 + by) if x.dtype == torch.float32 else y

    library.define("gelu(Tensor x) -> Tensor")
    library.impl("gelu", kernel, "CPU")
    return torch.ops.fastcheck_test.gelu


def chain(gelu: Any, x: torch.Tensor) -> torch.Tensor:
    """300 operators, the 200th of which is the custom one."""
    generator = torch.Generator().manual_seed(1)
    for number in range(300):
        if number == 199:
            x = gelu(x)
        elif number % 3 == 0:
            x = x @ torch.randn(16, 16, generator=generator) / 4
        elif number % 3 == 1:
            x = torch.tanh(x)
        else:
            x = x + 0.5
    return x


def test_a_custom_op_with_a_subtle_bug_is_found_among_300(
    tmp_path: Path, library: torch.library.Library
) -> None:
    gelu = fast_gelu(library, 3e-3)
    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(0))
    dumper = fastcheck.Dumper(tmp_path, reference="cpu")
    with pytest.warns(fastcheck.FastcheckWarning, match=r"1 of \d+ outputs.*gelu #0"), dumper:
        chain(gelu, x)
    ran = [line for line in calls(tmp_path) if line["kind"] == "op"]
    assert len([line for line in ran if line["op"] != "aten.randn.generator"]) >= 300
    (found,) = dumper.differences
    assert found["op"] == "fastcheck_test.gelu" and found["call"] == 0
    assert found["error"] == pytest.approx(3e-3, rel=0.01) and found["allowed"] == 1e-4
    assert calls(tmp_path)[found["n"]]["op"] == "fastcheck_test.gelu"
    written = lines(tmp_path)
    assert [line for line in written if line["is_different"]] == [found]
    assert index(tmp_path)["reference"]["different"] == [found]
    assert max(line["error"] for line in written if line != found) < 1e-5


def test_without_the_bug_nothing_is_found(
    tmp_path: Path, library: torch.library.Library, recwarn: pytest.WarningsRecorder
) -> None:
    gelu = fast_gelu(library, 0.0)
    with fastcheck.Dumper(tmp_path, reference="cpu") as dumper:
        chain(gelu, torch.randn(32, 16))
    assert not dumper.differences and len(lines(tmp_path)) > 250
    assert not recwarn.list


@pytest.mark.parametrize(
    ("op", "is_different"), [("flip", True), ("gather", True), ("tanh", False)]
)
def test_what_only_moves_values_is_held_to_the_bit(
    op: str, is_different: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = reference._compute_elsewhere

    def off_by_one_ulp(info: Any, *rest: Any) -> Any:
        results, reason = plain(info, *rest)
        if op in info.name:
            results = [result.float().nextafter(torch.tensor(9.0)) for result in results]
        return results, reason

    monkeypatch.setattr(reference, "_compute_elsewhere", off_by_one_ulp)
    x = torch.linspace(-1, 1, 32).reshape(4, 8)
    with warnings.catch_warnings(), fastcheck.Dumper(tmp_path, reference="cpu") as dumper:
        warnings.simplefilter("ignore", fastcheck.FastcheckWarning)
        torch.tanh(x).flip(0).gather(1, torch.zeros(4, 2, dtype=torch.long))
    found = [line["op"] for line in dumper.differences]
    assert found == [f"aten.{op}"] * is_different
    assert all(line["allowed"] == 0 for line in dumper.differences)


def test_a_whole_step_is_compared_forward_backward_and_optimizer(tmp_path: Path) -> None:
    dumped_run(tmp_path, steps=1, reference="cpu")
    written = lines(tmp_path)
    assert {line["direction"] for line in written} == {"forward", "backward", "optimizer"}
    assert not [line for line in written if line["is_different"]]
    # Whatever ran is compared, or listed with its reason.
    compared = {line["n"] for line in written}
    left_out = index(tmp_path)["left_out"]
    ran = [line for line in calls(tmp_path) if line["kind"] == "op"]
    names = {entry["name"] for entry in left_out}
    assert not [line for line in ran if line["n"] not in compared and _ran(line) not in names]
    reasons = {entry["name"]: entry["reason"] for entry in left_out}
    assert reasons["aten.relu_"] == "in place: its inputs are gone"
    assert reasons["aten.bernoulli_.float"] == "it draws random numbers"
    assert reasons["aten.t"] == "a view: it computes nothing"


def _ran(line: dict[str, Any]) -> str:
    return str(line.get("ran", line["op"]))


def test_what_cannot_be_run_again_is_listed_with_its_reason(
    tmp_path: Path, library: torch.library.Library
) -> None:
    library.define("stateful(Tensor x) -> Tensor")
    library.impl("stateful", lambda x: x + torch.rand(()), "CPU")

    def only_narrow(x: torch.Tensor) -> torch.Tensor:
        if x.dtype != torch.float32:
            raise NotImplementedError("float32 alone")
        return x + 1

    library.define("narrow(Tensor x) -> Tensor")
    library.impl("narrow", only_narrow, "CPU")
    state = torch.get_rng_state()
    torch.ops.fastcheck_test.stateful(torch.ones(3))
    expected = torch.get_rng_state()
    torch.set_rng_state(state)
    with fastcheck.Dumper(tmp_path, reference="cpu") as dumper:
        torch.ops.fastcheck_test.stateful(torch.ones(3))
        torch.ops.fastcheck_test.narrow(torch.ones(3))
        torch.empty(3).add(1)
    assert torch.equal(torch.get_rng_state(), expected)
    reasons = dict(list(dumper.left_out))
    assert reasons["fastcheck_test.stateful"] == "it draws random numbers"
    assert reasons["fastcheck_test.narrow"].startswith("no kernel on the CPU: float32 alone")
    assert reasons["aten.empty.memory_format"] == "it allocates memory and computes nothing"
    assert reasons["aten.add.Tensor"] == "it reads memory that nothing was written to yet"


def test_attention_is_compared_while_its_dropout_is_off(tmp_path: Path) -> None:
    q = torch.randn(1, 2, 8, 4)
    with fastcheck.Dumper(tmp_path, reference="cpu") as dumper:
        nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)
    attention = [line for line in lines(tmp_path) if "dot_product" in line["op"]]
    assert attention and not dumper.differences
    with fastcheck.Dumper(tmp_path, step=1, reference="cpu") as dumper:
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q, 0.0)
    assert lines(tmp_path, 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.complex64])
def test_rounding_of_every_format_is_allowed(tmp_path: Path, dtype: torch.dtype) -> None:
    x = torch.randn(24, 24).to(dtype)
    with fastcheck.Dumper(tmp_path, reference="cpu") as dumper:
        y = (x @ x).exp().mean()
        y.to(torch.complex64 if dtype.is_complex else torch.float32)
    assert not dumper.differences and len(lines(tmp_path)) >= 3


def test_integers_have_no_reference_in_float64(tmp_path: Path) -> None:
    with fastcheck.Dumper(tmp_path, reference="cpu"):
        torch.arange(12).argmax()
    assert any("integers, of an op" in e["reason"] for e in index(tmp_path)["left_out"])


def test_nonfinite_on_one_side_is_different(tmp_path: Path, library: torch.library.Library) -> None:
    """Of exp(x)**0.5: in float32 the exp overflows. An overflow of the op's own is none."""
    library.define("root(Tensor x) -> Tensor")
    library.impl("root", lambda x: x.exp().sqrt(), "CPU")
    dumper = fastcheck.Dumper(tmp_path, reference="cpu")
    with pytest.warns(fastcheck.FastcheckWarning, match="inf") as caught, dumper:
        torch.ops.fastcheck_test.root(torch.tensor([1.0, 100.0]))
        torch.exp(torch.tensor([1.0, 100.0]))
    assert caught[0].filename == __file__
    assert [line["op"] for line in dumper.differences] == ["fastcheck_test.root"]
    assert dumper.differences[0]["nonfinite"] == 1
    assert lines(tmp_path)[0]["error"] == "inf"  # strict JSON


def test_lists_choose_what_is_run_again(tmp_path: Path) -> None:
    dumped_run(tmp_path, steps=1, model=Net, reference="cpu", ops=["aten.addmm"])
    assert {line["op"] for line in lines(tmp_path)} == {"aten.addmm"}


def test_sums_that_cancel_are_held_against_what_was_summed(tmp_path: Path) -> None:
    """The gradient of a bias before BatchNorm is zero in theory."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten())
    with fastcheck.Dumper(tmp_path, reference="cpu") as dumper:
        model(torch.randn(4, 3, 10, 10)).square().mean().backward()
    assert not dumper.differences
    cancelling = [line for line in lines(tmp_path) if line["cancels"]]
    assert {line["ran"] for line in cancelling} == {"aten.convolution_backward"}
    assert all(line["error"] <= line["allowed"] < 1e-5 for line in cancelling)


@pytest.mark.parametrize("by", [1e-3, 0.5])
def test_a_wrong_sum_is_found_where_its_terms_cancel(
    tmp_path: Path, library: torch.library.Library, by: float
) -> None:
    def kernel(x: torch.Tensor) -> torch.Tensor:
        y = x.sum(0)
        return y + by if x.dtype == torch.float32 else y

    library.define("total(Tensor x) -> Tensor")
    library.impl("total", kernel, "CPU")
    x = torch.randn(64, 8)
    x = torch.cat([x, -x])
    dumper = fastcheck.Dumper(tmp_path, reference="cpu")
    with pytest.warns(fastcheck.FastcheckWarning, match="total"), dumper:
        torch.ops.fastcheck_test.total(x)
    (found,) = dumper.differences
    assert found["op"] == "fastcheck_test.total" and not found["cancels"]


@pytest.mark.parametrize("program", list(PROGRAMS))
def test_no_operator_of_a_healthy_program_is_accused(tmp_path: Path, program: str) -> None:
    made, draw = PROGRAMS[program], torch.Generator().manual_seed(1)
    torch.manual_seed(0)
    model, x = made.make().to(made.dtype), made.batch(draw)
    x = x.to(made.dtype) if x.is_floating_point() else x
    with fastcheck.Dumper(tmp_path, reference="cpu") as dumper:
        made_of = model(x).float()
        nn.CrossEntropyLoss()(made_of, torch.arange(len(x)) % made_of.shape[1]).backward()
    assert len(lines(tmp_path)) > 20 and not dumper.differences
