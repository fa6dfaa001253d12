"""The two styles in which tensors are named for a person: fastcheck's own, and that of msprobe."""

from __future__ import annotations

from typing import Optional

from ._errors import ConfigError, did_you_mean, explain
from ._naming import module_name, tensor_name
from ._op_names import spell
from ._site import Site

__all__ = ["STYLES", "check_style", "place", "row_name"]

STYLES = ("fastcheck", "msprobe")


def check_style(style: object) -> str:
    """``style``, if it is one; ConfigError otherwise."""
    if isinstance(style, str) and style in STYLES:
        return style
    raise ConfigError(
        explain(
            "unknown style",
            expected=" or ".join(map(repr, STYLES)),
            came=repr(style),
            do=did_you_mean(str(style), STYLES),
        )
    )


def place(site: Site, call: int, style: str) -> str:
    """In a sentence: ``output[0] of layers.3.attn (Attention)``, at op level ``output of aten.mm #3
    in layers.3.attn (Attention)``; or ``Module.layers.3.attn.Attention.forward.0.output.0``.
    """
    if style == "msprobe":
        return spell(site, call)
    op = f"{site.op} #{call} in " if site.op else ""
    return f"{tensor_name(site)} of {op}{module_name(site)}"


def row_name(site: Site, call: Optional[int], style: str) -> str:
    """In a table: ``layers.3.attn output[0]``; at op level with the operator's name and call."""
    if style == "msprobe":
        return spell(site, call or 0)
    name = site.module or site.module_type
    if site.op:
        name += f" {site.op}" + ("" if call is None else f" #{call}")
    return f"{name} {tensor_name(site)}"
