"""make_stop_dumper(): writes the culprit of a stop to disk if Stop(dump=) is given."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Optional

from fastcheck.calls.module_calls import ModuleNode
from fastcheck.dump.on_stop.captured_op import OpCaptures
from fastcheck.dump.on_stop.stop_dumper import StoppedCallDumper
from fastcheck.monitor.op_level.op_session import OpSession
from fastcheck.monitor.session.session import Session


def make_stop_dumper(
    session: Session, nodes: Sequence[ModuleNode], rank: int
) -> Optional[StoppedCallDumper]:
    """None without Stop(dump=)."""
    config = session.config
    if config.stop.dump is None:
        return None
    directory = os.fspath(config.stop.dump)
    if isinstance(session, OpSession):
        captures = session.captures = OpCaptures()
        return StoppedCallDumper(directory, rank, nodes, captures)
    why = "the step is not known: run it by monitor.run(step, batch)"
    if session.world_size > 1:
        why = "several ranks train together, of which none runs a step again alone"
    return StoppedCallDumper(directory, rank, nodes, None, why)
