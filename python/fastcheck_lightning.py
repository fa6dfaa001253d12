"""The callback of Lightning programs that have no line of fastcheck: an environment variable asks
for it.

Lightning imports this module in every program that makes a Trainer, wherever fastcheck is
installed. A module of the package would import all of it, torch's extension included.
"""

from __future__ import annotations

import os
from typing import Any

__all__ = ["lightning_callbacks"]


def lightning_callbacks() -> list[Any]:
    """What Lightning adds to each Trainer (entry points ``lightning.pytorch.callbacks_factory``):
    with ``FASTCHECK=1`` a callback with the default options, else none, and nothing is imported.
    """
    if os.environ.get("FASTCHECK") != "1":
        return []
    from fastcheck.callbacks.lightning import Lightning

    return [Lightning(is_default=True)]
