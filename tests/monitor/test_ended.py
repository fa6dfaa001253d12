"""A run that an exception of the program's own ends, about numbers that were not read before."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any, Callable

import pytest
import torch
from torch import nn

import fastcheck
from support.processes import run_python

Use = Callable[[torch.Tensor], Any]


def masked(logits: torch.Tensor) -> None:
    hidden = torch.ones_like(logits, dtype=torch.bool)
    hidden[1:, 0] = False
    probs = logits.masked_fill(hidden, -torch.inf).softmax(-1)
    torch.distributions.Categorical(probs=probs, validate_args=True)


def checked(logits: torch.Tensor) -> None:
    loss = (logits * 0).sum() / (logits * 0).sum()
    assert not torch.isnan(loss), "NaN loss"


def sampled(logits: torch.Tensor) -> None:
    with torch.no_grad():
        spread = logits * 0
        ratio = spread / spread
        sys.exit(f"mean {ratio.mean()}")


def of_data(logits: torch.Tensor) -> None:
    target = logits.detach() * torch.nan
    raise LookupError(f"{len(target)} targets, of which some are missing on purpose")


def healthy(logits: torch.Tensor) -> None:
    raise ValueError(f"{len(logits)} rows")


def said(use: Use) -> str:
    """The warnings of a run that ends in its second step."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises((Exception, SystemExit)), fastcheck.install(model):
            for step in range(2):
                logits = model(torch.rand(8, 4))
                logits.sum().backward()
                if step:
                    use(logits)
    assert all(one.category is fastcheck.FastcheckWarning for one in caught)
    return " ".join(" ".join(str(one.message) for one in caught).split())


@pytest.mark.parametrize(
    ("use", "told", "line"),
    [
        (masked, "ValueError ended the run in step 0, where probs held 3 NaN", "probs ="),
        (checked, "AssertionError ended the run in step 0, where loss held 1 NaN", "loss ="),
        (sampled, "SystemExit ended the run in step 0, where ratio held 24 NaN", "ratio ="),
    ],
)
def test_what_the_program_held(use: Use, told: str, line: str) -> None:
    text = said(use)
    assert told in text
    assert f"in {use.__name__}: {line}" in text


def test_the_operator_and_what_to_try() -> None:
    of_a_row = "try: SoftmaxBackward0 makes NaN of a row of nothing but -inf, as one that is masked"
    assert of_a_row in said(masked)
    assert "DivBackward0: the first operator in the graph of loss" in said(checked)
    without_graph = said(sampled)
    assert "ratio has no graph: data, or computed under no_grad()" in without_graph
    assert "try: Look at the line that assigns it: it divides" in without_graph


@pytest.mark.parametrize("use", [of_data, healthy])
def test_other_errors(use: Use) -> None:
    assert said(use) == ""


@pytest.mark.parametrize("command", [[], ["-m", "fastcheck", "run"], ["-i"]])
def test_a_process_that_an_exception_ends(command: list[str], tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    install = "" if "run" in command else "import fastcheck; monitor = fastcheck.install(model)"
    script.write_text(
        textwrap.dedent(
            f"""
            import torch
            model = torch.nn.Linear(4, 3)
            {install}
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            def act(x):
                logits = model(x)
                return torch.distributions.Categorical(logits=logits / (0 * logits))
            act(torch.rand(8, 4))
            """
        )
    )
    if "-i" in command:  # at its prompt the program may go on
        options = {"capture_output": True, "text": True, "input": "", "cwd": tmp_path}
        done = subprocess.run([sys.executable, *command, str(script)], check=False, **options)
        assert "ValueError" in done.stderr
        assert "ended the run" not in " ".join(done.stderr.split())
        return
    done = run_python(*command, script, cwd=tmp_path)
    text = " ".join(done.stderr.split())
    assert done.returncode == 1
    assert text.count("ended the run in step") == 1
    assert "ValueError ended the run in step 0, where logits held" in text
    assert "DivBackward0" in text
