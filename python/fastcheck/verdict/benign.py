"""Rules for single operators whose outputs may hold anything, as data; benign() adds to them."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import NamedTuple, Optional

from fastcheck.errors import ConfigError, check_text, plain

#: Ops that make finite values of -Inf, or of any infinity: what is infinite there was not carried
#: along.
_NAMES = ("_softmax", "exp", "exp2", "sigmoid", "tanh", "erf", "relu", "hardtanh", "softplus")
BOUNDED = frozenset(f"aten.{name}{tail}" for name in _NAMES for tail in ("", "_"))

#: Ops that put a number that they are given among those that they read, and compute nothing.
_FILLS = ("fill", "full", "full_like", "masked_fill", "new_full", "scalar_tensor", "where")
_LIMITS = ("clamp", "clamp_max", "clamp_min", "constant_pad_nd")
WRITERS = frozenset(f"aten.{name}{tail}" for name in _FILLS + _LIMITS for tail in ("", "_"))


#: Ops that make each result of one element of each operand.
ELEMENTWISE = frozenset(
    f"aten.{name}{tail}"
    for name in ("add", "sub", "mul", "div")
    for tail in (".Tensor", ".Scalar", "_.Tensor", "_.Scalar")
) | {"aten._to_copy"}


class BenignRule(NamedTuple):
    """Output ``output`` (None: any) of the ops that match ``pattern`` may be non-finite."""

    pattern: str
    output: Optional[int]
    reason: str


_RULES: list[BenignRule] = [
    BenignRule(
        "aten.*ctc_loss*",
        1,
        "the forward variables that CTC keeps for its backward are -Inf where no path leads",
    ),
    BenignRule(
        "aten._scaled_dot_product_*",
        1,
        "the log-sum-exp that attention keeps for its backward is -Inf where a row is masked",
    ),
]


def benign(pattern: str, output: Optional[int] = None, *, reason: str) -> None:
    """Declares non-finite outputs of these ops to be no events from now on.

    Args:
        pattern: as of fnmatch, on names such as ``aten.logsumexp``.
        output: which of their results; None: all.
        reason: shown in the summary beside them.

    Raises:
        ConfigError: an argument of another type, or an empty argument.
    """
    check_text("benign(pattern=)", pattern)
    check_text("benign(reason=)", reason)
    output = plain(output)
    if output is not None and (type(output) is not int or output < 0):
        expected = "the number of a result, or None"
        raise ConfigError("benign(output=) can't be used", expected=expected, got=repr(output))
    _RULES.append(BenignRule(pattern, output, reason))


def why_benign(op: str, output: int) -> Optional[str]:
    """The reason for which result ``output`` of ``op`` may be non-finite; None: it may not."""
    for rule in _RULES:
        if rule.output in (None, output) and fnmatchcase(op, rule.pattern):
            return rule.reason
    return None
