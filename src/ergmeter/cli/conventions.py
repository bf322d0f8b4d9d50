"""`erg conventions`: the ways of counting FLOPs, by name."""

from __future__ import annotations

import click


@click.command()
@click.argument("name", required=False)
@click.option("--markdown", is_flag=True, help="The whole page, as in docs/conventions.md.")
def command(name: str | None, markdown: bool) -> None:
    """Explain how FLOPs are counted under a convention; without NAME, list them all."""
    from ergmeter.flops.conventions import CONVENTIONS, convention
    from ergmeter.views import conventions as view

    if markdown:
        click.echo(view.page(), nl=False)
    elif name:
        click.echo("\n".join(view.entry(convention(name))))
    else:
        for each in CONVENTIONS.values():
            click.echo("\n".join(view.entry(each)) + "\n")
