"""compare() of checkpoints: every format, every dtype, names that differ, damaged files."""

from __future__ import annotations

import json
import os
import pickle
import sys
import zipfile
from pathlib import Path
from typing import Any, Callable

import numpy as np
import pytest
import torch
from torch import nn

import fastcheck

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
FLOATS += [torch.float8_e4m3fn, torch.float8_e5m2]
CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.bool: "BOOL",
}


def state(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "layers.0.weight": torch.randn(5, 7, generator=generator),
        "layers.0.bias": torch.randn(5, generator=generator),
        "norm.weight": torch.randn(5, generator=generator),
        "norm.num_batches_tracked": torch.tensor(3),
        "empty": torch.zeros(0, 4),
    }


def save_safetensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """The format by its documentation, so that reading is not tested against its own writing."""
    pytest.importorskip("safetensors")
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, tensor in tensors.items():
        raw = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        header[name] = {
            "dtype": CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def save_pt(tensors: dict[str, torch.Tensor], path: Path) -> None:
    torch.save(tensors, path)


def save_old_pt(tensors: dict[str, torch.Tensor], path: Path) -> None:
    torch.save(tensors, path, _use_new_zipfile_serialization=False)


def save_npz(tensors: dict[str, torch.Tensor], path: Path) -> None:
    np.savez(path, **{name: tensor.numpy() for name, tensor in tensors.items()})


def save_npy(tensors: dict[str, torch.Tensor], path: Path) -> None:
    path.mkdir()
    for name, tensor in tensors.items():
        np.save(path / f"{name}.npy", tensor.numpy())


def save_shards(tensors: dict[str, torch.Tensor], path: Path) -> None:
    path.mkdir()
    items = list(tensors.items())
    for shard in range(2):
        save_safetensors(
            dict(items[shard::2]), path / f"model-0000{shard + 1}-of-00002.safetensors"
        )
    (path / "model.safetensors.index.json").write_text("{}")


Save = Callable[[dict[str, torch.Tensor], Path], None]
FORMATS: dict[str, Save] = {
    "a.pt": save_pt,
    "b.pth": save_pt,
    "old.pt": save_old_pt,
    "c.safetensors": save_safetensors,
    "d.npz": save_npz,
    "arrays": save_npy,
    "shards": save_shards,
}


@pytest.mark.parametrize("other", list(FORMATS))
@pytest.mark.parametrize("name", list(FORMATS))
def test_every_format_against_every_other(tmp_path: Path, name: str, other: str) -> None:
    reference = state()
    actual = {key: value.clone() for key, value in reference.items()}
    (tmp_path / "x").mkdir()
    FORMATS[other](reference, tmp_path / other)
    FORMATS[name](actual, tmp_path / "x" / name)
    assert fastcheck.compare(tmp_path / "x" / name, tmp_path / other).is_identical
    actual["layers.0.weight"][2, 3] += 0.25
    (tmp_path / "y").mkdir()
    FORMATS[name](actual, tmp_path / "y" / name)
    comparison = fastcheck.compare(tmp_path / "y" / name, tmp_path / other)
    found = comparison["weights"].found
    assert not comparison.agrees and found is not None
    assert found.row.name == "layers.0.weight" and found.row.reason == "the elements differ"
    elements = found.row.elements
    assert elements is not None
    assert elements.differing == 1 and elements.first == 2 * 7 + 3
    assert elements.max_abs == pytest.approx(0.25, abs=1e-6)
    assert comparison.counts["weights"]["same"] == 4


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("save", [save_pt, save_safetensors])
def test_every_float_is_read_as_it_is(tmp_path: Path, dtype: torch.dtype, save: Save) -> None:
    wide = torch.randn(300, generator=torch.Generator().manual_seed(0))
    reference = {"w": wide.to(dtype)}
    bits = (
        torch.uint8 if dtype.itemsize == 1 else {2: torch.int16, 4: torch.int32}.get(dtype.itemsize)
    )
    raw = reference["w"].view(bits or torch.int64).clone()
    raw[17] ^= 1  # the neighbour
    actual = {"w": raw.view(dtype)}
    suffix = "pt" if save is save_pt else "safetensors"
    save(reference, tmp_path / f"reference.{suffix}")
    save(actual, tmp_path / f"actual.{suffix}")
    comparison = fastcheck.compare(
        tmp_path / f"actual.{suffix}", tmp_path / f"reference.{suffix}", exact=True
    )
    assert not comparison.agrees
    found = comparison["weights"].found
    assert found is not None and found.row.elements is not None
    row = found.row
    assert (
        row.elements is not None
        and row.elements.max_ulp == 1
        and row.elements.differing == 1
        and row.elements.first == 17
    )
    assert row.actual is not None and row.actual["dtype"] == str(dtype).replace("torch.", "")


def test_arrays_that_only_some_have_names_for(tmp_path: Path) -> None:
    """Big-endian, Fortran order, and bfloat16 as ml_dtypes leaves it in a file."""
    x = torch.arange(12.0).view(3, 4)
    np.save(tmp_path / "big.npy", x.numpy().astype(">f4"))
    np.save(tmp_path / "fortran.npy", np.asfortranarray(x.numpy()))
    half = x.to(torch.bfloat16)
    np.save(tmp_path / "half.npy", half.view(torch.int16).numpy().view("V2"))
    assert fastcheck.compare(tmp_path / "big.npy", x).is_identical
    assert fastcheck.compare(tmp_path / "fortran.npy", x).is_identical
    assert fastcheck.compare(tmp_path / "half.npy", half).is_identical


def test_missing_extra_and_renamed_tensors(tmp_path: Path) -> None:
    reference, actual = state(), state()
    actual["layers.1.weight"] = torch.ones(3)
    del actual["norm.weight"]
    comparison = fastcheck.compare(actual, reference)
    assert not comparison.agrees and comparison["weights"].answer == "partly"
    assert {(one.name, one.state.name) for one in comparison.missing} == {
        ("layers.1.weight", "ONLY_ACTUAL"),
        ("norm.weight", "ONLY_REFERENCE"),
    }
    assert fastcheck.compare(actual, reference, accept="missing").agrees
    wrapped = {f"backbone.{name}": value for name, value in state().items()}
    with pytest.raises(
        fastcheck.CompareError, match=r"backbone\.layers\.0\.weight to layers\.0\.weight"
    ):
        fastcheck.compare(wrapped, reference)
    assert fastcheck.compare(wrapped, reference, rename={"backbone": ""}).is_identical
    hinted = fastcheck.compare({**wrapped, "empty": torch.zeros(0, 4)}, reference)
    assert any("If they are renamed" in note for note in hinted.notes)


def test_a_tied_weight_that_one_side_holds_once_is_told() -> None:
    words = torch.randn(5, 3)
    whole = {"head": words, "tok": words, "norm": torch.ones(3), "last": torch.ones(3)}
    comparison = fastcheck.compare({k: whole[k] for k in ("tok", "norm")}, whole)
    assert not comparison.agrees
    (note,) = (note for note in comparison.notes if "tied" in note)
    assert note.startswith("1 tensor of one side alone is equal to the bit to another of that side")
    assert "head is tok" in note and fastcheck.compare({"tok": words}, whole, accept="missing")


def test_names_of_mindspore(tmp_path: Path) -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.dense = nn.BatchNorm1d(4), nn.Linear(4, 3)

    torch.manual_seed(0)
    ours = {k: v for k, v in Layer().state_dict().items() if "num_batches" not in k}
    for value in ours.values():
        value += torch.rand_like(value)
    spelt = {
        "norm.weight": "norm.gamma",
        "norm.bias": "norm.beta",
        "norm.running_mean": "norm.moving_mean",
        "norm.running_var": "norm.moving_variance",
    }
    np.savez(tmp_path / "mindspore.npz", **{spelt.get(n, n): v.numpy() for n, v in ours.items()})
    torch.save(ours, tmp_path / "torch.pt")
    sides = (tmp_path / "mindspore.npz", tmp_path / "torch.pt")
    assert not fastcheck.compare(*sides).agrees
    assert fastcheck.compare(*sides, rename="mindspore").is_identical
    assert fastcheck.compare(*reversed(sides), rename="mindspore").is_identical


def test_optimizer_states_and_hyper_parameters_of_a_checkpoint(tmp_path: Path) -> None:
    def save(name: str, lr: float, steps: int) -> Path:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.Adam(model.parameters(), lr=lr)
        for _ in range(steps):
            optimizer.zero_grad()
            model(torch.ones(4, 3)).sum().backward()
            optimizer.step()
        path = tmp_path / f"{name}.pt"
        torch.save(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": steps},
            path,
        )
        return path

    reference = save("reference", 0.1, 2)
    assert fastcheck.compare(save("same", 0.1, 2), reference).is_identical
    comparison = fastcheck.compare(save("other", 0.2, 2), reference)
    assert [s.path for s in comparison["other values"].settings] == ["optimizer.param_groups.0.lr"]
    assert comparison["weights"].answer == "no"
    later = fastcheck.compare(save("later", 0.1, 3), reference, ask_all=True)
    assert later["optimizer states"].answer == "no"


def test_a_flipped_bit_is_named_and_what_is_missing_has_no_step() -> None:
    state = {"a": torch.ones(4), "b": torch.randn(8), "c": torch.ones(2)}
    flipped = {name: tensor.clone() for name, tensor in state.items()}
    flipped["b"].view(torch.int32)[3] ^= 1
    found = fastcheck.compare(flipped, state)
    assert found.agrees and str(found).endswith("not equal to the bit: b")
    del flipped["c"]
    assert "only in reference, 1: c" in str(fastcheck.compare(flipped, state))


def test_layouts_do_not_matter(tmp_path: Path) -> None:
    x = torch.randn(6, 4, 3, 5)
    laid = {"a": x.to(memory_format=torch.channels_last), "b": x[0, 0].t(), "c": x[:, ::2, 0]}
    plain = {name: value.contiguous() for name, value in laid.items()}
    assert fastcheck.compare(laid, plain).is_identical


def test_shapes_and_dtypes_that_differ() -> None:
    x = torch.arange(6.0)
    comparison = fastcheck.compare({"w": x.view(2, 3)}, {"w": x.view(3, 2)})
    found = comparison["weights"].found
    assert found is not None and found.row.reason == "other shapes"
    half = fastcheck.compare({"w": x.half()}, {"w": x})
    assert half["weights"].found is not None and not half.agrees
    assert half["weights"].found.row.reason == "other dtypes"
    assert fastcheck.compare({"w": x.half()}, {"w": x}, accept="dtype").verdict == "equal"


def test_what_cannot_be_read_is_named_and_the_rest_compared() -> None:
    sparse = torch.ones(2, 2).to_sparse()
    comparison = fastcheck.compare(
        {"a": torch.ones(2), "s": sparse}, {"a": torch.ones(2), "s": sparse}
    )
    assert comparison["weights"].answer == "partly" and not comparison.agrees
    assert comparison.counts["weights"] == {"same": 1, "unreadable": 1}
    assert "1 can't be read" in str(comparison)


# Files that are damaged, or that want to run something


def damage(path: Path, how: str) -> None:
    data = path.read_bytes()
    if how == "cut":
        path.write_bytes(data[: len(data) * 2 // 3])
    elif how == "empty":
        path.write_bytes(b"")
    else:
        path.write_bytes(b"\x93NUM" + os.urandom(200))


@pytest.mark.parametrize("how", ["cut", "empty", "noise"])
@pytest.mark.parametrize("name", ["a.pt", "old.pt", "c.safetensors", "d.npz", "x.npy"])
def test_a_damaged_file_is_an_error_that_names_it(tmp_path: Path, name: str, how: str) -> None:
    path = tmp_path / name
    if name == "x.npy":
        np.save(path, np.arange(1000.0))
    else:
        FORMATS[name]({"w": torch.randn(1000)}, path)
    damage(path, how)
    with pytest.raises(fastcheck.CompareError) as caught:
        fastcheck.compare(path, {"w": torch.randn(1000), "tensor": torch.ones(1)})
    assert str(path) in str(caught.value) and "expected:" in str(caught.value)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [4], "data_offsets": [0, 12]},
        {"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [4], "data_offsets": [16, 0]},
        {"dtype": "F32", "shape": [4], "data_offsets": [-8, 8]},
        {"dtype": "F32", "shape": [400], "data_offsets": [0, 1600]},
        {"dtype": "F32", "shape": "four", "data_offsets": [0, 16]},
        {"shape": [4]},
        [],
    ],
)
def test_a_safetensors_header_that_lies_is_an_error(tmp_path: Path, entry: object) -> None:
    text = json.dumps({"w": entry}).encode()
    path = tmp_path / "bad.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(16))
    with pytest.raises(fastcheck.CompareError, match=r"bad\.safetensors"):
        fastcheck.compare(path, {"w": torch.ones(4)})


def test_without_the_package_it_says_which_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_safetensors(state(), tmp_path / "a.safetensors")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(fastcheck.CompareError, match=r"fastcheck\[tools\]"):
        fastcheck.compare(tmp_path / "a.safetensors", state())


class Runs:
    """What a pickle may bring along."""

    def __init__(self, where: str) -> None:
        self.where = where

    def __reduce__(self) -> Any:
        return os.mkdir, (self.where,)


def test_nothing_that_a_file_brings_along_is_run(tmp_path: Path) -> None:
    mark = tmp_path / "was here"
    bad = {"w": torch.ones(2), "x": Runs(os.fspath(mark))}
    torch.save(bad, tmp_path / "bad.pt")
    with pytest.raises(fastcheck.CompareError, match="would run code") as caught:
        fastcheck.compare(tmp_path / "bad.pt", {"w": torch.ones(2)})
    assert "--trust" in str(caught.value) and not mark.exists()
    objects = np.empty(1, object)
    objects[0] = Runs(os.fspath(mark))
    np.save(tmp_path / "bad.npy", objects, allow_pickle=True)
    np.savez(tmp_path / "bad.npz", w=objects)
    with pytest.raises(fastcheck.CompareError):
        fastcheck.compare(tmp_path / "bad.npy", torch.ones(2))
    archive = fastcheck.compare(tmp_path / "bad.npz", {"w": torch.ones(2)})
    assert archive.counts["weights"] == {"unreadable": 1}
    assert not mark.exists()
    with (tmp_path / "plain.pt").open("wb") as file:
        pickle.dump(bad["x"], file)
    with pytest.raises(fastcheck.CompareError):
        fastcheck.compare(tmp_path / "plain.pt", {"w": torch.ones(2)})
    assert not mark.exists()
    torch.save({"w": torch.ones(2), "x": Runs(os.fspath(mark))}, tmp_path / "asked.pt")
    fastcheck.compare(tmp_path / "asked.pt", {"w": torch.ones(2)}, trust=True)
    assert mark.exists()


def test_pickled_arguments_beside_the_weights_are_left_out_and_said(tmp_path: Path) -> None:
    mark = tmp_path / "was here"
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    save_safetensors(state(), folder / "model.safetensors")
    torch.save(Runs(os.fspath(mark)), folder / "training_args.bin")
    comparison = fastcheck.compare(folder, state())
    assert comparison.is_identical and not mark.exists()
    assert any("training_args.bin is left out" in note for note in comparison.notes)
    (folder / "more.pt").write_bytes(b"damaged")  # that is another matter
    with pytest.raises(fastcheck.CompareError, match=r"more\.pt"):
        fastcheck.compare(folder, state())


def test_an_archive_with_paths_in_it_writes_nowhere(tmp_path: Path) -> None:
    path = tmp_path / "slip.npz"
    np.save(tmp_path / "x.npy", np.ones(2))
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(tmp_path / "x.npy", "../../slipped.npy")
    fastcheck.compare(path, {"../../slipped": torch.ones(2).double()})
    assert not list(tmp_path.parent.glob("slipped*"))
