"""Operators whose result nobody may have kept: whether what their nodes hold of what they read
makes it non-finite.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Callable, Optional

import numpy as np
import torch

from .graph_nodes import PREFIX, name_of, operator_of
from .local_variables import record_of

#: A function of what a node has saved, by name: the elements of the result that its operator made
#: not finite, of finite numbers.
_Maker = Callable[[Mapping[str, Any]], Any]

#: Operators of one operand.
AGAIN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    name: getattr(torch, name.lower())
    for name in (
        *("Abs", "Acos", "Acosh", "Asin", "Atan", "Atanh", "Cos", "Cosh", "Digamma", "Erf"),
        *("Erfinv", "Lgamma", "Log", "Log2", "Log10", "Log1P", "Logit", "Sin", "Sinh"),
    )
}
#: Operators of two operands.
PAIRS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "Div": torch.div,
    "Mul": torch.mul,
    "Xlogy": torch.xlogy,
}


def _alone(function: Callable[[torch.Tensor], Any], values: Mapping[str, Any]) -> Any:
    read = values["self"]
    return ~function(read).isfinite() & read.isfinite()


def _paired(function: Callable[..., torch.Tensor], values: Mapping[str, Any]) -> Any:
    read, other = values["self"], values["other"]
    # 0 * Inf is NaN.
    result, is_good = function(read, other), read.isfinite() & other.isfinite()
    return (~result.isfinite() & is_good) | (result.isnan() & ~read.isnan() & ~other.isnan())


def _variance(values: Mapping[str, Any]) -> Any:
    dims, read = values["dim"], values["self"]
    count = read.numel()
    if dims:
        count = 1
        for dim in dims:
            # Negative numbers are kept as unsigned numbers.
            count *= read.shape[dim - 2**64 if dim >= 2**63 else dim]
    correction = values["correction"]
    return count <= (1 if correction is None else correction)


def made_of(read: torch.Tensor, node: Any) -> Optional[np.void]:
    """The record of what an operator of one operand has made of it, which nobody may have kept; of
    a power, which of the causes it has (an overflow, 1/0, the root of a negative number) shows in
    the result alone. None: it is no such operator.
    """
    kind = operator_of(name_of(node))
    if kind == "Pow":
        return record_of(read.detach().pow(node._saved_exponent))
    return record_of(AGAIN[kind](read.detach())) if kind in AGAIN else None


def _likelihood(values: Mapping[str, Any]) -> Any:
    is_empty = (values["total_weight"] == 0) & (values["reduction"] == 1)
    logs = values.get("self")
    if logs is None:
        return is_empty
    target, dim = values["target"], min(logs.dim() - 1, 1)
    chosen = logs.gather(dim, target.clamp_min(0).unsqueeze(dim)).squeeze(dim)
    return is_empty | ((target != values["ignore_index"]) & ~chosen.isfinite())


_MAKERS: dict[str, _Maker] = {
    **{name: functools.partial(_alone, function) for name, function in AGAIN.items()},
    **{name: functools.partial(_paired, function) for name, function in PAIRS.items()},
    "Div": lambda values: _paired(torch.div, values) if "self" in values else values["other"] == 0,
    "Mean": lambda values: values["self_sym_numel"] == 0,
    **dict.fromkeys(
        (
            "BinaryCrossEntropy",
            "BinaryCrossEntropyWithLogits",
            "HuberLoss",
            "MseLoss",
            "SmoothL1Loss",
        ),
        lambda values: values["reduction"] == 1 and not values["self"].numel(),
    ),
    **dict.fromkeys(("NllLoss", "NllLoss2D"), _likelihood),
    "Pow": lambda values: _alone(lambda read: read.pow(values["exponent"]), values),
    # An infinity comes of a number near 0 alone.
    **dict.fromkeys(("Reciprocal", "Rsqrt"), lambda values: values["result"].isinf()),
    "Std": lambda values: values["result"].isnan() & values["self"].isfinite().all(),
    **dict.fromkeys(("Var", "VarMean"), _variance),
}


def made_bad(name: str, values: Mapping[str, Any]) -> Optional[torch.Tensor]:
    """The elements that the operator of a node made not finite, of finite numbers; None: they are
    not known.
    """
    maker = _MAKERS.get(operator_of(name))
    try:
        made = None if maker is None else maker(values)
    except (KeyError, AttributeError, RuntimeError):  # an operand that is not kept
        return None
    return None if made is None else torch.as_tensor(made)


def makes_nonfinite(node: Any, saved: Mapping[str, torch.Tensor]) -> bool:
    names = (name for name in dir(node) if name.startswith(PREFIX))
    numbers = {n[len(PREFIX) :]: getattr(node, n) for n in names if not hasattr(node, f"_raw{n}")}
    made = made_bad(name_of(node), {**numbers, **saved})
    return made is not None and bool(made.any())
