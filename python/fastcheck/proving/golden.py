"""Golden: a step against the tensors of the same step that a file has kept."""

from __future__ import annotations

from pathlib import Path

import torch

from fastcheck.errors import ConfigError

from .case import TestedStep
from .computed import Computed, is_site
from .relation import Relation


class Golden(Relation):
    """The step as a file has it: its loss, what the model returned, gradients and updates. The
    tolerance is that of every relation: measured, so that another machine may round otherwise.

    Args:
        path: the file, which torch.load() reads.
        update: it is written, with the tensors of the step as it is now.
    """

    name = "golden record"
    kinds = ("loss", "output", "gradient", "update")

    def __init__(self, path: Path, update: bool = False) -> None:
        self._path, self._update = path, update

    def run(self, case: TestedStep, base: Computed, sites: bool = False) -> Computed:
        now = {key: t for key, t in base.tensors.items() if not is_site(key)}
        if self._update:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            torch.save({key: t.detach().cpu().clone() for key, t in now.items()}, self._path)
            return base
        kept = torch.load(self._path, map_location="cpu", weights_only=True)
        shapes = [
            {" ".join(key): tuple(t.shape) for key, t in tensors.items()} for tensors in (kept, now)
        ]
        if shapes[0] != shapes[1]:
            raise ConfigError(
                "the golden record is of another step",
                expected=str(dict(shapes[0].items() - shapes[1].items())),
                got=str(dict(shapes[1].items() - shapes[0].items())),
                hint="pytest --fastcheck-update writes it anew",
            )
        return Computed(kept)
