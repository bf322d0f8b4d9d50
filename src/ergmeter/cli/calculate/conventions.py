"""`erg conventions`: the ways of counting FLOPs, by name."""

from __future__ import annotations

import click

from ergmeter.cli.options import Forms, flag, with_reference_forms


@click.command()
@click.argument("name", required=False)
@flag("--markdown", help="The whole page, as in docs/conventions.md.")
@with_reference_forms
def command(name: str | None, markdown: bool, forms: Forms) -> None:
    """Explain how FLOPs are counted under a convention; without NAME, list them all."""
    from ergmeter.flops.conventions import CONVENTIONS, convention
    from ergmeter.views.calculate import flops as view

    if markdown:
        click.echo(view.conventions_page(), nl=False)
        return
    conventions = [convention(name)] if name else list(CONVENTIONS.values())
    forms.show(view.conventions_document(conventions))
