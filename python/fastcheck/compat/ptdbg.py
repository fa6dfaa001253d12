"""ptdbg_ascend's names: ``from fastcheck.compat.ptdbg import *`` replaces ptdbg_ascend's import.

``docs/compat.md`` lists the differences, option by option.
"""

from __future__ import annotations

import atexit
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, Callable, NoReturn, Optional, Union

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from fastcheck.errors import ConfigError, choice, string_list
from fastcheck.reproducibility.seeds import seed_all as _seed_all
from fastcheck.utils.names.api import api_names
from fastcheck.utils.torch.rank import own_rank

from ._options import Dumps, check_names, compare_paths, number_set, warn_once
from ._overflows import OverflowWatch, SelectedSteps

__all__ = [
    "PrecisionDebugger",
    "acc_cmp_dump",
    "compare",
    "compare_distributed",
    "overflow_check",
    "parse",
    "register_hook",
    "seed_all",
    "set_backward_input",
    "set_dump_path",
    "set_dump_switch",
    "set_overflow_check_switch",
]


_MODES = ("all", "list", "range", "stack", "api_list", "api_stack", "acl")

_MODULE = re.compile(r"Module\.(.+)\.[^.]+\.(?:forward|backward)\.(\d+)(?:\..*)?")
_OWN_DIRECTION = re.compile(r" · (forward|backward|optimizer)$")
_DIRECTION = re.compile(r"(?<=\d)[._](forward|backward|optimizer)([._].*)?$")


def dump_plan(
    mode: str,
    scope: Sequence[str],
    api_list: Sequence[str],
    filter_switch: str,
    dump_mode: Union[str, Sequence[str]],
    summary_only: bool,
) -> tuple[dict[str, dict[str, Any]], dict[str, tuple[str, ...]]]:
    """(options of Dumpers by their directory, names of functions with the names of their calls)."""
    choice("mode=", mode, _MODES)
    choice("filter_switch=", filter_switch, ("ON", "OFF"))
    if filter_switch == "ON":
        warn_once('filter_switch="ON" is not used: integers and bools are dumped too')
    directions = [dump_mode] if isinstance(dump_mode, str) else list(dump_mode)
    check_names(
        "entry of dump_mode=", directions, ("all", "forward", "backward", "input", "output")
    )
    if directions != ["all"]:
        warn_once("dump_mode= is not used: inputs, outputs and gradients are dumped, all of them")
    names = string_list("scope", scope)
    plan: dict[str, Any] = {"tensors": not summary_only}
    if mode == "acl":
        raise ConfigError(
            'mode="acl" is the dump of CANN\'s own operators; mode="list" dumps those of torch'
        )
    if mode in ("stack", "api_stack"):
        warn_once(f'mode="{mode}": records are written, without stacks of calls')
        plan["tensors"] = False
    if mode == "list" or (mode == "stack" and names):
        _check_scope(mode, bool(names), "at least one name", scope)
        return _lists([whole_call(name) for name in names], plan), {}
    if mode == "range":
        _check_scope(mode, len(names) == 2, "two names, the first and the last", scope)
        plan["first"], plan["last"] = names
    elif mode == "api_list":
        functions = string_list("api_list", api_list)
        if not functions:
            raise ConfigError(
                'mode="api_list" needs names of functions, such as api_list=["relu"], got '
                f'{api_list!r}; mode="list" with scope= is for single calls'
            )
        spellings = {function: tuple(api_names(function)) for function in functions}
        plan["ops"] = [name for names in spellings.values() for name in names]
        return {"": plan}, spellings
    return {"": plan}, {}


def _lists(names: list[str], plan: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Calls of modules, which overflow_check prints where it reads no operators, have a dump of
    their own.
    """
    modules = [_MODULE.sub(r"\1 #\2", name) for name in names if _MODULE.fullmatch(name)]
    ops = [name for name in names if not _MODULE.fullmatch(name)]
    plans = {"": {**plan, "ops": ops}} if ops else {}
    if modules:
        plans["modules" if ops else ""] = {**plan, "level": "module", "modules": modules}
    return plans


def whole_call(name: str) -> str:
    """``Functional_linear_145`` of ``Functional_linear_145_backward``: a call is dumped with its
    inputs, its outputs and the gradients of both.
    """
    return _DIRECTION.sub("", _OWN_DIRECTION.sub("", name))


def _check_scope(mode: str, is_met: bool, expected: str, got: Any) -> None:
    if not is_met:
        names = 'such as scope=["Functional_linear_145_backward"]'
        raise ConfigError(f'mode="{mode}" needs scope= with {expected}, {names}, got {got!r}')


Path = Union[str, "os.PathLike[str]"]
Plans = dict[str, dict[str, Any]]
Spellings = dict[str, tuple[str, ...]]


def overflow_check(*args: Any, **kwargs: Any) -> NoReturn:
    """The hook that counts overflows: for register_hook(model, overflow_check)."""
    _not_callable("overflow_check")


def acc_cmp_dump(*args: Any, **kwargs: Any) -> NoReturn:
    """The hook that dumps, while the switch is on: for register_hook(model, acc_cmp_dump)."""
    _not_callable("acc_cmp_dump")


def _not_callable(name: str) -> NoReturn:
    raise ConfigError(f"{name} cannot be called directly; write register_hook(model, {name})")


class _Session:
    """The state that the functions of ptdbg_ascend share."""

    def __init__(self) -> None:
        self.path = "ptdbg_dump"
        self.watch: Optional[OverflowWatch] = None
        self.models: list[torch.nn.Module] = []
        self.has_dump_hook = False
        self.plans: Optional[tuple[Plans, Spellings]] = None
        self.dumps: Optional[Dumps] = None
        self.step = 0
        # True if a module has run since the last optimizer's step.
        self.has_begun = True
        self._hooks: list[RemovableHandle] = []
        self._optimizers: set[int] = set()

    def follow_optimizers(self) -> None:
        """Ends a step when an optimizer has stepped."""
        if not self._hooks:
            self._hooks = [
                register_module_forward_pre_hook(self._begin),
                register_optimizer_step_pre_hook(self._add_hook),
                register_optimizer_step_post_hook(self._new_numbers),
            ]

    def _begin(self, module: torch.nn.Module, args: Any) -> None:
        self.has_begun = True

    def _add_hook(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        # An optimizer's own hooks run before those of all optimizers, which a Dumper that is closed
        # takes off: which must not happen in the middle of their run.
        if id(optimizer) not in self._optimizers:
            self._optimizers.add(id(optimizer))
            optimizer.register_step_post_hook(self._new_dump)

    def _new_dump(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self.step += 1
        if self.dumps is not None and self.dumps.is_open:
            self.dumps.open(self.step, self.models)
            self.has_begun = False

    def _new_numbers(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self.watch is not None:
            self.watch.begin_step()

    def apply_switch(self) -> None:
        """Starts to dump if a hook is registered and the switch is on."""
        self.close()
        if self.plans is None or not self.has_dump_hook:
            return
        plans, spellings = self.plans
        self.has_begun = True
        self.dumps = Dumps(self.path, plans, spellings)
        self.dumps.open(self.step, self.models)
        self.follow_optimizers()

    def close(self) -> None:
        """Ends the dump. Keeps what was dumped since the last optimizer's step if a module has run
        in it.
        """
        if self.dumps is not None:
            self.dumps.close(keeps=self.has_begun)

    def release(self) -> None:
        """close(), and removes the global hooks."""
        self.close()
        while self._hooks:
            self._hooks.pop().remove()


_session = _Session()
atexit.register(_session.release)


def register_hook(
    model: torch.nn.Module,
    hook: Callable[..., Any],
    overflow_nums: int = 1,
    dump_mode: str = "api",
    dump_config: Optional[Path] = None,
    rank: int = 0,
    need_clear: bool = True,
) -> None:
    """Puts ``hook`` on ``model``: ``overflow_check`` or ``acc_cmp_dump``.

    With ``overflow_check`` every call of torch's API that makes something non-finite of finite
    values, or carries it on, counts once, forward and backward apart; the ``overflow_nums``-th
    raises OverflowDetected (-1: none does), which ends the process with an exit status that is not
    zero. The names are printed and written to ``<dump path>/overflow``.

    Args:
        model: the model; on a device other than the CPU overflows are named by module.
        hook: which of the two.
        overflow_nums: how many overflows end the run, -1 for never.
        dump_mode: ``"api"``; ``"acl"``, the dump of CANN's own operators, is refused.
        dump_config, rank, need_clear: without effect.

    Raises ConfigError.
    """
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"register_hook() was given a {type(model).__name__}, not a model")
    if dump_mode == "acl":
        raise ConfigError("dump_mode=\"acl\" is the dump of CANN's own operators: use CANN's tools")
    choice("dump_mode=", dump_mode, ["api"])
    if dump_config is not None:
        warn_once("dump_config= is the configuration of CANN's dump, which is not used")
    if rank:
        warn_once("rank= is not used: the rank is that of torch.distributed, or RANK")
    if hook is overflow_check:
        _session.watch = OverflowWatch(
            [model], dump_path=_session.path, overflow_nums=overflow_nums, format_name=_underscored
        )
        _session.follow_optimizers()
    elif hook is acc_cmp_dump:
        _session.models.append(model)
        _session.has_dump_hook = True
        _session.apply_switch()
    else:
        raise ConfigError(
            "the hook must be overflow_check or acc_cmp_dump of fastcheck.compat.ptdbg, got "
            + getattr(hook, "__qualname__", type(hook).__name__)
        )


def _underscored(name: str) -> str:
    """``Functional_linear_145_backward``; a name of fastcheck's own, or of a module, as it is."""
    is_api = name.split(".", 1)[0] in ("Functional", "Torch", "Tensor", "VF") and " " not in name
    return name.replace(".", "_") if is_api else name


def set_dump_path(fpath: Optional[Path] = None, dump_tag: str = "") -> None:
    """Sets the place of dumps and record files: ``fpath/dump_tag``. Call it before register_hook().

    An ``fpath`` that ends with ``.pkl`` stands for the directory of that name without it.
    """
    if fpath is None or not os.fspath(fpath):
        raise ConfigError(f"set_dump_path() needs a path, got {fpath!r}")
    path = os.fspath(fpath)
    if path.endswith(".pkl"):
        path = path[: -len(".pkl")]
        warn_once(f"a dump is a directory, not a .pkl file: {path}")
    _session.path = os.path.join(path, dump_tag) if dump_tag else path
    if _session.watch is not None:
        warn_once("set_dump_path() has no effect on the earlier register_hook()")


def set_dump_switch(
    switch: str,
    mode: str = "all",
    scope: Sequence[str] = (),
    api_list: Sequence[str] = (),
    filter_switch: str = "OFF",
    dump_mode: Union[str, Sequence[str]] = ("all",),
    summary_only: bool = False,
) -> None:
    """``"ON"``: what registered models do is dumped from now on, a directory a step; ``"OFF"``: it
    is not. A step ends when an optimizer has stepped.

    Args:
        switch: ``"ON"`` or ``"OFF"``.
        mode: ``"all"``; ``"list"``: the calls that ``scope`` names; ``"range"``: from the first of
            its two names to the second; ``"api_list"``: the functions that ``api_list`` names;
            ``"stack"`` and ``"api_stack"``: records without values, of ``scope`` or of all.
        scope: names as overflow_check prints them.
        api_list: names of functions, such as ``"relu"``.
        filter_switch, dump_mode: integers, and both directions, are dumped in any case.
        summary_only: records without values.

    Raises ConfigError for a mode or a name that can't be used.
    """
    choice("the switch", switch, ["ON", "OFF"])
    if switch == "OFF":
        _session.plans = None
        _session.close()
        return
    _session.plans = dump_plan(mode, scope, api_list, filter_switch, dump_mode, summary_only)
    _session.apply_switch()


def set_overflow_check_switch(switch: str, filter_switch: str = "OFF") -> None:
    """``"OFF"``: pauses the reading of passes until ``"ON"``."""
    choice("the switch", switch, ["ON", "OFF"])
    if _session.watch is not None:
        _session.watch.pause(switch == "OFF")


def seed_all(seed: int = 1234, mode: bool = False) -> None:
    """fastcheck.seed_all(); ``mode``: deterministic kernels too."""
    _seed_all(seed, deterministic=mode)


def compare(
    input_param: Mapping[str, Any],
    output_path: Optional[Path] = None,
    stack_mode: bool = False,
    auto_analyze: bool = True,
    fuzzy_match: bool = False,
    **kwargs: Any,
) -> Any:
    """fastcheck.compare() of two dumps, printed, with ``compare_result.csv`` in ``output_path``.

    ``input_param``: ``npu_dump_data_dir`` (or ``npu_pkl_path``) is the side in question,
    ``bench_dump_data_dir`` (or ``bench_pkl_path``) the reference: directories of dumps. The other
    options have no counterpart.
    """
    check_names("option of compare()", kwargs, ["summary_compare", "md5_compare"])
    if stack_mode or fuzzy_match:
        warn_once("stack_mode= and fuzzy_match= are not used: see fastcheck.compare(rename=)")
    return compare_paths(
        input_param,
        actual=("npu_dump_data_dir", "npu_pkl_path"),
        reference=("bench_dump_data_dir", "bench_pkl_path"),
        unused=("is_print_compare_log",),
        output_path=output_path,
    )


def compare_distributed(
    npu_dump_dir: Path, bench_dump_dir: Path, output_path: Path, **kwargs: Any
) -> Any:
    """compare() of two dumps of several ranks, each of which is compared with its own."""
    given = {"npu_dump_data_dir": npu_dump_dir, "bench_dump_data_dir": bench_dump_dir}
    return compare(given, output_path, **kwargs)


def set_backward_input(backward_input: Any) -> NoReturn:
    """Refused: a part of the dump of CANN's own operators."""
    raise ConfigError(
        "set_backward_input() belongs to the dump of CANN's own operators; leave it out: "
        'set_dump_switch("ON", mode="list", scope=[...]) dumps both directions'
    )


def parse(*args: Any, **kwargs: Any) -> NoReturn:
    """Refused: a shell for .pkl and .npy files, which fastcheck does not write."""
    raise ConfigError(
        "parse() reads files that fastcheck does not write; `fastcheck show DUMP` and "
        "`fastcheck compare ACTUAL REFERENCE` read dumps"
    )


class PrecisionDebugger:
    """Dumps, or counts the overflows of, what runs between start() and stop().

        debugger = PrecisionDebugger(dump_path="./dump", hook_name="dump", step=[0])
        debugger.configure_hook(mode="all")
        for batch in data:
            debugger.start()
            loss = model(batch); loss.backward()
            debugger.stop()
            optimizer.step()
            debugger.step()

    As with ptdbg_ascend there is one debugger in a process, and ``PrecisionDebugger.start()`` is
    the same as ``debugger.start()``.

    Args:
        dump_path: the directory; step 3 is ``dump_path/step3/rank0``.
        hook_name: ``"dump"`` or ``"overflow_check"``.
        rank: the rank that dumps; None: all.
        step: the steps that are dumped; empty: all.
        enable_dataloader: not used.
        model: wanted for ``"overflow_check"``, and for names of modules.

    Raises ConfigError.
    """

    _current: Optional[PrecisionDebugger] = None

    def __init__(
        self,
        dump_path: Optional[Path] = None,
        hook_name: Optional[str] = None,
        rank: Optional[int] = None,
        step: Any = None,
        enable_dataloader: bool = False,
        model: Optional[torch.nn.Module] = None,
    ) -> None:
        choice("hook_name=", hook_name, ("dump", "overflow_check"))
        if dump_path is None or not os.fspath(dump_path):
            raise ConfigError("dump_path= is missing")
        if hook_name == "overflow_check" and model is None:
            raise ConfigError("overflow_check needs the model: PrecisionDebugger(..., model=model)")
        if enable_dataloader:
            warn_once("enable_dataloader= is not used: call start(), stop() and step()")
        self._path, self._models = os.fspath(dump_path), [] if model is None else [model]
        self._overflow_nums = 1
        is_dump = hook_name == "dump"
        self._run = SelectedSteps(
            Dumps(self._path, {"": {"tensors": True}}, {}) if is_dump else None,
            self._begin_watch,
            number_set("step", step),
            rank is None or rank == own_rank(),
        )
        PrecisionDebugger._current = self

    def _begin_watch(self, models: Sequence[torch.nn.Module], step: int) -> OverflowWatch:
        return OverflowWatch(
            models,
            dump_path=self._path,
            overflow_nums=self._overflow_nums,
            format_name=_underscored,
            first_step=step,
        )

    def configure_hook(
        self,
        mode: str = "all",
        scope: Optional[Sequence[str]] = None,
        api_list: Optional[Sequence[str]] = None,
        filter_switch: str = "OFF",
        acl_config: Optional[Path] = None,
        backward_input: Sequence[str] = (),
        input_output_mode: Union[str, Sequence[str]] = ("all",),
        summary_only: bool = False,
        summary_mode: str = "all",
        overflow_nums: int = 1,
        need_replicate: bool = False,
    ) -> None:
        """Sets what is dumped, as set_dump_switch() does, or how many overflows end the run. Call
        it before start().
        """
        choice("summary_mode=", summary_mode, ("all", "summary", "md5"))
        if acl_config or backward_input or need_replicate:
            warn_once(
                "acl_config=, backward_input= and need_replicate= are of CANN's own dump, which is "
                "not used"
            )
        self._overflow_nums = overflow_nums
        plans = dump_plan(
            mode,
            list(scope or ()),
            list(api_list or ()),
            filter_switch,
            input_output_mode,
            summary_only or summary_mode != "all",
        )
        if self._run.dumps is not None:
            self._run.stop()  # what was dumped until now is whole
            self._run.dumps = Dumps(self._path, *plans)

    @classmethod
    def start(cls) -> None:
        """Starts to read calls."""
        debugger = cls._one()
        debugger._run.start(debugger._models)

    @classmethod
    def stop(cls) -> None:
        """Stops to read calls: what runs before the next start() is not seen."""
        cls._one()._run.stop()

    @classmethod
    def step(cls) -> None:
        """Ends the step: the next start() begins the next step."""
        cls._one()._run.next_step()

    @classmethod
    def _one(cls) -> PrecisionDebugger:
        if cls._current is None:
            raise ConfigError(
                "there is no debugger yet: make a PrecisionDebugger(dump_path=, hook_name=) first"
            )
        return cls._current
