"""The callback for Ray Train, which runs in its controller."""

from __future__ import annotations

from typing import Any, Optional

from fastcheck.errors import warn
from fastcheck.report.error import OverflowDetected
from fastcheck.report.render import brief

try:
    from ray.train import UserCallback
except ImportError as error:
    raise ImportError("fastcheck.callbacks.Ray needs ray: pip install 'ray[train]'") from error

__all__ = ["Ray"]


class Ray(UserCallback):  # type: ignore[misc]  # its base is Any where ray is missing
    """Names the culprit in the controller when workers of Ray Train were stopped.

        run_config=ray.train.RunConfig(callbacks=[fastcheck.callbacks.Ray()])

    The workers call fastcheck.install() in their training function; this callback installs nothing.
    A stop on several workers is a single stop: all of them have the same report, of which a warning
    has the few lines that matter, and ``stop`` the whole.
    """

    def __init__(self) -> None:
        #: The stop of the last exception; None: it was another exception, or there was none.
        self.stop: Optional[OverflowDetected] = None

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        failures = {rank: _stop_in(error) for rank, error in sorted(worker_exceptions.items())}
        stops = [stop for stop in failures.values() if stop is not None]
        self.stop = stops[0] if stops else None
        if self.stop is not None:
            warn(
                f"{brief(self.stop.report)}\n  workers: {len(stops)} of {len(failures)} that failed"
            )


def _stop_in(error: Optional[BaseException]) -> Optional[OverflowDetected]:
    """The stop that an exception is, wraps or was caused by."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, OverflowDetected):
            return error
        seen.add(id(error))
        # Ray's wrapper for what a worker has raised keeps it under this name.
        error = getattr(error, "_base_exc", None) or error.__cause__ or error.__context__
    return None
