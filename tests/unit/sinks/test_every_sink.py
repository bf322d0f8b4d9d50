"""One run into every sink, read back with each library's own reader: the same values everywhere."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ergmeter import registry
from ergmeter.errors import UsageError
from ergmeter.ports import Sink
from ergmeter.records import Missing, Reading
from tests.unit.sinks.readback import READ_BACK, Place, Point, Points
from tests.unit.sinks.updates import UPDATES, on_a_thread, request, update

# MLflow 3.17 uses what SQLAlchemy 2.1 will drop.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader:DeprecationWarning")

HAS_DEVICES = {
    name: name != "csv" for name in READ_BACK
}  # a table's columns are fixed at its start
FLOAT32 = {"tensorboard"}


def sent(name: str) -> Points:
    """What is expected of a sink, worked out from the updates alone."""
    points: Points = {}
    for one in UPDATES:
        places: dict[Place, object] = {}
        for key, result in one.summary.readings.items():
            places[key, None] = result
        if HAS_DEVICES[name]:
            for device, figures in one.summary.devices.items():
                places |= {(key, device): result for key, result in figures.items()}
        values = {place: r.value for place, r in places.items() if isinstance(r, Reading)}
        if name in FLOAT32:
            values = {place: float(np.float32(value)) for place, value in values.items()}
        points["run" if one.is_final else "window", one.step] = Point(one.wall_s, values)
    return points


def test_every_sink_is_read_back_here_or_is_the_console() -> None:
    assert set(registry.names("sinks")) == {*READ_BACK, "console"}


@pytest.mark.parametrize("name", READ_BACK)
def test_a_sink_holds_what_it_was_given_and_nothing_of_what_is_missing(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    found = on_a_thread(lambda: READ_BACK[name](tmp_path, UPDATES))
    assert capfd.readouterr() == ("", "")  # nothing that the program alone would not print
    assert found == sent(name)
    assert not [place for point in found.values() for place in point.values if "carbon" in place[0]]


@pytest.mark.parametrize("name", sorted(registry.names("sinks")))
def test_a_sink_has_what_its_protocol_asks_for(name: str) -> None:
    sink = registry.load("sinks", name)
    assert sink.name == name
    assert callable(sink.write)
    assert callable(sink.close)
    assert Sink.__doc__


@pytest.mark.parametrize("name", sorted(registry.names("sinks")))
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"metrics": ["throughput.tokens_per_sec"]}, "did you mean throughput.tokens_per_s"),
        ({"metrik": ["mfu"]}, "no option 'metrik'; did you mean metrics"),
    ],
)
def test_a_name_that_does_not_exist_is_refused_with_the_nearest(
    name: str, options: dict[str, object], says: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=says):
        registry.load("sinks", name)(request(tmp_path, **options))


@pytest.mark.parametrize("name", ["csv", "jsonl", "tensorboard", "prometheus", "otel"])
def test_what_goes_missing_does_not_stay_at_its_last_value(name: str, tmp_path: Path) -> None:
    before, after = update(10), update(20, utilization__mfu_frac=Missing("no peak is known"))
    points = READ_BACK[name](tmp_path, [before, after])
    assert ("utilization.mfu_frac", None) in points["window", 10].values
    assert ("utilization.mfu_frac", None) not in points["window", 20].values
    assert ("time.step_s", None) in points["window", 20].values


@pytest.mark.parametrize("name", ["csv", "jsonl", "tensorboard", "prometheus", "otel"])
def test_what_is_no_finite_number_is_not_sent(name: str, tmp_path: Path) -> None:
    infinite = update(10, time__step_s=Reading(float("inf"), "s", "measured"))
    points = READ_BACK[name](tmp_path, [infinite])
    assert ("time.step_s", None) not in points["window", 10].values
    assert ("energy.mean_w", None) in points["window", 10].values
