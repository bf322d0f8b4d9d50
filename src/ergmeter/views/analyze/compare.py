"""Comparison of earlier `erg analyze` outputs as a document."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ergmeter.neuron.earlier_output import METRICS
from ergmeter.units import significant
from ergmeter.version import __version__
from ergmeter.views.charts.chart import Chart
from ergmeter.views.charts.interval_chart import Axis, Dot, interval_chart
from ergmeter.views.document import (
    ChartPart,
    Document,
    Items,
    Paragraph,
    Section,
    Table,
    TableColumn,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ergmeter.neuron.compare import OutputComparison, OutputGroup, RepeatSpread
    from ergmeter.neuron.earlier_output import EarlierOutput

_MEAN = "mean of"
TITLES = {
    "mfu_percent": "MFU %",
    "throughput_seq_per_sec": "seq/s",
    "overall_nki_ratio": "NKI ratio",
    "training_score": "score",
}


def document(comparison: OutputComparison, *, has_charts: bool = False) -> Document:
    """Return the outputs and their groups, what changed, and the inputs of each group.

    Charts show the numbers of the first table again: they are for pages alone.
    """
    first, *metrics = heads(comparison)
    output_rows = tuple(rows(comparison))
    means = frozenset(n for n, cells in enumerate(output_rows) if cells[0].startswith(_MEAN))
    columns: tuple[str | TableColumn, ...] = (
        first, *(TableColumn(metric, "number") for metric in metrics)
    )  # fmt: skip
    sentences = tuple(changes(comparison))
    repeats = Paragraph("All outputs have the same inputs: they are repeats of one run.")
    charts = map(ChartPart, spread_charts(comparison, names_of(comparison), tuple(metrics)))
    notes = Items(comparison.notes) if comparison.notes else Paragraph("Nothing to note.")
    sections = (
        Section("outputs", "outputs", (Table(columns, output_rows, strong_rows=means),)),
        *([Section("spreads", "side by side", tuple(charts))] if has_charts else []),
        Section("changes", "what changed", (Items(sentences) if sentences else repeats,)),
        Section("notes", "notes", (notes,)),
        Section("inputs", "inputs", (_inputs(comparison),)),
        Section("cite", "how to cite", (Paragraph(_citation(comparison), is_to_copy=True),)),
    )
    return Document(_title(comparison), sections, comparison.document())


def spread_charts(
    comparison: OutputComparison, names: dict[str, str], heads: tuple[str, ...]
) -> Iterator[Chart]:
    """Yield a chart for each metric that can be compared between outputs."""
    for metric, title in zip(METRICS, heads, strict=True):
        points: list[Dot] = []
        apart = []
        for number, group in enumerate(comparison.groups, start=1):
            for output in group.outputs:
                value, name = output.value(metric, convention=comparison.convention), output.path
                if value is not None:
                    text, label = significant(value, 5), f"{number}: {names[name]}"
                    points.append(Dot(label, value, None, None, text, "bare"))
            spread = group.spreads.get(metric)
            if spread is not None and (deviation := spread.standard_deviation) is not None:
                mean, text = spread.mean, significant(spread.mean, 5)
                ends, label = (mean - deviation, mean + deviation), f"{number}: mean"
                points.append(Dot(label, mean, *ends, text, "plain"))
            if metric in group.not_comparable:
                apart.append(str(number))
        if points:
            yield interval_chart(
                f"spread-{metric}", title, "", points, Axis(title, format=".5~g"),
                words={"bare": "an output", "plain": "mean ± standard deviation"},
                table=Table(("output", title), tuple((d.name, d.value_text) for d in points)),
                note=f"group {', '.join(apart)} is not comparable to the one before it"
                if apart
                else "",
            )  # fmt: skip


def heads(comparison: OutputComparison) -> tuple[str, ...]:
    """Return the column titles of `rows`."""
    under = f" ({comparison.convention})" if comparison.convention else ""
    return "output", *(f"{TITLES[name]}{under if name == METRICS[0] else ''}" for name in METRICS)


def rows(comparison: OutputComparison) -> Iterator[tuple[str, ...]]:
    """Yield a row for each output, and two for each group with repeats."""
    called = names_of(comparison)
    for group in comparison.groups:
        for output in group.outputs:
            yield (
                called[output.path],
                *(_metric_text(output, name, comparison.convention) for name in METRICS),
            )
        many = len(group.outputs)
        if many > 1:
            spreads = [group.spreads.get(name) for name in METRICS]
            yield f"{_MEAN} {many}", *(_mean(spread, of=many) for spread in spreads)
            yield "± standard deviation", *map(_deviation, spreads)


def _metric_text(output: EarlierOutput, name: str, convention: str | None) -> str:
    """Return an output's value, marked if it is impossible."""
    if output.impossible(name):
        own = output.document.get(name)
        return "-" if own is None else f"{significant(own, 5)} (impossible)"
    value = output.value(name, convention=convention)
    return "-" if value is None else significant(value, 5)


def changes(comparison: OutputComparison) -> Iterator[str]:
    """Yield a sentence about each change from one group to the next."""
    called = names_of(comparison)
    for before, group in zip(comparison.groups, comparison.groups[1:], strict=False):
        old, new = (
            _names([called[output.path] for output in of.outputs]) for of in (before, group)
        )
        yield f"{old} → {new}: {_change(before, group)}"


def names_of(comparison: OutputComparison) -> dict[str, str]:
    """Return paths without their common prefix, where that is shorter."""
    paths = [output.path for group in comparison.groups for output in group.outputs]
    shared = len(os.path.commonpath([str(Path(path).absolute().parent) for path in paths]))
    return {
        path: min(path, str(Path(path).absolute())[shared:].lstrip("/"), key=len) for path in paths
    }


def _names(paths: list[str]) -> str:
    return paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"


def _mean(spread: RepeatSpread | None, *, of: int) -> str:
    if spread is None:
        return "-"
    some = f" (of {spread.count})" if spread.count < of else ""
    return f"{significant(spread.mean, 5)}{some}"


def _deviation(spread: RepeatSpread | None) -> str:
    if spread is None or spread.standard_deviation is None:
        return "-"
    return significant(spread.standard_deviation, 2)


def _change(before: OutputGroup, after: OutputGroup) -> str:
    """Describe the inputs that differ between two groups, and the effect."""
    inputs = "; ".join(
        f"{name} {input_text(old)} → {input_text(new)}"
        for name, (old, new) in after.changed.items()
    )
    inputs = inputs or "nothing that is known of the inputs changed"
    effects = []
    for name in METRICS:
        old, new = before.spreads.get(name), after.spreads.get(name)
        if name in after.not_comparable:
            effects.append(f"{TITLES[name]} not comparable")
        elif old is not None and new is not None and old.mean:
            effects.append(_effect(name, old, new))
    return f"{inputs}: {', '.join(effects) or 'nothing to compare'}"


def input_text(value: Any) -> str:  # noqa: ANN401  whatever the documents hold
    """Format an input value for reading, or a dash if unknown."""
    if value is None:
        return "-"
    if isinstance(value, dict):  # LoRA
        return f"r={value.get('r')} on {', '.join(map(str, value.get('targets') or ()))}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _effect(name: str, old: RepeatSpread, new: RepeatSpread) -> str:
    percent = round(100 * (new.mean / old.mean - 1), 1) + 0.0  # no -0.0
    change = f"{TITLES[name]} {percent:+.1f} %"
    deviations = (old.standard_deviation, new.standard_deviation)
    if deviations == (None, None):
        return change
    apart = sum(deviation or 0.0 for deviation in deviations)
    is_within = abs(new.mean - old.mean) <= apart
    return f"{change} ({'within' if is_within else 'beyond'} the spread of the repeats)"


def _title(comparison: OutputComparison) -> str:
    """Return the number of outputs and of groups."""
    outputs = sum(len(group.outputs) for group in comparison.groups)
    kinds = len(comparison.groups)
    same = "with the same inputs" if kinds == 1 else f"in {kinds} groups, each of the same inputs"
    return f"{outputs} outputs of erg analyze, {same}"


def _inputs(comparison: OutputComparison) -> Table:
    """Tabulate the inputs that define a group, one column for each group."""
    called = names_of(comparison)
    groups = [
        f"{called[group.outputs[0].path]} ({len(group.outputs)})" for group in comparison.groups
    ]
    names = comparison.groups[0].inputs
    lines = tuple(
        (name.replace("_", " "), *(input_text(group.inputs[name]) for group in comparison.groups))
        for name in names
    )
    return Table(("input", *groups), lines)


def _citation(comparison: OutputComparison) -> str:
    under = f", MFU under {comparison.convention}" if comparison.convention else ""
    sentence = "; ".join(changes(comparison)) or "repeats of one run"
    return f"ergmeter {__version__}: {_title(comparison)}{under}: {sentence}."
