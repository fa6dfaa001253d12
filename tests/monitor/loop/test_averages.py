"""Tests of averages of weights that keep next to nothing of themselves."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import distributed, nn

import fastcheck
from fastcheck.utils.torch.frames import program_frames, values_at_hand
from support.warned import warned


class Shadow:
    """An average as programs write it: tensors by the names of the parameters."""

    def __init__(self, model: nn.Module) -> None:
        self.tensors = {name: p.detach().clone() for name, p in model.named_parameters()}

    def update(self, model: nn.Module, decay: float) -> None:
        for name, p in model.named_parameters():
            self.tensors[name] = decay * self.tensors[name] + (1 - decay) * p.detach()


def _update(average: nn.Module, model: nn.Module, decay: float) -> None:
    with torch.no_grad():
        for mean, parameter in zip(average.parameters(), model.parameters()):
            mean.lerp_(parameter, 1 - decay)


def _train(update: Any, kind: Any, steps: int = 60, rate: float = 1e-3) -> list[str]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.Adam(model.parameters(), rate)
    average = kind(model)
    with warned() as said, fastcheck.install(model):
        for step in range(steps):
            optimizer.zero_grad()
            model(torch.randn(8, 8)).square().mean().backward()
            optimizer.step()
            update(average, model, step)
    return [text for text in said if "average" in text]


@pytest.mark.parametrize("decay", [0.001, 0.005, 0.99, 0.999])
@pytest.mark.parametrize("kind", [copy.deepcopy, Shadow])
def test_a_decay_that_is_swapped(kind: Any, decay: float) -> None:
    update = Shadow.update if kind is Shadow else _update
    said = _train(lambda average, model, step: update(average, model, decay), kind)
    assert len(said) == (decay < 0.1)
    name = "average.tensors" if kind is Shadow else "average"
    assert all(f"step 51: {name}, which" in text and "swapped" in text for text in said)


@pytest.mark.parametrize(("decay", "is_told"), [(0.9999, True), (0.5, False)])
def test_an_average_that_rounds_away(decay: float, is_told: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    average = copy.deepcopy(model).bfloat16()
    frozen = copy.deepcopy(average)
    with warned() as said, fastcheck.install(model):
        for _ in range(60):
            optimizer.zero_grad()
            model(torch.randn(8, 8)).square().mean().backward()
            optimizer.step()
            with torch.no_grad():
                for mean, parameter in zip(average.parameters(), model.parameters()):
                    mean.lerp_(parameter.bfloat16(), 1 - decay)
    found = [text for text in said if "rounds away" in text]
    assert len(found) == is_told and all("step 51: average, which" in text for text in found)
    assert frozen[0].weight.dtype == torch.bfloat16


def _copied(average: nn.Module, model: nn.Module, step: int) -> None:
    average.load_state_dict(model.state_dict())


def _warmed_up(average: nn.Module, model: nn.Module, step: int) -> None:
    _update(average, model, min(0.999, (1 + step) / (10 + step)))


def _rounded(average: nn.Module, model: nn.Module, step: int) -> None:
    average.load_state_dict({k: p.bfloat16().float() for k, p in model.state_dict().items()})


def _seldom(average: nn.Module, model: nn.Module, step: int) -> None:
    if step % 20 == 0:
        _update(average, model, 0.001)


def _frozen(average: nn.Module, model: nn.Module, step: int) -> None:
    pass


@pytest.mark.parametrize("update", [_copied, _warmed_up, _rounded, _seldom, _frozen])
def test_copies_that_are_no_average(update: Any) -> None:
    assert _train(update, copy.deepcopy) == []


def test_a_rounded_copy_to_compute_with_is_no_average() -> None:
    """Most of its elements keep every bit in an update, as they should."""
    assert _train(_copied, lambda model: copy.deepcopy(model).bfloat16(), rate=1e-6) == []


@pytest.mark.skipif(sys.version_info >= (3, 13), reason="locals() is a copy from Python 3.13 on")
def test_what_locals_has_given_the_program_stays_as_it_is() -> None:
    """Averages are looked for among local variables, in updates 30 to 51."""
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    settings = locals()
    with fastcheck.install(model):
        for _ in range(60):
            optimizer.zero_grad()
            later = model(torch.randn(8, 8)).square().mean()
            later.backward()
            optimizer.step()
    assert set(settings) == {"model", "optimizer"}


def test_a_module_without_its_parts_beside_an_average() -> None:
    """One whose __init__() has not run is left alone."""
    bare = nn.Module.__new__(nn.Linear)
    said = _train(lambda average, model, step: _update(average, model, 0.001), copy.deepcopy)
    assert len(said) == 1 and type(bare) is nn.Linear


class _Asked:
    """Counts how often one of its class is asked for its ``__dict__``, from when on Python keeps
    the attributes in a dictionary, where they are slower to reach.
    """

    count = 0

    def __init__(self, held: object) -> None:
        self.held = held

    @property
    def __dict__(self) -> Any:  # type: ignore[override]  # a property in the place of a dictionary
        type(self).count += 1
        return {"held": self.held}


class _Data(_Asked):
    pass


class _Trainer(_Asked):
    pass


def test_objects_of_the_program_that_lead_to_no_model_are_left_alone() -> None:
    data, trainer = _Data(_Data([1.0])), _Trainer(_Trainer(nn.Linear(2, 2)))
    monitor = fastcheck.install(nn.Linear(2, 2))
    with monitor:
        names = [name for name, _ in values_at_hand()]
    assert (type(data).count, type(trainer).count) == (0, 2)
    assert {"data", "trainer", "trainer.held", "trainer.held.held", "monitor"} <= set(names)
    assert not [name for name in names if name.startswith(("data.", "monitor."))]


def test_variables_of_pytest_are_none_of_the_program() -> None:
    own = nn.Linear(2, 2)
    names = {name for name, value in values_at_hand() if value is own or name == "hook_impls"}
    assert names == {"own"}  # the other one is pluggy's
    packages = {str(frame.f_globals["__name__"]).partition(".")[0] for frame in program_frames()}
    assert "tests" in packages and packages.isdisjoint({"_pytest", "pluggy"})


class Name(str):
    """A name in a dictionary that changes each time it is looked up somewhere."""

    weights: dict[Any, Any]

    def __hash__(self) -> int:
        self.weights[len(self.weights)] = None
        return str.__hash__(self)


def test_a_dictionary_that_is_written_meanwhile() -> None:
    """As another thread may do at any time."""
    Name.weights = {}
    torch.manual_seed(0)
    weights: dict[Any, Any] = {}  # the first of the variables here
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    weights.update({Name(name): p for name, p in model.named_parameters()})
    Name.weights = weights
    optimizer, average = torch.optim.Adam(model.parameters(), 1e-3), copy.deepcopy(model)
    before = len(weights)
    with warned() as said, fastcheck.install(model):
        for _ in range(60):
            optimizer.zero_grad()
            model(torch.randn(8, 8)).square().mean().backward()
            optimizer.step()
            _update(average, model, 0.001)
    (text,) = said
    assert "average, which" in text and "hardly an average" in text
    assert len(weights) > before


@pytest.fixture
def one_rank() -> Iterator[None]:
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_sharded_weights_beside_a_whole_average() -> None:
    """Nothing is gathered, and nothing is said."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, distribute_module

    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    average = {name: p.detach().clone() for name, p in model.named_parameters()}
    distribute_module(model, mesh := init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with warned() as said, fastcheck.install(model):
        for _ in range(60):
            optimizer.zero_grad()
            model(DTensor.from_local(torch.randn(8, 8), mesh)).square().mean().backward()
            optimizer.step()
            for name, p in model.named_parameters():
                average[name].lerp_(p.full_tensor().detach(), 0.999)
    assert said == []
