"""The files of a dump: valid, complete, in bounded memory; write errors do not end training."""

from __future__ import annotations

import errno
import json
import os
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import fastcheck
from fastcheck.cli.main import main
from fastcheck.dump import dump_writer
from fastcheck.dump.storage import record_writer, shards
from fastcheck.dump.storage.files import StoredValues, read_calls, read_index, value_of
from fastcheck.dump.storage.shards import ShardWriter
from support.processes import run_python
from support.programs.command_line import strict
from support.programs.dumping import calls, dumped_run, index, log, place

safetensors = pytest.importorskip("safetensors")


def test_the_directory_holds_a_log_an_index_and_whole_safetensors(tmp_path: Path) -> None:
    dumped_run(tmp_path, steps=2, tensors=True)
    for step in (0, 1):
        names = {path.name for path in place(tmp_path, step).iterdir()}
        assert {"index.json", "calls.jsonl", "meta-rank0.json", "sites-rank0.jsonl"} <= names
        assert "records-rank0-000000.bin" in names and "tensors-00000.safetensors" in names
        assert not [name for name in names if name.endswith((".part", ".new"))]
    said = index(tmp_path)
    assert said["is_complete"] and said["fastcheck"] == "dump" and said["step"] == 0
    assert said["calls"] == len(calls(tmp_path)) and said["records"] == len(log(tmp_path).records)
    assert set(log(tmp_path, 1).records["step"].tolist()) == {1}
    meta = strict((place(tmp_path) / "meta-rank0.json").read_text())
    assert meta["environment"]["fastcheck"] == "environment"
    assert meta["optimizers"][0]["type"] == "AdamW"
    assert meta["optimizers"][0]["groups"][0]["parameters"][0] == "blocks.0.a.weight"


def test_every_line_is_strict_json_whatever_the_arguments(tmp_path: Path) -> None:
    with fastcheck.Dumper(tmp_path):
        x = torch.full((2, 2), float("inf"))
        x.masked_fill(x > 0, float("nan")).clamp(min=-float("inf"))
    lines = calls(tmp_path)
    assert {line["op"]: line["args"] for line in lines if "args" in line}[
        "aten.masked_fill.Scalar"
    ] == {"value": "nan"}


def test_the_commands_read_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dumped_run(tmp_path, steps=1)
    assert main(["show", str(tmp_path / "step0"), "--limit", "0"]) == 0
    shown = capsys.readouterr().out
    assert "aten.addmm #0 output" in shown
    assert main(["export", str(tmp_path / "step0"), str(tmp_path / "out.csv")]) == 0
    assert "aten.addmm" in (tmp_path / "out.csv").read_text()


def test_equal_contents_are_written_once(tmp_path: Path) -> None:
    x = torch.randn(256, 256)
    with fastcheck.Dumper(tmp_path, tensors=True):
        y = x + 1
        y.exp()
        x.clone()
    said = index(tmp_path)["tensors"]
    assert said["bytes"] == 3 * x.numel() * 4  # x, y and exp(y)
    assert said["shared"] == 3


def test_the_same_memory_in_two_shapes_is_two_values(tmp_path: Path) -> None:
    x = torch.arange(16.0).reshape(4, 4)
    with fastcheck.Dumper(tmp_path, tensors=True):
        x.exp()
        x.t().exp()
    load = StoredValues(os.fspath(place(tmp_path)))
    slots = [value_of(line["in"][0]) for line in calls(tmp_path) if line["op"] == "aten.exp"]
    read = [load.load(*slot, "float32") for slot in slots if slot is not None]
    assert torch.equal(read[0], x) and torch.equal(read[1], x.t())


@pytest.mark.parametrize("size", ["64KiB", "1MiB"])
def test_values_survive_shards_sizes_and_a_queue_that_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: str
) -> None:
    monkeypatch.setattr(shards, "_SHARD_BYTES", 200_000)
    monkeypatch.setattr(shards, "_LARGE_BYTES", 50_000)
    given: list[torch.Tensor] = []
    dtypes = [torch.float32, torch.bool, torch.float16, torch.int64, torch.complex64, torch.uint8]
    with fastcheck.Dumper(tmp_path, tensors=True, memory=size):
        for number in range(60):
            rows = [1, 17, 300][number % 3]
            x = torch.randn(rows, 37, generator=torch.Generator().manual_seed(number))
            x = (x * 50).to(dtypes[number % 6])
            x = x.t() if number % 2 else x
            given.append(x.clone())
            x.clone()
            x.zero_()  # what was put is what it was then
    load = StoredValues(os.fspath(place(tmp_path)))
    clones = [c for c in read_calls(os.fspath(place(tmp_path))) if c.get("op") == "aten.clone"]
    assert len(clones) == 120
    for x, call in zip(given, clones[1::2]):
        slot = value_of(call["in"][0])
        assert slot is not None
        assert torch.equal(load.load(*slot, str(x.dtype)[6:]), x)
    assert len(index(tmp_path)["tensors"]["files"]) > 4


def test_what_waits_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that takes nothing holds the training up; memory doesn't grow."""
    may_write = threading.Event()

    def slow(descriptor: int, data: Any) -> None:
        may_write.wait()
        original(descriptor, data)

    original = shards.write_all
    monkeypatch.setattr(shards, "write_all", slow)
    writer = ShardWriter(os.fspath(tmp_path), memory_bytes=1_000_000)

    def put() -> None:
        for number in range(20):
            writer.put(torch.full((50_000,), float(number)))

    thread = threading.Thread(target=put)
    thread.start()
    while writer._waiting_bytes < 1_000_000:
        time.sleep(0.01)
    thread.join(0.2)  # time for a tensor too many
    assert thread.is_alive()
    most = writer._waiting_bytes
    may_write.set()
    thread.join()
    writer.close()
    assert writer.problem is None and most == 1_000_000
    written = safetensors.safe_open(tmp_path / writer.files[0], framework="pt")
    assert all(float(written.get_tensor(str(n))[7]) == n for n in range(20))


def test_a_large_tensor_is_not_cloned(tmp_path: Path) -> None:
    code = """
import resource, sys, torch, fastcheck
x = torch.ones(40, 1 << 20)  # 160 MiB
y = torch.ones(1 << 20, 40).t()
x + 0
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
with fastcheck.Dumper(sys.argv[1], tensors=True, memory="64MiB"):
    x.sum()
    y.sum()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""
    done = run_python("-c", code, tmp_path)
    assert int(done.stdout) < 128, done.stdout


def test_an_existing_step_is_refused_and_overwritten_only_when_told(tmp_path: Path) -> None:
    dumped_run(tmp_path, steps=1, tensors=True)
    before = sorted(path.name for path in place(tmp_path).iterdir())
    (place(tmp_path) / "notes.txt").write_text("mine")
    with pytest.raises(fastcheck.ConfigError, match="overwrite=True"):
        dumped_run(tmp_path, steps=1)
    assert sorted(p.name for p in place(tmp_path).iterdir()) == sorted([*before, "notes.txt"])
    dumped_run(tmp_path, steps=1, overwrite=True, level="module")
    assert (place(tmp_path) / "notes.txt").read_text() == "mine"
    assert not list(place(tmp_path).glob("*.safetensors"))
    assert {line["kind"] for line in calls(tmp_path)} == {"module", "stored", "gradients"}


def full_disk(monkeypatch: pytest.MonkeyPatch, name: str, count: int) -> None:
    """From the so many-th write to a file of this name on the disk is full."""
    real, writes = os.write, [0]

    def write(descriptor: int, data: Any) -> int:
        if name in os.readlink(f"/proc/self/fd/{descriptor}"):
            writes[0] += 1
            if writes[0] > count:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor, data)

    monkeypatch.setattr(os, "write", write)


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="needs the names of descriptors")
@pytest.mark.parametrize(
    ("name", "count"),
    [
        *((name, count) for name in ("calls", "records", "tensors") for count in (0, 2)),
        ("sites", 0),
        ("sites", 1),
        ("meta", 0),
    ],
)
@pytest.mark.parametrize("level", ["op", "module"])
def test_a_full_disk_ends_the_dump_and_not_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, count: int, level: str
) -> None:
    # So that there is something to write before the end.
    monkeypatch.setattr(record_writer, "_SLOTS", 16)
    monkeypatch.setattr(dump_writer, "_LINES_AT_ONCE", 8)
    plain, _ = dumped_run(None, steps=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with monkeypatch.context() as patch:
            full_disk(patch, name, count)
            losses, _ = dumped_run(tmp_path, steps=1, level=level, tensors=True)
    assert losses == plain
    said = [str(w.message) for w in caught if issubclass(w.category, fastcheck.FastcheckWarning)]
    assert len(said) == 1, said
    assert os.fspath(place(tmp_path) / name) in said[0]
    assert os.strerror(errno.ENOSPC) in said[0] and "Training goes on" in said[0]
    if name == "meta":
        return  # nothing was begun
    # What was complete stays readable.
    assert not index(tmp_path)["is_complete"] and index(tmp_path)["problem"] in said[0]
    calls(tmp_path)
    if (name, count) not in (("records", 0), ("sites", 0)):
        assert len(log(tmp_path).records) >= 16
    for path in place(tmp_path).glob("*.safetensors"):
        safetensors.safe_open(path, framework="pt").keys()


def test_a_directory_that_cannot_be_made_ends_the_dump_and_not_the_training(
    tmp_path: Path,
) -> None:
    (tmp_path / "dump").write_text("a file in the way")
    plain, _ = dumped_run(None, steps=1)
    with pytest.warns(fastcheck.FastcheckWarning, match=r"dump.*Training goes on"):
        losses, _ = dumped_run(tmp_path / "dump", steps=1)
    assert losses == plain


@pytest.mark.parametrize("name", ["begin", "end"])
def test_a_fault_of_its_own_ends_the_dump_and_not_the_training(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fastcheck.dump.op_calls import PythonOpCalls

    def broken(*args: Any) -> Any:
        raise ZeroDivisionError("a fault")

    plain, _ = dumped_run(None, steps=1)
    monkeypatch.setattr(PythonOpCalls, name, broken)
    with pytest.warns(fastcheck.FastcheckWarning, match="ZeroDivisionError: a fault") as caught:
        losses, _ = dumped_run(tmp_path, steps=1, tensors=True)
    assert "/tests/support/" in caught[0].filename  # the line of the model or of the step
    assert losses == plain
    assert not index(tmp_path)["is_complete"]


def test_a_killed_process_leaves_what_was_complete(tmp_path: Path) -> None:
    code = """
import os, sys, time, torch, fastcheck
from pathlib import Path
from fastcheck.dump import dump_writer
from fastcheck.dump.storage import record_writer, shards
record_writer._SLOTS, dump_writer._LINES_AT_ONCE, shards._SHARD_BYTES = 8, 4, 4096
with fastcheck.Dumper(sys.argv[1], tensors=True):
    x = torch.ones(64)
    for i in range(100):
        x = x + 1
    while len(list(Path(sys.argv[1]).rglob("*.safetensors"))) < 3:  # a thread writes them
        time.sleep(0.01)
    os.kill(os.getpid(), 9)
"""
    assert run_python("-c", code, tmp_path).returncode == -9
    path = os.fspath(place(tmp_path))
    lines = list(read_calls(path))
    assert len(lines) > 90 and read_index(path) == {}
    assert len(log(tmp_path).records) > 150
    files, loaded = StoredValues(path), 0
    for line in lines:
        slot = value_of(line["out"][0])
        if slot is not None and files.has(slot[0]):
            assert float(files.load(*slot, "float32")[0]) == 1 + (line["n"])
            loaded += 1
    assert loaded > 10


def test_without_safetensors_reading_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fastcheck.Dumper(tmp_path, tensors=True):
        torch.ones(3) + 1
    monkeypatch.setitem(sys.modules, "safetensors", None)
    slot = value_of(calls(tmp_path)[0]["out"][0])
    assert slot is not None
    with pytest.raises(fastcheck.CompareError, match=r"fastcheck\[tools\]"):
        StoredValues(os.fspath(place(tmp_path))).load(*slot, "float32")
    assert json.loads((place(tmp_path) / "index.json").read_text())["is_complete"]
