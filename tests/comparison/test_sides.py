"""Two sides that are computed in another way are equal; those that only look so are not."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import torch

import fastcheck
from accuracy.compare_sides import CHECKED, PAIRS, judge
from accuracy.sides_programs import train
from accuracy.sides_schedules import dump_schedule
from support.page_data import PageData
from support.programs.compare_runs import answers
from support.sampling import sample


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


# No other test has an update that is off by more than its own rounding.
ALWAYS = "one element of a weight"


@pytest.mark.parametrize("name", dict.fromkeys([*sample(CHECKED, 14), ALWAYS]))
def test_a_healthy_pair_is_equal_and_a_wrong_one_different(logs: Path, name: str) -> None:
    (pair,) = [pair for pair in PAIRS if pair.name == name]
    found = judge(pair, logs)
    assert found["is_right"], found


@pytest.mark.parametrize("dim", [0, 1])
def test_calls_for_parts_are_compared_by_their_elements(tmp_path: Path, dim: int) -> None:
    """A module that is called for each half of what it reads, in dumps with values."""

    class Model(torch.nn.Module):
        def __init__(self, kind: str) -> None:
            super().__init__()
            self.kind, self.inner = kind, torch.nn.Tanh()
            self.weight = torch.nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x * self.weight
            if self.kind == "whole":
                return self.inner(x).sum((0, 1))
            if self.kind == "rows in another order":
                x = x.flip(0)
            return torch.cat([self.inner(part) for part in x.chunk(2, dim)], dim).sum((0, 1))

    for kind in ("whole", "halves", "rows in another order"):
        torch.manual_seed(0)
        model = Model(kind)
        with fastcheck.Dumper(tmp_path / kind, level="module", tensors=True):
            model(torch.randn(4, 6, 4)).sum().backward()
    found = fastcheck.compare(tmp_path / "halves", tmp_path / "whole")
    assert found.is_identical and any("has in parts" in note for note in found.notes)
    found = fastcheck.compare(tmp_path / "rows in another order", tmp_path / "whole")
    assert not found.agrees and found.first is not None
    assert found.first.row.name.startswith("inner · forward · input")
    assert "rows in another order" in str(found)


def test_a_metric_of_other_sizes_is_different(tmp_path: Path) -> None:
    """It reads the same, and nothing that it makes is in a gradient."""

    class Counts(torch.nn.Module):
        def __init__(self, bins: int) -> None:
            super().__init__()
            self.bins = bins

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.histc(x.detach(), self.bins)

    class Model(torch.nn.Module):
        def __init__(self, bins: int) -> None:
            super().__init__()
            self.first, self.counts = torch.nn.Linear(4, 4), Counts(bins)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.counts(x := self.first(x))
            return x

    for bins in (8, 9):
        torch.manual_seed(0)
        model = Model(bins)
        update = torch.optim.SGD(model.parameters(), 0.1)
        with fastcheck.install(model, log_dir=tmp_path / str(bins)):
            for _ in range(2):
                update.zero_grad()
                model(torch.randn(8, 4)).square().sum().backward()
                update.step()
    found = fastcheck.compare(tmp_path / "9", tmp_path / "8")
    assert not found.agrees and found.first is not None
    assert found.first.row.name == "counts · forward · output[0]"


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


class Two(torch.nn.Module):
    """``fault``: what the actual side computes otherwise, without a trace in the loss."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fault, self.a, self.b = fault, torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)
        self.pool = torch.nn.MaxPool1d(2) if fault == "an output" else torch.nn.AvgPool1d(2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.a(x).relu()
        if self.fault == "all zeros" or (self.fault == "validation" and not self.training):
            h = h.clamp_max(0.0)
        return self.b(h), self.pool(h.detach())


@pytest.mark.parametrize("fault", ["validation", "an output", "rows"])
def test_what_the_loss_does_not_read_is_compared(tmp_path: Path, fault: str) -> None:
    for kind in (fault, ""):
        model = Two(kind)
        if kind == "rows":
            rows = torch.tensor([1.0] * 6 + [1.5] * 2)[:, None]
            model.a.register_forward_hook(lambda module, x, y, by=rows: y * by)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with fastcheck.install(model, log_dir=tmp_path / f"log {kind}"):
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.randn(8, 8))[0][:6].square().mean().backward()
                with torch.no_grad():
                    model.eval()(torch.randn(8, 8))
                model.train()
                optimizer.step()
    found = fastcheck.compare(tmp_path / f"log {fault}", tmp_path / "log ")
    assert found["forward"].answer == "no", str(found)


def test_operators_are_no_other_schedule_where_gradients_have_no_values(tmp_path: Path) -> None:
    for kind in ("all zeros", ""):
        model, x = Two(kind), torch.ones(16, 8)
        with fastcheck.Dumper(tmp_path / f"dump {kind}", model=model, level="op", record="health"):
            model(x)[0].square().mean().backward()
    found = fastcheck.compare(tmp_path / "dump all zeros", tmp_path / "dump ")
    assert found["forward"].answer == "no", str(found)
    assert not any("another schedule" in note or "cancel" in note for note in found.notes)


def test_operators_are_no_other_schedule_where_a_gradient_is_missing(tmp_path: Path) -> None:
    for kind, factor in (("actual", 2.0), ("reference", 1.0)):
        model = Two("")
        model.b.requires_grad_(kind == "reference")
        with fastcheck.Dumper(tmp_path / kind, model=model, level="op"):
            h = model.a(torch.ones(16, 8))
            (h.square().mean() + model.b(h.detach() * factor).mean()).backward()
    found = fastcheck.compare(tmp_path / "actual", tmp_path / "reference")
    assert found["forward"].answer == "no", str(found)
    assert not any("another schedule" in note for note in found.notes)


def test_an_operator_that_makes_other_numbers_of_equal_inputs_is_of_no_schedule(
    tmp_path: Path,
) -> None:
    for kind, factor in (("actual", 1.5), ("reference", 1.0)):
        model = Two("")
        with fastcheck.Dumper(tmp_path / kind, model=model, level="op"):
            y = model(torch.ones(16, 8))[0]
            y.square().mean().backward()
            (y.detach().softmax(-1) * factor).sum()  # a metric
    found = fastcheck.compare(tmp_path / "actual", tmp_path / "reference")
    assert found["forward"].answer == "no" and found.first is not None, str(found)
    assert found.first.row.name == "aten.mul.Tensor · forward · output[0]"
    # What is made of it follows, with its own error.
    assert found.first.trail[0].error > 0.3


@pytest.mark.parametrize("fault", ["", "not divided", "labels of another part"])
def test_dumps_of_another_split_of_the_batch(tmp_path: Path, fault: str) -> None:
    for kind, parts in (("actual", 3), ("reference", 1)):
        fastcheck.seed_all(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
        criterion, optimizer = torch.nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), 0.1)
        x, labels = torch.randn(6, 8), torch.randint(0, 4, (6,))
        with fastcheck.Dumper(tmp_path / kind, model=model, level="module", tensors=True):
            for own, y in zip(x.chunk(parts), labels.chunk(parts)):
                if kind == "actual" and fault == "labels of another part":
                    y = labels.chunk(parts)[0]
                loss = criterion(model(own), y)
                (loss / (1 if kind == "actual" and fault == "not divided" else parts)).backward()
            optimizer.step()
    found = fastcheck.compare(tmp_path / "actual", tmp_path / "reference")
    assert found.agrees == (not fault), str(found)
    assert any("the batch is split in another way" in note for note in found.notes)
    assert found["forward"].answer == "unknown"
    assert found["gradients"].answer == ("yes" if not fault else "no")


class Norm(torch.nn.Module):
    def __init__(self, is_written_out: bool, eps: float) -> None:
        super().__init__()
        self.is_written_out, self.eps = is_written_out, eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_written_out:
            return torch.nn.functional.layer_norm(x, x.shape[-1:], eps=self.eps)
        variance, mean = torch.var_mean(x, -1, keepdim=True, correction=0)
        return (x - mean) * torch.rsqrt(variance + self.eps) * torch.ones_like(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("eps", [1e-5, 3e-2])
def test_values_of_coarse_dtypes_round_element_by_element(
    tmp_path: Path, dtype: torch.dtype, eps: float
) -> None:
    for kind, own in (("actual", eps), ("reference", 1e-5)):
        torch.manual_seed(0)
        model = torch.nn.Sequential(Norm(kind == "actual", own), torch.nn.Linear(64, 64)).to(dtype)
        with fastcheck.Dumper(tmp_path / kind, model=model, level="module", tensors=True):
            model(torch.randn(64, 64, dtype=dtype) + 0.5).square().mean().backward()
    found = fastcheck.compare(tmp_path / "actual", tmp_path / "reference")
    assert found.agrees == (eps == 1e-5), str(found)
    # A log would have no elements to compare.
    assert not any("a log has only" in text for text in found.advice)


def test_operators_of_another_schedule_have_their_errors(tmp_path: Path) -> None:
    for kind in ("rounds otherwise", ""):
        dump_schedule(tmp_path / f"dump {kind}", schedule=kind)
    path = tmp_path / "all.csv"
    sides, page = [tmp_path / "dump rounds otherwise", tmp_path / "dump "], tmp_path / "page.html"
    found = fastcheck.compare(*sides, csv=path, html=page)
    assert found.agrees and any("another schedule" in note for note in found.notes)
    rows = [
        row
        for row in csv.DictReader(path.read_text().splitlines())
        if "another schedule" in row["reason"]
    ]
    errors = [float(row["error"]) for row in rows]
    assert len(errors) > 5 and min(errors) > 0 and max(errors) > 0.01
    assert max(errors) > max(step.error for step in found.growth)
    assert (PageData(page.read_text()).arrays["excess"] == 1).sum() >= 5


def test_gradients_that_are_small_beside_others_are_not_said_to_cancel(tmp_path: Path) -> None:
    for kind, parts in (("actual", 2), ("reference", 1)):
        torch.manual_seed(0)
        model = torch.nn.Module()
        model.big, model.tiny = torch.nn.Linear(8, 1), torch.nn.Linear(8, 1)
        sign = -1e-4 if kind == "actual" else 1e-4
        model.forward = lambda x, m=model, by=sign: m.big(x) * 1e4 + m.tiny(x) * by
        optimizer = torch.optim.Adam(model.parameters())
        x = torch.randn(16, 8)
        with fastcheck.install(model, log_dir=tmp_path / kind):
            for part in x.chunk(parts):
                model(part).square().mean().div(parts).backward()
            optimizer.step()
    found = fastcheck.compare(tmp_path / "actual", tmp_path / "reference")
    (note,) = (note for note in found.notes if "no larger beside the largest" in note)
    assert note.startswith("2 gradients") and "gradient of tiny.weight" in note
    assert not any("terms cancel" in note for note in found.notes)


@pytest.mark.parametrize("fault", ["", "wrong way", "twice"])
def test_an_update_is_judged_by_its_own_size(tmp_path: Path, fault: str) -> None:
    """SGD moves each element of a weight by a bit or two: 3e-8 of its norm."""
    for kind, parts in (("actual", 2), ("reference", 1)):
        torch.manual_seed(0)
        model = torch.nn.Linear(256, 256)
        optimizer = torch.optim.SGD(model.parameters(), 1e-5)
        batches = torch.randn(3, 16, 256)
        with fastcheck.install(model, log_dir=tmp_path / kind):
            for x in batches:
                optimizer.zero_grad()
                loss = sum(y.square().sum() for y in model(x).chunk(parts)) / 16384
                torch.as_tensor(loss).backward()
                before = model.weight.detach().clone()
                optimizer.step()
                if kind == "actual" and fault:
                    with torch.no_grad():
                        by = model.weight - before
                        model.weight.copy_(before - by if fault == "wrong way" else before + 2 * by)
    found = fastcheck.compare(tmp_path / "actual", tmp_path / "reference")
    assert found.agrees == (not fault), str(found)
    assert not fault or "the updates differ" in str(found)


def test_groups_divided_otherwise_leave_shapes_compared(tmp_path: Path) -> None:
    for kind, shape in (("actual", (16, 4)), ("reference", (4, 16))):
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 1)
        model.w = torch.nn.Parameter(torch.randn(64).reshape(shape))
        own = [model.weight, model.bias]
        groups = [[model.w], own] if kind == "actual" else [[model.w, *own]]
        optimizer = torch.optim.SGD([{"params": group} for group in groups], 0.1)
        with fastcheck.Dumper(tmp_path / kind, model=model, step=0, level="module", tensors=True):
            model(torch.ones(16, 8) @ model.w.reshape(8, 8)).square().mean().backward()
            optimizer.step()
    found = fastcheck.compare(tmp_path / "actual", tmp_path / "reference")
    assert found["hyper-parameters"].answer == "yes"
    assert [row.reason for row in found.rows][:1] == ["other shapes"], str(found)


@pytest.mark.parametrize("has_values", [False, True])
@pytest.mark.parametrize(
    ("fault", "is_trained", "answers_of"),
    [
        ("", True, ("yes", "yes")),
        ("scaled", False, ("no", "no")),
        # No gradient of a parameter tells the order of the elements, but their values do.
        ("", False, ("partly", "yes")),
        ("flipped", False, ("partly", "no")),
    ],
)
def test_a_gradient_in_parts_has_the_sum_of_the_whole(
    tmp_path: Path, fault: str, is_trained: bool, answers_of: tuple[str, str], has_values: bool
) -> None:
    changes = {"scaled": lambda grad: grad * 1.01, "flipped": lambda grad: grad.flip(0)}
    for kind in ("actual", "reference"):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
        model[0].requires_grad_(is_trained)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        x = torch.randn(16, 8, requires_grad=not is_trained)
        place, dumper = tmp_path / kind, fastcheck.Dumper
        with (
            dumper(place, model=model, level="module", tensors=True)
            if has_values
            else fastcheck.install(model, log_dir=place)
        ):
            h = model[0](x)
            if kind == "actual" and fault:
                h.register_hook(changes[fault])
            y = model[1](h)
            parts = [y.square().mean(), y.abs().mean()]
            for part in parts if kind == "actual" else [sum(parts)]:
                part.backward(retain_graph=True)
            optimizer.step()
    found = fastcheck.compare(tmp_path / "actual", tmp_path / "reference")
    answer = answers_of[has_values]
    assert found["gradients"].answer == answer, str(found)
    assert found.agrees == (answer == "yes")
    notes = " ".join(found.notes)
    if fault != "scaled":
        assert "come another number of times" in notes
        assert ("their elements may stand in another order" in notes) == (answer == "partly")
