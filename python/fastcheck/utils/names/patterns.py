"""Reads the names of ops, APIs and modules in every spelling that a message, a log, msprobe or
ptdbg_ascend prints them in.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Optional

import torch

from fastcheck.errors import ConfigError, did_you_mean

from .msprobe import TensorName, is_name, parse

_DIRECTIONS = ("forward", "backward", "optimizer")
# The head of a stop message: "12 NaN in output of aten.sqrt #0 in decoder.gate (Gate) at step 4".
_HEADLINE = re.compile(
    r"(?:.* of )?(?P<op>[\w.]+) #(?P<call>\d+) in (?P<module>.+?)(?: at step \d+.*)?"
)
# The same of a module: "3 Inf in output[0] of decoder.gate (Gate) at step 4".
_MODULE_HEADLINE = re.compile(r".* (?:of|to|in) (?P<module>\S+ \([^)]*\)) at step \d+.*")
# And in msprobe's style: "3 Inf in Functional.softmax.7.forward.output.0 at step 4".
_PEER_HEADLINE = re.compile(r".* in (?P<name>\S+) at step \d+.*")
_NUMBERED = re.compile(r"(?P<name>.+?) ?#(?P<call>\d+)")
_TYPE = re.compile(r"(?P<path>\S*?) ?\((?P<type>[^)]*)\)")


@dataclass(frozen=True)
class Wanted:
    """One name of a list; what is None may be anything. ``op`` and ``module`` may hold ``*``."""

    text: str
    op: Optional[str] = None
    #: ``Functional.softmax``, as msprobe names an API and fastcheck's msprobe style an operator.
    api: Optional[str] = None
    module: Optional[str] = None
    call: Optional[int] = None
    direction: Optional[str] = None
    #: ``dropout``, where ``op`` means a composite operator alone: the operators that run are those
    #: that it is made of, in a call of the API of this name.
    composite: str = ""

    def is_made_by(self, api: str) -> bool:
        """True if ``api`` (``Functional.dropout``, ``Tensor.__matmul__``) calls the composite
        operator.
        """
        return bool(self.composite) and api.rpartition(".")[2].strip("_") == self.composite


def read_op(text: str, option: str = "ops") -> Wanted:
    """An entry of ``ops=``, or another ``option`` that names an operator. ConfigError when no
    operator of this process can be meant.
    """
    name = text.strip()
    peer = _peer(name)
    if peer is not None:
        if peer.kind == "Module":
            raise ConfigError(
                f"{option}= names an operator, and this is the name of a module: {text!r}; give it "
                f'to modules=[{peer.path!r}], or as it is with level="module"'
            )
        return Wanted(text, api=peer.api, call=peer.call, direction=peer.direction)
    headline = _HEADLINE.fullmatch(name)
    if headline:
        return _checked(
            Wanted(
                text,
                op=headline.group("op"),
                call=int(headline.group("call")),
                module=_path(headline.group("module")),
            )
        )
    fields: dict[str, str] = {}
    call_number: Optional[int] = None
    for part in re.split(r" · |\s{2,}", name):
        numbered = _NUMBERED.fullmatch(part)
        bare = numbered.group("name") if numbered else part
        if part in _DIRECTIONS:
            fields.setdefault("direction", part)
        elif "op" in fields:
            break  # what follows names one of its tensors
        elif numbered or _split(bare)[1]:
            module, _, op = _split(bare)
            fields["op"] = op
            if module:
                fields.setdefault("module", module)
            if numbered:
                call_number = int(numbered.group("call"))
        elif not fields:
            fields["module"] = _path(part)
    if "op" not in fields:
        if "module" not in fields or " · " in name:
            return _checked(Wanted(text, op=name))
        fields["op"] = fields.pop("module")
    return _checked(
        Wanted(
            text,
            op=fields["op"],
            module=fields.get("module"),
            call=call_number,
            direction=fields.get("direction"),
        )
    )


def read_module(text: str) -> Wanted:
    """An entry of ``modules=``."""
    name = text.strip()
    peer = _peer(name)
    if peer is not None and peer.kind == "Module":
        return Wanted(text, module=peer.path, call=peer.call, direction=peer.direction)
    headline = _MODULE_HEADLINE.fullmatch(name)
    if headline:
        return Wanted(text, module=_path(headline.group("module")))
    parts = name.split(" · ")
    numbered = _NUMBERED.fullmatch(parts[0])
    direction = next((part for part in parts[1:] if part in _DIRECTIONS), None)
    return Wanted(
        text,
        module=_path(numbered.group("name") if numbered else parts[0]),
        call=int(numbered.group("call")) if numbered else None,
        direction=direction,
    )


def _peer(text: str) -> Optional[TensorName]:
    """A name in the style of msprobe and ptdbg_ascend."""
    headline = _PEER_HEADLINE.fullmatch(text)
    name = headline.group("name") if headline else text
    return parse(name) if is_name(name) else None


def _path(text: str) -> str:
    """``layers.3.attn (Attention)`` and ``Net (the model)`` without what is in brackets."""
    match = _TYPE.fullmatch(text.strip())
    if match is None:
        return "" if text.strip() == "the model" else text.strip()
    return "" if match.group("type") == "the model" else match.group("path")


# Operators


@functools.lru_cache(maxsize=1)
def _registered(names: tuple[str, ...]) -> frozenset[str]:
    return frozenset(name.replace("::", ".", 1) for name in names)


def op_names() -> frozenset[str]:
    """Every operator of this process, as ``aten.add.Tensor``."""
    return _registered(tuple(torch._C._dispatch_get_all_op_names()))


@functools.lru_cache(maxsize=1)
def _spaces(names: frozenset[str]) -> frozenset[str]:
    return frozenset(name.partition(".")[0] for name in names)


def _split(name: str) -> tuple[str, bool, str]:
    """The module path before an op's name, whether a namespace was found, and the op's name:
    ``2.aten.mul.Tensor`` is how a comparison spells it.
    """
    spaces = _spaces(op_names())
    parts = name.split(".")
    for place, part in enumerate(parts[:-1]):
        if part in spaces:
            return ".".join(parts[:place]), True, ".".join(parts[place:])
    return "", False, name


def op_patterns(name: str) -> list[str]:
    """The patterns that an entry of ``Filter(ops=)`` stands for: the pattern itself, or the
    operators that have this name in msprobe's style. ConfigError for the name of a module or of one
    call.
    """
    if not is_name(name):
        return [name]
    wanted = parse(name)
    if wanted.kind == "Module":
        hint = f": include={wanted.path!r} chooses it" if wanted.path else ""
        raise ConfigError(f"ops= chooses operators, and {name!r} is the name of a module{hint}")
    if wanted.call is not None:
        whole = f"{wanted.kind}.{wanted.name}"
        raise ConfigError(f"ops= chooses operators, not single calls: {whole!r}, not {name!r}")
    return [op for op in sorted(op_names()) if wanted.has_op(op)]


def _checked(wanted: Wanted) -> Wanted:
    op = wanted.op or ""
    if any(letter in op for letter in "*?["):
        return wanted
    known = op_names()
    meant = [name for name in known if matches_op(op, name)]
    if meant:
        # Others (quantized.dropout) run by their own names, and so do overloads that write to out=.
        ours = [name for name in meant if name.startswith("aten.") and not name.endswith(".out")]
        is_composite = bool(ours) and all(map(_is_composite, ours))
        base = ours[0].split(".")[1].strip("_") if is_composite else ""
        return replace(wanted, composite=base)
    space = op.partition(".")[0]
    candidates = [name for name in known if name.startswith(f"{space}.")] or known
    bases = sorted({".".join(name.split(".")[:2]) for name in candidates})
    raise ConfigError(
        f"ops= names an operator that there isn't: {wanted.text!r}",
        expected='a name such as "aten.softmax", "aten.mm #3", "layers.3.attn · aten.mm #7", '
        '"Functional.softmax.7.backward"',
        got=repr(wanted.text),
        hint=did_you_mean(op, bases),
    )


def _is_composite(name: str) -> bool:
    """True if it has no kernel of its own, and is made of other operators."""
    key = "CompositeImplicitAutograd"
    return torch._C._dispatch_has_kernel_for_dispatch_key(name.replace(".", "::", 1), key)


def op_spellings(op: str) -> tuple[str, str, str, str]:
    """``aten.add.Tensor``, ``aten.add``, ``add.Tensor`` and ``add``, in the order of
    csrc/torch/operators/filter.cpp.
    """
    space, _, rest = op.partition(".")
    base = rest.partition(".")[0]
    return op, f"{space}.{base}", rest, base


def matches_op(pattern: str, name: str) -> bool:
    """True if a pattern means an op: with or without namespace and overload; the underscore that
    some kernels' names begin with may be left out, so that ``aten.softmax`` is ``aten._softmax``.
    """
    space, _, rest = name.partition(".")
    base = rest.partition(".")[0]
    names: tuple[str, ...] = op_spellings(name)
    if base.startswith("_"):
        bare = base.lstrip("_")
        names += (f"{space}.{bare}", bare)
    literal = pattern.replace("[", "[[]")
    return pattern in names or any(fnmatchcase(spelling, literal) for spelling in names)


def matches_module(pattern: str, path: str) -> bool:
    """True if a pattern (as of fnmatch) matches the module at ``path`` or a module that contains
    it.
    """
    parts = path.split(".")
    inside = (".".join(parts[:length]) for length in range(1, len(parts) + 1))
    return any(prefix == pattern or fnmatchcase(prefix, pattern) for prefix in inside)
