"""The documents of `erg doctor` and `erg calibrate`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ergmeter import doctor
from ergmeter.doctor import ProbeFinding
from ergmeter.hardware.calibration import CalibratedRate, Calibration
from ergmeter.hardware.table import DeviceSpec, candidates
from ergmeter.metrics.definitions.peaks import agreed
from ergmeter.records import or_none
from ergmeter.units import duration, grouped, scaled, si_prefix, significant
from ergmeter.views.document import (
    Document,
    HeadlinePart,
    Note,
    Paragraph,
    Part,
    Table,
    TableColumn,
)


def doctor_document(findings: list[ProbeFinding]) -> Document:
    """Return working probes first, then the others with their reason."""
    sources = [
        f"{device.name} ({finding.probe})"
        for finding in findings
        for device in finding.devices
        if {"energy", "power"} & set(finding.reads.get(device.id, []))
    ]
    energy = HeadlinePart("energy can be measured", ", ".join(sources), state="good")
    if not sources:
        energy = HeadlinePart("energy can't be measured here", _NO_ENERGY, state="unsure")
    return Document(
        "What can be measured on this machine",
        (*map(_probe, findings), energy),
        doctor.document(findings),
    )


_NO_ENERGY = (
    "no GPU or CPU sensor answers. Figures that need it are absent, with this reason; ergmeter"
    " does not estimate them."
)


def _probe(finding: ProbeFinding) -> Note:
    lines = [finding.reason] if finding.reason else []
    for device in finding.devices:
        reads = ", ".join(finding.reads.get(device.id, [])) or "nothing"
        lines.append(f"{device.name}  [{device.id}]  reads {reads}")
    lines += [f"! {warning}" for warning in finding.warnings]
    return Note("ok" if finding.works else "absent", finding.probe, "\n".join(lines))


_NONE = "-"


def calibration_document(
    calibrations: Sequence[Calibration], ends: Sequence[str] | None = None
) -> Document:
    """Return each device's rates with spread and share of peak, its sensors, and what is absent.

    `ends` are the sentences about how each calibration ended.
    """
    texts = ends or [""] * len(calibrations)
    parts = (
        part
        for calibration, text in zip(calibrations, texts, strict=True)
        for part in _calibration(calibration, text)
    )
    return Document(
        f"What {', '.join(calibration.name for calibration in calibrations)} can reach",
        tuple(parts),
        [calibration.as_json() for calibration in calibrations],
    )


def _calibration(calibration: Calibration, end: str) -> Iterator[Part]:
    yield HeadlinePart(calibration.name, about=f"[{calibration.device}]  {calibration.text}")
    rows = [
        (f"matmul {dtype}", rate, _peak(calibration, dtype))
        for dtype, rate in calibration.matmul.items()
    ]
    bandwidth = _agreed(calibration, lambda spec: spec.bandwidth_bytes_per_s)
    rows += [(f"memory {name}", rate, bandwidth) for name, rate in calibration.bandwidth.items()]
    if rows:
        yield _rates(rows)
    yield from map(Paragraph, (*_idle(calibration), *_refresh(calibration)))
    yield from (Paragraph(line, style="dim") for line in _peak_source(calibration))
    remarks = [*calibration.remarks, *(_drift(name, rate) for name, rate, _ in rows)]
    yield from (Note("minor", remark) for remark in remarks if remark)
    absent = grouped((why, what) for what, why in calibration.absent.items())
    yield from (Note("absent", f"no {', '.join(names)}: {why}") for why, names in absent.items())
    if end:
        yield Paragraph(end)


def _of_peak(rate: CalibratedRate, peak: float | None) -> str:
    """Return the share of the datasheet peak, marked if the interval is above it."""
    if not peak:
        return _NONE
    mark = " (impossible)" if rate.low > peak else ""
    return f"{100 * rate.value / peak:.1f} %{mark}"


def _rates(rows: list[tuple[str, CalibratedRate, float | None]]) -> Table:
    columns: dict[str, Callable[[CalibratedRate, float | None], str]] = {
        "held": lambda rate, _: scaled(rate.value, rate.unit),
        "90 %": lambda rate, _: f"{_beside(rate, rate.low)}-{_beside(rate, rate.high)}",
        "of peak": _of_peak,
        "burst": lambda rate, _: _beside(rate, rate.burst),
        "MHz": lambda rate, _: _NONE if rate.clock_hz is None else f"{rate.clock_hz / 1e6:.0f}",
        "W": lambda rate, _: _NONE if rate.power_w is None else f"{rate.power_w:.0f}",
        "limited by": lambda rate, _: _limits(rate),
        "with": lambda rate, _: rate.of,
    }
    has_gauges = any(rate.clock_hz is not None or rate.power_w is not None for _, rate, _ in rows)
    # CPUs have no sensor columns. For GPUs the sizes would not fit; the JSON has them.
    left_out = ("with",) if has_gauges else ("MHz", "W", "limited by")
    columns = {title: cell for title, cell in columns.items() if title not in left_out}
    titles = (
        TableColumn("rate", no_wrap=True),
        *(TableColumn(t, "text" if t in ("limited by", "with") else "number") for t in columns),
    )
    cells = ((name, *(cell(rate, peak) for cell in columns.values())) for name, rate, peak in rows)
    return Table(titles, tuple(cells))


def _beside(rate: CalibratedRate, value: float) -> str:
    """Format a value in the unit of the rate beside it, without the unit."""
    return significant(value / si_prefix(rate.value)[0], 3)


def _limits(rate: CalibratedRate) -> str:
    return ", ".join(f"{name} {100 * share:.0f} %" for name, share in rate.limited.items()) or _NONE


def _drift(name: str, rate: CalibratedRate) -> str:
    if rate.is_steady:
        return ""
    return (
        f"{name} was not steady: {100 * rate.drift_frac:+.1f} % from the first half of its window"
    )


def _peak(calibration: Calibration, dtype: str) -> float | None:
    """Return the datasheet peak, or the one computed for a CPU."""
    own = calibration.conditions.get("cpu_peak_flops_per_s")
    if own is not None:
        value = own.get(dtype)
        return float(value) if value else None
    return _agreed(calibration, lambda spec: spec.peak_flops_per_s.get(dtype))


def _agreed(calibration: Calibration, value: Callable[[DeviceSpec], float | None]) -> float | None:
    """Return the datasheet value, None if the device is unknown or its candidates differ."""
    specs = or_none(candidates, calibration.name)
    return None if specs is None else agreed(map(value, specs))


def _peak_source(calibration: Calibration) -> list[str]:
    """Return the source of the peak."""
    own = calibration.conditions.get("cpu_peak_source")
    if own:
        return [f"peak: {own}"]
    specs = or_none(candidates, calibration.name)
    return [] if specs is None else [f"peak: {specs[0].short_source}"]


def _idle(calibration: Calibration) -> list[str]:
    if calibration.idle is None:
        return []
    idle = calibration.idle
    counter = "" if idle.counter_w is None else f"; by its energy counter {idle.counter_w:.1f} W"
    return [
        f"idle, with a context: {idle.power_w:.1f} W"
        f" ({idle.low_w:.1f} to {idle.high_w:.1f}){counter}"
    ]


def _refresh(calibration: Calibration) -> list[str]:
    return [
        f"{name} sensor: a new value every {duration(refresh.period_s)}"
        f" ({duration(refresh.low_s)} to {duration(refresh.high_s)}; read every"
        f" {duration(refresh.resolution_s)})"
        for name, refresh in calibration.refresh.items()
    ]
