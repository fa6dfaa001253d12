"""The noise of a step, measured, how far another computation is from it, and the first place at
which the two part.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from typing import Optional
from unittest import mock

import torch

from .case import Relation, TestedStep
from .observer import Computed, Inside, Key, in_double, is_of_rows, is_site
from .result import Place

#: The score up to which a difference is noise. Of 201 healthy models the largest was 2.5
#: (tests/accuracy/prove_healthy.py).
LIMIT = 10.0
_PERTURBED = 3
#: Tensors that count as zeros where a computation does not have them.
_SUMS = ("gradient", "update")

#: The words for a tensor of a module that differs, by the kind of its key.
_TEXTS = {
    "forward input": "what {0} is given ({1})",
    "forward output": "its {1}",
    "backward input": "the gradient of its {1}",
    "backward output": "the gradient of what {0} returned ({1})",
}


class Floor:
    """The step as it is, and the noise of each of its tensors: how far it moves when every weight
    moves by one ulp, the worst of three. A step that is to be the very same moves by more, which
    counts by so much less then.
    """

    def __init__(self, case: TestedStep, sites: bool = False, is_exact: bool = False) -> None:
        ulps = 4 * case.far if is_exact else 1.0
        self.base, self.noise = case.compute(sites=sites), dict[Key, float]()
        # The least noise: one ulp of the tensor itself, and of its kind's typical element: a
        # gradient that is zero but for rounding has no size of its own.
        squares, counts = defaultdict[str, float](float), Counter[str]()
        for key, tensor in self.base.tensors.items():
            self.noise[key] = self._norm(key, tensor)
            squares[key[0]] += self.noise[key] ** 2
            counts[key[0]] += tensor.numel()
        for key, norm in self.noise.items():
            mean = squares[key[0]] / max(counts[key[0]], 1)
            typical = (mean * self.base.tensors[key].numel()) ** 0.5
            self.noise[key] = case.eps * (norm if is_of_rows(key) else max(norm, typical))
        for noise in range(1, _PERTURBED + 1):
            with mock.patch.multiple(case.settings, noise=noise, ulps=ulps):
                moved = case.compute(sites=sites)
            for key, known in self.noise.items():
                self.noise[key] = max(known, self.distance(key, self.base, moved) / ulps)

    def scores(self, other: Computed, base: Computed, kinds: tuple[str, ...]) -> dict[Key, float]:
        """The difference over the noise of every tensor of these kinds that both computations have;
        infinite where only one of the two is finite.
        """
        scores = {}
        for key in {**base.tensors, **other.tensors}:
            held = [c.tensors[key] for c in (base, other) if key in c.tensors]
            is_known = key[0] in kinds and (len(held) > 1 or key[0] in _SUMS)
            if is_known and held[0].shape == held[-1].shape:
                distance, noise = self.distance(key, base, other), self.noise.get(key, 0.0)
                scores[key] = distance / noise if noise else distance and float("inf")
        return scores

    def distance(self, key: Key, base: Computed, other: Computed) -> float:
        """The norm of the difference. A tensor that is missing counts as zeros."""
        pair = [in_double(c.tensors[key]) for c in (base, other) if key in c.tensors]
        a, b = pair[0], pair[-1].to(pair[0].device) if len(pair) > 1 else torch.zeros_like(pair[0])
        if a.shape != b.shape:
            return 0.0
        equal = (a == b) | (a.isnan() & b.isnan())
        return self._norm(key, torch.where(equal, torch.zeros_like(a), a - b))

    def _norm(self, key: Key, gap: torch.Tensor) -> float:
        gap = in_double(gap)
        if key[0] == "update":
            # Adam moves a weight by its sign where the gradient is rounding alone.
            size = in_double(self.base.tensors.get(("gradient", key[1]), torch.ones(()))).abs()
            if float(size.max()) > 0.0:
                gap = gap * (size / size.max())
        norm = float(gap.norm())
        return norm if norm == norm else float("inf")


def find_place(case: TestedStep, relation: Relation) -> Optional[Place]:
    """The first tensor of a module, in the order of the computation, that differs by more than its
    noise; then the same of the operators that this module calls itself.
    """
    if (difference := _first(case, relation)) is None:
        return None
    key, score = difference
    if key[0] in ("loss", "step"):
        return Place("", key[0], key[1], score)
    path, what = _split(key)
    if key[0] == "gradient" and relation.reduces:
        return Place(path, "reduction", what, score)
    kind = "backward input" if key[0] == "gradient" else key[0]
    text = _TEXTS[kind].format(path or "it", what)
    # The module around it makes what a module is given.
    module = _around(case.model, path) if path and "{0}" in _TEXTS[kind] else path
    phase = kind.partition(" ")[0]
    place = Place(module, phase, text, score)
    case.inside = inside = Inside(module)
    inner = _first(case, relation, phase)
    names = {inner[0][1]} if inner is not None and inner[0][0] == f"{phase} operator" else set()
    if phase == "backward":  # wrong in what has read it
        names = {reader for name in names for reader in inside.readers.get(name, [])}
    if len(names) != 1:
        return place
    (name,) = names
    return replace(place, operator=name.partition(" ")[2], line=inside.lines.get(name, ""))


def _first(case: TestedStep, relation: Relation, phase: str = "") -> Optional[tuple[Key, float]]:
    roles = ("operator",) if phase else ("input", "output")
    kinds = ("loss", *(f"{way} {role}" for way in ("forward", "backward") for role in roles))
    kinds += () if phase else ("gradient",)
    case.find_layouts(sites=True)
    floor = Floor(case, True, relation.is_exact)
    reference = relation.reference(case, floor.base, sites=True)
    other = relation.run(case, floor.base, sites=True)
    scores = floor.scores(other, reference, kinds)
    loss = scores.pop(("loss", ""), 0.0)
    found = (("loss", ""), loss) if loss > LIMIT and not phase else None
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
        if way != "forward" and found is not None:
            return found
        is_held = key in reference.rows or not is_of_rows(key) or not relation.mixes_rows
        if score > LIMIT and is_held and way == (phase or way):
            return _of_reader(key, other), score
    return found


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
    path = path.rpartition(".")[0]
    holder = model.get_submodule(path)
    is_list = path and isinstance(holder, (torch.nn.ModuleList, torch.nn.ModuleDict))
    return _around(model, path) if is_list else path


def _split(key: Key) -> tuple[str, str]:
    """The module and the tensor of ``"h.0#1 output"``, or of a parameter's gradient."""
    path, _, rest = key[1].partition("#") if is_site(key) else key[1].rpartition(".")
    return path, rest.partition(" ")[2] or rest
