"""CheckpointSeals: the ``seal=`` of an adapter, applied when its trainer saves a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Union

import torch

from fastcheck.errors import choice, warn
from fastcheck.sealing.seal import find_nonfinite, refusal, seal

__all__ = ["CheckpointSeals"]

Weights = Union[torch.nn.Module, Mapping[str, Any]]


class CheckpointSeals:
    """check() before a checkpoint is written, write() afterwards.

    Args:
        mode: ``"mark"``: write() seals. ``"refuse"``: that, and check() raises for weights that are
            not finite. False: neither does anything.

    Raises:
        ConfigError: another ``mode``.
    """

    def __init__(self, mode: Union[str, bool]) -> None:
        if mode is not False:
            choice("seal", mode, ("mark", "refuse"), "False")
        self._mode = mode

    def __bool__(self) -> bool:
        return bool(self._mode)

    def check(self, weights: Weights, what: object, hint: str, *, together: bool = False) -> None:
        """Raises NonFiniteWeightsError if ``what`` is not to be written. Weights that can't be read
        are left out, with a warning.

        Args:
            weights: a module, or what of it this rank holds.
            what: the checkpoint, for the message.
            hint: what to do then.
            together: every rank of the default process group calls this, with weights of its own:
                all of them raise if one has to. A collective call, which waits for the others.
        """
        if self._mode != "refuse":
            return
        bad: tuple[str, ...] = ()
        unread: dict[str, str] = {}
        try:
            bad, unread = find_nonfinite(weights)
        except Exception as error:  # weights that can't be checked are no reason to stop
            warn(f"{what} is saved unchecked: {type(error).__name__}: {error}")
        if together:
            bad = _of_all_ranks(bad)
        if bad:
            raise refusal(f"{what} is not written", bad, hint)
        by_reason: dict[str, list[str]] = {}
        for key, reason in unread.items():
            by_reason.setdefault(reason, []).append(key)
        for reason, keys in by_reason.items():
            others = f" (and {len(keys) - 1:,} more)" if len(keys) > 1 else ""
            warn(f"{keys[0]}{others} is saved unchecked: {reason}")

    def write(self, path: Union[str, os.PathLike[str]], weights: Weights, step: int) -> None:
        """Seals the checkpoint ``path``. A failure is a warning."""
        if not self._mode:
            return
        try:
            seal(path, weights, step=step)
        except Exception as error:  # a checkpoint without a seal is no reason to stop
            warn(f"{path} is not sealed: {type(error).__name__}: {error}")


def _of_all_ranks(bad: tuple[str, ...]) -> tuple[str, ...]:
    """The keys that any rank has found."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return bad
    found: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(found, bad)
    return tuple(dict.fromkeys(key for keys in found for key in keys))
