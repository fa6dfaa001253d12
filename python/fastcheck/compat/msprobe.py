"""msprobe's names: ``from fastcheck.compat.msprobe import PrecisionDebugger, seed_all``.

``docs/compat.md`` lists the differences from ``msprobe.pytorch``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional, Union

import torch

from fastcheck.dump.options import Models, check_models
from fastcheck.errors import ConfigError, choice
from fastcheck.reproducibility.seeds import seed_all as _seed_all
from fastcheck.utils.names.api import api_names, is_function
from fastcheck.utils.torch.rank import own_rank

from ._options import Dumps, check_names, compare_paths, number_set, warn_once
from ._overflows import OverflowWatch, SelectedSteps

__all__ = ["PrecisionDebugger", "compare", "seed_all"]


TASKS = ("statistics", "tensor", "md5", "overflow_check")
LEVELS = ("L0", "L1", "mix")
#: Tasks of msprobe without a counterpart, and what to use instead.
_OTHER_TASKS = {
    "acc_check": 'Dumper(reference="cpu") compares every operator with the CPU',
    "run_ut": 'Dumper(reference="cpu") compares every operator with the CPU',
    "free_benchmark": 'Dumper(reference="cpu") compares every operator with the CPU',
    "grad_probe": "install(log_dir=...) records every gradient",
    "nan_analyze": 'task="overflow_check" finds where it began',
    "structure": "fastcheck.inventory(model) lists a model's modules",
    "exception_dump": 'task="overflow_check" names what overflows',
}
#: Names of msprobe.pytorch without a counterpart, and what to write instead.
_OTHER_NAMES = {
    "save": "fastcheck.stats(x) reads one tensor, a Dumper(tensors=True) writes what it computes",
    "register_custom_api": 'Dumper(level="op") dumps every operator that a function of yours runs',
    "restore_custom_api": "no function is wrapped: there is nothing to restore",
    "module_dump": '"level": "L0" with "list": ["Module.NAME.TYPE.forward.0"] dumps one module',
    "module_dump_end": '"level": "L0" with "list": ["Module.NAME.TYPE.forward.0"] dumps one module',
    "MonitorV2": "fastcheck.install(model, log_dir=...) watches the run",
    "TrainerMon": "fastcheck.install(model, log_dir=...) watches the run",
    "compare_distributed": "fastcheck.compare(actual, reference) compares each rank with its own",
    "parse": "fastcheck show DUMP prints it, and fastcheck compare compares two",
}
_TOP = {"task", "dump_path", "rank", "step", "level", "dump_enable"}
# Keys that have no effect, and what to use instead.
_UNUSED = {
    "seed": "call seed_all()",
    "is_deterministic": "call seed_all(mode=True)",
    "enable_dataloader": "call start(), stop() and step()",
    "async_dump": "values are written by a thread in any case",
    "extra_info": "the line of each call has it",
    "precision": "sums and extremes are computed as docs/record-format.md describes",
    "acl_config": "CANN's own operators are not dumped",
    "risk_level": 'what is dumped follows from "level", "list" and "scope"',
    "nan_check": 'task "overflow_check" names the operator that makes the first',
}
_TASK_KEYS = {
    "statistics": {"scope", "list", "data_mode", "summary_mode", "tensor_list", "device"},
    "md5": {"scope", "list", "data_mode", "summary_mode", "tensor_list", "device"},
    "tensor": {"scope", "list", "data_mode", "summary_mode", "file_format", "backward_input"},
    "overflow_check": {"overflow_nums", "check_mode"},
}
_STATISTICS = ("max", "min", "mean", "l2norm")
_DATA_MODES = ("all", "forward", "backward", "input", "output")


@dataclass(frozen=True)
class ProbeConfig:
    """The options of a dump or an overflow check. ``ranks`` and ``steps``: None for all of them."""

    task: str
    dump_path: str
    level: str
    ranks: Optional[frozenset[int]]
    steps: Optional[frozenset[int]]
    names: tuple[str, ...]
    is_enabled: bool
    #: Names of functions, each with the names that their calls may have.
    spellings: Mapping[str, tuple[str, ...]]
    ends: tuple[str, ...]
    record: str
    overflow_nums: int

    @property
    def plans(self) -> dict[str, dict[str, Any]]:
        """Options of Dumpers, by the directory that each has below ``dump_path``."""
        of_levels = {"L0": ("module",), "L1": ("api",), "mix": ("module", "api")}[self.level]
        plans: dict[str, dict[str, Any]] = {}
        for level in of_levels:
            names = [
                name
                for entry in self.names
                if self._belongs(entry, level)
                for name in (self.spellings.get(entry, (entry,)) if level == "api" else (entry,))
            ]
            ends = [end for end in self.ends if self._belongs(end, level)]
            if len(of_levels) > 1 and (self.names or self.ends) and not (names or ends):
                continue
            plan: dict[str, Any] = {"level": level, "record": self.record}
            plan["tensors"] = self.task == "tensor"
            if level == "api":  # a tensor and its transpose are two of a call's inputs
                plan["order"] = "logical"
            if names:
                plan["ops" if level == "api" else "modules"] = names
            if ends:
                plan["first"], plan["last"] = ends[0], ends[-1]
            plans[{"module": "L0", "api": "L1"}[level] if len(of_levels) > 1 else ""] = plan
        return plans

    def _belongs(self, name: str, level: str) -> bool:
        """True if a name is for the dump of this level: with mix, modules are for the first dump
        and APIs for the second.
        """
        if self.level != "mix":
            return True
        return name.startswith(("Module.", "Cell.")) == (level == "module")


def read_config(
    path: Union[str, os.PathLike[str], None],
    *,
    task: Optional[str],
    dump_path: Union[str, os.PathLike[str], None],
    level: Optional[str],
    step: Any,
) -> ProbeConfig:
    """The file at ``path``, if a path is given; the other arguments take precedence over it."""
    given = {} if path is None else _load_config(os.fspath(path))
    known = (*_TOP, *_UNUSED, *_TASK_KEYS, *_OTHER_TASKS)
    check_names("key of config.json", given, known)
    for key, instead in _UNUSED.items():
        if given.get(key) not in (None, "", False):
            warn_once(f'"{key}" is not used: {instead}')
    chosen = _task(given.get("task", "statistics") if task is None else task)
    part = given.get(chosen, {})
    if not isinstance(part, dict):
        raise ConfigError(f'"{chosen}" of config.json must be an object, got {part!r}')
    check_names(f'key of "{chosen}"', part, _TASK_KEYS[chosen])
    chosen_level = _level(given.get("level", "L1") if level is None else level)
    place = given.get("dump_path") if dump_path is None else os.fspath(dump_path)
    if not isinstance(place, str) or not place:
        raise ConfigError(
            "dump_path must be a directory, in config.json or PrecisionDebugger(dump_path=...), "
            f"got {place!r}"
        )
    if part.get("check_mode") not in (None, "", "all"):
        warn_once('"check_mode" is not used: values are read instead of a register of the device')
    names, ends = _listed_names(part), _ends(part)
    if names and ends:
        warn_once(
            '"list" and "scope" together: dumps the calls of "list" between the two of "scope"'
        )
    return ProbeConfig(
        task=chosen,
        dump_path=str(place),
        level=chosen_level,
        ranks=number_set("rank", given.get("rank")),
        steps=number_set("step", given.get("step") if step is None else step),
        names=names,
        is_enabled=_is_enabled(given.get("dump_enable")),
        spellings={name: tuple(api_names(name)) for name in names if is_function(name)},
        ends=ends,
        record=_record_option(chosen, part),
        overflow_nums=_overflow_nums(part.get("overflow_nums", 1)),
    )


def _is_enabled(given: Any) -> bool:
    if not isinstance(given, (bool, type(None))):
        raise ConfigError(f'"dump_enable" must be true or false, got {given!r}')
    if given is False:
        warn_once('"dump_enable" is false: nothing is dumped. The file is read once, at the start')
    return given is not False


def _load_config(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            config = json.load(file)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"config.json can't be read: {path}: {why}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"config.json must be a JSON object, got {config!r}")
    return dict(config)


def _task(task: Any) -> str:
    if isinstance(task, str) and task in _OTHER_TASKS:
        raise ConfigError(f'task="{task}" has no counterpart in fastcheck: {_OTHER_TASKS[task]}')
    return str(choice("task", task, TASKS))


def _level(level: Any) -> str:
    if level in ("L2", "debug"):
        raise ConfigError(
            f'level="{level}" has no counterpart in fastcheck: Dumper(level="op") dumps every '
            "operator that torch runs; fastcheck.stats(x) reads one tensor"
        )
    return str(choice("level", level, LEVELS))


def _listed_names(part: Mapping[str, Any]) -> tuple[str, ...]:
    if part.get("tensor_list"):
        warn_once('"tensor_list" is not used: task "tensor" with that "list" dumps the values')
    for key, usual in (("backward_input", []), ("file_format", "npy"), ("device", "host")):
        if part.get(key) not in (None, usual):
            warn_once(f'"{key}" is not used: values are safetensors, as they ran')
    modes = _texts("data_mode", part.get("data_mode"))
    check_names("entry of data_mode", modes, _DATA_MODES)
    if modes and list(modes) != ["all"]:
        warn_once('"data_mode" is not used: inputs, outputs and gradients are dumped, all of them')
    return _texts("list", part.get("list"))


def _ends(part: Mapping[str, Any]) -> tuple[str, ...]:
    ends = _texts("scope", part.get("scope"))
    if len(ends) in (0, 2):
        return ends
    raise ConfigError(
        f'"scope" must be two names, of the first and the last call, got {list(ends)!r}; "list" '
        "dumps single calls"
    )


def _texts(name: str, given: Any) -> tuple[str, ...]:
    texts = [given] if isinstance(given, str) else [] if given is None else given
    if isinstance(texts, (list, tuple)) and all(isinstance(text, str) for text in texts):
        return tuple(texts)
    raise ConfigError(f'"{name}" must be a list of names, got {given!r}')


def _record_option(task: str, part: Mapping[str, Any]) -> str:
    """The statistics of each tensor that are computed: a checksum only where the config names
    it.
    """
    mode = part.get("summary_mode", "md5" if task == "md5" else "statistics")
    if isinstance(mode, list):
        check_names("entry of summary_mode", mode, _STATISTICS)
        return "full" if task in ("md5", "tensor") else "stats"
    choice("summary_mode", mode, ("statistics", "md5", "xor"))
    if mode in ("md5", "xor"):
        warn_once(
            f'"{mode}" is fastcheck\'s checksum of 64 bits, which sees order and sign; it is no CRC'
        )
    return "full" if mode != "statistics" or task in ("md5", "tensor") else "stats"


def _overflow_nums(given: Any) -> int:
    is_number = isinstance(given, int) and not isinstance(given, bool)
    if is_number and (given == -1 or given > 0):
        return int(given)
    raise ConfigError(f'"overflow_nums" must be a positive int, or -1 for never, got {given!r}')


Path = Union[str, "os.PathLike[str]"]


class PrecisionDebugger:
    """Dumps, or counts the overflows of, what runs between start() and stop().

        debugger = PrecisionDebugger(config_path="config.json")
        for batch in data:
            debugger.start(model)
            loss = model(batch); loss.backward()
            debugger.stop()
            optimizer.step()
            debugger.step()

    Tasks ``statistics``, ``tensor``, ``md5`` and ``overflow_check``, at level L0 (modules), L1
    (functions of torch's API) or mix. A dump of step 3 is
    ``dump_path/step3/rank0``, with mix in ``dump_path/L0`` and ``dump_path/L1``.

    Args:
        config_path: msprobe's config.json.
        task, dump_path, level, step: these take precedence over the file.
        model: the model, or models; start(model) too takes them.

    Raises ConfigError for a key or a value that is not known, with near matches.
    """

    def __init__(
        self,
        config_path: Optional[Path] = None,
        task: Optional[str] = None,
        dump_path: Optional[Path] = None,
        level: Optional[str] = None,
        model: Models = None,
        step: Any = None,
        **unknown: Any,
    ) -> None:
        known = ("config_path", "task", "dump_path", "level", "model", "step")
        check_names("option of PrecisionDebugger", unknown, known)
        self.config = config = read_config(
            config_path, task=task, dump_path=dump_path, level=level, step=step
        )
        self._models = check_models(model)
        is_mine = config.is_enabled and (config.ranks is None or own_rank() in config.ranks)
        dumps = None
        if config.task != "overflow_check" and is_mine:
            dumps = Dumps(config.dump_path, config.plans, config.spellings)
        self._run = SelectedSteps(dumps, self._begin_watch, config.steps, is_mine)

    def start(
        self, model: Models = None, token_range: Any = None, rank_id: Optional[int] = None
    ) -> None:
        """Starts to read calls; with ``rank_id`` those of this rank alone. The models are needed
        once, for task overflow_check.
        """
        if token_range is not None:
            warn_once("token_range= is not used: every pass of the step is read")
        self._models = check_models(model) or self._models
        if rank_id in (None, own_rank()):
            self._run.start(self._models)

    def _begin_watch(self, models: Sequence[torch.nn.Module], step: int) -> OverflowWatch:
        if not models:
            raise ConfigError(
                "overflow_check needs the model: debugger.start(model), or "
                "PrecisionDebugger(model=model)"
            )
        return OverflowWatch(
            models,
            dump_path=self.config.dump_path,
            overflow_nums=self.config.overflow_nums,
            level="module" if self.config.level == "L0" else "op",
            first_step=step,
        )

    def stop(self) -> None:
        """Stops to read calls: what runs before the next start() is not seen.

        Raises OverflowDetected like a hook does.
        """
        self._run.stop()

    def step(self) -> None:
        """A step is over: the next start() begins the next step. Call it after the optimizer's.

        Raises OverflowDetected like a hook does.
        """
        self._run.next_step()

    def __getattr__(self, name: str) -> Any:
        if name in _OTHER_NAMES:
            raise _no_counterpart(f"PrecisionDebugger.{name}", name)
        raise AttributeError(f"PrecisionDebugger has no attribute {name!r}")

    def set_init_step(self, step: int) -> None:
        """The number of the step that is begun next, of a run that was resumed."""
        self._run.step = step

    def __repr__(self) -> str:
        config = self.config
        return f"<PrecisionDebugger: {config.task} {config.level}, step {self._run.step}>"


def _no_counterpart(shown: str, name: str) -> ConfigError:
    return ConfigError(f"{shown} has no counterpart in fastcheck: {_OTHER_NAMES[name]}")


def __getattr__(name: str) -> Any:
    if name in _OTHER_NAMES:
        raise _no_counterpart(name, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def seed_all(seed: int = 1234, mode: bool = False, rm_dropout: bool = False) -> None:
    """fastcheck.seed_all(); ``mode``: deterministic kernels too. ``rm_dropout`` is not done."""
    if rm_dropout:
        warn_once("rm_dropout= is not done: model.eval(), or p=0, switches dropout off")
    _seed_all(seed, deterministic=mode)


def compare(
    input_param: Mapping[str, Any], output_path: Optional[Path] = None, **kwargs: Any
) -> Any:
    """fastcheck.compare() of two dumps, printed, with ``compare_result.csv`` in ``output_path``.

    ``input_param``: ``npu_path`` (or ``target_path``) is the side in question, ``bench_path`` (or
    ``golden_path``) the reference; msprobe's own dump.json, too. Of the other options msprobe has,
    none has a counterpart.
    """
    known = ("auto_analyze", "fuzzy_match", "suffix", "data_mapping", "layer_mapping", "highlight")
    check_names("option of compare()", kwargs, known)
    if any(kwargs.values()):
        warn_once(f"{', '.join(kwargs)} of compare() are not used: see fastcheck.compare()")
    return compare_paths(
        input_param,
        actual=("npu_path", "target_path"),
        reference=("bench_path", "golden_path"),
        unused=("stack_path", "is_print_compare_log"),
        output_path=output_path,
    )
