"""Healthy programs of many fields, in parts: each part is a module of its own, so that what passes
between them (masks, scores, NaN that a later part removes) is seen at module level too. The first
part takes ``h``, 4 rows of 8 with a gradient; the last returns as much.
"""

from __future__ import annotations

import math
from typing import Any, Callable

import torch
from torch.nn import functional as F

__all__ = ["PARTS"]

INF, NAN = float("inf"), float("nan")
Tensor = torch.Tensor
Part = Callable[..., Any]
PARTS: dict[str, tuple[Part, ...]] = {}

first_row = torch.arange(4)[:, None] == 0
first_half = torch.arange(8) < 4


def parts(name: str, *functions: Part) -> None:
    PARTS[name] = functions


def causal(n: int = 4) -> Tensor:
    return torch.ones(n, n).triu(1).bool()


def scores(h: Tensor) -> tuple[Tensor, Tensor]:
    return h @ h.T / math.sqrt(8), h


# ---- Attention -----------------------------------------------------------------------------------

parts(
    "attention whose scores are masked by +inf and subtracted",
    lambda h: (torch.where(causal(), INF, 0.0), h),
    lambda mask, h: (h @ h.T - mask, h),
    lambda s, h: s.softmax(-1) @ h,
)
parts(
    "a distance of +inf to what is out of reach",
    lambda h: (torch.cdist(h, h.detach() + 1).masked_fill(causal(), INF), h),
    lambda d, h: ((-d).softmax(-1), h),
    lambda w, h: w @ h,
)
parts(
    "alibi with a mask",
    scores,
    lambda s, h: (s - (torch.arange(4)[:, None] - torch.arange(4)).abs() * 0.5, h),
    lambda s, h: (s.masked_fill(causal(), -INF), h),
    lambda s, h: s.softmax(-1) @ h,
)
parts(
    "a window of attention, with a row beyond it",
    scores,
    lambda s, h: (s.masked_fill(first_row.expand(4, 4), -INF), h),
    lambda s, h: (torch.nan_to_num(s.softmax(-1)), h),
    lambda w, h: w @ h,
)
parts(
    "sparse attention by the best two",
    scores,
    lambda s, h: (s, s.topk(2, -1).values[:, -1:], h),
    lambda s, least, h: (torch.where(s < least, -INF, s), h),
    lambda s, h: s.softmax(-1) @ h,
)
parts(
    "attention by blocks with a running maximum of -inf",
    lambda h: (h, torch.full((4, 1), -INF), torch.zeros(4, 1), torch.zeros(4, 8)),
    lambda h, m, total, out: online(h, h[:2], m, total, out),
    lambda h, m, total, out: online(h, h[2:], m, total, out),
    lambda h, m, total, out: out / total,
)
parts(
    "the log of an attention's weights",
    lambda h: (F.softmax((h @ h.T).masked_fill(causal(), -INF), -1), h),
    lambda w, h: (w, w.detach().log(), h),
    lambda w, log, h: (w @ h) + (w * log.masked_fill(log == -INF, 0)).sum(-1, keepdim=True),
)
parts(
    "rotary positions of base 0 angles",
    lambda h: torch.view_as_complex(h.view(4, 4, 2).contiguous()),
    lambda z: z * torch.polar(torch.ones(4), torch.arange(4) / 10.0),
    lambda z: torch.view_as_real(z).flatten(1),
)
parts(
    "a temperature of 0 in a copy",
    lambda h: (h, (h.detach() / 0.0)),
    lambda h, sharp: h + F.one_hot(sharp.argmax(-1), 8),
)
parts(
    "a mask of a key that is -inf for every query",
    scores,
    lambda s, h: (s + torch.tensor([0.0, -INF, 0.0, -INF]), h),
    lambda s, h: torch.softmax(s, -1) @ h,
)
parts(
    "linear attention with an empty prefix",
    lambda h: (h.relu(), h.tril(-1)[:, :4]),
    lambda k, q: (k.cumsum(0) * torch.arange(4)[:, None].clamp(max=1), q),
    lambda total, q: torch.where(
        total.sum(-1, keepdim=True) > 0,
        total / total.sum(-1, keepdim=True).clamp_min(1e-6),
        total,
    ),
)


def online(h: Tensor, keys: Tensor, m: Tensor, total: Tensor, out: Tensor) -> tuple[Tensor, ...]:
    s = h @ keys.T / 3
    largest = torch.maximum(m, s.amax(-1, keepdim=True))
    shrink, w = (m - largest).exp(), (s - largest).exp()
    return h, largest, total * shrink + w.sum(-1, keepdim=True), out * shrink + w @ keys


# ---- Sequences and search ------------------------------------------------------------------------

parts(
    "log probabilities of impossible actions",
    lambda h: h.masked_fill(first_half, -INF),
    lambda s: s.log_softmax(-1),
    lambda s: torch.where(first_half, 0.0, s),
)
parts(
    "entropy of a masked policy",
    lambda h: (h, h.masked_fill(first_half, -INF).log_softmax(-1)),
    lambda h, log: (h, log.exp() * torch.where(log.isinf(), 0.0, log)),
    lambda h, terms: h - terms.sum(-1, keepdim=True),
)
parts(
    "nucleus sampling in a detached copy",
    lambda h: (h, h.detach().sort(-1, descending=True)),
    lambda h, s: (h, s.values.masked_fill(s.values.softmax(-1).cumsum(-1) > 0.6, -INF), s.indices),
    lambda h, s, at: h * (1 + torch.zeros(4, 8).scatter(1, at, s.softmax(-1).nan_to_num(0))),
)
parts(
    "beams that are not alive yet",
    lambda h: (h, torch.tensor([0.0, -INF, -INF, -INF])),
    lambda h, alive: (h, h.log_softmax(-1) + alive[:, None]),
    lambda h, total: h[total.detach().flatten().topk(4).indices // 8] + h,
)
parts(
    "viterbi from a single state",
    lambda h: (h, torch.where(torch.arange(8) == 0, 0.0, -INF)),
    lambda h, v: (h, (v[:, None] + torch.ones(8, 8).tril(1).log()).amax(0) + h[0]),
    lambda h, v: (h, (v[:, None] + torch.ones(8, 8).tril(1).log()).amax(0) + h[1]),
    lambda h, v: h + v[0],
)
parts(
    "a lattice in log space",
    lambda h: (h, torch.full((5, 9), -INF)),
    lambda h, table: (h, F.pad(h[None, :, :1].log_softmax(1)[0], (0, 8), value=-INF), table),
    lambda h, start, table: (h, torch.logaddexp(start, table[1:])),
    lambda h, table: h + table[:, :1],
)
parts(
    "a masked row of logaddexp",
    lambda h: (h, torch.where(first_half, -INF, h.detach())),
    lambda h, a: (h, torch.logaddexp(a, torch.full_like(a, -INF))),
    lambda h, s: h + torch.where(s.isinf(), 0.0, s),
)
parts(
    "a maximum over padded time",
    lambda h: torch.where(first_half, h, -INF),
    lambda h: (h, h.amax(-1, keepdim=True)),
    lambda h, most: torch.where(first_half, h, most),
)
parts(
    "a minimum over padded time",
    lambda h: torch.where(first_half, h, INF),
    lambda h: (h, h.amin(-1, keepdim=True)),
    lambda h, least: torch.where(first_half, h, least),
)
parts(
    "time since an event that never was",
    lambda h: (h, torch.where(first_row, INF, torch.arange(4.0)[:, None])),
    lambda h, since: (h, torch.exp(-since)),
    lambda h, weight: h * weight + h,
)
parts(
    "a positional bucket of log of 0",
    lambda h: (h, (torch.arange(4.0)[:, None] - torch.arange(4.0)).abs()),
    lambda h, d: (h, d, torch.log(d / 2)),
    lambda h, d, log: (h, torch.where(d < 2, d, 2 + log).long()),
    lambda h, bucket: h + bucket.float() @ h,
)
parts(
    "series with gaps",
    lambda h: torch.where(first_row, NAN, h),
    lambda h: (h.isnan(), h.nan_to_num(0.0)),
    lambda gap, h: torch.where(gap, 0.0, h),
)
parts(
    "gaps filled forward",
    lambda h: torch.where((torch.arange(4) == 2)[:, None], NAN, h),
    lambda h: (h, torch.where(h.isnan(), 0, torch.arange(4)[:, None])),
    lambda h, at: h.gather(0, at.cummax(0).values),
)
parts(
    "a gap in a running mean",
    lambda h: torch.where(first_row, NAN, h),
    lambda h: (
        h,
        torch.nancumsum(h, 0) if hasattr(torch, "nancumsum") else h.nan_to_num().cumsum(0),
    ),
    lambda h, total: total / (~h.isnan()).cumsum(0).clamp_min(1),
)
parts(
    "nansum and nanmean of rows",
    lambda h: torch.where((torch.arange(8) % 3 == 0) & ~first_row, NAN, h),
    lambda h: (h.nanmean(-1, keepdim=True), h.nansum(-1, keepdim=True), h),
    lambda mean, total, h: torch.where(h.isnan(), mean, h) + total,
)
parts(
    "nanquantile of a column without values",
    lambda h: (h, torch.where(torch.arange(8) == 3, NAN, h.detach())),
    lambda h, gaps: (h, torch.nanquantile(gaps, 0.5, dim=0)),
    lambda h, middle: h - middle.nan_to_num(0.0),
)


# ---- Graphs, segments, sets ----------------------------------------------------------------------

parts(
    "segments without members, by mean",
    lambda h: (h, torch.zeros(6, 8).index_add(0, torch.tensor([0, 0, 2, 5]), h)),
    lambda h, total: (h, total / torch.tensor([2.0, 0, 1, 0, 0, 1])[:, None]),
    lambda h, mean: h + mean.nan_to_num(0.0).sum(0),
)
parts(
    "segments without members, by maximum",
    lambda h: (h, torch.tensor([0, 0, 2, 2])),
    lambda h, at: (
        h,
        torch.full((4, 8), -INF).scatter_reduce(0, at[:, None].expand(4, 8), h, "amax"),
    ),
    lambda h, most: h + torch.where(most == -INF, 0.0, most),
)
parts(
    "a softmax over the neighbours of a lone node",
    lambda h: (h, torch.tensor([[0, 1, 0, 0], [1, 0, 0, 1], [0, 0, 0, 0], [0, 1, 0, 0]])),
    lambda h, edges: (h, (h @ h.T).masked_fill(edges == 0, -INF)),
    lambda h, s: (h, (s - s.amax(-1, keepdim=True)).exp()),
    lambda h, w: h + (w / w.sum(-1, keepdim=True)).nan_to_num(0.0) @ h,
)
parts(
    "a normalised laplacian with a lone node",
    lambda h: (h, torch.tensor([[0.0, 1, 0, 0], [1, 0, 0, 1], [0, 0, 0, 0], [0, 1, 0, 0]])),
    lambda h, a: (h, a, a.sum(-1).pow(-0.5)),
    lambda h, a, d: (h, a, torch.where(d.isinf(), 0.0, d)),
    lambda h, a, d: h + (d[:, None] * a * d) @ h,
)
parts(
    "shortest paths with unreachable nodes",
    lambda h: (h, torch.where(torch.eye(4) > 0, 0.0, torch.where(causal(), 1.0, INF))),
    lambda h, d: (h, (d[:, :, None] + d[None]).amin(1)),
    lambda h, d: (h, 1 / (1 + d)),
    lambda h, w: w @ h,
)
parts(
    "page rank with a dangling page",
    lambda h: (h, torch.tensor([[0.0, 1, 1, 0], [0, 0, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]])),
    lambda h, a: (h, a / a.sum(-1, keepdim=True)),
    lambda h, p: h + torch.where(p.isnan(), 0.25, p).T @ h,
)
parts(
    "sets of different sizes, padded with nan",
    lambda h: torch.stack([F.pad(h[i, : 2 * i + 2], (0, 6 - 2 * i), value=NAN) for i in range(4)]),
    lambda h: (h, ~h.isnan()),
    lambda h, known: torch.where(known, h, 0.0) / known.sum(-1, keepdim=True),
)
parts(
    "the best of an empty set",
    lambda h: (h, h.detach().masked_fill(first_row, -INF)),
    lambda h, s: (h, s.max(-1)),
    lambda h, best: torch.where((best.values == -INF)[:, None], h, h + best.indices[:, None]),
)


# ---- Vision and geometry -------------------------------------------------------------------------

parts(
    "flow divided by a depth of 0",
    lambda h: (h, h.detach().relu()),
    lambda h, depth: (h, 1 / depth),
    lambda h, inverse: h * torch.where(inverse.isfinite(), inverse, 0.0).clamp(max=10),
)
parts(
    "points behind the camera",
    lambda h: (h, h.detach()[:, 2:3].relu()),
    lambda h, z: (h, h.detach()[:, :2] / z),
    lambda h, xy: (h, xy.isfinite().all(-1, keepdim=True), xy),
    lambda h, ok, xy: h + torch.where(ok, xy.clamp(-5, 5), 0.0).sum(-1, keepdim=True),
)
parts(
    "transmittance of an opaque sample",
    lambda h: (h, torch.where(torch.arange(8) == 7, INF, 0.1).clamp(max=1e10)),
    lambda h, step: (h, F.softplus(h) * step),
    lambda h, optical: (h, 1 - torch.exp(-optical)),
    lambda h, alpha: alpha * torch.cumprod(torch.cat([torch.ones(4, 1), 1 - alpha], 1), 1)[:, :-1],
)
parts(
    "an unnormalised direction of length 0",
    lambda h: (h, h.detach() * ~first_row),
    lambda h, d: (h, d / d.norm(dim=-1, keepdim=True)),
    lambda h, d: h + torch.where(first_row, 0.0, d),
)
parts(
    "angles of a polygon with a repeated corner",
    lambda h: (h, torch.cat([h.detach()[:, :2], h.detach()[:, :2]], 1).view(4, 2, 2)),
    lambda h, p: (h, (p[:, 1] - p[:, 0])),
    lambda h, e: (h, (e[:, 0] / e.norm(dim=-1)).acos()),
    lambda h, angle: h + angle.nan_to_num(0.0)[:, None],
)
parts(
    "overlap of boxes without area",
    lambda h: (h, h.detach()[:, :1] * 0),
    lambda h, area: (h, area / (area + area)),
    lambda h, overlap: h * (1 - overlap.nan_to_num(0.0)),
)
parts(
    "a histogram of a constant picture",
    lambda h: (h, torch.zeros(4, 8)),
    lambda h, picture: (h, (picture - picture.mean()) / picture.std()),
    lambda h, picture: h + picture.nan_to_num(0.0),
)
parts(
    "an augmentation that warps out of the picture",
    lambda h: (h, torch.full((1, 4, 8, 2), 2.0)),
    lambda h, grid: F.grid_sample(h[None, None], grid, align_corners=False)[0, 0] + h,
    lambda h: torch.where(h == 0, NAN, h),
    lambda h: h.nan_to_num(0.0),
)
parts(
    "a signed distance at its surface",
    lambda h: (h, h.detach() * 0),
    lambda h, x: (h, x / x.norm(dim=-1, keepdim=True)),
    lambda h, normal: h + normal.nan_to_num(0.0, 0.0, 0.0),
)
parts(
    "colours without saturation",
    lambda h: (h, h.detach().amax(-1) * 0),
    lambda h, delta: (h, (h.detach()[:, 0] - h.detach()[:, 1]) / delta),
    lambda h, hue: h + torch.where(hue.isfinite(), hue, 0.0)[:, None],
)


# ---- Linear algebra and statistics ---------------------------------------------------------------

parts(
    "singular matrices of a batch, masked",
    lambda h: (h, torch.stack([torch.zeros(3, 3), torch.eye(3), torch.eye(3), torch.eye(3)])),
    lambda h, a: (h, torch.linalg.inv_ex(a)),
    lambda h, found: (h, torch.where((found.info == 0)[:, None, None], found.inverse, 0.0)),
    lambda h, inverse: h + inverse.sum((-1, -2))[:, None],
)
parts(
    "the log of a determinant of 0",
    lambda h: (h, torch.linalg.slogdet(torch.zeros(4, 3, 3))),
    lambda h, found: (h, found.logabsdet),
    lambda h, log: h + log.exp()[:, None],
)
parts(
    "a condition number of a singular matrix",
    lambda h: (h, torch.linalg.svdvals(torch.zeros(3, 3))),
    lambda h, s: (h, s.max() / s.min()),
    lambda h, condition: h if not condition.isfinite() else h / condition,
)
parts(
    "whitening with a constant column",
    lambda h: (h, h.detach() * first_half),
    lambda h, x: (h, 1 / x.var(0).sqrt()),
    lambda h, scale: h * torch.where(scale.isinf(), 1.0, scale),
)
parts(
    "a correlation matrix with a constant row",
    lambda h: (h, torch.corrcoef(h.detach() * ~first_row)),
    lambda h, c: (h, c.nan_to_num(0.0)),
    lambda h, c: h + c @ h,
)
parts(
    "z scores of a single sample",
    lambda h: (h, h.detach()[:1]),
    lambda h, x: (h, (x - x.mean(0)) / x.std(0, correction=0)),
    lambda h, z: h + z.nan_to_num(0.0),
)
parts(
    "kurtosis of a constant",
    lambda h: (h, torch.ones(4, 8)),
    lambda h, x: (h, (x - x.mean(-1, keepdim=True)).pow(4).mean(-1) / x.var(-1).square()),
    lambda h, k: h + torch.nan_to_num(k, nan=3.0)[:, None],
)
parts(
    "quantisation scales of rows of 0",
    lambda h: (h, (h.detach() * ~first_row)),
    lambda h, x: (h, x, x.abs().amax(-1, keepdim=True) / 127),
    lambda h, x, scale: (h, torch.round(x / scale), scale),
    lambda h, q, scale: h + (q.nan_to_num(0.0) * scale),
)
parts(
    "weight norm of a row of 0",
    lambda h: (h, torch.eye(8) * (torch.arange(8) > 0)[:, None]),
    lambda h, v: (h, v / v.norm(dim=1, keepdim=True)),
    lambda h, w: h @ torch.where(w.isnan(), 0.0, w),
)
parts(
    "spectral norm of zeros",
    lambda h: (h, torch.zeros(8, 8)),
    lambda h, w: (h, w, torch.linalg.matrix_norm(w, 2)),
    lambda h, w, sigma: (h, w / sigma),
    lambda h, w: h + h @ w.nan_to_num(0.0),
)
parts(
    "mixture densities with a weight of 0",
    lambda h: (h.log_softmax(-1), torch.where(first_half, -INF, 0.0), h),
    lambda log, weight, h: (torch.logsumexp(log + weight, -1, keepdim=True), h),
    lambda total, h: h - total,
)
parts(
    "a ratio of gamma functions at a pole",
    lambda h: (h, torch.lgamma(torch.tensor([0.0, 1, 2, 3, 4, 5, 6, 7]))),
    lambda h, log: (h, torch.exp(-log)),
    lambda h, inverse: h + inverse,
)
parts(
    "probabilities to odds and back",
    lambda h: (h, torch.tensor([0.0, 0.5, 1.0, 0.25]).logit()[:, None]),
    lambda h, logit: (h, logit.sigmoid()),
    lambda h, p: h * p + h,
)
parts(
    "a cumulative hazard that is infinite",
    lambda h: (h, -torch.log(1 - torch.linspace(0, 1, 8))),
    lambda h, hazard: (h, torch.exp(-hazard)),
    lambda h, survival: h * survival + h,
)
