"""Comparisons of the graph of a loss with that of the look before: terms without a graph, elements
that dropout drops, and weights that get gradients and no updates.

Reads tensors that the graph has saved, and waits for a device.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Callable, Optional

import torch
import torch.nn.functional as F
from torch.nn.modules.dropout import _DropoutNd

from fastcheck.utils.text.numbers import counted
from fastcheck.utils.torch.frames import values_at_hand
from fastcheck.utils.torch.memory_ref import MemoryRef
from fastcheck.utils.torch.readable import can_read_now

from .nodes import before_views, factor_of, kind_of, leaf_of, operand_of, saved_by, signed

# Reads a number, and waits for a device.
_Number = Callable[[], float]

# Roundings of the loss that a change of it is more than.
_ROUNDINGS = 16
# The terms of a loss that are added up at most.
_MOST_TERMS = 64
# The elements of a mask: so many are hardly dropped twice by chance.
_LEAST_MASK, _MOST_MASK = 256, 4096
# Standard deviations that the share of dropped elements is from p at most.
_DEVIATIONS = 6.0
# The operand that is the input of a layer.
_INPUT = {"Addmm": 1, "Convolution": 0}


class SinceLastLook:
    """``models``: returns those that are installed; ``known``: the numbers of their parameters and
    those of the optimizers.
    """

    def __init__(
        self,
        models: Callable[[], Sequence[torch.nn.Module]],
        known: Callable[[], Collection[int]],
    ) -> None:
        self._models = models
        self._known = known
        # The least and the largest value of what a loss has beside its criteria.
        self._rest = (math.inf, -math.inf)
        # The largest loss.
        self._size = 0.0
        self._mask: Optional[torch.Tensor] = None
        # The version of each weight that nothing updates, and its gradient.
        self._idle: dict[int, tuple[MemoryRef, int, MemoryRef]] = {}

    def compare(
        self, roots: Sequence[torch.Tensor], nodes: Collection[Any], derives_by_data: bool
    ) -> dict[str, str]:
        """The forms that differ from those of the look before, or do not. ``derives_by_data``: the
        program asks for derivatives with respect to data, as to points in space.
        """
        forms: dict[str, str] = {}
        if self._has_other_rest(roots):
            forms["inert_term"] = ""
        if same := self._drops_the_same(nodes):
            forms["same_dropout"] = same
        forms.update(self._idle_forms(nodes, derives_by_data))
        return forms

    def _has_other_rest(self, roots: Sequence[torch.Tensor]) -> bool:
        """True if what a loss has beside its criteria has not always had one value."""
        root = roots[0] if len(roots) == 1 else None
        if root is None or root.grad_fn is None or root.numel() != 1 or not can_read_now(root):
            return False
        rest = _rest(root)
        if rest is None:
            return False
        least, most = min(self._rest[0], rest), max(self._rest[1], rest)
        self._rest = least, most
        size = self._size = max(self._size, abs(float(root)), abs(rest))
        return most - least > _ROUNDINGS * torch.finfo(root.dtype).eps * size

    def _drops_the_same(self, nodes: Collection[Any]) -> str:
        """Names a dropout that drops the elements that it dropped before."""
        before, self._mask = self._mask, None
        shares = {
            module.p
            for model in self._models()
            for module in model.modules()
            if isinstance(module, _DropoutNd) and module.training and 0 < module.p < 1
        }
        mask, share = _first_mask(nodes, shares) if shares else (None, 0.0)
        self._mask = mask
        if mask is None or before is None or mask.shape != before.shape:
            return ""
        return f"p={share:g}" if torch.equal(mask, before) else ""

    def _idle_forms(
        self, nodes: Collection[Any], derives_by_data: bool
    ) -> Iterator[tuple[str, str]]:
        """Names the weights that no model has registered, and to whose gradients backward() goes on
        adding.
        """
        before, self._idle = self._idle, {}
        known = self._known()
        leaves = [leaf for node in nodes if (leaf := leaf_of(node)) is not None]
        if derives_by_data:  # then all data may require a gradient
            leaves = [leaf for leaf in leaves if isinstance(leaf, torch.nn.Parameter)]
        strange = {id(leaf): leaf for leaf in leaves}
        # Data that a layer reads may require a gradient.
        layers = ((node, _INPUT.get(kind_of(node))) for node in nodes)
        read = (before_views(n.next_functions[p]) for n, p in layers if p is not None)
        other = {*known, *(id(leaf_of(node)) for node, _ in read)}
        idle = [n for n, w in strange.items() if n not in other and self._is_idle(w, before)]
        found: dict[int, tuple[str, str]] = {}
        models = self._models()
        for form, places in (("", _unregistered(models)), ("left_out", _at_hand(models))):
            for name, weight in places if len(found) < len(idle) else ():
                own = "unregistered" if isinstance(weight, torch.nn.Parameter) else "no_parameter"
                if id(weight) in idle:
                    found.setdefault(id(weight), (form or own, name))
        for form in dict.fromkeys(form for form, _ in found.values()):
            names = [name for own, name in found.values() if own == form]
            what = f"{counted(len(names), 'weight')} in {', '.join(dict.fromkeys(names))}"
            yield form, f"{what} {'get' if len(names) > 1 else 'gets'}"

    def _is_idle(
        self, weight: torch.Tensor, before: Mapping[int, tuple[MemoryRef, int, MemoryRef]]
    ) -> bool:
        gradient = weight.grad
        if gradient is None:
            return False
        now = self._idle[id(weight)] = MemoryRef(weight), weight._version, MemoryRef(gradient)
        ref, version, other = before.get(id(weight), now)
        is_same = id(weight) in before and ref.is_of(weight) and version == weight._version
        return is_same and other.is_of(gradient) and can_read_now(gradient) and bool(gradient.any())


def _rest(root: torch.Tensor) -> Optional[float]:
    """The terms without a graph that are added to the criteria of a loss, before it was multiplied
    by a number, as by that of a GradScaler; None: they are not known, or there are none, and no
    tensor is read.
    """
    node: Any = root.grad_fn
    scales: list[_Number] = []
    while (factor := _factor(node)) is not None:
        node, scales = operand_of(node), [*scales, factor]
    criteria = _criteria(node)
    if not criteria:
        return None
    scale = _product(scales)
    if not scale:
        return None
    total = float(root) / scale
    for made, factors in criteria:
        total -= _product(factors) * made()
    return total


def _criteria(node: Any) -> list[tuple[_Number, list[_Number]]]:
    """The criteria that a loss is the sum of, each with what it is multiplied by; empty where it
    has no term without a graph, or is made of something else.
    """
    found: list[tuple[_Number, list[_Number]]] = []
    waiting: list[tuple[Any, list[_Number], bool]] = [(node, [], True)]
    has_rest = False
    for _ in range(_MOST_TERMS):
        if not waiting:
            return found if has_rest else []
        node, factors, is_whole = waiting.pop()
        children = [child for child, _ in node.next_functions]
        if kind_of(node) in ("Add", "Sub") and getattr(node, "_saved_alpha", 1) == 1:
            # A constant times the weight of a term may change with that.
            if None in children and not is_whole:
                return []
            has_rest |= None in children
            other = factors if kind_of(node) == "Add" else [*factors, _minus_one]
            pairs = zip(children, (factors, other))
            waiting += [(child, own, is_whole) for child, own in pairs if child is not None]
        elif (factor := _factor(node)) is not None:
            waiting.append((operand_of(node), [*factors, factor], False))
        elif (made := _criterion(node)) is not None:
            found.append((made, factors))
        else:
            return []
    return []


def _factor(node: Any) -> Optional[_Number]:
    """The number that this node multiplies its only operand with; None: it is no such node."""
    factor = factor_of(node)
    if factor is None:
        return None
    power = 1 if kind_of(node) == "Mul" else -1
    return lambda: float(factor) ** power if factor.any() else 0.0


def _minus_one() -> float:
    return -1.0


def _product(factors: Sequence[_Number]) -> float:
    return math.prod(factor() for factor in factors)


def _criterion(node: Any) -> Optional[_Number]:
    """Computes an averaged criterion; None: it is none, or what it has read is not held."""
    criteria: dict[str, Callable[..., torch.Tensor]] = {
        "NllLoss": F.nll_loss,
        "BinaryCrossEntropyWithLogits": F.binary_cross_entropy_with_logits,
        "BinaryCrossEntropy": F.binary_cross_entropy,
        "SmoothL1Loss": F.smooth_l1_loss,
        "HuberLoss": F.huber_loss,
        "MseLoss": F.mse_loss,
    }
    compute = criteria.get(kind_of(node))
    if compute is None or node._saved_reduction != 1:
        return None
    if getattr(node, "_saved_weight", None) is not None:
        return None
    if getattr(node, "_saved_pos_weight", None) is not None:
        return None
    given, target = saved_by(node, "self"), saved_by(node, "target")
    if given is None or target is None:
        return None
    options: Any = {
        name: getattr(node, f"_saved_{name}")
        for name in ("beta", "delta")
        if hasattr(node, f"_saved_{name}")
    }
    if kind_of(node) == "NllLoss":
        options = {"ignore_index": signed(node._saved_ignore_index)}
    return lambda: float(compute(given, target, **options))


def _first_mask(
    nodes: Collection[Any], shares: Collection[float]
) -> tuple[Optional[torch.Tensor], float]:
    """The elements that the first dropout of a graph keeps, and the share that it drops, if that is
    one of these; none: there is no such dropout.
    """
    made = [node for node in nodes if kind_of(node) in ("Mul", "NativeDropout")]
    for node in sorted(made, key=lambda node: node._sequence_nr()):
        is_noise = kind_of(node) == "Mul" and node.next_functions[-1][0] is None
        noise = saved_by(node, "other" if is_noise else "result1")
        # A bool that is multiplied with is a mask of the program's own.
        if noise is None or noise.numel() < _LEAST_MASK or is_noise == (noise.dtype == torch.bool):
            continue
        mask = noise.reshape(-1)[:_MOST_MASK]
        dropped = 1 - float((mask != 0).double().mean())
        for share in shares:
            spread = math.sqrt(share * (1 - share) / len(mask))
            is_share = abs(dropped - share) < _DEVIATIONS * spread
            scale = 1.0 if mask.dtype == torch.bool else 1 / (1 - share)
            if is_share and bool(((mask[mask != 0].double() - scale).abs() < 1e-2 * scale).all()):
                return (mask != 0).cpu(), share
    return None, 0.0


def _unregistered(models: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the parameters of modules in training mode that a list, a tuple or a dictionary of a
    model's module holds, and the tensors that these or its attributes are, each with the name of
    the attribute.
    """
    for model in models:
        for path, module in model.named_modules():
            for attribute, held in vars(module).items():
                if attribute.startswith("_"):
                    continue
                name = f"{path}.{attribute}" if path else attribute
                values = held.values() if type(held) is dict else held
                for value in values if type(held) in (list, tuple, dict) else (held,):
                    if isinstance(value, torch.nn.Module) and value.training:
                        yield from ((name, weight) for weight in value.parameters())
                    elif isinstance(value, torch.Tensor):
                        yield name, value


def _at_hand(models: Sequence[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the parameters and single numbers in the program's local variables, and those of
    modules of its own there, as of a criterion: not of layers, nor of a network like a model's, as
    a teacher is. Other tensors may be data that require a gradient.
    """
    kinds = {type(module) for model in models for module in model.modules()}
    for name, value in values_at_hand():
        is_number = isinstance(value, torch.Tensor) and value.dim() == 0
        if is_number or isinstance(value, torch.nn.Parameter):
            yield name, value
        is_module = isinstance(value, torch.nn.Module) and value.training
        for path, module in value.named_modules(prefix=name) if is_module else ():
            if type(module) not in kinds and not type(module).__module__.startswith("torch."):
                yield from module.named_parameters(prefix=path, recurse=False)
