"""bisect(): finds a minimal set of operators that causes a difference when computed elsewhere.

The search is delta debugging (ddmin: A. Zeller, R. Hildebrandt, "Simplifying and Isolating
Failure-Inducing Input", IEEE Transactions on Software Engineering 28(2), 2002), over names.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Callable, Optional, Union

import torch

from fastcheck.calls.selection import CallName, Names, Selection, make_selection
from fastcheck.errors import ConfigError, choice, plain
from fastcheck.utils.torch.run_on_device import Elsewhere

from .override import Override, override

Place = Union[str, torch.device, None]

_BY: dict[str, Callable[[CallName], str]] = {
    "op": lambda name: name.op,
    # Modules as override() takes them: a root itself has no path.
    "module": lambda name: name.module or "the model",
    "call": lambda name: f"{name.op} #{name.call}",
}


@dataclass(frozen=True)
class Bisection:
    """The result of bisect().

    ``culprits``: the names which have to be computed elsewhere, all of them and no others; empty
    where computing everything elsewhere does not help. ``before``: the metric of the run as it is;
    ``after``: with all chosen names elsewhere; ``value``: with the culprits alone.
    ``threshold``: what counts as good. ``runs``: of every run the names that were elsewhere, and
    its metric. ``left_out``: what could not be computed elsewhere, and why.
    """

    culprits: tuple[str, ...]
    before: float
    after: float
    value: float
    threshold: float
    runs: tuple[tuple[tuple[str, ...], float], ...]
    left_out: dict[str, str]

    def __str__(self) -> str:
        metrics = f"{self.before:.6g} as it is, {self.after:.6g} with everything elsewhere"
        if not self.culprits:
            return f"no operator explains it: {metrics}"
        names = ", ".join(self.culprits)
        return f"{names}: {metrics}, {self.value:.6g} with these alone ({len(self.runs)} runs)"


def bisect(
    run: Callable[[Override], Any],
    metric: Callable[[Any], float],
    *,
    ops: Names = None,
    modules: Names = None,
    device: Place = None,
    dtype: Optional[torch.dtype] = None,
    by: str = "op",
    threshold: Optional[float] = None,
) -> Bisection:
    """Finds the operators that have to be computed on another device, or in a wider dtype, for an
    error to go away; also an error that is nowhere visible at a single operator, and only adds up::

        def run(override):
            torch.manual_seed(0)
            model = build()
            with override:
                return train(model, steps=50)

        print(fastcheck.bisect(run, lambda loss: abs(loss - 0.693), dtype=torch.float32).culprits)

    The first run collects the names, the second has all of them elsewhere; from then on the set is
    halved. With one culprit among n names, about 2 log2(n) runs.

    Args:
        run: ``run(override)`` trains, or whatever shows the error, within ``with override:``, and
            returns what ``metric`` wants. Called many times: it has to begin from the same state,
            seed included, each time.
        metric: a number of what ``run`` returned: the larger, the worse; NaN is worst. True and
            False will do: whether it is wrong.
        ops, modules: what to search among, as override() takes it; None: everything.
        device, dtype: where the others are computed, as override() takes it.
        by: what one name stands for: ``"op"``, all calls of an operator with those of its backward;
            ``"module"``, all operators that run directly in a module; ``"call"``, a single call.
        threshold: a run is good when its metric is not above this. None: half way between the
            first two runs.

    The answer is minimal: with any one of its names left out the run is not good. There may be
    another minimal set, where two errors cancel.

    Raises ConfigError for options that can't be used, and where nothing was run within the
    override. Errors of ``run`` and ``metric`` propagate.
    """
    choice("by", by, _BY)
    for name, function in (("run", run), ("metric", metric)):
        if not callable(function):
            raise ConfigError(f"{name} must be callable, got {function!r}")
    limit = plain(threshold)
    if not isinstance(limit, (float, int, type(None))):
        raise ConfigError("threshold is no number", expected="a number", got=repr(threshold))
    chosen = override(ops, modules, device=device, dtype=dtype)  # checks the options
    search = _BisectSearch(run, metric, chosen.elsewhere, _BY[by])
    selection = make_selection("op", ops, modules, None, None)
    before = search.measure_unchanged(selection)
    names = tuple(search.names)
    if not names:
        raise ConfigError(
            "bisect() found no operator of ops= and modules= within `with override:` of "
            "run(override)"
        )
    after = search.metric_of(names)
    if limit is None:
        limit = after if math.isinf(before) else (before + after) / 2
    if not before > limit >= after:
        return search.result((), before, after, before, limit)
    culprits = _minimal(names, lambda some: search.metric_of(some) <= limit)
    return search.result(culprits, before, after, search.metric_of(culprits), limit)


@dataclass(eq=False)
class _BisectSearch:
    """Runs with some names elsewhere, and keeps each metric."""

    _run: Callable[[Override], Any]
    _metric: Callable[[Any], float]
    _elsewhere: Elsewhere
    _key: Callable[[CallName], str]

    def __post_init__(self) -> None:
        self.names: dict[str, None] = {}
        self._values: dict[frozenset[str], float] = {}
        self._runs: list[tuple[tuple[str, ...], float]] = []
        self._left_out: dict[str, str] = {}

    def measure_unchanged(self, selection: Selection) -> float:
        """The metric of a run as it is, which also collects the names."""

        def note(name: CallName) -> bool:
            if selection.wants(name):
                self.names.setdefault(self._key(name))
            return False

        value = self._once(Override(self._elsewhere, choose=note), ())
        if selection.unmet():
            raise ConfigError(selection.unmet_text())
        return value

    def metric_of(self, names: Iterable[str]) -> float:
        """The metric with these names elsewhere."""
        some = frozenset(names)
        if some not in self._values:
            override = Override(self._elsewhere, choose=lambda name: self._key(name) in some)
            self._values[some] = self._once(
                override, tuple(name for name in self.names if name in some)
            )
            self._left_out.update(
                (name, why) for name, why in override.left_out.items() if not override.ran[name]
            )
        return self._values[some]

    def _once(self, override: Override, names: tuple[str, ...]) -> float:
        result = self._metric(self._run(override))
        try:
            value = float(result)
        except (TypeError, ValueError, RuntimeError) as error:
            expected = "metric(result) is a number"
            raise ConfigError(
                "bisect(metric=) can't be used", expected=expected, got=repr(result)
            ) from error
        value = math.inf if math.isnan(value) else value
        self._runs.append((names, value))
        return value

    def result(
        self, culprits: Sequence[str], before: float, after: float, value: float, limit: float
    ) -> Bisection:
        runs = tuple(self._runs)
        return Bisection(tuple(culprits), before, after, value, limit, runs, dict(self._left_out))


def _minimal(names: Sequence[str], is_good: Callable[[Sequence[str]], bool]) -> tuple[str, ...]:
    """A subset that is good and of which no name can be spared; ``names`` is good."""
    left, parts = list(names), 2
    while len(left) > 1:
        size = math.ceil(len(left) / parts)
        chunks = [left[start : start + size] for start in range(0, len(left), size)]
        for place, chunk in enumerate(chunks):
            if is_good(chunk):
                left, parts = chunk, 2
                break
            rest = [name for other in chunks[:place] + chunks[place + 1 :] for name in other]
            if len(chunks) > 2 and is_good(rest):
                left, parts = rest, max(len(chunks) - 1, 2)
                break
        else:
            if len(chunks) >= len(left):
                break
            parts = min(len(left), parts * 2)
    return tuple(left)
