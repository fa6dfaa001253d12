"""A stand-in for DeepSpeed's engine with ZeRO 1: the public attributes that the adapter uses, as
deepspeed 0.19.8 has them. One rank; the optimizer holds the parameters as one flat tensor.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Optional

import torch
from torch import nn


class EventMonitor:
    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled
        self.events: list[tuple[str, float, int]] = []

    def write_events(self, event_list: list[tuple[str, float, int]]) -> None:
        self.events += event_list


class ZeroOptimizer:
    def __init__(self, parameters: list[nn.Parameter], scale: Optional[float]) -> None:
        self.params_in_partition = [parameters]
        self.averaged_gradients: dict[int, Optional[list[torch.Tensor]]] = {}
        flat = torch.cat([p.detach().float().reshape(-1) for p in parameters])
        self.flat = nn.Parameter(flat)
        self.optimizer = torch.optim.SGD([self.flat], lr=0.1)
        self.overflow = False
        self.loss_scale = scale or 1.0
        self._has_scale = scale is not None

    def take_gradients(self) -> None:
        kept = []
        for parameter in self.params_in_partition[0]:
            assert parameter.grad is not None
            kept.append(parameter.grad)
            parameter.grad = None
        padding: Any = torch.zeros(3)
        padding._zero_padding = True
        self.averaged_gradients[0] = [*kept, padding]

    def step(self) -> None:
        kept, self.averaged_gradients[0] = self.averaged_gradients[0], None
        assert kept is not None
        gradient = torch.cat([g.float().reshape(-1) for g in kept[:-1]]) / self.loss_scale
        self.overflow = self._has_scale and not bool(gradient.isfinite().all())
        if self.overflow:
            self.loss_scale /= 2
            return
        self.flat.grad = gradient
        self.optimizer.step()
        at = 0
        with torch.no_grad():
            for parameter in self.params_in_partition[0]:
                values = self.flat[at : at + parameter.numel()]
                parameter.copy_(values.view_as(parameter))
                at += parameter.numel()


class Engine(nn.Module):
    dp_world_size = 1
    global_rank = 0

    def __init__(
        self,
        module: nn.Module,
        scale: Optional[float] = None,
        stage: int = 1,
        monitors: bool = False,
    ) -> None:
        super().__init__()
        self.module = module
        self.optimizer = ZeroOptimizer(list(module.parameters()), scale)
        self.monitor = EventMonitor(monitors)
        self.global_steps = self.skipped_steps = 0
        self._stage, self._scale = stage, scale

    def fp16_enabled(self) -> bool:
        return self._scale is not None

    def zero_optimization_stage(self) -> int:
        return self._stage

    def forward(self, *args: Any) -> Any:
        return self.module(*args)

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> Any:
        return self.module.state_dict()

    def save_checkpoint(self, save_dir: str, tag: Optional[str] = None) -> bool:
        folder = Path(save_dir, tag or f"global_step{self.global_steps}")
        folder.mkdir(parents=True, exist_ok=True)
        torch.save({"module": self.module_state_dict()}, folder / "mp_rank_00_model_states.pt")
        Path(save_dir, "latest").write_text(folder.name)
        return True

    def backward(self, loss: torch.Tensor) -> None:
        (loss * self.optimizer.loss_scale).backward()
        self.optimizer.take_gradients()

    def step(self) -> None:
        self.optimizer.step()
        self.skipped_steps += self.optimizer.overflow
        self.global_steps += 1
