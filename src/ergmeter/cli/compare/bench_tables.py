"""`erg bench list`, `report` and `compare`: how cells are, what came of them, against others."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ergmeter.cli.options.bench import statuses
from ergmeter.cli.options.pages import check_page, with_page, write_page

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import pyarrow as pa

_MOST = 200  # rows on a page; a file has them all


@click.command("report")
@click.argument("results", type=click.Path(path_type=Path))
@click.option(
    "--export",
    "exports",
    type=click.Path(path_type=Path),
    multiple=True,
    help="Also write all columns to this file, .parquet or .csv. May be repeated.",
)
@click.option(
    "--fms",
    "fms_directory",
    type=click.Path(path_type=Path, file_okay=False),
    help="Also write FMS's benchmarks.csv and raw_summary.csv into this directory.",
)
@click.option("--force", is_flag=True, help="Replace files that are there already.")
@click.option(
    "--all", "every", is_flag=True, help=f"Every configuration, and not just the first {_MOST}."
)
@click.option(
    "--memory",
    is_flag=True,
    help="GPU memory alone, by all who tell it: each device, the Trainer's stages and their sums.",
)
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "md", "csv"]),
    default="text",
    show_default=True,
    help="csv has all cells and columns; with --memory, those of memory.",
)
@click.option("--json", "as_json", is_flag=True, help="All cells and columns, as a list in JSON.")
@with_page
def report(
    results: Path,
    exports: tuple[Path, ...],
    fms_directory: Path | None,
    force: bool,
    every: bool,
    memory: bool,
    form: str,
    as_json: bool,
    page: Path | None,
) -> None:
    """Show what the cells in RESULTS came to: a directory, a table of ours, or FMS's own."""
    from rich.console import Console

    from ergmeter.bench.results import memory_table, tables
    from ergmeter.bench.results.overview import Overview
    from ergmeter.bench.results.results import batches
    from ergmeter.compat.fms import exports as fms
    from ergmeter.views.bench import memory as bench_memory
    from ergmeter.views.bench import report as bench_report

    if as_json and (memory or form != "text"):
        raise click.UsageError("--json has all columns: leave --format and --memory out")
    for path in exports:
        tables.check_ending(path)
    files = [fms_directory / name for name in (fms.BENCHMARKS, fms.RAW)] if fms_directory else []
    _check_free((*exports, *files), results=results, force=force)
    check_page(page, (*exports, *files))
    rows = batches(results)
    most = None if every else _MOST
    pictured = Overview(most=most)
    found: Any = memory_table.MemoryTable(most=most) if memory else Overview(most=most)
    view: Any = bench_memory if memory else bench_report
    with ExitStack() as stack:
        takers: list[Any] = [found, *([pictured] if page else [])]
        takers += [stack.enter_context(tables.TableWriter(path)) for path in exports]
        if fms_directory is not None:
            takers.append(stack.enter_context(fms.FmsWriter(fms_directory)))
        if as_json:
            _echo_list(one for batch in _handed_on(rows, takers) for one in tables.documents(batch))
            form = "json"
        for number, batch in enumerate(_handed_on(rows, takers)):
            if form == "csv":
                shown = batch.select(memory_table.COLUMNS) if memory else batch
                click.echo(tables.csv_text(shown, header=number == 0), nl=False)
    if page is not None:
        from ergmeter.views.html.bench_page import bench_page

        write_page(page, bench_page(pictured, name=results.name or str(results), out=page))
    if form == "md":
        click.echo(view.markdown(found), nl=False)
    elif form == "text":
        Console().print(view.page(found))


def _handed_on(batches: Iterable[pa.Table], takers: Sequence[Any]) -> Iterator[pa.Table]:
    for batch in batches:
        for taker in takers:
            taker.add(batch)
        yield batch


def _echo_list(rows: Iterable[dict[str, Any]]) -> None:
    """A list in JSON, an object a line, as they come."""
    from ergmeter.views.documents import finite

    before = "[\n "
    for one in rows:
        click.echo(before + json.dumps(finite(one), allow_nan=False), nl=False)
        before = ",\n "
    click.echo("[]" if before == "[\n " else "\n]")


def _check_free(paths: Sequence[Path], *, results: Path, force: bool) -> None:
    """Before anything is read: what is there is not replaced unasked, what is read not at all."""
    for path in paths:
        if path.is_dir():
            raise click.UsageError(f"{path} is a directory; name a file")
        is_source = path.exists() and results.exists() and path.samefile(results)
        if is_source or (path.exists() and not force):
            way = "it is what is read; name another" if is_source else "--force replaces it"
            raise click.UsageError(f"{path} is there already: {way}")


@click.command("list")
@click.argument("directory", type=click.Path(path_type=Path))
@click.option("--all", "every", is_flag=True, help=f"Every cell, and not just the first {_MOST}.")
@click.option("--status", "chosen", metavar="STATUS[,...]", help="Just cells with these statuses.")
@click.option("--json", "as_json", is_flag=True, help="As JSON, all of them.")
def listed(directory: Path, every: bool, chosen: str | None, as_json: bool) -> None:
    """List the cells in DIRECTORY with their statuses."""
    from rich.console import Console

    from ergmeter.bench.execute import state
    from ergmeter.bench.plan import plan
    from ergmeter.bench.results.listing import CellListing, document
    from ergmeter.views.bench import run

    wanted = statuses(chosen)
    cells = plan.cells(directory / state.PLAN)
    rows = ((cell, state.read(state.directory_of(directory, cell))) for cell in cells)
    if as_json:
        _echo_list(
            document(cell, one, state.directory_of(directory, cell))
            for cell, one in rows
            if not wanted or one.status in wanted
        )
        return
    listing = CellListing(most=None if every else _MOST, statuses=wanted)
    for cell, one in rows:
        listing.add(cell, one)
    Console().print(run.listed(listing))


@click.command("compare")
@click.argument("new", type=click.Path(path_type=Path))
@click.argument("ref", type=click.Path(path_type=Path))
@click.option(
    "--noise",
    "noises",
    multiple=True,
    metavar="[METRIC=]SHARE",
    help="How much a single run scatters, where runs were not repeated: 1%, or loss=0.2%.",
)
@click.option("--by", metavar="COLUMNS", help="Match cells by these columns, joined by commas.")
@click.option(
    "--new-where",
    multiple=True,
    metavar="COLUMN=VALUE",
    help="Just the cells of NEW with this value: two kinds within one file. May be repeated.",
)
@click.option("--ref-where", multiple=True, metavar="COLUMN=VALUE", help="The same of REF.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "md", "csv", "json"]),
    default="text",
    show_default=True,
)
@click.option(
    "--rule",
    "rules",
    multiple=True,
    metavar="RULE",
    help="What the page of --html judges by, as `erg gate` has it: 'tokens_per_s -3%'. May be"
    " repeated. Default: that of `erg gate`.",
)
@with_page
def compare(
    new: Path,
    ref: Path,
    noises: tuple[str, ...],
    by: str | None,
    new_where: tuple[str, ...],
    ref_where: tuple[str, ...],
    form: str,
    rules: tuple[str, ...],
    page: Path | None,
) -> None:
    """Hold the cells in NEW against those in REF, each with what its noise allows to say.

    Both are directories of `erg bench run`, tables that `erg bench report` wrote, or FMS's files.
    """
    from rich.console import Console

    from ergmeter.bench.gate import comparing
    from ergmeter.bench.gate.pairing import where
    from ergmeter.bench.gate.rules import noise
    from ergmeter.bench.results.results import load
    from ergmeter.views.bench import compare as view

    columns = tuple(part.strip() for part in (by or "").split(",") if part.strip())
    options = comparing.BenchCompareOptions(
        noise=noise(noises), by=columns, new_where=where(new_where), ref_where=where(ref_where)
    )
    if rules and page is None:
        raise click.UsageError("--rule is for the page of --html; `erg gate` judges without one")
    check_page(page)
    sides = load(new), load(ref)
    found = comparing.compare(*sides, options=options)
    if page is not None:
        from ergmeter.bench.gate.gate import gate
        from ergmeter.views.html.bench_compare_page import bench_compare_page

        judged = gate(*sides, rules, options=options)
        write_page(page, bench_compare_page(found, judged, new=str(new), ref=str(ref)))
    if form == "text":
        Console().print(view.page(found))
    elif form == "json":
        click.echo(json.dumps(view.document(found), indent=1, allow_nan=False))
    else:
        click.echo({"md": view.markdown, "csv": view.csv_text}[form](found), nl=False)
