"""What every test of a request needs."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from support.programs.asked import ASKED


@pytest.fixture
def no_handler_left() -> Iterator[None]:
    """The signal has the system's handler again after a test."""
    yield
    signal.signal(ASKED, signal.SIG_DFL)
