"""The OpenTelemetry sink: over OTLP to a local collector, and its names and units."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)

from ergmeter.errors import UsageError
from ergmeter.records import Reading
from ergmeter.sinks.otel import OtelSink
from tests.unit.sinks.collectors import Sent, collector
from tests.unit.sinks.readback import Points, otel_metric_points
from tests.unit.sinks.test_every_sink import sent as expected
from tests.unit.sinks.updates import GPU, RUN, UPDATES, request, update, written


def metrics_of(sent: Sent) -> dict[str, Any]:
    """The metrics of a request by name, decoded with OTLP's own messages."""
    assert sent.path == "/v1/metrics"
    assert sent.headers["content-type"] == "application/x-protobuf"
    (resource,) = ExportMetricsServiceRequest.FromString(sent.body).resource_metrics
    attributes = {one.key: one.value.string_value for one in resource.resource.attributes}
    assert attributes["service.name"] == "ergmeter"
    assert attributes["ergmeter.run"] == RUN
    return {one.name: one for scope in resource.scope_metrics for one in scope.metrics}


def pairs(metric: Any) -> list[tuple[dict[str, str], float]]:
    points = (metric.gauge or metric.sum).data_points or metric.sum.data_points
    return [
        (
            {one.key: one.value.string_value for one in point.attributes},
            point.as_double if point.HasField("as_double") else point.as_int,
        )
        for point in points
    ]


def test_a_collector_gets_the_figures_of_each_update(tmp_path: Path) -> None:
    with collector() as server:
        written(OtelSink(request(tmp_path, endpoint=server.url)), *UPDATES)
        found: Points = {}
        for one in server.sent:
            found |= otel_metric_points({n: pairs(m) for n, m in metrics_of(one).items()})
    assert found == expected("otel")


def test_units_are_ucums_and_a_gpus_figures_have_the_conventions_names_too(
    tmp_path: Path,
) -> None:
    busy = update(10)
    busy.summary.devices[GPU]["utilization.busy_frac"] = Reading(0.875, "frac", "measured")
    with collector() as server:
        written(OtelSink(request(tmp_path, endpoint=server.url + "/v1/metrics")), busy)
        metrics = metrics_of(server.sent[0])
    units = {name: metric.unit for name, metric in metrics.items()}
    assert units["ergmeter.throughput.tokens_per_s"] == "{token}/s"
    assert units["ergmeter.energy.joules_per_token"] == "J/{token}"
    assert units["ergmeter.memory.device_peak_bytes"] == "By"
    assert units["ergmeter.utilization.mfu_frac"] == "1"
    of_a_gpu = {"hw.id": GPU, "hw.type": "gpu"}
    assert pairs(metrics["hw.power"]) == [(of_a_gpu, 309.75)]  # not of the CPU: not known as one
    assert pairs(metrics["hw.gpu.memory.usage"]) == [(of_a_gpu, 11.5e9)]
    task = {"hw.gpu.task": "general"}
    assert pairs(metrics["hw.gpu.utilization"]) == [({**of_a_gpu, **task}, 0.875)]
    assert metrics["hw.gpu.memory.usage"].HasField("sum")
    assert not metrics["hw.gpu.memory.usage"].sum.is_monotonic
    assert (units["hw.power"], units["hw.gpu.memory.usage"]) == ("W", "By")
    assert "hw.energy" not in metrics  # a counter there; here it is the energy of a window


def test_a_collector_that_refuses_is_an_error_and_nothing_is_printed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # as in a script that sets up none
    with collector() as server:
        sink = OtelSink(request(tmp_path, endpoint=server.url, metrics=["mfu"]))
        server.status = 400
        with pytest.raises(ConnectionError, match="did not accept the metrics"):
            sink.write(UPDATES[0])
        server.status = 200
        sink.write(UPDATES[0])
        assert "ergmeter.utilization.mfu_frac" in metrics_of(server.sent[-1])
        sink.close()
    assert capfd.readouterr() == ("", "")


def test_a_reader_and_an_endpoint_contradict_each_other(tmp_path: Path) -> None:
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader

    with pytest.raises(UsageError, match="a reader exports by itself"):
        OtelSink(request(tmp_path, reader=InMemoryMetricReader(), endpoint="http://localhost"))
