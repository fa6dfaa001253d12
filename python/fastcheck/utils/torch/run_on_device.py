"""Runs one operator on another device or in a wider dtype, and copies the values into its results.

The operator itself runs as well: its results keep their dtype, device and strides, random
generators advance as without fastcheck, and dropout masks are its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Optional

import torch

from fastcheck.errors import first_line

from .operators import OpInfo, inputs_of, op_info, outputs_of, tensors_of
from .own_operators import no_grad, unobserved

_COMPLEX = {torch.float32: torch.complex64, torch.float64: torch.complex128}
_DROPOUT = torch.ops.aten.native_dropout.default


@dataclass(frozen=True)
class Elsewhere:
    """A place to compute an operator: ``device`` and ``dtype``, where None leaves either as it
    is.
    """

    device: Optional[torch.device]
    dtype: Optional[torch.dtype]
    #: Operators that draw random numbers run there too, with the generator of that device.
    draws: bool = False

    def run(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, str]:
        """Returns what ``func`` returns, and the reason why that is the operator's own result; an
        empty reason where it was computed elsewhere. Raises what the operator itself raises.
        """
        info = op_info(func)
        reason = self._reason(info, args, kwargs)
        if reason:
            return func(*args, **kwargs), reason
        if func is _DROPOUT and not self._may_draw(info, args, kwargs):
            return self._dropout(func, args, kwargs)
        moved: Any = None
        try:
            with unobserved(), no_grad():
                # Before it runs: it may write to them.
                moved = self.moved(info, args, kwargs)
        except Exception as error:
            reason = f"its arguments can't be taken there: {first_line(error)}"
        result = func(*args, **kwargs)
        if not reason:
            with unobserved(), no_grad():
                made = outputs_of(info, args, kwargs, result)
                reason = self._replace(made, info, func, *moved)
        return result, reason

    def moved(self, info: OpInfo, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments on the other device or in the other dtype; copies where the operator writes
        to them.
        """
        known: dict[int, torch.Tensor] = {}
        written = _written(info, args, kwargs)
        place = info.position.get("half_to_float")
        moved_args = self._moved(args, known, written)
        if place is not None and place < len(args) and self.dtype is not None:
            # They are wide already.
            moved_args = (*moved_args[:place], False, *moved_args[place + 1 :])
        return moved_args, self._moved(kwargs, known, written)

    def _replace(
        self, made: Sequence[torch.Tensor], info: OpInfo, func: Any, args: Any, kwargs: Any
    ) -> str:
        """Runs the operator on the other device, and overwrites its results here."""
        is_drawn = self._may_draw(info, args, kwargs)
        there, reason = compute(info, func, args, kwargs, may_draw=is_drawn)
        if reason:
            return reason
        pairs = list(zip(made, there))
        if any(here.shape != other.shape for here, other in pairs):
            return "it makes tensors of other shapes there"
        try:
            for here, other in pairs:
                # An index may be another where two values have rounded to one number.
                is_inexact = here.is_floating_point() or here.is_complex()
                if is_inexact or self.dtype is None or is_drawn:
                    here.copy_(other)
        except Exception as error:
            return f"what it makes can't be put back: {first_line(error)}"
        return ""

    def _dropout(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, str]:
        """Runs dropout with the mask that was drawn here."""
        result = func(*args, **kwargs)
        x, p = args[0], float(args[1])
        with unobserved(), no_grad():
            there, mask = self._moved([x, result[1]], {}, frozenset())
            scale = 0.0 if p >= 1.0 else 1.0 / (1.0 - p)
            result[0].copy_(there * mask * scale)
        return result, ""

    def _reason(self, info: OpInfo, args: Any, kwargs: Any) -> str:
        """The reason why an operator is left as it is; empty where it isn't."""
        # Dropout is computed with the mask that it draws here.
        is_drawn = info.name == "aten.native_dropout" or self._may_draw(info, args, kwargs)
        reason = "" if is_drawn else info.why_once(args, kwargs)
        if reason:
            return reason
        given = [t for value in (*args, *kwargs.values()) for _, t in tensors_of(value, "")]
        if not given:
            return "" if self._may_draw(info, args, kwargs) else "it is given no tensor"
        if any(t.layout is not torch.strided or t.is_quantized for t in given):
            return "it is given sparse or quantized tensors"
        changes = any(
            (self.device is not None and t.device != self.device)
            or self._wide(t.dtype) is not t.dtype
            for t in given
        )
        if not changes:
            return "it runs there already" if self.dtype is None else "nothing in it is narrower"
        return ""

    def _may_draw(self, info: OpInfo, args: Any, kwargs: Any) -> bool:
        """True if it draws random numbers, and another device's generator is to give them."""
        return self.draws and self.device is not None and info.draws(args, kwargs)

    def _wide(self, dtype: torch.dtype) -> torch.dtype:
        wanted = self.dtype
        if wanted is None:
            return dtype
        if dtype.is_complex:
            wanted = _COMPLEX.get(wanted, dtype)
        elif not dtype.is_floating_point:
            return dtype
        return wanted if wanted.itemsize > dtype.itemsize else dtype

    def _moved(self, value: Any, known: dict[int, torch.Tensor], written: frozenset[int]) -> Any:
        if isinstance(value, torch.Tensor):
            tensor = known.get(id(value))
            if tensor is None:
                # A copy of an argument that is written to, or it would be written twice.
                tensor = known[id(value)] = value.detach().to(
                    device=self.device or value.device,
                    dtype=self._wide(value.dtype),
                    copy=id(value) in written,
                )
            return tensor
        if isinstance(value, torch.dtype):
            return self._wide(value)
        if isinstance(value, torch.device):
            return self.device or value
        if isinstance(value, torch.Generator) and self.device is not None:
            return value if value.device == self.device else None  # that device's own
        if isinstance(value, tuple):
            return tuple(self._moved(item, known, written) for item in value)
        if isinstance(value, list):
            return [self._moved(item, known, written) for item in value]
        if isinstance(value, dict):
            moved = {key: self._moved(item, known, written) for key, item in value.items()}
            return {**moved, "pin_memory": False} if "pin_memory" in moved else moved
        return value


def _written(info: OpInfo, args: Any, kwargs: Any) -> frozenset[int]:
    return frozenset(id(t) for at, _, t in inputs_of(info, args, kwargs) if at in info.written)


def compute(
    info: OpInfo, func: Any, args: Any, kwargs: Any, where: str = "there", *, may_draw: bool = False
) -> tuple[list[torch.Tensor], str]:
    """The tensors that an operator makes of arguments that were moved, or why it can't. The
    generators are put back if it draws random numbers nevertheless, unless it ``may_draw``.
    """
    state = torch.get_rng_state()
    try:
        result = func(*args, **kwargs)
    except NotImplementedError as error:
        return [], f"no kernel {where}: {first_line(error)}"
    except Exception as error:
        return [], f"it can't run {where}: {first_line(error)}"
    finally:
        has_drawn = not may_draw and not torch.equal(state, torch.get_rng_state())
        if has_drawn:
            torch.set_rng_state(state)
    if has_drawn:
        return [], "it draws random numbers"
    return outputs_of(info, args, kwargs, result), ""
