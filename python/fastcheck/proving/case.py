"""Case: one step of a model, computed as often as wanted from the same state."""

from __future__ import annotations

import contextlib
import inspect
import random
import re
from collections.abc import Iterator, Sequence
from typing import Any, Callable, Optional

import numpy as np
import torch
from torch.nn.modules.batchnorm import _BatchNorm

from fastcheck.utils.torch.flatten import flatten
from fastcheck.utils.torch.training_state import Generators, TrainingState

from .computed import Computed, Key, is_of_rows
from .observer import Observer
from .torch_calls import Calls, seen_checkpoints, within, without_dropout_of_recurrent

#: The floating formats of which one ulp is known, coarsest first.
_COARSE = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class Layout:
    """Where a tensor has the rows of the batch: the dimension, and how many entries each has."""

    def __init__(self, shapes: tuple[torch.Size, torch.Size], counts: tuple[int, int]) -> None:
        full, fewer = shapes
        found = []
        if len(full) == len(fewer):
            changed = [i for i, pair in enumerate(zip(full, fewer)) if pair[0] != pair[1]]
            for i in changed:
                each = full[i] // counts[0]
                if (each * counts[0], each * counts[1]) == (full[i], fewer[i]):
                    found.append((i, each))
            if len(found) != len(changed):
                found = []
        # Two such dimensions: an entry belongs to two rows.
        self.place: Optional[tuple[int, int]] = found[0] if len(found) == 1 else None

    def rows_first(self, tensor: torch.Tensor) -> torch.Tensor:
        """[rows, each, ...], or without ``each`` where that is 1."""
        dim, each = self.place or (0, 1)
        tensor = tensor.movedim(dim, 0)
        return tensor if each == 1 else tensor.reshape(-1, each, *tensor.shape[1:])


class Case:
    """The step, its batch and its model, and what is known of them.

    ``rows``: the number of rows of the batch, 0 where it is not known. ``length``: of the padded
    sequences, with ``mask`` the name of the tensor that says which tokens are real; 0 without one.
    ``noise``: which perturbation of the weights is in force, 0 for none, and ``ulps`` its size.
    ``dropout``: whether dropout is left in. ``draws``: whether the last computation drew random
    numbers.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        batch: Any,
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        state: TrainingState,
    ) -> None:
        self.step, self.batch, self.model, self.optimizers = step, batch, model, optimizers
        self.state = state
        self.parameters: dict[str, torch.Tensor] = dict(model.named_parameters())
        self._weights = list(self.parameters.values())
        self.noise, self.ulps, self.dropout = 0, 1.0, True
        self.seed: Optional[int] = None
        self.dtype = torch.float32
        self.attention_calls = self.checkpoints = 0
        self.draws = False
        self.call: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
        self.layouts: dict[Key, Layout] = {}
        self.batch_norms: list[torch.nn.Module] = []
        self.is_learning = False
        self._loose = [
            (vars(module), name, value, value.detach().clone())
            for module in model.modules()
            for name, value in vars(module).items()
            if isinstance(value, torch.Tensor)
        ]
        self.ops_of: Optional[str] = None
        self.lines: dict[str, str] = {}
        self.readers: dict[str, list[str]] = {}
        self._takes_model = _takes(step, 2)
        self.tensors = dict(flatten(batch, "batch"))
        self.rows = self._rows()
        self.real = 1
        self.mask, self.length = self._mask()

    def _rows(self) -> int:
        """Dimension 0 of all tensors of the batch, unless a module has it elsewhere."""
        sizes = {t.shape[0] for t in self.tensors.values() if t.dim() and t.shape[0] != 1}
        is_elsewhere = any(getattr(m, "batch_first", True) is False for m in self.model.modules())
        return sizes.pop() if len(sizes) == 1 and not is_elsewhere else 0

    def _mask(self) -> tuple[str, int]:
        for name, tensor in self.tensors.items():
            is_mask = re.search(r"(attention|attn|pad|padding|input|token|\W)_?mask\W*$", name)
            if not is_mask or tensor.dim() != 2 or tensor.shape[0] != self.rows:
                continue
            if tensor.shape[1] > 1 and bool(((tensor == 0) | (tensor == 1)).all()):
                real = self.real_value(tensor)
                if real is not None:
                    self.real = real
                    return name, tensor.shape[1]
        return "", 0

    @staticmethod
    def real_value(mask: torch.Tensor) -> Optional[int]:
        """What stands for a real token: a row's first or last token is one in every row."""
        first, last = (set(mask[:, i].int().tolist()) for i in (0, -1))
        if len(first) == len(last) == 1 and first != last:
            return 1
        found = first if len(first) == 1 else last
        return found.pop() if len(found) == 1 else None

    @property
    def eps(self) -> float:
        """One ulp of the coarsest format in which the modules compute, relative."""
        return float(torch.finfo(self.dtype).eps)

    def learn(self) -> Computed:
        """The step as it is; what it calls, in which format it computes, where rows are."""
        self.is_learning = True
        try:
            with seen_checkpoints(leave_out=False) as calls:
                kept = self.compute()
            self.checkpoints = len(calls)
        finally:
            self.is_learning = False
        return kept

    def find_layouts(self, sites: bool = False) -> None:
        """Where the rows are in each tensor: by a computation with one row less."""
        if self.rows < 2:
            return
        self.layouts = {}
        full = self.compute(sites=sites)
        try:
            fewer = self.compute(self.take_rows(range(self.rows - 1)), sites=sites)
        except Exception:  # BatchNorm refuses a single row, and a step may count on its rows
            fewer = full
        for key, tensor in full.tensors.items():
            if not is_of_rows(key):
                continue
            other = fewer.tensors.get(key)
            shape = None if other is None else other.shape
            if fewer is full and tensor.dim() and tensor.shape[0] == self.rows:
                shape = torch.Size((self.rows - 1, *tensor.shape[1:]))
            if shape is not None:
                self.layouts[key] = Layout((tensor.shape, shape), (self.rows, self.rows - 1))

    def learn_of(self, module: torch.nn.Module, dtypes: list[torch.dtype]) -> None:
        """A module that the step has called, and the formats that it returned."""
        self.dtype = next(one for one in _COARSE if one in (*dtypes, self.dtype))
        if isinstance(module, _BatchNorm) and (module.training or module.running_mean is None):
            self.batch_norms.append(module)

    def map_batch(self, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Any:
        """The batch with each of its tensors replaced by ``change(name, tensor)``."""
        return _mapped(self.batch, "batch", {k: change(k, t) for k, t in self.tensors.items()})

    def take_rows(self, index: Sequence[int]) -> Any:
        """The batch with these rows only, in this order."""
        where = torch.tensor(index)

        def take(name: str, tensor: torch.Tensor) -> torch.Tensor:
            if tensor.dim() and tensor.shape[0] == self.rows:
                return tensor.index_select(0, where.to(tensor.device))
            return tensor

        return self.map_batch(take)

    def compute(self, batch: Any = None, *, sites: bool = False, put_back: bool = True) -> Computed:
        """The step from the kept state: loss, outputs of the model, gradients, updates; ``sites``:
        also what each module takes in and returns, and their gradients. ``put_back=False`` goes on
        from where the model is.
        """
        if put_back:
            self.put_back()
        for parameter in self.parameters.values():
            parameter.grad = None
        if self.seed is not None:
            torch.manual_seed(self.seed)
            np.random.seed(self.seed)
            random.seed(self.seed)
        drawn = _drawn()
        before = {name: p.detach().clone() for name, p in self.parameters.items()}
        given = self.map_batch(lambda _, t: t.detach().clone()) if batch is None else batch
        kept = Computed()
        gradients: dict[str, torch.Tensor] = {}
        with contextlib.ExitStack() as stack:
            watch = Observer(self, kept, gradients, sites)
            calls = Calls(self.dropout, None if self.ops_of is None else watch.called)
            stack.enter_context(watch.hooks())
            stack.enter_context(within(calls))
            if not self.dropout:
                stack.enter_context(without_dropout_of_recurrent(self.model))
            args = (self.model, given) if self._takes_model else (given,)
            returned = self.step(*args)
            loss: Any = _loss(returned)
            if loss is not None and loss.grad_fn is not None and not gradients:
                loss.backward()
        self.draws = drawn != _drawn()
        if self.is_learning:
            self.attention_calls = calls.attention
        if loss is not None:
            kept.tensors["loss", ""] = loss.detach().clone()
        for name, tensor in flatten(returned, "returned"):
            if tensor is not loss and tensor.is_floating_point():
                kept.tensors["output", name] = tensor.detach().clone()
        for name, parameter in self.parameters.items():
            if name in gradients:
                kept.tensors["gradient", name] = gradients[name]
            if not torch.equal(parameter.detach(), before[name]):
                kept.tensors["update", name] = parameter.detach() - before[name]
        return self._in_rows(kept, given)

    def _in_rows(self, kept: Computed, batch: Any) -> Computed:
        """Rows first where they are known, and zeros where the mask hides a token."""
        mask = dict(flatten(batch, "batch")).get(self.mask)
        for key, layout in self.layouts.items():
            if layout.place is None or key not in kept.tensors:
                continue
            try:
                tensor = layout.rows_first(kept.tensors[key])
            except RuntimeError:  # another shape in this computation
                continue
            if mask is not None:
                at = [d for d in range(1, tensor.dim()) if tensor.shape[d] == mask.shape[1]]
                if at and (at[0] == 1 or len(at) == 1) and tensor.shape[0] == mask.shape[0]:
                    shape = [1] * tensor.dim()
                    shape[0], shape[at[0]] = mask.shape
                    tensor = tensor.masked_fill((mask != self.real).view(shape), 0)
            kept.tensors[key] = tensor
            kept.rows.add(key)
        return kept

    def put_back(self) -> None:
        """The kept state, with the weights perturbed where ``noise`` asks for it."""
        self.state.put_back()
        with torch.no_grad():
            for holder, name, tensor, kept in self._loose:
                holder[name] = tensor
                tensor.detach().copy_(kept)
        if not self.noise:
            return
        draw = torch.Generator().manual_seed(self.noise)
        size = 0.75 * self.ulps * self.eps
        with torch.no_grad():
            for parameter in self._weights:
                if parameter.is_floating_point():
                    sign = torch.randint(0, 2, parameter.shape, generator=draw).to(parameter.device)
                    parameter.mul_(1 + size * (2 * sign - 1).to(parameter.dtype))

    def evaluate(self, seed: int, sites: bool = False) -> Computed:
        """The model in evaluation, on what the step called it with."""
        self.put_back()
        kept = Computed()
        args, kwargs = self.call
        torch.manual_seed(seed)
        was = {module: module.training for module in self.model.modules()}
        try:
            self.model.eval()
            watch = Observer(self, kept, {}, sites)
            with torch.no_grad(), watch.hooks():
                self.model(*args, **kwargs)
        finally:
            for module, training in was.items():
                module.training = training
        return kept


def _drawn() -> tuple[Any, ...]:
    """What changes where a random number is drawn on the host."""
    kept = Generators().to_dict()
    own = [kept["torch"], *(state for states in kept["devices"].values() for state in states)]
    return [bytes(state.numpy()) for state in own], kept["numpy"][2], kept["python"]


def _takes(step: Callable[..., Any], count: int) -> bool:
    try:
        inspect.signature(step).bind(*range(count))
    except (TypeError, ValueError):
        return False
    try:
        inspect.signature(step).bind(*range(count - 1))
    except (TypeError, ValueError):
        return True
    return False


def _loss(returned: Any) -> Optional[torch.Tensor]:
    """The loss among what a step returns: what is called so, or the first scalar."""
    named = returned.get("loss") if isinstance(returned, dict) else getattr(returned, "loss", None)
    if isinstance(named, torch.Tensor) and named.numel() == 1:
        return named
    if isinstance(returned, float):
        return torch.tensor(returned, dtype=torch.float64)
    for _, tensor in flatten(returned, "returned"):
        if tensor.numel() == 1 and tensor.is_floating_point():
            return tensor
    return None


def _mapped(value: Any, label: str, tensors: dict[str, torch.Tensor]) -> Any:
    """``value`` with its tensors replaced, by the names that flatten() gives them."""
    if isinstance(value, torch.Tensor):
        return tensors[label]
    queue = [tensors[name] for name, _ in flatten(value, label)]
    return _replaced(value, iter(queue))


def _replaced(value: Any, tensors: Iterator[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return next(tensors)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_replaced(one, tensors) for one in value))
    if isinstance(value, (list, tuple)):
        return type(value)(_replaced(one, tensors) for one in value)
    if isinstance(value, dict):
        return {name: _replaced(one, tensors) for name, one in value.items()}
    if hasattr(value, "keys") and hasattr(value, "__getitem__"):  # transformers' BatchEncoding
        return {name: _replaced(value[name], tensors) for name in value.keys()}  # noqa: SIM118
    return value
