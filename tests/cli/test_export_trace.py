"""fastcheck export LOG run.trace.json: what Perfetto opens."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from fastcheck.cli.main import main
from fastcheck.log.reader import read_log
from support.programs import synthetic_logs


def trace(log: Path, out: Path) -> list[dict[str, Any]]:
    assert main(["export", str(log), str(out)]) == 0
    entries: list[dict[str, Any]] = json.loads(out.read_text())["traceEvents"]
    return entries


def test_sites_are_counters_and_events_are_instants(tmp_path: Path) -> None:
    synthetic_logs.write(tmp_path / "log", 12, 20, ranks=2)
    entries = trace(tmp_path / "log", tmp_path / "run.trace.json")
    view = read_log(tmp_path / "log")
    names = [e["args"]["name"] for e in entries if e["ph"] == "M"]
    assert names == ["rank 0", "rank 1"]
    counters = {(e["pid"], e["name"], e["ts"]): e["args"] for e in entries if e["ph"] == "C"}
    seen = 0
    for record, rank in zip(view.records, view.ranks.tolist()):
        site = view.sites[int(record["site"])]
        if site.role in ("loss", "loss_scale"):
            continue
        at = int(record["step"]) * 1000
        abs_max = max(-float(record["min"]), float(record["max"]))
        limit = 65504.0 if record["dtype"] == 2 else 3.4028234663852886e38
        bits = counters[rank, f"{site}: headroom bits", at]["headroom bits"]
        assert bits == pytest.approx(math.log2(limit / abs_max), abs=1e-9)
        bad = bool(record["nan_count"] or record["posinf_count"])
        assert ((rank, f"{site}: not finite", at) in counters) == bad
        seen += 1
    assert seen == 2 * 10 * 20
    instants = [e for e in entries if e["ph"] == "i"]
    assert [(e["pid"], e["ts"]) for e in instants] == [(0, 18000), (1, 18000)]
    assert instants[0]["name"] == "origin: blocks.0.attn.proj (Linear) · forward · output"
    assert counters[0, "step: scale", 3000] == {"scale": 65536.0}


def test_events_of_the_watch_are_instants_too(tmp_path: Path) -> None:
    synthetic_logs.write(tmp_path / "log", 12, 20, ranks=2, event_step=-1)
    lines = [
        {"step": 7, "rank": 1, "kind": "loss_spike", "text": "the loss is 7", "is_warning": True},
        {"step": 9, "rank": "x", "text": "a shift", "is_warning": False},
        {"step": None, "text": "no step"},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "log" / "watch-rank1.jsonl").write_text(text)
    entries = trace(tmp_path / "log", tmp_path / "run.trace.json")
    spike, shift = (entry for entry in entries if entry["ph"] == "i")
    assert (spike["pid"], spike["ts"], spike["name"]) == (1, 7000, "watch: loss_spike")
    assert spike["args"] == {"text": "the loss is 7", "warns": True}
    assert (shift["pid"], shift["ts"], shift["args"]["warns"]) == (0, 9000, False)


def test_what_is_there_already_stays(tmp_path: Path) -> None:
    synthetic_logs.write(tmp_path / "log", 8, 4)
    out = tmp_path / "run.trace.json"
    out.write_text("mine")
    assert main(["export", str(tmp_path / "log"), str(out)]) == 2 and out.read_text() == "mine"
    assert main(["export", str(tmp_path / "log"), str(out), "--force"]) == 0
    assert json.loads(out.read_text())["displayTimeUnit"] == "ms"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "run.trace.json"]


def test_steps_do_not_go_with_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    synthetic_logs.write(tmp_path / "log", 8, 4)
    arguments = ["export", str(tmp_path / "log"), str(tmp_path / "x.trace.json"), "--steps"]
    assert main(arguments) == 2
    assert "a trace is made of a whole log" in capsys.readouterr().err
