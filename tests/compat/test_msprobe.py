"""Scripts of msprobe run with fastcheck.compat.msprobe: each task at each level, lists, scopes,
ranks and steps, and errors for an invalid config.json.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fastcheck
from fastcheck.compat import msprobe
from fastcheck.compat._options import _warned
from fastcheck.compat.msprobe import read_config
from fastcheck.log.reader import read_log
from support.programs.compat import calls_of, overflows_of, run_script

TASKS = ("statistics", "tensor", "md5", "overflow_check")
LEVELS = ("L0", "L1", "mix")


def config(at: Path, name: str, task: str, level: str, part: dict[str, Any], **top: Any) -> str:
    """Writes a config.json; its dump_path is ``at/name``."""
    content = {
        "task": task,
        "dump_path": str(at / name),
        "rank": [],
        "step": [],
        "level": level,
        "async_dump": False,
        task: part,
        **top,
    }
    path = at / f"{name}.json"
    path.write_text(json.dumps(content))
    return path.name


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Every task at every level, and some choices, in one process."""
    at = tmp_path_factory.mktemp("matrix")
    usual = {"scope": [], "list": [], "data_mode": ["all"]}
    files = []
    up_to_down = [f"Module.blocks.0.{name}.Linear.forward.0" for name in ("up", "down")]
    mixed = ["Module.head.Linear.forward.0", "Functional.gelu.0.backward"]
    for task in TASKS:
        part = {"overflow_nums": -1} if task == "overflow_check" else usual
        files += [config(at, f"{task}-{level}", task, level, part) for level in LEVELS]
    for name, level, part, top in (
        ("list-L1", "L1", {"list": ["Functional.linear.1", "gelu"]}, {}),
        ("list-L0", "L0", {"list": ["Module.blocks.1.Block.forward.0"]}, {}),
        ("list-mix", "mix", {"list": mixed}, {}),
        ("list-typo", "L1", {"list": ["Functional.linaer.1"]}, {"step": [0]}),
        ("scope-L1", "L1", {"scope": ["Functional.gelu.0", "Tensor.add.0"]}, {}),
        ("scope-L0", "L0", {"scope": up_to_down}, {}),
        ("steps", "L1", {}, {"step": [0, "2-5"]}),
        ("other-rank", "L1", {}, {"rank": [1, "3-4"]}),
    ):
        files.append(config(at, name, "statistics", level, part, **top))
    ran = run_script("msprobe_train.py", *files, at=at)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("done ") == len(files)
    return at, ran.stderr


def places(dump: Path, level: str) -> list[Path]:
    return [dump / "L0", dump / "L1"] if level == "mix" else [dump]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("task", ["statistics", "tensor", "md5"])
def test_tasks_at_levels(matrix: tuple[Path, str], task: str, level: str) -> None:
    dump = matrix[0] / f"{task}-{level}"
    for place, kind in zip(places(dump, level), ("module", "api")):
        steps = sorted(path.name for path in place.iterdir())
        assert steps == ["step0", "step1", "step2"]
        kind = "api" if level == "L1" else kind
        calls = [line for line in calls_of(place / "step0") if line["kind"] == kind]
        assert {line["direction"] for line in calls} == {"forward", "backward"}
        names = {line["module"] for line in calls}
        assert {"blocks.0.up", "blocks.1.down", "head"} <= names
        entries = [entry for line in calls for entry in (*line["in"], *line["out"])]
        assert any("value" in entry for entry in entries) is (task == "tensor")
        records = read_log(place / "step0" / "rank0").records
        assert len(records) > 20 and (records["abs_sum"] > 0).any()
        assert (records["checksum"] != 0).any() == (task != "statistics")


@pytest.mark.parametrize("level", LEVELS)
def test_overflow_check_at_levels(matrix: tuple[Path, str], level: str) -> None:
    found = overflows_of(matrix[0] / f"overflow_check-{level}")
    # The evaluations between the steps are full of NaN, and not observed.
    first = (
        "Module.blocks.0.down.Linear.forward.0" if level == "L0" else "Functional.linear.1.forward"
    )
    assert (found[0]["name"], found[0]["step"], found[0]["verdict"]) == (first, 1, "origin")
    assert {line["step"] for line in found} == {1, 2}
    names = [(line["step"], line["name"]) for line in found]
    assert len(set(names)) == len(names)
    backward = "Module.head.Linear.backward.0" if level == "L0" else "Functional.linear.4.backward"
    assert (1, backward) in names


def modules(calls: list[dict[str, Any]]) -> set[str]:
    return {line["module"] for line in calls if line["kind"] != "stored"}


def test_lists(matrix: tuple[Path, str]) -> None:
    at = matrix[0]
    apis = {line["api"] for line in calls_of(at / "list-L1" / "step0")}
    assert apis == {"Functional.linear.1", "Functional.gelu.0", "Functional.gelu.1"}
    found = calls_of(at / "list-L0" / "step0")
    assert modules(found) == {"blocks.1", "blocks.1.up", "blocks.1.down"}
    assert modules(calls_of(at / "list-mix" / "L0" / "step0")) == {"head"}
    found = calls_of(at / "list-mix" / "L1" / "step0")
    assert {(line["api"], line["direction"]) for line in found} == {
        ("Functional.gelu.0", "backward")
    }
    assert "no call in the block has the name 'Functional.linaer.1'" in matrix[1]
    assert "did you mean 'Functional.linear'" in matrix[1]


def test_scopes(matrix: tuple[Path, str]) -> None:
    at = matrix[0]
    forward = [
        line["api"]
        for line in calls_of(at / "scope-L1" / "step0")
        if line["direction"] == "forward"
    ]
    assert list(dict.fromkeys(forward)) == [
        "Functional.gelu.0",
        "Functional.linear.1",
        "Tensor.add.0",
    ]
    found = calls_of(at / "scope-L0" / "step0")
    assert modules(found) == {"blocks.0.up", "blocks.0.down"}


def test_steps_and_ranks(matrix: tuple[Path, str]) -> None:
    at = matrix[0]
    assert sorted(path.name for path in (at / "steps").iterdir()) == ["step0", "step2"]
    assert not (at / "other-rank").exists()


def test_a_rank_that_is_listed(tmp_path: Path) -> None:
    name = config(tmp_path, "ranks", "statistics", "L0", {}, rank=[1, "3-4"], step=[0])
    ran = run_script("msprobe_train.py", name, at=tmp_path, env={"RANK": "4"})
    assert ran.returncode == 0
    assert (tmp_path / "ranks" / "step0" / "rank4" / "calls.jsonl").exists()


def test_the_limit_ends_the_run(tmp_path: Path) -> None:
    name = config(tmp_path, "stop", "overflow_check", "L1", {"overflow_nums": 2})
    ran = run_script("msprobe_train.py", name, at=tmp_path)
    assert ran.returncode == 1 and "OverflowDetected" in ran.stderr
    names = [line["name"] for line in overflows_of(tmp_path / "stop")]
    assert names == ["Functional.linear.1.forward", "Tensor.add.0.forward"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"levle": "L1"}, "did you mean 'level'"),
        ({"task": "statistic"}, "did you mean 'statistics'"),
        ({"task": "free_benchmark"}, "reference="),
        ({"level": "l1"}, "did you mean 'L1'"),
        ({"level": "L2"}, 'Dumper(level="op") dumps every operator'),
        ({"rank": ["a"]}, '[0, 3, "5-8"]'),
        ({"step": ["5-3"]}, "got '5-3'"),
        ({"step": [-1]}, "numbers from 0 on"),
        ({"statistics": {"lst": []}}, "did you mean 'list'"),
        ({"statistics": {"list": 3}}, '"list" must be a list of names'),
        ({"statistics": {"scope": ["a"]}}, "two names"),
        ({"statistics": {"data_mode": ["fwd"]}}, "unknown entry of data_mode 'fwd'"),
        ({"statistics": {"summary_mode": "md4"}}, "did you mean 'md5'"),
        ({"statistics": {"summary_mode": ["max", "mim"]}}, "did you mean 'min'"),
        ({"statistics": []}, '"statistics" of config.json must be an object'),
        ({"task": "overflow_check", "overflow_check": {"overflow_nums": 0}}, "-1 for never"),
        ({"task": "overflow_check", "overflow_check": {"overflow_num": 1}}, "'overflow_nums'"),
        ({"dump_path": ""}, "dump_path must be a directory"),
        ({"statistics": {"list": ["Functional.linear.x y"]}}, "names an operator that there isn't"),
    ],
)
def test_a_wrong_config_is_told_what_is_wrong(
    tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    content = {"task": "statistics", "dump_path": str(tmp_path / "d"), "level": "L1", **change}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(content))
    with pytest.raises(fastcheck.ConfigError) as caught:
        msprobe.PrecisionDebugger(config_path=path)
    assert says in str(caught.value)
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize("text", ["{", "[]", None])
def test_a_config_that_can_not_be_read(tmp_path: Path, text: Any) -> None:
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(fastcheck.ConfigError, match=r"config\.json"):
        msprobe.PrecisionDebugger(config_path=path)


def test_options_hold_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"task": "tensor", "dump_path": "a", "level": "L0", "step": [1]}))
    found = read_config(path, task="statistics", dump_path="b", level="mix", step=[2])
    assert (found.task, found.dump_path, found.level) == ("statistics", "b", "mix")
    assert found.steps == {2} and found.ranks is None
    assert read_config(None, task=None, dump_path="b", level=None, step=None).level == "L1"
    with pytest.raises(fastcheck.ConfigError, match="did you mean 'dump_path'"):
        msprobe.PrecisionDebugger(dumppath="a")


def test_what_has_no_counterpart_is_said(tmp_path: Path) -> None:
    _warned.clear()
    path = tmp_path / "config.json"
    part = {"data_mode": ["forward"], "file_format": "bin", "summary_mode": "md5"}
    content = {"task": "tensor", "dump_path": "a", "extra_info": True, "tensor": part}
    path.write_text(json.dumps(content))
    with pytest.warns(fastcheck.FastcheckWarning) as caught:
        read_config(path, task=None, dump_path=None, level=None, step=None)
    said = " ".join(str(one.message) for one in caught)
    for word in ("extra_info", "data_mode", "file_format", "checksum of 64 bits"):
        assert word in said
    _warned.clear()


def test_overflow_check_needs_the_model(tmp_path: Path) -> None:
    debugger = msprobe.PrecisionDebugger(task="overflow_check", dump_path=tmp_path)
    with pytest.raises(fastcheck.ConfigError, match=r"start\(model\)"):
        debugger.start()
    with pytest.raises(fastcheck.ConfigError, match="model must be"):
        debugger.start(model="net")  # type: ignore[arg-type]  # wrong on purpose


def test_steps_of_a_resumed_run(tmp_path: Path) -> None:
    net = nn.Linear(2, 2)
    debugger = msprobe.PrecisionDebugger(task="overflow_check", dump_path=tmp_path, level="L0")
    debugger.set_init_step(70)
    debugger.start(net)
    with pytest.raises(fastcheck.OverflowDetected) as caught:
        net(torch.full((1, 2), float("nan")))
    assert caught.value.step == 70 and overflows_of(tmp_path)[0]["step"] == 70
    assert debugger._run._watch is not None
    debugger._run._watch.monitor.remove()


def test_several_parts_of_a_step(tmp_path: Path) -> None:
    net = nn.Linear(2, 2)
    debugger = msprobe.PrecisionDebugger(task="statistics", dump_path=tmp_path, model=net)
    for _ in range(2):
        debugger.start()
        net(torch.ones(1, 2))
        debugger.stop()
    debugger.step()
    debugger.start()
    debugger.step()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["part2", "step0", "step1"]
    assert calls_of(tmp_path / "part2" / "step0")


def test_compare(matrix: tuple[Path, str], tmp_path: Path) -> None:
    place = str(matrix[0] / "md5-L1" / "step0")
    found = msprobe.compare({"npu_path": place, "bench_path": place}, tmp_path)
    assert found.agrees and (tmp_path / "compare_result.csv").exists()
    with pytest.raises(fastcheck.ConfigError, match="did you mean 'fuzzy_match'"):
        msprobe.compare({"npu_path": place, "bench_path": place}, fuzzymatch=True)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("save", "fastcheck.stats"),
        ("register_custom_api", 'Dumper(level="op")'),
        ("restore_custom_api", "no function is wrapped"),
        ("module_dump", '"list"'),
        ("module_dump_end", '"list"'),
        ("TrainerMon", "fastcheck.install"),
    ],
)
def test_names_without_a_counterpart_say_what_to_write(
    tmp_path: Path, name: str, says: str
) -> None:
    with pytest.raises(fastcheck.ConfigError) as caught:
        getattr(msprobe, name)
    assert name in str(caught.value) and says in str(caught.value)
    debugger = msprobe.PrecisionDebugger(task="statistics", dump_path=tmp_path)
    with pytest.raises(fastcheck.ConfigError, match=f"PrecisionDebugger.{name}"):
        getattr(debugger, name)()
    with pytest.raises(AttributeError):
        debugger.no_such_name  # noqa: B018  # reading it is what is tested
    assert not hasattr(msprobe, "no_such_name")


def test_the_rank_of_start_and_the_switch_of_the_file(tmp_path: Path) -> None:
    net = nn.Linear(2, 2)
    debugger = msprobe.PrecisionDebugger(task="statistics", dump_path=tmp_path / "a", model=net)
    debugger.start(rank_id=1)
    net(torch.ones(1, 2))
    debugger.stop()
    assert not list(tmp_path.glob("a/**/*.bin"))
    debugger.start(rank_id=0)
    net(torch.ones(1, 2))
    debugger.stop()
    assert list(tmp_path.glob("a/**/*.bin"))
    _warned.clear()
    path = tmp_path / "config.json"
    content = {"task": "statistics", "dump_path": str(tmp_path / "b"), "risk_level": "ALL"}
    path.write_text(json.dumps({**content, "dump_enable": False}))
    with pytest.warns(fastcheck.FastcheckWarning) as caught:
        off = msprobe.PrecisionDebugger(config_path=path, model=net)
    said = " ".join(str(one.message) for one in caught)
    assert "nothing is dumped" in said and "what is dumped follows from" in said
    off.start()
    net(torch.ones(1, 2))
    off.stop()
    assert not (tmp_path / "b").exists()
    for wrong in ("yes", 0):
        path.write_text(json.dumps({**content, "dump_enable": wrong}))
        with pytest.raises(fastcheck.ConfigError, match="dump_enable"):
            msprobe.PrecisionDebugger(config_path=path)
    _warned.clear()
