"""Ranks: the step of one process against the same step on several ranks, forks of this process."""

from __future__ import annotations

import os
import tempfile
import traceback
import warnings
from typing import Any, Callable

import torch
import torch.distributed as dist

from fastcheck.errors import ConfigError, check_bool, plain

from .batches import joined
from .case import Relation, TestedStep
from .observer import Computed, in_double

_Wrap = Callable[[Any], Any]
_SECONDS = 120


class Ranks(Relation):
    """The step on ``count`` ranks of gloo, each with its share of the rows. ``wrap(model)`` returns
    the model as a rank computes with it::

        Ranks(torch.nn.parallel.DistributedDataParallel)
        Ranks(lambda model: fully_shard(model) or model)
        Ranks(lambda model: parallelize_module(model, mesh(), plan), shares_rows=False)

    ``shares_rows=False``: each rank has the whole batch. Gradients are those that the optimizer is
    given, or that are left after the step. Where the loss of a rank is what one process makes of
    its share, they are the mean over the shares; else those of the whole batch.
    """

    kinds = ("loss", "output", "gradient")
    draws_alike = False
    reduces = True

    def __init__(self, wrap: _Wrap, count: int = 2, *, shares_rows: bool = True) -> None:
        count, shares_rows = plain(count), check_bool("shares_rows", shares_rows)
        if not callable(wrap) or not isinstance(count, int) or count < 2:
            got, expected = f"Ranks({wrap!r}, {count})", "a function of the model, 2 ranks or more"
            raise ConfigError("no ranks", expected=expected, got=got)
        self.name = f"{count} ranks of {getattr(wrap, '__name__', 'a function')}"
        self._wrap, self._count, self._shares_rows = wrap, count, shares_rows
        self.mixes_rows = shares_rows
        self._found = Computed()

    def why_not(self, case: TestedStep) -> str:
        if not case.takes_model:
            return "the step takes no model: a rank calls it as step(model, batch)"
        if self._shares_rows and case.given.why_no_rows:
            return case.given.why_no_rows
        if self._shares_rows and case.given.rows % self._count:
            return f"{case.given.rows} rows are not {self._count} equal shares"
        if not hasattr(os, "fork") or not dist.is_available() or not dist.is_gloo_available():
            return "this system has no fork, or torch no gloo"
        if dist.is_initialized() or any(p.device.type != "cpu" for p in case.parameters.values()):
            return "ranks are forks of a process that is no rank, with its model on the CPU"
        return ""

    def _batch(self, case: TestedStep, rank: int) -> Any:
        if not self._shares_rows:
            return super().batch(case)
        share = case.given.rows // self._count
        return case.take_rows(range(rank * share, (rank + 1) * share))

    def reference(self, case: TestedStep, base: Computed, sites: bool = False) -> Computed:
        ranks = self._run_ranks(case, sites)
        weights = [1 / self._count] * self._count
        wanted, actual = base, ranks[0]
        if self._shares_rows:
            actual = joined(ranks, weights)
            parts = [case.compute(self._batch(case, i), sites=sites) for i in range(self._count)]
            # Their losses agree, or there is none.
            a, b = (float(c.tensors.get(("loss", ""), 0.0)) for c in (parts[0], ranks[0]))
            if abs(a - b) <= 1e-2 * abs(a):
                wanted = joined(parts, weights)
            else:
                actual.tensors.pop(("loss", ""), None)
        for key, tensor in wanted.tensors.items():  # of the rank that is farthest off
            if self._shares_rows and key[0] != "gradient":
                continue
            held = [rank.tensors[key] for rank in ranks if key in rank.tensors]
            if len(held) == self._count and all(copy.shape == tensor.shape for copy in held):
                actual.tensors[key] = max(held, key=lambda t: in_double(t).dist(in_double(tensor)))
        # A rank may hold other parameters, as a share of the whole.
        ours, theirs = wanted.tensors, actual.tensors
        kept = {k: t for k, t in ours.items() if k[0] != "gradient" or k in theirs}
        self._found = Computed({k: t for k, t in theirs.items() if k in kept}, actual.rows)
        return Computed(kept, wanted.rows)

    def run(self, case: TestedStep, base: Computed, sites: bool = False) -> Computed:
        return self._found

    def _run_ranks(self, case: TestedStep, sites: bool) -> list[Computed]:
        import torch._dynamo  # DistributedDataParallel does, in each rank anew

        case.put_back()
        context = torch.multiprocessing.get_context("fork")
        with tempfile.TemporaryDirectory() as folder:
            paths = [os.path.join(folder, str(rank)) for rank in range(self._count)]
            ranks = [
                context.Process(target=self._be_rank, args=(case, rank, path, sites))
                for rank, path in enumerate(paths)
            ]
            for path in paths:
                torch.save(f"no answer: it crashed, or took more than {_SECONDS} s", path)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", DeprecationWarning)  # of fork beside threads
                    for process in ranks:
                        process.start()
                for process in ranks:
                    process.join(_SECONDS)
            finally:
                for process in ranks:
                    process.kill()
                    process.join()
            answers = [torch.load(path, weights_only=False) for path in paths]
        errors = [f"rank {i}: {each}" for i, each in enumerate(answers) if isinstance(each, str)]
        if errors:  # rather an error that is no consequence of another rank's end
            raise RuntimeError(min(errors, key=lambda text: "onnection" in text))
        return [Computed(*answer) for answer in answers]

    def _be_rank(self, case: TestedStep, rank: int, path: str, sites: bool) -> None:
        answer: Any = "it ended"
        try:
            torch.set_num_threads(1)  # the threads of OpenMP did not come along
            meeting = f"file://{os.path.dirname(path)}/meeting"
            dist.init_process_group("gloo", meeting, rank=rank, world_size=self._count)
            case.become_rank(self._wrap(case.model))
            computed = case.compute(self._batch(case, rank), sites=sites, put_back=False)
            for name, parameter in case.parameters.items():
                if parameter.requires_grad:  # a parameter without a gradient
                    computed.tensors.setdefault(("gradient", name), torch.zeros(parameter.shape))
            answer = computed.tensors, computed.rows
        except Exception:
            answer = traceback.format_exc().strip().splitlines()[-1]
        finally:
            torch.save(answer, path + ".part")
            os.replace(path + ".part", path)
            os._exit(0)
