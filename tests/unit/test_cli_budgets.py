"""`--budget`: by its unit an amount is of energy, time or money, and by a mistyped one of none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.runs import GPU, add_writer, even_steps, make_run

Erg = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Five days of one step each: more than any budget here."""
    path = make_run(tmp_path / "run")
    add_writer(path, steps=even_steps(5, seconds=86_400.0, tokens_computed=1), devices=[GPU])
    return path


@pytest.mark.parametrize(
    ("budget", "rule"),
    [
        ("8 h", "time > 8 h"),
        ("8 hours", "time > 8 h"),
        ("8 hr", "time > 8 h"),
        ("1.5Hours", "time > 1.5 h"),
        ("30 minutes", "time > 30 min"),
        ("30mins", "time > 30 min"),
        ("90 secs", "time > 90 s"),
        ("2 days", "time > 2 d"),
        ("1 day", "time > 1 d"),
    ],
)
def test_time_is_known_by_each_of_its_spellings(
    erg: Erg, run: Path, budget: str, rule: str
) -> None:
    code, out, _ = erg("watch", "--once", run, "--budget", budget)
    assert code == 0
    assert f"! {rule}: " in out


@pytest.mark.parametrize(
    ("budget", "rule"),
    [
        ("5 joules", "energy > 5 J"),
        ("2 kWh", "energy > 2 kWh"),
        *((one, "cost > 50") for one in ("50 EUR", "50EUR", "50 CHF", "$50", "50 $", "50€")),
        ("£ 2.5", "cost > 2.5"),
    ],
)
def test_energy_is_by_its_unit_and_money_by_three_capitals_or_a_sign(
    erg: Erg, run: Path, budget: str, rule: str
) -> None:
    code, out, _ = erg("watch", "--once", run, "--budget", budget)
    assert code == 0
    # Not judged: this run has neither power nor a price.
    assert f"{rule} (" in " ".join(out.split())


@pytest.mark.parametrize(
    ("budget", "said"),
    [
        ("2 kwh", "no unit 'kwh'; did you mean kWh?"),
        ("5 KWH", "no unit 'KWH'; did you mean kWh?"),
        ("2kWhs", "no unit 'kWhs'; did you mean kWh?"),
        ("2 kw", "no unit 'kw'; did you mean kWh?"),
        ("8 huors", "no unit 'huors'; did you mean h?"),
        ("50 eur", "no unit 'eur'; did you mean EUR?"),
        ("50 euros", "no unit 'euros'; did you mean EUR?"),
        ("3 weeks", "no unit 'weeks' ('2 kWh', '8 h', '50 EUR')"),
        ("8", "no unit '' ('2 kWh'"),
        ("$50 EUR", "give an amount as '2 kWh'"),
        ("1,000 EUR", "give an amount as '2 kWh'"),
        ("8 h 30", "give an amount as '2 kWh'"),
        ("much", "give an amount as '2 kWh'"),
        ("-8 h", "a limit must be above 0"),
    ],
)
def test_what_is_neither_is_refused_with_the_nearest_unit(
    erg: Erg, run: Path, budget: str, said: str
) -> None:
    code, _, err = erg("watch", "--once", run, "--budget", budget)
    assert code == 2
    assert said in err
    assert len(err.splitlines()) == 1
