"""`erg bench report` and `erg bench compare`: what came of the cells, and against others."""

from __future__ import annotations

import json
from pathlib import Path

import click


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
@click.option(
    "--format", "form", type=click.Choice(["text", "md", "csv"]), default="text", show_default=True
)
def report(results: Path, exports: tuple[Path, ...], fms_directory: Path | None, form: str) -> None:
    """Show what the cells in RESULTS came to: a directory, a table of ours, or FMS's own."""
    from rich.console import Console

    from ergmeter.bench import exports as fms
    from ergmeter.bench import tables
    from ergmeter.bench.results import load
    from ergmeter.views import bench_report

    found = load(results)
    if form == "csv":
        click.echo(tables.csv_text(found), nl=False)
    elif form == "md":
        click.echo(bench_report.markdown(found), nl=False)
    else:
        Console().print(bench_report.page(found))
    for path in exports:
        tables.write(found, path)
    if fms_directory is not None:
        fms_directory.mkdir(parents=True, exist_ok=True)
        fms.write(found, fms_directory)


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
def compare(
    new: Path,
    ref: Path,
    noises: tuple[str, ...],
    by: str | None,
    new_where: tuple[str, ...],
    ref_where: tuple[str, ...],
    form: str,
) -> None:
    """Hold the cells in NEW against those in REF, each with what its noise allows to say.

    Both are directories of `erg bench run`, tables that `erg bench report` wrote, or FMS's files.
    """
    from rich.console import Console

    from ergmeter.bench import comparing
    from ergmeter.bench.pairing import where
    from ergmeter.bench.results import load
    from ergmeter.bench.rules import noise
    from ergmeter.views import bench_compare as view

    columns = tuple(part.strip() for part in (by or "").split(",") if part.strip())
    options = comparing.Options(
        noise=noise(noises), by=columns, new_where=where(new_where), ref_where=where(ref_where)
    )
    found = comparing.compare(load(new), load(ref), options=options)
    if form == "text":
        Console().print(view.page(found))
    elif form == "json":
        click.echo(json.dumps(view.document(found), indent=1, allow_nan=False))
    else:
        click.echo({"md": view.markdown, "csv": view.csv_text}[form](found), nl=False)
