"""What level="op" reads: which operators, in which modules, and which of their tensors. Checked
here, decided in C++.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch

from ._calls import ModuleNode
from ._config import Config
from ._errors import ConfigError, did_you_mean, explain
from ._op_names import api_of, is_name, parse

__all__ = ["check_filters", "filter_options"]

# fastcheck::observer::Filter::bit
_ROLE_BITS = {
    "input": 1,
    "output": 2,
    "grad_output": 4,
    "grad_input": 8,
    "optimizer_state": 16 | 32,
    # Read once, by name: no operator is asked.
    "param": 0,
}
_NOT = "!"


def filter_options(config: Config, nodes: Sequence[ModuleNode]) -> dict[str, Any]:
    """The arguments of OpObserver.start()."""
    chosen = [name for name in config.ops if not name.startswith(_NOT)]
    left_out = [name[len(_NOT) :] for name in config.ops if name.startswith(_NOT)]
    return {
        "ops": [pattern for name in chosen for pattern in _patterns(name)],
        "not_ops": [pattern for name in left_out for pattern in _patterns(name)],
        "modules": [int(node.is_selected) for node in nodes],
        # What runs in no module can't be in one that was asked for.
        "outside": config.include is None,
        "roles": sum(_ROLE_BITS[role] for role in set(config.roles or _ROLE_BITS)),
    }


def check_filters(config: Config) -> None:
    """Raises ConfigError for a pattern that no registered operator matches, and for a role that no
    operator's tensor has.
    """
    _check_ops(config.ops)
    _check_roles(config.roles)


def _check_ops(patterns: Iterable[str]) -> None:
    registered = {op: _spellings(op) for op in _registered()} if patterns else {}
    for pattern in patterns:
        name = pattern[len(_NOT) :] if pattern.startswith(_NOT) else pattern
        wanted = _patterns(name)
        if any(
            fnmatchcase(spelt, one)
            for spellings in registered.values()
            for spelt in spellings
            for one in wanted
        ):
            continue
        if is_name(name):
            known = {".".join(api_of(op)) for op in registered}
        else:
            known = {spellings[1 if "." in name else 3] for spellings in registered.values()}
        raise ConfigError(
            explain(
                f"ops pattern {pattern!r} matches no operator",
                expected="a name of torch's dispatcher (aten._softmax, aten.add.Tensor, mm), one "
                'of msprobe\'s style (Functional.softmax), or a pattern; "!" before it leaves out',
                came=repr(pattern),
                do=did_you_mean(name, sorted(known))
                or "names are those of the records: monitor.sites[...].op",
            )
        )


def _check_roles(roles: Iterable[str]) -> None:
    for role in roles:
        if role not in _ROLE_BITS:
            raise ConfigError(
                explain(
                    "unknown role",
                    expected=" or ".join(map(repr, _ROLE_BITS)),
                    came=repr(role),
                    do=did_you_mean(str(role), _ROLE_BITS),
                )
            )


def _patterns(name: str) -> list[str]:
    """What the observer is to look for; of a name in msprobe's style, the operators that go by
    it.
    """
    if not is_name(name):
        return [name]
    wanted = parse(name)
    if wanted.kind == "Module":
        raise ConfigError(
            explain(
                "ops= chooses operators, and this is the name of a module",
                expected="a name such as aten._softmax or Functional.softmax",
                came=repr(name),
                do=f"give it to include=: include={wanted.path!r}" if wanted.path else "",
            )
        )
    if wanted.call is not None:
        raise ConfigError(
            explain(
                "ops= chooses operators, not single calls",
                expected=f"{wanted.kind}.{wanted.name}",
                came=repr(name),
                do="leave the number and what follows it out",
            )
        )
    return [op for op in _registered() if wanted.has_op(op)]


def _registered() -> list[str]:
    names = torch._C._dispatch_get_all_op_names()
    return sorted(str(name).replace("::", ".", 1) for name in names)


def _spellings(op: str) -> tuple[str, str, str, str]:
    """As csrc/torch/observer/filter.cpp has them."""
    space, _, bare = op.partition(".")
    base = bare.split(".", 1)[0]
    return op, f"{space}.{base}", bare, base
