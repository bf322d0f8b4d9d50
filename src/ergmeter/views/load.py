"""What came of `erg load`: a row for each level, and below it what to know about the figures.

The trap: a table that hides who was slow. Failed requests stand in the row, with their reasons
below, and so does the client's own CPU: at a whole core the client was measured, not the server.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from ergmeter.records import Missing, Reading
from ergmeter.units import significant
from ergmeter.views import documents
from ergmeter.views.terminal import value

if TYPE_CHECKING:
    from rich.console import Console

    from ergmeter.load.level import Outcome, Plan
    from ergmeter.records import Result, Summary

_COLUMNS = {
    "\nreq/s": "throughput.requests_per_s",
    "tokens/s\nout": "throughput.output_tokens_per_s",
    "TTFT ms\nmedian": "latency.ttft_median_s",
    "\np95": "latency.ttft_p95_s",
    "TPOT ms\nmedian": "latency.tpot_median_s",
    " \np95": "latency.tpot_p95_s",
    "whole ms\nmedian": "latency.e2e_median_s",
}
# In a line of their own: most runs have neither, and the table fits 80 columns.
_BELOW = {
    "goodput": "throughput.goodput_per_s",
    "energy": "energy.joules_per_generated_token",
}
_BUSY_FRAC = 0.8  # of a core: beyond it the client may be what is measured
_GROUPS = ("latency.", "throughput.", "requests.", "energy.", "overhead.client")


@dataclass(frozen=True, slots=True)
class Level:
    """One level: what it was to do, what happened, and what its run came to."""

    plan: Plan
    outcome: Outcome
    summary: Summary


def show(console: Console, levels: list[Level]) -> None:
    """Print the table, the remarks, and how to see more of each run."""
    first = levels[0].plan.asking
    console.print(Text(f"{first.model} at {first.target.address.url}", "dim"))
    console.print(_table(levels))
    for line in _below(levels):
        console.print(Text(line))
    for line in remarks(levels):
        console.print(Text.assemble(("! ", "yellow"), line))
    for level in levels:
        console.print(Text(f"erg report {shlex.quote(str(level.outcome.run))}"), soft_wrap=True)


def _table(levels: list[Level]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("\nrequests", no_wrap=True)
    for title in ("\nok", "\nfailed", *_COLUMNS, "client\nCPU"):
        table.add_column(title, justify="right", no_wrap=True)
    for level in levels:
        table.add_row(
            level.plan.pace.label,
            str(level.outcome.answered),
            str(level.outcome.failed),
            *(_cell(level.summary.readings[key]) for key in _COLUMNS.values()),
            f"{100 * level.outcome.cpu_frac:.0f} %",
        )
    return table


def _cell(found: Result) -> str:
    if not isinstance(found, Reading):
        return "-"
    return significant(found.value * (1e3 if found.unit == "s" else 1.0), 3)


def _below(levels: list[Level]) -> list[str]:
    """What only some loads have: a line for each level."""
    return [
        f"{level.plan.pace.label}: {what} {value(found)} ({found.note.partition('; ')[0]})"
        for what, key in _BELOW.items()
        for level in levels
        if isinstance(found := level.summary.readings[key], Reading)
    ]


def remarks(levels: list[Level]) -> list[str]:
    """What a reader of the table must know."""
    said = []
    for level in levels:
        label, outcome = level.plan.pace.label, level.outcome
        for kind, count in outcome.failures.most_common():
            said.append(f"{label}: {count} x {kind}: {outcome.examples[kind]}")
        if outcome.cpu_frac > _BUSY_FRAC:
            said.append(
                f"{label}: the client took {100 * outcome.cpu_frac:.0f} % of a core: its own"
                " waiting is in these figures; use several clients or a faster machine"
            )
        again = level.plan.prompts.repeats_after
        if again is not None and outcome.answered + outcome.failed > again:
            said.append(
                f"{label}: the {again} prompts were asked more than once: caches may answer"
            )
        said += _missing(label, level.summary.readings)
    first = levels[0].plan
    if not first.asking.counts_tokens:
        said.append("the server sends no usage: a chunk with text stands for a token (assumed)")
    if first.why_no_energy:
        said.append(f"no energy: {first.why_no_energy}")
    return list(dict.fromkeys(said))


def _missing(label: str, readings: dict[str, Result]) -> list[str]:
    """Why a figure of the table is not there; a reason that several share is given once."""
    reasons = [
        found.reason for key in _COLUMNS.values() if isinstance(found := readings[key], Missing)
    ]
    return [f"{label}: {reason}" for reason in dict.fromkeys(reasons)]


def document(levels: list[Level]) -> dict[str, Any]:
    """The same for programs."""
    first = levels[0].plan.asking
    return {
        "url": first.target.address.url,
        "model": first.model,
        "options": first.options,
        "tokens_from": "usage" if first.counts_tokens else "chunks",
        "levels": [_entry(level) for level in levels],
        "remarks": remarks(levels),
    }


def _entry(level: Level) -> dict[str, Any]:
    outcome = level.outcome
    kept = {k: v for k, v in level.summary.readings.items() if k.startswith(_GROUPS)}
    return {
        "run": str(outcome.run),
        "clock": level.plan.pace.clock,
        "answered": outcome.answered,
        "failed": outcome.failed,
        "failures": [
            {"kind": kind, "count": count, "example": outcome.examples[kind]}
            for kind, count in outcome.failures.most_common()
        ],
        "most_in_flight": outcome.most_in_flight,
        "client_cpu_frac": float(significant(outcome.cpu_frac)),
        "client_lag_p99_s": float(significant(outcome.lag_p99_s)),
        "readings": {key: documents.result(found) for key, found in kept.items()},
    }
