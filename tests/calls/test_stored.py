"""What modules store, gathered in C++ and in Python: the same tensors, sites and roles."""

from __future__ import annotations

import gc
import weakref
from typing import Any, Callable, Optional

import pytest
import torch
from torch import nn

import fastcheck.calls.stored
from fastcheck.calls.module_calls import ModuleNode
from fastcheck.calls.stored import (
    ParameterFinder,
    TensorBatch,
    buffers_of,
    new_finder,
    parameter_ids,
    parameters_of,
)
from fastcheck.extension import status
from fastcheck.monitor.loop.hand_changes import HandChanges
from fastcheck.record.site import SiteTable
from fastcheck.utils.torch.memory_ref import MemoryRef, memory_ref

pytestmark = pytest.mark.skipif(status.module is None, reason="needs the extension")


class Sub(nn.Parameter):
    """Another class than torch's own."""


def model() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Sequential(
        nn.Linear(3, 4, bias=False),
        nn.BatchNorm1d(4),
        nn.Embedding(5, 4, sparse=True),
        nn.LazyLinear(2),
        nn.Linear(4, 3),
        nn.ParameterList([Sub(torch.ones(2))]),
    )
    tied, other = layers[4], layers[0]
    tied.weight = other.weight
    for number, parameter in enumerate(layers[1].parameters()):
        parameter.grad = torch.full_like(parameter, number)
    other.weight.main_grad = torch.ones(4, 3)
    layers[2].weight.grad = torch.ones(5, 4).to_sparse(1)
    layers[4].bias.grad = torch.ones(3)
    layers[4].register_buffer("nothing", None)
    layers[4].register_buffer("freed", torch.ones(4))
    layers[4].freed.untyped_storage().resize_(0)
    layers[4].register_buffer("meta", torch.ones(4, device="meta"))
    layers[4].register_buffer("apart", torch.ones(4))
    layers[4].apart._local_tensor = torch.zeros(2)
    layers[5][0].grad = torch.ones(2)
    layers[1].bias.grad._local_tensor = torch.zeros(2)  # type: ignore[union-attr]  # made above
    return layers


def nodes_of(layers: nn.Module, sites: SiteTable) -> list[ModuleNode]:
    return [ModuleNode(p, m, sites, is_primary=not p) for p, m in layers.named_modules()]


def gathered(layers: nn.Module, sites: SiteTable, *, is_used_now: bool) -> list[Any]:
    nodes = nodes_of(layers, sites)
    found: list[Any] = []
    for _ in range(2):  # the second time all have their sites
        batch = TensorBatch()
        batch.is_used_now = is_used_now
        parameters = parameters_of(nodes, None)
        batch.add_stored(parameters, "param")
        batch.add_stored(buffers_of(nodes), "buffer")
        batch.add_gradients(parameters, lambda node, name, _: node.site("param_grad", name, 0))
        held = [(tensor.data_ptr(), tensor.shape) for tensor in batch.tensors]
        named = [(node.path, name, id(tensor)) for node, name, tensor in parameters]
        found.append((held, [str(sites[n]) for n in batch.sites], batch.roles, named))
    return found


@pytest.mark.parametrize("is_used_now", [False, True])
def test_as_in_python(monkeypatch: pytest.MonkeyPatch, is_used_now: bool) -> None:
    layers = model()
    compiled = gathered(layers, SiteTable(), is_used_now=is_used_now)
    monkeypatch.setattr(fastcheck.calls.stored, "_module", None)
    assert compiled == gathered(layers, SiteTable(), is_used_now=is_used_now)
    held, sites, roles, _ = compiled[1]
    assert len(held) == len(sites) == len(roles) == 16
    assert roles.count("param_grad") == 6 and "buffer freed of 4 (Linear)" not in sites


def test_those_that_an_optimizer_owns() -> None:
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD([{"params": [layers[1].bias]}, {"params": layers[0].weight}], lr=1)
    assert parameter_ids(optimizer) == {id(layers[1].bias), id(layers[0].weight)}
    nodes = nodes_of(layers, SiteTable())
    found = parameters_of(nodes, parameter_ids(optimizer))
    assert [(node.path, name) for node, name, _ in found] == [("0", "weight"), ("1", "bias")]
    assert parameters_of(nodes[:2], set()) == []


def as_found(finder: ParameterFinder, optimizer: Any, sites: SiteTable) -> list[Any]:
    ids, parameters, buffers = finder.look(None if optimizer is None else optimizer.param_groups)
    batch = TensorBatch()
    batch.add_stored(parameters, "param")
    batch.add_gradients(parameters, lambda node, name, _: node.site("param_grad", name, 0))
    held = [(t.data_ptr(), t.shape, t.dtype) for t in batch.tensors]
    named = [(node.path, name, id(tensor)) for node, name, tensor in parameters]
    unnamed = [(node.path, name, id(tensor)) for node, name, tensor in buffers]
    return [ids, named, held, [str(sites[n]) for n in batch.sites], batch.roles, unnamed]


def test_what_lies_ahead_in_a_long_list_may_be_of_any_kind() -> None:
    """So long that objects are asked for before their turn: some without a gradient or memory."""
    layers, sites = nn.Sequential(*(model() for _ in range(20))), SiteTable()
    nodes = nodes_of(layers, sites)
    finders = new_finder(nodes), ParameterFinder(nodes)
    for _ in range(2):  # the second time all have their sites
        compiled, plain = (as_found(finder, None, sites) for finder in finders)
        assert compiled == plain and len(plain[2]) == 20 * 12
    assert status.module is not None
    tensors = [torch.ones(1)] * 70 + [torch.ones(1, device="meta")]
    with pytest.raises(TypeError, match="item 70: expected a tensor with memory"):
        status.module.record_list(tensors)


def test_what_an_optimizer_holds_is_found_again_after_any_change() -> None:
    """A finder that keeps what it has found answers as one that keeps nothing."""
    layers, sites = model(), SiteTable()
    nodes = nodes_of(layers, sites)
    groups = [{"params": list(layers[k].parameters())} for k in (1, 2, 4)]
    optimizer = torch.optim.SGD(groups, lr=1)
    finders = [(new_finder(nodes), each) for each in (optimizer, None)]
    assert not isinstance(finders[0][0], ParameterFinder)  # the extension's

    def replace() -> None:
        layers[1].weight = nn.Parameter(torch.rand(4))

    def replace_in_both() -> None:
        layers[4].bias = optimizer.param_groups[2]["params"][1] = nn.Parameter(torch.rand(3))
        layers[4].bias.grad = torch.rand(3)

    def rename() -> None:
        layers[4].register_parameter("shift", layers[4]._parameters.pop("bias"))

    def untie() -> None:
        layers[4].weight = nn.Parameter(torch.rand(3, 4))
        optimizer.param_groups[2]["params"][0] = layers[4].weight

    def swap_values() -> None:
        layers[1].bias.data = torch.rand(4, dtype=torch.float64)

    def swap_modules() -> None:
        layers[1]._parameters = dict(reversed(layers[1]._parameters.items()))

    changes: list[Callable[[], Any]] = [
        lambda: None,
        replace,
        replace_in_both,
        rename,
        untie,
        swap_values,
        swap_modules,
        lambda: optimizer.zero_grad(),
        lambda: setattr(layers[2].weight, "grad", torch.rand(5, 4)),
        lambda: optimizer.add_param_group({"params": [layers[0].weight]}),
        lambda: optimizer.param_groups.pop(0),
        lambda: setattr(layers[2], "weight", None),
        lambda: setattr(layers[1], "running_mean", None),
        lambda: setattr(layers[1], "running_var", torch.rand(4)),
        lambda: layers[1].register_buffer("another", torch.rand(4)),
        lambda: layers.__delitem__(4),
    ]
    before: list[Any] = []
    for change in changes:
        change()
        for _ in range(2):
            found = [as_found(*finder, sites) for finder in finders]
            assert found == [as_found(ParameterFinder(nodes), each, sites) for _, each in finders]
        assert found != before
        before = found


def test_a_finder_keeps_no_parameter() -> None:
    layers = nn.Sequential(nn.Linear(2, 2))
    finder = new_finder(nodes_of(layers, SiteTable()))
    assert len(finder.look(None)[1]) == 2
    held = weakref.ref(layers[0].weight)
    del layers[0]
    gc.collect()
    assert held() is None and len(finder.look(None)[1]) == 0
    with pytest.raises(IndexError):
        finder.look(None)[1][0]


def test_a_module_that_makes_its_parameters_when_it_is_asked() -> None:
    class Made:
        @property
        def _buffers(self) -> dict[str, torch.Tensor]:
            return {}

        @property
        def _parameters(self) -> dict[str, torch.Tensor]:
            return {f"weight_{k}": torch.full((3,), float(k)) for k in range(4)}

    node: Any = ModuleNode("", nn.Linear(2, 2), SiteTable(), is_primary=True)
    made = Made()
    node.module = lambda: made
    for finder in (new_finder([node]), ParameterFinder([node])):
        for _ in range(2):
            found = [(name, float(tensor.sum())) for _, name, tensor in finder.look(None)[1]]
            assert found == [(f"weight_{k}", 3.0 * k) for k in range(4)]


@pytest.mark.parametrize("make", [new_finder, ParameterFinder])
def test_a_finder_that_has_raised_finds_the_parameters_the_next_time(make: Any) -> None:
    layer = nn.Linear(2, 2)
    finder = make([ModuleNode("", layer, SiteTable(), is_primary=True)])
    groups: list[Any] = [{"params": [layer.bias]}]

    def names() -> list[str]:
        return [name for _, name, _ in finder.look(groups)[1]]

    assert names() == ["bias"]
    groups.append({})
    with pytest.raises(KeyError):
        names()
    assert gc.isenabled()
    groups[1]["params"] = [layer.weight]
    assert names() == ["weight", "bias"]


def test_what_adding_one_raises_comes_through() -> None:
    def refuse(*_: object) -> int:
        raise KeyError("no site")

    layer = nn.Linear(2, 2)
    layer.weight.grad = torch.ones(2, 2)
    node = ModuleNode("", layer, SiteTable(), is_primary=True)
    with pytest.raises(KeyError, match="no site"):
        TensorBatch().add_gradients(parameters_of([node], None), refuse)


def tensor_objects() -> int:
    return sum(type(each) is torch.Tensor for each in gc.get_objects())


def test_a_gradient_gets_no_object_of_python_by_being_read() -> None:
    layers, sites = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3))), SiteTable()
    layers(torch.ones(1, 2)).sum().backward()
    finder = new_finder(nodes_of(layers, sites))
    as_found(finder, None, sites)  # with objects, and all have their sites now
    layers.zero_grad()
    layers(torch.ones(1, 2)).sum().backward()
    # A class of the program's own, and a tensor whose values are elsewhere.
    layers[1].weight.grad, apart = Sub(torch.ones(2, 2)), torch.ones(2)
    layers[1].bias.grad = torch.ones(2)
    layers[1].bias.grad._local_tensor = apart
    _, parameters, _ = finder.look(None)
    batch, added = TensorBatch(), []

    def site_of(node: ModuleNode, name: str, _: torch.Tensor) -> int:
        added.append((node.path, name))
        return 0

    before = tensor_objects()
    batch.add_gradients(parameters, site_of)
    assert tensor_objects() == before and added == [("1", "weight"), ("1", "bias")]
    assert batch.tensors[0] is batch.given(0) is layers[0].weight.grad
    assert tensor_objects() == before + 1
    assert batch.tensors[2] is batch.given(2) is layers[1].weight.grad
    assert batch.tensors[3] is apart and batch.given(3) is layers[1].bias.grad
    assert len(batch.tensors[4:9]) == 2 and len(batch.tensors[4:][1:]) == 1
    for wrong in (6, 10**6):
        with pytest.raises(IndexError):
            batch.tensors[wrong]
    with pytest.raises(IndexError):
        batch.tensors[4:][2]
    with pytest.raises(ValueError, match="without a step"):
        batch.tensors[::2]


def test_a_list_that_cannot_be_read_says_which_of_its_tensors() -> None:
    tensors = TensorBatch().tensors
    for tensor in (torch.ones(1), torch.ones(1, device="meta")):
        tensors.append(tensor)
    assert status.module is not None and len(status.module.record_list(tensors[:1])) == 1
    with pytest.raises(TypeError, match="item 1: expected a tensor with memory"):
        status.module.record_list(tensors)
    with pytest.raises(TypeError, match="got int"):
        tensors.append(1)


def changed_in_place(x: torch.Tensor) -> torch.Tensor:
    return x.mul_(2)


def changed_behind_those(x: torch.Tensor) -> torch.Tensor:
    x[99:].mul_(2)
    return x


def changed_past_the_version(x: torch.Tensor) -> torch.Tensor:
    x.data[3] = 7
    return x


def changed_where_nobody_looks(x: torch.Tensor) -> torch.Tensor:
    x.data[99] = 7
    return x


def with_nan(x: torch.Tensor) -> torch.Tensor:
    x.data[99] = torch.nan
    return x


CHANGES: dict[Callable[[torch.Tensor], torch.Tensor], bool] = {
    torch.Tensor.detach: False,
    changed_in_place: True,
    changed_behind_those: True,
    changed_past_the_version: True,
    changed_where_nobody_looks: False,
    with_nan: False,
    torch.clone: True,
    lambda x: x[1:]: True,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("change", "is_seen"), CHANGES.items(), ids=range(len(CHANGES)))
def test_a_gradient_that_was_changed_by_hand(
    change: Callable[[torch.Tensor], torch.Tensor], is_seen: bool, dtype: torch.dtype
) -> None:
    """float32 is compared in C++."""
    from fastcheck.monitor.loop.hand_changes import Probe
    from fastcheck.monitor.loop.hand_changes import probe as make_probe

    gradient = torch.arange(100, dtype=dtype)
    probe = make_probe(gradient)
    assert isinstance(probe, Probe) == (dtype is torch.float64)
    assert not probe.is_changed(gradient)
    assert probe.is_changed(change(gradient)) == is_seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_nan_among_the_elements_that_are_compared_is_no_change(dtype: torch.dtype) -> None:
    from fastcheck.monitor.loop.hand_changes import probe as make_probe

    gradient = torch.tensor([0.0, torch.nan], dtype=dtype)
    probe = make_probe(gradient)
    assert not probe.is_changed(gradient)
    gradient.data.fill_(1.0)
    assert probe.is_changed(gradient)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_gradients_that_are_changed_before_the_update_of_their_optimizer(
    dtype: torch.dtype,
) -> None:
    """float32 is looked at in C++, all parameters in one call."""
    layer, other = nn.Linear(2, 2, dtype=dtype), nn.Linear(2, 2, dtype=dtype)
    nodes = [
        ModuleNode(p, m, SiteTable(), is_primary=True) for p, m in (("a", layer), ("b", other))
    ]
    optimizers = [torch.optim.SGD(module.parameters()) for module in (layer, other)]
    owned, changes = [parameter_ids(optimizer) for optimizer in optimizers], HandChanges()

    def updates_with_a_change(changed: Optional[nn.Parameter]) -> list[bool]:
        for parameter in (*layer.parameters(), *other.parameters()):
            parameter.grad = torch.ones_like(parameter)
        changes.after_backward(parameters_of(nodes, None))
        if changed is not None:
            changed.grad.data.mul_(2)  # type: ignore[union-attr]  # it has one
        return [
            changes.before_update(optimizer, ids, parameters_of(nodes, ids))
            for optimizer, ids in zip(optimizers, owned)
        ]

    assert updates_with_a_change(None) == [False, False]
    assert updates_with_a_change(None) == [False, False]
    # An update leaves the probes of other optimizers.
    assert updates_with_a_change(other.bias) == [False, True]


def places(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Others that begin where it does, of whatever class, and some that do not."""
    own = tensor.detach()
    own._local_tensor = tensor  # type: ignore[attr-defined]  # as a DTensor has it
    parameter = nn.Parameter(tensor.detach())
    return [tensor, tensor[:1], own, parameter, tensor[1:], tensor.clone(), tensor.to_sparse()]


@pytest.mark.parametrize("made", [memory_ref, MemoryRef])
def test_memory_is_known_again(made: Callable[[torch.Tensor], MemoryRef]) -> None:
    tensor = torch.arange(3.0)
    others = places(tensor)
    assert [made(tensor).is_of(one) for one in others] == [True] * 4 + [False] * 3
    assert [made(one).is_of(tensor) for one in others] == [True] * 4 + [False] * 3
    sparse = others[-1]
    assert made(sparse).is_of(sparse)
    with torch.inference_mode():
        assert made(others[0]).is_of(others[1])


def test_memory_that_was_freed_is_nobody_elses() -> None:
    for _ in range(100):
        tensor = torch.ones(1000)
        memory = memory_ref(tensor)
        del tensor
        assert not memory.is_of(torch.ones(1000))
