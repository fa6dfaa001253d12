"""What is warned of at the end of a step: weights that don't move or are not protected, modules
that are observed from now on, a step that nothing ends, learning rates.
"""

from __future__ import annotations

from typing import Optional

from fastcheck.errors import LearningRateWarning, warn
from fastcheck.monitor.hooks.boundaries.endless import EndlessSteps
from fastcheck.monitor.hooks.protect.protection import WeightProtection
from fastcheck.monitor.hooks.stored.state_reader import StateReader
from fastcheck.monitor.session.run_meta import RunMeta

from .module_tree import ModuleTree


def warn_of_step(
    state: StateReader,
    meta: Optional[RunMeta],
    protection: WeightProtection,
    endless: EndlessSteps,
    tree: Optional[ModuleTree],
    notes: dict[str, None],
) -> None:
    """Called outside of all locks."""
    warnings = protection.take_warnings()
    news = "" if tree is None else tree.take_news()
    if news:
        notes[news] = None
        warnings.append(news)
    unended = endless.take_warning()
    if unended:
        warnings.append(unended)
    for text in warnings:
        warn(text)
    rates = "" if meta is None else meta.schedule.take_warning()
    if rates:
        warn(rates, LearningRateWarning)
    stalled_weights = state.stalled_weights
    for text in () if stalled_weights is None else stalled_weights.take_warnings():
        warn(text)


def warn_in_child() -> None:
    warn(
        "this process was forked from the one that called fastcheck.install(), and trains: "
        "nothing is observed here. Call install() in it"
    )
