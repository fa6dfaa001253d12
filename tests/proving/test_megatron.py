"""prove() of Megatron Core itself: two ranks of tensor parallelism against one process."""

from __future__ import annotations

import importlib.util
import json
import os

import pytest

from support.paths import TESTS
from support.processes import run_python

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed"
)


def test_a_backward_without_its_all_reduce_is_named() -> None:
    paths = [str(TESTS), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    done = run_python("-m", "support.programs.megatron_tp", env=environment)
    assert done.returncode == 0, done.stderr
    right, wrong = json.loads(done.stdout.splitlines()[-1])["outcomes"]
    assert right["state"] == "holds" and right["score"] < 5
    assert wrong["state"] == "differs" and wrong["score"] > 1e5
    assert (wrong["first"]["module"], wrong["first"]["kind"]) == ("output_layer", "backward")
