"""Reads the names of a log's counted events, for ``Dumper(from_log=)``."""

from __future__ import annotations

from fastcheck.errors import ConfigError, LogError, explain
from fastcheck.log.reader import find_logs, read_log
from fastcheck.log.view import first_event
from fastcheck.record.naming import OUTSIDE
from fastcheck.utils.names.patterns import Wanted

__all__ = ["names_of_log"]


def names_of_log(path: str) -> tuple[list[Wanted], list[Wanted]]:
    """(ops, modules) of the counted events of the newest log at ``path``: of all events when none
    is counted. ConfigError when there is no log, or no event in it.
    """
    try:
        logs = find_logs(path)
        view = read_log(logs[-1] if logs else path)
    except LogError as error:
        raise ConfigError(f"from_log= can't be read\n{error}") from error
    start = first_event(view.events)
    if start is None:
        raise ConfigError(
            explain(
                "the log given as from_log= has no event",
                expected="a log with at least one event",
                got=view.directory,
                hint="fastcheck show prints what a log holds",
            )
        )
    ops: dict[Wanted, None] = {}
    modules: dict[Wanted, None] = {}
    for event in view.events:
        if event.counted != start.counted:
            continue
        site = event.site
        where = OUTSIDE if site.module_type == OUTSIDE else site.module
        if site.op:
            ops[Wanted(str(site), op=site.op, module=where, call=int(event.record["call"]))] = None
        elif site.role != "loss":
            modules[Wanted(str(site), module=where)] = None
    return list(ops), list(modules)
