"""Where nothing but records is wanted C++ takes a dump's operators in: it writes, to the byte, what
Python writes.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Callable, Optional

import numpy as np
import pytest
import torch

import fastcheck
from dump_programs import PROGRAMS, Step, checkpointed, training
from fastcheck import _C
from fastcheck._extension import Status
from fastcheck._logread import read_log
from fastcheck._record import RECORD_BYTES
from fastcheck.dump.op_info import op_info
from fastcheck.dump.reading import read_index
from fastcheck.dump.recorded_op_calls import RecordedOpCalls


@contextlib.contextmanager
def in_python() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RecordedOpCalls, "make", classmethod(lambda *_: None))
        yield


def dumped(place: Path, step: Step, **options: Any) -> dict[str, bytes]:
    """The files that have to be the same whoever writes them."""
    with fastcheck.Dumper(os.fspath(place), **options) as dumper:
        step()
    assert dumper.problem == ""
    files = (place / "step0" / "rank0").iterdir()
    return {
        file.name: file.read_bytes()
        for file in files
        if file.name != "index.json" and not file.name.startswith("meta-")
    }


def check(tmp_path: Path, program: Callable[[], Step], **options: Any) -> dict[str, Any]:
    """Runs what ``program`` makes twice, from the same start; the index that C++ has written."""
    found = []
    for name, context in (("cpp", contextlib.nullcontext()), ("python", in_python())):
        torch.manual_seed(0)
        step = program()
        with context:
            found.append(dumped(tmp_path / name, step, **options))
    assert sorted(found[0]) == sorted(found[1])
    lines = [files["calls.jsonl"].decode().splitlines() for files in found]
    for ours, wanted in zip(*lines):
        assert ours == wanted
    assert found[0] == found[1]
    index = read_index(os.fspath(tmp_path / "cpp" / "step0" / "rank0"))
    assert index["calls"] == len(lines[0]) > 0
    by_python = read_index(os.fspath(tmp_path / "python" / "step0" / "rank0"))
    assert by_python["reused"] == 0
    by_python["reused"] = index["reused"]
    for one in (index, by_python):
        del one["started"], one["options"]
    assert index == by_python
    return index


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda one: one.__name__)
def test_the_files_are_those_of_python(program: Callable[[], Step], tmp_path: Path) -> None:
    check(tmp_path, program)


@pytest.mark.parametrize("reentrant", [False, True])
def test_of_a_checkpointed_function(reentrant: bool, tmp_path: Path) -> None:
    check(tmp_path, lambda: checkpointed(reentrant=reentrant))
    records = read_log(os.fspath(tmp_path / "cpp" / "step0" / "rank0")).records
    assert any(records["flags"] & int(fastcheck.Flag.RECOMPUTE))


@pytest.mark.parametrize("record", ["health", "stats", "full"])
def test_at_each_depth(record: str, tmp_path: Path) -> None:
    check(tmp_path, training, record=record)


def test_two_dumps_in_one_another(tmp_path: Path) -> None:
    """Each numbers what it sees by itself."""

    def program() -> Step:
        inner, x = training(), torch.ones(3, requires_grad=True)

        def step() -> None:
            y = x.sin()
            with fastcheck.Dumper(os.fspath(tmp_path / "inner"), overwrite=True):
                inner()
            y.cos().sum().backward()

        return step

    check(tmp_path, program)


def used(monkeypatch: pytest.MonkeyPatch) -> list[Optional[RecordedOpCalls]]:
    """What make() has given since."""
    made: list[Optional[RecordedOpCalls]] = []
    make = RecordedOpCalls.make

    def spied(*args: Any) -> Optional[RecordedOpCalls]:
        made.append(make(*args))
        return made[-1]

    monkeypatch.setattr(RecordedOpCalls, "make", spied)
    return made


@pytest.mark.parametrize(
    ("options", "is_recorded"),
    [
        ({}, True),
        ({"record": "stats"}, True),
        ({"tensors": True}, False),
        ({"ops": ["aten.sin"]}, False),
        ({"order": "logical"}, False),
    ],
    ids=str,
)
def test_what_cpp_takes_in(
    options: dict[str, Any], is_recorded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = used(monkeypatch)
    assert dumped(tmp_path, lambda: torch.ones(3).sin(), **options)
    assert [one is not None for one in made] == [is_recorded]


def test_a_dump_without_the_extension_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The records but for their sums, which the portable backend has in another order."""
    with_it = dumped(tmp_path / "with", training())
    monkeypatch.setattr("fastcheck.dump.records.status", Status(None, "gone", None, None, None))
    without = dumped(tmp_path / "without", training())
    assert with_it["calls.jsonl"] == without["calls.jsonl"]


def test_nothing_is_kept_of_a_dump_that_is_over(tmp_path: Path) -> None:
    with fastcheck.Dumper(os.fspath(tmp_path)) as dumper:
        torch.ones(3).sin()
        session = weakref.ref(dumper._session)  # type: ignore[arg-type]
    del dumper
    gc.collect()
    assert session() is None


@pytest.mark.parametrize("name", ["begin", "end"])
def test_an_error_of_its_own_ends_the_dump_and_not_the_training(name: str, tmp_path: Path) -> None:
    class Broken:
        reused = 0

        def __getattr__(self, asked: str) -> Any:
            if asked == name:
                raise ZeroDivisionError("a fault")
            return lambda *_: asked

    make = RecordedOpCalls.make

    def broken(*args: Any) -> Optional[RecordedOpCalls]:
        made = make(*args)
        assert made is not None
        made._recorder = Broken()
        return made

    dumper = fastcheck.Dumper(os.fspath(tmp_path))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RecordedOpCalls, "make", broken)
        with pytest.warns(fastcheck.FastcheckWarning, match="ZeroDivisionError: a fault"), dumper:
            y = torch.ones(3).sin().cos()
    assert torch.equal(y, torch.ones(3).sin().cos()) and "a fault" in dumper.problem


class Seldom:
    """What the recorder leaves to Python, and a writer."""

    count = used = 0
    op_info = staticmethod(op_info)

    def module_text(self, node: object) -> tuple[str, str]:
        return '""', '"outside"'

    def site(self, *_: object) -> int:
        return 7

    def flush(self) -> None:
        self.used = 0


class TestTheType:
    """Nobody but fastcheck calls it."""

    def recorder(self, slots: int = 4) -> Any:
        python = Seldom()
        memory = torch.zeros(RECORD_BYTES * slots, dtype=torch.uint8)
        return _C.OpRecorder(python, python, memory, 3, 0)

    def begun(self, recorder: Any, x: torch.Tensor) -> Any:
        return recorder.begin(torch.ops.aten.sin.default, (x,), {}, None, False, False)

    def test_arguments_are_checked(self) -> None:
        recorder, other, x = self.recorder(), self.recorder(), torch.ones(3)
        with pytest.raises(TypeError, match="expected"):
            recorder.begin(1, 2, 3)
        with pytest.raises(TypeError, match="expected"):
            recorder.end(object(), (), {}, None, 0)
        with pytest.raises(TypeError, match=r"expected \(begin"):
            other.end(self.begun(recorder, x), (x,), {}, x, 0)
        with pytest.raises(TypeError, match=r"expected a torch\.Tensor"):
            _C.OpRecorder(object(), object(), "slots", 3, 0)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="depth"):
            _C.OpRecorder(object(), object(), torch.zeros(192, dtype=torch.uint8), 4, 0)

    def test_what_python_reads_in_between_is_counted(self) -> None:
        class Reader(Seldom):
            def tensor_text(self, tensor: torch.Tensor) -> str:
                return '"shape": []'

            def read_text(self, tensor: torch.Tensor, *_: object) -> str:
                assert (self.count, self.used) == (1, 1)
                self.count, self.used = 2, 2
                return '"seq": 1'

        python, x = Reader(), torch.ones(3)
        recorder = _C.OpRecorder(python, python, torch.zeros(RECORD_BYTES * 4).byte(), 3, 0)
        args = (x, torch.ones(3, device="meta"))
        call = recorder.begin(torch.ops.aten.add.Tensor, args, {}, None, False, False)
        assert (python.count, python.used) == (2, 2)
        line = recorder.end(call, args, {}, x + 1, 0)
        assert [one["seq"] for one in json.loads(line)["in"]] == [0, 1]
        assert [one["seq"] for one in json.loads(line)["out"]] == [2]

    def test_a_call_may_outlive_all_but_its_recorder(self) -> None:
        recorder, x = self.recorder(), torch.ones(3)
        calls = [self.begun(recorder, x) for _ in range(3)]
        recorder.clear()
        lines = [recorder.end(call, (x,), {}, x.sin(), n) for n, call in enumerate(calls)]
        assert [line[:9] for line in lines] == ['{"n": 0, ', '{"n": 1, ', '{"n": 2, ']
        assert recorder.reused == 2  # x, by the second and the third

    def test_a_cycle_through_it_is_collected(self) -> None:
        python: Any = Seldom()
        slots = torch.zeros(RECORD_BYTES, dtype=torch.uint8)
        python.recorder = _C.OpRecorder(python, python, slots, 3, 0)
        self.begun(python.recorder, torch.ones(3))
        gone = weakref.ref(python)
        del python
        gc.collect()
        assert gone() is None


def test_sites_are_the_same_numbers_again(tmp_path: Path) -> None:
    """An operator that runs in a loop has one site for each of its tensors."""

    def step() -> None:
        x = torch.ones(3)
        for _ in range(10):
            x = x.sin()

    dumped(tmp_path, step)
    log = read_log(os.fspath(tmp_path / "step0" / "rank0"))
    assert len(np.unique(log.records["site"])) == len(log.sites) == 3
