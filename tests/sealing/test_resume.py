"""What a resumed run did not get back is named; a run that got everything back is not accused."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any, Callable

import numpy as np
import pytest
import torch
from torch import nn

import fastcheck


class Sampler:
    """A permutation and the position in it."""

    def __init__(self) -> None:
        self.order, self.position = list(range(40)), 0

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order, "position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order, self.position = list(state["order"]), state["position"]


class Run:
    """A training program with all that a checkpoint of it has."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.model = nn.Sequential(self.first, nn.BatchNorm1d(8), nn.Dropout(), self.last)
        groups: list[dict[str, Any]] = [
            {"params": self.first.parameters()},
            {"params": self.last.parameters(), "lr": 0.01, "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)
        self.sampler, self.shuffle = Sampler(), torch.Generator().manual_seed(seed)
        self.position = {"epoch": 0, "batch": 0}

    def step(self) -> None:
        self.optimizer.zero_grad()
        x = torch.randn(16, 8) + random.random() + np.random.rand()
        self.model(x).square().mean().backward()
        self.optimizer.step()
        self.scheduler.step()
        torch.randperm(4, generator=self.shuffle)
        self.sampler.position += 1
        self.position["batch"] += 1

    @property
    def parts(self) -> dict[str, Any]:
        names = ("optimizer", "scheduler", "sampler", "shuffle", "position")
        return {name: getattr(self, name) for name in names}

    def save(self) -> None:
        holders = ("model", "optimizer", "scheduler", "sampler")
        content: dict[str, Any] = {name: getattr(self, name).state_dict() for name in holders}
        content["position"] = self.position
        content["random"] = random.getstate()
        content["numpy"] = np.random.get_state()
        content["torch"] = torch.get_rng_state()
        content["shuffle"] = self.shuffle.get_state()
        torch.save(content, "last.pt")

    def load(self, leave_out: str = "") -> None:
        content = torch.load("last.pt", weights_only=False)
        for name in {"model", "optimizer", "scheduler", "sampler"} - {leave_out}:
            getattr(self, name).load_state_dict(content[name])
        for name, restore in (
            ("position", self.position.update),
            ("random", random.setstate),
            ("numpy", np.random.set_state),
            ("torch", torch.set_rng_state),
            ("shuffle", self.shuffle.set_state),
        ):
            if name != leave_out:
                restore(content[name])

    def verify(self, **options: Any) -> fastcheck.types.Resumption:
        return fastcheck.verify("last.pt", resume=self.model, **{**self.parts, **options})

    def state(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.optimizer.state[self.model.get_parameter(name)]
        return found


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)
    run = Run(0)
    for _ in range(6):
        run.step()
    run.save()
    fastcheck.seal("last.pt", run.model, step=6, resume=True, **run.parts)
    run.step()  # The program goes on; what it seals is what it was.
    return run


def left_out(name: str) -> Callable[[Run], None]:
    return lambda run: run.load(leave_out=name)


def loaded_and(fault: Callable[[Run], Any]) -> Callable[[Run], None]:
    def resume(run: Run) -> None:
        run.load()
        fault(run)

    return resume


def with_one_old_weight(run: Run) -> None:
    old = run.last.bias.detach().clone()
    run.load()
    with torch.no_grad():
        run.last.bias.copy_(old)


def with_parameters_exchanged(run: Run) -> None:
    groups = run.optimizer.param_groups
    one, other = run.first.weight, run.last.weight
    groups[0]["params"] = [other if p is one else p for p in groups[0]["params"]]
    groups[1]["params"] = [one if p is other else p for p in groups[1]["params"]]
    run.load()


def with_averages_of_one_lost(run: Run) -> None:
    run.optimizer.state.pop(run.last.weight)


def with_a_group_lost(run: Run) -> None:
    for parameter in run.optimizer.param_groups.pop()["params"]:
        del run.optimizer.state[parameter]


def with_scheduler_made_after(run: Run) -> None:
    run.scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer, 2, gamma=0.5)


def with_learning_rates_of_the_script(run: Run) -> None:
    for group, lr in zip(run.optimizer.param_groups, (0.1, 0.01)):
        group["lr"] = lr


def in_bfloat16(run: Run) -> None:
    state = run.state("3.weight")
    state["exp_avg_sq"] = state["exp_avg_sq"].bfloat16()


NO_STEPS = "no step after the seal was recorded: the first steps are not compared"
GENERATOR = "not in its sealed state: not restored, or drawn from since"
FAULTS: dict[str, tuple[Callable[[Run], Any], dict[str, str]]] = {
    "weights": (left_out("model"), {"weights.0.weight": "other values"}),
    "an old weight": (with_one_old_weight, {"weights.3.bias": "other values"}),
    "a counter of BatchNorm": (
        loaded_and(lambda run: run.model.get_buffer("1.num_batches_tracked").zero_()),
        {"weights.1.num_batches_tracked": "other values"},
    ),
    "optimizer": (
        left_out("optimizer"),
        {
            "optimizer.state": "none of its 4 sealed entries is there",
            "optimizer.param_groups.0.lr": "0.1, sealed as 0.0125",
        },
    ),
    "state of one parameter": (
        loaded_and(with_averages_of_one_lost),
        {"optimizer.state.3.weight": "missing"},
    ),
    "a moment": (
        loaded_and(lambda run: run.state("0.bias").pop("exp_avg_sq")),
        {"optimizer.state.0.bias.exp_avg_sq": "missing"},
    ),
    "zero moments": (
        loaded_and(lambda run: run.state("0.weight")["exp_avg"].zero_()),
        {"optimizer.state.0.weight.exp_avg": "other values: zeros"},
    ),
    "rounded moments": (
        loaded_and(in_bfloat16),
        {"optimizer.state.3.weight.exp_avg_sq": "64 of bfloat16, sealed as 64 of float32"},
    ),
    "exchanged moments": (
        with_parameters_exchanged,
        {
            "optimizer.state.0.weight.exp_avg": "other values: those that "
            "optimizer.state.3.weight.exp_avg had",
            "optimizer.param_groups.0.params.0.weight": "missing",
        },
    ),
    "step counter": (
        loaded_and(lambda run: run.state("3.bias")["step"].zero_()),
        {"optimizer.state.3.bias.step": "0.0, sealed as 6.0"},
    ),
    "learning rate": (
        loaded_and(with_learning_rates_of_the_script),
        {
            "optimizer.param_groups.0.lr": "0.1, sealed as 0.0125",
            "optimizer.param_groups.1.lr": "0.01, sealed as 0.00125",
        },
    ),
    "weight decay": (
        loaded_and(lambda run: run.optimizer.param_groups[1].update(weight_decay=0.01)),
        {"optimizer.param_groups.1.weight_decay": "0.01, sealed as 0"},
    ),
    "a group": (
        loaded_and(with_a_group_lost),
        {
            "optimizer.state.3.weight": "missing",
            "optimizer.state.3.bias": "missing",
            "optimizer.param_groups.1": "missing",
        },
    ),
    "a group more": (
        loaded_and(lambda run: run.optimizer.add_param_group({"params": [torch.ones(2)]})),
        {"optimizer.param_groups.2": "a group that was not sealed"},
    ),
    "scheduler": (left_out("scheduler"), {"scheduler.last_epoch": "0, sealed as 6"}),
    "scheduler made after": (
        loaded_and(with_scheduler_made_after),
        {"scheduler._step_count": "1, sealed as 7"},
    ),
    "sampler": (left_out("sampler"), {"sampler.position": "0, sealed as 6"}),
    "order of the sampler": (
        loaded_and(lambda run: run.sampler.order.reverse()),
        {"sampler.order": "other values"},
    ),
    "position": (left_out("position"), {"position.batch": "0, sealed as 6"}),
    "torch's generator": (left_out("torch"), {"random.torch": GENERATOR}),
    "NumPy's generator": (left_out("numpy"), {"random.numpy": GENERATOR}),
    "Python's generator": (left_out("random"), {"random.python": GENERATOR}),
    "a generator": (left_out("shuffle"), {"shuffle": GENERATOR}),
    "a draw": (loaded_and(lambda run: torch.rand(1)), {"random.torch": GENERATOR}),
}
# These have more findings than the ones above, each of them true.
MORE = {"weights", "optimizer", "exchanged moments", "scheduler", "scheduler made after"}


@pytest.mark.parametrize("name", FAULTS)
def test_what_did_not_come_back_is_named(saved: Run, name: str) -> None:
    resume, expected = FAULTS[name]
    run = Run(1)
    resume(run)
    found = run.verify()
    assert not found
    assert expected.items() <= found.differing.items(), found.differing
    if name not in MORE:
        assert found.differing == expected
    part = next(iter(expected)).partition(".")[0]
    assert {one.partition(".")[0] for one in found.differing} <= {part, "optimizer"}
    assert str(found).endswith("NOT RESUMED")


def test_a_run_that_got_everything_back_is_not_accused(saved: Run) -> None:
    run = Run(1)
    run.load()
    found = run.verify()
    assert found and not found.differing and found.notes == ()
    assert found.step == 6 and found.equal > 50
    assert run.verify()  # To verify changes nothing.
    run.step()
    assert torch.equal(run.first.weight, saved.first.weight)
    assert not run.verify()


lr_scheduler = torch.optim.lr_scheduler
Make = Callable[[Any], Any]


@pytest.mark.parametrize(
    ("make_optimizer", "make_scheduler"),
    [
        (lambda p: torch.optim.SGD(p, lr=1), lambda o: lr_scheduler.LambdaLR(o, lambda n: 0.9**n)),
        (
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
            lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=20),
        ),
        (
            lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1), amsgrad=True),
            lambda o: lr_scheduler.MultiStepLR(o, [2, 4]),
        ),
        (
            lambda p: torch.optim.RMSprop(p, centered=True),
            lambda o: lr_scheduler.SequentialLR(
                o,
                [lr_scheduler.LinearLR(o), lr_scheduler.CosineAnnealingWarmRestarts(o, 3)],
                milestones=[3],
            ),
        ),
        (
            lambda p: torch.optim.Adagrad(p),
            lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
        ),
    ],
)
def test_clean_resumes_of_other_optimizers_and_schedulers(
    tmp_path: Path, make_optimizer: Make, make_scheduler: Make
) -> None:
    def program(seed: int) -> tuple[nn.Module, dict[str, Any]]:
        torch.manual_seed(seed)
        model = nn.Linear(4, 4).bfloat16()
        optimizer = make_optimizer(model.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        return model, {
            "optimizer": optimizer,
            "scheduler": make_scheduler(optimizer),
            "scaler": scaler,
        }

    model, parts = program(0)
    for _ in range(5):
        loss = model(torch.ones(2, 4, dtype=torch.bfloat16)).square().mean()
        loss.backward()
        parts["optimizer"].step()
        is_plateau = isinstance(parts["scheduler"], lr_scheduler.ReduceLROnPlateau)
        parts["scheduler"].step(*([1.0] if is_plateau else []))
    path = str(tmp_path / "last.pt")
    holders = {"model": model, **parts}
    saved_random = torch.get_rng_state()
    torch.save({name: one.state_dict() for name, one in holders.items()}, path)
    fastcheck.seal(path, model, resume=True, **parts)

    model, parts = program(1)
    content = torch.load(path, weights_only=False)
    for name, one in {"model": model, **parts}.items():
        one.load_state_dict(content[name])
    torch.set_rng_state(saved_random)
    found = fastcheck.verify(path, resume=model, **parts)
    assert found and found.notes == (NO_STEPS,), found


def test_what_is_accepted_is_not_verified(saved: Run) -> None:
    run = Run(1)
    run.load(leave_out="random")
    assert not run.verify()
    found = run.verify(accept=("random.python",))
    assert found and found.notes == ("random.python was not verified (accept)",)
    assert not run.verify(accept=("random.py",))


def test_a_part_that_is_given_on_one_side_only(saved: Run) -> None:
    run = Run(1)
    run.load()
    found = fastcheck.verify("last.pt", resume=run.model, **{**run.parts, "scaler": {"scale": 1}})
    assert found and found.notes == ("scaler was not sealed",)
    found = fastcheck.verify("last.pt", resume=run.model, optimizer=run.optimizer)
    missing = {"scheduler", "sampler", "shuffle", "position"}
    assert found.differing == dict.fromkeys(missing, "was sealed, and is not given to verify()")


def test_values_that_cannot_be_read_are_noted(saved: Run) -> None:
    parts: dict[str, Any] = {
        "other": {"objects": [object()] * 30, "one": object(), "sparse": torch.eye(2).to_sparse()}
    }
    fastcheck.seal("other.pt", saved.model, resume=True, **parts)
    found = fastcheck.verify("other.pt", resume=saved.model, **parts)
    names = ("objects", "one", "sparse")
    assert found
    unread = (f"other.{name} can't be read, and was not verified" for name in names)
    assert found.notes == (*unread, NO_STEPS)


def test_a_seal_holds_no_text_of_a_state(saved: Run) -> None:
    fastcheck.seal("other.pt", saved.model, resume=True, loader={"token": "hf_secret"})
    assert "hf_secret" not in Path("other.pt.fastcheck.json").read_text()
    found = fastcheck.verify("other.pt", resume=saved.model, loader={"token": "hf_SECRET"})
    assert found.differing == {"loader.token": "other values"}


def test_the_checkpoint_of_a_resumable_seal_verifies_as_any(saved: Run) -> None:
    torch.save(saved.model.state_dict(), "weights.pt")
    fastcheck.seal("weights.pt", saved.model, resume=True, **saved.parts)
    assert fastcheck.verify("weights.pt")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"optimizer": {}}, "unknown option"),
        ({"resume": True, "sampler": 3}, "sampler can't be sealed"),
        ({"resume": True, "sampler": Sampler}, "sampler can't be sealed"),
        ({"resume": True, "weights": {}}, "a part has a reserved name"),
        ({"resume": True, "map": {}}, "a part has a reserved name"),
        ({"resume": True, "together": True}, "both seal"),
    ],
)
def test_options_that_can_not_be_used(saved: Run, options: dict[str, Any], text: str) -> None:
    with pytest.raises(fastcheck.ConfigError, match=text):
        fastcheck.seal("other.pt", saved.model, **options)
    assert not Path("other.pt.fastcheck.json").exists()


def test_only_a_model_is_resumed(saved: Run) -> None:
    with pytest.raises(fastcheck.ConfigError, match="the model itself"):
        fastcheck.seal("other.pt", saved.model.state_dict(), resume=True)
    with pytest.raises(fastcheck.ConfigError, match="unknown option"):
        fastcheck.verify("last.pt", optimizer=saved.optimizer)  # type: ignore[call-overload]  # wrong on purpose
    receipt = fastcheck.receipt(saved.model)
    with pytest.raises(fastcheck.ConfigError, match="a receipt and resume"):
        fastcheck.verify("last.pt", receipt, resume=saved.model)  # type: ignore[call-overload]  # wrong on purpose


def test_a_seal_without_the_state_of_a_run(saved: Run) -> None:
    fastcheck.seal("other.pt", saved.model)
    with pytest.raises(fastcheck.CompareError, match="the seal has no state of a run"):
        fastcheck.verify("other.pt", resume=saved.model)


@pytest.mark.parametrize("damaged", [[], {"optimizer": ["a", "b", 3]}, {"optimizer": 3}])
def test_a_damaged_seal_is_refused(saved: Run, damaged: object) -> None:
    path = Path("last.pt.fastcheck.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "resume": damaged}))
    with pytest.raises(fastcheck.CompareError, match="not a seal"):
        saved.verify()


def resumed(saved: Run) -> tuple[Run, fastcheck.Resumption]:
    """Two steps have followed the seal."""
    saved.step()
    run = Run(1)
    run.load()
    found = run.verify()
    assert found and found.first_steps is None
    return run, found


def test_the_first_steps_are_those_that_followed_the_seal(saved: Run) -> None:
    run, found = resumed(saved)
    run.step()
    assert found.first_steps is None
    run.step()
    assert found.first_steps is not None and found.first_steps.is_identical, found.first_steps
    assert found.first_steps.steps == (0, 1)
    assert not any(module._forward_hooks for module in run.model.modules())
    assert not any(module._forward_hooks for module in saved.model.modules())


def with_other_batch(run: Run) -> None:
    torch.manual_seed(7)


def with_moments_lost(run: Run) -> None:
    run.state("3.weight")["exp_avg"].zero_()


@pytest.mark.parametrize(
    ("fault", "question", "text"),
    [
        (lambda run: run.model.eval(), "forward", "first 1 · forward · output"),
        (with_other_batch, "batches", "first the model · forward · input"),
        (with_moments_lost, "update", "first 3 · optimizer · 3.weight"),
        (
            lambda run: run.optimizer.param_groups[0].update(lr=0.3),
            "hyper-parameters",
            r"optimizers\[0\].groups\[0\].lr: 0.3, was 0.0125",
        ),
        (
            lambda run: run.model.get_parameter("3.weight").requires_grad_(False),
            "update",
            "no gradient of 3.weight, which had one",
        ),
    ],
)
def test_what_differs_in_the_first_steps_is_named(
    saved: Run, fault: Callable[[Run], Any], question: str, text: str
) -> None:
    """Faults that come after verify(), which can't see them."""
    run, found = resumed(saved)
    fault(run)
    run.step()
    with pytest.warns(fastcheck.FastcheckWarning, match=text) as warned:
        run.step()
    assert len(warned) == 1
    assert found.first_steps is not None and found.first_steps[question].answer == "no"
    assert str(warned[0].message).split("\n")[1].startswith(f"{question}: ")


def test_of_two_calls_the_last_compares(saved: Run) -> None:
    run, first = resumed(saved)
    last = run.verify()
    run.step()
    run.step()
    assert first.first_steps is None
    assert last.first_steps is not None and last.first_steps.agrees


def test_the_next_seal_at_a_path_has_its_own_steps(saved: Run) -> None:
    for _ in range(3):
        saved.step()
    fastcheck.seal("last.pt", saved.model, resume=True, **saved.parts)
    assert saved.verify().notes == (NO_STEPS,)


def test_no_steps_of_compiled_modules(saved: Run) -> None:
    saved.first.compile(backend="eager")
    fastcheck.seal("last.pt", saved.model, resume=True, **saved.parts)
    assert not Path("last.pt.fastcheck.steps").exists()


def test_steps_beside_a_checkpoint_are_no_part_of_it(saved: Run) -> None:
    Path("folder").mkdir()
    torch.save(saved.model.state_dict(), "folder/model.pt")
    fastcheck.seal("folder", saved.model, resume=True, **saved.parts)
    saved.step()
    assert Path("folder/fastcheck.steps").is_dir()
    found = fastcheck.verify("folder")
    assert found and found.notes == ()
