"""Dumper: the context manager around a step, or a part of a step."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any, Optional, Union

import torch

from fastcheck.calls.modes import ApiCalls
from fastcheck.calls.module_calls import ModuleNode
from fastcheck.calls.selection import CallName, Names, Selection, make_selection
from fastcheck.calls.stored import StoredTensor, gradients_of, parameter_ids, parameters_of
from fastcheck.calls.tracker import CallListener, ModuleTracker
from fastcheck.dump.storage.files import claim, place_of
from fastcheck.errors import ConfigError, LogError, check_bool, local_path, warn
from fastcheck.log.reader import newest_log, read_log
from fastcheck.log.view import first_event
from fastcheck.record.site import OUTSIDE
from fastcheck.reproducibility.environment import environment_or_error
from fastcheck.reproducibility.inventory import describe_optimizer
from fastcheck.utils.names.patterns import Wanted
from fastcheck.utils.torch.operators import describe_tensor
from fastcheck.utils.torch.own_operators import unobserved
from fastcheck.utils.torch.rank import own_rank
from fastcheck.utils.torch.readable import can_read, has_memory, is_materialised
from fastcheck.utils.torch.sharding import local
from fastcheck.utils.torch.transforms import take_off
from fastcheck.utils.torch.versions import eager_stance

from .api_calls import CallsOfApis
from .dump_writer import DumpSession, warn_of_end
from .module_calls import ModuleCalls
from .op_calls import PythonOpCalls, RecordedOpCalls
from .options import Models, check_models, check_options
from .reference import Reference


class DumpedState(CallListener):
    """Reads the parameters, buffers and gradients of the modules that are dumped."""

    def __init__(self, session: DumpSession, selection: Selection) -> None:
        self._session = session
        self._selection = selection
        self._optimizers: list[dict[str, Any]] = []
        self._optimizer_ids: set[int] = set()
        self._has_gradients = False
        self.tracker: Optional[ModuleTracker] = None

    def met_root(self, nodes: Sequence[ModuleNode]) -> None:
        tensors: list[tuple[StoredTensor, str]] = []
        for node in nodes:
            module = node.module()
            if module is None or not self._is_wanted(node):
                continue
            for role, held in (("param", module._parameters), ("buffer", module._buffers)):
                for name, tensor in held.items():
                    if tensor is not None and is_materialised(tensor):
                        tensors.append(((node, name, tensor), role))
        self._read("stored", tensors)

    def before_update(self, optimizer: torch.optim.Optimizer) -> None:
        if id(optimizer) not in self._optimizer_ids:
            self._optimizer_ids.add(id(optimizer))
            names = {
                id(parameter): node.name_of(name)
                for module, node in self._nodes()
                for name, parameter in module._parameters.items()
                if parameter is not None
            }
            self._optimizers.append(describe_optimizer(optimizer, names))
            self._session.add_meta(optimizers=self._optimizers)
        self._read_gradients(parameter_ids(optimizer))

    def at_end(self) -> None:
        """The gradients that no optimizer has taken within the dump."""
        if not self._has_gradients:
            self._read_gradients(None)

    def _read_gradients(self, owned: Optional[set[int]]) -> None:
        wanted = [node for _, node in self._nodes() if self._is_wanted(node)]
        gradients = gradients_of(parameters_of(wanted, owned))
        tensors = [(stored, "param_grad") for stored in gradients]
        self._has_gradients |= bool(tensors)
        self._read("gradients", tensors)

    def _is_wanted(self, node: ModuleNode) -> bool:
        return self._selection.wants_state(CallName("", node.path, 0, "optimizer"))

    def _nodes(self) -> list[tuple[torch.nn.Module, ModuleNode]]:
        return [] if self.tracker is None else self.tracker.nodes

    def _read(self, kind: str, tensors: list[tuple[StoredTensor, str]]) -> None:
        entries = []
        for (node, name, tensor), role in tensors:
            inner = local(tensor)
            if inner.layout is torch.sparse_coo:
                inner = inner._values()
            entry = {"label": node.name_of(name), **describe_tensor(inner), "role": role}
            if can_read(inner) and has_memory(inner):
                entry.update(self._session.records.read(inner, node.site(role, name, 0), 0))
            entries.append(entry)
        if entries:
            self._session.add_call(
                {"kind": kind, "direction": "optimizer", "in": entries, "out": []}
            )


def names_of_log(path: str) -> tuple[list[Wanted], list[Wanted]]:
    """(ops, modules) of the counted events of the newest log at ``path``: of all events when none
    is counted. ConfigError when there is no log, or no event in it.
    """
    try:
        view = read_log(newest_log(path))
    except LogError as error:
        raise ConfigError(f"from_log= can't be read\n{error}") from error
    start = first_event(view.events)
    if start is None:
        raise ConfigError(f"the log given as from_log= has no event: {view.directory}")
    ops: dict[Wanted, None] = {}
    modules: dict[Wanted, None] = {}
    for event in view.events:
        if event.counted != start.counted:
            continue
        site = event.site
        where = OUTSIDE if site.module_type == OUTSIDE else site.module
        if site.op:
            ops[Wanted(str(site), op=site.op, module=where, call=int(event.record["call"]))] = None
        elif site.role != "loss":
            modules[Wanted(str(site), module=where)] = None
    return list(ops), list(modules)


class Dumper:
    """Writes the inputs and outputs of the operators or modules of a training step to disk, in the
    order of their calls, forward and backward, with the arguments that are not tensors.

        for i, batch in enumerate(data):
            with fastcheck.Dumper("dump", step=i, enable=i in {0, 1, 2}):
                loss = criterion(model(batch.x), batch.y)
                loss.backward()
                optimizer.step()

    In ``dump/step3/rank0``: a record log (``fastcheck show``, ``export`` and ``compare`` read it),
    ``calls.jsonl`` with one line a call, ``index.json`` with what was left out and why, and with
    ``tensors=True`` safetensors files. Training is not changed: losses and weights are
    bit-identical, no random number is drawn. Compiled functions run uncompiled within the
    block, and may round differently.

    Args:
        directory: of all steps and ranks.
        step: the number of the step; its directory must not be there yet.
        enable: False: this does nothing and costs nothing.
        tensors: write the values too, each content once.
        reference: ``"cpu"``: run every operator once more on the CPU, on the same inputs, and
            record the distance of its outputs; ``.differences`` has what is beyond the
            thresholds of ``compare()``. In the same dtype for operators on a device, in float64 for
            those that run on the CPU anyway. ``level="op"`` only.
        level: ``"op"``: every operator of torch's dispatcher, in this thread and in backward;
            ``"module"``: what modules take and return; ``"api"``: what functions of torch's Python
            API do (``Functional.softmax``), as msprobe at its level L1.
        ops: the operators that are dumped alone, with their gradients, by any name that a stop
            message, a log, ``compare()``, msprobe or ptdbg_ascend prints: ``"aten.softmax"``,
            ``"layers.3.attn · aten.softmax #7"``, ``"Functional.softmax.7.backward"``.
        modules: the same of modules, what is inside them included. With ``ops=``: these operators,
            within these modules.
        first, last: dump from the first call of this name up to the first call of that name;
            of backward, the gradients of these.
        from_log: a log of an overflow: the operators and modules of its counted
            events are added to the lists.
        model: the module, or modules, by whose paths calls are named. Left out: the module that is
            called first.
        record: of each tensor, ``"health"``, ``"stats"`` or ``"full"``, as of ``install()``.
        order: ``"storage"``: tensors are read as they lie in memory; ``"logical"``: row-major,
            slower, so that checksums don't depend on the memory layout.
        memory: how many bytes of values may wait to be written.
        overwrite: replace a dump of this step that is there.

    Raises:
        ConfigError: an invalid option, at the start; at the end of the ``with`` block, a name that
            no call had, unless the block itself has raised.

    A disk that is full or can't be written ends the dump with a FastcheckWarning that names the
    file; training goes on. The CPU's tensors are read at once. Those of devices are read there,
    and fetched together now and then, which waits for the device; ``tensors=True`` and
    ``reference=`` copy them to the host, which waits each time.
    """

    def __init__(
        self,
        directory: Union[str, os.PathLike[str]],
        *,
        step: int = 0,
        enable: bool = True,
        tensors: bool = False,
        reference: Optional[str] = None,
        level: str = "op",
        ops: Names = None,
        modules: Names = None,
        first: Optional[str] = None,
        last: Optional[str] = None,
        from_log: Union[str, os.PathLike[str], None] = None,
        model: Models = None,
        record: str = "full",
        order: str = "storage",
        memory: Union[str, int] = "256MiB",
        overwrite: bool = False,
    ) -> None:
        self.enabled = check_bool("enable", enable)
        #: The folder of this step.
        self.path: Optional[str] = None
        #: The names in the lists that no call of the ``with`` block had.
        self.unmet: tuple[str, ...] = ()
        self._session: Optional[DumpSession] = None
        # The reason why the dump could not begin.
        self._why_not = ""
        self._was_used = False
        if not self.enabled:
            return
        self._options = check_options(
            step=step,
            tensors=tensors,
            reference=reference,
            level=level,
            record=record,
            order=order,
            memory=memory,
            overwrite=overwrite,
        )
        self._selection = make_selection(
            level,
            ops,
            modules,
            first,
            last,
            ([], []) if from_log is None else names_of_log(local_path("from_log", from_log)),
        )
        self._models = check_models(model)
        self._rank = own_rank()
        self.path = place_of(local_path("directory", directory), step, self._rank)
        self._lists = {
            "ops": _given(ops),
            "modules": _given(modules),
            "first": first,
            "last": last,
            "from_log": None if from_log is None else os.fspath(from_log),
        }

    @property
    def problem(self) -> str:
        """The reason why the dump stopped before its end; empty when it did not."""
        return self._why_not if self._session is None else self._session.problem

    @property
    def differences(self) -> list[dict[str, Any]]:
        """The outputs that are beyond the thresholds, with ``reference=``, in the order of calls;
        at most 1000.
        """
        return [] if self._session is None else list(self._session.differences)

    @property
    def left_out(self) -> dict[tuple[str, str], int]:
        """The number of calls, by (op, reason), that were not dumped, or not compared with the
        reference.
        """
        return {} if self._session is None else dict(self._session.left_out)

    def __enter__(self) -> Dumper:
        if not self.enabled:
            return self
        if self._was_used:
            raise ConfigError(
                'this Dumper was already used: each step takes its own, Dumper("dump", step=i)'
            )
        self._was_used = True
        self._stack = contextlib.ExitStack()
        assert self.path is not None
        try:
            claim(self.path, self._options.step, self._options.overwrite)
            with unobserved():
                dump = {**self._options._asdict(), **self._lists}
                meta = {"dump": dump, "environment": environment_or_error()}
                session = DumpSession(self.path, self._rank, meta, self._options)
        except (OSError, LogError) as error:
            cause = error.__cause__ if isinstance(error, LogError) else error
            reason = getattr(cause, "strerror", None) or str(error)
            self._why_not = f"{getattr(cause, 'filename', None) or self.path}: {reason}"
            warn_of_end(self._options.step, self._why_not)
            return self
        self._session = session
        try:
            self._start(session)
        except BaseException:
            self._stack.close()
            session.finish("it did not start", {})
            raise
        return self

    def _start(self, session: DumpSession) -> None:
        options, selection = self._options, self._selection
        self._stack.enter_context(eager_stance())
        state = DumpedState(session, selection)
        self._state = state
        listeners: list[CallListener] = [state]

        tracker = ModuleTracker(session, self._models, listeners, selection.add_modules)
        state.tracker = tracker
        if options.level == "module":
            calls = ModuleCalls(session, selection)
            listeners.append(calls)
            self._stack.callback(calls.stop)
        tracker.start()
        self._stack.callback(tracker.stop)
        if self._models:
            selection.check_modules()
        if options.level == "api":
            calls_of_apis = CallsOfApis(session, selection, tracker)
            listeners.append(calls_of_apis)
            self._stack.callback(calls_of_apis.stop)
            self._stack.enter_context(calls_of_apis.mode)
        if options.level == "op":
            apis = ApiCalls() if selection.uses_apis else None
            reference = Reference(session) if options.has_reference else None
            recorded = None if reference else RecordedOpCalls.make(session, selection)
            ops = recorded or PythonOpCalls(session, selection, tracker, apis, reference)
            listeners.append(ops)
            self._stack.callback(ops.close)
            if apis is not None:
                self._stack.enter_context(apis)
            mode = ops.mode()
            mode.__enter__()
            # Another thread may end the dump: the mode then stays, and passes all by.
            self._stack.callback(take_off, mode)

    def __exit__(self, kind: Optional[type[BaseException]], *_: object) -> None:
        session = self._session
        if session is None or session.is_closed:
            return
        self._stack.close()
        if session.is_on:
            with session.lock:
                session.guarded("the gradients", self._state.at_end)
        unmet = None
        if kind is None and not session.problem:
            self.unmet, unmet = self._selection.unmet(), self._selection.unmet_text() or None
        ended_by = "" if kind is None else kind.__name__
        options = {**self._options._asdict(), **self._lists}
        del options["overwrite"]
        with unobserved():
            session.finish(ended_by, {"options": options, "unmet": unmet})
        self._warn_of_differences(session)
        if unmet is not None:
            raise ConfigError(unmet)

    def _warn_of_differences(self, session: DumpSession) -> None:
        if not session.differences:
            return
        first = session.differences[0]
        where = f" in {first['module']}" if first["module"] else ""
        ran = f" ({first['ran']})" if first["ran"] != first["op"] else ""
        warn(
            f"fastcheck: {len(session.differences):,} of {session.compared_count:,} outputs of "
            f"step {session.step} differ from those of the CPU for the same inputs, first "
            f"{first['op']} #{first['call']}{ran}, {first['direction']}{where}: relative error "
            f"{first['error']:.3g}, allowed {first['allowed']:.3g}; all of them in "
            f"{os.path.join(session.place, 'reference.jsonl')}"
        )

    def __repr__(self) -> str:
        return f"<fastcheck.Dumper: {self.path or 'off'}>"


def _given(names: Names) -> Optional[list[str]]:
    return None if names is None else [names] if isinstance(names, str) else list(names)
