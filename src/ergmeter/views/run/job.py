"""What `erg job` found, on the terminal and as JSON."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from ergmeter.errors import NotMeasurable
from ergmeter.records import Missing
from ergmeter.units import duration
from ergmeter.views import documents
from ergmeter.views.run import card

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType

    from ergmeter.compare.jobs import JobRun
    from ergmeter.records import Result

_TITLES = {
    "job.wall_s": "time, first start to last end",
    "job.down_s": "between the runs",
    "job.goodput_frac": "goodput",
    "job.steps": "steps kept",
    "job.lost_steps": "steps made again",
    "job.tokens": "tokens kept",
    "job.energy_j": "energy, all runs",
}


def page(name: str, parts: Sequence[JobRun], results: dict[str, Result]) -> RenderableType:
    """The runs in order, then what they came to together."""
    runs = Table(box=None, pad_edge=False)
    for title in ("run", "began", "lasted", "steps", "status"):
        runs.add_column(title, justify="left" if title in ("run", "status") else "right")
    for part in parts:
        began = datetime.fromtimestamp(part.start_s, timezone.utc).astimezone()
        runs.add_row(
            part.run.path.name,
            began.strftime("%m-%d %H:%M"),
            duration(part.end_s - part.start_s),
            _numbers(part),
            card.brief(part.run.status),
        )
    figures = Table(box=None, show_header=False, pad_edge=False)
    figures.add_column()
    figures.add_column(justify="right")
    figures.add_column(style="dim")
    for key, result in results.items():
        if isinstance(result, Missing):
            figures.add_row(_TITLES[key], "-", result.reason)
        else:
            figures.add_row(_TITLES[key], card.value(result), result.note)
    return Group(Text.assemble((f"job {name}", "bold")), runs, Text(), figures)


def document(name: str, parts: Sequence[JobRun], results: dict[str, Result]) -> dict[str, Any]:
    """The same, for programs."""
    return {
        "job": name,
        "runs": [
            {
                "run": str(part.run.path),
                "status": part.run.status,
                "start_s": part.start_s,
                "end_s": part.end_s,
            }
            for part in parts
        ],
        "readings": {key: documents.result(one) for key, one in results.items()},
    }


def _numbers(part: JobRun) -> str:
    """The numbers of the first and the last step, counted from 1 as people do."""
    try:
        first = part.first_step()
        return f"{first + 1} to {first + part.kept(None)[0]}"
    except NotMeasurable:
        return "-"
