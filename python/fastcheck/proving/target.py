"""A step that is named on the command line: ``train.py:step``, or ``package.module:step``."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from dataclasses import dataclass
from typing import Any, Callable

import torch

from fastcheck.errors import ConfigError


@dataclass(frozen=True)
class Target:
    """What the function returned: ``model, batch, step``, and an optimizer where it has one."""

    model: torch.nn.Module
    batch: Any
    step: Callable[..., Any]
    optimizer: Any = None


def load(spec: str) -> Target:
    """Imports the file or module, and calls the function. Raises ConfigError where there is none,
    or it returns something else; what the program raises is raised here.
    """
    where, _, name = spec.rpartition(":")
    if not where or not name:
        raise _refused("a file and a function, as train.py:step", spec)
    if where.endswith(".py"):
        if not os.path.isfile(where):
            raise _refused("a file that exists", where)
        sys.path.insert(0, os.path.dirname(os.path.abspath(where)))
        found = importlib.util.spec_from_file_location("fastcheck_proved", where)
        assert found is not None and found.loader is not None
        module = importlib.util.module_from_spec(found)
        sys.modules[found.name] = module
        found.loader.exec_module(module)
    else:
        sys.path.insert(0, os.getcwd())
        module = importlib.import_module(where)
    make = getattr(module, name, None)
    if not callable(make):
        raise _refused(f"a function in {where}", name)
    returned = make()
    parts = returned if isinstance(returned, tuple) else ()
    is_fit = len(parts) in (3, 4) and isinstance(parts[0], torch.nn.Module) and callable(parts[2])
    if not is_fit:
        raise _refused("a function that returns model, batch, step[, optimizer]", repr(returned))
    return Target(*parts)


def _refused(expected: str, got: str) -> ConfigError:
    hint = "fastcheck prove train.py:step"
    return ConfigError("there is no step to prove", expected=expected, got=got, hint=hint)
