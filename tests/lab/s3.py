"""fastcheck collect and fleet over s3://, with moto as the server. `make test-s3` runs it.

Only what an object store does otherwise than a disk is tested here: files appear whole by an
upload, there are no folders, and the engine reads through pyarrow.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fastcheck.fleet.manifest import counted_files
from fastcheck.fleet.store import Folder
from fastcheck.record.format import RECORD_BYTES
from support.programs.synthetic_fleets import generator
from synthetic_log import write_log

parquet = pytest.importorskip("pyarrow.parquet")
synthetic = generator()
SITES, STEPS = 40, 60


@pytest.fixture(scope="module", autouse=True)
def server() -> Iterator[None]:
    """A bucket on this machine, which pyarrow finds by the environment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [os.environ["FASTCHECK_MOTO"], "-p", str(port)]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    os.environ.update(
        AWS_ENDPOINT_URL=url,
        AWS_ACCESS_KEY_ID="key",
        AWS_SECRET_ACCESS_KEY="secret",
        AWS_DEFAULT_REGION="us-east-1",
        AWS_EC2_METADATA_DISABLED="true",
    )
    try:
        for _ in range(200):
            try:
                request = urllib.request.Request(f"{url}/bucket", method="PUT")
                urllib.request.urlopen(request).close()
                break
            except OSError:
                time.sleep(0.1)
        yield
    finally:
        child.kill()
        child.wait()


def command(*words: str, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "fastcheck", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    return done.stdout


def rows_of(place: str) -> Any:
    folder, keys = Folder(place), []
    for path in counted_files(folder, "r"):
        table = parquet.read_table(folder.open(f"run=r/{path}"))
        keys += list(zip(*(table[name].to_pylist() for name in ("step", "site", "rank", "call"))))
    return keys


def test_a_collector_that_is_killed_loses_and_doubles_no_row(tmp_path: Path) -> None:
    """While the log grows; and then a merge of its files."""
    place = "s3://bucket/killed"
    write_log(str(tmp_path / "whole"), SITES, STEPS, 0)
    log = tmp_path / "log"
    log.mkdir()
    for path in (tmp_path / "whole").iterdir():
        if not path.name.startswith("records"):
            (log / path.name).write_bytes(path.read_bytes())
    (segment,) = (tmp_path / "whole").glob("records*")
    data, at = segment.read_bytes(), 0
    words = ["collect", str(log), "--out", place, "--run", "r", "--node", "n"]
    words += ["--steps-per-file", "2"]
    rng = random.Random(3)
    with open(log / segment.name, "ab") as file:
        for number in range(1, 7):
            # Waits for nothing where the last one was killed before its first file.
            child = subprocess.Popen(
                [sys.executable, "-m", "fastcheck", *words, "--follow", "--interval", "0.01"]
            )
            until = time.monotonic() + rng.uniform(2.0, 4.0)
            while time.monotonic() < until:
                end = min(at + RECORD_BYTES * rng.randrange(1, 40), len(data) * number // 6)
                file.write(data[at:end])
                file.flush()
                at = end
                time.sleep(0.02)
            child.send_signal(signal.SIGKILL)
            child.wait()
    assert at == len(data)
    command(*words)
    rows = rows_of(place)
    assert len(rows) == len(set(rows)) == SITES * STEPS


@pytest.mark.parametrize("kind", ["bitflip", "scale", ""])
def test_the_verdict_is_that_of_the_same_files_on_a_disk(tmp_path: Path, kind: str) -> None:
    shape = synthetic.Shape(ranks=32, sites=20, steps=24, shards=2)
    faults = [synthetic.choose_fault(shape, kind, 5)] if kind else []
    found = []
    for place in (str(tmp_path / "fleet"), f"s3://bucket/{kind or 'healthy'}"):
        synthetic.write_fleet(Folder(place), shape, faults, 5)
        report = json.loads(command("fleet", place, "--json", code=1 if kind else 0))
        found.append(report)
    assert found[0] == found[1]
    assert bool(found[0]["accused"]) == bool(kind)


def test_what_is_not_there_is_named() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "fastcheck", "fleet", "s3://no-such-bucket/fleet"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and "no-such-bucket" in done.stderr
