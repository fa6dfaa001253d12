"""Runs the command line within the test's process."""

from __future__ import annotations

import json
from typing import Any

import pytest

from fastcheck.cli.main import main


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(list(arguments))
    out, err = capsys.readouterr()
    return code, out, err


def shown_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    code, out, _ = run(capsys, *arguments, "--json")
    assert code in (0, 1)

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    document: dict[str, Any] = json.loads(out, parse_constant=refuse)
    return document
