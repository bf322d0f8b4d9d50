"""`erg metrics`: what the figures mean."""

from __future__ import annotations

import click

from ergmeter.cli.options import flag


@click.command()
@click.argument("name", required=False)
@flag("--markdown", help="The whole reference page, as in docs/metrics.md.")
def command(name: str | None, markdown: bool) -> None:
    """Explain a metric, by key or by another system's name for it; without NAME, list all."""
    from ergmeter.metrics.catalog import catalogue, find
    from ergmeter.views.calculate import reference

    if markdown:
        click.echo(reference.metrics_page(), nl=False)
    elif name:
        click.echo("\n".join(reference.metric_entry(find(name)[0])))
    else:
        for metric in catalogue().values():
            aliases = ", ".join(alias.name for alias in metric.aliases)
            click.echo(f"{metric.key:44} {metric.unit:16} {aliases}")
