"""Imports Composer where parts of what it imports are missing, or do not fit this torch: empty
modules take the place of torchvision and of MosaicML's client, which its Trainer does not use.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, ClassVar, Optional

import pytest

_REPLACED = ("torchvision", "mcli")


class _Empty(ModuleType):
    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _Finder:
    def find_spec(
        self, name: str, path: Optional[Sequence[str]], target: Any = None
    ) -> Optional[ModuleSpec]:
        if name.partition(".")[0] not in _REPLACED:
            return None
        return ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]  # by its methods

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Empty(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


def finder() -> Any:
    """For ``sys.meta_path`` of a process of its own."""
    return _Finder()


@contextmanager
def replaced() -> Iterator[None]:
    """Within it those modules are empty; afterwards they are as they were, installed or not."""
    own = finder()
    sys.meta_path.insert(0, own)
    try:
        yield
    finally:
        sys.meta_path.remove(own)
        for name in [one for one in sys.modules if one.partition(".")[0] in _REPLACED]:
            del sys.modules[name]


def import_composer() -> Any:
    """The real package; the test is skipped without it."""
    if importlib.util.find_spec("composer") is None:
        pytest.skip("composer is not installed", allow_module_level=True)
    if importlib.util.find_spec("transformers") is not None:
        # Composer imports it, and it looks once for all whether torchvision is there.
        importlib.import_module("transformers.utils").is_torchvision_available()
    with replaced():
        return importlib.import_module("composer")
