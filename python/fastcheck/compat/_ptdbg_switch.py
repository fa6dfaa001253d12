"""What set_dump_switch() means: its modes as options of a Dumper."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Union

from ._functions import api_names
from ._options import check_names, one_of, refuse, say

__all__ = ["dump_plan", "whole_call"]

_MODES = ("all", "list", "range", "stack", "api_list", "api_stack", "acl")

_MODULE = re.compile(r"Module\.(.+)\.[^.]+\.(?:forward|backward)\.(\d+)(?:\..*)?")
_OWN_DIRECTION = re.compile(r" · (forward|backward|optimizer)$")
_DIRECTION = re.compile(r"(?<=\d)[._](forward|backward|optimizer)([._].*)?$")


def dump_plan(
    mode: str,
    scope: Sequence[str],
    api_list: Sequence[str],
    filter_switch: str,
    dump_mode: Union[str, Sequence[str]],
    summary_only: bool,
) -> tuple[dict[str, dict[str, Any]], dict[str, tuple[str, ...]]]:
    """(options of Dumpers by their directory, names of functions with what they may be called
    by).
    """
    one_of("mode=", mode, _MODES)
    one_of("filter_switch=", filter_switch, ("ON", "OFF"))
    if filter_switch == "ON":
        say('filter_switch="ON" is not used: integers and bools are dumped too')
    directions = [dump_mode] if isinstance(dump_mode, str) else list(dump_mode)
    check_names(
        "the entry of dump_mode=", directions, ("all", "forward", "backward", "input", "output")
    )
    if directions != ["all"]:
        say("dump_mode= is not used: inputs, outputs and gradients are dumped, all of them")
    names = _as_list("scope", scope)
    plan: dict[str, Any] = {"tensors": not summary_only}
    if mode == "acl":
        refuse(
            'mode="acl" is the dump of CANN\'s own operators',
            expected=" or ".join(f'"{one}"' for one in _MODES[:-1]),
            came=mode,
            do='mode="list" dumps what the API of torch reads and makes',
        )
    if mode in ("stack", "api_stack"):
        say(f'mode="{mode}": records, and no stacks of calls; a stop names the line')
        plan["tensors"] = False
    if mode == "list" or (mode == "stack" and names):
        _need(mode, bool(names), "at least one name", scope)
        return _lists([whole_call(name) for name in names], plan), {}
    if mode == "range":
        _need(mode, len(names) == 2, "two names, the first and the last", scope)
        plan["first"], plan["last"] = names
    elif mode == "api_list":
        functions = _as_list("api_list", api_list)
        if not functions:
            refuse(
                'mode="api_list" needs api_list=',
                expected='names of functions, such as api_list=["relu"]',
                came=api_list,
                do='mode="list" with scope= for single calls',
            )
        spellings = {function: tuple(api_names(function)) for function in functions}
        plan["ops"] = [name for names in spellings.values() for name in names]
        return {"": plan}, spellings
    return {"": plan}, {}


def _lists(names: list[str], plan: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Calls of modules, which overflow_check prints where it reads no operators, have a dump of
    their own.
    """
    modules = [_MODULE.sub(r"\1 #\2", name) for name in names if _MODULE.fullmatch(name)]
    ops = [name for name in names if not _MODULE.fullmatch(name)]
    plans = {"": {**plan, "ops": ops}} if ops else {}
    if modules:
        plans["modules" if ops else ""] = {**plan, "level": "module", "modules": modules}
    return plans


def whole_call(name: str) -> str:
    """``Functional_linear_145`` of ``Functional_linear_145_backward``: a call is dumped with its
    inputs, its outputs and the gradients of both.
    """
    return _DIRECTION.sub("", _OWN_DIRECTION.sub("", name))


def _need(mode: str, is_met: bool, expected: str, came: Any) -> None:
    if not is_met:
        refuse(
            f'mode="{mode}" needs scope=',
            expected=expected,
            came=came,
            do='scope=["Functional_linear_145_backward"]',
        )


def _as_list(name: str, given: Union[str, Sequence[str]]) -> list[str]:
    found = [given] if isinstance(given, str) else list(given)
    for one in found:
        if not isinstance(one, str):
            refuse(f"{name}= holds something else", expected="names", came=one, do="give text")
    return found
