"""What would transformers' Trainer have printed of a whole training, at its end?

The trap: a time of one window beside rates of another. Our rates are of the steps after the
warm-up; FMS's files and programs take runtime times rate for the work that was done. So what goes
into them is of the whole training, first steps included: the Trainer's own figures where it printed
them, and what it left out as our counts over its time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ergmeter.bench.results.trainer_columns import number
from ergmeter.errors import ErgmeterError, NotMeasurable
from ergmeter.metrics.catalog import catalogue
from ergmeter.metrics.evidence.ranks import need_all
from ergmeter.metrics.evidence.window import UNBROKEN
from ergmeter.metrics.summarize import evidence_of
from ergmeter.runlog.reader import Run
from ergmeter.runlog.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

RUNTIME, LOSS = "train_runtime", "train_loss"
# Theirs, ours, and whose counts must all be there for it.
_RATES = {
    "train_samples_per_second": ("throughput.samples_per_s", "samples"),
    "train_steps_per_second": ("throughput.steps_per_s", ""),
    "train_tokens_per_second": ("throughput.computed_tokens_per_s", "tokens"),
}
NAMES = (RUNTIME, *_RATES, LOSS, "epoch", "eval_loss")


def trained(
    told: Mapping[str, object], run: Path, *, ranks: int | None, loss: float | None
) -> dict[str, float]:
    """By the Trainer's names. `told` is what it printed; what nobody knows is left out."""
    found = {name: value for name in NAMES if (value := number(told.get(name))) is not None}
    if LOSS not in found and loss is not None:
        found[LOSS] = loss
    if not {RUNTIME, *_RATES} <= found.keys():
        counts, took_s = _counted(run)
        runtime_s = found.get(RUNTIME) or took_s
        if runtime_s is None:
            return found
        found[RUNTIME] = runtime_s
        for name, count in counts.items():
            # Its tokens are those of one process, its samples and steps those of all.
            share = ranks if name == "train_tokens_per_second" else 1
            if name not in found and share:
                found[name] = count / share / runtime_s
    return found


def _counted(path: Path) -> tuple[dict[str, float], float | None]:
    """Of all steps of the run: what they did, and the time from the first to the last."""
    try:
        evidence = evidence_of(Run.open(path), Settings(warmup_steps=0, window=UNBROKEN))
        took_s = evidence.window.duration_s
    except ErgmeterError:
        return {}, None
    counts = {}
    for name, (key, of_all) in _RATES.items():
        try:
            if of_all:
                need_all(evidence, of_all)
            rate = catalogue()[key].reading(evidence)
        except NotMeasurable:
            continue
        if rate.basis != "reported":  # a rate that was printed is no count
            counts[name] = rate.value * took_s
    return counts, took_s
