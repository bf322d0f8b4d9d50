"""Loss, learning rate and gradient norm: the last values that the program reported.

These are not measures of efficiency, but a step that is twice as fast and learns nothing is no
gain. If a run diverged, its last finite value may be long before the end: if the last value is NaN
or infinite, there is no reading.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.catalog import Metric
from ergmeter.metrics.evidence.evidence import OUTPUT, Evidence
from ergmeter.metrics.evidence.steps import Steps
from ergmeter.records import Direction, Missing, Reading, Result
from ergmeter.units import NS_PER_S, significant

_DIVERGED = "diverged: "  # the reason of a NaN loss begins with this
_SOON_NS = NS_PER_S  # the loss of the last step is printed after it
_HOW = {
    "loss": "set step.loss, print loss=.., or use an integration (a Trainer logs it every"
    " logging_steps)",
    "learning_rate": "set step.learning_rate, use an integration, or print lr=..",
    "grad_norm": "set step.grad_norm, use an integration, or print grad_norm=..",
}


def divergence(readings: Mapping[str, Result]) -> str:
    """The text on when the loss became NaN and stayed so, from a summary's readings; else ""."""
    loss = readings.get("training.loss")
    reason = loss.reason if isinstance(loss, Missing) else ""
    return reason if reason.startswith(_DIVERGED) else ""


def _last(column: str, evidence: Evidence) -> Reading:
    """The last value in the window, of the first rank that has one; else the last printed one."""
    if not evidence.trains:
        evidence.work  # noqa: B018  or the reason why there are no steps
        raise NotMeasurable("no training steps: requests have no " + column.replace("_", " "))
    reading, rows = None, evidence.counted.lanes[0]
    for number, lane in enumerate(evidence.counted.lanes):
        # Only for the first rank, read whether values are absent or NaN: for a thousand ranks
        # without values that would be a thousand files.
        if number == 0 or np.isfinite(lane[column]).any():
            stream = OUTPUT if evidence.from_output else ""
            reading, rows = _of(lane, column, evidence, stream=stream), lane
            if reading is not None:
                break
    is_printed = evidence.from_output
    if reading is None and not is_printed:
        printed, window, is_printed = evidence.printed, evidence.window, True
        is_read_late = printed["end_ns"] <= _printed_until_ns(evidence)
        is_before_end = (printed["start_ns"] < window.end_ns) | is_read_late
        rows = printed.where((printed["end_ns"] > window.start_ns) & is_before_end)
        reading = _of(rows, column, evidence, stream=OUTPUT, how=", as printed")
    if is_printed and column == "loss":
        reading = _on_a_later_line(evidence, rows) or reading
    if reading is None:
        raise NotMeasurable(f"no step has a {column.replace('_', ' ')}: {_HOW[column]}")
    return reading


def _on_a_later_line(evidence: Evidence, rows: Steps) -> Reading | None:
    """The last loss printed after those of these rows and up to just after the last step."""
    has_loss = np.isfinite(rows["loss"]) if len(rows) else np.zeros(0, dtype=bool)
    after_ns = int(rows["end_ns"][has_loss].max()) + 1 if has_loss.any() else 0
    since_ns = max(evidence.window.start_ns, after_ns)
    beside = evidence.losses_beside_steps
    later = (beside.t_ns >= since_ns) & (beside.t_ns <= _printed_until_ns(evidence))
    if not later.any():
        return None
    note = (
        f"the program's own, as printed, the last of {int(has_loss.sum() + later.sum())} told;"
        f" {evidence.window_note}"
    )
    return Reading(float(beside.values[later][-1]), "1", "reported", note=note)


def _printed_until_ns(evidence: Evidence) -> float:
    """The last time at which a printed line may belong to a counted step, as lines come late.

    If steps follow the window, this is the window's end: later lines belong to those steps.
    """
    end_ns = evidence.window.end_ns
    if evidence.work.highest("end_ns") > end_ns:
        return end_ns
    a_step_ns = evidence.window.duration_s / max(len(evidence.counted), 1) * NS_PER_S
    return end_ns + max(_SOON_NS, a_step_ns)


def _of(
    rows: Steps, column: str, evidence: Evidence, *, stream: str, how: str = ""
) -> Reading | None:
    """The last finite value of these rows. NotMeasurable if a later value is NaN or infinite."""
    if not len(rows):
        return None
    finite = np.flatnonzero(np.isfinite(rows[column]))
    broken = _not_numbers(rows, column, evidence, stream)
    last_ns = rows["end_ns"][finite[-1]] if len(finite) else 0
    since = broken.where(broken["end_ns"] > last_ns)
    if len(since):
        raise NotMeasurable(_lost(column, since, rows.where(finite[-1:])) + how)
    if not len(finite):
        return None
    index = rows["index"][finite[-1]]
    # Printed step numbers are the program's; recorded indices begin at 0.
    number = index if evidence.from_output else index + 1
    which = "" if np.isnan(index) or how else f" of step {number:.0f}"
    others = f", {len(broken)} before it are no numbers" if len(broken) else ""
    note = (
        f"the program's own{which}{how}, the last of {len(finite)} told{others};"
        f" {evidence.window_note}"
    )
    return Reading(float(rows[column][finite[-1]]), "1", "reported", note=note)


def _not_numbers(rows: Steps, column: str, evidence: Evidence, stream: str) -> Steps:
    """The training steps in the time of these rows with a NaN or infinite value, ordered by end."""
    writers = np.unique(rows["writer"]).astype(int).tolist()
    steps = Steps(evidence.run.not_numbers(column, writers, stream))
    first_ns, last_ns = rows["end_ns"].min(), rows["end_ns"].max()
    inside = (steps["end_ns"] >= first_ns) & (steps["end_ns"] <= last_ns)
    chosen = steps.where(inside).of_phase("train")
    return chosen.where(np.argsort(chosen["end_ns"], kind="stable"))


def _lost(column: str, since: Steps, last: Steps) -> str:
    """The text on where values became NaN or infinite, and the last number before."""
    what = f"{_DIVERGED}loss" if column == "loss" else column.replace("_", " ")
    lost = f"{what} is not a number ({since[column][0]:g}){_at(since, ' from step {} on')}"
    if not len(last):
        return f"{lost}; no step of the window before it has a number"
    return f"{lost}; the last number was {significant(last[column][0])}{_at(last, ' at step {}')}"


def _at(rows: Steps, words: str) -> str:
    """The step number put into a text such as " at step {}"; "" if it is unknown."""
    index = rows["index"][0]
    return "" if np.isnan(index) else words.format(f"{index:.0f}")


def _metric(name: str, title: str, direction: Direction, **declared: Any) -> Metric:  # noqa: ANN401
    return Metric(
        f"training.{name}",
        title,
        "1",
        direction,
        f"the last {title} reported in the window",
        (f"steps with a {title}",),
        partial(_last, name),
        **declared,
    )


METRICS = [
    _metric(
        "loss",
        "loss",
        "lower",
        noun="training loss",
        scale="difference",
        column="loss",
        rule="loss",
        rule_aliases=("train_loss",),
        views="watch 30 as loss; serve live 30; serve ledger 50; console 10;"
        " ledger 30 in trainer as train_loss; compare 90 as loss; bench compare 50;"
        " fairness 10; bench report 50 expected; bench matrix 150",
    ),
    _metric("learning_rate", "learning rate", "neither"),
    _metric("grad_norm", "gradient norm", "neither"),
]
