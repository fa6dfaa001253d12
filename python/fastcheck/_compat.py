"""What old releases of torch have under another name, or not at all: the lowest is torch 2.1."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

__all__ = ["GradScaler", "is_compiling", "is_dynamo_compiling"]

if TYPE_CHECKING:
    from torch.amp import GradScaler
    from torch.compiler import is_compiling, is_dynamo_compiling
else:
    # torch.amp's since 2.3, of which CUDA's is then a subclass.
    GradScaler: Any = getattr(torch.amp, "GradScaler", torch.cuda.amp.GradScaler)
    # Since 2.3; before that torch.compile is not served, and nothing needs to be known of it.
    is_compiling: Any = getattr(torch.compiler, "is_compiling", lambda: False)
    is_dynamo_compiling: Any = getattr(torch.compiler, "is_dynamo_compiling", lambda: False)
