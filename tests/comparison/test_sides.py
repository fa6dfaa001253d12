"""Two sides that are computed in another way are equal; those that only look so are not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import fastcheck
from accuracy.compare_sides import CHECKED, PAIRS, judge
from accuracy.sides_programs import train
from support.programs.compare_runs import answers
from support.sampling import sample


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.mark.parametrize("name", sample(CHECKED, 14))
def test_a_healthy_pair_is_equal_and_a_wrong_one_different(logs: Path, name: str) -> None:
    (pair,) = [pair for pair in PAIRS if pair.name == name]
    found = judge(pair, logs)
    assert found["is_right"], found


def test_what_nothing_reads_is_not_taken_for_rounding(tmp_path: Path) -> None:
    """The gradient of the last step: no update is read after it."""
    for name, kind in (("actual", "transposed gradient"), ("reference", "loop")):
        train(tmp_path / name, optimizer=kind, steps=1)
    found = fastcheck.compare(tmp_path / "actual", tmp_path / "reference")
    assert found["gradients"].answer == "no"
    assert "rounding can't be distinguished from another order" in found.advice[0]
    assert "If this is intended, use --accept order" in found.advice[0]


def test_another_order_leads_though_its_update_differs_too(tmp_path: Path) -> None:
    for kind in ("transposed gradient", "loop"):
        train(tmp_path / kind, optimizer=kind)
    found = fastcheck.compare(tmp_path / "transposed gradient", tmp_path / "loop")
    assert found["gradients"].answer == "no" and found.first is not None
    assert found.first.row.name.endswith("gradient of blocks.1.attention.value.weight")
    assert "not only rounding" in found.advice[0]


def test_an_update_is_judged_against_its_size(tmp_path: Path) -> None:
    for kind in ("frozen", "half", "loop"):
        train(tmp_path / kind, optimizer=kind, rate=1e-6, dtype=torch.float32)
    name = "blocks.1.attention.value · optimizer · blocks.1.attention.value.weight"
    reasons = {"frozen": "it was updated on one side alone", "half": "relative to the size"}
    for kind, reason in reasons.items():
        found = fastcheck.compare(tmp_path / kind, tmp_path / "loop")
        assert found["gradients"].answer == "yes" and found["update"].answer == "no"
        assert found.first is not None
        assert (found.first.row.step, found.first.row.name) == (0, name)
        assert reason in found.first.row.reason
        assert found.first.row.error == pytest.approx({"frozen": 1.0, "half": 0.5}[kind], rel=0.05)


def test_another_kernel_of_the_same_update_is_a_note(tmp_path: Path) -> None:
    for kind in ("fused", "loop"):
        train(tmp_path / kind, optimizer=kind)
    found = fastcheck.compare(tmp_path / "fused", tmp_path / "loop")
    assert found.agrees and answers(found)["hyper-parameters"] == "yes"
    assert any("fused is True in actual and None in reference" in note for note in found.notes)
    train(tmp_path / "other", optimizer="fused", rate=1.1e-3)
    found = fastcheck.compare(tmp_path / "other", tmp_path / "loop")
    assert [setting.path for setting in found["hyper-parameters"].settings] == [
        "optimizers[0].groups[0].lr"
    ]


class Halves(torch.nn.Linear):
    """The same sums in another order."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, last = self.weight.chunk(2, 1)
        linear = torch.nn.functional.linear
        return linear(x[..., :32], first, self.bias) + linear(x[..., 32:], last)


@pytest.mark.parametrize(("turned", "said"), [(4e-6, "agree within 1 %"), (4e-5, "not explained")])
def test_a_few_elements_of_an_update_may_turn(tmp_path: Path, turned: float, said: str) -> None:
    """An element whose gradient is nearly 0 has an update whose sign rounding decides; ``turned``:
    what that moves, relative to the weight.
    """
    for kind in (Halves, torch.nn.Linear):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), kind(64, 64))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with fastcheck.install(model, log_dir=tmp_path / kind.__name__):
            for _ in range(2):
                optimizer.zero_grad()
                (model(torch.randn(16, 64)).square().mean() * 100).backward()
                optimizer.step()
                with torch.no_grad():
                    model.get_parameter("0.weight").mul_(1 + turned * (kind is Halves))
    found = fastcheck.compare(tmp_path / "Halves", tmp_path / "Linear")
    assert found.agrees and said in found.advice[0], str(found)


def test_rows_that_nothing_reads_may_differ(tmp_path: Path) -> None:
    """As those of padding, which two ways to attend fill differently. Where the loss reads them
    they are a difference.
    """
    for name, last in (("actual", 1.5), ("reference", 1.0)):
        for kept in (6, 8):
            torch.manual_seed(0)
            inner = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh())
            model = torch.nn.Sequential(inner, torch.nn.Linear(8, 1))
            factors = torch.tensor([1.0] * 6 + [last] * 2)[:, None]
            inner.register_forward_hook(lambda module, x, y, by=factors: y * by)
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            with fastcheck.install(model, log_dir=tmp_path / f"{name}{kept}"):
                for _ in range(3):
                    optimizer.zero_grad()
                    model(torch.randn(8, 4))[:kept].square().mean().backward()
                    optimizer.step()
    found = fastcheck.compare(tmp_path / "actual6", tmp_path / "reference6")
    assert found.agrees, str(found)
    assert any("6 tensors of modules differ" in note and "padding" in note for note in found.notes)
    assert not fastcheck.compare(tmp_path / "actual6", tmp_path / "reference6", exact=True).agrees
    read = fastcheck.compare(tmp_path / "actual8", tmp_path / "reference8")
    assert read.first is not None and read.first.row.name == "0 · forward · output[0]"
