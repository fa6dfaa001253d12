"""Finds where a gradient became 0: in the records of a step, from the loss back to the weights."""

from __future__ import annotations

import re
from collections.abc import Collection

import numpy as np

from fastcheck.record.site import Site, SiteTable, module_name
from fastcheck.record.statistics import component_counts

# Operators whose result is not 0 on purpose, as that of zeros() and of a comparison is.
_COMPUTES = re.compile(
    r"aten\.(?:mul|div|r?sqrt|pow|exp|relu|threshold|hardtanh|clamp\w*|sigmoid|(?:add|b)?mm|round"
    r"|floor|trunc|sign|native_dropout)_?(?:\.|$)"
)


def where_zero(records: np.ndarray, table: SiteTable, modules: Collection[str]) -> str:
    """A sentence on the records of a step in which weights of ``modules`` had a gradient of 0: the
    first result that was 0, and the first gradient that was, with the one before it; empty where
    neither was read.
    """
    sites = [table[number] for number in records["site"].tolist()]
    is_zero = (records["numel"] > 1) & (records["zero_count"] == component_counts(records))
    seen = []
    outputs = (
        site
        for site, is_first in zip(sites, is_zero.tolist())
        if is_first and site.direction == "forward" and site.role == "output"
    )
    result = next((site for site in outputs if not site.op or _COMPUTES.match(site.op)), None)
    if result is not None:
        weights = {
            site.module for site, is_0 in zip(sites, is_zero.tolist()) if is_0 and _is_weight(site)
        }
        why = ", as its weight is" if result.module in weights else ""
        seen.append(f"{_named(result)} was 0 throughout{why}")
    # A pass begins at its loss.
    is_loss = [site.role == "loss" for site in sites]
    passed = [k for k, site in enumerate(sites) if is_loss[k] or site.role.startswith("grad_")]
    is_end = [is_zero[k] and sites[k].module in modules and not is_loss[k] for k in passed]
    at = is_end.index(True) if True in is_end else 0
    others = {site.module for site in sites if site.role == "param"}.difference(modules)
    while at and is_zero[passed[at - 1]] and not is_loss[passed[at - 1]]:
        if sites[passed[at - 1]].module in others:  # that of another branch, told of before
            break
        at -= 1
    if at:
        before, first = sites[passed[at - 1]], sites[passed[at]]
        if is_loss[passed[at - 1]]:
            seen.append(f"{_named(first)} was 0 already where it came from the loss")
        elif is_zero[passed[at - 1]] or not (first.op or _are_near(first.module, before.module)):
            seen.append(f"{_named(first)} was 0 throughout")
        else:
            # At op level the gradient of a bias may come between.
            one = "what" if first.op else f"{_named(before)}, which"
            seen.append(
                f"{_named(first)} was 0 throughout, and {one} was read before it"
                f"{'' if first.op else ','} was not"
            )
    return f" In the last of these steps {'; '.join(seen)}." if seen else ""


def _is_weight(site: Site) -> bool:
    return site.role == "param" and site.label == "weight"


def _are_near(one: str, other: str) -> bool:
    """True if two modules are in the same one, or within the same part of the model: the gradient
    of one part need not have come from that of another.
    """
    parents = one.rpartition(".")[0], other.rpartition(".")[0]
    return parents[0] == parents[1] or one.split(".")[0] == other.split(".")[0]


def _named(site: Site) -> str:
    where = module_name(site)
    if not site.op:
        return f"the {site.tensor_name} of {where}"
    return f"the {'result' if site.direction == 'forward' else 'gradient'} of {site.op} in {where}"
