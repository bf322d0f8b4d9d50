"""When an alert sets in and when it is over, by hand; and that batches make no difference."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ergmeter.metrics.live.alert_judge import MAX_ONSETS, Alert, Judge
from ergmeter.metrics.live.alert_rules import parse_rules
from ergmeter.metrics.live.follow import RunFollower
from ergmeter.metrics.live.rows import LiveRows
from ergmeter.records import Device, Sample, Step
from ergmeter.runlog.settings import Settings
from tests.runs import GPU, add_writer, even_steps, make_run

S = 10**9
PROCESS = Device("process:a:1", "process", "python", "process")


def paced(*lengths_s: float, start_s: float = 0.0, **fields: object) -> list[Step]:
    """Steps of these lengths, one after the other, of 100 tokens each."""
    ends = [start_s + t for t in itertools.accumulate(lengths_s)]
    return [
        Step(round((end - s) * S), round(end * S), index=i, tokens_computed=100, **fields)  # type: ignore[arg-type]
        for i, (end, s) in enumerate(zip(ends, lengths_s, strict=True))
    ]


def alerts(
    path: Path,
    *rules: str,
    steps: Iterable[Step] = (),
    samples: Iterable[Sample] = (),
    devices: Iterable[Device] = (GPU,),
    declared: Settings | None = None,
) -> tuple[list[Alert], Judge]:
    """What a judge says of a run that is over."""
    run = make_run(path)
    add_writer(run, steps=steps, samples=samples, devices=list(devices))
    with closing(RunFollower(run)) as following:
        following.learn()
        judge = Judge(parse_rules(rules), devices=following.devices, settings=declared, start_ns=0)
        _, ready, is_behind = following.look(is_last=True)
        assert not is_behind
        return judge.feed(ready), judge


def times_s(found: list[Alert], *, over: bool = False) -> list[float]:
    return [one.t_ns / S for one in found if one.is_over is over]


def test_a_run_at_half_its_pace_is_slow_after_two_stretches_and_over_when_it_is_back(
    tmp_path: Path,
) -> None:
    # 1 s a step until 100 s, 2 s a step until 160 s, 1 s again. Stretches of 10 s: those that end
    # at 110 and 120 are the first two slow ones, the one that ends at 170 is the first quick one.
    steps = paced(*[1.0] * 100, *[2.0] * 30, *[1.0] * 60)
    found, _ = alerts(tmp_path / "run", "tokens_per_s < -20%", steps=steps)
    assert times_s(found) == [120.0]
    assert times_s(found, over=True) == [170.0]
    assert found[0].value == pytest.approx(50.0)
    assert found[0].threshold == pytest.approx(80.0)
    assert found[0].text == (
        "tokens_per_s < -20%: 50 tokens/s, 50 % below the run's median of 100 tokens/s"
    )


def test_one_slow_stretch_is_no_alert(tmp_path: Path) -> None:
    steps = paced(*[1.0] * 100, *[2.0] * 5, *[1.0] * 60)
    found, _ = alerts(tmp_path / "run", "tokens_per_s < -20%", steps=steps)
    assert found == []


def interrupted(phase: str) -> list[Step]:
    """A hundred steps of 1 s, then after every 5 more 10 s of something else, eight times."""
    rows, t_s = paced(*[1.0] * 100), 100
    for _ in range(8):
        rows.append(Step(t_s * S, (t_s + 10) * S, phase=phase))
        rows += paced(*[1.0] * 5, start_s=t_s + 10.0)
        t_s += 15
    return rows


@pytest.mark.parametrize(("phase", "onsets"), [("eval", 0), ("checkpoint", 0), ("data", 1)])
def test_evaluation_and_checkpoints_are_not_slow_steps_but_waiting_for_data_is(
    tmp_path: Path, phase: str, onsets: int
) -> None:
    found, _ = alerts(tmp_path / "run", "tokens_per_s < -20%", steps=interrupted(phase))
    assert len(times_s(found)) == onsets


def test_a_limit_of_ones_own_needs_no_median(tmp_path: Path) -> None:
    found, _ = alerts(tmp_path / "run", "step_s > 0.5 s", steps=paced(*[1.0] * 30))
    assert times_s(found) == [20.0]
    assert found[0].detail == "1 s"


def test_a_loss_that_is_none_is_told_once_until_it_is_one_again(tmp_path: Path) -> None:
    losses = [2.0, math.nan, math.inf, math.nan, 2.0, 2.0, math.nan]
    steps = [Step(i * S, (i + 1) * S, index=i, loss=loss) for i, loss in enumerate(losses)]
    found, _ = alerts(tmp_path / "run", "loss nan", steps=steps)
    assert times_s(found) == [2.0, 7.0]
    assert times_s(found, over=True) == [5.0]
    assert found[0].detail == "loss nan at step 1"
    assert found[0].as_json()["value"] is None


def test_a_loss_that_nobody_tells_is_not_nan_and_the_rule_says_that_it_judges_nothing(
    tmp_path: Path,
) -> None:
    found, judge = alerts(tmp_path / "run", "loss nan", steps=even_steps(20))
    assert found == []
    assert judge.unjudged == {"loss nan": "no step reports loss, and no printed line has it"}


def held(bits: dict[range, int]) -> list[Sample]:
    """Readings every 0.1 s of the reasons for which the clock is held down."""
    return [
        Sample(k * S // 10, GPU.id, throttled=mask) for span, mask in bits.items() for k in span
    ]


@pytest.mark.parametrize(
    ("mask", "why"), [(0x20, "heat"), (0x40, "heat"), (0x80, "power brake"), (0x8, "power brake")]
)
def test_a_clock_that_heat_or_a_brake_holds_down_for_two_seconds_is_an_alert(
    tmp_path: Path, mask: int, why: str
) -> None:
    samples = held({range(100): 4, range(100, 130): mask, range(130, 300): 4})
    found, _ = alerts(tmp_path / "run", "throttled", samples=samples)
    assert times_s(found) == [12.0]
    assert times_s(found, over=True) == [23.0]
    assert why in found[0].detail
    assert found[0].about == GPU.id


def test_a_power_cap_or_a_short_dip_is_none(tmp_path: Path) -> None:
    samples = held({range(100): 4, range(100, 115): 0x20, range(115, 300): 4})
    found, judge = alerts(tmp_path / "run", "throttled", samples=samples)
    assert found == []
    assert judge.unjudged == {}


def grown(bytes_at: Iterable[float]) -> list[Sample]:
    return [
        Sample(round((i + 0.5) * S), PROCESS.id, memory_bytes=round(b))
        for i, b in enumerate(bytes_at)
    ]


def test_memory_that_rises_five_stretches_in_a_row_by_so_much_is_an_alert(tmp_path: Path) -> None:
    # Of 100 steps each 20 are a stretch; a percent of 1 GB a second from the first step on. The
    # first stretch begins at 1 s, its least is 1.01 GB (at 1.5 s); five rises later, at 120 s:
    # the stretch from 100 s on has 2.0 GB.
    samples = grown(1e9 * (1 + 0.01 * i) for i in range(200))
    found, _ = alerts(
        tmp_path / "run", "memory +10%", steps=paced(*[1.0] * 200), samples=samples,
        devices=[PROCESS],
    )  # fmt: skip
    assert times_s(found) == [120.0]
    assert found[0].value == pytest.approx(2.0e9)
    assert found[0].threshold == pytest.approx(1.01e9 * 1.1)
    assert "without a fall" in found[0].detail


def test_memory_that_goes_up_and_down_or_is_loaded_before_the_first_step_is_none(
    tmp_path: Path,
) -> None:
    saw = grown(1e9 * (1 + 0.01 * (i % 50)) for i in range(200))
    found, _ = alerts(
        tmp_path / "a", "memory +10%", steps=paced(*[1.0] * 200), samples=saw, devices=[PROCESS]
    )
    assert found == []
    loaded = grown([*(1e9 * (1 + i) for i in range(100)), *[100e9] * 200])
    steps = paced(*[1.0] * 200, start_s=100.0)
    found, _ = alerts(tmp_path / "b", "memory +10%", steps=steps, samples=loaded, devices=[PROCESS])
    assert found == []


def drawn(watts: float, seconds: int, *, counter: bool) -> list[Sample]:
    return [
        Sample(k * S // 10, GPU.id, power_w=watts, energy_j=watts * k / 10 if counter else None)
        for k in range(seconds * 10 + 1)
    ]


@pytest.mark.parametrize("counter", [True, False])
def test_a_budget_of_energy_is_used_up_at_the_instant_it_is(tmp_path: Path, counter: bool) -> None:
    # 360 W are 0.1 Wh a second: 5 Wh after 50 s.
    found, judge = alerts(
        tmp_path / "run", "energy > 5 Wh", samples=drawn(360.0, 80, counter=counter)
    )
    assert times_s(found) == [pytest.approx(50.0, abs=0.11)]
    assert judge.totals.energy.known_j == pytest.approx(360.0 * 80)


@pytest.mark.parametrize(
    ("rule", "said"),
    [("energy > 3600 J", "3600 J used"), ("energy >18kJ", "18 kJ used"), ("energy > 5 Wh", "5 Wh")],
)
def test_what_was_used_is_told_in_the_unit_of_the_rule(
    tmp_path: Path, rule: str, said: str
) -> None:
    found, _ = alerts(tmp_path / "run", rule, samples=drawn(360.0, 80, counter=True))
    assert found[0].detail.startswith(said)


def test_a_budget_of_energy_without_a_device_that_could_tell_is_known_from_the_start(
    tmp_path: Path,
) -> None:
    rules, rows = parse_rules(["energy > 5 Wh", "loss nan"]), LiveRows(0)
    host = Device("process:1", "process", "python", "process")
    blind = Judge(rules, devices={host.id: host})
    blind.feed(rows)
    assert blind.hopeless == {"energy > 5 Wh": "no device reports its energy"}
    assert Judge(rules, devices={host.id: host, GPU.id: GPU}).hopeless == {}
    assert Judge(rules, devices={}).hopeless == {}  # none is known yet


@pytest.mark.parametrize(
    ("seconds", "rule", "lacks"),
    [
        (59, "tokens_per_s < -20%", "needs 5 stretches of 10 s, and one more; 5 seen"),
        (61, "tokens_per_s < -20%", ""),
        (9, "tokens_per_s < 5", "no stretch of 10 s has ended yet"),
        (11, "tokens_per_s < 5", ""),
    ],
)
def test_a_run_that_was_too_short_to_be_judged_says_so(
    tmp_path: Path, seconds: int, rule: str, lacks: str
) -> None:
    found, judge = alerts(tmp_path / "run", rule, steps=paced(*[1.0] * seconds))
    assert found == []
    assert bool(judge.unjudged) == bool(lacks)
    assert lacks in judge.unjudged.get(rule, "")
    assert judge.untold == {}  # it is a matter of time


def test_a_gap_in_the_power_is_not_bridged(tmp_path: Path) -> None:
    samples = [s for s in drawn(100.0, 60, counter=False) if not 20 * S < s.t_ns < 40 * S]
    _, judge = alerts(tmp_path / "run", "energy > 5 kWh", samples=samples)
    assert judge.totals.energy.known_j == pytest.approx(100.0 * 40)


def test_energy_is_of_the_boards_and_of_each_once(tmp_path: Path) -> None:
    cpu = Device("cpu:0", "cpu", "package", "rapl")
    die = Device("GPU-1", "gpu", "second die", "amd", {"energy_counted_in": GPU.id})
    more = [
        Sample(s.t_ns, device.id, power_w=50.0)
        for s in drawn(100.0, 10, counter=False)
        for device in (cpu, die)
    ]
    samples = [*drawn(100.0, 10, counter=False), *more]
    _, judge = alerts(tmp_path / "run", "energy > 5 kWh", samples=samples, devices=[GPU, cpu, die])
    assert judge.totals.energy.known_j == pytest.approx(1000.0)


def test_a_budget_of_money_is_rent_or_a_bill_whichever_is_used_up_first(tmp_path: Path) -> None:
    rent = Settings(price_per_gpu_hour=3.6, currency="EUR")  # a thousandth a second
    found, _ = alerts(
        tmp_path / "a", "cost > 0.03", samples=drawn(360.0, 80, counter=True), declared=rent
    )
    assert times_s(found) == [pytest.approx(30.0)]
    assert found[0].detail == "0.03 EUR of rent"
    bill = Settings(price_per_kwh=10.0, pue=1.5, currency="EUR")  # 0.0015 a second
    found, _ = alerts(
        tmp_path / "b", "cost > 0.03", samples=drawn(360.0, 80, counter=True), declared=bill
    )
    assert times_s(found) == [pytest.approx(20.0, abs=0.11)]
    assert found[0].detail.endswith("EUR of bill for energy")


def test_a_budget_of_time_begins_with_the_run(tmp_path: Path) -> None:
    found, _ = alerts(tmp_path / "run", "time > 1 min", steps=paced(*[1.0] * 100))
    assert times_s(found) == [60.0]
    found, _ = alerts(tmp_path / "other", "time > 2 min", steps=paced(*[1.0] * 100))
    assert found == []


def test_a_run_that_makes_no_step_any_more_is_stalled_until_it_does(tmp_path: Path) -> None:
    samples = [Sample(k * S, GPU.id, power_w=60.0) for k in range(200)]
    steps = [*paced(*[1.0] * 20), *paced(1.0, 1.0, start_s=150.0)]
    found, _ = alerts(tmp_path / "run", "stalled > 30 s", steps=steps, samples=samples)
    assert times_s(found) == [50.0, 182.0]
    assert times_s(found, over=True) == [151.0]


def test_a_run_that_never_stepped_is_not_stalled(tmp_path: Path) -> None:
    samples = [Sample(k * S, GPU.id, power_w=60.0) for k in range(200)]
    found, judge = alerts(tmp_path / "run", "stalled > 30 s", samples=samples)
    assert found == []
    assert judge.unjudged == {"stalled > 30 s": "no step was seen"}


def test_a_rule_that_goes_on_and_off_all_night_is_told_so_often_and_no_more(
    tmp_path: Path,
) -> None:
    steps = [Step(i * S, (i + 1) * S, index=i, loss=math.nan if i % 2 else 2.0) for i in range(200)]
    found, _ = alerts(tmp_path / "run", "loss nan", steps=steps)
    assert len(times_s(found)) == MAX_ONSETS


ALL = (
    *("tokens_per_s < -20%", "step_s > +50%", "loss nan", "throttled", "memory +10%"),
    *("energy > 5 Wh", "time > 2 min", "stalled > 8 s"),
)


@settings(max_examples=20)
@given(cuts=st.lists(st.integers(1, 260), unique=True, max_size=12))
def test_batches_make_no_difference(
    cuts: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The same rows in one batch, or in as many as somebody looked: the same alerts."""
    lengths = [*[1.0] * 100, *[2.0] * 30, 12.0, *[1.0] * 80]
    steps = [
        Step(s.start_ns, s.end_ns, index=s.index, tokens_computed=100,
             loss=math.nan if s.index == 150 else 1.0)
        for s in paced(*lengths)
    ]  # fmt: skip
    samples = [
        Sample(k * S // 2, GPU.id, power_w=360.0, throttled=0x20 if 100 <= k < 120 else 4,
               memory_bytes=10**9 + k * 10**6)
        for k in range(520)
    ]  # fmt: skip
    path = tmp_path_factory.mktemp("batches")
    whole, _ = alerts(path / "whole", *ALL, steps=steps, samples=samples)
    assert {one.rule.text for one in whole} == set(ALL)

    with closing(RunFollower(path / "whole")) as following:
        following.learn()
        rows, _, _ = following.look(is_last=True)
    judge = Judge(parse_rules(ALL), devices=following.devices, start_ns=0)
    found: list[Alert] = []
    edges = [0, *(cut * S for cut in sorted(cuts)), 300 * S]
    for since_ns, until_ns in itertools.pairwise(edges):
        until_ns = min(until_ns, rows.until_ns)
        found += judge.feed(between(rows, since_ns, until_ns))
    assert sorted((a.t_ns, a.text, a.is_over) for a in found) == sorted(
        (a.t_ns, a.text, a.is_over) for a in whole
    )


def between(rows: LiveRows, since_ns: int, until_ns: int) -> LiveRows:
    part = LiveRows(until_ns)
    for writer, steps in rows.steps.items():
        inside = (steps["end_ns"] > since_ns) & (steps["end_ns"] <= until_ns)
        if inside.any():
            part.steps[writer] = {name: column[inside] for name, column in steps.items()}
    for column, devices in rows.samples.items():
        for device, (t_ns, values) in devices.items():
            inside = (t_ns > since_ns - (since_ns == 0)) & (t_ns <= until_ns)
            if np.any(inside):
                part.samples.setdefault(column, {})[device] = (t_ns[inside], values[inside])
    return part


def test_a_checkpoint_within_an_evaluation_is_taken_out_of_the_pace_once(tmp_path: Path) -> None:
    # After every 5 steps of 2 s there are 10 s of evaluation, with 8 s of a checkpoint in them.
    # The time that is left is 2 s a step throughout; with the 8 s out twice it would be 0.4 s.
    rows: list[Step] = []
    for number in range(8):
        t_s = number * 20
        rows += paced(*[2.0] * 5, start_s=float(t_s))
        rows.append(Step((t_s + 11) * S, (t_s + 19) * S, phase="checkpoint"))
        rows.append(Step((t_s + 10) * S, (t_s + 20) * S, phase="eval"))
    found, _ = alerts(tmp_path / "run", "step_s > 1.9 s", steps=rows)
    assert times_s(found) == [22.0]
    assert times_s(found, over=True) == []


def test_power_read_too_far_apart_is_said_and_is_not_zero(tmp_path: Path) -> None:
    samples = [Sample(k * 5 * S, GPU.id, power_w=300.0) for k in range(20)]
    found, judge = alerts(tmp_path / "run", "energy > 5 Wh", samples=samples)
    assert found == []
    assert judge.totals.energy.known_j is None
    assert judge.unjudged == {"energy > 5 Wh": "power is read 5 s apart (limit 2 s)"}


def test_one_reading_is_no_energy_yet(tmp_path: Path) -> None:
    _, judge = alerts(
        tmp_path / "run", "energy > 5 Wh", samples=[Sample(S, GPU.id, energy_j=1000.0)]
    )
    assert judge.totals.energy.known_j is None


@pytest.mark.parametrize("cuts", [(), (12,), (13,), (11, 12, 13)])
def test_why_a_clock_was_held_down_is_the_same_in_any_batches(cuts: tuple[int, ...]) -> None:
    """Heat from 10 s to 13 s, read every second, and free from then on."""
    judge = Judge(parse_rules(["throttled"]), devices={GPU.id: GPU})
    t_ns = np.arange(20) * S
    bits = np.where((t_ns >= 10 * S) & (t_ns < 13 * S), 0x20, 4).astype(float)
    found: list[Alert] = []
    for first, last in itertools.pairwise((0, *cuts, 20)):
        part = (t_ns[first:last], bits[first:last])
        found += judge.feed(LiveRows(int(part[0][-1]), {}, {"throttled": {GPU.id: part}}))
    assert times_s(found) == [12.0]
    assert found[0].detail.endswith("is throttled by heat")
    assert found[0].value == 0x20


def test_the_reason_for_a_hold_is_not_lost_where_a_batch_begins_with_its_end() -> None:
    """Read every 2.5 s: one reading of heat, then a free one, which is the first of a batch."""
    judge = Judge(parse_rules(["throttled"]), devices={GPU.id: GPU})
    found: list[Alert] = []
    for t_s, bits in ((0.0, 4.0), (2.5, 0x20), (5.0, 4.0)):
        part = (np.array([round(t_s * S)]), np.array([float(bits)]))
        found += judge.feed(LiveRows(round(t_s * S), {}, {"throttled": {GPU.id: part}}))
    assert times_s(found) == [4.5]
    assert found[0].detail.endswith("is throttled by heat")


def judged_memory(path: Path, *writers: list[Step]) -> list[Alert]:
    run = make_run(path)
    samples = grown(1e9 * (1 + 0.01 * i) for i in range(400))
    for number, steps in enumerate(writers):
        add_writer(run, steps=steps, samples=() if number else samples, devices=[PROCESS])
    with closing(RunFollower(run)) as following:
        following.learn()
        judge = Judge(parse_rules(["memory +10%"]), devices=following.devices)
        return judge.feed(following.look(is_last=True)[1])


def test_memory_is_judged_by_the_steps_of_who_trains(tmp_path: Path) -> None:
    other = [Step(0, S // 2, phase="data")]
    for name, writers in (
        ("a", (other, paced(*[1.0] * 200))),
        ("b", (paced(*[1.0] * 200), other)),
    ):
        assert times_s(judged_memory(tmp_path / name, *writers)) == [120.0]


def test_memory_is_judged_by_another_writer_once_the_first_has_ended(tmp_path: Path) -> None:
    """Ten steps of the first, and from 100 s on those of a second: 190 of them end a stretch at
    110, 130, ... The one from 1 s to 110 s is the first, five rises later it is 210 s."""
    found = judged_memory(tmp_path / "run", paced(*[1.0] * 10), paced(*[1.0] * 190, start_s=100.0))
    assert times_s(found) == [210.0]
