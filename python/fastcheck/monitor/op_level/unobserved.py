"""Counts operators that op level could not observe, by operator and reason."""

from __future__ import annotations

import sys
import weakref
from typing import Any, Callable

from fastcheck.log.unobserved import UnreadOp, to_meta

_IN_COMPILED = "compiled code calls no operators: what it takes and returns is read"


def unread_ops(observer: Any, compiled: dict[str, int]) -> list[UnreadOp]:
    """Most calls first. ``compiled``: how often modules were called within compiled code."""
    rows = [
        UnreadOp(op, reason, calls)
        for op, reason, calls, has_no_values in observer.unread()
        # What is traced runs on fake tensors first, and then for good.
        if not (has_no_values and _has_traced())
    ]
    rows += [
        UnreadOp(f"{name} (compiled)", _IN_COMPILED, calls) for name, calls in compiled.items()
    ]
    return sorted(rows, key=lambda row: (-row.calls, row.op))


def describing(
    describe: Callable[[], dict[str, Any]], rows: weakref.WeakMethod[Callable[[], list[UnreadOp]]]
) -> Callable[[], dict[str, Any]]:
    """A function that returns ``describe()`` and the rows of that moment."""

    def both() -> dict[str, Any]:
        method = rows()
        return {**describe(), **to_meta([] if method is None else method())}

    return both


def _has_traced() -> bool:
    utils = sys.modules.get("torch._dynamo.utils")
    counters: Any = getattr(utils, "counters", None)
    return bool(counters and counters.get("frames", {}).get("total"))
