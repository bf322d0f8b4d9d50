"""`erg grid`: carbon intensity of electricity by grid, with sources."""

from __future__ import annotations

import click

from ergmeter.cli.options import Forms, with_forms


@click.command()
@click.argument("name", required=False)
@with_forms
def command(name: str | None, forms: Forms) -> None:
    """Show the carbon intensity of a grid by code or name; without NAME, list all.

    Countries by ISO code (FR, FRA) or name, regions of the United States by their eGRID code
    (CAMX). Yearly averages where the electricity was generated (location-based). They are what
    --grid NAME takes in record, report and estimate.

    \b
    erg grid france
    erg report --grid FR --pue 1.2
    """
    from ergmeter.hardware.grid import grid_named, grids
    from ergmeter.views.calculate.reference import grid_document

    rows = [grid_named(name)] if name else list(grids())
    forms.show(grid_document(rows, is_one=name is not None))
