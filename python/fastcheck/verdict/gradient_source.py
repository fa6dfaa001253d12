"""Finds the call whose backward made the first non-finite gradient of a step.

Autograd hands gradients back from the loss to the batch, each one complete before it is passed on.
So when a gradient is the first that is non-finite, those of whatever was computed from its tensor
are finite, and the code in between is to blame.
"""

from __future__ import annotations

from typing import Optional

from fastcheck.calls.module_calls import Call, CallLog
from fastcheck.record.site import SiteTable

from .finding import Finding

__all__ = ["blame"]


def blame(
    finding: Finding, token: int, calls: CallLog, sites: SiteTable
) -> tuple[Optional[Call], str]:
    """The call to blame for the gradient of the tensor ``token``, if it is known, and the reason.

    Where a module read the tensor, the finding is blamed on that module's input.
    """
    consumers = calls.consumers(token)
    if consumers:
        consumer = consumers[-1]
        source = sites[consumer.input_sites[consumer.inputs.index(token)]]
        finding.blamed_site = consumer.node.site("grad_input", source.label, source.index)
        finding.blamed_call = consumer
        others = [c.node.name for c in consumers if c.depth == consumer.depth and c is not consumer]
        if others:
            return consumer, (
                f"the backward of {consumer.node.name} made it, or that of {', '.join(others)}, "
                "which read the same tensor: the gradients of what they returned were finite"
            )
        return consumer, (
            f"the backward of {consumer.node.name} made it, or that of code outside of modules "
            "that used the same tensor: the gradients of what the module returned were finite"
        )
    producer = calls.producer(token)
    if producer is None:
        return None, (
            "it is the first non-finite gradient of this step; the forward pass that it belongs "
            "to came earlier"
        )
    user = producer.parent
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
