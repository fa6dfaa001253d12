"""Translates the modes of set_dump_switch() to options of a Dumper."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Union

from fastcheck.errors import choice, string_list
from fastcheck.utils.names.api import api_names

from ._options import check_names, raise_config_error, warn_once

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
    """(options of Dumpers by their directory, names of functions with the names of their calls)."""
    choice("mode=", mode, _MODES)
    choice("filter_switch=", filter_switch, ("ON", "OFF"))
    if filter_switch == "ON":
        warn_once('filter_switch="ON" is not used: integers and bools are dumped too')
    directions = [dump_mode] if isinstance(dump_mode, str) else list(dump_mode)
    check_names(
        "entry of dump_mode=", directions, ("all", "forward", "backward", "input", "output")
    )
    if directions != ["all"]:
        warn_once("dump_mode= is not used: inputs, outputs and gradients are dumped, all of them")
    names = string_list("scope", scope)
    plan: dict[str, Any] = {"tensors": not summary_only}
    if mode == "acl":
        raise_config_error(
            'mode="acl" is the dump of CANN\'s own operators',
            expected=" or ".join(f'"{one}"' for one in _MODES[:-1]),
            got=mode,
            hint='mode="list" dumps what the API of torch reads and makes',
        )
    if mode in ("stack", "api_stack"):
        warn_once(f'mode="{mode}": records are written, without stacks of calls')
        plan["tensors"] = False
    if mode == "list" or (mode == "stack" and names):
        _check_scope(mode, bool(names), "at least one name", scope)
        return _lists([whole_call(name) for name in names], plan), {}
    if mode == "range":
        _check_scope(mode, len(names) == 2, "two names, the first and the last", scope)
        plan["first"], plan["last"] = names
    elif mode == "api_list":
        functions = string_list("api_list", api_list)
        if not functions:
            raise_config_error(
                'mode="api_list" needs api_list=',
                expected='names of functions, such as api_list=["relu"]',
                got=api_list,
                hint='mode="list" with scope= for single calls',
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


def _check_scope(mode: str, is_met: bool, expected: str, got: Any) -> None:
    if not is_met:
        raise_config_error(
            f'mode="{mode}" needs scope=',
            expected=expected,
            got=got,
            hint='scope=["Functional_linear_145_backward"]',
        )
