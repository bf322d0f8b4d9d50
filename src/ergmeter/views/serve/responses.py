"""JSON and pages about runs, benches and ledgers. Called by name in a worker process.

All values come from the functions that `erg report`, `erg check`, `erg compare` and `erg bench
report` use.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa

from ergmeter.bench import results
from ergmeter.bench.overview import Configuration, overview, repeats_of, view_columns
from ergmeter.bench.tables import ARGUMENTS
from ergmeter.compare import comparison
from ergmeter.compare.entry import Entry
from ergmeter.compare.ledgers import read_ledger
from ergmeter.compare.pairing import CompareOptions
from ergmeter.compare.run_curves import compared_curves
from ergmeter.compare.sources import read_entries
from ergmeter.errors import NotMeasurable, UsageError
from ergmeter.metrics import timeline
from ergmeter.metrics.catalog import bench_columns, catalogue, every_metric, in_view
from ergmeter.metrics.checks import fitness
from ergmeter.metrics.evidence.evidence import Evidence
from ergmeter.metrics.evidence.gpu_use import gpu_use
from ergmeter.metrics.live.recent_window import remaining
from ergmeter.metrics.summarize import evidence_of, readings_of, summary_of
from ergmeter.records import Device, Reading, value_text
from ergmeter.runlog.reader import Run
from ergmeter.units import listed_by, significant
from ergmeter.views import bench as bench_report
from ergmeter.views import compare, documents
from ergmeter.views.charts import chart
from ergmeter.views.charts.compare_charts import compare_charts, front_in_words, head
from ergmeter.views.charts.compare_curves import ABOUT, course_charts
from ergmeter.views.charts.time_charts import IDS, time_charts
from ergmeter.views.render.html import html, vega, without_legends
from ergmeter.views.run import card, check
from ergmeter.views.run.report import page_sections
from ergmeter.views.serve.live import result_with_texts
from ergmeter.views.serve.pool import LIBRARY, SERIES

# Bench matrix. All settings that vary are returned; the reader picks the two axes.


_AXES = ("scenario", "num_gpus", "nodes", *ARGUMENTS)


def matrix(table: pa.Table) -> dict[str, Any]:
    """Return the settings that vary, the metrics, and each configuration."""
    rows = table.drop_columns(["raw"]).to_pylist()
    axes = [name for name in _AXES if len({row[name] for row in rows}) > 1] or ["scenario"]
    groups = listed_by((repeats_of(row), row) for row in rows)
    figures = {
        name: {"title": at.label, "is_lower_better": bench_columns()[name].direction == "lower"}
        for name, at in view_columns("bench matrix").items()
        if any(row[name] is not None for row in rows)
    }
    cells = [_group(Configuration(group), axes, tuple(figures)) for group in groups.values()]
    return {"axes": axes, "figures": figures, "groups": cells, "cells": len(rows)}


def _group(
    configuration: Configuration, axes: Sequence[str], figures: tuple[str, ...]
) -> dict[str, Any]:
    return {
        "axes": {name: configuration.rows[0][name] for name in axes},
        "status": configuration.status,
        "is_ok": bool(configuration.ok),
        "reason": configuration.reason,
        "figures": {name: _figure(configuration, name) for name in figures},
        "paths": configuration.paths,
    }


def _figure(configuration: Configuration, name: str) -> dict[str, Any] | None:
    """Return the mean over completed repeats, as in `erg bench report`."""
    value = configuration.mean(name)
    if value is None:
        return None
    return {
        "value": value if math.isfinite(value) else None,
        "text": bench_report.figure_in_words(configuration, name),
        "runs": configuration.runs(name),
        "impossible": configuration.impossible(name) or None,
    }


# Ledger table. The columns most looked for come first; columns with one value in all rows are
# returned once. Values are rounded for display and kept in full beside it.


# Replaces catalogue titles that are ambiguous among ledger columns.
_HEADS = {"steps.count": "steps in the window", "time.run_s": "duration"}
_DIGITS = 5


def ledger_table(entries: Sequence[Entry]) -> dict[str, Any]:
    """Return heads and rows with full values; constant columns once."""
    columns = _columns(entries)
    cells = {column: [_cell(entry, column) for entry in entries] for column in columns}
    titles = {column: {cell["title"] for cell in own} for column, own in cells.items()}
    first = _first()
    alike = [column for column in columns if column not in first and len(titles[column]) == 1]
    differing = [column for column in columns if column not in alike]
    heads = _heads(columns)
    return {
        "heads": [heads[column] for column in differing],
        "rows": [[cells[column][row] for column in differing] for row in range(len(entries))],
        "alike": [{"head": heads[column], **cells[column][0]} for column in alike],
    }


def _first() -> tuple[str, ...]:
    """Catalogue keys and ledger columns that come first, and stay even if constant."""
    return ("backend", *in_view("serve ledger"), "steps", "started", "status")


def _columns(entries: Sequence[Entry]) -> list[str]:
    """Return the non-empty columns: important first, then metrics, then facts."""
    figures = dict.fromkeys(
        key for entry in entries for key in entry.figures if entry.value(key) is not None
    )
    there = [*figures, *dict.fromkeys(name for entry in entries for name in entry.facts)]
    first = _first()
    return [
        *(column for column in first if column in there),
        *(column for column in there if column not in first),
    ]


def _heads(columns: Sequence[str]) -> dict[str, str]:
    metrics = catalogue()
    titles = {column: metrics[column].title if column in metrics else column for column in columns}
    labels = {key: at.label for key, at in in_view("serve ledger").items() if at.label} | _HEADS
    titles |= {column: labels[column] for column in columns if column in labels}
    often = Counter(titles.values())
    return {
        column: f"{title} ({column})" if often[title] > 1 else title
        for column, title in titles.items()
    }


def _cell(entry: Entry, column: str) -> dict[str, str]:
    """Return the displayed text and the full value."""
    figure = entry.figures.get(column)
    if isinstance(figure, Reading):
        return {
            "text": value_text(figure),
            "title": f"{figure.value:.17g} {figure.unit}".removesuffix(" 1"),
        }
    fact = entry.facts.get(column)
    if fact is None:
        return {"text": "-", "title": entry.why_not(column) if figure else "not said"}
    return {"text": _rounded(fact), "title": fact}


def _rounded(text: str) -> str:
    """Round long fractions; versions, integers and words are unchanged."""
    if len(text) <= _DIGITS + 2 or not text.lstrip("-").replace(".", "", 1).isdigit():
        return text
    return significant(float(text), _DIGITS) if "." in text else text


_COUNTERS = (
    *("energy_j", "cpu_s", "disk_read_bytes", "disk_written_bytes"),
    *("net_received_bytes", "net_sent_bytes"),
)
_OF_STEPS = {"step_s": timeline.step_line, "loss": timeline.loss_line}
_FEWEST = 50  # points of a line
_Span: TypeAlias = "tuple[float, float]"


def row(path: str, root: str) -> bytes:
    """Return a run's row in the list: description and the metrics of the columns.

    The page of a long run shows this first, so it must stay cheap.
    """
    run = Run.open(path)
    results = readings_of(evidence_of(run), in_view("serve list"))
    return _packed_json(
        {
            **about(run),
            "status": run.status,
            "readings": {key: result_with_texts(result) for key, result in results.items()},
            "is_damaged": bool(run.verified()),
        },
        root,
    )


def about(run: Run) -> dict[str, Any]:
    """Return a run's own description."""
    accelerators = [run.devices[id_].name for id_, use in gpu_use(run).items() if use.counts]
    names = accelerators or [device.name for device in run.devices.values() if device.kind == "cpu"]
    counts = [f"{names.count(n)} x {n}" for n in dict.fromkeys(names)]
    labels = documents.label_document(run)  # broken ones are empty; `erg list` reports them
    return {
        "title": run.name,
        "created": run.header.get("created"),
        "command": run.header.get("command"),
        "model": _model(run),
        "devices": counts,
        "host": next((str(w.header.get("host")) for w in run.writers), ""),
        "tags": labels.get("tags", []),
        "notes_on_it": [note["text"] for note in labels.get("notes", ())],
    }


def document(path: str, root: str) -> bytes:
    """Return a run's summary and check."""
    run = Run.open(path)
    evidence = evidence_of(run)
    summary = summary_of(evidence)
    verdict = fitness(evidence)
    body = {
        **documents.report(run, summary),
        **about(run),
        "titles": _titles(summary.readings),
        "shown": {key: result_with_texts(reading) for key, reading in summary.readings.items()},
        "check": check.check_data(run, verdict),
        "ahead": _remaining_json(evidence),
    }
    return _packed_json(body, root)


def charts(path: str, root: str, only: Sequence[str]) -> bytes:
    """Return all or some charts of a run over time, as in the report."""
    unknown = [name for name in only if name not in IDS]
    if unknown:
        raise UsageError(f"no chart {unknown[0]!r}; there are {', '.join(IDS)}")
    run_charts = time_charts(evidence_of(Run.open(path)), only or IDS)
    charts_ = [{**chart.as_json(), "spec": without_legends(chart.spec)} for chart in run_charts]
    return _packed_json({"config": chart.config(), "charts": charts_}, root)


def report(path: str, root: str) -> bytes:
    """Return the page of `erg report --html` without the charting library."""
    evidence = evidence_of(Run.open(path))
    summary = summary_of(evidence)
    sections = page_sections(evidence, summary)
    page = html(card.document([(evidence, summary)], sections=sections))
    page = page.replace(f"<script>{vega()}</script>", LIBRARY)
    return _under(page, root).encode()


def ready() -> bytes:
    """Return nothing; calling it loads all imports in the worker."""
    return b""


def library() -> bytes:
    """Return the charting library."""
    return vega().encode()


def series(path: str, root: str, columns: Sequence[str], span: _Span, most: int) -> bytes:
    """Return columns over time by device, at most `most` points in total."""
    unknown = [name for name in columns if name not in SERIES]
    if unknown:
        raise UsageError(f"no column {unknown[0]!r}; there are {', '.join(SERIES)}")
    evidence = evidence_of(Run.open(path))
    wanted = [(name, source) for name in columns for source in _sources(evidence, name)]
    chosen = wanted[: max(1, most // _FEWEST)]
    # Both neighbours of a gap and a break are kept too: at most 1.5 times the points.
    points = max(4, most * 2 // (5 * max(1, len(chosen))))
    lines = [_line(evidence, device, name, span=span, points=points) for name, device in chosen]
    body = {"columns": list(columns), "lines": lines, "left_out": len(wanted) - len(chosen)}
    return _packed_json(body, root)


def compared(paths: Sequence[str], root: str, group_by: Sequence[str], anyway: bool) -> bytes:
    """Return a comparison as `erg compare` makes it."""
    options = CompareOptions(group_by=tuple(group_by), anyway=anyway)
    entries = read_entries([Path(path) for path in paths], keys=comparison.figures_needed(options))
    outcome = comparison.compare(entries, options)
    measures = outcome.measures
    texts = {
        "heads": {measure.key: head(measure) for measure in measures},
        "cells": [
            {each.key: " ".join(compare.cell(outcome, group, each)).strip() for each in measures}
            for group in outcome.groups
        ],
        "titles": [compare.title(pair) for pair in outcome.pairs],
        "around": [[line for _, line in compare.beside_verdicts(pair)] for pair in outcome.pairs],
        "front": front_in_words(outcome.front) if outcome.front else None,
        "signs": compare.SIGNS,
    }
    over = course_charts(compared_curves(outcome.groups), outcome.groups)
    drawings = {
        "config": chart.config(),
        "charts": [chart.as_json() for chart in compare_charts(outcome)],
        "courses": {
            "charts": [chart.as_json() for chart in over.charts],
            "axes": over.axes,
            "first": over.first,
            "said": over.notes,
            "about": ABOUT,
        },
    }
    return _packed_json({**compare.comparison_data(outcome), "shown": texts, **drawings}, root)


def bench(path: str, root: str) -> bytes:
    """Return a bench by configuration, repeats averaged, as in `erg bench report`.

    Program output is left out: it may be megabytes.
    """
    cells = results.table(Path(path), keep=False)
    return _packed_json({**matrix(cells), "notes": bench_report.notes(overview(cells))}, root)


def ledger(path: str, root: str) -> bytes:
    """Return the readable rows of an energy ledger, and why others are not."""
    source = read_ledger(Path(path), argument=path)
    entries = source.ended_well
    facts = list(dict.fromkeys(name for entry in entries for name in entry.facts))
    keys = list(dict.fromkeys(key for entry in entries for key in entry.figures))
    rows = [
        {
            "source": entry.source,
            "facts": dict(entry.facts),
            "readings": {key: result_with_texts(figure) for key, figure in entry.figures.items()},
            "remarks": list(entry.remarks),
        }
        for entry in entries
    ]
    body = {"facts": facts, "metrics": keys, "titles": _titles(keys), "rows": rows}
    body |= {"table": ledger_table(entries), "left_out": list(source.unused)}
    return _packed_json(body, root)


def _remaining_json(evidence: Evidence) -> dict[str, Any]:
    """Return progress and remaining time, or the reason why unknown."""
    try:
        progress = remaining(evidence)
        return {**asdict(progress), "text": progress.text}
    except NotMeasurable as error:
        return {"missing": str(error)}


def _model(run: Run) -> str | None:
    declared = run.workload.get("model") or run.workload.get("model_name_or_path")
    if declared:
        return str(declared)
    trained = (w.header.get("training") for w in run.writers)
    models = (setup.get("model") for setup in trained if isinstance(setup, dict))
    return next((str(model) for model in models if model), None)


def _titles(keys: Iterable[str]) -> dict[str, str]:
    metrics = every_metric()
    return {key: metrics[key].title for key in keys if key in metrics}


def _sources(evidence: Evidence, column: str) -> list[Device | None]:
    if column in _OF_STEPS:
        return [None]
    series = evidence.series(column)
    return [device for device in evidence.run.devices.values() if device.id in series]


def _line(
    evidence: Evidence, device: Device | None, column: str, *, span: _Span, points: int
) -> dict[str, Any]:
    """Return a line of a chart, or the reason for its absence."""
    is_counter = column in _COUNTERS
    try:
        if device is None:
            line = _OF_STEPS[column](evidence, points=points)
        else:
            line = timeline.part_of_line(
                evidence, device, column, span_s=span, points=points, is_counter=is_counter
            )
    except NotMeasurable as error:
        return {"column": column, "device": None, "missing": str(error)}
    within = line.within(*span)
    return {
        "column": column,
        "device": device.id if device else None,
        "is_rate": is_counter,  # rate per second of a counter
        "t_s": within.t_s.tolist(),
        "values": within.values.tolist(),
        "readings": line.readings,
    }


def _packed_json(body: dict[str, Any], root: str) -> bytes:
    """Return JSON with paths made relative to the directory."""
    text = json.dumps(documents.finite(body), allow_nan=False, default=str)
    return _under(text, json.dumps(root)[1:-1]).encode("utf-8", "replace")


def _under(text: str, root: str) -> str:
    """Return text with paths made relative to a directory; unchanged for `/`."""
    return text if root == "/" else text.replace(f"{root}/", "")
