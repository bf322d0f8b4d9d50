"""What `bench/device.py` printed on an H200, from its runs again: the same numbers."""

from __future__ import annotations

import json
import re
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ergmeter.metrics.definitions.energy_breakdown import energy_of
from ergmeter.metrics.summarize import evidence_of, summarize
from ergmeter.records import Reading
from ergmeter.runlog.reader import Run

DATA = Path(__file__).parents[2] / "data" / "h200_run" / "bench.tar.gz"
README = Path(__file__).parents[3] / "bench" / "README.md"
NS = 1e9


def squeezed(path: Path) -> str:
    """A page whose tables are not padded."""
    return re.sub(" +", " ", path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench")
    with tarfile.open(DATA) as packed:
        packed.extractall(folder, filter="data")
    return folder


def printed(bench: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((bench / f"{name}.json").read_text())
    return found


@pytest.mark.parametrize(
    ("length", "within"),
    [("0.05", 0.03), ("0.2", 0.03), ("1", 0.01), ("10", 0.01)],
    ids=["50ms", "200ms", "1s", "10s"],
)
def test_bursts_add_up_to_the_counter_less_idle_as_printed(
    bench: Path, length: str, within: float
) -> None:
    said = printed(bench, "bursts")[f"{length} s"]
    evidence = evidence_of(Run.open(bench / f"bursts-{length}s"))
    steps = evidence.all_steps
    bursts = steps.where(steps["phase"] == 0)
    start_ns, end_ns = bursts.columns["start_ns"], bursts.columns["end_ns"]
    each = energy_of(evidence, start_ns, end_ns)
    # By hand, from the counter as it was read beside it.
    began, ended = said["began"], said["ended"]
    rest_s = (ended[0] - began[0] - float((end_ns - start_ns).sum())) / NS
    truth_j = ended[1] - began[1] - said["rest_w"] * rest_s
    assert truth_j == pytest.approx(said["truth_j"], rel=1e-9)
    assert each.joules.sum() == pytest.approx(said["ours_j"], rel=1e-9)
    assert each.joules.sum() == pytest.approx(truth_j, rel=within)
    assert np.std(each.joules) / np.mean(each.joules) == pytest.approx(said["spread"], rel=1e-9)
    assert not np.isnan(bursts["host_end_ns"]).any()  # timed by the device
    printed_j = f"{said['truth_j']:.1f}", f"{each.joules.sum():.1f}"
    assert " | ".join(printed_j) in squeezed(README)  # what the page says was printed


def test_every_rung_of_the_ladder_is_as_printed_and_mfu_below_the_tensor_pipes(bench: Path) -> None:
    found = summarize(Run.open(bench / "ladder")).readings
    said = printed(bench, "ladder")
    assert len(said) == 11
    for key, value in said.items():
        one = found[key]
        assert isinstance(one, Reading), (key, one)
        # The window now begins at the end of the warm-up, a gap of microseconds before.
        assert one.value == pytest.approx(value, rel=1e-5), key
    step = found["time.in_step_s"]
    assert isinstance(step, Reading)
    assert step.note.endswith("; by the device's clock")
    rungs = [
        said[key]
        for key in (
            "utilization.busy_frac", "activity.sm_frac", "activity.tensor_frac",
            "utilization.mfu_frac",
        )
    ]  # fmt: skip
    assert rungs == sorted(rungs, reverse=True)
    assert said["utilization.mfu_frac"] / said["activity.tensor_frac"] > 0.8


def test_measuring_adds_nothing_that_the_turns_can_tell(bench: Path) -> None:
    """Of a step of 20 ms: the turns that were recorded, and the table made of them."""
    said = printed(bench, "overhead")
    added = {name: 100 * (np.median(one["ratios"]) - 1) for name, one in said.items()}
    assert len(said["20 ms, ergmeter, all of it"]["ratios"]) == 18
    for name, found in added.items():
        assert f"| {name.partition(', ')[2]} | 24.9 | {found:+.3f} |" in squeezed(README), name
    assert abs(added["20 ms, ergmeter, all of it"]) < 0.1
    assert added["20 ms, Zeus, a window each step"] > 30


def test_losses_were_the_same_to_the_last_bit(bench: Path) -> None:
    said = printed(bench, "losses")
    assert len(said["within"]) == 30
    assert said["within"] == said["without"]


@pytest.mark.parametrize(
    ("number", "within"), [(0, 0.005), (1, 0.02), (2, 0.005), (3, 0.005), (4, 0.005)]
)
def test_a_window_of_five_seconds_ends_where_its_last_step_does(
    tmp_path: Path, number: int, within: float
) -> None:
    """The sensor sees the load's end 70 to 100 ms late, a per cent or more of what was drawn.

    The counter was read beside it, at a refresh before and one after; of the second less the
    122 W that the device draws at rest. In the run of number 1 a burst just before the steps hides
    what rest is, so that it is spread by the sensor.
    """
    with tarfile.open(DATA.with_name("edges.tar.gz")) as packed:
        packed.extractall(tmp_path, filter="data")
    read = json.loads((tmp_path / "rows.json").read_text())[number]
    truth_j = read["end_j"] - read["start_j"] - 122.0 * (read["end_ns"] - read["e"]) / NS
    found = summarize(Run.open(tmp_path / f"run{number}")).readings["energy.run_j"]
    assert isinstance(found, Reading)
    assert found.value == pytest.approx(truth_j, rel=within)
    assert found.low is not None
    assert found.high is not None
    assert found.low < truth_j < found.high
