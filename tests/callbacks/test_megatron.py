"""The adapter on a stand-in for Megatron Core's optimizers: the public interface of megatron-core
0.16 (step() returns success, norm and zeros; get_loss_scale(); config; param_groups). Those of
Megatron itself need CUDA.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Optional

import pytest
import torch
from torch import nn

import fastcheck
from support.programs.training import Net, batches, nan_gradient, stopped, where
from support.ranks import megatron_workers
from support.ranks.ranks_harness import run_ranks, values

pytestmark = pytest.mark.usefixtures("fresh_start")


class MainGradOptimizer:
    """Updates float32 copies from ``main_grad``, into which backward hooks accumulate."""

    def __init__(self, model: nn.Module, scale: Optional[float] = None) -> None:
        self.parameters = list(model.parameters())
        for parameter in self.parameters:
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)

            def accumulate(p: Any) -> None:
                p.main_grad.add_(p.grad)
                p.grad = None

            parameter.register_post_accumulate_grad_hook(accumulate)
        self.main = [nn.Parameter(p.detach().clone().float()) for p in self.parameters]
        self.optimizer = torch.optim.SGD(self.main, lr=0.1)
        self.config = SimpleNamespace(fp16=scale is not None)
        self.scale = torch.tensor([scale or 1.0])

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    def get_loss_scale(self) -> torch.Tensor:
        return self.scale

    @torch.no_grad()
    def step(self) -> Any:
        gradients: list[Any] = [p.main_grad / self.scale for p in self.parameters]
        if self.config.fp16 and not all(bool(g.isfinite().all()) for g in gradients):
            self.scale = self.scale / 2
            return False, None, None
        for main, gradient in zip(self.main, gradients):
            main.grad = gradient
        self.optimizer.step()
        for parameter, main in zip(self.parameters, self.main):
            parameter.copy_(main)
        return True, 1.0, None

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.main_grad.zero_()


def loop(model: nn.Module, optimizer: MainGradOptimizer, steps: int, bad: int = -1) -> list[float]:
    losses = []
    for step, x in enumerate(batches(steps)):
        optimizer.zero_grad()
        out = model(x)
        loss = (nan_gradient(out) if step == bad else out).square().mean()
        (loss * optimizer.get_loss_scale()).backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_main_gradients_are_read_once_a_step() -> None:
    model = Net()
    optimizer = MainGradOptimizer(model)
    monitor = fastcheck.callbacks.megatron([model], optimizer)
    loop(model, optimizer, 3)
    sites = [monitor.sites[r["site"]] for r in monitor.records() if r["step"] == 1]
    keys = [site.key for site in sites if site.role == "param_grad"]
    assert keys == [name for name, _ in model.named_parameters()]
    rows = monitor.step_table()
    assert [row.learning_rate for row in rows] == [0.1] * 3 and all(r.gradient_norm for r in rows)
    monitor.remove()


def test_losses_and_weights_are_the_same() -> None:
    found = []
    for observed in (False, True):
        torch.manual_seed(0)
        model = Net()
        optimizer = MainGradOptimizer(model)
        if observed:
            fastcheck.callbacks.megatron(model, optimizer)
        found.append((loop(model, optimizer, 4), [p.detach() for p in model.parameters()]))
    assert found[0][0] == found[1][0] and all(map(torch.equal, found[0][1], found[1][1]))


def test_a_nan_stops_before_the_update() -> None:
    model = Net()
    optimizer = MainGradOptimizer(model)
    fastcheck.callbacks.megatron(model, optimizer)
    stop = stopped(loop, model, optimizer, 5, bad=2)
    assert stop.step == 2 and where(stop.culprit)[:2] == ("head", "grad_output")
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_a_step_that_the_scaler_skips_is_no_event() -> None:
    model = Net()
    optimizer = MainGradOptimizer(model, scale=1024.0)
    monitor = fastcheck.callbacks.megatron(model, optimizer)
    loop(model, optimizer, 4, bad=1)
    rows = monitor.step_table()
    assert [row.overflow for row in rows] == [False, True, False, False]
    assert [row.scale for row in rows] == [1024, 1024, 512, 512]
    assert monitor.event_count == 0
    monitor.remove()


def test_an_optimizer_of_torch_is_an_error() -> None:
    model = Net()
    with pytest.raises(fastcheck.ConfigError, match="Megatron Core"):
        fastcheck.callbacks.megatron(model, torch.optim.SGD(model.parameters(), lr=0.1))


class Shard:
    """What megatron.core.dist_checkpointing.ShardedTensor describes: a local part of a tensor."""

    prepend_axis_num = 0
    flattened_range = None

    def __init__(self, key: str, data: torch.Tensor, parts: int = 1) -> None:
        self.key, self.data = key, data
        self.local_shape = tuple(data.shape)
        self.global_offset = (0,) * data.dim()  # of the first rank
        self.global_shape = (data.shape[0] * parts, *data.shape[1:])


@pytest.fixture
def checkpointing(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stand-in for megatron.core.dist_checkpointing."""

    def save(sharded_state_dict: Any, checkpoint_dir: str, *_: Any, **__: Any) -> None:
        kept = {one.key: one.data for one in sharded_state_dict["model"].values()}
        torch.save(kept, Path(checkpoint_dir, "model.pt"))

    module: Any = ModuleType("megatron.core.dist_checkpointing")
    module.save = save
    monkeypatch.setitem(sys.modules, "megatron.core.dist_checkpointing", module)
    return module


def saved(checkpointing: Any, model: nn.Module, folder: str, parts: int = 1) -> str:
    Path(folder).mkdir()
    shards = {k: Shard(f"model.{k}", v, parts) for k, v in model.state_dict().items()}
    # As Megatron-LM calls it: the name of the iteration's folder is the caller's.
    checkpointing.save({"model": shards, "args": None}, folder)
    return folder


@pytest.mark.parametrize("seal", ["mark", "refuse", False])
def test_checkpoints_are_sealed(checkpointing: Any, seal: Any) -> None:
    model, plain = Net(), checkpointing.save
    optimizer = MainGradOptimizer(model)
    monitor = fastcheck.callbacks.megatron(model, optimizer, seal=seal, overflow_nums=-1)
    loop(model, optimizer, 3)
    folder = saved(checkpointing, model, "iter_0000003")
    assert Path(folder, "fastcheck.json").exists() is bool(seal)
    if seal:
        found = fastcheck.verify(folder)
        assert found and found.step == 2 and found.equal == len(model.state_dict())
    with torch.no_grad():
        model.head.bias[1] = float("nan")
    if seal == "refuse":
        with pytest.raises(fastcheck.NonFiniteWeightsError, match="bad is not written"):
            saved(checkpointing, model, "bad")
        assert not Path("bad/model.pt").exists()
    else:
        saved(checkpointing, model, "bad")
        if seal:
            assert fastcheck.verify("bad").nonfinite == {"model.head.bias": 1}
    saved(checkpointing, Net(), "others")
    assert not Path("others/fastcheck.json").exists(), "the weights of another model"
    monitor.remove()
    assert checkpointing.save is plain


def test_parts_of_weights_are_checked_and_sealed(checkpointing: Any) -> None:
    """Of two ranks, one of which is there: no tensor is whole."""
    model = Net()
    optimizer = MainGradOptimizer(model)
    fastcheck.callbacks.megatron(model, optimizer, seal="refuse")
    saved(checkpointing, model, "parts", parts=2)
    content = json.loads(Path("parts", "fastcheck.json").read_text())
    assert set(content["unsealed"]) == {f"model.{key}" for key in model.state_dict()}
    assert "these ranks hold 4 of its 8 elements" in content["unsealed"]["model.head.bias"]
    assert not fastcheck.verify("parts")
    with torch.no_grad():
        model.head.bias[1] = float("nan")
    with pytest.raises(fastcheck.NonFiniteWeightsError, match="bad is not written"):
        saved(checkpointing, model, "bad", parts=2)


@pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"
)
def test_checkpoints_of_megatron_core_itself(tmp_path: Path) -> None:
    """On the CPU: two calls of torch.cuda are overridden. The first layer is tensor parallel: each
    of two ranks holds half of it, and the weight of the last rank is the one that is spoilt.
    """
    for found in values(run_ranks(megatron_workers.saves, str(tmp_path), world_size=2)):
        assert found == {
            "verified": (True, 4),
            "parts": {
                "model.0.bias": 2,
                "model.0.weight": 2,
                "model.1.bias": 0,
                "model.1.weight": 0,
            },
            "other": {"model.0.weight": "other values in the part [4:8, 0:4]"},
            "refused": "bad is not written",
            "written": [],
        }
