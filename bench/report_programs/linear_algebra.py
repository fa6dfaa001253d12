"""Decompositions, determinants and systems of equations."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from report_programs.program import (
    BAD,
    LOSS,
    NO_RATE,
    OVERFLOW,
    ZERO_DIVISION,
    Made,
    chain,
    data,
    mlp,
    program,
    update,
    whole,
)


@program(
    "pytorch/pytorch#49886",
    "the derivative of svd divides by the difference of singular values, two of which are 0",
    place=r"\bwhiten\b|Low|\bbody\b",
    operator=r"\bsvd|Svd",
    kind=r"singular values|equal|repeated|degenerate",
    advice=r"singular values|svdvals|equal|noise|eps",
    never=(NO_RATE,),
)
def svd_of_equal_singular_values(fixed: bool) -> Made:
    class Low(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if fixed:
                x = x + 1e-3 * data(5, *x.shape)
            u, s, v = torch.linalg.svd(x, full_matrices=False)  # FAULT
            return u[:, :3] * s[:3] @ v[:3]

    model = chain(body=nn.Linear(6, 5, bias=False), whiten=Low(), head=nn.Linear(5, 2))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        x = data(i, 8, 6)
        if i == BAD:
            x = torch.zeros(8, 6)
            x[0, 0] = 1  # one sample left: rank 1
        return update(optimizer, F.cross_entropy(model(x), whole(i, 0, 2, 8)))

    return [model], step


@program(
    "jax-ml/jax#8732",
    "the derivative of eigh divides by the difference of eigenvalues, which are equal",
    place=r"\bwhiten\b|Whiten|covariance",
    operator=r"eigh",
    kind=r"eigenvalues|equal|repeated|degenerate",
    advice=r"eigenvalues|eigvalsh|equal|noise|eps",
    never=(NO_RATE,),
)
def eigh_of_equal_eigenvalues(fixed: bool) -> Made:
    class Whiten(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.covariance = nn.Parameter(torch.eye(4))

        def forward(self, x: Tensor) -> Tensor:
            tilt = torch.diag(torch.tensor([0.0, 0.1, 0.2, 0.3])) if fixed else 0.0
            values, vectors = torch.linalg.eigh(self.covariance + tilt)  # FAULT
            return x @ vectors / values.sqrt()

    model = chain(whiten=Whiten(), head=nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        return update(optimizer, F.cross_entropy(model(data(i, 8, 4)), whole(i, 0, 2, 8)))

    return [model], step


@program(
    "pytorch/pytorch#23473",
    "logdet of a 1x1 convolution whose determinant became negative is NaN",
    place=r"\bmix\b|Mix|\bflow\b",
    operator=r"logdet|\blog\b|LogBackward|slogdet",
    kind=r"negative|determinant",
    advice=r"slogdet|abs|negative|determinant",
    never=(NO_RATE,),
)
def logdet_of_negative(fixed: bool) -> Made:
    class Mix(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(4))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            size = torch.slogdet(self.weight)[1] if fixed else torch.logdet(self.weight)  # FAULT
            return x @ self.weight, size

    model = nn.ModuleDict({"mix": Mix()})
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        y, size = model["mix"](data(i, 8, 4))
        loss = update(optimizer, y.square().mean() - size)
        if i == BAD - 1:
            with torch.no_grad():
                model["mix"].weight[0, 0] = -0.1
        return loss

    return [model], step


@program(
    "Parskatt/RoMa#43",
    "a system that is nearly singular is solved: the solution is beyond float32",
    place=LOSS + r"|\bsolve\b",
    operator=r"solve|\bpow\b|PowBackward",
    kind=OVERFLOW + r"|beyond the range",
    advice=r"eye|regularis|jitter|diagonal|lstsq|pinv|scale|float64|clamp|double",
    never=(NO_RATE,),
)
def nearly_singular_system(fixed: bool) -> Made:
    model = mlp(4, 16, 3)
    optimizer = torch.optim.SGD(model.parameters(), 1e-5)

    def step(i: int) -> Tensor:
        x = data(i, 8, 4)
        system = torch.eye(3).repeat(8, 1, 1)
        if i == BAD:
            system[2, 2, 2] = 1e-38
        if fixed:
            system = system + 1e-2 * torch.eye(3)
        found = torch.linalg.solve(system, model(x)[..., None] * 100)  # FAULT
        return update(optimizer, found.square().mean())

    return [model], step


@program(
    "pytorch/pytorch#42792",
    "the derivative of qr of a matrix of low rank divides by a diagonal element of R that is 0",
    place=r"\bbase\b|Orthogonal",
    operator=r"\bqr\b|Qr",
    kind=r"rank|singular|diagonal|" + ZERO_DIVISION,
    advice=r"noise|rank|eps|1e-",
    never=(NO_RATE,),
)
def orthogonal_of_low_rank(fixed: bool) -> Made:
    class Orthogonal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lift = nn.Linear(6, 12, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            a = self.lift(x).view(-1, 4, 3)
            if fixed:
                a = a + 1e-2 * torch.eye(4, 3)
            return torch.linalg.qr(a)[0].flatten(1)  # FAULT

    model = chain(base=Orthogonal(), head=nn.Linear(12, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def step(i: int) -> Tensor:
        x = data(i, 8, 6)
        if i == BAD:
            x[2] = 0.0  # a matrix of zeros
        return update(optimizer, F.cross_entropy(model(x), whole(i, 0, 3, 8)))

    return [model], step


@program(
    "didriknielsen/survae_flows#16",
    "a flow's 1x1 convolution becomes singular: log|det W| is -inf",
    place=r"\bflow\b|the loss|Invertible",
    operator=r"slogdet|logdet",
    kind=r"singular|determinant",
    advice=r"regularis|orthogonal|torch\.eye|\bLU\b|\beps\b",
    never=(NO_RATE,),
)
def determinant_of_zero(fixed: bool) -> Made:
    class Invertible(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            w = self.weight + 0.1 * torch.eye(4) if fixed else self.weight
            return x @ w, torch.linalg.slogdet(w)[1]  # FAULT

    model = nn.ModuleDict({"flow": Invertible()})
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        z, log_det = model["flow"](data(i, 16, 4))
        loss = update(optimizer, 0.5 * z.square().sum(1).mean() - log_det)
        if i == BAD - 1:
            with torch.no_grad():
                model["flow"].weight[2] *= 0 if not fixed else 0.1
        return loss

    return [model["flow"]], step


@program(
    "pytorch/pytorch#42792",
    "the derivative of qr divides by the diagonal of R, which is 0: two columns are one",
    place=LOSS + r"|code after the model",
    operator=r"\bqr\b|Qr",
    kind=r"diagonal of R|depend on each other",
    advice=r"noise",
    never=(NO_RATE, r"sqrt\(x \+ eps\)"),
)
def basis_of_dependent_columns(fixed: bool) -> Made:
    model = nn.Linear(4, 4, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)

    def step(i: int) -> Tensor:
        x = data(i, 4, 4)
        if i == BAD:
            x = torch.zeros(4, 4)
            x[0, 0] = 1
        columns = model(x)
        if fixed:
            columns = columns + 0.1 * torch.eye(4) + 0.01 * data(99, 4, 4)
        basis, _ = torch.linalg.qr(columns)  # FAULT
        return update(optimizer, (basis - torch.eye(4)).square().mean())

    return [model], step
