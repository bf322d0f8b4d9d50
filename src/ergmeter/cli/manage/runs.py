"""`erg runs`: tags, notes, pruning, packing and collecting of runs."""

from __future__ import annotations

from pathlib import Path

import click

from ergmeter.cli.options import PATH, check_folder, flag, repeated
from ergmeter.errors import ErgmeterError
from ergmeter.units import duration, number_of, printable, scaled

_RUN = click.argument("run", type=PATH)
_LONGEST_HELP = 1000  # characters of a summary: more than any has


class _Actions(click.Group):
    """Lists the subcommands with their whole first sentence, which click would cut."""

    def format_commands(
        self,
        ctx: click.Context,  # noqa: ARG002  as click's
        formatter: click.HelpFormatter,
    ) -> None:
        rows = [
            (name, command.get_short_help_str(_LONGEST_HELP))
            for name, command in self.commands.items()
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


@click.group(cls=_Actions, invoke_without_command=True, subcommand_metavar="COMMAND [ARGS]...")
@click.pass_context
def command(context: click.Context) -> None:
    """Tag, annotate, prune, pack, anonymise and collect runs. `erg list` shows them."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@command.command()
@_RUN
@click.argument("tags", nargs=-1)
@repeated("--remove", metavar="TAG", help="Remove this tag.")
def tag(run: Path, tags: tuple[str, ...], remove: tuple[str, ...]) -> None:
    """Tag a run; without TAGS, show its tags. One that is tagged `keep` is never pruned."""
    from ergmeter.runlog.manage import labels as collection
    from ergmeter.runlog.reader import Run

    Run.open(run)
    labels = collection.labels_of(run)
    if tags or remove:
        labels = collection.tag(run, add=tags, remove=remove)
    click.echo(" ".join(printable(tag) for tag in labels.tags) or "no tag")


@command.command()
@_RUN
@click.argument("text", nargs=-1)
def note(run: Path, text: tuple[str, ...]) -> None:
    """Add a note to a run; without TEXT, show its notes."""
    from ergmeter.runlog.manage import labels as collection
    from ergmeter.runlog.reader import Run

    Run.open(run)
    labels = collection.annotate(run, " ".join(text)) if text else collection.labels_of(run)
    for at, note_text in labels.notes:
        click.echo(f"{printable(at)}  {printable(note_text)}")
    if not labels.notes:
        click.echo("no note")


@command.command()
@click.argument("directory", type=PATH, default=Path("runs"))
@click.option("--older-than", metavar="AGE", help="Only runs older than this: 30d, 12h, 2w.")
@click.option("--larger-than", metavar="SIZE", help="Only runs larger than this: 500MB, 2GB, 1GiB.")
@repeated("--tag", "tags", help="Only runs with this tag. May be repeated: all of them.")
@click.option(
    "--keep-newest", type=click.IntRange(min=0), default=0, metavar="N", help="Keep these."
)
@flag("--yes", help="Do it. Without this nothing is removed.")
def prune(
    directory: Path,
    older_than: str | None,
    larger_than: str | None,
    tags: tuple[str, ...],
    keep_newest: int,
    yes: bool,
) -> int:
    """Remove the runs in DIRECTORY (default: runs/) that meet all given conditions.

    Shows what would go; --yes removes it. A run stays if it was written to within the last hour,
    is tagged `keep`, is a link, can't be read, or has files that are not part of a run.
    """
    from ergmeter.runlog.manage import labels as collection

    doomed = collection.chosen(
        directory,
        older_s=None if older_than is None else collection.age_parsed(older_than),
        larger_bytes=None if larger_than is None else collection.size_parsed(larger_than),
        tags=tags,
        newest=keep_newest,
    )
    freed, gone, failed = 0, 0, 0
    for run in doomed:
        name = printable(run.path.name)
        what = f"{name}  {scaled(run.size_bytes, 'B')}, written {duration(max(0.0, run.age_s))} ago"
        if run.reason:
            click.echo(f"stays   {what}: {printable(run.reason)}")
            continue
        try:
            if yes:
                collection.remove(run.path)
        except (ErgmeterError, OSError) as error:
            click.echo(f"erg: {name}: {printable(str(error))}", err=True)
            failed += 1
            continue
        click.echo(f"{'removed' if yes else 'goes   '} {what}")
        freed, gone = freed + run.size_bytes, gone + 1
    runs = f"{number_of(gone, 'run')}, {scaled(freed, 'B')}"
    click.echo(f"{runs} removed" if yes else f"{runs} would go; --yes removes them")
    return 1 if failed else 0


@command.command()
@_RUN
@click.argument("file", type=PATH, required=False)
def pack(run: Path, file: Path | None) -> None:
    """Pack a run into one FILE (.tar.gz or .zip; default: RUN.tar.gz)."""
    from ergmeter.runlog.manage import pack as packing

    beside = run if run.name not in ("", "..") else run.resolve()
    into = packing.pack(run, file or beside.parent / f"{run.resolve().name}.tar.gz")
    size = scaled(into.stat().st_size, "B")
    click.echo(f"{printable(str(into))}  {size}; `erg runs unpack` unpacks it")


@command.command()
@click.argument("file", type=PATH)
@click.argument("directory", type=PATH, default=Path("runs"))
def unpack(file: Path, directory: Path) -> None:
    """Unpack a packed run into DIRECTORY (default: runs/)."""
    from ergmeter.runlog.manage import pack as packing

    click.echo(printable(str(packing.unpack(file, directory))))


@command.command()
@_RUN
@click.argument("into", type=PATH)
@click.option("--name", help="What to call the copy. [default: as the run]")
def anonymise(run: Path, into: Path, name: str | None) -> None:
    """Copy a run without host names, user names, paths, UUIDs, command line, labels and notes.

    Metrics stay as they are. The copy is searched for leaks before it appears.
    """
    from ergmeter.runlog.manage.anonymise import anonymise as write_anonymised

    path = write_anonymised(run, into, name=name)
    click.echo(f"{path}  anonymous; look at its run.json before you share")


@command.command()
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...")
@click.argument("directory", type=PATH)
def collect(sources: tuple[str, ...], directory: Path) -> int:
    """Bring runs together in DIRECTORY, each once, by its id.

    A SOURCE is a directory of runs, a run, or [USER@]HOST:PATH, which is fetched by rsync.
    What is still being written is left for the next time.
    """
    from ergmeter.runlog.manage.collect import collect as collect_runs

    codes = []
    check_folder(directory, option="DIRECTORY")
    for source in sources:
        try:
            outcomes = collect_runs(source, directory)
        except (ErgmeterError, OSError) as error:  # one machine is down, and the others are not
            click.echo(f"erg: {printable(str(error))}", err=True)
            codes.append(error.exit_code if isinstance(error, ErgmeterError) else 1)
            continue
        for outcome in outcomes:
            click.echo(f"{printable(outcome.name)}: {printable(outcome.message)}")
        if not outcomes:
            click.echo(f"no run found in {printable(source)}")
        codes.append(int(any(outcome.message.startswith("left out") for outcome in outcomes)))
    return 2 if set(codes) == {2} else int(any(codes))
