"""Where time and joules went: parts that add up, checked by hand."""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.explain.time import time_split
from ergmeter.metrics.explain.waterfall import explain
from ergmeter.metrics.summarize import evidence_of
from ergmeter.metrics.time_breakdown import TimeBreakdown, time_breakdown
from ergmeter.records import Mark, Reading, Sample, Step
from ergmeter.runlog.reader import Run
from ergmeter.runlog.settings import Settings
from tests.runs import GPU, add_writer, run_of
from tests.unit.metrics.test_h200 import replayed

S = 10**9
# A run of 40 s that draws 100 W before its first step, 300 W until 30 s and 100 W afterwards.
STEPS = [
    Step(5 * S, 9 * S, index=0),  # compiles: 4 s instead of 1
    *(Step((9 + i) * S, (10 + i) * S, index=1 + i) for i in range(8)),  # to 17 s
    Step(17 * S, 18 * S, phase="data"),
    Step(18 * S, 19 * S, index=9),
    Step(19 * S, 21 * S, phase="eval"),
    Step(20 * S, 21 * S, phase="checkpoint"),  # inside of the evaluation
    Step(21 * S, 26 * S, index=10),  # 4 s too long
    Step(26 * S + S // 2, 27 * S + S // 2, index=11),  # half a second after the one before
    Step(30 * S + S // 2, 31 * S + S // 2, index=12),  # 3 s after it
]
SAMPLES = [
    Sample(i * S // 10, "GPU-0", power_w=300.0 if 50 <= i < 300 else 100.0) for i in range(401)
]


def lived(path: Path, end_ns: int, **contents: Any) -> Run:
    """A run from now on: its writer marks its opening by the clock."""
    zero_ns = time.monotonic_ns()
    moved: dict[str, Any] = {
        "steps": [
            replace(one, start_ns=one.start_ns + zero_ns, end_ns=one.end_ns + zero_ns)
            for one in contents.pop("steps")
        ],
        "samples": [replace(one, t_ns=one.t_ns + zero_ns) for one in contents.pop("samples", ())],
    }
    return run_of(
        path / "run",
        marks=[Mark(zero_ns + end_ns, "ended", "finished")],
        header={"clock": {"monotonic_ns": zero_ns, "wall_ns": time.time_ns()}},
        closed=False,
        **moved,
        **contents,
    )


def of(path: Path, *, samples: bool = True, **overrides: object) -> TimeBreakdown:
    sampled = {"samples": SAMPLES, "devices": [GPU]} if samples else {}
    run = lived(path, 40 * S, steps=STEPS, **sampled)
    return time_breakdown(evidence_of(run, Settings(**overrides)))  # type: ignore[arg-type]


def seconds(found: TimeBreakdown) -> dict[str, float]:
    return {part.name: part.seconds for part in found.parts}


def test_each_part_is_as_long_as_one_counts_by_hand(tmp_path: Path) -> None:
    assert seconds(of(tmp_path)) == pytest.approx(
        {
            "startup": 5.0,
            "slow_start": 3.0,  # the first step, beyond the median of 1 s
            "data": 1.0,
            "train": 1 + 8 + 1 + 1 + 1 + 1,
            "eval": 1.0,  # the other second is the checkpoint's
            "checkpoint": 1.0,
            "stall": 4.0 + 3.0,  # the long step, and the long gap
            "unknown": 0.5,
            "end": 8.5,
        }
    )


def test_a_declared_warm_up_is_all_warm_up(tmp_path: Path) -> None:
    found = seconds(of(tmp_path, warmup_steps=3))
    assert found["warmup"] == pytest.approx(4 + 1 + 1)
    assert found["train"] == pytest.approx(13 - 3)


def test_a_rank_that_is_behind_has_its_warm_up_in_the_warm_up(tmp_path: Path) -> None:
    """Two ranks, the one that is looked at a millisecond behind: 41 s of warm-up and no stall."""
    late_ns = S // 1000

    def steps(rank: int) -> list[Step]:
        by_ns = 0 if rank else late_ns
        edges = [0, 1, 41, *range(42, 53 if rank == 0 else 52)]
        spans = itertools.pairwise(edges)
        return [
            Step(a * S + by_ns, b * S + by_ns, index=i, rank=rank) for i, (a, b) in enumerate(spans)
        ]

    run = run_of(tmp_path / "run", steps=steps(0), header={"world": 2})
    add_writer(run.path, steps=steps(1), header={"world": 2})
    found = seconds(time_breakdown(evidence_of(Run.open(run.path), Settings(warmup_steps=2))))
    assert found["warmup"] == pytest.approx(41.0)
    assert found["train"] == pytest.approx(11.0)
    assert "stall" not in found


def test_joules_are_those_of_the_same_instants(tmp_path: Path) -> None:
    found = of(tmp_path)
    joules = {part.name: part.joules for part in found.parts}
    assert joules["startup"] == pytest.approx(500, rel=0.03)  # 5 s of 100 W
    assert joules["data"] == pytest.approx(300, rel=1e-6)
    assert joules["eval"] == pytest.approx(300, rel=1e-6)
    assert joules["end"] == pytest.approx(850, rel=1e-6)  # 8.5 s of 100 W
    whole_j = 15 * 100 + 25 * 300
    assert found.whole_j == pytest.approx(whole_j, rel=1e-3)
    assert sum(j for j in joules.values() if j is not None) == pytest.approx(found.whole_j)
    assert found.joules_basis == "derived"
    assert found.unread_s == pytest.approx(0.0, abs=1e-9)


def test_shares_are_of_the_whole_run(tmp_path: Path) -> None:
    found = of(tmp_path)
    assert found.whole_s == 40.0
    assert sum(part.time_frac for part in found.parts) == pytest.approx(1.0)
    assert sum(part.joules_frac or 0 for part in found.parts) == pytest.approx(1.0)
    startup = found.parts[0]
    assert (startup.name, startup.time_frac) == ("startup", 0.125)


def test_without_a_sensor_time_is_told_and_joules_have_their_reason(tmp_path: Path) -> None:
    found = of(tmp_path, samples=False)
    assert found.whole_j is None
    assert found.why_no_joules.startswith("no energy sensor")
    assert {part.joules for part in found.parts} == {None}
    assert sum(part.seconds for part in found.parts) == pytest.approx(40.0)


def test_a_run_without_steps_has_no_parts(tmp_path: Path) -> None:
    with pytest.raises(NotMeasurable, match="no steps were recorded"):
        time_breakdown(evidence_of(run_of(tmp_path / "run", marks=[Mark(S, "ended", "finished")])))


@st.composite
def any_steps(draw: st.DrawFn) -> list[Step]:
    steps, at = [], 0
    for index in range(draw(st.integers(1, 25))):
        at += draw(st.integers(0, 3 * S))
        length = draw(st.integers(1, 3 * S))
        phase = draw(st.sampled_from(["train", "train", "eval", "data", "checkpoint", "idle"]))
        steps.append(Step(at, at + length, index=index, phase=phase if index else "train"))
        at += draw(st.integers(0, length))  # spans may overlap
    return steps


@given(any_steps())
@settings(max_examples=40)
def test_parts_add_up_to_the_life_of_the_run_whatever_was_told(
    tmp_path_factory: pytest.TempPathFactory, steps: list[Step]
) -> None:
    end_ns = max(step.end_ns for step in steps) + S
    found = time_breakdown(evidence_of(lived(tmp_path_factory.mktemp("any"), end_ns, steps=steps)))
    assert sum(part.seconds for part in found.parts) == pytest.approx(end_ns / S, rel=1e-12)
    assert all(part.seconds > 0 for part in found.parts)


def test_a_step_that_waited_for_what_was_named_is_no_stall(tmp_path: Path) -> None:
    """Steps of 1 s; one of 4 s waits for data for 3 s of them, one of 6 s for 3 s, in two spans."""
    steps = [
        *(Step(i * S, (i + 1) * S, index=i) for i in range(9)),
        Step(9 * S, 13 * S, index=9),
        Step(9 * S, 12 * S, phase="data"),
        Step(13 * S, 19 * S, index=10),
        Step(13 * S + S // 2, 15 * S, phase="data"),
        Step(16 * S, 17 * S + S // 2, phase="data"),
    ]
    run = lived(tmp_path, 19 * S, steps=steps)
    found = seconds(time_breakdown(evidence_of(run, Settings(warmup_steps=0))))
    # Of the last step half a second before the first wait and half of one after it are as usual.
    assert found == pytest.approx({"train": 9 + 1 + 1, "data": 3 + 3, "stall": 2.0})


def test_a_wait_in_every_step_is_no_part_of_what_is_usual(tmp_path: Path) -> None:
    """Steps of 3 s, of which 2 s wait for data; one takes 3 s of its own beside them."""
    steps, at = [], 0
    for number in range(11):
        longer = 2 * S if number == 6 else 0
        steps += [Step(at, at + 3 * S + longer, index=number), Step(at, at + 2 * S, phase="data")]
        at += 3 * S + longer
    run = lived(tmp_path, at, steps=steps)
    found = seconds(time_breakdown(evidence_of(run, Settings(warmup_steps=0))))
    assert found == pytest.approx({"train": 11.0, "data": 22.0, "stall": 2.0})


def test_the_sleeps_of_a_recording_are_stalls_and_explain_says_the_same(tmp_path: Path) -> None:
    """Half a second after every fifth step of 0.3 s, six times: a gap shorter than two steps."""
    evidence = evidence_of(replayed(tmp_path / "run", "full_bf16_1b_stalls"), Settings())
    found, explained = seconds(time_breakdown(evidence)), time_split(evidence)
    assert found["stall"] == pytest.approx(6 * 0.5, rel=0.02)
    assert explained.parts_s == pytest.approx({"stalls": found["stall"], "gaps": found["unknown"]})


@given(st.data())
@settings(max_examples=60)
def test_explain_has_the_stalls_of_the_breakdown_whatever_the_steps(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Steps with gaps and waits, inside and between; some of each are ten times as long."""
    milliseconds = st.integers(1, 100) | st.integers(500, 1000)
    steps: list[Step] = []
    at = 0
    for index in range(data.draw(st.integers(10, 30))):
        length = 2 * data.draw(milliseconds)
        steps.append(Step(at, at + length * S // 1000, index=index))
        if data.draw(st.booleans()):  # waits in the first half of the step, or after it
            wait_at = data.draw(st.sampled_from([at, steps[-1].end_ns]))
            steps.append(Step(wait_at, wait_at + length * S // 2000, phase="data"))
        at = max(step.end_ns for step in steps[-2:]) + data.draw(milliseconds) * S // 1000
    steps.append(Step(at, at + S // 10, index=len(steps)))  # so that nothing is after the window
    run = lived(tmp_path_factory.mktemp("any"), steps[-1].end_ns, steps=steps)
    evidence = evidence_of(run, Settings(warmup_steps=0))
    found, explained = seconds(time_breakdown(evidence)), time_split(evidence).parts_s
    blocks = {"stall": "stalls", "slow_start": "slow_start", "data": "data", "unknown": "gaps"}
    for part, block in blocks.items():
        assert explained.get(block, 0.0) == pytest.approx(found.get(part, 0.0), abs=1e-6)


def plain(count: int, *, at: int = 0, every: int = S) -> list[Step]:
    """Steps of one length, end to end."""
    return [Step(at + i * every, at + (i + 1) * every, index=i) for i in range(count)]


def both(path: Path, steps: list[Step], **overrides: Any) -> tuple[dict[str, float], ...]:
    """The seconds of the breakdown, and those of `erg explain`."""
    end_ns = max(step.end_ns for step in steps)
    run = lived(path, end_ns, steps=steps, devices=[GPU], samples=SAMPLES)
    evidence = evidence_of(run, Settings(**overrides))
    return seconds(time_breakdown(evidence)), time_split(evidence).parts_s


def test_steps_that_only_wait_do_not_make_stalls_of_the_others(tmp_path: Path) -> None:
    """12 of 20 steps are waits for data from end to end: no time of a step's own is usual."""
    waits = [replace(step, phase="data", index=None) for step in plain(12)]
    found, explained = both(tmp_path, [*plain(20), *waits], warmup_steps=0)
    assert found == pytest.approx({"data": 12.0, "train": 8.0})
    assert explained == pytest.approx({"data": 12.0})


@pytest.mark.parametrize("phase", ["idle", "decode", "prefill"])
def test_a_named_pause_between_steps_is_no_stall(tmp_path: Path, phase: str) -> None:
    pause = Step(20 * S, 25 * S, phase=phase)
    steps = [*plain(20), pause, *plain(20, at=25 * S)]
    found, explained = both(tmp_path, steps, window="whole")
    assert found == pytest.approx({"train": 40.0, phase: 5.0})
    assert explained[phase] == pytest.approx(5.0)
    assert "stalls" not in explained


def test_steps_that_a_user_leaves_out_are_no_warm_up(tmp_path: Path) -> None:
    """30 steps, 20 s of nothing, 30 steps; a window from the 31st on moves nothing of the run."""
    later = [replace(step, index=30 + i) for i, step in enumerate(plain(30, at=50 * S))]
    run = lived(tmp_path, 80 * S, steps=[*plain(30), *later])
    for window in ("training", "30:60"):
        found = seconds(time_breakdown(evidence_of(run, Settings(window=window))))
        assert found == pytest.approx({"train": 60.0, "stall": 20.0})


def test_steps_that_overlap_have_the_stalls_of_explain(tmp_path: Path) -> None:
    """Of two long steps that overlap, the time from end to end counts once."""
    two = [Step(10 * S, 16 * S, index=10), Step(12 * S, 16 * S + S // 2, index=11)]
    found, explained = both(tmp_path, [*plain(10), *two, *plain(10, at=two[1].end_ns)])
    assert found["stall"] == pytest.approx(5.0) == explained["stalls"]


def test_a_run_that_is_all_warm_up_says_nothing_of_stalls(tmp_path: Path) -> None:
    run = lived(tmp_path, 20 * S, steps=plain(20))
    assert "stall" not in time_breakdown(evidence_of(run, Settings(warmup_steps=50))).note


def test_with_few_steps_stalls_are_not_known_and_it_is_said(tmp_path: Path) -> None:
    steps = [Step(i * S, (i + 1) * S, index=i) for i in range(6)]
    steps.append(Step(6 * S, 26 * S, index=6))
    found = time_breakdown(evidence_of(lived(tmp_path, 26 * S, steps=steps), Settings()))
    assert seconds(found) == pytest.approx({"train": 26.0})
    assert found.note.endswith("; no stalls: 7 steps: too few to tell a stall from the rest")


def test_a_gap_after_every_step_is_none_and_a_longer_one_is_by_what_it_has_beyond_them(
    tmp_path: Path,
) -> None:
    """Steps of 0.4 s every second; once 2 s later, once 0.9 s: not twice the period."""
    starts_s = [float(number) for number in range(60)]
    starts_s = [at + (2.0 if at >= 20 else 0.0) + (0.9 if at >= 40 else 0.0) for at in starts_s]
    steps = [
        Step(round(at * S), round((at + 0.4) * S), index=number)
        for number, at in enumerate(starts_s)
    ]
    run = lived(tmp_path, steps[-1].end_ns, steps=steps)
    found = seconds(time_breakdown(evidence_of(run, Settings())))
    assert found == pytest.approx({"train": 60 * 0.4, "stall": 2.0, "unknown": 59 * 0.6 + 0.9})


def test_a_whole_run_may_have_named_spans_outside_its_steps_alone(tmp_path: Path) -> None:
    pause = Step(20 * S, 25 * S, phase="idle")
    run = lived(tmp_path, 25 * S, steps=[*plain(20), pause], devices=[GPU], samples=SAMPLES)
    found = explain(evidence_of(run, Settings(window="whole")))
    assert isinstance(found.energy, Reading)
    assert {block.key: block.share_frac for block in found.blocks}["idle"] == pytest.approx(0.2)
