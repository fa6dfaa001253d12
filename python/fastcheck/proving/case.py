"""TestedStep: one step of a model, computed as often as wanted from the same state. Relation: a way
to compute it that must agree with the step as it is.
"""

from __future__ import annotations

import contextlib
import inspect
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Callable, Optional
from unittest import mock

import numpy as np
import torch

from fastcheck.utils.torch.flatten import flatten
from fastcheck.utils.torch.training_state import Generators, TrainingState

from .given import Given
from .observer import Calls, Computed, Inside, Key, Learned, Observer, is_of_rows, seen_checkpoints


class RowAxis:
    """The place where a tensor has the rows of the batch: the dimension, and how many entries each
    has.
    """

    def __init__(self, full: torch.Tensor, fewer: torch.Tensor, counts: tuple[int, int]) -> None:
        self.place: Optional[tuple[int, int]] = None
        sizes = list(zip(full.shape, fewer.shape)) if full.dim() == fewer.dim() else []
        changed = [i for i, (size, less) in enumerate(sizes) if size != less]
        if len(changed) == 1:  # of two such dimensions an entry belongs to two rows
            each = full.shape[changed[0]] // counts[0]
            if (each * counts[0], each * counts[1]) == sizes[changed[0]]:
                self.place = changed[0], each
        # True if all rows come several times, as by cat(), and not each row's entries together.
        self._is_cat = False
        if self.place is not None and self.place[1] > 1:
            gaps = []
            for self._is_cat in (False, True):
                pair = (self.rows_first(t).to(torch.complex128) for t in (full, fewer))
                gaps.append(float(torch.sub(*(t[: counts[1]] for t in pair)).abs().nansum()))
            self._is_cat = gaps[1] < gaps[0]
        #: The shape of the whole batch.
        self.shape = self.rows_first(full).shape

    def rows_first(self, tensor: torch.Tensor) -> torch.Tensor:
        """[rows, each, ...], or without ``each`` where that is 1."""
        dim, each = self.place or (0, 1)
        tensor = tensor.movedim(dim, 0)
        if each == 1:
            return tensor
        if self._is_cat:
            return tensor.reshape(each, -1, *tensor.shape[1:]).transpose(0, 1)
        return tensor.reshape(-1, each, *tensor.shape[1:])


@dataclass
class Settings:
    """The settings of a computation. ``noise``: which perturbation of the weights is in force, 0
    for none, and ``ulps`` its size. ``dropout``: whether dropout is left in. ``seed``: of the
    generators, in place of their kept state. ``reads_late``: gradients are read before the update,
    or after the step: those of ranks are reduced after they were accumulated. ``learns``: what the
    step calls is noted.
    """

    noise: int = 0
    ulps: float = 1.0
    dropout: bool = True
    seed: Optional[int] = None
    reads_late: bool = False
    learns: bool = False


class TestedStep:
    """The step, its batch and its model, and what is known of them.

    ``given``: the batch, of which ``map_batch(change)`` makes another batch, with each tensor
    replaced by ``change(name, tensor)``, and ``take_rows(index)`` some rows. ``learned``: what the
    step calls. ``saved``: what has a state_dict(). ``settings``: of the next computation.
    ``inside``: the module whose operators it keeps. ``draws``: whether the last computation drew
    random numbers. ``eps``: one ulp of the coarsest format in which the modules compute, relative;
    ``far``: a number of ulps by which weights can move and the step stays much the same.
    """

    def __init__(
        self,
        step: Callable[..., Any],
        batch: Any,
        model: torch.nn.Module,
        others: Sequence[Any],
        state: TrainingState,
    ) -> None:
        self.step, self.model, self.state, self.takes_model = step, model, state, _takes_model(step)
        self.saved: list[Any] = [held for held in (model, *others) if hasattr(held, "state_dict")]
        self._generators = [other for other in others if isinstance(other, torch.Generator)]
        self.given = Given(batch, model)
        self.map_batch, self.take_rows = self.given.map, self.given.take_rows
        self.parameters: dict[str, torch.Tensor] = dict(model.named_parameters())
        self._weights = list(self.parameters.values())
        self.settings, self.learned = Settings(), Learned()
        self.widths = {real.shape[1] for real in self.given.real_tokens(batch)}
        self.inside: Optional[Inside] = None
        self.layouts: dict[Key, RowAxis] = {}
        self._loose = [
            (vars(module), name, value, value.detach().clone())
            for module in model.modules()
            for name, value in vars(module).items()
            if isinstance(value, torch.Tensor)
        ]

    def learn(self) -> None:
        """Learns from one run of the step what it calls, and in which format it computes."""
        before = {name: buffer.detach().clone() for name, buffer in self.model.named_buffers()}
        with seen_checkpoints(leave_out=False) as calls:
            self.settings.learns = True
            self.compute()
        self.settings, self.learned.checkpoints = Settings(), len(calls)
        self.eps = float(torch.finfo(self.learned.dtype).eps)
        self.far = 1024.0 if self.eps < 1e-6 else 4.0
        for name, buffer in self.model.named_buffers():
            if name in before and not torch.equal(before[name], buffer):
                self.learned.written.add(self.model.get_submodule(name.rpartition(".")[0]))

    def find_layouts(self, sites: bool = False) -> None:
        """Finds where the rows are in each tensor, by a computation with one row less."""
        rows = self.given.rows
        if rows < 2:
            return
        self.layouts = {}
        full = self.compute(sites=sites).tensors
        try:
            fewer = self.compute(self.take_rows(range(rows - 1)), sites=sites).tensors
        except Exception:  # BatchNorm refuses a single row, and a step may count on its rows
            fewer = {key: t[:-1] for key, t in full.items() if t.dim() and t.shape[0] == rows}
        finally:  # of fewer rows, too
            self.state.put_back_attributes()
        held = [key for key in full if is_of_rows(key) and key in fewer]
        axes = {key: RowAxis(full[key], fewer[key], (rows, rows - 1)) for key in held}
        self.layouts = {key: axis for key, axis in axes.items() if axis.place is not None}

    def become_rank(self, model: Any) -> None:
        """The step computes with ``model``, which is the model as this rank has it."""
        step = self.step
        self.step = lambda _, batch: step(model, batch)
        self.parameters = dict(self.model.named_parameters())
        self.settings.reads_late = True

    def compute(self, batch: Any = None, *, sites: bool = False, put_back: bool = True) -> Computed:
        """The step from the kept state: loss, outputs of the model, gradients, updates; ``sites``:
        also what each module takes in and returns, and their gradients. ``put_back=False`` goes on
        from where the model is.
        """
        if put_back:
            self.put_back()
        for parameter in self.parameters.values():
            parameter.grad = None
        if self.settings.seed is not None:
            own: list[Any] = [generator.manual_seed for generator in self._generators]
            for seed in (torch.manual_seed, np.random.seed, random.seed, *own):
                seed(self.settings.seed)
        drawn = self._drawn()
        before = {name: p.detach().clone() for name, p in self.parameters.items()}
        given = self.map_batch(lambda _, t: t.clone()) if batch is None else batch
        for name, tensor in flatten(given, "batch") if self.given.trained else ():
            if name in self.given.trained and not tensor.requires_grad:
                tensor.requires_grad_()
        kept, late = Computed(), self.settings.reads_late
        learned = self.learned if self.settings.learns else None
        watch = Observer(self.model, kept, sites, learned, self.inside)
        calls = Calls(self.settings.dropout, None if self.inside is None else watch.called)
        with watch.hooks(self.parameters, late), calls.seen(), contextlib.ExitStack() as stack:
            for layer in () if self.settings.dropout else self.model.modules():
                if isinstance(layer, torch.nn.RNNBase):  # an argument of the kernel
                    stack.enter_context(mock.patch.object(layer, "dropout", 0.0))
            returned = self.step(*((self.model, given) if self.takes_model else (given,)))
            loss: Any = _loss(returned)
            if loss is not None and loss.grad_fn is not None and not calls.has_backward:
                loss.backward()
            if late:
                watch.read_gradients()
        self.draws = drawn != self._drawn()
        if learned is not None:
            learned.attention_calls, learned.has_autocast = calls.attention, calls.has_autocast
        if loss is not None:
            kept.tensors["loss", ""] = loss.detach().clone()
        for name, tensor in flatten(returned, "returned"):
            if tensor is not loss and tensor.is_floating_point():
                kept.tensors["output", name] = tensor.detach().clone()
        for name, parameter in () if late else self.parameters.items():
            if not torch.equal(parameter.detach(), before[name]):
                kept.tensors["update", name] = parameter.detach() - before[name]
        # Rows first where they are known, and zeros where the mask hides a token.
        masks = self.given.real_tokens(given)
        for key in self.layouts.keys() & kept.tensors:
            with contextlib.suppress(RuntimeError):  # another shape in this computation
                tensor = self.layouts[key].rows_first(kept.tensors[key])
                kept.tensors[key] = self.without_hidden(tensor, masks, self.layouts[key].shape)
                kept.rows.add(key)
        return kept

    def without_hidden(
        self, tensor: torch.Tensor, masks: Sequence[torch.Tensor], shape: torch.Size
    ) -> torch.Tensor:
        """Zeros in place of the tokens that ``masks`` hide; ``shape``: that of the tensor in the
        step as it is.
        """
        for real in masks:
            sizes = list(enumerate(zip(tensor.shape, shape)))[1:]
            at = [d for d, (n, was) in sizes if n == real.shape[1] and was in self.widths]
            if at and (at[0] == 1 or len(at) == 1) and tensor.shape[0] == real.shape[0]:
                places = [1] * tensor.dim()
                places[0], places[at[0]] = real.shape
                return tensor.masked_fill(~real.view(places), 0)
        return tensor

    def put_back(self) -> None:
        """The kept state, with the weights perturbed where ``noise`` asks for it."""
        self.state.put_back()
        torch.clear_autocast_cache()  # of a caller's region: it holds the weights of before
        draw = torch.Generator().manual_seed(self.settings.noise)
        with torch.no_grad():
            for holder, name, tensor, kept in self._loose:
                holder[name] = tensor
                tensor.detach().copy_(kept)
            for parameter in self._weights if self.settings.noise else ():
                if parameter.dtype.to_real().is_floating_point:
                    size = 0.75 * self.settings.ulps * self.eps
                    sign = torch.randint(0, 2, parameter.shape, generator=draw).to(parameter.device)
                    parameter.mul_(1 + size * (2 * sign - 1).to(parameter.dtype))

    def _drawn(self) -> tuple[Any, ...]:
        """The state that changes where a random number is drawn on the host."""
        kept = Generators().to_dict()
        own = [kept["torch"], *(state for states in kept["devices"].values() for state in states)]
        own += [generator.get_state() for generator in self._generators]
        return [bytes(state.numpy()) for state in own], kept["numpy"][2], kept["python"]

    def evaluate(self, seed: int, sites: bool = False, *, put_back: bool = True) -> Computed:
        """The model in evaluation, on what the step called it with."""
        args, kwargs = self.learned.call

        def evaluated(*_: Any) -> None:
            self.model.eval()  # until the state is put back
            self.model(*args, **kwargs)

        seeded = mock.patch.object(self.settings, "seed", seed)
        with seeded, mock.patch.object(self, "step", evaluated), torch.no_grad():
            return self.compute(sites=sites, put_back=put_back)


def _takes_model(step: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(step).parameters.values()
    except (TypeError, ValueError):
        return False
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(param.kind in kinds and param.default is param.empty for param in parameters) == 2


def _loss(returned: Any) -> Optional[torch.Tensor]:
    """The loss among what a step returns: what is called so, or the first scalar."""
    named = returned.get("loss") if isinstance(returned, dict) else getattr(returned, "loss", None)
    if isinstance(named, torch.Tensor) and named.numel() == 1:
        return named
    if isinstance(returned, float):
        return torch.tensor(returned, dtype=torch.float64)
    tensors = (tensor for _, tensor in flatten(returned, "returned"))
    return next((t for t in tensors if t.numel() == 1 and t.is_floating_point()), None)


class Relation:
    """A way to compute a training step that must agree with the step as it is. A subclass
    overrides what it needs, and is given to ``fastcheck.prove(relations=[...])``::

        class MyKernel(fastcheck.Relation):
            name = "my attention against torch's"

            def changed(self, case):
                return unittest.mock.patch.object(my_model, "attention", reference_attention)

    Attributes:
        name: what the table calls it.
        kinds: what is compared, of ``"loss"``, ``"output"`` (of the model), ``"gradient"`` and
            ``"update"``.
        measured: the kinds that a healthy loss may not agree in; if they alone differ the step
            depends on the batch by design.
        mixes_rows: rows are computed in another order or company.
        is_exact: computed is the very same. A step that differs then may differ by itself, which
            is not to count as its noise.
        reduces: gradients of parameters are reduced after they were computed.
        draws_alike: the same random numbers are drawn for the same elements. If not, dropout is
            left out, and a step that draws other random numbers is not asked.
    """

    name = ""
    kinds: tuple[str, ...] = ("loss", "output", "gradient")
    measured: tuple[str, ...] = ()
    mixes_rows = False
    is_exact = False
    reduces = False
    draws_alike = True

    def why_not(self, case: TestedStep) -> str:
        """The reason why the relation can't be asked of this step, or ``""``."""
        return ""

    def by_design(self, case: TestedStep) -> str:
        """The reason why this step may depend on what the relation changes, or ``""``."""
        return ""

    def changed(self, case: TestedStep) -> contextlib.AbstractContextManager[Any]:
        """A context in which the model, or torch, computes in another way. It is undone at its
        end.
        """
        return contextlib.nullcontext()

    def batch(self, case: TestedStep) -> Any:
        """The batch in its other form; see ``case.map_batch`` and ``case.take_rows``."""
        return case.map_batch(lambda _, tensor: tensor.detach().clone())

    def back(self, case: TestedStep, computed: Computed) -> Computed:
        """The results of the computation in the form of the step as it is. The tensors whose keys
        are in ``computed.rows`` have the rows of the batch in their first dimension.
        """
        return computed

    def reference(self, case: TestedStep, base: Computed, sites: bool = False) -> Computed:
        """The part of the step as it is that ``back()`` returns."""
        return base

    def note(self, case: TestedStep) -> str:
        """A note that is shown beside the score."""
        return ""

    def run(self, case: TestedStep, base: Computed, sites: bool = False) -> Computed:
        """The computation, in the form of ``base``, the step as it is."""
        with self.changed(case):
            return self.back(case, case.compute(self.batch(case), sites=sites))
