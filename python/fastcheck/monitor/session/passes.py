"""The calls of models from outside, with their arguments, held until their step is over: one of
them may be run again, to find the operator that made the numbers of a stop.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

import torch

from fastcheck.calls.module_calls import Call
from fastcheck.utils.torch.own_operators import unobserved
from fastcheck.utils.torch.versions import autocast_dtype

# Beside the last one.
_MOST = 7
_MOST_BYTES = 64 << 20
# Arguments that were computed would be freed by backward.
_MOST_COMPUTED_BYTES = 16 << 20


class Pass(NamedTuple):
    """``generator``: the state of torch's generator of the host when the call began. ``autocast``:
    the kind of device, and the dtype (empty: it was off).
    """

    step: int
    call: Call
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    generator: Optional[torch.Tensor]
    autocast: tuple[str, str]
    nbytes: int


class Passes:
    """The calls of a session's models from outside, held until their step is over. Every method
    expects its lock to be held.
    """

    def __init__(self) -> None:
        #: torch's generator of the host, as the last pass has begun with it.
        self.generator: Optional[torch.Tensor] = None
        self._held: list[Pass] = []
        #: Those that begin now are not read (``Session.pause()``).
        self.are_paused = False

    @property
    def held(self) -> Sequence[Pass]:
        """The passes that are held, the oldest first."""
        return self._held

    def began(self) -> None:
        self.generator = torch.default_generator.get_state()

    def hold(
        self,
        step: int,
        call: Call,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        tensors: Sequence[torch.Tensor],
    ) -> None:
        """``call`` has begun, with ``tensors`` among its arguments."""
        nbytes, are_computed = 0, False
        for tensor in tensors:
            nbytes += tensor.numel() * tensor.element_size()
            are_computed = are_computed or tensor.grad_fn is not None
        if are_computed:
            if nbytes > _MOST_COMPUTED_BYTES or not all(map(_is_simple, (*args, *kwargs.values()))):
                return
            args = tuple(map(_without_graph, args))
            kwargs = {name: _without_graph(value) for name, value in kwargs.items()}
        kind = tensors[0].device.type if tensors else "cpu"
        autocast = kind, autocast_dtype(kind)
        size = sum(one.nbytes for one in self._held)
        while self._held and (len(self._held) > _MOST or size > _MOST_BYTES):
            size -= self._held.pop(0).nbytes
        self._held.append(Pass(step, call, args, kwargs, self.generator, autocast, nbytes))

    def drop_before(self, step: int) -> None:
        """Lets go of those of the steps before this one."""
        if self._held:
            self._held = [one for one in self._held if one.step >= step]


def _is_simple(value: Any) -> bool:
    return value is None or isinstance(value, (torch.Tensor, bool, int, float, str))


def _without_graph(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.grad_fn is None:
        return value
    with unobserved():
        return value.detach().requires_grad_()
