"""`erg list`: the runs there are."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from ergmeter.runlog.reader import Run

_COLUMNS = ("throughput.tokens_per_s", "time.step_s", "energy.joules_per_token", "time.run_s")
_TITLES = ("tokens/s", "step", "J/token", "lasted")


@click.command()
@click.argument("directory", type=click.Path(path_type=Path), default=Path("runs"))
@click.option("--json", "as_json", is_flag=True, help="As JSON, with the readings of the columns.")
def command(directory: Path, as_json: bool) -> int:
    """List the runs in DIRECTORY (default: runs/), the newest last."""
    from rich.console import Console
    from rich.table import Table

    from ergmeter.errors import ErgmeterError
    from ergmeter.metrics.summarize import summarize
    from ergmeter.runlog.directory import run_paths
    from ergmeter.runlog.reader import Run
    from ergmeter.views import documents, terminal

    table = Table(box=None, pad_edge=False)
    table.add_column(f"run in {directory.name or directory}/", no_wrap=True)
    table.add_column("made")
    table.add_column("status", min_width=len("failed (2)"))
    for title in _TITLES:
        table.add_column(title, justify="right", no_wrap=True)
    listed = []
    damaged = []
    for path in run_paths(directory):
        try:
            run = Run.open(path)
            summary = summarize(run)
        except ErgmeterError as error:
            said = str(error)
            damaged.append(said if str(path) in said else f"{path}: {said}")
            continue
        readings = {key: summary.readings[key] for key in _COLUMNS}
        table.add_row(
            path.name,
            _made(run),
            terminal.brief(summary.status),
            *(terminal.bare(r) for r in readings.values()),
        )
        listed.append(
            {
                "path": str(path),
                "name": run.name,
                "created": run.header.get("created"),
                "status": summary.status,
                "readings": {key: documents.result(r) for key, r in readings.items()},
            }
        )
    if as_json:
        click.echo(json.dumps(listed, indent=1, allow_nan=False))
    elif listed:
        Console().print(table)
    else:
        click.echo(f"no run in {directory}; `erg record -- COMMAND` makes one")
    for line in damaged:
        click.echo(f"erg: {line}", err=True)
    return 1 if damaged else 0


def _made(run: Run) -> str:
    """When, by the clock here; of a run whose name begins with the day just the time of day."""
    try:
        created = datetime.fromisoformat(str(run.header.get("created"))).astimezone()
    except ValueError:
        return ""
    day, _, time_of_day = created.isoformat()[:16].partition("T")
    return time_of_day if run.path.name.startswith(day) else f"{day[5:]} {time_of_day}"
