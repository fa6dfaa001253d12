"""Names in the style of msprobe and ptdbg_ascend: conversion both ways, and where they appear."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fastcheck
from fastcheck.cli.main import main
from fastcheck.record.site import Site
from fastcheck.utils.names.msprobe import KINDS, TensorName, msprobe_api_of, msprobe_name, parse
from support.programs.op_level import Attention, model_with, train
from support.programs.training import Net, stopped

pytestmark = pytest.mark.usefixtures("op_observer")


def site(op: str = "", direction: str = "forward", role: str = "output", index: int = 0) -> Site:
    return Site("layers.3.attn", "Attention", direction, role, index, role, op or None)


@pytest.mark.parametrize(
    ("where", "call", "name"),
    [
        (
            site("aten._softmax", "backward", "grad_input"),
            7,
            "Functional.softmax.7.backward.output.0",
        ),
        (site("aten.add.Tensor", role="input", index=1), 3, "Tensor.add.3.forward.input.1"),
        (site("aten.mm"), 0, "Torch.mm.0.forward.output.0"),
        (site("aten.add_.Tensor", "optimizer"), 2, "Tensor.add_.2.optimizer.output.0"),
        (site("aten.relu", "backward", "grad_output"), 0, "Functional.relu.0.backward.input.0"),
        (site("c10d.allreduce_"), 1, "Distributed.allreduce.1.forward.output.0"),
        (site("mylib.fused.out"), 1, "Custom.mylib.fused.1.forward.output.0"),
        (site(), 0, "Module.layers.3.attn.Attention.forward.0.output.0"),
        (Site("", "GPT", "forward", "input", 2, "y"), 1, "Module.GPT.forward.1.input.2"),
        (
            Site("fc", "Linear", "optimizer", "param", 0, "weight"),
            0,
            "Module.fc.Linear.parameters.weight",
        ),
        (
            Site("fc", "Linear", "optimizer", "param_grad", 0, "bias"),
            0,
            "Module.fc.Linear.parameters_grad.bias",
        ),
    ],
    ids=str,
)
def test_spelt_and_parsed(where: Site, call: int, name: str) -> None:
    assert msprobe_name(where, call) == name
    parsed = parse(name)
    assert str(parsed) == name
    assert parsed.matches(where, call)
    if parsed.call is not None:
        assert not parsed.matches(where, call + 1)


def test_what_has_no_name_keeps_its_own() -> None:
    loss = Site("", "", "forward", "loss", 0, "loss")
    assert msprobe_name(loss, 0) == str(loss)


@pytest.mark.parametrize(
    "name",
    [
        "Functional.softmax",
        "Functional.soft*",
        "Functional.softmax.7",
        "Functional.softmax.7.backward",
        "Functional.softmax.7.backward.output",
        "Functional_softmax_7_backward",
        "Functional_softmax_7_backward_output_0",
        "Functional_softmax_7_backward_output.0",
    ],
)
def test_beginnings_and_underscores(name: str) -> None:
    place = site("aten._softmax", "backward", "grad_input")
    assert parse(name).matches(place, 7)
    assert not parse(name).matches(site("aten.relu", "backward", "grad_input"), 7)


@pytest.mark.parametrize(
    ("written", "plain"),
    [
        ("__add__", "add"),
        ("__iadd__", "add_"),
        ("__getitem__", "__getitem__"),
        ("__radd__", "add"),
        ("__truediv__", "div"),
        ("__itruediv__", "div_"),
        ("__matmul__", "matmul"),
        ("__and__", "bitwise_and"),
    ],
)
def test_the_operators_of_python(written: str, plain: str) -> None:
    assert parse(f"Tensor.{written}.0.forward") == TensorName("Tensor", plain, 0, "forward")


@pytest.mark.parametrize(("text", "near"), [("Functionl.softmax.7", "Functional"), ("loss", "")])
def test_what_is_no_name(text: str, near: str) -> None:
    with pytest.raises(fastcheck.ConfigError, match=f"not the name of a tensor(?s:.*){near}"):
        parse(text)


def test_every_operator_has_a_kind() -> None:
    for name in torch._C._dispatch_get_all_op_names():
        kind, api = msprobe_api_of(name.replace("::", ".", 1))
        assert kind in KINDS and api


def test_every_site_of_a_run_comes_back() -> None:
    model = nn.Sequential(Attention(), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4))
    monitor = fastcheck.install(model, level="op")
    optimizer = torch.optim.Adam(model.parameters())
    train(model, 1, shape=(2, 6, 8), optimizer=optimizer)
    names = set()
    for record in monitor.records():
        place, call = monitor.sites[int(record["site"])], int(record["call"])
        if place.role in ("loss", "learning_rate"):
            continue  # msprobe has no names for these
        names.add(msprobe_name(place, call))
        assert parse(msprobe_name(place, call)).matches(place, call)
    assert {"Functional.softmax.0.forward.output.0", "Torch.addmm.0.forward.output.0"} & names
    assert "Functional.layer_norm.0.backward.output.0" in names


# Where they are printed


def bad(**options: Any) -> Any:
    model = model_with(lambda x: torch.sqrt(-x.abs() - 1))
    return model, fastcheck.install(model, level="op", **options)


def test_a_stop_in_this_style() -> None:
    model, _ = bad(stop=fastcheck.Stop(style="msprobe"))
    text = str(stopped(train, model, 1))
    assert "in Torch.sqrt.0.forward.output.0 at step 0" in text
    assert "aten.sqrt #0" in text  # the dispatcher's own name is printed as well


def test_a_summary_in_this_style() -> None:
    model, monitor = bad(overflow_nums=-1)
    train(model, 1)
    assert "Torch.sqrt.forward.output.0" in monitor.summary(style="msprobe")
    assert "Torch.sqrt.0.forward.output.0" in monitor.summary(style="msprobe")
    assert "Torch.sqrt" not in monitor.summary()
    with pytest.raises(fastcheck.ConfigError, match="unknown style"):
        monitor.summary(style="msprob")


def test_an_unknown_style_is_an_error() -> None:
    with pytest.raises(fastcheck.ConfigError, match=r"unknown style(?s:.*)'msprobe'"):
        fastcheck.install(Net(), stop=fastcheck.Stop(style="msprob"))


def test_show_takes_and_prints_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, monitor = bad(overflow_nums=-1, log_dir=tmp_path / "log")
    train(model, 1)
    monitor.remove()
    log = str(tmp_path / "log")
    assert main(["show", log, "--style", "msprobe"]) == 0
    assert "Torch.sqrt.0.forward.output.0" in capsys.readouterr().out
    assert main(["show", log, "--site", "Torch.sqrt", "--json"]) == 0
    records = json.loads(capsys.readouterr().out)["records"]
    assert records and {record["site"]["op"] for record in records} == {"aten.sqrt"}
    assert main(["show", log, "--site", "Torch.sqrt.0.backward", "--json"]) == 0
    records = json.loads(capsys.readouterr().out)["records"]
    assert {record["site"]["direction"] for record in records} == {"backward"}
