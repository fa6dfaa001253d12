"""Sinks for those who operate runs, with their real libraries and a server that keeps the posts."""

from __future__ import annotations

import errno
import html
import json
import socket
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from torch import nn

import fastcheck
from fastcheck.monitor.sinks import services
from fastcheck.monitor.sinks.services import OpenTelemetry, Slack, Webhook
from support.programs.training import batches, chain, train
from support.trackers import Kept, stopped_run

pytestmark = pytest.mark.usefixtures("fresh_start")


HANGS, NO_HTTP = -1, -2


class Server(ThreadingHTTPServer):
    """``posts``: (path, body). ``status``: what it answers, of HTTP or one of the above."""

    status = 200

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.posts: list[tuple[str, bytes]] = []
        self.url = f"http://127.0.0.1:{self.server_port}"

    def bodies(self, path: str) -> list[Any]:
        return [json.loads(body) for at, body in self.posts if at == path]


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Server)
        body = self.rfile.read(int(self.headers["Content-Length"]))
        status = self.server.status
        if status == HANGS:
            self.rfile.read(1)  # the client has closed it
        elif status == NO_HTTP:
            self.wfile.write(b"no HTTP\r\n")
        else:
            if status == 200:
                self.server.posts.append((self.path, body))
            self.send_response(status)
            self.send_header("Location", "/login")
            self.end_headers()

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(services, "_TIMEOUT", 600)  # its thread may have to wait for its turn
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_a_stop_is_posted_in_both_forms(server: Server) -> None:
    stop = stopped_run(f"webhook:{server.url}/json", f"slack:{server.url}/slack")
    (body,) = server.bodies("/json")
    ((title, text, step),) = [alert.values() for alert in body.pop("alerts")]
    assert title == f"fastcheck: {stop.culprit.site}, step 2" and text == str(stop) and step == 2
    assert body.pop("host") == socket.gethostname()
    assert body == {"fastcheck": "alert", "format": 1, "kind": "stop", "rank": 0, "left_out": 0}
    (form,) = server.bodies("/slack")
    assert list(form) == ["text"] and f"*{title}*\n```{stop}```" in html.unescape(form["text"])


def test_a_warning_is_posted() -> None:
    """That of the watch that warns, and one of check_replicas()."""
    sink, model = Kept(), chain(fc=nn.Linear(8, 8), out=nn.Linear(8, 8))
    with (
        pytest.warns(fastcheck.SpikeWarning) as caught,
        fastcheck.install(model, overflow_nums=-1, sinks=sink) as monitor,
    ):
        train(model, data=(x * 30 if step == 50 else x for step, x in enumerate(batches(60))))
        monitor._event_store.listeners[-1].replicas_differ(60, "rank 1 has other weights")
    texts = [(title.partition(",")[0], text) for title, text, _ in sink.warnings]
    assert texts[-1] == ("fastcheck: replicas differ", "rank 1 has other weights")
    spikes = [text for title, text in texts if title == "fastcheck: loss_spike"]
    assert spikes and spikes[0] in [str(one.message) for one in caught]


def test_what_comes_within_a_minute_waits_for_the_next_post(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    hook = Webhook(f"{server.url}/")
    for step in range(20):
        hook.warning("title", "text", step)
    hook.alert("stop", "text", 19)
    assert [(b["kind"], len(b["alerts"])) for b in server.bodies("/")] == [
        ("warning", 1),
        ("stop", 1),
    ]
    now[0] = 59.0
    hook.log({}, 20)
    assert len(server.posts) == 2
    now[0] = 60.0
    hook.log({}, 21)
    last = server.bodies("/")[2]
    assert [alert["step"] for alert in last["alerts"]] == list(range(1, 11))
    assert last["left_out"] == 9
    hook.close()
    assert len(server.posts) == 3
    hook.alert("another", "text", 22)
    hook.close()
    assert [a["title"] for a in server.bodies("/")[3]["alerts"]] == ["another"]


@pytest.mark.parametrize(
    ("status", "said"),
    [(503, "503"), (302, "302"), (NO_HTTP, "no HTTP"), (HANGS, "timed out")],
)
def test_a_post_that_fails_is_tried_again_and_names_no_secret(
    status: int, said: str, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    hook = Slack(f"{server.url}/T0/secret")
    server.status = status
    if status == HANGS:
        monkeypatch.setattr(services, "_TIMEOUT", 0.1)
    with pytest.warns(fastcheck.FastcheckWarning, match=f"{said}.*again in a minute") as caught:
        hook.warning("title", "train.py:3 in <module>", 1)
    assert "secret" not in str(caught[0].message)
    monkeypatch.setattr(services, "_TIMEOUT", 600)
    server.status = 200
    hook.log({}, 2)
    assert not server.posts
    now[0] = 61.0
    hook.log({}, 3)
    # Slack would make a link of <module>.
    assert "train.py:3 in &lt;module&gt;" in server.bodies("/T0/secret")[0]["text"]


def test_a_host_that_does_not_answer_ends_nothing() -> None:
    with pytest.warns(fastcheck.FastcheckWarning, match="was not posted to 127.0.0.1"):
        stop = stopped_run("webhook:http://127.0.0.1:1/secret")
    assert stop.report.step == 2


def test_prometheus_writes_a_file_for_node_exporter() -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    path = Path("fastcheck.prom")
    stopped_run("prometheus:fastcheck.prom")
    found = {
        f.name: f.samples[0].value for f in parser.text_string_to_metric_families(path.read_text())
    }
    assert found["fastcheck_stopped_at_step"] == found["fastcheck_step"] == 2
    assert found["fastcheck_events"] == 1 and "fastcheck_loss" in found
    stopped_run("prometheus:fastcheck.prom")  # the same names again
    assert 'fastcheck_step{run="fastcheck"} 2.0' in path.read_text()
    assert [entry.name for entry in Path().glob("*.prom*")] == [path.name]


def test_a_disk_that_is_full_for_a_time_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    client = pytest.importorskip("prometheus_client")
    sink, write = services.Prometheus("x.prom"), client.write_to_textfile

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(client, "write_to_textfile", full)
    with pytest.warns(fastcheck.FastcheckWarning, match="x.prom was not written.*no space left"):
        sink.log({"fastcheck/loss": 1.0}, 1)
    monkeypatch.setattr(client, "write_to_textfile", write)
    sink.close()
    assert 'fastcheck_loss{run="x"} 1.0' in Path("x.prom").read_text()


def test_prometheus_serves_what_is_scraped() -> None:
    pytest.importorskip("prometheus_client")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        target = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(fastcheck.ConfigError, match="can't listen on"):
            stopped_run(f"prometheus:{target}")
    stopped_run(f"prometheus:{target}", "prometheus")  # one of them serves both
    stopped_run(f"prometheus:{target}")
    with urllib.request.urlopen(f"http://{target}/metrics", timeout=600) as page:
        text = page.read().decode()
    assert "\nfastcheck_stopped_at_step 2.0\n" in text


def test_opentelemetry_exports_by_otlp(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http.metric_exporter")
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
        ExportMetricsServiceRequest,
    )

    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", server.url)
    stop = stopped_run("opentelemetry")
    found: dict[str, Any] = {}
    for path, body in server.posts:
        assert path == "/v1/metrics"
        (resource,) = ExportMetricsServiceRequest.FromString(body).resource_metrics
        for metric in resource.scope_metrics[0].metrics:
            found[metric.name] = metric.gauge.data_points[0]
    assert found["fastcheck.step"].as_int == 2 and found["fastcheck.events"].as_double == 1
    last = found["fastcheck.stopped_at_step"]
    assert last.as_int == 2
    assert str(stop.culprit.site) in last.attributes[0].value.string_value


def test_opentelemetry_uses_the_provider_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    sdk = pytest.importorskip("opentelemetry.sdk.metrics")
    from opentelemetry import metrics
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    reader = InMemoryMetricReader()
    provider = sdk.MeterProvider([reader])
    monkeypatch.setattr(metrics, "get_meter_provider", lambda: provider)
    sink = OpenTelemetry()
    sink.log({"fastcheck/loss": 2.0, "fastcheck/gradient_norm": float("nan")}, 3)
    sink.close()
    data: Any = reader.get_metrics_data()
    names = [m.name for m in data.resource_metrics[0].scope_metrics[0].metrics]
    assert names == ["fastcheck.loss", "fastcheck.step"]
    provider.shutdown()


def test_the_environment_names_more(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTCHECK_SINKS", f"webhook:{server.url}/a, slack:{server.url}/b,")
    kept = Kept()
    stopped_run(kept)
    assert len(kept.alerts) == len(server.bodies("/a")) == len(server.bodies("/b")) == 1
    assert "FASTCHECK_SINKS" not in str(fastcheck.environment()), "it holds secrets"
    monkeypatch.setenv("FASTCHECK_SINKS", "webhok:https://host/secret")
    with pytest.raises(fastcheck.ConfigError, match="webhook") as caught:
        fastcheck.install(nn.Linear(2, 2))
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "webhook",
        "slack:",
        "webhook:ftp://host/secret",
        "webhook:host/secret",
        "slack:ftp://host/secret",
        "prometheus:metrics.txt",
        "prometheus:nowhere/x.prom",
        "prometheus:/proc/x.prom",
        "prometheus:99999",
        "webhook:https://user:secret@host/",
        "slack:https://host/secret of mine",
        "webhook:https://host:secret/",
        "opentelemetry:host",
        "wandb:secret",
    ],
)
def test_a_target_that_is_none_is_an_error_at_install(name: str) -> None:
    with pytest.raises(fastcheck.ConfigError, match=name.partition(":")[0]) as caught:
        fastcheck.install(nn.Linear(2, 2), sinks=name)
    assert "secret" not in str(caught.value)


def test_a_library_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(fastcheck.ConfigError, match="pip install prometheus-client"):
        fastcheck.install(nn.Linear(2, 2), sinks="prometheus")
