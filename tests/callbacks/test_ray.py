"""The callback in Ray Train's controller, called as the controller does, and trainings of Ray
itself; skipped without Ray.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import fastcheck
from support.programs.training import Apply, chain, poison, stopped, train
from support.trainers import in_lab

pytest.importorskip("ray.train")

pytestmark = [
    pytest.mark.usefixtures("fresh_start"),
    pytest.mark.filterwarnings("default:::(?!fastcheck)"),
]


def a_stop() -> fastcheck.OverflowDetected:
    model = chain(fc=nn.Linear(8, 8), hole=Apply(poison))
    fastcheck.install(model)
    return stopped(train, model, 1)


def test_the_culprit_is_named_in_the_controller() -> None:
    from ray.train.v2._internal.exceptions import UserExceptionWithTraceback

    stop, callback = a_stop(), fastcheck.callbacks.Ray()
    sent = pickle.loads(pickle.dumps(UserExceptionWithTraceback(stop, "Traceback ...")))
    with pytest.warns(fastcheck.FastcheckWarning, match="hole") as caught:
        callback.after_exception(None, {1: sent, 0: ValueError("another")})
    assert callback.stop is not None and str(callback.stop) == str(stop)
    assert "1 of 2 that failed" in str(caught[0].message)


def test_other_exceptions_are_left_alone() -> None:
    callback = fastcheck.callbacks.Ray()
    callback.after_exception(None, {0: ValueError("another")})
    assert callback.stop is None


def test_it_is_a_callback_that_a_run_takes() -> None:
    import ray.train

    assert isinstance(fastcheck.callbacks.Ray(), ray.train.UserCallback)


def trained_by_ray(folder: Path, is_observed: bool) -> Any:
    """What each of two workers has after four steps: losses, weights and steps of the monitor."""
    import ray.train.torch

    # What the workers run is pickled with its code: nothing of this module is imported there.
    def loop(config: dict[str, Any]) -> None:
        import json
        from pathlib import Path

        import ray.train.torch
        import torch

        import fastcheck

        torch.manual_seed(0)
        model: Any = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
        model = ray.train.torch.prepare_model(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        rank = ray.train.get_context().get_world_rank()
        monitor = fastcheck.install(model) if config["is_observed"] else None
        losses = []
        for batch in torch.randn(32, 8)[rank::2].split(4):
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        weights = [p.tolist() for p in model.parameters()]
        seen = None if monitor is None else [monitor.step_index, monitor.event_count]
        Path(config["folder"], f"{rank}.json").write_text(json.dumps([losses, weights, seen]))

    folder.mkdir()
    ray.train.torch.TorchTrainer(
        loop,
        train_loop_config={"folder": str(folder), "is_observed": is_observed},
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(
            storage_path=str(folder),
            callbacks=[fastcheck.callbacks.Ray()] if is_observed else [],
        ),
    ).fit()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@in_lab
def test_losses_and_weights_are_the_same(tmp_path: Path) -> None:
    plain = trained_by_ray(tmp_path / "plain", False)
    observed = trained_by_ray(tmp_path / "observed", True)
    assert [one[:2] for one in plain] == [one[:2] for one in observed]
    assert [one[2] for one in observed] == [[3, 0], [3, 0]], "four steps, no event"
    assert plain[0][0] != plain[1][0], "each rank has batches of its own"
    assert plain[0][1] == plain[1][1]
