"""Searches what is kept of the graph of a loss, once backward has passed, for the first operator
whose result or whose derivative is not finite.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Optional

import numpy as np
import torch

from fastcheck.monitor.session.derivatives import DECOMPOSITIONS, SavedByNode
from fastcheck.record.event import KNOWN_ALONE
from fastcheck.record.format import is_nonfinite
from fastcheck.report.stop_report import MadeBy
from fastcheck.statistics.functions import stats
from fastcheck.utils.torch.held_frames import HeldFrame, HeldTensor
from fastcheck.utils.torch.own_operators import no_grad, unobserved
from fastcheck.utils.torch.readable import first_bad

from .graph_nodes import BESIDE_RESULT, CARRIERS, MOST_NODES, is_count, operator_of, order_of
from .local_variables import Variable, find_variable, is_at, record_of
from .made_again import AGAIN, PAIRS, made_bad
from .variables import NO_GRAPH, from_outside, from_variable, is_loud, later_variable, shown_in


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
    graphs: Sequence[Sequence[SavedByNode]], frames: Sequence[HeldFrame] = (), is_sure: bool = False
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
        for has_variables, is_bad in itertools.product((False, True), (is_loud, is_nonfinite)):
            for saved in known:
                records = [(n, r) for n, v in _tensors(saved) if (r := record_of(v)) is not None]
                read = [(n, r) for n, r in records if not BESIDE_RESULT.match(n)]
                bad = [(n, r) for n, r in read if is_bad(r)]
                if bad:
                    given = None if is_sure else _without_graph(saved, *bad[0], frames)
                    if given is not None or has_variables:
                        return given
                    break
                own = results.get((saved.order, saved.name))
                made, result = made_bad(saved.name, saved.values), _result_of(saved)
                if has_variables and result is None and own is not None:
                    result = record_of(own.tensor)
                elif not has_variables and operator_of(saved.name) == "LogSoftmax":
                    continue
                if made is not None and made.any() and (result is None or is_bad(result)):
                    is_finite = not any(is_nonfinite(record) for _, record in read)
                    # A quotient keeps no dividend where the divisor has no graph.
                    is_whole = operator_of(saved.name) != "Div" or "self" in saved.values
                    if is_sure and not (is_finite and is_whole):
                        return None
                    what = "finite numbers" if is_finite else "numbers without NaN"
                    what = f"made of {what} what is not finite" if is_whole else "divided by 0"
                    counts = saved.values.get("other")
                    if torch.is_tensor(counts) and is_count(counts):
                        read.append(("other", stats(counts).record))
                    return _kept(saved, what, read, result, _named_by(own, frames))
                if result is not None and is_bad(result):
                    if is_sure:
                        return None
                    variable = _named_by(own, frames)
                    source = None if variable is None else _given(saved, variable, frames)
                    if source is not None:
                        return from_variable(saved.name, source)
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
    is_open = not saved.values or operator_of(saved.name) in CARRIERS
    source = variable.first_cause() if is_open else None
    has_graph = source is not None and any(
        held.node and held.tensor is source.value for held in _all(frames)
    )
    return None if has_graph else source


def _masked_before(saved: SavedByNode, known: Sequence[SavedByNode]) -> list[tuple[str, np.void]]:
    """The result of the last log_softmax before this node, where it holds -Inf."""
    for node in reversed(known):
        result = node.values.get("result")
        if (
            node.order < saved.order
            and operator_of(node.name) == "LogSoftmax"
            and result is not None
        ):
            record = record_of(result)
            return [] if record is None or not is_nonfinite(record) else [("log_softmax", record)]
    return []


def _without_graph(
    saved: SavedByNode, name: str, record: np.void, frames: Sequence[HeldFrame]
) -> Optional[MadeBy]:
    operands = dict(zip(("self", "target" if "target" in saved.values else "other"), (0, 1)))
    number = operands.get(name, len(saved.needs_gradient))
    # The weights of a loss have no derivative.
    is_weight = name in ("weight", "pos_weight")
    if not is_weight and (number >= len(saved.needs_gradient) or saved.needs_gradient[number]):
        return None
    how = f"{saved.name} in the graph of the loss read it in a tensor that has no graph ({name}): "
    how += NO_GRAPH
    tensor, address = saved.values[name], saved.address(name)
    variable = find_variable(lambda value: is_at(value, tensor, address), frames=frames)
    how += variable.first_bad() if variable is not None else first_bad(name, tensor)
    return from_outside(how, name, record, variable)


def _kept(
    saved: SavedByNode,
    what: str,
    read: list[tuple[str, np.void]],
    result: Optional[np.void],
    variable: Optional[Variable],
) -> MadeBy:
    how = f"{saved.name}, in the graph of the loss: in the forward pass its operator {what}. It is "
    how += "the first such operator among those whose values are still in memory."
    return MadeBy(saved.name, how, inputs=tuple(read), result=result, variable=shown_in(variable))


def _result_of(saved: SavedByNode) -> Optional[np.void]:
    """The record of the result, as far as it can be computed from what the node has saved."""
    values, name = saved.values, operator_of(saved.name)
    read, other, exponent = map(values.get, ("self", "other", "exponent"))
    result = values.get("result")
    if result is None and name in AGAIN and read is not None:
        result = AGAIN[name](read)
    elif result is None and name in PAIRS and torch.is_tensor(read) and torch.is_tensor(other):
        result = PAIRS[name](read, other)
    elif result is None and name == "Pow" and torch.is_tensor(read) and exponent is not None:
        result = read.pow(exponent)
    return None if result is None else record_of(result)


def _source(steep: SavedByNode, known: Sequence[SavedByNode]) -> Optional[MadeBy]:
    """The operator that made in forward what this node has read, where that was not finite."""
    read = [v for name, v in _tensors(steep) if not BESIDE_RESULT.match(name)]
    counts = [(v.shape, int((~v.isfinite()).sum())) for v in read]
    for saved in sorted(known, key=lambda node: node.order):
        bad = made_bad(saved.name, saved.values) if saved.order < steep.order else None
        if bad is None or not bad.any() or (bad.shape, int(bad.sum())) not in counts:
            continue
        return _made_by(
            saved,
            "in the forward pass its operator made of finite numbers what is not finite, in "
            f"{int(bad.sum()):,} of {bad.numel():,} elements, as many as {steep.name} has read, "
            "the first node of backward whose derivative is not finite.",
            _tensors(saved),
        )
    for saved in sorted(known, key=lambda node: node.order):
        result = saved.values.get("result")
        if saved.order < steep.order and torch.is_tensor(result):
            nans = (result.shape, int(result.isnan().sum()))
            if nans[1] and nans in counts:  # A node of a root keeps its result alone.
                how = f"the first operator of forward {KNOWN_ALONE}, in as many elements as "
                how += f"{steep.name} has read, the first node of backward whose derivative is not "
                return _made_by(saved, f"{how}finite.", [], result=record_of(result))
    return None


def _made_by(
    saved: SavedByNode, how: str, read: list[tuple[str, torch.Tensor]], **fields: Any
) -> MadeBy:
    return MadeBy(
        saved.name,
        f"{saved.name}, in the graph of the loss: {how}",
        inputs=tuple((name, r) for name, v in read if (r := record_of(v)) is not None),
        variable=later_variable(saved.is_node, lambda tensor: _leads_to(tensor.grad_fn, saved)),
        **fields,
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
    return _made_by(
        saved,
        f"the derivative of its operator{which} is not finite at the values that it read or "
        f"returned, in {where}. It is the first such operator in backward among those whose values "
        "are still in memory.",
        _operands(saved),
        is_backward=True,
    )


def _leads_to(root: Any, saved: SavedByNode) -> bool:
    """True if the graph of ``root`` holds this node, among those that came after it."""
    waiting, met = [root], {root}
    while waiting and len(met) < MOST_NODES:
        node = waiting.pop()
        if saved.is_node(node):
            return True
        for following, _ in node.next_functions:
            if (
                following is not None
                and following not in met
                and order_of(following) >= saved.order
            ):
                met.add(following)
                # A leaf's comes after all others.
                if not hasattr(following, "variable"):
                    waiting.append(following)
    return False
