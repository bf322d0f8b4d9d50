"""What replay promises, against the recording read here independently."""

from __future__ import annotations

import csv
import gzip
import json
import shutil
import time
from pathlib import Path

import pytest

from ergmeter.errors import FormatError, NotMeasurable, UsageError
from ergmeter.ports import Probe, ProbeRequest
from ergmeter.probes.replay import (
    ReplayProbe,
    recorded_device,
    recorded_samples,
    recorded_steps,
)
from ergmeter.records import Sample

H200 = Path(__file__).parents[2] / "data" / "h200"


def rows(part: str) -> list[dict[str, str]]:
    with gzip.open(H200 / f"h200_{part}.csv.gz", "rt", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def samples() -> list[Sample]:
    return recorded_samples(H200)


def probe_of(**options: object) -> ReplayProbe:
    return ReplayProbe(ProbeRequest(pid=1, path="/", options={"path": str(H200), **options}))


def played(probe: Probe) -> list[Sample]:
    return [record for record in probe.read() if isinstance(record, Sample)]


def test_every_row_becomes_samples_in_order_of_time(samples: list[Sample]) -> None:
    assert len(samples) == 2 * len(rows("samples")) + len(rows("gpm")) == 2 * 11_997 + 1_471
    times = [sample.t_ns for sample in samples]
    assert times == sorted(times)
    assert {sample.device for sample in samples} == {"replay:h200"}


@pytest.mark.parametrize("number", [0, 2_000, 7_777, 11_996])
def test_a_rows_quick_readings_stand_at_its_own_time(samples: list[Sample], number: int) -> None:
    row = rows("samples")[number]
    (sample,) = [sample for sample in samples if sample.t_ns == int(row["t_ns"])]
    assert sample.power_w == pytest.approx(float(row["power_instant_mw"]) / 1000)
    assert sample.power_average_w == pytest.approx(float(row["power_usage_mw"]) / 1000)
    assert sample.memory_bytes == int(row["memory_used_bytes"])
    assert sample.busy_frac == pytest.approx(float(row["gpu_util_pct"]) / 100)
    assert sample.clock_hz == pytest.approx(float(row["sm_clock_mhz"]) * 1e6)
    assert sample.temperature_c == float(row["temperature_c"])
    assert sample.throttled == int(row["throttle_reasons"])
    assert (sample.energy_j, sample.tensor_frac) == (None, None)


@pytest.mark.parametrize("number", [0, 2_000, 7_777, 11_996])
def test_a_rows_energy_stands_at_the_middle_of_its_read(samples: list[Sample], number: int) -> None:
    row = rows("samples")[number]
    began, ended = int(row["energy_read_start_ns"]), int(row["energy_read_end_ns"])
    found = [s for s in samples if s.energy_j is not None and began <= s.t_ns <= ended]
    (sample,) = found
    assert sample.t_ns == pytest.approx((began + ended) / 2, abs=1)
    assert sample.t_ns != int(row["t_ns"])
    assert sample.energy_j == pytest.approx(float(row["energy_counter_mj"]) / 1000)
    assert sample.power_w is None


def test_the_first_row_is_what_its_text_says(samples: list[Sample]) -> None:
    first = next(sample for sample in samples if sample.power_w is not None)
    assert (first.t_ns, first.power_w, first.power_average_w) == (478_638, 76.775, 76.631)
    counter = next(sample for sample in samples if sample.energy_j is not None)
    assert (counter.t_ns, counter.energy_j) == (13_181_308, 3599.052)


def test_tensor_activity_is_a_fraction_at_the_end_of_its_interval(samples: list[Sample]) -> None:
    by_time = {s.t_ns: s.tensor_frac for s in samples if s.tensor_frac is not None}
    expected = {int(row["end_ns"]): float(row["tensor_util"]) / 100 for row in rows("gpm")}
    assert by_time == pytest.approx(expected)
    assert max(by_time.values()) == pytest.approx(0.46084)


def test_steps_come_with_their_phase_tokens_and_loss() -> None:
    steps = recorded_steps(H200)
    assert len(steps) == 869
    phase, first = steps[0]
    assert phase == "full_bf16_1b"
    assert (first.start_ns, first.end_ns, first.index) == (17_113_660_773, 19_857_747_824, 0)
    assert (first.tokens_computed, first.samples, first.phase) == (16_384, 8, "train")
    assert first.loss == pytest.approx(10.801048278808594)
    assert (first.tokens_real, first.tokens_loss) == (None, None)
    phase, last = steps[-1]
    assert (phase, last.index, last.tokens_computed, last.loss) == ("tiny_async", 239, 512, None)


def test_every_step_lies_in_the_window_of_its_phase() -> None:
    phases = json.loads((H200 / "h200_trace.json").read_text())["phases"]
    windows = {phase["name"]: (phase["start_ns"], phase["end_ns"]) for phase in phases}
    assert len(windows) == 6
    for phase, step in recorded_steps(H200):
        start_ns, end_ns = windows[phase]
        assert start_ns <= step.start_ns < step.end_ns <= end_ns


def test_the_device_is_the_one_recorded() -> None:
    device = recorded_device(H200)
    assert (device.id, device.kind, device.name) == ("replay:h200", "gpu", "NVIDIA H200")
    assert device.facts["driver"] == "580.159.04"
    assert probe_of(speed=2).devices[0].facts["speed"] == 2.0


def test_plain_files_and_the_path_of_the_samples_give_the_same_recording(
    tmp_path: Path, samples: list[Sample]
) -> None:
    for file in H200.glob("*.csv.gz"):
        (tmp_path / file.stem).write_bytes(gzip.decompress(file.read_bytes()))
    shutil.copy(H200 / "h200_trace.json", tmp_path)
    assert recorded_samples(tmp_path) == samples
    assert recorded_samples(tmp_path / "h200_samples.csv") == samples
    assert recorded_samples(H200 / "h200_samples.csv.gz") == samples


def test_at_speed_one_it_plays_in_real_time(samples: list[Sample]) -> None:
    before_ns = time.monotonic_ns()
    probe: Probe = probe_of()
    made_ns = time.monotonic_ns()
    time.sleep(0.25)
    heard = played(probe)
    now_ns = time.monotonic_ns()

    due = samples[: len(heard)]
    assert due[-1].t_ns <= now_ns - before_ns
    assert samples[len(heard)].t_ns > 250_000_000
    starts_ns = {sample.t_ns - recorded.t_ns for sample, recorded in zip(heard, due, strict=True)}
    assert len(starts_ns) == 1
    assert before_ns <= starts_ns.pop() <= made_ns
    assert [sample.power_w for sample in heard] == [recorded.power_w for recorded in due]


def test_at_a_high_speed_the_whole_recording_plays_once(samples: list[Sample]) -> None:
    probe = probe_of(speed=1000)
    heard: list[Sample] = []
    deadline = time.monotonic() + 30
    while len(heard) < len(samples) and time.monotonic() < deadline:
        heard += played(probe)
    assert [sample.energy_j for sample in heard] == [sample.energy_j for sample in samples]
    assert probe.read() == []
    span_s = (heard[-1].t_ns - heard[0].t_ns) / 1e9
    recorded_s = (samples[-1].t_ns - samples[0].t_ns) / 1e9
    assert span_s == pytest.approx(recorded_s / 1000, rel=1e-6)


def test_no_recording_is_refused_with_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(NotMeasurable, match="no recording to replay: give the option"):
        ReplayProbe(ProbeRequest(pid=1, path="/"))
    with pytest.raises(NotMeasurable, match=r"no recording at .*absent"):
        probe_of(path=str(tmp_path / "absent"))
    with pytest.raises(FormatError, match=r"one NAME_samples\.csv .* found none"):
        probe_of(path=str(tmp_path))


@pytest.mark.parametrize("speed", [0, -1, "nan"])
def test_a_speed_that_never_arrives_is_refused(speed: float | str) -> None:
    with pytest.raises(UsageError, match="speed"):
        probe_of(speed=speed)


def test_a_broken_row_is_named_by_file_and_line(tmp_path: Path) -> None:
    text = gzip.decompress((H200 / "h200_samples.csv.gz").read_bytes()).decode()
    lines = text.splitlines()[:4]
    lines[2] = lines[2].replace("76631", "lots", 1)
    (tmp_path / "h200_samples.csv").write_text("\n".join(lines))
    with pytest.raises(FormatError, match=r"h200_samples\.csv, line 3: .*lots"):
        recorded_samples(tmp_path)


def test_a_truncated_archive_is_named(tmp_path: Path) -> None:
    data = (H200 / "h200_samples.csv.gz").read_bytes()
    (tmp_path / "h200_samples.csv.gz").write_bytes(data[: len(data) // 2])
    with pytest.raises(FormatError, match=r"h200_samples\.csv\.gz: cannot be read"):
        recorded_samples(tmp_path)


def test_a_recording_without_its_trace_has_the_name_of_its_files(tmp_path: Path) -> None:
    shutil.copy(H200 / "h200_samples.csv.gz", tmp_path)
    assert recorded_device(tmp_path).name == "h200"
