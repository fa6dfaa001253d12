"""Hooks on modules that torch converts: they are registered anew there, without ``with_kwargs``."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.ao.quantization as quantization
from torch import nn

import fastcheck

pytestmark = pytest.mark.filterwarnings("ignore:.*(torch.ao|reduce_range|qconfig|quantize).*")
LEVELS = ("module", "op")


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        quantization.QuantStub(),
        nn.Linear(8, 8),
        nn.ReLU(),
        nn.Linear(8, 2),
        quantization.DeQuantStub(),
    )


def train(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(4, 8)).square().mean().backward()
        optimizer.step()


def prepare(model: nn.Module) -> nn.Module:
    model.qconfig = quantization.get_default_qat_qconfig("fbgemm")  # type: ignore[assignment]  # torch reads it from any module
    return quantization.prepare_qat(model.train(), inplace=True)  # type: ignore[no-any-return]  # torch has it untyped


def converted(model: nn.Module) -> nn.Module:
    return quantization.convert(copy.deepcopy(model).eval())  # type: ignore[no-any-return]  # torch has it untyped


def converted_in_place(model: nn.Module) -> nn.Module:
    return quantization.convert(model.eval(), inplace=True)  # type: ignore[no-any-return]  # torch has it untyped


def dynamic(model: nn.Module) -> nn.Module:
    return quantization.quantize_dynamic(model, {nn.Linear})  # type: ignore[no-any-return]  # torch has it untyped


def dynamic_in_place(model: nn.Module) -> nn.Module:
    return quantization.quantize_dynamic(model, {nn.Linear}, inplace=True)  # type: ignore[no-any-return]  # torch has it untyped


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("convert", [converted, converted_in_place, dynamic, dynamic_in_place])
def test_a_converted_model_runs_as_without_fastcheck(
    convert: Callable[[nn.Module], nn.Module], level: str
) -> None:
    results = []
    for is_observed in (False, True):
        trained = prepare(model()) if convert in (converted, converted_in_place) else model()
        if is_observed:
            monitor = fastcheck.install(trained, level=level)
        train(trained)
        results.append(convert(trained)(torch.ones(2, 8)))
    monitor.remove()
    assert torch.equal(*results)


def test_what_takes_the_place_of_a_module_is_named_as_not_observed() -> None:
    trained = model()
    with fastcheck.install(trained) as monitor:
        train(trained)
        prepare(trained)
        with pytest.warns(fastcheck.FastcheckWarning, match=r"not observed: .*1 \(Linear\)"):
            train(trained)
        assert not monitor.events


def again(hooks: dict[int, Any]) -> Iterator[Any]:
    found = list(hooks.values())
    hooks.clear()
    return iter(found)


@pytest.mark.parametrize("level", LEVELS)
def test_a_hook_that_is_registered_without_kwargs_observes_its_module(level: str) -> None:
    counts = []
    for is_again in (False, True):
        layer = nn.Linear(8, 8)
        with fastcheck.install(layer, level=level) as monitor:
            if is_again:
                for hook in again(layer._forward_pre_hooks):
                    layer.register_forward_pre_hook(hook)
                for hook in again(layer._forward_hooks):
                    layer.register_forward_hook(hook)
            layer(torch.ones(2, 8)).sum().backward()
            counts.append(sorted(map(str, monitor.table()["name"])))
    assert counts[0] == counts[1] and len(counts[0]) > 2


@pytest.mark.parametrize("arguments", [(), (1,), ({},), (1, 2), (1, 2, 3, 4)])
def test_a_copy_of_a_hook_takes_any_arguments(arguments: tuple[object, ...]) -> None:
    layer = nn.Linear(8, 8)
    with fastcheck.install(layer) as monitor, warnings.catch_warnings():
        warnings.simplefilter("error")
        for hooks in (layer._forward_pre_hooks, layer._forward_hooks):
            (hook,) = hooks.values()
            for copied in (copy.deepcopy(hook), pickle.loads(pickle.dumps(hook))):
                assert copied(layer, *arguments) is None
        assert not len(monitor.records())
