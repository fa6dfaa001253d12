"""The composition root: build() makes all parts of a monitor, each from those that it needs, and
puts nothing into a part that was made. What has effects outside is begun by Hooks.attach().
"""

from __future__ import annotations

import functools
import itertools
import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Callable, Optional

import torch

from fastcheck.calls.module_calls import ModuleNode
from fastcheck.dump.on_stop.captured_op import OpCaptures
from fastcheck.dump.on_stop.stop_dumper import StoppedCallDumper
from fastcheck.log.writer import RecordLog
from fastcheck.monitor import named_tensors
from fastcheck.monitor.distributed.join import agreement_for, join_listeners
from fastcheck.monitor.distributed.replicas import OwnBatches, ReplicaCheck, automatic_checks
from fastcheck.monitor.hooks import optimizers
from fastcheck.monitor.hooks.compiled import Connection, connect, disconnect, set_hook_id
from fastcheck.monitor.hooks.graphs import GraphFollower, followers
from fastcheck.monitor.hooks.hook_support import ModuleTree, follow_forks
from fastcheck.monitor.hooks.module_observer import ModuleObserver
from fastcheck.monitor.hooks.state_reader import StateReader
from fastcheck.monitor.hooks.step_watcher import StepWatcher
from fastcheck.monitor.loop.facts import Facts
from fastcheck.monitor.on_request import Install, Requests
from fastcheck.monitor.op_level.hooks import OpModuleObserver, OpState
from fastcheck.monitor.op_level.level import OpLevel
from fastcheck.monitor.op_level.sites import check_alone
from fastcheck.monitor.precision import RangeLevel
from fastcheck.monitor.session.config import Config
from fastcheck.monitor.session.event_store import Archive, EventStore, ProcessRank
from fastcheck.monitor.session.level import Level
from fastcheck.monitor.session.run_meta import RunMeta, first_meta
from fastcheck.monitor.session.session import ModuleLevel, Session
from fastcheck.monitor.session.stop_handler import StepBoundary, StopHandler
from fastcheck.monitor.sinks.connection import SinkConnection
from fastcheck.monitor.sinks.sink import ScalarSink
from fastcheck.record.event import Event
from fastcheck.record.site import SiteTable
from fastcheck.report.stop_report import Dumped
from fastcheck.utils.torch.rank import group_size, own_rank
from fastcheck.watch.event import WatchEvent
from fastcheck.watch.options import Watch

from .origin.makers import Makers
from .replay import Replayer
from .watching import Watching


@dataclass(frozen=True)
class Models:
    """The models and modules that are observed. ``named``: all modules by path; ``nodes``: those
    with hooks; ``is_selected``: whether a module with this path is to be observed;
    ``has_excluded``: some are not.
    """

    models: tuple[torch.nn.Module, ...]
    named: Mapping[str, torch.nn.Module]
    nodes: list[ModuleNode]
    sites: SiteTable
    is_selected: Callable[[str], bool]
    has_excluded: bool


@dataclass(frozen=True)
class Core:
    """The parts of a monitor that its methods use."""

    models: Sequence[weakref.ref[torch.nn.Module]]
    nodes: Sequence[ModuleNode]
    session: Session
    meta: RunMeta
    state: StateReader
    stops: StopHandler
    boundary: StepBoundary
    watcher: StepWatcher
    watching: Optional[Watching]
    replayer: Replayer
    hooks: Hooks


# A number for each monitor, and none that torch hands out: it counts up from 0.
_hook_ids = itertools.count(-1, -1)


@dataclass(eq=False)
class Hooks:
    """The hooks on modules, optimizers, graphs, forks and requests, from attach() to close()."""

    _nodes: list[ModuleNode]
    observer: ModuleObserver
    _watcher: StepWatcher
    graphs: GraphFollower
    _reader: named_tensors.NamedTensors
    _stops: StopHandler
    _compiled: dict[int, None]
    _requests: Optional[Requests]

    def __post_init__(self) -> None:
        self._handles: list[Any] = []
        self._connection: Optional[Connection] = None

    def __bool__(self) -> bool:
        return bool(self._handles)

    def attach(self) -> None:
        """Called once. What it raises leaves some of them on: close() takes them off."""
        session = self._watcher.session
        if self._requests is not None:
            self._requests.begin()
        self._connection = connection = connect(self.observer, self._nodes, self._compiled)
        number = next(_hook_ids)
        for index, node in enumerate(self._nodes):
            module = node.module()
            if module is None:
                continue
            before, after = self.observer.attach(node)
            if connection is not None:
                before.address = after.address = connection.address(index)
                before.is_outermost = node.is_primary
            # always_call: a call that raises has to end too, or what runs next would seem to be
            # inside it.
            handles = self._handles
            handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            set_hook_id(handles[-1], number)
            handles.append(module.register_forward_hook(after, with_kwargs=True, always_call=True))
            set_hook_id(handles[-1], number)
        optimizers.watchers.connect(self._watcher)
        followers.connect(self.graphs)
        if isinstance(session.level, OpLevel):
            session.level.begin(self._nodes, self._stops)
        named_tensors.connect(self._reader)
        follow_forks(session, self._nodes)

    def close(self) -> None:
        """Removes the hooks. The session's lock is held."""
        step = self._watcher.session.step
        for handle in (*self._handles, *step.leaf_handles):
            handle.remove()
        self._handles.clear()
        step.leaf_handles.clear()
        optimizers.watchers.disconnect(self._watcher)
        followers.disconnect(self.graphs)
        self.graphs.leave()
        if self._connection is not None:
            disconnect(self._connection.number)
        named_tensors.disconnect(self._reader)
        self._watcher.close()

    @property
    def compiled_modules(self) -> list[str]:
        """The names of the modules that ran compiled."""
        return [] if self._connection is None else self._connection.modules


def build(
    config: Config,
    models: Models,
    install: Callable[..., Any],
    install_alone: Install,
    targets: Sequence[ScalarSink] = (),
    watched: Optional[Watch] = None,
    is_alone: bool = False,
) -> Core:
    """All parts of a monitor. ``install``: the public function, and ``install_alone`` that for a
    monitor that meets no other rank; ``is_alone``: this monitor meets none.
    """
    is_op_level, nodes, rank = config.level == "op", models.nodes, own_rank()
    # One rank's stop would leave the others waiting for it in their next collective.
    group, lag = config.training.process_group, int(config.sync == "never")
    options, may_stop = config.of_all_ranks(), config.may_stop
    agreement = None if is_alone else agreement_for(group, lag, options, stops=may_stop)
    together = 1 if agreement is None else agreement.world_size
    if is_op_level:
        check_alone()

    log = None
    if config.log.dir is not None:
        meta = first_meta(config, nodes)
        log = RecordLog(config.log.dir, rank, config.log.limit_bytes, models.sites, meta)
    archive = Archive(config.log.history, models.sites, rank, log)
    ranks = ProcessRank(rank, together, group_size(group))
    event_store = EventStore(config, models.sites, ranks, archive)
    compiled: dict[int, None] = {}
    modules = weakref.WeakValueDictionary(models.named)
    run_meta = RunMeta(config, nodes, event_store, compiled, modules)

    captures = OpCaptures() if is_op_level and config.stop.dump is not None else None

    def make_level(session: Session) -> Level:
        if is_op_level:
            return OpLevel(session, models.has_excluded, captures)
        kind = RangeLevel if config.record == "range" else ModuleLevel
        return kind(session, nodes, models.has_excluded)

    session = Session(config, event_store, make_level)
    state = (OpState if is_op_level else StateReader)(session, nodes)
    if log is not None:
        # A model that is deleted takes its monitor along, without remove().
        weakref.finalize(session, log.close)
    watching = None if watched is None else Watching(session, watched, run_meta.batches)

    write_dump = _dump_writer(config, nodes, rank, together, captures)
    makers = Makers(session, install_alone, state.memory, run_meta)

    facts = Facts(
        session,
        nodes,
        run_meta.schedule,
        state.without_derivative,
        is_on=watching is not None,
    )
    watched_at_stop: Callable[[], Sequence[WatchEvent]] = tuple
    if watching is not None:
        watched_at_stop = functools.partial(watching.at_stop, facts.tell_early)
    stops = StopHandler(
        session, run_meta, agreement, write_dump, makers, state.broken_weights, watched_at_stop
    )
    checks: Sequence[ReplicaCheck] = ()
    if agreement is not None and watching is not None:
        checks = _replica_checks(models, watching)
    boundary = StepBoundary(session, stops, checks)
    if agreement is not None:
        join_listeners.connect(stops)

    tree = ModuleTree(models.models, models.named, nodes, models.is_selected)
    limits = watched is not None and watched.skip_above is not None
    norm_limit = watching.norm_limit if watching is not None and limits else None
    are_all_here = None if agreement is None else agreement.are_all_here
    watcher = StepWatcher(
        session, state, run_meta, stops, boundary, tree, facts, norm_limit, are_all_here
    )
    graphs = GraphFollower(watcher, nodes)
    # Objects that live as long as the hooks on the model do.
    keeps: list[object] = [graphs]
    if isinstance(session.level, OpLevel):
        observer: ModuleObserver = OpModuleObserver(
            session, session.level, state, watcher, stops, keeps, nodes
        )
    else:
        observer = ModuleObserver(session, state, watcher, stops, keeps)
    reader = named_tensors.reader_for(observer)
    keeps.append(reader)

    requests = None
    if config.on_request is not None:
        requests = Requests(session, watcher, models.models, install_alone)
        boundary.at_end.callback(requests.close)
    if targets:
        scalars = dict if watching is None else watching.scalars
        boundary.at_end.callback(SinkConnection(session, targets, scalars).close)
    return Core(
        models=[weakref.ref(model) for model in models.models],
        nodes=nodes,
        session=session,
        meta=run_meta,
        state=state,
        stops=stops,
        boundary=boundary,
        watcher=watcher,
        watching=watching,
        replayer=Replayer(session, models.models, install),
        hooks=Hooks(nodes, observer, watcher, graphs, reader, stops, compiled, requests),
    )


def _replica_checks(models: Models, watching: Watching) -> list[ReplicaCheck]:
    """The checks that several ranks make by themselves."""
    nodes = models.nodes
    batches = OwnBatches(watching.last_batches, watching.batches_are_one)

    def calls_of(module: torch.nn.Module) -> int:
        return sum(node.total_calls for node in nodes if node.module() is module)

    return [
        check for model in models.models for check in automatic_checks(model, calls_of, batches)
    ]


def _dump_writer(
    config: Config,
    nodes: Sequence[ModuleNode],
    rank: int,
    together: int,
    captures: Optional[OpCaptures],
) -> Optional[Callable[[Event], Dumped]]:
    """The function that dumps the call that is to blame for a stop; None without Stop(dump=)."""
    if config.stop.dump is None:
        return None
    why = "the step is not known: run it by monitor.run(step, batch)"
    if together > 1:
        why = "several ranks train together, of which none runs a step again alone"
    directory = os.fspath(config.stop.dump)
    return StoppedCallDumper(directory, rank, nodes, captures, why).dump
