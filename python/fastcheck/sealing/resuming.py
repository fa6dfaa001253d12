"""The state of a run as a tree of fingerprints, which seal(resume=True) writes, and the steps that
follow; what of the state did not come back where the run goes on, and whether the steps are the
same: ``verify(path, resume=model)``.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Optional, Union

import numpy as np
import torch

from fastcheck.comparison.compare import Comparison, compare
from fastcheck.comparison.measure import PairState
from fastcheck.errors import CompareError, ConfigError, FastcheckError, first_line, printable, warn
from fastcheck.log.reader import find_logs, log_parts
from fastcheck.monitor.next_steps import NextSteps
from fastcheck.sealing.reading import read_all
from fastcheck.utils.torch.sharding import is_part, kept_parts, local
from fastcheck.utils.torch.training_state import Generators
from fastcheck.utils.torch.versions import is_compiled

# A leaf is a list of three texts: what kind of value it is, what tells it from others of its kind,
# and the value itself, where it is short and no text of the user.
Leaf = list[str]
Tree = dict[str, Any]
_SHOWN = 20
_GENERATOR = "the state of a generator"
_UNREAD = "unread"
# Names that are parts already, and options of verify().
_RESERVED = ("random", "shards", "weights", "accept", "map", "receipt", "trust")
# The update of a step shows in the next step.
_STEPS = 2


@dataclass(frozen=True)
class Resumption:
    """The result of verify(resume=). ``bool()`` of it: everything that was sealed came back.

    ``equal``: how many values are as they were sealed. ``differing``: by name, what did not come
    back, and how it is instead. ``notes``: what was not verified. ``first_steps``: once the first
    two steps are over, their comparison with those that followed the seal.
    """

    step: Optional[int]
    equal: int
    differing: dict[str, str]
    notes: tuple[str, ...]
    _steps: Optional[ResumedSteps] = field(default=None, repr=False, compare=False)

    @property
    def first_steps(self) -> Optional[Comparison]:
        """The first two steps after the resume against those after the seal; None before they are
        over.
        """
        return None if self._steps is None else self._steps.comparison

    def __bool__(self) -> bool:
        return bool(self.equal) and not self.differing

    def __str__(self) -> str:
        step = "" if self.step is None else f" after step {self.step:,}"
        lines = [f"{self.equal:,} values are as they were sealed{step}"]
        lines += [f"{name}: {text}" for name, text in list(self.differing.items())[:_SHOWN]]
        if len(self.differing) > _SHOWN:
            lines.append(f"and {len(self.differing) - _SHOWN:,} more (differing has all)")
        lines += [*self.notes[:_SHOWN], "resumed" if self else "NOT RESUMED"]
        return printable("\n".join(lines), keep="\n")


def check_parts(parts: Mapping[str, Any], resume: object, call: str, wants: str) -> None:
    """Raises ConfigError for the names of parts in a call without ``resume``."""
    if parts and resume in (None, False):
        expected = f"one of {call}()'s options, or {wants}"
        raise ConfigError("unknown option", expected=expected, got=", ".join(parts))


# ---- what is sealed -----------------------------------------------------------------------------


def training_tree(model: object, parts: Mapping[str, Any]) -> Tree:
    """The states of the random generators and of ``parts``, and this rank's shards of weights that
    are spread over ranks; not the other weights.
    """
    if not isinstance(model, torch.nn.Module):
        expected, got = "a torch.nn.Module", type(model).__name__
        raise ConfigError("resume needs the model itself", expected=expected, got=got)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    tree: Tree = {}
    tensors: dict[str, tuple[Leaf, torch.Tensor]] = {}
    for name, part in parts.items():
        if name in _RESERVED:
            expected = "another name: this name is an option, or what fastcheck seals itself"
            raise ConfigError("a part has a reserved name", expected=expected, got=name)
        tree[name] = _tree(_state_of(name, part, names), name, tensors)
    state = model.state_dict()
    shards = {key: w for key, w in state.items() if isinstance(w, torch.Tensor) and is_part(w)}
    shards.update(kept_parts(model))
    if shards:
        tree["shards"] = _tree(shards, "shards", tensors)
    read, _ = read_all({path: tensor for path, (_, tensor) in tensors.items()})
    for path, statistics in read.items():
        leaf, tensor = tensors[path]
        shown = _shown(tensor.item()) if statistics.numel == 1 else ""
        shown = shown or (
            "zeros" if statistics.numel and statistics.zero_count == statistics.numel else ""
        )
        leaf[:] = [_kind(statistics.dtype, statistics.numel), f"{statistics.checksum:016x}", shown]
    random = Generators().to_dict()
    devices = random.pop("devices")
    tree["random"] = {name: _generator(state) for name, state in random.items()}
    for device, states in devices.items():
        tree["random"].update(
            {f"{device}:{n}": _generator(state) for n, state in enumerate(states)}
        )
    return tree


def _kind(dtype: str, numel: int) -> str:
    return f"{numel:,} of {dtype}"


def _state_of(name: str, part: Any, names: Mapping[int, str]) -> Any:
    if isinstance(part, (Mapping, torch.Generator)):
        return part
    if isinstance(part, type) or not callable(getattr(part, "state_dict", None)):
        expected = "an object with state_dict(), a torch.Generator, or a mapping"
        hint = f'{name}={{"epoch": epoch, "batch": batch}}, of what has no state_dict()'
        raise ConfigError(f"{name} can't be sealed", expected=expected, got=repr(part), hint=hint)
    state = part.state_dict()
    groups = getattr(part, "param_groups", None)
    return state if groups is None else _by_parameter(state, groups, names)


def _by_parameter(state: Any, groups: Sequence[Any], names: Mapping[int, str]) -> Any:
    """An optimizer's state_dict with the names of parameters for their numbers: the same number may
    be another parameter after a resume.
    """
    if not isinstance(state, Mapping) or not {"state", "param_groups"} <= set(state):
        return state
    name_of = {
        number: names.get(id(parameter), f"parameter {number}")
        for packed, group in zip(state["param_groups"], groups)
        for number, parameter in zip(packed["params"], group["params"])
    }
    return {
        **state,
        "state": {name_of.get(number, number): held for number, held in state["state"].items()},
        "param_groups": [
            {**packed, "params": {name_of.get(number, number): True for number in packed["params"]}}
            for packed in state["param_groups"]
        ],
    }


def _tree(value: Any, path: str, tensors: dict[str, tuple[Leaf, torch.Tensor]]) -> Any:
    """Leaves of tensors are filled in afterwards, all at once."""
    if isinstance(value, torch.Generator):
        return _generator(value.get_state())
    if isinstance(value, torch.Tensor):
        leaf = [_UNREAD, "", ""]
        tensors[path] = leaf, local(value)
        return leaf
    if isinstance(value, (list, tuple)) and len(value) <= _SHOWN:
        value = dict(enumerate(value))
    if isinstance(value, Mapping):
        return {str(k): _tree(held, f"{path}.{k}", tensors) for k, held in value.items()}
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if value is None or isinstance(value, (bool, int, float)):
        return ["a number", repr(value), _shown(value)]
    if isinstance(value, np.ndarray):
        return [f"{value.shape} of {value.dtype}", _digest(value.tolist()), ""]
    if _is_plain(value):
        return [f"{len(value):,} in a {type(value).__name__}", _digest(value), ""]
    return [_UNREAD, "", ""]


def _is_plain(value: Any) -> bool:
    """True if the ``repr()`` of the value depends on its content only."""
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str, bytes))


def _shown(value: Any) -> str:
    return f"{value:,}" if type(value) is int else str(value)


def _generator(state: Any) -> Leaf:
    return [_GENERATOR, _digest(state), ""]


def _digest(value: Any) -> str:
    return hashlib.sha256(repr(_plain(value)).encode("utf-8", "replace")).hexdigest()


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return [_plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def is_tree(value: Any) -> bool:
    """True if the value has the form that training_tree() returns, as far as JSON shows."""
    return isinstance(value, dict) and all(
        len(node) == 3 and all(isinstance(text, str) for text in node)
        if isinstance(node, list)
        else is_tree(node)
        for node in value.values()
    )


# ---- what came back -----------------------------------------------------------------------------


# The ``tensors`` and ``unsealed`` of a seal: what it keeps of each weight, and why not of others.
Weights = tuple[Mapping[str, Mapping[str, Any]], Mapping[str, str]]


def resumption(
    seal: Mapping[str, Any],
    path: str,
    model: torch.nn.Module,
    weights: Weights,
    parts: Mapping[str, Any],
    accept: Sequence[str],
) -> Resumption:
    """Names each value of the seal at ``path`` that a model with these weights and parts does not
    have. Raises CompareError if the seal has no state of a run.
    """
    if seal.get("resume") is None:
        hint = "fastcheck.seal(checkpoint, model, resume=True, optimizer=optimizer) writes one"
        text, expected = "the seal has no state of a run", "a seal of resume=True"
        raise CompareError(text, expected=expected, got=path, hint=hint)
    tree, sealed = training_tree(model, parts), seal["resume"]
    now = {"weights": _weights_tree(weights, tree), **tree}
    sealed_weights = seal["tensors"], seal["unsealed"]
    sealed = {"weights": _weights_tree(sealed_weights, sealed), **sealed}
    findings = _Findings(sealed, (accept,) if isinstance(accept, str) else tuple(accept))
    for name, value in sealed.items():
        if name in now:
            findings.compare(name, value, now[name])
        else:
            findings.differs(name, "was sealed, and is not given to verify()")
    findings.notes += [f"{name} was not sealed" for name in now if name not in sealed]
    steps = None
    if not has_steps(path):
        findings.notes.append(
            "no step after the seal was recorded: the first steps are not compared"
        )
    else:
        try:
            steps = ResumedSteps(model, path)
        except FastcheckError as error:
            findings.notes.append(f"the first steps are not compared: {first_line(error)}")
    return Resumption(
        seal["step"], findings.equal, findings.differing, tuple(findings.notes), steps
    )


def _weights_tree(weights: Weights, tree: Tree) -> Tree:
    """``tree``: of the same side, whose shards are not among what can't be read."""
    entries, unread = weights
    unread = {key: why for key, why in unread.items() if key not in tree.get("shards", ())}
    read = {
        key: [_kind(entry["dtype"], entry["numel"]), entry.get("checksum", ""), ""]
        for key, entry in entries.items()
    }
    return {**read, **{key: [_UNREAD, "", ""] for key in unread}}


class _Findings:
    def __init__(self, sealed: Tree, accept: Sequence[str]) -> None:
        self._accept = accept
        leaves = list(_leaves(sealed, ""))
        counts = Counter(leaf[1] for _, leaf in leaves)
        self._owner = {leaf[1]: path for path, leaf in leaves if counts[leaf[1]] == 1}
        self.equal = 0
        self.differing: dict[str, str] = {}
        self.notes: list[str] = []

    def differs(self, path: str, text: str) -> None:
        if not self._accepts(path):
            self.differing[path] = text

    def _accepts(self, path: str) -> bool:
        return any(f"{path}.".startswith(f"{prefix}.") for prefix in self._accept)

    def compare(self, path: str, sealed: Union[Tree, Leaf], now: Union[Tree, Leaf]) -> None:
        if self._accepts(path):
            self.notes.append(f"{path} was not verified (accept)")
        elif isinstance(sealed, dict) and isinstance(now, dict):
            if len(sealed) > 1 and not set(sealed) & set(now):
                self.differs(path, f"none of its {len(sealed):,} sealed entries is there")
                return
            for key, value in sealed.items():
                if key in now:
                    self.compare(f"{path}.{key}", value, now[key])
                else:
                    self.differs(f"{path}.{key}", "missing")
            for key in now:
                # Entries of other kinds come and go with versions.
                if key not in sealed and path.endswith(".param_groups"):
                    self.differs(f"{path}.{key}", "a group that was not sealed")
        elif isinstance(sealed, dict) or isinstance(now, dict):
            self.differs(path, "of another structure than what was sealed")
        elif _UNREAD in (sealed[0], now[0]):
            self.notes.append(f"{path} can't be read, and was not verified")
        elif sealed[:2] == now[:2]:
            self.equal += 1
        else:
            self.differs(path, self._difference(path, sealed, now))

    def _difference(self, path: str, sealed: Leaf, now: Leaf) -> str:
        if sealed[0] != now[0]:
            return f"{now[0]}, sealed as {sealed[0]}"
        if sealed[0] == _GENERATOR:
            return "not in its sealed state: not restored, or drawn from since"
        if sealed[2] and now[2]:
            return f"{now[2]}, sealed as {sealed[2]}"
        owner = self._owner.get(now[1], "")
        ends = [(name.partition(".")[0], name.rpartition(".")[2]) for name in (owner, path)]
        if ends[0] == ends[1] and not now[2]:  # exp_avg of one parameter, for another's
            return f"other values: those that {owner} had"
        return f"other values{now[2] and ': ' + now[2]}"


def _leaves(tree: Union[Tree, Leaf], path: str) -> Iterator[tuple[str, Leaf]]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _leaves(value, f"{path}.{key}" if path else key)
    else:
        yield path, tree


# ---- the first steps ----------------------------------------------------------------------------

_LOOK_AT = {
    "batches": "the sampler and the data loader",
    "forward": "the batch, random generators, train() and eval(), state that is in no state_dict",
    "loss": "the criterion, the number of micro-batches",
    "gradients": "the criterion, the loss scale, the number of micro-batches",
    "update": "the optimizer's state, clipping",
}


def steps_folder(seal: str) -> str:
    """The folder of the log of the steps that followed a seal."""
    return f"{os.path.splitext(seal)[0]}.steps"


def has_steps(seal: str) -> bool:
    ranks = (log_parts(log) for log in find_logs(steps_folder(seal)))
    return any(os.path.getsize(path) for parts in ranks for own in parts.values() for path in own)


def record_steps(model: torch.nn.Module, seal: str) -> None:
    """Writes a log of the next steps beside the seal, replacing an earlier log. Warns if that is
    not possible.
    """
    folder = steps_folder(seal)
    shutil.rmtree(folder, ignore_errors=True)
    if is_compiled(model):  # hooks would recompile it
        return
    try:
        NextSteps(model, folder, _STEPS)
    except FastcheckError as error:  # a seal without steps is a seal
        warn(f"the steps after the seal {seal} are not recorded: {first_line(error)}")


class ResumedSteps:
    """Compares the first steps of ``model``, from now on, with those that followed the seal, and
    warns where they differ.
    """

    def __init__(self, model: torch.nn.Module, seal: str) -> None:
        self.comparison: Optional[Comparison] = None
        self._sealed = steps_folder(seal)
        self._seal = seal
        self._folder = tempfile.mkdtemp(prefix="fastcheck-")
        # A model that is deleted takes no second step.
        self._remove = weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        NextSteps(model, self._folder, _STEPS, self._compare)

    def _compare(self) -> None:
        log = find_logs(self._sealed)[-1]
        accept = ("environment", "missing")
        try:
            comparison = compare(self._folder, log, steps="0:0", accept=accept)
            if comparison.agrees:  # else the batch of the second may have other random numbers
                comparison = compare(self._folder, log, steps="0-:0-", accept=accept)
        except FastcheckError as error:
            warn(f"the first steps after the resume are not compared: {first_line(error)}")
            return
        finally:
            self._remove()
        self.comparison = comparison
        if not comparison.agrees:
            warn(_text(comparison, self._seal))


def _text(comparison: Comparison, seal: str) -> str:
    lines = ["the first steps after the resume are not those that followed the seal"]
    for answer in comparison.answers:
        if answer.answer != "no":
            continue
        lines.append(f"{answer.question}: {answer.text}")
        settings = answer.settings[:_SHOWN]
        lines += [
            f"  {setting.path}: {setting.actual}, was {setting.reference}" for setting in settings
        ]
        if answer.found is not None:
            lines.append(f"  first {answer.found.row.name}: {answer.found.row.reason}")
        if answer.question in _LOOK_AT:
            lines.append(f"  look at {_LOOK_AT[answer.question]}")
    gone = [
        pair.name.rpartition(" · ")[2]
        for pair in comparison.missing
        if pair.state is PairState.ONLY_REFERENCE and " · optimizer · gradient of " in pair.name
    ]
    lines += [f"no {name}, which had one" for name in gone[:_SHOWN]]
    return printable("\n".join([*lines, f"the seal: {seal}"]), keep="\n")
