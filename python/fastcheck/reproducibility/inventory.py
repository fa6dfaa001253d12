"""inventory(): parameters, buffers, modules and optimizer groups as plain data for compare()."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Optional, Union

import torch

from fastcheck.errors import ConfigError, as_list
from fastcheck.utils.private import without_credentials
from fastcheck.utils.torch.readable import is_materialised

Optimizers = Union[torch.optim.Optimizer, Iterable[torch.optim.Optimizer], None]


def inventory(model: torch.nn.Module, optimizer: Optimizers = None) -> dict[str, Any]:
    """The parameters, buffers and modules of ``model``, and the groups and hyper-parameters of its
    optimizers.

    Returns plain dictionaries, ready for ``json.dump``; compare() takes two of them, or their
    files. Of each parameter: shape, dtype, device, whether it is trainable, and the name that it
    shares its memory with, if it does. Parameters that no optimizer has are listed. Reads no
    tensor's values and synchronises nothing: hyper-parameters that are tensors on a device are
    named, not read.

    Raises:
        ConfigError: ``model`` is no torch.nn.Module, or ``optimizer`` no optimizer.
    """
    if not isinstance(model, torch.nn.Module):
        raise _refused("a torch.nn.Module", model)
    parameters: dict[str, Any] = {}
    names: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        described = _tensor(parameter)
        described["trainable"] = parameter.requires_grad
        described["shared_with"] = names.get(id(parameter))
        names.setdefault(id(parameter), name)
        parameters[name] = described
    persistent = set(model.state_dict(keep_vars=True))
    buffers = {
        name: {**_tensor(buffer), "persistent": name in persistent}
        for name, buffer in model.named_buffers(remove_duplicate=False)
    }
    materialised = [p for p in model.parameters() if is_materialised(p)]
    made: dict[str, Any] = {
        "fastcheck": "inventory",
        "format": 1,
        "totals": {
            "parameters": sum(p.numel() for p in materialised),
            "trainable": sum(p.numel() for p in materialised if p.requires_grad),
        },
        "modules": {
            name: {"type": type(module).__name__, "training": module.training}
            for name, module in model.named_modules()
        },
        "parameters": parameters,
        "buffers": buffers,
    }
    optimizers = [] if optimizer is None else as_list(optimizer)
    if not all(hasattr(opt, "param_groups") for opt in optimizers):
        raise _refused("a torch.optim.Optimizer, or several", optimizer)
    if optimizers:
        made["optimizers"] = [describe_optimizer(opt, names) for opt in optimizers]
        held = {id(p) for opt in optimizers for group in opt.param_groups for p in group["params"]}
        made["without_optimizer"] = [name for key, name in names.items() if key not in held]
    return made


def _refused(expected: str, got: object) -> ConfigError:
    what, hint = "inventory() can't describe this", "inventory(model, optimizer)"
    return ConfigError(what, expected=expected, got=f"{got!r:.80}", hint=hint)


def describe_optimizer(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str]
) -> dict[str, Any]:
    """The type and the groups of an optimizer. ``names``: of parameters, by ``id()``."""
    groups = []
    for group in optimizer.param_groups:
        described = {key: _plain(value) for key, value in group.items() if key != "params"}
        described["parameters"] = [names.get(id(p), "not the model's") for p in group["params"]]
        groups.append(described)
    return {"type": type(optimizer).__name__, "groups": groups}


def _tensor(tensor: torch.Tensor) -> dict[str, Any]:
    return {
        # None: of a lazy module before its first forward.
        "shape": list(tensor.shape) if is_materialised(tensor) else None,
        "dtype": str(tensor.dtype).replace("torch.", ""),
        # Not which of them: ranks and machines number their devices differently.
        "device": tensor.device.type,
    }


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        # Reading it on a device would make the host wait.
        number: Optional[Any] = value.item() if value.is_cpu and value.numel() == 1 else None
        return f"tensor on {value.device.type}" if number is None else number
    if isinstance(value, str):
        return without_credentials(value)
    if isinstance(value, (bool, int, float)) or value is None:
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return type(value).__name__
