"""The output of reports: by rich on a terminal where it is installed, otherwise plain text."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios

import pytest

from fastcheck.cli import console
from fastcheck.cli.console import progress, show_sections
from fastcheck.utils.text.layout import Section, Table, plain_text
from support.programs.command_line import Terminal

REPORT = [
    Section(
        "about", ["a line", "  \x1b[32mwell\x1b[0m, and [bold]as it is written[/bold] :warning:"]
    ),
    Section(
        "numbers",
        [
            Table(
                ["tensor", "numel", "max"],
                [["layers.0.attention.output.dense weight", "1,024", "3.5"], ["b", "8", "inf"]],
                styles={1: "red"},
            ),
            Table(["what", "why"], [["a", "because " * 20]], left=2, indent=4),
        ],
    ),
    Section("", []),
]


def use_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """From within the test: pytest changes the streams after its fixtures."""
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "90")
    made = Terminal()
    monkeypatch.setattr(sys, "stdout", made)
    monkeypatch.setattr(sys, "stderr", made)
    return made


def lines(text: str) -> list[str]:
    return [line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()]


def test_rich_fits_tables_to_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    terminal = use_terminal(monkeypatch)
    show_sections(REPORT)
    shown = lines(terminal.getvalue())
    assert shown[:2] == [
        "about     a line",
        " " * 12 + "well, and [bold]as it is written[/bold] :warning:",
    ]
    assert max(map(len, shown)) <= 90
    assert any(
        line.endswith("layers.0.attention.output.dense weight  1,024  3.5") for line in shown
    )
    assert any(line.startswith(" " * 14 + "a") for line in shown)
    assert "".join(shown).count("because") == 20
    assert re.search(r"\x1b\[1;31mb", terminal.getvalue())


def test_a_narrow_terminal_cuts_no_number_and_no_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("rich")
    terminal = use_terminal(monkeypatch)
    monkeypatch.setenv("COLUMNS", "30")
    name = "layers.0." + "attention." * 9 + "weight"
    show_sections([Section("numbers", [Table(["tensor", "max"], [[name, "-3.4028e+38"]])])])
    text = "\n".join(lines(terminal.getvalue()))
    assert "-3.4028e+38" in text
    assert re.sub(r"\s|-3.4028e\+38", "", text).endswith(name)


def test_without_rich_a_terminal_gets_the_plain_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = use_terminal(monkeypatch)
    monkeypatch.setattr(console, "has_rich", lambda: False)
    show_sections(REPORT)
    assert terminal.getvalue() == plain_text(REPORT, color=True) + "\n"
    assert "\x1b[31;1mb" in terminal.getvalue()


@pytest.mark.parametrize("has_rich", [True, False])
def test_a_file_gets_the_same_with_rich_and_without(
    has_rich: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "has_rich", lambda: has_rich)
    show_sections(REPORT)
    assert capsys.readouterr().out == plain_text(REPORT) + "\n"


@pytest.mark.parametrize("variables", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_a_terminal_without_colours_gets_the_plain_text(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = use_terminal(monkeypatch)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    show_sections(REPORT)
    assert terminal.getvalue() == plain_text(REPORT) + "\n"


def test_nobody_is_told_of_progress_off_a_terminal_or_without_rich(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with progress("comparing", "blocks") as told:
        assert told is None
    terminal = use_terminal(monkeypatch)
    monkeypatch.setattr(console, "has_rich", lambda: False)
    with progress("comparing", "blocks") as told:
        assert told is None
    assert terminal.getvalue() == ""


def test_progress_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    terminal = use_terminal(monkeypatch)
    with pytest.raises(KeyError), progress("comparing", "blocks") as told:
        assert told is not None
        for done in range(500):
            told(done, 1000)
        raise KeyError("from the work itself")
    assert "comparing" in terminal.getvalue() and "blocks" in terminal.getvalue()
    assert terminal.getvalue().endswith("\x1b[2K"), "what erases a line"


def test_the_command_on_a_terminal() -> None:
    """All of it: a real terminal of 84 columns, and another process."""
    pytest.importorskip("rich")
    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 84, 0, 0))
    dropped = ("NO_COLOR", "COLUMNS", "LINES")
    variables = {name: value for name, value in os.environ.items() if name not in dropped}
    child = subprocess.Popen(
        [sys.executable, "-m", "fastcheck", "doctor"],
        stdout=writer,
        env={**variables, "TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"},
    )
    os.close(writer)
    said = b""
    # At the end of what was written Linux raises EIO.
    try:
        while piece := os.read(reader, 65536):
            said += piece
    except OSError:
        pass
    os.close(reader)
    child.wait()
    shown = lines(said.decode())
    assert "\x1b[1m" in said.decode()
    assert any(re.fullmatch(r"backends +name +state +why", line) for line in shown)
    assert max(map(len, shown)) <= 84
