"""Dimensions that were mixed up: a view in place of a transposition, a softmax or a norm over other
elements than those that are added up after it, and the last sample in place of the last step.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from .nodes import VIEWS, axis_of, is_normalised, kind_of, match, shape_of, signed

_VIEW = re.compile("View|UnsafeView|ReshapeAlias")
# Nodes that keep the dimensions of what a convolution returns.
_KEEPS = re.compile(
    "Relu|LeakyRelu|Elu|Gelu|Silu|Sigmoid|Tanh|Add|Mul|Clone|NativeBatchNorm|CudnnBatchNorm|"
    "NativeGroupNorm|Upsample\\w+"
)
# Layers whose features are in the last dimension.
_FEATURES = ("Addmm", "Mm", "Embedding", "NativeLayerNorm")
# Nodes of a transformer's layer between its attention and its result.
_OF_FEATURES = re.compile("Addmm|Mm|NativeLayerNorm|NativeDropout|View|UnsafeView")
# The order in which torch's attention moves places before samples and heads; nodes to look at.
_TO_FRONT, _MOST = [2, 0, 1, 3], 100
_LAST = "the result of a layer whose features are last"
_RECURRENT = ("MkldnnRnnLayer", "CudnnRnn", "MiopenRnn")


def moved(node: Any) -> str:
    """The shapes, where a view gives a tensor the shape that it has after its channels, or its
    heads, were moved to another dimension: of a convolution, or before or after attention; or after
    its samples were moved to the first, of what a recurrent layer returns.
    """
    kind = kind_of(node)
    if kind == "LogSoftmax" and len(shape_of(node)) == 3 and axis_of(node)[0] == 1:
        view = node.next_functions[0][0]
        is_view = _VIEW.fullmatch(kind_of(view)) and _has_channels_last(
            shape_of(view), _sizes(view)
        )
        if is_view and _is_made_by(view.next_functions[0][0], _FEATURES):
            return _viewed(f"{_LAST}, of shape {list(_sizes(view))},", view)
    if kind == "Bmm" or kind.startswith("ScaledDotProduct"):
        for view, before, after in _views_before(node):
            if len(before) == 3 and _splits(before, after):
                return _viewed(f"what attention is given, of shape {list(before)},", view)
    if not _VIEW.fullmatch(kind):
        return ""
    before, after = _sizes(node), shape_of(node)
    inner = node.next_functions[0][0]
    if len(before) == 4 and len(after) == 3 and _splits(after, before):
        while kind_of(inner) == "Clone" or _VIEW.fullmatch(kind_of(inner)):
            inner = inner.next_functions[0][0]
        if kind_of(inner) == "Bmm" or kind_of(inner).startswith("ScaledDotProduct"):
            return _viewed(f"the result of attention, of shape {list(before)},", node)
    rows = f"of shape {list(before)},"
    if _has_channels_last(before, after) and _is_made_by(inner, ("Convolution",)):
        return _viewed(f"the result of a convolution, {rows}", node)
    is_image = len(after) > 3 and _has_channels_last(after, before)
    if is_image and _is_made_by(inner, _FEATURES):
        return _viewed(f"{_LAST}, {rows}", node)
    if _has_samples_second(before, after) and (what := _states(inner)):
        return _viewed(f"{what}, {rows}", node)
    return ""


def _has_samples_second(before: tuple[int, ...], after: tuple[int, ...]) -> bool:
    """True if ``after`` is the shape that N x B x ... has once its samples are first."""
    if len(before) != 3 or 1 in before[:2] or before[0] == before[1]:
        return False
    places, samples, width = before
    return after in ((samples, places * width), (samples, places, width))


def _states(node: Any) -> str:
    """Names what a recurrent layer returns that has its samples in dimension 1, or what is stacked
    in the same way, as its last states are.
    """
    while _KEEPS.fullmatch(kind_of(node)) or kind_of(node) == "NativeDropout":
        node = node.next_functions[0][0]
    if kind_of(node) == "Cat" and axis_of(node)[0] == 2:  # of both directions
        node = node.next_functions[0][0]
    if kind_of(node) in _RECURRENT:
        return "the output of a recurrent layer without batch_first=True"
    is_stack = kind_of(node) == "Stack" and axis_of(node)[0] == 0
    return "what was stacked in dimension 0, as states of a recurrent layer are" * is_stack


def _has_channels_last(first: tuple[int, ...], last: tuple[int, ...]) -> bool:
    """True if ``last`` is the shape that N x C x ... has after its channels were moved to the end,
    and only that: where there are as many channels as columns, it may be rows of these.
    """
    samples, channels, *places = first if len(first) > 2 else (0, 1)
    place = math.prod(places)
    if min(channels, place) < 2 or channels in (place, *places[-1:]):
        return False
    rows = (samples * place, channels), (samples, place, channels)
    return last in (*rows, (samples, *places, channels))


def _is_made_by(node: Any, kinds: tuple[str, ...]) -> bool:
    """True if a node of these kinds has made the elements in their order, perhaps before a function
    of each.
    """
    while kind_of(node) not in kinds:
        is_row = kinds is _FEATURES and _VIEW.fullmatch(kind_of(node))
        if not _KEEPS.fullmatch(kind_of(node)) and not (
            is_row and _sizes(node)[-1:] == shape_of(node)[-1:]
        ):
            break
        node = node.next_functions[0][0]
    return kind_of(node) in kinds


def _splits(whole: tuple[int, ...], heads: tuple[int, ...]) -> bool:
    """True if B x H x T x d, or BH x T x d, is what B x T x Hd was viewed as."""
    samples, places, width = whole
    if len(heads) == 3 and samples and heads[0] % samples == 0:
        heads = (samples, heads[0] // samples, *heads[1:])
    if len(heads) != 4 or heads[:1] + heads[2:3] != (samples, places):
        return False
    return heads[1] * heads[3] == width and heads[1] not in (1, places) and places > 1


def _viewed(what: str, view: Any) -> str:
    return f"{what} was viewed as {list(shape_of(view))}"


def _sizes(view: Any) -> tuple[int, ...]:
    """The shape of what a view was made of."""
    return tuple(getattr(view, "_saved_self_sym_sizes", ())) or shape_of(view.next_functions[0][0])


def _views_before(node: Any) -> Iterator[tuple[Any, tuple[int, ...], tuple[int, ...]]]:
    """The views between the operands of a node and what has made their elements, each with the
    shapes before and after it.
    """
    for inner, _ in node.next_functions[:3]:
        while VIEWS.fullmatch(kind_of(inner)) or match(inner, ("Mul|Div", "*", "-")):
            if _VIEW.fullmatch(kind_of(inner)):
                yield inner, _sizes(inner), shape_of(inner)
            inner = inner.next_functions[0][0]


def mixed(node: Any) -> str:
    """The dimensions, where a matrix product adds up over the last dimension of a softmax that was
    taken over one that is neither that nor the one before it, as over the samples or the heads; or
    over another than both of its sides were normalised over.
    """
    if kind_of(node) == "Mm":
        return _mixed_norms(node)
    made: Any = node.next_functions[0][0] if kind_of(node) == "Bmm" else None
    last = shape_of(made)[-2:]
    while kind_of(made) in ("View", "UnsafeView", "Expand", "ReshapeAlias", "Mul", "NativeDropout"):
        made = made.next_functions[0][0]
        if shape_of(made)[-2:] != last:
            return ""
    dimension, shape = axis_of(made) if kind_of(made) == "Softmax" else (0, ())
    if dimension >= len(shape) - 2 or shape[dimension] == 1:
        return ""
    return (
        f"softmax was taken over dimension {dimension} of {list(shape)}, and the matrix product "
        f"that follows adds up over dimension {len(shape) - 1}"
    )


def _mixed_norms(node: Any) -> str:
    summed = 1
    for place, (inner, _) in enumerate(node.next_functions):
        summed = 1 - place
        while kind_of(inner) in ("T", "Transpose", "Permute"):
            inner, summed = inner.next_functions[0][0], 1 - summed
        if is_normalised(inner) != (1 - summed,) or 1 in shape_of(inner):
            return ""
    return (
        f"both sides of a matrix product were divided by their norms over dimension {1 - summed} "
        f"of {list(shape_of(inner))}, and it adds up over dimension {summed}"
    )


def last_sample(node: Any) -> str:
    """The shape, where the last element of dimension 1 is taken of what an LSTM or GRU returns that
    has time in dimension 0.
    """
    made: Any = node.next_functions[0][0] if kind_of(node) == "Select" else None
    shape = shape_of(made)
    if len(shape) != 3 or 1 in shape[:2] or node._saved_dim != 1:
        return ""
    is_last = signed(node._saved_index) % shape[1] == shape[1] - 1
    if kind_of(made) == "Cat" and axis_of(made)[0] == 2:  # of both directions
        made = made.next_functions[0][0]
    # A GRU on the CPU consists of its steps.
    steps = match(made, ("Stack", ("Add", ("Mul", "Sub", "Sigmoid"), "Tanh")))
    is_recurrent = kind_of(made) in _RECURRENT or (steps and axis_of(made)[0] == 0)
    return f"{list(shape)}" if is_last and is_recurrent else ""


def padded(node: Any) -> str:
    """Counts the sequences that have ended before the last place, where that is taken of what
    pad_packed_sequence() returns: it has written a block for each number of sequences.
    """
    if kind_of(node) != "Select" or signed(node._saved_index) != -1:
        return ""
    made, time = node.next_functions[0][0], node._saved_dim
    # Sequences are brought into the order of the batch.
    while kind_of(made) == "Transpose" or match(made, ("IndexSelect", "Transpose|CopySlices")):
        if kind_of(made) == "Transpose":
            dims = [made._saved_dim0, made._saved_dim1]
            time = 1 - time if sorted(signed(dim) % 3 for dim in dims) == [0, 1] else -1
        made = made.next_functions[0][0]
    last = match(made, ("CopySlices", "CopySlices", ("block:View", "Slice")))
    if last is None or time != 0:
        return ""
    shape, block = shape_of(made), shape_of(last["block"])
    if len(shape) != 3 or len(block) != 3:
        return ""
    ended = shape[1] - block[1]
    return f"{ended} of {shape[1]} sequences" if ended > 0 else ""


def over_samples(node: Any) -> str:
    """The shape, where one element of dimension 1 is taken, or their mean, of what attention
    without batch_first=True has made: it attends over dimension 0.
    """
    made: Any = node.next_functions[0][0] if kind_of(node) in ("Select", "Mean") else None
    shape, chosen = shape_of(made), getattr(node, "_saved_dim", None)
    # A mean over all dimensions has None.
    dims = chosen if isinstance(chosen, tuple) else () if chosen is None else (chosen,)
    is_one = len(shape) == 3 and [signed(dim) % 3 for dim in dims] == [1]
    if not is_one or 1 in shape[:2] or shape[0] == shape[1]:
        return ""
    waiting, met = [made], {made}
    for inner in waiting:
        edges = [child for child, _ in inner.next_functions]
        child = edges[0] if edges else None
        is_it = kind_of(inner) == "Permute" and list(map(signed, inner._saved_dims)) == _TO_FRONT
        if is_it and shape_of(child)[::2] == (shape[1], shape[0]):
            return f"{list(shape)}"
        if kind_of(inner) == "Transpose" and kind_of(child) == "Bmm":
            heads, places, _ = shape_of(child)
            return f"{list(shape)}" * (places == shape[0] and heads % shape[1] == 0)
        if len(waiting) < _MOST and (
            _KEEPS.fullmatch(kind_of(inner)) or _OF_FEATURES.fullmatch(kind_of(inner))
        ):
            more = {one for one in edges if one is not None} - met
            waiting += more
            met |= more
    return ""
