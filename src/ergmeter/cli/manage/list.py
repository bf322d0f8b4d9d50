"""`erg list`: the runs there are."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ergmeter.cli.options import PATH, flag, print_json

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.text import Text

    from ergmeter.runlog.reader import Run

_STATUS = "failed (2)"  # which a status is not cut below
_FIGURES = 3  # the column that they begin at: after name, when it was made and status
_GIVE_WAY = ("step", "lasted", "J/token")  # last, in this order, where there is no room
_STAYS = "tokens/s"
_GAP = 2  # between columns


@click.command()
@click.argument("directory", type=PATH, default=Path("runs"))
@flag("--json", "as_json", help="As JSON, with the readings of the columns.")
def command(directory: Path, as_json: bool) -> int:
    """List the runs in DIRECTORY (default: runs/), the newest last."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from ergmeter.errors import ErgmeterError
    from ergmeter.metrics.catalog import catalogue, in_view
    from ergmeter.metrics.summarize import summarize
    from ergmeter.runlog.format import run_paths
    from ergmeter.runlog.manage.labels import labels_of
    from ergmeter.runlog.reader import Run
    from ergmeter.units import printable
    from ergmeter.views import documents
    from ergmeter.views.run import card

    table = Table(box=None, pad_edge=False)
    table.add_column(f"run in {directory.name or directory}/", overflow="fold")
    table.add_column("made", no_wrap=True)
    table.add_column("status", min_width=len(_STATUS))
    columns = {key: at.label or catalogue()[key].title for key, at in in_view("list").items()}
    listed: list[dict[str, Any]] = []
    rows: list[tuple[str, ...]] = []
    damaged: list[str] = []
    for path in run_paths(directory):
        try:
            run = Run.open(path)
            summary = summarize(run)
            labels = labels_of(path)
        except (ErgmeterError, OSError) as error:
            damaged += _damage(path, str(error))
            continue
        readings = {key: summary.readings[key] for key in columns}
        rows.append(
            (
                printable(path.name),
                _made(run),
                card.short_status(summary.status),
                *(card.column_text(r) for r in readings.values()),
                ", ".join(map(printable, labels.tags)),
            )
        )
        listed.append(
            {
                "path": str(path),
                "name": run.name,
                "created": run.header.get("created"),
                "status": summary.status,
                "tags": list(labels.tags),
                "notes": [{"at": at, "text": text} for at, text in labels.notes],
                "readings": {key: documents.result(r) for key, r in readings.items()},
            }
        )
    console = Console()
    titles: tuple[str, ...] = (str(table.columns[0].header), "made", _STATUS, *columns.values())
    unshown = _without_room(rows, titles, console.width)
    hidden = ", ".join(titles[at] for at in unshown)
    titles, *rows = (_without(row, unshown) for row in (titles, *rows))
    for title in titles[_FIGURES:]:
        table.add_column(title, justify="right", no_wrap=True)
    if any(row[-1] for row in rows):
        in_a_column, rows = _with_tags(rows, titles, console.width)
        if in_a_column:
            table.add_column("tags", no_wrap=True)
    for row in rows:
        table.add_row(*map(Text, row[: len(table.columns)]))
    if as_json:
        print_json(listed)
    elif listed:
        console.print(table)
        console.print(_without_room_note(hidden), style="dim", end="")
        console.print(*_note_lines(listed), sep="", end="")
    else:
        click.echo(f"no run in {directory}; `erg record -- COMMAND` makes one")
    for line in damaged:
        click.echo(f"erg: {line}", err=True)
    return 1 if damaged else 0


def _damage(path: Path, reason: str) -> list[str]:
    """A line about a run that can't be read; none about one that was removed since we looked."""
    if not path.exists():
        return []
    return [reason if str(path) in reason else f"{path}: {reason}"]


def _without_room(
    rows: list[tuple[str, ...]], titles: tuple[str, ...], columns: int
) -> tuple[int, ...]:
    """The places of figures that are not shown: first what no run has.

    It is whole columns that give way: a figure that is cut in the middle is another figure.
    """
    widths = [
        max(map(len, column)) for column in zip(titles, *(row[:-1] for row in rows), strict=True)
    ]
    places = range(_FIGURES, len(titles))
    nobody_has = [column for column in places if all(row[column] == "-" for row in rows)]
    left_out: tuple[int, ...] = ()
    others = sorted((at for at in places if titles[at] != _STAYS), key=lambda at: _turn(titles[at]))
    for index in dict.fromkeys((*nobody_has, *others)):
        visible = [width for at, width in enumerate(widths) if at not in left_out]
        if sum(visible) + _GAP * (len(visible) - 1) <= columns:
            break
        left_out = (*left_out, index)
    return left_out


def _turn(title: str) -> int:
    """When a column gives way: a plugin's first, ours in their order."""
    return _GIVE_WAY.index(title) if title in _GIVE_WAY else -1


def _without_room_note(hidden: str) -> str:
    return f"no room for {hidden}: a wider terminal, or --json\n" if hidden else ""


def _note_lines(listed: list[dict[str, Any]]) -> Iterator[Text]:
    """The newest note on each run, and how many there are where there are more."""
    from rich.text import Text

    from ergmeter.units import printable

    for entry in listed:
        notes = entry["notes"]
        if notes:
            more = f" (the last of {len(notes)})" if len(notes) > 1 else ""
            line = f"note on {Path(entry['path']).name}{more}: {notes[-1]['text']}"
            yield Text(f"{printable(line)}\n", "dim", no_wrap=True, overflow="ellipsis")


def _without(row: tuple[str, ...], places: tuple[int, ...]) -> tuple[str, ...]:
    return tuple(cell for column, cell in enumerate(row) if column not in places)


def _with_tags(
    rows: list[tuple[str, ...]], titles: tuple[str, ...], columns: int
) -> tuple[bool, list[tuple[str, ...]]]:
    """The rows with their tags, and whether those have a column of their own.

    Where there is no room for one they stand below the name, cut to its width: no figure gives way.
    """
    widths = [max(len(title), *(len(row[i]) for row in rows)) for i, title in enumerate(titles)]
    room = columns - sum(widths) - _GAP * len(widths)
    if room >= max(len(row[-1]) for row in rows):
        return True, rows
    cut = [row[-1] if len(row[-1]) <= widths[0] else row[-1][: widths[0] - 1] + "…" for row in rows]
    below = [f"{row[0]}\n{tags}" if tags else row[0] for row, tags in zip(rows, cut, strict=True)]
    return False, [(name, *row[1:-1]) for name, row in zip(below, rows, strict=True)]


def _made(run: Run) -> str:
    """The local start time; only the time of day if the run's name begins with the day."""
    try:
        created = datetime.fromisoformat(str(run.header.get("created"))).astimezone()
    except ValueError:
        return ""
    day, _, time_of_day = created.isoformat()[:16].partition("T")
    return time_of_day if run.path.name.startswith(day) else f"{day[5:]} {time_of_day}"
