"""Prometheus, OpenTelemetry, and webhooks for stops and warnings."""

from __future__ import annotations

import contextlib
import html
import http.client
import importlib
import json
import math
import os
import platform
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any, ClassVar, Optional

from fastcheck.errors import ConfigError, warn_of_fault
from fastcheck.utils.torch.rank import own_rank

# Seconds between two writes of a file that node_exporter reads, and between two posts of one kind.
_FILE_SECONDS = 5.0
_POST_SECONDS = 60.0
# Seconds that a post may take, and how many texts it has at most.
_TIMEOUT = 5.0
_TEXTS = 10


class Prometheus:
    """Sets gauges of prometheus_client.

    Args:
        target: a path that ends in ``.prom``: a file for node_exporter's textfile collector,
            written every 5 seconds at most. A port, or ``address:port``: a server of this process,
            until it ends. "": the default registry alone, which a server of the program's shows.

    The values of a file have its name as a label: node_exporter reads all files of a folder, and
    refuses all of them where two have the same name and labels.
    """

    # The gauges of the default registry, which monitors share, and the ports that are served.
    _shared: ClassVar[dict[str, Any]] = {}
    _served: ClassVar[set[str]] = set()
    _lock: ClassVar = threading.Lock()

    def __init__(self, target: str = "") -> None:
        self._client = importlib.import_module("prometheus_client")
        is_file = target.endswith(".prom")
        self._path = os.path.abspath(target) if is_file else None
        self._registry = self._client.CollectorRegistry() if is_file else self._client.REGISTRY
        self._gauges = {} if is_file else self._shared
        self._labels = {"run": os.path.basename(target)[: -len(".prom")]} if is_file else {}
        self._written = float("-inf")
        if self._path is not None:
            try:
                self._client.write_to_textfile(self._path, self._registry)
            except OSError as error:
                raise ConfigError(f"sink 'prometheus' can't write {self._path}: {error}") from error
        if target and not is_file:
            self._serve(target)

    def _serve(self, target: str) -> None:
        address, _, port = target.rpartition(":")
        if not port.isdecimal():
            forms = "a file that ends in .prom, a port, or address:port"
            raise ConfigError(f"sink 'prometheus' writes to {forms}, not to {target!r}")
        with self._lock:
            if target in self._served:
                return
            try:
                self._client.start_http_server(int(port), address or "0.0.0.0")
            except (OSError, OverflowError) as error:
                raise ConfigError(
                    f"sink 'prometheus': can't listen on {target}: {error}"
                ) from error
            self._served.add(target)

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        for name, value in scalars.items():
            self._set(name.replace("/", "_"), value)
        self._set("fastcheck_step", step)
        if time.monotonic() - self._written >= _FILE_SECONDS:
            self.close()

    def alert(self, title: str, text: str, step: int) -> None:
        self._set("fastcheck_stopped_at_step", step)
        self.close()

    def close(self) -> None:
        """Writes the file."""
        if self._path is not None:
            self._written = time.monotonic()
            try:
                self._client.write_to_textfile(self._path, self._registry)
            except OSError as error:
                warn_of_fault(
                    f"{self._path} was not written: {error}. It is tried again every "
                    f"{_FILE_SECONDS:.0f} s. Training is not affected."
                )

    def _set(self, name: str, value: float) -> None:
        with self._lock:
            if name not in self._gauges:
                text = "docs/trainers.md of fastcheck"
                gauge = self._client.Gauge(name, text, [*self._labels], registry=self._registry)
                self._gauges[name] = gauge.labels(**self._labels) if self._labels else gauge
        self._gauges[name].set(value)


class OpenTelemetry:
    """Sets gauges of the program's MeterProvider; where it has set none, of a provider that exports
    by OTLP over HTTP, as the environment's ``OTEL_`` variables say.
    """

    def __init__(self) -> None:
        metrics = importlib.import_module("opentelemetry.metrics")
        sdk = importlib.import_module("opentelemetry.sdk.metrics")
        provider = metrics.get_meter_provider()
        self._is_own = not isinstance(provider, sdk.MeterProvider)
        if self._is_own:
            export = importlib.import_module("opentelemetry.sdk.metrics.export")
            http = "opentelemetry.exporter.otlp.proto.http.metric_exporter"
            exporter = importlib.import_module(http).OTLPMetricExporter()
            provider = sdk.MeterProvider(
                [export.PeriodicExportingMetricReader(exporter)], shutdown_on_exit=False
            )
        self._provider = provider
        self._meter = provider.get_meter("fastcheck")
        self._gauges: dict[str, Any] = {}

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        for name, value in {**scalars, "fastcheck/step": step}.items():
            if math.isfinite(value):  # the library refuses others
                self._set(name.replace("/", "."), value)

    def alert(self, title: str, text: str, step: int) -> None:
        self._set("fastcheck.stopped_at_step", step, {"title": title})
        self._provider.force_flush()

    def close(self) -> None:
        if self._is_own:
            self._provider.shutdown()

    def _set(self, name: str, value: float, attributes: Mapping[str, str] = {}) -> None:
        if name not in self._gauges:
            self._gauges[name] = self._meter.create_gauge(name)
        self._gauges[name].set(value, attributes)


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Makes a redirection an error: urllib would send a GET, whose answer is none to the post."""

    def redirect_request(self, *_: Any) -> None: ...


def _host_of(url: str) -> Optional[str]:
    """The host of a URL that can be posted to; None: it can't."""
    with contextlib.suppress(ValueError):  # of the port
        parts = urllib.parse.urlsplit(url)
        is_plain = url.isascii() and url.isprintable() and " " not in url
        if (
            parts.scheme in ("http", "https")
            and parts.port != 0
            and is_plain
            and "@" not in parts.netloc
        ):
            return parts.hostname
    return None


class Webhook:
    """Posts stops and warnings, each kind at most once a minute: those in between are in the next
    post. What can't be posted is tried again, a minute later and when the run ends.
    """

    name = "webhook"

    def __init__(self, url: str) -> None:
        host = _host_of(url)
        if host is None:
            form = f"{self.name}:https://host/path, in ASCII, without user and password"
            raise ConfigError(f"sink {self.name!r} posts to {form}")
        self._url = url  # a secret: no message has more of it than the host
        self._host = host
        self._waiting: dict[str, list[dict[str, Any]]] = {"stop": [], "warning": []}
        self._left_out = dict.fromkeys(self._waiting, 0)
        self._posted = dict.fromkeys(self._waiting, float("-inf"))

    def log(self, scalars: Mapping[str, float], step: int) -> None:
        self._post_due()

    def alert(self, title: str, text: str, step: int) -> None:
        self._add("stop", title, text, step)

    def warning(self, title: str, text: str, step: int) -> None:
        self._add("warning", title, text, step)

    def close(self) -> None:
        self._post_due(_POST_SECONDS)

    def _add(self, kind: str, title: str, text: str, step: int) -> None:
        if len(self._waiting[kind]) < _TEXTS:
            self._waiting[kind].append({"title": title, "text": text, "step": step})
        else:
            self._left_out[kind] += 1
        self._post_due()

    def _post_due(self, ahead: float = 0.0) -> None:
        now = time.monotonic() + ahead
        for kind, alerts in self._waiting.items():
            if alerts and now - self._posted[kind] >= _POST_SECONDS:
                self._posted[kind] = time.monotonic()
                if self._post(self._body(kind, alerts, self._left_out[kind])):
                    self._waiting[kind], self._left_out[kind] = [], 0

    def _body(self, kind: str, alerts: list[dict[str, Any]], left_out: int) -> dict[str, Any]:
        return {
            "fastcheck": "alert",
            "format": 1,
            "kind": kind,
            "host": platform.node(),
            "rank": own_rank(),
            "alerts": alerts,
            "left_out": left_out,
        }

    def _post(self, body: Mapping[str, Any]) -> bool:
        data = json.dumps(body, allow_nan=False).encode()
        headers = {"Content-Type": "application/json", "User-Agent": "fastcheck"}
        try:
            request = urllib.request.Request(self._url, data, headers)
            opener = urllib.request.build_opener(_NoRedirects)
            with opener.open(request, timeout=_TIMEOUT):
                return True
        except (OSError, http.client.HTTPException) as error:  # URLError and HTTPError too
            text = str(error).replace(self._url, self._host) or type(error).__name__
            reason = " ".join(text.split())  # of what is no HTTP it has the line
            warn_of_fault(
                f"an alert was not posted to {self._host}: {reason}. It is tried again in a minute "
                "and when the run ends. Training is not affected."
            )
            return False


class Slack(Webhook):
    """Posts in the form of Slack's incoming webhooks, which Mattermost and others take too."""

    name = "slack"

    def _body(self, kind: str, alerts: list[dict[str, Any]], left_out: int) -> dict[str, Any]:
        texts = [f"*{alert['title']}*\n```{alert['text']}```" for alert in alerts]
        more = [f"and {left_out:,} more"] if left_out else []
        text = "\n".join([f"{platform.node()}, rank {own_rank()}", *texts, *more])
        return {"text": html.escape(text, quote=False)}  # <module> would be a link
