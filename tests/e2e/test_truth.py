"""The figures are those of the loop's own clock and count, and agree with one another."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from ergmeter import Run
from tests.e2e.conftest import script

if TYPE_CHECKING:
    from tests.e2e.conftest import Lab

LOOPS = ["uneven", "short", "padded"]


LATE = 0.05  # of the time: what a machine with no core to spare may add to what is granted


def held_up_s(run: Run, ends_s: list[float]) -> float:
    """By how much the window of printed lines is longer or shorter because lines were read late.

    Both clocks are the kernel's monotonic one, so it is known to the microsecond: what a reader
    that waits for a core can do nothing about.
    """
    steps = run.steps("output")
    opened_by = int(steps["index"][0] - steps["steps"][0])
    late_s = [
        int(steps["start_ns"][0]) / 1e9 - ends_s[opened_by],
        int(steps["end_ns"][-1]) / 1e9 - ends_s[-1],
    ]
    return abs(late_s[1] - late_s[0])


def check(
    report: dict[str, Any], truth: dict[str, float], basis: str, *, late_s: float = 0.0
) -> None:
    readings = report["readings"]
    within = 0.01 + min(late_s / truth["seconds"], LATE)

    def value(key: str) -> float:
        assert "value" in readings[key], readings[key]
        assert readings[key]["basis"] == basis
        return float(readings[key]["value"])

    tokens_per_s, step_s = value("throughput.tokens_per_s"), value("time.step_s")
    assert tokens_per_s == pytest.approx(truth["real"] / truth["seconds"], rel=within)
    assert step_s == pytest.approx(truth["seconds"] / truth["steps"], rel=within)
    exact = 1e-9 if basis == "measured" else 0.005
    assert value("tokens.per_step") == pytest.approx(truth["real"] / truth["steps"], rel=exact)
    # Lines that come in one read with the first open the window together with it.
    assert truth["steps"] * (1 if basis == "measured" else 0.99) <= value("steps.count")
    assert value("steps.count") <= truth["steps"]
    assert value("throughput.computed_tokens_per_s") == pytest.approx(
        truth["computed"] / truth["seconds"], rel=within
    )
    padding = 1 - truth["real"] / truth["computed"]
    assert value("tokens.padding_frac") == pytest.approx(padding, rel=exact)
    assert tokens_per_s * step_s == pytest.approx(value("tokens.per_step"), rel=0.001)
    low, high = (readings["throughput.tokens_per_s"][end] for end in ("low", "high"))
    assert low <= tokens_per_s <= high


@pytest.mark.parametrize("way", ["span", "end"])
@pytest.mark.parametrize("loop", LOOPS)
def test_a_meters_figures_are_true(lab: Lab, loop: str, way: str) -> None:
    done = lab.run(*script("truth", loop, way, "truth.json"))
    assert done.returncode == 0, done.stderr.decode()
    truth = json.loads((lab.path / "truth.json").read_text())
    check(lab.report(truth["run"]), truth["all"], "measured")


@pytest.mark.parametrize("loop", LOOPS)
def test_figures_from_printed_lines_are_true(lab: Lab, loop: str) -> None:
    assert lab.record(*script("truth", loop, "print", "truth.json")).returncode == 0
    truth = json.loads((lab.path / "truth.json").read_text())
    late_s = held_up_s(Run.open(lab.path / "run"), truth["ends_s"])
    check(lab.report(), truth["after_first"], "derived", late_s=late_s)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_meter_under_a_recorder_says_what_it_says_alone(lab: Lab, loop: str) -> None:
    assert lab.record(*script("truth", loop, "span", "truth.json")).returncode == 0
    truth = json.loads((lab.path / "truth.json").read_text())
    assert truth["run"] == str(lab.path / "run")
    check(lab.report(), truth["all"], "measured")
