"""Options that several commands take: the warm-up, what the program does not say, the grid."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import click

from ergmeter.records import dtype_named
from ergmeter.runlog.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable


class _Auto(click.Choice[str]):
    """The one word there is, with a hint for whoever gives a number."""

    def convert(
        self,
        value: Any,  # noqa: ANN401  as click's
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> Any:  # noqa: ANN401
        if value != "auto":
            how = "a number of steps is --warmup-steps, of seconds --warmup-s"
            self.fail(f"{value!r} is not 'auto'; {how}", param, ctx)
        return super().convert(value, param, ctx)


# By the field of `Settings` that each is for.
_OPTIONS: dict[str, dict[str, Any]] = {
    "warmup_steps": {"type": click.IntRange(min=0), "help": "Leave out the first N steps."},
    "warmup_s": {
        "type": click.FloatRange(min=0),
        "help": "Leave out the first S seconds of steps.",
    },
    "warmup": {
        "type": _Auto(["auto"]),
        "help": "Leave out a slow beginning by the default rule, whatever the run declares.",
    },
    "window": {
        "metavar": "training|whole|STEP:STEP",
        "help": "What the figures are over: the pace of training (default), the whole run, or the"
        " steps with these numbers, the last not included.",
    },
    "parameters": {
        "type": click.IntRange(min=1),
        "help": "Parameters of the model, for TT and ST.",
    },
    "tokens_per_step": {
        "type": click.IntRange(min=1),
        "help": "Tokens of a step, all ranks, where the program does not say. Marked as assumed.",
    },
    "samples_per_step": {
        "type": click.IntRange(min=1),
        "help": "Samples of a step, all ranks, where the program does not say. Marked as assumed.",
    },
    "device": {
        "help": "Whose peak and bandwidth to take, by its driver's name or an alias of `erg peaks`,"
        " where it was not seen or is to be another."
    },
    "dtype": {"help": "What products are computed in (bf16, fp16, fp8, ...), for MFU."},
    "peak": {"help": "Dense peak of one device, for MFU, if not the table's: 989.5T."},
    "peak_source": {"help": "Where that peak is from."},
    "devices": {
        "metavar": "0,2|all|none",
        "help": "Which GPUs count, by index or UUID, whatever was seen of their use.",
    },
    "num_devices": {
        "type": click.IntRange(min=1),
        "help": "Devices the tokens are of, where they can't be seen.",
    },
    "layout": {
        "metavar": "tp=2,pp=4",
        "help": "Which ranks work on the same tokens: sizes of tp, cp, pp (and ep, dp), where the"
        " framework does not say; order=tp-cp-ep-dp-pp if ranks are numbered otherwise.",
    },
    "job": {"help": "What this run is a part of, where a job is stopped and resumed (erg job)."},
    "grid": {
        "metavar": "NAME",
        "help": "Country or region whose electricity it is: FR, DEU, CAMX (`erg grid` lists them).",
    },
    "grid_g_per_kwh": {
        "type": click.FloatRange(min=0),
        "help": "Carbon intensity of the grid, location-based, instead of --grid.",
    },
    "grid_source": {"help": "Where that intensity is from."},
    "market_g_per_kwh": {
        "type": click.FloatRange(min=0),
        "help": "Carbon intensity by your contract, market-based; shown beside the grid's.",
    },
    "market_source": {"help": "Where that intensity is from: the contract, the certificates."},
    "pue": {
        "type": click.FloatRange(min=1),
        "help": "Power usage effectiveness of the building.",
    },
    "pue_source": {"help": "Where that PUE is from."},
    "embodied_kg": {
        "type": click.FloatRange(min=0),
        "help": "CO2e of making one device, in kg, for its share by --lifetime-h.",
    },
    "embodied_source": {"help": "Where that figure is from."},
    "lifetime_h": {
        "type": click.FloatRange(min=1),
        "help": "Hours in use that a device's making is spread over.",
    },
    "price_per_gpu_hour": {"type": click.FloatRange(min=0), "help": "Of one device, as rented."},
    "price_per_kwh": {"type": click.FloatRange(min=0), "help": "Of the electricity."},
    "currency": {"help": "What the prices are in: USD, EUR, ..."},
}


def with_settings(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of `Settings` to a command, which gets them as one `settings`."""

    @functools.wraps(function)
    def wrapped(**given: Any) -> Any:  # noqa: ANN401  click passes what it parsed
        declared = {name: given.pop(name) for name in _OPTIONS}
        peak = declared.pop("peak")
        if peak is not None:
            from ergmeter.hardware import parse_peak

            declared["peak_flops_per_s"] = parse_peak(peak)
        declared["dtype"] = dtype_named(declared["dtype"])
        settings = Settings.declared(None, declared)
        return function(settings=settings, **given)

    for name, attributes in reversed(_OPTIONS.items()):
        wrapped = click.option(f"--{name.replace('_', '-')}", **attributes)(wrapped)
    return wrapped


def with_sinks(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--sink` to a command, which gets `sinks` as a Meter takes them."""

    @functools.wraps(function)
    def wrapped(**given: Any) -> Any:  # noqa: ANN401  click passes what it parsed
        given["sinks"] = [_sink(text) for text in given["sinks"]]
        return function(**given)

    wrapped = click.option(
        "--sink",
        "sinks",
        multiple=True,
        metavar="NAME[:OPTION=VALUE,...]",
        help="Send the figures there while it runs: console, csv, jsonl, tensorboard, wandb,"
        " mlflow, prometheus, otel, trackio (may be repeated): --sink tensorboard:path=tb",
    )(wrapped)
    return click.option(
        "--sinks-every",
        "sinks_every_s",
        type=click.FloatRange(min=0.1),
        default=10.0,
        show_default=True,
        metavar="SECONDS",
        help="How often.",
    )(wrapped)


def _sink(text: str) -> tuple[str, dict[str, Any]]:
    """NAME:OPTION=VALUE,... as a name and its options; a value is YAML, so 9400 is a number."""
    import yaml

    name, _, rest = text.partition(":")
    options: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        option, equals, value = part.partition("=")
        if not equals:
            raise click.UsageError(
                f"--sink {text}: {part!r} is no option; give NAME:OPTION=VALUE,OPTION=VALUE"
            )
        options[option] = yaml.safe_load(value)
    return name, options


def chosen_form(form: str, *, as_json: bool) -> str:
    """What `--format` and `--json` come to. Raises UsageError where they want different things."""
    from click.core import ParameterSource

    is_said = (
        click.get_current_context().get_parameter_source("form") is ParameterSource.COMMANDLINE
    )
    if as_json and is_said and form != "json":
        raise click.UsageError(f"--json and --format {form} are two forms; give one")
    return "json" if as_json else form
