"""What a live view is told: the catalogue's figures, the pace, the time to go, the alerts."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ergmeter.errors import FormatError, UsageError
from ergmeter.metrics.catalog import in_view
from ergmeter.metrics.live.frame import RunWatcher
from ergmeter.metrics.live.recent_window import remaining
from ergmeter.metrics.summarize import evidence_of, summarize
from ergmeter.records import Mark, Missing, Reading, Sample, Step
from ergmeter.runlog.identity import writer_header
from ergmeter.runlog.reader import Run
from ergmeter.runlog.writer import Writer
from tests.runs import GPU, add_writer, even_steps, make_run

S = 10**9
CLOCK = {"monotonic_ns": 0, "wall_ns": 1_700_000_000 * S}


def at(seconds: float) -> Callable[[], int]:
    """The time of day so long after the clock of the runs began."""
    return lambda: CLOCK["wall_ns"] + round(seconds * S)


def samples(seconds: int, watts: float = 250.0) -> list[Sample]:
    return [
        Sample(k * S // 10, GPU.id, power_w=watts, memory_bytes=10**9, temperature_c=60.0)
        for k in range(seconds * 10 + 20)
    ]


def run_of(path: Path, **contents: Any) -> Path:
    run = make_run(path)
    header = {"clock": CLOCK, **contents.pop("header", {})}
    add_writer(run, devices=[GPU], header=header, **contents)
    return run


@contextmanager
def watched(run: Path, **options: Any) -> Iterator[RunWatcher]:
    with closing(RunWatcher(run, **options)) as watching:
        yield watching


def value(found: object) -> float:
    assert isinstance(found, Reading), found
    return found.value


def test_the_figures_so_far_are_those_of_the_report(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", steps=even_steps(100, tokens_computed=100), samples=samples(100))
    with watched(run) as watching:
        frame = watching.look(totals=True)
    report = summarize(Run.open(run)).readings
    assert dict(frame.so_far) == {key: report[key] for key in in_view("so far")}
    assert value(frame.so_far["energy.joules_per_token"]) == pytest.approx(2.5)
    assert frame.status == "finished"
    assert frame.step == 100


def test_lately_is_of_the_last_half_minute(tmp_path: Path) -> None:
    quick = [Step(i * S, (i + 1) * S, index=i, tokens_computed=100) for i in range(100)]
    slow = [
        Step((100 + 2 * i) * S, (102 + 2 * i) * S, index=100 + i, tokens_computed=100)
        for i in range(20)
    ]
    run = run_of(tmp_path / "run", steps=[*quick, *slow], samples=samples(140))
    with watched(run) as watching:
        frame = watching.look(totals=True)
    assert value(frame.recent["throughput.tokens_per_s"]) == pytest.approx(50.0)
    assert value(frame.so_far["throughput.tokens_per_s"]) == pytest.approx(12_000 / 140)


def test_a_run_of_a_few_seconds_has_no_empty_time_before_it(tmp_path: Path) -> None:
    """On a machine that has been up for a while before it."""
    up_ns = 1000 * S
    steps = [
        Step(up_ns + i * S, up_ns + (i + 1) * S, index=i, tokens_computed=100) for i in range(5)
    ]
    clock = {"monotonic_ns": up_ns, "wall_ns": CLOCK["wall_ns"]}
    run = run_of(tmp_path / "run", steps=steps, header={"clock": clock})
    with watched(run) as watching:
        frame = watching.look(totals=False)
    assert value(frame.recent["throughput.tokens_per_s"]) == pytest.approx(100.0)


def test_the_time_to_go_is_what_is_left_at_the_pace_of_lately(tmp_path: Path) -> None:
    run = run_of(
        tmp_path / "run", steps=even_steps(40, seconds=0.5), header={"total_steps": 100},
        closed=False,
    )  # fmt: skip
    with watched(run, now_ns=at(21)) as watching:
        frame = watching.look(totals=False)
    assert (frame.total, frame.unit, frame.done) == (100.0, "steps", 40)
    assert frame.eta_s == pytest.approx(30.0)
    with watched(run, total_steps=60, now_ns=at(21)) as watching:
        assert watching.look(totals=False).eta_s == pytest.approx(10.0)


def test_where_nobody_says_how_many_steps_there_will_be_that_is_said(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", steps=even_steps(10))
    with watched(run) as watching:
        frame = watching.look(totals=False)
    assert frame.eta_s is None
    assert frame.no_eta == "progress unknown: no total step count (--steps)"


def test_a_budget_of_tokens_is_a_goal_too(tmp_path: Path) -> None:
    run = run_of(
        tmp_path / "run", steps=even_steps(50, tokens_computed=100), samples=samples(50),
        header={"budget": {"tokens": 10_000}}, closed=False,
    )  # fmt: skip
    with watched(run, now_ns=at(52)) as watching:
        frame = watching.look(totals=False)
    assert (frame.total, frame.unit, frame.done) == (10_000.0, "tokens", 5000.0)
    assert frame.eta_s == pytest.approx(50.0, rel=0.05)


def test_alerts_are_those_that_were_told_and_those_that_would_have_been(tmp_path: Path) -> None:
    steps = [Step(i * S, (i + 1) * S, index=i, loss=math.nan if i > 5 else 1.0) for i in range(20)]
    told = [Mark(7 * S, "alert", "loss nan: loss nan at step 6")]
    alarmed = run_of(
        tmp_path / "a", steps=steps, marks=told,
        header={"alerts": {"rules": ["loss nan", "time > 10 s"], "stop_on": []}},
    )  # fmt: skip
    with watched(alarmed) as watching:
        frame = watching.look(totals=False)
    assert [(a.text, a.was_told) for a in frame.alerts] == [
        ("loss nan: loss nan at step 6", True),
        ("time > 10 s: 10 s used", False),
    ]
    bare = run_of(tmp_path / "b", steps=steps)
    with watched(bare) as watching:
        frame = watching.look(totals=False)
    assert [(a.text, a.was_told) for a in frame.alerts] == [("loss nan: loss nan at step 6", False)]
    with watched(bare, rules=["time > 10 s"]) as watching:
        assert [a.t_ns for a in watching.look(totals=False).alerts] == [10 * S]


def test_one_rank_of_several_can_be_watched(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for rank, count in ((0, 30), (1, 20)):
        steps = even_steps(count, tokens_computed=100, rank=rank)
        add_writer(run, steps=steps, header={"clock": CLOCK, "world": 2})
    with watched(run) as watching:
        assert watching.look(totals=False).ranks == {0: 30, 1: 20}
    with watched(run, rank=1) as watching:
        frame = watching.look(totals=False)
    assert frame.ranks == {1: 20}
    assert frame.step == 20


def test_what_is_added_is_taken_in_and_a_run_that_is_gone_is_told(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    header = {**writer_header("meter"), "settings": {}, "unavailable": {}}
    writer = Writer(run, header=header)
    start_ns = header["clock"]["monotonic_ns"]
    for first in (0, 10):
        rows = [
            Step(start_ns + i * S, start_ns + (i + 1) * S, index=i, loss=3.0 - i / 10)
            for i in range(first, first + 10)
        ]
        writer.write("steps", rows)
        if not first:
            watching = RunWatcher(run)
        frame = watching.look(totals=False)
        assert frame.is_going
        assert frame.step == first + 10
        assert frame.loss == pytest.approx(3.0 - (first + 9) / 10)
        assert len(frame.curves["loss"]) == first + 10
    writer.close()
    shutil.rmtree(run)
    with pytest.raises(FormatError, match="does not exist"):
        watching.look(totals=False)
    watching.close()


def test_a_look_opens_no_more_of_a_long_run_than_of_a_short_one(tmp_path: Path) -> None:
    """By the rows that are followed: of old segments none is read twice."""
    run = run_of(tmp_path / "run", steps=even_steps(50), closed=False)
    with watched(run) as watching:
        watching.look(totals=False)
        new, _, _ = watching._following.look()
        assert new.steps == {}
        assert new.samples == {}


def test_the_header_of_a_run_may_be_from_another_time(tmp_path: Path) -> None:
    """Rules that this version can't read are no reason to show nothing."""
    run = run_of(tmp_path / "run", steps=even_steps(5))
    (path,) = run.glob("*/writer.json")
    header = json.loads(path.read_text())
    path.write_text(json.dumps({**header, "alerts": {"rules": ["from the future"]}}))
    with watched(run) as watching:
        assert "loss nan" in watching.look(totals=False).rules


def test_lately_begins_with_a_step_and_not_within_one(tmp_path: Path) -> None:
    """Steps of 10 s: the last three of them, and not four in the time of three."""
    steps = even_steps(12, seconds=10.0, tokens_computed=1000)
    run = run_of(tmp_path / "run", steps=steps)
    with watched(run) as watching:
        frame = watching.look(totals=False)
    assert value(frame.recent["throughput.tokens_per_s"]) == pytest.approx(100.0)


def ranks_run(path: Path, *, first: int = 0, late_s: float = 0.0) -> Path:
    """Two ranks, 100 tokens a second each; the writer that began first is rank `first`."""
    run = make_run(path)
    for rank in (first, 1 - first):
        late_ns = round(late_s * rank * S)
        rows = [
            Step(i * 10 * S + late_ns, (i + 1) * 10 * S + late_ns, index=i, rank=rank,
                 tokens_computed=1000, loss=float(rank))
            for i in range(10)
        ]  # fmt: skip
        header = {"clock": CLOCK, "world": 2, "budget": {"tokens": 20_000}}
        add_writer(run, steps=rows, header=header, closed=False)
    return run


def test_a_rank_that_ends_its_steps_a_little_later_is_not_counted_once_more(tmp_path: Path) -> None:
    with watched(ranks_run(tmp_path / "run", late_s=0.01), now_ns=at(101)) as watching:
        frame = watching.look(totals=False)
    assert value(frame.recent["throughput.tokens_per_s"]) == pytest.approx(200.0, rel=0.01)


def test_a_budget_of_tokens_is_one_ranks_and_so_is_its_pace(tmp_path: Path) -> None:
    with watched(ranks_run(tmp_path / "run"), now_ns=at(101)) as watching:
        frame = watching.look(totals=False)
    assert (frame.done, frame.total) == (10_000.0, 20_000.0)
    assert frame.eta_s == pytest.approx(100.0)


@pytest.mark.parametrize("first", [0, 1])
def test_what_is_told_of_one_rank_is_of_the_lowest_in_any_order(tmp_path: Path, first: int) -> None:
    with watched(ranks_run(tmp_path / "run", first=first), now_ns=at(101)) as watching:
        frame = watching.look(totals=False)
    assert frame.done == 10_000.0
    assert frame.loss == 0.0
    assert set(frame.curves["loss"]) == {0.0}


def test_a_lower_rank_that_comes_later_is_told_from_its_start(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    with_clock = {"clock": CLOCK, "world": 2, "budget": {"tokens": 20_000}}
    add_writer(run, steps=even_steps(9, tokens_computed=100, rank=1, loss=1.0), header=with_clock)
    with watched(run) as watching:
        assert watching.look(totals=False).done == 900.0
        add_writer(
            run, steps=even_steps(5, tokens_computed=100, rank=0, loss=0.5), header=with_clock
        )
        frame = watching.look(totals=False)
    assert frame.done == 500.0
    assert set(frame.curves["loss"]) == {0.5}


def test_a_printed_line_of_ten_steps_is_ten_steps_of_the_pace(tmp_path: Path) -> None:
    lines = [Step(i * 20 * S, (i + 1) * 20 * S, index=10 * i + 9, steps=10) for i in range(10)]
    run = run_of(tmp_path / "run", steps=lines, header={"total_steps": 200}, closed=False)
    with watched(run, now_ns=at(201)) as watching:
        frame = watching.look(totals=False)
    assert frame.done == 100
    assert frame.eta_s == pytest.approx(200.0)  # 100 more, at one in 2 s


def test_a_goal_is_one_for_every_view(tmp_path: Path) -> None:
    steps = even_steps(10, tokens_computed=100, tokens_real=60)
    run = run_of(tmp_path / "run", steps=steps, header={"budget": {"tokens": 1200}})
    with watched(run) as watching:
        assert watching.look(totals=False).done == 600.0
    assert remaining(evidence_of(Run.open(run))).done == 600.0
    resumed = [Step(i * S, (i + 1) * S, index=500 + i) for i in range(10)]
    run = run_of(tmp_path / "resumed", steps=resumed, header={"total_steps": 1000})
    found = remaining(evidence_of(Run.open(run)))
    with watched(run) as watching:
        frame = watching.look(totals=False)
    assert (found.unit, found.done, found.total) == (frame.unit, frame.done, frame.total)
    assert found.done == 510


def test_a_run_whose_steps_stopped_has_no_pace_and_no_time_to_go(tmp_path: Path) -> None:
    run = run_of(
        tmp_path / "run", steps=even_steps(50, tokens_computed=100), samples=samples(400),
        header={"total_steps": 100}, closed=False,
    )  # fmt: skip
    with watched(run, now_ns=at(400)) as watching:
        frame = watching.look(totals=False)
    assert frame.quiet_s == pytest.approx(351.9)  # the last reading is that of 401.9 s
    assert frame.eta_s is None
    assert frame.no_eta == "last step 5 min 52 s ago"
    assert frame.recent["throughput.tokens_per_s"] == Missing("the last step ended 5 min 52 s ago")
    assert "stalled > 10 min" in frame.rules


def test_long_steps_are_no_silence(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", steps=even_steps(5, seconds=60.0), closed=False)
    with watched(run, now_ns=at(300 + 250)) as watching:
        assert watching.look(totals=False).quiet_s is None
    with watched(run, now_ns=at(300 + 350)) as watching:
        assert watching.look(totals=False).quiet_s == pytest.approx(350.0)


def test_what_all_ranks_tell_is_one_alert_and_two_devices_are_two(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for rank in (0, 1):
        told = [
            Mark((100 + rank) * S, "alert", f"tokens_per_s < -20%: {50 + rank} tokens/s"),
            Mark((110 + rank) * S, "alert", f"throttled: gpu:{rank} is throttled by heat"),
        ]
        add_writer(run, steps=even_steps(5, rank=rank), marks=told, header={"clock": CLOCK})
    with watched(run) as watching:
        frame = watching.look(totals=False)
    assert [one.text for one in frame.alerts] == [
        "tokens_per_s < -20%: 50 tokens/s",
        *(f"throttled: gpu:{rank} is throttled by heat" for rank in (0, 1)),
    ]


def lost(rank: int, at: int, *, told: bool = True) -> dict[str, Any]:
    """A writer whose loss is none from a step on, which its own alarm told of."""
    steps = [
        replace(one, loss=math.nan if at <= number < at + 3 else 2.0)
        for number, one in enumerate(even_steps(20, rank=rank))
    ]
    marks = [Mark((at + 1) * S, "alert", f"loss nan: loss nan at step {at}")] if told else []
    return {"steps": steps, "marks": marks, "header": {"clock": CLOCK}}


@pytest.mark.parametrize("told", [True, False])
def test_a_loss_that_several_ranks_lose_is_one_alert_with_the_ranks(
    tmp_path: Path, told: bool
) -> None:
    run = make_run(tmp_path / "run")
    for rank, at in ((0, 6), (1, 6), (3, 7)):
        add_writer(run, **lost(rank, at, told=told))
    add_writer(run, steps=even_steps(20, rank=2, loss=2.0), header={"clock": CLOCK})
    with watched(run, rules=["loss nan"]) as watching:
        (alert,) = watching.look(totals=False).alerts
    assert alert.with_ranks == "loss nan: loss nan at step 6 (3 ranks: 0, 1, 3)"
    assert alert.was_told is told
    notes = [one for one in summarize(Run.open(run)).notes if one.startswith("alert")]
    assert notes == (["alert: loss nan: loss nan at step 6 (3 ranks: 0, 1, 3)"] if told else [])


def test_the_ranks_of_what_somebody_told_who_watches_all_are_seen_now(tmp_path: Path) -> None:
    """As `erg record` does: its own share has the marks and no steps."""
    run = make_run(tmp_path / "run")
    for rank in (0, 2):
        add_writer(run, **lost(rank, 6, told=False))
    twice = [Mark(7 * S, "alert", "loss nan: loss nan at step 6")] * 2
    add_writer(run, marks=twice, stream="output", header={"clock": CLOCK})
    with watched(run, rules=["loss nan"]) as watching:
        (alert,) = watching.look(totals=False).alerts
    assert (alert.with_ranks, alert.was_told) == (
        "loss nan: loss nan at step 6 (2 ranks: 0, 2)",
        True,
    )


def test_one_rank_of_several_is_named_and_one_that_falls_again_is_another_alert(
    tmp_path: Path,
) -> None:
    run = make_run(tmp_path / "run")
    add_writer(run, steps=even_steps(20, rank=0, loss=2.0), header={"clock": CLOCK})
    again = lost(1, 6)
    again["steps"][12] = replace(again["steps"][12], loss=math.inf)
    again["marks"].append(Mark(13 * S, "alert", "loss nan: loss inf at step 12"))
    add_writer(run, **again)
    with watched(run, rules=["loss nan"]) as watching:
        said = [one.with_ranks for one in watching.look(totals=False).alerts]
    assert said == [
        "loss nan: loss nan at step 6 (rank 1)",
        "loss nan: loss inf at step 12 (rank 1)",
    ]


def two_trainings(path: Path) -> Path:
    """Of one command: thirty steps, and twenty at a fourth of the pace."""
    run = make_run(path)
    for name, steps in (
        ("A", even_steps(30, tokens_computed=100, loss=2.0)),
        ("B", even_steps(20, seconds=4.0, tokens_computed=100, loss=1.0)),
    ):
        training = {"id": name, "world": 1, "model": f"Model{name}"}
        add_writer(run, steps=steps, header={"clock": CLOCK, "training": training})
    return run


def test_of_several_trainings_one_is_watched_and_none_of_the_other(tmp_path: Path) -> None:
    run = two_trainings(tmp_path / "run")
    models = [Run.open(run).training(n).name for n in (1, 2)]
    steps = {"test, ModelA": (30, 2.0, 1.0), "test, ModelB": (20, 1.0, 4.0)}
    for number in (1, 2):
        with watched(run, training=number) as watching:
            frame = watching.look(totals=True)
        assert frame.run.name == models[number - 1]
        step_s = frame.so_far["time.step_s"]
        assert isinstance(step_s, Reading)
        assert (frame.step, frame.loss, step_s.value) == steps[frame.run.name]
        assert len(frame.curves["loss"]) == frame.step
        assert (frame.training, frame.trainings) == (number, 2)
    with watched(run) as watching:  # the newest
        assert watching.look(totals=False).run.name == models[1]
    with pytest.raises(UsageError, match="no training 3"):
        RunWatcher(run, training=3)


def test_a_training_that_begins_is_watched_from_then_on(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    first = {"clock": CLOCK, "training": {"id": "A", "world": 1}}
    add_writer(run, steps=even_steps(30, loss=2.0), header=first)
    with watched(run) as watching:
        assert watching.look(totals=False).step == 30
        later = {"monotonic_ns": 0, "wall_ns": CLOCK["wall_ns"] + 60 * S}
        second = {"clock": later, "training": {"id": "B", "world": 1}}
        # Without numbers: what is counted is how many there are.
        steps = [replace(one, index=None) for one in even_steps(5, loss=1.0)]
        add_writer(run, steps=steps, header=second)
        frame = watching.look(totals=False)
    assert (frame.step, frame.loss, frame.training) == (5, 1.0, 2)
    assert frame.curves["loss"] == (1.0,) * 5


def test_one_that_was_named_stays_when_another_begins(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    first = {"clock": CLOCK, "training": {"id": "A", "world": 1}}
    add_writer(run, steps=even_steps(30, loss=2.0), header=first)
    with watched(run, training=1) as watching:
        assert watching.look(totals=False).step == 30
        later = {"monotonic_ns": 0, "wall_ns": CLOCK["wall_ns"] + 60 * S}
        add_writer(
            run,
            steps=even_steps(5, loss=1.0),
            header={"clock": later, "training": {"id": "B", "world": 1}},
        )
        frame = watching.look(totals=False)
    assert (frame.step, frame.loss, frame.training) == (30, 2.0, 1)
    assert frame.curves["loss"] == (2.0,) * 30


def test_another_run_under_the_same_path_is_begun_anew(tmp_path: Path) -> None:
    first = even_steps(100, tokens_computed=100, loss=2.0)
    first[50] = replace(first[50], loss=math.nan)
    run = run_of(tmp_path / "run", steps=first, samples=samples(100), closed=False)
    with watched(run, rules=["loss nan"]) as watching:
        before = watching.look(totals=True)
        shutil.rmtree(run)
        # Ten steps of half the tokens, at 100 W; nothing of it is worth an alert.
        second = even_steps(10, tokens_computed=50, loss=0.5)
        run_of(tmp_path / "run", steps=second, samples=samples(10, 100.0), closed=False)
        frame = watching.look(totals=False)
    assert (before.step, before.replaced, len(before.alerts)) == (100, 0, 1)
    assert (frame.step, frame.replaced, frame.alerts) == (10, 1, ())
    assert frame.loss == 0.5
    assert frame.curves["loss"] == (0.5,) * 10
    assert value(frame.so_far["throughput.tokens_per_s"]) == pytest.approx(50.0)
    assert value(frame.so_far["energy.joules_per_token"]) == pytest.approx(2.0)
    assert frame.gauges[0].values["power_w"] == 100.0
