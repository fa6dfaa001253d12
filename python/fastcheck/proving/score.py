"""The noise of a step, measured, how far another computation is from it, and the first place at
which the two part.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Optional
from unittest import mock

import torch

from .case import TestedStep
from .computed import Computed, Key, is_of_rows, is_site
from .observer import Inside
from .relation import Relation
from .result import Place

#: The score up to which a difference is noise. Of 113 healthy models the largest was 2.5
#: (tests/accuracy/prove_healthy.py).
LIMIT = 10.0
_PERTURBED = 3
#: Tensors that count as zeros where a computation does not have them.
_SUMS = ("gradient", "update")


@dataclass
class Floor:
    """The step as it is, and the noise of each of its tensors: how far it moves when every weight
    moves by one ulp, the worst of three.
    """

    base: Computed
    noise: dict[Key, float] = field(default_factory=dict)

    @classmethod
    def measure(cls, case: TestedStep, sites: bool = False, ulps: float = 1.0) -> Floor:
        """Four computations of the step; ``ulps``: by how many the weights move, for a step that
        differs by itself, which counts by so much less then.
        """
        floor = cls(case.compute(sites=sites))
        floor._begin(case.eps)
        for noise in range(1, _PERTURBED + 1):
            with mock.patch.multiple(case.settings, noise=noise, ulps=ulps):
                moved = case.compute(sites=sites)
            for key, known in floor.noise.items():
                floor.noise[key] = max(known, floor.distance(key, floor.base, moved) / ulps)
        return floor

    def _begin(self, eps: float) -> None:
        """The least noise: one ulp of the tensor itself, and of its kind's typical element: a
        gradient that is zero but for rounding has no size of its own.
        """
        squares, counts = defaultdict[str, float](float), Counter[str]()
        for key, tensor in self.base.tensors.items():
            self.noise[key] = self._norm(key, tensor)
            squares[key[0]] += self.noise[key] ** 2
            counts[key[0]] += tensor.numel()
        for key, norm in self.noise.items():
            mean = squares[key[0]] / max(counts[key[0]], 1)
            typical = (mean * self.base.tensors[key].numel()) ** 0.5
            self.noise[key] = eps * (norm if is_of_rows(key) else max(norm, typical))

    def scores(self, other: Computed, base: Computed, kinds: tuple[str, ...]) -> dict[Key, float]:
        """The difference over the noise of every tensor of these kinds that both computations have;
        infinite where only one of the two is finite.
        """
        scores = {}
        for key in {**base.tensors, **other.tensors}:
            ours, theirs = base.tensors.get(key), other.tensors.get(key)
            is_one = ours is None or theirs is None
            if key[0] not in kinds or (is_one and key[0] not in _SUMS):
                continue
            if is_one or ours.shape == theirs.shape:  # type: ignore[union-attr]  # both are there where it is not is_one
                distance, noise = self.distance(key, base, other), self.noise.get(key, 0.0)
                scores[key] = distance / noise if noise else distance and float("inf")
        return scores

    def distance(self, key: Key, base: Computed, other: Computed) -> float:
        """The norm of the difference. A tensor that is missing counts as zeros."""
        pair = [c.tensors[key].detach().double() for c in (base, other) if key in c.tensors]
        a, b = pair[0], pair[-1].to(pair[0].device) if len(pair) > 1 else torch.zeros_like(pair[0])
        if a.shape != b.shape:
            return 0.0
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


def ulps_of(case: TestedStep, relation: Relation) -> float:
    """The number of ulps by which the weights move for the noise of this relation."""
    return 4 * case.far if relation.is_exact else 1.0


def find_place(case: TestedStep, relation: Relation) -> Optional[Place]:
    """The first tensor of a module, in the order of the computation, that differs by more than its
    noise; then the same of the operators that this module calls itself.
    """
    difference = _first(case, relation)
    if difference is None:
        return None
    key, score = difference
    if key[0] in ("loss", "step"):
        return Place("", key[0], key[1], score)
    path, what = _split(key)
    is_gradient = key[0] == "gradient"
    phase, role = ("backward", "input") if is_gradient else key[0].split()
    if is_gradient and relation.reduces:
        return Place(path, "reduction", what, score)
    module, text = path, f"what it is given ({what})"
    if (phase, role) == ("forward", "output"):
        text = f"its {what}"
    elif (phase, role) == ("backward", "input"):
        text = f"the gradient of its {what}"
    elif path:  # what is given to a module is made by the module around it
        module = _around(case.model, path)
        text = f"what {path} is given ({what})"
        if phase == "backward":
            text = f"the gradient of what {path} returned ({what})"
    place = Place(module, phase, text, score)
    case.inside = inside = Inside(module)
    inner = _first(case, relation, phase)
    if inner is None or inner[0][0].split()[1] != "operator":
        return place
    name = inner[0][1]
    if phase == "backward":  # wrong in what has read it
        readers = inside.readers.get(name, [])
        if len(set(readers)) != 1:
            return place
        name = readers[0]
    operator = name.partition(" ")[2]
    return Place(module, phase, text, score, operator, inside.lines.get(name, ""))


def _first(case: TestedStep, relation: Relation, phase: str = "") -> Optional[tuple[Key, float]]:
    roles = ("operator",) if phase else ("input", "output")
    kinds = ("loss", *(f"{way} {role}" for way in ("forward", "backward") for role in roles))
    kinds += () if phase else ("gradient",)
    case.find_layouts(sites=True)
    floor = Floor.measure(case, True, ulps_of(case, relation))
    reference = relation.reference(case, floor.base, sites=True)
    other = relation.run(case, floor.base, sites=True)
    scores = floor.scores(other, reference, kinds)
    loss = scores.pop(("loss", ""), 0.0)
    has_backward = any(not key[0].startswith("forward") for key in scores)
    sites = [key for key in reference.tensors if is_site(key)]
    if relation.mixes_rows and not any(key in reference.rows for key in sites):
        worst = max((loss, *scores.values()))
        return (("step", ""), worst) if worst > LIMIT else None
    for key in () if phase else sites:
        is_given = key[0] == "forward input" and key[1].startswith("#") and key in reference.rows
        if is_given and key in other.rows and key not in scores:  # another shape
            return key, float("inf")
    for key, score in scores.items():
        way = key[0].partition(" ")[0]
        is_read = ("backward output", key[1]) in scores or key in floor.base.fixed
        if has_backward and key[0] == "forward output" and not is_read:
            continue  # nothing is made of it, as of the last state of a recurrent layer
        if way != "forward" and loss > LIMIT and not phase:
            return ("loss", ""), loss
        is_held = key in reference.rows or not is_of_rows(key) or not relation.mixes_rows
        if score > LIMIT and is_held and way == (phase or way):
            return _of_reader(key, other), score
    return (("loss", ""), loss) if loss > LIMIT and not phase else None


def _of_reader(key: Key, other: Computed) -> Key:
    """The gradient of an input in place of that of an output, where one module takes the tensor:
    it has made the gradient.
    """
    if key[0] != "backward output":
        return key
    inputs = [k for k in other.tensors if k[0] == "backward input"]
    same = [k for k in inputs if torch.equal(other.tensors[k], other.tensors[key])]
    paths = {_split(k)[0] for k in same}
    outer = [k for k in same if not any(_split(k)[0].startswith(f"{p}.") for p in paths)]
    return outer[0] if len(outer) == 1 else key


def _around(model: torch.nn.Module, path: str) -> str:
    """The path of the module that calls this module: not of a list that holds it."""
    modules = dict(model.named_modules(remove_duplicate=False))
    path = path.rpartition(".")[0]
    while isinstance(modules.get(path), (torch.nn.ModuleList, torch.nn.ModuleDict)):
        path = path.rpartition(".")[0]
    return path


def _split(key: Key) -> tuple[str, str]:
    """The module and the tensor of ``"h.0#1 output"``, or of a parameter's gradient."""
    path, _, rest = key[1].partition("#") if is_site(key) else key[1].rpartition(".")
    return path, rest.partition(" ")[2] or rest
