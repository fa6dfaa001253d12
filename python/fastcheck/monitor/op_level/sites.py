"""Maps the observer's operator sites to sites of the table."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fastcheck.calls.module_calls import ModuleNode
from fastcheck.extension import extension
from fastcheck.monitor.session.overflow_status import ROLE as STATUS_ROLE
from fastcheck.record.naming import OUTSIDE
from fastcheck.record.site import Site, SiteTable

_INPUT = 0
_STATUS = 2
_DIRECTIONS = ("forward", "backward", "optimizer")
_ROLES = {
    ("forward", 0): "input",
    ("forward", 1): "output",
    ("backward", 0): "grad_output",
    ("backward", 1): "grad_input",
    ("optimizer", 0): "input",
    ("optimizer", 1): "output",
}


class OpSites:
    """The observer's numbers, mapped to those of the site table."""

    def __init__(self, sites: SiteTable, nodes: Sequence[ModuleNode]) -> None:
        self._sites = sites
        self._nodes = nodes
        self._ops = extension.op_observer()
        self._numbers = np.zeros(0, np.int32)
        self._is_status = np.zeros(0, np.bool_)

    def add(self, first: int, rows: Sequence[tuple[int, int, int, int, int, int]]) -> None:
        """``rows``: the observer's sites from number ``first`` on."""
        numbers = [self._sites.intern(self._site(*row)) for row in rows]
        self._numbers = np.concatenate([self._numbers[:first], np.array(numbers, np.int32)])
        is_status = np.array([row[4] == _STATUS for row in rows], np.bool_)
        self._is_status = np.concatenate([self._is_status[:first], is_status])

    def are_status(self, records: np.ndarray) -> np.ndarray:
        """Which of these are words of a device's, read behind an op. Before translate()."""
        numbers = records["site"]
        found = numbers >= 0
        found[found] = self._is_status[numbers[found]]
        return found

    def translate(self, records: np.ndarray) -> None:
        """Puts the table's numbers into the records. Those of named readings came as ~number."""
        numbers = records["site"]
        is_named = numbers < 0
        numbers[is_named] = ~numbers[is_named]
        numbers[~is_named] = self._numbers[numbers[~is_named]]

    def _site(
        self, module: int, op: int, forward_op: int, direction: int, role: int, index: int
    ) -> Site:
        node = self._nodes[module] if module >= 0 else None
        path, kind = ("", OUTSIDE) if node is None else (node.path, node.type_name)
        where = _DIRECTIONS[direction]
        spelt = STATUS_ROLE if role == _STATUS else _ROLES[where, role]
        name = self._ops.op_name(op)
        label = spelt
        if role == _STATUS:
            label = "overflow status"
        elif role == _INPUT:
            label = self._ops.argument_name(op, index)
        elif index:
            label = f"{spelt}[{index}]"
        if where == "backward" and forward_op >= 0:
            # The op of the forward pass names the place; the op that ran is in the label.
            label = f"{label if role == _STATUS else f'{spelt}[{index}]'} ({name})"
            name = self._ops.op_name(forward_op)
        return Site(path, kind, where, spelt, index, label, name)
