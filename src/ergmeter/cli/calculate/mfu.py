"""`erg mfu`: model-FLOPs utilisation of figures from a log or a paper."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from ergmeter.cli import work_options as step
from ergmeter.cli.options import COUNT, Forms, with_default, with_forms
from ergmeter.errors import UsageError

if TYPE_CHECKING:
    from ergmeter.metrics.definitions.peaks import Peak
    from ergmeter.records import Missing


@click.command()
@click.argument("model", metavar="MODEL_CONFIG")
@step.with_batch
@click.option(
    "--tokens-per-s",
    type=float,
    callback=step.positive,
    help="Tokens/s of all devices together; with --lengths, without padding.",
)
@click.option(
    "--tokens-per-s-per-device", type=float, callback=step.positive, help="Of one device instead."
)
@click.option("--step-time", type=float, callback=step.positive, help="Seconds of a step instead.")
@step.DEVICE
@with_default("--num-devices", type=COUNT, default=1, help="Number of devices.")
@click.option("--dtype", help="Type of matrix products.  [default: bf16, marked as assumed]")
@click.option("--peak", help="Dense peak of one device, if not the table's: 989.5T.")
@click.option("--peak-source", help="Where that peak is from.")
@step.CONVENTION
@step.PARAMS
@step.PHASE
@step.CONTEXT
@step.WEIGHTS_DTYPE
@step.CACHE_DTYPE
@with_forms
def command(
    model: str,
    tokens_per_s: float | None,
    tokens_per_s_per_device: float | None,
    step_time: float | None,
    num_devices: int,
    forms: Forms,
    **options: Any,  # noqa: ANN401  click passes what it parsed
) -> None:
    """Say what share of the hardware's peak a job got, from figures somebody printed.

    MODEL_CONFIG as for `erg flops`. A device whose peak is not known gives no MFU, and says so.
    """
    from ergmeter.metrics.definitions.compute import TokenRate, compute_results
    from ergmeter.records import dtype_named
    from ergmeter.views.calculate.flops import mfu_document

    dtype = dtype_named(options["dtype"])
    work = step.work_of(model, options)
    speed, source = _speed(
        tokens_per_s, tokens_per_s_per_device, step_time, num_devices, work.batch.tokens_real
    )
    results = compute_results(
        list(work.flops.values()),
        TokenRate(speed, num_devices, "reported", source),
        _peak(options["device"], options["peak"], options["peak_source"], dtype),
    )
    forms.show(mfu_document(work, results))


def _speed(
    total: float | None, each: float | None, step_s: float | None, devices: int, tokens: int
) -> tuple[float, str]:
    speeds = [value for value in (total, each, step_s) if value is not None]
    if len(speeds) != 1:
        raise UsageError(
            "give one of --tokens-per-s, --tokens-per-s-per-device and --step-time;"
            f" got {len(speeds)}"
        )
    if total is not None:
        return total, f"{total:g} tokens/s in all, as given"
    if each is not None:
        return each * devices, f"{each:g} tokens/s on each, as given"
    return tokens / speeds[0], f"{tokens} tokens in {speeds[0]:g} s, as given"


def _peak(
    device: str | None, peak: str | None, source: str | None, dtype: str | None
) -> Peak | Missing:
    from ergmeter.hardware.table import parse_peak
    from ergmeter.metrics.definitions.peaks import declared_peak, device_peak

    if peak is not None:
        return declared_peak(parse_peak(peak), dtype, source, device=device)
    if device is None:
        raise UsageError("which device? pass --device (`erg peaks` lists them) or --peak")
    return device_peak(device, dtype or "bf16", is_dtype_assumed=dtype is None)
