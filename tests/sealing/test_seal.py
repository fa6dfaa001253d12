"""seal() and verify(): every file format, every kind of difference, and non-finite weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Callable

import pytest
import torch
from torch import nn

import fastcheck
from fastcheck.cli.main import main

pytestmark = pytest.mark.usefixtures("fresh_start")


class Tied(nn.Module):
    """With a tied weight, a buffer, a bfloat16 part, a scalar and an empty tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.norm = nn.BatchNorm1d(8)
        self.layer = nn.Linear(8, 8, dtype=torch.bfloat16)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("nothing", torch.zeros(0, 3))


def save_torch(model: nn.Module, name: str) -> str:
    torch.save(model.state_dict(), name)
    return name


def save_wrapped(model: nn.Module, name: str) -> str:
    torch.save({"epoch": 3, "state_dict": model.state_dict()}, name)
    return name


def save_safetensors(model: nn.Module, name: str) -> str:
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_model(model, name)
    return name


def save_shards(model: nn.Module, name: str) -> str:
    safetensors = pytest.importorskip("safetensors.torch")
    folder = Path(name)
    folder.mkdir()
    state = {key: value for key, value in model.state_dict().items() if key != "head.weight"}
    keys = sorted(state)
    for number, part in enumerate((keys[:3], keys[3:])):
        tensors = {key: state[key] for key in part}
        safetensors.save_file(tensors, str(folder / f"model-{number}.safetensors"))
    return name


SAVES: dict[str, tuple[Callable[[nn.Module, str], str], str]] = {
    "pt": (save_torch, "model.pt"),
    "wrapped": (save_wrapped, "model.pth"),
    "safetensors": (save_safetensors, "model.safetensors"),
    "shards": (save_shards, "model"),
}


@pytest.mark.parametrize("kind", sorted(SAVES))
def test_what_was_sealed_is_verified(kind: str) -> None:
    model = Tied()
    save, name = SAVES[kind]
    made = fastcheck.seal(save(model, name), model, step=7)
    assert made.is_finite and made.step == 7 and not made.unsealed
    assert made.tensors.keys() == model.state_dict().keys()
    found = fastcheck.verify(name)
    assert found and found.step == 7 and found.verdict == "finite"
    assert (found.differing, found.missing, found.nonfinite, found.notes) == ({}, (), {}, ())
    assert found.equal == len(model.state_dict())
    assert main(["verify", name]) == 0


@pytest.mark.parametrize("kind", sorted(SAVES))
def test_one_flipped_bit_is_named(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    model = Tied()
    fastcheck.seal(SAVES[kind][1] if kind != "shards" else _folder("model"), model)
    with torch.no_grad():
        bits = model.layer.weight.view(torch.int16)
        bits[3, 5] ^= 1
    if kind == "shards":
        Path("model/fastcheck.json").rename("kept.json")
        Path("model").rmdir()
    SAVES[kind][0](model, SAVES[kind][1])
    if kind == "shards":
        Path("kept.json").rename("model/fastcheck.json")
    found = fastcheck.verify(SAVES[kind][1])
    assert not found and found.differing == {"layer.weight": "other values"}
    assert main(["verify", SAVES[kind][1]]) == 1
    assert "layer.weight" in capsys.readouterr().out


def _folder(name: str) -> str:
    Path(name).mkdir()
    return name


def test_other_differences() -> None:
    model = Tied()
    fastcheck.seal("model.pt", model)
    state: dict[str, Any] = dict(model.state_dict())
    state["layer.weight"] = state["layer.weight"].float()
    state["norm.weight"] = torch.ones(9)
    del state["norm.bias"]
    state["extra"] = torch.tensor([1.0, float("inf"), float("nan")])
    torch.save(state, "model.pt")
    found = fastcheck.verify("model.pt")
    assert found.differing == {
        "layer.weight": "dtype float32, sealed as bfloat16",
        "norm.weight": "9 elements, sealed as 8",
    }
    assert found.missing == ("norm.bias",)
    assert found.nonfinite == {"extra": 2}
    assert json.loads(json.dumps(found.to_dict()))["ok"] is False


def test_weights_that_are_not_finite_are_marked_or_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = Tied()
    with torch.no_grad():
        model.layer.bias[2] = float("nan")
    with pytest.raises(fastcheck.NonFiniteWeightsError, match=r"layer\.bias"):
        fastcheck.seal("model.pt", model, nonfinite="refuse")
    assert not list(Path().iterdir())
    torch.save(model.state_dict(), "model.pt")
    made = fastcheck.seal("model.pt", model)
    assert made.nonfinite == ("layer.bias",) and not made.is_finite
    found = fastcheck.verify("model.pt")
    assert not found and found.verdict == "non-finite" and found.nonfinite == {"layer.bias": 1}
    assert found.differing == {}
    for options in ([], ["--json"]):
        assert main(["verify", "model.pt", *options]) == 1
        assert "layer.bias" in capsys.readouterr().out


def test_layouts_and_state_dicts_are_the_same() -> None:
    weight = torch.randn(6, 4)
    a = fastcheck.seal("a.pt", {"w": weight})
    b = fastcheck.seal("b.pt", {"w": weight.t().contiguous().t()})
    assert a.tensors == b.tensors


def test_what_cannot_be_read_is_listed() -> None:
    made = fastcheck.seal("a.pt", {"w": torch.ones(2), "s": torch.ones(3).to_sparse()})
    assert list(made.tensors) == ["w"] and "strided" in made.unsealed["s"]
    torch.save({"w": torch.ones(2)}, "a.pt")
    found = fastcheck.verify("a.pt")
    assert found and "s was not sealed" in found.notes[0]


@pytest.mark.parametrize(
    "change",
    [
        lambda content: "",
        lambda content: "[]",
        lambda content: json.dumps({**content, "format": 3}),
        lambda content: json.dumps({**content, "tensors": [1]}),
        lambda content: json.dumps({**content, "tensors": {"w": {"dtype": "float32"}}}),
        lambda content: json.dumps({k: v for k, v in content.items() if k != "step"}),
        lambda content: json.dumps({**content, "unsealed": None}),
    ],
)
def test_a_damaged_seal_is_a_clear_error(change: Callable[[Any], str]) -> None:
    fastcheck.seal(save_torch(Tied(), "model.pt"), Tied())
    path = Path("model.pt.fastcheck.json")
    path.write_text(change(json.loads(path.read_text())))
    with pytest.raises(fastcheck.CompareError, match="seal"):
        fastcheck.verify("model.pt")
    assert main(["verify", "model.pt"]) == 2


def test_wrong_calls() -> None:
    with pytest.raises(fastcheck.CompareError, match="no seal"):
        fastcheck.verify(save_torch(Tied(), "model.pt"))
    with pytest.raises(fastcheck.ConfigError, match="nothing to seal"):
        fastcheck.seal("a.pt", nn.ReLU())
    with pytest.raises(fastcheck.ConfigError, match="nonfinite"):
        fastcheck.seal("a.pt", Tied(), nonfinite="ignore")
    with pytest.raises(fastcheck.ConfigError, match="step"):
        fastcheck.seal("a.pt", Tied(), step=1.5)  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(OSError):
        fastcheck.seal("not/there/a.pt", Tied())
    assert not [path for path in Path().iterdir() if path.name.endswith(".part")]


def test_a_link_to_a_checkpoint_has_its_seal(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    torch.save(model.state_dict(), tmp_path / "step7.pt")
    fastcheck.seal(tmp_path / "step7.pt", model)
    (tmp_path / "latest.pt").symlink_to("step7.pt")
    assert fastcheck.verify(str(tmp_path / "latest.pt"))
    fastcheck.seal(tmp_path / "latest.pt", nn.Linear(2, 2))
    assert not fastcheck.verify(str(tmp_path / "latest.pt")), "its own seal comes first"


def test_shards_that_are_missing_or_left_from_before_are_named(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    for number, key in enumerate(("weight", "bias"), 1):
        torch.save({key: model.state_dict()[key]}, tmp_path / f"model-{number}.pt")
    files = {"weight": "model-1.pt", "bias": "model-2.pt"}
    (tmp_path / "model.index.json").write_text(json.dumps({"weight_map": files}))
    fastcheck.seal(tmp_path, model)
    assert fastcheck.verify(str(tmp_path)).notes == ()
    torch.save({"bias": torch.zeros(2)}, tmp_path / "model-3.pt")
    found = fastcheck.verify(str(tmp_path))
    assert found.differing == {"bias": "2 tensors may be it: model-2.bias, model-3.bias"}
    assert not found and found.missing == ()
    for number in (2, 3):
        (tmp_path / f"model-{number}.pt").unlink()
    found = fastcheck.verify(str(tmp_path))
    assert found.missing == ("bias",)
    assert found.notes == ("model.index.json names files that are not there: model-2.pt",)
    for damaged in ("{}", "[]", '{"weight_map": 3}', '{"weight_map": {"bias": [1]}}', "not JSON"):
        (tmp_path / "model.index.json").write_text(damaged)
        assert fastcheck.verify(str(tmp_path)).notes == ()
