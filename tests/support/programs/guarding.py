"""Helpers shared by the tests of UpdateGuard: its hooks, fused optimizers, small models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Callable, Optional

import torch
from torch import Tensor, nn
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

import fastcheck
from fastcheck.monitor.hooks import found_inf as protect
from fastcheck.monitor.hooks.found_inf import UpdateGuard

#: Every fused optimizer of torch, in the variants whose kernels take different paths.
FUSED: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]] = {
    "adam": (torch.optim.Adam, {"weight_decay": 0.1}),
    "adam-amsgrad-maximize": (torch.optim.Adam, {"amsgrad": True, "maximize": True}),
    "adamw": (torch.optim.AdamW, {}),
    "adamw-amsgrad": (torch.optim.AdamW, {"amsgrad": True}),
    "adagrad": (torch.optim.Adagrad, {"lr_decay": 0.1, "weight_decay": 0.1}),
    "sgd": (torch.optim.SGD, {}),
    "sgd-momentum": (torch.optim.SGD, {"momentum": 0.9}),
    "sgd-dampening": (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.3}),
    "sgd-nesterov": (torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    "sgd-maximize": (torch.optim.SGD, {"momentum": 0.9, "maximize": True, "weight_decay": 0.1}),
}


def a_guard(**options: Any) -> UpdateGuard:
    return UpdateGuard(fastcheck.found_nonfinite, **options)


def attributes(optimizer: torch.optim.Optimizer) -> set[str]:
    """What a step is handed, and must not keep."""
    return {"found_inf", "grad_scale"} & set(vars(optimizer))


def fused(name: str, parameters: Any, **options: Any) -> torch.optim.Optimizer:
    kind, variant = FUSED[name]
    return kind(parameters, **{"lr": 0.05, "fused": True, **variant, **options})


@contextmanager
def guarding(*guards: UpdateGuard) -> Iterator[None]:
    """The guards' hooks on every optimizer of the process, as a monitor connects them."""
    with ExitStack() as stack:
        for guard in guards:
            before = register_optimizer_step_pre_hook(_before(guard))
            stack.callback(before.remove)
            after = register_optimizer_step_post_hook(_after(guard))
            stack.callback(after.remove)
        yield


def _before(guard: UpdateGuard) -> Callable[..., None]:
    def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        guard.before_update(optimizer)

    return hook


def _after(guard: UpdateGuard) -> Callable[..., None]:
    return lambda optimizer, args, kwargs: guard.after_update(optimizer)


def parameters(count: int = 3, device: str = "cpu", seed: int = 0) -> list[nn.Parameter]:
    """Of several shapes and strides; the last one, of two dimensions, is transposed."""
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(3 + i, 5, generator=generator) for i in range(count)]
    made[-1] = made[-1].t()
    return [nn.Parameter(tensor.to(device)) for tensor in made]


def give_gradients(
    params: Sequence[Tensor], seed: int, bad: Optional[float] = None, factor: float = 1.0
) -> None:
    """Random gradients with a few zeros of both signs; ``bad`` goes into the last one's corner."""
    generator = torch.Generator().manual_seed(1000 + seed)
    for parameter in params:
        gradient = torch.randn(parameter.shape, generator=generator) * factor
        gradient[0, :2] = torch.tensor([0.0, -0.0])
        if bad is not None and parameter is params[-1]:
            gradient[-1, -1] = bad
        # In the parameter's own strides, as backward makes them.
        parameter.grad = torch.empty_like(parameter).copy_(gradient.to(parameter.device))


def state_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Parameters and every tensor of the state, copied to the host, in a fixed order."""
    found = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            found.append(parameter.detach().cpu().clone())
            found.extend(state[key].detach().cpu().clone() for key in sorted(state))
    return found


def same_bits(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return len(one) == len(other) and all(
        a.shape == b.shape and bool((a.view(torch.int32) == b.view(torch.int32)).all())
        for a, b in zip(one, other)
    )


def all_finite(tensors: Sequence[Tensor]) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in tensors)


def why_unguarded(optimizer: torch.optim.Optimizer) -> Optional[str]:
    """Why updates of the optimizer are not guarded, once its devices were tried; None: they are."""
    reason = protect._why_not(optimizer)
    if reason is not None:
        return reason
    devices = {p.device for group in optimizer.param_groups for p in group["params"]}
    kind = protect._torch_class(optimizer)
    if kind is not torch.optim.Optimizer:  # one that declares the contract is not tried
        for device in devices:
            protect._try(kind, device)
    return protect._device_problem(kind, devices)
