"""Where a rank runs: by a variable, by Megatron's state, by the mesh of DTensors, or unknown."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

import fastcheck
from fastcheck.reproducibility.placement import placement


class Placed:
    def __init__(self, is_whole: bool) -> None:
        self._is_whole = is_whole

    def is_replicate(self) -> bool:
        return self._is_whole


class Mesh:
    mesh_dim_names = ("dp_replicate", "dp_shard", "tp")
    ndim = 3

    def get_local_rank(self, dimension: int) -> int:
        return (4, 1, 0)[dimension]


class Meshed(torch.nn.Module):
    """Its parameter has the attributes of a DTensor."""

    def parameters(self, recurse: bool = True) -> Any:
        placed = [Placed(True), Placed(False), Placed(False)]
        device = torch.device("cpu")
        return iter([types.SimpleNamespace(device_mesh=Mesh(), placements=placed, device=device)])


def test_of_one_process_the_parallel_part_is_unknown() -> None:
    found = placement([torch.nn.Linear(2, 2)])
    assert found["device"] == "cpu" and found["host"]
    assert found["coordinates"] is found["replica_group"] is found["world_size"] is None


def test_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTCHECK_PLACEMENT", "dp=3, tp=1,pp=0")
    found = placement([])
    assert found["coordinates"] == {"dp": 3, "tp": 1, "pp": 0}
    assert found["replica_group"] == "pp=0 tp=1"
    monkeypatch.setenv("FASTCHECK_PLACEMENT", "dp=3")
    assert placement([])["replica_group"] == "all"
    monkeypatch.setenv("FASTCHECK_PLACEMENT", "nonsense")
    assert placement([])["coordinates"] is None


def test_a_mesh() -> None:
    found = placement([Meshed()])
    assert found["coordinates"] == {"dp_replicate": 4, "dp_shard": 1, "tp": 0}
    assert found["replica_group"] == "dp_shard=1 tp=0"


def test_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    state = types.ModuleType("megatron.core.parallel_state")
    ranks = {"data": 5, "tensor_model": 2, "pipeline_model": 1}
    values: dict[str, Any] = {f"get_{name}_parallel_rank": at for name, at in ranks.items()}
    for name, at in values.items():
        setattr(state, name, lambda at=at: at)
    state.model_parallel_is_initialized = lambda: True  # type: ignore[attr-defined]  # a stand-in
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", state)
    found = placement([])
    assert found["coordinates"] == {"dp": 5, "tp": 2, "pp": 1}
    assert found["replica_group"] == "pp=1 tp=2"


def test_the_launchers_name_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    assert placement([])["run"] == "4711"


def test_the_log_has_it(tmp_path: Path) -> None:
    monitor = fastcheck.install(torch.nn.Linear(2, 2), log_dir=tmp_path)
    monitor.remove()
    meta = json.loads((tmp_path / "meta-rank0.json").read_text())
    assert meta["placement"]["device"] == "cpu"
