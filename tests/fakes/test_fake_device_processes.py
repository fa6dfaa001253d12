"""Properties of the fake accelerator that need a process of their own: reads that fault, waits that
would not end, other names, and the end of a process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any, Callable

import pytest
import torch

from fakes import fake_device
from support.devices.device_calls import WAITS
from support.paths import TESTS
from support.processes import run_python

pytestmark = pytest.mark.fake_accelerator


fake: Any = fake_device.load()
NAME = fake.name()


def run(
    source: str, is_forked: bool = True, **environment: str
) -> subprocess.CompletedProcess[str]:
    """A process of its own, with the device loaded. ``is_forked``: False where its end matters."""
    start = (
        "import torch, sys, os\nimport faulthandler; faulthandler.disable()\n"
        "from fakes import fake_device\n"
        "fake = fake_device.load()\n"
    )
    environment = {"PYTHONPATH": str(TESTS), **environment}
    if is_forked:
        return run_python("-c", start + source, env=environment)
    return subprocess.run(
        [sys.executable, "-c", start + source],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )


UNEVEN = """
stream = fake.Stream()
x = torch.ones(4, device=fake.name())
fake.synchronize()
events = [fake.Event(enable_timing=True) for _ in range(200)]
with fake.stream(stream):
    for event in events:
        x.add_(1)
        event.record()
fake.synchronize()
state = 7 + 31 * stream.stream_id  # std::minstd_rand of this stream

def draw():
    global state
    state = state * 48271 % 2147483647
    return state

late = [draw() % 5000 if draw() % 16 == 0 else 0 for _ in events]
spent = [1000 * begin.elapsed_time(end) for begin, end in zip(events, events[1:])]
print(sum(us > 1000 for us in late[1:]) > 3, all(s + 1 > us for s, us in zip(spent, late[1:])))
"""


def test_uneven_streams_begin_some_kernels_late() -> None:
    done = run(UNEVEN, FAKE_DEVICE_UNEVEN="7")
    assert done.stdout == "True True\n", done.stderr
    done = run("", FAKE_DEVICE_UNEVEN="very")
    assert "FAKE_DEVICE_UNEVEN: expected a number, got 'very'" in done.stderr


def test_host_read_of_device_memory_faults() -> None:
    source = """
import ctypes
x = torch.ones(4).to(fake.name())
fake.synchronize()
print('before', flush=True)
ctypes.string_at(x.data_ptr(), 4)
print('after')
"""
    done = run(source)
    assert done.stdout.strip() == "before"
    assert done.returncode == -signal.SIGSEGV


def test_host_read_faults_while_a_kernel_runs() -> None:
    source = """
import ctypes, threading
x = torch.ones(4).to(fake.name())
running, over = threading.Event(), threading.Event()
def kernel(view):
    view.add_(1); running.set(); over.wait()
fake.launch(kernel, x)
running.wait()
print('before', flush=True)
ctypes.string_at(x.data_ptr(), 4)
"""
    done = run(source)
    assert (done.stdout.strip(), done.returncode) == ("before", -signal.SIGSEGV)


def test_kernel_that_leaves_its_block_faults() -> None:
    source = """
import ctypes
x = torch.ones(1024).to(fake.name())
def kernel(view):
    print('before', flush=True); ctypes.memset(view.data_ptr(), 0, 4097)
fake.launch(kernel, x)
fake.synchronize()
"""
    done = run(source)
    assert (done.stdout.strip(), done.returncode) == ("before", -signal.SIGSEGV)


GIL_WAITS: dict[str, Callable[[Any], Any]] = {
    **WAITS,
    # torch's bindings of these two wait with the GIL in hand
    "storage": lambda x: x.untyped_storage().cpu(),
    "accelerator.empty_cache": lambda x: torch.accelerator.memory.empty_cache(),
    "empty_cache": lambda x: fake.empty_cache(),
    "upload": lambda x: x.copy_(torch.zeros(4)),
    "equal": lambda x: torch.equal(x, x),
}


def test_no_wait_holds_the_gil_that_a_kernel_needs() -> None:
    """What fails here never returns."""
    source = """
from fakes.test_fake_device_processes import GIL_WAITS
x = torch.ones(4, device=fake.name())
faulthandler.dump_traceback_later(600, exit=True)
fake.set_delay(100_000)
for name, wait in GIL_WAITS.items():
    fake.launch(lambda view: None, x)
    wait(x)
    print(name, flush=True)
"""
    done = run(source)
    assert (done.stdout.split(), done.returncode) == ([*GIL_WAITS], 0), done.stderr


def test_memory_is_freed_while_another_thread_empties_the_cache() -> None:
    source = """
import threading
faulthandler.dump_traceback_later(600, exit=True)
x, freed = torch.ones(4, device=fake.name()), threading.Event()
running = threading.Event()
def kernel(view):
    running.set(); freed.wait()
fake.launch(kernel, x)
running.wait()
def out_of_memory():
    fake.set_memory_limit(fake.memory_reserved())
    try:
        torch.empty(1 << 20, device=fake.name())  # waits for the kernel, to give the cache back
    except torch.OutOfMemoryError:
        print('refused', flush=True)
torch.empty(300, device=fake.name())
thread = threading.Thread(target=out_of_memory)
thread.start()
while fake.counters(thread)['alloc'] == 0: pass
thread.join(0.2)
del x
freed.set()
thread.join()
"""
    done = run(source)
    assert (done.stdout, done.returncode) == ("refused\n", 0), done.stderr


def test_errors_of_python_kernels_do_not_block_the_host() -> None:
    source = """
import time
faulthandler.dump_traceback_later(600, exit=True)
class Slow(Exception):
    def __str__(self):
        time.sleep(0.2)  # lets go of the GIL, and wants it back
        return 'slow'
def kernel(view):
    raise Slow
x = torch.ones(4, device=fake.name())
fake.launch(kernel, x)
end = time.monotonic() + 1
while time.monotonic() < end:
    fake.memory_stats(); fake.hold(fake.default_stream(1)); fake.release(fake.default_stream(1))
try:
    fake.synchronize()
except RuntimeError as error:
    print('slow' in str(error))
"""
    done = run(source)
    assert (done.stdout, done.returncode) == ("True\n", 0), done.stderr


@pytest.mark.parametrize("name", ["npu", "mlu"])
def test_renamed(name: str) -> None:
    source = """
x = torch.ones(2, device=fake.name() + ':1')
print(x.device, torch.get_device_module(x.device) is fake)
"""
    assert run(source, FAKE_DEVICE_NAME=name).stdout.strip() == f"{name}:1 True"


def test_one_name_per_process() -> None:
    assert fake_device.load() is fake
    with pytest.raises(RuntimeError, match="process of its own"):
        fake_device.load("npu" if NAME != "npu" else "mlu")


def test_exit_with_work_held_and_errors_pending() -> None:
    source = """
x = torch.zeros(2, device=fake.name())
bad = torch.tensor([7]).to(fake.name())
side, other = fake.Stream(), fake.Stream()
fake.hold(side)
with fake.stream(side):
    x.add_(1)
fake.current_stream().wait_stream(side)
with fake.stream(other):
    x.index_select(0, bad)
"""
    done = run(source, is_forked=False)
    assert done.returncode == 0
    assert "aten::index_select failed" in done.stderr


def test_a_forked_child_is_told() -> None:
    source = """
x = torch.zeros(2, device=fake.name())
fake.synchronize()
child = os.fork()
if child == 0:
    try:
        x.add_(1)
    except RuntimeError as error:
        print(error, flush=True)
    os._exit(0)
os.waitpid(child, 0)
"""
    assert "not usable in a forked child" in run(source).stdout
