"""CheckpointSeals: the ``seal=`` of an adapter, applied when its trainer saves a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Union

import torch

from fastcheck.errors import UnsealedCheckpointWarning, choice, warn
from fastcheck.sealing.reading import read_all
from fastcheck.sealing.seal import refusal, seal
from fastcheck.utils.grouping import grouped
from fastcheck.utils.torch.rank import of_all_ranks, own_rank
from fastcheck.utils.torch.sharding import is_part, local

__all__ = ["CheckpointSeals", "held_weights", "is_spread"]

Weights = Union[torch.nn.Module, Mapping[str, Any]]

_IN_PARTS = (
    "its weights are spread over the ranks; save whole weights and seal those, or call "
    "fastcheck.seal(folder, model, together=True) on every rank after "
    "torch.distributed.checkpoint.save()"
)


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
        self._left_out: set[str] = set()

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
                all of them raise if a rank has to. The call is collective and waits for the
                others, as it always does for weights that are spread over ranks (FSDP).
        """
        if self._mode != "refuse":
            return
        bad: tuple[str, ...] = ()
        unread: dict[str, str] = {}
        try:
            statistics, unread = read_all(held_weights(weights))
            bad = tuple(key for key, stats in statistics.items() if stats.nonfinite_count)
        except Exception as error:  # weights that can't be checked are no reason to stop
            reason = f"{type(error).__name__}: {error}"
            warn(f"{what} is saved unchecked: {reason}", UnsealedCheckpointWarning)
        if together or is_spread(weights):
            bad = tuple(dict.fromkeys(key for keys in of_all_ranks(bad) for key in keys))
        if bad:
            raise refusal(f"{what} is not written", bad, hint)
        for reason, keys in grouped(unread, unread.__getitem__).items():
            others = f" (and {len(keys) - 1:,} more)" if len(keys) > 1 else ""
            warn(f"{keys[0]}{others} is saved unchecked: {reason}", UnsealedCheckpointWarning)

    def write(self, path: Union[str, os.PathLike[str]], weights: Weights, step: int) -> None:
        """Seals the checkpoint ``path``, on the rank that calls this. A failure is a warning."""
        if not self._mode:
            return
        try:
            if is_spread(weights):  # the state_dict of some waits for all ranks
                self.leave_out(path, _IN_PARTS)
            else:
                seal(path, weights, step=step)
        except Exception as error:  # a checkpoint without a seal is no reason to stop
            self.leave_out(path, f"{type(error).__name__}: {error}")

    def write_together(
        self, path: Union[str, os.PathLike[str]], weights: Mapping[str, Any], step: int
    ) -> None:
        """Seals what the ranks of the default process group hold of the checkpoint ``path``. Every
        rank calls this, and waits for the others.
        """
        if not self._mode:
            return
        try:
            seal(path, weights, step=step, together=True)
        except Exception as error:  # a checkpoint without a seal is no reason to stop
            if own_rank() == 0:
                self.leave_out(path, f"{type(error).__name__}: {error}")

    def leave_out(self, path: object, reason: str) -> None:
        """Warns that the checkpoint ``path`` has no seal, once for each ``reason``."""
        if self._mode and reason not in self._left_out:
            self._left_out.add(reason)
            warn(f"{path} is not sealed: {reason}", UnsealedCheckpointWarning)


def is_spread(weights: Weights) -> bool:
    """True if this rank holds parts of weights: FSDP1, FSDP2 or another DTensor, ZeRO 3."""
    if isinstance(weights, Mapping):
        return any(isinstance(value, torch.Tensor) and is_part(value) for value in weights.values())
    return any(
        is_part(parameter) or hasattr(parameter, "ds_tensor") for parameter in weights.parameters()
    ) or any(hasattr(module, "_fsdp_wrapped_module") for module in weights.modules())


def held_weights(weights: Weights) -> dict[str, torch.Tensor]:
    """The part that this rank holds of the weights and of the buffers that a checkpoint keeps, by
    name. No communication: the state_dict of some wrappers gathers.
    """
    if isinstance(weights, Mapping):
        return {k: local(v) for k, v in weights.items() if isinstance(v, torch.Tensor)}
    if not is_spread(weights):
        return dict(weights.state_dict())
    tensors = {name: local(parameter) for name, parameter in weights.named_parameters()}
    for path, module in weights.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                tensors[f"{path}.{name}" if path else name] = local(buffer)
    return tensors
