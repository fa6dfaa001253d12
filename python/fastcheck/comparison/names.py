"""One name for the same tensor in every kind of source, after renaming."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from fastcheck.errors import ConfigError, did_you_mean

_BUILT_IN: Mapping[str, Mapping[str, str]] = {
    # What MindSpore calls parameters and buffers, and what PyTorch does: last parts of a name.
    "mindspore": {
        "gamma": "weight",
        "beta": "bias",
        "moving_mean": "running_mean",
        "moving_variance": "running_var",
        "embedding_table": "weight",
    }
}


class Name(NamedTuple):
    """The place of a tensor. ``label`` is spelt as in a :class:`fastcheck.Site`, a lone ``output``
    as ``output[0]``; a checkpoint's tensor has only a ``label``.
    """

    module: str
    direction: str
    role: str
    label: str
    op: str = ""

    def __str__(self) -> str:
        if self.role in ("", "loss"):
            return self.label
        label = self.label
        if self.role in ("param", "param_grad", "buffer") and self.module:
            label = f"{self.module}.{label}"
        if self.role in ("grad_input", "grad_output", "param_grad"):
            label = f"gradient of {label}"
        place = ".".join(filter(None, (self.module, self.op))) or "the model"
        return f"{place} · {self.direction} · {label}"


def plain_label(label: str, role: str) -> str:
    """``output`` and ``output[0]`` are one tensor to two implementations of a module, of which one
    returns a tuple.
    """
    if role in ("output", "grad_output", "input", "grad_input") and label in ("output", "input"):
        return f"{label}[0]"
    return label


class NameTable:
    """Numbers names in the order in which they are met, for both sides together."""

    def __init__(self) -> None:
        self._names: list[Name] = []
        self._numbers: dict[Name, int] = {}

    def number(self, name: Name) -> int:
        found = self._numbers.get(name)
        if found is None:
            found = self._numbers[name] = len(self._names)
            self._names.append(name)
        return found

    def __getitem__(self, number: int) -> Name:
        return self._names[number]

    def __len__(self) -> int:
        return len(self._names)


class Renaming:
    """Turns names of ``actual`` into those of ``reference``.

    A rule is a path on either side: it is about that path and all that is below it. ``*`` on the
    left stands for anything within one part of a path, and the ``*`` on the right for what it was.
    The longest rule that fits is used, once. A built-in map is about the last part of a name, and
    for both sides.
    """

    def __init__(
        self,
        rules: Mapping[str, str],
        last_parts: Mapping[str, str] | None = None,
        of_reference: Mapping[str, str] | None = None,
    ) -> None:
        self._rules = sorted(rules.items(), key=lambda rule: (-rule[0].count("."), -len(rule[0])))
        self._last_parts = dict(last_parts or {})
        self._rules_of_reference = dict(of_reference or {})
        self._used: set[str] = set()
        self._seen: dict[str, None] = {}
        for left, right in rules.items():
            if right.count("*") > left.count("*"):
                raise ConfigError(
                    f"a renaming has more * on the right than on the left: {left!r}: {right!r}"
                )

    @classmethod
    def of(cls, rename: str | Mapping[str, str] | None) -> Renaming:
        """Makes a renaming of what ``compare(rename=)`` takes: a mapping, the name of a built-in
        one, or None.
        """
        if rename is None:
            return cls({})
        if isinstance(rename, str):
            if rename not in _BUILT_IN:
                raise ConfigError(
                    "unknown rename",
                    expected='"mindspore", a mapping, or the path of a JSON file with one',
                    got=repr(rename),
                    hint=did_you_mean(rename, _BUILT_IN),
                )
            return cls({}, _BUILT_IN[rename])
        for left, right in rename.items():
            if not (isinstance(left, str) and isinstance(right, str) and left):
                raise ConfigError(
                    f"a renaming must be a pair of names as text, got {left!r}: {right!r}"
                )
        return cls(rename)

    def of_reference(self) -> Renaming:
        """The renaming of the names of the reference."""
        return Renaming(self._rules_of_reference, self._last_parts)

    def __call__(self, path: str) -> str:
        """The name that ``path`` has on the side of the reference."""
        if not self._rules and not self._last_parts:
            return path
        self._seen.setdefault(path)
        for left, right in self._rules:
            found = _fitted(left, path)
            if found is not None:
                self._used.add(left)
                parts = iter(found[0])
                start = "".join(next(parts) if part == "*" else part for part in right)
                return start + found[1] if start else found[1].lstrip(".")
        head, dot, last = path.rpartition(".")
        return head + dot + self._last_parts.get(last, last)

    def check_used(self) -> None:
        """Raises ConfigError for a rule that matched no name, probably a typing error."""
        for left, right in self._rules:
            if left not in self._used:
                raise ConfigError(
                    "a renaming matches no name of the actual side",
                    expected="a name of the actual side on the left, its name in the "
                    "reference on the right",
                    got=f"{left!r}: {right!r}",
                    hint=did_you_mean(left, _with_parents(self._seen)),
                )


def _fitted(rule: str, path: str) -> tuple[list[str], str] | None:
    """The text that each * of a rule stands for in ``path``, and what ``path`` has below the rule;
    None where the rule is not about it.
    """
    left, parts = rule.split("."), path.split(".")
    stars: list[str] = []
    for one, part in zip(left, parts):
        found = _stars(one, part)
        if found is None:
            return None
        stars += found
    rest = "".join(f".{part}" for part in parts[len(left) :])
    return (stars, rest) if len(left) <= len(parts) else None


def _stars(rule: str, part: str) -> list[str] | None:
    """The text that each * of one part of a rule stands for: the first for as much as it can. From
    the right each text between two * is looked for once; a regular expression goes back to try
    others.
    """
    first, *texts = rule.split("*")
    if not (texts and part.startswith(first)):
        return [] if rule == part else None
    texts[-1] += "."  # the end of the part, where the last text has to be
    part += "."
    found, end = [], len(part)
    for text in reversed(texts):
        start = part.rfind(text, len(first), end)
        if start < 0:
            return None
        found.append(part[start + len(text) : end])
        end = start
    return [part[len(first) : end], *found[:0:-1]]


def _with_parents(paths: Iterable[str]) -> dict[str, None]:
    found: dict[str, None] = {}
    for path in paths:
        parts = path.split(".")
        for length in range(1, len(parts) + 1):
            found.setdefault(".".join(parts[:length]))
    return found
