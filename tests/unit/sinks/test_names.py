"""Every spelling of a key, for every metric of the catalogue."""

from __future__ import annotations

import re

import pytest

from ergmeter.errors import UsageError
from ergmeter.metrics.catalog import catalogue
from ergmeter.sinks.shared.updates import Names, explanation, ucum


def test_a_key_in_each_tools_spelling() -> None:
    names, key = Names(), "throughput.tokens_per_s"
    assert names.tag(key) == "ergmeter/throughput.tokens_per_s"
    assert names.tag(key, is_final=True) == "ergmeter-run/throughput.tokens_per_s"
    assert names.tag(key, device="node:a/b c") == "ergmeter/throughput.tokens_per_s/node-a-b-c"
    assert names.series(key) == "ergmeter_throughput_tokens_per_s"
    assert names.series(key, is_final=True) == "ergmeter_run_throughput_tokens_per_s"
    assert names.instrument(key) == "ergmeter.throughput.tokens_per_s"
    assert names.instrument(key, is_final=True) == "ergmeter.run.throughput.tokens_per_s"


@pytest.mark.parametrize("prefix", ["ergmeter", "team-a_2"])
def test_every_name_is_one_that_its_tool_takes_and_no_two_are_alike(prefix: str) -> None:
    names = Names(prefix)
    both = [(key, whole) for key in catalogue() for whole in (False, True)]
    tags = [names.tag(key, is_final=whole) for key, whole in both]
    series = [names.series(key, is_final=whole) for key, whole in both]
    instruments = [names.instrument(key, is_final=whole) for key, whole in both]
    for found in (tags, series, instruments):
        assert len(set(found)) == 2 * len(catalogue())
    # prometheus.io/docs/concepts/data_model
    assert all(re.fullmatch(r"[a-zA-Z_:][a-zA-Z0-9_:]*", name) for name in series)
    # opentelemetry.io/docs/specs/otel/metrics/api, instrument name syntax
    assert all(re.fullmatch(r"[A-Za-z][A-Za-z0-9_.\-/]{0,254}", name) for name in instruments)
    # What MLflow's validation of metric names lets through.
    assert all(re.fullmatch(r"[/\w.\- :]+", name) for name in tags)


@pytest.mark.parametrize("prefix", ["", "1a", "a/b", "a b"])
def test_a_prefix_that_some_tool_would_refuse_is_refused(prefix: str) -> None:
    with pytest.raises(UsageError, match="prefix must start with a letter"):
        Names(prefix)


@pytest.mark.parametrize(
    ("unit", "code"),
    [
        ("tokens/s", "{token}/s"),
        ("tokens/s/param", "{token}/s/{parameter}"),
        ("J/step", "J/{step}"),
        ("Wh", "W.h"),
        ("B/h", "By/h"),
        ("C", "Cel"),
        ("frac", "1"),
        ("FLOP/token", "{FLOP}/{token}"),
        ("cores", "{core}"),
    ],
)
def test_a_unit_in_ucum(unit: str, code: str) -> None:
    assert ucum(unit) == code


def test_an_annotation_of_a_unit_is_one_thing_in_words() -> None:
    for metric in catalogue().values():
        for word in re.findall(r"{(.*?)}", ucum(metric.unit)):
            assert re.fullmatch(r"[A-Za-z]+[a-rt-zA-Z]", word), metric.key


def test_an_explanation_is_title_unit_and_formula() -> None:
    assert explanation("energy.joules_per_token") == (
        "energy per token [J/token]: energy.run_j / tokens.total"
    )
