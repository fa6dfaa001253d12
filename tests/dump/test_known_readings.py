"""A Dumper does not read a tensor again unless something has written to it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Callable

import numpy as np
import pytest
import torch
from torch import nn

import fastcheck
from fastcheck.dump.op_calls import RecordedOpCalls
from fastcheck.dump.storage.files import read_index
from fastcheck.log.reader import read_log
from support.programs.training import Net, batches

Step = Callable[[], object]


def dumped(place: Path, step: Step, **options: Any) -> np.ndarray:
    with fastcheck.Dumper(os.fspath(place), overwrite=True, **options):
        step()
    return read_log(os.fspath(place / "step0" / "rank0")).records


def reused(place: Path) -> int:
    """Of how many records the memory was not read again."""
    return int(read_index(os.fspath(place / "step0" / "rank0"))["reused"])


def training(seed: int = 0) -> Step:
    torch.manual_seed(seed)
    model, (x,) = nn.Sequential(Net(), nn.BatchNorm1d(4), nn.Linear(4, 2)), batches(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    step()  # what the optimizer keeps is there
    return step


def test_records_are_those_of_reading_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = dumped(tmp_path, training())
    count = reused(tmp_path)
    monkeypatch.setattr(RecordedOpCalls, "make", classmethod(lambda *_: None))
    assert found.tobytes() == dumped(tmp_path, training()).tobytes()
    assert reused(tmp_path) == 0 and count > 0.25 * len(found)


def test_a_tensor_is_read_once(tmp_path: Path) -> None:
    x = torch.randn(100)

    def step() -> None:
        for _ in range(5):
            x.sin()

    found = dumped(tmp_path, step)
    assert len(found) == 10 and reused(tmp_path) == 4
    assert len(set(found["checksum"])) == 2 and list(found["seq"]) == list(range(10))


def set_data(x: torch.Tensor) -> None:
    x.data.add_(1)


def behind_torch(x: torch.Tensor) -> None:
    x.numpy()[...] = 7


@pytest.mark.parametrize("elements", [3, 100_000])
@pytest.mark.parametrize("write", [lambda x: x.add_(1), set_data, behind_torch])
def test_what_was_written_in_between_is_read_again(
    write: Callable[[torch.Tensor], object], elements: int, tmp_path: Path
) -> None:
    x = torch.zeros(elements)
    wanted = []

    def step() -> None:
        for _ in range(2):
            wanted.append(fastcheck.checksum(x))
            x.sin()
            write(x)

    found = dumped(tmp_path, step)
    names = read_log(os.fspath(tmp_path / "step0" / "rank0")).sites
    inputs = [
        int(record["checksum"])
        for record in found
        if names[int(record["site"])].op == "aten.sin"
        and "self" in names[int(record["site"])].label
    ]
    assert inputs == wanted and len(set(wanted)) == 2


def test_an_operator_that_writes_to_few_elements_through_another_version(tmp_path: Path) -> None:
    """A sample of a few bytes would not show it; the operator's schema does."""
    x = torch.zeros(1_000_000)
    at = 500_000 + 8  # between two places

    def step() -> None:
        x.sin()
        x.data[at : at + 1].fill_(float("nan"))
        x.sin()

    found = dumped(tmp_path, step)
    assert [int(n) for n in found["nan_count"] if n] == [1, 1, 1]


def test_a_record_that_is_kept_still_says_that_it_is_non_finite(tmp_path: Path) -> None:
    x = torch.full((100,), float("nan"))

    def step() -> None:
        x.isnan()
        x.isnan()

    found = dumped(tmp_path, step)
    bad = found[found["nan_count"] > 0]
    assert len(bad) == 2 and all(bad["flags"] & int(fastcheck.types.Flag.NONFINITE))


def test_memory_that_is_used_again_is_another_tensor(tmp_path: Path) -> None:
    def step() -> None:
        for value in range(1, 21):
            torch.full((1000,), float(value)).sin()

    found = dumped(tmp_path, step)
    assert len(set(found["checksum"])) == 40


@pytest.mark.parametrize("options", [{"tensors": True}, {"reference": "cpu"}, {"level": "module"}])
def test_where_more_than_records_of_operators_is_wanted_everything_is_read(
    options: dict[str, Any], tmp_path: Path
) -> None:
    x = torch.randn(4, 8, requires_grad=True)
    model = nn.Sequential(nn.Identity(), nn.Identity())
    assert len(dumped(tmp_path, lambda: model(x).sin().sum().backward(), **options))
    assert reused(tmp_path) == 0


def test_few_are_remembered(tmp_path: Path) -> None:
    """65536 storages: then it begins anew."""
    x = torch.ones(1)

    def step() -> None:
        kept = [x.sin() for _ in range(65540)]
        assert len(kept) == 65540

    found = dumped(tmp_path, step, record="health")
    assert len(found) == 2 * 65540 and reused(tmp_path) == 65540 - 2


def test_a_storage_that_is_gone_is_not_remembered(tmp_path: Path) -> None:
    x = torch.ones(1)

    def step() -> None:
        for _ in range(65540):
            x.sin()

    dumped(tmp_path, step, record="health")
    assert reused(tmp_path) == 65540 - 1


def test_few_views_of_one_storage_are_remembered(tmp_path: Path) -> None:
    """64: then it begins anew with that storage."""
    x = torch.arange(65.0)

    def step() -> None:
        for count in (64, 64, 65, 64):
            for view in x.split(1)[:count]:
                view.sin()

    found = dumped(tmp_path, step)
    # The second and the third time; then all but the last, which is all that is left.
    assert len(found) == 2 * 257 and reused(tmp_path) == 64 + 64


def test_what_an_operator_has_made_in_place_is_not_read_again_by_the_next(tmp_path: Path) -> None:
    """Autograd counts the version of it when the mode has returned."""
    x, y = torch.zeros(1000), torch.zeros(1000)

    def step() -> None:
        x.add_(1)
        x.mul_(2)
        torch.sin(x, out=y)
        y.exp()

    dumped(tmp_path, step)
    assert reused(tmp_path) == 3  # what mul_, sin and exp take in


def test_a_version_that_nobody_saw_being_counted_is_another_content(tmp_path: Path) -> None:
    x = torch.zeros(1_000_000)
    at = 500_000 + 8  # between two of the places that are looked at

    def step() -> None:
        x.add_(1)
        with torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]  # torch's stub of _C lacks it
            x[at : at + 1].fill_(float("nan"))
        x.sin()

    found = dumped(tmp_path, step)
    assert [int(n) for n in found["nan_count"] if n] == [1, 1]


def test_what_ran_within_a_higher_order_operator_may_have_written(tmp_path: Path) -> None:
    from torch._higher_order_ops.cond import cond

    x = torch.ones(2)

    def step() -> None:
        x.sin()
        x.sin()
        cond(torch.tensor(True), lambda t: t + 1, lambda t: t - 1, (x,))
        x.sin()

    dumped(tmp_path, step)
    assert reused(tmp_path) == 1


@pytest.mark.parametrize("count", [1, 7, 8, 64, 2000, 4096, 4097, 1_000_003])
def test_any_byte_of_a_small_tensor_shows_and_the_ends_of_a_large_one(
    count: int, tmp_path: Path
) -> None:
    x = torch.zeros(count, dtype=torch.uint8)
    unseen = x.numpy()
    places = range(count) if count <= 64 else [0, 1, count // 2, count - 70, count - 1]
    if count > 4096:
        places = [0, 63, count - 64, count - 1]

    def step() -> None:
        x.bitwise_not()
        x.bitwise_not()
        for place in places:
            unseen[place] += 1
            x.bitwise_not()

    found = dumped(tmp_path, step)
    assert len(found) == 2 * (len(places) + 2) and reused(tmp_path) == 1
    assert len(set(found["checksum"][::2])) == len(places) + 1


def test_a_view_is_what_its_memory_is(tmp_path: Path) -> None:
    """One that leaves gaps is read each time: a few of its bytes are not at hand."""
    x = torch.randn(40, 40)

    def step() -> None:
        x.t().sin()
        x.sin()
        for _ in range(2):
            x[:, ::2].sin()

    dumped(tmp_path, step)
    assert reused(tmp_path) == 1


def test_an_interrupt_within_a_call_mixes_up_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was read in that call has no number; the next one gets it."""
    first, other = torch.zeros(1_000_000), torch.zeros(1_000_000)
    other[500_000 + 8] = 1  # where one doesn't look
    site = RecordedOpCalls.site

    def interrupted(self: Any, *args: Any) -> int:
        if args[4] == 1:  # the second argument
            raise KeyboardInterrupt
        return site(self, *args)

    def step() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(RecordedOpCalls, "site", interrupted)
            with pytest.raises(KeyboardInterrupt):
                torch.add(first, torch.ones(1))
        other.sin()
        first.sin()

    found = dumped(tmp_path, step)
    names = read_log(os.fspath(tmp_path / "step0" / "rank0")).sites
    read = [int(one["checksum"]) for one in found if names[int(one["site"])].role == "input"]
    assert read == [int(fastcheck.checksum(other)), int(fastcheck.checksum(first))]
