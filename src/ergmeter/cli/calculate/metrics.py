"""`erg metrics`: what the figures mean."""

from __future__ import annotations

import click

from ergmeter.cli.options import Forms, flag, with_reference_forms


@click.command()
@click.argument("name", required=False)
@with_reference_forms
@flag("--markdown", help="The whole reference page, as in docs/metrics.md.")
def command(name: str | None, forms: Forms, markdown: bool) -> None:
    """Explain a metric, by key or by another system's name for it; without NAME, list all."""
    from ergmeter.metrics.catalog import catalogue, find
    from ergmeter.views.calculate import reference

    if markdown:
        click.echo(reference.metrics_page(), nl=False)
        return
    metrics = [find(name)[0]] if name else list(catalogue().values())
    if forms.form != "text":
        forms.show(reference.metrics_document(metrics))
        return
    forms.write_page(reference.metrics_document(metrics))
    if name:
        click.echo("\n".join(reference.metric_entry(metrics[0])))
        return
    for metric in metrics:
        aliases = ", ".join(alias.name for alias in metric.aliases)
        click.echo(f"{metric.key:44} {metric.unit:16} {aliases}")
