"""No secret of the environment is recorded, and a seal says nothing of the place it was made at."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import fastcheck
from fastcheck.fleet.store import Folder
from support.programs.compare_runs import log_run
from support.programs.training import Net

pytestmark = pytest.mark.usefixtures("fresh_start")

SECRET = "hunter2"


@pytest.mark.parametrize(
    "name",
    [
        "ASCEND_API_KEY",
        "FASTCHECK_W_AUTH",
        "HCCL_PWD",
        "HIP_PAT",
        "MKL_COOKIE",
        "NCCL_ACCESS_KEY_ID",
        "NCCL_Credentials",
        "PYTORCH_PASSPHRASE",
        "TORCHX_DB_PASSWD",
        "TORCH_HF_TOKEN",
        "TORCH_PASSWORD_2",
        "TORCH_SECRETS",
        "TRITON_DB_PASS",
        "XLA_BEARER",
    ],
)
def test_a_variable_whose_name_says_secret_is_left_out(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, SECRET)
    assert name not in fastcheck.environment()["variables"]


@pytest.mark.parametrize(
    ("value", "kept"),
    [
        (f"https://me:{SECRET}@host:8080/x", "https://host:8080/x"),
        (f"https://{SECRET}@host/x", "https://host/x"),
        (f"redis://:{SECRET}@host/0", "redis://host/0"),
        (f"redis://me:{SECRET}@x@host/0", "redis://host/0"),
        (f"redis://me:{SECRET}/{SECRET}@host/0", "redis://host/0"),
        (f"a=git+ssh://me:{SECRET}@host/x b", "a=git+ssh://host/x b"),
        (f"http://a:{SECRET}@one/,http://b:{SECRET}@two/", "http://one/,http://two/"),
        (f"https://host/x?api_key={SECRET}&y=1", "https://host/x?api_key=***&y=1"),
        (f"https://host/x?y=1&X-Amz-Signature={SECRET}", "https://host/x?y=1&X-Amz-Signature=***"),
        (f"password={SECRET};y=1", "password=***;y=1"),
        (f"--token {SECRET} --y", "--token *** --y"),
        (f"Authorization: Bearer {SECRET}", "Authorization: ***"),
        ("tcp://host:29500/path/@x", "tcp://host:29500/path/@x"),
        ("me@host", "me@host"),
        ("cache_size=3,key", "cache_size=3,key"),
    ],
)
def test_credentials_are_cut_out_of_a_value(
    value: str, kept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_PLACE", value)
    assert fastcheck.environment()["variables"]["TORCH_PLACE"] == kept


def test_settings_of_kernels_are_kept_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "NCCL_DEBUG": "INFO",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,max_split_size_mb:128",
        "TORCHINDUCTOR_MAX_AUTOTUNE": "1",
        "XLA_FLAGS": "--xla_dump_to=/a --xla_gpu_autotune_level=2",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    assert fastcheck.environment()["variables"].items() >= settings.items()


def test_no_file_of_a_run_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_HUB_TOKEN", SECRET)
    monkeypatch.setenv("ASCEND_MIRROR", f"https://me:{SECRET}@host")

    def optimizer(parameters: object) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": parameters, "db": f"sql://me:{SECRET}@host"}], lr=0.1)

    log_run(tmp_path / "log", optimizer=optimizer, steps=2)
    model = Net()
    with fastcheck.Dumper(tmp_path / "dump"):
        model(torch.ones(2, 8))
    torch.save(model.state_dict(), tmp_path / "model.pt")
    fastcheck.seal(tmp_path / "model.pt", model, step=1)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert (
        sum(b"CUDA" in path.read_bytes() or b"versions" in path.read_bytes() for path in files) > 2
    )
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []


def test_a_seal_has_nothing_of_the_place(tmp_path: Path) -> None:
    model = Net()
    torch.save(model.state_dict(), tmp_path / "model.pt")
    fastcheck.seal(tmp_path / "model.pt", model, step=1)
    sealed = json.loads((tmp_path / "model.pt.fastcheck.json").read_text())
    assert "versions" in sealed["environment"] and "where" not in sealed["environment"]
    assert fastcheck.verify(str(tmp_path / "model.pt"))


def test_the_url_of_a_fleet_is_printed_without_its_password() -> None:
    with pytest.raises(fastcheck.LogError) as caught:
        Folder(f"nosuch://me:{SECRET}@bucket/fleet")
    assert "nosuch://bucket/fleet" in str(caught.value) and SECRET not in str(caught.value)
