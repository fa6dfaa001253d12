"""rerun(): the same step several times from the same state. Is it the machine?"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Callable, Optional, Union

import torch

from fastcheck.errors import ConfigError, as_list, check_bool, choice, plain
from fastcheck.utils.torch.training_state import is_stateful
from fastcheck.utils.torch.versions import GradScaler

from .install import _install
from .reruns import Rerun, StepRunner
from .session.options import check_process_group

_Models = Union[torch.nn.Module, Sequence[torch.nn.Module]]
_Optimizers = Union[torch.optim.Optimizer, Sequence[torch.optim.Optimizer], None]


def rerun(
    step: Callable[..., Any],
    *batch: Any,
    model: _Models,
    optimizer: _Optimizers = None,
    scaler: Optional[GradScaler] = None,
    also: Sequence[Any] = (),
    runs: int = 2,
    level: str = "module",
    deterministic: bool = False,
    process_group: Any = None,
) -> Rerun:
    """Runs ``step(*batch)`` twice from the same state, and compares the checksum of every tensor:
    what modules take in and return, gradients, what the optimizer was given, and what the step has
    left (weights, buffers, gradients, the optimizer's state, what it returned)::

        report = fastcheck.rerun(train_step, batch, model=model, optimizer=optimizer)
        print(report)

    If they differ the step runs a third time, so that the report can name the run that is odd. All
    is put back before each run and at the end, also after an exception: weights, gradients,
    buffers, plain attributes of modules (``training`` too), the tensors of ``batch``, optimizers,
    ``scaler``, ``also``, and the generators of Python, NumPy and torch on every device. What else
    the step changes stays changed. Monitors of the model see nothing of these runs.

    Args:
        step: forward, backward and update of one step. What it takes in has to be in ``batch``.
        model: the module, or several of them.
        optimizer: the optimizer, or several; an optimizer that is not given is kept from its first
            step on.
        scaler: the GradScaler of the step.
        also: what else has to be put back: objects with ``state_dict()`` and ``load_state_dict()``
            (a scheduler, an average of weights), and ``torch.Generator``.
        runs: how often the step runs at least; a fault that is rare needs more.
        level: ``"module"``, or ``"op"`` to have the operator named.
        deterministic: use ``torch.use_deterministic_algorithms(True)`` for all runs.
        process_group: the ranks that compare; None: all. Every rank has to call this.

    Returns:
        A Rerun: ``identical``, ``first`` (the first tensor that differs, with its rank),
        ``odd_runs``, ``cause`` and ``why``; ``str()`` of it is a report.

    Raises:
        ConfigError: an option that can't be used. What the first run raises is raised here.

    Costs the memory of another copy of weights, gradients, buffers and optimizer states. Waits for
    the devices and, among several ranks, for the other ranks.
    """
    models = _several("model", model, torch.nn.Module, "a torch.nn.Module")
    if not models:
        raise _refused("model", "a torch.nn.Module, or several", model)
    optimizers = _several("optimizer", optimizer, torch.optim.Optimizer, "a torch.optim.Optimizer")
    also, runs = as_list(also), plain(runs)
    for other in also:
        if not is_stateful(other):
            raise _refused("also", "objects with state_dict() and load_state_dict()", other)
    if scaler is not None and not isinstance(scaler, GradScaler):
        raise _refused("scaler", "a torch.amp.GradScaler", scaler)
    if isinstance(runs, bool) or not isinstance(runs, int) or runs < 2:
        raise _refused("runs", "an int of at least 2", runs)
    if not callable(step):
        raise _refused("step", "a function of the batch", step)
    deterministic = check_bool("deterministic", deterministic)
    check_process_group(process_group)
    runner = StepRunner(
        functools.partial(_install, is_alone=True),
        models,
        optimizers,
        scaler,
        also,
        choice("level", level, ("module", "op")),
        deterministic,
        process_group,
    )
    return runner.run(step, batch, runs)


def _several(name: str, given: Any, kind: type, expected: str) -> list[Any]:
    """``given`` is one of ``kind``, None, or several."""
    if given is None or isinstance(given, kind):
        return [] if given is None else [given]
    if not isinstance(given, Sequence) or not all(isinstance(item, kind) for item in given):
        raise _refused(name, f"{expected}, or several", given)
    return list(given)


def _refused(name: str, expected: str, got: object) -> ConfigError:
    hint = "fastcheck.rerun(train_step, batch, model=model, optimizer=optimizer)"
    what = f"rerun({name}=) can't be used"
    return ConfigError(what, expected=expected, got=repr(got), hint=hint)
