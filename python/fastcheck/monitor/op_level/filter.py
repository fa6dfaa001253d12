"""Filters of op level: operators, modules and tensor roles; checked here, applied in C++.

A dump selects calls by ``calls/selection.py`` instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from fastcheck.calls.module_calls import ModuleNode
from fastcheck.errors import ConfigError, did_you_mean, explain
from fastcheck.monitor.session.config import Config
from fastcheck.monitor.session.options import ROLES
from fastcheck.utils.names.msprobe import is_name, msprobe_api_of
from fastcheck.utils.names.patterns import op_names, op_patterns, op_spellings

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
        # What runs in no module can't be in one that was asked for.
        "outside": config.include is None,
        "roles": sum(_ROLE_BITS[role] for role in set(config.filter.roles or ROLES)),
    }


def check_ops(patterns: Iterable[str]) -> None:
    """Raises ConfigError for a pattern that no registered operator matches."""
    registered = {op: op_spellings(op) for op in op_names()} if patterns else {}
    for pattern in patterns:
        name = pattern[len(_NOT) :] if pattern.startswith(_NOT) else pattern
        wanted = op_patterns(name)
        if any(
            fnmatchcase(spelt, one)
            for spellings in registered.values()
            for spelt in spellings
            for one in wanted
        ):
            continue
        if is_name(name):
            known = {".".join(msprobe_api_of(op)) for op in registered}
        else:
            known = {spellings[1 if "." in name else 3] for spellings in registered.values()}
        raise ConfigError(
            explain(
                f"ops pattern {pattern!r} matches no operator",
                expected="a name of torch's dispatcher (aten._softmax, aten.add.Tensor, mm), one "
                'of msprobe\'s style (Functional.softmax), or a pattern; "!" before it leaves out',
                got=repr(pattern),
                hint=did_you_mean(name, sorted(known))
                or "names are those of the records: monitor.sites[...].op",
            )
        )
