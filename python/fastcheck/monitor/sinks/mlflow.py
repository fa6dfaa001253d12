"""MLflow: metrics and the stop report of the active run."""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping
from typing import Any

from fastcheck.errors import ConfigError, explain


def library() -> Any:
    """The module; ImportError if mlflow is not installed."""
    return importlib.import_module("mlflow")


def active() -> Mlflow:
    """The run that is active on this thread; ConfigError if there is none."""
    run = library().active_run()
    if run is None:
        raise ConfigError(
            explain(
                "sink 'mlflow' has no run to write to",
                expected="an active run",
                got="mlflow.active_run() is None",
                hint="call mlflow.start_run() before fastcheck.install(), on the same thread",
            )
        )
    return Mlflow(run.info.run_id)


class Mlflow:
    """Writes to the run with this id, from any thread: an active run is that of its thread."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._client = library().MlflowClient()

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        metric, now = library().entities.Metric, int(time.time() * 1000)
        metrics = [metric(name, value, now, step) for name, value in scalars.items()]
        self._client.log_batch(self._run_id, metrics=metrics, synchronous=True)

    def text(self, name: str, text: str, step: int) -> None:
        self._client.set_tag(self._run_id, name, text)

    def alert(self, title: str, text: str, step: int) -> None:
        self._client.set_tag(self._run_id, "fastcheck/stop", title)
        self._client.log_text(self._run_id, f"{title}\n\n{text}\n", "fastcheck-stop.txt")
