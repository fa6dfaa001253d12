"""The merge of a tensor's chunks on CUDA (csrc/cuda/merge.cuh), run thread by thread on the CPU,
against the canonical tree written out: any number of chunks, among them more than a test could read
tensors for."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from fakes.cuda_on_cpu import driver

pytestmark = pytest.mark.skipif(driver.compiler() is None, reason="no C++ compiler")

#: Partial of csrc/core/accumulator.h.
PARTIAL = np.dtype(
    [
        ("counts", "<u8", 7),
        ("min", "<u8"),
        ("max", "<u8"),
        ("sums", "<f8", 3),
        ("checksum", "<u4", 2),
    ]
)
#: Components of a chunk, at most.
MOST = 8 * 32 * 4096


def partials(count: int, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    chunks = np.zeros(count, PARTIAL)
    chunks["counts"] = random.integers(0, MOST, (count, 7), endpoint=True)
    chunks["min"] = random.integers(0, 2**63, count)
    chunks["max"] = random.integers(0, 2**63, count)
    # Of magnitudes that are apart: another order of the additions gives another sum.
    chunks["sums"] = random.normal(size=(count, 3)) * 10.0 ** random.integers(-3, 4, (count, 3))
    chunks["checksum"] = random.integers(0, 2**32, (count, 2))
    return chunks


def tree(sums: np.ndarray) -> np.ndarray:
    """Neighbours added up, pair by pair, zeros behind them (core/order.h)."""
    size = 1 << max(0, len(sums) - 1).bit_length()
    nodes = np.concatenate([sums, np.zeros((size - len(sums), 3))])
    while len(nodes) > 1:
        nodes = nodes[0::2] + nodes[1::2]
    return nodes[0]


def check(count: int, warps: int, seed: int) -> None:
    chunks = partials(count, count)
    merged = np.zeros(1, PARTIAL)
    lib = driver.library()
    lib.cuda_on_cpu_schedule(seed, 1)
    code = lib.probe_merge(
        chunks.ctypes.data_as(ctypes.c_void_p),
        ctypes.c_int64(count),
        warps,
        merged.ctypes.data_as(ctypes.c_void_p),
    )
    assert code == 0, lib.cuda_on_cpu_error()
    assert merged["counts"][0].tolist() == chunks["counts"].sum(axis=0).tolist()
    assert (merged["min"][0], merged["max"][0]) == (chunks["min"].min(), chunks["max"].max())
    assert merged["sums"][0].tolist() == tree(chunks["sums"]).tolist()
    terms = chunks["checksum"].sum(axis=0, dtype=np.uint64) & np.uint64(0xFFFFFFFF)
    assert merged["checksum"][0].tolist() == terms.tolist()


@pytest.mark.parametrize("warps", [1, 2, 3, 4, 8])
def test_chunks_of_one_group_to_a_warp(warps: int) -> None:
    """Around each number of nodes that a thread folds, and of warps that take part."""
    edges = {2, 3, 31, 32, 33, 64, 128, 256} | {size * warps for size in (32, 64, 128, 256)}
    counts = {edge + by for edge in edges for by in (-1, 0, 1)} | {5, 20, 37, 100, 200 * warps}
    for count in sorted(counts):
        if 2 <= count <= 256 * warps:
            check(count, warps, seed=1 + count % 7)


@pytest.mark.parametrize("warps", [1, 2, 4, 8])
def test_more_groups_than_warps(warps: int) -> None:
    """Sums of groups go through memory, once or twice; counts pass 32 bits."""
    for count in (256 * warps + 1, 512 * warps, 512 * warps + 77, 256 * 256, 256 * 256 + 1):
        check(count, warps, seed=1 + count % 5)
