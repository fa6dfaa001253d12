"""Checkpoints by content: odd names, wrappers, MindSpore's; and files that ask for too much."""

from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fastcheck
from fastcheck.comparison.sources.checkpoint import matching_prefixes
from fastcheck.comparison.sources.formats import format_of
from support.fuzzing.limits import limited_memory


def state() -> dict[str, torch.Tensor]:
    return {"a.weight": torch.arange(12.0).reshape(3, 4), "a.bias": torch.ones(3)}


# Names


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize(
    "name", ["m.pth.tar", "m.ckpt", "m.pt.tar", "checkpoint", "epoch=3-step=100"]
)
def test_a_torch_file_of_any_name(tmp_path: Path, name: str, legacy: bool) -> None:
    path = tmp_path / name
    torch.save(state(), path, _use_new_zipfile_serialization=not legacy)
    assert fastcheck.compare(path, state()).is_identical
    fastcheck.seal(path, state())
    assert fastcheck.verify(os.fspath(path))
    (tmp_path / "folder").mkdir()
    path.rename(tmp_path / "folder" / name)
    (tmp_path / "folder" / "config.json").write_text("{}")
    (tmp_path / "folder" / "readme.zip").write_bytes(b"PK\x03\x04 no archive")
    assert fastcheck.compare(tmp_path / "folder", state()).is_identical


def test_numpy_and_safetensors_of_any_name(tmp_path: Path) -> None:
    arrays = {name: tensor.numpy() for name, tensor in state().items()}
    with open(tmp_path / "arrays", "wb") as file:
        np.savez(file, **arrays)
    with open(tmp_path / "array.pt", "wb") as file:
        np.save(file, arrays["a.bias"])
    assert fastcheck.compare(tmp_path / "arrays", state()).is_identical
    assert fastcheck.compare(tmp_path / "array.pt", torch.ones(3)).is_identical
    safetensors = pytest.importorskip("safetensors.torch")
    safetensors.save_file(state(), tmp_path / "weights.bin")
    assert fastcheck.compare(tmp_path / "weights.bin", state()).is_identical


def field(number: int, data: bytes) -> bytes:
    """One length-delimited field of a protobuf message."""
    size, length = len(data), b""
    while size > 127:
        length += bytes([size & 127 | 128])
        size >>= 7
    return bytes([number << 3 | 2]) + length + bytes([size]) + data


@pytest.mark.parametrize("name", ["net.ckpt", "net"])
@pytest.mark.parametrize("values", [3, 3000])
def test_a_checkpoint_of_mindspore_is_refused_with_the_way_to_convert_it(
    tmp_path: Path, name: str, values: int
) -> None:
    tensor = b"\x08\x03" + field(2, b"Float32") + field(3, bytes(4 * values))
    value = field(1, b"conv1.weight") + field(2, tensor)
    path = tmp_path / name
    path.write_bytes(field(1, value) * 2)
    with pytest.raises(fastcheck.CompareError, match=r"numpy\.savez.*load_checkpoint"):
        fastcheck.compare(path, state())


@pytest.mark.parametrize("content", [b"", b"\n", b"\n\n\n\n", b"hello", b"{}", b"PK\x03\x04"])
def test_what_is_no_checkpoint_has_no_format(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    assert format_of(os.fspath(tmp_path / "file")) is None


# Wrappers


@pytest.mark.parametrize(
    "wrapped",
    [
        {"state_dict": state(), "epoch": 3},
        {"model": {f"module.{k}": v for k, v in state().items()}},
        {f"module.{k}": v for k, v in state().items()},
        {"model_state_dict": {f"_orig_mod.module.{k}": v for k, v in state().items()}},
        {"net": state(), "ema": {k: v + 1 for k, v in state().items()}},
    ],
)
def test_a_wrapper_of_one_side_is_looked_through(tmp_path: Path, wrapped: dict[str, Any]) -> None:
    torch.save(wrapped, tmp_path / "wrapped.pt")
    for sides in ((tmp_path / "wrapped.pt", state()), (state(), tmp_path / "wrapped.pt")):
        comparison = fastcheck.compare(*sides, accept=["missing", "hyper-parameters"])
        assert comparison.agrees and comparison.counts["weights"]["same"] == 2
        assert any("names are those below" in note for note in comparison.notes)


def test_names_stay_where_both_sides_have_them() -> None:
    names = ["model.a.weight", "model.b.weight", "lm_head.weight"]
    assert matching_prefixes(names, names) == ("", "")
    assert matching_prefixes(names[:2], names) == ("", "")
    assert matching_prefixes(["encoder.w"], ["decoder.w"]) == ("", "")
    assert matching_prefixes(["state_dict.model.w"], ["model.w"]) == ("state_dict.", "")
    assert matching_prefixes(["module.w"], ["model.w"]) == ("module.", "model.")


# Files that ask for more than they hold


def test_an_archive_whose_header_asks_for_more_than_it_holds(tmp_path: Path) -> None:
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        header, {"descr": "<f4", "fortran_order": False, "shape": (1 << 33,)}
    )
    with zipfile.ZipFile(tmp_path / "bomb.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("w.npy", header.getvalue() + bytes(4096))
    with limited_memory(1 << 28):
        comparison = fastcheck.compare(tmp_path / "bomb.npz", {"w": torch.ones(4)})
    assert comparison.counts["weights"] == {"unreadable": 1}
    assert "34,359,738,368" in str(comparison.rows[0])


def test_an_archive_that_no_memory_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez_compressed(tmp_path / "big.npz", w=np.zeros(1 << 20, np.float32))
    monkeypatch.setattr("fastcheck.comparison.sources.files._available_bytes", lambda: 1 << 20)
    comparison = fastcheck.compare(tmp_path / "big.npz", {"w": torch.zeros(1 << 20)})
    assert comparison.counts["weights"] == {"unreadable": 1}
    assert "of memory are free" in str(comparison.rows[0])


def test_lists_within_lists_without_end(tmp_path: Path) -> None:
    bomb: list[Any] = [1]
    for _ in range(30):
        bomb = [bomb] * 10
    torch.save({"bomb": bomb, **state()}, tmp_path / "bomb.pt")
    with limited_memory(1 << 31), pytest.MonkeyPatch.context() as patch:
        patch.setattr("fastcheck.comparison.sources.files._MAX_LEAVES", 100_000)
        with pytest.raises(fastcheck.CompareError, match="more than 100,000 values"):
            fastcheck.compare(tmp_path / "bomb.pt", state())


def test_a_storage_repeated_by_its_strides(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1).expand(1 << 20, 1 << 20)}, tmp_path / "wide.pt")
    comparison = fastcheck.compare(tmp_path / "wide.pt", {"w": torch.ones(4)})
    assert comparison.counts["weights"] == {"unreadable": 1}
    small = {"w": torch.ones(1).expand(100, 100)}
    torch.save(small, tmp_path / "small.pt")
    assert fastcheck.compare(tmp_path / "small.pt", small).is_identical


def test_a_member_of_an_npz_that_is_no_array_is_said(tmp_path: Path) -> None:
    np.savez(tmp_path / "w.npz", w=np.ones(3, np.float32))
    with zipfile.ZipFile(tmp_path / "w.npz", "a") as archive:
        archive.writestr("note.txt", "by hand")
    weights = {"w": torch.ones(3), "note.txt": torch.ones(1)}
    counts = fastcheck.compare(tmp_path / "w.npz", weights).counts["weights"]
    assert counts == {"same": 1, "unreadable": 1}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_in_a_file_is_said(tmp_path: Path) -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    torch.save({"w": torch.ones(3), "n": nested}, tmp_path / "w.pt")
    counts = fastcheck.compare(tmp_path / "w.pt", tmp_path / "w.pt", trust=True).counts["weights"]
    assert counts == {"same": 1, "unreadable": 1}


def test_the_list_of_an_npz_is_not_read_for_each_member(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = {f"w{number}": np.full(3, number, np.float32) for number in range(50)}
    np.savez(tmp_path / "many.npz", **arrays)
    opened = []
    read = zipfile.ZipFile._RealGetContents  # type: ignore[attr-defined]  # typeshed lacks it
    monkeypatch.setattr(
        zipfile.ZipFile, "_RealGetContents", lambda self: (opened.append(self), read(self))
    )
    others = {name: torch.from_numpy(array) for name, array in arrays.items()}
    assert fastcheck.compare(tmp_path / "many.npz", others).is_identical
    assert len(opened) < 5


@pytest.mark.parametrize("kind", ["fifo", "device"])
@pytest.mark.parametrize("name", ["w.pt", "w.npy", "w.npz", "w.safetensors", "dump.json", "e.json"])
def test_what_is_no_regular_file(tmp_path: Path, name: str, kind: str) -> None:
    if kind == "fifo":
        os.mkfifo(tmp_path / name)
    else:
        (tmp_path / name).symlink_to("/dev/zero")
    with pytest.raises(fastcheck.CompareError):
        fastcheck.compare(tmp_path / name, state())
    with pytest.raises(fastcheck.CompareError):
        fastcheck.compare(tmp_path, state())


# Dumps


def test_a_dump_with_a_broken_header_is_an_error_that_names_it(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    for name in ("a", "b"):
        with fastcheck.Dumper(tmp_path / name, step=0, tensors=True):
            torch.nn.functional.gelu(torch.ones(4) if name == "a" else torch.zeros(4))
    assert not fastcheck.compare(tmp_path / "a", tmp_path / "b").agrees
    [shard] = (tmp_path / "a").rglob("tensors-*.safetensors")
    whole = shard.read_bytes()
    for broken in (b"\xff" * 8 + whole[8:], whole[:8] + b"[" + whole[9:], whole[:20], b""):
        shard.write_bytes(broken)
        with pytest.raises(fastcheck.CompareError, match="tensors-00000"):
            fastcheck.compare(tmp_path / "a", tmp_path / "b")
    shard.unlink()
    os.mkfifo(shard)
    fastcheck.compare(tmp_path / "a", tmp_path / "b")  # by its statistics


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_text_in_place_of_a_checkpoint_is_said(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"model.{suffix}"
    for text, said in (
        (
            "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n",
            "git lfs pull",
        ),
        ("<!DOCTYPE html>\n<html>", "text, which begins with '<!DOCTYPE html>'"),
        ("", "it is empty"),
    ):
        path.write_text(text)
        with pytest.raises(fastcheck.CompareError, match=said):
            fastcheck.compare(path, {"w": torch.ones(2)})


def test_a_link_to_nothing_is_said(tmp_path: Path) -> None:
    (tmp_path / "model.pt").symlink_to("step7.pt")
    with pytest.raises(fastcheck.CompareError, match=r"is a link to step7\.pt, which is not"):
        fastcheck.compare(tmp_path / "model.pt", {"w": torch.ones(2)})
