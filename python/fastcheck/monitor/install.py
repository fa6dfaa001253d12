"""install(): registers the hooks on a model and returns its Monitor."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import NoReturn, Optional, Union

import torch

from fastcheck.backends.table import prepare
from fastcheck.calls.module_calls import ModuleNode
from fastcheck.errors import ConfigError, did_you_mean, plain, warn
from fastcheck.monitor.hooks.found_inf import UpdateGuard
from fastcheck.monitor.hooks.hook_support import (
    check_built,
    check_hookable,
    takes_hooks,
    unhookable_note,
)
from fastcheck.monitor.hooks.module_observer import ForwardPreHook
from fastcheck.monitor.op_level.level import why_not
from fastcheck.monitor.op_level.sites import check_ops
from fastcheck.monitor.precision import check_level
from fastcheck.monitor.session.config import Config, option_of_install
from fastcheck.monitor.session.options import Filter, Log, OnRequest, Patterns, Stop, Training
from fastcheck.monitor.sinks.sink import ScalarSink, Sinks, open_sinks, sinks_of_environment
from fastcheck.record.site import SiteTable
from fastcheck.utils.names.patterns import matches_module
from fastcheck.utils.torch.versions import unwrap_compiled
from fastcheck.watch.options import Watch

from .core import Models, build
from .monitor import Monitor
from .watching import WatchOption, watch_options


def install(
    model: torch.nn.Module,
    *more: torch.nn.Module,
    overflow_nums: int = 1,
    level: str = "module",
    sync: str = "never",
    record: str = "full",
    log_dir: Union[str, os.PathLike[str], None] = None,
    include: Patterns = None,
    exclude: Patterns = None,
    every: int = 1,
    stats_every: int = 1,
    stop: Optional[Stop] = None,
    log: Optional[Log] = None,
    filter: Optional[Filter] = None,
    training: Optional[Training] = None,
    sinks: Sinks = None,
    on_request: Optional[OnRequest] = None,
    watch: WatchOption = True,
    **unknown: NoReturn,
) -> Monitor:
    """Observes ``model`` (and ``more`` modules, such as the criterion) and stops the run where it
    overflows.

    Every tensor is read once, on its device: the inputs of a module, the outputs of each submodule,
    the gradients of these, and once per step the parameters, their gradients and the buffers.
    Losses and weights are bit-identical with and without it.

    Args:
        model: the module to observe, with all its submodules.
        more: further modules; site names begin with their class name.
        overflow_nums: stop at this overflow event, counted from 1, and at every later event; -1:
            never.
        level: ``"module"``: inputs and outputs of modules. ``"op"``: results of every operator, in
            forward, backward and the optimizer; one monitor at a time.
        sync: when a stop happens on an accelerator. ``"never"``: one or two steps later, the host
            waits for nothing; ``"step"``: before the optimizer applies a bad gradient, for one wait
            per step; ``"call"``: in the call itself, so that the traceback ends there, for
            debugging. On the CPU each is ``"call"``, but at op level only ``"call"`` stops in an
            operator, and every operator then runs through Python. Several ranks stop at a step
            boundary: one later with ``"never"``, else before the optimizer steps.
        record: what is computed of each tensor: ``"health"`` (counts), ``"stats"`` (and min, max,
            sums) or ``"full"`` (and a checksum); ``"range"``: as ``"full"``, and in one of 32 steps
            the exponents, for ``monitor.advice()`` (docs/precision.md). At module level.
        log_dir: a directory to write all records to, short for ``log=fastcheck.Log(log_dir)``;
            without it only a stop writes, to ``fastcheck_log/``.
        include, exclude: patterns (as of fnmatch) on dotted module paths. A pattern that matches a
            module covers its submodules. With include= at op level, operators outside of modules
            are not observed.
        every: observe one step in ``every``, the first one included.
        stats_every: read all that ``record`` names in one step of so many, and in as many steps
            once an event or a warning of the watch is known; in the others only the counts of
            ``record="health"``, and the loss and other tensors of one element that are not read in
            lists, as parameters are, whole. Captured graphs too go by it. The watch judges the
            steps that are read whole.
        stop: a fastcheck.Stop: which events count, what a stop does and what it leaves behind.
        log: a fastcheck.Log: where records are written, how many are kept on disk and in memory.
        filter: a fastcheck.Filter: which operators, tensors and steps are observed.
        training: a fastcheck.Training: optimizer, loss scale and ranks, where they can't be found.
        sinks: where some scalars of each step are written to, and the stop report: names of
            ``"tensorboard"``, ``"wandb"``, ``"mlflow"``, ``"trackio"``, ``"aim"``,
            ``"prometheus"``, ``"opentelemetry"``, ``"webhook:URL"``, ``"slack:URL"``, or objects
            with ``log(dict, step)``, one or several; and those that the environment's
            FASTCHECK_SINKS names. Written by a thread of its own (docs/trainers.md).
        on_request: a fastcheck.OnRequest: a file or a signal by which the run, while it is under
            way, is asked to observe its next steps at op level, or to dump them.
        watch: warn when the loss spikes, a layer leaves its usual range or a tensor is about to
            overflow; ``monitor.watch`` has the events (docs/watch.md). A fastcheck.Watch changes
            what counts as unusual; False: nothing is watched, as with ``record="health"``.

    Returns:
        The Monitor. The model keeps it alive until ``monitor.remove()``.

    Raises:
        ConfigError: an option or a module that can't be used, a sink that is not installed, or
            options that are not the same on all ranks; nothing was installed.
        TypeError: unknown option.
        LogError: the log can't be written.
        ExtensionError: ``level="op"`` without the compiled extension.

    Synchronises no device. Among several ranks it waits for the others to call it too, at most two
    seconds, and they have to be given the same options (docs/guide.md). Copies and pickles of the
    model are not observed. Use ``torch.jit.script`` before install() or after remove().
    """
    if unknown:
        raise TypeError(option_of_install(next(iter(unknown))))
    config = Config(
        overflow_nums=plain(overflow_nums),
        level=level,
        sync=sync,
        record=record,
        log_dir=log_dir,
        include=include,
        exclude=exclude,
        every=plain(every),
        stats_every=plain(stats_every),
        stop=Stop() if stop is None else stop,
        log=Log(None) if log is None else log,
        filter=Filter() if filter is None else filter,
        training=Training() if training is None else training,
        on_request=on_request,
    )
    check_level(record, level)
    targets = (*open_sinks(sinks), *sinks_of_environment())
    return _install(config, (model, *more), targets, watch_options(watch, record))


def _install(
    config: Config,
    models: Sequence[torch.nn.Module],
    targets: Sequence[ScalarSink] = (),
    watched: Optional[Watch] = None,
    is_alone: bool = False,
) -> Monitor:
    """``is_alone``: the monitor meets no other rank."""
    model, *others = map(unwrap_compiled, models)
    named = _named_modules((model, *others))
    check_hookable(model)
    selected = _selected(named, config)
    observed = {path: module for path, module in selected.items() if takes_hooks(module)}
    if not is_alone:
        _warn_of_the_same(model, config)
        if len(set(map(id, models))) < len(models):
            warn(
                "install() was given the same module twice. If one of the two is meant as a target "
                "network, a teacher or an average of weights, it has to be a copy (copy.deepcopy)"
            )
    is_op_level = config.level == "op"
    if is_op_level:
        check_ops(config.filter.ops or ())
    sites = SiteTable()
    nodes = [
        ModuleNode(path, module, sites, is_primary=module is model)
        for path, module in (named if is_op_level else observed).items()
        if takes_hooks(module)
    ]
    gaps = set(named) - set(observed)
    for node in nodes:
        node.is_selected = node.path in observed
        start = f"{node.path}." if node.path else ""
        node.has_excluded_parts = any(path.startswith(start) for path in gaps)
    _mark_roots(nodes, (model, *others))
    _check_observable((model, *others), any(node.is_selected for node in nodes))
    devices = {p.device for module in models for p in module.parameters()}
    for device in devices:
        with contextlib.suppress(Exception):  # reported where a tensor can't be read
            prepare(device)
    if config.stop.protect_weights is not False:
        UpdateGuard.learn(devices)
    if is_op_level and config.sync != "call":
        _check_readable_by_op(model)
    chosen = Models(
        models=(model, *others),
        named=named,
        nodes=nodes,
        sites=sites,
        is_selected=functools.partial(_is_selected, config=config),
        has_excluded=len(observed) < len(named),
    )
    again = functools.partial(_install, is_alone=True)
    core = build(config, chosen, install, again, targets, watched, is_alone)
    note = unhookable_note(selected.items())
    if note:
        core.session.faults.notes[note] = None
    monitor = Monitor(core)
    try:
        core.hooks.attach()
    except BaseException:
        with contextlib.suppress(Exception):  # what was raised first is for the user
            monitor._remove(waits_for_ranks=False)
        raise
    return monitor


def _warn_of_the_same(model: torch.nn.Module, config: Config) -> None:
    """A cell of a notebook that runs twice installs twice."""
    for hook in model._forward_pre_hooks.values():
        if isinstance(hook, ForwardPreHook) and hook.is_of(config):
            warn(
                "this model has a monitor with the same options already, and both read every "
                "tensor: call remove() of the first one (in a notebook, before install() runs "
                "again)"
            )
            return


def _check_readable_by_op(model: torch.nn.Module) -> None:
    for name, parameter in model.named_parameters():
        device = parameter.device
        if parameter.is_cpu or parameter.is_meta:  # to_empty() may follow
            continue
        problem = why_not(device)
        if problem:
            raise ConfigError(
                f'level="op" can\'t read {device} without making the host wait: {problem}',
                expected='a device with streams and events, or sync="call"',
                got=f"{name} on {device}",
                hint='sync="call" copies each tensor to the host and reads it there',
            )


def _hint(model: object) -> str:
    if isinstance(model, type) and issubclass(model, torch.nn.Module):
        return "give the model itself, not its class"
    if isinstance(model, torch.optim.Optimizer):
        return "install(model) finds the optimizer"
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
                "install() was given something that is not a model",
                expected="a torch.nn.Module, and perhaps more of them",
                got=f"{type(model).__name__}: {' '.join(str(model).split())[:80]}",
                hint=_hint(model),
            )
        check_built(model)
        prefix = type(model).__name__ if position else ""
        taken = sum(path == prefix or path.startswith(prefix + "_") for path in named)
        if position and taken:
            prefix = f"{prefix}_{taken + 1}"
        for path, module in model.named_modules():
            if id(module) not in seen and unwrap_compiled(module) is module:
                seen.add(id(module))
                parts = [prefix, *(part for part in path.split(".") if part != "_orig_mod")]
                named[".".join(part for part in parts if part)] = module
    return named


def _selected(named: dict[str, torch.nn.Module], config: Config) -> dict[str, torch.nn.Module]:
    included, excluded = config.include, config.exclude or ()
    for option, patterns in (("include", included or ()), ("exclude", excluded)):
        for pattern in patterns:
            if not any(fnmatchcase(path, pattern) for path in named):
                raise ConfigError(
                    f"{option} pattern {pattern!r} matches no module",
                    expected="a module path of the model, or a pattern such as 'layers.*'",
                    got=repr(pattern),
                    hint=did_you_mean(pattern, filter(None, named))
                    or "names are those of model.named_modules()",
                )
    return {path: module for path, module in named.items() if _is_selected(path, config)}


def _is_selected(path: str, config: Config) -> bool:
    included, excluded = config.include, config.exclude or ()
    return (
        included is None or any(matches_module(pattern, path) for pattern in included)
    ) and not any(matches_module(pattern, path) for pattern in excluded)


def _mark_roots(nodes: list[ModuleNode], models: tuple[torch.nn.Module, ...]) -> None:
    """Marks the modules whose results leave the model; of a container that is never called the
    parts with parameters are models.
    """
    ids = set(map(id, models))
    by_path = {node.path: node for node in nodes}
    for node in nodes:
        module, parent = node.module(), by_path.get(node.path.rpartition(".")[0])
        is_part = parent is not None and parent.is_root and not parent.is_callable
        has_parameters = module is not None and next(module.parameters(), None) is not None
        node.is_root = id(module) in ids or (is_part and has_parameters)


def _check_observable(models: Sequence[torch.nn.Module], has_any: bool) -> None:
    model = models[0]
    has_parameters = [next(one.parameters(), None) is not None for one in models]
    is_loss = inspect.getmodule(type(model)) is torch.nn.modules.loss
    if not has_parameters[0] and (any(has_parameters) or is_loss):
        raise ConfigError(
            "install() was given a criterion as its model",
            expected="the model that is trained, first",
            got=f"{type(model).__name__}, which has no parameters",
            hint="give the model first and the criterion after it: "
            "fastcheck.install(model, criterion)",
        )
    if has_any:
        return
    raise ConfigError(
        "there is nothing to observe",
        expected="at least one module that include= and exclude= leave",
        got=f"{type(model).__name__}, of which every module is excluded",
        hint="make exclude= narrower",
    )
