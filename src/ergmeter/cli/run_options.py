"""Options that several commands share: RUN, its settings, sinks, alerts, `--html` and formats.

A page never replaces a file that is no HTML page, nor another output of the same command.
Libraries are imported when they are needed: `erg report --help` loads no numpy.
"""

from __future__ import annotations

import difflib
import functools
import json
import os
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import click

from ergmeter.cli.options import COUNT, PATH, flag, path_option, repeated, with_default, with_each
from ergmeter.records import Flops, dtype_named
from ergmeter.runlog.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from rich.console import Console

    from ergmeter.runlog.reader import Run
    from ergmeter.views.document import Document

_BEGINS = b"<!doctype html"
_AS_WE_RUN = os.access in os.supports_effective_ids


def print_json(document: object) -> None:
    """Print a document as JSON, which has no NaN."""
    click.echo(json.dumps(document, indent=1, allow_nan=False))


_Form: TypeAlias = Literal["terminal", "csv", "json", "markdown"]
_FORMATS: dict[str, _Form] = {"table": "terminal", "csv": "csv", "json": "json", "md": "markdown"}


@dataclass(frozen=True)
class Forms:
    """The form in which a command was asked to show its document, and a page to write."""

    form: _Form
    page: Path | None = None

    @classmethod
    def of(cls, form: str, page: Path | None = None) -> Forms:
        """The form by its name in `--format`."""
        named: dict[str, _Form] = {"md": "markdown", "json": "json"}
        return cls(named.get(form, "terminal"), page)

    def show(self, document: Document, *, console: Console | None = None, csv: str = "") -> None:
        """Write the page, then print the document, or its CSV."""
        self.write_page(document)
        if self.form == "json":
            from ergmeter.views.render.json import json_text

            click.echo(json_text(document))
        elif self.form == "markdown":
            from ergmeter.views.render.markdown import markdown

            click.echo(markdown(document), nl=False)
        elif self.form == "csv":
            click.echo(csv, nl=False)
        else:
            from rich import console as rich_console

            from ergmeter.views.render.terminal import show

            show(document, console or rich_console.Console())

    def write_page(self, document: Document) -> None:
        """Write the page, if one was asked for."""
        if self.page is not None:
            from ergmeter.views.render.html import html

            write_page(self.page, html(document))


def with_forms(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--json`, `--md` and `--html` to a command, which gets them as `forms`."""

    @functools.wraps(function)
    def wrapped(as_json: bool, as_markdown: bool, page: Path | None, **options: Any) -> Any:  # noqa: ANN401  click passes what it parsed
        if as_json and as_markdown:
            raise click.UsageError("--json and --md are two forms; give one")
        check_page(page)
        form: _Form = "json" if as_json else "markdown" if as_markdown else "terminal"
        return function(forms=Forms(form, page), **options)

    options = [
        flag("--json", "as_json", help="As JSON, in base units (FLOPs, bytes, seconds, joules)."),
        flag("--md", "--markdown", "as_markdown", help="As Markdown, for an issue."),
        with_page,
    ]
    return with_each(wrapped, options)


def with_format(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--format` and the options of `with_forms` to a command, which gets `forms`."""

    @functools.wraps(function)
    def wrapped(form: str, forms: Forms, **options: Any) -> Any:  # noqa: ANN401  click passes what it parsed
        is_json, is_markdown = forms.form == "json", forms.form == "markdown"
        form = chosen_form(form, as_json=is_json, as_markdown=is_markdown)
        return function(forms=replace(forms, form=_FORMATS[form]), **options)

    formats = click.Choice(tuple(_FORMATS))
    return with_default("--format", "form", type=formats, default="table")(with_forms(wrapped))


def with_page(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--html` to a command, which gets it as `page`."""
    return path_option(
        "--html",
        "page",
        metavar="FILE",
        help="Write one page with charts, that needs no network (pip install 'ergmeter[html]').",
    )(function)


def check_page(page: Path | None, outputs: Iterable[Path] = ()) -> None:
    """Before the work: a page can be drawn and written, and replaces nothing but a page."""
    if page is None:
        return
    check_writable(page, option="--html")
    if _is_something_else(page):
        raise click.UsageError(
            f"--html {page}: there is a file that is no HTML page, which is not replaced; name"
            " another"
        )
    if page.resolve() in [output.resolve() for output in outputs]:
        raise click.UsageError(f"--html {page} is another output as well; name another file")
    from ergmeter.views.charts.plots import converter

    converter()


def check_writable(path: Path, *, option: str) -> None:
    """Refuse what is a directory, or has none to be in, or one that takes no file."""
    if path.is_dir():
        raise click.UsageError(f"{option} {path}: is a directory; it takes a file")
    folder = path.parent
    if not folder.is_dir():
        what = "is no directory" if folder.exists() else "does not exist"
        raise click.UsageError(f"{option} {path}: the directory {folder} {what}")
    if not path.exists():
        _check_access(folder, f"{option} {path}")
    elif not os.access(path, os.W_OK, effective_ids=_AS_WE_RUN):
        raise click.UsageError(f"{option} {path}: can't be written to; name another file")


def check_folder(folder: Path, *, option: str) -> None:
    """Refuse a directory that is something else, or can't be made or written to."""
    paths = (folder, *folder.absolute().parents)
    there = next(path for path in paths if path.exists() or path.is_symlink())
    if not there.is_dir():
        raise click.UsageError(f"{option} {folder}: {there} is no directory; name another")
    _check_access(there, f"{option} {folder}")


def _check_access(folder: Path, what: str) -> None:
    if not os.access(folder, os.W_OK | os.X_OK, effective_ids=_AS_WE_RUN):
        raise click.UsageError(f"{what}: the directory {folder} can't be written to; name another")


def write_page(page: Path, html: str, *, is_told_apart: bool = True) -> None:
    """Write a page and print its path: on stderr if stdout has other output."""
    page.write_text(html, encoding="utf-8")
    click.echo(f"{page} ({len(html.encode()) / 1e6:.2f} MB)", err=is_told_apart)


def _is_something_else(page: Path) -> bool:
    """Whether there is a file that holds something and is no page; a pipe is not looked into."""
    if not page.is_file():
        return False
    with page.open("rb") as file:
        begins = file.read(len(_BEGINS))
    return bool(begins) and begins.lower() != _BEGINS


def _only_auto(_context: object, _parameter: object, value: str | None) -> str | None:
    """The word `auto`; a number is an error that names the right option."""
    if value not in (None, "auto"):
        how = "a number of steps is --warmup-steps, of seconds --warmup-s"
        raise click.BadParameter(f"{value!r} is not 'auto'; {how}")
    return value


# By the field of `Settings` that each is for.
_OPTIONS: dict[str, dict[str, Any]] = {
    "warmup_steps": {"type": click.IntRange(min=0), "help": "Leave out the first N steps."},
    "warmup_s": {
        "type": click.FloatRange(min=0),
        "help": "Leave out the first S seconds of steps.",
    },
    "warmup": {
        "callback": _only_auto,
        "metavar": "[auto]",
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
    def wrapped(**options: Any) -> Any:  # noqa: ANN401  click passes what it parsed
        declared = {name: options.pop(name) for name in _OPTIONS}
        peak = declared.pop("peak")
        if peak is not None:
            from ergmeter.hardware.table import parse_peak

            declared["peak_flops_per_s"] = parse_peak(peak)
        declared["dtype"] = dtype_named(declared["dtype"])
        settings = Settings.declared(None, declared)
        return function(settings=settings, **options)

    for name, attributes in reversed(_OPTIONS.items()):
        wrapped = click.option(f"--{name.replace('_', '-')}", **attributes)(wrapped)
    return wrapped


def with_sinks(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--sink` to a command, which gets `sinks` as a Meter takes them."""

    @functools.wraps(function)
    def wrapped(**options: Any) -> Any:  # noqa: ANN401  click passes what it parsed
        options["sinks"] = [_sink(text) for text in options["sinks"]]
        return function(**options)

    wrapped = repeated(
        "--sink",
        "sinks",
        metavar="NAME[:OPTION=VALUE,...]",
        help="Send the figures there while it runs: console, csv, jsonl, tensorboard, wandb,"
        " mlflow, prometheus, otel, trackio (may be repeated): --sink tensorboard:path=tb",
    )(wrapped)
    return with_default(
        "--sinks-every",
        "sinks_every_s",
        type=click.FloatRange(min=0.1),
        default=10.0,
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


_RULES = (
    "Be alarmed by this (may be repeated): 'tokens_per_s < -20%', 'loss nan', 'throttled',"
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
        help="What the run may use up, an alert when it has: '2 kWh', '8 h', or '50 EUR' where a"
        " price of energy or of devices is given.",
    )(wrapped)
    return repeated("--alert", "alerts", metavar="RULE", help=_RULES)(wrapped)


def with_alerts(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--alert`, `--budget`, `--stop-on`, `--alert-command` and `--alert-webhook`."""
    options = [
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
    ]
    return with_rules(with_each(function, options))


def _budget_rule(budget: str) -> str:
    """A budget as a rule, by its unit. What is neither energy, time nor money by its looks is
    refused: as money it would never be used up, and nobody would be told."""
    from ergmeter.errors import UsageError
    from ergmeter.metrics.live.alert_rules import JOULES, SECONDS

    match = _AMOUNT.fullmatch(budget.strip())
    if match is None or (match["sign"] and match["unit"]):
        raise UsageError(f"--budget {budget!r}: give an amount as '2 kWh', '8 h' or '50 EUR'")
    number, unit_text = match["number"], match["sign"] or match["unit"]
    unit = (
        unit_text
        if unit_text in (*JOULES, *SECONDS)
        else _SPELT.get(unit_text.lower().removesuffix("s"))
    )
    if unit is not None:
        return f"{'energy' if unit in JOULES else 'time'} > {number} {unit}"
    units = {unit.lower(): unit for unit in (*_CURRENCIES, *JOULES, *SECONDS)} | _SPELT
    near = difflib.get_close_matches(unit_text.lower(), units, n=1)
    # KWH is no currency.
    is_other_case = units.get(unit_text.lower(), unit_text) != unit_text
    if _MONEY.fullmatch(unit_text) and not is_other_case:
        return f"cost > {number}"
    hint = f"; did you mean {units[near[0]]}?" if near else ""
    raise UsageError(f"--budget {budget!r}: no unit {unit_text!r}{hint} ('2 kWh', '8 h', '50 EUR')")


def chosen_form(form: str, *, as_json: bool, as_markdown: bool = False) -> str:
    """What `--format`, `--json` and `--md` come to. UsageError if they name two forms."""
    from click.core import ParameterSource

    is_said = (
        click.get_current_context().get_parameter_source("form") is ParameterSource.COMMANDLINE
    )
    asked = {"--json": "json"} if as_json else {}
    asked |= {"--md": "md"} if as_markdown else {}
    asked |= {f"--format {form}": form} if is_said else {}
    if len(set(asked.values())) > 1:
        raise click.UsageError(f"{' and '.join(asked)} are two forms; give one")
    return next(iter(asked.values()), form)


_NEXT = "see also: erg explain RUN, erg report RUN --html FILE, erg serve"

with_training = click.option(
    "--training",
    type=COUNT,
    metavar="N",
    help="Of several trainings that one command ran, just this one.",
)


def with_run(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add RUN and --training to a command, which gets the `run` opened. The newest without RUN.

    What could not be read of it is told when the command is done, and its exit code is 1 then.
    """

    @functools.wraps(function)
    def wrapped(run: Path | None, training: int | None, **options: Any) -> int:  # noqa: ANN401
        from ergmeter.runlog.format import newest_run
        from ergmeter.runlog.reader import Run

        opened = Run.open(run or newest_run(Path("runs")))
        opened = opened.training(training) if training else opened
        code = function(run=opened, **options) or 0
        return tell_damage(opened) or code

    argument = click.argument("run", type=PATH, required=False)
    return argument(with_training(wrapped))


def tell_damage(run: Run) -> int:
    """Say what of a run could not be read. The exit code."""
    for line in run.damage:
        click.echo(f"erg: damaged, left out: {line}", err=True)
    return 1 if run.damage else 0


def show_run(
    console: Console,
    run: Run,
    settings: Settings | None = None,
    *,
    flops: Sequence[Flops] = (),
    show_all: bool = False,
) -> None:
    """Print the card of a run. Of several trainings in it each has its own."""
    from ergmeter.metrics.summarize import summarize
    from ergmeter.views.run.card import card, every_metric, show

    for part in parts(run):
        summary = summarize(part, settings, flops=flops)
        if show_all:
            console.print(card(part, summary), every_metric(summary), sep="\n")
        else:
            show(console, part, summary)
    tell_next(console)


def tell_next(console: Console) -> None:
    """On a terminal, once and in one line: what else there is to look at.

    Not within a recording: its recorder says it at the end.
    """
    from ergmeter.runlog.format import RUN_VARIABLE

    is_looked_at = sys.stdout.isatty() and console.file.isatty()
    if is_looked_at and RUN_VARIABLE not in os.environ:
        console.print(_NEXT, style="dim", highlight=False)


def parts(run: Run) -> list[Run]:
    """The run itself, or its trainings where there are several."""
    several = len(run.trainings)
    return [run.training(number + 1) for number in range(several)] if several > 1 else [run]
