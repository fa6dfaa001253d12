"""Launches of the Triton kernels for a list of one dtype: a launch for partials, another for the
records.

The kernels find a tensor by its address, in a table that is copied to the device without waiting.
What depends on sizes alone is worked out once for a list, and kept there. Nothing waits for the
device.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fastcheck.backends.portable import checksum as sum64
from fastcheck.backends.portable.constants import stream_key, upload
from fastcheck.backends.portable.formats import FORMATS
from fastcheck.backends.portable.traversal import Traversal
from fastcheck.utils.torch.own_operators import no_grad

from . import kernels
from .launch import CHUNK_BYTES, Reader, Target, on

#: Steps that are worth a program of their own: what it leaves behind is a row for the fold.
_STEPS_EACH = 4
#: Lists kept. A training run has an entry for each optimizer, and for each kind of list.
_KEPT = 64


@dataclass(frozen=True)
class _LaunchPlan:
    """The arguments of a launch, int32 on the device: ``owners`` of each program, ``shapes`` (n,
    SHAPE_FIELDS).
    """

    owners: torch.Tensor
    shapes: torch.Tensor


def takes(x: Traversal) -> bool:
    """True if a tensor that Triton reads can be one of a list: it lies as it is read, where a word
    begins, and fits one chunk.
    """
    return (
        0 < x.components * x.format.info.component_bytes <= CHUNK_BYTES
        and x.is_flat
        and x.flips is None
        and x.bits.data_ptr() % 4 == 0
    )


def launch_records(
    xs: Sequence[Traversal], places: Sequence[int], slots: torch.Tensor, depth: int, target: Target
) -> None:
    """Launches kernels that write bytes [0, 112) of ``slots[place]`` for each of ``xs``, which are
    of one dtype and device and :func:`takes` names. uint8 (n, 192) ``slots`` on that device.
    """
    device = slots.device
    with no_grad(), torch._C.DisableTorchFunctionSubclass(), on(device):
        sizes = tuple((place, x.components) for place, x in zip(places, xs))
        name = xs[0].format.info.name
        plan = _plan(device, stream_key(device), name, (target.programs, target.lanes), sizes)
        reader = Reader(xs[0].format, depth, target)
        addresses = torch.tensor([x.bits.data_ptr() for x in xs], dtype=torch.int64, device="cpu")
        programs = plan.owners.numel()
        partials = torch.empty((kernels.COLUMNS, programs), dtype=torch.int32, device=device)
        sent = upload(addresses, device)
        read = (sent, plan.owners, plan.shapes, partials, programs, *sum64.seeds(0))
        kernels.part_list_kernel[(programs,)](*read, GROUPS=reader.groups, **reader.options)
        folded = (plan.shapes, partials, slots.view(torch.int32), programs)
        kernels.fold_list_kernel[(len(xs),)](*folded, BLOCK=target.block, **reader.options)


@functools.lru_cache(maxsize=_KEPT)
def _plan(
    device: torch.device,
    stream: int,  # what is copied without waiting may be read on this stream only
    name: str,
    target: tuple[int, int],
    sizes: tuple[tuple[int, int], ...],
) -> _LaunchPlan:
    form = FORMATS[getattr(torch, name)]
    size = form.info.component_bytes
    reader = Reader(form, 1, Target(*target))
    owners: list[int] = []
    shapes: list[int] = []
    for owner, (place, components) in enumerate(sizes):
        programs = min(-(-reader.steps(components) // _STEPS_EACH), target[0])
        first = len(owners)
        owners += [owner] * programs
        body, tail_count, rows = reader.layout(components)
        lengths = map(sum64.signed, sum64.length_terms(components * size))
        shapes += [body, tail_count, components, rows, first, programs]
        shapes += [sum64.signed(components), components >> 32, *lengths, place]
    sent = upload(torch.tensor([*owners, *shapes], dtype=torch.int32), device)
    return _LaunchPlan(sent[: len(owners)], sent[len(owners) :])
