"""Who made the first non-finite gradient of a step: the call whose backward it came out of.

Autograd hands gradients back from the loss to the batch, each one complete before it is passed on.
So when a gradient is the first that is non-finite, those of whatever was computed from its tensor
are finite, and the code in between is to blame.
"""

from __future__ import annotations

from typing import Optional

from ._calls import Call, CallLog
from ._finding import Finding
from ._site import SiteTable

__all__ = ["blame"]


def blame(
    finding: Finding, token: int, calls: CallLog, sites: SiteTable
) -> tuple[Optional[Call], str]:
    """The call to blame for the gradient of the tensor ``token``, if it is known, and the reason.

    Where a module read the tensor, the finding is blamed on that module's input.
    """
    readers = calls.readers(token)
    if readers:
        reader = readers[-1]
        source = sites[reader.input_sites[reader.inputs.index(token)]]
        finding.blamed_site = reader.node.site("grad_input", source.label, source.index)
        finding.blamed_call = reader
        others = [c.node.name for c in readers if c.depth == reader.depth and c is not reader]
        also = f" ({', '.join(others)} read the same tensor)" if others else ""
        return reader, (
            f"the backward of {reader.node.name} made it: the gradients of what it returned "
            f"were finite{also}"
        )
    maker = calls.maker(token)
    if maker is None:
        return None, (
            "it is the first non-finite gradient of this step; the forward pass that it belongs "
            "to came earlier"
        )
    user = maker.parent
    while user is not None and token in user.outputs:
        user = user.parent
    if user is None:
        return None, (
            "the code that used it after the model (the loss) made it: no gradient came back "
            "before this one"
        )
    return user, (
        f"code of {user.node.name}.forward that used it made it, outside its submodules: the "
        "gradients that came back before this one were finite"
    )
