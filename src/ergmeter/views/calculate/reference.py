"""Reference tables made from the catalogues: metrics, devices, grid intensities."""

from __future__ import annotations

import dataclasses
import textwrap
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ergmeter.hardware import BUILT_IN, ambiguous_names, built_in_devices
from ergmeter.metrics.catalog import catalogue
from ergmeter.records import DTYPES
from ergmeter.units import significant

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ergmeter.hardware import DeviceSpec
    from ergmeter.hardware.grid import GridIntensity
    from ergmeter.metrics.catalog import Metric

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

_HEAD = """\
# Hardware

This page is made from the table by `erg peaks --markdown`; a test keeps it up to date.

MFU divides by a device's peak, so a wrong peak is a wrong MFU. `erg peaks` lists the peaks that
ergmeter knows, `erg peaks NAME` shows one with its source.

## How a name finds its row

The name that the driver reports is compared whole, without regard to case and runs of spaces and
to nothing else: first with a user's own rows, then with the driver names of the table, its
aliases and its keys. There is no search for parts of a name: "NVIDIA L40S" is not an "NVIDIA L4",
and a laptop's "NVIDIA GeForce RTX 4090 Laptop GPU" is not the card. No two rows share a name.

- A name that several devices share stands for what all of them agree on, and the note then names
  them: every A100 has 312 TFLOP/s in bf16, so `--device a100` has an MFU, and no bandwidth, for
  that of 40 GB is slower. Where they differ it is answered with their keys ("h100": h100-sxm,
  h100-pcie, h100-nvl). Some drivers do that too: "AMD Instinct MI250X / MI250", the two RTX 3080,
  Apple's chips with more or fewer GPU cores. Pass the key that is yours as the device.
- An unknown name has no peak, and MFU is absent: `erg mfu` says "unknown peak: pass --peak". Up to
  five rows with that text in a name are asked about, nearest first ("4090": rtx-4090 or
  rtx-4090-d); none of their peaks is used.
- A run is held against the device that its driver names. `erg record --device`, `erg report
  --device` and `Meter(device=...)` name another, for its peak and its bandwidth, where none was
  seen (a remote machine, an imported log) or the driver's name is shared; the note says so.

## What the figures are

- **Dense.** Datasheets like to print the rate with 2:4 sparsity, which is twice that; training
  does not get it. Where the datasheet has only that one, the row says that it was halved.
- **FP32 accumulate.** Matrix products of 16-bit numbers are summed in 32 bits, which is how
  training runs them. GeForce cards do that at half of the rate they are advertised with;
  workstation and data-centre cards at the full rate. `fp32` is without tensor cores on NVIDIA,
  and the matrix rate on AMD.
- **Of one device, as the driver counts devices.** A GCD of an MI250X, a core of a TPU v2, v3 or
  7x, a chip of the other TPUs. Trainium and Inferentia have a row for the core and one for the
  chip.
- **Nominal.** A card capped below its TDP can't reach its peak; its MFU is still against it.
- **Memory twice.** Nominal in the table; below it, what the driver reports where somebody's
  nvidia-smi was found. ECC keeps its check bits in GDDR itself, which takes 6.25 % of it (an L4 of
  24 GiB has 22.5), and costs nothing in HBM. `erg estimate` plans with the second where there is
  one.
- **"none" or "-".** "none": the device has no units for the type, and asking for it says so ("has
  no fp8 units"). "-": nobody publishes the rate, or what is published does not agree: unknown.

A row ends with its source, what its peak was held against, and the day of that:

- *datasheet*: the maker's own document was read, in part or in a copy.
- *second document agrees*: one that is not the source has the same figures; which ones, and which
  document, stands with it. The other types follow by the ratios that the source gives.
- *as commonly quoted, not checked*: nothing was found to hold it against. Read its source before
  much rests on it.

## CPUs

A CPU has no row. Its fp32 peak is derived as cores x lanes x FMA units x 2 x clock, from
/proc/cpuinfo, with the matrix unit (AMX) for bf16 and int8 where there is one. It is marked as
assumed and says which clock it took; where width or clock is unknown it is absent.

## Your own rows

Put them in `~/.config/ergmeter/hardware.toml`, or name a file in `ERGMETER_HARDWARE`. They win over
a built-in row of the same name, and say so.

```toml
[my-card]
name = "My card"                          # needed
driver_names = ["ACME Accelerator 9000"]  # as the driver reports it
aliases = ["acme"]
peak_tflop_per_s = { bf16 = 400, fp8 = 800 }  # needed; dense
bandwidth_gb_per_s = 2000                 # decimal GB
lacks = ["fp4"]                           # no units for these; the other types are unknown
memory_gib = 64                           # nominal
driver_memory_mib = 61440                 # as the driver reports it
driver_memory_source = "acme-smi, with ECC on"
tdp_w = 350
source = "ACME 9000 datasheet, revision 3"  # needed
checked = "2026-11-15"
```

For one run, pass the peak itself with its source: `--peak 400T`, `--peak "400 TFLOP/s"` and
`--peak 400e12` are the same. It is the peak of one device.

## The table

Peaks in TFLOP/s (int8: 1e12 operations per second), bandwidth in GB/s, memory in GiB, TDP in W.
"""


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
    """Return the page docs/hardware.md, of the built-in rows."""
    titles = ("device", "name", *DTYPES, "GB/s", "GiB", "W", "note", "source")
    lines = [_HEAD, _markdown(titles), _markdown(["---"] * len(titles))]
    for spec in built_in_devices():
        source = f"{spec.source}; {spec.confirmed or _UNREAD}; {spec.checked}"
        cells = (f"`{spec.key}`", spec.name, *_peak_texts(spec).values(), spec.note or "-", source)
        lines.append(_markdown(cells))
    lines += ["", "## Driver names", "", _markdown(("device", "names")), _markdown(("---", "---"))]
    for spec in built_in_devices():
        if spec.driver_names:
            lines.append(_markdown((f"`{spec.key}`", ", ".join(spec.driver_names))))
    lines += ["", "## Memory as drivers report it", ""]
    lines += [_markdown(("device", "MiB", "of nominal", "source")), _markdown(["---"] * 4)]
    lines += [_markdown(_reported(spec)) for spec in built_in_devices() if spec.driver_memory_bytes]
    lines += ["", "## Names that need a choice", "", _markdown(("name", "devices"))]
    lines.append(_markdown(("---", "---")))
    lines += [_markdown((name, ", ".join(keys))) for name, keys in ambiguous_names().items()]
    return "\n".join(lines) + "\n"


def _reported(spec: DeviceSpec) -> tuple[str, ...]:
    there, nominal = spec.driver_memory_bytes or 0, spec.memory_bytes
    share = f"{100 * there / nominal:.1f} %" if nominal else _UNKNOWN
    return (f"`{spec.key}`", f"{there / 2**20:.0f}", share, spec.driver_memory_source)


def _markdown(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


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
