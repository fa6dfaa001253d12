"""prove(): a training step computed in ways that must agree."""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Callable, Union
from unittest import mock

import torch

from fastcheck.errors import ConfigError, as_list, did_you_mean, first_line
from fastcheck.monitor.reruns import set_aside
from fastcheck.utils.torch.flatten import flatten
from fastcheck.utils.torch.readable import has_values, is_materialised
from fastcheck.utils.torch.training_state import TrainingState, is_stateful

from . import batches, models
from .case import Relation, Settings, TestedStep
from .observer import Computed, Key
from .ranks import Ranks
from .result import BY_DESIGN, DIFFERS, FAILED, HOLDS, NOT_ASKED, Outcome, Place, Proof, write_proof
from .score import LIMIT, Floor, find_place

_AUTO: dict[str, type[Relation]] = {
    "again": models.Again,
    "permuted": batches.Permuted,
    "alone": batches.Alone,
    "padded": batches.Padded,
    "left_padded": batches.LeftPadded,
    "packed": batches.Packed,
    "micro_batches": batches.MicroBatches,
    "checkpointed": models.Checkpointed,
    "attention": models.AttentionBackend,
    "autocast": models.Autocast,
    "unshared": models.Unshared,
    "saved": models.SavedAndLoaded,
    "evaluated": models.EvaluatedTwice,
}
#: Relations that are asked by name alone: they take longer.
_BY_NAME: dict[str, Callable[[], Relation]] = {
    **_AUTO,
    "causal": batches.Causal,
    "compiled": models.TorchCompile,
    "traced": lambda: models.TorchCompile("aot_eager"),
    "ddp": lambda: Ranks(torch.nn.parallel.DistributedDataParallel),
    "fsdp": lambda: Ranks(importlib.import_module("torch.distributed.fsdp").fully_shard),
}
#: Held while a step is computed: what it replaces in torch is there for all threads.
_LOCK = threading.RLock()
_DRAWS = "depends on the batch by design: it draws random numbers, besides dropout"


def prove(
    step: Callable[..., Any],
    batch: Any,
    *,
    model: torch.nn.Module,
    optimizer: Union[torch.optim.Optimizer, Sequence[torch.optim.Optimizer], None] = None,
    relations: Union[str, Sequence[Union[str, Relation]]] = "auto",
    also: Sequence[Any] = (),
    html: Union[str, os.PathLike[str], None] = None,
) -> Proof:
    """Computes one training step in ways that must agree, and names the first place where it does
    not::

        proof = fastcheck.prove(step, batch, model=model, optimizer=optimizer)
        print(proof)

    The tolerance is measured: the step is computed three times with each weight moved by one ulp
    of the format in which the model computes, and a difference counts by how often it is larger
    than what that has moved. Compared are the loss, what the model returns, every gradient, and the
    update. All is put back before each computation and at the end, also after an exception, as
    rerun() does. Monitors of the model see nothing of it.

    Args:
        step: one step, called as ``step(batch)``, or as ``step(model, batch)`` where it takes two
            arguments. Returns the loss, or a mapping or object with ``loss``. It may call backward
            and the optimizer; where it does not call backward prove() does. It is deterministic but
            for torch's, NumPy's and Python's generators.
        batch: what it takes in: tensors in nested dicts, lists and tuples, rows first.
        model: the module.
        optimizer: the optimizer of the step, or several.
        relations: ``"auto"``, or relations by name and objects: see docs/prove.md.
        also: what else has a state: other models, schedulers, a GradScaler, an average of the
            weights, a torch.Generator.
        html: a page to write, to open in a browser.

    Returns:
        A Proof: ``holds``, ``outcomes``; ``str()`` of it is a table.

    Raises:
        ConfigError: an argument that can't be used, such as a step that leaves nothing to compare.
            What the step raises is raised here, if it raises as it is.
        LogError: the page can't be written.

    Costs about 8 computations of the step, and 1 to 3 for each relation; a relation that differs
    costs some 10 more. Holds three more copies of weights and gradients. Waits for the devices.
    """
    if not isinstance(model, torch.nn.Module):
        raise _refused("model", "a torch.nn.Module", model)
    held = (t for t in (*model.parameters(), *model.buffers()) if is_materialised(t))
    if not all(map(has_values, held)):
        raise _refused("model", "weights and buffers whose memory was not freed", type(model))
    if not callable(step):
        raise _refused("step", "a function of the batch", step)
    optimizers = [] if optimizer is None else as_list(optimizer)
    also = as_list(also)
    if not all(isinstance(opt, torch.optim.Optimizer) for opt in optimizers):
        raise _refused("optimizer", "a torch.optim.Optimizer, or several", optimizer)
    if not all(map(is_stateful, also)):
        raise _refused("also", "objects with state_dict(), or torch.Generators", also)
    asked = _asked(relations)
    tensors = [t for _, t in flatten(batch, "batch") if not t.is_inference()]
    began = time.monotonic()
    with _LOCK, set_aside([model]):
        state = TrainingState([model], optimizers=optimizers, others=also, tensors=tensors)
        with state, torch.inference_mode(False), torch.enable_grad():
            case = TestedStep(step, batch, model, [*optimizers, *also], state)
            try:
                prover = Prover(case)
                outcomes = tuple(prover.ask(relation) for relation in asked)
            finally:
                case.put_back()
    proof = Proof(outcomes, prover.subject, round(time.monotonic() - began, 3))
    if html is not None:
        write_proof(html, proof)
    return proof


class Prover:
    """Asks relations of one step."""

    def __init__(self, case: TestedStep) -> None:
        self.case = case
        self._floors: dict[bool, Floor] = {}
        case.learn()
        draws = case.draws
        case.find_layouts()
        self._draws = ""
        floor = self._floors[False] = self._floor(not draws)
        if draws and case.draws:
            case.settings.seed = 1
            scores = floor.scores(case.compute(), floor.base, Relation.kinds)
            self._draws = _DRAWS if max(scores.values(), default=0.0) > LIMIT else ""
        case.settings = Settings()
        if not floor.base.tensors:
            expected = "a function of the batch that returns the loss, or calls the model"
            raise _refused("step", expected, case.step, "it left no loss, output or gradient")
        count = sum(p.numel() for p in case.parameters.values())
        rows = f", {case.given.rows} rows" if case.given.rows else ""
        size = f"{count:,} parameters{rows}, {case.learned.dtype}".replace("torch.", "")
        self.subject = f"{type(case.model).__name__}: {size}"

    def _floor(self, dropout: bool) -> Floor:
        self.case.settings.dropout = dropout
        if dropout not in self._floors:
            self._floors[dropout] = Floor(self.case)
        return self._floors[dropout]

    def ask(self, relation: Relation) -> Outcome:
        """Asks a relation, and returns its outcome. Raises nothing."""
        began, layouts = time.monotonic(), self.case.layouts
        try:
            outcome = self._ask(relation)
        except Exception as error:
            text = f"{type(error).__name__}: {first_line(error)}"
            outcome = Outcome(relation.name, FAILED, note=text)
        finally:
            self.case.settings, self.case.layouts, self.case.inside = Settings(), layouts, None
        return replace(outcome, seconds=round(time.monotonic() - began, 3))

    def _ask(self, relation: Relation) -> Outcome:
        case, name = self.case, relation.name
        if reason := relation.why_not(case):
            return Outcome(name, NOT_ASKED, note=reason)
        if reason := relation.by_design(case) or ("" if relation.draws_alike else self._draws):
            return Outcome(name, BY_DESIGN, note=reason)
        floor = self._floor(relation.draws_alike)
        scores = self._scores(relation, floor, floor.base)
        if relation.is_exact and any(scores.values()):
            floor = Floor(case, is_exact=True)
            scores = self._scores(relation, floor, floor.base)
        most, worst = _worst(relation, scores)
        if self._persists(relation, floor, most):
            update = Place("", *worst, score=0.0) if worst[0] == "update" else None
            first = find_place(case, relation) or update
            return Outcome(name, DIFFERS, most, " ".join(filter(None, worst)), first)
        if not scores:
            return Outcome(name, NOT_ASKED, note="nothing of the step can be compared")
        loss = floor.base.tensors.get(("loss", ""))
        if "loss" in relation.kinds and loss is not None and not loss.isfinite().all():
            # NaN is equal to NaN, and nothing is known of gradients that are NaN.
            return Outcome(name, NOT_ASKED, note="the loss of the step is not finite")
        score = max(scores.values())
        if score > LIMIT and most > LIMIT:
            return Outcome(name, HOLDS, score, note="at other weights: a tie was decided otherwise")
        if score > LIMIT:
            note = (
                "depends on the whole batch: no weighted sum of its parts' gradients, which a mean "
                "of rows would be"
            )
            return Outcome(name, BY_DESIGN, score, note=note)
        return Outcome(name, HOLDS, score, note=relation.note(case))

    def _scores(self, relation: Relation, floor: Floor, base: Computed) -> dict[Key, float]:
        reference = relation.reference(self.case, base)
        other = relation.run(self.case, base)
        return floor.scores(other, reference, relation.kinds)

    def _persists(self, relation: Relation, floor: Floor, score: float) -> bool:
        """True if it differs at other weights too: not where a tie (of a router, of a maximum) was
        decided by rounding.
        """
        for noise in (101, 102):
            if score <= LIMIT:
                return False
            with mock.patch.multiple(self.case.settings, noise=noise, ulps=self.case.far):
                scores = self._scores(relation, floor, self.case.compute())
            score, _ = _worst(relation, scores)
        return score > LIMIT


def _worst(relation: Relation, scores: dict[Key, float]) -> tuple[float, Key]:
    """The largest score of what has to agree, and its tensor."""
    hard = [(score, key) for key, score in scores.items() if key[0] not in relation.measured]
    return max(hard, key=lambda pair: pair[0], default=(0.0, ("", "")))


def _asked(relations: Union[str, Sequence[Union[str, Relation]]]) -> list[Relation]:
    is_auto = isinstance(relations, str) and relations == "auto"
    wanted = list(_AUTO) if is_auto else as_list(relations)
    named: list[type[Relation]] = [*_AUTO.values(), batches.Causal]
    known: dict[str, Callable[[], Relation]] = {**{r.name: r for r in named}, **_BY_NAME}
    asked: list[Any] = [known[str(r)]() if str(r) in known else r for r in wanted]
    for one in asked or [relations]:
        if not isinstance(one, Relation):
            expected = '"auto", Relations, or of ' + ", ".join(_BY_NAME)
            raise _refused("relations", expected, one, did_you_mean(str(one), _BY_NAME))
    return asked


def _refused(name: str, expected: str, got: object, hint: str = "") -> ConfigError:
    hint = hint or "fastcheck.prove(step, batch, model=model, optimizer=optimizer)"
    return ConfigError(f"prove({name}=) can't be used", expected=expected, got=repr(got), hint=hint)
