"""How a site is named in running text: its module, and its tensor within the module."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._site import Site


#: The module type of what was computed outside of every observed module: a loss, an optimizer.
OUTSIDE = "outside the model"


def module_name(site: Site) -> str:
    """``layers.3.attn (Attention)``; the installed model itself has no path and is named by its
    type.
    """
    if site.op and site.module_type == OUTSIDE:
        return OUTSIDE
    return (
        f"{site.module} ({site.module_type})" if site.module else f"{site.module_type} (the model)"
    )


def tensor_name(site: Site) -> str:
    """The tensor within its module: ``output[0]``, ``gradient of output[0]``."""
    if site.role in ("grad_input", "grad_output"):
        label = site.label
        return label if "grad" in label else f"gradient of {label}"
    prefixes = {
        "param": "parameter ",
        "param_grad": "gradient of parameter ",
        "buffer": "buffer ",
        "optimizer_state": "optimizer state ",
    }
    if site.role == "loss":
        return "the loss"
    if site.role == "param_grad" and "grad" in site.label:
        return site.label
    return prefixes.get(site.role, "") + site.label
