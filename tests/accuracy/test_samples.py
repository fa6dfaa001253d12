"""Suites of this folder run to their ends on small samples: all of them in whole runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.paths import ROOT, TESTS
from support.processes import run_python
from support.sampling import IS_WHOLE, sample

SAMPLES = {
    "compare_healthy": [],
    "compare_sides": [],
    "fault_injection": ["--faults", "4"],
    "fleet_true": [],
    "healthy": ["--steps", "2"],
    "healthy_awkward": [],
    "invariants": [],
    "library_faults": ["--only", "transformers: gpt2"],
    "libraries": ["--only", "transformers: gpt2", "--steps", "2"],
    "options": ["--runs", "10"],
    "own_errors": ["--every", "600"],
    "prove_faults": [],
    "prove_healthy": ["--kinds", "causal", "--only", "gpt2", "--out", "prove.json"],
    "receipts": [],
    "resumes": [],
    "stress": ["--seconds", "2"],
    "threads": ["--seconds", "1"],
    "watch": ["--steps", "100", "--seeds", "1"],
    "watch_standing": ["--seeds", "1"],
}


#: They train for each of many machines, layouts and programs. tests/comparison (test_machines.py,
#: test_sides.py) compares as the first two do, tests/fleet judges as the third, tests/proving
#: (test_prove.py) proves as the fourth, tests/sealing (test_resume.py) resumes as the last.
LONG = ("compare_healthy", "compare_sides", "fleet_true", "prove_healthy", "resumes")


@pytest.mark.parametrize("suite", sample([s for s in SAMPLES if IS_WHOLE or s not in LONG], 3))
def test_a_sample(suite: str, tmp_path: Path) -> None:
    environment = {
        "PYTHONPATH": f"{TESTS}:{ROOT / 'bench'}",
        "FASTCHECK_BENCH_RESULTS": str(tmp_path),
        "FASTCHECK_BENCH_SMOKE": "1",
    }
    done = run_python("-m", f"accuracy.{suite}", *SAMPLES[suite], cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(tmp_path.glob("*.json"))


def test_no_suite_is_left_out() -> None:
    programs = Path(__file__).parent.glob("*.py")
    suites = {path.stem for path in programs if "\ndef main(" in path.read_text()}
    assert suites - {"compare_worker"} == set(SAMPLES)
