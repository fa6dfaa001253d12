"""What fastcheck warns of within a block."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import fastcheck

__all__ = ["warned"]


@contextlib.contextmanager
def warned() -> Iterator[list[str]]:
    """Yields a list that has the texts of all warnings of fastcheck once the block has ended."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts += [str(w.message) for w in caught if issubclass(w.category, fastcheck.FastcheckWarning)]
