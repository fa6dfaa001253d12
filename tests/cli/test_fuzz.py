"""Mutated files of every kind: a result, or an error that fastcheck documents; bounded memory.

``tests/lab/fuzz_readers.py`` does the same for as long as one likes.
"""

from __future__ import annotations

import re

import hypothesis
import pytest
from hypothesis import strategies as st

from support.fuzzing.corpus import Case, cases, run_mutated
from support.fuzzing.limits import limited_memory

NAMES = (
    "log",
    "log-pages",
    "dump-records",
    "dump-values",
    "new.pt",
    "old.pt",
    "one.npy",
    "plain.npz",
    "packed.npz",
    "w.safetensors",
    "shards",
    "seal",
    "msprobe-statistics",
    "msprobe-tensors",
    "settings",
)
MORE_BYTES = 1 << 29
STEERING = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    pytest.importorskip("safetensors")
    return {case.name: case for case in cases(tmp_path_factory.mktemp("corpus"))}


def test_every_case_is_fuzzed(corpus: dict[str, Case]) -> None:
    assert set(corpus) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_mutated_file_is_a_result_or_a_documented_error(
    name: str, corpus: dict[str, Case], capsys: pytest.CaptureFixture[str]
) -> None:
    @hypothesis.given(st.data())
    def check(data: st.DataObject) -> None:
        def choose(below: int) -> int:
            return data.draw(st.integers(0, below - 1))

        with limited_memory(MORE_BYTES):
            codes = run_mutated(corpus[name], choose)
        out, err = capsys.readouterr()
        assert set(codes) <= {0, 1, 2}
        assert not STEERING.search(out + err)

    check()
