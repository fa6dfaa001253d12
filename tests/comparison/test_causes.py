"""What the report of two runs says of the first difference: a factor, and what one side lacks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Callable, Optional

import numpy as np
import pytest
import torch
from torch import nn

import fastcheck
from fastcheck.comparison.row import _moments_text, factor_of, factor_text
from fastcheck.record.statistics import statistics_of
from support.programs.compare_runs import log_run


def text_of(actual: str, reference: str) -> str:
    return " ".join(str(fastcheck.compare(actual, reference)).split())


def run(
    directory: Path,
    model: Callable[[], nn.Module],
    loss: Callable[[torch.Tensor], torch.Tensor] = lambda y: y.square().mean(),
    steps: int = 3,
) -> str:
    """The directory of the log of a few steps; ``loss`` of what the model returns."""
    torch.manual_seed(0)
    net, data = model(), torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with fastcheck.install(net, log=fastcheck.Log(directory)):
        for _ in range(steps):
            optimizer.zero_grad()
            loss(net(torch.randn(6, 8, generator=data))).backward()
            optimizer.step()
    return str(directory)


class Residual(nn.Module):
    """A residual of a layer and its dropout. ``is_cut``: without the layer's gradient."""

    def __init__(self, rate: float = 0.0, is_cut: bool = False) -> None:
        super().__init__()
        self.first, self.drop = nn.Linear(8, 8), nn.Dropout(rate)
        self.layer = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.last = nn.Linear(8, 4)
        self.is_cut = is_cut

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        made = self.drop(self.layer(x))
        made: torch.Tensor = self.last(x + (made.detach() if self.is_cut else made))
        return made


def side_of(x: torch.Tensor) -> dict[str, Any]:
    statistics = statistics_of(np.asarray(fastcheck.stats(x).record))
    named = ("min", "max", "mean", "l2_norm", "nan_count", "posinf_count", "neginf_count")
    side = {name: getattr(statistics, name) for name in named}
    return {**side, "numel": x.numel(), "dtype": str(x.dtype).removeprefix("torch.")}


@pytest.mark.parametrize(
    ("factor", "text"),
    [
        (2, "2"),
        (0.125, "1/8"),
        (math.sqrt(32), "5.657"),
        (-1, "-1"),
        (-3, "-3"),
    ],
)
def test_a_factor_of_all_elements_is_found(factor: float, text: str) -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    found = factor_of(side_of(x * factor), side_of(x))
    assert found == pytest.approx(factor, rel=1e-5)
    assert factor_text(found) == text


@pytest.mark.parametrize(
    "changed",
    [
        lambda x: x,
        lambda x: x + 1,
        lambda x: x * 1.00001,
        lambda x: torch.cat([x[:1] * 2, x[1:]]),
        lambda x: x * torch.tensor([1.0, 2.0]).repeat(500),
        lambda x: x[:500] * 2,
        lambda x: x * 0,
        lambda x: torch.cat([x[:1] * math.inf, x[1:] * 2]),
        lambda x: -2 * x.abs(),
    ],
)
def test_other_changes_are_no_factor(changed: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    assert factor_of(side_of(changed(x)), side_of(x)) == factor_of(None, side_of(x)) == 1


def test_one_element_has_a_whole_factor_alone() -> None:
    x = torch.tensor([4.1886])
    assert factor_of(side_of(x * 4), side_of(x)) == 4
    assert factor_of(side_of(x / -4), side_of(x)) == -0.25
    assert factor_of(side_of(-x), side_of(x)) == -1
    assert factor_of(side_of(x * 1.3), side_of(x)) == 1
    assert factor_of(side_of(x * 1.000001), side_of(x)) == 1
    assert factor_of(side_of((x * 4).bfloat16()), side_of(x.bfloat16())) == 1


NORMAL = torch.randn(1000, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        (NORMAL * 2 - 1, "its statistics are those of reference times 2 minus 1"),
        (0.5 - NORMAL, "its statistics are those of reference times -1 plus 0.5"),
        (NORMAL, ""),
        (NORMAL.flip(0), ""),
        (NORMAL.bfloat16().float(), ""),
        (NORMAL * 0.9, ""),
        (NORMAL.tanh(), ""),
        (torch.cat([NORMAL[1:] * 2 - 1, NORMAL[:1]]), ""),
        (torch.full_like(NORMAL, 2.0), ""),
        (torch.cat([NORMAL[:1] * math.inf, NORMAL[1:] * 2 - 1]), ""),
    ],
)
def test_a_range_that_is_scaled_and_shifted_is_found(changed: torch.Tensor, text: str) -> None:
    assert _moments_text(side_of(changed), side_of(NORMAL)) == text
    assert _moments_text(side_of(changed[:3]), side_of(NORMAL[:3])) == ""


IDS = torch.randint(1, 50, (64,), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("x", "changed", "text"),
    [
        (IDS, IDS - 1, "its statistics are those of reference minus 1"),
        (IDS / 50, IDS / 50 + 0.5, "its statistics are those of reference plus 0.5"),
        (IDS, IDS.flip(0), ""),
        (IDS / 50, IDS / 50 + 1e-6, ""),
        (IDS, torch.cat([IDS[:1] + 1, IDS[1:]]), ""),
        (IDS, IDS * 2, ""),
        (IDS[:1], IDS[:1] + 1, ""),
        (IDS / 50, torch.cat([IDS[:1] * math.inf, IDS[1:] / 50 + 1]), ""),
    ],
)
def test_a_number_that_is_added_to_all_elements_is_found(
    x: torch.Tensor, changed: torch.Tensor, text: str
) -> None:
    assert _moments_text(side_of(changed), side_of(x)) == text


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        (torch.cat([IDS, IDS.new_zeros(8)]), "actual has 8 elements more, with the sums"),
        (torch.cat([IDS, IDS.new_full((8,), -100)]), "as many of -100"),
        (IDS.new_tensor(IDS[IDS != 12].tolist()), "reference has 5 elements more"),
        (torch.cat([IDS, IDS[:8]]), ""),
        (torch.cat([IDS, IDS.new_zeros(8)]).float(), ""),
        (IDS[:0], ""),
        (IDS, ""),
    ],
)
def test_elements_of_one_value_on_one_side_alone_are_found(
    changed: torch.Tensor, text: str
) -> None:
    found = _moments_text(side_of(changed), side_of(IDS.to(changed.dtype)))
    assert text in found and bool(text) == bool(found)


def test_a_sum_in_place_of_a_mean(tmp_path: Path) -> None:
    mean = run(tmp_path / "mean", Residual)
    total = run(tmp_path / "sum", Residual, lambda y: y.square().sum())
    text = text_of(total, mean)
    assert "its statistics are 24 times those of reference" in text
    assert "a whole factor, 24: for example a mean on one side and a sum on the other" in text
    assert "a whole factor, 1/24: " in text_of(mean, total)
    assert "factor" not in text_of(
        run(tmp_path / "other", Residual, lambda y: y.exp().mean()), mean
    )


def test_dropout_of_one_side_is_named(tmp_path: Path) -> None:
    plain, dropped = (
        run(tmp_path / "plain", Residual),
        run(tmp_path / "drop", lambda: Residual(0.5)),
    )
    alone = "alone: drop · forward · output[0]. On the other side its module is called less often"
    assert f"Before it, in actual {alone}" in text_of(dropped, plain)
    first = fastcheck.compare(dropped, plain).to_dict()["first"]
    assert first["alone"] == {"actual": ["drop · forward · output[0]"], "reference": []}
    assert f"Before it, in reference {alone}" in text_of(plain, dropped)
    assert "does not call it" not in text_of(plain, dropped)


def test_gradients_that_one_side_lacks_are_named(tmp_path: Path) -> None:
    plain = run(tmp_path / "plain", Residual)
    text = text_of(run(tmp_path / "cut", lambda: Residual(is_cut=True)), plain)
    assert "Before it, in reference alone: layer.0 · backward · gradient of output[0]" in text
    assert "no gradient comes there (detach(), no_grad(), frozen weights), or it is not" in text


def test_steps_are_those_of_the_runs_where_a_module_has_another_name(tmp_path: Path) -> None:
    def with_layer(name: str) -> Callable[[], nn.Module]:
        def make() -> nn.Module:
            net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
            net.add_module(name, nn.Identity())
            net.add_module("softmax" if name == "old" else "normal", nn.Softmax(-1))
            return net

        return make

    def change(step: int, model: nn.Module) -> None:
        if step == 2:
            next(model.parameters()).data.mul_(1.5)

    reference = log_run(tmp_path / "reference", model=with_layer("old"))
    actual = log_run(tmp_path / "actual", model=with_layer("new"), before_forward=change)
    comparison = fastcheck.compare(actual, reference)
    assert [step.step for step in comparison.growth] == [0, 1, 2, 3]
    assert comparison.first is not None and comparison.first.row.step == 1


def learn(
    directory: Path,
    criterion: Optional[nn.Module] = None,
    loss: Callable[[torch.Tensor], torch.Tensor] = lambda made: made,
    at_step_3: Callable[[nn.Module], object] = lambda net: None,
    clip: Callable[..., Any] = lambda parameters: None,
    leaves_out: int = -1,
    net: Callable[[], nn.Module] = lambda: nn.Sequential(
        nn.Linear(8, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4)
    ),
    **options: Any,
) -> str:
    """The directory of the log of six steps with a criterion. ``loss``: of what it returns."""
    torch.manual_seed(0)
    model, criterion = net(), criterion or nn.CrossEntropyLoss()
    data = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters())
    with fastcheck.install(model, criterion, log_dir=directory, **options):
        for step in range(6):
            x, y = torch.randn(16, 8, generator=data), torch.arange(16) % 4
            if step == 3:
                at_step_3(model)
            optimizer.zero_grad()
            loss(criterion(model(x), y)).backward()
            clip(model.parameters())
            if step != leaves_out:
                optimizer.step()
    return str(directory)


def flip(bit: int, name: str = "3.weight") -> Callable[[nn.Module], object]:
    def do(net: nn.Module) -> None:
        net.get_parameter(name).data.view(torch.int32)[0, 3] ^= 1 << bit

    return do


LATE = "equal to the bit in the steps before, as was all else"


@pytest.mark.parametrize("bit", [0, 22])
def test_a_bit_that_flips_is_no_formula_and_no_rounding(bit: int, tmp_path: Path) -> None:
    actual, reference = learn(tmp_path / "a", at_step_3=flip(bit)), learn(tmp_path / "b")
    text = text_of(actual, reference)
    at = "step 2, 3 ·" if bit == 0 else "first step 2: 3 ·"
    assert f"{at} optimizer · 3.weight" in text
    assert LATE in text and "5 others of its kind are equal to the bit in that step" in text
    assert "formula" not in text and "why rounding" not in text


def test_a_formula_that_differs_from_the_first_step_on_is_named_as_one(tmp_path: Path) -> None:
    def net(approximate: str) -> nn.Module:
        made = nn.Sequential(nn.Linear(8, 512), nn.GELU(approximate), nn.Linear(512, 4))
        made[0].weight.data.mul_(0.1)
        return made

    def side(approximate: str, **options: Any) -> str:
        directory = tmp_path / f"{approximate} {len(options)}"
        return learn(directory, net=lambda: net(approximate), **options)

    text = text_of(side("tanh"), side("none"))
    assert "the formula, a constant or the precision (TF32, bfloat16) is different" in text
    assert LATE not in text
    assert "1.approximate is tanh in actual and none in reference" in text
    stats = text_of(side("tanh", record="stats"), side("none", record="stats"))
    assert "before it is equal as far as the statistics tell" in stats
    assert "some of 18 tensors differ" in stats


def test_an_attribute_of_the_module_that_differs_is_named(tmp_path: Path) -> None:
    reference = learn(tmp_path / "reference")
    smooth = learn(tmp_path / "smooth", nn.CrossEntropyLoss(label_smoothing=0.1))
    named = "CrossEntropyLoss.label_smoothing is 0.1 in actual and 0.0 in reference"
    assert named in text_of(smooth, reference)

    def net() -> nn.Module:
        return nn.Sequential(
            nn.Linear(8, 16), nn.LayerNorm(16, 1e-2), nn.GELU(), nn.Linear(16, 4), nn.Dropout(0.0)
        )

    text = text_of(learn(tmp_path / "eps", net=net), reference)
    assert "1.eps is 0.01 in actual and 1e-05 in reference" in text and "4.p" not in text
    assert "other settings" not in text_of(reference, learn(tmp_path / "again"))


@pytest.mark.parametrize("reduction", ["sum", "none"])
def test_a_loss_that_is_divided_outside_of_the_criterion_is_the_same(
    reduction: str, tmp_path: Path
) -> None:
    reference, criterion = learn(tmp_path / "mean"), nn.CrossEntropyLoss(reduction=reduction)
    found = fastcheck.compare(
        learn(tmp_path / "16", criterion, lambda made: made.sum() / 16), reference
    )
    assert found.verdict == "equal" and "CrossEntropyLoss · forward · output[0]" in str(found)
    wrong = learn(tmp_path / "15", criterion, lambda made: made.sum() / 15)
    assert not fastcheck.compare(wrong, reference).agrees


def test_the_kind_of_clipping_is_a_setting(tmp_path: Path) -> None:
    def side(name: str) -> str:
        return learn(tmp_path / name, clip=lambda p: getattr(nn.utils, name)(p, 0.01))

    sides = side("clip_grad_value_"), side("clip_grad_norm_")
    settings = fastcheck.compare(*sides)["hyper-parameters"].settings
    assert [tuple(setting) for setting in settings] == [
        ("clipping.threshold from step 0 on", "not there", "0.01"),
        ("clipping.value from step 0 on", "0.01", "not there"),
    ]


def test_an_update_that_is_left_out_explains_the_batches_after_it(tmp_path: Path) -> None:
    sides = learn(tmp_path / "actual", leaves_out=2), learn(tmp_path / "reference")
    text = text_of(*sides)
    assert "step 2 has more batches in actual (the model · forward · input[0])" in text
    other = learn(tmp_path / "other", at_step_3=lambda net: torch.manual_seed(7))
    assert "more batches" not in text_of(other, sides[1])


def test_a_shared_weight_is_not_swapped(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self, tied: bool) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
            if tied:
                self.first.weight = self.last.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made: torch.Tensor = self.last(torch.tanh(self.first(x)))
            return made

    sides = [learn(tmp_path / str(tied), net=lambda t=tied: Tied(t)) for tied in (True, False)]
    text = text_of(*sides)
    assert "swapped" not in text and "actual has no last.weight: it is shared" in text


def test_records_without_statistics_have_no_loss(tmp_path: Path) -> None:
    health = learn(tmp_path / "health", record="health")
    assert not fastcheck.compare(health, learn(tmp_path / "full")).losses


def test_logs_of_other_levels_are_named_as_such(tmp_path: Path) -> None:
    sides = learn(tmp_path / "op", level="op"), learn(tmp_path / "module")
    notes = " ".join(fastcheck.compare(*sides).notes)
    assert "level is op in actual and module in reference" in notes
    assert "schedule" not in notes and "rename=" not in notes
    stats = fastcheck.compare(learn(tmp_path / "stats", record="stats"), sides[1])
    assert "record is stats in actual and full in reference" in " ".join(stats.notes)
    assert not fastcheck.compare(sides[0], learn(tmp_path / "again", level="op")).notes


def test_names_that_a_log_has_lost_are_a_note(tmp_path: Path) -> None:
    reference, actual = learn(tmp_path / "reference"), learn(tmp_path / "actual")
    (sites,) = Path(actual).glob("sites-rank*")
    sites.write_text("\n".join(sites.read_text().splitlines()[:-3]) + "\n")
    notes = fastcheck.compare(actual, reference).notes
    assert "actual: the log has lost names of tensors of rank 0: site N" in notes
    assert not fastcheck.compare(reference, reference).notes


def test_identical_says_that_steps_are_not_on_both_sides(tmp_path: Path) -> None:
    shorter = run(tmp_path / "shorter", lambda: nn.Linear(8, 4), steps=2)
    longer = run(tmp_path / "longer", lambda: nn.Linear(8, 4), steps=3)
    ending = "in the steps and ranks that both have"
    assert f"identical: equal to the bit, {ending}" in text_of(shorter, longer)
    assert "identical: equal to the bit, nothing missing" in text_of(longer, longer)


def test_another_optimizer_has_no_kernel_of_the_same_update(tmp_path: Path) -> None:
    def side(kind: Callable[..., torch.optim.Optimizer]) -> str:
        return log_run(tmp_path / str(kind), optimizer=kind)

    found = fastcheck.compare(side(torch.optim.RMSprop), side(torch.optim.AdamW))
    assert found["hyper-parameters"].settings[0].path == "optimizers[0].type"
    assert not any("kernel" in note for note in found.notes)
