"""Setup shared by the tests of captured graphs on the fake accelerator."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from fakes import fake_device
from support.programs.graphs import batches_on

fake: Any = fake_device.load()
NAME = fake.name()

has_graphs = pytest.mark.skipif(
    not hasattr(torch.accelerator, "Graph"), reason="this torch has no graphs of any device"
)
#: install() with them: the kernels are those of csrc/cuda, over the host shim (cuda_on_fake).
marks = [has_graphs, pytest.mark.usefixtures("graphs_on_fake_device")]

data = functools.partial(batches_on, NAME)
