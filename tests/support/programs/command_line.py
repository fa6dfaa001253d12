"""Runs the command line within the test's process."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from fastcheck.cli.main import main


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def strict(text: str) -> Any:
    """json.loads that refuses NaN and Infinity."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(list(arguments))
    out, err = capsys.readouterr()
    return code, out, err


def shown_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    code, out, _ = run(capsys, *arguments, "--json")
    assert code in (0, 1)
    document: dict[str, Any] = strict(out)
    return document
