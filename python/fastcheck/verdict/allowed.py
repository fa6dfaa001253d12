"""allow_nonfinite(): declares NaNs and infinities at chosen sites intended (missing values)."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Optional, Protocol

from fastcheck.errors import check_text
from fastcheck.record.site import Site
from fastcheck.utils.names.patterns import matches_module

# Tensors that an update applies or keeps are never non-finite on purpose.
_NEVER = frozenset(("param", "param_grad", "optimizer_state", "loss", "grad_norm"))


class Allowance:
    """An allowance of allow_nonfinite(): in effect until remove(), or for a ``with`` block."""

    def __init__(self, module: str, tensor: str, reason: str) -> None:
        self.module = module
        self.tensor = tensor
        self.reason = reason

    def covers(self, site: Site) -> bool:
        """True if tensors of this site may be non-finite."""
        if site.role in _NEVER or not fnmatchcase(site.label, self.tensor.replace("[", "[[]")):
            return False
        if not self.module:
            return not site.module
        return matches_module(self.module, site.module)

    def remove(self) -> None:
        """Withdraws the allowance. A second call does nothing."""
        if self in _allowances:
            _allowances.remove(self)
            _tell()

    def __enter__(self) -> Allowance:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


class Told(Protocol):
    """A session, which is told of allowances."""

    def allow(self, allowances: list[Allowance]) -> None:
        """Judges by these allowances from now on, by the earlier allowances what was observed so
        far.
        """


_allowances: list[Allowance] = []
_sessions: weakref.WeakSet[Told] = weakref.WeakSet()


def allowances() -> list[Allowance]:
    """The allowances that hold now."""
    return list(_allowances)


def tell_allowances(session: Told) -> None:
    """Calls the session's ``allow``, from now on, when an allowance comes or goes."""
    _sessions.add(session)


def _tell() -> None:
    for session in list(_sessions):
        session.allow(allowances())


def allow_nonfinite(module: str = "", tensor: str = "*", *, reason: str) -> Allowance:
    """Declares NaNs and infinities in these tensors to be no events from now on: missing labels, a
    batch whose gaps the model fills in, the inside of a module that imputes, a metric of an empty
    class.

    Where they leave what is covered, or reach the loss or the gradient of a parameter, they are an
    event as before. At op level the tensors are those that operators make; benign() is for an
    operator wherever it runs. In a ``with`` block it covers what is computed within the block, on a
    device too; nothing waits for it.

    Args:
        module: a pattern (as of fnmatch) on dotted module paths, which covers submodules as
            ``include=`` does; "" is the model itself, without its submodules, and at op level the
            code outside of all modules.
        tensor: a pattern on labels as reports have them: ``"input[1]"``, ``"labels"``,
            ``"output*"``.
        reason: shown beside them in the summary.

    Returns:
        An Allowance, whose ``remove()`` takes it back; or use it in a ``with`` statement.

    Raises:
        ConfigError: an argument is not a string, or ``tensor`` or ``reason`` is empty.
    """
    check_text("allow_nonfinite(module=)", module, "a string")
    check_text("allow_nonfinite(tensor=)", tensor)
    check_text("allow_nonfinite(reason=)", reason)
    allowance = Allowance(module, tensor, reason)
    _allowances.append(allowance)
    _tell()
    return allowance


def why_allowed(site: Site, among: Iterable[Allowance]) -> Optional[str]:
    """The reason why tensors of this site may be non-finite; None: they may not."""
    allowance = next((candidate for candidate in among if candidate.covers(site)), None)
    return None if allowance is None else f"allowed by allow_nonfinite(): {allowance.reason}"
