"""Reasons why a run has no steps, no window or no whole run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ergmeter.metrics.evidence.evidence import Evidence
from ergmeter.records import Mark, Window
from ergmeter.runlog.reader import Run
from tests.runs import add_writer, even_steps, make_run, run_of
from tests.unit.metrics.reasons.case import Case, absent
from tests.unit.metrics.reasons.making import lacks, refuses
from tests.unit.metrics.test_trainings import training

S = 10**9
RATE, WHOLE_RATE = "throughput.tokens_per_s", "throughput.whole_run_tokens_per_s"


def watched(evidence: Evidence) -> Window:
    return evidence.watched


def imported(path: Path, **contents: Any) -> Run:
    """A run made of a log."""
    make_run(path)
    header = path / "run.json"
    stored = json.loads(header.read_text("utf-8"))
    header.write_text(json.dumps({**stored, "imported": {"format": "log"}}), "utf-8")
    add_writer(path, stream="output", **contents)
    return Run.open(path)


def two_trainings(path: Path) -> Run:
    make_run(path)
    for name in ("A", "B"):
        add_writer(path, steps=even_steps(10, tokens_computed=1), header=training(name))
    return Run.open(path)


def ten_seconds(path: Path) -> Run:
    clock = {"monotonic_ns": 0, "wall_ns": 0}
    rows = even_steps(40, tokens_computed=1)
    return run_of(path, steps=rows, header={"clock": clock}).part(Window(10 * S, 20 * S))


def just_started(path: Path) -> Run:
    make_run(path)
    (add_writer(path, closed=False) / "marks.jsonl").write_text("", "utf-8")
    return Run.open(path)


def killed_at_once(path: Path) -> Run:
    os.utime(make_run(path) / "run.json", (1, 1))
    return Run.open(path)


CASES: list[Case] = [
    # -- no steps
    absent(
        "a Meter was used without meter.step",
        RATE,
        "no steps were recorded (use `with meter.step(...)`, or print step=.. tokens=..)",
    ),
    absent(
        "only evaluation was recorded",
        RATE,
        "no training steps, only eval",
        steps=even_steps(5, phase="eval"),
    ),
    absent(
        "the server of `erg load` answered nothing",
        RATE,
        "no request was answered",
        marks=[Mark(0, "server", "vllm"), Mark(10 * S, "m")],
    ),
    lacks(
        "one command ran two trainings",
        RATE,
        "2 trainings in this run, each with its own metrics: choose one, --training 1 (to 2)",
        two_trainings,
    ),
    absent(
        "one step was made",
        RATE,
        "1 step: it may be all warm-up, so there is no pace of training",
        steps=even_steps(1, tokens_computed=1),
    ),
    # -- no whole run
    absent(
        "the run only decodes",
        WHOLE_RATE,
        "no training steps: this run only generates",
        steps=even_steps(10, phase="decode", tokens_real=10),
    ),
    lacks(
        "a log was imported",
        WHOLE_RATE,
        "a log does not say when its program started: no whole run",
        lambda path: imported(path, steps=even_steps(20, tokens_computed=1)),
    ),
    lacks(
        "ten seconds of a run are looked at",
        WHOLE_RATE,
        "only a part of the run was chosen, so there is no whole run",
        ten_seconds,
    ),
    lacks(
        "one of two trainings of a command is looked at",
        WHOLE_RATE,
        "several trainings in this run: the run's start is not this training's",
        lambda path: two_trainings(path).training(1),
    ),
    # -- no time at all
    refuses(
        "a log has neither times nor steps",
        "a log without times has no duration",
        imported,
        watched,
    ),
    refuses(
        "the run began this instant",
        "the run has just started: nothing was written yet",
        just_started,
        watched,
    ),
    refuses(
        "the program was killed before a writer started",
        "the run ended before its first records were written",
        killed_at_once,
        watched,
    ),
]
