"""A run that continues another is compared from there; a batch may be split in another way."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fastcheck
from accuracy.sides_programs import train_resumed, train_split
from fastcheck.comparison.block import Block, Kind, Phase
from fastcheck.comparison.names import Name, NameTable
from fastcheck.comparison.over_time import pair_steps
from fastcheck.comparison.split import Split, wholes_of
from fastcheck.record.format import RECORD_DTYPE
from support.programs.compare_runs import answers


def test_a_perfect_resume_is_identical_from_where_it_continues(tmp_path: Path) -> None:
    train_resumed(tmp_path / "whole", fault="whole")
    train_resumed(tmp_path / "resumed")
    found = fastcheck.compare(tmp_path / "resumed", tmp_path / "whole")
    assert found.is_identical and found.steps == (3, 4, 5, 6)
    assert "step 0 of actual is compared with step 3 of reference" in found.notes[0]
    again = fastcheck.compare(tmp_path / "whole", tmp_path / "resumed", steps="3-:0-")
    assert again.is_identical and again.steps == (0, 1, 2, 3)
    part = fastcheck.compare(tmp_path / "whole", tmp_path / "resumed", steps="4-5:1-2")
    assert part.is_identical and part.steps == (1, 2)
    same = fastcheck.compare(tmp_path / "resumed", tmp_path / "whole", steps="0-:0-")
    assert same["batches"].answer == same["initial weights"].answer == "no"
    with pytest.raises(fastcheck.CompareError, match="no steps of these ranges"):
        fastcheck.compare(tmp_path / "whole", tmp_path / "resumed", steps="50-:0-")


@pytest.mark.parametrize("fault", ["learning rate", "schedule"])
def test_settings_are_those_of_the_paired_step(tmp_path: Path, fault: str) -> None:
    train_resumed(tmp_path / "whole", fault="whole")
    train_resumed(tmp_path / "resumed", fault=fault)
    found = fastcheck.compare(tmp_path / "resumed", tmp_path / "whole")
    settings = found["hyper-parameters"].settings
    name = "optimizers[0].groups[0].lr"
    assert [s.path for s in settings] == [
        name if fault == "learning rate" else f"{name} from step 4 on"
    ]
    assert found["initial weights"].answer == "yes"


def test_weights_that_were_not_loaded_are_found_by_two_batches(tmp_path: Path) -> None:
    train_resumed(tmp_path / "whole", fault="whole")
    train_resumed(tmp_path / "resumed", fault="weights")
    found = fastcheck.compare(tmp_path / "resumed", tmp_path / "whole")
    assert answers(found)["batches"] == "yes" and answers(found)["initial weights"] == "no"
    assert "the batch is equal to the bit, and the next batch (the weights are eq" in found.notes[0]


def test_a_buffer_that_was_not_loaded_is_an_initial_weight(tmp_path: Path) -> None:
    """The whole run has it after the update of the step before; the resumed one at its begin."""
    train_resumed(tmp_path / "whole", fault="whole")
    train_resumed(tmp_path / "resumed", fault="buffers")
    found = fastcheck.compare(tmp_path / "resumed", tmp_path / "whole")
    assert answers(found)["batches"] == "yes" and answers(found)["initial weights"] == "no"
    assert "norm.running_mean\n" in str(found)
    assert "the norms differ: all zeros in actual\n" in str(found)


def test_a_batch_in_parts_is_held_against_the_whole(tmp_path: Path) -> None:
    train_split(tmp_path / "whole")
    train_split(tmp_path / "parts", parts=4)
    found = fastcheck.compare(tmp_path / "parts", tmp_path / "whole")
    assert found.agrees and not found.missing
    assert answers(found) == {
        **dict.fromkeys(answers(found), "yes"),
        "forward": "unknown",
    }
    assert sum("split in another way: 4 of 32 elements" in note for note in found.notes) == 1
    assert {"LOSS", "GRADIENTS", "UPDATE"} <= {
        phase.upper() for phase, states in found.counts.items() if sum(states.values()) >= 4
    }
    part = fastcheck.compare(tmp_path / "parts", tmp_path / "whole", steps="1-:0-")
    lines = ("only actual has step 0: not compared", "only reference has step 3: not compared")
    assert part.notes[:2] == lines and "split in another way" in part.notes[2]
    train_split(tmp_path / "uneven", parts=3)
    uneven = fastcheck.compare(tmp_path / "uneven", tmp_path / "whole")
    assert uneven.agrees and any("3 of 32 to 48 elements" in note for note in uneven.notes)
    train_split(tmp_path / "wrong", parts=4, fault="mean of means")
    wrong = fastcheck.compare(tmp_path / "wrong", tmp_path / "whole", ask_all=True)
    assert answers(wrong)["loss"] == answers(wrong)["gradients"] == "no"
    assert answers(wrong)["batches"] == "yes"


class Shifted(nn.Module):
    """The gradient of ``shift`` is rounding noise: a softmax does not depend on it."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.shift = nn.Linear(8, 5), nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.head(x) + self.shift
        return made


def test_a_gradient_of_noise_is_no_difference_of_another_split(tmp_path: Path) -> None:
    for parts in (1, 3):
        torch.manual_seed(0)
        model, criterion = Shifted(), nn.CrossEntropyLoss(reduction="sum")
        optimizer = torch.optim.AdamW(model.parameters())
        with fastcheck.install(model, criterion, log_dir=tmp_path / str(parts)):
            for _ in range(4):
                optimizer.zero_grad()
                batch = torch.randn(12, 8), torch.randint(0, 5, (12,))
                for x, y in zip(*(part.chunk(parts) for part in batch)):
                    (criterion(model(x), y) / 12).backward()
                optimizer.step()
    found = fastcheck.compare(tmp_path / "3", tmp_path / "1")
    assert found.agrees
    assert any("no larger beside the largest" in note and "shift" in note for note in found.notes)


def test_of_a_gradient_the_sum_of_all_parts_is_compared() -> None:
    names = NameTable()
    records = np.zeros(2, RECORD_DTYPE)
    records["sum_sq"] = 1, 4
    number = names.number(Name("", "optimizer", "param_grad", "gradient of weight"))
    block = Block(0, 0, np.array([number] * 2), np.array([Phase.GRADIENTS] * 2), records)
    (whole,) = wholes_of(Split(([0], [0]), False, ""), [block], [None], names)
    assert whole.records["sum_sq"].tolist() == [4]


def test_one_batch_alone_pairs_no_steps(tmp_path: Path) -> None:
    """It may be the same by chance, of data in another order."""
    torch.manual_seed(0)
    batches = list(torch.randn(4, 5, 4))
    orders = {"actual": (2, 0, 3), "reference": (0, 1, 2, 3)}
    for name, order in orders.items():
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with fastcheck.install(model, log_dir=tmp_path / name):
            for number in order:
                optimizer.zero_grad()
                model(batches[number]).square().mean().backward()
                optimizer.step()
    found = fastcheck.compare(tmp_path / "actual", tmp_path / "reference")
    assert found.steps == (0, 1, 2) and answers(found)["batches"] == "no"


def test_ranks_of_one_side_alone_are_told_apart_from_its_steps() -> None:
    def side(ranks: int, steps: int) -> Any:
        places = [(step, rank) for step in range(steps) for rank in range(ranks)]
        return SimpleNamespace(kind=Kind.DUMP, places=lambda: places)

    for wanted in (None, "0-:0-"):
        pairing = pair_steps(side(2, 4), side(1, 2), wanted)
        assert pairing.notes == ["only actual has steps 2 to 3: not compared"]
        assert pairing.other_ranks == ["only actual has steps 0 to 3 of ranks [1]: not compared"]


def test_the_wrapper_of_one_side_is_taken_off(tmp_path: Path) -> None:
    for name in ("plain", "wrapped"):
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        model = nn.DataParallel(model) if name == "wrapped" else model
        optimizer = torch.optim.AdamW(model.parameters())
        draw = torch.Generator().manual_seed(1)
        with fastcheck.install(model, log_dir=tmp_path / name):
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.randn(5, 4, generator=draw)).square().mean().backward()
                optimizer.step()
    for actual, reference, side in (
        ("wrapped", "plain", "actual"),
        ("plain", "wrapped", "reference"),
    ):
        found = fastcheck.compare(tmp_path / actual, tmp_path / reference)
        assert found.is_identical and f"{side}: names are those below module" in found.notes
    own = fastcheck.compare(tmp_path / "wrapped", tmp_path / "plain", rename={"module": ""})
    assert own.is_identical
