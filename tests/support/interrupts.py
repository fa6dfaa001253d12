"""Raises KeyboardInterrupt at a chosen point of fastcheck's Python code, where a signal could.

The interpreter looks for signals after calls, at the start of functions and in loops. Between two
instructions of any other kind none arrives: a context manager that is written in C is entered and
left in one piece.
"""

from __future__ import annotations

import contextlib
import dis
import sys
from pathlib import Path
from types import FrameType
from typing import Any, Optional

import torch.autograd.grad_mode

import fastcheck

_ROOT = str(Path(fastcheck.__file__).parent)
#: Python code that a context manager may be: a point there counts where fastcheck has called it.
_CALLED = {contextlib.__file__, torch.autograd.grad_mode.__file__}
_LOOKS = ("CALL", "RESUME", "JUMP_BACKWARD", "POP_JUMP_BACKWARD", "FOR_ITER")


class Points:
    """Counts the points that its ``with`` block passes in this thread; raises at number ``at``.

    ``place`` is then the file, line and function where it did. ``within``: how the names of the
    files begin whose points count.
    """

    def __init__(self, at: int = -1, within: str = _ROOT) -> None:
        self._at = at
        self._within = within
        self.count = 0
        self.place = ""
        self._looks: dict[Any, dict[int, bool]] = {}
        self._last: dict[FrameType, int] = {}

    def __enter__(self) -> Points:
        sys.settrace(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        self._last.clear()

    def _called(self, frame: FrameType, event: str, argument: object) -> Optional[Any]:
        if not self._is_ours(frame):
            return None
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        return self._traced

    def _is_ours(self, frame: FrameType) -> bool:
        name = frame.f_code.co_filename
        if name.startswith(self._within):
            return True
        back = frame.f_back
        return name in _CALLED and back is not None and self._is_ours(back)

    def _traced(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "return":
            self._last.pop(frame, None)
        if event != "opcode":
            return self._traced
        before = self._last.get(frame)
        self._last[frame] = frame.f_lasti
        if before is not None and self._looks_after(frame, before):
            self.count += 1
            if self.count - 1 == self._at:
                code = frame.f_code
                self.place = f"{code.co_filename}:{frame.f_lineno} {code.co_name}"
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._traced

    def _looks_after(self, frame: FrameType, offset: int) -> bool:
        code = frame.f_code
        known = self._looks.get(code)
        if known is None:
            known = self._looks[code] = {
                one.offset: one.opname.startswith(_LOOKS) for one in dis.get_instructions(code)
            }
        return known.get(offset, False)
