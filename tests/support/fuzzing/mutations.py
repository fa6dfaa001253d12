"""Damages the bytes of a file: flips, cuts, duplicates, and replaced numbers and strings."""

from __future__ import annotations

import re
from typing import Callable

__all__ = ["mutate"]

#: A number from 0 on, below the one given.
Choose = Callable[[int], int]

_NUMBERS = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 1 << 40, (1 << 63) - 1)
_BINARY = [n.to_bytes(size, "little") for n in _NUMBERS for size in (4, 8) if n < 1 << (8 * size)]
_BINARY += [bytes(8), b"\xff" * 8, bytes.fromhex("000000000000f87f"), bytes(192)]
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?|true|false|null')
_VALUES = [
    b"-1",
    b"0",
    b"4294967296",
    b"9223372036854775807",
    b"9" * 30,
    b"9" * 5000,
    b"1e999",
    b"-0.5",
    b"NaN",
    b"null",
    b"true",
    b'""',
    b'"x"',
    b'"nan"',
    rb'"\u001b[2J\u0007"',
    rb'"\ud800"',
    b'"=1+1"',
    b'"../../../etc/passwd"',
    b"[]",
    b"{}",
    b"[[1]]",
    b'{"a": 1}',
    b"[" * 100_000,
]


def _flip(data: bytes, choose: Choose) -> bytes:
    made = bytearray(data)
    for _ in range(1 + choose(3)):
        made[choose(len(made))] ^= 1 << choose(8)
    return bytes(made)


def _cut(data: bytes, choose: Choose) -> bytes:
    start = choose(len(data))
    return data[:start] if choose(2) else data[:start] + data[start + 1 + choose(64) :]


def _double(data: bytes, choose: Choose) -> bytes:
    start = choose(len(data))
    part = data[start : start + 1 + choose(512)]
    return data[:start] + part + data[start:]


def _overwrite(data: bytes, choose: Choose) -> bytes:
    start = choose(len(data))
    new = _BINARY[choose(len(_BINARY))]
    return data[:start] + new + data[start + len(new) :]


def _replace_token(data: bytes, choose: Choose) -> bytes:
    """Of JSON: a number, a string or a word becomes another value. Of others: overwrites."""
    tokens = list(_TOKEN.finditer(data)) if data[:1] in (b"{", b"[") else []
    if not tokens:
        return _overwrite(data, choose)
    token = tokens[choose(len(tokens))]
    new = _VALUES[choose(len(_VALUES))]
    return data[: token.start()] + new + data[token.end() :]


_KINDS = (_replace_token, _flip, _overwrite, _cut, _double)


def mutate(data: bytes, choose: Choose) -> bytes:
    """``data`` with one kind of damage; nothing, or anything else, for an empty file."""
    if not data:
        return _VALUES[choose(len(_VALUES))]
    return _KINDS[choose(len(_KINDS))](data, choose)
