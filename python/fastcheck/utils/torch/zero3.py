"""Parameters that DeepSpeed's ZeRO 3 has partitioned: each rank keeps a flat part of each."""

from __future__ import annotations

from typing import Any, Optional

import torch


def kept_part(tensor: Any) -> Optional[torch.Tensor]:
    """What this rank keeps of a parameter that is not gathered now, flat; None of any other tensor.
    No communication.
    """
    kept = getattr(tensor, "ds_tensor", None)
    if not isinstance(kept, torch.Tensor) or tensor.numel() == tensor.ds_numel:
        return None
    return without_padding(tensor, kept)


def without_padding(parameter: Any, flat: torch.Tensor) -> torch.Tensor:
    """This rank's part ``flat`` of a parameter, or of its gradient, without what DeepSpeed adds
    behind the last element to make all parts equally long, which is never written.
    """
    rank = 0
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        rank = torch.distributed.get_rank(getattr(parameter, "ds_process_group", None))
    held = int(parameter.ds_numel) - rank * flat.numel()
    return flat.detach().reshape(-1)[: max(0, held)]
