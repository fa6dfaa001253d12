"""install(): puts the hooks on a model and returns the Monitor that watches it."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any, NoReturn, Optional, Union

import torch

from ._calls import ModuleNode
from ._config import Action, Config, Optimizers, ScalerLike, make_config
from ._errors import ConfigError, did_you_mean, explain
from ._monitor import Monitor
from ._op_filter import check_filters
from ._op_launch import why_not
from ._protect import UpdateGuard
from ._replay import Replayer
from ._site import SiteTable

__all__ = ["install"]


def install(
    model: torch.nn.Module,
    *more: torch.nn.Module,
    optimizer: Optimizers = None,
    scaler: ScalerLike = None,
    overflow_nums: int = 1,
    level: str = "module",
    record: str = "full",
    sync: str = "never",
    max_lag: Optional[int] = 2,
    protect_weights: Union[bool, str] = "auto",
    include: Union[str, Iterable[str], None] = None,
    exclude: Union[str, Iterable[str], None] = None,
    ops: Union[str, Iterable[str], None] = None,
    roles: Union[str, Iterable[str], None] = None,
    steps: Optional[Iterable[int]] = None,
    every: int = 1,
    count: str = "origin",
    within: Optional[int] = None,
    action: Action = "raise",
    history: int = 100,
    max_skipped: int = 20,
    log_dir: Union[str, os.PathLike[str], None] = None,
    log_limit: Union[str, int, None] = "1GB",
    process_group: Any = None,
    style: str = "fastcheck",
    replay: bool = False,
    dump_on_overflow: Union[str, os.PathLike[str], None] = None,
    reset_overflow_status: bool = False,
    **unknown: NoReturn,
) -> Monitor:
    """Observes ``model`` (and ``more`` modules, such as the criterion) and stops the run where it
    overflows.

    Every tensor is read once, where it lives: what enters a module, what each submodule returns,
    the gradients of these, and once per step the parameters, their gradients and the buffers.
    Training is not changed: losses and weights are bit-identical with and without it.

    Args:
        model: the module to observe, with all its submodules.
        more: further modules; in site names they go by their class name.
        optimizer: the optimizers whose steps end a step; found by themselves when left out.
        scaler: a ``torch.amp.GradScaler`` (found by itself), or for other loss scaling the scale,
            as a number or as a callable that returns it.
        overflow_nums: carry out ``action`` at the so many-th overflow event and at every later one;
            -1: never.
        level: ``"module"``: what modules take and return. ``"op"``: what every operator makes, in
            forward, backward and the optimizer; one monitor at a time.
        record: what is computed of each tensor: ``"health"`` (counts), ``"stats"`` (and min, max,
            sums) or ``"full"`` (and a checksum).
        sync: when a stop happens on an accelerator. ``"never"``: as soon as the host learns of it,
            one or two steps later, and the host waits for nothing; ``"step"``: before the optimizer
            applies a bad gradient, for one wait per step; ``"call"``: in the call that made it, so
            that the traceback points at the line, for debugging. On the CPU all are ``"call"``, the
            call being a module's; at op level it is an operator's with ``"call"`` alone, and every
            operator goes through Python then. Several ranks stop at a step boundary: one later with
            ``"never"``, else before the optimizer steps.
        max_lag: with ``sync="never"``, how many steps the host may be ahead of the device before it
            waits; None: any number.
        protect_weights: whether an update with a non-finite gradient is skipped on the device
            itself, by the ``found_inf`` of torch's fused optimizers: a stop may come after it.
            ``"auto"``: where an optimizer can, on accelerators and among several ranks with
            ``sync="never"``, if events may stop the run; True: in any case, and a warning where an
            optimizer can't; False: never.
        include, exclude: patterns (as of fnmatch) on dotted module paths. A pattern that matches a
            module covers what is inside it. At op level include= leaves out what runs in no module.
        ops: at op level, names of operators or patterns: ``"aten._softmax"``, ``"mm"``,
            ``"aten.add*"``, ``"Functional.softmax"``; those that begin with ``!`` are left out. An
            operator that is made of others stands for these. Backward goes by the operator of the
            forward pass too.
        roles: at op level, which tensors are read: ``"output"``, ``"grad_input"``,
            ``"optimizer_state"`` (what an optimizer's operators make), ``"param"`` (what the model
            stores, once), ``"input"`` and ``"grad_output"`` (what an operator read and none made).
        steps: the steps to observe: a range, or their numbers, from 0.
        every: observe every so many steps, the first one included.
        count: ``"origin"`` counts where overflows begin or enter; ``"all"`` also what they spread
            to; ``"calls"`` the same, and of all that is non-finite in one call of an operator or
            module only the first, as ptdbg_ascend and msprobe did.
        within: count only the events of the last so many steps.
        action: ``"raise"`` raises OverflowDetected, ``"warn"`` warns, a callable is called with the
            Event.
        history: how many steps of records are held in memory and written when the run is stopped.
        max_skipped: how many steps in a row loss scaling may skip before that counts as one event.
        log_dir: a directory to write all records to; without it only a stop writes, to
            ``fastcheck_log/``.
        log_limit: the most that the log may hold, as bytes or as a text such as ``"1GB"``; None: no
            limit.
        process_group: the ranks that stop together (a ``torch.distributed.ProcessGroup``); None:
            all of them, where torch.distributed is initialised. Each of them has to install().
        style: how reports name tensors: ``"fastcheck"``, or ``"msprobe"`` for names such as
            ``Functional.softmax.7.backward.output.0``.
        replay: whether a step that ``monitor.run(step, batch)`` runs is run again at op level when
            it is stopped, to name the operator and the line.
        dump_on_overflow: a directory, where a stop leaves what the culprit read and made, its
            random numbers, the environment, and a script that runs it again. At module level of
            steps that ``monitor.run(step, batch)`` runs (``replay`` is then on), at op level with
            ``sync="call"``.
        reset_overflow_status: on an Ascend NPU that saturates, clear the device's overflow status
            at the start and at each step boundary once it was read, at op level behind each
            operator, so that it dates every overflow. It is the whole device's: leave it False
            where other code looks at it.

    Returns:
        The Monitor. It need not be kept: the model keeps the observation going until
        ``monitor.remove()``.

    Raises:
        ConfigError: an option or a module that can't be used; nothing was installed.
        TypeError: an option that there is not.
        LogError: ``log_dir`` can't be written.
        ExtensionError: ``level="op"`` without the compiled extension.

    Synchronises nothing. Pickles of an observed model need fastcheck to be read again; copies and
    pickles are not observed. ``torch.jit.script`` can't take a module with hooks: script before, or
    remove() first.
    """
    if unknown:
        raise TypeError(_of_unknown(next(iter(unknown))))
    config = make_config(
        optimizer=optimizer,
        scaler=scaler,
        overflow_nums=overflow_nums,
        within=within,
        count=count,
        action=action,
        level=level,
        record=record,
        sync=sync,
        max_lag=max_lag,
        protect_weights=protect_weights,
        include=include,
        exclude=exclude,
        ops=ops,
        roles=roles,
        steps=steps,
        every=every,
        history=history,
        max_skipped=max_skipped,
        log_dir=log_dir,
        log_limit=log_limit,
        process_group=process_group,
        style=style,
        replay=replay,
        dump_on_overflow=dump_on_overflow,
        reset_overflow_status=reset_overflow_status,
    )
    model, *others = (_uncompiled(module) for module in (model, *more))
    named = _named_modules((model, *others))
    observed = _selected(named, config)
    is_op_level = config.level == "op"
    if is_op_level:
        check_filters(config)
    sites = SiteTable()
    nodes = [
        ModuleNode(path, module, sites, is_primary=module is model)
        for path, module in (named if is_op_level else observed).items()
    ]
    for node in nodes:
        node.is_selected = node.path in observed
    _mark_gaps(nodes, set(named) - set(observed))
    _check_observable(model, any(node.is_selected for node in nodes))
    if config.protect_weights is not False:
        UpdateGuard.learn({p.device for module in (model, *more) for p in module.parameters()})
    if is_op_level and config.sync != "call":
        _check_readable_by_op(model)
    monitor = Monitor(config, sites, model, nodes, has_excluded=len(observed) < len(named))
    monitor._replays = Replayer(monitor._session, (model, *others), install, monitor._dumper)
    monitor._attach()
    return monitor


def _of_unknown(name: str) -> str:
    parameters = inspect.signature(install).parameters.values()
    options = [one.name for one in parameters if one.kind is one.KEYWORD_ONLY]
    return explain(
        f"install() has no option {name!r}",
        expected=", ".join(options),
        came=name,
        do=did_you_mean(name, options),
    )


def _check_readable_by_op(model: torch.nn.Module) -> None:
    for name, parameter in model.named_parameters():
        device = parameter.device
        if parameter.is_cpu:
            continue
        problem = why_not(device)
        if problem:
            raise ConfigError(
                explain(
                    f'level="op" can\'t read {device} without making the host wait: {problem}',
                    expected='a device with streams and events, or sync="call"',
                    came=f"{name} on {device}",
                    do='level="module" says what it can of every device, and replay=True then runs '
                    "the step that was stopped again, operator by operator",
                )
            )


def _instead_of(model: object) -> str:
    if isinstance(model, type) and issubclass(model, torch.nn.Module):
        return "give the model itself, not its class"
    if isinstance(model, torch.optim.Optimizer):
        return "pass options by name: fastcheck.install(model, optimizer=optimizer)"
    return "pass options by name: fastcheck.install(model, overflow_nums=1)"


def _named_modules(models: tuple[torch.nn.Module, ...]) -> dict[str, torch.nn.Module]:
    """All modules by their path, each once: the first model without prefix, the others under their
    class name.
    """
    named: dict[str, torch.nn.Module] = {}
    seen: set[int] = set()
    for position, model in enumerate(models):
        if not isinstance(model, torch.nn.Module):
            raise ConfigError(
                explain(
                    "install() was given something that is not a model",
                    expected="a torch.nn.Module, and perhaps more of them",
                    came=f"{type(model).__name__}: {' '.join(str(model).split())[:80]}",
                    do=_instead_of(model),
                )
            )
        prefix = type(model).__name__ if position else ""
        taken = (
            sum(path == prefix or path.startswith(prefix + "_") for path in named)
            if position
            else 0
        )
        if taken:
            prefix = f"{prefix}_{taken + 1}"
        for path, module in model.named_modules():
            if id(module) not in seen and _uncompiled(module) is module:
                seen.add(id(module))
                parts = [prefix, *(part for part in path.split(".") if part != "_orig_mod")]
                named[".".join(part for part in parts if part)] = module
    return named


def _uncompiled(module: torch.nn.Module) -> torch.nn.Module:
    """The module itself, of what torch.compile(module) returned."""
    is_wrapper = type(module).__module__ == "torch._dynamo.eval_frame"
    inside = getattr(module, "_orig_mod", module) if is_wrapper else module
    return inside if isinstance(inside, torch.nn.Module) else module


def _selected(named: dict[str, torch.nn.Module], config: Config) -> dict[str, torch.nn.Module]:
    for option, patterns in (("include", config.include or ()), ("exclude", config.exclude)):
        for pattern in patterns:
            if not any(fnmatchcase(path, pattern) for path in named):
                raise ConfigError(
                    explain(
                        f"{option} pattern {pattern!r} matches no module",
                        expected="a module path of the model, or a pattern such as 'layers.*'",
                        came=repr(pattern),
                        do=did_you_mean(pattern, filter(None, named))
                        or "names are those of model.named_modules()",
                    )
                )
    return {
        path: module
        for path, module in named.items()
        if (config.include is None or _covered(path, config.include))
        and not _covered(path, config.exclude)
    }


def _covered(path: str, patterns: tuple[str, ...]) -> bool:
    """Whether a pattern matches the module or one that it is inside of."""
    parts = path.split(".")
    inside = [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
    return any(fnmatchcase(prefix, pattern) for prefix in inside for pattern in patterns)


def _mark_gaps(nodes: list[ModuleNode], excluded: set[str]) -> None:
    """Tells each module whether something inside it goes unobserved."""
    for node in nodes:
        start = f"{node.path}." if node.path else ""
        node.has_excluded_parts = any(path.startswith(start) for path in excluded)


def _check_observable(model: torch.nn.Module, has_any: bool) -> None:
    if next(model.parameters(), None) is None:
        raise ConfigError(
            explain(
                "install() was given a model without parameters",
                expected="the model that is trained, first",
                came=f"{type(model).__name__}, which has none",
                do="give the model first and the criterion after it: "
                "fastcheck.install(model, criterion)",
            )
        )
    if has_any:
        return
    raise ConfigError(
        explain(
            "there is nothing to observe",
            expected="at least one module that include= and exclude= leave",
            came=f"{type(model).__name__}, of which every module is excluded",
            do="make exclude= narrower",
        )
    )
