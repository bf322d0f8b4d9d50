"""The Prometheus sink: scraped over HTTP, and pushed to a gateway."""

from __future__ import annotations

import urllib.error
import urllib.request
from base64 import b64encode
from pathlib import Path

import pytest

from ergmeter.errors import UsageError
from ergmeter.sinks.prometheus import PrometheusSink
from tests.unit.sinks.collectors import collector
from tests.unit.sinks.readback import prometheus_text_points
from tests.unit.sinks.updates import GPU, RUN, UPDATES, request, written


def scraped(sink: PrometheusSink) -> str:
    assert sink.url is not None
    with urllib.request.urlopen(sink.url, timeout=10) as answer:
        text: str = answer.read().decode()
    return text


def test_a_scrape_has_help_from_the_catalogue_and_labels(tmp_path: Path) -> None:
    sink = PrometheusSink(request(tmp_path, port=0, metrics=["energy.mean_w"]))
    assert "ergmeter" not in scraped(sink)  # nothing yet is nothing, not zeros
    sink.write(UPDATES[0])
    text = scraped(sink)
    sink.close()
    assert (
        "# HELP ergmeter_energy_mean_w mean power [W]: energy.run_j / window\n"
        "# TYPE ergmeter_energy_mean_w gauge\n"
        'ergmeter_energy_mean_w{basis="measured",run="llama sft"} 310.25\n'
        f'ergmeter_energy_mean_w{{basis="measured",device="{GPU}",run="llama sft"}} 309.75\n'
        'ergmeter_energy_mean_w{basis="measured",device="cpu-0",run="llama sft"} 80.125\n'
    ) in text
    assert 'ergmeter_step{run="llama sft"} 10.0\n' in text


def test_a_closed_endpoint_is_gone(tmp_path: Path) -> None:
    sink = PrometheusSink(request(tmp_path, port=0))
    written(sink, *UPDATES)
    with pytest.raises(urllib.error.URLError, match="refused"):
        scraped(sink)


def test_a_port_that_is_taken_is_said_to_be(tmp_path: Path) -> None:
    with collector() as other:
        port = other.url.rpartition(":")[2]
        with pytest.raises(UsageError, match=f"port {port} of 127.0.0.1 is in use; choose another"):
            PrometheusSink(request(tmp_path, port=port))


def test_a_push_replaces_the_runs_group_and_the_last_one_is_of_the_whole_run(
    tmp_path: Path,
) -> None:
    with collector() as gateway:
        sink = PrometheusSink(request(tmp_path, push=gateway.url))
        assert sink.url is None  # an endpoint only where a port is asked for too
        written(sink, *UPDATES)
        pushed = gateway.sent
    (group,) = {(one.method, one.path) for one in pushed}
    # The gateway's way of writing a value with a blank in it.
    assert group == ("PUT", f"/metrics/job/ergmeter/run@base64/{b64encode(RUN.encode()).decode()}")
    points = [prometheus_text_points(one.body.decode()) for one in pushed]
    assert [list(one) for one in points] == [
        [("window", 10)],
        [("window", 20)],
        [("window", 30)],
        [("run", 30)],
    ]
    value = points[3]["run", 30].values["throughput.tokens_per_s", None]
    assert value == 12345.6789 * 0.9


def test_a_gateway_that_is_down_is_an_error_and_takes_the_update_later(tmp_path: Path) -> None:
    with collector() as gateway:
        sink = PrometheusSink(request(tmp_path, push=gateway.url))
        gateway.status = 503
        with pytest.raises(urllib.error.HTTPError, match="503"):
            sink.write(UPDATES[0])
        gateway.status = 200
        sink.write(UPDATES[0])
        assert prometheus_text_points(gateway.sent[-1].body.decode()).keys() == {("window", 10)}
