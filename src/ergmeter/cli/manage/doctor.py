"""`erg doctor`: what can be measured here, and why the rest can't."""

from __future__ import annotations

import click

from ergmeter.cli.options import Forms, with_forms


@click.command()
@with_forms
def command(forms: Forms) -> int:
    """Show what can be measured on this machine, by which probe, and what to do about the rest.

    Takes two readings of everything, half a second apart, so that a counter that exists but never
    moves is detected. Exits 0 also if little can be measured: that is an answer, not a failure.
    """
    from ergmeter import doctor
    from ergmeter.views.calculate.machine import doctor_document

    forms.show(doctor_document(doctor.examine()))
    return 0
