"""Options for alerts and budgets, of the commands that measure or watch."""

from __future__ import annotations

import difflib
import functools
import re
from typing import TYPE_CHECKING, Any

import click

from ergmeter.cli.options import repeated

if TYPE_CHECKING:
    from collections.abc import Callable

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
        budgets = tuple(_rule(text) for text in options.pop("budgets"))
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
    for option in reversed(
        (
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
        )
    ):
        function = option(function)
    return with_rules(function)


def _rule(budget: str) -> str:
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
