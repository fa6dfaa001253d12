"""Causes in two programs, beside their tensors, as far as logs tell: classes and attributes of
modules, criteria and parameters of one side alone, the state that optimizers began from.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from .block import Source
from .measure import PairState
from .tally import Found, Missing, Tally

Sides = tuple[Source, Source]
_SIDES = ("actual", "reference")
_MOST = 3


def path_of(name: str) -> str:
    """The path of the module in a tensor's name."""
    path = name.partition(" · ")[0]
    return "" if path == "the model" else path


def of_modules(first: Found, sides: Sides) -> Iterator[str]:
    """Attributes and classes that differ, of the module of the first difference and of those that
    it lies in.
    """
    path = path_of(first.row.name)
    settings, classes = [], []
    while True:
        mine, other = (side.modules.get(path, {}) for side in sides)
        shown = path or "the model"
        settings += [
            f"{shown}.{key} is {mine[key]} in actual and {value} in reference"
            for key, value in other.items()
            if key in mine and mine[key] != value
        ]
        kinds = [side.classes.get(path) for side in sides]
        if None not in kinds and kinds[0] != kinds[1]:
            classes.append(f"{shown} is of class {kinds[0]} in actual and {kinds[1]} in reference")
        if not path:
            break
        path = path.rpartition(".")[0]
    if settings:
        found = "; ".join(settings[: _MOST + 1])
        yield f"other settings of modules, as install() has found them: {found}"
    if classes:
        yield f"other modules: {'; '.join(classes[:_MOST])}"


def of_one_side(tally: Tally, sides: Sides) -> Iterator[str]:
    """Parameters that one side alone has in a module of both, and criteria that one side alone was
    given, or calls.
    """
    parameters: dict[str, Missing] = {}
    criteria: dict[str, Missing] = {}
    for entry in tally.missing.values():
        path, (has, lacks) = path_of(entry.name), _places(entry)
        kind = re.escape(sides[has].classes.get(path, ""))
        if path in sides[lacks].classes:
            if entry.is_given and " · optimizer · " in entry.name:
                parameters.setdefault(path, entry)
        elif kind and re.fullmatch(rf"{kind}(_\d+)?", path):
            criteria.setdefault(path, entry)
    for path, entry in list(criteria.items())[:_MOST]:
        has, lacks = _places(entry)
        if path in sides[lacks].modules:
            yield f"{path} is called in {_SIDES[has]}, and not in {_SIDES[lacks]}"
        elif sides[lacks].modules:
            yield (
                f"{path} was given to install() in {_SIDES[has]} alone: what it reads and returns "
                f"is not compared. Give it in {_SIDES[lacks]} too: install(model, criterion)"
            )
    for path, entry in list(parameters.items())[:_MOST]:
        has, lacks = _places(entry)
        kinds = [side.classes[path] for side in sides]
        yield (
            f"{path or 'the model'} is in both, and has {entry.name.rpartition(' · ')[2]} in "
            f"{_SIDES[has]} alone. In {_SIDES[lacks]} "
            + (
                f"the module is of another class ({kinds[0]} in actual, {kinds[1]} in reference)"
                if kinds[0] != kinds[1]
                else "it is shared with another module (tied weights), has another name, or is not "
                "there"
            )
        )


def _places(entry: Missing) -> tuple[int, int]:
    """The side that has what is missing, and the side that lacks it."""
    return (0, 1) if entry.state is PairState.ONLY_ACTUAL else (1, 0)


def of_gradient(first: Found, tally: Tally, starts: tuple[int, int]) -> Iterator[str]:
    """A parameter whose update differs, and whose gradient one side alone has."""
    module, _, label = first.row.name.rpartition(" · ")
    for place, state in enumerate((PairState.ONLY_REFERENCE, PairState.ONLY_ACTUAL)):
        entry = tally.missing.get((state, f"{module} · gradient of {label}"))
        step = first.row.step - starts[1] + starts[1 - place]
        if entry is not None and entry.first_step <= step:
            yield (
                f"from step {entry.first_step:,} on {_SIDES[1 - place]} alone has a gradient of "
                f"{label}: in {_SIDES[place]} the optimizer finds none (frozen: "
                "requires_grad=False, a detach(), no path from the loss), and passes over it"
            )


def of_state(first: Found, sides: Sides, starts: tuple[int, int]) -> Iterator[str]:
    """The state that the optimizers began from, where the first update that is compared differs."""
    begun = [side.optimizer_states for side in sides]
    if first.row.step != starts[1] or not all(begun):
        return
    is_resumed = starts[0] != starts[1]
    for number, (mine, other) in enumerate(zip(*begun)):
        name = f"optimizers[{number}]"
        texts = [_state_text(state) for state in (mine, other)]
        if not is_resumed:
            if texts[0] != texts[1]:
                yield f"{name} began {texts[0]} in actual, and {texts[1]} in reference"
            continue
        # The run that is continued has taken steps before the first that is compared.
        late = int(starts[1] > starts[0])
        new, old = (mine, other) if late else (other, mine)
        taken = starts[late] - starts[1 - late]
        ran = f"{_SIDES[late]} had taken {taken:,} steps by then"
        begins = f"{name} of {_SIDES[1 - late]} began {texts[1 - late]}"
        counts, before = new.get("steps"), (old.get("steps") or [0])[0]
        if not new.get("with_state"):
            if old.get("keeps"):
                yield f"{begins}, and {ran}: its state was not loaded (load_state_dict())"
        elif counts and counts[0] < before + taken:
            yield f"{begins}, and {ran}: step counts that start again correct Adam's averages anew"
        else:
            yield (
                f"gradients and settings agree, so look at the rest of the optimizer's state "
                f"(averages, momentum): {begins}, and {ran}. fastcheck compare of the two "
                "checkpoints names what differs in it"
            )


def _state_text(state: Mapping[str, Any]) -> str:
    held, counts = state.get("with_state"), state.get("steps")
    if not held:
        return "without state"
    text = f"with a state of {held:,} of its {state.get('parameters'):,} parameters"
    if counts:
        span = f"{counts[0]:,g}" + (f" to {counts[-1]:,g}" if counts[0] != counts[-1] else "")
        text += f" and step counts of {span}"
    return text
