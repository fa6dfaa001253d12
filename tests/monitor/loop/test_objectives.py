"""Tests of losses of a known kind: programs of the accuracy suite, and what is like them and
healthy.
"""

from __future__ import annotations

import copy
import math
import re
from typing import Any, Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Normal, kl_divergence

import fastcheck
from accuracy.invariants import texts_of
from accuracy.invariants_objectives import OBJECTIVES, Recurrent, Scaled, net, train
from accuracy.invariants_programs import Fault


@pytest.mark.parametrize("fault", OBJECTIVES, ids=lambda fault: fault.name)
def test_a_fault_is_told_and_its_fixed_version_is_not(fault: Fault) -> None:
    warned, told = texts_of(fault.program(True))
    assert len([text for text in (*warned, *told) if re.search(fault.text, text)]) == 1
    assert texts_of(fault.program(False)) == ([], [])


def said(model: nn.Module, loss: Callable[[int], torch.Tensor]) -> list[str]:
    def program() -> Any:
        yield model
        train(model, loss)

    warned, told = texts_of(program())
    return [*warned, *told]


def rows(model: nn.Module, *shape: int) -> torch.Tensor:
    return F.normalize(model(torch.randn(*shape)), dim=1)


def _queue(model: nn.Module) -> torch.Tensor:
    """MoCo: negatives of earlier batches."""
    one, queue = rows(model, 16, 16), F.normalize(torch.randn(16, 16), dim=0)
    positive = (one * torch.roll(one.detach(), 1, 1)).sum(1, keepdim=True)
    similar = torch.cat([positive, one @ queue], 1)
    return F.cross_entropy(similar / 0.1, torch.zeros(16, dtype=torch.long))


def _hard(model: nn.Module) -> torch.Tensor:
    one, other, negative = (rows(model, 16, 16) for _ in range(3))
    similar = torch.cat([(one * other).sum(1, keepdim=True), one @ negative.t()], 1)
    return F.cross_entropy(similar / 0.1, torch.zeros(16, dtype=torch.long))


def _own(model: nn.Module) -> torch.Tensor:
    one = rows(model, 16, 16)
    return F.cross_entropy(one @ one.t() / 0.1, torch.arange(16))


def _without_diagonal(model: nn.Module) -> torch.Tensor:
    one = rows(model, 16, 16)
    similar = one @ one.t() / 0.1 - 1e9 * torch.eye(16)
    return F.cross_entropy(similar, torch.arange(16).roll(1))


def _layer_of_one_class(model: nn.Module) -> torch.Tensor:
    return F.cross_entropy(model(torch.randn(8, 16)), torch.zeros(8, dtype=torch.long))


def _pixels_of_one_class(model: nn.Module) -> torch.Tensor:
    """Crops that show the background alone."""
    made = model(torch.randn(2, 4, 4, 16)).movedim(3, 1)
    return F.cross_entropy(made, torch.zeros(2, 4, 4, dtype=torch.long))


def _masked_before_dropout(model: nn.Module) -> torch.Tensor:
    """A mask of the program's own that keeps as many as dropout does."""
    x = torch.randn(32, 16)
    keep = torch.arange(32) % 2 == 0
    return F.mse_loss(F.dropout(model(x) * keep[:, None].expand(32, 16)), x)


def _one_of_two_terms(model: nn.Module) -> torch.Tensor:
    made = model(torch.randn(32, 16))
    return F.cross_entropy(made, torch.zeros(32, dtype=torch.long)) + made.square().mean()


def _divergence_alone(model: nn.Module) -> torch.Tensor:
    mean, logvar = model(torch.randn(8, 16)).chunk(2, 1)
    return -0.5 * (1 + logvar - mean**2 - logvar.exp()).sum(1).mean()


def _of_a_deviation(model: nn.Module) -> torch.Tensor:
    """The divergence of a standard deviation, of which the layer gives the logarithm."""
    x = torch.randn(8, 8)
    mean, log_std = model(torch.cat([x, x], 1)).chunk(2, 1)
    made = mean + log_std.exp() * torch.randn_like(mean)
    divergence = 0.5 * (mean**2 + log_std.exp() ** 2 - 2 * log_std - 1)
    return F.mse_loss(made, x) + 0.1 * divergence.mean()


def _mean_decoded(model: nn.Module) -> torch.Tensor:
    x = torch.randn(8, 8)
    mean, logvar = model(torch.cat([x, x], 1)).chunk(2, 1)
    return F.mse_loss(mean, x) - 0.05 * (1 + logvar - mean**2 - logvar.exp()).mean()


def _root_of_variance(model: nn.Module) -> torch.Tensor:
    x = torch.randn(8, 8)
    mean, logvar = model(torch.cat([x, x], 1)).chunk(2, 1)
    posterior = Normal(mean, logvar.exp().sqrt())
    divergence = kl_divergence(posterior, Normal(0.0, 1.0)).mean()
    return F.mse_loss(posterior.rsample(), x) + divergence


def _pairs(model: nn.Module) -> torch.Tensor:
    x = torch.randn(8, 16)
    return -F.logsigmoid(model(x) - model(x - 1)).mean()


def _advantages(model: nn.Module) -> torch.Tensor:
    made = model(torch.randn(32, 16)).log_softmax(1)
    action = made.exp().multinomial(1)
    return -(made.gather(1, action) * torch.rand(32, 1)).mean()


def _entropy_alone(model: nn.Module) -> torch.Tensor:
    """Adaptation to a test set makes it smaller."""
    logits = model(torch.randn(32, 16))
    return -(logits.softmax(1) * logits.log_softmax(1)).sum(1).mean()


def _soft_labels(model: nn.Module) -> torch.Tensor:
    x = torch.randn(32, 16)
    return -(x.softmax(1) * model(x).log_softmax(1)).sum(1).mean()


def _forgets_a_part(model: nn.Module) -> torch.Tensor:
    x, y = torch.randn(2, 32, 16)
    kept = F.cross_entropy(model(x), x.argmax(1))
    return kept - 0.1 * F.cross_entropy(model(y), y.argmax(1))


def _constant_term(model: nn.Module) -> torch.Tensor:
    x = torch.randn(32, 16)
    zero = torch.zeros(())
    return zero + F.cross_entropy(model(x), x.argmax(1)) + 0.5 * math.log(2 * math.pi)


def _autoencoder(model: nn.Module) -> torch.Tensor:
    x = torch.randn(32, 16)
    return F.mse_loss(model(x), x)


def _counts(model: nn.Module) -> torch.Tensor:
    x = torch.randn(32, 16)
    rate, squares = model(x).exp().chunk(2, 1)
    return F.poisson_nll_loss(rate, x[:, :8] ** 2, log_input=False) + squares.exp().log1p().mean()


def _several_positives(model: nn.Module) -> torch.Tensor:
    x = torch.randn(32, 16)
    alike = (x[:, :1].sign() == x[:, 0].sign()).float()
    of = -(alike * (model(x) @ x.t() / 16).log_softmax(1)).sum(1)
    return F.cross_entropy(model(x), F.one_hot(x.argmax(1), 16).float()) + of.mean() / 16


def _kernel(model: nn.Module) -> torch.Tensor:
    """A distance of distributions by a kernel, of each with each."""
    made, other = model(torch.randn(32, 16))[:, :1], torch.randn(32, 1)
    return (
        torch.exp(-(made - made.t()).pow(2)).mean() - torch.exp(-((made - other.t()) ** 2)).mean()
    )


def _mixture(model: nn.Module) -> torch.Tensor:
    x = torch.randn(32, 16)
    share, mean, log_std, _ = model(x).chunk(4, 1)
    likelihood = Normal(mean, log_std.exp()).log_prob(x[:, :1].sin())
    return -(share.log_softmax(1) + likelihood).logsumexp(1).mean()


@pytest.mark.parametrize(
    "loss",
    [
        *(_queue, _hard, _own, _without_diagonal, _layer_of_one_class, _one_of_two_terms),
        *(_pixels_of_one_class, _masked_before_dropout),
        *(_divergence_alone, _of_a_deviation, _mean_decoded, _root_of_variance, _pairs),
        *(_advantages, _entropy_alone, _soft_labels, _forgets_a_part, _constant_term),
        *(_autoencoder, _kernel, _mixture, _counts, _several_positives),
    ],
)
def test_what_is_like_a_fault_and_healthy(loss: Callable[[nn.Module], torch.Tensor]) -> None:
    torch.manual_seed(0)
    model = net(16, 32, 16)
    model.drop = nn.Dropout()
    assert said(model, lambda step: loss(model[:3])) == []


def _huber(made: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.huber_loss(made, target, delta=0.1)


def _smooth_l1(made: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.smooth_l1_loss(made, target, beta=0.5)


def _of_probabilities(made: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.binary_cross_entropy(made.sigmoid(), target.sigmoid())


@pytest.mark.parametrize("criterion", [F.mse_loss, _huber, _smooth_l1, _of_probabilities])
@pytest.mark.parametrize("scale", [1.0, 1024.0])
@pytest.mark.parametrize("is_constant", [False, True])
def test_a_term_without_a_graph_where_the_loss_is_multiplied(
    is_constant: bool, scale: float, criterion: Callable[..., torch.Tensor]
) -> None:
    """A constant is none that has changed, though the factor of the loss has."""
    torch.manual_seed(0)
    model = net(16, 32, 16)

    def loss(step: int) -> torch.Tensor:
        x = torch.randn(32, 16)
        term = torch.tensor(0.7) if is_constant else model[0].weight.detach().square().sum()
        return (criterion(model(x), x.sin()) + term) * scale * (1 + step // 10)

    assert any("has no graph" in text for text in said(model, loss)) is not is_constant


class _Holder(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        layer = nn.Linear(16, 16)
        self.kind, self.last, self.layers = kind, nn.Linear(16, 16), [layer]
        if kind == "registered, too":
            self.layer = layer
        if kind == "frozen":
            layer.requires_grad_(False)
        if kind == "evaluated":
            layer.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.last(self.layers[0](x))
        return made


@pytest.mark.parametrize(
    "kind",
    [
        *("trains nothing", "registered, too", "frozen", "evaluated", "held"),
        *("by hand", "momentum by hand", "read", "read now and then"),
    ],
)
def test_a_layer_in_a_list(kind: str) -> None:
    """``by hand``: the program updates it; ``read``: it reads its gradients, and clears them."""
    torch.manual_seed(0)
    model = _Holder(kind)
    layer = model.layers[0]
    own = [*model.parameters(), *(layer.parameters() if kind == "held" else ())]

    def loss(step: int) -> torch.Tensor:
        if "by hand" in kind and step:
            with torch.no_grad():
                for weight in layer.parameters():
                    weight -= 0.01 * weight.grad
                    weight.grad *= 0.9
        if kind in ("by hand", "read") or (kind == "read now and then" and step % 7 == 0):
            layer.zero_grad()
        x = torch.randn(8, 16)
        return F.mse_loss(model(x), x.sin())

    def program() -> Any:
        yield model
        train(model, loss, torch.optim.SGD(own, 0.01))

    warned, told = texts_of(program())
    is_told = any("2 weights in layers get gradients" in text for text in warned)
    assert is_told is (kind == "trains nothing") and told == []


class _Encoded(nn.Module):
    """An autoencoder of sequences: the decoder reads the last state of the encoder alone."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = (nn.GRU(16, 16, 2, batch_first=True) for _ in range(2))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        state = self.encoder(x)[1]
        made: tuple[torch.Tensor, torch.Tensor] = self.decoder(
            state[-1][:, None].expand(-1, x.shape[1], -1), state
        )
        return made


class _Pointwise(nn.Linear):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor]:  # type: ignore[override]  # as GRU
        return (super().forward(x),)


@pytest.mark.parametrize(
    ("layer", "is_told"),
    [
        (nn.GRU(16, 16, 2, batch_first=True), True),
        (nn.LSTM(16, 16, 2, batch_first=True), True),
        (nn.RNN(16, 16, batch_first=True), True),
        (nn.GRU(16, 8, batch_first=True, bidirectional=True), False),
        (nn.LSTM(16, 8, batch_first=True, bidirectional=True), False),
        (_Encoded(), False),
        (_Pointwise(16, 16), False),
    ],
)
@pytest.mark.parametrize("is_shifted", [False, True])
def test_targets_that_a_recurrent_layer_reads(
    layer: nn.Module, is_told: bool, is_shifted: bool
) -> None:
    torch.manual_seed(0)
    model = Recurrent(copy.deepcopy(layer))

    def loss(step: int) -> torch.Tensor:
        tokens = torch.randint(0, 20, (8, 9))
        target = tokens[:, is_shifted : 8 + is_shifted]
        return F.cross_entropy(model(tokens[:, :8]).flatten(0, 1), target.flatten())

    assert len(said(model, loss)) == (is_told and not is_shifted)


class _Points(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
        self.x = torch.rand(32, 2, requires_grad=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.net(x)
        return made


@pytest.mark.parametrize(
    "kind",
    [
        *("derived", "derived by others", "data", "data of the model", "updated by hand"),
        *("trained", "own loss network"),
    ],
)
def test_a_tensor_that_requires_a_gradient_and_is_not_trained(kind: str) -> None:
    """As points at which an equation is to hold, and what the program updates itself."""
    torch.manual_seed(0)
    model = _Points()
    points, other = model.x, torch.rand(32, 2, requires_grad=True)
    reads = nn.Sequential(nn.Linear(1, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))

    def loss(step: int) -> torch.Tensor:
        if kind == "updated by hand" and step:
            with torch.no_grad():
                points.sub_(0.01 * points.grad)
                other.data -= 0.01 * other.grad
            points.grad, other.grad = None, None
        if kind.startswith("data"):
            given = points if kind == "data of the model" else other
            return model(given).square().mean() + model(torch.rand(8, 2)).square().mean()
        made = model(points) + model(other)
        if kind == "derived by others":
            third = torch.rand(32, 2, requires_grad=True)
            (slope,) = torch.autograd.grad(model(third).sum(), third, create_graph=True)
            return slope.square().mean() + made.square().mean()
        if kind == "derived":
            slopes = torch.autograd.grad(made.sum(), (points, other), create_graph=True)
            return sum((slope.square().mean() for slope in slopes), made.square().mean())
        read = reads(made) if kind == "own loss network" else made
        return read.square().mean() + read.mean() + model.net(torch.rand(8, 2)).square().mean()

    own = [*model.parameters(), *((points, other) if kind != "updated by hand" else ())]

    def program() -> Any:
        yield model
        is_data = kind.startswith("d")
        train(model, loss, torch.optim.Adam(model.parameters() if is_data else own, 1e-3))

    assert texts_of(program()) == ([], [])


def test_a_number_that_no_optimizer_holds() -> None:
    torch.manual_seed(0)
    model, scale = net(16, 32, 16), torch.tensor(1.0, requires_grad=True)
    x = torch.randn(48, 32, 16)
    found = said(model, lambda step: F.mse_loss(model(x[step]) * scale, x[step]))
    assert len(found) == 1 and "1 weight in scale gets gradients that nothing uses" in found[0]


def test_a_teacher_may_have_a_graph() -> None:
    torch.manual_seed(0)
    model = Scaled(is_faulty=False)
    teacher = copy.deepcopy(model)
    x = torch.randn(48, 32, 16)
    assert said(model, lambda step: F.mse_loss(model(x[step]), teacher(x[step].sin()))) == []


def test_a_target_network_may_have_a_graph() -> None:
    """Its weights are in no optimizer."""
    torch.manual_seed(0)
    model = net(16, 32, 16)
    target = copy.deepcopy(model)

    def loss(step: int) -> torch.Tensor:
        x, action = torch.randn(32, 16), torch.randint(0, 16, (32, 1))
        following = target(torch.randn(32, 16)).max(1).values
        return F.mse_loss(model(x).gather(1, action).squeeze(1), torch.randn(32) + 0.9 * following)

    assert said(model, loss) == []


def test_a_policy_is_its_reference_before_the_first_update() -> None:
    """A stop tells of what the last look at a graph has shown."""
    torch.manual_seed(0)
    model = net(16, 32, 16)
    reference = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with fastcheck.install(model, overflow_nums=1), pytest.raises(fastcheck.OverflowDetected) as e:
        for step in range(4):
            x = torch.randn(8, 16)
            loss = -F.logsigmoid(model(x) - reference(x)).mean()
            optimizer.zero_grad()
            (loss if step < 3 else loss * torch.nan).backward()
            optimizer.step()
    assert "logsigmoid" not in str(e.value)
