"""The gravest warning of the watch in a log, and what to try, from the lines of its watch file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

#: Kinds of warnings, the gravest first; kinds that are not here come last.
_GRAVEST = (
    "loss_spike",
    "explosion",
    "invariant",
    "loss_scale",
    "headroom",
    "precision",
    "dead",
    "update",
    "settings",
)
# Warnings of other kinds say in their text what to do (watch/rules.py).
_WITHOUT_ADVICE = ("loss_spike", "explosion", "headroom")
_BY_CAUSE: Mapping[str, str] = {
    "data": "Look at the batch of step {step}. After monitor.batch(name) before the forward pass, "
    "warnings name the batch.",
    "loss": "Look at what the loss of step {step} reads beside the model's outputs: targets, "
    "weights of its terms, a factor.",
    "optimizer": "Undo the change that the warning names, or else lower the learning rate.",
    "layer": "Look at {mover}, the first tensor that left its range: its curves are below.",
    "gradient": "Clip the gradients, or lower the learning rate: {mover} left its range first.",
    "hardware": "The ranks held different weights: run `fastcheck doctor --device` on their "
    "machines, and fastcheck.rerun() of a step.",
}


def gravest(warnings: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The first line, by step, of the most serious kind among at least one line of
    ``read_watch()``.
    """

    def weight(line: Mapping[str, Any]) -> int:
        kind = line.get("kind")
        return _GRAVEST.index(kind) if kind in _GRAVEST else len(_GRAVEST)

    return min(warnings, key=weight)


def first_mover(line: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The first mover that a line names."""
    movers = line.get("movers")
    first = movers[0] if isinstance(movers, list) and movers else None
    return first if isinstance(first, dict) and type(first.get("step")) is int else None


def advice_of(line: Mapping[str, Any]) -> list[str]:
    """Sentences on what to try after this warning; none where its text says so."""
    kind, step = line.get("kind"), line["step"]
    if kind not in _WITHOUT_ADVICE:
        return []
    if kind == "headroom":
        return ["Compute this tensor in bfloat16 or float32 before then, or scale it down."]
    mover = first_mover(line)
    name = mover.get("site") if mover is not None else None
    text = _BY_CAUSE.get(str(line.get("cause")))
    tries = []
    if text is not None and ("{mover}" not in text or isinstance(name, str)):
        first = mover["step"] if mover is not None else step
        tries.append(text.format(mover=name, step=f"{first:,}"))
    back = "If the loss does not come down by itself, go back to a checkpoint from before step"
    return [*tries, f"{back} {step:,}."]
