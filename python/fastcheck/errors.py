"""All errors and warnings that fastcheck raises itself, and the form of their messages.

FastcheckError
├── ConfigError             (also ValueError)   an option of install(), or of the command line
├── UnsupportedTensorError  (also TypeError)    a tensor that fastcheck can't read
├── ExtensionError          (also ImportError)  the compiled extension is missing or unfit
├── LogError                                    a log that can't be opened, or isn't one
├── CompareError                                two things that can't be compared, or one of the two
└── OverflowDetected                            the run was stopped, and why

None of them is a RuntimeError: training loops that retry after "CUDA out of memory" catch
RuntimeError, and would swallow the stop.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import importlib
import os
import re
import sys
import warnings
from collections.abc import Iterable
from types import FrameType
from typing import Any, Optional, TypeVar, Union

import numpy as np

_Options = TypeVar("_Options")
_MOST_GOT = 600

# Frames that are never the user's: torch and the libraries stand between the user's line and
# fastcheck's (module and optimizer wrappers, hooks, backward, context managers, imports, threads).
_INTERNAL_PACKAGES = frozenset(
    {"contextlib", "fastcheck", "importlib", "threading", "torch", "torch_mlu", "torch_npu"}
)

# Control characters of ASCII and Latin-1, line and paragraph separators, marks that turn the
# direction of a line round or are not seen, and halves of surrogate pairs, which no encoding takes.
# Joiners stay (U+200C, U+200D): letters of some scripts, and emoji, are written with them.
_UNPRINTABLE = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff"
    "\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)


class FastcheckError(Exception):
    """The base class of all errors that fastcheck raises. ``expected``, ``got`` and ``hint`` are
    passed to explain(), which makes the message.
    """

    __module__ = "fastcheck"

    def __init__(self, what: str, *, expected: str = "", got: str = "", hint: str = "") -> None:
        is_whole = expected or got
        text = explain(what, expected=expected, got=got, hint=hint) if is_whole else what
        super().__init__(printable(text, keep="\n"))


class ConfigError(FastcheckError, ValueError):
    """An option has a value that fastcheck can't use. Nothing was installed."""

    __module__ = "fastcheck"


class UnsupportedTensorError(FastcheckError, TypeError):
    """A tensor whose dtype, layout or kind fastcheck can't read (sparse, quantised, meta, ...)."""

    __module__ = "fastcheck"


class ExtensionError(FastcheckError, ImportError):
    """The compiled extension is missing, or was built for another version of torch."""

    __module__ = "fastcheck"


class LogError(FastcheckError):
    """A log that can't be created or read. Not an OSError: the cause is in ``__cause__``."""

    __module__ = "fastcheck"


class CompareError(FastcheckError):
    """An argument of compare() that can't be compared: it is not there, damaged, of another kind
    than the other side, or has nothing in common with it.
    """

    __module__ = "fastcheck"


class FastcheckWarning(UserWarning):
    """A message that doesn't stop the run: an event under action="warn", a log that stopped."""

    __module__ = "fastcheck"


class LearningRateWarning(FastcheckWarning):
    """The learning rate of all parameters is 0, in ten updates in a row."""

    __module__ = "fastcheck"


class UnsealedCheckpointWarning(FastcheckWarning):
    """A trainer has saved a checkpoint without a seal, or with weights that were not checked."""

    __module__ = "fastcheck"


def warn(message: str, category: type[Warning] = FastcheckWarning) -> None:
    """Warns, with the user's innermost line as the warning's location, also from within hooks.

    On a thread that runs no code of the user, the location is the line that calls warn().
    """
    caller = sys._getframe(1)
    user: Optional[FrameType] = caller
    while user is not None and _is_internal(user):
        user = user.f_back
    frame = user or caller
    # Not warn(stacklevel=): it does not count the frames of importlib.
    warnings.warn_explicit(
        printable(message, keep="\n"),
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=frame.f_globals.get("__name__"),
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )


def warn_of_fault(message: str, category: type[Warning] = FastcheckWarning) -> None:
    """warn(), of a fault within fastcheck. It may be found in the middle of an operator, or by the
    garbage collector, through which nothing may be raised: where warnings are errors the message
    goes to stderr.
    """
    try:
        warn(message, category)
    except Warning as error:
        with contextlib.suppress(Exception):  # stderr may be closed
            print(f"{type(error).__name__}: {error}", file=sys.stderr)


def _is_internal(frame: FrameType) -> bool:
    package = str(frame.f_globals.get("__name__")).partition(".")[0]
    return package in _INTERNAL_PACKAGES


def needed_module(name: str, what: str, hint: str) -> Any:
    """The module of this name, which ``what`` needs.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        expected = f"{package}, installed"
        raise ConfigError(
            f"{what} needs {package}", expected=expected, got=str(error), hint=hint
        ) from error


def explain(what: str, *, expected: str, got: str, hint: str = "") -> str:
    """The text of every error: what is wrong, what was expected, what it got (the beginning of a
    long text, as of a state_dict), and a hint.

    Names of a file may be in it: control characters are escaped, but for line feeds.
    """
    got = got if len(got) <= _MOST_GOT else f"{got[:_MOST_GOT]} ..."
    lines = [what, f"  expected: {expected}", f"  got:      {got}"]
    if hint:
        lines.append(f"  hint:     {hint}")
    return printable("\n".join(lines), keep="\n")


def printable(text: str, keep: str = "") -> str:
    """``text`` with what could steer a terminal escaped: ``\\x1b`` for ESC. ``keep``: characters
    that stay as they are.
    """

    def escaped(match: re.Match[str]) -> str:
        character = match.group()
        return character if character in keep else ascii(character)[1:-1]

    return _UNPRINTABLE.sub(escaped, text)


def choice(name: str, value: object, choices: Iterable[str], otherwise: str = "") -> str:
    """``value``, if it is one of ``choices``.

    Raises:
        ConfigError: it is not one of them, or no string. ``otherwise``: what else may be given.
    """
    known = list(choices)
    if isinstance(value, str) and value in known:
        return value
    raise ConfigError(
        f"unknown {name}",
        expected=" or ".join([*(f'"{option}"' for option in known), *filter(None, [otherwise])]),
        got=repr(value),
        hint=did_you_mean(str(value), known),
    )


def as_list(value: object) -> list[Any]:
    """The entries of an iterable; of a string, and of all else, the value itself."""
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes)):
        with contextlib.suppress(TypeError):  # an array or a tensor without dimensions
            return list(value)
    return [value]


def plain(value: Any) -> Any:
    """A number or bool of NumPy as one of Python; all else as it is."""
    return value.item() if isinstance(value, np.generic) else value


def string_list(name: str, value: Union[str, Iterable[str], None]) -> list[str]:
    """One string, several, or None, as a list.

    Raises:
        ConfigError: one of them is not a string, or is blank.
    """
    entries = [] if value is None else as_list(value)
    for entry in entries:
        if not isinstance(entry, str) or not entry.strip():
            raise ConfigError(f"{name} must be a string or a list of strings, got {entry!r}")
    return entries


def check_text(name: str, value: object, expected: str = "a string that is not empty") -> None:
    """Raises ConfigError if ``value`` is not a string, or blank where ``expected`` rules that
    out.
    """
    if not isinstance(value, str) or not (value.strip() or expected == "a string"):
        raise ConfigError(f"{name} can't be used", expected=expected, got=repr(value))


def check_bool(name: str, value: object) -> bool:
    """``value`` as a bool; ConfigError if it is none of Python's or NumPy's."""
    if not isinstance(value, (bool, np.bool_)):
        raise ConfigError(f"{name} must be a bool", expected="True or False", got=repr(value))
    return bool(value)


def local_path(name: str, value: object, expected: str = "a str or an os.PathLike") -> str:
    """A path that an option was given, as a string.

    Raises:
        ConfigError: it is no string or os.PathLike, is a URL, or no file can have that name.
    """
    try:
        path = os.fspath(value)  # type: ignore[call-overload]  # raises for what is no path
    except TypeError:
        path = None
    if isinstance(path, str) and path and "\0" not in path and "://" not in path:
        return path
    raise ConfigError(f"{name} is not a path on this machine", expected=expected, got=repr(value))


def first_line(error: BaseException) -> str:
    """The first line of an error's text, without a full stop; its type's name if it has no text."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".") if lines else type(error).__name__


def near_matches(name: str, candidates: Iterable[str], limit: int = 3) -> list[str]:
    """The ``candidates`` that ``name`` was probably meant to be, most likely first.

    Looks at the spelling as a whole and, for dotted paths, at the last part too.
    """
    pool = list(dict.fromkeys(candidates))
    lowered = name.lower()
    by_lower: dict[str, str] = {}
    for candidate in pool:
        by_lower.setdefault(candidate.lower(), candidate)
    ratios = {
        candidate: difflib.SequenceMatcher(None, lowered, lower).ratio()
        for lower, candidate in by_lower.items()
    }
    close = [candidate for candidate, ratio in ratios.items() if ratio >= 0.6]
    matches = sorted(close, key=lambda candidate: -ratios[candidate])[:limit]
    tail = lowered.rsplit(".", 1)[-1].strip("*?")
    for candidate in pool:
        if len(matches) >= limit:
            break
        last = candidate.lower().rsplit(".", 1)[-1]
        related = bool(tail) and (
            tail in candidate.lower()
            or (len(last) > 2 and last in lowered)
            or difflib.SequenceMatcher(None, tail, last).ratio() >= 0.75
        )
        if related and candidate not in matches:
            matches.append(candidate)
    return matches[:limit]


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """``"did you mean 'x' or 'y'?"``, or an empty string when nothing is near."""
    matches = near_matches(name, candidates)
    if not matches:
        return ""
    quoted = [repr(candidate) for candidate in matches]
    listed = quoted[0] if len(quoted) == 1 else ", ".join(quoted[:-1]) + " or " + quoted[-1]
    return f"did you mean {listed}?"


def unknown_option(
    of: str, name: str, options: Iterable[str], elsewhere: Iterable[str] = ()
) -> str:
    """The text of the TypeError for a keyword of ``of`` that is none of its ``options``, with one
    that is near it, there or among those ``elsewhere``.
    """
    known = list(options)
    return explain(
        f"{of}() has no option {name!r}",
        expected=", ".join(known),
        got=name,
        hint=did_you_mean(name, known) or did_you_mean(name, elsewhere),
    )


def names_options(kind: type[_Options]) -> type[_Options]:
    """A dataclass whose TypeError for an unknown keyword names those that there are."""
    made = kind.__init__
    names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]  # it is one

    @functools.wraps(made)
    def init(self: Any, *args: Any, **given: Any) -> None:
        for name in given:
            if name not in names:
                raise TypeError(unknown_option(kind.__name__, name, names))
        made(self, *map(plain, args), **{name: plain(value) for name, value in given.items()})

    kind.__init__ = init  # type: ignore[method-assign]  # a dataclass has made the one before too
    return kind


def no_attribute(module: str, name: str, candidates: Iterable[str]) -> AttributeError:
    """The error of a module that has no public ``name``, with the names that are near it."""
    # pytest, inspect and copy ask each module that they meet for several private names.
    hint = "" if name.startswith("_") else did_you_mean(name, candidates)
    error = AttributeError(f"module {module!r} has no attribute {name!r}; {hint}".rstrip("; "))
    error.name, error.obj = name, None  # Python would add a second hint of its own
    return error
