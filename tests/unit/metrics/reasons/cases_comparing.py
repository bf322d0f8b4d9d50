"""Ledgers, jobs, ratios and targets: why runs have nothing to compare."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from ergmeter.compare.entry import EVAL_LOSS
from ergmeter.compare.jobs import JobRun, job_results
from ergmeter.compare.ledgers import read_ledger
from ergmeter.compare.sources import read_entries
from ergmeter.compare.time_to_loss import TIME, to_target
from ergmeter.metrics.summarize import _result
from ergmeter.records import Missing, Result, Step
from ergmeter.stats.ratio import contrast, pooled_noise
from tests.runs import even_steps, run_of
from tests.unit.metrics.reasons.case import Case
from tests.unit.metrics.reasons.making import raised
from tests.unit.metrics.test_entries import two_trainings, written
from tests.unit.metrics.test_jobs import part
from tests.unit.metrics.test_ledgers import DOCUMENTED, ORIGINAL, OUR_ROW, OURS, ledger

STEPS = even_steps(10)
LOSSES = [replace(one, loss=2.0) for one in STEPS[:3]]


def reason_of(result: Result) -> list[str]:
    assert isinstance(result, Missing), f"it is there: {result}"
    return [result.reason]


def of_row(fact: str, key: str, expected: str, header: str, row: str, **changed: str) -> Case:
    """A figure that a ledger's row lacks, and the reason."""

    def texts(folder: Path) -> list[str]:
        cells = dict(zip(header.split(","), row.split(","), strict=True)) | changed
        path = ledger(folder, header, ",".join(cells.values()))
        (entry,) = read_ledger(path, argument="x").entries
        return reason_of(entry.figures[key])

    return Case(fact, texts, expected)


def of_job(fact: str, key: str, expected: str, *steps: Iterable[Step] | range) -> Case:
    """What a job of runs with these steps can't say; of a range, steps with these numbers."""

    def texts(folder: Path) -> list[str]:
        runs = [
            part(folder / f"{number}", began_s=100.0 * number, steps=own)
            if isinstance(own, range)
            else run_of(folder / f"{number}", steps=own)
            for number, own in enumerate(steps)
        ]
        return reason_of(job_results([JobRun.of(run) for run in runs])[key])

    return Case(fact, texts, expected)


def target(fact: str, expected: str, made: Callable[[Path], Path | None], loss: float) -> Case:
    return Case(
        fact, lambda folder: reason_of(to_target(made(folder / "run"), loss)[TIME]), expected
    )


def no_eval_loss(folder: Path) -> list[str]:
    (entry,) = read_entries([run_of(folder / "run", steps=STEPS).path]).entries
    return reason_of(entry.figures[EVAL_LOSS])


TOKENS_PER_S, PER_TOKEN = "throughput.tokens_per_s", "energy.joules_per_token"

CASES = [
    # -- ledgers --
    of_row(
        "a ledger's empty cell, in a row with a note of its user",
        PER_TOKEN,
        "the ledger's cell is empty (notes of its row: no energy sensor)",
        OURS,
        OUR_ROW,
        energy_J="",
        J_per_token="",
        notes="lora_r=32_alpha=32; no energy sensor",
    ),
    of_row(
        "a row of the original for a run of 0 s",
        TOKENS_PER_S,
        "the row has no wall time above 0 s",
        DOCUMENTED,
        ORIGINAL,
        wall_s="0",
        warmup_s="0",
        tok_per_s="2.4e14",
    ),
    of_row(
        "a row of the original for continued pre-training",
        TOKENS_PER_S,
        "the row counts 0 tokens, as the original did for cpt, seq2seq and loader workers",
        DOCUMENTED,
        ORIGINAL,
        tokens_processed="0",
        tok_per_s="0",
    ),
    of_row(
        "a row of the original without tokens, of the energy of one",
        PER_TOKEN,
        "the row counts 0 tokens",
        DOCUMENTED,
        ORIGINAL,
        tokens_processed="0",
        tok_per_s="0",
    ),
    of_row(
        "a row of the original with 60 s of warm-up for a run of 50 s",
        PER_TOKEN,
        "the run is shorter than its warm-up: no energy was measured",
        DOCUMENTED,
        ORIGINAL,
        wall_s="50",
        tok_per_s="2.4e14",
    ),
    of_row(
        "a row of the original without a working sensor",
        PER_TOKEN,
        "the row has 0 J, which the original wrote where its sensor did not work",
        DOCUMENTED,
        ORIGINAL,
        energy_J="0",
    ),
    # -- jobs --
    of_job(
        "a job whose second run does not number its steps",
        "job.steps",
        "the steps of 1 have no numbers",
        range(10),
        [replace(one, index=None) for one in STEPS],
    ),
    of_job("a job without tokens", "job.tokens", "0: the steps have no count of tokens", STEPS),
    of_job(
        "a job of two runs that each count from 0",
        "job.lost_steps",
        "all 2 runs count their steps from 0, so where each resumed is not known",
        range(10),
        range(5),
    ),
    # -- ratios --
    Case(
        "a group without a run",
        lambda _: raised(lambda: contrast([], [1.0])),
        "no run has a value",
    ),
    Case(
        "a repeat whose value is infinite",
        lambda _: raised(lambda: contrast([math.inf], [1.0])),
        "a value is not a finite number",
    ),
    Case(
        "a repeat whose value is 0",
        lambda _: raised(lambda: contrast([0.0, 1.0], [1.0, 1.0])),
        "a value is 0: a ratio needs values above 0",
    ),
    Case(
        "groups of one run each have no scatter",
        lambda _: raised(lambda: pooled_noise([[1.0], [2.0]])),
        "no group has two repeats",
    ),
    # -- losses --
    Case("a run that never evaluated", no_eval_loss, "no evaluation loss was recorded"),
    target(
        "a target for a ledger's row",
        "jobs and rows of a ledger have no losses by step: name a run's directory",
        lambda _: None,
        2.0,
    ),
    target(
        "a target for a run of two trainings",
        "each with its own loss: name one,",
        two_trainings,
        2.0,
    ),
    target(
        "a target for a run of three losses",
        "3 steps have a loss: a target loss needs 5",
        lambda path: run_of(path, steps=LOSSES).path,
        2.0,
    ),
    target(
        "a target below every loss",
        "the loss never reached 0.5: the lowest mean of the last 5 recorded losses is 1.3",
        written,
        0.5,
    ),
    target(
        "a target for a run without losses",
        "no step has a loss",
        lambda path: run_of(path, steps=STEPS).path,
        2.0,
    ),
    # -- plug-ins --
    Case(
        "a metric of a plug-in that divides by 0",
        lambda _: reason_of(_result(lambda: 1 / 0)),  # type: ignore[arg-type, return-value]
        "the metric failed: ZeroDivisionError: division by zero",
    ),
]
