"""Facts of the program that are in no record: settings of its optimizers, and what was noticed."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Callable, Optional

from fastcheck.log.step_table import StepRow

from .numbers import Number
from .rules import is_jump

# Facts that are one if the loss of their step is so, beside what is said of it.
_OF_LOSS: dict[str, Callable[[float, float], bool]] = {
    "negative": lambda loss, _: loss < 0,
    "first_loss": lambda loss, guess: loss >= max(5 * guess, guess + 5),
}


class Program:
    """The facts of the program that are in no record: numbers of the optimizer, by name, and what
    was noticed.
    """

    def __init__(self) -> None:
        self._settings: dict[str, float] = {}
        self._optimizers: set[str] = set()
        self._has_new_optimizer = False
        # Changes since the last step, and facts with the step in which each was noticed.
        self._changes: list[Number] = []
        self._noticed: list[tuple[int, Number]] = []
        # The largest rms of all gradients.
        self._largest = 0.0

    def setting(self, name: str, before: Optional[float], value: float) -> None:
        """Takes in a setting, as Watcher.setting() does."""
        self._settings[name] = value
        option = name.rpartition(".")[2].partition("[")[0]
        if name == "clipping.scaled":
            self._changes.append(Number("clipped_scaled", value))
        elif option == "lr":  # the rows have the largest of all groups, and each change of it
            optimizer = name.partition(".")[0]  # of which another group may come later
            self._has_new_optimizer |= optimizer not in self._optimizers
            self._optimizers.add(optimizer)
            if before is not None and is_jump(before, value):
                full_name = f"the learning rate ({name})"
                self._changes.append(Number(option, value, before, full_name=full_name))
        elif before is not None:
            self._changes.append(Number(option, value, before, full_name=name))
        elif name.endswith("betas[1]"):
            beta1 = self._settings.get(f"{name[:-2]}0]", math.nan)
            self._changes.append(Number("beta2", value, beta1**4))

    def take_rate_name(self) -> str:
        """The name of the rate of the next step, beside that of the step before; empty: they may be
        those of two optimizers that take turns.
        """
        is_new, self._has_new_optimizer = self._has_new_optimizer, False
        if len(self._optimizers) < 2:
            return "the learning rate"
        return "the learning rate (another optimizer's)" if is_new else ""

    def noticed(self, step: int, number: Number) -> None:
        self._noticed.append((step, number))

    def take_changes(self) -> list[Number]:
        changes, self._changes = self._changes, []
        return changes

    def take_noticed(self, step: int, row: Optional[StepRow]) -> list[Number]:
        """The facts of this step, and of earlier steps. What a loss should be is one if this step's
        is another: below 0, or far above what is learned by guessing.
        """
        if not self._noticed:
            return []
        numbers = [(at, number) for at, number in self._noticed if at <= step]
        self._noticed = [notice for notice in self._noticed if notice[0] > step]
        loss = math.nan if row is None or row.loss is None else row.loss
        return [
            number._replace(value=loss, usual=number.value) if number.name in _OF_LOSS else number
            for at, number in numbers
            if number.name not in _OF_LOSS
            or (at == step and _OF_LOSS[number.name](loss, number.value))
        ]

    def beside_eps(self, sizes: list[float]) -> list[float]:
        """The rms of gradients by step, or 0 from the step on in which it is not below eps: such
        gradients shrink with the loss.
        """
        _, *largest = accumulate(sizes, max, initial=self._largest)
        eps, self._largest = self.eps, largest[-1]
        return [size if most < eps else 0.0 for size, most in zip(sizes, largest)]

    @property
    def eps(self) -> float:
        """The smallest eps of an optimizer; 0: none has one."""
        eps = [value for name, value in self._settings.items() if name.endswith(".eps")]
        return min(eps, default=0.0)
