"""Pickles of checkpoints that try to run code, or to change the program, when they are read."""

from __future__ import annotations

import copyreg
import enum
import os
import pickle
import struct
import tarfile
import warnings
from pathlib import Path
from typing import Any, Callable

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import filesystem, metadata

import fastcheck
from fastcheck.cli.main import main
from support.processes import run_python

pytestmark = pytest.mark.usefixtures("fresh_start")


def state() -> dict[str, torch.Tensor]:
    return {"w": torch.arange(6.0).reshape(2, 3), "half": torch.ones(3).half()}


def save(folder: str = "saved") -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of one process alone
        dcp.save(state(), checkpoint_id=folder)
    fastcheck.seal(folder, state())


def text(value: str) -> bytes:
    return pickle.BINUNICODE + struct.pack("<I", len(value)) + value.encode()


def named(module: str, name: str) -> bytes:
    """The opcodes that put a global on the stack."""
    return text(module) + text(name) + pickle.STACK_GLOBAL


def built(module: str, name: str, attributes: bytes) -> bytes:
    """Those that set attributes of it: BUILD with the state of slots."""
    return named(module, name) + pickle.NONE + attributes + pickle.TUPLE2 + pickle.BUILD


def mapping(key: str, value: bytes) -> bytes:
    return pickle.EMPTY_DICT + text(key) + value + pickle.SETITEM


def put_before_the_metadata(opcodes: bytes) -> None:
    """The rest of the pickle stays as it was: its metadata is what comes out."""
    path = Path("saved/.metadata")
    whole = path.read_bytes()
    assert whole[:2] == pickle.PROTO + b"\x04" and whole[2:3] == pickle.FRAME
    path.write_bytes(whole[:2] + opcodes + pickle.POP + whole[2:])


def is_refused() -> bool:
    codes = [main(["verify", "saved"]), main(["compare", "saved", "saved"])]
    assert codes == [2, 2] or codes == [0, 0]
    return codes == [2, 2]


_METADATA = "torch.distributed.checkpoint.metadata"
TARGETS = [
    (_METADATA, "Metadata", metadata.Metadata),
    (_METADATA, "_MEM_FORMAT_ENCODING", metadata._MEM_FORMAT_ENCODING),
    ("torch.distributed.checkpoint.filesystem", "FileSystemWriter", filesystem.FileSystemWriter),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo", filesystem._StorageInfo),
    ("torch.distributed.checkpoint.planner", "SavePlan", dcp.SavePlan),
    ("torch.serialization", "_get_layout", torch.serialization._get_layout),
    ("pathlib", "PosixPath", type(Path())),
    ("torch", "Size", torch.Size),
    ("torch", "float32", torch.float32),
]


@pytest.mark.parametrize(("module", "name", "target"), TARGETS, ids=[t[1] for t in TARGETS])
def test_no_class_and_no_function_of_the_program_is_changed(
    module: str, name: str, target: Any
) -> None:
    save()
    put_before_the_metadata(built(module, name, mapping("planted", pickle.NEWTRUE)))
    try:
        assert is_refused()
        assert not hasattr(target, "planted")
    finally:
        if hasattr(target, "planted"):
            del target.planted


def test_an_enumeration_is_not_made_a_function() -> None:
    save()
    encoding = metadata._MEM_FORMAT_ENCODING
    before = dict(vars(encoding))
    values = mapping("_value2member_map_", mapping("x", text("y")))
    put_before_the_metadata(built(_METADATA, "_MEM_FORMAT_ENCODING", values))
    try:
        assert is_refused() and dict(vars(encoding)) == before
    finally:
        type.__setattr__(encoding, "_value2member_map_", before["_value2member_map_"])
    assert isinstance(encoding(0), enum.Enum)


def test_the_metadata_is_unpickled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    save()

    def load(*args: object, **options: object) -> None:
        raise AssertionError("without a restriction")

    monkeypatch.setattr(pickle, "load", load)
    monkeypatch.setattr(pickle, "loads", load)
    assert fastcheck.verify("saved")


@pytest.mark.parametrize("trust", [False, True])
@pytest.mark.parametrize(
    "called",
    [
        ("os", "mkdir"),
        ("torch.distributed.checkpoint.filesystem", "os.mkdir"),
        ("torch.distributed.checkpoint.planner", "SavePlan.__init__.__globals__"),
        ("torch", "_dynamo.external_utils.wrap_inline"),
        ("torch", "load"),
        ("builtins", "getattr"),
        ("copyreg", "_reconstructor"),
        ("pathlib", "Path.mkdir"),
    ],
)
def test_nothing_is_called(called: tuple[str, str], trust: bool) -> None:
    save()
    arguments = pickle.MARK + text("planted") + pickle.TUPLE
    put_before_the_metadata(named(*called) + arguments + pickle.REDUCE)
    if trust:
        assert fastcheck.verify("saved", trust=True)
    else:
        assert is_refused()
    assert not Path("planted").exists()


def test_an_object_of_an_extension_code_is_not_called() -> None:
    """A code is looked up in a cache of the process before find_class() is asked."""
    save()
    copyreg.add_extension("os", "mkdir", 0x7A)
    try:
        pickle.loads(pickle.EXT1 + b"\x7a.")
        arguments = text("planted") + pickle.TUPLE1
        put_before_the_metadata(pickle.EXT1 + b"\x7a" + arguments + pickle.REDUCE)
        assert is_refused() and not Path("planted").exists()
    finally:
        copyreg.remove_extension("os", "mkdir", 0x7A)


def test_no_module_is_imported() -> None:
    save()
    put_before_the_metadata(named("torch.distributed.checkpoint.examples.stateful_example", "x"))
    program = (
        "import sys, fastcheck.cli.main as cli\n"
        "code = cli.main(['verify', 'saved'])\n"
        "sys.exit(any('examples' in name for name in sys.modules) or code)"
    )
    assert run_python("-c", program).returncode == 2


@pytest.mark.parametrize(
    "opcodes", [pickle.NONE + pickle.BINPERSID, pickle.PERSID + b"x\n"], ids=["binary", "text"]
)
def test_a_persistent_id_is_refused(opcodes: bytes) -> None:
    save()
    put_before_the_metadata(opcodes)
    assert is_refused()


def changed(change: Callable[[Any, Any], None]) -> None:
    """Changes where the metadata says that the tensor ``w`` is stored."""
    path = Path("saved/.metadata")
    whole = pickle.loads(path.read_bytes())
    index, info = next((i, v) for i, v in whole.storage_data.items() if i.fqn == "w")
    change(whole, info)
    whole.storage_data[index] = info
    path.write_bytes(pickle.dumps(whole))


@pytest.mark.parametrize("outside", ["../outside", "saved/../../outside", "absolute"])
def test_a_shard_elsewhere_is_not_read(outside: str) -> None:
    save()
    (shard,) = Path("saved").glob("*.distcp")
    Path("outside").write_bytes(shard.read_bytes())
    name = str(Path("outside").absolute()) if outside == "absolute" else outside
    changed(lambda _, info: setattr(info, "relative_path", name))
    found = fastcheck.verify("saved")
    assert list(found.differing) == ["w"] and "not in the checkpoint" in found.differing["w"]


def test_a_shard_that_is_a_fifo_is_not_waited_for() -> None:
    save()
    (shard,) = Path("saved").glob("*.distcp")
    shard.unlink()
    os.mkfifo(shard)
    found = fastcheck.verify("saved")
    assert set(found.differing) == {"w", "half"} and "not a regular file" in found.differing["w"]
    Path("saved/.metadata").unlink()
    os.mkfifo("saved/.metadata")
    assert is_refused()


def test_parts_that_do_not_make_the_whole() -> None:
    save()
    changed(lambda whole, _: whole.state_dict_metadata["w"].chunks.clear())
    found = fastcheck.verify("saved")
    assert "6 elements less" in found.differing["w"]


class Evil:
    def __reduce__(self) -> tuple[object, ...]:
        return (os.mkdir, ("planted",))


def test_a_shard_that_holds_code(monkeypatch: pytest.MonkeyPatch) -> None:
    save()
    (shard,) = Path("saved").glob("*.distcp")
    torch.save(Evil(), shard)
    size = shard.stat().st_size
    changed(lambda _, info: vars(info).update(offset=0, length=size))
    # What makes torch.load do without its restriction where it was not asked for it.
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    found = fastcheck.verify("saved", trust=True)
    assert "w" in found.differing and not Path("planted").exists()


def scripted(path: Path) -> None:
    torch.jit.save(torch.jit.script(nn.Linear(2, 2)), path)


def archived(path: Path) -> None:
    Path("sys_info").write_bytes(pickle.dumps(Evil()))
    with tarfile.open(path, "w") as archive:
        archive.add("sys_info")


@pytest.mark.parametrize("write", [scripted, archived])
def test_forms_that_an_old_torch_reads_without_its_restriction(
    write: Callable[[Path], None],
) -> None:
    write(Path("w.pt"))
    with pytest.raises(fastcheck.CompareError, match="archive"):
        fastcheck.compare("w.pt", state())
    assert not Path("planted").exists()
