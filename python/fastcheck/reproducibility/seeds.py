"""seed_all(): seeds every random generator and switches on deterministic kernels."""

from __future__ import annotations

import os
import random
import sys
from typing import Any

import numpy as np
import torch

from fastcheck.errors import ConfigError, check_bool, plain, warn

#: Variables that libraries read when they start, for results that don't depend on timing.
_VARIABLES = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
_NPU_VARIABLES = {
    "HCCL_DETERMINISTIC": "true",
    "LCCL_DETERMINISTIC": "1",
    "CLOSE_MATMUL_K_SHIFT": "1",
    "ATB_MATMUL_SHUFFLE_K_ENABLE": "0",
}
_MAX_SEED = 2**32 - 1  # NumPy's


class Seeds:
    """Arguments of a DataLoader for the same batches in every run:

    ``DataLoader(..., worker_init_fn=seeds.worker_init, generator=seeds.generator())``

    Can be pickled, for workers that are spawned.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def worker_init(self, worker_id: int) -> None:
        """Seeds Python and NumPy in a worker with the seed that torch has there: each worker's own,
        another in every epoch, derived from the loader's generator. torch's DataLoader does the
        like; other loaders leave them alone.
        """
        del worker_id
        seed = torch.initial_seed() % (_MAX_SEED + 1)
        random.seed(seed)
        np.random.seed(seed)

    def generator(self) -> torch.Generator:
        """A new generator with the seed: of the order of the samples, apart from the global
        generator, which the model consumes too.
        """
        return torch.Generator().manual_seed(self.seed)

    def __repr__(self) -> str:
        return f"Seeds({self.seed})"


def seed_all(seed: int, deterministic: bool = True) -> Seeds:
    """Seeds Python, NumPy and torch with all its devices, and with ``deterministic`` makes torch
    choose kernels whose results don't depend on timing. Call it first, before a device is used.
    ``PYTHONHASHSEED`` is set for child processes: this process has read it.

    Args:
        seed: 0 to 2**32 - 1. For ranks that should draw differently, add the rank to it.
        deterministic: ``torch.use_deterministic_algorithms(True)`` (an op that has only a
            nondeterministic kernel then raises), cuDNN deterministic and without benchmarking, and
            the environment variables that cuBLAS, and on an NPU HCCL and ATB, read when they start;
            a variable that is set already is kept.

    Returns:
        Seeds, with ``worker_init`` and ``generator()`` for a DataLoader.

    Raises ConfigError for another seed. Warns where a device was used before, and its
    libraries have read their variables. Synchronises nothing.
    """
    seed = plain(seed)
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= _MAX_SEED:
        raise ConfigError(
            "seed can't be used", expected=f"an int from 0 to {_MAX_SEED}", got=repr(seed)
        )
    check_bool("deterministic", deterministic)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    os.environ["PYTHONHASHSEED"] = str(seed)
    if deterministic:
        _make_deterministic()
    return Seeds(seed)


def _make_deterministic() -> None:
    wanted = dict(_VARIABLES)
    if "torch_npu" in sys.modules:
        wanted.update(_NPU_VARIABLES)
    fresh = [name for name in wanted if name not in os.environ]
    for name in fresh:
        os.environ[name] = wanted[name]
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
    late = [name for name in fresh if _is_started("npu" if name in _NPU_VARIABLES else "cuda")]
    if late:
        warn(
            f"seed_all() came after a device was used: {', '.join(late)} may have been read "
            "already. Call it first, or set them in the shell."
        )


def _is_started(kind: str) -> bool:
    module: Any = getattr(torch, kind, None)
    try:
        return module is not None and bool(module.is_initialized())
    except Exception:  # a plug-in whose query fails
        return False
