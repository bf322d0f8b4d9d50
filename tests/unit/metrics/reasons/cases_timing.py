"""Step times, the window, phases and other ranks: why a time is absent."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from ergmeter.metrics.live.frame import RunWatcher
from ergmeter.metrics.summarize import summarize
from ergmeter.metrics.time_breakdown import step_time_distribution
from ergmeter.metrics.timeline import loss_series, step_series
from ergmeter.records import Missing, Reading
from ergmeter.runlog.reader import Run
from tests.runs import add_writer, even_steps, make_run, run_of
from tests.unit.metrics import test_live_frame
from tests.unit.metrics.reasons.case import Case, absent
from tests.unit.metrics.reasons.making import lacks, refused
from tests.unit.metrics.test_inference import THREE

STEPS = even_steps(20, tokens_computed=10)
PRINTED: dict[str, Any] = {"steps": STEPS, "stream": "output"}


def two_ranks(path: Path, *, steps: int) -> Run:
    run = make_run(path)
    for rank in range(2):
        add_writer(run, steps=[replace(one, rank=rank) for one in STEPS[:steps]])
    return Run.open(run)


def quiet(folder: Path) -> list[str]:
    run = test_live_frame.run_of(folder / "run", steps=STEPS, closed=False)
    with closing(RunWatcher(run, now_ns=test_live_frame.at(320))) as watching:
        found = watching.look(totals=False).recent["throughput.tokens_per_s"]
    assert isinstance(found, Missing)
    return [found.reason]


def rule(folder: Path) -> list[str]:
    found = summarize(run_of(folder / "run", steps=STEPS)).readings["time.warmup_s"]
    assert isinstance(found, Reading)
    return [found.note]


CASES = [
    absent(
        "a recorded program that prints its steps, of the time between them",
        "time.outside_steps_frac",
        "printed lines do not show gaps between steps; a Meter does",
        **PRINTED,
    ),
    absent(
        "a recorded program that prints its steps, of its start-up",
        "time.before_first_step_s",
        "printed lines do not show when the first step began; a Meter does",
        **PRINTED,
    ),
    absent(
        "a training that never evaluated",
        "time.eval_s",
        "no eval span was recorded (meter.phase('eval'))",
        steps=STEPS,
    ),
    # -- the window --
    Case(
        "no warm-up was declared: the note gives the rule",
        rule,
        "leading steps above 1.5 times the later median",
    ),
    absent(
        "a window of steps that the run never made",
        "throughput.tokens_per_s",
        "--window 100:200 holds no step: this run's steps are numbered 0 to 19",
        steps=STEPS,
        settings={"window": "100:200"},
    ),
    absent(
        "a warm-up of 50 steps was declared for 20",
        "throughput.tokens_per_s",
        "the run is shorter than its warm-up: 20 steps in 20 s, warm-up 50 steps",
        steps=STEPS,
        settings={"warmup_steps": 50},
    ),
    # -- charts --
    refused(
        "requests, of which no distribution of steps is drawn",
        step_time_distribution,
        "an inference run has requests and no steps: see its latencies",
        steps=THREE,
    ),
    refused(
        "two steps, of which no distribution is drawn",
        step_time_distribution,
        "2 counted steps: too few for a distribution",
        steps=STEPS[:2],
    ),
    refused(
        "requests, of which no line of step times is drawn",
        step_series,
        "an inference run has requests and no steps: see its latencies",
        steps=THREE,
    ),
    refused(
        "steps without a loss, of which no line is drawn",
        loss_series,
        "no step has a loss: set step.loss, or print loss=..",
        steps=STEPS,
    ),
    # -- ranks --
    absent(
        "requests have no pace that ranks could keep",
        "ranks.spread_frac",
        "no training steps: requests differ in length",
        steps=THREE,
    ),
    absent(
        "a program of several ranks prints for one",
        "ranks.spread_frac",
        "printed lines are of one rank: use a Meter in each rank",
        **PRINTED,
    ),
    absent(
        "a training of one rank",
        "ranks.spread_frac",
        "only one rank: stragglers need two or more",
        steps=STEPS,
    ),
    lacks(
        "two ranks made three steps each",
        "ranks.spread_frac",
        "fewer than two ranks have made 5 steps",
        lambda path: two_ranks(path, steps=3),
    ),
    Case("no step for five minutes in a run that goes on", quiet, "the last step ended 5 min"),
]
