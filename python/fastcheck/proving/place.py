"""The first place at which two computations of a step part."""

from __future__ import annotations

from typing import Optional

from .case import Case
from .computed import Key, is_of_rows
from .relation import Relation
from .result import Place
from .score import LIMIT, Floor


def find_place(case: Case, relation: Relation) -> Optional[Place]:
    """The first tensor of a module, in the order of the computation, that differs by more than its
    noise; then the same of the operators that this module calls itself.
    """
    found = _first(case, relation)
    if found is None:
        return None
    key, score = found
    if key[0] == "loss":
        return Place("", "loss", "", score)
    path, what = _split(key[1])
    phase, role = key[0].split()
    module, text = path, what
    if (phase, role) == ("forward", "output"):
        text = f"its {what}"
    elif (phase, role) == ("backward", "input") or role == "parameter":
        text = f"the gradient of its {what}"
    elif path:  # what is given to a module is made by the one around it
        module = path.rpartition(".")[0]
        text = f"what {path} is given ({what})"
        if phase == "backward":
            text = f"the gradient of what {path} returned ({what})"
    place = Place(module, phase, text, score)
    case.ops_of = module
    try:
        inner = _first(case, relation, phase)
        if inner is None or inner[0][0].split()[1] != "operator":
            return place
        name = inner[0][1]
        if phase == "backward":  # wrong in what has read it
            readers = case.readers.get(name, [])
            if len(set(readers)) != 1:
                return place
            name = readers[0]
        return Place(module, phase, text, score, _split(name)[1], case.lines.get(name, ""))
    finally:
        case.ops_of = None


def _first(case: Case, relation: Relation, phase: str = "") -> Optional[tuple[Key, float]]:
    kinds = tuple(
        f"{way} {role}"
        for way in ("forward", "backward")
        for role in ("input", "output", "parameter", "operator")
    )
    if phase:
        kinds = ("forward operator", "backward operator")
    case.find_layouts(sites=True)
    floor = Floor.measure(case, sites=True)
    reference = relation.reference(case, floor.base, sites=True)
    other = relation.run(case, floor.base, sites=True)
    scores = floor.scores(other, reference, ("loss", *kinds))
    loss = scores.pop(("loss", ""), 0.0)
    has_backward = any(key[0].startswith("backward") for key in scores)
    for key, score in scores.items():
        way, _, role = key[0].partition(" ")
        if has_backward and way == "forward" and ("backward " + role, key[1]) not in scores:
            continue  # nothing is made of it, as of the last state of a recurrent layer
        if key[0].startswith("backward") and loss > LIMIT and not phase:
            return ("loss", ""), loss
        is_held = key in reference.rows or not is_of_rows(key) or not relation.mixes_rows
        if score > LIMIT and is_held and way == (phase or way):
            return key, score
    return (("loss", ""), loss) if loss > LIMIT and not phase else None


def _split(name: str) -> tuple[str, str]:
    """``"h.0#1 output"``: the module and the tensor of it."""
    path, _, rest = name.partition("#")
    return path, rest.partition(" ")[2]
