"""Output of `erg bench`: progress and ending of `run`; the commands `list`, `report`, `compare`."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import click

from ergmeter.cli.options import (
    BY,
    NOISE,
    PATH,
    SHORT_FLAGS,
    Forms,
    check_page,
    flag,
    given_parameters,
    path_option,
    repeated,
    with_format,
    with_forms,
    with_page,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    import pyarrow as pa

    from ergmeter.bench.execute.driver import BenchProgress
    from ergmeter.bench.plan.cells import BenchPlan

_INTERRUPTED = 130  # what a shell gives a program that Ctrl-C ended
_REDRAW_S = 0.5  # drawing takes processor time from what is measured
_MOST = 200  # rows on a terminal


def show_starts(plan: BenchPlan, out: Path, *, seed: int, rerun: Collection[str]) -> None:
    """Print how each cell would be started, by number; then the random order.

    With --num-gpus: as on a machine with that many GPUs, whatever this one has.
    """
    from ergmeter.bench.execute import driver, launching, state
    from ergmeter.views import bench as bench_plan

    on_gpus = "num_gpus" in given_parameters()
    has_gpus, notes = launching.dry_run_gpus(plan.cells, on_gpus=on_gpus)
    for line in (*plan.warnings, *notes):
        click.echo(line, err=True)
    started = set()
    for cell in plan.cells:
        directory = state.directory_of(out, cell).resolve()
        cell_state = state.read(directory)
        if cell.skip or (cell_state.is_final and cell_state.status not in rerun):
            why = f"skipped: {cell.skip}" if cell.skip else f"it is {cell_state.status} already"
            click.echo(f"{bench_plan.heading(cell)}  # {why}")
            continue
        started.add(cell.index)
        how = launching.start(cell, directory, has_gpus=has_gpus)
        click.echo(f"{bench_plan.heading(cell)}\n{launching.command_line(how)}")
    # Ordered among all cells, as in a resumed run that finds some of them done.
    ordered = [cell.index for cell in driver.order(plan.cells, seed=seed) if cell.index in started]
    text = f"in this order, with --seed {seed}: {' '.join(map(str, ordered))}"
    click.echo(f"# {text if ordered else 'nothing would start'}")


@contextmanager
def live_progress(progress: BenchProgress, out: Path) -> Iterator[Callable[[BenchProgress], None]]:
    """Yield a function that shows progress: a live table on a terminal, lines elsewhere."""
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    from ergmeter.bench.overview import varying
    from ergmeter.views import bench as run
    from ergmeter.views.render.terminal import grid

    names = varying(progress.plan.cells)
    console = Console(stderr=True)
    if not console.is_terminal:
        statuses: dict[int, str] = {index: state.status for index, state in progress.states.items()}

        def say(now: BenchProgress) -> None:
            for line in run.news(now, statuses, names, out=out):
                click.echo(line, err=True)

        yield say
        return
    drawn_s = 0.0
    with Live(console=console, auto_refresh=False, transient=True) as live:

        def draw(now: BenchProgress) -> None:
            nonlocal drawn_s
            if time.monotonic() - drawn_s > _REDRAW_S:
                above, table = run.progress_parts(now, names)
                live.update(Group(Text(above), grid(table, console.width)), refresh=True)
                drawn_s = time.monotonic()

        yield draw


def ending(progress: BenchProgress, out: Path, *, is_done: bool) -> int:
    """Print the failed cells and the counts of all; return the exit code."""
    from ergmeter.bench.overview import varying
    from ergmeter.views import bench as run
    from ergmeter.views.document import Document

    failed = progress.failed
    counts = run.counts(progress.counts, broken=progress.broken)
    if failed:
        table = run.cell_table(failed[:_MOST], varying(progress.plan.cells), out=out)
        Forms("text").show(Document("Failed cells", (table,)))
    if len(failed) > _MOST:
        click.echo(f"and {len(failed) - _MOST} more: erg bench list {out} --all")
    if not is_done:
        click.echo(f"{counts}\ngo on with: {_resume_command(out)}")
        return _INTERRUPTED
    click.echo(f"see more: erg bench report {out}\n{counts}")
    return 1 if failed else 0


_NOT_AGAIN = ("resume", "move_aside", "rerun", "out")


def _resume_command(out: Path) -> str:
    """Return the given command line with --resume."""
    import shlex

    from ergmeter.runlog.identity import redacted

    context = click.get_current_context()
    words = context.command_path.split()
    for name, param in given_parameters().items():
        value = context.params[name]
        if name in _NOT_AGAIN:
            continue
        if not isinstance(param, click.Option):
            words.append(str(value))
        elif param.is_flag:
            words.append(param.opts[0])
        else:
            values = value if param.multiple else (value,)
            words += [word for v in values for word in (param.opts[0], str(v))]
    return shlex.join(redacted([*words, "--out", str(out), "--resume"]))


@click.command("report")
@click.argument("results", type=PATH)
@path_option(
    "--export",
    "exports",
    multiple=True,
    help="Also write all columns to this file, .parquet or .csv. May be repeated.",
)
@click.option(
    "--fms",
    "fms_directory",
    type=click.Path(path_type=Path, file_okay=False),
    help="Also write FMS's benchmarks.csv and raw_summary.csv into this directory.",
)
@flag("--force", help="Replace files that are there already.")
@flag("--all", "every", help=f"Every configuration, and not just the first {_MOST}.")
@flag(
    "--memory",
    help="Only GPU memory, from every source: each device, the Trainer's stages and their sums.",
)
@with_format(
    *("text", "md", "csv"),
    help="csv has all cells and columns; with --memory, those of memory. md is --md.",
)
@with_page
def report(
    results: Path,
    exports: tuple[Path, ...],
    fms_directory: Path | None,
    force: bool,
    every: bool,
    memory: bool,
    forms: Forms,
) -> None:
    """Show the results of cells in RESULTS: a directory, a table of `erg bench`, or FMS's own.

    --json has all cells and columns, as a list.
    """
    from ergmeter.bench import tables
    from ergmeter.bench.overview import TABLE_COLUMNS, MemoryTable, Overview
    from ergmeter.bench.results import batches, damaged_plan, rows
    from ergmeter.compat import fms
    from ergmeter.views.bench import memory_document, report_document

    if forms.form == "json" and memory:
        raise click.UsageError("--json has all columns: leave --memory out")
    for path in exports:
        tables.check_ending(path)
    files = [fms_directory / name for name in (fms.BENCHMARKS, fms.RAW)] if fms_directory else []
    _check_free((*exports, *files), results=results, force=force)
    check_page(forms.page, (*exports, *files))
    most = None if every else _MOST
    summary = MemoryTable(most=most) if memory else Overview(most=most)
    is_table = memory or exports or files or forms.form in ("json", "csv")
    stored = batches(results) if is_table else iter(())
    with ExitStack() as stack:
        takers: list[Any] = [summary.add]
        takers += [stack.enter_context(tables.table_writer(path)) for path in exports]
        if fms_directory is not None:
            takers.append(stack.enter_context(fms.fms_writer(fms_directory)))
        if forms.form == "json":
            _echo_list(
                document
                for batch in _handed_on(stored, takers)
                for document in tables.documents(batch)
            )
        for number, batch in enumerate(_handed_on(stored, takers)):
            if forms.form == "csv":
                columns = batch.select(TABLE_COLUMNS) if memory else batch
                click.echo(tables.csv_text(columns, header=number == 0), nl=False)
    name = results.name or str(results)
    if isinstance(summary, MemoryTable):
        document = memory_document(summary, name=name)
    else:
        for line in damaged_plan(results):
            summary.add_trouble(line)
        summary.add_rows(() if is_table else rows(results))
        document = report_document(summary, name=name, page=forms.page)
    if forms.form in ("json", "csv"):
        forms.write_page(document)
    else:
        forms.show(document)


def _handed_on(batches: Iterable[pa.Table], takers: Sequence[Any]) -> Iterator[pa.Table]:
    for batch in batches:
        for add in takers:
            add(batch)
        yield batch


def _echo_list(rows: Iterable[dict[str, Any]]) -> None:
    """Print rows as a JSON list, one object per line, as they arrive."""
    from ergmeter.views.documents import finite

    before = "[\n "
    for document in rows:
        click.echo(before + json.dumps(finite(document), allow_nan=False), nl=False)
        before = ",\n "
    click.echo("[]" if before == "[\n " else "\n]")


def _check_free(paths: Sequence[Path], *, results: Path, force: bool) -> None:
    """Refuse paths that exist unless forced, and always the input and directories."""
    for path in paths:
        if path.is_dir():
            raise click.UsageError(f"{path} is a directory; name a file")
        is_source = path.exists() and results.exists() and path.samefile(results)
        if is_source or (path.exists() and not force):
            way = "it is the input; name another" if is_source else "--force replaces it"
            raise click.UsageError(f"{path} is there already: {way}")


@click.command("list")
@click.argument("directory", type=PATH)
@flag("--all", "every", help=f"Every cell, and not just the first {_MOST}.")
@click.option("--status", "chosen", metavar="STATUS[,...]", help="Just cells with these statuses.")
@with_forms
def listed(directory: Path, every: bool, chosen: str | None, forms: Forms) -> None:
    """List the cells in DIRECTORY with their statuses.

    --json has all of them, as a list.
    """
    from ergmeter.bench.execute import state
    from ergmeter.bench.execute.outcome import Status
    from ergmeter.bench.overview import cell_document, cell_listing
    from ergmeter.bench.plan.cells import check_plan
    from ergmeter.views.bench import list_document

    wanted = statuses("--status", chosen, get_args(Status))
    check_plan(directory / state.PLAN)
    is_json = forms.form == "json"
    if is_json:
        _echo_list(
            cell_document(cell, cell_state, state.directory_of(directory, cell))
            for cell, cell_state in state.states(directory)
            if not wanted or cell_state.status in wanted
        )
    if is_json and forms.page is None:
        return
    most = None if every else _MOST
    listing = cell_listing(state.states(directory), most=most, statuses=wanted)
    document = list_document(listing, name=directory.name or str(directory))
    if is_json:
        forms.write_page(document)
    else:
        forms.show(document)


@click.command("compare")
@click.argument("new", type=PATH)
@click.argument("ref", type=PATH)
@NOISE
@BY
@repeated(
    "--new-where",
    metavar="COLUMN=VALUE",
    help="Only cells of NEW with this value, such as one of two kinds in a file. May be repeated.",
)
@repeated("--ref-where", metavar="COLUMN=VALUE", help="The same for REF.")
@with_format("text", "md", "csv", "json", flags=SHORT_FLAGS)
@repeated(
    "--rule",
    "rules",
    metavar="RULE",
    help="A rule that the page of --html judges by, as in `erg gate`: 'tokens_per_s -3%'. May be"
    " repeated. Default: those of `erg gate`.",
)
@with_page
def compare(
    new: Path,
    ref: Path,
    noises: tuple[str, ...],
    by: tuple[str, ...],
    new_where: tuple[str, ...],
    ref_where: tuple[str, ...],
    rules: tuple[str, ...],
    forms: Forms,
) -> None:
    """Compare the cells in NEW with those in REF, each change with its interval.

    Both are directories of `erg bench run`, tables that `erg bench report` wrote, or FMS's files.
    """

    from ergmeter.bench.results import entries, rows
    from ergmeter.compare.comparison import compare_sides
    from ergmeter.compare.gate import parse_noise
    from ergmeter.compare.pairing import CompareOptions, where
    from ergmeter.metrics.catalog import in_view, rule_metric
    from ergmeter.views import gate as view

    options = CompareOptions(
        noise=parse_noise(noises, [rule_metric(name) for name in in_view("bench compare")]),
        by=by,
        new_where=where(new_where),
        ref_where=where(ref_where),
    )
    if rules and forms.page is None:
        raise click.UsageError("--rule is for the page of --html; `erg gate` judges without one")
    sides = [list(entries(rows(path), argument=str(path))) for path in (new, ref)]
    comparison = compare_sides(sides[0], sides[1], options)
    if forms.page is not None:
        from ergmeter.compare.gate import gate

        judged = gate(sides[0], sides[1], rules, options=options)
        forms.write_page(view.cells_page(comparison, judged, new=str(new), ref=str(ref)))
    if forms.form == "csv":
        click.echo(view.cells_csv(comparison), nl=False)
    else:
        Forms(forms.form).show(view.cells_document(comparison))


def statuses(option: str, text: str | None, allowed: Collection[str]) -> tuple[str, ...]:
    """Parse the statuses of an option; none if it is not given."""
    if text is None:
        return ()
    asked = tuple(text.replace(",", " ").split())
    if not asked or not set(asked) <= set(allowed):
        raise click.UsageError(f"{option} takes {', '.join(allowed)}, with commas; got {text!r}")
    return asked
