"""Searches the graph of a loss for the first operator whose result is not finite, and what is kept
of it for the first whose derivative is not.

The graph is whole from the call of backward() until backward has passed: nodes hold some of the
tensors that their operators read and made. These are read here, once the stop is decided. A tensor
that was saved through hooks (activation checkpointing, ``save_on_cpu``) is left alone: to unpack it
may run a program's code.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any, Callable, Optional

import numpy as np
import torch

from fastcheck.monitor.session.derivatives import DECOMPOSITIONS, SavedByNode
from fastcheck.record.event import KNOWN_ALONE, TARGET_OF_KL
from fastcheck.record.format import DTYPES, NONFINITE_COUNTS, Depth, is_nonfinite
from fastcheck.report.stop_report import MadeBy
from fastcheck.statistics.functions import stats
from fastcheck.utils.torch.held_frames import HeldFrame, HeldTensor
from fastcheck.utils.torch.own_operators import no_grad, unobserved
from fastcheck.utils.torch.readable import can_read, first_bad

from .assignments import each
from .local_variables import (
    Variable,
    caller_with,
    find_variable,
    held_by,
    holds_nonfinite,
    is_at,
    is_same,
    local_variables,
    record_of,
    running_lines,
    running_place,
)
from .written_lines import lines_behind, lines_of_data

# A non-finite number that is found in a part of a larger graph may not be the first.
_MOST_NODES = 20_000
_PREFIX = "_saved_"
_FAR_FROM_OVERFLOW = 1e30
#: Names of what operators have made beside their result, as their nodes keep it.
_MADE = re.compile(r"result|out|total_weight|log_?sum_?exp|save|reserve|philox|rng|log_alpha")

#: An edge: a node, and the number of a result of it.
_Edge = tuple[Any, int]
#: A function of what a node has saved, by name: the elements of the result that its operator made
#: not finite, of finite numbers.
_Maker = Callable[[Mapping[str, Any]], Any]


def search_graph(root: torch.Tensor, name: str = "the loss") -> Optional[MadeBy]:
    """The first operator in the graph of ``root``, which is not finite, whose result is known not
    to be finite. ``name``: of ``root``. None: nothing in it is known to be, or nothing is held any
    more. Makes the host wait for a device.
    """
    with unobserved(), no_grad():
        # A -Inf alone is often on purpose, as a mask or a log-probability of 0.
        for is_bad in (_is_loud, is_nonfinite):
            made = _GraphSearch(root, is_bad, name).found()
            if made is not None:
                return made
    return None


def search_derivatives(graphs: Sequence[Sequence[SavedByNode]]) -> Optional[MadeBy]:
    """The first operator, in the order of backward, whose derivative is not finite at what it has
    read. Makes the host wait for a device.
    """
    known = [node for graph in graphs for node in graph]
    # A decomposition does not tell whether its vectors were used.
    known.sort(key=lambda node: node.name in DECOMPOSITIONS)
    with unobserved(), no_grad():
        for saved in known:
            factors = saved.factors()
            bad = max((int((~f.isfinite()).sum()) for f in factors), default=0)
            if bad:
                return _source(saved, known) or _steep(saved, bad, max(f.numel() for f in factors))
    return None


def search_operators(
    graphs: Sequence[Sequence[SavedByNode]],
    frames: Sequence[HeldFrame] = (),
    is_sure: bool = False,
) -> Optional[MadeBy]:
    """The first operator, in the order of forward, whose result is known not to be finite, or the
    operand without a graph that is not. None, too, where an operator has read such numbers before:
    what made them is not kept. ``frames``: of the program, with its variables. ``is_sure``: only
    one that has made them of finite numbers, and is the first that met any. Makes the host wait
    for a device.
    """
    nodes = {(node.order, node.name): node for graph in graphs for node in graph}
    results = _results(frames)
    for place in results:  # an operator that keeps nothing
        nodes.setdefault(place, SavedByNode(place[1], place[0], (), {}, []))
    known = [nodes[place] for place in sorted(nodes)]
    with unobserved(), no_grad():
        # A -Inf alone is often on purpose, as a mask or a log-probability of 0. A variable may hold
        # what was made of it.
        for has_variables, is_bad in itertools.product((False, True), (_is_loud, is_nonfinite)):
            for saved in known:
                records = [(n, r) for n, v in _tensors(saved) if (r := record_of(v)) is not None]
                read = [(n, r) for n, r in records if not _MADE.match(n)]
                bad = [(n, r) for n, r in read if is_bad(r)]
                if bad:
                    given = None if is_sure else _without_graph(saved, *bad[0], frames)
                    if given is not None or has_variables:
                        return given
                    break
                own = results.get((saved.order, saved.name))
                made, result = _made_bad(saved.name, saved.values), _result_of(saved)
                if has_variables and result is None and own is not None:
                    result = record_of(own.tensor)
                elif not has_variables and _kind(saved.name) == "LogSoftmax":
                    continue
                if made is not None and made.any() and (result is None or is_bad(result)):
                    is_finite = not any(is_nonfinite(record) for _, record in read)
                    # A quotient keeps no dividend where the divisor has no graph.
                    is_whole = _kind(saved.name) != "Div" or "self" in saved.values
                    if is_sure and not (is_finite and is_whole):
                        return None
                    what = "finite numbers" if is_finite else "numbers without NaN"
                    what = f"made of {what} what is not finite" if is_whole else "divided by 0"
                    counts = saved.values.get("other")
                    if torch.is_tensor(counts) and _is_whole(counts):
                        read.append(("other", stats(counts).record))
                    return _kept(saved, what, read, result, _named_by(own, frames))
                if result is not None and is_bad(result):
                    if is_sure:
                        return None
                    variable = _named_by(own, frames)
                    source = None if variable is None else _given(saved, variable, frames)
                    if source is not None:
                        return _from_variable(saved.name, source)
                    read += _masked_before(saved, known)
                    # That a loss is not finite is known.
                    if read or saved is not known[-1]:
                        what = "had a result that is not finite"
                        return _kept(saved, what, read, result, variable)
    return None


def _results(frames: Sequence[HeldFrame]) -> dict[tuple[int, str], HeldTensor]:
    """The variables that operators of a graph have made, and nothing has written since, by node."""
    made = (held for held in _all(frames) if held.node and held.is_unchanged)
    return {(held.order, held.node): held for held in made}


def _named_by(held: Optional[HeldTensor], frames: Sequence[HeldFrame]) -> Optional[Variable]:
    """The variable that holds it, of several one that was assigned."""
    if held is None:
        return None
    place = held.order, held.node
    same = [other.tensor for other in _all(frames) if (other.order, other.node) == place]
    return find_variable(lambda tensor: any(tensor is other for other in same), frames=frames)


def _all(frames: Sequence[HeldFrame]) -> Iterator[HeldTensor]:
    return (held for frame in frames for held in frame.tensors)


def _given(
    saved: SavedByNode, variable: Variable, frames: Sequence[HeldFrame]
) -> Optional[Variable]:
    """The variable without a graph that the line which assigns the result has read, where the
    operator makes no NaN or infinity of most numbers.
    """
    is_open = not saved.values or _kind(saved.name) in _CARRIERS
    source = variable.first_cause() if is_open else None
    has_graph = source is not None and any(
        held.node and held.tensor is source.value for held in _all(frames)
    )
    return None if has_graph else source


def _masked_before(saved: SavedByNode, known: Sequence[SavedByNode]) -> list[tuple[str, np.void]]:
    """The result of the last log_softmax before this node, where it holds -Inf."""
    for node in reversed(known):
        result = node.values.get("result")
        if node.order < saved.order and _kind(node.name) == "LogSoftmax" and result is not None:
            record = record_of(result)
            return [] if record is None or not is_nonfinite(record) else [("log_softmax", record)]
    return []


def _without_graph(
    saved: SavedByNode, name: str, record: np.void, frames: Sequence[HeldFrame]
) -> Optional[MadeBy]:
    operands = dict(zip(("self", "target" if "target" in saved.values else "other"), (0, 1)))
    number = operands.get(name, len(saved.needs_gradient))
    if number >= len(saved.needs_gradient) or saved.needs_gradient[number]:
        return None
    how = f"{saved.name} in the graph of the loss read it in a tensor that has no graph ({name}): "
    how += "data, or computed under no_grad() or from detached tensors."
    tensor, address = saved.values[name], saved.address(name)
    variable = find_variable(lambda value: is_at(value, tensor, address), frames=frames)
    how += variable.first_bad() if variable is not None else first_bad(name, tensor)
    return _outside(how, name, record, variable)


def _outside(how: str, name: str, record: np.void, variable: Optional[Variable]) -> MadeBy:
    """``how``, and what is known of this operand; ``variable``: that holds it."""
    how += "" if _is_loud(record) else " It holds -Inf alone, as the log of 0 is."
    # The line that assigns a list may have read what is in another element.
    cause = None if variable is None or variable.key else variable.first_cause()
    if variable is not None and cause is not None:
        read = f"{cause.name} ({cause.shown})" if cause.key else cause.name
        how += f" {variable.name} was assigned from {read}, which is not finite either."
        variable = cause
    is_loud = _is_loud(record)
    written = lines_behind(*variable.origin(), is_loud) if variable else lines_of_data(is_loud)
    return MadeBy("", how, inputs=((name, record),), variable=_shown(variable), written=written)


def _from_variable(name: str, source: Variable, graph: str = "the graph of the loss") -> MadeBy:
    # A sum keeps nothing of what it adds.
    return MadeBy(
        "",
        f"{name}, the first operator in {graph} whose result is known "
        f"not to be finite, may have it from {source.shown}, which has no graph: data, "
        "or computed under no_grad() or from detached tensors."
        f"{source.first_bad()}",
        inputs=((source.shown, stats(source.value.detach()).record),),
        variable=str(source.first_cause() or source),
    )


def _shown(variable: Optional[Variable]) -> str:
    return "" if variable is None else str(variable)


def _kept(
    saved: SavedByNode,
    what: str,
    read: list[tuple[str, np.void]],
    result: Optional[np.void],
    variable: Optional[Variable],
) -> MadeBy:
    how = f"{saved.name}, in the graph of the loss: in the forward pass its operator {what}. It is "
    how += "the first such operator among those whose values are still in memory."
    return MadeBy(saved.name, how, inputs=tuple(read), result=result, variable=_shown(variable))


def _result_of(saved: SavedByNode) -> Optional[np.void]:
    """The record of the result, as far as it can be computed from what the node has saved."""
    values, name = saved.values, _kind(saved.name)
    read, other, exponent = map(values.get, ("self", "other", "exponent"))
    result = values.get("result")
    if result is None and name in _AGAIN and read is not None:
        result = _AGAIN[name](read)
    elif result is None and name in _PAIRS and torch.is_tensor(read) and torch.is_tensor(other):
        result = _PAIRS[name](read, other)
    elif result is None and name == "Pow" and torch.is_tensor(read) and exponent is not None:
        result = read.pow(exponent)
    return None if result is None else record_of(result)


def _source(steep: SavedByNode, known: Sequence[SavedByNode]) -> Optional[MadeBy]:
    """The operator that made in forward what this node has read, where that was not finite."""
    read = [v for name, v in _tensors(steep) if not _MADE.match(name)]
    counts = [(v.shape, int((~v.isfinite()).sum())) for v in read]
    for saved in sorted(known, key=lambda node: node.order):
        bad = _made_bad(saved.name, saved.values) if saved.order < steep.order else None
        if bad is None or not bad.any() or (bad.shape, int(bad.sum())) not in counts:
            continue
        return _made_in_forward(saved, steep, bad)
    for saved in sorted(known, key=lambda node: node.order):
        result = saved.values.get("result")
        if saved.order < steep.order and torch.is_tensor(result):
            nans = (result.shape, int(result.isnan().sum()))
            if nans[1] and nans in counts:
                return _known_in_forward(saved, steep, result)
    return None


def _made_in_forward(saved: SavedByNode, steep: SavedByNode, bad: torch.Tensor) -> MadeBy:
    return MadeBy(
        saved.name,
        f"{saved.name}, in the graph of the loss: in the forward pass its operator made of finite "
        f"numbers what is not finite, in {int(bad.sum()):,} of {bad.numel():,} elements, as many "
        f"as {steep.name} has read, the first node of backward whose derivative is not finite.",
        inputs=tuple((n, r) for n, v in _tensors(saved) if (r := record_of(v)) is not None),
        variable=_later_variable(saved.is_node, lambda tensor: _leads_to(tensor.grad_fn, saved)),
    )


def _known_in_forward(saved: SavedByNode, steep: SavedByNode, result: torch.Tensor) -> MadeBy:
    # A node of a root keeps its result alone.
    return MadeBy(
        saved.name,
        f"{saved.name}, in the graph of the loss: the first operator of forward {KNOWN_ALONE}, in "
        f"as many elements as {steep.name} has read, the first node of backward whose derivative "
        "is not finite.",
        result=record_of(result),
        variable=_later_variable(saved.is_node, lambda tensor: _leads_to(tensor.grad_fn, saved)),
    )


def _tensors(saved: SavedByNode) -> list[tuple[str, torch.Tensor]]:
    return [(name, v) for name, v in saved.values.items() if torch.is_tensor(v)]


def _operands(saved: SavedByNode) -> list[tuple[str, torch.Tensor]]:
    """The tensors, and the exponent of a power where that is a number."""
    exponent = saved.values.get("exponent")
    tensors = _tensors(saved)
    if isinstance(exponent, (int, float)):
        tensors.append(("exponent", torch.tensor(float(exponent), device="cpu")))
    return tensors


def _steep(saved: SavedByNode, bad: int, numel: int) -> MadeBy:
    where = f"{bad:,} of {numel:,} elements" if numel > 1 else "the only element"
    which = " (where its vectors are used)" if saved.name in DECOMPOSITIONS else ""
    return MadeBy(
        saved.name,
        f"{saved.name}, in the graph of the loss: the derivative of its operator{which} is not "
        f"finite at the values that it read or returned, in {where}. It is the first such operator "
        "in backward among those whose values are still in memory.",
        inputs=tuple((n, r) for n, v in _operands(saved) if (r := record_of(v)) is not None),
        variable=_later_variable(saved.is_node, lambda tensor: _leads_to(tensor.grad_fn, saved)),
        is_backward=True,
    )


def _leads_to(root: Any, saved: SavedByNode) -> bool:
    """True if the graph of ``root`` holds this node, among those that came after it."""
    waiting, met = [root], {root}
    while waiting and len(met) < _MOST_NODES:
        node = waiting.pop()
        if saved.is_node(node):
            return True
        for following, _ in node.next_functions:
            if following is not None and following not in met and _order(following) >= saved.order:
                met.add(following)
                # A leaf's comes after all others.
                if not hasattr(following, "variable"):
                    waiting.append(following)
    return False


def _is_loud(record: np.void) -> bool:
    return bool(record["nan_count"] or record["posinf_count"])


class _GraphSearch:
    """The part of a graph that can have led to the root: edges that are known to be finite end
    it.
    """

    def __init__(self, root: torch.Tensor, is_bad: Callable[[np.void], bool], name: str) -> None:
        self._is_bad = is_bad
        self._graph = f"the graph of {name}"
        self._known: dict[_Edge, np.void] = {}
        self._saved: dict[Any, dict[str, torch.Tensor]] = {}
        self._is_whole = True
        # Results that their nodes do not keep.
        for variable in local_variables():
            if variable.value.grad_fn is not None:
                self._note(variable.value)
        self._spread(root)

    def _spread(self, root: torch.Tensor) -> None:
        self._note(root)
        # Consumers before what they consume: by then it is known which of their inputs are finite.
        waiting = [(-_order(root.grad_fn), 0, root.grad_fn)] if root.grad_fn is not None else []
        met = {root.grad_fn}
        while waiting:
            node = heapq.heappop(waiting)[2]
            if len(self._saved) >= _MOST_NODES:
                self._is_whole = False
                return
            saved = self._saved[node] = _saved_by(node)
            for tensor in saved.values():
                self._note(tensor)
            again = _AGAIN.get(_kind(_name(node)))
            if again is not None and "self" in saved and (node, 0) not in self._known:
                result = record_of(again(saved["self"].detach()))
                if result is not None and not is_nonfinite(result):
                    self._known[node, 0] = result
            for edge in node.next_functions:
                child = edge[0]
                if child is None or child in met or self._state(edge) is False:
                    continue
                met.add(child)
                if not hasattr(child, "variable"):
                    heapq.heappush(waiting, (-_order(child), len(met), child))

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
        for (node, _), record in self._known.items():
            if self._is_bad(record):
                results.setdefault(node, []).append(record)
        for node in sorted(self._saved, key=_order):
            saved = self._saved[node]
            inputs = {
                name: tensor
                for name, tensor in saved.items()
                if tensor.grad_fn is not node and not _MADE.match(name)
            }
            records = [(n, r) for n, t in inputs.items() if (r := self._note(t)) is not None]
            counts = inputs.get("other")
            if _kind(_name(node)) == "Div" and counts is not None and _is_whole(counts):
                records.append(("other", stats(counts).record))
            for name, record in records:
                # A tensor with a graph was met before, if it is bad.
                if inputs[name].grad_fn is None and self._is_bad(record):
                    return self._from_outside(node, name, inputs[name], record)
            result = next(iter(results.get(node, ())), None)
            if result is None and _kind(_name(node)) == "Pow" and "self" in saved:
                result = _bad_power(saved["self"], node)
            if result is not None or _makes_nonfinite(node, saved):
                bad = [(name, record) for name, record in records if is_nonfinite(record)]
                if bad and all(inputs[name].grad_fn is None for name, _ in bad):
                    # -Inf alone, which does harm here.
                    return self._from_outside(node, bad[0][0], inputs[bad[0][0]], bad[0][1])
                before = None if result is None else self._before(node, result)
                if result is not None and (mask := self._from_mask((before or [node])[0], result)):
                    return mask
                made = self._made(*(before or self._carried_from(node, records, result)))
                is_one = result is not None and result["numel"] == 1
                if not (is_one and made.operator and self._is_carried(node, saved)):
                    return made
                carried = self._made(*self._carried_from(node.next_functions[0][0], [], result))
                variable = carried.variable or _used_in(made.variable)
                return replace(carried, variable=variable)
        return None

    def _is_carried(self, node: Any, saved: Mapping[str, torch.Tensor]) -> bool:
        """True for a quotient by numbers from 1 on: its dividend was not finite either."""
        divisor = saved.get("other")
        if divisor is None or _kind(_name(node)) != "Div":
            return False
        child: Any = node.next_functions[0][0]
        if child not in self._saved or len(child._input_metadata) != 1 or divisor.numel() != 1:
            return False
        is_same = child._input_metadata[0].dtype == node._input_metadata[0].dtype
        return is_same and bool((divisor.abs() >= 1) & divisor.isfinite())

    def _carried_from(
        self, node: Any, inputs: list[tuple[str, np.void]], result: Optional[np.void]
    ) -> tuple[Any, list[tuple[str, np.void]], Optional[np.void]]:
        """The autograd.Function whose NaN this node has added up, or chosen, which alone makes
        none; the node itself with what it has read, where it has done neither.
        """
        child = node
        while _kind(_name(child)) in _UNARY and len(child.next_functions) == 1:
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
        if is_real and _kind(_name(node)) in _KEEPERS and result["nan_count"]:
            return child, [], result if result["nan_count"] == result["numel"] else None
        if _kind(_name(node)) != "ToCopy":
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
        """The -Inf without a graph that sums and products alone have led to this sum, which made
        NaN of as large a share: Inf - Inf.
        """
        waiting, met = [node], {node}
        while waiting:
            user = waiting.pop()
            if _kind(_name(user)) not in _SUMS or user not in self._saved:
                continue
            for name, tensor in self._saved[user].items():
                record = None if tensor.grad_fn is not None else self._note(tensor)
                if record is None or user is node or not record["neginf_count"]:
                    continue
                share = record["neginf_count"] * result["numel"]
                if share == result["nan_count"] * record["numel"]:
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
        how = (
            f"{_name(node)} in {self._graph} read it in a tensor that has no graph "
            f"({name}): data, or computed under no_grad() or from detached tensors."
        )
        variable = find_variable(lambda value: is_same(value, tensor))
        if variable is not None:
            return _outside(how + variable.first_bad(), name, record, variable)
        how += first_bad(name, tensor)
        users = self._users(node)
        made = _own_or_later(lambda of: of is node, lambda later: later.grad_fn in users)
        source = None if made is None else made.first_cause()
        if made is None or source is None or source.value.grad_fn is not None:
            return _outside(how, name, record, None)
        how += f" {made.shown} was assigned from {source.shown}, which is not finite either."
        return _outside(how + source.first_bad(), name, record, source)

    def _made(
        self, node: Any, inputs: list[tuple[str, np.void]], result: Optional[np.void]
    ) -> MadeBy:
        edges = node.next_functions
        states = [self._state(edge) for edge in edges if edge[0] is not None]
        saved = self._saved[node].items()
        kept = [t for name, t in saved if t.grad_fn is None and not _MADE.match(name)]
        # An operand without an edge has no graph, is a number or is none at all.
        is_known = len(kept) >= len(edges) - len(states)
        is_sure = is_known and all(state is False for state in states)
        is_maker = is_sure or _makes_nonfinite(node, self._saved[node])
        source = None
        # A number that stands alone is like many others.
        if result is not None and not is_maker and (not is_known or result["numel"] > 1):
            source = _beside(result)
        if source is None and not is_maker and _kind(_name(node)) in _CARRIERS:
            source = _read_for(node)
        if source is not None:
            return _from_variable(_name(node), source, self._graph)
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
        later = self._users(node)
        variable = _later_variable(
            lambda fn: fn is node,
            lambda tensor: tensor.grad_fn in later and holds_nonfinite(tensor),
        )
        return MadeBy(
            _name(node),
            f"{_name(node)}: the first operator in {self._graph} {known}.",
            _line(node),
            tuple((_named(name, self._saved[node].get(name)), record) for name, record in inputs),
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
            is_unary = len(node.next_functions) == 1 and _kind(_name(node)) in _UNARY
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
        if not (has_all and is_small and is_wide) or _kind(_name(node)) not in _CHOOSING:
            return None
        how = (
            f"{_name(node)} in {self._graph}: its operand with a graph is finite, so that the "
            "infinity or NaN comes of the other, which has none: data, a number, or computed under "
            "no_grad() or from detached tensors."
        )
        if target is not None and target["min"] < 0 and _kind(_name(node)) == "Sub":
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
        is_product = _kind(_name(node)) == "Mul" and len(records) == 1
        return is_product and records[0] is not None and not is_nonfinite(records[0])

    def _masked(self, node: Any) -> list[tuple[str, np.void]]:
        """The result of a log_softmax, of those that were made before this node, that holds -Inf
        alone.
        """
        for (made, _), record in self._known.items():
            is_before = made in self._saved and _order(made) < _order(node)
            if is_before and _kind(_name(made)) == "LogSoftmax" and is_nonfinite(record):
                return [("log_softmax", record)]
        return []

    def _users(self, node: Any) -> set[Any]:
        """The nodes that were computed from the result of this node."""
        users = {node}
        for later in sorted(self._saved, key=_order):
            if any(child in users for child, _ in later.next_functions):
                users.add(later)
        return users


def _read_for(node: Any) -> Optional[Variable]:
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
        source = _beside(record, memory)
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
        made = _outside(first_bad(label, tensor)[1:], label, record, variable)
    if caller is not None:
        how = f"{made.how} The call is at {running_place(caller)}"
        written = lines_behind(caller, [running_lines(caller)], _is_loud(record))
        made = replace(made, how=how.lstrip(), written=written)
    # The stop shows its record already.
    return replace(made, inputs=()) if made.how or made.variable else None


def search_held(
    frames: Sequence[FrameType], with_data: bool
) -> Optional[tuple[str, torch.Tensor, Optional[MadeBy]]]:
    """The tensor that is NaN or +Inf and was made first, of those that these frames hold, with its
    name and the operator that made it. ``with_data``: one without a graph, where none has one.
    """
    with unobserved(), no_grad():
        held = [one for frame in frames for one in held_by(frame)]
        bad = [one for one in held if (r := record_of(one.value)) is not None and _is_loud(r)]
        with_graph = [one for one in bad if one.value.grad_fn is not None]
        if with_graph:
            first = min(with_graph, key=lambda one: _order(one.value.grad_fn))
            return first.shown, first.value, search_graph(first.value, first.shown)
        is_bad = {id(one.value) for one in bad if with_data}
        variable = find_variable(lambda tensor: id(tensor) in is_bad)
        if variable is None:
            return None
        first = variable.first_cause() or variable
        how = f"{first.shown} has no graph: data, or computed under no_grad() or from detached "
        how += f"tensors.{first.first_bad()}"
        written = lines_behind(*first.origin(), is_loud=True)
        return first.shown, first.value, MadeBy("", how, variable=str(first), written=written)


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _beside(result: np.void, memory: Collection[int] = ()) -> Optional[Variable]:
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


def _order(node: Any) -> int:
    """Nodes in the order in which their operators ran, on one thread."""
    return int(node._sequence_nr())


def _name(node: Any) -> str:
    return str(node.name())


def _kind(name: str) -> str:
    """``Div`` of ``DivBackward0``."""
    return re.sub(r"Backward\d*$", "", name)


def _named(name: str, tensor: Optional[torch.Tensor]) -> str:
    """The name of an operand, with the node that made it."""
    node: Any = None if tensor is None else tensor.grad_fn
    while node is not None and _kind(_name(node)) in _VIEWS:
        node = node.next_functions[0][0]
    return name if node is None or hasattr(node, "variable") else f"{name} ({_name(node)})"


def _line(node: Any) -> str:
    """The line of Python of a node, which anomaly mode has the graph keep."""
    kept = node.metadata.get("traceback_") or ()
    pattern = re.compile(r'File "(.+)", line (\d+), in (.+)')
    for text in reversed(kept):
        match = pattern.search(text)
        if match and not re.search(r"[/\\](?:torch|fastcheck)[/\\]", match[1]):
            return f"{match[1]}:{match[2]} in {match[3]}"
    return ""


def _saved_by(node: Any) -> dict[str, torch.Tensor]:
    """The tensors that the node holds, of those that its operator has read and made, by name. Empty
    where hooks have packed a tensor, where a tensor was changed or freed since, and with versions
    of torch that do not tell of hooks.
    """
    tensors: dict[str, torch.Tensor] = {}
    try:
        names = [name[len("_raw") :] for name in dir(node) if name.startswith("_raw_saved_")]
        for name in names:
            raw = getattr(node, f"_raw{name}")
            if any(getattr(saved, "unpack_hook", True) is not None for saved in each(raw)):
                return {}
        for name in names:
            attribute = name if name.startswith(_PREFIX) and hasattr(node, name) else name[1:]
            value = getattr(node, attribute)
            label = name[len(_PREFIX) :]
            many = isinstance(value, (tuple, list))
            for index, tensor in enumerate(each(value)):
                if isinstance(tensor, torch.Tensor):
                    tensors[f"{label}[{index}]" if many else label] = tensor
    except RuntimeError:
        return {}
    return tensors


def _is_whole(tensor: torch.Tensor) -> bool:
    """True if it holds integers that can be read, such as a count that a sum is divided by."""
    kind = tensor.dtype
    return not (kind.is_floating_point or kind.is_complex) and can_read(tensor)


# Operators whose result nobody may have kept: whether what they read makes it non-finite.


#: Operators of one operand.
_AGAIN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "Abs": torch.abs,
    "Acos": torch.acos,
    "Acosh": torch.acosh,
    "Asin": torch.asin,
    "Atan": torch.atan,
    "Atanh": torch.atanh,
    "Cos": torch.cos,
    "Cosh": torch.cosh,
    "Digamma": torch.digamma,
    "Erf": torch.erf,
    "Erfinv": torch.erfinv,
    "Lgamma": torch.lgamma,
    "Log": torch.log,
    "Log2": torch.log2,
    "Log10": torch.log10,
    "Log1P": torch.log1p,
    "Logit": torch.logit,
    "Sin": torch.sin,
    "Sinh": torch.sinh,
}


#: Operators of two operands.
_PAIRS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "Div": torch.div,
    "Mul": torch.mul,
    "Xlogy": torch.xlogy,
}
#: Operators that make a NaN or an infinity of one, and rarely of other numbers.
_CARRIERS = frozenset(("Add", "Div", "Mean", "Mul", "Neg", "Sub", "Sum"))
#: Operators of one operand, and views; operators that add or choose, and keep no operand.
_SUMS = frozenset(("Add", "Mul", "Neg", "Rsub", "Sub"))
_UNARY = frozenset(("Clone", "Mean", "Neg", "Select", "Squeeze", "Sum", "Unsqueeze", "View"))
#: Operators of one operand that keep their result, and have a NaN of a NaN alone.
_KEEPERS = frozenset(("Exp", "Exp2", "Expm1", "Sigmoid", "Tanh"))
#: Operators that make no other numbers.
_VIEWS = frozenset(("Clone", "Select", "Squeeze", "Unsqueeze", "View"))
_CHOOSING = frozenset(("Add", "Cat", "Rsub", "Stack", "Sub", "Where"))


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


def _bad_power(read: torch.Tensor, node: Any) -> Optional[np.void]:
    """The record of its power, which nobody may have kept, where it is not finite: which of the
    causes it has (an overflow, 1/0, the root of a negative number) shows in the result alone.
    """
    made = record_of(read.detach().pow(node._saved_exponent))
    known = record_of(read)
    is_made = made is not None and is_nonfinite(made)
    return made if is_made and known is not None and not is_nonfinite(known) else None


def _likelihood(values: Mapping[str, Any]) -> Any:
    is_empty = (values["total_weight"] == 0) & (values["reduction"] == 1)
    logs = values.get("self")
    if logs is None:
        return is_empty
    target, dim = values["target"], min(logs.dim() - 1, 1)
    chosen = logs.gather(dim, target.clamp_min(0).unsqueeze(dim)).squeeze(dim)
    return is_empty | ((target != values["ignore_index"]) & ~chosen.isfinite())


_MAKERS: dict[str, _Maker] = {
    **{name: functools.partial(_alone, function) for name, function in _AGAIN.items()},
    **{name: functools.partial(_paired, function) for name, function in _PAIRS.items()},
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


def _made_bad(name: str, values: Mapping[str, Any]) -> Optional[torch.Tensor]:
    """The elements that the operator of a node made not finite, of finite numbers; None: they are
    not known.
    """
    maker = _MAKERS.get(_kind(name))
    try:
        made = None if maker is None else maker(values)
    except (KeyError, AttributeError, RuntimeError):  # an operand that is not kept
        return None
    return None if made is None else torch.as_tensor(made)


def _makes_nonfinite(node: Any, saved: Mapping[str, torch.Tensor]) -> bool:
    names = (name for name in dir(node) if name.startswith(_PREFIX))
    numbers = {n[len(_PREFIX) :]: getattr(node, n) for n in names if not hasattr(node, f"_raw{n}")}
    made = _made_bad(_name(node), {**numbers, **saved})
    return made is not None and bool(made.any())


# The program's variables


def _later_variable(is_of: Callable[[Any], bool], is_later: Callable[[torch.Tensor], bool]) -> str:
    """The variable that holds the result of the node for which ``is_of`` holds, or the first result
    that this has led to.
    """
    found = _own_or_later(is_of, is_later)
    if found is None or is_of(found.value.grad_fn):
        return "" if found is None else str(found)
    return _used_in(str(found)) if found.last else ""


def _own_or_later(
    is_of: Callable[[Any], bool], is_later: Callable[[torch.Tensor], bool]
) -> Optional[Variable]:
    own = find_variable(lambda tensor: tensor.grad_fn is not None and is_of(tensor.grad_fn))
    return own or find_variable(
        lambda tensor: tensor.grad_fn is not None and is_later(tensor),
        lambda tensor: _order(tensor.grad_fn),
    )


def _used_in(variable: str) -> str:
    return variable and f"the result is used in {variable.removeprefix('the result is used in ')}"
