"""A program with its source, its cause, what an answer has to hold, and its fixed version; and what
several of them use.

A program is a function of ``fixed`` that gives the modules to install and a step. The line at fault
bears the comment ``# FAULT``; a text that names it has named the place and the operator. What an
answer has to hold is written from the cause, not from what the text says today.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Callable, NamedTuple, Optional

import torch
from torch import Tensor, nn

Step = Callable[[int], Optional[Tensor]]
Made = tuple[Sequence[nn.Module], Step]

#: The step in which a bad batch comes, in the programs that have one.
BAD = 4


class Program(NamedTuple):
    """``place``, ``operator`` and ``kind``: patterns of an answer. ``advice``: that of the remedy,
    within the first items to try. ``never``: what would be false. ``is_finite``: losses and weights
    stay finite, so that without fastcheck nothing shows. ``steps``: iterations of the faulty
    version. ``lines``: those at fault, as ``masks.py:160``.
    """

    name: str
    make: Callable[[bool], Made]
    source: str
    cause: str
    place: str
    operator: str
    kind: str
    advice: str
    never: tuple[str, ...]
    is_finite: bool
    steps: int
    lines: tuple[str, ...]


# What is said of a cause, in any of these words.
ONE_ELEMENT = r"one (?:element|value|number|sample|row)|single (?:element|value|sample)|unbiased"
ZERO_DIVISION = (
    r"0 ?/ ?0|x ?/ ?0|1 ?/ ?0|divi\w+ by (?:a |an exact )?(?:zero|0)\b"
    r"|(?:denominator|divisor)[^.]{0,60}\b(?:zeros?|0)\b"
)
OVERFLOW = (
    r"\boverflow(?:s|ed)?\b|out of (?:the )?range|left the range|beyond|ends at|holds up to|"
    r"above 88"
)
LOG_OF_ZERO = (
    r"log\(0\)|log(?:arithm)? of (?:a |an exact )?(?:zero|0)\b|log [^.]{0,40}\b(?:zeros?|0)\b"
)
MASKED_WHOLE = (
    r"mask\w* (?:whole|out whole)|(?:fully|wholly|completely) masked|every key|all -?inf"
    r"|nothing but -inf"
)
ROOT_AT_ZERO = (
    r"(?:sqrt|root|norm|std|pow|x ?\*\* ?p)[^.]{0,80}\b(?:at|of) (?:a )?(?:0|zero)\b|Inf at 0"
)
EMPTY_MEAN = (
    r"(?:mean|average|std|var)\w* (?:over|of) (?:nothing|no (?:element|target|token)|an empty)"
    r"|no elements?\b|empty|ignore_index|count of (?:zero|0)"
)
BAD_DATA = r"before the model|the data\b|bad batch|batch (?:was|is|held|holds)"
EPS = r"\beps\b|clamp|\bmax\(|where"
LOSS = r"\bthe loss\b"
#: The first thing to try, of what did not grow.
NO_RATE = r"\btry 1\. (?:(?! 2\. ).)*lower the learning rate"


def program(
    source: str,
    cause: str,
    *,
    place: str,
    operator: str,
    kind: str,
    advice: str,
    never: tuple[str, ...] = (),
    is_finite: bool = False,
    steps: int = 8,
) -> Callable[[Callable[[bool], Made]], Program]:
    """Makes a program of the function that follows."""

    def complete(make: Callable[[bool], Made]) -> Program:
        text, first = inspect.getsourcelines(make)
        file = Path(make.__code__.co_filename).name
        lines = tuple(f"{file}:{n}" for n, line in enumerate(text, first) if "# FAULT" in line)
        patterns = (place, operator, kind, advice, never)
        return Program(make.__name__, make, source, cause, *patterns, is_finite, steps, lines)

    return complete


def here(made: Tensor) -> Tensor:
    """The tensor on torch's default device, which is that of the run (reports.py --device)."""
    return made.to(torch.get_default_device())


def device_kind() -> str:
    return torch.get_default_device().type


def data(step: int, *shape: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(step)
    return here(torch.randn(*shape, generator=generator, device="cpu"))


def uniform(step: int, *shape: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(step)
    return here(torch.rand(*shape, generator=generator, device="cpu"))


def whole(step: int, low: int, high: int, *shape: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(step)
    return here(torch.randint(low, high, shape, generator=generator, device="cpu"))


def update(optimizer: torch.optim.Optimizer, loss: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss


def chain(**parts: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(parts))


def mlp(*widths: int, activation: type[nn.Module] = nn.ReLU) -> nn.Sequential:
    layers: list[nn.Module] = []
    for wide, narrow in zip(widths, widths[1:]):
        layers += [nn.Linear(wide, narrow), activation()]
    return nn.Sequential(*layers[:-1])
