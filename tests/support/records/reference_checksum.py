"""The checksum of docs/record-format.md, section 7, computed slowly: part of the reference."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]

TILE = 4096
LANES = 64
RUNS = 4
RUN_ROWS = 16

HALVES = {
    "a": {"S": 0x243F6A88, "P": 0x9E3779B1, "Q": 0x85EBCA77, "M": 0xCC9E2D51, "R": 13},
    "b": {"S": 0x13198A2E, "P": 0xC2B2AE3D, "Q": 0x27D4EB2F, "M": 0x9E3779B9, "R": 19},
}
FMIX = (0x85EBCA6B, 0xC2B2AE35)
# One line each of the chain's finish: the half it changes, the other's shift, the factor.
FINISH = [
    ("a", 15, 0x85EBCA6B),
    ("b", 13, 0xC2B2AE35),
    ("a", 16, 0x27D4EB2F),
    ("b", 14, 0x9E3779B1),
    ("a", 15, 1),
]
MASK32 = 0xFFFFFFFF


def fmix(h: int) -> int:
    h ^= h >> 16
    h = h * FMIX[0] & MASK32
    h ^= h >> 13
    h = h * FMIX[1] & MASK32
    return h ^ h >> 16


def rotl(h: int, by: int) -> int:
    return (h << by | h >> (32 - by)) & MASK32


def length_term(half: str, size: int) -> int:
    k = HALVES[half]
    return fmix(k["S"] ^ ((size & MASK32) * k["Q"] + (size >> 32) * k["P"] + 1) & MASK32)


def words_of(raw: bytes) -> list[int]:
    padded = raw + b"\0" * (-len(raw) % 4)
    return [int(word) for word in np.frombuffer(padded, "<u4")]


def chain_term(identity: int, chain: list[int]) -> dict[str, int]:
    """What one chain adds to either half."""
    state = {}
    for half, k in HALVES.items():
        h = (k["S"] + (identity & MASK32) * k["P"] + (identity >> 32) * k["Q"]) & MASK32
        for word in chain:
            h = (rotl(h, k["R"]) * k["M"] + word) & MASK32
        state[half] = h
    for half, shift, factor in FINISH:
        other = state["b" if half == "a" else "a"]
        state[half] = (state[half] ^ other >> shift) * factor & MASK32
    return state


def checksum_plain(raw: bytes, itemsize: int) -> int:
    """The checksum word by word in Python integers: the definition."""
    row_words = LANES * itemsize // 4
    tile_words = TILE * itemsize // 4
    chains: dict[int, list[int]] = {}
    for position, word in enumerate(words_of(raw)):
        tile, inside = divmod(position, tile_words)
        word_row, word_lane = divmod(inside, row_words)
        identity = (tile * RUNS + word_row // RUN_ROWS) * row_words + word_lane
        chains.setdefault(identity, []).append(word)
    total = {half: length_term(half, len(raw)) for half in HALVES}
    for identity, chain in chains.items():
        for half, term in chain_term(identity, chain).items():
            total[half] = (total[half] + term) & MASK32
    return total["b"] << 32 | total["a"]


def checksum(raw: bytes, itemsize: int) -> int:
    """:func:`checksum_plain` for all chains at once (uint32 arrays wrap mod 2^32)."""
    row_words = LANES * itemsize // 4
    words = np.frombuffer(raw + b"\0" * (-len(raw) % 4), "<u4")
    count = words.size
    tiles = -(-count // (row_words * RUNS * RUN_ROWS))
    padded = np.zeros(tiles * RUNS * RUN_ROWS * row_words, np.uint32)
    padded[:count] = words
    there = (np.arange(padded.size) < count).reshape(tiles * RUNS, RUN_ROWS, row_words)
    grid = padded.reshape(tiles * RUNS, RUN_ROWS, row_words)
    identity = np.arange(tiles * RUNS * row_words, dtype=np.uint64).reshape(-1, row_words)
    low = (identity & np.uint64(MASK32)).astype(np.uint32)
    high = (identity >> np.uint64(32)).astype(np.uint32)
    state = {}
    for half, k in HALVES.items():
        h = np.uint32(k["S"]) + low * np.uint32(k["P"]) + high * np.uint32(k["Q"])
        left, right = np.uint32(k["R"]), np.uint32(32 - k["R"])
        for row in range(RUN_ROWS):
            mixed = ((h << left) | (h >> right)) * np.uint32(k["M"]) + grid[:, row]
            h = np.where(there[:, row], mixed, h)
        state[half] = h
    for half, shift, factor in FINISH:
        other = state["b" if half == "a" else "a"]
        state[half] = (state[half] ^ (other >> np.uint32(shift))) * np.uint32(factor)
    total = {}
    for half in HALVES:
        terms = int(state[half][there[:, 0]].sum(dtype=np.uint64))
        total[half] = (terms + length_term(half, len(raw))) & MASK32
    return total["b"] << 32 | total["a"]
