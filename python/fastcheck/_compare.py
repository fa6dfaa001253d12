"""fastcheck.compare, the function; ``comparison``, which does the work, is imported at a call."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Callable, Optional, Union

if TYPE_CHECKING:
    from .comparison import Comparison

__all__ = ["Accept", "Progress", "Rename", "compare"]

Rename = Union[str, os.PathLike[str], Mapping[str, str], None]
Accept = Union[str, Iterable[str]]
Progress = Callable[[int, int], None]


def compare(
    actual: Any,
    reference: Any,
    *,
    rename: Rename = None,
    accept: Accept = (),
    exact: bool = False,
    thresholds: Optional[Mapping[str, float]] = None,
    ask_all: bool = False,
    csv: Union[str, os.PathLike[str], None] = None,
    progress: Optional[Progress] = None,
    trust: bool = False,
) -> Comparison:
    """Compares two runs, dumps, checkpoints, environments or inventories, and says what differs
    first, in the order in which a person should ask: environment, hyper-parameters, batches,
    initial weights, forward, loss, gradients, update.

    Args:
        actual, reference: each a path: of a record log (``install(log_dir=...)``), of a dump
            (``Dumper``), of a checkpoint (.pt, .pth, .safetensors, .npy, .npz, or a directory of
            them), of an msprobe dump, or of the JSON of ``environment()`` or ``inventory()``. Or
            in memory: a tensor, a state_dict, a module, or what those two return.
        rename: names of ``actual`` and what they are called in ``reference``: a mapping, the path
            of a JSON file with one, or ``"mindspore"`` (gamma, beta, moving_mean,
            moving_variance). A rule is about a path and all below it; ``*`` stands for one part.
        accept: what may differ: ``"environment"``, ``"hyper-parameters"``, ``"batches"``,
            ``"weights"``, ``"dtype"``, ``"order"`` (only a checksum differs), ``"missing"``.
        exact: everything has to be equal to the bit, as far as both sides have checksums or
            values; of the rest the statistics have to be equal within the thresholds.
        thresholds: the relative error allowed of some dtypes, instead of those in
            ``docs/compare.md``: ``{"bfloat16": 0.05}``.
        ask_all: go on after the first "no".
        csv: a file to write every pair to that is not equal to the bit; one that is there is
            replaced, unless it belongs to a side.
        progress: called with (done, total) blocks.
        trust: load files that torch.load only reads with ``weights_only=False``. That runs code
            that the file brings along.

    Returns:
        A Comparison: ``print()`` it, or ask ``.agrees``, ``["batches"].answer``, ``.first``,
        ``.to_dict()``.

    Raises:
        CompareError: a side can't be read, the two are of different kinds, or have nothing in
            common.
        ConfigError: an option that can't be used, or a renaming that fits nothing.

    Tensors are read on the host; device tensors given in memory are copied there. Of two logs, one
    step of one rank is in memory at a time.
    """
    from .comparison import compare_sides

    return compare_sides(
        actual,
        reference,
        rename=rename,
        accept=accept,
        exact=exact,
        thresholds=thresholds,
        ask_all=ask_all,
        csv=csv,
        progress=progress,
        trust=trust,
    )
