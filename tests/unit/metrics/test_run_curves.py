"""Curves of runs over steps, tokens and time: against runs whose curves are known by hand."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from ergmeter.compare.entry import Entry, Group
from ergmeter.compare.run_curves import (
    AXES,
    Axis,
    ComparedCurves,
    Curve,
    RunCurve,
    RunCurves,
    RunProgress,
    compared_curves,
)
from ergmeter.compare.sources import read_entries
from ergmeter.errors import NotMeasurable
from ergmeter.metrics.summarize import evidence_of
from ergmeter.records import Device, Mark, Missing, Sample, Step
from ergmeter.runlog.reader import Run
from ergmeter.runlog.settings import Settings
from tests.runs import GPU, add_writer, even_steps, make_run, reading, run_of

S = 10**9
OTHER = Device("GPU-1", "gpu", "Test GPU", "nvml", {"power_field": "instant"})


def step(start_s: float, end_s: float, **fields: object) -> Step:
    return Step(round(start_s * S), round(end_s * S), **fields)  # type: ignore[arg-type]


def entry(path: Path) -> Entry:
    return Entry(str(path), str(path), {}, {}, path)


def traced(run: Run, settings: Settings | None = None) -> RunCurves:
    (found,) = compared_curves([Group("g", (entry(run.path),))], settings).runs
    return found


def course(run: Run, curve: Curve, settings: Settings | None = None) -> RunCurve:
    found = traced(run, settings).curves[curve]
    assert isinstance(found, RunCurve), found
    return found


def why(run: Run, curve: Curve) -> str:
    found = traced(run).curves[curve]
    assert isinstance(found, Missing), found
    return found.reason


def at(run: Run, axis: Axis, *t_s: float) -> list[float]:
    found: list[float] = RunProgress(evidence_of(run)).at(axis, np.array(t_s)).tolist()
    return found


def test_within_a_step_a_run_is_on_its_way_and_between_two_it_stands(tmp_path: Path) -> None:
    # The clock of the run is 10 s on when its first step begins.
    steps = [step(10, 11, tokens_real=100), step(12, 13, tokens_real=300)]
    run = run_of(tmp_path / "run", steps=steps)
    assert at(run, "time", 0, 1.5) == [0, 1.5]
    assert at(run, "step", 0, 0.5, 1, 1.5, 2.5, 3, 9) == [0, 0.5, 1, 1, 1.5, 2, 2]
    assert at(run, "tokens", 0, 0.5, 1, 1.5, 2.5, 3) == [0, 50, 100, 100, 250, 400]


def test_rows_that_overlap_do_not_lead_back(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", steps=[step(0, 3), step(2, 4), step(2.5, 5)])
    made = at(run, "step", *np.linspace(0, 5, 51))
    assert made == sorted(made)
    assert (made[0], made[30], made[50]) == (0, 1, 3)


def test_what_was_learned_in_the_warm_up_counts(tmp_path: Path) -> None:
    steps = even_steps(20, tokens_real=100, loss=2.0)
    run = run_of(tmp_path / "run", steps=steps, settings={"warmup_steps": 8})
    losses = course(run, "loss")
    assert losses.x["tokens"].tolist() == pytest.approx([100.0 * n for n in range(1, 21)])
    assert losses.x["time"][0] == pytest.approx(1.0)
    assert losses.readings == 20


def test_tokens_are_of_all_ranks_and_steps_of_one(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    for rank, tokens in ((0, 100), (1, 50)):
        add_writer(path, steps=even_steps(10, tokens_real=tokens, rank=rank))
    run = Run.open(path)
    assert at(run, "step", 10) == [10]
    assert at(run, "tokens", 2.5, 10) == [375, 1500]
    assert course(run, "tokens_per_s").values.tolist() == pytest.approx([150.0] * 10)


def test_a_rate_is_the_tokens_of_a_step_over_the_time_since_the_last(tmp_path: Path) -> None:
    # Steps of 1 s with 3 s before the third, in which something else was done.
    steps = [step(0, 1, tokens_real=80), step(1, 2, tokens_real=80), step(5, 6, tokens_real=40)]
    found = course(run_of(tmp_path / "run", steps=steps), "tokens_per_s")
    assert found.values.tolist() == pytest.approx([80.0, 80.0, 10.0])
    assert found.x["step"].tolist() == pytest.approx([1, 2, 3])
    assert found.x["tokens"].tolist() == pytest.approx([80, 160, 200])
    assert found.x["time"].tolist() == pytest.approx([1, 2, 6])
    assert (found.lowest, found.highest, found.last) == pytest.approx((10, 80, 10))
    assert (found.basis, found.note) == ("measured", "real tokens")


def test_a_printed_line_has_the_rate_since_the_line_before_it(tmp_path: Path) -> None:
    lines = [step(0, 4, steps=10, tokens_computed=1000), step(4, 6, steps=10, tokens_computed=1000)]
    path = make_run(tmp_path / "run")
    add_writer(path, steps=lines, stream="output")
    run = Run.open(path)
    assert course(run, "tokens_per_s").values.tolist() == pytest.approx([250.0, 500.0])
    assert course(run, "step_s").values.tolist() == pytest.approx([0.4, 0.2])
    assert course(run, "step_s").x["step"].tolist() == pytest.approx([10, 20])
    assert course(run, "tokens_per_s").note == "tokens as printed"


def test_declared_tokens_are_assumed(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", steps=even_steps(10))
    assert why(run, "tokens_per_s").startswith("the steps have no count of tokens")
    found = course(run, "tokens_per_s", Settings(tokens_per_step=500))
    assert (found.basis, found.highest) == ("assumed", 500.0)
    assert traced(run).lacking.keys() == {"tokens"}
    assert not traced(run, Settings(tokens_per_step=500)).lacking


def test_power_begins_with_the_first_step_and_ends_with_the_last(tmp_path: Path) -> None:
    samples = [Sample(t * S, GPU.id, power_w=100.0 + t) for t in range(20)]
    steps = [step(5, 10, tokens_real=10), step(10, 15, tokens_real=30)]
    run = run_of(tmp_path / "run", steps=steps, samples=samples, devices=[GPU])
    found = course(run, "power_w")
    assert found.x["time"].tolist() == list(range(11))
    assert found.values.tolist() == [105.0 + n for n in range(11)]
    assert found.x["step"].tolist() == pytest.approx([n / 5 for n in range(11)])
    assert found.x["tokens"].tolist() == pytest.approx([0, 2, 4, 6, 8, 10, 16, 22, 28, 34, 40])
    assert found.basis == "measured"


def test_what_several_devices_drew_is_added_up(tmp_path: Path) -> None:
    samples = [Sample(t * S, GPU.id, power_w=100.0) for t in range(11)]
    samples += [Sample(t * S, OTHER.id, power_w=20.0 * t) for t in range(0, 11, 2)]
    run = run_of(tmp_path / "run", steps=even_steps(10), samples=samples, devices=[GPU, OTHER])
    found = course(run, "power_w")
    # The other is read every 2 s; between its readings it is taken to go straight.
    assert found.values.tolist() == [100.0 + 20 * t for t in range(11)]
    assert found.basis == "derived"
    assert found.note.startswith("sum of 2 devices")


def test_where_one_of_several_was_not_read_there_is_no_sum(tmp_path: Path) -> None:
    samples = [Sample(t * S // 10, GPU.id, power_w=100.0) for t in range(400)]
    there = [t for t in range(400) if not 100 < t < 200]
    samples += [Sample(t * S // 10, OTHER.id, power_w=50.0) for t in there]
    steps = even_steps(40)
    run = run_of(tmp_path / "run", steps=steps, samples=samples, devices=[GPU, OTHER])
    found = course(run, "power_w")
    told = np.isfinite(found.values)
    assert set(found.values[told]) == {150.0}
    (place,) = found.x["time"][~told]
    assert 10 < place < 20
    assert not ((found.x["time"][told] > 10) & (found.x["time"][told] < 20)).any()


def test_a_sum_that_lacks_a_device_is_none(tmp_path: Path) -> None:
    samples = [Sample(t * S, GPU.id, power_w=100.0) for t in range(11)]
    silent = Device("GPU-1", "gpu", "Test GPU", "nvml", {"absent": {"a vGPU": ["power_w"]}})
    samples += [Sample(t * S, OTHER.id, memory_bytes=5) for t in range(11)]
    run = run_of(tmp_path / "run", steps=even_steps(10), samples=samples, devices=[GPU, silent])
    assert why(run, "power_w") == "no power of Test GPU [GPU-1]: a vGPU"


def test_a_counter_alone_is_power_by_how_it_grew(tmp_path: Path) -> None:
    samples = [Sample(t * S, GPU.id, energy_j=70.0 * t) for t in range(11)]
    run = run_of(tmp_path / "run", steps=even_steps(10), samples=samples, devices=[GPU])
    found = course(run, "power_w")
    assert found.values.tolist() == pytest.approx([70.0] * 10)
    assert (found.basis, found.x["time"][0]) == ("derived", 1.0)


def test_a_run_that_is_all_warm_up_has_its_pace(tmp_path: Path) -> None:
    steps = even_steps(5, tokens_real=100)
    run = run_of(tmp_path / "run", steps=steps, settings={"warmup_steps": 50})
    found = course(run, "tokens_per_s")
    assert found.values.tolist() == pytest.approx([100.0] * 5)
    assert found.note == "real tokens"  # and not of how many ranks, which others may differ in


def test_memory_is_that_of_the_fullest_device_as_the_comparison_has_it(tmp_path: Path) -> None:
    samples = [Sample(t * S, GPU.id, memory_bytes=1000 + t) for t in range(11)]
    samples += [Sample(t * S, OTHER.id, memory_bytes=1005 if t != 4 else 2000) for t in range(11)]
    run = run_of(tmp_path / "run", steps=even_steps(10), samples=samples, devices=[GPU, OTHER])
    found = course(run, "device_bytes")
    assert found.highest == 2000 == reading(run, "memory.device_peak_bytes").value
    assert found.x["step"][int(found.values.argmax())] == pytest.approx(4)
    assert found.note == "of GPU-1, the fullest of 2; in use by all programs"
    assert "process" in why(run, "host_bytes")


def test_a_spike_of_one_reading_in_many_is_kept_on_every_axis(tmp_path: Path) -> None:
    samples = [Sample(t * S // 100, GPU.id, power_w=300.0) for t in range(20_000)]
    samples[12_345] = Sample(12_345 * S // 100, GPU.id, power_w=699.0)
    steps = even_steps(200, tokens_real=1000)
    run = run_of(tmp_path / "run", steps=steps, samples=samples, devices=[GPU])
    found = course(run, "power_w")
    place = int(found.values.argmax())
    assert found.values[place] == 699.0
    assert found.x["time"][place] == pytest.approx(123.45)
    assert found.x["step"][place] == pytest.approx(123.45)
    assert found.x["tokens"][place] == pytest.approx(123_450)
    assert found.readings == 20_000
    assert found.is_bounded
    assert len(found.values) <= 600


def test_an_inference_run_has_time_and_no_steps(tmp_path: Path) -> None:
    steps = even_steps(10, phase="decode", tokens_real=10)
    samples = [Sample(t * S, GPU.id, power_w=100.0) for t in range(11)]
    run = run_of(tmp_path / "run", steps=steps, samples=samples, devices=[GPU])
    assert course(run, "power_w").x.keys() == {"time"}
    assert why(run, "tokens_per_s") == "an inference run has requests and no steps"


def test_a_run_without_steps_has_none_of_it_and_says_why(tmp_path: Path) -> None:
    samples = [Sample(t * S, GPU.id, power_w=100.0) for t in range(11)]
    run = run_of(tmp_path / "run", samples=samples, devices=[GPU], marks=[Mark(10 * S, "m")])
    assert why(run, "power_w").startswith("no steps were recorded")


def test_a_directory_that_is_gone_is_a_reason(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", steps=even_steps(10))
    shutil.rmtree(run.path)
    assert str(run.path) in why(run, "loss")


def test_of_several_trainings_each_has_its_own_curve(tmp_path: Path) -> None:
    path = make_run(tmp_path / "run")
    for number, seconds in ((1, 1.0), (2, 2.0)):
        steps = even_steps(20, seconds=seconds, tokens_real=100)
        add_writer(path, steps=steps, header={"training": {"id": f"t{number}"}})
    found = read_entries([path]).entries
    curves = [one.curves["tokens_per_s"] for one in compared_curves([Group("g", found)]).runs]
    rates = [one.highest for one in curves if isinstance(one, RunCurve)]
    assert rates == [one.value("throughput.tokens_per_s") for one in found]
    assert sorted(rates) == [50.0, 100.0]


def chosen(*sizes: int) -> tuple[list[tuple[int, int]], ComparedCurves]:
    """Which of so many runs in groups are traced. None of them is there, which costs nothing."""
    groups = [
        Group(f"g{n}", tuple(entry(Path(f"/none/{n}/{run}")) for run in range(size)))
        for n, size in enumerate(sizes)
    ]
    found = compared_curves(groups)
    return [(one.group, one.repeat) for one in found.runs], found


def test_of_many_runs_the_first_of_each_group_are_taken_in_turn() -> None:
    assert chosen(2, 1)[0] == [(0, 0), (0, 1), (1, 0)]
    places, found = chosen(9, 2, 9)  # 2 and 5 and 5 make 12
    assert places == [
        *((0, n) for n in range(5)),
        *((1, n) for n in range(2)),
        *((2, n) for n in range(5)),
    ]
    assert found.left_out == 8
    assert [len(chosen(*[1] * n)[0]) for n in (8, 9)] == [8, 8]
    assert len(chosen(20)[0]) == 6


def test_a_row_of_a_ledger_has_no_course(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", steps=even_steps(10))
    row = Entry("energy.csv line 2", "energy.csv", {}, {})
    found = compared_curves([Group("g", (row, entry(run.path)))])
    assert [one.source for one in found.runs] == [str(run.path)]
    assert (found.left_out, found.without) == (0, 1)


def test_step_time_stands_in_where_tokens_are_not_known_of_all(tmp_path: Path) -> None:
    known = run_of(tmp_path / "known", steps=even_steps(10, tokens_real=5))
    silent = run_of(tmp_path / "silent", steps=even_steps(10))
    both = [Group(run.path.name, (entry(run.path),)) for run in (known, silent)]
    assert compared_curves(both[:1]).curves == ("tokens_per_s",)
    assert compared_curves(both).curves == ("tokens_per_s", "step_s")
    assert compared_curves(both[1:]).curves == ("step_s",)


def test_the_memory_of_a_host_is_not_drawn_beside_that_of_a_device(tmp_path: Path) -> None:
    host = Device("p", "process", "the program", "process")
    here = [Sample(t * S, host.id, memory_bytes=10) for t in range(11)]
    there = [Sample(t * S, GPU.id, memory_bytes=10) for t in range(11)]
    cpu = run_of(tmp_path / "cpu", steps=even_steps(10), samples=here, devices=[host])
    gpu = run_of(
        tmp_path / "gpu", steps=even_steps(10), samples=[*here, *there], devices=[host, GPU]
    )
    both = [Group(run.path.name, (entry(run.path),)) for run in (cpu, gpu)]
    assert "host_bytes" in compared_curves(both[:1]).curves
    assert compared_curves(both).curves[-1] == "device_bytes"


def test_rows_that_were_lost_leave_no_place_on_an_axis(tmp_path: Path) -> None:
    run = run_of(
        tmp_path / "run",
        steps=even_steps(10, tokens_real=5),
        marks=[Mark(5 * S, "steps_dropped", "3 rows were lost")],
    )
    progress = RunProgress(evidence_of(run))
    for axis in AXES[:2]:
        with pytest.raises(NotMeasurable, match="3 rows were lost"):
            progress.at(axis, np.zeros(1))
    assert traced(run).lacking.keys() == {"step", "tokens"}
