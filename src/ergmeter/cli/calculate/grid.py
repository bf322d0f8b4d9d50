"""`erg grid`: carbon intensity of electricity by grid, with sources."""

from __future__ import annotations

import click

from ergmeter.cli.options import flag
from ergmeter.cli.run_options import print_json


@click.command()
@click.argument("name", required=False)
@flag("--json", "as_json", help="As JSON.")
def command(name: str | None, as_json: bool) -> None:
    """Show the carbon intensity of a grid by code or name; without NAME, list all.

    Countries by ISO code (FR, FRA) or name, regions of the United States by their eGRID code
    (CAMX). Yearly averages where the electricity was generated (location-based). They are what
    --grid NAME takes in record, report and estimate.

    \b
    erg grid france
    erg report --grid FR --pue 1.2
    """
    from rich.console import Console

    from ergmeter.hardware.grid import grid_named, grids
    from ergmeter.views.calculate import reference as view

    rows = [grid_named(name)] if name else list(grids())
    if as_json:
        documents = [view.grid_document(row) for row in rows]
        print_json(documents[0] if name else documents)
    elif name:
        click.echo("\n".join(view.grid_entry(rows[0])))
    else:
        Console().print(view.grid_listing(rows))
