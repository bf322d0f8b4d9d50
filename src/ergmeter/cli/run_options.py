"""Options that several commands share: RUN, its settings, sinks and alerts.

Libraries are imported when they are needed: `erg report --help` loads no numpy.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from ergmeter.cli.options import COUNT, PATH, repeated, with_default, with_each
from ergmeter.cli.work_options import OF_A_STEP, STEP, work_of
from ergmeter.errors import UsageError, closest
from ergmeter.records import dtype_named
from ergmeter.runlog.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from ergmeter.runlog.reader import Run


def _only_auto(value: str) -> str:
    """The word `auto`; a number is an error that names the right option."""
    if value != "auto":
        how = "a number of steps is --warmup-steps, of seconds --warmup-s"
        raise click.BadParameter(f"{value!r} is not 'auto'; {how}")
    return value


_NOT_NEGATIVE, _ONE_OR_MORE = click.FloatRange(min=0), click.FloatRange(min=1)
# By the field of `Settings` that each is for: its type and its help.
_OPTIONS: dict[str, tuple[Any, str]] = {
    "warmup_steps": (click.IntRange(min=0), "Leave out the first N steps."),
    "warmup_s": (_NOT_NEGATIVE, "Leave out the first S seconds of steps."),
    "warmup": (
        _only_auto,
        "Leave out a slow beginning by the default rule, whatever the run declares.",
    ),
    "window": (
        str,
        "What the metrics are over: the pace of training (default), the whole run, or steps A to"
        " B, without B.",
    ),
    "parameters": (COUNT, "Parameters of the model, for TT and ST."),
    "tokens_per_step": (
        COUNT,
        "Tokens of a step, all ranks, where the program does not say. Marked as assumed.",
    ),
    "samples_per_step": (
        COUNT,
        "Samples of a step, all ranks, where the program does not say. Marked as assumed.",
    ),
    "device": (
        str,
        "Device whose peak and bandwidth to use, by its driver's name or an alias of `erg peaks`,"
        " if it was not detected or is wrong.",
    ),
    "dtype": (str, "Type of matrix products (bf16, fp16, fp8, ...), for MFU."),
    "peak": (str, "Dense peak of one device, for MFU, if not the table's: 989.5T."),
    "peak_source": (str, "Where that peak is from."),
    "devices": (str, "Which GPUs count, by index or UUID, whatever was detected of their use."),
    "num_devices": (COUNT, "Devices that process the tokens, if not detected."),
    "layout": (
        str,
        "Which ranks work on the same tokens: sizes of tp, cp, pp (and ep, dp), where the"
        " framework does not say; order=tp-cp-ep-dp-pp if ranks are numbered otherwise.",
    ),
    "job": (str, "The job that this run is a part of, if it is stopped and resumed (erg job)."),
    "grid": (
        str,
        "Country or region whose electricity it is: FR, DEU, CAMX (`erg grid` lists them).",
    ),
    "grid_g_per_kwh": (
        _NOT_NEGATIVE,
        "Carbon intensity of the grid, location-based, instead of --grid.",
    ),
    "grid_source": (str, "Where that intensity is from."),
    "market_g_per_kwh": (
        _NOT_NEGATIVE,
        "Carbon intensity by your contract, market-based; shown beside the grid's.",
    ),
    "market_source": (str, "Where that intensity is from: the contract, the certificates."),
    "pue": (_ONE_OR_MORE, "Power usage effectiveness of the building."),
    "pue_source": (str, "Where that PUE is from."),
    "embodied_kg": (
        _NOT_NEGATIVE,
        "CO2e of making one device, in kg, for its share by --lifetime-h.",
    ),
    "embodied_source": (str, "Where that figure is from."),
    "lifetime_h": (_ONE_OR_MORE, "Hours in use that a device's making is spread over."),
    "price_per_gpu_hour": (_NOT_NEGATIVE, "Price of one device, as rented."),
    "price_per_kwh": (_NOT_NEGATIVE, "Price of the electricity."),
    "currency": (str, "What the prices are in: USD, EUR, ..."),
}
_METAVARS = {
    "warmup": "[auto]",
    "window": "training|whole|A:B",
    "devices": "0,2|all|none",
    "layout": "tp=2,pp=4",
    "grid": "NAME",
}


TOKENS_ARE = click.option(
    "--tokens-are",
    type=click.Choice(["step", "line", "total"]),
    help="What a printed `tokens` counts, instead of detecting it.",
)


# The first of each group of settings.
_SETTING_GROUPS = {
    "warmup_steps": "window",
    "parameters": "tokens, devices and ranks",
    "grid": "carbon and cost",
}
_COMMON = ("warmup_steps", "window", "dtype")


def _setting(name: str) -> Callable[..., Any]:
    type_, text = _OPTIONS[name]
    option = f"--{name.replace('_', '-')}"
    return click.option(option, type=type_, help=text, metavar=_METAVARS.get(name))


def with_settings(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of `Settings` to a command, which gets them as one `settings`."""

    @functools.wraps(function)
    def wrapped(**options: Any) -> Any:  # noqa: ANN401  click passes what it parsed
        declared = {name: options.pop(name) for name in _OPTIONS}
        peak = declared.pop("peak")
        if peak is not None:
            from ergmeter.hardware.table import parse_peak

            declared["peak_flops_per_s"] = parse_peak(peak)
        declared["dtype"] = dtype_named(declared["dtype"])
        return function(settings=Settings.declared(None, declared), **options)

    names, options = list(_OPTIONS), cast("Callable[..., Any]", wrapped)
    for first, title in reversed(_SETTING_GROUPS.items()):
        start = names.index(first)
        names, group = names[:start], names[start:]
        options = with_each(*map(_setting, group), group=title, common=_COMMON)(options)
    return options


def with_model(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that give a run its FLOPs; the command gets them as `flops`."""

    @functools.wraps(function)
    def wrapped(**options: Any) -> Any:  # noqa: ANN401  click passes what it parsed
        model = options.pop("model_config")
        step = {name: options.pop(name) for name in OF_A_STEP}
        if model is None:
            _check_unused(step)
            return function(flops=(), **options)
        return function(flops=tuple(work_of(model, step).flops.values()), **options)

    model = click.option(
        "--model-config", metavar="PATH", help="The model's config.json, for MFU; with --seq-len."
    )
    common = ("model_config", "seq_len")
    return with_each(model, *STEP, group="model and FLOPs", common=common)(wrapped)


def _check_unused(options: dict[str, Any]) -> None:
    """Refuse options that describe a step if no model is given."""
    usual = {"batch_size": 1, "phase": "train", "convention": "exact"}
    for name, value in options.items():
        if value and value != usual.get(name):
            raise UsageError(
                f"--{name.replace('_', '-')} says how a model's step is counted, and no model is"
                " named: pass --model-config"
            )


with_sink = repeated(
    "--sink",
    "sinks",
    metavar="NAME[:OPTIONS]",
    help="Send metrics there while it runs (may be repeated): console, csv, jsonl, wandb, mlflow,"
    " tensorboard[:path=DIR], prometheus, otel, trackio.",
)
# Add `--sink` to a command, which gets `sinks` as a Meter takes them, and `sinks_every_s`.
with_sinks = with_each(
    with_default(
        "--sinks-every",
        "sinks_every_s",
        type=click.FloatRange(min=0.1),
        default=10.0,
        metavar="SECONDS",
        help="How often to send.",
    ),
    with_sink,
    group="sinks",
    common=("sinks",),
)


_RULES = (
    "Raise an alert (may be repeated): 'loss nan', 'tokens_per_s < -20%', 'throttled',"
    " 'memory +10%', 'stalled > 5 min', 'energy > 2 kWh', ... (docs/alerts.md)"
)
_AMOUNT = re.compile(
    r"(?P<sign>[$€£]?)\s*(?P<number>[+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*(?P<unit>[^\d\s]*)"
)
_MONEY = re.compile(r"[A-Z]{3}|[$€£]")
_CURRENCIES = ("EUR", "USD", "GBP")  # to be reminded of; any three capitals are one
_SPELT = {"sec": "s", "second": "s", "min": "min", "minute": "min", "hr": "h", "hour": "h"} | {
    "day": "d",
    "joule": "J",
}


def with_rules(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--alert` and `--budget` to a command, which gets both as `alerts`."""

    @functools.wraps(function)
    def wrapped(**options: Any) -> Any:  # noqa: ANN401  click passes what it parsed
        budgets = tuple(_budget_rule(text) for text in options.pop("budgets"))
        return function(**{**options, "alerts": (*options["alerts"], *budgets)})

    wrapped = repeated(
        "--budget",
        "budgets",
        metavar="AMOUNT",
        help="Raise an alert when the run has used this up: '2 kWh', '8 h', or '50 EUR' if a"
        " price of energy or of devices is given.",
    )(wrapped)
    return repeated("--alert", "alerts", metavar="RULE", help=_RULES)(wrapped)


# Add `--alert`, `--budget`, `--stop-on`, `--alert-command` and `--alert-webhook`.
with_alerts = with_each(
    with_rules,
    click.option(
        "--stop-on",
        default="",
        metavar="KIND,...",
        help="Stop the command (SIGTERM) at an alert of these kinds: budget, nan,"
        " throughput, memory, throttled, stalled.",
    ),
    click.option(
        "--alert-command",
        metavar="COMMAND",
        help="Run this at each alert, without a shell: 'notify {alert}'; also {rule},"
        " {kind}, {value}, {threshold}, {unit}, {about}, {run}.",
    ),
    click.option("--alert-webhook", metavar="URL", help="POST each alert there, as JSON."),
    group="alerts",
    common=("alerts",),
)


def _budget_rule(budget: str) -> str:
    """Return a budget as an alert rule, by its unit. An unknown unit is refused: if it were taken
    for money, the budget would never be used up."""
    from ergmeter.metrics.live.alert_rules import JOULES, SECONDS

    match = _AMOUNT.fullmatch(budget.strip())
    if match is None or (match["sign"] and match["unit"]):
        raise UsageError(f"--budget {budget!r}: give an amount as '2 kWh', '8 h' or '50 EUR'")
    number, unit_text = match["number"], match["sign"] or match["unit"]
    unit = _SPELT.get(unit_text.lower().removesuffix("s"))
    if unit_text in (*JOULES, *SECONDS):
        unit = unit_text
    if unit is not None:
        return f"{'energy' if unit in JOULES else 'time'} > {number} {unit}"
    units = {unit.lower(): unit for unit in (*_CURRENCIES, *JOULES, *SECONDS)} | _SPELT
    # KWH is no currency.
    is_other_case = units.get(unit_text.lower(), unit_text) != unit_text
    if _MONEY.fullmatch(unit_text) and not is_other_case:
        return f"cost > {number}"
    near = closest(unit_text.lower(), units)
    hint = f"; did you mean {units[near]}?" if near else ""
    raise UsageError(f"--budget {budget!r}: no unit {unit_text!r}{hint} ('2 kWh', '8 h', '50 EUR')")


with_training = click.option(
    "--training",
    type=COUNT,
    metavar="N",
    help="Number of one training, if the command ran several.",
)


def with_run(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add RUN and --training to a command, which gets the `run` opened. The newest without RUN.

    Damage of the run is printed when the command is done, and its exit code is 1 then.
    """

    @functools.wraps(function)
    def wrapped(run: Path | None, training: int | None, **options: Any) -> int:  # noqa: ANN401
        from ergmeter.runlog.format import newest_run
        from ergmeter.runlog.reader import Run

        opened = Run.open(run or newest_run(Path("runs")))
        opened = opened.training(training) if training else opened
        code = function(run=opened, **options) or 0
        return tell_damage(opened) or code

    return click.argument("run", type=PATH, required=False)(with_training(wrapped))


# Add RUN, its settings and its FLOPs to a command, which gets `run`, `settings` and `flops`.
with_run_and_settings = with_each(with_model, with_settings, with_run)


def tell_damage(run: Run) -> int:
    """Print what could not be read of a run; return the exit code."""
    for line in run.damage:
        click.echo(f"erg: damaged, left out: {line}", err=True)
    return 1 if run.damage else 0


def show_run(console: Console, run: Run) -> None:
    """Print the card of a run, or a card for each of its trainings."""
    from ergmeter.metrics.summarize import summaries
    from ergmeter.views.render.terminal import show
    from ergmeter.views.run.card import document

    show(document(summaries(run)), console)
