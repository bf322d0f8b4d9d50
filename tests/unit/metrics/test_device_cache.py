"""What is asked of a device is asked once, and so are its readings read."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.evidence import samples
from ergmeter.metrics.evidence.samples import cached_result
from ergmeter.metrics.summarize import summarize
from ergmeter.records import Device, Missing, Reading, Sample
from ergmeter.runlog.reader import Run
from ergmeter.runlog.segments import Segment
from tests.runs import add_writer, even_steps, make_run

if TYPE_CHECKING:
    from pathlib import Path

    from ergmeter.metrics.evidence.evidence import Evidence


def evidence() -> Evidence:
    return cast("Evidence", SimpleNamespace(results={}))


def value(readings: dict[str, Any], key: str) -> float:
    found = readings[key]
    assert isinstance(found, Reading), found
    return found.value


def test_an_answer_is_computed_once_for_each_device_and_column() -> None:
    asked = []

    @cached_result
    def answer(evidence: Evidence, column: str, device: Device) -> str:
        asked.append((column, device.id))
        return f"{column} of {device.id}"

    one, other = (Device(name, "gpu", name, "nvml", {}) for name in ("a", "b"))
    seen = evidence()
    for _ in range(2):
        assert answer(seen, "power_w", one) == "power_w of a"
        assert answer(seen, "power_w", other) == "power_w of b"
        assert answer(seen, "clock_hz", one) == "clock_hz of a"
    assert answer(evidence(), "power_w", one) == "power_w of a"
    assert asked == [("power_w", "a"), ("power_w", "b"), ("clock_hz", "a"), ("power_w", "a")]


def test_why_there_is_none_is_kept_without_the_readings_it_came_from() -> None:
    asked = []

    @cached_result
    def answer(evidence: Evidence) -> float:
        asked.append(evidence)
        raise NotMeasurable("no reading in the window")

    seen = evidence()
    for _ in range(2):
        with pytest.raises(NotMeasurable, match="no reading in the window"):
            answer(seen)
    assert len(asked) == 1
    assert list(seen.results.values()) == [Missing("no reading in the window")]


def test_the_power_of_a_node_is_read_once_for_all_metrics_and_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "run")
    for node in range(3):
        gpu = Device(f"GPU-{node}", "gpu", "Test GPU", "nvml", {"power_field": "instant"})
        ticks = range(-5, 206)
        add_writer(
            run,
            header={"host": f"node-{node}", "boot_id": f"boot-{node}"},
            steps=even_steps(20, rank=node),
            samples=[
                Sample(
                    t * 10**8, gpu.id, power_w=300.0 + 100 * node, energy_j=(30.0 + 10 * node) * t
                )
                for t in ticks
            ],
            devices=[gpu],
        )
    read: Counter[str] = Counter()
    columns_by_device = Segment.columns_by_device

    def counted(self: Segment, names: list[str], **how: Any) -> Any:
        read[self.path.parent.name] += "power_w" in names
        return columns_by_device(self, names, **how)

    monkeypatch.setattr(samples, "MAX_READINGS", 1)
    monkeypatch.setattr(Segment, "columns_by_device", counted)
    found = summarize(Run.open(run)).readings
    # 300, 400 and 500 W for 20 s.
    assert value(found, "energy.run_j") == pytest.approx(1200 * 20, rel=1e-3)
    assert value(found, "energy.train_j") == pytest.approx(1200 * 20, rel=1e-3)
    assert value(found, "energy.step_median_j") == pytest.approx(1200, rel=1e-3)
    assert value(found, "energy.peak_w") == pytest.approx(1200)
    assert list(read.values()) == [1, 1, 1]
