"""`erg peaks`: peak FLOP/s of devices, with sources."""

from __future__ import annotations

import click

from ergmeter.cli.options import Forms, flag, with_reference_forms
from ergmeter.errors import UsageError


@click.command()
@click.argument("name", required=False)
@click.option("--vendor", help="Just the devices of this vendor: nvidia, amd, google, aws, ...")
@click.option("--dtype", help="Just the devices with a peak for this type, and just that peak.")
@with_reference_forms
@flag("--markdown", help="The whole page, as in docs/hardware.md.")
def command(
    name: str | None, vendor: str | None, dtype: str | None, forms: Forms, markdown: bool
) -> None:
    """Show a device's peak, by its driver's name for it or an alias; without NAME, list all.

    Peaks are dense, with FP32 accumulate. Rows of ~/.config/ergmeter/hardware.toml, or of the file
    that ERGMETER_HARDWARE names, come before the built-in ones.
    """
    from ergmeter.hardware.table import devices, lookup
    from ergmeter.records import DTYPES
    from ergmeter.views.calculate import reference

    if markdown:
        click.echo(reference.hardware_page(), nl=False)
        return
    if name:
        spec = lookup(name)
        if dtype:
            spec.peak(dtype)  # raises if there is none
        forms.show(reference.device_document(spec))
        return
    if dtype and dtype not in DTYPES:
        raise UsageError(f"no type {dtype!r}; the table has {', '.join(DTYPES)}")
    rows = devices()
    vendors = {row.vendor for row in rows}
    if vendor and vendor.lower() not in vendors:
        raise UsageError(f"no vendor {vendor!r}; the table has {', '.join(sorted(vendors))}")
    rows = [row for row in rows if not vendor or row.vendor == vendor.lower()]
    rows = [row for row in rows if not dtype or dtype in row.peak_flops_per_s]
    forms.show(reference.peaks_document(rows, dtype=dtype))
