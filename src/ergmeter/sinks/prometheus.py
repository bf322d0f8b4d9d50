"""Serves metrics to Prometheus: an endpoint to scrape, a push gateway, or both.

A gauge keeps its last value for ever: a missing metric would show an old value, and an ended run
would seem to train. So no gauge is set: the latest update is served as it is. After the final
update that is the run's metrics alone, and the pushed group is replaced by them.

An endpoint ends with the program, often before the next scrape. Use push for the final metrics of a
job that ends.
"""

from __future__ import annotations

import errno
import importlib
from typing import TYPE_CHECKING, Any, ClassVar

from ergmeter.errors import UsageError
from ergmeter.sinks.shared.updates import PREFIX, TRACKER, SelectingSink, explanation

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.core import GaugeMetricFamily

    from ergmeter.ports import SinkRequest, Update

_PUSH_TIMEOUT_S = 10.0


class PrometheusSink(SelectingSink):
    """Serves and pushes the latest update."""

    name = "prometheus"
    library = "prometheus_client"
    options: ClassVar = TRACKER | {
        "port": 9478,
        "address": "127.0.0.1",
        "push": None,
        "job": PREFIX,
    }

    def __init__(self, request: SinkRequest) -> None:
        super().__init__(request)
        self._client: Any = importlib.import_module("prometheus_client")
        self._family: Any = importlib.import_module("prometheus_client.core").GaugeMetricFamily
        self._latest: Update | None = None
        self._gateway: str | None = self._options["push"]
        self.registry = self._client.CollectorRegistry()
        self.registry.register(self)
        self.url: str | None = None
        if self._gateway is None or "port" in request.options:
            self._serve(self._options["address"], self._options["port"])

    def write(self, update: Update) -> None:
        """Serve this update, and push it."""
        self._latest = update
        if self._gateway is not None:
            self._client.push_to_gateway(
                self._gateway,
                job=self._options["job"],
                registry=self.registry,
                grouping_key={"run": self._run},
                timeout=_PUSH_TIMEOUT_S,
            )

    def close(self) -> None:
        """Stop serving. Pushed values stay with the gateway."""
        if self.url is not None:
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the metrics of a scrape; called by prometheus_client."""
        update = self._latest
        if update is None:
            return
        yield self._single("step", "optimizer steps done", update.step)
        yield self._single("updated_seconds", "when the window ended, unix time", update.wall_s)
        families: dict[str, GaugeMetricFamily] = {}
        for figure in self._selection.figures(update):
            series = self._names.series(figure.key, is_final=update.is_final)
            if series not in families:
                over = "at the end of the run: " if update.is_final else ""
                families[series] = self._family(series, over + explanation(figure.key))
            labels = {"run": self._run, **self._labels(figure, update)}
            if figure.reading.impossible:
                labels["impossible"] = "true"
            families[series].add_sample(series, labels, figure.value)
        yield from families.values()

    def _single(self, name: str, says: str, value: float) -> GaugeMetricFamily:
        series = self._names.series(name)
        family: GaugeMetricFamily = self._family(series, says)
        family.add_sample(series, {"run": self._run}, value)
        return family

    def _serve(self, address: str, port: int) -> None:
        try:
            self._server, self._thread = self._client.start_http_server(
                port, address, self.registry
            )
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise UsageError(
                    f"port {port} of {address} is in use; choose another port=, or 0 for a free one"
                ) from error
            raise
        self.url = f"http://{address}:{self._server.server_port}/metrics"
