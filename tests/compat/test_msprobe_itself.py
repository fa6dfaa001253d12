"""The same script under msprobe 26.2.0 and under fastcheck.compat.msprobe: their dumps agree call
by call. Skipped where mindstudio-probe is not installed beside fastcheck (bench/environments.py has
what it needs).
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import fastcheck
from support.programs.compat import run_script

needs_msprobe = pytest.mark.skipif(
    importlib.util.find_spec("msprobe") is None, reason="mindstudio-probe is not installed"
)


def dumps(at: Path, task: str, level: str, **part: Any) -> tuple[Path, Path]:
    """Those of fastcheck and of msprobe."""
    for tool in ("fastcheck.compat.msprobe", "msprobe.pytorch"):
        config = {
            "task": task,
            "dump_path": str(at / tool),
            "rank": [],
            "step": [],
            "level": level,
            "async_dump": False,
            task: {"scope": [], "list": [], "data_mode": ["all"], **part},
        }
        (at / f"{tool}.json").write_text(json.dumps(config))
        ran = run_script("either_msprobe.py", tool, f"{tool}.json", at=at)
        assert ran.returncode == 0, ran.stderr
        (at / f"{tool}.loss").write_text(ran.stdout.splitlines()[-1])
    return at / "fastcheck.compat.msprobe", at / "msprobe.pytorch"


def calls(ours: Path, theirs: Path, step: int) -> tuple[list[str], list[str]]:
    """Forward calls of modules, in their order."""
    (place,) = (theirs / f"step{step}").iterdir()
    keys = json.loads((place / "dump.json").read_text())["data"]
    of_modules = [key for key in keys if key.startswith("Module.") and ".forward." in key]
    lines = (ours / f"step{step}" / "rank0" / "calls.jsonl").read_text().splitlines()
    mine = [json.loads(line) for line in lines]
    names = [
        f"Module.{line['module']}.{line['type']}.forward.{line['call']}"
        for line in mine
        if line["kind"] == "module" and line["direction"] == "forward" and line["module"]
    ]
    return names, of_modules


@needs_msprobe
@pytest.mark.parametrize(
    ("task", "part"),
    [("statistics", {"summary_mode": mode}) for mode in ("statistics", "md5")] + [("tensor", {})],
)
def test_modules_agree_call_by_call(tmp_path: Path, task: str, part: dict[str, Any]) -> None:
    ours, theirs = dumps(tmp_path, task, "L0", **part)
    losses = [path.read_text() for path in sorted(tmp_path.glob("*.loss"))]
    assert losses[0] == losses[1]
    for step in (0, 1):
        mine, other = calls(ours, theirs, step)
        assert set(mine) == set(other)
    found = fastcheck.compare(ours, theirs)
    assert found.agrees, str(found)
    # msprobe dumps no call of the whole model.
    assert {one.name.split(" · ")[0] for one in found.missing} <= {"the model"}
    assert found.steps == (0, 1)
    assert found["initial weights"].answer == found["update"].answer == "yes"


@needs_msprobe
@pytest.mark.parametrize(
    ("task", "part"),
    [("statistics", {"summary_mode": mode}) for mode in ("statistics", "md5")] + [("tensor", {})],
)
def test_calls_of_apis_agree(tmp_path: Path, task: str, part: dict[str, Any]) -> None:
    ours, theirs = dumps(tmp_path, task, "L1", **part)
    for sides in ((ours, theirs), (theirs, ours)):
        found = fastcheck.compare(*sides)
        assert found.agrees and not found.missing, str(found)
        assert found.is_identical == (task == "tensor")
        said = ("initial weights", "forward", "gradients", "update")
        assert {found[question].answer for question in said} == {"yes"}
        assert sum(sum(counts.values()) for counts in found.counts.values()) > 500
        # msprobe wraps neither; what it does not dump is said.
        assert any("Tensor.flatten, Tensor.transpose" in note for note in found.notes)


@needs_msprobe
def test_operators_and_calls_of_apis_are_not_compared(tmp_path: Path) -> None:
    _, theirs = dumps(tmp_path, "tensor", "L1")
    with fastcheck.Dumper(tmp_path / "operators"):
        torch.ones(3).exp()
    with pytest.raises(fastcheck.CompareError, match="different levels"):
        fastcheck.compare(tmp_path / "operators", theirs)
    assert fastcheck.compare(theirs, theirs).is_identical
