"""OpCall: the data of one operator call while PythonOpCalls records it."""

from __future__ import annotations

from typing import Any, Optional

from fastcheck.calls.module_calls import ModuleNode
from fastcheck.calls.namer import Forward
from fastcheck.calls.selection import CallName
from fastcheck.utils.torch.operators import OpInfo


class OpCall:
    """A call that is under way."""

    __slots__ = (
        "flags",
        "forward",
        "func",
        "info",
        "inputs",
        "is_wanted",
        "name",
        "node",
        "skipped",
    )

    def __init__(self, func: Any, info: OpInfo, name: CallName) -> None:
        self.func = func
        self.info = info
        self.name = name
        self.node: Optional[ModuleNode] = None
        self.forward: Optional[Forward] = None
        self.flags = 0
        self.is_wanted = True
        self.inputs: list[dict[str, Any]] = []
        # Why the reference can't take it.
        self.skipped = ""
