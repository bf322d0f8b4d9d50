"""The document of `erg load`: one row for each load level, and notes below.

A row has the number of failed requests, whose reasons are below, and the client's CPU: at a full
core the client was the bottleneck, not the server.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ergmeter.load.level import LevelOutcome, LevelPlan
from ergmeter.load.pacing import AFTER_FAILURE_S, Closed, Open
from ergmeter.metrics.catalog import in_view
from ergmeter.records import Missing, Reading, Result, Summary, value_text
from ergmeter.units import duration, number_of, significant
from ergmeter.views import documents
from ergmeter.views.document import Document, Note, Paragraph, Table, columns_of

_BUSY_FRAC = 0.8  # of a core: above it the client may be the bottleneck
_GROUPS = ("latency.", "throughput.", "requests.", "time.window_s", "energy.", "overhead.client")


@dataclass(frozen=True, slots=True)
class LevelRow:
    """One load level: target, outcome and summary of its run."""

    plan: LevelPlan
    outcome: LevelOutcome
    summary: Summary


def document(levels: list[LevelRow]) -> Document:
    """Return the table, the remarks, and how to see more of each run."""
    first = levels[0].plan.asking
    title = f"{first.model} at {first.target.address.url}"
    reports = (f"erg report {shlex.quote(str(level.outcome.run))}" for level in levels)
    return Document(
        title,
        (
            Paragraph(title, style="dim"),
            _table(levels),
            *map(Paragraph, _below(levels)),
            *(Note("minor", line) for line in remarks(levels)),
            *(Paragraph(line, is_to_copy=True) for line in reports),
        ),
        _data(levels),
    )


def _table(levels: list[LevelRow]) -> Table:
    numbers = ("ok", "failed", *(at.label for at in in_view("load").values()), "client\nCPU")
    rows = (
        (
            level.plan.pace.label,
            str(level.outcome.answered),
            str(level.outcome.failed),
            *(_cell(level.summary.readings[key]) for key in in_view("load")),
            f"{100 * level.outcome.cpu_frac:.0f} %",
        )
        for level in levels
    )
    columns = columns_of("requests", *numbers, no_wrap=True)
    return Table(columns, tuple(rows), "latencies in ms")


def _cell(result: Result) -> str:
    if not isinstance(result, Reading):
        return "-"
    return significant(result.value * (1e3 if result.unit == "s" else 1.0), 3)


def _below(levels: list[LevelRow]) -> list[str]:
    """Return metrics that only some loads have, a line for each level."""
    return [
        f"{level.plan.pace.label}: {at.label} {value_text(reading)}"
        f" ({reading.note.partition('; ')[0]})"
        for key, at in in_view("load notes").items()
        for level in levels
        if at.group != "open" or isinstance(level.plan.pace, Open)
        if at.group != "failures" or level.outcome.failed
        if isinstance(reading := level.summary.readings[key], Reading)
    ]


def remarks(levels: list[LevelRow]) -> list[str]:
    """Return notes on reading the table."""
    lines = [f"{level.plan.pace.label}: {remark}" for level in levels for remark in _remarks(level)]
    first = levels[0].plan
    if not first.asking.counts_tokens:
        lines.append("the server sends no usage: a chunk with text stands for a token (assumed)")
    if first.why_no_energy:
        lines.append(f"no energy: {first.why_no_energy}")
    return list(dict.fromkeys(lines))


def _remarks(level: LevelRow) -> Iterator[str]:
    outcome = level.outcome
    for kind, count in outcome.failures.most_common():
        yield f"{count} x {kind}: {outcome.examples[kind]}"
    if outcome.failed and isinstance(level.plan.pace, Closed):
        yield f"a pause of {AFTER_FAILURE_S:g} s after each failure is in the rates (closed loop)"
    if outcome.unsettled:
        yield (
            f"{number_of(outcome.unsettled, 'request')} in flight when it was interrupted, for up"
            f" to {duration(outcome.unsettled_s)}: offered, not settled; the window ends with the"
            " last one settled"
        )
    if outcome.no_usage:
        yield f"no usage (token counts) with {outcome.no_usage} of {outcome.answered} answers"
    if outcome.zero_usage:
        yield (
            f"usage of 0 tokens for visible text with {outcome.zero_usage} of"
            f" {outcome.answered} answers: treated as no count"
        )
    if outcome.cpu_frac > _BUSY_FRAC:
        yield (
            f"the client took {100 * outcome.cpu_frac:.0f} % of a core: its own"
            " waiting is in these figures; use several clients or a faster machine"
        )
    again = level.plan.prompts.repeats_after
    if again is not None and outcome.offered > again:
        yield f"the {again} prompts were sent more than once: caches may answer"
    for key in in_view("load"):
        if isinstance(reading := level.summary.readings[key], Missing):
            yield reading.reason


def _data(levels: list[LevelRow]) -> dict[str, Any]:
    """Return the levels as JSON."""
    first = levels[0].plan.asking
    return {
        "url": first.target.address.url,
        "model": first.model,
        "options": first.options,
        "length_field": first.length_field,
        "tokens_from": "usage" if first.counts_tokens else "chunks",
        "levels": [_entry(level) for level in levels],
        "remarks": remarks(levels),
    }


def _entry(level: LevelRow) -> dict[str, Any]:
    outcome = level.outcome
    readings = {k: v for k, v in level.summary.readings.items() if k.startswith(_GROUPS)}
    return {
        "run": str(outcome.run),
        "clock": level.plan.pace.clock,
        "offered": outcome.offered,
        "answered": outcome.answered,
        "failed": outcome.failed,
        "unsettled": outcome.unsettled,
        "failed_frac": float(significant(outcome.failed_frac)),
        "failures": [
            {"kind": kind, "count": count, "example": outcome.examples[kind]}
            for kind, count in outcome.failures.most_common()
        ],
        "most_in_flight": outcome.most_in_flight,
        "client_cpu_frac": float(significant(outcome.cpu_frac)),
        "client_lag_p99_s": float(significant(outcome.lag_p99_s)),
        "readings": {key: documents.result(reading) for key, reading in readings.items()},
    }
