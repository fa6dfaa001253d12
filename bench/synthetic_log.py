"""Writes a log of any size without training: records of modules over steps, with an overflow.

    python bench/synthetic_log.py DIRECTORY --sites 1000 --steps 1000

The abs max of a site is a random walk in log2 with noise; one site grows towards the largest
float16 number and overflows in the last tenth, from where it spreads over the sites behind it.
With spikes, each site's abs max is that of SPIKE once, at a step of its own. With watch, events of
install(watch=) are beside it: a forecast of the overflow, a site that left its range, the loss.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator

import numpy as np

from fastcheck.record.format import DTYPES, RECORD_BYTES, RECORD_DTYPE, Flag, Verdict
from fastcheck.record.site import Site
from fastcheck.utils.text.numbers import to_json
from fastcheck.watch.event import Mover, WatchEvent

_ROLES = (
    ("forward", "output", "output"),
    ("forward", "input", "input[0]"),
    ("backward", "grad_output", "grad_output[0]"),
    ("backward", "param_grad", "weight"),
    ("optimizer", "param", "weight"),
)
_PARTS = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2", "norm")
_TYPES = ("Linear", "Linear", "Linear", "Linear", "LayerNorm")
#: log2 of abs max at a spike.
SPIKE = 14
_SEGMENT_RECORDS = 64 * 1024 * 1024 // RECORD_BYTES
_FLOAT16 = next(info.code for info in DTYPES if info.name == "float16")
_FLOAT32 = next(info.code for info in DTYPES if info.name == "float32")


def site_lines(count: int) -> list[dict[str, object]]:
    """The sites as lines of the log: forward through the layers, then backward, then the update."""
    lines: list[dict[str, object]] = []
    layers = (count - 2) // (len(_ROLES) * len(_PARTS)) + 2
    each = max(1, (count - 2) // len(_ROLES))
    for number, (direction, role, label) in enumerate(_ROLES):
        if number == 2:
            lines.append(_line("", "CrossEntropyLoss", "forward", "loss", "loss"))
            lines.append(_line("", "GradScaler", "optimizer", "loss_scale", "loss scale"))
        some = [
            _line(f"blocks.{layer}.{part}", kind, direction, role, label)
            for layer in range(layers)
            for part, kind in zip(_PARTS, _TYPES)
        ]
        lines += some[:each] if number < len(_ROLES) - 1 else some[: count - len(lines)]
    return [{"id": number, **line} for number, line in enumerate(lines)]


def _line(module: str, kind: str, direction: str, role: str, label: str) -> dict[str, object]:
    return {
        "module": module,
        "module_type": kind,
        "direction": direction,
        "role": role,
        "index": 0,
        "label": label,
        "op": None,
    }


def spike_steps(sites: int, steps: int) -> np.ndarray:
    """The step of each site's spike."""
    return np.random.default_rng(7).integers(0, steps, sites)


def steps_of(
    sites: int,
    steps: int,
    seed: int = 0,
    event_step: int | None = None,
    spikes: bool = False,
) -> Iterator[np.ndarray]:
    """The records of one step after the other. ``event_step``: where the overflow is; -1: none."""
    peaks = spike_steps(sites, steps)
    random = np.random.default_rng(seed)
    event = steps * 9 // 10 if event_step is None else event_step
    lines = site_lines(sites)
    roles = np.array([line["role"] for line in lines])
    culprit, loss = sites // 10, int(np.flatnonzero(roles == "loss")[0])
    base = random.normal(0, 2, sites)
    walk = np.zeros(sites)
    record = np.zeros(sites, RECORD_DTYPE)
    record["site"] = np.arange(sites)
    record["version"], record["depth"] = 1, 3
    record["dtype"] = np.where(np.isin(roles, ("param", "loss", "loss_scale")), _FLOAT32, _FLOAT16)
    record["numel"] = np.where(np.isin(roles, ("loss", "loss_scale")), 1, 65536)
    is_weight = roles == "param"
    stuck = is_weight & (np.arange(sites) % 50 == 3)
    for step in range(steps):
        walk += random.normal(0, 0.02, sites)
        level = base + walk + random.normal(0, 0.1, sites)
        if event >= 0:
            level[culprit] = min(8 + 8 * step / max(event, 1), 15.9) + random.normal(0, 0.05)
        if spikes:
            level[peaks == step] = SPIKE
        abs_max = np.minimum(np.exp2(level), 65504.0)
        made = record.copy()
        numel = made["numel"]
        made["seq"], made["step"] = step * sites + np.arange(sites), step
        made["max"], made["min"] = abs_max, -abs_max * 0.9
        made["sum"] = random.normal(0, 0.02, sites) * abs_max * numel
        made["sum_sq"] = (abs_max * 0.3) ** 2 * numel * np.exp2(random.normal(0, 0.1, sites))
        made["abs_sum"] = abs_max * 0.2 * numel
        made["zero_count"] = random.binomial(1000, 0.1, sites) * (numel // 1000)
        made["checksum"] = random.integers(0, 1 << 62, sites)
        made["checksum"][stuck] = 12345
        made["min"][loss] = made["max"][loss] = 3 * np.exp(-step / steps) + random.normal(0, 0.05)
        made["max"][loss + 1] = made["min"][loss + 1] = 65536.0
        made["zero_count"][loss : loss + 2] = 0
        if 0 <= event <= step:
            _overflow(made, culprit, loss, step == event)
        yield made


def _overflow(made: np.ndarray, culprit: int, loss: int, is_first: bool) -> None:
    reached = np.arange(len(made)) % 5 != 4
    reached[:culprit] = False
    reached[loss], reached[loss + 1] = True, False
    for name in ("sum", "abs_sum", "sum_sq"):
        made[name][loss] = 0  # its one element is a NaN
    made["min"][loss], made["max"][loss] = np.inf, -np.inf
    made["nan_count"][reached] = np.minimum(made["numel"][reached], 40)
    made["posinf_count"][culprit], made["nan_count"][culprit] = 7, 0
    made["zero_count"][reached] = 0
    made["flags"][reached] |= int(Flag.NONFINITE) | (int(Verdict.PROPAGATED) << 8)
    if is_first:
        made["flags"][culprit] = int(Flag.NONFINITE | Flag.EVENT) | (int(Verdict.ORIGIN) << 8)


def write_log(
    directory: str,
    sites: int,
    steps: int,
    rank: int = 0,
    event_step: int | None = None,
    spikes: bool = False,
    watch: bool = False,
) -> None:
    """Writes the files of one rank."""
    os.makedirs(directory, exist_ok=True)
    lines = site_lines(sites)
    _write(directory, f"sites-rank{rank}.jsonl", lines)
    meta = {
        "format": 1,
        "record_bytes": RECORD_BYTES,
        "rank": rank,
        "host": f"node{rank // 8}",
        "created": "2026-01-01T00:00:00+0000",
        "record": "full",
        "every": 1,
        "environment": {"torch": "2.13.0", "python": "3.11", "device": "synthetic"},
    }
    with open(os.path.join(directory, f"meta-rank{rank}.json"), "w") as file:
        json.dump(meta, file)
    events: list[dict[str, object]] = []
    segment, room = 0, 0
    file = None
    for made in steps_of(sites, steps, rank, event_step, spikes):
        for record in made[(made["flags"] & int(Flag.EVENT)) != 0]:
            events.append(_event(record, lines[int(record["site"])], rank))
        if file is None or room < len(made):
            if file is not None:
                file.close()
            name = f"records-rank{rank}-{segment:06d}.bin"
            file = open(os.path.join(directory, name), "wb")  # noqa: SIM115  (closed by the next)
            segment, room = segment + 1, _SEGMENT_RECORDS
        file.write(made.tobytes())
        room -= len(made)
    if file is not None:
        file.close()
    _write(directory, f"events-rank{rank}.jsonl", events)
    if watch:
        event = steps * 9 // 10 if event_step is None else event_step
        _write(directory, f"watch-rank{rank}.jsonl", _watched(lines, rank, event))


def _watched(lines: list[dict[str, object]], rank: int, event: int) -> list[dict[str, object]]:
    """As WatchEvent.to_dict() has them, by step: one of each form."""
    sites = [Site.from_dict(line) for line in lines]
    culprit, other = sites[len(sites) // 10], sites[len(sites) // 2]
    shift = WatchEvent(
        max(event // 2, 0),
        "shift",
        other,
        9.5,
        2.25,
        8.5,
        f"{other}: it left its range",
        False,
        rank,
    )
    forecast = WatchEvent(
        max(event - 15, 0),
        "headroom",
        culprit,
        40_000.0,
        65_504.0,
        float("nan"),
        f"{culprit}: it overflows in 10 to 18 steps",
        True,
        rank,
        (Mover(max(event - 30, 0), culprit, "abs max", 7.5),),
        "precision",
        (10.0, 18.0),
    )
    loss = WatchEvent(
        max(event - 3, 0),
        "loss_spike",
        None,
        7.5,
        2.5,
        12.0,
        "the loss is 7.5, usual is 2.5",
        True,
        rank,
        (Mover(max(event - 30, 0), culprit, "abs max", 7.5),),
        "layer",
    )
    found = [to_json(one.to_dict()) for one in (shift, forecast, loss)]
    return sorted(found, key=lambda line: line["step"])


def _event(record: np.void, site: dict[str, object], rank: int) -> dict[str, object]:
    blamed = {name: value for name, value in site.items() if name != "id"}
    return {
        "step": int(record["step"]),
        "seq": int(record["seq"]),
        "call": 0,
        "site": int(record["site"]),
        "verdict": int(Verdict.ORIGIN),
        "verdict_name": "origin",
        "counted": True,
        "rank": rank,
        "reason": "all that it was computed from was finite",
        "blamed": blamed,
    }


def _write(directory: str, name: str, lines: list[dict[str, object]]) -> None:
    with open(os.path.join(directory, name), "w") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory")
    parser.add_argument("--sites", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=1)
    options = parser.parse_args()
    for rank in range(options.ranks):
        write_log(options.directory, options.sites, options.steps, rank)


if __name__ == "__main__":
    main()
