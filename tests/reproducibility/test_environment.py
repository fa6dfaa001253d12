"""environment(), inventory() and seed_all(), and the part of them that the log keeps."""

from __future__ import annotations

import json
import os
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import fastcheck
from fastcheck.log.reader import read_log
from support.processes import run_code
from support.programs.compare_runs import log_run
from support.programs.training import Net, train


def plain(value: Any) -> Any:
    return json.loads(json.dumps(value, allow_nan=False))


def differing(actual: Any, reference: Any, question: str) -> dict[str, tuple[str, str]]:
    settings = fastcheck.compare(actual, reference)[question].settings
    return {setting.path: (setting.actual, setting.reference) for setting in settings}


# environment


def test_environment_is_plain_and_equal_to_itself(tmp_path: Path) -> None:
    found = fastcheck.environment()
    assert plain(found) == found
    path = tmp_path / "environment.json"
    elsewhere = {**found, "where": {"host": "another", "initial_seed": 5}}
    path.write_text(json.dumps(elsewhere))
    comparison = fastcheck.compare(path, fastcheck.environment())
    assert comparison.is_identical, str(comparison)
    assert found["versions"]["torch"] == torch.__version__
    assert found["machine"]["cores"] == os.cpu_count()


SWITCHES = {
    "torch.deterministic": "torch.use_deterministic_algorithms(True)",
    "torch.float32_matmul_precision": "torch.set_float32_matmul_precision('medium')",
    "torch.cudnn_allow_tf32": "torch.backends.cudnn.allow_tf32 = False",
    "torch.cudnn_benchmark": "torch.backends.cudnn.benchmark = True",
    "torch.sdpa_flash": "torch.backends.cuda.enable_flash_sdp(False)",
    "torch.default_dtype": "torch.set_default_dtype(torch.float64)",
    "torch.threads": "torch.set_num_threads(1)",
    "torch.flush_denormal": "torch.set_flush_denormal(True)",
    "torch.mkldnn": "torch.backends.mkldnn.enabled = False",
    "torch.anomaly_mode": "torch.autograd.set_detect_anomaly(True, check_nan=False)",
    "variables.CUBLAS_WORKSPACE_CONFIG": "os.environ['CUBLAS_WORKSPACE_CONFIG'] = ':16:8'",
    "variables.HCCL_DETERMINISTIC": "os.environ['HCCL_DETERMINISTIC'] = 'true'",
}


def test_every_switch_shows() -> None:
    """In a process of its own: most of these can't be taken back."""
    done = run_code(
        "import json, os, torch, fastcheck\n"
        "torch.set_num_threads(2)\n"
        "seen = {}\n"
        f"for path, code in {SWITCHES!r}.items():\n"
        "    before = fastcheck.environment()\n"
        "    exec(code)\n"
        "    found = fastcheck.compare(fastcheck.environment(), before)['environment']\n"
        "    seen[path] = [setting.path for setting in found.settings]\n"
        "print(json.dumps(seen))"
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert {path: path in found for path, found in seen.items()} == dict.fromkeys(SWITCHES, True)


def test_secrets_and_places_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    before = fastcheck.environment()
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("TORCH_HOME_PATH", "/somewhere")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "9")
    after = fastcheck.environment()
    assert "secret" not in json.dumps(after)
    assert fastcheck.compare(after, before).is_identical


def test_an_unused_device_is_counted_and_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda i: started.append(i) or f"GPU {i}")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert fastcheck.environment()["devices"]["cuda"] == {"count": 2} and not started
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    used = plain(fastcheck.environment())["devices"]["cuda"]
    assert used == {"count": 2, "names": ["GPU 0", "GPU 1"], "capability": [9, 0]}


def test_asking_starts_no_device() -> None:
    done = run_code(
        "import torch, fastcheck; fastcheck.environment(); print(torch.cuda.is_initialized())"
    )
    assert done.stdout.strip() == "False", done.stderr


# inventory


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


def test_inventory_tells_what_there_is() -> None:
    model = Shared()
    model.norm.bias.requires_grad_(False)
    optimizer = torch.optim.AdamW(
        [
            {"params": [model.embed.weight], "lr": 0.1},
            {"params": [model.norm.weight], "lr": torch.tensor(0.2), "weight_decay": 0.0},
        ],
        foreach=False,
    )
    found = fastcheck.inventory(model, optimizer)
    assert plain(found) == found
    assert found["parameters"]["embed.weight"] == {
        "shape": [10, 4],
        "dtype": "float32",
        "device": "cpu",
        "trainable": True,
        "shared_with": None,
    }
    assert found["parameters"]["head.weight"]["shared_with"] == "embed.weight"
    assert found["parameters"]["norm.bias"]["trainable"] is False
    assert found["buffers"]["scratch"]["persistent"] is False
    assert found["buffers"]["norm.running_mean"]["persistent"] is True
    assert found["totals"] == {"parameters": 48, "trainable": 44}
    groups = found["optimizers"][0]["groups"]
    assert [group["parameters"] for group in groups] == [["embed.weight"], ["norm.weight"]]
    assert [group["lr"] for group in groups] == [0.1, pytest.approx(0.2)]
    assert found["without_optimizer"] == ["norm.bias"]
    assert found["modules"]["norm"] == {"type": "BatchNorm1d", "training": True}


def test_two_inventories_differ_in_what_differs(tmp_path: Path) -> None:
    def made(**changes: Any) -> Any:
        model = Net(changes.pop("width", 8))
        model.head.bias.requires_grad_(changes.pop("trainable", True))
        return fastcheck.inventory(model, torch.optim.Adam(model.parameters(), **changes))

    path = tmp_path / "inventory.json"
    path.write_text(json.dumps(made()))
    assert fastcheck.compare(made(), path).is_identical
    question = "model and optimizer"
    assert differing(made(betas=(0.9, 0.95)), path, question) == {
        "optimizers[0].groups[0].betas[1]": ("0.95", "0.999")
    }
    assert set(differing(made(trainable=False), path, question)) == {
        "totals.trainable",
        "parameters.head.bias.trainable",
    }
    wider = differing(made(width=9), path, question)
    assert wider["parameters.head.weight.shape[1]"] == ("9", "8")


def test_a_model_without_an_optimizer_and_a_device_number_that_is_not_read() -> None:
    assert "optimizers" not in fastcheck.inventory(nn.Linear(2, 2))
    for wrong in (3, "adam", [3]):
        with pytest.raises(fastcheck.ConfigError, match=r"expected: a torch\.optim\.Optimizer"):
            fastcheck.inventory(nn.Linear(2, 2), wrong)
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["lr"] = torch.ones((), device="meta")
    optimizer.param_groups[0]["mine"] = object()
    group = fastcheck.inventory(model, optimizer)["optimizers"][0]["groups"][0]
    assert group["lr"] == "tensor on meta" and group["mine"] == "object"


# What the log keeps


def test_the_log_says_with_what_it_ran(tmp_path: Path) -> None:
    log = log_run(tmp_path / "log", optimizer=lambda p: torch.optim.SGD(p, lr=0.25), steps=2)
    meta = read_log(log).meta[0]
    assert meta["environment"]["versions"]["torch"] == torch.__version__
    (optimizer,) = meta["optimizers"]
    assert optimizer["type"] == "SGD" and optimizer["groups"][0]["lr"] == 0.25
    assert "blocks.0.a.weight" in optimizer["groups"][0]["parameters"]
    assert meta["format"] == 1 and meta["record"] == "full"  # what was there before still is
    assert [p.name for p in Path(log).iterdir() if p.name.endswith(".new")] == []


def test_a_stop_without_log_dir_says_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = Net()

    def poison(step: int) -> None:
        if step == 2:
            with torch.no_grad():
                model.head.weight[0] = float("nan")

    with fastcheck.install(model), pytest.raises(fastcheck.OverflowDetected) as caught:
        train(model, 5, before_step=poison)
    assert caught.value.log_path is not None
    meta = read_log(caught.value.log_path).meta[0]
    assert meta["optimizers"][0]["type"] == "SGD" and "environment" in meta


def test_a_machine_that_cannot_be_asked_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise OSError("not today")

    monkeypatch.setattr("fastcheck.reproducibility.environment.environment", fail)
    model = Net()
    with fastcheck.install(model, log_dir=tmp_path / "log"):
        train(model, 2)
    assert read_log(tmp_path / "log").meta[0]["environment"] == {"error": "not today"}


def test_an_optimizer_that_cannot_be_described_stops_nothing(tmp_path: Path) -> None:
    class Odd(torch.optim.SGD):
        broken = False

        def __getattribute__(self, name: str) -> Any:
            if name == "param_groups" and Odd.broken:
                import sys

                if sys._getframe(1).f_code.co_name == "describe_optimizer":
                    raise RuntimeError("not for you")
            return super().__getattribute__(name)

    model = Net()
    optimizer = Odd(model.parameters(), lr=0.1)
    Odd.broken = True
    with fastcheck.install(model, log_dir=tmp_path / "log") as monitor:
        train(model, 3, optimizer=optimizer)
        assert monitor.step_index == 2
    meta = read_log(tmp_path / "log").meta[0]
    assert meta["optimizers"] == [{"type": "Odd", "error": "not for you"}]


def test_a_meta_file_that_cannot_be_replaced_ends_the_log_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    model = Net()
    with fastcheck.install(model, log_dir=tmp_path / "log") as monitor:
        monkeypatch.setattr(os, "replace", fail)
        with pytest.warns(fastcheck.FastcheckWarning, match="No space left"):
            losses = train(model, 3)
        monkeypatch.undo()
        assert monitor.step_index == 2  # it still notices where steps end
    assert len(losses) == 3
    assert read_log(tmp_path / "log").meta[0]["record"] == "full"  # the old one, whole


# seed_all


def draw() -> list[Any]:
    return [random.random(), np.random.rand(), torch.rand(2).tolist(), torch.randn(1).item()]


@pytest.fixture
def generators(monkeypatch: pytest.MonkeyPatch) -> Any:
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    switches = torch.are_deterministic_algorithms_enabled()
    cudnn = torch.backends.cudnn
    cudnn_before = cudnn.deterministic, cudnn.benchmark
    for name in ("PYTHONHASHSEED", "CUBLAS_WORKSPACE_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])
    torch.use_deterministic_algorithms(switches)
    cudnn.deterministic, cudnn.benchmark = cudnn_before


def test_a_seed_is_that_of_every_generator(generators: None) -> None:
    fastcheck.seed_all(7)
    first = draw()
    fastcheck.seed_all(7)
    assert draw() == first
    fastcheck.seed_all(8)
    second = draw()
    assert all(a != b for a, b in zip(first, second))
    assert os.environ["PYTHONHASHSEED"] == "8"


def test_deterministic_or_not(generators: None, monkeypatch: pytest.MonkeyPatch) -> None:
    fastcheck.seed_all(0, deterministic=False)
    assert not torch.are_deterministic_algorithms_enabled()
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    torch.backends.cudnn.benchmark = True
    fastcheck.seed_all(0)
    assert torch.are_deterministic_algorithms_enabled()
    assert torch.backends.cudnn.deterministic and not torch.backends.cudnn.benchmark
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    fastcheck.seed_all(0)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"  # the user's own is kept


def test_a_device_that_was_used_before_is_warned_of(
    generators: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.warns(fastcheck.FastcheckWarning, match="came after a device was used"):
        fastcheck.seed_all(0)


@pytest.mark.parametrize("seed", [-1, 2**32, 1.5, "1", True, None])
def test_what_is_no_seed_says_so(seed: Any) -> None:
    with pytest.raises(fastcheck.ConfigError, match="seed can't be used"):
        fastcheck.seed_all(seed)


class Noise(Dataset[Any]):
    """Draws from Python and NumPy, which torch alone doesn't seed well in workers."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return index, random.random(), np.random.rand(), torch.rand(()).item()


def epochs(workers: int) -> list[Any]:
    seeds = fastcheck.seed_all(3, deterministic=False)
    loader = DataLoader(
        Noise(),
        batch_size=2,
        shuffle=True,
        num_workers=workers,
        worker_init_fn=seeds.worker_init,
        generator=seeds.generator(),
    )
    return [[[column.tolist() for column in batch] for batch in loader] for _ in range(2)]


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_draw_the_same_again_and_each_its_own(generators: None, workers: int) -> None:
    first = epochs(workers)
    assert epochs(workers) == first
    assert first[0] != first[1]
    drawn = [number for epoch in first for batch in epoch for number in batch[2]]
    assert len(set(drawn)) == len(drawn)  # no two workers, and no two epochs, alike


def test_a_worker_is_seeded_by_what_torch_was(generators: None) -> None:
    """For loaders that leave Python and NumPy alone; torch's own seeds them too."""
    seeds = fastcheck.seed_all(3, deterministic=False)

    def worker(base: int) -> list[float]:
        torch.manual_seed(base)
        seeds.worker_init(0)
        return [random.random(), float(np.random.rand())]

    first = worker(2**40 + 11)
    random.seed(0)
    np.random.seed(0)
    assert worker(2**40 + 11) == first
    assert all(a != b for a, b in zip(first, worker(2**40 + 12)))


def test_seeds_can_be_sent_to_a_worker(generators: None) -> None:
    seeds = pickle.loads(pickle.dumps(fastcheck.seed_all(5, deterministic=False)))
    assert seeds.seed == 5 and repr(seeds) == "Seeds(5)"
    assert seeds.generator().initial_seed() == 5
