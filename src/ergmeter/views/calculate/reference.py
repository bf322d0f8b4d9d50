"""Reference tables made from the catalogues: metrics, devices, grid intensities; as documents."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from importlib import resources
from typing import Any

from ergmeter.hardware.grid import GridIntensity
from ergmeter.hardware.table import BUILT_IN, DeviceSpec, ambiguous_names, built_in_devices
from ergmeter.metrics.catalog import Metric, catalogue
from ergmeter.records import DTYPES
from ergmeter.units import significant
from ergmeter.views.document import (
    Document,
    HeadlinePart,
    Paragraph,
    Part,
    Section,
    Table,
    TableColumn,
    columns_of,
)

# Grid intensities.


def grid_document(rows: Sequence[GridIntensity], *, is_one: bool) -> Document:
    """Return one grid with its source, or a table for each source with what it counts."""
    if is_one:
        (row,) = rows
        return _entry(row.name, f"({row.code})", _grid_fields(row), _grid_data(row))
    columns = (TableColumn("code", no_wrap=True), *columns_of("name", "g CO2e/kWh", "year"))
    parts: list[Part] = []
    for number, source in enumerate(dict.fromkeys(row.source for row in rows), 1):
        cells = (
            (row.code, row.name, f"{row.g_per_kwh:.0f}", str(row.year))
            for row in rows
            if row.source == source
        )
        title = f"{source.title} ({source.licence}): {source.scope}"
        parts.append(Section(f"source-{number}", title, (Table(columns, tuple(cells)),)))
    parts.append(Paragraph("erg grid NAME   one with its source and other names", style="dim"))
    return Document("Carbon intensity of electricity", tuple(parts), list(map(_grid_data, rows)))


def _entry(name: str, about: str, fields: dict[str, str], data: dict[str, Any]) -> Document:
    """Return one entry of a reference table as a list of its fields."""
    table = Table(("what", "value"), tuple(fields.items()), has_head=False)
    return Document(name, (HeadlinePart(name, about=about), table), data, about)


def _grid_fields(row: GridIntensity) -> dict[str, str]:
    source = row.source
    return {
        "intensity": f"{significant(row.g_per_kwh)} g CO2e/kWh, location-based",
        "published as": f"{row.published:g} {source.unit}, average of {row.year}",
        "counts": source.scope,
        "also called": ", ".join(row.also) or "-",
        "source": f"{source.title} ({source.licence})",
        "address": source.url,
    }


def _grid_data(row: GridIntensity) -> dict[str, Any]:
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


def peaks_document(specs: Sequence[DeviceSpec], *, dtype: str | None = None) -> Document:
    """Return a table for each vendor: all types, or one type with more columns."""
    titles = (dtype, "GB/s", "GiB", "W") if dtype else (*DTYPES, "GB/s")
    columns = columns_of("device", *titles, no_wrap=True)
    parts: list[Part] = [Paragraph("dense peaks in TFLOP/s (int8: 1e12 op/s)", style="dim")]
    for vendor in dict.fromkeys(spec.vendor for spec in specs):
        rows = [
            (spec.key, *map(_peak_texts(spec, digits=4).__getitem__, titles))
            for spec in specs
            if spec.vendor == vendor
        ]
        parts.append(Section(vendor, vendor, (Table(columns, tuple(rows)),)))
    parts.append(
        Paragraph("erg peaks NAME   one with its source, note and other names", style="dim")
    )
    return Document("Peaks of devices", tuple(parts), list(map(_device_data, specs)))


def device_document(spec: DeviceSpec) -> Document:
    """Return one device with its source, note and names."""
    numbers = _peak_texts(spec)
    peaks = ", ".join(f"{dtype} {numbers[dtype]}" for dtype in spec.peak_flops_per_s)
    unread = _UNREAD if spec.origin == BUILT_IN else "-"
    fields = {
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
    return _entry(spec.name, f"({spec.vendor})", fields, _device_data(spec))


def _memory(spec: DeviceSpec, nominal: str) -> str:
    """Return nominal memory, and that reported by the driver."""
    there = spec.driver_memory_bytes
    if there is None:
        return f"{nominal} GiB, nominal"
    return (
        f"{nominal} GiB, nominal; its driver reports {there / 2**20:.0f} MiB:"
        f" {spec.driver_memory_source}"
    )


def _device_data(spec: DeviceSpec) -> dict[str, Any]:
    """Return one device as JSON: every field, in base units."""
    return {**dataclasses.asdict(spec), "peak_flops_per_s": dict(spec.peak_flops_per_s)}


def hardware_page() -> str:
    """Return the page docs/hardware.md: hardware_page.md with the built-in rows."""
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
    return filled_page(
        "hardware_page.md",
        devices=markdown_table(
            ("device", "name", *DTYPES, "GB/s", "GiB", "W", "note", "source"), table
        ),
        drivers=markdown_table(("device", "names"), drivers),
        reported=markdown_table(("device", "MiB", "of nominal", "source"), reported),
        shared=markdown_table(("name", "devices"), shared),
    )


def _reported(spec: DeviceSpec) -> tuple[str, ...]:
    there, nominal = spec.driver_memory_bytes or 0, spec.memory_bytes
    share = f"{100 * there / nominal:.1f} %" if nominal else _UNKNOWN
    return (f"`{spec.key}`", f"{there / 2**20:.0f}", share, spec.driver_memory_source)


def filled_page(name: str, **tables: str) -> str:
    """Return a page of the documentation: the file of that name here, with its tables."""
    template = resources.files("ergmeter.views.calculate").joinpath(name).read_text("utf-8")
    return template.format(**tables)


def markdown_table(
    titles: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: int = 0
) -> str:
    """Return a Markdown table; the last `numbers` columns are right-aligned."""
    under = ["---"] * (len(titles) - numbers) + ["---:"] * numbers
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (titles, under, *rows))


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


_METRIC_FIELDS = ("key", "title", "unit", "direction", "upper_bound", "formula", "needs", "kinds")


def metric_entry(metric: Metric) -> Iterator[str]:
    """Describe one metric."""
    better = {"higher": "higher is better", "lower": "lower is better"}.get(metric.direction, "")
    yield from [
        f"{metric.key}  ({metric.title}, in {metric.unit}{'; ' + better if better else ''})",
        f"  formula: {metric.formula}",
        f"  needs:   {', '.join(metric.needs) or 'nothing'}",
    ]
    if metric.upper_bound is not None:
        yield f"  at most: {metric.upper_bound:g}; above it, {metric.above_bound}"
    if metric.per_device:
        yield f"  also for each device of kind {', '.join(metric.kinds)}"
    yield from (
        f"  {alias.system} calls it {alias.name} [{alias.unit}]: {alias.definition}"
        for alias in metric.aliases
    )


def metrics_document(metrics: Sequence[Metric]) -> Document:
    """Return metrics with unit, formula, needs and the names that other systems have for them."""
    rows = tuple(
        (
            *(m.key, m.title, m.unit, m.direction, _bound(m), m.formula, ", ".join(m.needs)),
            ", ".join(f"{alias.name} [{alias.unit}] ({alias.system})" for alias in m.aliases),
        )
        for m in metrics
    )
    data = [
        {
            **{name: getattr(m, name) for name in _METRIC_FIELDS},
            "aliases": [dataclasses.asdict(alias) for alias in m.aliases],
        }
        for m in metrics
    ]
    titles = ("key", "title", "unit", "better", "bound", "formula", "needs", "other names")
    return Document("Metrics", (Table(titles, rows),), data)


def _bound(metric: Metric) -> str:
    return "" if metric.upper_bound is None else f"{metric.upper_bound:g}"


def metrics_page() -> str:
    """Return the page docs/metrics.md."""
    metrics = catalogue().values()
    rows = (
        (f"`{m.key}`", m.unit, m.direction, _bound(m), m.formula, ", ".join(m.needs) or "-")
        for m in metrics
    )
    names = (
        (f"`{alias.name}`", alias.system, f"`{m.key}`", alias.unit, alias.definition)
        for m in metrics
        for alias in m.aliases
    )
    return filled_page(
        "metrics_page.md",
        metrics=markdown_table(("key", "unit", "better", "bound", "formula", "needs"), rows),
        names=markdown_table(("name", "system", "is", "unit", "definition"), names),
    )
