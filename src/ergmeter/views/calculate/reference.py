"""Reference tables made from the catalogues: metrics, devices, grid intensities."""

from __future__ import annotations

import dataclasses
import textwrap
from importlib import resources
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ergmeter.hardware.table import BUILT_IN, DeviceSpec, ambiguous_names, built_in_devices
from ergmeter.metrics.catalog import Metric, catalogue
from ergmeter.records import DTYPES
from ergmeter.units import significant

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ergmeter.hardware.grid import GridIntensity

# Grid intensities.


def grid_listing(rows: Sequence[GridIntensity]) -> RenderableType:
    """Render a table for each source, with what it counts."""
    parts: list[RenderableType] = []
    for source in dict.fromkeys(row.source for row in rows):
        table = Table(box=None, pad_edge=False)
        table.add_column("code", no_wrap=True)
        table.add_column("name")
        table.add_column("g CO2e/kWh", justify="right", no_wrap=True)
        table.add_column("year", justify="right")
        for row in rows:
            if row.source == source:
                table.add_row(row.code, row.name, f"{row.g_per_kwh:.0f}", str(row.year))
        parts += [Text(f"{source.title} ({source.licence}): {source.scope}", "bold"), table]
        parts.append(Text())
    parts.append(Text("erg grid NAME   one with its source and other names", "dim"))
    return Group(*parts)


def grid_entry(row: GridIntensity) -> list[str]:
    """Describe one grid."""
    source = row.source
    lines = {
        "intensity": f"{significant(row.g_per_kwh)} g CO2e/kWh, location-based",
        "published as": f"{row.published:g} {source.unit}, average of {row.year}",
        "counts": source.scope,
        "also called": ", ".join(row.also) or "-",
        "source": f"{source.title} ({source.licence})",
        "address": source.url,
    }
    return [
        f"{row.name}  ({row.code})",
        *(f"  {title:<13} {line}" for title, line in lines.items()),
    ]


def grid_document(row: GridIntensity) -> dict[str, Any]:
    """Return one grid as JSON."""
    source = row.source
    return {
        "code": row.code,
        "name": row.name,
        "also": list(row.also),
        "g_per_kwh": row.g_per_kwh,
        "method": "location-based",
        "published": row.published,
        "published_unit": source.unit,
        "year": row.year,
        "source": source.title,
        "scope": source.scope,
        "licence": source.licence,
        "address": source.url,
    }


# Devices.


_UNREAD = "as commonly quoted, not checked"
# A type without a number: no such units, or no published rate.
_NO_UNITS, _UNKNOWN = "none", "-"


def hardware_listing(specs: Sequence[DeviceSpec], *, dtype: str | None = None) -> RenderableType:
    """Render a table for each vendor: all types, or one type with more columns."""
    parts: list[RenderableType] = [Text("dense peaks in TFLOP/s (int8: 1e12 op/s)", "dim")]
    columns = (dtype, "GB/s", "GiB", "W") if dtype else (*DTYPES, "GB/s")
    for vendor in dict.fromkeys(spec.vendor for spec in specs):
        table = Table(box=None, pad_edge=False, title=f"\n{vendor}", title_justify="left")
        table.add_column("device", no_wrap=True)
        for title in columns:
            table.add_column(title, justify="right", no_wrap=True)
        for spec in specs:
            if spec.vendor == vendor:
                peaks = _peak_texts(spec, digits=4)
                table.add_row(spec.key, *(peaks[title] for title in columns))
        parts.append(table)
    parts.append(Text("\nerg peaks NAME   one with its source, note and other names", "dim"))
    return Group(*parts)


def hardware_entry(spec: DeviceSpec, *, width: int) -> list[str]:
    """Describe one device in lines of `width` columns; addresses are not cut."""
    numbers = _peak_texts(spec)
    peaks = ", ".join(f"{dtype} {numbers[dtype]}" for dtype in spec.peak_flops_per_s)
    unread = _UNREAD if spec.origin == BUILT_IN else "-"
    lines = {
        "dense peak": f"{peaks} TFLOP/s (int8: 1e12 op/s)" if peaks else "none published",
        "lacks": ", ".join(spec.lacks) or "-",
        "bandwidth": f"{numbers['GB/s']} GB/s",
        "memory": _memory(spec, numbers["GiB"]),
        "TDP": f"{numbers['W']} W",
        "driver says": ", ".join(spec.driver_names) or "-",
        "also called": ", ".join((spec.key, *spec.aliases)),
        "source": spec.source,
        "checked": spec.checked or "-",
        "confirmed": spec.confirmed or unread,
        "note": spec.note or "-",
    }
    text_lines = [f"{spec.name}  ({spec.vendor})"]
    for title, text in lines.items():
        text_lines += textwrap.wrap(
            text,
            width,
            initial_indent=f"  {title:12} ",
            subsequent_indent=" " * 15,
            break_long_words=False,
            break_on_hyphens=False,
        )
    return text_lines


def _memory(spec: DeviceSpec, nominal: str) -> str:
    """Return nominal memory, and that reported by the driver."""
    there = spec.driver_memory_bytes
    if there is None:
        return f"{nominal} GiB, nominal"
    return (
        f"{nominal} GiB, nominal; its driver reports {there / 2**20:.0f} MiB:"
        f" {spec.driver_memory_source}"
    )


def hardware_document(spec: DeviceSpec) -> dict[str, Any]:
    """Return one device as JSON: every field, in base units."""
    return {**dataclasses.asdict(spec), "peak_flops_per_s": dict(spec.peak_flops_per_s)}


def hardware_page() -> str:
    """Return the page docs/hardware.md: hardware_page.md, then the built-in rows."""
    head = (
        resources.files("ergmeter.views.calculate").joinpath("hardware_page.md").read_text("utf-8")
    )
    rows = built_in_devices()
    table = [
        (
            f"`{spec.key}`",
            spec.name,
            *_peak_texts(spec).values(),
            spec.note or "-",
            f"{spec.source}; {spec.confirmed or _UNREAD}; {spec.checked}",
        )
        for spec in rows
    ]
    drivers = [(f"`{s.key}`", ", ".join(s.driver_names)) for s in rows if s.driver_names]
    reported = [_reported(spec) for spec in rows if spec.driver_memory_bytes]
    shared = [(name, ", ".join(keys)) for name, keys in ambiguous_names().items()]
    lines = [
        head,
        *_table(("device", "name", *DTYPES, "GB/s", "GiB", "W", "note", "source"), table),
        *("", "## Driver names", "", *_table(("device", "names"), drivers)),
        *("", "## Memory as drivers report it", ""),
        *_table(("device", "MiB", "of nominal", "source"), reported),
        *("", "## Names that need a choice", "", *_table(("name", "devices"), shared)),
    ]
    return "\n".join(lines) + "\n"


def _reported(spec: DeviceSpec) -> tuple[str, ...]:
    there, nominal = spec.driver_memory_bytes or 0, spec.memory_bytes
    share = f"{100 * there / nominal:.1f} %" if nominal else _UNKNOWN
    return (f"`{spec.key}`", f"{there / 2**20:.0f}", share, spec.driver_memory_source)


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    return [f"| {' | '.join(cells)} |" for cells in (titles, ["---"] * len(titles), *rows)]


def _peak_texts(spec: DeviceSpec, *, digits: int = 6) -> dict[str, str]:
    """Return the peaks of a row by column title, in the title's unit."""
    scales: dict[str, tuple[float | None, float]] = {
        **{dtype: (spec.peak_flops_per_s.get(dtype), 1e12) for dtype in DTYPES},
        "GB/s": (spec.bandwidth_bytes_per_s, 1e9),
        "GiB": (spec.memory_bytes, 2**30),
        "W": (spec.tdp_w, 1),
    }
    absent = dict.fromkeys(spec.lacks, _NO_UNITS)
    return {
        title: absent.get(title, _UNKNOWN) if value is None else significant(value / unit, digits)
        for title, (value, unit) in scales.items()
    }


_METRICS_HEAD = """\
# Metrics

This page is made from the catalogue by `erg metrics --markdown`; a test keeps it up to date.

A figure is over the run's *window*, unless its formula says otherwise. Its *basis* is the weakest
of its inputs': measured, derived, reported, assumed. [concepts.md](concepts.md) explains the words.
A figure that can't be had is absent, with its reason. Above its *bound* it is impossible.
"""


def metric_entry(metric: Metric) -> list[str]:
    """Describe one metric."""
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


def metrics_page() -> str:
    """Return the page docs/metrics.md."""
    metrics = catalogue().values()
    lines = [
        _METRICS_HEAD,
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
