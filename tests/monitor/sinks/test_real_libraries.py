"""Sinks against the real libraries, read back with their own readers. Each skips without its
library: requirements-dev.txt has tensorboard alone.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import fastcheck
from support.programs.training import Apply, chain, train
from support.trackers import stopped_run

pytestmark = [
    pytest.mark.usefixtures("fresh_start"),
    # What the libraries warn of themselves.
    pytest.mark.filterwarnings("default:::(?!fastcheck)"),
]


@pytest.mark.parametrize("is_given", [False, True])
def test_tensorboard(is_given: bool) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    stop = stopped_run(SummaryWriter("runs/mine") if is_given else "tensorboard")
    (folder,) = Path("runs").iterdir()
    assert folder.name == "mine" if is_given else folder.name.endswith("-fastcheck")
    events = EventAccumulator(str(folder))
    events.Reload()
    assert [e.step for e in events.Scalars("fastcheck/loss")] == [0, 1]
    assert [(e.step, e.value) for e in events.Scalars("fastcheck/events")][2:] == [(2, 1.0)]
    assert len(events.Tags()["scalars"]) <= 50
    (text,) = events.Tensors("fastcheck/stop/text_summary")
    assert str(stop).splitlines()[0] in text.tensor_proto.string_val[0].decode()


@pytest.fixture
def wandb_run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = wandb.init(project="p", mode="offline", dir=".")
    yield run
    run.finish()


def test_wandb(wandb_run: Any) -> None:
    """The user's own rows keep their numbers and their values."""
    import wandb

    model = chain(fc=nn.Linear(8, 8), hole=Apply(), out=nn.Linear(8, 8))
    monitor = fastcheck.install(model, sinks="wandb")
    for step in range(3):
        train(model, 1)
        wandb.log({"mine": step}, step=10 * step)
    monitor.remove()
    wandb_run.finish()
    rows = wandb_rows(Path(wandb_run.dir).parent)
    assert [(row["_step"], row["mine"]) for row in rows if "mine" in row] == [
        (0, 0),
        (10, 1),
        (20, 2),
    ]
    written = [row for row in rows if "fastcheck/loss" in row]
    assert written and written[-1]["fastcheck/step"] == 2
    assert written[-1]["fastcheck/learning_rate"] == 0.01


def test_the_stop_in_wandb(wandb_run: Any) -> None:
    stop = stopped_run("wandb")
    assert wandb_run.summary["fastcheck/stop"] == str(stop)


def wandb_rows(folder: Path) -> list[dict[str, Any]]:
    """The history of an offline run."""
    from wandb.proto import wandb_internal_pb2

    (path,) = folder.glob("*.wandb")
    deadline = time.monotonic() + 10
    while path.stat().st_size < 100 and time.monotonic() < deadline:
        time.sleep(0.1)  # W&B's own process writes it
    rows = []
    for data in logged(path.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            row = {
                item.key or ".".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            rows.append(row)
    return rows


def logged(data: bytes) -> Iterator[bytes]:
    """The records of a file in the format of LevelDB's log: blocks of 32 KiB of pieces, each with
    checksum, length and kind (1: whole, 2, 3, 4: first, middle, last). wandb has no public reader.
    """
    at, held = 7, b""  # after W&B's own header
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        held += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield held
            held = b""


def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "store").as_uri())
    with mlflow.start_run() as run:
        stop = stopped_run("mlflow")
    client, run_id = mlflow.MlflowClient(), run.info.run_id
    history = client.get_metric_history(run_id, "fastcheck/events")
    assert [(one.step, one.value) for one in history] == [(0, 0), (1, 0), (2, 1)]
    text = Path(client.download_artifacts(run_id, "fastcheck-stop.txt")).read_text()
    assert str(stop) in text


def test_trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "store"))
    trackio = pytest.importorskip("trackio")
    monkeypatch.setattr("trackio.utils.TRACKIO_DIR", tmp_path / "store", raising=False)
    trackio.init(project="p", name="r", embed=False)
    stopped_run("trackio")
    trackio.finish()
    from trackio.sqlite_storage import SQLiteStorage

    rows = SQLiteStorage.get_logs("p", "r")
    found = [(row["step"], row["fastcheck/events"]) for row in rows if "fastcheck/events" in row]
    assert found == [(0, 0), (1, 0), (2, 1)]


def test_aim(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read back from the run itself: a closed run is read through an index that aim makes later."""
    aim = pytest.importorskip("aim")
    made: list[Any] = []
    monkeypatch.setattr(aim.Run, "close", lambda run: made.append(run))
    aim.Repo.from_path(".", init=True)
    stop = stopped_run("aim")
    (run,) = made
    info = run.collect_sequence_info(("metric", "texts"))
    (events,) = [one["values"] for one in info["metric"] if one["name"] == "fastcheck/events"]
    assert (events["first_step"], events["first"]) == (0, 0)
    assert (events["last_step"], events["last"]) == (2, 1)
    (text,) = [one["values"] for one in info["texts"] if one["name"] == "fastcheck/stop"]
    assert str(stop).splitlines()[0] in text["last"].data
