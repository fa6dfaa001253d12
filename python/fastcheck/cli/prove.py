"""``fastcheck prove``: computes a training step in ways that must agree."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
import traceback
from typing import Any

import torch

from fastcheck.errors import ConfigError, FastcheckError, did_you_mean
from fastcheck.utils.reading import why_missing

from .console import print_json

HELP = "whether a training step agrees with itself: in a batch, padded, checkpointed, ..."

DESCRIPTION = """\
Computes one training step in ways that must agree (rows in another order, more padding,
micro-batches, checkpointing, ...), and names the first place where it does not. TARGET is a file or
module and a function of it that takes nothing and returns model, batch and step, and the optimizer
where there is one."""

EPILOG = """\
examples:
  fastcheck prove train.py:step
  fastcheck prove package.module:step --relations permuted padded
  fastcheck prove train.py:step --relations ddp fsdp      two ranks; step takes model and batch
  fastcheck prove train.py:step --relations causal        for a model that is to be causal
  fastcheck prove train.py:step --json

exit codes:
  0  no relation differs
  1  a relation differs
  2  wrong usage, no such step, the program raised an exception, or no relation could be computed"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", metavar="TARGET", help="train.py:step, or package.module:step")
    parser.add_argument("--relations", nargs="+", metavar="NAME", help="only these relations")
    parser.add_argument("--html", metavar="FILE", help="write a page to open in a browser, too")
    parser.add_argument("--json", action="store_true", help="one JSON document instead of text")


def run(options: argparse.Namespace) -> int:
    """Exit code 1 when a relation differs, 2 when none could be computed."""
    from fastcheck.proving.prove import prove
    from fastcheck.proving.result import FAILED, NOT_ASKED

    try:
        model, batch, step, *optimizer = _load(options.target)
        proof = prove(
            step,
            batch,
            model=model,
            optimizer=optimizer[0] if optimizer else None,
            relations=options.relations or "auto",
            html=options.html,
        )
    except FastcheckError:
        raise
    except Exception:  # not Python's status of 1, which is that of a relation that differs
        traceback.print_exc()
        print("fastcheck: nothing is proved: the program raised this exception", file=sys.stderr)
        return 2
    if options.json:
        print_json("prove", proof.to_dict())
    else:
        print(proof)
    if all(outcome.state in (FAILED, NOT_ASKED) for outcome in proof.outcomes):
        print("fastcheck: nothing is proved: no relation could be computed", file=sys.stderr)
        return 2
    return 0 if proof else 1


def _load(spec: str) -> tuple[Any, ...]:
    """Model, batch and step, and the optimizer where there is one: imports the file or module, and
    calls the function. Raises ConfigError where there is none,
    or it returns something else; what the program raises is raised here.
    """
    where, _, name = spec.rpartition(":")
    if not where or not name:
        raise _refused("a file and a function, as train.py:step", spec)
    if where.endswith(".py"):
        if not os.path.isfile(where):
            raise _refused("a file that exists", where, why_missing(where))
        sys.path.insert(0, os.path.dirname(os.path.abspath(where)))
        module_spec = importlib.util.spec_from_file_location("fastcheck_proved", where)
        assert module_spec is not None and module_spec.loader is not None
        module = importlib.util.module_from_spec(module_spec)
        sys.modules[module_spec.name] = module
        module_spec.loader.exec_module(module)
    else:
        sys.path.insert(0, os.getcwd())
        try:
            module = importlib.import_module(where)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{where}.".startswith(f"{error.name}."):
                raise  # what the program imports is missing
            raise _refused(
                "a module that can be imported, or a file that ends in .py", where
            ) from error
    make = getattr(module, name, None)
    if not callable(make):
        near = did_you_mean(name, [key for key, value in vars(module).items() if callable(value)])
        raise _refused(f"a function in {where}", name, near)
    returned = make()
    parts = returned if isinstance(returned, tuple) else ()
    is_fit = len(parts) in (3, 4) and isinstance(parts[0], torch.nn.Module) and callable(parts[2])
    if not is_fit:
        raise _refused("a function that returns model, batch, step[, optimizer]", repr(returned))
    return parts


def _refused(expected: str, got: str, hint: str = "fastcheck prove train.py:step") -> ConfigError:
    return ConfigError("there is no step to prove", expected=expected, got=got, hint=hint)
