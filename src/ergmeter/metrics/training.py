"""What the training itself says: loss, learning rate, gradient norm, as it was last told.

Not efficiency, but a step that is twice as fast and learns nothing is no gain: a comparison and a
live view need both on the same axis. Values are the program's own, passed on.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.catalog import Metric
from ergmeter.metrics.evidence import OUTPUT
from ergmeter.metrics.steps import Steps
from ergmeter.records import Reading

if TYPE_CHECKING:
    from ergmeter.metrics.evidence import Evidence
    from ergmeter.records import Direction

_HOW = {
    "loss": "set step.loss, print loss=.., or use an integration (a Trainer tells it every"
    " logging_steps)",
    "learning_rate": "set step.learning_rate, use an integration, or print lr=..",
    "grad_norm": "set step.grad_norm, use an integration, or print grad_norm=..",
}


def _last(column: str, evidence: Evidence) -> Reading:
    """The last that was told in the window, of the first rank that tells it; else as printed."""
    for lane in evidence.counted.lanes:
        found = _of(lane, column, evidence)
        if found is not None:
            return found
    if not evidence.from_output:
        printed = Steps(evidence.run.steps(OUTPUT))
        window = evidence.window
        inside = (printed["end_ns"] > window.start_ns) & (printed["start_ns"] < window.end_ns)
        found = _of(printed.where(inside), column, evidence, how=", as printed")
        if found is not None:
            return found
    raise NotMeasurable(f"no step tells its {column.replace('_', ' ')}: {_HOW[column]}")


def _of(rows: Steps, column: str, evidence: Evidence, *, how: str = "") -> Reading | None:
    told = np.flatnonzero(~np.isnan(rows[column]))
    if not len(told):
        return None
    index = rows["index"][told[-1]]
    # A program that prints counts as it likes; our own numbers begin at 0.
    which = "" if np.isnan(index) or how else f" of step {index + 1:.0f}"
    note = f"the program's own{which}{how}, the last of {len(told)} told; {evidence.window_note}"
    return Reading(float(rows[column][told[-1]]), "1", "reported", note=note)


def _metric(column: str, title: str, direction: Direction) -> Metric:
    return Metric(
        f"training.{column}",
        title,
        "1",
        direction,
        f"the last {title} told in the window",
        (f"steps that tell their {title}",),
        partial(_last, column),
    )


METRICS = [
    _metric("loss", "loss", "lower"),
    _metric("learning_rate", "learning rate", "neither"),
    _metric("grad_norm", "gradient norm", "neither"),
]
