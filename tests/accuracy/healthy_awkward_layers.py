"""Healthy programs that make NaN and infinities on their way: what a layer computes from its input,
and its backward. ``h``: 4 rows of 8, with a gradient; the first row of ``zeroed(h)`` is 0.
"""

from __future__ import annotations

from typing import Callable

import torch
from torch.nn import functional as F

__all__ = ["LAYERS"]

INF, NAN = float("inf"), float("nan")
Tensor = torch.Tensor
LAYERS: dict[str, Callable[[Tensor], Tensor]] = {}


def layer(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    LAYERS[function.__name__.replace("_", " ")] = function
    return function


def zeroed(h: Tensor) -> Tensor:
    keep = torch.ones(h.shape[0], 1)
    keep[0] = 0
    return h * keep


def causal(n: int) -> Tensor:
    return torch.ones(n, n).triu(1).bool()


# ---- Backward at a point where a formula divides by 0 --------------------------------------------


@layer
def normalize_of_a_zero_row(h: Tensor) -> Tensor:
    return F.normalize(zeroed(h), dim=-1)


@layer
def cosine_similarity_with_a_zero_row(h: Tensor) -> Tensor:
    return h * F.cosine_similarity(zeroed(h), h, dim=-1).unsqueeze(-1)


@layer
def norm_of_a_zero_row(h: Tensor) -> Tensor:
    return h + zeroed(h).norm(dim=-1, keepdim=True)


@layer
def vector_norm_of_order_3(h: Tensor) -> Tensor:
    return h + torch.linalg.vector_norm(zeroed(h), 3, dim=-1, keepdim=True)


@layer
def frobenius_norm_of_zeros(h: Tensor) -> Tensor:
    return h + torch.linalg.matrix_norm(h * 0)


@layer
def std_of_a_constant(h: Tensor) -> Tensor:
    return h + (h * 0 + 1).std(-1, keepdim=True)


@layer
def std_over_dimensions_of_a_constant(h: Tensor) -> Tensor:
    deviation, mean = torch.std_mean(h * 0 + 2, dim=(0, 1))
    return h + deviation + mean


@layer
def sinc_of_0(h: Tensor) -> Tensor:
    return torch.sinc(zeroed(h))


@layer
def pow_of_0_with_a_learned_exponent(h: Tensor) -> Tensor:
    return torch.pow(zeroed(h).abs(), 2 + h.sigmoid())


@layer
def a_scalar_to_a_learned_power(h: Tensor) -> Tensor:
    return torch.pow(0.0, 1 + h.abs()) + h


@layer
def cumprod_with_zeros(h: Tensor) -> Tensor:
    return torch.cumprod(zeroed(h) * (torch.arange(8) != 3), -1) + h


@layer
def prod_with_zeros(h: Tensor) -> Tensor:
    return h + (h * (torch.arange(8) != 3)).prod(-1, keepdim=True)


@layer
def logsumexp_over_a_row_of_minus_infinity(h: Tensor) -> Tensor:
    empty = torch.zeros(4, 8).bool()
    empty[0] = True
    total = h.masked_fill(empty, -INF).logsumexp(-1, keepdim=True)
    return h + torch.where(total == -INF, torch.zeros(()), total)


@layer
def logcumsumexp_that_begins_masked(h: Tensor) -> Tensor:
    total = h.masked_fill(torch.arange(8) < 2, -INF).logcumsumexp(-1)
    return h + total[:, 2:].sum(-1, keepdim=True)


@layer
def angle_of_0(h: Tensor) -> Tensor:
    return torch.angle(torch.complex(zeroed(h), zeroed(h))) + h


@layer
def absolute_value_of_a_complex_0(h: Tensor) -> Tensor:
    return torch.complex(zeroed(h), zeroed(h)).abs() + h


@layer
def sign_of_a_complex_0(h: Tensor) -> Tensor:
    return torch.sgn(torch.complex(zeroed(h), h)).real + h


@layer
def renorm_of_a_zero_row(h: Tensor) -> Tensor:
    return torch.renorm(zeroed(h), 2, 0, 0.5)


@layer
def distances_to_oneself(h: Tensor) -> Tensor:
    return h + torch.cdist(h, h).mean(-1, keepdim=True)


@layer
def pairwise_distance_of_equal_rows(h: Tensor) -> Tensor:
    mode = "donot_use_mm_for_euclid_dist"
    return h + torch.cdist(h, h.detach(), compute_mode=mode).sum(1, keepdim=True)


@layer
def xlogy_of_0(h: Tensor) -> Tensor:
    return torch.xlogy(zeroed(torch.ones(4, 8)), h.abs() + 1) + h


@layer
def hypot_of_0(h: Tensor) -> Tensor:
    return torch.sqrt(zeroed(h).square().sum(-1, keepdim=True).clamp(min=1e-12)) + h


@layer
def the_double_where(h: Tensor) -> Tensor:
    positive = h > 0
    return torch.where(positive, torch.log(torch.where(positive, h, torch.ones(()))), h)


@layer
def a_hook_that_cleans_a_gradient(h: Tensor) -> Tensor:
    y = h * 1
    y.register_hook(lambda gradient: gradient.nan_to_num(0, 0, 0))
    return torch.where(y > 1e9, torch.sqrt(y * 0), y)


@layer
def a_mean_over_no_members(h: Tensor) -> Tensor:
    groups, members = torch.tensor([0, 0, 2, 2]), torch.tensor([2.0, 0.0, 2.0])
    mean = torch.zeros(3, 8).index_add(0, groups, h) / members[:, None]
    return h + mean.nan_to_num(0)[groups]


# ---- Attention and masks -------------------------------------------------------------------------


@layer
def a_row_that_is_masked_entirely(h: Tensor) -> Tensor:
    mask = causal(4)
    mask[0] = True
    weights = (h @ h.t()).masked_fill(mask, -INF).softmax(-1)
    return weights.nan_to_num(0) @ h


@layer
def torchs_attention_with_a_masked_row(h: Tensor) -> Tensor:
    mask = ~causal(4)
    mask[0] = False
    x = h[None, None]
    return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)[0, 0]


@layer
def the_logarithm_of_a_mask(h: Tensor) -> Tensor:
    return (h @ h.t() + torch.log(1.0 - causal(4).float())).softmax(-1) @ h


@layer
def two_masks_of_the_lowest_number(h: Tensor) -> Tensor:
    low = torch.zeros(4, 4).masked_fill(causal(4), torch.finfo(torch.float32).min)
    return (h @ h.t() + low + low).softmax(-1) @ h


@layer
def a_mask_built_by_multiplication(h: Tensor) -> Tensor:
    mask = (causal(4).float() * -INF).nan_to_num(0, 0, -INF)
    return (h @ h.t() + mask).softmax(-1) @ h


@layer
def a_positive_mask_for_softmin(h: Tensor) -> Tensor:
    return F.softmin((h @ h.t()).masked_fill(causal(4), INF), -1) @ h


@layer
def relative_positions_as_t5_has_them(h: Tensor) -> Tensor:
    distance = (torch.arange(4)[:, None] - torch.arange(4)[None]).clamp(min=0)
    far = 2 + (torch.log(distance.float() / 2) / 3 * 4).to(torch.long)
    bucket = torch.where(distance < 2, distance, far.clamp(max=7))
    return (h @ h.t() + h[0][bucket]).softmax(-1) @ h


@layer
def maximum_over_neighbours_where_some_have_none(h: Tensor) -> Tensor:
    target = torch.tensor([0, 0, 2, 2])[:, None].expand(4, 8)
    best = torch.full((3, 8), -INF).scatter_reduce(0, target, h, "amax")
    return h + best.masked_fill(best == -INF, 0)[target[:, 0]]


@layer
def degrees_of_a_graph_with_a_lone_node(h: Tensor) -> Tensor:
    edges = torch.zeros(4, 4)
    edges[1, 2] = edges[2, 1] = edges[3, 1] = 1
    scale = edges.sum(1).pow(-0.5)
    scale[scale == INF] = 0
    return h + (scale[:, None] * edges * scale[None]) @ h


@layer
def padding_of_minus_infinity_below_max_pooling(h: Tensor) -> Tensor:
    return F.max_pool1d(F.pad(h, (1, 1), value=-INF), 3, 1)


@layer
def nearest_neighbours_without_oneself(h: Tensor) -> Tensor:
    distance = torch.cdist(h.detach(), h.detach()).fill_diagonal_(INF)
    return h + h[distance.argmin(-1)]


@layer
def smallest_distances(h: Tensor) -> Tensor:
    distance = ((h[:, None] - h[None]) ** 2).sum(-1) + torch.diag(torch.full((4,), INF))
    return h + distance.min(-1).values[:, None] * 0.01


@layer
def a_forward_algorithm_with_forbidden_transitions(h: Tensor) -> Tensor:
    forbidden = torch.log((torch.rand(8, 8) > 0.5).float() + torch.eye(8)).clamp(max=0)
    state = h[0]
    for row in h[1:]:
        state = torch.logsumexp(state[:, None] + forbidden, 0) + row
    return h + state


@layer
def a_mixture_with_a_weight_of_0(h: Tensor) -> Tensor:
    weights = torch.tensor([0.0, 0.5, 0.5, 0, 0, 0, 0, 0]).log()
    return h + torch.logsumexp(h + weights, -1, keepdim=True)


@layer
def gumbel_noise_of_0(h: Tensor) -> Tensor:
    u = torch.rand(4, 8)
    u[:, 0] = 0
    return (h - torch.log(-torch.log(u))).softmax(-1)


# ---- Computed aside, without a gradient ----------------------------------------------------------


@layer
def where_with_a_logarithm_aside(h: Tensor) -> Tensor:
    with torch.no_grad():
        weight = torch.where(h > 0, torch.log(h), torch.zeros(()))
    return h * weight


@layer
def a_reciprocal_that_is_masked(h: Tensor) -> Tensor:
    size = zeroed(h).detach().abs().sum(-1, keepdim=True)
    return h * torch.where(size == 0, torch.ones(()), 1 / size)


@layer
def zero_by_zero_made_0(h: Tensor) -> Tensor:
    x = zeroed(h).detach()
    return h + (x / x).nan_to_num(0)


@layer
def a_sigmoid_of_an_exponential(h: Tensor) -> Tensor:
    gate = 1 / (1 + torch.exp(-1e4 * h.detach()))
    return h * gate


@layer
def a_softplus_with_a_threshold(h: Tensor) -> Tensor:
    x = h.detach() * 1e3
    return h + torch.where(x > 20, x, torch.log1p(torch.exp(x))).clamp(max=1)


@layer
def boxes_that_are_empty(h: Tensor) -> Tensor:
    areas = zeroed(h).detach().relu()
    iou = torch.minimum(areas, areas.roll(1)) / torch.maximum(areas, areas.roll(1))
    return h * (1 + iou.nan_to_num(0))


@layer
def rays_along_an_axis(h: Tensor) -> Tensor:
    inverse = 1 / zeroed(h).detach()
    near = torch.minimum(-inverse, inverse).amax(-1)
    far = torch.maximum(-inverse, inverse).amin(-1)
    return h * (near < far).float()[:, None]


@layer
def depth_behind_the_camera(h: Tensor) -> Tensor:
    depth = zeroed(h).detach()[:, :1]
    point = h.detach() / depth
    return h + torch.where(depth > 0, point, torch.zeros(())).clamp(-1, 1)


@layer
def transport_with_an_empty_bin(h: Tensor) -> Tensor:
    mass = torch.tensor([0.0, 0.5, 0.25, 0.25]).log()
    cost, f = (h @ h.t()).detach(), torch.zeros(4)
    for _ in range(3):
        f = mass - torch.logsumexp(f[:, None] - cost, 0)
    return h * f.exp()[:, None]


@layer
def results_filled_into_nan(h: Tensor) -> Tensor:
    out = torch.full((4, 8), NAN)
    chosen = torch.tensor([True, True, False, True])
    out = out.masked_scatter(chosen[:, None].expand(4, 8), h[chosen])
    return torch.where(chosen[:, None], out, h)


@layer
def a_nan_that_nobody_uses(h: Tensor) -> Tensor:
    _ = torch.sqrt(-h.detach().abs() - 1) * 2
    return h


@layer
def a_nan_overwritten_in_place(h: Tensor) -> Tensor:
    x = torch.sqrt(-h.detach().abs() - 1)
    x.copy_(h.detach())
    return h + x


@layer
def interpolation_at_equal_times(h: Tensor) -> Tensor:
    begin, end = torch.tensor([0.0, 1, 1, 2]), torch.tensor([1.0, 1, 2, 2])
    part = (0.5 - begin) / (end - begin)
    part = torch.where(end == begin, torch.zeros(()), part)
    return h * part[:, None]


@layer
def sampling_from_the_best(h: Tensor) -> Tensor:
    with torch.no_grad():
        kth = h.topk(3, -1).values[:, -1:]
        chosen = torch.multinomial(h.masked_fill(h < kth, -INF).softmax(-1), 1)
    return h * F.one_hot(chosen[:, 0], 8)
