"""RecordedOpCalls (C++) writes the same bytes as PythonOpCalls."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Callable, Optional

import numpy as np
import pytest
import torch

import fastcheck
from fastcheck import _C
from fastcheck.dump.op_calls import RecordedOpCalls
from fastcheck.dump.storage import record_writer
from fastcheck.dump.storage.files import read_index
from fastcheck.extension import ExtensionStatus
from fastcheck.log.reader import read_log
from fastcheck.record.format import RECORD_BYTES
from support.programs.dump_programs import PROGRAMS, checkpointed, training
from support.programs.dumping import Step


@contextlib.contextmanager
def in_python() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RecordedOpCalls, "make", classmethod(lambda *_: None))
        yield


def dumped(place: Path, step: Step, **options: Any) -> dict[str, bytes]:
    """The files that have to be the same from C++ and from Python."""
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
    assert any(records["flags"] & int(fastcheck.types.Flag.RECOMPUTE))


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
    monkeypatch.setattr(
        "fastcheck.dump.storage.record_writer.status", ExtensionStatus(None, "gone")
    )
    without = dumped(tmp_path / "without", training())
    assert with_it["calls.jsonl"] == without["calls.jsonl"]


def test_nothing_is_kept_of_a_dump_that_is_over(tmp_path: Path) -> None:
    with fastcheck.Dumper(os.fspath(tmp_path)) as dumper:
        torch.ones(3).sin()
        session = weakref.ref(dumper._session)  # type: ignore[arg-type]  # it is set while the dumper is open
    del dumper
    gc.collect()
    assert session() is None


@pytest.mark.parametrize("role", ["input", "output"])
def test_an_error_of_its_own_ends_the_dump_and_not_the_training(role: str, tmp_path: Path) -> None:
    """Before the operator, and behind it."""
    site = RecordedOpCalls.site

    def broken(self: RecordedOpCalls, *args: Any) -> int:
        if args[3] == role:
            raise ZeroDivisionError("a fault")
        return site(self, *args)

    dumper = fastcheck.Dumper(os.fspath(tmp_path))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RecordedOpCalls, "site", broken)
        expected = pytest.warns(fastcheck.FastcheckWarning, match="ZeroDivisionError: a fault")
        with expected as caught, dumper:
            y = torch.ones(3).sin().cos()
    assert caught[0].filename == __file__
    assert torch.equal(y, torch.ones(3).sin().cos()) and "a fault" in dumper.problem


def test_a_type_error_of_its_own_is_no_problem_of_a_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_writer, "stats", lambda x: x)
    dumper = fastcheck.Dumper(os.fspath(tmp_path), order="logical")
    with pytest.warns(fastcheck.FastcheckWarning, match="unexpected keyword argument"), dumper:
        torch.ones(3).sin()
    assert "TypeError" in dumper.problem


@pytest.mark.parametrize("point", ["add_line", "plain_text", "tensor_text", "module_text", "site"])
def test_a_fault_where_warnings_are_errors_does_not_come_up_through_an_operator(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    point: str,
) -> None:
    """Of each function that the recorder calls in Python, forward and backward."""
    monkeypatch.setattr(RecordedOpCalls, point, lambda *args: 1 // 0)
    x = torch.ones(3, 3, requires_grad=True)
    with fastcheck.Dumper(os.fspath(tmp_path)) as dumper:
        torch.nn.functional.linear(x.to_sparse() if point == "tensor_text" else x, x).sum()
        x.square().sum().backward()
    assert x.grad is not None and torch.equal(x.grad, torch.full((3, 3), 2.0))
    assert "ZeroDivisionError" in dumper.problem
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_an_interrupt_behind_the_operator_is_the_training_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is held afterwards that another thread waits for."""

    def interrupted(self: RecordedOpCalls, text: str) -> None:
        raise KeyboardInterrupt

    with fastcheck.Dumper(os.fspath(tmp_path)) as dumper:
        with monkeypatch.context() as patch:
            patch.setattr(RecordedOpCalls, "add_line", interrupted)
            with pytest.raises(KeyboardInterrupt):
                torch.ones(3)
        free: list[bool] = []
        session: Any = dumper._session
        other = threading.Thread(target=lambda: free.append(not session.lock._is_owned()))
        other.start()
        other.join()
        torch.ones(3)
    assert free == [True] and dumper.problem == ""


def test_an_error_of_the_operator_is_the_training_s(tmp_path: Path) -> None:
    with fastcheck.Dumper(os.fspath(tmp_path)) as dumper:
        with pytest.raises(RuntimeError, match="size of tensor"):
            torch.ones(2) + torch.ones(3)
        torch.ones(2)
    assert dumper.problem == ""


class Seldom:
    """What the recorder leaves to Python, a session and a writer."""

    count = used = 0
    plain_dispatch = torch.Tensor.__torch_dispatch__

    def __init__(self) -> None:
        self.session = SimpleNamespace(
            is_closed=False, problem="", call_count=0, lock=_C.SessionLock()
        )
        self.lines: list[str] = []
        self.passed: list[object] = []

    def operator(self, func: Any) -> Any:
        if not isinstance(func, torch._ops.OpOverload):
            return None
        return func._schema.name, func._schema.overload_name, func

    def module_text(self, node: object) -> tuple[str, str]:
        return '""', '"outside"'

    def site(self, *_: object) -> int:
        return 7

    def flush(self) -> None:
        self.used = 0

    def add_line(self, text: str) -> None:
        self.lines.append(text)
        self.session.call_count += 1

    def pass_by(self, func: object) -> None:
        self.passed.append(func)


class TestTheType:
    """Nobody but torch and fastcheck calls it."""

    def recorder(self, python: object, slots: int = 4) -> Any:
        memory = torch.zeros(RECORD_BYTES * slots, dtype=torch.uint8)
        return _C.OpRecorder(python, python, memory, 3, 0)

    def test_arguments_are_checked(self) -> None:
        recorder = self.recorder(Seldom())
        with pytest.raises(TypeError):
            recorder.dispatch(1, 2)
        with pytest.raises(TypeError):
            recorder.dispatch(None, torch.sin, 3, ())
        with pytest.raises(TypeError, match="expected"):
            recorder.move(1)
        with pytest.raises(TypeError, match=r"expected a torch\.Tensor"):
            _C.OpRecorder(Seldom(), object(), "slots", 3, 0)  # type: ignore[arg-type]  # wrong on purpose
        with pytest.raises(ValueError, match="depth"):
            _C.OpRecorder(Seldom(), object(), torch.zeros(192, dtype=torch.uint8), 4, 0)

    def test_any_way_to_call_a_mode(self) -> None:
        """torch's own callers give lists, keywords, and no arguments at all."""
        python, x, sin = Seldom(), torch.ones(3), torch.ops.aten.sin.default
        recorder = self.recorder(python)
        for y in (
            recorder.dispatch(None, sin, [], [x]),
            recorder.dispatch(None, sin, (), (x,), None),
            recorder.dispatch(None, func=sin, types=(), args=(x,), kwargs={}),
            recorder.dispatch(None, sin, (), kwargs={"self": x}),
        ):
            assert torch.equal(y, x.sin())
        assert len(python.lines) == 4
        assert recorder.dispatch(None, lambda: 7, []) == 7 and len(python.passed) == 1

    def test_what_python_reads_in_between_is_counted(self) -> None:
        class Reader(Seldom):
            def tensor_text(self, tensor: torch.Tensor) -> str:
                return '"shape": []'

            def read_text(self, tensor: torch.Tensor, *_: object) -> str:
                self.count, self.used = self.count + 1, self.used + 1
                return f'"seq": {self.count - 1}'

        python, x = Reader(), torch.ones(3)
        recorder = self.recorder(python, 8)
        other = torch.ones(3, device="meta")
        recorder.dispatch(None, torch.ops.aten.is_same_size.default, (), (x, other))
        assert (python.count, python.used) == (2, 2)
        recorder.dispatch(None, torch.ops.aten.sin.default, (), (x,))
        assert (python.count, python.used) == (4, 4)
        lines = [json.loads(line) for line in python.lines]
        assert [[one["seq"] for one in line["in"] + line["out"]] for line in lines] == [
            [0, 1],
            [2, 3],
        ]

    def test_a_cycle_through_it_is_collected(self) -> None:
        python: Any = Seldom()
        python.recorder = self.recorder(python)
        python.recorder.dispatch(None, torch.ops.aten.sin.default, (), (torch.ones(3),))
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
