"""override(): computes chosen operators of a run on another device or in a wider dtype.

A mode of torch's dispatcher below autograd: it sees forward and backward, and the autograd graph
is unchanged. Operators and modules have the same names as in Dumper.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Callable, Optional, Union

import torch

from fastcheck.calls.modes import ApiCalls, OpMode
from fastcheck.calls.namer import CallNamer
from fastcheck.calls.selection import CallName, Names, Selection, make_selection
from fastcheck.calls.tracker import ModuleTracker
from fastcheck.errors import ConfigError, plain, warn
from fastcheck.record.site import SiteTable
from fastcheck.utils.torch.operators import op_info
from fastcheck.utils.torch.run_on_device import Elsewhere
from fastcheck.utils.torch.versions import eager_stance

Chooser = Callable[[CallName], bool]


def override(
    ops: Names = None,
    modules: Names = None,
    *,
    device: Union[str, torch.device, None] = None,
    dtype: Optional[torch.dtype] = None,
    random: bool = False,
) -> Override:
    """A context manager within which the chosen operators are computed on another device, in a
    wider dtype, or both. Their results are put back where, and in the dtype in which, they would
    have been; forward and backward go on as ever::

        with fastcheck.override(ops="aten.softmax", dtype=torch.float32):
            loss = model(batch).mean()
            loss.backward()

    Each chosen operator runs twice: as it is, for the places of its results and for its random
    numbers, and elsewhere, for their values. So the masks of dropout are the same. What can't run
    elsewhere is left as it is, and listed in ``left_out``: operators that draw random numbers,
    communicate or have no kernel there; views, and whatever is there already. Integers (indices,
    counts) are replaced by ``device=`` alone.

    Args:
        ops: names of operators as Dumper takes them ("aten.mm", "layers.3 · aten.mm #7",
            "Functional.softmax"); with the operators of their backward. None: all.
        modules: paths or patterns; operators that run within these. None: everywhere.
        device: such as ``"cpu"``. Copies to and from it make the host wait.
        dtype: a floating-point dtype. Tensors of narrower dtypes are computed in it (complex
            tensors in the complex dtype of its width); wider tensors stay as they are.
        random: with ``device=``, operators that draw random numbers are computed there too, with
            that device's generator: a run has other masks, and no longer depends on this device's
            generator, which advances as usual. Seed both.

    The object that ``with`` gives has ``ran`` and ``left_out``: how often each operator was
    computed elsewhere, and ``{name: reason}``. Compiled functions run as they are written
    meanwhile (from torch 2.6 on). To dump what comes out, enter the Dumper after it.

    Raises ConfigError for a name that cannot exist, at once; for a name that no call had, when the
    block ends. Warns (FastcheckWarning) when an operator that ``ops`` names was left as it is
    every time.
    """
    if device is None and dtype is None:
        raise ConfigError("override() changes nothing without device= or dtype=")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConfigError(f"dtype must be a floating-point dtype of torch, got {dtype!r}")
    try:
        place = None if device is None else torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(
            f'device must be a torch.device, such as "cpu", got {device!r}'
        ) from error
    random = plain(random)
    if not isinstance(random, bool) or (random and place is None):
        raise ConfigError(
            "random= is for another device's generator: True with device=, or False; got "
            f"random={random!r}, device={device!r}"
        )
    selection = make_selection("op", ops, modules, None, None)
    return Override(Elsewhere(place, dtype, draws=random), selection, is_named=ops is not None)


@dataclass(eq=False, repr=False)
class Override:
    """A section in which operators are computed elsewhere: override() returns it, and bisect()
    hands it to its ``run``. May be entered again, once it was left; counts go on.
    """

    elsewhere: Elsewhere
    selection: Optional[Selection] = None
    choose: Optional[Chooser] = None
    is_named: bool = False
    ran: Counter[str] = field(default_factory=Counter, init=False)
    left_out: dict[str, str] = field(default_factory=dict, init=False)
    _stack: Optional[contextlib.ExitStack] = field(default=None, init=False)

    def __enter__(self) -> Override:
        if self._stack is not None:
            raise ConfigError("this override is already entered; override() makes another")
        calls = _CallRouter(self)
        with contextlib.ExitStack() as stack:
            calls.tracker.start()
            stack.callback(calls.tracker.stop)
            stack.enter_context(eager_stance())
            if calls.apis is not None:
                stack.enter_context(calls.apis)
            stack.enter_context(OpMode(calls.run))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: Optional[type[BaseException]], *_: object) -> None:
        stack, self._stack = self._stack, None
        if stack is not None:
            stack.close()
        if kind is not None or self.selection is None:
            return
        if self.selection.unmet():
            raise ConfigError(self.selection.unmet_text())
        idle = {name: why for name, why in self.left_out.items() if not self.ran[name]}
        if self.is_named and idle and not self.ran:
            reasons = "; ".join(f"{name}: {why}" for name, why in idle.items())
            warn(f"override() left every operator as it is: {reasons}")

    def wants(self, name: CallName, was_within: Optional[bool]) -> bool:
        """True if the call is computed elsewhere."""
        if self.selection is not None:
            return self.selection.wants(name, was_within)
        return self.choose is None or self.choose(name)

    def run_elsewhere(self, name: str, func: Any, args: Any, kwargs: Any) -> Any:
        """Computes a call elsewhere, and counts it or why it could not be."""
        result, reason = self.elsewhere.run(func, args, kwargs)
        if reason:
            self.left_out[name] = reason
        else:
            self.ran[name] += 1
        return result

    def add_modules(self, paths: Iterable[str]) -> None:
        """Adds paths of modules that exist: lists may name these."""
        if self.selection is not None:
            self.selection.add_modules(paths)

    @property
    def uses_apis(self) -> bool:
        """True if the given names need calls of torch's Python API to be followed."""
        return self.selection is not None and self.selection.uses_apis


class _TrackerSession:
    """The TrackerOwner of one block."""

    is_on = True
    step = 0

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.sites = SiteTable()

    def guarded(self, what: str, function: Callable[..., Any], *args: Any) -> Any:
        """Calls the function; an error in it is a warning, and only names are lost."""
        try:
            return function(*args)
        except Exception as error:
            warn(f"override() could not read {what}: {type(error).__name__}: {error}")
            return None


class _CallRouter:
    """Runs each operator of a block, the chosen operators elsewhere."""

    def __init__(self, owner: Override) -> None:
        self._owner = owner
        self._session = _TrackerSession()
        self.tracker = ModuleTracker(self._session, (), (), owner.add_modules)
        self.apis = ApiCalls() if owner.uses_apis else None
        self._namer = CallNamer(self.tracker, self.apis)

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs an operator, elsewhere if it is chosen."""
        op = op_info(func).name
        with self._session.lock:
            call = self._namer.name(op)
            wants = self._owner.wants(call.name, None)
            if call.name.direction == "forward":
                self._namer.register(call, True)
        if not wants:
            return func(*args, **kwargs)
        return self._owner.run_elsewhere(op, func, args, kwargs)
