"""The noise of a step, measured, how far another computation is from it, and the first place at
which the two part.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Optional

import torch

from .case import Case
from .computed import Computed, Key, is_of_rows
from .relation import Relation
from .result import Place

#: The score up to which a difference is noise. Of 113 healthy models the largest was 2.5
#: (tests/accuracy/prove_healthy.py).
LIMIT = 10.0
_PERTURBED = 3


@dataclass
class Floor:
    """The step as it is, and how far each of its tensors moves when every weight moves by one ulp:
    the worst of three.
    """

    base: Computed
    moved: dict[Key, float] = field(default_factory=dict)
    _least: dict[Key, float] = field(default_factory=dict)

    @classmethod
    def measure(cls, case: Case, sites: bool = False) -> Floor:
        """Four computations of the step."""
        floor = cls(case.compute(sites=sites))
        for noise in range(1, _PERTURBED + 1):
            case.noise = noise
            try:
                moved = case.compute(sites=sites)
            finally:
                case.noise = 0
            for key in floor.base.tensors:
                found = floor.distance(key, floor.base, moved)
                floor.moved[key] = max(floor.moved.get(key, 0.0), found)
        floor._set_least(case.eps)
        return floor

    def _set_least(self, eps: float) -> None:
        """One ulp of the tensor itself, and of its kind's typical element: a gradient that is zero
        but for rounding has no size of its own.
        """
        squares: dict[str, tuple[float, int]] = {}
        norms = {key: self._norm(key, tensor) for key, tensor in self.base.tensors.items()}
        for key, tensor in self.base.tensors.items():
            total, count = squares.get(key[0], (0.0, 0))
            squares[key[0]] = total + norms[key] ** 2, count + tensor.numel()
        for key, tensor in self.base.tensors.items():
            total, count = squares[key[0]]
            typical = (total / max(count, 1) * tensor.numel()) ** 0.5
            own = norms[key] if is_of_rows(key) else typical
            self._least[key] = eps * max(norms[key], own)

    def score(self, key: Key, other: Computed, base: Computed) -> float:
        """The difference over the floor; infinite where only one of the two is finite."""
        distance = self.distance(key, base, other)
        floor = max(self.moved.get(key, 0.0), self._least.get(key, 0.0))
        if distance == 0.0:
            return 0.0
        return distance / floor if floor > 0.0 else float("inf")

    def scores(self, other: Computed, base: Computed, kinds: tuple[str, ...]) -> dict[Key, float]:
        """Of every tensor of these kinds that both computations have."""
        found = {}
        for key, tensor in base.tensors.items():
            if key[0] not in kinds:
                continue
            theirs = other.tensors.get(key)
            if theirs is None and key[0] not in ("gradient", "update"):
                continue
            if theirs is None or theirs.shape == tensor.shape:
                found[key] = self.score(key, other, base)
        return found

    def distance(self, key: Key, base: Computed, other: Computed) -> float:
        """The norm of the difference. A tensor that is missing counts as zeros."""
        ours, theirs = base.tensors[key], other.tensors.get(key)
        if theirs is not None and theirs.shape != ours.shape:
            return 0.0
        a = ours.detach().double()
        b = torch.zeros_like(a) if theirs is None else theirs.detach().to(a.device).double()
        equal = (a == b) | (a.isnan() & b.isnan())
        gap = torch.where(equal, torch.zeros_like(a), a - b)
        return self._norm(key, gap)

    def _norm(self, key: Key, gap: torch.Tensor) -> float:
        gap = gap.detach().double()
        if key[0] == "update":
            # Adam moves a weight by its sign where the gradient is rounding alone.
            gradient = self.base.tensors.get(("gradient", key[1]))
            if gradient is not None:
                size = gradient.double().abs()
                if float(size.max()) > 0.0:
                    gap = gap * (size / size.max())
        norm = float(gap.norm())
        return norm if norm == norm else float("inf")


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
