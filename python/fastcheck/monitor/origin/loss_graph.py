"""Searches the graph of a loss for the first operator whose result is not finite.

The graph is whole from the call of backward() until backward has passed: nodes hold some of the
tensors that their operators read and made. These are read here, once the stop is decided.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any, Callable, Optional

import numpy as np
import torch

from fastcheck.record.event import KNOWN_ALONE, TARGET_OF_KL
from fastcheck.record.format import DTYPES, Depth, is_nonfinite
from fastcheck.report.stop_report import MadeBy
from fastcheck.statistics.functions import stats
from fastcheck.utils.torch.own_operators import no_grad, unobserved
from fastcheck.utils.torch.readable import first_bad

from .graph_nodes import (
    BESIDE_RESULT,
    CARRIERS,
    MOST_NODES,
    OF_SCRIPT,
    is_count,
    line_of,
    name_of,
    named_operand,
    operator_of,
    order_of,
    saved_tensors,
)
from .local_variables import (
    find_variable,
    held_by,
    holds_nonfinite,
    is_same,
    local_variables,
    record_of,
)
from .made_again import made_of, makes_nonfinite
from .variables import (
    NO_GRAPH,
    beside,
    from_outside,
    from_variable,
    is_loud,
    later_variable,
    own_or_later,
    read_for,
    used_in,
)
from .written_lines import lines_behind, lines_of_data

#: An edge: a node, and the number of a result of it.
_Edge = tuple[Any, int]
# A number up to this does not overflow float32 by itself.
_FAR_FROM_OVERFLOW = 1e30
# Operators that add, and keep no operand; of one operand, and views; that choose.
_SUMS = frozenset(("Add", "Mul", "Neg", "Rsub", "Sub"))
_UNARY = frozenset(("Clone", "Mean", "Neg", "Select", "Squeeze", "Sum", "Unsqueeze", "View"))
_CHOOSING = frozenset(("Add", "Cat", "Rsub", "Stack", "Sub", "Where"))
# Operators of one operand that keep their result, and have a NaN of a NaN alone.
_KEEPERS = frozenset(("Exp", "Exp2", "Expm1", "Sigmoid", "Tanh"))


def search_graph(root: torch.Tensor, name: str = "the loss") -> Optional[MadeBy]:
    """The first operator in the graph of ``root``, which is not finite, whose result is known not
    to be finite. ``name``: of ``root``. None: nothing in it is known to be, or nothing is held any
    more. Makes the host wait for a device.
    """
    with unobserved(), no_grad():
        # A -Inf alone is often on purpose, as a mask or a log-probability of 0.
        for is_bad in (is_loud, is_nonfinite):
            made = _GraphSearch(root, is_bad, name).found()
            if made is not None:
                return made
    return None


def search_held(
    frames: Sequence[FrameType], with_data: bool
) -> Optional[tuple[str, torch.Tensor, Optional[MadeBy]]]:
    """The tensor that is NaN or +Inf and was made first, of those that these frames hold, with its
    name and the operator that made it. ``with_data``: one without a graph, where none has one.
    """
    with unobserved(), no_grad():
        held = [one for frame in frames for one in held_by(frame)]
        bad = [one for one in held if (r := record_of(one.value)) is not None and is_loud(r)]
        with_graph = [one for one in bad if one.value.grad_fn is not None]
        if with_graph:
            first = min(with_graph, key=lambda one: order_of(one.value.grad_fn))
            return first.shown, first.value, search_graph(first.value, first.shown)
        is_bad = {id(one.value) for one in bad if with_data}
        variable = find_variable(lambda tensor: id(tensor) in is_bad)
        if variable is None:
            return None
        first = variable.first_cause() or variable
        how = f"{first.shown} has no graph: {NO_GRAPH}{first.first_bad()}"
        written = lines_behind(*first.origin(), is_loud=True)
        return first.shown, first.value, MadeBy("", how, variable=str(first), written=written)


class _GraphSearch:
    """The part of a graph that can have led to the root: edges that are known to be finite end
    it.
    """

    def __init__(self, root: torch.Tensor, is_bad: Callable[[np.void], bool], name: str) -> None:
        self._is_bad = is_bad
        self._graph = f"the graph of {name}"
        self._known: dict[_Edge, np.void] = {}
        self._saved: dict[Any, dict[str, torch.Tensor]] = {}
        # Results of which +Inf or NaN was made, as of a -Inf that is squared.
        self._harmful: set[_Edge] = set()
        self._is_whole = True
        # Results that their nodes do not keep.
        for variable in local_variables():
            if variable.value.grad_fn is not None:
                self._note(variable.value)
        self._spread(root)

    def _spread(self, root: torch.Tensor) -> None:
        self._note(root)
        # Consumers before what they consume: by then it is known which of their inputs are finite.
        waiting = [(-order_of(root.grad_fn), 0, root.grad_fn)] if root.grad_fn is not None else []
        met = {root.grad_fn}
        while waiting:
            node = heapq.heappop(waiting)[2]
            if len(self._saved) >= MOST_NODES:
                self._is_whole = False
                return
            saved = self._saved[node] = saved_tensors(node)
            for tensor in saved.values():
                self._note(tensor)
            if "self" in saved and (node, 0) not in self._known:
                result = made_of(saved["self"], node)
                if result is not None and not is_nonfinite(result):
                    self._known[node, 0] = result
                elif result is not None and is_loud(result):
                    self._harmful.add(node.next_functions[0])
            for edge in node.next_functions:
                child = edge[0]
                if child is None or child in met or self._state(edge) is False:
                    continue
                met.add(child)
                if not hasattr(child, "variable"):
                    heapq.heappush(waiting, (-order_of(child), len(met), child))

    def _note(self, tensor: torch.Tensor) -> Optional[np.void]:
        edge = tensor.grad_fn, tensor.output_nr
        record = self._known.get(edge)
        if record is None:
            record = record_of(tensor)
            if record is not None and edge[0] is not None:
                self._known[edge] = record
        return record

    def _state(self, edge: _Edge) -> Optional[bool]:
        """True if this result is bad; None: it is not known, or its -Inf may be on purpose."""
        record = self._known.get(edge)
        if record is None or not is_nonfinite(record):
            return None if record is None else False
        return self._is_bad(record) or None

    def found(self) -> Optional[MadeBy]:
        if not self._is_whole:
            return None
        results: dict[Any, list[np.void]] = {}
        for edge, record in self._known.items():
            if self._is_bad(record) or (edge in self._harmful and is_nonfinite(record)):
                node = edge[0]
                results.setdefault(node, []).append(record)
        for node in sorted(self._saved, key=order_of):
            saved = self._saved[node]
            inputs = {
                name: tensor
                for name, tensor in saved.items()
                if tensor.grad_fn is not node and not BESIDE_RESULT.match(name)
            }
            records = [(n, r) for n, t in inputs.items() if (r := self._note(t)) is not None]
            counts = inputs.get("other")
            is_scaled = operator_of(name_of(node)) in ("Div", "Mul")
            if is_scaled and counts is not None and is_count(counts):
                records.append(("other", stats(counts).record))
            for name, record in records:
                # A tensor with a graph was met before, if it is bad.
                if inputs[name].grad_fn is None and self._is_bad(record):
                    return self._from_outside(node, name, inputs[name], record)
            result = next(iter(results.get(node, ())), None)
            is_power = operator_of(name_of(node)) == "Pow" and (node, 0) not in self._known
            if is_power and "self" in saved and not any(is_nonfinite(r) for _, r in records):
                result = made_of(saved["self"], node)
            if result is not None or makes_nonfinite(node, saved):
                bad = [(name, record) for name, record in records if is_nonfinite(record)]
                if bad and all(inputs[name].grad_fn is None for name, _ in bad):
                    # -Inf alone, which does harm here.
                    return self._from_outside(node, bad[0][0], inputs[bad[0][0]], bad[0][1])
                before = None if result is None else self._before(node, result)
                maker, _, own = before or (node, records, result)
                if result is not None and (mask := self._from_mask(maker, result)):
                    return mask
                made = self._made(*(before or self._carried_from(node, records, result)))
                is_one = result is not None and result["numel"] == 1
                if not (is_one and made.operator and self._is_carried(maker, self._saved[maker])):
                    return made
                carried = self._made(*self._carried_from(maker.next_functions[0][0], [], own))
                variable = carried.variable or used_in(made.variable)
                return replace(carried, variable=variable)
        return None

    def _is_carried(self, node: Any, saved: Mapping[str, torch.Tensor]) -> bool:
        """True for a quotient by a number from 1 on, and a product with one up to 1: the other
        operand was not finite either.
        """
        number, kind = saved.get("other"), operator_of(name_of(node))
        if number is None or number.is_complex() or kind not in ("Div", "Mul"):
            return False
        child: Any = node.next_functions[0][0]
        if child not in self._saved or len(child._input_metadata) != 1 or number.numel() != 1:
            return False
        is_same = child._input_metadata[0].dtype == node._input_metadata[0].dtype
        is_less = (number > 0) & (number <= 1) if kind == "Mul" else number.abs() >= 1
        return is_same and bool(is_less & number.isfinite())

    def _carried_from(
        self, node: Any, inputs: list[tuple[str, np.void]], result: Optional[np.void]
    ) -> tuple[Any, list[tuple[str, np.void]], Optional[np.void]]:
        """The autograd.Function whose NaN this node has added up, or chosen, which alone makes
        none; the node itself with what it has read, where it has done neither.
        """
        child = node
        while operator_of(name_of(child)) in _UNARY and len(child.next_functions) == 1:
            child = child.next_functions[0][0]
            if child not in self._saved or 0 in child._input_metadata[0].shape:
                return node, inputs, result
        is_custom = isinstance(child, torch.autograd.function.BackwardCFunction)
        if not is_custom or result is None or not result["nan_count"]:
            return node, inputs, result
        return child, [], result if child is node else None

    def _before(
        self, node: Any, result: np.void
    ) -> Optional[tuple[Any, list[tuple[str, np.void]], Optional[np.void]]]:
        """The node whose result was converted to a wider format, which makes nothing infinite; or
        whose NaN this one has kept, which makes none of other numbers.
        """
        child: Any = node.next_functions[0][0] if node.next_functions else None
        if child not in self._saved or len(child._input_metadata) != 1:
            return None
        # An exponential of a large complex number may be NaN.
        is_real = not node._input_metadata[0].dtype.is_complex
        if is_real and operator_of(name_of(node)) in _KEEPERS and result["nan_count"]:
            return child, [], result if result["nan_count"] == result["numel"] else None
        if operator_of(name_of(node)) != "ToCopy":
            return None
        narrow, wide = (fn._input_metadata[0].dtype for fn in (child, node))
        if not wide.is_floating_point or torch.finfo(narrow).max > torch.finfo(wide).max:
            return None
        before = result.copy()
        before["dtype"] = next(
            n for n, dtype in enumerate(DTYPES) if f"torch.{dtype.name}" == str(narrow)
        )
        return child, [], before

    def _from_mask(self, node: Any, result: np.void) -> Optional[MadeBy]:
        """The -Inf without a graph that sums and products alone have led to this sum, which is -Inf
        in as large a share, or NaN: Inf - Inf.
        """
        waiting, met = [node], {node}
        while waiting:
            user = waiting.pop()
            if operator_of(name_of(user)) not in _SUMS or user not in self._saved:
                continue
            for name, tensor in self._saved[user].items():
                record = None if tensor.grad_fn is not None else self._note(tensor)
                if record is None or user is node or not record["neginf_count"]:
                    continue
                share = record["neginf_count"] * result["numel"]
                bad = result["nan_count"] or result["neginf_count"]
                if share == bad * record["numel"]:
                    return self._from_outside(user, name, tensor, record)
            children = {child for child, _ in user.next_functions if child is not None}
            waiting += children - met
            met |= children
        return None

    def _from_outside(
        self, node: Any, name: str, tensor: torch.Tensor, record: np.void
    ) -> Optional[MadeBy]:
        if tensor.requires_grad:
            return None  # a weight: it has records of its own
        how = f"{name_of(node)} in {self._graph} read it in a tensor that has no graph ({name}): "
        how += NO_GRAPH
        variable = find_variable(lambda value: is_same(value, tensor))
        if variable is not None:
            return from_outside(how + variable.first_bad(), name, record, variable)
        how += first_bad(name, tensor)
        users = self._users(node)
        made = own_or_later(lambda of: of is node, lambda later: later.grad_fn in users)
        source = None if made is None else made.first_cause()
        if made is None or source is None or source.value.grad_fn is not None:
            return from_outside(how, name, record, None)
        how += f" {made.shown} was assigned from {source.shown}, which is not finite either."
        return from_outside(how + source.first_bad(), name, record, source)

    def _made(
        self, node: Any, inputs: list[tuple[str, np.void]], result: Optional[np.void]
    ) -> MadeBy:
        edges = node.next_functions
        states = [self._state(edge) for edge in edges if edge[0] is not None]
        saved = self._saved[node].items()
        kept = [t for name, t in saved if t.grad_fn is None and not BESIDE_RESULT.match(name)]
        # An operand without an edge has no graph, is a number or is none at all.
        is_known = len(kept) >= len(edges) - len(states)
        is_sure = is_known and all(state is False for state in states)
        is_maker = is_sure or makes_nonfinite(node, self._saved[node])
        source = None
        # A number that stands alone is like many others.
        if result is not None and not is_maker and (not is_known or result["numel"] > 1):
            source = beside(result)
        if source is None and not is_maker and operator_of(name_of(node)) in CARRIERS:
            source = read_for(node)
        if source is not None:
            return from_variable(name_of(node), source, self._graph)
        other = None if is_sure or result is None else self._added_to(node)
        if other is not None:
            return other
        if is_sure:
            known = "whose result is not finite, while what it read was"
        else:
            known = KNOWN_ALONE
            inputs = [*inputs, *self._masked(node)]
        if not inputs:  # a mean or a sum keeps nothing of what it has read
            read = [(name, self._known.get(edge)) for name, edge in zip(("self", "other"), edges)]
            known_of = [(name, record) for name, record in read if record is not None]
            is_all = len(known_of) == len(edges)
            inputs = [(name, r) for name, r in known_of if is_all or is_nonfinite(r)]
        if not inputs and result is not None and getattr(node, "_saved_self_sym_numel", None) == 0:
            empty = record_of(torch.empty(0, dtype=getattr(torch, DTYPES[result["dtype"]].name)))
            inputs = [] if empty is None else [("self", empty)]
        if name_of(node) == OF_SCRIPT:
            known += ", of a function that torch.jit has compiled"
        later = self._users(node)
        variable = later_variable(
            lambda fn: fn is node,
            lambda tensor: tensor.grad_fn in later and holds_nonfinite(tensor),
        )
        return MadeBy(
            name_of(node),
            f"{name_of(node)}: the first operator in {self._graph} {known}.",
            line_of(node),
            tuple(
                (named_operand(name, self._saved[node].get(name)), record)
                for name, record in inputs
            ),
            result,
            variable,
        )

    def _added_to(self, node: Any) -> Optional[MadeBy]:
        """The operand without a graph of a sum, where all others are finite and this node has read
        nothing else.
        """
        first = node
        while True:
            children = [child for child, _ in node.next_functions if child is not None]
            is_unary = len(node.next_functions) == 1 and operator_of(name_of(node)) in _UNARY
            # A product whose result is known is explained by its zeros.
            is_within = node is not first and len(children) == 1 and self._is_factor(node)
            if not (is_unary or is_within):
                break
            node = children[0]
        edges = [edge for edge in node.next_functions if edge[0] is not None]
        product, target = self._factor(edges)
        records = [self._known[edge] for edge in edges if self._state(edge) is False]
        records += product
        has_all = 0 < len(records) == len(edges) < len(node.next_functions)
        # A sum of finite numbers may overflow, and a mean of nothing is NaN.
        is_small = all(
            r["numel"]
            and r["depth"] >= Depth.STATS
            and max(-r["min"], r["max"]) < _FAR_FROM_OVERFLOW
            for r in records
        )
        is_wide = node._input_metadata[0].dtype in (torch.float32, torch.float64, torch.bfloat16)
        if not (has_all and is_small and is_wide) or operator_of(name_of(node)) not in _CHOOSING:
            return None
        how = (
            f"{name_of(node)} in {self._graph}: its operand with a graph is finite, so that the "
            "infinity or NaN comes of the other, which has none: data, a number, or computed under "
            "no_grad() or from detached tensors."
        )
        if target is not None and target["min"] < 0 and operator_of(name_of(node)) == "Sub":
            how += (
                " kl_div(input, target) is such a difference, xlogy(target, target) - target * "
                "input, and its target has numbers below 0, as log-probabilities have: the log of "
                "these is NaN."
            )
            return MadeBy("", how, inputs=((TARGET_OF_KL, target),))
        return MadeBy(
            "",
            how,
            inputs=tuple(("its operand with a graph", record) for record in records[:1]),
            written=lines_of_data(is_loud=True),
        )

    def _factor(self, edges: Sequence[_Edge]) -> tuple[list[np.void], Optional[np.void]]:
        """The operand with a graph of a product by a tensor without one, and that tensor, where it
        is the only one of these and both are known to be finite.
        """
        product = edges[0][0] if len(edges) == 1 and edges[0] not in self._known else None
        if product is None or not self._is_factor(product):
            return [], None
        operands = [edge for edge in product.next_functions if edge[0] is not None]
        if len(operands) != 1 or self._state(operands[0]) is not False:
            return [], None
        (tensor,) = self._saved[product].values()
        return [self._known[operands[0]]], self._note(tensor)

    def _is_factor(self, node: Any) -> bool:
        """True for a product by a tensor without a graph that is finite."""
        records = [self._note(tensor) for tensor in self._saved.get(node, {}).values()]
        is_product = operator_of(name_of(node)) == "Mul" and len(records) == 1
        return is_product and records[0] is not None and not is_nonfinite(records[0])

    def _masked(self, node: Any) -> list[tuple[str, np.void]]:
        """The result of a log_softmax, of those that were made before this node, that holds -Inf
        alone.
        """
        for (made, _), record in self._known.items():
            is_before = made in self._saved and order_of(made) < order_of(node)
            if is_before and operator_of(name_of(made)) == "LogSoftmax" and is_nonfinite(record):
                return [("log_softmax", record)]
        return []

    def _users(self, node: Any) -> set[Any]:
        """The nodes that were computed from the result of this node."""
        users = {node}
        for later in sorted(self._saved, key=order_of):
            if any(child in users for child, _ in later.next_functions):
                users.add(later)
        return users
