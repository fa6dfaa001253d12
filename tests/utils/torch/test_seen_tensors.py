"""SeenTensors: the extension's and the Python one agree on which tensors were read already."""

from __future__ import annotations

import weakref
from typing import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastcheck import _C
from fastcheck.utils.torch import seen_tensors
from fastcheck.utils.torch.seen_tensors import SeenTensors, make_seen

BOTH = pytest.mark.parametrize("make", [_C.SeenTensors, SeenTensors], ids=["extension", "python"])
Make = Callable[[], SeenTensors]


# ---- One tensor under several names --------------------------------------------------------------

SAME: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "itself": lambda x: x,
    "detached": lambda x: x.detach(),
    "another shape": lambda x: x.view(3, 8),
    "transposed": lambda x: x.t(),
    "permuted": lambda x: x.view(2, 3, 4).permute(2, 0, 1),
    "dimensions of one": lambda x: x[None, :, None],
    "conjugated, real": lambda x: x.conj(),
    "channels last": lambda x: x.view(1, 2, 3, 4).permute(0, 3, 1, 2),
    "a dimension of one with an odd stride": lambda x: x.as_strided((1, 24), (999, 1)),
}
OTHER: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a copy": lambda x: x.clone(),
    "a part": lambda x: x[1:],
    "the same number elsewhere": lambda x: x.flatten()[:12],
    "another dtype": lambda x: x.view(torch.int32),
    "written to": lambda x: x.add_(0),
    "negated": lambda x: torch._neg_view(x),
    "broadcast": lambda x: x.flatten()[:1].expand(24),
    "overlapping": lambda x: x.as_strided((4, 6), (1, 1)),
    "every other": lambda x: x.as_strided((11, 2), (2, 2)),
}


def whole() -> torch.Tensor:
    return torch.arange(24.0).view(4, 6)


@BOTH
@pytest.mark.parametrize("name", SAME)
def test_the_same_bytes_are_known(make: Make, name: str) -> None:
    seen, x = make(), whole()
    assert seen.add(x, 7) == -1
    assert seen.add(SAME[name](x), 8) == 7
    assert len(seen) == 1


@BOTH
@pytest.mark.parametrize("name", OTHER)
def test_other_bytes_are_new(make: Make, name: str) -> None:
    seen, x = make(), whole()
    seen.add(x, 7)
    other = OTHER[name](x)
    assert (seen.add(other, 8), seen.add(other, 9)) == (-1, 8)
    assert len(seen) == 2


@BOTH
def test_conjugation_and_geometry_of_what_is_not_dense_count(make: Make) -> None:
    seen, z = make(), torch.ones(4, dtype=torch.complex64)
    assert [seen.add(t, i) for i, t in enumerate((z, z.conj(), z.conj().conj()))] == [-1, -1, 0]
    x = torch.arange(24.0)
    columns = x.view(4, 6)[:, :3]
    assert [seen.add(t, 5) for t in (columns, columns.t(), columns.clone())] == [-1] * 3
    assert seen.add(columns, 9) == 5


@BOTH
def test_without_a_version_or_a_storage_it_is_always_new(make: Make) -> None:
    seen = make()
    with torch.inference_mode():
        x = torch.ones(3)
    sparse = torch.ones(3).to_sparse()
    assert [seen.add(t, 1) for t in (x, x, sparse, sparse)] == [-1] * 4
    assert len(seen) == 0


@BOTH
def test_clear_forgets(make: Make) -> None:
    seen, x = make(), whole()
    seen.add(x, 1)
    seen.clear()
    assert len(seen) == 0
    assert (seen.add(x, 2), seen.add(x, 3)) == (-1, 2)


# ---- Memory --------------------------------------------------------------------------------------


@BOTH
def test_memory_is_free_to_go(make: Make) -> None:
    seen, array = make(), np.ones(1000, dtype=np.float32)
    x = torch.from_numpy(array)
    alive = weakref.ref(array)
    seen.add(x, 1)
    seen.add(x[2:], 2)
    del x, array
    assert alive() is None
    assert len(seen) == 2


def identities(seen: SeenTensors, clear: bool) -> tuple[set[int], int]:
    """Storages made and dropped one after another: their addresses, how many counted as seen."""
    addresses, known = set(), 0
    for i in range(300):
        x = torch.ones(16)
        addresses.add(x.untyped_storage()._cdata)
        known += seen.add(x, i) >= 0
        if clear:
            seen.clear()
        del x
    return addresses, known


@BOTH
def test_an_address_that_is_reused_never_passes_for_what_it_was(make: Make) -> None:
    addresses, known = identities(make(), clear=False)
    assert (len(addresses), known) == (300, 0)


@BOTH
def test_what_is_forgotten_is_released(make: Make) -> None:
    assert len(identities(make(), clear=True)[0]) < 300


@BOTH
def test_dropping_it_releases_all(make: Make) -> None:
    reused = set()
    for i in range(300):
        x = torch.ones(16)
        reused.add(x.untyped_storage()._cdata)
        seen = make()
        seen.add(x, i)
        del x, seen
    assert len(reused) < 300


# ---- The two agree -------------------------------------------------------------------------------

OPERATIONS = ("new", "view", "view", "view", "write", "drop", "add", "clear")
VIEWS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda x: x.detach(),
    lambda x: x.transpose(0, -1) if x.dim() else x,
    lambda x: x.movedim(0, -1) if x.dim() else x,
    lambda x: x.unsqueeze(0),
    lambda x: x[..., ::2] if x.dim() else x,
    lambda x: x[1:] if x.dim() else x,
    lambda x: x.flatten(),
    lambda x: x.conj(),
    lambda x: x.expand(2, *x.shape),
    lambda x: x.imag if x.is_complex() else torch._neg_view(x),
    lambda x: (
        torch.view_as_real(x.resolve_conj().resolve_neg()) if x.is_complex() else x.view(x.dtype)
    ),
    lambda x: x.narrow(0, 0, 1).expand_as(x) if x.dim() and x.shape[0] else x,
    lambda x: x.view(torch.int32) if x.dtype is torch.float32 and not x.is_neg() else x,
    lambda x: x.as_strided(x.shape, tuple(reversed(x.stride()))) if x.numel() == 1 else x,
]


def view(x: torch.Tensor, which: int) -> torch.Tensor:
    """One of VIEWS; the tensor itself where torch has no such view of it."""
    try:
        return VIEWS[which](x)
    except RuntimeError:
        return x


@given(st.data())
def test_both_answer_alike(data: st.DataObject) -> None:
    ours, theirs = SeenTensors(), _C.SeenTensors()
    pool: list[torch.Tensor] = []
    answers = []
    for seq in range(data.draw(st.integers(1, 40), label="operations")):
        choice = data.draw(st.sampled_from(OPERATIONS))
        if choice == "new" or not pool:
            shape = data.draw(st.lists(st.sampled_from([0, 1, 1, 2, 3, 4]), max_size=4))
            dtype = data.draw(st.sampled_from([torch.float32, torch.complex64]))
            pool.append(torch.zeros(shape, dtype=dtype))
        at = data.draw(st.integers(0, len(pool) - 1))
        if choice == "view":
            if pool[at].dim() < 7 and pool[at].numel() < 5000:
                pool.append(view(pool[at], data.draw(st.integers(0, len(VIEWS) - 1))))
        elif choice == "write":
            if not torch._debug_has_internal_overlap(pool[at]):
                pool[at].zero_()
        elif choice == "drop":
            del pool[at]
        elif choice == "clear":
            ours.clear()
            theirs.clear()
        for tensor in pool[-3:]:
            answers.append((ours.add(tensor, seq), theirs.add(tensor, seq)))
        assert len(ours) == len(theirs)
    assert [mine for mine, _ in answers] == [other for _, other in answers]


def test_python_stands_in_for_a_missing_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(make_seen(), _C.SeenTensors)
    monkeypatch.setattr(seen_tensors, "compiled", lambda: None)
    assert isinstance(make_seen(), SeenTensors)
