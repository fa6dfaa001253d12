"""Names of a site's module for messages."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .site import Site


#: The module type of what was computed outside of every observed module: a loss, an optimizer.
OUTSIDE = "outside the model"


def module_name(site: Site) -> str:
    """``layers.3.attn (Attention)``; the installed model itself has no path and is named by its
    type.
    """
    if (site.op and site.module_type == OUTSIDE) or not (site.module or site.module_type):
        return OUTSIDE
    return (
        f"{site.module} ({site.module_type})" if site.module else f"{site.module_type} (the model)"
    )
