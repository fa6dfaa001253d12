"""Small types of the extension agree with their Python replacements."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import pytest
from torch import nn

from fastcheck.calls import module_calls, recorder
from fastcheck.record.format import Depth
from fastcheck.ring import host as cursor_module
from fastcheck.ring.depths import Depths
from fastcheck.ring.host import HostRing, make_reader
from fastcheck.utils.torch.seen_tensors import make_seen
from fastcheck.verdict.entries import Gradient, InnerInput, Output, Returned, expanded
from support.processes import run_python


class TestTwins:
    """The types of the extension and those that stand in for them."""

    @pytest.mark.parametrize("kind", [module_calls.Call, module_calls.new_call])
    def test_a_call(self, kind: Any) -> None:
        node = nn.Linear(1, 1)
        outer = kind(node, 3, None, 2**63, 17, False)
        inner = kind(node, 4, outer, 5, 18, True)
        inner.add_input(1, 2)
        inner.add_input(2**40, 3)
        inner.add_output(7)
        inner.watched = {("a", "b"): (1, 2)}
        assert (outer.node, outer.index, outer.parent, outer.depth) == (node, 3, None, 0)
        assert (outer.thread, outer.first_seq, outer.is_recompute) == (2**63, 17, False)
        assert (inner.parent, inner.depth, inner.is_recompute) == (outer, 1, True)
        assert (inner.inputs, inner.input_sites, inner.outputs) == ([1, 2**40], [2, 3], [7])
        assert (inner.outputs_seq, inner.is_complete) == (18, False)
        assert inner.watched == {("a", "b"): (1, 2)} and outer.watched is None

    @pytest.mark.parametrize("kind", [module_calls.CallCounter, type(module_calls.new_counter())])
    def test_a_counter(self, kind: Any) -> None:
        counter = kind()
        assert counter.recomputed_call(0) is None
        assert [counter.next_call(0) for _ in range(3)] == [0, 1, 2]
        assert [counter.recomputed_call(0) for _ in range(4)] == [2, 1, 0, 2]
        assert counter.recomputed_call(1) is None
        assert counter.next_call(1) == 0 and counter.total == 4

    @pytest.mark.parametrize("kind", [cursor_module.Cursor, type(cursor_module.new_cursor())])
    def test_a_cursor(self, kind: Any) -> None:
        cursor = kind()
        assert (cursor.seq, cursor.slot) == (0, 0)
        cursor.seq, cursor.slot = 2**40, 5
        cursor.seq += 1
        assert (cursor.seq, cursor.slot) == (2**40 + 1, 5)
        with pytest.raises(TypeError):
            cursor_type = type(cursor_module.new_cursor())
            cursor_type().seq = "1"


def test_what_a_call_had_handed_through_is_no_reading_of_it() -> None:
    call = module_calls.Call(nn.Linear(1, 1), 0, None, 1, 3, False)
    call.add_output(4)
    call.outputs_seq = 5
    call.add_output(6)
    assert list(expanded(call)) == [Output(6, call), Returned(call, False)]


def test_a_recorder_makes_entries_of_classes_of_tuples_alone() -> None:
    """It writes into what it has allocated as it writes into a tuple."""
    seen, cursor = make_seen(), cursor_module.new_cursor()
    ring = HostRing(Depths(Depth.STATS), when_full=lambda: None, cursor=cursor)
    made = recorder.make_recorder(make_reader(seen, ring), cursor, recorder.make_lock())
    if isinstance(made, recorder.HookRecorder):
        pytest.skip("the extension is not built against this torch")
    made.attach(lambda: None, object(), [], InnerInput, Output, Gradient)
    for kinds in ((InnerInput, Output), (InnerInput, Output, list), (InnerInput, Output, ())):
        with pytest.raises(TypeError, match="three classes of tuples"):
            made.attach(lambda: None, object(), [], *kinds)  # type: ignore[arg-type]  # wrong on purpose


class TestLock:
    def test_it_is_reentrant_and_keeps_others_out(self) -> None:
        lock = recorder.make_lock()
        seen: list[str] = []

        def other() -> None:
            with lock:
                seen.append("other")

        thread = threading.Thread(target=other)
        with lock:
            assert lock._is_owned()
            with lock:
                thread.start()
            time.sleep(0.05)
            seen.append("first")
        thread.join()
        assert seen == ["first", "other"]
        assert not lock._is_owned()

    def test_many_threads_take_turns(self) -> None:
        """None gets in while another is inside, and none is left waiting."""
        lock = recorder.make_lock()
        before = sys.getswitchinterval()
        inside, entered = [0], [0] * 8

        def enter(index: int) -> None:
            for _ in range(300):
                with lock:
                    inside[0] += 1
                    assert inside[0] == 1
                    time.sleep(0)  # lets go of the interpreter's lock
                    assert inside[0] == 1
                    inside[0] -= 1
                    entered[index] += 1

        threads = [threading.Thread(target=enter, args=(i,), daemon=True) for i in range(8)]
        try:
            sys.setswitchinterval(1e-5)
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(60)
        finally:
            sys.setswitchinterval(before)
        assert entered == [300] * 8

    def test_who_does_not_hold_it_can_not_release_it(self) -> None:
        lock = recorder.make_lock()
        with pytest.raises(RuntimeError):
            lock.release()
        lock.acquire()
        refused: list[bool] = []

        def other() -> None:
            assert not lock._is_owned()
            with pytest.raises(RuntimeError):
                lock.release()
            refused.append(True)

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert refused
        lock.release()

    def test_a_signal_interrupts_who_waits(self) -> None:
        script = (
            "import _thread, threading, time, fastcheck.calls.recorder as r\n"
            "lock = r.make_lock()\n"
            "holds = threading.Event()\n"
            "def hold():\n"
            "    with lock:\n"
            "        holds.set(); threading.Event().wait()\n"
            "threading.Thread(target=hold, daemon=True).start()\n"
            "holds.wait()\n"
            "def interrupt():\n"
            "    time.sleep(0.3); __import__('os').kill(__import__('os').getpid(), 2)\n"
            "try:\n"
            "    threading.Thread(target=interrupt, daemon=True).start()\n"
            "    lock.acquire()\n"
            "except KeyboardInterrupt:\n"
            "    print('interrupted', flush=True); __import__('os')._exit(0)\n"
        )
        done = run_python("-c", script)
        assert done.stdout == "interrupted\n", done.stderr
