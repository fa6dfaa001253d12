"""``fastcheck run``: programs that do not import fastcheck, each in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from support.processes import run_python
from support.ranks import training_workers
from support.ranks.ranks_harness import run_ranks
from support.trainers import in_lab

pytestmark = pytest.mark.usefixtures("fresh_start")

TRAIN = """
    import sys
    import torch
    from torch import nn
    import helper  # beside the program

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    bad = int(sys.argv[1])
    for step in range(5):
        x = torch.randn(3, 4)
        if step == bad:
            x[1, 2] = float("inf")
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        print(loss.item())
    print(sys.argv[1:], __name__, helper.NAME)
"""


def program(text: str, name: str = "programs/train.py") -> str:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))
    (path.parent / "helper.py").write_text("NAME = 'helper'\n")
    return name


def run(
    *arguments: str, command: Any = ("-m", "fastcheck", "run"), is_forked: bool = True
) -> subprocess.CompletedProcess[str]:
    path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    if is_forked:
        return run_python(*command, *arguments, env=path)
    return subprocess.run(
        [sys.executable, *command, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **path},
    )


def test_a_healthy_program_runs_as_it_is() -> None:
    train = program(TRAIN)
    plain = run(train, "9", "--flag", command=())
    watched = run(train, "9", "--flag")
    assert (watched.returncode, watched.stdout, watched.stderr) == (0, plain.stdout, plain.stderr)
    assert "['9', '--flag'] __main__ helper" in watched.stdout


def test_a_fault_stops_it_with_the_report() -> None:
    done = run("--log-dir", "log", program(TRAIN), "3", is_forked=False)
    assert done.returncode == 1 and len(done.stdout.splitlines()) == 3
    assert re.match(r"Traceback .*\n  File \".*train\.py\", line \d+, in <module>", done.stderr)
    assert "fastcheck.OverflowDetected: 1 +Inf in input[0]" in done.stderr
    assert list(Path("log").glob("records-*.bin"))


def test_options_are_those_of_install() -> None:
    done = run("--overflow-nums", "-1", "--level", "op", "--summary", program(TRAIN), "3")
    assert done.returncode == 0
    assert "aten." in done.stderr and "helper" in done.stdout
    for wrong, said in (
        (("--level", "opp"), "did you mean 'op'?"),
        (("--every", "0"), "every must be an int >= 1"),
        (("--level", "op", "--record", "range"), "for module level"),
    ):
        done = run(*wrong, program(TRAIN), "9")
        assert (done.returncode, done.stdout) == (2, "") and said in done.stderr
    done = run("--include", "nothing.*", program(TRAIN), "9")
    assert done.returncode == 1 and "matches no module" in done.stderr
    assert "nothing was observed" not in done.stderr  # for a model was found


def test_a_module() -> None:
    program(TRAIN, "package/train.py")
    Path("helper.py").write_text("NAME = 'of the folder'\n")
    done = run("-m", "package.train", "9")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "['9'] __main__ of the folder"


@pytest.mark.parametrize(
    ("text", "code", "shown"),
    [
        ("raise SystemExit(3)", 3, "nothing was observed"),
        ("import sys; sys.exit('bye')", 1, "bye"),
        ("def f():\n    1 / 0\nf()", 1, "ZeroDivisionError"),
        ("print('no optimizer')", 0, "nothing was observed"),
        ("import helper, torch\ntorch.optim.SGD([torch.ones(2)])", 0, "nothing was observed"),
    ],
)
def test_the_exit_code_is_the_program_s(text: str, code: int, shown: str) -> None:
    done = run(program(text))
    assert done.returncode == code and shown in done.stderr
    assert "cli/run.py" not in done.stderr and "runpy" not in done.stderr


def test_a_program_that_is_not_there() -> None:
    done = run("nothing.py")
    assert done.returncode == 2 and "there is no such program" in done.stderr
    done = run("-m", "no_such_module.train")
    assert done.returncode == 2 and "there is no such module" in done.stderr


@pytest.mark.parametrize(
    ("options", "environment", "message"),
    [
        (["--sinks", "nope"], {}, "unknown sink 'nope'"),
        (["--sinks", "webhook:ftp://host"], {}, "posts to webhook:https://"),
        (["--sinks", "wandb:x"], {}, "sink 'wandb' can't write there"),
        ([], {"FASTCHECK_SINKS": "nope"}, "unknown sink 'nope'"),
        (["--log-dir", "programs/train.py"], {}, "the log can't be written"),
        (["--level", "op"], {"FASTCHECK_NO_EXTENSION": "1"}, "extension is switched off"),
        (["--every", "0"], {}, "every must be"),
        (["--record", "range", "--level", "op"], {}, "module level"),
    ],
)
def test_options_are_refused_before_the_program_begins(
    options: list[str], environment: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    done = run(*options, program("print('no optimizer')"), is_forked=False)
    assert done.returncode == 2 and message in done.stderr and not done.stdout


def test_two_models_are_observed_each() -> None:
    done = run(
        "--summary",
        program(
            """
            import torch
            from torch import nn

            class Trainer:  # parts of no common module
                def __init__(self):
                    self.one, self.two = nn.Linear(2, 2), nn.Linear(2, 1)

            trainer = Trainer()
            wrapped = nn.Sequential(trainer.two)
            first = torch.optim.SGD(trainer.one.parameters(), lr=0.1)
            second = torch.optim.SGD(trainer.two.parameters(), lr=0.1)
            again = torch.optim.SGD(trainer.one.parameters(), lr=0.1)
            wrapped(trainer.one(torch.ones(1, 2))).sum().backward()
            first.step()
            second.step()
            """
        ),
    )
    assert done.returncode == 0, done.stderr
    # Linear, and Sequential, which contains the other one.
    assert done.stderr.count("watched ") == 2, done.stderr


OF_RANKS = """
        import torch
        from torch import nn
        from torch.nn.parallel import DistributedDataParallel

        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group("gloo")
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Linear(4, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(6):
            x = torch.ones(2, 4)
            if step == 3 and torch.distributed.get_rank() == 1:
                x[0, 0] = float("nan")
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
        print("not stopped")
        """


def test_ranks_stop_together() -> None:
    train = str(Path(program(OF_RANKS)).resolve())
    ranks = run_ranks(training_workers.runs_a_program, train, world_size=2)
    for rank in ranks:
        assert rank.value == 1 and "not stopped" not in rank.output
        assert rank.output.count("fastcheck.OverflowDetected:") == 1, rank.output
    assert sum("rank 1 prints the report" in rank.output for rank in ranks) == 1


@in_lab
@pytest.mark.skipif(sys.platform != "linux", reason="gloo over the loopback interface")
def test_two_ranks_of_torchrun_stop_together() -> None:
    train = program(OF_RANKS)
    done = run(
        *("--standalone", "--nproc-per-node", "2", "-m", "fastcheck", "run", train),
        command=("-m", "torch.distributed.run"),
        is_forked=False,
    )
    assert done.returncode == 1 and "not stopped" not in done.stdout, done.stderr[-3000:]
    assert done.stderr.count("fastcheck.OverflowDetected:") == 2, done.stderr[-3000:]


@pytest.mark.parametrize("watch", [["--watch"], ["--no-watch"]])
def test_sinks_and_the_watch(watch: list[str]) -> None:
    pytest.importorskip("prometheus_client")
    done = run("--sinks", "prometheus:run.prom", *watch, program(TRAIN), "3")
    assert done.returncode == 1, done.stderr
    found = Path("run.prom").read_text()
    assert '\nfastcheck_stopped_at_step{run="run"} 3.0\n' in found
    assert ("fastcheck_watch_events" in found) is (watch == ["--watch"])
