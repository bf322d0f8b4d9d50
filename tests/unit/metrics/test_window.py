"""The training window: what is warm-up, what is cut, and that all figures share its intervals."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ergmeter.compare.comparison import compare
from ergmeter.compare.pairing import CompareOptions
from ergmeter.compare.sources import read_entries
from ergmeter.errors import UsageError
from ergmeter.metrics.evidence.evidence import Evidence
from ergmeter.metrics.evidence.window import TrainingWindow, intersected, slow_start
from ergmeter.metrics.explain.time import time_split
from ergmeter.metrics.summarize import evidence_of, summarize
from ergmeter.records import Device, Mark, Missing, Reading, Sample, Step
from ergmeter.runlog.format import MARKS_FILE
from ergmeter.runlog.reader import Run
from ergmeter.runlog.settings import Settings
from tests.runs import GPU, add_writer, even_steps, make_run, reading, reason

S = 10**9
TOKENS = 1000


def run_of(path: Path, *, end_s: float = 15.0, **contents: Any) -> Run:
    """A finished run that began at 0 and ended at this instant of its clock."""
    run = make_run(path)
    directory = add_writer(run, closed=False, **contents)
    marks = [Mark(0, "opened"), Mark(round(end_s * S), "closed")]
    lines = (json.dumps({"t_ns": one.t_ns, "name": one.name, "detail": ""}) for one in marks)
    (directory / MARKS_FILE).write_text("\n".join(lines) + "\n", "utf-8")
    return Run.open(run)


def in_a_row(times_s: Any, *, steps: int = 1, rank: int = 0, **fields: Any) -> list[Step]:
    """Steps of these lengths without a gap."""
    ends = np.round(np.cumsum(times_s) * S).astype(int).tolist()
    starts = [0, *ends[:-1]]
    return [
        Step(a, b, index=i * steps, steps=steps, rank=rank, tokens_computed=TOKENS, **fields)
        for i, (a, b) in enumerate(zip(starts, ends, strict=True))
    ]


RNG = np.random.default_rng(20)
FLAT = np.full(100, 0.1)


def changed(places: dict[int, float], count: int = 100) -> np.ndarray[Any, Any]:
    times = np.full(count, 0.1)
    for place, value in places.items():
        times[place] = value
    return times


# Step times in seconds, steps of a row, and how many steps the rule leaves out.
SERIES: dict[str, tuple[Any, int, int]] = {
    "flat": (FLAT, 1, 0),
    "one slow": (changed({0: 2.0}), 1, 1),
    "three slow": (changed({0: 2.0, 1: 0.5, 2: 0.2}), 1, 3),
    # 0.1 s x (1 + 3 exp(-i/5)) is above 0.15 s up to i = 8: 3 exp(-8/5) = 0.61, 3 exp(-9/5) = 0.496
    "decaying": (0.1 * (1 + 3 * np.exp(-np.arange(100) / 5)), 1, 9),
    "drifting clocks": (np.linspace(0.1, 0.12, 100), 1, 0),
    "a slow step in the middle": (changed({50: 5.0}), 1, 0),
    "periodic": (changed(dict.fromkeys(range(0, 100, 10), 0.4)), 1, 0),
    "compile at 1 and 20": (changed({0: 20.0, 19: 10.0}), 1, 1),
    "heavy tail": (0.1 * (1 + RNG.pareto(2.0, 100)), 1, 0),
    "three steps": (np.array([3.0, 0.1, 0.1]), 1, 1),
    "rows of ten steps": (changed({0: 4.0}, 20), 10, 10),
}


@pytest.mark.parametrize("name", SERIES)
def test_the_warm_up_rule_drops_exactly(tmp_path: Path, name: str) -> None:
    times_s, steps, dropped = SERIES[name]
    run = run_of(tmp_path / "run", steps=in_a_row(times_s, steps=steps))
    assert reading(run, "time.warmup_steps").value == dropped
    left = times_s[dropped // steps :]
    expected = TOKENS * len(left) / float(np.sum(left))
    assert reading(run, "throughput.tokens_per_s").value == pytest.approx(expected, rel=1e-6)


def test_two_ranks_share_one_instant(tmp_path: Path) -> None:
    """Rank 0 has one slow step, rank 1 has two: the second of rank 1 ends the warm-up of both."""
    run = make_run(tmp_path / "run")
    add_writer(run, steps=in_a_row(changed({0: 3.0, 1: 1.0}), rank=0), header={"rank": 0})
    add_writer(run, steps=in_a_row(changed({0: 2.0, 1: 2.0}), rank=1), header={"rank": 1})
    opened = Run.open(run)
    assert reading(opened, "time.warmup_steps").value == 2
    # Both end their second step at 4.0 s, and 98 steps of 0.1 s follow.
    assert reading(opened, "time.warmup_s").value == pytest.approx(4.0)
    assert reading(opened, "throughput.tokens_per_s").value == pytest.approx(2 * TOKENS / 0.1)


@pytest.mark.parametrize(
    ("times_s", "dropped"),
    [
        ([1.0], 0),
        ([3.0, 1.0], 1),
        ([1.4, 1.0], 0),
        ([3.0, 3.0, 1.0, 1.0], 1),  # with fewer than five steps only the first
        ([3.0, 1.0, 3.0], 0),  # slow steps are not rare in this run
        ([40.0] + [1.0, 1.0, 1.0, 1.0, 1.9] * 10, 1),  # as slow as the first they are
        ([3.0, 3.0, 1, 1, 1, 1, 1, 1, 1], 1),  # at most 20 %: one of nine
        ([0.2] * 3 + [1.0] * 20, 0),  # a faster beginning stays in
        ([9.0] * 60 + [1.0] * 200, 50),  # at most 50
        ([9.0] * 40 + [1.0] * 1000, 40),
    ],
)
def test_bounds_of_the_rule(times_s: list[float], dropped: int) -> None:
    assert slow_start(np.array(times_s)).dropped == dropped


DISTRIBUTIONS: dict[str, Callable[[np.random.Generator, int], np.ndarray[Any, Any]]] = {
    "lognormal 0.25": lambda rng, n: rng.lognormal(0, 0.25, n),
    "lognormal 0.5": lambda rng, n: rng.lognormal(0, 0.5, n),
    "lognormal 1": lambda rng, n: rng.lognormal(0, 1, n),
    "Pareto 2": lambda rng, n: 1 + rng.pareto(2.0, n),
    "Pareto 3": lambda rng, n: 1 + rng.pareto(3.0, n),
    "1 in 20 five times as slow": lambda rng, n: np.where(rng.random(n) < 0.05, 5.0, 1.0),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_stationary_heavy_tails_are_biased_by_less_than_half_a_percent(name: str) -> None:
    rng = np.random.default_rng(7)
    with_all, without = 0.0, 0.0
    for _ in range(2000):
        times_s = DISTRIBUTIONS[name](rng, 50)
        dropped = slow_start(times_s).dropped
        with_all += float(times_s.mean())
        without += float(times_s[dropped:].mean())
    assert abs(without / with_all - 1) < 0.005


def test_the_rule_is_causal(tmp_path: Path) -> None:
    """What comes after 250 steps changes nothing."""
    times_s = np.concatenate([[2.0, 0.5], np.full(248, 0.1)])
    slower = np.concatenate([times_s, np.full(500, 5.0)])
    assert slow_start(times_s).dropped == slow_start(slower).dropped == 2


def test_a_single_step_has_no_pace(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", steps=in_a_row([2.0]))
    assert reason(run, "throughput.tokens_per_s").startswith("1 step: it may be all warm-up")
    assert reading(run, "throughput.whole_run_tokens_per_s").value > 0
    assert reading(run, "throughput.tokens_per_s", warmup_steps=0).value == pytest.approx(500)


def test_a_faster_beginning_is_a_note(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", steps=in_a_row([0.02] * 3 + [0.1] * 47))
    summary = summarize(run)
    assert "the first 3 steps were 5.0 times as fast as those after, and counted" in summary.notes


def test_more_slow_steps_than_may_go_are_a_note(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", steps=in_a_row([1.0] * 5 + [0.1] * 15))
    assert reading(run, "time.warmup_steps").value == 4
    notes = [note for note in summarize(run).notes if "more slow step" in note]
    assert len(notes) == 1
    assert "--warmup-steps 5" in notes[0]


# -- periods --------------------------------------------------------------------------------------


def test_each_counted_step_carries_the_gap_before_it(tmp_path: Path) -> None:
    """A first step of 5 s, then steps of 1 s, each 0.5 s after the one before."""
    steps = [Step(0, 5 * S, tokens_computed=TOKENS)]
    steps += [
        Step(5 * S + i * 3 * S // 2 + S // 2, 5 * S + (i + 1) * 3 * S // 2, tokens_computed=TOKENS)
        for i in range(20)
    ]
    run = run_of(tmp_path / "run", steps=steps)
    assert reading(run, "time.window_s").value == pytest.approx(30.0)
    assert reading(run, "throughput.tokens_per_s").value == pytest.approx(TOKENS / 1.5)
    assert reading(run, "time.step_median_s").value == pytest.approx(1.5)


@pytest.mark.parametrize(("fewest", "bias_frac"), [(30, 0.05), (100, 0.016), (400, 0.004)])
def test_a_pause_after_every_tenth_step_is_unbiased_over_where_it_stopped(
    tmp_path: Path, fewest: int, bias_frac: float
) -> None:
    """Nine gaps of nothing and one of 0.4 s to every ten steps of 0.1 s: 1.4 s for ten steps.

    No pause precedes the first step, so that half a pause is missing in the mean; it lies within
    the interval wherever the run stops.
    """
    true = 10 * TOKENS / 1.4
    rates = []
    for stopped in range(fewest, fewest + 10):
        t_ns, steps = 0, []
        for i in range(stopped):
            steps.append(Step(t_ns, t_ns + S // 10, index=i, tokens_computed=TOKENS))
            t_ns += S // 10 + (4 * S // 10 if i % 10 == 9 else 0)
        rate = reading(run_of(tmp_path / f"run{stopped}", steps=steps), "throughput.tokens_per_s")
        assert rate.low is not None
        assert rate.high is not None
        assert rate.low < true < rate.high
        rates.append(rate.value)
    assert float(np.mean(rates)) == pytest.approx(true, rel=bias_frac)
    # The last pause is in the window or not: never more than one too few.
    assert max(abs(rate / true - 1) for rate in rates) < 4.1 / (1.4 * fewest - 4)


def test_a_first_step_without_a_gap_before_it_is_not_called_fast(tmp_path: Path) -> None:
    steps = even_steps(100, seconds=0.5, gap_s=0.5)
    run = run_of(tmp_path / "run", steps=steps)
    assert not [note for note in summarize(run).notes if "as fast as" in note]


def test_of_few_steps_only_the_first_is_left_out_and_the_note_says_so(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", steps=in_a_row([10.0, 10.0, 1.0, 1.0]), end_s=30)
    notes = [note for note in summarize(run).notes if "more slow step" in note]
    assert len(notes) == 1
    assert "of fewer than 5 steps only the first is left out" in notes[0]


def test_a_window_of_steps_is_of_the_last_time_that_they_were_made(tmp_path: Path) -> None:
    """Steps 0 to 149, then a resume at 80 up to 199: one a second throughout."""
    numbers = [*range(150), *range(80, 200)]
    steps = [
        Step(i * S, (i + 1) * S, index=number, tokens_computed=TOKENS)
        for i, number in enumerate(numbers)
    ]
    run = run_of(tmp_path / "run", steps=steps, end_s=300)
    rate = reading(run, "throughput.tokens_per_s", window="100:200")
    assert rate.value == pytest.approx(TOKENS)
    assert reading(run, "steps.count", window="100:200").value == 100
    assert reading(run, "throughput.tokens_per_s", window="0:50").value == pytest.approx(TOKENS)


def test_time_outside_steps_of_the_whole_run_is_of_all_of_it(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", steps=even_steps(15), end_s=25)
    found = reading(run, "time.outside_steps_frac", window="whole")
    assert found.value == pytest.approx(10 / 25)


def test_the_parts_of_a_whole_run_are_of_all_of_it(tmp_path: Path) -> None:
    """4 s of start-up with an evaluation of 1 s, 15 steps of 1 s, 6 s of ending."""
    steps = [
        replace(one, start_ns=one.start_ns + 4 * S, end_ns=one.end_ns + 4 * S)
        for one in even_steps(15)
    ]
    run = run_of(tmp_path / "run", steps=[Step(2 * S, 3 * S, phase="eval"), *steps], end_s=25)
    split = time_split(evidence_of(run, Settings(window="whole")))
    assert split.whole_s == pytest.approx(25)
    assert split.parts_s == pytest.approx({"eval": 1.0, "around": 9.0})
    assert 1 - sum(split.parts_s.values()) / split.whole_s == pytest.approx(15 / 25)


# -- cuts -----------------------------------------------------------------------------------------


def with_pauses(phase: str, *, every: int = 10, pause_s: float = 0.5) -> list[Step]:
    """A hundred steps of 0.1 s, and a span of another phase after every tenth."""
    t_ns, rows = 0, []
    for i in range(100):
        rows.append(Step(t_ns, t_ns + S // 10, index=i, tokens_computed=TOKENS))
        t_ns += S // 10
        if i % every == every - 1:
            rows.append(Step(t_ns, t_ns + round(pause_s * S), phase=phase))
            t_ns += round(pause_s * S)
    return rows


@pytest.mark.parametrize("phase", ["eval", "checkpoint", "idle"])
def test_what_is_no_training_is_cut(tmp_path: Path, phase: str) -> None:
    run = run_of(tmp_path / "run", steps=with_pauses(phase))
    window = reading(run, "time.window_s")
    assert window.value == pytest.approx(10.0)
    words = {"eval": "evaluation", "checkpoint": "checkpoints", "idle": "pauses"}
    assert f"without 4.5 s of {words[phase]}" in window.note  # the last lies after the window
    assert reading(run, "throughput.tokens_per_s").value == pytest.approx(TOKENS / 0.1)
    assert reading(run, "time.step_p95_s").value == pytest.approx(0.1)


def test_cuts_are_those_of_the_rank_that_names_them(tmp_path: Path) -> None:
    """Rank 0 saves; rank 1 has more rows, as it names its waits for data."""

    def wait(end_ns: int) -> Step:
        return Step(end_ns - 2, end_ns - 1, phase="data", rank=1)

    saves = with_pauses("checkpoint")
    waits = []
    for one in saves:
        if one.phase == "train":
            waits += [replace(one, rank=1), wait(one.end_ns)]
    run = make_run(tmp_path / "run")
    for rows in (saves, waits):
        add_writer(run, steps=rows, header={"clock": {"monotonic_ns": 0, "wall_ns": 0}})
    assert reading(Run.open(run), "time.window_s").value == pytest.approx(10.0)


def test_waits_for_data_and_stalls_are_in(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", steps=with_pauses("data"))
    assert reading(run, "time.window_s").value == pytest.approx(14.5)


def test_a_save_in_the_background_is_not_cut(tmp_path: Path) -> None:
    steps = in_a_row(FLAT)
    saves = [Step(3 * S, 6 * S, phase="checkpoint"), Step(7 * S + 10, 7 * S + 20, phase="eval")]
    run = run_of(tmp_path / "run", steps=steps + saves)
    assert reading(run, "time.window_s").value == pytest.approx(10.0)
    notes = [note for note in summarize(run).notes if "overlaps training steps" in note]
    assert any("3 s of checkpoints" in note for note in notes)


def queued(count: int, *, step_s: float = 0.1, queue: int = 8, save_s: float = 0.4) -> list[Step]:
    """A loop that queues up to `queue` steps on a GPU and saves after every tenth.

    The host takes 1 ms to queue a step and waits where the queue is full. Saving first waits for
    the queue to drain, then writes. Steps carry the device's times and the host's.
    """
    host, device = 0.0, 0.0
    ends: list[float] = []
    rows = []
    for i in range(count):
        if len(ends) >= queue:
            host = max(host, ends[-queue])
        asked = host
        host += 0.001
        start = max(device, host)
        device = start + step_s
        ends.append(device)
        rows.append(
            Step(
                round(start * S),
                round(device * S),
                index=i,
                tokens_computed=TOKENS,
                host_start_ns=round(asked * S),
                host_end_ns=round(host * S),
            )
        )
        if i % 10 == 9:
            begun = host
            host = max(host, device) + save_s
            rows.append(Step(round(begun * S), round(host * S), phase="checkpoint"))
    return rows


def test_eight_steps_queued_and_a_save_every_ten(tmp_path: Path) -> None:
    """The device needs 0.1 s a step; while the host saves, it first works off its queue."""
    run = run_of(tmp_path / "run", steps=queued(200), devices=[GPU])
    rate = reading(run, "throughput.tokens_per_s").value
    assert rate == pytest.approx(TOKENS / 0.1, rel=0.01)
    assert rate <= TOKENS / 0.1
    # 19 saves of 0.4 s lie in the window; the host's spans are longer by the queue.
    assert reading(run, "time.window_s").value == pytest.approx(20.0, rel=0.01)


def host_timed(rows: list[Step]) -> list[Step]:
    """The same as a program would record it without the device's times."""
    return [
        Step(row.host_start_ns, row.host_end_ns, index=row.index, tokens_computed=TOKENS)
        if row.phase == "train" and row.host_start_ns is not None and row.host_end_ns is not None
        else row
        for row in rows
    ]


def test_by_the_hosts_clock_a_long_cut_stays_in_with_a_note(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", steps=host_timed(queued(200)), devices=[GPU])
    rate = reading(run, "throughput.tokens_per_s").value
    assert rate <= TOKENS / 0.1  # with the cuts out it would be three times as much
    assert any(
        "checkpoints stays in the window: it is not known when the GPU" in one
        for one in summarize(run).notes
    )


def test_by_the_hosts_clock_a_short_cut_widens_the_interval(tmp_path: Path) -> None:
    """One save of 0.05 s in 10 s of steps: half a percent."""
    steps = in_a_row(np.full(50, 0.1))
    save = Step(5 * S, 5 * S + S // 20, phase="checkpoint")
    after = [
        Step(
            5 * S + S // 20 + i * S // 10,
            5 * S + S // 20 + (i + 1) * S // 10,
            index=50 + i,
            tokens_computed=TOKENS,
        )
        for i in range(50)
    ]
    run = run_of(tmp_path / "run", steps=[*steps, save, *after], devices=[GPU])
    found = reading(run, "throughput.tokens_per_s")
    assert found.value == pytest.approx(TOKENS / 0.1)
    assert found.low == pytest.approx(TOKENS / 0.1 * 10 / 10.05)
    assert found.high == pytest.approx(TOKENS / 0.1)


def test_a_rank_that_trains_on_keeps_the_span_in(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    add_writer(run, steps=with_pauses("checkpoint"), header={"rank": 0})
    add_writer(run, steps=in_a_row(np.full(145, 0.1), rank=1), header={"rank": 1})
    assert reading(Run.open(run), "time.window_s").value == pytest.approx(14.5)


def test_a_rank_that_waits_does_not(tmp_path: Path) -> None:
    """Rank 1's step after each save waits for rank 0, as a collective has it."""
    run = make_run(tmp_path / "run")
    rows = with_pauses("checkpoint")
    add_writer(run, steps=rows, header={"rank": 0})
    steps = [row for row in rows if row.phase == "train"]
    ends = [row.end_ns for row in steps]
    others = [
        Step(a, b, index=i, tokens_computed=TOKENS, rank=1)
        for i, (a, b) in enumerate(zip([0, *ends[:-1]], ends, strict=True))
    ]
    add_writer(run, steps=others, header={"rank": 1})
    assert reading(Run.open(run), "time.window_s").value == pytest.approx(10.0)


# -- intervals ------------------------------------------------------------------------------------

WINDOW = TrainingWindow("training", np.array([10, 50, 80]), np.array([20, 60, 100]))


def test_the_clock_of_a_window_stands_still_in_its_cuts() -> None:
    at = np.array([0, 10, 15, 20, 30, 50, 55, 70, 80, 90, 100, 200])
    assert WINDOW.elapsed_ns(at).tolist() == [0, 0, 5, 10, 10, 10, 15, 20, 20, 30, 40, 40]
    assert WINDOW.duration_s == pytest.approx(40e-9)


def test_what_lies_in_a_window() -> None:
    at = np.array([9, 10, 20, 21, 49, 50, 100, 101])
    assert WINDOW.contains(at).tolist() == [False, True, True, False, False, True, True, False]
    starts, ends = WINDOW.clipped(np.array([0, 55]), np.array([12, 85]))
    assert list(zip(starts.tolist(), ends.tolist(), strict=True)) == [(10, 12), (55, 60), (80, 85)]


def test_nothing_in_common() -> None:
    one = np.array([0]), np.array([10])
    other = np.array([20]), np.array([30])
    assert [len(part) for part in intersected(one, other)] == [0, 0]


# -- one window for all ---------------------------------------------------------------------------


def counter_and_load(until_s: float) -> list[Sample]:
    """A GPU that draws 500 W in steps and 100 W in saves, by its counter and its power."""
    rows = []
    joules = 0.0
    saves = [
        (row.start_ns, row.end_ns) for row in with_pauses("checkpoint") if row.phase != "train"
    ]
    for tick in range(round(until_s * 50) + 1):
        t_ns = tick * S // 50
        is_saving = any(a <= t_ns < b for a, b in saves)
        watts = 100.0 if is_saving else 500.0
        rows.append(Sample(t_ns, "GPU-0", power_w=watts, energy_j=joules))
        joules += watts / 50
    return rows


def test_joules_are_those_of_the_steps(tmp_path: Path) -> None:
    gpu = Device("GPU-0", "gpu", "Test GPU", "nvml", {"power_field": "instant"})
    rows = [*with_pauses("checkpoint")]
    timed = [
        Step(row.start_ns, row.end_ns, index=row.index, tokens_computed=TOKENS,
             host_start_ns=row.start_ns, host_end_ns=row.end_ns)
        if row.phase == "train" else row
        for row in rows
    ]  # fmt: skip
    run = run_of(tmp_path / "run", steps=timed, samples=counter_and_load(16.0), devices=[gpu])
    energy = reading(run, "energy.run_j")
    assert energy.value == pytest.approx(10.0 * 500, rel=0.02)  # 10 s of steps; 4.5 s are cut
    assert energy.low is not None
    assert energy.high is not None
    assert energy.low <= 5000 <= energy.high
    assert reading(run, "energy.mean_w").value == pytest.approx(500, rel=0.02)
    assert reading(run, "energy.joules_per_token").value == pytest.approx(0.05, rel=0.02)
    # The whole run, saves included.
    whole = reading(run, "energy.whole_run_mean_w").value
    assert whole == pytest.approx((10 * 500 + 5 * 100) / 15, rel=0.08)


@pytest.mark.parametrize("window", [None, "whole", "20:80"])
def test_figures_of_one_window_agree_to_the_last_digit(tmp_path: Path, window: str | None) -> None:
    run = run_of(
        tmp_path / "run",
        steps=with_pauses("checkpoint"),
        samples=counter_and_load(16.0),
        devices=[Device("cpu-0", "cpu", "CPU", "rapl"), GPU],
    )
    evidence = evidence_of(run, Settings(window=window))
    found = {key: one for key, one in summary(evidence).items() if isinstance(one, Reading)}
    for prefix in ("", "whole_run_"):
        rate = found[f"throughput.{prefix}tokens_per_s"].value
        step_s = found[f"time.{prefix}step_s"].value
        assert rate * step_s == pytest.approx(TOKENS, rel=1e-12)
        watts = found[f"energy.{prefix}mean_w"].value
        joules = found[f"energy.{prefix}joules_per_token"].value
        assert watts / rate == pytest.approx(joules, rel=1e-12)


def summary(evidence: Evidence) -> dict[str, Reading | Missing]:
    from ergmeter.metrics.summarize import summary_of

    return summary_of(evidence).readings


# -- which window ---------------------------------------------------------------------------------


def test_a_window_of_steps(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", steps=with_pauses("eval"))
    found = reading(run, "time.window_s", window="20:40")
    assert found.value == pytest.approx(2.0)  # the evaluations after 19 and 29 are cut
    assert "steps 20:40 of the run" in found.note
    assert reason(run, "throughput.tokens_per_s", window="200:").startswith(
        "--window 200: holds no step: this run's steps are numbered 0 to 99"
    )


def test_the_whole_run(tmp_path: Path) -> None:
    """From the Meter's start at 0 s to its last mark at 20 s, with all 100 steps."""
    run = run_of(tmp_path / "run", steps=with_pauses("eval"), end_s=20.0)
    found = reading(run, "throughput.whole_run_tokens_per_s")
    assert found.value == pytest.approx(100 * TOKENS / 20)
    assert "since the Meter's start" in found.note
    assert found.low is None


# -- stored numbers -------------------------------------------------------------------------------


def evaluated(path: Path) -> Path:
    """A run of 10 s of steps and 4.5 s of evaluation between them, on nothing but a CPU."""
    return run_of(path, steps=with_pauses("eval")).path


def ledger(path: Path, *rows: dict[str, object]) -> Path:
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = [",".join(names), *(",".join(str(row.get(n, "")) for n in names) for row in rows)]
    path.write_text("\n".join(lines) + "\n", "utf-8")
    return path


ROW: dict[str, object] = {
    "tok_per_s": 6896.55,
    "tokens_processed": 100000,
    "wall_s": 15,
    "window_s": 14.5,
}


def windows(*paths: Path, **settings: Any) -> list[str | None]:
    found = read_entries(paths, Settings(**settings), keys=["throughput.tokens_per_s"])
    return [entry.facts.get("window") for entry in found.entries]


def test_an_entry_says_what_it_is_over(tmp_path: Path) -> None:
    run = evaluated(tmp_path / "run")
    assert windows(run) == ["training"]
    assert windows(run, window="whole") == ["whole"]
    assert windows(ledger(tmp_path / "old.csv", ROW)) == ["unbroken"]
    assert windows(ledger(tmp_path / "new.csv", {**ROW, "window": "training"})) == ["training"]


def test_a_ledgers_row_is_computed_anew_where_its_run_is_there(tmp_path: Path) -> None:
    one, other = evaluated(tmp_path / "one"), evaluated(tmp_path / "other")
    rows = ledger(tmp_path / "ledger.csv", {**ROW, "run": other})
    found = read_entries([one, rows], keys=["throughput.tokens_per_s"])
    assert [entry.facts["window"] for entry in found.entries] == ["training"] * 2
    assert [entry.value("throughput.tokens_per_s") for entry in found.entries] == pytest.approx(
        [10_000] * 2
    )


def test_different_kinds_of_window_are_not_compared(tmp_path: Path) -> None:
    """The row's run is gone: 10,000 and 6,897 tokens/s are the same run over two windows."""
    one = evaluated(tmp_path / "one")
    rows = ledger(tmp_path / "ledger.csv", {**ROW, "run": tmp_path / "gone"})
    found = compare(read_entries([one, rows]), CompareOptions(group_by=("source",)))
    assert any(
        "kind of window differs (training / unbroken)" in line
        for line in found.pairs[0].fairness.refusals
    )
    assert not found.is_comparable
    # By the window of the row they can be compared, and agree.
    same = read_entries([one, rows], Settings(window="unbroken"))
    again = compare(same, CompareOptions(group_by=("source",)))
    assert not any("window" in line for line in again.pairs[0].fairness.refusals)
    rates = [entry.value("throughput.tokens_per_s") for entry in same.entries]
    assert rates == pytest.approx([100_000 / 14.5, 6896.55])


def test_whole_runs_with_different_starts_are_not_compared(tmp_path: Path) -> None:
    by_meter = run_of(tmp_path / "meter", steps=with_pauses("eval")).path
    by_command = run_of(tmp_path / "command", steps=with_pauses("eval"), header=RECORDER).path
    found = compare(read_entries([by_meter, by_command]), CompareOptions(group_by=("source",)))
    (pair,) = found.pairs
    said = {one.measure.key: one.words for one in pair.verdicts}
    assert (
        "one side's whole run starts with the command" in said["throughput.whole_run_tokens_per_s"]
    )
    assert "since the command" not in said["throughput.tokens_per_s"]


RECORDER = {"source": "recorder"}


def test_a_whole_run_under_erg_record_is_since_the_command(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", steps=with_pauses("eval"), header=RECORDER)
    assert "since the command's start" in reading(run, "time.whole_run_step_s").note


def test_a_summary_carries_its_window(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", steps=with_pauses("eval"))
    window = summarize(run).window
    assert window["kind"] == "training"
    assert window["cuts"] == [{"phase": "eval", "spans": 9, "seconds": 4.5}]
    assert window["warmup_steps"] == 0
    assert window["whole_run_from"] == "meter"
    assert not window["is_provisional"]


@pytest.mark.parametrize("window", ["some", "5:3", ":", "1:2:3"])
def test_a_window_there_is_not(window: str) -> None:
    with pytest.raises(UsageError, match=r"window"):
        Settings(window=window)


def test_a_running_run_is_provisional_until_the_rule_has_seen_enough(tmp_path: Path) -> None:
    def running(path: Path, count: int) -> Run:
        run = make_run(path)
        add_writer(run, steps=in_a_row(np.full(count, 0.1)), closed=False)
        return Run.open(run)

    early, late = running(tmp_path / "early", 100), running(tmp_path / "late", 300)
    assert early.status == late.status == "running"
    assert ", provisional" in reading(early, "throughput.tokens_per_s").note
    assert "provisional" not in reading(late, "throughput.tokens_per_s").note
    fixed = summarize(early, Settings(warmup_steps=1)).readings["throughput.tokens_per_s"]
    assert isinstance(fixed, Reading)
    assert "provisional" not in fixed.note
