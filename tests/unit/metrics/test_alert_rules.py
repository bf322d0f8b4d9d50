"""What can be said as a rule, what it comes to in base units, and how a mistake is answered."""

from __future__ import annotations

import pytest

from ergmeter.errors import UsageError
from ergmeter.metrics.live.alert_rules import (
    DEFAULT,
    EXAMPLES,
    AlertRule,
    check_prices,
    parse_rule,
    parse_rules,
    parse_stop_classes,
)
from ergmeter.runlog.settings import Settings


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("tokens_per_s < -20%", ("tokens_per_s", "throughput", -0.2, True)),
        ("tokens_per_s<1e5", ("tokens_per_s", "throughput", 100_000.0, False)),
        ("step_s > +50%", ("step_s", "throughput", 0.5, True)),
        ("step_s > 2 s", ("step_s", "throughput", 2.0, False)),
        ("energy > 2 kWh", ("energy", "budget", 7.2e6, False)),
        ("energy > 500 Wh", ("energy", "budget", 1.8e6, False)),
        ("time > 8 h", ("time", "budget", 28_800.0, False)),
        ("cost > 50 EUR", ("cost", "budget", 50.0, False)),
        ("stalled > 5 min", ("stalled", "stalled", 300.0, False)),
        ("memory +10%", ("memory", "memory", 0.1, True)),
    ],
)
def test_a_rule_comes_to_base_units(text: str, rule: tuple[str, str, float, bool]) -> None:
    found = parse_rule(text)
    assert (found.subject, found.kind) == rule[:2]
    assert found.limit == pytest.approx(rule[2])
    assert found.is_relative is rule[3]


def test_memory_grows_over_as_many_steps_as_are_given() -> None:
    assert parse_rule("memory +10%").over_steps == 100
    assert parse_rule("memory +10% over 40 steps").over_steps == 40


def test_every_example_that_a_message_names_can_be_read() -> None:
    assert [rule.text for rule in parse_rules(EXAMPLES)] == list(EXAMPLES)
    assert len(parse_rules(DEFAULT)) == len(DEFAULT)


def test_a_rule_that_is_given_twice_is_one() -> None:
    assert parse_rules(["loss nan", "loss   nan"]) == (AlertRule("loss nan", "loss", "nan"),)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("token_per_s < -20%", "did you mean 'tokens_per_s < -20%'?"),
        ("los nan", "did you mean 'loss nan'?"),
        ("tokens_per_s < -20", "median, write tokens_per_s < -20%"),
        ("step_s > +50", "median, write step_s > +50%"),
        ("throtled", "did you mean 'throttled'?"),
        ("tokens_per_s > -20%", "'tokens_per_s > -20%' is not an alert rule"),
        ("tokens_per_s < +20%", "relative to the median, write tokens_per_s < -20%"),
        ("energy > 2", "a limit of energy has a unit: J, kJ, MJ, GJ, Wh, kWh, MWh"),
        ("energy > 0 kWh", "a limit must be above 0; got 0"),
        ("energy < 2 kWh", "did you mean 'energy > 2 kWh'?"),
        ("memory +0%", "write a share as -20% or +50%; got +0%"),
        ("tokens_per_s < -100%", "write a share as"),
        ("tokens_per_s < 1.2.3", "is not an alert rule"),
        ("", "'' is not an alert rule"),
    ],
)
def test_what_is_no_rule_is_refused_in_one_line(text: str, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_rule(text)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_text_in_place_of_a_list_is_refused() -> None:
    with pytest.raises(UsageError, match=r"give alerts=\['loss nan'\]"):
        parse_rules("loss nan")


def test_what_to_stop_on_is_a_list_of_kinds() -> None:
    assert parse_stop_classes("budget, nan") == ("budget", "nan")
    with pytest.raises(UsageError, match="did you mean 'budget'"):
        parse_stop_classes("budgets")


def test_a_budget_of_money_needs_a_price() -> None:
    rules = parse_rules(["cost > 5"])
    with pytest.raises(UsageError, match="--price-per-gpu-hour or --price-per-kwh"):
        check_prices(rules, Settings())
    check_prices(rules, Settings(price_per_kwh=0.3))


def test_a_loss_that_is_none_may_be_spelled_in_any_case() -> None:
    assert parse_rule("loss Nan") == parse_rule("Loss NaN") == parse_rule("loss nan")
