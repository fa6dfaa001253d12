"""Small tensors that wait for each other, on the fake accelerator with the CUDA kernels: records
are those of tensors that are read at once, whatever writes to a tensor meanwhile.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
from typing import Any, Callable, Optional

import numpy as np
import pytest
import torch
from torch import nn

import fastcheck
from fakes import cuda_on_fake, fake_device
from fastcheck import _C
from fastcheck.backends import table
from support.sampling import sample

pytestmark = [pytest.mark.fake_accelerator, pytest.mark.usefixtures("cuda_on_fake_device")]

fake: Any = fake_device.load()
NAME = fake.name()
LIMIT = 256 * 1024 // 4  # elements of float32


class Then(nn.Module):
    """Calls a function of its input, which may write to it."""

    def __init__(self, function: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result = self.function(x)
        return x if result is None else result


def chain(*between: nn.Module, width: int = 8, length: int = 20) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(8, width), *between, nn.Tanh()]
    for _ in range(length):
        layers += [nn.Linear(width, width) if width == 8 else nn.Identity(), nn.Tanh()]
    return nn.Sequential(*layers).to(NAME)


Pass = Callable[[nn.Module, torch.Tensor], torch.Tensor]


class Run:
    """Some steps of a model; each one's records have arrived before the next one."""

    def __init__(self, model: nn.Module, waits: bool = True, **options: Any) -> None:
        if not waits:
            backend = dataclasses.replace(cuda_on_fake.entry(), reads_lists_in_one_launch=False)
            self._patch = pytest.MonkeyPatch()
            self._patch.setattr(table, "_of_type", lambda *_: backend)
        options.setdefault("log", fastcheck.Log(None, history=50))
        self.model = model
        self.monitor = fastcheck.install(model, **options)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        self.launches: list[int] = []
        self.step()
        if not waits:
            self._patch.undo()

    def step(self, call: Optional[Pass] = None) -> None:
        x = torch.ones(4, 8).to(NAME)
        with fake.recorded_launches() as names:
            loss = (call or (lambda model, x: model(x)))(self.model, x).square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        self.launches.append(sum("fastcheck records" in name for name in names))
        self.monitor.flush()

    def end(self) -> Run:
        self.monitor.remove()
        return self

    def steps(self, count: int) -> Run:
        for _ in range(count):
            self.step()
        return self

    def records(self, step: Optional[int] = None) -> np.ndarray:
        records = self.monitor.records()
        return records if step is None else records[records["step"] == step]

    def names(self) -> list[str]:
        sites = self.monitor._session.sites
        return [str(sites[int(number)]) for number in self.records()["site"]]

    def record_of(self, step: int, module: str, role: str = "output") -> np.ndarray:
        sites = self.monitor._session.sites
        records = self.records(step)
        mine = [
            sites[int(i)].module == module and sites[int(i)].role == role for i in records["site"]
        ]
        return records[mine]


def check_same(make: Callable[[], nn.Module], steps: int = 6, **options: Any) -> Run:
    """The records of a model whose tensors wait are those of one whose do not."""
    waiting = Run(make(), **options).steps(steps).end()
    at_once = Run(make(), waits=False, **options).steps(steps).end()
    assert waiting.records().tobytes() == at_once.records().tobytes()
    assert waiting.names() == at_once.names()
    assert waiting.monitor._session.faults.unread_count == 0
    assert waiting.launches[-1] < at_once.launches[-1]
    return waiting


@pytest.mark.parametrize("record", sample(["full", "stats", "health"], 1))
def test_records_are_the_same_with_fewer_launches(record: str) -> None:
    run = check_same(chain, record=record)
    assert len(run.records(5)) > 160
    assert run.launches[-1] <= 8


def test_a_site_is_read_twice_in_one_step() -> None:
    run = Run(chain()).steps(5)
    first, trial, after = run.launches[0], run.launches[1], run.launches[-1]
    assert first < trial < first + 6
    assert after < first / 10
    assert len(run.records(1)) == len(run.records(4))


@pytest.mark.parametrize("sync", sample(["call", "step", "never"], 1))
def test_modes_of_waiting_for_the_device(sync: str) -> None:
    make = chain
    runs = [Run(make(), waits, sync=sync).steps(4) for waits in (True, False)]
    assert runs[0].records().tobytes() == runs[1].records().tobytes()


def write_by_version(x: torch.Tensor) -> torch.Tensor:
    return torch.relu_(x)


def write_past_the_version(x: torch.Tensor) -> None:
    x.data.mul_(3)


def replace_the_memory(x: torch.Tensor) -> None:
    x.data = x.data + 1


def write_by_a_kernel(x: torch.Tensor) -> torch.Tensor:
    """Writes the result of an operator by what is none."""
    with _C.Unread():
        fake.launch(lambda x: x.fill_(5.0), x)
    return x * 1


WRITES = [write_by_version, write_past_the_version, replace_the_memory, write_by_a_kernel]


@pytest.mark.parametrize(("write", "level"), sample(itertools.product(WRITES, ("module", "op")), 3))
def test_tensors_that_are_written_to_in_each_step(
    write: Callable[[torch.Tensor], Any], level: str
) -> None:
    check_same(lambda: chain(Then(write)), level=level)


def norm_between() -> nn.Module:
    return chain(nn.BatchNorm1d(8))


def masked_in_place() -> nn.Module:
    return chain(Then(lambda x: (x * 1).masked_fill_(x > 0, 2.0).add_(1)))


def gradients_that_add_up() -> nn.Module:
    """Autograd adds in place only to what nobody else holds."""
    return chain(Then(lambda x: torch.tanh(x) + torch.sin(x) * x))


MODELS = [chain, norm_between, masked_in_place, gradients_that_add_up]


@pytest.mark.parametrize(
    ("make", "record"), sample(itertools.product(MODELS, ("stats", "full")), 2)
)
def test_operators_are_read_together(make: Callable[[], nn.Module], record: str) -> None:
    run = check_same(make, level="op", record=record)
    assert len(run.records(5)) > 150
    assert run.launches[-1] < 30


def test_operators_write_later_what_waits() -> None:
    """Nothing is lost: what an operator is about to write is read before it."""
    place = Then(lambda x: x * 1)
    run = Run(chain(place), level="op").steps(5)
    place.function = write_by_version
    run.steps(2)
    assert run.end().monitor._session.faults.unread_count == 0


def test_an_operator_of_a_library_writes_what_it_does_not_declare() -> None:
    """What waits is read before it."""
    library = torch.library.Library("fastcheck_test_waiting", "FRAGMENT")
    library.define("fill(Tensor x) -> ()")

    def fill(x: torch.Tensor) -> None:
        with _C.Unread():
            fake.launch(lambda x: x.fill_(5.0), x)

    library.impl("fill", fill, "PrivateUse1")

    def records(waits: bool) -> bytes:
        place = Then(lambda x: x * 1)
        run = Run(chain(place), waits, level="op").steps(5)

        def write(x: torch.Tensor) -> torch.Tensor:
            torch.ops.fastcheck_test_waiting.fill(x)
            return x * 1

        place.function = write
        run.step()
        return bytes(run.end().records(6).tobytes())

    assert records(True) == records(False)


def test_events_of_operators_are_the_same() -> None:
    def events(waits: bool) -> list[Any]:
        place = Then(lambda x: x * 1)
        run = Run(chain(place), waits, level="op", overflow_nums=-1).steps(4)
        place.function = lambda x: torch.log(x - 10) * 2
        run.step()
        run.end()
        return [(str(e.site), e.step, e.verdict, e.reason, e.line) for e in run.monitor.events]

    together, at_once = events(True), events(False)
    assert together == at_once
    assert any("test_waiting.py" in line for *_, line in together)


def test_gradients_that_are_written_to_in_each_step() -> None:
    def hooked(x: torch.Tensor) -> torch.Tensor:
        watch: Any = x.register_hook  # torch leaves it untyped
        watch(lambda gradient: gradient.mul_(2))
        return x * 1

    check_same(lambda: chain(Then(hooked)))


def test_a_write_that_begins_later_leaves_no_record_of_other_contents() -> None:
    place = Then(lambda x: x * 1)
    run = Run(chain(place)).steps(5)
    place.function = write_by_version
    run.step()
    assert len(run.record_of(5, "0")) == 1
    assert len(run.record_of(6, "0")) == 0
    assert "small tensors that left no record: 1, overwritten" in str(run.monitor.summary())
    run.step()
    assert len(run.record_of(7, "0")) == 1
    assert run.record_of(7, "0")["negative_count"][0] > 0


def test_a_verdict_says_what_was_not_read() -> None:
    place = Then(lambda x: x * 1)
    run = Run(chain(place), stop=fastcheck.Stop(action="warn")).steps(5)

    def erase(x: torch.Tensor) -> torch.Tensor:
        x.zero_()
        return x * torch.nan

    place.function = erase
    with pytest.warns(fastcheck.FastcheckWarning):
        run.step()
    (origin,) = (event for event in run.monitor.events if event.verdict.name == "ORIGIN")
    assert origin.site.module == "1"
    assert origin.reason.count("had been overwritten before being read") == 1


def test_large_tensors_and_those_without_gradients_are_read_at_once() -> None:
    small, large = (
        Run(chain(width=width, length=4)).steps(5).launches[-1]
        for width in (LIMIT // 4, LIMIT // 4 + 1)
    )
    assert small < 10 < large
    model = chain()
    run = Run(model).steps(5)
    with torch.no_grad(), fake.recorded_launches() as names:
        model(torch.ones(4, 8).to(NAME))
    run.monitor.flush()
    assert sum("fastcheck records" in name for name in names) > 40


class Part(nn.Module):
    """Returns a small part of large memory."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return torch.ones(LIMIT + 1, device=NAME)[: x.numel()].view_as(x)


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Part() for _ in range(5))
        self.bytes: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = x + part(x)
        self.bytes.append(fake.memory_allocated())
        return x


def test_a_part_of_large_memory_is_read_at_once() -> None:
    """While it waits, all of that would stay."""
    parts = Parts()
    Run(chain(parts, length=2)).steps(3).end()
    assert max(parts.bytes) - parts.bytes[0] < 4 * LIMIT


def write_aside(x: torch.Tensor) -> torch.Tensor:
    """Writes on a stream that waits for the tensor, not for its reading, which comes after it."""
    home, other = fake.current_stream(), fake.Stream()
    other.wait_stream(home)
    other.synchronize()
    with fake.held(home):
        with torch.no_grad(), fake.stream(other):
            x.mul_(3)
        other.synchronize()
    return x * 1


def test_writes_on_another_stream() -> None:
    def run(waits: bool) -> Run:
        place = Then(lambda x: x * 1)
        run = Run(chain(place), waits, level="op").steps(4)
        place.function = write_aside
        return run.steps(2).end()

    waiting, at_once = run(True), run(False)
    wanted = {int(record["seq"]): bytes(record.tobytes()) for record in at_once.records()}
    for record in waiting.records():
        assert wanted.pop(int(record["seq"])) == record.tobytes()
    assert len(wanted) == waiting.monitor._session.faults.unread_count > 0
    assert waiting.records(6).tobytes() == at_once.records(6).tobytes()


def test_another_stream_in_the_middle() -> None:
    kept = []

    def make() -> nn.Module:
        other = fake.Stream()
        inner = nn.Sequential(nn.Tanh(), nn.Tanh())

        def aside(x: torch.Tensor) -> torch.Tensor:
            home = fake.current_stream()
            other.wait_stream(home)
            with fake.stream(other):
                kept.append(inner(x))
            home.wait_stream(other)
            return x * 1

        place = Then(aside)
        place.add_module("inner", inner)
        return chain(place)

    check_same(make)


def test_memory_that_is_handed_on_before_the_reading() -> None:
    """The allocator may not give it to anybody until the records are there."""

    def hand_on(x: torch.Tensor) -> torch.Tensor:
        y = x * 1
        x.data = torch.empty(0, device=NAME)
        return y + torch.full_like(y, 7.0)

    check_same(lambda: chain(nn.Tanh(), Then(hand_on)))


def test_threads_that_share_a_model() -> None:
    def from_a_thread(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        made: list[torch.Tensor] = []
        thread = threading.Thread(target=lambda: made.append(model(x)))
        thread.start()
        thread.join()
        return made[0]

    runs = [Run(chain(), waits) for waits in (True, False)]
    for run in runs:
        for _ in range(5):
            run.step(from_a_thread)
    assert runs[0].records().tobytes() == runs[1].records().tobytes()
    assert runs[0].launches[-1] < runs[1].launches[-1]


def test_what_waits_when_a_forward_fails() -> None:
    place = Then(lambda x: x * 1)
    model = chain(place)
    run = Run(model).steps(5)

    def fail(x: torch.Tensor) -> None:
        raise ValueError("the model's own")

    place.function = fail
    for _ in range(2):
        with pytest.raises(ValueError, match="own"):
            model(torch.ones(4, 8).to(NAME))
    run.monitor.remove()
    assert len(run.record_of(6, "0")) == 2


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_list_that_cannot_be_launched(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(chain()).steps(5)
    ring = next(iter(run.monitor._session.rings.of.values()))

    read = ring.observe_each

    def refuse(tensors: list[torch.Tensor], identities: list[Any]) -> None:
        if len(tensors) <= 32:  # not the parameters and gradients
            raise error("not now")
        read(tensors, identities)

    with monkeypatch.context() as patch:
        patch.setattr(ring, "observe_each", refuse)
        if error is RuntimeError:
            with pytest.warns(fastcheck.FastcheckWarning, match="small tensors together"):
                run.step()
        else:
            with pytest.raises(KeyboardInterrupt):
                run.model(torch.ones(4, 8).to(NAME))
    unread = run.monitor._session.faults.unread_count
    assert 0 < unread <= 32
    before = len(run.records(5))
    run.step()
    run.step()
    assert len(run.records()[run.records()["step"] == run.records()["step"].max()]) == before
    assert run.monitor._session.faults.unread_count == unread
