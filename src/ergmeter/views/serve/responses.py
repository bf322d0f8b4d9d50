"""What is read of runs, benches and ledgers, as JSON. Called in a process of its own.

The trap: a number that only this page has. All that is said here was computed below, by the same
functions that `erg report`, `erg check`, `erg compare` and `erg bench report` show.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ergmeter.bench import results
from ergmeter.bench.overview import CELL_METRICS, LOWER, Configuration, configuration, overview
from ergmeter.bench.plan.cells import repeats_of
from ergmeter.bench.tables import ARGUMENTS
from ergmeter.compare import comparison
from ergmeter.compare.entry import EVAL_LOSS
from ergmeter.compare.ledgers import read_ledger
from ergmeter.compare.run_curves import compared_curves
from ergmeter.compare.sources import read_entries
from ergmeter.compare.verdicts import DEVICE_MEMORY, HOST_MEMORY, JOULES, LOSS, RATE
from ergmeter.errors import FormatError, NotMeasurable, UsageError
from ergmeter.metrics import timeline
from ergmeter.metrics.catalog import catalogue
from ergmeter.metrics.checks import fitness
from ergmeter.metrics.evidence.gpu_use import gpu_use
from ergmeter.metrics.live.recent_window import remaining
from ergmeter.metrics.summarize import evidence_of, readings_of, summary_of
from ergmeter.records import COLUMN_KINDS, Missing, Reading
from ergmeter.runlog.manage.labels import Labels, labels_of
from ergmeter.runlog.reader import Run
from ergmeter.runlog.segments import Series
from ergmeter.units import NS_PER_S, duration, significant
from ergmeter.views import compare, compare_documents, documents
from ergmeter.views.bench import report as bench_report
from ergmeter.views.bench.report import figure_in_words
from ergmeter.views.charts import palette
from ergmeter.views.charts.compare_charts import compare_charts
from ergmeter.views.charts.compare_curves import ABOUT, course_charts
from ergmeter.views.charts.time_charts import IDS, time_charts
from ergmeter.views.html import report as html_report
from ergmeter.views.html.page import vega, without_legends
from ergmeter.views.run import card, check
from ergmeter.views.serve.pool import LIBRARY

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import pyarrow as pa

    from ergmeter.compare.entry import Entry
    from ergmeter.metrics.evidence.evidence import Evidence
    from ergmeter.metrics.timeline import BoundedSeries
    from ergmeter.records import Device, Result

# -- matrix ----------------------------------------------------------------------------------------
# The cells of a bench by what tells them apart: one entry a configuration, for a matrix.
#
# The trap: a choice of axes that nobody made. All settings that vary are told, and the page's
# reader says which two; where more vary, several configurations stand in one place, each with its
# name.


_AXES = ("scenario", "num_gpus", "nodes", *ARGUMENTS)


def matrix(found: pa.Table) -> dict[str, Any]:
    """The settings that vary, the figures there are, and each configuration with both."""
    rows = found.drop_columns(["raw"]).to_pylist()
    axes = [name for name in _AXES if len({row[name] for row in rows}) > 1] or ["scenario"]
    groups: dict[object, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[repeats_of(row)].append(row)
    figures = {
        name: {"title": title, "is_lower_better": name in LOWER}
        for name, title in CELL_METRICS.items()
        if any(row[name] is not None for row in rows)
    }
    cells = [_group(configuration(group, axes), tuple(figures)) for group in groups.values()]
    return {"axes": axes, "figures": figures, "groups": cells, "cells": len(rows)}


def _group(one: Configuration, figures: tuple[str, ...]) -> dict[str, Any]:
    return {
        "axes": dict(one.settings),
        "status": one.status,
        "is_ok": one.is_ok,
        "reason": one.reason,
        "figures": {name: _figure(one, name) for name in figures},
        "paths": list(one.paths),
    }


def _figure(one: Configuration, name: str) -> dict[str, Any] | None:
    """The mean of the repeats that came to an end, as `erg bench report` has it."""
    if name not in one.figures:
        return None
    value, runs = one.figures[name], one.runs[name]
    return {
        "value": value if math.isfinite(value) else None,
        "text": figure_in_words(one, name),
        "runs": runs,
        "impossible": one.impossible.get(name),
    }


# -- ledger table ----------------------------------------------------------------------------------
# In which order are the columns of a ledger shown, and which of them need no column?
#
# The trap: a ledger has sixty columns, and a table of all of them is read by nobody. What people
# look for comes first, what is the same in every row is said once, and a figure has as many digits
# as one reads; its full value stays with it.


# By key of the catalogue or column of the ledger. They stay in the table, also where all are alike.
_FIRST = (
    *("backend", RATE, JOULES, DEVICE_MEMORY, HOST_MEMORY, LOSS, EVAL_LOSS),
    *("steps", "started", "status"),
)
# Where a title of the catalogue is another column's name, or does not say what it is of.
_HEADS = {"steps.count": "steps in the window", "time.run_s": "duration", EVAL_LOSS: "eval loss"}
_DIGITS = 5


def ledger_table(entries: Sequence[Entry]) -> dict[str, Any]:
    """Heads, and rows of cells with their full value; what all rows say alike, once."""
    columns = _columns(entries)
    cells = {one: [_cell(entry, one) for entry in entries] for one in columns}
    alike = [one for one in columns if one not in _FIRST and _is_same(cells[one])]
    shown = [one for one in columns if one not in alike]
    heads = _heads(columns)
    return {
        "heads": [heads[one] for one in shown],
        "rows": [[cells[one][row] for one in shown] for row in range(len(entries))],
        "alike": [{"head": heads[one], **cells[one][0]} for one in alike],
    }


def _columns(entries: Sequence[Entry]) -> list[str]:
    """What some row has, the important first, then figures, then facts."""
    figures = dict.fromkeys(
        key for entry in entries for key in entry.figures if entry.value(key) is not None
    )
    there = [*figures, *dict.fromkeys(name for entry in entries for name in entry.facts)]
    return [*(one for one in _FIRST if one in there), *(one for one in there if one not in _FIRST)]


def _heads(columns: Sequence[str]) -> dict[str, str]:
    known = catalogue()
    titles = {one: known[one].title if one in known else one for one in columns}
    titles |= {one: _HEADS[one] for one in columns if one in _HEADS}
    often = Counter(titles.values())
    return {one: f"{said} ({one})" if often[said] > 1 else said for one, said in titles.items()}


def _cell(entry: Entry, column: str) -> dict[str, str]:
    """What is shown, and in full."""
    found = entry.figures.get(column)
    if isinstance(found, Reading):
        text = card.value(found).removesuffix(" 1")
        return {"text": text, "title": f"{found.value:.17g} {found.unit}".removesuffix(" 1")}
    said = entry.facts.get(column)
    if said is None:
        return {"text": "-", "title": entry.why_not(column) if found else "not said"}
    return {"text": _rounded(said), "title": said}


def _rounded(said: str) -> str:
    """A fraction of many digits with few; versions, whole numbers and words as they are."""
    if len(said) <= _DIGITS + 2 or not said.lstrip("-").replace(".", "", 1).isdigit():
        return said
    return significant(float(said), _DIGITS) if "." in said else said


def _is_same(cells: Sequence[dict[str, str]]) -> bool:
    return len({one["title"] for one in cells}) == 1


# -- work ------------------------------------------------------------------------------------------


# What the list shows of a run.
LISTED = (
    "throughput.tokens_per_s",
    "time.step_s",
    "utilization.mfu_frac",
    "energy.joules_per_token",
    "time.run_s",
)
_COUNTERS = (
    *("energy_j", "cpu_s", "disk_read_bytes", "disk_written_bytes"),
    *("net_received_bytes", "net_sent_bytes"),
)
_OF_STEPS = {"step_s": timeline.step_line, "loss": timeline.loss_line}
SERIES = (
    *(n for n, kind in COLUMN_KINDS["samples"].items() if kind in ("float", "count")),
    *_OF_STEPS,
)
_FEWEST = 50  # points of a line
_Span: TypeAlias = "tuple[float, float]"


def row(path: str, root: str) -> bytes:
    """A run in the list: what it is, and the figures of the columns, and no more: this is also what
    the page of a long run shows first."""
    run = Run.open(path)
    found = readings_of(evidence_of(run), LISTED)
    return _packed_json(
        {
            **about(run),
            "status": run.status,
            "readings": {key: _brief(one) for key, one in found.items()},
            "is_damaged": bool(run.verified()),
        },
        root,
    )


def about(run: Run) -> dict[str, Any]:
    """What a run says of itself."""
    accelerators = [run.devices[id_].name for id_, use in gpu_use(run).items() if use.counts]
    names = accelerators or [one.name for one in run.devices.values() if one.kind == "cpu"]
    counts = [f"{names.count(n)} x {n}" for n in dict.fromkeys(names)]
    labels = _labels(run)
    return {
        "title": run.name,
        "created": run.header.get("created"),
        "command": run.header.get("command"),
        "model": _model(run),
        "devices": counts,
        "host": next((str(w.header.get("host")) for w in run.writers), ""),
        "tags": list(labels.tags),
        "notes_on_it": [text for _, text in labels.notes],
    }


def document(path: str, root: str) -> bytes:
    """A run's summary and what `erg check` found."""
    run = Run.open(path)
    evidence = evidence_of(run)
    summary = summary_of(evidence)
    found = fitness(evidence)
    whole = {
        **documents.report(run, summary),
        **about(run),
        "titles": _titles(summary.readings),
        "shown": {key: _brief(found) for key, found in summary.readings.items()},
        "check": check.document(run, found),
        "ahead": _remaining_json(evidence),
    }
    return _packed_json(whole, root)


def charts(path: str, root: str, only: Sequence[str]) -> bytes:
    """The charts of a run over time, as the report has them; all of them or just some."""
    unknown = [name for name in only if name not in IDS]
    if unknown:
        raise UsageError(f"no chart {unknown[0]!r}; there are {', '.join(IDS)}")
    found = time_charts(evidence_of(Run.open(path)), only or IDS)
    charts_ = [{**asdict(one), "spec": without_legends(one.spec)} for one in found]
    return _packed_json({"config": palette.config(), "charts": charts_}, root)


def report(path: str, root: str) -> bytes:
    """The page that `erg report --html` writes, less the charting library in it."""
    evidence = evidence_of(Run.open(path))
    page = html_report.report(evidence, summary_of(evidence))
    page = page.replace(f"<script>{vega()}</script>", LIBRARY)
    return _under(page, root).encode()


def ready() -> bytes:
    """Nothing: whoever is asked has by then loaded all that reading takes."""
    return b""


def library() -> bytes:
    """The charting library."""
    return vega().encode()


def series(path: str, root: str, columns: Sequence[str], span: _Span, most: int) -> bytes:
    """Columns over time, device by device, in no more points than asked for, all together."""
    unknown = [name for name in columns if name not in SERIES]
    if unknown:
        raise UsageError(f"no column {unknown[0]!r}; there are {', '.join(SERIES)}")
    evidence = evidence_of(Run.open(path))
    wanted = [(name, one) for name in columns for one in _sources(evidence, name)]
    shown = wanted[: max(1, most // _FEWEST)]
    # Around a gap both neighbours and a break are kept besides: half as many again at the most.
    points = max(4, most * 2 // (5 * max(1, len(shown))))
    lines = [_line(evidence, device, name, span=span, points=points) for name, device in shown]
    whole = {"columns": list(columns), "lines": lines, "left_out": len(wanted) - len(shown)}
    return _packed_json(whole, root)


def compared(paths: Sequence[str], root: str, group_by: Sequence[str], anyway: bool) -> bytes:
    """What `erg compare` says of these runs."""
    options = comparison.CompareOptions(group_by=tuple(group_by), anyway=anyway)
    entries = read_entries([Path(one) for one in paths], keys=comparison.figures_needed(options))
    found = comparison.compare(entries, options)
    heads = {one.key: compare.head(one) for one in found.measures}
    cells = [
        {one.key: " ".join(compare.cell(found, g, one)).strip() for one in found.measures}
        for g in found.groups
    ]
    # The page has a link for what is an option on a command line.
    words = [
        [line for _, line in compare.around(pair) if not line.startswith("--")]
        for pair in found.pairs
    ]
    titles = [compare.title(pair) for pair in found.pairs]
    front = compare.front_in_words(found.front) if found.front else None
    shown = {
        "heads": heads,
        "cells": cells,
        "titles": titles,
        "around": words,
        "front": front,
        "signs": compare.SIGNS,
    }
    over = course_charts(compared_curves(found.groups), found.groups)
    drawn_ = {
        "config": palette.config(),
        "charts": [asdict(one) for one in compare_charts(found)],
        "courses": {**asdict(over), "about": ABOUT},
    }
    return _packed_json({**compare_documents.document(found), "shown": shown, **drawn_}, root)


def bench(path: str, root: str) -> bytes:
    """The cells of a bench by configuration, its repeats averaged, as `erg bench report` has them.

    What a program printed is left out: it may be megabytes.
    """
    found = results.table(Path(path), keep=False)
    return _packed_json({**matrix(found), "notes": bench_report.notes(overview(found))}, root)


def ledger(path: str, root: str) -> bytes:
    """The rows of an energy ledger that can be read, and why the others can't."""
    found = read_ledger(Path(path), given=path)
    facts = list(dict.fromkeys(name for entry in found.entries for name in entry.facts))
    keys = list(dict.fromkeys(key for entry in found.entries for key in entry.figures))
    rows = [
        {
            "source": entry.source,
            "facts": dict(entry.facts),
            "readings": {key: _brief(said) for key, said in entry.figures.items()},
            "remarks": list(entry.remarks),
        }
        for entry in found.entries
    ]
    whole = {"facts": facts, "metrics": keys, "titles": _titles(keys), "rows": rows}
    told = {"table": ledger_table(found.entries), "left_out": list(found.left_out)}
    return _packed_json({**whole, **told}, root)


def _remaining_json(evidence: Evidence) -> dict[str, Any]:
    """How far a run is, and what is left; or why nobody knows."""
    try:
        found = remaining(evidence)
    except NotMeasurable as error:
        return {"missing": str(error)}
    left = "not known yet" if found.left_s is None else duration(found.left_s)
    done = f"{found.done:,.0f} of {found.total:,.0f} {found.unit} ({found.done_frac:.1%})"
    return {**asdict(found), "text": f"{done}; left, at the counted rate: {left}"}


def _model(run: Run) -> str | None:
    said = run.workload.get("model") or run.workload.get("model_name_or_path")
    if said:
        return str(said)
    trained = (w.header.get("training") for w in run.writers)
    models = (one.get("model") for one in trained if isinstance(one, dict))
    return next((str(one) for one in models if one), None)


def _labels(run: Run) -> Labels:
    try:
        return labels_of(run.path)
    except FormatError:  # broken labels must not cost the figures; `erg list` says what is wrong
        return Labels()


def _titles(keys: Iterable[str]) -> dict[str, str]:
    known = catalogue()
    return {key: known[key].title for key in keys if key in known}


def _brief(found: Result) -> dict[str, Any]:
    """A reading with the words a person reads; or why there is none."""
    whole = documents.result(found)
    if isinstance(found, Reading) and "value" in whole:
        # A loss has no unit to show; a column names its unit in its head.
        text, bare = (say(found).removesuffix(" 1") for say in (card.value, card.bare))
        whole |= {"text": text, "bare": bare, "interval": card.interval(found)}
    elif isinstance(found, Missing):
        whole["text"] = "-"
    return whole


def _sources(evidence: Evidence, column: str) -> list[Device | None]:
    if column in _OF_STEPS:
        return [None]
    said = evidence.series(column)
    return [one for one in evidence.run.devices.values() if one.id in said]


def _line(
    evidence: Evidence, device: Device | None, column: str, *, span: _Span, points: int
) -> dict[str, Any]:
    """One line of a chart, or why there is none."""
    try:
        if device is None:
            line = _OF_STEPS[column](evidence, points=points)
        else:
            line = _sampled(evidence, device, column, span=span, points=points)
    except NotMeasurable as error:
        return {"column": column, "device": None, "missing": str(error)}
    inside = (line.t_s >= span[0]) & (line.t_s <= span[1])
    return {
        "column": column,
        "device": device.id if device else None,
        "is_rate": column in _COUNTERS,  # per second, of what only ever grows
        "t_s": line.t_s[inside].tolist(),
        "values": line.values[inside].tolist(),
        "readings": line.readings,
    }


def _sampled(
    evidence: Evidence, device: Device, column: str, *, span: _Span, points: int
) -> BoundedSeries:
    """A column in a span of time: bounded within it, so that a closer look shows more."""
    found = evidence.series(column)[device.id]
    found = timeline.rate(found) if column in _COUNTERS else found
    zero_ns = timeline.zero_ns(evidence)
    ends_ns = [zero_ns + one * NS_PER_S for one in span]
    first, last = np.searchsorted(found.t_ns, ends_ns[0]), np.searchsorted(found.t_ns, ends_ns[1])
    part = Series(found.t_ns[first:last], found.values[first:last])
    return timeline.bounded_series(part, zero_ns=zero_ns, points=points)


def _packed_json(whole: dict[str, Any], root: str) -> bytes:
    """As JSON, with paths as they are under the directory: where it lies is nobody's business."""
    text = json.dumps(documents.finite(whole), allow_nan=False, default=str)
    inside = json.dumps(root)[1:-1]
    return _under(text, inside).encode("utf-8", "replace")


def _under(text: str, root: str) -> str:
    """With paths as they are under a directory; of `/` they are so already."""
    return text if root == "/" else text.replace(f"{root}/", "")
