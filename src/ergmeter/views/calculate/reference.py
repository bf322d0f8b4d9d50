"""The metrics reference, made from the catalogue: a page can't say what the code does not do."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ergmeter.metrics.catalog import catalogue

if TYPE_CHECKING:
    from ergmeter.metrics.catalog import Metric

_HEAD = """\
# Metrics

This page is made from the catalogue by `erg metrics --markdown`; a test keeps it up to date.

A figure is over the run's *window*, unless its formula says otherwise. Its *basis* is the weakest
of its inputs': measured, derived, reported, assumed. [concepts.md](concepts.md) explains the words.
A figure that can't be had is absent, with its reason. Above its *bound* it is impossible.
"""


def entry(metric: Metric) -> list[str]:
    """One metric in words."""
    better = {"higher": "higher is better", "lower": "lower is better"}.get(metric.direction, "")
    lines = [
        f"{metric.key}  ({metric.title}, in {metric.unit}{'; ' + better if better else ''})",
        f"  formula: {metric.formula}",
        f"  needs:   {', '.join(metric.needs) or 'nothing'}",
    ]
    if metric.upper_bound is not None:
        lines.append(f"  at most: {metric.upper_bound:g}; above it, {metric.above_bound}")
    if metric.kinds:
        lines.append(f"  also for each device of kind {', '.join(metric.kinds)}")
    lines += [
        f"  {alias.system} calls it {alias.name} [{alias.unit}]: {alias.definition}"
        for alias in metric.aliases
    ]
    return lines


def _bound(metric: Metric) -> str:
    return "" if metric.upper_bound is None else f"{metric.upper_bound:g}"


def page() -> str:
    """The reference page."""
    metrics = catalogue().values()
    lines = [
        _HEAD,
        "| key | unit | better | bound | formula | needs |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| `{m.key}` | {m.unit} | {m.direction} | {_bound(m)} | {m.formula} |"
        f" {', '.join(m.needs) or '-'} |"
        for m in metrics
    ]
    lines += [
        "",
        "## Other systems' names",
        "",
        "`erg report RUN --metric NAME` takes these names too, and answers in the unit given here.",
        "",
        "| name | system | is | unit | definition |",
        "| --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| `{a.name}` | {a.system} | `{m.key}` | {a.unit} | {a.definition} |"
        for m in metrics
        for a in m.aliases
    ]
    return "\n".join(lines) + "\n"
