"""The two styles of tensor names in printed text: fastcheck's own and msprobe's."""

from __future__ import annotations

from typing import Optional

from fastcheck.errors import choice
from fastcheck.record.site import Site, module_name

from .msprobe import msprobe_name, name_of

STYLES = ("fastcheck", "msprobe")


def check_style(style: object) -> str:
    """``style``, if it is a style's name; ConfigError otherwise."""
    return choice("style", style, STYLES)


def tensor_place(site: Site, call: int, style: str, api: str = "") -> str:
    """The name of a tensor within a sentence: ``output[0] of layers.3.attn (Attention)``, at op
    level ``output of aten.mm #3 in layers.3.attn (Attention)``; or
    ``Module.layers.3.attn.Attention.forward.0.output.0``. ``api``: the call of torch's API that it
    belongs to, where that is known: ``Functional.linear.145``.
    """
    if style == "msprobe":
        name = name_of(site, call) if api else None
        if name is not None:
            return f"{api}.{site.direction}.{name.part}.{name.index}"
        return msprobe_name(site, call)
    op = f"{site.op} #{call} in " if site.op else ""
    return f"{site.tensor_name} of {op}{module_name(site)}"


def row_name(site: Site, call: Optional[int], style: str) -> str:
    """The name of a tensor in a table: ``layers.3.attn output[0]``, ``parameter
    layers.3.attn.weight``; at op level with the operator's name and call.
    """
    if style == "msprobe":
        return msprobe_name(site, call or 0)
    if site.is_stored:
        return site.tensor_name
    name = site.module or site.module_type
    if site.op:
        name += f" {site.op}" + ("" if call is None else f" #{call}")
    return f"{name} {site.tensor_name}".strip()
