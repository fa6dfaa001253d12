"""The CUDA kernels, run thread by thread on the CPU (tests/fakes/cuda_on_cpu), against the CPU's
Records.

Equal byte for byte over dtype, size, layout and alignment, however the work is cut and in whatever
order the threads run. The CPU's Records are held to tests/support/records/reference.py by
test_stats_values.py; here the reference itself stands in for some of them."""

from __future__ import annotations

import ctypes
import itertools

import numpy as np
import pytest
import torch

from fakes.cuda_on_cpu import driver
from fakes.cuda_on_cpu.driver import Call, Cut, Garbage, LaunchError, record
from fakes.layouts import LAYOUTS
from fastcheck.ring.device import MAX_SEGMENTS
from support.helpers import SIZES, assert_same, even, expected, kernel, kinds, tensor_of
from support.records.reference import (
    DTYPES,
    FLOAT_NAMES,
    chain_term,
    fields,
    pattern,
    record_of_bytes,
    words_of,
)
from support.records.torch_dtypes import torch_dtype
from support.sampling import sample

pytestmark = pytest.mark.skipif(driver.compiler() is None, reason="no C++ compiler")

ALL = sorted(DTYPES)
# Grids of one block, of fewer blocks than chunks and of as many; every block and share in turn.
CUTS = (
    Cut(),
    Cut(warps=1, share=1, blocks=1, resident=1),
    Cut(warps=2, share=1, blocks=3, seed=2),
    Cut(warps=4, share=2, blocks=2, seed=3, resident=2),
    Cut(warps=8, share=1, blocks=100, seed=4, resident=7),
    Cut(warps=1, share=8, blocks=2, seed=5),
    Cut(warps=2, share=32, blocks=1, seed=6),
)


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    driver.library()


# --- one tensor ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ALL)
def test_sizes(dtype: str) -> None:
    cuts = itertools.cycle(CUTS)
    for kind in kinds(dtype):
        for size in sample(SIZES, 6):
            count = even(size, dtype)
            x = tensor_of(pattern(kind, dtype, count, size), dtype)
            cut = next(cuts)
            assert_same(record(x, cut=cut), expected(kind, dtype, count, size), (kind, count, cut))


@pytest.mark.parametrize("dtype", ALL)
def test_cuts(dtype: str) -> None:
    count = even(37 * 4096 + 1001, dtype)
    x = tensor_of(pattern(kinds(dtype)[-1], dtype, count, 3), dtype)
    wanted = kernel(x)
    for cut in sample(CUTS, 3):
        assert_same(record(x, cut=cut), wanted, cut)


@pytest.mark.parametrize("dtype", ALL)
def test_depths(dtype: str) -> None:
    for count in (0, 2, 4098, 9000):
        raw = pattern("random", dtype, count, 4)
        x = tensor_of(raw, dtype)
        for depth, cut in zip(("health", "stats", "full"), CUTS):
            wanted = record_of_bytes(raw, dtype, depth=depth)
            assert_same(record(x, depth, cut=cut), wanted, (depth, count))


@pytest.mark.parametrize("dtype", ALL)
def test_alignment(dtype: str) -> None:
    kind = kinds(dtype)[0]
    for count in (4096, even(4096 + 333, dtype)):  # with the end behind a whole row, and within one
        raw = pattern(kind, dtype, count, 21)
        wanted = expected(kind, dtype, count, 21)
        for offset in sample(range(17), 6):  # the odd ones are not even aligned to the component
            x = tensor_of(raw, dtype, offset)
            assert_same(record(x, cut=Cut(seed=offset + 1)), wanted, (count, offset))


@pytest.mark.parametrize("dtype", FLOAT_NAMES)
def test_special_tiles(dtype: str) -> None:
    """One unusual component in one of three tiles; then all of a tile, then all of it."""
    row = DTYPES[dtype]
    exponent = "exponent:-6" if row.exponent_bits > 4 else "exponent:-7"
    width = 8 * row.itemsize
    top = 1 << (width - 1)
    largest = top - 1 - ((1 << row.mantissa_bits) if row.has_inf else 1)
    special = {
        0,
        1,
        (1 << row.mantissa_bits) - 1,
        1 << row.mantissa_bits,
        largest,
        largest + 1,
        top - 1,
    }
    if row.has_inf:
        special.add(largest + 2)
    base = np.frombuffer(pattern(exponent, dtype, 3 * 4096, 9), f"<u{row.itemsize}")
    places = (0, 5, 63, 64, 1023, 1024, 2048, 4095)
    for bits in sample(sorted(special | {b | top for b in special}), 5):
        for spot, place in enumerate(
            (4096 + places[bits % len(places)], slice(4096, 8192), slice(None))
        ):
            x = base.copy()
            x[place] = bits
            tensor = tensor_of(x.tobytes(), dtype)
            assert_same(record(tensor, cut=Cut(seed=bits + 1)), kernel(tensor), (hex(bits), spot))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scale_rule(dtype: str) -> None:
    """Tiles on either side of both limits, whole and partial, with and without a NaN."""
    row = DTYPES[dtype]
    every = itertools.product((-60, -56, -55, -41, 44, 45, 59, 60, 112), (4096, 5000), (0, 1))
    for exponent, count, nan in sample(every, 12):
        bits = np.frombuffer(
            pattern(f"exponent:{exponent}", dtype, count, 11), f"<u{row.itemsize}"
        ).copy()
        if nan:
            bits[count // 3] = (1 << (8 * row.itemsize - 1)) - 1
        x = tensor_of(bits.tobytes(), dtype)
        assert_same(record(x), kernel(x), (exponent, count, nan))
    for limit in (2.0**60, 2.0**-40):
        for place, factor in itertools.product((0, 700, 4095), (0.5, 1 - 2**-8, 1, 1 + 2**-7, 2)):
            values = torch.full((4096,), 2.0**-50 if limit < 1 else 1.0)
            values[place] = limit * factor
            x = values.to(torch_dtype(dtype))
            assert_same(record(x), kernel(x), (limit, place, factor))


# Of a tile: a binary exponent, and how many of its components are not finite.
TILES_OF_A_SHARE = ((-3, 0), (-60, 0), (-3, 1), (60, 0), (60, 1), (-60, 70), (-3, 0), (-3, 4096))


@pytest.mark.parametrize("dtype", FLOAT_NAMES)
def test_unlike_tiles_in_one_share(dtype: str) -> None:
    """Ordinary, tiny, huge and non-finite ones in turn, each of them once the partial tile too."""
    row = DTYPES[dtype]
    top = 1 << (8 * row.itemsize - 1)
    widest = row.exponent_bits >= 8
    parts = []
    for number, (exponent, bad) in enumerate(TILES_OF_A_SHARE):
        exponent = exponent if widest else -3 if row.exponent_bits > 4 else -7
        raw = pattern(f"exponent:{exponent}", dtype, 4096, number)
        bits = np.frombuffer(raw, f"<u{row.itemsize}").copy()
        spots = (np.arange(bad) * 577 + 77) % 4096
        # NaN and the infinities in turn; a largest finite number beside them.
        nonfinite = [top - 1, 2 * top - 1]
        if row.has_inf:
            infinity = top - (1 << row.mantissa_bits)
            nonfinite += [infinity, infinity + top]
        bits[spots] = np.array(nonfinite, bits.dtype)[np.arange(bad) % len(nonfinite)]
        if 0 < bad < 4096:
            bits[3000] = nonfinite[-1] - 1
        parts.append(bits)
    for turn in sample(range(len(parts)), 3):
        share = np.concatenate(parts[turn:] + parts[:turn])
        for left in (4096, 4095, 1001):
            x = tensor_of(share[: 7 * 4096 + left].tobytes(), dtype)
            for depth in ("stats", "full"):
                actual = record(x, depth, cut=Cut(warps=1, share=8, seed=turn + 1))
                assert_same(actual, kernel(x, depth), (turn, left, depth))


# Ordinary, tiny, huge, non-finite and empty of numbers, in a share of 32.
TILES_IN_TURN = "oottttottttnttzzttthhhhthnhhhooo"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tiles_whose_scale_is_not_that_of_the_tiles_before(dtype: str) -> None:
    """A tile is scaled while it is read where the two before it had to be, and else read again."""
    exponents = {"o": -3, "t": -60, "h": 60, "n": -60, "z": -3}
    parts = []
    for number, kind in enumerate(TILES_IN_TURN):
        raw = pattern(f"exponent:{exponents[kind]}", dtype, 4096, number)
        tile = tensor_of(raw, dtype)
        if kind == "n":
            tile[number] = float("nan")
        parts.append(tile.zero_() if kind == "z" else tile)
    for first in (0, 3):
        x = torch.cat(parts[first:])
        for depth in ("stats", "full"):
            actual = record(x, depth, cut=Cut(warps=1, share=32, seed=first))
            assert_same(actual, kernel(x, depth), (first, depth))


# --- layouts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "dtype",
    [
        "float64",
        "float32",
        "bfloat16",
        "float8_e5m2",
        "complex64",
        "complex128",
        "int8",
        "int32",
        "bool",
    ],
)
def test_layouts(dtype: str, layout: str) -> None:
    components = DTYPES[dtype].components
    x = tensor_of(pattern("random", dtype, 12000 * components, 8), dtype)
    y = LAYOUTS[layout](x)
    for order, cut in zip(("storage", "logical"), CUTS[1:]):
        assert_same(record(y, order=order, cut=cut), kernel(y, order=order), order)
    shifted = LAYOUTS[layout](tensor_of(pattern("random", dtype, 12000 * components, 8), dtype, 4))
    assert_same(record(shifted), kernel(y))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tiles", [1 << 19, (1 << 21) + 3, 1 << 26, (1 << 31) + 5])
def test_beyond_32_bits(dtype: str, tiles: int) -> None:
    """The last tile of tensors of 2^31 elements and more, as if all before it were there: directly,
    and through strides (a row of 1000 repeated by a stride of 0, the last one shorter)."""
    lib = driver.library()
    row = DTYPES[dtype]
    raw = pattern("exponent:-3", dtype, 2000, tiles)
    x = tensor_of(raw, dtype)
    sums, checksum = (ctypes.c_double * 3)(), (ctypes.c_uint32 * 2)()
    for strided in (False, True):
        argument = driver.TensorArgument(dtype=row.code, dense=not strided)
        if strided:
            rows = tiles * 4096 // 1000 + 2
            sizes, strides = (ctypes.c_int64 * 2)(rows, 1000), (ctypes.c_int64 * 2)(0, 1)
            argument.data, argument.ndim, argument.numel = x.data_ptr(), 2, rows * 1000
            argument.sizes, argument.strides = map(ctypes.addressof, (sizes, strides))
            begin, count = tiles * 4096 % 1000, rows * 1000 - tiles * 4096
            once = raw[: 1000 * row.itemsize]
            read = (once * 4)[begin * row.itemsize : (begin + count) * row.itemsize]
        else:
            argument.data = x.data_ptr() - tiles * 4096 * row.itemsize
            argument.numel = tiles * 4096 + 2000
            read = raw
        lib.cuda_on_cpu_schedule(tiles, 1)
        assert lib.probe_tile(ctypes.byref(argument), ctypes.c_int64(tiles), sums, checksum) == 0
        wanted = fields(record_of_bytes(read, dtype))
        assert list(sums) == [wanted["sum"], wanted["abs_sum"], wanted["sum_sq"]]
        assert list(checksum) == chains_of(read, row.itemsize, tiles)


def chains_of(raw: bytes, itemsize: int, tile: int) -> list[int]:
    """What the chains of one tile add to the two halves of the checksum."""
    width = 16 * itemsize
    chains: dict[int, list[int]] = {}
    for position, word in enumerate(words_of(raw)):
        run, lane = position // width // 16, position % width
        chains.setdefault((tile * 4 + run) * width + lane, []).append(word)
    terms = [chain_term(identity, chain) for identity, chain in chains.items()]
    return [sum(term[half] for term in terms) % 2**32 for half in "ab"]


# --- lists ---------------------------------------------------------------------------------------


def mixed_list() -> list[torch.Tensor]:
    tensors = []
    for seed, (size, dtype) in enumerate(
        itertools.product((0, 3, 70, 4096, 9001), ("float32", "bfloat16", "int8", "complex64"))
    ):
        tensors.append(
            tensor_of(pattern("random", dtype, even(size, dtype), seed), dtype, 4 * (seed % 3))
        )
    tensors.append(tensors[-4][::2])
    return tensors


@pytest.mark.parametrize("cut", CUTS)
def test_mixed_list(cut: Cut) -> None:
    tensors = mixed_list()
    for depth in ("full", "health"):
        for x, actual in zip(tensors, Call(tensors, cut=cut).records(depth)):
            assert_same(actual, kernel(x, depth), (x.dtype, x.shape, cut))


@pytest.mark.parametrize("count", [32, 33, 150])
def test_long_list(count: int) -> None:
    """Up to 32 tensors travel in the arguments of the launch, more through device memory."""
    tensors = [
        tensor_of(pattern("random", "bfloat16", 37 * i, i), "bfloat16") for i in range(count)
    ]
    call = Call(tensors, cut=Cut(seed=count))
    assert (call.workspace.table_bytes > 0) == (count > 32)
    for x, actual in zip(tensors, call.records()):
        assert_same(actual, kernel(x))


def test_workspace_is_left_as_found() -> None:
    """One workspace serves launches of other cuts and lists, one after the other."""
    tensors = mixed_list()
    call = Call(tensors, cut=CUTS[1])
    wanted = [kernel(x) for x in tensors]
    for cut in CUTS[1:]:
        call.tuning = driver.Tuning(2, cut.warps, max(cut.share, 1), cut.blocks)
        assert call.records() == wanted


def test_all_kernels_are_loaded_with_the_device() -> None:
    """A kernel's first launch may wait for the device, unless something referred to it before."""
    lib = driver.library()
    assert lib.fastcheck_cuda_device(ctypes.byref(ctypes.c_int32())) == 0
    assert lib.fastcheck_cuda_find_exponents() == 0
    tensors = [tensor_of(pattern("random", dtype, 4, 1), dtype) for dtype in ALL]
    for depth in ("health", "stats", "full"):
        Call(tensors).records(depth)
    Call(tensors).found_nonfinite()
    for tensor in tensors:
        if tensor.is_floating_point():
            driver.exponent_words(tensor)
            driver.record_and_exponents(tensor)
    found, unfound = ctypes.c_int(), ctypes.c_int()
    lib.cuda_on_cpu_found(ctypes.byref(found), ctypes.byref(unfound))
    # Of 15 component types at three depths, three of them once more for a launch's only tensor, and
    # of six formats: whether any is non-finite, exponents, and exponents with the record.
    assert (found.value, unfound.value) == (3 * (15 + 3) + 3 * 6, 0)


@pytest.mark.parametrize("dtype", ALL)
def test_the_only_tensor_of_a_launch_takes_few_arguments(dtype: str) -> None:
    """In formats of training, where it is dense, aligned or not."""
    raw = pattern("random", dtype, 9000, 1)
    x = tensor_of(raw, dtype)

    def argument_bytes(*tensors: torch.Tensor) -> int:
        call = Call(tensors)
        assert call.records() == [kernel(tensor) for tensor in tensors]
        return int(call.lib.cuda_on_cpu_arguments())

    few = 120 if dtype in ("float32", "float16", "bfloat16", "complex64") else 1368
    assert argument_bytes(x) == argument_bytes(tensor_of(raw, dtype, 1)) == few
    assert argument_bytes(x, x) == argument_bytes(x[::2]) == 1368


def test_small_workspace_is_refused() -> None:
    call = Call([tensor_of(pattern("random", "float32", 9000, 1), "float32")], cut=CUTS[1])
    call.workspace.partials_bytes -= 1
    with pytest.raises(LaunchError, match="workspace"):
        call.records()
    with pytest.raises(LaunchError, match="argument"):
        Call([torch.zeros(3)], cut=Cut(warps=3))


# --- slots, flags --------------------------------------------------------------------------------


def test_slots_in_any_order() -> None:
    """What the host gives a record is 0."""
    tensors = [
        tensor_of(pattern("exponent:-3", "float32", n, n), "float32") for n in (10, 5000, 0, 4096)
    ]
    tensors[1][77] = float("nan")
    call = Call(tensors, cut=Cut(seed=5))
    for i, argument in enumerate(call.arguments):
        argument.slot = 3 - i
    for i, raw in enumerate(reversed(call.records())):
        got = fields(raw)
        assert [got[name] for name in ("seq", "step", "call", "site")] == [0] * 4
        assert (got["flags"], got["device_mode"]) == (int(i == 1), 0)
        assert_same(raw, kernel(tensors[i]))


BOX_ROW = np.dtype([("record", "V192"), ("slot", "<u8"), ("stretch", "<u8")])


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_black_box(seed: int) -> None:
    """Of each stretch of launches the first sixteen non-finite records, with their addresses. As
    many stretches have a place as a ring has segments.
    """
    tensors = [torch.full((5 + 2000 * (i % 4),), float(i)) for i in range(24)]
    bad = [i for i in range(24) if i % 6 != 0]
    for i in bad:
        tensors[i][3] = float("nan")
    box = Garbage(MAX_SEGMENTS * 16 * BOX_ROW.itemsize, fill=0)
    claims = Garbage(MAX_SEGMENTS * 8)
    call = Call(tensors, cut=Cut(seed=seed, resident=4))
    call.workspace.box, call.workspace.claims = box.address, claims.address
    rows: list[np.ndarray] = []
    for stretch in (1, 2, 2 + MAX_SEGMENTS):  # the last one has the place of the second
        call.workspace.stretch = stretch
        wanted = [kernel(x) for x in tensors]
        assert call.records() == wanted
        all_rows = np.frombuffer(box.bytes(), BOX_ROW).reshape(MAX_SEGMENTS, 16)
        rows.append(all_rows[stretch % MAX_SEGMENTS])
        assert set(rows[-1]["stretch"]) == {stretch}
        numbers = (rows[-1]["slot"] - np.uint64(call.slots.address)) // np.uint64(192)
        assert len(set(numbers)) == 16 and set(numbers) <= set(bad)
        assert [bytes(row) for row in rows[-1]["record"]] == [wanted[int(n)] for n in numbers]
    assert not all_rows[3]["stretch"].any()
    assert set(all_rows[1]["stretch"]) == {1}
    # One more in the same stretch finds no room.
    call.records()
    assert box.bytes() == all_rows.tobytes()


@pytest.mark.parametrize("depth", ["health", "stats", "full"])
def test_a_launch_whose_gate_is_0_reads_and_writes_nothing(depth: str) -> None:
    tensors = [torch.arange(9000.0), torch.ones(3)]
    wanted = Call(tensors).records(depth)
    gate = Garbage(4, fill=0)
    call = Call(tensors)
    call.workspace.gate = gate.address
    slots, partials = call.slots.bytes(), call.partials.bytes()
    for argument in call.arguments[: call.count]:
        argument.data = None  # reading it would be the end
    call.records(depth)
    assert (call.slots.bytes(), call.partials.bytes()) == (slots, partials)
    opened = Call(tensors)
    opened.workspace.gate = gate.address
    ctypes.memset(gate.address, 1, 1)
    assert opened.records(depth) == wanted


def test_blocks_fill_a_multiprocessor() -> None:
    """found_nonfinite takes fewer registers than the record kernels: three blocks, not two."""
    call = Call([torch.ones(4096 * 70)], cut=Cut(warps=8, share=1, multiprocessors=2))
    call.records("health")
    of_records = call.lib.cuda_on_cpu_grid()
    call.found_nonfinite()
    assert (of_records, call.lib.cuda_on_cpu_grid()) == (2 * 2, 2 * 3)


# Of an H100: 228 KiB a multiprocessor, of which each block costs 1 KiB beside its own.
SHARED_BYTES = 228 * 1024


@pytest.mark.parametrize("warps", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", ALL)
def test_shared_memory_leaves_room_for_what_the_registers_do(dtype: str, warps: int) -> None:
    """16 warps of the record kernels, 24 of found_nonfinite (csrc/cuda/plan.h)."""
    call = Call([tensor_of(pattern("random", dtype, 6, 1), dtype)], cut=Cut(warps=warps))
    call.records()
    assert 16 // warps * (call.lib.cuda_on_cpu_shared() + 1024) <= SHARED_BYTES
    if dtype in FLOAT_NAMES:
        call.found_nonfinite()
        assert 24 // warps * (call.lib.cuda_on_cpu_shared() + 1024) <= SHARED_BYTES


@pytest.mark.parametrize("dtype", FLOAT_NAMES)
def test_found_nonfinite(dtype: str) -> None:
    row = DTYPES[dtype]
    top = 1 << (8 * row.itemsize - 1)
    first_bad = top - (1 << row.mantissa_bits) if row.has_inf else top - 1
    base = np.frombuffer(pattern("constant", dtype, 5000, first_bad - 1), f"<u{row.itemsize}")
    for offset in (0, 2):
        clean = [torch.ones(3, dtype=torch.int32), tensor_of(base.tobytes(), dtype, offset)]
        assert Call(clean).found_nonfinite() == 0.0
        assert Call(clean).found_nonfinite(1.0) == 1.0
        for place, bits in itertools.product(
            (0, 4095, 4096, 4999), (first_bad, top - 1, top + first_bad)
        ):
            x = base.copy()
            x[place] = bits
            tensors = [torch.ones(7), tensor_of(x.tobytes(), dtype, offset)]
            assert Call(tensors, cut=Cut(seed=place + 1)).found_nonfinite() == 1.0, (
                place,
                hex(bits),
            )
    assert Call([]).found_nonfinite() == 0.0
