"""Scripts of ptdbg_ascend run with fastcheck.compat.ptdbg: an overflow is named and ends the run,
and its name in a list dumps that call alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fastcheck
from fastcheck.cli.main import main
from fastcheck.compat import ptdbg
from fastcheck.compat._options import _warned
from fastcheck.compat._overflows import _usable_level
from fastcheck.compat.ptdbg import dump_plan, whole_call
from fastcheck.log.reader import read_log
from fastcheck.utils.names.api import api_names
from support.programs.compat import calls_of, overflows_of, overflows_on_rank_1, run_script
from support.ranks.ranks_harness import run_ranks, values

NAME = "Functional_linear_145_backward"


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    at = tmp_path_factory.mktemp("check")
    return at / "dump", run_script("bert_crf_ptdbg.py", "check", 1, at=at)


def test_the_overflow_is_named_and_ends_the_run(checked: tuple[Path, Any]) -> None:
    dump, ran = checked
    assert ran.returncode == 1
    assert "linear 145 is tagger" in ran.stdout
    assert f"overflow 1 of 1: {NAME}, step 0, 13 +Inf and 15 -Inf" in ran.stdout
    assert "step 0 done" not in ran.stdout  # before the update
    assert "fastcheck.OverflowDetected" in ran.stderr
    assert "Functional.linear.145.backward" in ran.stderr
    (only,) = overflows_of(dump)
    assert (only["name"], only["module"], only["step"]) == (NAME, "tagger", 0)
    assert (only["verdict"], only["posinf"], only["neginf"]) == ("origin", 13, 15)


def test_the_printed_name_dumps_that_call(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    ran = run_script("bert_crf_ptdbg.py", "list", NAME, at=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert sorted(path.name for path in (tmp_path / "dump").iterdir()) == ["step0", "step1"]
    step = tmp_path / "dump" / "step0"
    calls = calls_of(step)
    assert {(line["api"], line["module"]) for line in calls} == {
        ("Functional.linear.145", "tagger")
    }
    loaded = load_file(step / "rank0" / "tensors-00000.safetensors")

    def value(entry: dict[str, Any]) -> torch.Tensor:
        return loaded[entry["value"][1]]

    forward = next(line for line in calls if line["op"] == "aten.addmm" and "ran" not in line)
    bias, x, weight = map(value, forward["in"])
    assert torch.equal(value(forward["out"][0]), torch.addmm(bias, x, weight))
    of_x, of_weight = (line for line in calls if line.get("ran") == "aten.mm")
    gradient = value(of_x["in"][0])
    assert gradient.isfinite().all()
    assert value(of_x["out"][0]).isinf().sum() == 28
    assert torch.equal(value(of_weight["in"][0]), gradient.t())
    (of_bias,) = (line for line in calls if line.get("ran") == "aten.sum.dim_IntList")
    assert torch.equal(value(of_bias["out"][0]), gradient.sum(0, keepdim=True))


def test_a_dump_that_nobody_switches_off_is_whole(tmp_path: Path) -> None:
    ran = run_script("bert_crf_ptdbg.py", "list", "Torch_tanh_0_forward", "no-off", at=tmp_path)
    assert ran.returncode == 0 and not ran.stderr
    assert sorted(path.name for path in (tmp_path / "dump").iterdir()) == ["step0", "step1"]
    index = json.loads((tmp_path / "dump" / "step1" / "rank0" / "index.json").read_text())
    assert index["is_complete"] and index["calls"] == 2


def test_calls_are_counted_up_to_the_limit(tmp_path: Path) -> None:
    ran = run_script("bert_crf_ptdbg.py", "check", 3, at=tmp_path)
    assert ran.returncode == 1
    names = [line["name"] for line in overflows_of(tmp_path / "dump")]
    assert names == [NAME, "Torch_tanh_0_backward", "Functional_linear_144_backward"]


def test_without_a_limit_the_run_goes_on(tmp_path: Path) -> None:
    ran = run_script("bert_crf_ptdbg.py", "check", -1, at=tmp_path)
    assert ran.returncode == 0 and "step 1 done" in ran.stdout
    found = overflows_of(tmp_path / "dump")
    # Each call once, in each step: a linear makes three gradients.
    keys = [(line["step"], line["name"]) for line in found]
    assert len(set(keys)) == len(keys)
    backward = [name for step, name in keys if step == 0 and name.endswith("_backward")]
    assert backward[0] == NAME and len(backward) > 145
    # And none of the first step's forward, which was healthy; numbers begin again.
    assert not any(step == 0 and "linear" in n and n.endswith("_forward") for step, n in keys)
    assert (1, "Functional_linear_0_forward") in keys
    assert all(name.split("_", 1)[0] in ("Functional", "Torch", "Tensor") for _, name in keys)


def test_the_record_file_is_a_log_too(checked: tuple[Path, Any], capsys: Any) -> None:
    log = checked[0] / "overflow"
    view = read_log(log)
    assert [event.api for event in view.events] == ["Functional.linear.145"]
    assert len(view.records) == 1 and view.records["call"][0] == 145
    shown = main(["show", str(log), "--style", "msprobe"])
    assert shown == 0
    assert "in Functional.linear.145.backward.output.0" in capsys.readouterr().out


@pytest.fixture(scope="module")
def modes(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    at = tmp_path_factory.mktemp("modes")
    ran = run_script("ptdbg_modes.py", at=at)
    assert ran.returncode == 0 and "trained to the end" in ran.stdout, ran.stderr
    return at / "modes", ran.stderr


def dumped(modes: tuple[Path, str], mode: str) -> list[dict[str, Any]]:
    (step,) = (modes[0] / mode).iterdir()
    return calls_of(step)


def has_values(calls: list[dict[str, Any]]) -> bool:
    return any("value" in entry for line in calls for entry in (*line["in"], *line["out"]))


def test_mode_all(modes: tuple[Path, str]) -> None:
    ops = {line.get("op") for line in dumped(modes, "all")}
    assert {"aten.addmm", "aten.relu", "aten._softmax", "aten.pow.Tensor_Scalar"} <= ops
    assert has_values(dumped(modes, "all"))


def test_mode_list(modes: tuple[Path, str]) -> None:
    calls = dumped(modes, "list")
    assert {line["api"] for line in calls} == {"Functional.linear.1"}
    assert {line["direction"] for line in calls} == {"forward", "backward"}


def test_mode_range(modes: tuple[Path, str]) -> None:
    calls = dumped(modes, "range")
    assert {line["api"] for line in calls} == {
        "Functional.relu.0",
        "Functional.linear.1",
        "Functional.softmax.0",
    }


def test_mode_api_list(modes: tuple[Path, str]) -> None:
    assert [line["api"] for line in dumped(modes, "api_list")] == ["Functional.relu.0"] * 2
    # Torch.relu and Tensor.relu met nothing, and need not.
    assert "relu" not in modes[1].split("did you mean")[0]


def test_modes_without_values(modes: tuple[Path, str]) -> None:
    assert [line["api"] for line in dumped(modes, "stack")] == ["Functional.relu.0"] * 2
    for mode in ("stack", "api_stack", "summary"):
        assert dumped(modes, mode) and not has_values(dumped(modes, mode))
    assert 'mode="api_stack": records are written, without stacks' in modes[1]


def test_a_name_that_nothing_went_by(modes: tuple[Path, str]) -> None:
    assert "no call in the block has the name 'Functional_linaer_0'" in modes[1]
    assert "did you mean 'Functional.linear'" in modes[1]
    assert dumped(modes, "typo") == []


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"mode": "lst"}, "did you mean 'list'"),
        ({"mode": "acl"}, "CANN"),
        ({"mode": "list"}, "at least one name"),
        ({"mode": "range", "scope": ["Functional_relu_0"]}, "two names"),
        ({"mode": "api_list"}, "names of functions"),
        ({"mode": "api_list", "api_list": ["sofmax"]}, "did you mean 'softmax'"),
        ({"filter_switch": "on"}, '"ON" or "OFF"'),
        ({"dump_mode": ["foward"]}, "did you mean 'forward'"),
        ({"mode": "list", "scope": [145]}, "scope must be a string or a list of strings"),
    ],
)
def test_what_can_not_be_meant_is_an_error(options: dict[str, Any], says: str) -> None:
    with pytest.raises(fastcheck.ConfigError) as caught:
        ptdbg.set_dump_switch("ON", **options)
    assert says in str(caught.value)
    assert ptdbg._session.plans is None


def test_what_has_no_counterpart_is_said_once() -> None:
    _warned.clear()
    options: dict[str, Any] = {"api_list": (), "filter_switch": "ON", "dump_mode": "forward"}
    with pytest.warns(fastcheck.FastcheckWarning) as caught:
        plan, _ = dump_plan("all", (), summary_only=False, **options)
        dump_plan("all", (), summary_only=False, **options)
    assert plan == {"": {"tensors": True}} and len(caught) == 2


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("Functional_linear_145_backward", "Functional_linear_145"),
        ("Functional_linear_145_forward_output_0", "Functional_linear_145"),
        ("Tensor.add_.3.backward", "Tensor.add_.3"),
        ("layers.3 · aten.mul #3 · backward", "layers.3 · aten.mul #3"),
        ("Functional_relu_0", "Functional_relu_0"),
        ("Functional_soft_backward_relu_0", "Functional_soft_backward_relu_0"),
    ],
)
def test_a_call_comes_with_both_directions(name: str, call: str) -> None:
    assert whole_call(name) == call


def test_without_operators_modules_are_named_and_dumped(tmp_path: Path) -> None:
    pure = {"FASTCHECK_NO_EXTENSION": "1"}
    ran = run_script("bert_crf_ptdbg.py", "check", 1, at=tmp_path, env=pure)
    assert ran.returncode == 1
    assert "reading operators needs the compiled extension" in ran.stderr
    (only,) = overflows_of(tmp_path / "dump")
    assert only["name"] == "Module.tagger.Linear.backward.0"
    ran = run_script("bert_crf_ptdbg.py", "list", only["name"], at=tmp_path, env=pure)
    assert ran.returncode == 0
    calls = [line for line in calls_of(tmp_path / "dump" / "step0") if line["kind"] == "module"]
    assert {line["module"] for line in calls} == {"tagger"} and has_values(calls)
    assert {line["direction"] for line in calls} == {"forward", "backward"}


def test_names_of_both_kinds_are_two_dumps() -> None:
    names = ["Module.layers.3.attn.Attention.backward.1", "Functional_relu_0_forward"]
    plans, _ = dump_plan("list", names, (), "OFF", "all", False)
    assert plans["modules"]["modules"] == ["layers.3.attn #1"]
    assert plans["modules"]["level"] == "module" and plans[""]["ops"] == ["Functional_relu_0"]


def test_what_has_no_values_is_watched_at_module_level() -> None:
    _warned.clear()
    with pytest.warns(fastcheck.FastcheckWarning, match="the model is on meta"):
        assert _usable_level([nn.Linear(2, 2, device="meta")]) == ("module", "never")
    assert _usable_level([nn.Linear(2, 2)]) == ("op", "never")


def test_one_rank_that_reaches_the_limit_ends_all(tmp_path: Path) -> None:
    for value in values(run_ranks(overflows_on_rank_1, str(tmp_path), world_size=2)):
        assert value == ("Functional.linear.0", 2, 1)
    names = [path.name for path in (tmp_path / "overflow").glob("overflows-*")]
    assert names == ["overflows-rank1.jsonl"]


def test_functions_by_their_bare_names() -> None:
    assert api_names("relu") == ["Functional.relu", "Torch.relu", "Tensor.relu"]
    assert api_names("permute") == ["Torch.permute", "Tensor.permute"]


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """In this process, and gone afterwards."""
    own = ptdbg._Session()
    monkeypatch.setattr(ptdbg, "_session", own)
    yield own
    own.release()
    assert not torch.nn.modules.module._global_forward_pre_hooks


def test_hooks_and_models_are_checked(tmp_path: Path, session: Any) -> None:
    with pytest.raises(fastcheck.ConfigError, match="cannot be called directly"):
        ptdbg.overflow_check()
    with pytest.raises(fastcheck.ConfigError, match="not a model"):
        ptdbg.register_hook([1], ptdbg.overflow_check)  # type: ignore[arg-type]  # wrong on purpose
    with pytest.raises(fastcheck.ConfigError, match="overflow_check"):
        ptdbg.register_hook(nn.Linear(2, 2), print)
    with pytest.raises(fastcheck.ConfigError, match="CANN"):
        ptdbg.register_hook(nn.Linear(2, 2), ptdbg.overflow_check, dump_mode="acl")
    with pytest.raises(fastcheck.ConfigError, match="needs a path"):
        ptdbg.set_dump_path()
    with pytest.warns(fastcheck.FastcheckWarning, match="not a .pkl file") as caught:
        ptdbg.set_dump_path(str(tmp_path / "npu.pkl"), dump_tag="a")
    assert caught[0].filename == __file__
    assert ptdbg._session.path == str(tmp_path / "npu" / "a")


def test_the_switch_of_overflow_check(tmp_path: Path, session: Any) -> None:
    net = nn.Linear(2, 2)
    bad, good = torch.full((1, 2), float("nan")), torch.ones(1, 2)
    ptdbg.set_dump_path(tmp_path)
    ptdbg.register_hook(net, ptdbg.overflow_check)
    watch = ptdbg._session.watch
    assert watch is not None
    try:
        ptdbg.set_overflow_check_switch("OFF")
        net(bad)
        net(good)
        assert watch.count == 0
        ptdbg.set_overflow_check_switch("ON")
        net(good)
        with pytest.raises(fastcheck.OverflowDetected):
            net(bad)
    finally:
        watch.close()


def test_seeds() -> None:
    ptdbg.seed_all(seed=7)
    first = torch.rand(3)
    ptdbg.seed_all(seed=7)
    assert torch.equal(torch.rand(3), first)
    assert not torch.are_deterministic_algorithms_enabled()


def test_compare(modes: tuple[Path, str], tmp_path: Path, capsys: Any) -> None:
    place = next((modes[0] / "all").iterdir())
    sides = {"npu_dump_data_dir": str(place), "bench_dump_data_dir": str(place)}
    found = ptdbg.compare(sides, tmp_path / "out")
    assert found.agrees and (tmp_path / "out" / "compare_result.csv").exists()
    assert capsys.readouterr().out.strip()
    with pytest.raises(fastcheck.ConfigError, match="did you mean 'npu_dump_data_dir'"):
        ptdbg.compare({"npu_dump_dir": "a"})
    with pytest.raises(fastcheck.ConfigError, match="no path of one side"):
        ptdbg.compare({"npu_dump_data_dir": "a"})


def test_the_debugger_of_the_manual(tmp_path: Path) -> None:
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    debugger = ptdbg.PrecisionDebugger(dump_path=tmp_path, hook_name="dump", step=[0, 2])
    debugger.configure_hook(mode="api_list", api_list=["linear"], summary_only=True)
    for _ in range(3):
        debugger.start()
        net(torch.ones(1, 2)).sum().backward()
        ptdbg.PrecisionDebugger.stop()
        optimizer.step()
        debugger.step()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step0", "step2"]
    calls = calls_of(tmp_path / "step0")
    assert calls and all("linear" in str(call) for call in calls)


def test_a_debugger_that_is_configured_again_while_it_reads(tmp_path: Path) -> None:
    net = nn.Linear(2, 2)
    debugger = ptdbg.PrecisionDebugger(dump_path=tmp_path, hook_name="dump")
    debugger.start()
    net(torch.ones(1, 2))
    debugger.configure_hook(summary_only=True)
    net(torch.ones(1, 2))  # no start() yet
    assert (tmp_path / "step0/rank0/tensors-00000.safetensors").exists()
    before = calls_of(tmp_path / "step0")
    debugger.start()
    net(torch.ones(1, 2))
    debugger.stop()
    assert not (tmp_path / "step0/rank0/tensors-00000.safetensors").exists()
    assert len(calls_of(tmp_path / "step0")) == len(before) > 0


def test_the_debugger_checks_overflows(tmp_path: Path) -> None:
    net = nn.Linear(2, 2)
    with pytest.raises(fastcheck.ConfigError, match="needs the model"):
        ptdbg.PrecisionDebugger(dump_path=tmp_path, hook_name="overflow_check")
    debugger = ptdbg.PrecisionDebugger(tmp_path, "overflow_check", model=net)
    debugger.configure_hook(overflow_nums=1)
    net(torch.full((1, 2), float("inf")))  # before start()
    debugger.start()
    with pytest.raises(fastcheck.OverflowDetected):
        net(torch.full((1, 2), float("inf"))).sum().backward()
        debugger.step()
    assert debugger._run._watch is not None
    debugger._run._watch.close()
    assert overflows_of(tmp_path)


def test_the_debugger_is_told_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(fastcheck.ConfigError, match="hook_name"):
        ptdbg.PrecisionDebugger(tmp_path, "dumps")
    with pytest.raises(fastcheck.ConfigError, match="dump_path= is missing"):
        ptdbg.PrecisionDebugger(hook_name="dump")
    monkeypatch.setattr(ptdbg.PrecisionDebugger, "_current", None)
    with pytest.raises(fastcheck.ConfigError, match="no debugger yet"):
        ptdbg.PrecisionDebugger.start()


def test_compare_distributed_and_what_is_refused(tmp_path: Path, capsys: Any) -> None:
    for name in ("a", "b"):
        with fastcheck.Dumper(tmp_path / name):
            torch.ones(3).mul(2)
    found = ptdbg.compare_distributed(tmp_path / "a", tmp_path / "b", tmp_path / "out")
    assert found.agrees and (tmp_path / "out" / "compare_result.csv").exists()
    with pytest.raises(fastcheck.ConfigError, match="CANN"):
        ptdbg.set_backward_input(["x.npy"])
    with pytest.raises(fastcheck.ConfigError, match="fastcheck show"):
        ptdbg.parse()
