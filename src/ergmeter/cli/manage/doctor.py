"""`erg doctor`: what can be measured here, and why the rest can't."""

from __future__ import annotations

import click

from ergmeter.cli.options import flag
from ergmeter.cli.run_options import print_json


@click.command()
@flag("--json", "as_json", help="As JSON.")
def command(as_json: bool) -> int:
    """Say what can be measured on this machine, by which probe, and what to do about the rest.

    Takes two readings of everything, half a second apart, so that a counter that exists but never
    moves is found out. Exits 0 also if little can be measured: that is an answer, not a failure.
    """
    from rich.console import Console

    from ergmeter import doctor
    from ergmeter.views.calculate import machine as view

    findings = doctor.examine()
    if as_json:
        print_json(doctor.document(findings))
    else:
        Console().print(view.doctor_page(findings))
    return 0
