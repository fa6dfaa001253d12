"""OnRequest: the options of install() for requests to a running program."""

from __future__ import annotations

import os
import signal as signals
from dataclasses import dataclass
from typing import Optional, Union

from fastcheck.errors import ConfigError, choice, explain, local_path

from .options import at_least_one, check_bool


@dataclass(frozen=True)
class OnRequest:
    """How a run that is under way is asked to observe its next steps more closely:
    ``install(model, on_request=fastcheck.OnRequest(file="more", steps=3))``, and ``touch more``.

    Args:
        file: a path. The request is that a file there is touched or made; it is looked at once in a
            second at most, at the end of a step.
        signal: a signal, such as ``"SIGUSR1"``. install() then has to be called in the main thread.
            A former handler is called too, and put back by remove().
        level: ``"op"``: a second monitor at op level, which stops nothing, with a log of its own.
            ``"dump"``: a fastcheck.Dumper for each step.
        steps: how many steps, from the next one on.
        dir: where it is written, to ``step12-op`` or ``step12-dump``.
        tensors: with ``level="dump"``, write the values too.

    Raises:
        ConfigError: an option has a value that can't be used.
    """

    file: Union[str, os.PathLike[str], None] = None
    signal: Union[str, int, None] = None
    level: str = "op"
    steps: int = 3
    dir: Union[str, os.PathLike[str]] = "fastcheck_request"
    tensors: bool = False

    def __post_init__(self) -> None:
        if self.file is None and self.signal is None:
            raise ConfigError(
                explain(
                    "nothing can make the request",
                    expected="a file, a signal, or both",
                    got="file=None, signal=None",
                    hint='fastcheck.OnRequest(signal="SIGUSR1")',
                )
            )
        if self.file is not None:
            object.__setattr__(self, "file", local_path("file", self.file, "the path of a file"))
        if self.signal is not None:
            object.__setattr__(self, "signal", _checked_signal(self.signal))
        choice("level", self.level, ("op", "dump"))
        at_least_one("steps", self.steps, "a number of steps")
        object.__setattr__(self, "dir", local_path("dir", self.dir, "a directory"))
        check_bool("tensors", self.tensors)
        if self.tensors and self.level != "dump":
            raise ConfigError(
                explain(
                    "OnRequest(tensors=) is for a dump",
                    expected='level="dump" with tensors=True',
                    got=f"level={self.level!r}",
                )
            )

    @property
    def path(self) -> Optional[str]:
        """``file`` as a string."""
        return None if self.file is None else os.fspath(self.file)

    @property
    def number(self) -> Optional[signals.Signals]:
        """``signal`` as one."""
        return None if self.signal is None else _checked_signal(self.signal)


def _checked_signal(value: Union[str, int]) -> signals.Signals:
    try:
        if isinstance(value, str):
            return signals.Signals[value]
        if isinstance(value, int) and not isinstance(value, bool):
            return signals.Signals(value)
    except (KeyError, ValueError):
        pass
    raise ConfigError(
        explain(
            "signal is none of this system",
            expected='a name or a number of one, such as "SIGUSR1"',
            got=repr(value),
        )
    )
