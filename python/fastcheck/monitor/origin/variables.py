"""The program's variables beside a graph: what a loss has read without one, what a weight was
written from, what an operator's result is used in.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any, Callable, Optional

import numpy as np
import torch

from fastcheck.record.format import NONFINITE_COUNTS, is_nonfinite
from fastcheck.report.stop_report import MadeBy
from fastcheck.statistics.functions import stats
from fastcheck.utils.torch.own_operators import no_grad, unobserved
from fastcheck.utils.torch.readable import first_bad

from .graph_nodes import order_of
from .local_variables import (
    Variable,
    caller_with,
    find_variable,
    is_same,
    record_of,
    running_lines,
    running_place,
)
from .written_lines import lines_behind, lines_of_data

#: The reasons why a tensor has no graph.
NO_GRAPH = "data, or computed under no_grad() or from detached tensors."


def from_outside(how: str, name: str, record: np.void, variable: Optional[Variable]) -> MadeBy:
    """``how``, and what is known of this operand; ``variable``: that holds it."""
    how += "" if is_loud(record) else " It holds -Inf alone, as the log of 0 is."
    cause, inputs = None, [(name, record)]
    if variable is not None and variable.has_own_line:
        cause = variable.first_cause()
    if variable is not None and cause is not None:
        read = f"{cause.name} ({cause.shown})" if cause.key else cause.name
        how += f" {variable.shown} was assigned from {read}, which is not finite either."
        variable, record = cause, stats(cause.value.detach()).record
        inputs.append((cause.shown, record))
    loud = is_loud(record)
    written = lines_behind(*variable.origin(), loud) if variable else lines_of_data(loud)
    return MadeBy("", how, inputs=tuple(inputs), variable=shown_in(variable), written=written)


def from_variable(name: str, source: Variable, graph: str = "the graph of the loss") -> MadeBy:
    # A sum keeps nothing of what it adds.
    return MadeBy(
        "",
        f"{name}, the first operator in {graph} whose result is known not to be finite, may have "
        f"it from {source.shown}, which has no graph: {NO_GRAPH}{source.first_bad()}",
        inputs=((source.shown, stats(source.value.detach()).record),),
        variable=str(source.first_cause() or source),
    )


def shown_in(variable: Optional[Variable]) -> str:
    return "" if variable is None else str(variable)


def is_loud(record: np.void) -> bool:
    return bool(record["nan_count"] or record["posinf_count"])


def read_for(node: Any) -> Optional[Variable]:
    """A variable without a graph that is not finite, and that the line has read which assigned the
    result of this node.
    """
    own = find_variable(lambda tensor: tensor.grad_fn is node)
    source = None if own is None else own.first_cause()
    return None if source is None or source.value.requires_grad else source


def search_variables(record: np.void, how: str, memory: Collection[int] = ()) -> Optional[MadeBy]:
    """The local variable that may be the tensor of this record, or what it was written from, as
    ``how`` says. ``memory``: the addresses of what it can't be.
    """
    with unobserved(), no_grad():
        source = beside(record, memory)
        cause = None if source is None else source.first_cause()
    # A weight was not written from what was computed from it, as its gradient was.
    if source is None or (cause is not None and _address(cause.value) in memory):
        return None
    return MadeBy(
        "",
        f"{source.shown} has as many elements, of which no more are NaN or Inf: {how}."
        f"{source.first_bad()}",
        inputs=((source.shown, stats(source.value.detach()).record),),
        variable=str(cause or source),
    )


def search_argument(tensor: torch.Tensor, label: str) -> Optional[MadeBy]:
    """The place of the first NaN or Inf in an argument that a model was given, and the local
    variable that holds it.
    """
    with unobserved(), no_grad():
        record = record_of(tensor)
        if record is None or not is_nonfinite(record):
            return None
        variable = find_variable(lambda value: is_same(value, tensor))
        caller = caller_with(tensor) if variable is None else None
        made = from_outside(first_bad(label, tensor)[1:], label, record, variable)
    if caller is not None:
        how = f"{made.how} The call is at {running_place(caller)}"
        written = lines_behind(caller, [running_lines(caller)], is_loud(record))
        made = replace(made, how=how.lstrip(), written=written)
    # The stop shows its record already.
    return replace(made, inputs=()) if made.how or made.variable else None


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def beside(result: np.void, memory: Collection[int] = ()) -> Optional[Variable]:
    """A variable without a graph, in other memory than this, of as many elements as the result and
    no more that are bad.
    """

    def is_it(tensor: torch.Tensor) -> bool:
        record = None if tensor.requires_grad else record_of(tensor)
        if record is None or record["numel"] != result["numel"] or not is_nonfinite(record):
            return False
        if _address(tensor) in memory:
            return False
        counts = (sum(int(r[name]) for name in NONFINITE_COUNTS) for r in (record, result))
        return next(counts) <= next(counts)

    return find_variable(is_it)


def later_variable(is_of: Callable[[Any], bool], is_later: Callable[[torch.Tensor], bool]) -> str:
    """The variable that holds the result of the node for which ``is_of`` holds, or the first result
    that this has led to.
    """
    found = own_or_later(is_of, is_later)
    if found is None or is_of(found.value.grad_fn):
        return "" if found is None else str(found)
    return used_in(str(found)) if found.last else ""


def own_or_later(
    is_of: Callable[[Any], bool], is_later: Callable[[torch.Tensor], bool]
) -> Optional[Variable]:
    own = find_variable(lambda tensor: tensor.grad_fn is not None and is_of(tensor.grad_fn))
    return own or find_variable(
        lambda tensor: tensor.grad_fn is not None and is_later(tensor),
        lambda tensor: order_of(tensor.grad_fn),
    )


def used_in(variable: str) -> str:
    return variable and f"the result is used in {variable.removeprefix('the result is used in ')}"
