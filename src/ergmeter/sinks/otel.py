"""Sends metrics to an OpenTelemetry collector over OTLP, or to a reader of the user's own.

A synchronous gauge repeats its last value for ever, so a missing metric would go out as an old one.
Gauges here are observable, and a missing metric has no observation. The SDK's periodic reader logs
a failed export and drops it. Here an update is exported when it is written, and a failure raises,
so that it is sent again.

Beside our names, the hardware semantic conventions are used where they mean the same. Not
`hw.energy`: that is a counter that only grows, and ours is the energy of a window.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any, ClassVar
from urllib.parse import urlsplit

from ergmeter.errors import UsageError
from ergmeter.metrics.catalog import catalogue, in_view
from ergmeter.sinks.shared.updates import PREFIX, TRACKER, SelectingSink, explanation, ucum

if TYPE_CHECKING:
    from opentelemetry.metrics import Observation
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader, MetricExporter

    from ergmeter.ports import SinkRequest, Update
    from ergmeter.records import Reading

_PATH = "/v1/metrics"

# opentelemetry.io/docs/specs/semconv/hardware/gpu and .../common, 2026: of each GPU, by hw.id.
# The mean over a window stands for the instant, as with any reader that polls.
# The catalogue declares the names that are used.
_ATTRIBUTES = {"hw.gpu.utilization": {"hw.gpu.task": "general"}}
_UP_DOWN = "hw.gpu.memory.usage"  # the conventions make it an UpDownCounter
_OF_A_GPU = "utilization.busy_frac"  # a device that has or lacks this metric is a GPU


class OtelSink(SelectingSink):
    """Exports each update."""

    name = "otel"
    library = "opentelemetry"
    options: ClassVar = {
        **TRACKER,
        "endpoint": None,
        "headers": None,
        "timeout_s": 10.0,
        "exporter": None,
        "reader": None,
        "hardware_names": True,
    }

    def __init__(self, request: SinkRequest) -> None:
        super().__init__(request)
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import InMemoryMetricReader
        from opentelemetry.sdk.resources import Resource

        options = self._options
        self._collected: InMemoryMetricReader | None = None  # what is exported from
        self._exporter: MetricExporter | None = None
        reader = options["reader"]
        if reader is None:
            reader = self._collected = InMemoryMetricReader()
            self._exporter = options["exporter"] or _exporter(options)
        elif options["exporter"] or options["endpoint"]:
            raise UsageError("a reader exports by itself: omit endpoint= and exporter=")
        resource = Resource.create({"service.name": PREFIX, "ergmeter.run": request.name})
        self._provider = MeterProvider([reader], resource=resource, shutdown_on_exit=False)
        self._meter = self._provider.get_meter("ergmeter")
        self._points: dict[str, list[Observation]] = {}
        self._instruments: set[str] = set()

    def write(self, update: Update) -> None:
        """Export one update; the user's own reader, if any, collects it later."""
        from opentelemetry.metrics import Observation

        points = self._single(update)
        for figure in self._selection.figures(update):
            name = self._names.instrument(figure.key, is_final=update.is_final)
            self._observe(name, ucum(catalogue()[figure.key].unit), explanation(figure.key))
            attributes = self._labels(figure, update) | _mark(figure.reading)
            points.setdefault(name, []).append(Observation(figure.value, attributes))
        if self._options["hardware_names"] and not update.is_final:
            self._add_hardware(update, points)
        self._points = points
        if self._collected is not None and self._exporter is not None:
            self._export(self._collected, self._exporter)

    def close(self) -> None:
        """Shut the exporter down."""
        self._provider.shutdown()
        if self._exporter is not None:
            self._exporter.shutdown()

    def _export(self, collected: InMemoryMetricReader, exporter: MetricExporter) -> None:
        from opentelemetry.sdk.metrics.export import MetricExportResult

        data = collected.get_metrics_data()
        if data is not None and exporter.export(data) is not MetricExportResult.SUCCESS:
            raise ConnectionError("the OpenTelemetry collector did not accept the metrics")

    def _single(self, update: Update) -> dict[str, list[Observation]]:
        from opentelemetry.metrics import Observation

        step, updated = self._names.instrument("step"), self._names.instrument("updated")
        self._observe(step, "{step}", "optimizer steps done")
        self._observe(updated, "s", "when the window ended, unix time")
        return {step: [Observation(update.step)], updated: [Observation(update.wall_s)]}

    def _add_hardware(self, update: Update, points: dict[str, list[Observation]]) -> None:
        from opentelemetry.metrics import Observation

        names = in_view("otel")
        gpus = {id_ for id_, results in update.summary.devices.items() if _OF_A_GPU in results}
        for figure in self._selection.figures(update):
            if figure.device in gpus and figure.key in names:
                name = names[figure.key].label
                self._observe(name, ucum(catalogue()[figure.key].unit), explanation(figure.key))
                attributes = {"hw.id": str(figure.device), "hw.type": "gpu"}
                attributes |= _ATTRIBUTES.get(name, {})
                attributes |= _mark(figure.reading)
                points.setdefault(name, []).append(Observation(figure.value, attributes))

    def _observe(self, name: str, unit: str, description: str) -> None:
        """Create the instrument `name`, which reports the points of that name, if it is new."""
        if name in self._instruments:
            return
        make = (
            self._meter.create_observable_up_down_counter
            if name == _UP_DOWN
            else self._meter.create_observable_gauge
        )
        make(name, [lambda _: self._points.get(name, [])], unit=unit, description=description)
        self._instruments.add(name)


def _mark(reading: Reading) -> dict[str, str]:
    return {"impossible": reading.impossible} if reading.impossible else {}


def _exporter(options: dict[str, Any]) -> MetricExporter:
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter

    # Without a handler Python prints the exporter's warnings to the program's standard error; the
    # run already has a mark for them. The program's own handlers still get them.
    logging.getLogger("opentelemetry").addHandler(logging.NullHandler())
    endpoint = options["endpoint"]  # None: OTEL_EXPORTER_OTLP_ENDPOINT, then localhost:4318
    if endpoint is not None and urlsplit(endpoint).path in ("", "/"):
        endpoint = endpoint.rstrip("/") + _PATH
    return OTLPMetricExporter(
        endpoint=endpoint, headers=options["headers"], timeout=options["timeout_s"]
    )
