"""The doors to prove(): the command, the fixture of pytest, trainers."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fastcheck
from fastcheck.cli.main import main
from support.browser import PROGRAM as BROWSER
from support.browser import browser
from support.page_data import inflated
from support.processes import run_python

PROGRAM = """
import torch
from torch import nn

def step():
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    return model, torch.randn(4, 4), lambda x: model(x).square().mean()

def leaking():
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    return model, torch.randn(4, 4), lambda x: model(x - x[0]).square().mean()

def nothing():
    return 3
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(PROGRAM)
    return path


def test_the_command_says_what_holds(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prove", f"{program}:step"]) == 0
    assert "rows in another order" in capsys.readouterr().out


def test_the_command_proves_nothing_without_a_relation(
    program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A status of 0 would be taken for a proof."""
    assert main(["prove", f"{program}:step", "--relations", "packed"]) == 2
    assert "nothing is proved" in capsys.readouterr().err


def test_the_command_fails_where_a_relation_differs(
    program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    html = program.with_suffix(".html")
    target = ["prove", f"{program}:leaking", "--relations", "permuted", "packed"]
    assert main([*target, "--json", "--html", str(html)]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["fastcheck"], found["format"], found["holds"]) == ("prove", 1, False)
    assert [one["state"] for one in found["outcomes"]] == ["differs", "not asked"]
    page = html.read_text()
    held = json.loads(inflated(page, "header"))
    assert held["kind"] == "proof" and held["outcomes"] == found["outcomes"]
    for text in ("0 hold, 1 differ", "first place: the model (forward)", "no padding mask"):
        assert text in page


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_the_page_in_a_browser(tmp_path: Path) -> None:
    path, model = tmp_path / "proof.html", nn.Linear(2, 2)
    fastcheck.prove(
        lambda x: model(x).mean(), torch.ones(2, 2), model=model, relations="again", html=path
    )
    with browser() as window:
        window.open(path, "document.documentElement.dataset.ready === 'true'")
        assert window.value("document.querySelectorAll('tbody tr').length") == 1
        assert window.problems == [] and window.requests == [path.as_uri()]


def test_a_page_that_cannot_be_written_is_wrong_usage(
    program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = program / "no folder" / "page.html"
    assert main(["prove", f"{program}:step", "--relations", "again", "--html", str(place)]) == 2
    assert "the page can't be written" in capsys.readouterr().err


@pytest.mark.parametrize("target", ["{}", "{}:unknown", "{}:nothing", "/no/file.py:step"])
def test_the_command_refuses_what_is_no_step(
    program: Path, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["prove", target.format(program)]) == 2
    assert "expected:" in capsys.readouterr().err


TESTS = """
import os, pytest, torch
from torch import nn

model = nn.Linear(4, 2)

def test_right(fastcheck_prove, request):
    proof = fastcheck_prove(lambda x: model(x).square().mean(), torch.ones(4, 4), model=model)
    assert proof.holds and request.node.get_closest_marker("fastcheck_prove")

@pytest.mark.fastcheck_prove(relations=["permuted"])
def test_wrong(fastcheck_prove):
    x = torch.randn(4, 4)
    fastcheck_prove(lambda x: model(x - x[0]).square().mean(), x, model=model)

def test_other():
    assert False

SCALE = float(os.environ.get("SCALE", 1))

@pytest.mark.parametrize("width", [3])
@pytest.mark.fastcheck_golden(also=[])
def test_golden(fastcheck_golden, width):
    torch.manual_seed(0)
    width = width if SCALE else 5
    model = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(x):
        loss = (model(x) * SCALE).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    fastcheck_golden(step, torch.randn(6, 4), model=model, optimizer=optimizer)

def test_trains():
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        (model(torch.ones(4, 4)).sum() * float("inf" if step == 2 else 1)).backward()
        optimizer.step()

@pytest.mark.parametrize("value", [1.0, float("nan")])
@pytest.mark.parametrize("compiled", [False, True])
def test_without_an_optimizer(value, compiled):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    inner = torch.compile(model[0], backend="eager", fullgraph=True) if compiled else model[0]
    model[2](inner(torch.ones(4, 4)) * value)

def test_that_raises_by_itself():
    model = nn.Linear(4, 2)
    model(torch.full((4, 4), float("nan") if SCALE == 1 else 1.0))
    raise KeyError("its own")
"""


def test_the_plugin_of_pytest(tmp_path: Path) -> None:
    path = tmp_path / "test_step.py"
    path.write_text(TESTS)
    command = ("-m", "pytest", "-p", "fastcheck_pytest", path, "--strict-markers")

    def run(*options: str, **variables: str) -> str:
        environment = {"PYTEST_ADDOPTS": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **variables}
        return run_python(*command, *options, cwd=tmp_path, env=environment).stdout

    shown = run("-m", "fastcheck_prove")
    assert "1 failed, 1 passed, 8 deselected" in shown
    assert re.search("rows in another order +differs", shown)
    only = ("-m", "fastcheck_golden")
    file = tmp_path / "golden/test_step-test_golden_3_.pt"
    assert f"there is no {file}: pytest --fastcheck-update writes it" in run(*only)
    assert "1 passed" in run(*only, "--fastcheck-update") and file.exists()
    assert "1 passed" in run(*only) and "1 passed" in run(*only, SCALE=str(1 + 2**-23))
    assert re.search("golden record +differs", run(*only, SCALE="1.001"))
    assert "the golden record is of another step" in run(*only, SCALE="0")
    ordinary = ("-k", "test_trains or without_an_optimizer")
    assert "5 passed" in run(*ordinary)
    shown = run(*ordinary, "--fastcheck")
    assert "3 failed, 2 passed" in shown and "FastcheckWarning" not in shown
    assert len(re.findall(r"^E +fastcheck.OverflowDetected: ", shown, re.MULTILINE)) == 3
    assert "KeyError: 'its own'" in run("-k", "by_itself", "--fastcheck", SCALE="2")
    assert "NaN in input[0], the batch given to" in run("-k", "by_itself", "--fastcheck")


def test_a_trainer_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=30,
        n_embd=16,
        n_layer=2,
        n_head=2,
        n_positions=16,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = transformers.GPT2LMHeadModel(config)
    ids = torch.randint(3, 30, (8, 6))
    data = [
        {"input_ids": row, "labels": row, "attention_mask": torch.ones(6).long()} for row in ids
    ]
    options = transformers.TrainingArguments(
        str(tmp_path), use_cpu=True, per_device_train_batch_size=4, report_to=[]
    )
    trainer = transformers.Trainer(model=model, args=options, train_dataset=data)
    before = torch.get_rng_state()
    proof = fastcheck.callbacks.prove_trainer(trainer, relations=["again", "permuted", "padded"])
    assert [one.state for one in proof.outcomes] == ["holds"] * 3
    assert torch.equal(before, torch.get_rng_state())


def test_a_trainer_of_lightning() -> None:
    lightning = pytest.importorskip("lightning")

    class Net(lightning.LightningModule):  # type: ignore[misc,name-defined]  # its base is Any where lightning is missing
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def training_step(self, batch: Any, index: int) -> Any:
            return self.layer(batch - batch[0]).square().mean()

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=4)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning.Trainer(logger=False, enable_checkpointing=False, accelerator="cpu")
    proof = fastcheck.callbacks.prove_trainer(trainer, model=Net(), relations=["permuted"])
    assert proof["rows in another order"].state == "differs"


def test_another_trainer_is_refused() -> None:
    with pytest.raises(fastcheck.ConfigError, match="no step of this trainer"):
        fastcheck.callbacks.prove_trainer(object())
