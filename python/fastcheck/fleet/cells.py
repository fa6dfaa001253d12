"""What is unusual of each rank in each step, for the heat map of a fleet's page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from .engines import Engine
from .findings import Cell
from .questions import CELL_ANSWERS, statement

__all__ = ["cell_answers", "is_any_bad", "unusual_cells"]

_MOST_CELLS = 1_000_000
Answers = Mapping[str, list[dict[str, Any]]]


def is_any_bad(engine: Engine) -> bool:
    """Whether a NaN or an infinity was found, which was not judged harmless."""
    return bool(engine.ask("SELECT count(first_bad) AS ranks FROM progress")[0]["ranks"])


def cell_answers(engine: Engine) -> dict[str, list[dict[str, Any]]]:
    """The answers that only the heat map needs."""
    return {
        name: engine.ask(statement(text, engine.dialect))
        for name, text in CELL_ANSWERS.items()
        if name != "bad_cells" or is_any_bad(engine)
    }


def unusual_cells(answers: Answers) -> tuple[Cell, ...]:
    """Those of most weight, if there are more than a page can hold; none where the questions of the
    page were not asked.
    """
    if "step_list" not in answers:
        return ()
    found = sorted(_cells(answers), key=lambda one: -one.z)
    return tuple(found[:_MOST_CELLS])


def _cells(answers: Answers) -> Iterator[Cell]:
    for row in answers["outlying_steps"]:
        yield _cell(row, "outlying", float(row["z"]))
    for name, kind in (("replica_cells", "replicas"), ("bad_cells", "nonfinite")):
        for row in answers.get(name, ()):
            yield _cell(row, kind, math.inf)


def _cell(row: Mapping[str, Any], kind: str, z: float) -> Cell:
    return Cell(int(row["rank"]), int(row["step"]), kind, z, int(row["site_count"]))
