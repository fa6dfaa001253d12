"""The options of a Dumper, checked once."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional, Union

from .._errors import ConfigError, did_you_mean, explain
from .._log import parse_bytes
from .._record import Depth

__all__ = ["Options", "check_options"]

_DEPTHS = {"health": Depth.HEALTH, "stats": Depth.STATS, "full": Depth.FULL}


class Options(NamedTuple):
    step: int
    tensors: bool
    level: str
    depth: int
    is_logical: bool
    has_reference: bool
    reference_dtype: str
    memory_bytes: int
    overwrite: bool


def check_options(
    *,
    step: int,
    tensors: bool,
    reference: Optional[str],
    reference_dtype: str,
    level: str,
    record: str,
    order: str,
    memory: Union[str, int],
    overwrite: bool,
) -> Options:
    """ConfigError for the first that can't be used."""
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        raise ConfigError(
            explain("step= is no step", expected="a number from 0 on", came=repr(step), do="step=i")
        )
    _one_of("level", level, ("op", "module"))
    _one_of("record", record, tuple(_DEPTHS))
    _one_of("order", order, ("storage", "logical"))
    if reference is not None:
        _one_of("reference", reference, ("cpu",))
    if reference is not None and level != "op":
        raise ConfigError(
            explain(
                'reference= runs operators again, and is for level="op"',
                expected='level="op"',
                came=f"level={level!r}",
            )
        )
    if tensors and record != "full":
        raise ConfigError(
            explain(
                'tensors=True needs record="full"',
                expected="checksums, which tell a value that is written already",
                came=f"record={record!r}",
            )
        )
    _one_of("reference_dtype", reference_dtype, ("auto", "same", "float64"))
    try:
        size = parse_bytes(memory)
    except ConfigError:
        size = None
    if size is None:
        raise ConfigError(
            explain(
                "memory= is not a size that fastcheck can use",
                expected='65536 bytes or more: a number, or a text such as "256MiB"',
                came=repr(memory),
            )
        )
    return Options(
        step=step,
        tensors=bool(tensors),
        level=level,
        depth=int(_DEPTHS[record]),
        is_logical=order == "logical",
        has_reference=reference is not None,
        reference_dtype=reference_dtype,
        memory_bytes=size,
        overwrite=bool(overwrite),
    )


def _one_of(name: str, value: Any, choices: tuple[str, ...]) -> None:
    if value in choices:
        return
    raise ConfigError(
        explain(
            f"{name}= is not one that fastcheck knows",
            expected=" or ".join(map(repr, choices)),
            came=repr(value),
            do=did_you_mean(str(value), choices),
        )
    )
