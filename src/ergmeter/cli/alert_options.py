"""Options for alerts and budgets, of the commands that measure or watch."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Callable

_RULES = (
    "Be alarmed by this (may be repeated): 'tokens_per_s < -20%', 'loss nan', 'throttled',"
    " 'memory +10%', 'stalled > 5 min', 'energy > 2 kWh', ... (docs/alerts.md)"
)


def with_rules(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--alert` and `--budget` to a command, which gets both as `alerts`."""

    @functools.wraps(function)
    def wrapped(**given: Any) -> Any:  # noqa: ANN401  click passes what it parsed
        budgets = tuple(_rule(text) for text in given.pop("budgets"))
        return function(**{**given, "alerts": (*given["alerts"], *budgets)})

    wrapped = click.option(
        "--budget",
        "budgets",
        multiple=True,
        metavar="AMOUNT",
        help="What the run may use up, an alert when it has: '2 kWh', '8 h', or '50 EUR' where a"
        " price of energy or of devices is given.",
    )(wrapped)
    return click.option("--alert", "alerts", multiple=True, metavar="RULE", help=_RULES)(wrapped)


def with_alerts(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same, with whom to tell and what to stop for."""
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
    """A budget as a rule: by its unit one of energy or time; money is in anything else."""
    from ergmeter.errors import UsageError
    from ergmeter.metrics.alert_rules import JOULES, SECONDS

    number, _, unit = budget.strip().partition(" ")
    if not unit:  # 2kWh
        number = budget.strip().rstrip("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz$€£")
        unit = budget.strip()[len(number) :]
    try:
        float(number)
    except ValueError:
        raise UsageError(
            f"--budget {budget!r}: give an amount as '2 kWh', '8 h' or '50 EUR'"
        ) from None
    if unit in JOULES:
        return f"energy > {number} {unit}"
    if unit in SECONDS:
        return f"time > {number} {unit}"
    units = {one.lower(): one for one in (*JOULES, *SECONDS)}
    # By another case, or 2 kW for 2 kWh.
    near = unit and (units.get(unit.lower()) or units.get(f"{unit.lower()}h"))
    if near or not unit:
        hint = f"; did you mean {near}?" if near else ""
        raise UsageError(f"--budget {budget!r}: no unit {unit!r}{hint} ('2 kWh', '8 h', '50 EUR')")
    return f"cost > {number}"
