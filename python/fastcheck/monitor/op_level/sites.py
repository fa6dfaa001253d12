"""Chooses the operators that the observer reads, and maps its sites to those of the site table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from fastcheck.calls.module_calls import ModuleNode
from fastcheck.errors import ConfigError, did_you_mean
from fastcheck.extension import extension
from fastcheck.monitor.session.config import Config
from fastcheck.monitor.session.options import ROLES
from fastcheck.monitor.session.overflow_status import ROLE as STATUS_ROLE
from fastcheck.record.site import OUTSIDE, Site, SiteTable
from fastcheck.utils.names.msprobe import is_name, msprobe_api_of
from fastcheck.utils.names.patterns import op_names, op_patterns, op_spellings

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
        """A boolean array of the records that are status words of a device, read behind an op.
        Called before translate().
        """
        numbers = records["site"]
        is_status = numbers >= 0
        is_status[is_status] = self._is_status[numbers[is_status]]
        return is_status

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


# fastcheck::observer::Filter::bit. Parameters and buffers have none: they are read by name, once.
_ROLE_BITS = dict(zip(ROLES, (1, 2, 4, 8, 16 | 32, 0)))
_NOT = "!"


def filter_options(config: Config, nodes: Sequence[ModuleNode]) -> dict[str, Any]:
    """The arguments of OpObserver.start()."""
    ops = tuple(config.filter.ops or ())
    chosen = [name for name in ops if not name.startswith(_NOT)]
    left_out = [name[len(_NOT) :] for name in ops if name.startswith(_NOT)]
    return {
        "ops": [pattern for name in chosen for pattern in op_patterns(name)],
        "not_ops": [pattern for name in left_out for pattern in op_patterns(name)],
        "modules": [int(node.is_selected) for node in nodes],
        # An operator that runs in no module can't be in a module that was asked for.
        "outside": config.include is None,
        "roles": sum(_ROLE_BITS[role] for role in set(config.filter.roles or ROLES)),
    }


def check_alone() -> None:
    """Raises ConfigError while another monitor observes operators."""
    if extension.op_observer().run():
        raise ConfigError(
            'a monitor with level="op" is installed already',
            expected="a single monitor at a time: it sees the ops of the whole process",
            got="a second monitor",
            hint="remove() the first, or give both models to one install(model, other)",
        )


def check_ops(patterns: Iterable[str]) -> None:
    """Raises ConfigError for a pattern that no registered operator matches."""
    registered = {op: op_spellings(op) for op in op_names()} if patterns else {}
    for pattern in patterns:
        name = pattern[len(_NOT) :] if pattern.startswith(_NOT) else pattern
        wanted = op_patterns(name)
        if any(
            fnmatchcase(spelt, glob)
            for spellings in registered.values()
            for spelt in spellings
            for glob in wanted
        ):
            continue
        if is_name(name):
            known = {".".join(msprobe_api_of(op)) for op in registered}
        else:
            known = {spellings[1 if "." in name else 3] for spellings in registered.values()}
        raise ConfigError(
            f"ops pattern {pattern!r} matches no operator",
            expected="a name of torch's dispatcher (aten._softmax, aten.add.Tensor, mm), one "
            'of msprobe\'s style (Functional.softmax), or a pattern; "!" before it leaves out',
            got=repr(pattern),
            hint=did_you_mean(name, sorted(known))
            or "names are those of the records: monitor.sites[...].op",
        )
