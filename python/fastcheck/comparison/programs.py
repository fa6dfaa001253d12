"""Causes in two programs, beside their tensors, as far as logs tell: classes and attributes of
modules, criteria and parameters of one side alone, the state that optimizers began from.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, Optional

from fastcheck.utils.text.numbers import counted

from .block import SIDES, Phase, Source
from .measure import PairState
from .names import Name
from .row import factor_of
from .tally import Found, Missing, Tally

Sides = tuple[Source, Source]
_MOST = 3
# Stands for a parameter that is none of the model.
_NOT_OURS = "not the model's"
# The key of a module's class among its attributes.
_CLASS = "class"
#: Each update has a record of its learning rates.
_RATE = str(Name("", "optimizer", "learning_rate", "lr"))
#: Classes of torch whose output has random numbers in it.
_DROPPING = ("Dropout", "Dropout1d", "Dropout2d", "Dropout3d")
_RANDOM = (*_DROPPING, "AlphaDropout", "FeatureAlphaDropout", "RReLU")
#: Classes of torch whose output depends on which samples are together.
_AVERAGING = ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d")


def path_of(name: str) -> str:
    """The path of the module in a tensor's name."""
    path = name.partition(" · ")[0]
    return "" if path == "the model" else path


def of_modules(first: Found, sides: Sides) -> Iterator[str]:
    """Attributes that differ of the module of the first difference, of those that it lies in, and
    of those that one side alone reads before it; or what an embedding reads, or that the module
    draws random numbers.
    """
    own = path_of(first.row.name)
    alone = [path_of(name) for names in first.alone for name in names]
    paths = dict.fromkeys([*_around(own), *alone])
    settings = [*of_settings(paths, sides)]
    yield from settings
    if settings:
        return
    if (
        " · forward · output" in first.row.name
        and all(class_of(side, own) == "Embedding" for side in sides)
        and factor_of(first.row.actual, first.row.reference) == 1
    ):
        yield (
            f"{own} (Embedding) looks up rows of a weight that agrees: look at the indices that it "
            "is given (an offset, other positions). A log has those that the model itself is given"
        )
    elif (
        " · forward · output" in first.row.name
        and class_of(sides[1], own) in _RANDOM
        and not any(name.startswith(f"{own} · forward · input") for name in chain(*first.alone))
    ):
        yield (
            f"{own} ({class_of(sides[1], own)}) draws random numbers: look at the seeds, and at "
            "what draws from the same generator before it on one side alone"
        )
    elif (
        first.row.name == f"{own} · backward · gradient of input[0]"
        and class_of(sides[1], own) in _DROPPING
        and all(side.modules.get(own, {}).get("p", 1) for side in sides)
        and factor_of(first.row.actual, first.row.reference) == 1
        and first.exact_before
    ):
        yield (
            f"{own} ({class_of(sides[1], own)}) makes another gradient of what is equal to the "
            "bit: its mask is not that of its forward, as where activation checkpointing draws it "
            "again (preserve_rng_state=False), or a hook changes the gradient"
        )
    elif _is_of_its_own(first, own):
        yield (
            f"the modules in {own or 'the model'} return what is equal to the bit: its own "
            f"forward(), or a hook on it, makes another output of that, after {first.after}"
        )


def _is_of_its_own(first: Found, own: str) -> bool:
    """True if it is an output of a module that calls others, which agree, and does more itself."""
    below = f"{own}." if own else ""
    is_after = path_of(first.after).startswith(below) and path_of(first.after) != own
    is_output = first.row.name.startswith(f"{own or 'the model'} · forward · output")
    return is_output and is_after and first.exact_before and not any(first.alone)


def of_settings(paths: Iterable[str], sides: Sides) -> Iterator[str]:
    """Attributes of these modules that differ."""
    settings = [text for path in paths for text in _other_settings(path, sides)]
    if settings:
        found = "; ".join(settings[: _MOST + 1])
        yield f"other settings of modules, as install() has found them: {found}"


def of_offset(sides: Sides) -> Iterator[str]:
    """Learning rates of one side that are those of the other some steps later."""
    for name, theirs in sides[1].schedules.items():
        mine = dict(sides[0].schedules.get(name, ())) if name.endswith(".lr") else {}
        for late in (-1, 1, -2, 2):
            both = [(mine[at + late], rate) for at, rate in theirs if at >= 0 and at + late in mine]
            is_same = all(own == rate for own, rate in both)
            if is_same and len({rate for _, rate in both}) == len(both) >= _MOST:
                yield (
                    f"{name} is that of reference {counted(abs(late), 'step')} "
                    f"{'later' if late > 0 else 'earlier'}, as far as both change it: look at the "
                    "place of scheduler.step(), or where the schedule begins"
                )
                return


def of_warnings(sides: Sides, starts: tuple[int, int], last: int) -> Iterator[str]:
    """Warnings of one run alone, of steps that both have. ``last``: the last step of reference."""
    said = [{_told_by(text) for _, text in side.warned} for side in sides]
    for place, (side, start) in enumerate(zip(sides, starts)):
        alone = [
            f"step {step:,}: {text.rstrip('.')}"
            for step, text in side.warned
            if start <= step <= last - starts[1] + start and _told_by(text) not in said[1 - place]
        ]
        for text in list(dict.fromkeys(alone))[:_MOST]:
            yield f"the run of {SIDES[place]} alone was warned: {text}"


def _told_by(warning: str) -> str:
    """The advice of a warning, which its rule alone gives; its numbers and names are the run's."""
    return re.sub(r"\d+", "", warning.rpartition(". ")[2])


def of_other_model(sides: Sides) -> Iterator[str]:
    """An optimizer of one side alone that holds none of the model's parameters."""
    held = [[*_held_by(side)] for side in sides]
    if held[0] != held[1] and sorted(map(sorted, held[0])) == sorted(map(sorted, held[1])):
        yield (
            "the optimizers hold the same parameters in another order: they are numbered in the "
            "order in which they first step"
        )
    for number, both in enumerate(zip(*held)):
        strange = [names == {_NOT_OURS} for names in both]
        if strange[0] != strange[1]:
            yield (
                f"optimizers[{number}] of {SIDES[strange.index(True)]} holds none of the model's "
                "parameters: it is of other tensors, as where the model is copied, or made anew, "
                "after its optimizer"
            )


def _held_by(side: Source) -> Iterator[set[str]]:
    """The names of the parameters of each optimizer."""
    optimizers = (side.settings.get(Phase.HYPERPARAMETERS) or {}).get("optimizers")
    for optimizer in optimizers if isinstance(optimizers, list) else ():
        groups = optimizer.get("groups", ())
        yield {str(name) for group in groups for name in group.get("parameters", ())}


def of_rates(first: Found, sides: Sides, starts: tuple[int, int]) -> Iterator[str]:
    """A learning rate that is changed for the first time in the step of the first difference."""
    step = first.row.step
    for name, changes in sides[1].schedules.items():
        later = [at for at, _ in changes if at > starts[1]]
        # A second step has a momentum for the first time.
        if name.endswith(".lr") and step > starts[1] + 1 and later[:1] == [step]:
            old, new = ([v for at, v in changes if at < step], dict(changes)[step])
            begun = f" from {old[-1]:.6g}" if old else ""
            yield (
                f"in that step {name} is changed for the first time,{begun} to {new:.6g}, on both "
                "sides: look at what of the optimizer goes by it (a momentum that holds rates, a "
                "decay)"
            )
            return


def of_left_out(first: Found, sides: Sides) -> Iterator[str]:
    """The first module of both sides that one side alone calls, before the first difference."""
    if sides[0].options != sides[1].options or any(side.compiled_modules for side in sides):
        return
    for has, names in enumerate(first.alone):
        lacks = sides[1 - has]
        around = (reversed(_around(path_of(name))) for name in names)
        for path in dict.fromkeys(chain.from_iterable(around)):
            if path not in lacks.modules or path in lacks.called:
                continue
            if not any(called.startswith(f"{path}.") for called in lacks.called):
                yield (
                    f"{path} is in both models, and {SIDES[1 - has]} does not call it (or its "
                    "forward() alone, which runs no hooks)"
                )
                return


def of_split(sides: Sides) -> Iterator[str]:
    """Modules that draw random numbers, or average over samples, where the two sides split the
    batch in other ways.
    """
    mine, other = (
        {
            path: held
            for path, held in side.modules.items()
            if held.get("training") and held.get("p", 1)
        }
        for side in sides
    )
    both = {path: str(held.get(_CLASS)) for path, held in mine.items() if path in other}
    if path := next((path for path, kind in both.items() if kind in _RANDOM), ""):
        yield (
            f"{path} ({both[path]}) draws random numbers, and others for a batch in other parts: "
            "the two agree only where nothing is drawn (p=0)"
        )
    if path := next((path for path, kind in both.items() if kind in _AVERAGING), ""):
        yield (
            f"{path} ({both[path]}) takes the mean and the variance of each part of the batch by "
            "itself: the two agree only where parts are as large on both sides (of ranks, "
            "SyncBatchNorm takes those of the whole)"
        )


def of_classes(first: Optional[Found], tally: Tally, sides: Sides) -> Iterator[str]:
    """Modules of other classes, among that of the first difference, those that it lies in, and
    those that one side alone reads or calls.
    """
    own = [] if first is None else _around(path_of(first.row.name))
    alone = (path_of(entry.name) for entry in tally.missing.values())
    paths = dict.fromkeys([*own, *alone])
    if found := [text for path in paths for text in other_class(path, sides)]:
        yield f"other modules: {'; '.join(found[:_MOST])}"


def _around(path: str) -> list[str]:
    """A module's path, and those of the modules that it lies in."""
    parts = path.split(".") if path else []
    return [".".join(parts[:count]) for count in range(len(parts), -1, -1)]


def _other_settings(path: str, sides: Sides) -> list[str]:
    """Texts on the attributes of a module that differ."""
    mine, other = (side.modules.get(path, {}) for side in sides)
    return [
        f"{path or 'the model'}.{key} is {mine[key]} in actual and {value} in reference"
        for key, value in other.items()
        if key != _CLASS and key in mine and mine[key] != value
    ]


def class_of(side: Source, path: str) -> str:
    """The class of a module; "" where it is not known."""
    return str(side.modules.get(path, {}).get(_CLASS) or side.classes.get(path, ""))


def other_class(path: str, sides: Sides) -> list[str]:
    """The text on a module that is of another class on the two sides."""
    kinds = [class_of(side, path) for side in sides]
    if "" in kinds or kinds[0] == kinds[1]:
        return []
    return [f"{path or 'the model'} is of class {kinds[0]} in actual and {kinds[1]} in reference"]


def of_one_side(tally: Tally, sides: Sides, starts: tuple[int, int]) -> Iterator[str]:
    """Parameters that one side alone has in a module of both, and criteria that one side alone was
    given, or calls.
    """
    parameters: dict[str, Missing] = {}
    criteria: dict[str, Missing] = {}
    for entry in tally.missing.values():
        path, (has, lacks) = path_of(entry.name), _places(entry)
        kind = re.escape(sides[has].classes.get(path, ""))
        if path in sides[lacks].classes:
            # One that is read less often later is not the optimizer's.
            is_first = entry.is_alone and entry.first_step == starts[has]
            is_parameter = " · optimizer · " in entry.name and " · gradient of " not in entry.name
            if is_first and is_parameter and not other_class(path, sides):
                parameters.setdefault(path, entry)
        elif kind and re.fullmatch(rf"{kind}(_\d+)?", path):
            criteria.setdefault(path, entry)
    own = [path for path, entry in criteria.items() if _places(entry)[0] == 0]
    if len(criteria) == 2 and len(own) == 1:
        (other,) = criteria.keys() - own
        yield f"the criterion is {own[0]} in actual and {other} in reference"
        criteria.clear()
    for path, entry in list(criteria.items())[:_MOST]:
        has, lacks = _places(entry)
        if path in sides[lacks].modules:
            yield f"{path} is called in {SIDES[has]}, and not in {SIDES[lacks]}"
        elif sides[lacks].modules:
            yield (
                f"{path} was given to install() in {SIDES[has]} alone: what it reads and returns "
                f"is not compared. Give it in {SIDES[lacks]} too: install(model, criterion)"
            )
    for path, entry in list(parameters.items())[:_MOST]:
        has, lacks = _places(entry)
        text = (
            f"{path or 'the model'} is in both, and has {entry.name.rpartition(' · ')[2]} in "
            f"{SIDES[has]} alone. In {SIDES[lacks]} it is shared with another module (tied "
            "weights), has another name, or is not there"
        )
        yield ". ".join([text, *_other_settings(path, sides)[:_MOST]])


def _places(entry: Missing) -> tuple[int, int]:
    """The side that has what is missing, and the side that lacks it."""
    return (0, 1) if entry.state is PairState.ONLY_ACTUAL else (1, 0)


def of_gradient(first: Found, tally: Tally, starts: tuple[int, int]) -> Iterator[str]:
    """A parameter whose update differs, and whose gradient one side alone has."""
    module, _, label = first.row.name.rpartition(" · ")
    for place, state in enumerate((PairState.ONLY_REFERENCE, PairState.ONLY_ACTUAL)):
        entry = tally.missing.get((state, f"{module} · gradient of {label}"))
        step = first.row.step - starts[1] + starts[1 - place]
        if entry is not None and entry.is_alone and entry.first_step <= step:
            rest = sum(at >= entry.first_step for at in tally.growth) * len(tally.batches)
            when = f"from step {entry.first_step:,} on"
            if entry.count < rest:
                when = f"in {counted(entry.count, 'step')}, {entry.first_step:,} first,"
            has = f"{when} {SIDES[1 - place]} alone has a gradient of {label}"
            if entry.is_zero:
                yield (
                    f"{has}, all zeros: in {SIDES[place]} the optimizer finds none, and passes "
                    "over it. Of zeros, as zero_grad(set_to_none=False) leaves them, it makes an "
                    "update: averages and weight decay move the weight"
                )
                continue
            yield (
                f"{has}: in {SIDES[place]} the optimizer finds none (frozen: "
                "requires_grad=False, a detach(), no path from the loss), and passes over it"
            )


def of_updates(tally: Tally) -> Iterator[str]:
    """Updates of one side alone, within steps that both have."""
    for side, state in zip(SIDES, (PairState.ONLY_ACTUAL, PairState.ONLY_REFERENCE)):
        entry = tally.missing.get((state, _RATE))
        if entry is not None and not entry.is_alone:
            yield (
                f"from step {entry.first_step:,} on an optimizer updates more often within a step "
                f"in {side}: look for another optimizer.step()"
            )


def of_state(first: Found, sides: Sides, starts: tuple[int, int]) -> Iterator[str]:
    """The state that the optimizers began from, where the first update that is compared differs."""
    begun = [side.optimizer_states for side in sides]
    # The shorter of two runs continues the longer: steps count from install() on.
    late = int(starts[1] > starts[0])
    if first.row.step != starts[1] or starts[1 - late] or not all(begun):
        return
    ran = f"{SIDES[late]} had run {starts[late]:,} steps by then"
    certain, texts = [], []
    for number, states in enumerate(zip(*begun)):
        name, began = f"optimizers[{number}]", [_state_text(state) for state in states]
        new, old = states[1 - late], states[late]
        if not starts[late]:
            if began[0] != began[1]:
                certain.append(f"{name} began {began[0]} in actual, and {began[1]} in reference")
            continue
        texts.append(f"{name} of {SIDES[1 - late]} began {began[1 - late]}")
        if old.get("keeps") and not new.get("with_state"):
            certain.append(f"{texts[-1]}, and {ran}: its state was not loaded (load_state_dict())")
        elif old.get("keeps") and (new.get("steps") or [1])[-1] == 0:
            certain.append(f"{texts[-1]}, and {ran}: its step counts start again")
    yield from certain
    if texts and not certain:
        yield (
            "gradients and settings agree, so look at the rest of the optimizer's state (averages, "
            f"momentum): {'; '.join(texts)}, and {ran}. fastcheck compare of the two checkpoints "
            "names what differs in it"
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
