"""The figures are those of the loop's own clock and count, and agree with one another."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from ergmeter import Run
from tests.e2e.clocks import bounds_s
from tests.e2e.conftest import script

if TYPE_CHECKING:
    from tests.e2e.conftest import Lab

pytestmark = pytest.mark.soak

LOOPS = ["uneven", "short", "padded"]


def check(
    report: dict[str, Any],
    truth: dict[str, Any],
    basis: str,
    *,
    between_s: tuple[float, float],
    first: int = 0,
) -> None:
    """Of the steps from the `first` on, whose window is as long as this at least, and at most."""
    readings = report["readings"]
    real, computed = (sum(truth[name][first:]) for name in ("real", "computed"))
    steps = len(truth["real"]) - first

    def value(key: str) -> float:
        assert "value" in readings[key], readings[key]
        assert readings[key]["basis"] == basis
        return float(readings[key]["value"])

    tokens_per_s, step_s = value("throughput.tokens_per_s"), value("time.step_s")
    assert value("steps.count") == steps
    assert value("tokens.per_step") == pytest.approx(real / steps, rel=1e-9)
    assert value("tokens.padding_frac") == pytest.approx(1 - real / computed, rel=1e-9)
    least_s, most_s = between_s
    assert real / most_s <= tokens_per_s <= real / least_s
    assert computed / most_s <= value("throughput.computed_tokens_per_s") <= computed / least_s
    assert tokens_per_s * step_s == pytest.approx(value("tokens.per_step"), rel=1e-9)
    low, high = (readings["throughput.tokens_per_s"][end] for end in ("low", "high"))
    assert low <= tokens_per_s <= high


@pytest.mark.parametrize("way", ["span", "end"])
@pytest.mark.parametrize("loop", LOOPS)
def test_a_meters_figures_are_true(lab: Lab, loop: str, way: str) -> None:
    done = lab.run(*script("truth", loop, way, "truth.json"))
    assert done.returncode == 0, done.stderr.decode()
    truth = json.loads((lab.path / "truth.json").read_text())
    check(lab.report(truth["run"]), truth, "measured", between_s=bounds_s([truth]))


@pytest.mark.parametrize("loop", LOOPS)
def test_figures_from_printed_lines_are_true(lab: Lab, loop: str) -> None:
    """Lines are timed when they are read, by a reader that may have to wait for a core: no line is
    read before it was printed, and both kinds of time make windows of about a length."""
    assert lab.record(*script("truth", loop, "print", "truth.json")).returncode == 0
    truth = json.loads((lab.path / "truth.json").read_text())
    steps = Run.open(lab.path / "run").steps("output")
    # Lines that come in one read with the first open the window together with it.
    opened_by = int(steps["index"][0] - steps["steps"][0])
    start_s, end_s = int(steps["start_ns"][0]) / 1e9, int(steps["end_ns"][-1]) / 1e9
    printed_s = truth["amids_s"]
    assert start_s >= printed_s[opened_by]
    assert end_s >= printed_s[-1]
    read_s, took_s = end_s - start_s, printed_s[-1] - printed_s[opened_by]
    assert took_s / 2 < read_s < 2 * took_s  # a half of the lines would be less
    about = (read_s * (1 - 1e-9), read_s * (1 + 1e-9))
    check(lab.report(), truth, "derived", between_s=about, first=opened_by + 1)


@pytest.mark.parametrize("loop", LOOPS)
def test_a_meter_under_a_recorder_says_what_it_says_alone(lab: Lab, loop: str) -> None:
    assert lab.record(*script("truth", loop, "span", "truth.json")).returncode == 0
    truth = json.loads((lab.path / "truth.json").read_text())
    assert truth["run"] == str(lab.path / "run")
    check(lab.report(), truth, "measured", between_s=bounds_s([truth]))
