"""What `bench/device.py` printed on an H200, from its runs again: the same numbers."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ergmeter.metrics.step_energy import energy_of
from ergmeter.metrics.summarize import evidence_of, summarize
from ergmeter.records import Reading
from ergmeter.runlog.reader import Run

DATA = Path(__file__).parents[2] / "data" / "h200_run" / "bench.tar.gz"
NS = 1e9


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
    ("length", "within"), [("0.05", 0.03), ("0.2", 0.03), ("1", 0.01)], ids=["50ms", "200ms", "1s"]
)
def test_bursts_add_up_to_the_counter_less_idle_as_printed(
    bench: Path, length: str, within: float
) -> None:
    said = printed(bench, "bursts")[f"{length} s"]
    evidence = evidence_of(Run.open(bench / f"bursts-{length}s"))
    steps = evidence.all_steps
    bursts = steps.where(steps["phase"] == 0)
    start_ns, end_ns = bursts.columns["start_ns"], bursts.columns["end_ns"]
    each = energy_of(evidence, start_ns, end_ns)  # type: ignore[arg-type]
    # By hand, from the counter as it was read beside it.
    began, ended = said["began"], said["ended"]
    rest_s = (ended[0] - began[0] - float((end_ns - start_ns).sum())) / NS
    truth_j = ended[1] - began[1] - said["rest_w"] * rest_s
    assert truth_j == pytest.approx(said["truth_j"], rel=1e-6)
    assert each.joules.sum() == pytest.approx(said["ours_j"], rel=1e-6)
    assert each.joules.sum() == pytest.approx(truth_j, rel=within)
    assert np.std(each.joules) / np.mean(each.joules) == pytest.approx(said["spread"], rel=1e-6)
    assert not np.isnan(bursts["host_end_ns"]).any()  # timed by the device


def test_every_rung_of_the_ladder_is_as_printed_and_mfu_below_the_tensor_pipes(bench: Path) -> None:
    found = summarize(Run.open(bench / "ladder")).readings
    said = printed(bench, "ladder")
    assert len(said) == 11
    for key, value in said.items():
        one = found[key]
        assert isinstance(one, Reading), (key, one)
        assert one.value == pytest.approx(value, rel=1e-6), key
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


def test_losses_were_the_same_to_the_last_bit(bench: Path) -> None:
    said = printed(bench, "losses")
    assert len(said["within"]) == 30
    assert said["within"] == said["without"]
