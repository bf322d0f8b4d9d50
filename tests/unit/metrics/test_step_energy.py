"""The energy of each step, of idle, and what is left of it: by hand, and by a real recording."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest

from ergmeter.metrics.definitions.energy_breakdown import steps_energy
from ergmeter.metrics.device_energy import counter_curve, power_curve
from ergmeter.metrics.evidence.evidence import Evidence
from ergmeter.metrics.summarize import summarize
from ergmeter.records import Device, Sample, Step, Window
from ergmeter.runlog.reader import Run
from ergmeter.runlog.settings import Settings
from ergmeter.views.documents import export
from tests.runs import GPU, add_writer, even_steps, reading, reason, run_of

S = 10**9


def evidence_of(run: Run) -> Evidence:
    return Evidence(run, Settings())


def samples(seconds: float, watts: Any, *, every_s: float = 0.02) -> list[Sample]:
    """A device whose counter refreshes every 100 ms and whose power is known at each instant."""
    t_s = np.arange(0.0, seconds + 1e-9, every_s)
    power = np.array([watts(float(t)) for t in t_s])
    drawn = np.append(0.0, np.cumsum(np.diff(t_s) * power[:-1]))
    shown = np.interp(np.floor(t_s * 10 + 1e-9) / 10, t_s, drawn)
    return [
        Sample(round(t * S), GPU.id, power_w=float(p), energy_j=1e6 + float(j))
        for t, p, j in zip(t_s, power, shown, strict=True)
    ]


def test_each_step_has_its_own_and_together_they_are_the_counters(tmp_path: Path) -> None:
    def watts(t_s: float) -> float:
        return 600.0 if int(t_s) % 2 else 200.0

    run = run_of(
        tmp_path / "run",
        steps=even_steps(20, seconds=1.0, tokens_computed=10),
        samples=samples(21.0, watts),
        devices=[GPU],
    )
    each = steps_energy(evidence_of(run))
    assert each.joules == pytest.approx([200.0, 600.0] * 10, rel=0.12)
    assert each.joules.sum() == pytest.approx(10 * 800, rel=0.01)
    assert (each.low_j <= each.joules).all()
    assert (each.joules <= each.high_j).all()
    truth = np.array([200.0, 600.0] * 10)
    assert ((each.low_j <= truth + 1e-6) & (truth <= each.high_j + 1e-6)).all()
    assert each.basis == "measured"
    assert reading(run, "energy.step_p95_j").value == pytest.approx(600, rel=0.12)


def test_exported_steps_have_their_energy_once_for_all_ranks(tmp_path: Path) -> None:
    path = tmp_path / "run"
    steps = even_steps(10, seconds=1.0, tokens_computed=10)
    run_of(path, steps=steps, samples=samples(11.0, lambda _: 300.0), devices=[GPU])
    add_writer(path, steps=[replace(one, rank=1) for one in steps], header={"writer": "other"})
    run = Run.open(path)
    files = list(export(run, summarize(run), tmp_path / "out", form="parquet"))
    table = pyarrow.parquet.read_table(next(one for one in files if one.stem == "steps"))
    by_rank: dict[int, list[float | None]] = {0: [], 1: []}
    for rank, joules in zip(table["rank"].to_pylist(), table["energy_j"].to_pylist(), strict=True):
        by_rank[rank].append(joules)
    assert by_rank[1] == [None] * 10
    assert sum(one for one in by_rank[0] if one) == pytest.approx(3000, rel=0.01)
    by_energy = zip(table["energy_j"].to_pylist(), table["energy_basis"].to_pylist(), strict=True)
    assert {basis for joules, basis in by_energy if joules is not None} == {"measured"}
    assert table["energy_basis"].null_count == table["energy_j"].null_count
    assert reading(run, "energy.run_j").value == pytest.approx(3000, rel=0.01)


def test_steps_shorter_than_a_refresh_are_not_zero(tmp_path: Path) -> None:
    run = run_of(
        tmp_path / "run",
        steps=even_steps(200, seconds=0.02, tokens_computed=10),
        samples=samples(5.0, lambda _: 400.0),
        devices=[GPU],
    )
    each = steps_energy(evidence_of(run))
    # But for the first refresh, of which nobody saw the beginning.
    assert each.joules[5:] == pytest.approx(np.full(195, 8.0), rel=0.2)
    found = reading(run, "energy.step_median_j")
    assert found.value == pytest.approx(8.0, rel=0.05)
    assert found.low is not None
    assert found.high is not None
    assert found.low <= 8.0 <= found.high
    assert found.high > 2 * found.low  # a step of 20 ms is known to a refresh, and no better


def test_a_step_beyond_the_readings_has_none(tmp_path: Path) -> None:
    run = run_of(
        tmp_path / "run",
        steps=even_steps(10, seconds=1.0, tokens_computed=10),
        samples=[one for one in samples(11.0, lambda _: 400.0) if one.t_ns > 2.5 * S],
        devices=[GPU],
    )
    joules = steps_energy(evidence_of(run)).joules
    assert np.isnan(joules).tolist() == [True] * 3 + [False] * 7


def test_many_windows_at_once_are_as_one_by_one() -> None:
    t_ns = np.arange(0, 10 * S, S // 50)
    dice = np.random.default_rng(0)
    power = dice.uniform(100, 700, len(t_ns))
    starts = np.sort(dice.integers(0, 9 * S, 50))
    ends = starts + dice.integers(S // 100, S, 50)
    integral = power_curve(t_ns, power)
    counter = counter_curve(t_ns, np.floor(integral.at(t_ns) / 30) * 30, shape=integral)
    gap = power_curve(np.append(t_ns[:100], t_ns[300:]), np.append(power[:100], power[300:]))
    for curve in (integral, counter, gap):
        each = np.stack(curve.over_each(starts, ends))
        for start_ns, end_ns, found in zip(starts, ends, each.T, strict=True):
            try:
                one = curve.over(Window(int(start_ns), int(end_ns)))
            except Exception:  # noqa: BLE001  whatever refuses one window
                assert np.isnan(found).all()
            else:
                assert found == pytest.approx([one.joules, one.low_j, one.high_j])
    assert np.isnan(gap.over_each(starts, ends)[0]).any()


def idle_run(path: Path, device: Device, *, idle: bool) -> Run:
    """Ten seconds at 500 W, then four of which the first draws 300 W and the rest 120 W."""

    def watts(t_s: float) -> float:
        return 500.0 if t_s < 10 else 300.0 if t_s < 11 else 120.0

    steps = even_steps(10, seconds=1.0, tokens_computed=10)
    if idle:
        steps.append(Step(10 * S, 15 * S, phase="idle"))
    return run_of(path, steps=steps, samples=samples(15.0, watts), devices=[device])


def test_net_is_gross_without_what_the_devices_draw_at_rest(tmp_path: Path) -> None:
    run = idle_run(tmp_path / "run", GPU, idle=True)
    assert reading(run, "energy.idle_w").value == pytest.approx(120, rel=0.02)
    net = reading(run, "energy.net_j")
    assert net.value == pytest.approx(10 * (500 - 120), rel=0.02)
    assert net.basis == "derived"
    assert "idle in this run" in net.note
    assert reading(run, "energy.net_joules_per_token").value == pytest.approx(38, rel=0.02)


def exported(run: Run, target: Path) -> Any:
    files = export(run, summarize(run), target, form="parquet")
    return pyarrow.parquet.read_table(next(one for one in list(files) if one.stem == "steps"))


def test_exported_steps_are_those_whose_energy_is_reported(tmp_path: Path) -> None:
    """Rank 0 is gone after three steps of 100 to 300 W; rank 1 made ten, of 100 to 1000 W."""
    path = tmp_path / "run"
    steps = even_steps(10, seconds=1.0, tokens_computed=10)
    watts = samples(11.0, lambda t_s: 100.0 * (int(t_s + 1e-9) + 1))
    run_of(path, steps=steps[:3], samples=watts, devices=[GPU])
    add_writer(path, steps=[replace(one, rank=1) for one in steps], header={"writer": "other"})
    run = Run.open(path)
    table = exported(run, tmp_path / "out")
    own = [
        joules
        for rank, joules in zip(
            table["rank"].to_pylist(), table["energy_j"].to_pylist(), strict=True
        )
        if rank == 1
    ]
    assert table["energy_j"].null_count == 3
    assert float(np.median(own)) == reading(run, "energy.step_median_j").value
    assert float(np.percentile(own, 95)) == reading(run, "energy.step_p95_j").value
    assert sum(own) == pytest.approx(5500, rel=0.03)


def test_requests_have_no_energy_of_a_step(tmp_path: Path) -> None:
    """Two at a time: a second of each is a second of the other."""
    rows = [
        Step(i * S // 2, i * S // 2 + S, phase="decode", index=i, tokens_real=5) for i in range(20)
    ]
    watts = samples(12.0, lambda _: 300.0)
    run = run_of(tmp_path / "run", steps=rows, samples=watts, devices=[GPU])
    for key in ("energy.step_median_j", "energy.step_p95_j"):
        assert reason(run, key).startswith("no training steps: requests overlap")
    assert reading(run, "energy.run_j").value == pytest.approx(10.5 * 300, rel=0.02)
    assert "energy_j" not in exported(run, tmp_path / "out").column_names


def test_printed_lines_have_no_energy_of_a_step(tmp_path: Path) -> None:
    rows = even_steps(10, seconds=1.0, tokens_computed=10)
    watts = samples(11.0, lambda _: 300.0)
    run = run_of(tmp_path / "run", steps=rows, samples=watts, devices=[GPU], stream="output")
    assert "printed line" in reason(run, "energy.step_median_j")
    assert "energy_j" not in exported(run, tmp_path / "out").column_names
