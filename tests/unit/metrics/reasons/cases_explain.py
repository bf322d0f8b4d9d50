"""What `erg explain` can't separate, and what `erg compare` can't compare."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from ergmeter.compare.time_to_loss import TIME
from ergmeter.metrics.explain.time import time_split
from ergmeter.records import Mark, Missing, Sample, Step
from ergmeter.runlog.reader import Run
from tests.runs import even_steps, run_of
from tests.unit.metrics.reasons.case import Case
from tests.unit.metrics.reasons.making import explains, refuses
from tests.unit.metrics.test_comparison import compared, entry, group, only, words
from tests.unit.metrics.test_explain_made import H200, STEP, made

S = 10**9
BUSY: dict[str, Any] = {"busy_frac": 0.9}  # the driver's utilisation, and no hardware counters


def never_reached(_folder: Path) -> list[str]:
    runs = group("a", [1000.0, 1010.0, 990.0], target__time_s=60.0)
    runs[1] = entry("a", 1, 1010.0, target__time_s=Missing("the loss stayed above 2"))
    other = group("b", [1310.0, 1325.0, 1295.0], target__time_s=50.0)
    return [words(only(compared(runs, other, metrics=(TIME,))), TIME)]


def seldom_read(path: Path) -> Run:
    """8 s of steps; the counters' means are of the first 6 s, and of the 6 s after them."""
    samples = [Sample(t * S, H200.id, graphics_frac=0.6, activity_s=6.0) for t in (6, 12)]
    return run_of(
        path,
        steps=even_steps(8, tokens_computed=100),
        samples=samples,
        devices=[H200],
        marks=[Mark(0, "device_used", H200.id)],
        settings={"dtype": "bf16", "warmup_steps": 0},
    )


CASES: list[Case] = [
    explains(
        "the hardware counters were read twice",
        "graphics_frac: the hardware counters were read too seldom for so short a window: activity"
        " may be 45.0 % to 70.0 %; let the run last longer",
        seldom_read,
    ),
    *(
        explains(fact, f"peak_clock_hz: {reason}", made, **settings)
        for fact, reason, settings in (
            (
                "the peak was declared",
                "the peak was declared without its clock",
                {"peak_flops_per_s": 1e15},
            ),
            (
                "products in 32 bits",
                "the peak of fp32 is at another clock than the 16-bit peak",
                {"dtype": "fp32"},
            ),
            (
                "a device of which nobody has heard",
                "the clock of the datasheet's peak is unknown",
                {"device": "unheard of"},
            ),
            (
                "a card of which no document states the clock",
                "no source for the clock of the peak of",
                {"device": "l40s"},
            ),
        )
    ),
    explains(
        "the driver's utilisation was read for 2 s",
        "busy_frac: the driver's utilisation lags by up to a second, too much for a window below"
        " 5 s",
        lambda path: made(path, even_steps(8, seconds=0.25, tokens_computed=100), **BUSY),
    ),
    explains(
        "the window holds evaluation, and the driver's utilisation was read",
        "busy_frac: the driver's utilisation does not separate training from evaluation and"
        " checkpoints in the window",
        lambda path: made(
            path,
            [
                *even_steps(40, seconds=0.25, tokens_computed=100),
                Step(10 * S, 12 * S, phase="eval"),
                Step(12 * S, 12 * S + S // 4, index=40, tokens_computed=100),
            ],
            **BUSY,
        ),
        window="unbroken",
    ),
    explains(
        "padding was not counted apart from tokens",
        "padding: padding is not counted apart from tokens: pass tokens_real= to meter.step",
        made,
    ),
    explains(
        "20 of 100 positions are padding, whose FLOPs were not counted",
        "padding: the FLOP count has no cost of a padding position (hardware_per_padding)",
        lambda path: made(
            path,
            even_steps(40, seconds=0.25, tokens_computed=100, tokens_real=80),
            flops=replace(STEP, hardware_per_padding=None),
        ),
    ),
    refuses(
        "a run that only decodes",
        "no training steps, so there is no step time to split",
        lambda path: run_of(path, steps=even_steps(10, phase="decode", tokens_real=10)),
        time_split,
    ),
    Case(
        "one of three runs never reached the target loss",
        never_reached,
        "a: only 2 of 3 runs have it (the loss stayed above 2)",
    ),
]
