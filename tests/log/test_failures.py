"""The log on disk after a crash, on a full disk, and in a directory without write permission."""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from fastcheck.errors import FastcheckWarning, LogError
from fastcheck.log.reader import read_log
from fastcheck.log.writer import RecordLog, default_directory, save_log
from fastcheck.record.format import RECORD_DTYPE
from support.logs import as_bytes, site_table
from support.paths import TESTS
from support.records import record_builder as build

SIZE = RECORD_DTYPE.itemsize


# Crashes


@pytest.mark.parametrize("cut", [1, 100, 191])
def test_a_torn_last_record_is_dropped_and_counted(tmp_path: pathlib.Path, cut: int) -> None:
    log = RecordLog(tmp_path, 0, None, site_table())
    records = build.healthy_records(0, 9)
    log.append(records, 0)
    path = tmp_path / "records-rank0-000000.bin"
    path.write_bytes(path.read_bytes()[:-cut])
    view = read_log(tmp_path)
    assert as_bytes(view.records) == as_bytes(records[:8])
    assert view.dropped_bytes == SIZE - cut


def test_torn_lines_and_lost_sites_leave_the_records_readable(tmp_path: pathlib.Path) -> None:
    log = RecordLog(tmp_path, 0, None, site_table())
    records = build.healthy_records(0, 8)
    log.append(records, 0)
    log.append_event(build.event(build.site("layers.1"), records[1]))
    log.append_event(build.event(build.site("layers.2"), records[2]))
    for name in ("sites-rank0.jsonl", "events-rank0.jsonl"):
        path = tmp_path / name
        path.write_bytes(path.read_bytes()[:-9])
    view = read_log(tmp_path)
    assert len(view.records) == 8 and len(view.events) == 1 and view.dropped_bytes > 0
    assert view.sites[0].module == "layers.0"
    assert "name lost" in str(view.sites[3])


def test_a_tail_of_zero_bytes_is_not_taken_for_records(tmp_path: pathlib.Path) -> None:
    log = RecordLog(tmp_path, 0, None, site_table())
    log.append(build.healthy_records(0, 3), 0)
    with open(tmp_path / "records-rank0-000000.bin", "ab") as file:
        file.write(bytes(2 * SIZE + 5))
    view = read_log(tmp_path)
    assert len(view.records) == 3 and view.dropped_bytes == 2 * SIZE + 5


WRITER = """
    import sys
    sys.path.insert(0, sys.argv[2])
    from support.records import record_builder as build
    from fastcheck.log.writer import RecordLog
    from fastcheck.record.site import SiteTable
    sites = SiteTable()
    for index in range(4):
        sites.intern(build.site(f"layers.{index}"))
    log = RecordLog(sys.argv[1], 0, None, sites)
    step = 0
    while True:
        assert log.append(build.healthy_records(step, 50, step * 50), step)
        step += 1
        print(step, flush=True)
"""


def test_kill_9_loses_nothing_that_append_returned_for(tmp_path: pathlib.Path) -> None:
    """Every record whose append() returned before the kill is read back, whole and in order."""
    place = tmp_path / "log"
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(WRITER), str(place), str(TESTS)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    done = 0
    with child:
        for line in child.stdout:
            done = int(line)
            if done >= 40:
                child.send_signal(signal.SIGKILL)
                break
        for line in child.stdout:
            done = int(line)
    assert child.returncode == -signal.SIGKILL
    view = read_log(place)
    assert len(view.records) >= done * 50 >= 2000
    whole = len(view.records)
    expected = [
        line
        for step in range(whole // 50 + 1)
        for line in as_bytes(build.healthy_records(step, 50, step * 50))
    ]
    assert as_bytes(view.records) == expected[:whole]
    assert view.sites[3].module == "layers.3"


# Failures while the run goes on


@contextlib.contextmanager
def small_disk(path: pathlib.Path, size: str = "256k") -> Iterator[pathlib.Path]:
    """A file system of ``size``, where this user may mount one; else the test is skipped."""
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("mounting a small tmpfs needs root")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def test_a_full_disk_is_said_once_and_the_run_goes_on(tmp_path: pathlib.Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        log = RecordLog(disk / "log", 0, None, site_table())
        results = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in range(30):
                results.append(log.append(build.healthy_records(step, 100, step * 100), step))
                log.append_event(build.event(build.site(), build.record(step=step)))
        assert results[0] and not results[-1]
        assert results == sorted(results, reverse=True)
        assert [warning.category for warning in caught] == [FastcheckWarning]
        message = str(caught[0].message)
        assert "No space left" in message and "Training goes on" in message
        # The event's line, written after the step's records, may be what found no room.
        first = results.index(False)
        assert any(f"at step {step}:" in message for step in (first - 1, first))
        view = read_log(disk / "log")
        whole = results.index(False) * 100
        assert len(view.records) == whole and view.dropped_bytes == 0
        assert view.records["seq"].tolist() == list(range(whole))


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EIO])
def test_an_error_in_the_middle_of_a_record_leaves_whole_records(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """The same without a file system to fill: the kernel takes half a record, then refuses."""
    log = RecordLog(tmp_path, 0, None, site_table())
    assert log.append(build.healthy_records(0, 10), 0)
    real = os.write
    calls = []

    def refusing(descriptor: int, data: Any) -> int:
        calls.append(len(data))
        if len(calls) == 1:
            return real(descriptor, data[: SIZE + 50])
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "write", refusing)
    with pytest.warns(FastcheckWarning, match=os.strerror(code)) as caught:
        assert not log.append(build.healthy_records(1, 10, 10), 1)
        assert not log.append(build.healthy_records(2, 10, 20), 2)
    assert len(caught) == 1 and len(calls) == 2 and log.failed
    monkeypatch.undo()
    assert (tmp_path / "records-rank0-000000.bin").stat().st_size == 10 * SIZE


def test_a_directory_that_cannot_be_written_is_an_error_at_the_start(
    tmp_path: pathlib.Path,
) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(LogError) as caught:
        RecordLog(tmp_path / "file" / "log", 0, None, site_table())
    text = str(caught.value)
    assert "expected" in text and "Not a directory" in text and "log_dir=" in text


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="drops root's rights")
def test_permission_denied(tmp_path: pathlib.Path) -> None:
    """As an ordinary user, in a directory of root."""
    place = tmp_path / "closed"
    place.mkdir(mode=0o755)
    for parent in [tmp_path, *tmp_path.parents][:4]:
        if parent.stat().st_uid == 0 and parent != pathlib.Path("/"):
            parent.chmod(parent.stat().st_mode | 0o055)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.setuid(65534)
        answer = "no error"
        try:
            RecordLog(place / "log", 0, None, site_table())
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(writer, answer.encode())
        os._exit(0)
    os.close(writer)
    with open(reader, encoding="utf-8") as file:
        answer = file.read()
    os.waitpid(child, 0)
    assert answer.startswith("LogError") and "Permission denied" in answer


def test_save_log_writes_all_at_once(tmp_path: pathlib.Path) -> None:
    records = build.healthy_records(0, 20)
    culprit = build.event(build.site("layers.1"), records[1])
    place = save_log(tmp_path / "a" / "b", 0, records, [culprit], site_table(), {}, [])
    assert place is not None
    view = read_log(place)
    assert len(view.records) == 20 and len(view.events) == 1


def test_save_log_never_raises(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.warns(FastcheckWarning, match="could not be saved"):
        place = save_log(
            tmp_path / "file" / "log", 0, build.healthy_records(0, 2), [], site_table(), {}, []
        )
    assert place is None


def test_default_directory_is_relative_and_of_this_process() -> None:
    assert default_directory().startswith(f"fastcheck_log{os.sep}")
    assert default_directory().endswith(f"-{os.getpid()}")
