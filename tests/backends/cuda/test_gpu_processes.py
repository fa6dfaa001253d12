"""The CUDA backend on a GPU, in processes of their own: a device that is lost, and launches by
Python where no compiled extension fits the torch. Skipped without a GPU, as test_gpu.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from support.processes import run_code

pytestmark = pytest.mark.gpu

LOST = """
import torch, fastcheck
from support.programs.training import deep, batches, poison
model = deep(3).cuda()
fastcheck.install(model, log_dir={log!r})
for step, x in enumerate(batches(3)):
    if step == 2:
        model.get_submodule("tail").function = poison
    y = model(x.cuda())
    torch._assert_async(y.isfinite().all())
torch.cuda.synchronize()
"""


def test_a_device_that_is_lost_is_reported_with_the_culprit(tmp_path: Path) -> None:
    done = run_code(LOST.format(log=str(tmp_path)))
    assert done.returncode != 0
    assert "device-side assert triggered" in done.stderr
    assert "the first tensor before it that was not finite: tail" in done.stderr
    shown = run_code(f"from fastcheck.cli.main import main; main(['show', {str(tmp_path)!r}])")
    assert "the device was lost in step 2" in shown.stdout


BY_PYTHON = """
import torch, fastcheck
from fastcheck.backends import table
from support.devices.on_device import random
assert fastcheck.extension.status.module is None
assert table.backend_for(torch.device("cuda")).name == "cuda"
torch.manual_seed(0)
for dtype in ("float32", "bfloat16", "int8"):
    for count in (0, 1, 4097, 300_000):
        x = random(dtype, count, count)
        assert repr(fastcheck.stats(x.cuda())) == repr(fastcheck.stats(x)), (dtype, count)
x = torch.ones(4097, device="cuda")
torch.cuda.synchronize()
torch.cuda.set_sync_debug_mode("error")
fastcheck.stats(x)
"""


def test_launches_by_python() -> None:
    done = run_code(BY_PYTHON, env={"FASTCHECK_NO_BINDING": "1"})
    assert done.returncode == 0, done.stderr


WHILE_CAPTURING = """
import torch, fastcheck
model = torch.nn.Linear(64, 64).cuda()
monitor = fastcheck.install(model)
x = torch.ones(64, 64, device="cuda")
for _ in range(3):
    model(x)
graph = torch.cuda.CUDAGraph()
y = torch.ones(8, device="cuda")
torch.cuda.synchronize()
model(x)  # its copy is under way, which the drain's thread asks after, while this thread captures
with torch.cuda.graph(graph):
    for _ in range(200):
        y = y + 1
graph.replay()
monitor.flush()
assert y.sum().item() == 8 * 201
"""


def test_a_capture_goes_on_while_copies_are_asked_after() -> None:
    done = run_code(WHILE_CAPTURING)
    assert done.returncode == 0, done.stderr
