"""Step time, window, warm-up, time by phase, and stragglers among the ranks.

A step's time is from the end of the step before it to its own end, so that each step includes the
gap before it. Then step time x steps = window and tokens/s x step time = tokens per step, exactly.
From a step's start to its end is `time.in_step_s`; the difference is `time.outside_steps_frac`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.catalog import Metric, efficientllm, over_whole_run, sft_play
from ergmeter.metrics.definitions.throughput import pace
from ergmeter.metrics.definitions.tokens import need_all_rows, need_rows, steps_in, steps_of
from ergmeter.metrics.evidence.evidence import Evidence
from ergmeter.metrics.evidence.samples import cached_result
from ergmeter.metrics.evidence.steps import Steps, interval_in_order
from ergmeter.metrics.phases import PHASE_TITLES
from ergmeter.records import FloatArray, Reading
from ergmeter.stats.intervals import percentile
from ergmeter.units import NS_PER_S, duration, number_of

# Stragglers. The rank with the longest steps need not be the slow one. Where ranks wait for each
# other at the end of a step, the rank that came late has the shortest step. So both are compared:
# the time in a step, which differs if ranks do not wait, and the time between steps, which is
# longest for the rank that the others wait for. Slow work inside a step that ends with a collective
# can't be assigned by the host's clock (`erg check` names a GPU that is throttled).

STRAGGLING_FRAC = 0.05  # of the step time: a rank further from the median rank is a straggler
_FEW_STEPS = 5


@dataclass(frozen=True, slots=True)
class RankPace:
    """Each rank's median time in a step and median time between steps."""

    ranks: tuple[int, ...]
    hosts: tuple[str, ...]
    in_step_s: FloatArray
    between_s: FloatArray
    step_s: float  # from one step's start to the next one's, of the median rank

    def straggler(self) -> Straggler:
        """The rank that is furthest behind the median rank: slow in its steps, or late to them."""
        slow_s = self.in_step_s - np.median(self.in_step_s)
        late_s = self.between_s - np.median(self.between_s)
        slow, late = int(np.argmax(slow_s)), int(np.argmax(late_s))
        # A late rank has short steps, as the others wait for it.
        is_late = bool(late_s[late] >= slow_s[slow])
        at, by_s = (late, float(late_s[late])) if is_late else (slow, float(slow_s[slow]))
        return Straggler(self.ranks[at], self.hosts[at], is_late, by_s, by_s / self.step_s)


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank, and by how much it is behind the median rank in every step."""

    rank: int
    host: str
    is_late: bool  # late to each step; otherwise slow within it
    by_s: float
    by_frac: float

    @property
    def text(self) -> str:
        """The straggler as a sentence."""
        way = f"takes {duration(self.by_s)} longer for each step than the median rank"
        if self.is_late:
            way = f"comes {duration(self.by_s)} later to each step than the median rank,"
            way += " which waits for it"
        return f"rank {self.rank} on {self.host} {way}"


@cached_result
def pace_of_ranks(evidence: Evidence) -> RankPace:
    """Return each rank's median time in a step and between steps."""
    lanes = evidence.counted.lanes
    if not evidence.trains:
        raise NotMeasurable("no training steps: requests differ in length")
    if evidence.from_output:
        raise NotMeasurable("printed lines are of one rank: use a Meter in each rank")
    if len(lanes) < 2:
        raise NotMeasurable("only one rank: stragglers need two or more")
    medians = [_medians(lane) for lane in lanes if len(lane) >= _FEW_STEPS]
    if len(medians) < 2:
        raise NotMeasurable(f"fewer than two ranks have made {_FEW_STEPS} steps")
    ranks, writers, inside, between, steps = zip(*medians, strict=True)
    hosts = (evidence.run.writers[writer].header.get("host") for writer in writers)
    return RankPace(
        ranks, tuple(map(str, hosts)), np.array(inside), np.array(between), float(np.median(steps))
    )


def _medians(lane: Steps) -> tuple[int, int, float, float, float]:
    """Return the rank, its writer, and medians of: time in a step, time between steps, time from
    one start to the next."""
    steps = np.maximum(lane.step_counts, 1.0)  # a row may be of several
    inside = lane.duration_s / steps
    periods = np.diff(lane["start_ns"]) / NS_PER_S / steps[:-1]
    medians = (float(np.median(times)) for times in (inside, periods - inside[:-1], periods))
    return int(lane["rank"][0]), int(lane["writer"][0]), *medians  # type: ignore[return-value]


def spread_frac(evidence: Evidence) -> Reading:
    """Lag of the slowest rank behind the median rank, as a share of a step."""
    pace = pace_of_ranks(evidence)
    worst = pace.straggler()
    fastest, slowest = float(pace.in_step_s.min()), float(pace.in_step_s.max())
    note = (
        f"{worst.text}; median time in a step by rank {duration(fastest)} to {duration(slowest)},"
        f" {len(pace.ranks)} ranks; {evidence.window_note}"
    )
    return Reading(worst.by_frac, "frac", "measured", note=note)


def _rank_step_s(evidence: Evidence, *, is_slowest: bool) -> Reading:
    """The median time in a step, of the slowest or the fastest rank."""
    pace = pace_of_ranks(evidence)
    at = int((np.argmax if is_slowest else np.argmin)(pace.in_step_s))
    note = f"rank {pace.ranks[at]} on {pace.hosts[at]}, median of its steps; {evidence.window_note}"
    return Reading(float(pace.in_step_s[at]), "s", "measured", note=note)


_of_ranks = partial(Metric, unit="s", direction="lower", needs=("steps of several ranks",))

RANK_METRICS = [
    _of_ranks(
        "ranks.spread_frac",
        "straggling",
        unit="frac",
        formula="how much later or slower than the median rank the furthest rank is in every step,"
        " by medians over steps / step time",
        compute=spread_frac,
    ),
    _of_ranks(
        "ranks.slowest_step_s",
        "slowest rank's step",
        formula="highest of the ranks' median times in a step",
        compute=partial(_rank_step_s, is_slowest=True),
    ),
    _of_ranks(
        "ranks.fastest_step_s",
        "fastest rank's step",
        direction="neither",
        formula="lowest of the ranks' median times in a step",
        compute=partial(_rank_step_s, is_slowest=False),
    ),
]


# Step time and the window.

# Of a log: a line says when its steps ended, and the line before it when they began.
_FIRST_LINE = "the first printed line only starts the clock, unless it gives its own time"


def _periods(evidence: Evidence, lane: Steps, most: float) -> FloatArray:
    """Time of each step of a rank; steps that share a row (up to `most`) get the row's mean."""
    periods_s = evidence.periods_s(lane)
    steps = lane["steps"]
    return np.repeat(periods_s / steps, steps.astype(int)) if most > 1 else periods_s


def _note(evidence: Evidence, most: float) -> str:
    """For a note: how step times were taken. `most`: the highest number of steps in a row."""
    rows, way = ("rows", "from one step's end")
    if evidence.from_output:
        rows, way = "printed lines", "from one printed line"
    several = f"{rows} cover up to {most:.0f} steps each, which all get the mean of their row; "
    return f"{several if most > 1 else ''}{way} to the next; {evidence.window_note}"


def step_s(evidence: Evidence) -> Reading:
    """Mean time of a step: window / steps, the inverse of steps/s and its interval."""
    per_s = pace(evidence)
    # If the interval of steps/s includes 0, the step time has no upper end.
    low, high = (1 / per_s.high, 1 / per_s.low) if per_s.low and per_s.high else (None, None)
    note = f"window / steps, time between steps included; {evidence.window_note}"
    note += _whose_clock(evidence)
    return Reading(1 / per_s.value, "s", per_s.basis, low, high, note)


def _step_percentile(evidence: Evidence, q: float) -> Reading:
    steps_of(evidence)  # or the reason why there are none
    lanes = evidence.counted.lanes
    most = max(float(lane["steps"].max()) for lane in lanes)
    value = percentile(np.concatenate([_periods(evidence, lane, most) for lane in lanes]), q)
    return Reading(value, "s", evidence.steps_basis, note=_note(evidence, most))


def in_step_s(evidence: Evidence) -> Reading:
    """Mean time inside a step, without the time between steps."""
    steps_of(evidence)  # or the reason why there are none
    inside_s, steps = evidence.counted.duration_s, steps_in(evidence.counted)
    low, high = interval_in_order(inside_s, steps) or (None, None)
    value = float(inside_s.sum() / steps.sum())
    note = f"from a step's start to its end; {evidence.window_note}{_whose_clock(evidence)}"
    return Reading(value, "s", evidence.steps_basis, low, high, note)


def _whose_clock(evidence: Evidence) -> str:
    """For a note: whether steps were timed by the GPU's clock or the host's; "" without GPUs."""
    if evidence.from_output or not evidence.devices("gpu"):
        return ""
    by_device = sum(int((~np.isnan(lane["host_end_ns"])).sum()) for lane in evidence.counted.lanes)
    if by_device == len(evidence.counted):
        return "; by the device's clock"
    if by_device:
        return f"; {by_device} of {len(evidence.counted)} steps by the device's clock"
    return "; by the host's clock, which need not wait for the device"


def outside_steps_frac(evidence: Evidence) -> Reading:
    """Share of the window in which no step was open, mean over ranks."""
    lanes = evidence.counted.lanes  # or the reason why there are none
    if evidence.from_output:
        raise NotMeasurable("printed lines do not show gaps between steps; a Meter does")
    need_rows(evidence)
    inside_s = sum(_in_window_s(evidence, lane) for lane in lanes)
    whole_s = sum(float(evidence.periods_s(lane).sum()) for lane in lanes)
    if evidence.is_whole_run:  # a whole run does not end with the last step
        whole_s = evidence.window.duration_s * len(lanes)
    return Reading(1 - inside_s / whole_s, "frac", "measured", note=evidence.window_note)


def _in_window_s(evidence: Evidence, lane: Steps) -> float:
    """The time of the window that lies within steps of a rank."""
    starts, ends = evidence.window.clipped(lane.columns["start_ns"], lane.columns["end_ns"])
    return float((ends - starts).sum()) / NS_PER_S


def window_s(evidence: Evidence) -> Reading:
    """The length of the window that metrics cover."""
    note = evidence.window_note
    if evidence.from_output and evidence.has_work:
        note += f"; {_FIRST_LINE}"
    return Reading(evidence.span.duration_s, "s", evidence.clock_basis, note=note)


def run_s(evidence: Evidence) -> Reading:
    """Time from the start of the run to its last record."""
    note = "start to end, all of it"
    return Reading(evidence.watched.duration_s, "s", evidence.clock_basis, note=note)


def warmup_s(evidence: Evidence) -> Reading:
    """Time from the first step's start to the window's start."""
    first_ns = evidence.work.lowest("start_ns")
    steps, rule = evidence.warmup()
    value = max(0.0, (evidence.window.start_ns - first_ns) / NS_PER_S)
    note = f"{number_of(round(steps), 'step')} left out; rule: {rule}" if steps else f"rule: {rule}"
    return Reading(value, "s", evidence.steps_basis, note=note)


def warmup_steps(evidence: Evidence) -> Reading:
    """The number of warm-up steps, which the window leaves out."""
    steps, rule = evidence.warmup()
    return Reading(steps, "steps", evidence.steps_basis, note=f"rule: {rule}")


def before_first_step_s(evidence: Evidence) -> Reading:
    """Start-up: time from the run's start to the start of the first step."""
    first_ns = evidence.work.lowest("start_ns")
    if evidence.from_output:
        raise NotMeasurable("printed lines do not show when the first step began; a Meter does")
    value = (first_ns - evidence.watched.start_ns) / NS_PER_S
    early = evidence.all_steps.of_phase("eval")
    early = early.where_each(lambda lane: lane["end_ns"] <= first_ns)
    note = "loading and setting up"
    if len(early):
        note += f", and {duration(max(lane.busy_s for lane in early.lanes))} of evaluation"
    return Reading(value, "s", "measured", note=note)


def _phase_s(evidence: Evidence, phase: str) -> Reading:
    rows = evidence.all_steps.of_phase(phase)
    if not len(rows):
        raise NotMeasurable(f"no {phase} span was recorded (meter.phase({phase!r}))")
    need_all_rows(evidence)
    lanes = rows.lanes
    value = max(lane.busy_s for lane in lanes)
    longest = f", of the rank with the most of {len(lanes)}" if len(lanes) > 1 else ""
    note = f"{number_of(len(rows), 'span')}, whole run{longest}"
    if _took_as_printed(evidence, rows):
        return Reading(value, "s", "reported", note=f"{note}; duration as the program printed it")
    return Reading(value, "s", evidence.steps_basis, note=note)


def _took_as_printed(evidence: Evidence, rows: Steps) -> bool:
    """True if the spans' durations are those that the program printed (`eval_runtime`)."""
    if not evidence.from_output:
        return False
    said_s = [reported.value for reported in evidence.run.reported() if reported.unit == "s"]
    # Spans are stored in whole nanoseconds, so durations may be off by rounding.
    return bool(np.isclose(rows.duration_s[:, None], said_s, rtol=0, atol=1e-6).any())


_time = partial(Metric, unit="s", direction="lower", needs=("steps",))

METRICS = [
    _time(
        "time.step_s",
        "step time",
        formula="window / steps",
        compute=step_s,
        quantity="speed",
        views="short card 40 as step time;"
        " card 200 in time expected; report 40 expected; model card 70; list 20 as step;"
        " watch 20 as step time; recent 20; so far 20; serve list 20 as step;"
        " serve live 20 as step; serve run 20; console 30",
    ),
    *(
        _time(
            f"time.step_{name}_s",
            f"step time, {title}",
            formula=f"{title} over steps of the time from the end of the step before to its own,"
            " cuts left out",
            compute=partial(_step_percentile, q=q),
            column="step_median_s" if name == "median" else "",
            rule="step_time" if name == "median" else "",
            views=f"card {order} in time",
        )
        for name, title, q, order in (
            ("median", "median", 50, 210),
            ("p95", "95th percentile", 95, 220),
        )
    ),
    _time(
        "time.in_step_s",
        "time inside a step",
        formula="sum of (end - start) / steps",
        compute=in_step_s,
        aliases=efficientllm(
            "AL",
            "s",
            "average latency of an iteration: computation and communication together, as far as the"
            " step encloses them",
        ),
    ),
    _time(
        "time.outside_steps_frac",
        "time outside steps",
        unit="frac",
        formula="1 - time inside steps / window",
        needs=("steps of a Meter",),
        compute=outside_steps_frac,
        upper_bound=1.0,
        views="card 230 in time",
    ),
    _time(
        "time.window_s",
        "window",
        direction="neither",
        formula="end of the last warm-up step (or start of the first step) to the end of the last"
        " counted step, without evaluation, checkpoints and named pauses",
        needs=(),
        compute=window_s,
        column="timed_s",
        views="ledger 10 as window_s; fairness 20",
    ),
    _time(
        "time.run_s",
        "run",
        formula="start of the run to its last record",
        needs=(),
        compute=run_s,
        quantity="whole-run speed",
        column="runtime_s",
        rule="runtime",
        rule_aliases=("train_runtime",),
        aliases=sft_play("wall_s", "s", "wall clock time of the whole run"),
        views="list 40 as lasted; serve list 50 as lasted; bench compare 30;"
        " bench report 110 as time expected; bench matrix 140 as time",
    ),
    _time(
        "time.warmup_s",
        "warm-up",
        direction="neither",
        formula="start of the first step to the end of the last warm-up step",
        compute=warmup_s,
        aliases=sft_play("warmup_s", "s", "time left out before the window"),
    ),
    Metric(
        "time.warmup_steps",
        "warm-up steps",
        "steps",
        "neither",
        "steps before the window",
        ("steps",),
        warmup_steps,
    ),
    _time(
        "time.before_first_step_s",
        "start-up",
        formula="start of the run to the start of the first step",
        needs=("steps of a Meter",),
        compute=before_first_step_s,
        views="card 270 in time",
    ),
    *(
        _time(
            f"time.{phase}_s",
            f"{PHASE_TITLES[phase]}, whole run",
            formula=f"sum over {phase} spans, whole run",
            needs=(f"{phase} spans",),
            compute=partial(_phase_s, phase=phase),
            views=f"card {order} in time",
        )
        for phase, order in (("eval", 240), ("checkpoint", 250), ("data", 260))
    ),
]
METRICS += over_whole_run(METRICS, "time.step_s", title="time per step")
