"""Relations in which the model, or torch, computes the same batch in another way."""

from __future__ import annotations

import contextlib
import functools
import importlib
import io
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, MethodType
from typing import Any
from unittest import mock

import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import checkpoint as checkpointing

from fastcheck.errors import ConfigError, first_line
from fastcheck.utils.text.numbers import counted
from fastcheck.utils.torch.training_state import Generators
from fastcheck.utils.torch.versions import is_compiled

from .case import Relation, TestedStep
from .observer import Computed, is_site, seen_checkpoints


class Again(Relation):
    """The step twice, from the same state, on the same tensors: it leaves the batch as it is."""

    name = "the same again"
    kinds = ("loss", "output", "gradient", "update")
    is_exact = True

    def run(self, case: TestedStep, base: Computed, sites: bool = False) -> Computed:
        kept = {name: t.detach().clone() for name, t in case.given.tensors.items()}
        case.compute(case.map_batch(lambda name, _: kept[name]))
        return case.compute(case.map_batch(lambda name, _: kept[name]), sites=sites)


class EvaluatedTwice(Relation):
    """The model in evaluation twice in a row, with two seeds: it draws nothing, and changes nothing
    that the second computes with.
    """

    name = "evaluation twice"
    kinds = ("output",)

    def why_not(self, case: TestedStep) -> str:
        return "" if case.learned.call != ((), {}) else "the step does not call the model itself"

    def by_design(self, case: TestedStep) -> str:
        case.settings.dropout = False
        first, other = (case.evaluate(seed).tensors for seed in (0, 1))
        case.settings.dropout = True
        if all(torch.equal(first[key], other[key]) for key in first.keys() & other if case.draws):
            return ""
        return (
            "it draws random numbers in evaluation, besides dropout: meant as in a VAE, or noise "
            "that was meant for training alone"
        )

    def run(self, case: TestedStep, base: Computed, sites: bool = False) -> Computed:
        case.evaluate(0)
        return case.evaluate(1, sites, put_back=False)

    def reference(self, case: TestedStep, base: Computed, sites: bool = False) -> Computed:
        return case.evaluate(0, sites)


class Checkpointed(Relation):
    """Activation checkpointing switched off where the step uses it, and else on: in each of the
    repeated layers, with the generators put back.
    """

    name = "activation checkpointing"
    kinds = ("loss", "output", "gradient", "update")

    def why_not(self, case: TestedStep) -> str:
        args, kwargs = case.learned.call
        if any(map(_is_cache, (*args, *kwargs.values()))):
            return "it is given a cache of keys and values, which a recompute fills again"
        if case.learned.checkpoints or self._has_switch(case) or self._layers(case):
            return ""
        return "the model has no repeated layers that could run twice"

    def _has_switch(self, case: TestedStep) -> bool:
        return bool(getattr(case.model, "supports_gradient_checkpointing", False))

    def _layers(self, case: TestedStep) -> list[torch.nn.Module]:
        # A recompute would write to buffers again, and compute with what was written: not with the
        # running statistics of a norm.
        written = {part for part in case.learned.written if not isinstance(part, _NormBase)}
        lists = (torch.nn.ModuleList, torch.nn.Sequential)
        holders = (holder for holder in case.model.modules() if isinstance(holder, lists))
        held = (layer for holder in holders for layer in holder if [*layer.parameters()])
        return [layer for layer in held if written.isdisjoint(layer.modules())]

    @contextlib.contextmanager
    def changed(self, case: TestedStep) -> Iterator[None]:
        model: Any = case.model
        inner: set[torch.nn.Module] = set()
        with contextlib.ExitStack() as stack:
            if case.learned.checkpoints:
                stack.enter_context(seen_checkpoints(leave_out=True))
            elif self._has_switch(case):
                for module in model.modules():  # it sets attributes, and adds a hook
                    for held in (vars(module), module._forward_hooks, module._forward_pre_hooks):
                        stack.enter_context(mock.patch.dict(held))
                model.register_forward_pre_hook(_switched_on, with_kwargs=True)
                # A cache of keys and values would be filled twice.
                off = mock.patch.object(model.config, "use_cache", False, create=True)
                stack.enter_context(off)
            else:
                for layer in self._layers(case):
                    if layer not in inner:
                        inner.update(layer.modules())
                        again = functools.partial(_checkpointed, layer, layer.forward)
                        stack.enter_context(mock.patch.object(layer, "forward", again))
            yield

    def note(self, case: TestedStep) -> str:
        return "switched off" if case.learned.checkpoints else "switched on"


def _switched_on(model: Any, args: Any, kwargs: Any) -> Any:
    """A hook: switched on in the call, because attributes are put back before it."""
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return args, {name: name != "use_cache" and held for name, held in kwargs.items()}


def _is_cache(value: object) -> bool:
    """True if it is a cache of keys and values, as those of transformers are."""
    return hasattr(value, "get_seq_length")


def _checkpointed(layer: torch.nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
    # A recompute would fill a cache again.
    args = tuple(None if _is_cache(held) else held for held in args)
    kwargs = {name: None if _is_cache(held) else held for name, held in kwargs.items()}
    # A recompute runs outside of functional_call(), which has put tensors in the place of these.
    if not all(isinstance(p, torch.nn.Parameter) for p in layer.parameters()):
        return forward(*args, **kwargs)
    return checkpointing.checkpoint(forward, *args, use_reentrant=False, **kwargs)


class AttentionBackend(Relation):
    """scaled_dot_product_attention by its definition (SDPBackend.MATH)."""

    name = "attention by its definition"

    def why_not(self, case: TestedStep) -> str:
        return "" if case.learned.attention_calls else "scaled_dot_product_attention is not called"

    draws_alike = False  # a backend draws dropout in its own way

    def changed(self, case: TestedStep) -> Any:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        return sdpa_kernel(SDPBackend.MATH)


class Autocast(Relation):
    """All in the format of the weights: regions of torch.autocast are left out. The noise is that
    of the format in which the modules compute within them.
    """

    name = "autocast against none"

    def why_not(self, case: TestedStep) -> str:
        return "" if case.learned.has_autocast else "the step does not use torch.autocast"

    @contextlib.contextmanager
    def changed(self, case: TestedStep) -> Iterator[None]:
        off: Any = dict.fromkeys(("__enter__", "__exit__"), lambda *_: None)
        with contextlib.ExitStack() as stack:
            for device in {"cpu", *(p.device.type for p in case.parameters.values())}:
                stack.enter_context(torch.autocast(device, enabled=False))  # of a caller's region
            stack.enter_context(mock.patch.multiple(torch.autocast, **off))
            yield


class TorchCompile(Relation):
    """The model within torch.compile; or without, where it is compiled already.

    Args:
        backend: of torch.compile, by its name, or a function.
    """

    draws_alike = False  # a backend draws dropout in its own way

    def __init__(self, backend: Any = "inductor") -> None:
        name = backend if isinstance(backend, str) else getattr(backend, "__name__", "a function")
        self.name = f"torch.compile ({name}) against eager"
        self._backend = backend
        self._graphs: list[None] = []
        self._forward: Any = None

    def why_not(self, case: TestedStep) -> str:
        if is_compiled(case.model):
            known = hasattr(torch.compiler, "set_stance")
            return "" if known else "this torch can't run what is compiled without torch.compile"
        case.settings.dropout = False
        try:
            with self.changed(case):
                case.compute()
        except Exception as raised:
            error = getattr(raised, "inner_exception", raised)  # of a backend
            return f"torch.compile: {type(error).__name__}: {first_line(error)}"
        if case.draws:
            return "it draws random numbers within torch.compile, which draws them in another way"
        return "" if self._graphs else "torch.compile makes no graph of the model"

    def changed(self, case: TestedStep) -> Any:
        if is_compiled(case.model):
            return torch.compiler.set_stance("force_eager")
        forward = self._forward or self._compiled(case.model.forward)
        return mock.patch.object(case.model, "forward", forward)

    def _compiled(self, forward: Any) -> Any:
        make = importlib.import_module("torch._dynamo").lookup_backend(self._backend)
        graphs = self._graphs  # the relation would be in a cycle that is never collected

        def backend(graph: Any, inputs: Any) -> Any:
            graphs.append(None)
            return make(graph, inputs)

        function = getattr(forward, "__func__", None)
        if isinstance(function, FunctionType):
            # Graphs are kept with the code of a function: with a copy, which the relation holds.
            code, defaults = function.__code__.replace(), function.__defaults__
            own = FunctionType(code, function.__globals__, None, defaults, function.__closure__)
            own.__kwdefaults__ = function.__kwdefaults__
            forward = MethodType(own, forward.__self__)
        self._forward = torch.compile(forward, backend=backend, dynamic=False)
        return self._forward

    def note(self, case: TestedStep) -> str:
        return counted(len(self._graphs), "graph") if self._graphs else ""


class Unshared(Relation):
    """A parameter that stands in several places, replaced by copies: their gradients add up to
    its own.
    """

    name = "shared parameters as copies"
    kinds = ("loss", "output", "gradient")

    def _places(self, case: TestedStep) -> list[tuple[str, str]]:
        first: dict[int, str] = {}
        named = case.model.named_parameters(remove_duplicate=False)
        pairs = [(first.setdefault(id(parameter), name), name) for name, parameter in named]
        return [(original, name) for original, name in pairs if original != name]

    def why_not(self, case: TestedStep) -> str:
        return "" if self._places(case) else "no parameter stands in two places"

    def run(self, case: TestedStep, base: Computed, sites: bool = False) -> Computed:
        case.put_back()  # the copies are of the weights as they are computed with
        places = self._places(case)
        with contextlib.ExitStack() as stack:
            for _, name in places:
                path, _, last = name.rpartition(".")
                held: dict[str, Any] = case.model.get_submodule(path)._parameters
                copy = torch.nn.Parameter(held[last].detach().clone(), held[last].requires_grad)
                for changed, key in ((held, last), (case.parameters, name)):
                    stack.enter_context(mock.patch.dict(changed, {key: copy}))
            computed = case.compute(put_back=False, sites=sites)
        tensors = computed.tensors
        for original, name in places:
            if ("gradient", name) in tensors:
                part, whole = tensors.pop(("gradient", name)), ("gradient", original)
                tensors[whole] = tensors[whole] + part if whole in tensors else part
        return computed


class SavedAndLoaded(Relation):
    """Two steps, against one step, torch.save, the state before it, torch.load and one step: what
    state_dict() leaves out is a step old then.
    """

    name = "save, load and go on"
    draws_alike = False  # a model that is built anew in its first step draws its weights there
    kinds = ("loss", "output", "gradient", "update")

    def run(self, case: TestedStep, base: Computed, sites: bool = False) -> Computed:
        case.compute()
        file = io.BytesIO()
        torch.save([holder.state_dict() for holder in case.saved], file)
        generators = Generators()
        case.put_back()
        file.seek(0)
        for holder, state in zip(case.saved, torch.load(file, weights_only=False)):
            holder.load_state_dict(state)
        generators.put_back()
        return case.compute(put_back=False, sites=sites)

    def reference(self, case: TestedStep, base: Computed, sites: bool = False) -> Computed:
        case.compute()
        return case.compute(put_back=False, sites=sites)


class Golden(Relation):
    """The step as a file has it: its loss, what the model returned, gradients and updates. The
    tolerance is that of every relation: measured, so that another machine may round otherwise.

    Args:
        path: the file, which torch.load() reads.
        update: it is written, with the tensors of the step as it is now.
    """

    name = "golden record"
    kinds = ("loss", "output", "gradient", "update")

    def __init__(self, path: Path, update: bool = False) -> None:
        self._path, self._update = path, update

    def run(self, case: TestedStep, base: Computed, sites: bool = False) -> Computed:
        now = {key: t for key, t in base.tensors.items() if not is_site(key)}
        if self._update:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            torch.save({key: t.detach().cpu().clone() for key, t in now.items()}, self._path)
            return base
        kept = torch.load(self._path, map_location="cpu", weights_only=True)
        was, is_now = ({(" ".join(k), tuple(t.shape)) for k, t in c.items()} for c in (kept, now))
        if was != is_now:
            expected, got = str(dict(was - is_now)), str(dict(is_now - was))
            what = "the golden record is of another step"
            hint = "pytest --fastcheck-update writes it anew"
            raise ConfigError(what, expected=expected, got=got, hint=hint)
        return Computed(kept)
