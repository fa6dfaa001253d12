"""Training on the fake accelerator."""

from __future__ import annotations

from typing import Any, Optional

import torch
from torch import nn

from fakes import fake_device
from support.programs.training import Apply, batches, poison

fake: Any = fake_device.load()
NAME = fake.name()


def loop(
    model: nn.Module,
    steps: int,
    *,
    fault: Optional[int] = None,
    damage: Any = poison,
    optimizer: Optional[torch.optim.Optimizer] = None,
) -> list[torch.Tensor]:
    """Trains without ever asking the device for a value; the losses stay there."""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for step, x in enumerate(batches(steps)):
        if step == fault:
            model.tail.function = damage
        optimizer.zero_grad()
        loss = model(x.pin_memory().to(NAME, non_blocking=True)).float().square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        del loss
        model.tail.function = Apply().function
    return losses
