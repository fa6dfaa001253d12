"""Converts names to and from the style of msprobe and ptdbg_ascend.

``Functional.softmax.7.backward.output.0`` is the first gradient made by the eighth softmax of the
step, ``Module.layers.3.attn.Attention.forward.0`` the first call of a module.

The operators are ATen's, as the dispatcher runs them: a linear layer is ``Torch.addmm``. Their
calls are counted for each overload, in each step. Of a backward the input is the gradient that came
in, the output what was made of it.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Optional

import torch

from fastcheck.errors import ConfigError, did_you_mean
from fastcheck.record.site import OUTSIDE, Site

KINDS = ("Functional", "Tensor", "Torch", "VF", "Aten", "Distributed", "Custom", "Module")

#: The namespaces that a function of torch's API may be of.
_OF_THE_API = ("Functional", "Tensor", "Torch", "VF")
#: Names of kernels, and the usual names of the same operators.
_RENAMED = {
    "_softmax": "softmax",
    "_log_softmax": "log_softmax",
    "_softmax_backward_data": "softmax_backward",
    "_log_softmax_backward_data": "log_softmax_backward",
    "native_layer_norm": "layer_norm",
    "native_group_norm": "group_norm",
    "native_batch_norm": "batch_norm",
    "_native_batch_norm_legit": "batch_norm",
    "_batch_norm_with_update": "batch_norm",
    "native_dropout": "dropout",
    "_embedding_bag": "embedding_bag",
    "_ctc_loss": "ctc_loss",
    "nll_loss_forward": "nll_loss",
    "nll_loss2d_forward": "nll_loss",
    "_scaled_dot_product_flash_attention_for_cpu": "scaled_dot_product_attention",
    "_scaled_dot_product_flash_attention": "scaled_dot_product_attention",
    "_scaled_dot_product_efficient_attention": "scaled_dot_product_attention",
    "_scaled_dot_product_cudnn_attention": "scaled_dot_product_attention",
}
#: The methods that Python's operators call on a tensor.
_ARITHMETIC = {"add", "sub", "mul", "div", "pow", "neg", "remainder", "floor_divide"}
_ARITHMETIC |= {"eq", "ne", "lt", "le", "gt", "ge"}
_ARITHMETIC |= {"bitwise_and", "bitwise_or", "bitwise_not", "bitwise_xor"}
_DUNDERS = {"truediv": "div", "mod": "remainder", "floordiv": "floor_divide", "and": "bitwise_and"}
_DUNDERS.update({"or": "bitwise_or", "xor": "bitwise_xor", "invert": "bitwise_not"})

_PARTS = {
    "input": "input",
    "output": "output",
    # A backward reads the gradient of what the forward returned.
    "grad_output": "input",
    "grad_input": "output",
}
_STORED = {"param": "parameters", "param_grad": "parameters_grad", "buffer": "buffers"}

_KIND = "|".join(KINDS)
_DIRECTION = "forward|backward|optimizer"
_API = re.compile(
    rf"({_KIND})\.(\S+?)(?:\.(\d+))?(?:\.({_DIRECTION})(?:\.(input|output)(?:\.(\d+))?)?)?"
)
_PTDBG = re.compile(
    rf"({_KIND})_(\S+?)(?:_(\d+))?(?:_({_DIRECTION})(?:_(input|output)(?:[_.](\d+))?)?)?"
)
# MindSpore has cells.
_MODULE = re.compile(
    rf"(Module|Cell)\.(\S+?)(?:\.({_DIRECTION})(?:\.(\d+)(?:\.(input|output)(?:\.(\d+))?)?)?)?"
)
_BEGINNING = re.compile(rf"(?:{_KIND}|Cell)[._]\S+$")
_STORED_NAME = re.compile(rf"(Module|Cell)\.(\S+)\.({'|'.join(_STORED.values())})\.([^.]+)")


@dataclass(frozen=True)
class TensorName:
    """A name, or the beginning of a name: what is None stands for any. ``name`` may be a pattern,
    as of fnmatch; of a module it is its path and its type.
    """

    kind: str
    name: str
    call: Optional[int] = None
    direction: Optional[str] = None
    part: Optional[str] = None
    index: Optional[int] = None
    #: The name of a tensor that a module stores: ``weight``.
    stored: Optional[str] = None
    #: The name as it was given, where ``name`` is what it stands for: ``__iadd__`` for ``add_``.
    written: str = field(default="", compare=False)

    @property
    def api(self) -> str:
        """``Tensor.__iadd__``: as torch's Python API has it."""
        return f"{self.kind}.{self.written or self.name}"

    @property
    def path(self) -> str:
        """The path of a module, without its type; empty for the model itself."""
        return self.name.rpartition(".")[0]

    def matches(self, site: Site, call: int) -> bool:
        """True if it is a name, or the beginning of a name, of this site in this call."""
        other = name_of(site, call)
        return (
            other is not None
            and other.kind == self.kind
            and fnmatchcase(other.name, self.name)
            and all(
                mine in (None, theirs)
                for mine, theirs in (
                    (self.call, other.call),
                    (self.direction, other.direction),
                    (self.part, other.part),
                    (self.index, other.index),
                    (self.stored, other.stored),
                )
            )
        )

    def has_op(self, op: str) -> bool:
        """True if an operator (``aten._softmax``) has this name."""
        kind, name = msprobe_api_of(op)
        return kind == self.kind and fnmatchcase(name, self.name)

    def __str__(self) -> str:
        if self.stored is not None:
            return f"{self.kind}.{self.name}.{self.part}.{self.stored}"
        parts: tuple[object, ...] = (self.call, self.direction)
        if self.kind == "Module":
            parts = (self.direction, self.call)
        parts = (self.kind, self.name, *parts, self.part, self.index)
        return ".".join(str(part) for part in parts if part is not None)


def msprobe_name(site: Site, call: int) -> str:
    """The name of a record's tensor in this style; the site's own spelling, where the style has
    none (a loss).
    """
    name = name_of(site, call)
    return str(site) if name is None else str(name)


def parse(text: str) -> TensorName:
    """The inverse of msprobe_name(); takes beginnings of names too (``Functional.softmax``,
    ``Functional.softmax.7.backward``), patterns for the operator or module, and ptdbg_ascend's
    underscores.

    Raises ConfigError for what is no such name.
    """
    stored = _STORED_NAME.fullmatch(text)
    if stored:
        _, name, part, label = stored.groups()
        return TensorName("Module", name, part=part, stored=label)
    module = _MODULE.fullmatch(text)
    if module:
        _, name, direction, call, part, index = module.groups()
        return TensorName("Module", name, _number(call), direction, part, _number(index))
    api = _API.fullmatch(text) or _PTDBG.fullmatch(text)
    if api is None:
        kind = re.split(r"[._]", text, maxsplit=1)[0]
        raise ConfigError(
            "this is not the name of a tensor",
            expected="one such as Functional.softmax.7.backward.output.0, or its beginning; "
            f"it begins with {', '.join(KINDS)}",
            got=repr(text),
            hint=did_you_mean(kind, KINDS),
        )
    kind, name, call, direction, part, index = api.groups()
    plain = plain_function(name)
    return TensorName(kind, plain, _number(call), direction, part, _number(index), written=name)


def is_name(text: str) -> bool:
    """True if parse() is to read it: it begins as names of this style do."""
    return _BEGINNING.match(text) is not None


def _number(text: Optional[str]) -> Optional[int]:
    return None if text is None else int(text)


def plain_function(name: str) -> str:
    """``__iadd__`` is ``add_``; ``__getitem__`` has no other name."""
    dunder = re.fullmatch(r"__(\w+)__", name)
    if dunder is None:
        return name
    bare = dunder.group(1)
    if bare in _DUNDERS or bare in _ARITHMETIC or bare == "matmul":
        return _DUNDERS.get(bare, bare)
    inner = _DUNDERS.get(bare[1:], bare[1:])
    if bare[0] not in "ir" or inner not in (*_ARITHMETIC, "matmul"):
        return name
    return inner + ("_" if bare[0] == "i" else "")


def plain_api(name: str) -> str:
    """``Tensor.__iadd__`` is ``Tensor.add_``, as torch tells what is called; ``Torch.linalg_inv``
    is ``Torch.inv``, as msprobe has it.
    """
    kind, _, rest = name.partition(".")
    rest = plain_function(rest)
    return f"{kind}.{rest[7:] if kind == 'Torch' and rest.startswith('linalg_') else rest}"


def name_of(site: Site, call: int = 0) -> Optional[TensorName]:
    """The name of a site in one of its calls; None for what the style has no name for."""
    part = _PARTS.get(site.role)
    if site.op is not None and part is not None:
        kind, name = msprobe_api_of(site.op)
        return TensorName(kind, name, call, site.direction, part, site.index)
    if not site.module_type or site.module_type == OUTSIDE:
        return None
    module = f"{site.module}.{site.module_type}" if site.module else site.module_type
    if part is not None:
        return TensorName("Module", module, call, site.direction, part, site.index)
    if site.role in _STORED:
        return TensorName("Module", module, part=_STORED[site.role], stored=site.label)
    return None


@functools.lru_cache(maxsize=4096)
def has_api_name(op: str, api: str) -> bool:
    """True if an operator (``aten._softmax``) is called ``Functional.softmax`` in this style."""
    return plain_api(".".join(msprobe_api_of(op))) == plain_api(api)


@functools.lru_cache(maxsize=4096)
def msprobe_api_of(op: str) -> tuple[str, str]:
    """``("Functional", "softmax")`` for ``aten._softmax``: the kind and the name, without
    overload; for a function of the API its own.
    """
    space, _, rest = op.partition(".")
    if space in _OF_THE_API:
        return space, rest
    base = rest.split(".", 1)[0]
    if space == "c10d":
        return "Distributed", base.rstrip("_")
    if space != "aten":
        return "Custom", f"{space}.{base}"
    name = _RENAMED.get(base, base)
    if name in _ARITHMETIC or name.endswith("_"):
        return "Tensor", name
    for kind, holder in (("Functional", torch.nn.functional), ("Torch", torch)):
        if not name.startswith("_") and callable(getattr(holder, name, None)):
            return kind, name
    return ("Tensor" if callable(getattr(torch.Tensor, name, None)) else "Aten"), name
