"""When the C++ recorder of hooks stops recording: a stop, an internal failure, a model that is
deleted or copied.
"""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import fastcheck
from fastcheck.extension import status
from fastcheck.monitor.session.session import ModuleLevel, Session
from support.programs.recorder_models import MODELS, NAN, Block, Poison, outcome
from support.programs.training import Apply

pytestmark = [
    pytest.mark.fake_hooks,
    pytest.mark.skipif(status.module is None, reason="no extension"),
]


def test_a_stop_comes_out_of_the_very_hook(device: str) -> None:
    if device != "cpu":
        pytest.skip("a device's records arrive later")
    model = nn.Sequential(Block(), Block(Poison(NAN)), Block())
    # Elsewhere the end of the outermost call decides.
    monitor = fastcheck.install(model, stop=fastcheck.Stop(count="all"))
    x = torch.randn(8, 8)
    model(x)
    entered = []
    model[1].second.register_forward_pre_hook(lambda *_: entered.append(1))
    model[1].poison.is_on = True
    with pytest.raises(fastcheck.OverflowDetected, match=r"1\.poison"):
        model(x)
    assert not entered  # the next module was not reached
    assert not monitor._core.hooks.observer._local.stack


class TestOwnFailures:
    @pytest.mark.parametrize(
        "target", ["saw", "on_unreadable", "read_elsewhere", "call_ended", "settle_call"]
    )
    def test_training_goes_on(
        self, target: str, device: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        expected = outcome(MODELS["blocks"], device)[-1]

        def broken(*args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("a defect")

        kind = Session if target in ("call_ended", "settle_call") else ModuleLevel
        monkeypatch.setattr(kind, target, broken)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert outcome(MODELS["blocks"], device)[-1] == expected

    def test_it_is_said_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model = nn.Sequential(Block(), Block(Poison(NAN)), Block())
        monitor = fastcheck.install(model, overflow_nums=-1)
        model(torch.randn(8, 8))
        monkeypatch.setattr(ModuleLevel, "saw", lambda *_: 1 // 0)
        model[1].poison.is_on = True
        with pytest.warns(fastcheck.FastcheckWarning) as said:
            for _ in range(3):
                model(torch.randn(8, 8))
        # It is left alone from then on.
        sites = monitor._session.sites
        made = [sites[int(number)] for number in monitor.records()["site"]]
        assert sum(site.module == "1.poison" and site.role == "output" for site in made) == 2
        texts = [str(warning.message) for warning in said]
        assert len(texts) == len(set(texts))
        assert any("1.poison" in text and "ZeroDivisionError" in text for text in texts)
        monitor.remove()

    def test_a_tensor_that_the_kernel_refuses(self, monkeypatch: pytest.MonkeyPatch) -> None:
        refused = []
        method = ModuleLevel.on_unreadable
        monkeypatch.setattr(
            ModuleLevel, "on_unreadable", lambda *args: (refused.append(1), method(*args))[-1]
        )

        def freed(x: torch.Tensor) -> torch.Tensor:
            y = torch.ones(8) * 1
            if is_bad:
                y.untyped_storage().resize_(0)
            return y

        is_bad = False
        twice = Apply(freed)
        model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(twice, twice), Apply(lambda x: 1))
        monitor = fastcheck.install(model, overflow_nums=-1)
        model(torch.randn(8, 8))
        is_bad = True
        with pytest.warns(fastcheck.FastcheckWarning, match=r"1\.0"):
            assert model(torch.randn(8, 8)) == 1
        assert model(torch.randn(8, 8)) == 1
        assert len(refused) == 1  # its site is not tried again
        monitor.remove()


def test_a_model_that_is_deleted_takes_everything_along(device: str) -> None:
    model = nn.Sequential(Block(), Block()).to(device)
    monitor = fastcheck.install(model)
    for _ in range(2):
        model(torch.randn(8, 8).to(device)).sum().backward()
    session, observer = weakref.ref(monitor._session), weakref.ref(monitor._core.hooks.observer)
    part = weakref.ref(model[0])
    del model, monitor
    gc.collect()
    assert session() is None and observer() is None and part() is None


def test_a_graph_that_outlives_its_monitor(device: str) -> None:
    model = nn.Sequential(Block(), Block()).to(device)
    monitor = fastcheck.install(model)
    losses = [model(torch.randn(8, 8).to(device)).sum() for _ in range(2)]
    monitor.remove()
    losses[0].backward()
    del model, monitor
    gc.collect()
    losses[1].backward()


def test_copies_are_not_observed() -> None:
    model = nn.Sequential(Block(), Block())
    monitor = fastcheck.install(model)
    model(torch.randn(8, 8))
    before = monitor._session.next_seq
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin(torch.randn(8, 8)).sum().backward()
    assert monitor._session.next_seq == before
    monitor.remove()
