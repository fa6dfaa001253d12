"""A small true fleet: 16 gloo ranks on two nodes train and write logs; one of them is faulty.

    make accuracy SUITE="fleet_true [--fault bitflip --fault scale --fault none] [--seed 0]"

The model has a layer that all ranks share and one of two experts: 2 data parallel groups of 8
ranks, half of each on each node. ``bitflip`` flips a bit of one weight of one rank in one step, and
``scale`` multiplies the output of a layer by 1.2 from a step on; ``seed`` draws rank, step and
place. Each node has a directory of logs of its own, which ``fastcheck collect`` converts, and
``fastcheck fleet`` has to name the rank, the step and the site; without a fault nobody. About a
minute on two cores. The results are in bench/results/fleet_true.json.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import RESULTS, few, machine, size

FAULTS = ("bitflip", "scale", "none")
_RANKS, _PER_NODE, _EXPERTS, _STEPS = size(16, 8), size(8, 4), 2, 24

# One interpreter imports PyTorch, and each rank is a fork of it.
_PROGRAM = """
import json, os, sys
import torch, torch.distributed as dist
import fastcheck

plan = json.loads(sys.argv[1])


class Layer(torch.nn.Linear):
    factor = 1.0

    def forward(self, values):
        return super().forward(values) * self.factor


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = Layer(64, 128)
        self.expert = torch.nn.Sequential(
            Layer(128, 128), torch.nn.ReLU(), Layer(128, 128), torch.nn.ReLU(), Layer(128, 16)
        )

    def forward(self, values):
        return self.expert(torch.nn.functional.relu(self.shared(values)))


def train(rank):
    node, expert = rank // plan["per_node"], rank % plan["experts"]
    os.environ["FASTCHECK_PLACEMENT"] = f"dp={rank // plan['experts']},ep={expert}"
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(plan["ranks"]))
    torch.set_num_threads(1)
    store = dist.FileStore(plan["store"], plan["ranks"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=plan["ranks"])
    groups = [
        dist.new_group(list(range(one, plan["ranks"], plan["experts"])))
        for one in range(plan["experts"])
    ]
    torch.manual_seed(0)
    shared = Model().shared
    torch.manual_seed(1 + expert)
    model = Model()
    model.shared = shared
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monitor = fastcheck.install(
        model,
        training=fastcheck.Training(optimizer=optimizer),
        log=fastcheck.Log(f"{plan['logs']}/node{node}"),
    )
    torch.manual_seed(100 + rank)
    for step in range(plan["steps"]):
        is_faulty = rank == plan["rank"] and step >= plan["step"]
        layer = model.get_submodule(plan["module"])
        if is_faulty and plan["fault"] == "scale":
            layer.factor = 1.2
        if is_faulty and plan["fault"] == "bitflip" and step == plan["step"]:
            with torch.no_grad():
                layer.weight.view(torch.int32).view(-1)[plan["element"]] ^= 1 << plan["bit"]
        loss = torch.nn.functional.mse_loss(model(torch.randn(512, 64)), torch.randn(512, 16))
        optimizer.zero_grad()
        loss.backward()
        for name, parameter in model.named_parameters():
            group = None if name.startswith("shared.") else groups[expert]
            dist.all_reduce(parameter.grad, group=group)
            parameter.grad /= dist.get_world_size(group)
        optimizer.step()
    monitor.remove()
    dist.barrier()
    dist.destroy_process_group()


children = []
for rank in range(plan["ranks"]):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            train(rank)
            code = 0
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    children.append(child)
failed = 0
for child in children:
    failed += os.waitpid(child, 0)[1] != 0
sys.exit(min(failed, 1))
"""


def _plan(fault: str, seed: int, place: Path) -> dict[str, Any]:
    rng = random.Random(f"{fault} {seed}")
    modules = ["shared", "expert.0", "expert.2", "expert.4"]
    return {
        "fault": fault,
        "rank": rng.randrange(_RANKS),
        "step": rng.randrange(3, _STEPS // 2),
        "module": rng.choice(modules),
        "element": rng.randrange(16 * 128),
        # Of the significand, where it changes a weight by a fraction of its value.
        "bit": rng.randrange(23),
        "ranks": _RANKS,
        "per_node": _PER_NODE,
        "experts": _EXPERTS,
        "steps": _STEPS,
        "logs": str(place / "logs"),
        "store": str(place / "store"),
    }


def _fastcheck(*arguments: object) -> str:
    command = [sys.executable, "-m", "fastcheck", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode > 1:
        raise SystemExit(done.stderr)
    return done.stdout


def run(fault: str, seed: int) -> dict[str, Any]:
    """The verdict on a fleet that trained, beside the truth."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        plan = _plan(fault, seed, place)
        subprocess.run([sys.executable, "-c", _PROGRAM, json.dumps(plan)], check=True)
        trained = time.monotonic() - start
        logs = sorted((place / "logs").iterdir())
        for log in logs:
            _fastcheck("collect", log, "--out", place / "out", "--run", "true", "--node", log.name)
        report = json.loads(_fastcheck("fleet", place / "out", "--json"))
        size = sum(path.stat().st_size for path in (place / "out").rglob("step=*/*.parquet"))
    suspects = [
        {"kind": one["kind"], **{name: suspect[name] for name in ("rank", "first_step", "site")}}
        for one in report["findings"]
        if one["is_accusation"]
        for suspect in one["suspects"]
    ]
    truth = None
    if fault != "none":
        truth = {name: plan[name] for name in ("rank", "step", "module")}
    return {
        "fault": fault,
        "seed": seed,
        "nodes": len(logs),
        "ranks": report["ranks"],
        "rows": report["rows"],
        "bytes_a_row": size / report["rows"],
        "truth": truth,
        "suspects": suspects,
        "is_right": _is_right(truth, suspects),
        "seconds_of_training": trained,
        "seconds": time.monotonic() - start,
    }


def _is_right(truth: dict[str, Any] | None, suspects: list[dict[str, Any]]) -> bool:
    if truth is None:
        return not suspects
    return [(one["rank"], one["first_step"]) for one in suspects] == [
        (truth["rank"], truth["step"])
    ] and suspects[0]["site"].startswith(f"{truth['module']} (")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fault", choices=FAULTS, action="append", default=[])
    parser.add_argument("--seed", type=int, action="append", default=[])
    options = parser.parse_args()
    made = []
    for seed in options.seed or [0]:
        for fault in options.fault or few(FAULTS):
            made.append(run(fault, seed))
            print(json.dumps(made[-1], indent=1), flush=True)
    result = {"bench": "fleet_true", "runs": made, "machine": machine()}
    (RESULTS / "fleet_true.json").write_text(json.dumps(result, indent=1) + "\n")
    if not all(one["is_right"] for one in made):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
