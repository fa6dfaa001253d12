"""msprobe's names: ``from fastcheck.compat.msprobe import PrecisionDebugger, seed_all``.

``docs/compat.md`` lists the differences from ``msprobe.pytorch``.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Mapping
from typing import Any, Optional, Union

from fastcheck.dump.options import Models, check_models
from fastcheck.errors import ConfigError, explain
from fastcheck.reproducibility.seeds import seed_all as _seed_all
from fastcheck.utils.torch.rank import own_rank

from ._dumps import Dumps
from ._msprobe_config import read_config
from ._options import check_names, compare_paths, warn_once
from ._overflows import OverflowWatch

__all__ = ["PrecisionDebugger", "compare", "seed_all"]

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
    (torch's operators, named by the API that ran them) or mix. A dump of step 3 is
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
        self._step = 0
        self._is_running = False
        self._watch: Optional[OverflowWatch] = None
        self._dumps: Optional[Dumps] = None
        self._is_mine = config.ranks is None or own_rank() in config.ranks
        if config.task != "overflow_check" and self._is_mine:
            self._dumps = Dumps(config.dump_path, config.plans, config.spellings)
            atexit.register(self._dumps.close)

    def start(self, model: Models = None, token_range: Any = None) -> None:
        """From here on calls are seen. The models are wanted once, for task overflow_check."""
        if token_range is not None:
            warn_once("token_range= is not used: every pass of the step is read")
        self._models = check_models(model) or self._models
        if not self._is_mine or self._is_running:
            return
        if self._dumps is None and self._watch is None:
            # In a step that is left out, too: they are counted from here on.
            self._watch = self._begin_watch()
            self._watch.pause(True)
        if self.config.steps is not None and self._step not in self.config.steps:
            return
        self._is_running = True
        if self._dumps is not None:
            self._dumps.open(self._step, self._models)
        if self._watch is not None:
            self._watch.pause(False)
            self._watch.begin_step()

    def _begin_watch(self) -> OverflowWatch:
        if not self._models:
            raise ConfigError(
                explain(
                    "overflow_check needs the model",
                    expected="debugger.start(model), or PrecisionDebugger(model=model)",
                    got="no model",
                )
            )
        return OverflowWatch(
            self._models,
            dump_path=self.config.dump_path,
            overflow_nums=self.config.overflow_nums,
            level="module" if self.config.level == "L0" else "op",
            first_step=self._step,
        )

    def stop(self) -> None:
        """Up to here: what runs before the next start() is not seen.

        Raises OverflowDetected like a hook does.
        """
        self._is_running = False
        if self._dumps is not None:
            self._dumps.close()
        if self._watch is not None:
            self._watch.pause(True)

    def step(self) -> None:
        """A step is over: the next start() begins the next one. Call it after the optimizer's.

        Raises OverflowDetected like a hook does.
        """
        self.stop()
        self._step += 1
        if self._watch is not None:
            self._watch.monitor.step()

    def set_init_step(self, step: int) -> None:
        """The number of the step that is begun next, of a run that was resumed."""
        self._step = step

    def __repr__(self) -> str:
        config = self.config
        return f"<PrecisionDebugger: {config.task} {config.level}, step {self._step}>"


def seed_all(seed: int = 1234, mode: bool = False, rm_dropout: bool = False) -> None:
    """fastcheck.seed_all(); ``mode``: deterministic kernels too. ``rm_dropout`` is not done."""
    if rm_dropout:
        warn_once("rm_dropout= is not done: model.eval(), or p=0, switches dropout off")
    _seed_all(seed, deterministic=mode)


def compare(
    input_param: Mapping[str, Any],
    output_path: Optional[Path] = None,
    **kwargs: Any,
) -> Any:
    """fastcheck.compare() of two dumps, printed, with ``compare_result.csv`` in ``output_path``.

    ``input_param``: ``npu_path`` (or ``target_path``) is the one in question, ``bench_path`` (or
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
