"""The libraries that a sink can be named after: where each writes, and how its active run is found.

A library is imported when it is asked for, never before.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping
from typing import Any, Callable, NamedTuple, Optional

from fastcheck.errors import ConfigError

from .services import OpenTelemetry, Prometheus, Slack, Webhook


class TensorBoard:
    """``writer``: a SummaryWriter, which stays open. ``directory``: that of an event file, which is
    made when something is written; None: ``runs/<date and host>-fastcheck``, beside what a
    SummaryWriter() writes.
    """

    def __init__(self, writer: Any = None, directory: Optional[str] = None) -> None:
        self._given = writer is not None
        self._writer = writer
        self._directory = directory

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        for name, value in scalars.items():
            self._open().add_scalar(name, value, step)

    def text(self, name: str, text: str, step: int) -> None:
        self._open().add_text(name, text, step)

    def alert(self, title: str, text: str, step: int) -> None:
        # Four spaces: Markdown shows the columns of the report as they are.
        lines = "\n".join(f"    {line}" for line in text.splitlines())
        self._open().add_text("fastcheck/stop", f"{title}\n\n{lines}", step)
        self._open().flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.flush() if self._given else self._writer.close()

    def _open(self) -> Any:
        if self._writer is None:
            tensorboard = importlib.import_module("torch.utils.tensorboard")
            self._writer = tensorboard.SummaryWriter(self._directory, comment="-fastcheck")
        return self._writer


class Wandb:
    """Writes to ``run``, which stays open: scalars join the rows of the run.

    Rows of a W&B run have one increasing number, which each ``run.log()`` of the user moves on. A
    row that fastcheck committed would move it too, and a ``run.log(..., step=)`` of the user with a
    lower number would be lost. So the scalars are left for the user's next row (``commit=False``),
    with their step beside them as the axis of their plots.
    """

    def __init__(self, run: Any) -> None:
        self._run = run
        run.define_metric("fastcheck/step", hidden=True)
        run.define_metric("fastcheck/*", step_metric="fastcheck/step")

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        self._run.log({**scalars, "fastcheck/step": step}, commit=False)

    def text(self, name: str, text: str, step: int) -> None:
        self._run.log({name: text}, commit=False)

    def alert(self, title: str, text: str, step: int) -> None:
        self._run.summary["fastcheck/stop"] = text
        self._run.alert(title=title[:63], text=text, level="ERROR")


class Mlflow:
    """Writes metrics and the stop report to ``run``, from any thread: an active run is that of its
    thread.
    """

    def __init__(self, run: Any) -> None:
        self._run_id = run.info.run_id
        self._library = importlib.import_module("mlflow")
        self._client = self._library.MlflowClient()

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        metric, now = self._library.entities.Metric, int(time.time() * 1000)
        metrics = [metric(name, value, now, step) for name, value in scalars.items()]
        self._client.log_batch(self._run_id, metrics=metrics, synchronous=True)

    def text(self, name: str, text: str, step: int) -> None:
        self._client.set_tag(self._run_id, name, text)

    def alert(self, title: str, text: str, step: int) -> None:
        self._client.set_tag(self._run_id, "fastcheck/stop", title)
        self._client.log_text(self._run_id, f"{title}\n\n{text}\n", "fastcheck-stop.txt")


class Trackio:
    """Writes to ``run``, which stays open. The current run is that of its context: the object is
    good on any thread.
    """

    def __init__(self, run: Any) -> None:
        self._run = run

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        self._run.log(dict(scalars), step=step)

    def text(self, name: str, text: str, step: int) -> None:
        self._run.log({name: text}, step=step)

    def alert(self, title: str, text: str, step: int) -> None:
        level = importlib.import_module("trackio").AlertLevel.ERROR
        self._run.alert(title=title, text=text, level=level, step=step)


class Aim:
    """Makes a run in the repository that aim finds, when something is written: aim has no active
    run.
    """

    def __init__(self) -> None:
        self._library = importlib.import_module("aim")
        self._run: Any = None

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        self._open().track(dict(scalars), step=step)

    def text(self, name: str, text: str, step: int) -> None:
        self._open().track(self._library.Text(text), name=name, step=step)

    def alert(self, title: str, text: str, step: int) -> None:
        self.text("fastcheck/stop", f"{title}\n\n{text}", step)

    def close(self) -> None:
        if self._run is not None:
            self._run.close()

    def _open(self) -> Any:
        if self._run is None:
            self._run = self._library.Run(experiment="fastcheck", log_system_params=False)
        return self._run


class _Library(NamedTuple):
    """``active_run``: the run to write to, of the imported ``module``; None of a library that makes
    its own. ``call``: makes a run active. ``package``: where it is not the name of the sink.
    ``target``: what may stand behind the name and a colon, and with ``needs_target`` has to.
    """

    module: str
    sink: Callable[..., Any]
    active_run: Optional[Callable[[Any], Any]] = None
    call: str = ""
    package: str = ""
    target: str = ""
    needs_target: bool = False


LIBRARIES = {
    "tensorboard": _Library("torch.utils.tensorboard", TensorBoard),
    "wandb": _Library("wandb", Wandb, lambda module: module.run, "wandb.init()"),
    "mlflow": _Library("mlflow", Mlflow, lambda m: m.active_run(), "mlflow.start_run()"),
    "trackio": _Library(
        "trackio", Trackio, lambda m: m.context_vars.current_run.get(), "trackio.init()"
    ),
    "aim": _Library("aim", Aim),
    "prometheus": _Library(
        "prometheus_client",
        Prometheus,
        package="prometheus-client",
        target="a file that ends in .prom, a port, or address:port",
    ),
    "opentelemetry": _Library(
        "opentelemetry.exporter.otlp.proto.http.metric_exporter",
        OpenTelemetry,
        package="opentelemetry-exporter-otlp-proto-http",
    ),
    "webhook": _Library("urllib.request", Webhook, target="https://...", needs_target=True),
    "slack": _Library("urllib.request", Slack, target="https://...", needs_target=True),
}


def sink_of(name: str, target: str = "", *, is_trial: bool = False) -> Any:
    """A sink that writes with this library, to its active run on this thread or to ``target``.
    ``is_trial``: before the program has begun; None where only the program can open it.

    Raises:
        ConfigError: the library is not installed, has no active run, or can't write to ``target``.
    """
    library = LIBRARIES[name]
    if (library.needs_target and not target) or (target and not library.target):
        form = f"{name}:{library.target}" if library.target else name
        raise ConfigError(f"sink {name!r} can't write there", expected=repr(form), got=repr(name))
    try:
        module = importlib.import_module(library.module)
    except ImportError as error:
        package = library.package or name
        raise ConfigError(
            f"sink {name!r} needs the package {package}, which can't be imported ({error}); "
            f"pip install {package}"
        ) from error
    if is_trial and not target:
        return None
    if library.active_run is None:
        return library.sink(*([target] if target else []))
    run = library.active_run(module)
    if run is None:
        raise ConfigError(
            f"sink {name!r} has no active run to write to; call {library.call} before "
            "fastcheck.install(), on the same thread"
        )
    return library.sink(run)
