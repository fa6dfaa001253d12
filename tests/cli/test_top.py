"""``fastcheck top``: once, and live on a terminal."""

from __future__ import annotations

import io
import os
import pty
import re
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from fastcheck.cli import top
from fastcheck.cli.main import main
from support.programs import synthetic_logs
from support.programs.command_line import run


def test_once_prints_one_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    synthetic_logs.write(tmp_path / "runs" / "new", 40, 20)
    code, out, err = run(capsys, "top", str(tmp_path / "runs"), "--once", "--rows", "4")
    assert code == 0 and not err and "\x1b" not in out
    assert "/runs/new" in out and "step 19" in out and "sites  1-4 of 39, by headroom" in out
    arguments = ("--sort", "name", "--filter", "mlp.fc1")
    code, out, _ = run(capsys, "top", str(tmp_path / "runs"), "--once", *arguments)
    names = [line[:30].strip() for line in out.splitlines() if ".mlp.fc1" in line[:30]]
    assert code == 0 and len(names) == 6 and names == sorted(names)


def test_a_narrow_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    synthetic_logs.write(tmp_path, 40, 20)
    monkeypatch.setenv("COLUMNS", "60")
    code, out, _ = run(capsys, "top", str(tmp_path), "--once")
    assert code == 0 and max(map(len, out.splitlines())) <= 60


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", "--once"], "nowhere, which is not there"),
        (["nowhere"], "top needs a terminal"),
        ([__file__], "test_top.py, which is no directory"),
        (["nowhere", "--interval", "0"], "--interval must be"),
        (["nowhere", "--interval", "nan"], "--interval must be"),
        (["nowhere", "--rows", "0"], "--rows must be"),
    ],
)
def test_what_can_not_be_shown(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    code, _, err = run(capsys, "top", *arguments)
    assert code == 2 and message in err


def test_without_rich_a_hint(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    code, _, err = run(capsys, "top", "nowhere")
    assert code == 2 and "pip install 'fastcheck[tools]', or --once" in err


def test_keys_are_parsed() -> None:
    sent = "\x1b[A\x1bOB\x1b[5~\x1b[6~\x1b[H\x1b[1~\x1b[1;5Cjé\r\n\x7f\x08\x03\x1b"
    named = ["up", "down", "pageup", "pagedown", "home", "home"]
    assert top.parse_keys(sent) == [
        *named, "j", "é", "enter", "enter", "backspace", "backspace", "escape",
    ]  # fmt: skip


class Terminal:
    """A pseudo-terminal as standard input and output of this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.user, self.program = pty.openpty()
        self.out = bytearray()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._files: list[Any] = [os.fdopen(os.dup(self.program), mode) for mode in ("r", "w")]
        monkeypatch.setattr(sys, "stdin", self._files[0])
        monkeypatch.setattr(sys, "stdout", self._files[1])
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.setenv("COLUMNS", "100")
        monkeypatch.setenv("LINES", "30")
        monkeypatch.delenv("NO_COLOR", raising=False)

    def _read(self) -> None:
        try:
            while data := os.read(self.user, 65536):
                self.out += data
        except OSError:  # the other side is closed
            pass

    def press(self, keys: str) -> None:
        os.write(self.user, keys.encode())

    def wait_for(self, text: str, seconds: float = 600.0) -> None:
        end = time.monotonic() + seconds
        while text.encode() not in self.out:
            assert time.monotonic() < end, self.out.decode(errors="replace")
            time.sleep(0.005)

    def close(self) -> str:
        """All that was written."""
        for file in self._files:
            file.close()
        os.close(self.program)
        self._reader.join()
        os.close(self.user)
        return self.out.decode()


def follow(terminal: Terminal, log: Path, script: Any) -> int:
    """Runs top, while ``script`` runs on another thread and ends with q."""
    failures: list[BaseException] = []

    def play() -> None:
        try:
            script()
        except BaseException as error:
            failures.append(error)
        terminal.press("\x1b[Bq" if failures else "q")

    player = threading.Thread(target=play)
    player.start()
    code = main(["top", str(log), "--interval", "0.1"])
    player.join()
    if failures:
        raise failures[0]
    return code


def test_live_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    import termios

    terminal = Terminal(monkeypatch)
    before = termios.tcgetattr(terminal.program)

    def script() -> None:
        terminal.wait_for("waiting for a run to begin")
        synthetic_logs.write(tmp_path / "log", 40, 20, event_step=-1)
        terminal.wait_for("step 19")
        terminal.wait_for("by headroom")
        terminal.press("s")
        terminal.wait_for("by abs max")
        terminal.press("jj")
        terminal.wait_for("  3-")
        terminal.press("/fc1")
        terminal.wait_for("fc1_")
        terminal.press("\r")
        terminal.wait_for("matching fc1, by abs max")
        synthetic_logs.write(tmp_path / "log", 40, 30, event_step=25)
        terminal.wait_for("step 29")
        terminal.wait_for("at step 25")

    assert follow(terminal, tmp_path / "log", script) == 0
    assert termios.tcgetattr(terminal.program) == before
    out = terminal.close()
    assert "\x1b[?1049h" in out and out.count("\x1b[?1049l") == 1  # xterm's other screen
    assert re.search(r"\x1b\[1;31m", out)


def test_no_color(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    synthetic_logs.write(tmp_path, 40, 20)
    terminal = Terminal(monkeypatch)
    monkeypatch.setenv("NO_COLOR", "1")
    assert follow(terminal, tmp_path, lambda: terminal.wait_for("over")) == 0
    assert not re.search(r"\x1b\[[0-9;]+m", terminal.close().replace("\x1b[0m", ""))


def test_without_keys_it_goes_on_until_it_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("rich")
    synthetic_logs.write(tmp_path, 40, 20)
    terminal = Terminal(monkeypatch)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(top.time, "sleep", sleep)
    assert main(["top", str(tmp_path)]) == 130
    out = terminal.close()
    assert "q quit" not in out
    assert out.endswith("\x1b[?25h\x1b[?1049l")  # the cursor and the screen are as they were
    assert all(0 <= seconds <= 2 for seconds in waits)
