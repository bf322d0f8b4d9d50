"""What `erg calibrate` found, on the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ergmeter.errors import NotMeasurable
from ergmeter.hardware import candidates
from ergmeter.metrics.definitions.peaks import agreed
from ergmeter.units import duration, scaled, significant

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import RenderableType

    from ergmeter.hardware.calibration import CalibratedRate, Calibration

_NONE = "-"


def page(found: Calibration) -> RenderableType:
    """Rates with their spread and what they are of the peak, then the sensors, then the rest."""
    parts: list[RenderableType] = [
        Text.assemble((found.name, "bold"), (f"  [{found.device}]  {found.said}", "dim"))
    ]
    rows = [(f"matmul {dtype}", rate, _peak(found, dtype)) for dtype, rate in found.matmul.items()]
    rows += [(f"memory {name}", rate, _bandwidth(found)) for name, rate in found.bandwidth.items()]
    if rows:
        parts.append(Padding(_rates(rows), (0, 0, 0, 2)))
    parts += [Padding(Text(line), (0, 0, 0, 2)) for line in (*_idle(found), *_refresh(found))]
    parts += [Padding(Text(line, "dim"), (0, 0, 0, 2)) for line in _peak_source(found)]
    remarks = [*found.remarks, *(_drift(name, rate) for name, rate, _ in rows)]
    parts += [
        Padding(Text.assemble(("! ", "yellow"), remark), (0, 0, 0, 2))
        for remark in remarks
        if remark
    ]
    absent: dict[str, list[str]] = {}
    for what, why in found.absent.items():
        absent.setdefault(why, []).append(what)
    parts += [
        Padding(Text.assemble((f"no {', '.join(names)}: ", "yellow"), why), (0, 0, 0, 2))
        for why, names in absent.items()
    ]
    return Group(*parts)


def _of_peak(rate: CalibratedRate, peak: float | None) -> str:
    """The share of the datasheet's peak, marked if the whole interval is above it."""
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
    seen = any(rate.clock_hz is not None or rate.power_w is not None for _, rate, _ in rows)
    # Of a CPU no sensor was asked; of a GPU the sizes, which the JSON has, would not fit.
    left_out = ("with",) if seen else ("MHz", "W", "limited by")
    columns = {title: cell for title, cell in columns.items() if title not in left_out}
    table = Table(box=None, pad_edge=False)
    table.add_column("", no_wrap=True)
    for title in columns:
        is_text = title in ("limited by", "with")
        table.add_column(title, justify="left" if is_text else "right", no_wrap=not is_text)
    for name, rate, peak in rows:
        table.add_row(name, *(cell(rate, peak) for cell in columns.values()))
    return table


def _beside(rate: CalibratedRate, value: float) -> str:
    """A figure in the unit that the rate itself is shown in, without that unit."""
    for factor in (1e12, 1e9, 1e6):
        if rate.value >= factor:
            return significant(value / factor, 3)
    return significant(value, 3)


def _limits(rate: CalibratedRate) -> str:
    return ", ".join(f"{name} {100 * share:.0f} %" for name, share in rate.limited.items()) or _NONE


def _drift(name: str, rate: CalibratedRate) -> str:
    if rate.is_steady:
        return ""
    return (
        f"{name} was not steady: {100 * rate.drift_frac:+.1f} % from the first half of its window"
    )


def _peak(found: Calibration, dtype: str) -> float | None:
    """What the datasheet has, or what a CPU's parts give."""
    own = found.conditions.get("cpu_peak_flops_per_s")
    if own is not None:
        value = own.get(dtype)
        return float(value) if value else None
    try:
        return agreed(spec.peak_flops_per_s.get(dtype) for spec in candidates(found.name))
    except NotMeasurable:
        return None


def _bandwidth(found: Calibration) -> float | None:
    try:
        return agreed(spec.bandwidth_bytes_per_s for spec in candidates(found.name))
    except NotMeasurable:
        return None


def _peak_source(found: Calibration) -> list[str]:
    """What "of peak" is of."""
    own = found.conditions.get("cpu_peak_source")
    if own:
        return [f"peak: {own}"]
    try:
        specs = candidates(found.name)
    except NotMeasurable:
        return []
    return [f"peak: {specs[0].short_source}"]


def _idle(found: Calibration) -> list[str]:
    if found.idle is None:
        return []
    one = found.idle
    counter = "" if one.counter_w is None else f"; by its energy counter {one.counter_w:.1f} W"
    return [
        f"idle, with a context: {one.power_w:.1f} W ({one.low_w:.1f} to {one.high_w:.1f}){counter}"
    ]


def _refresh(found: Calibration) -> list[str]:
    return [
        f"{name} sensor: something new every {duration(one.period_s)}"
        f" ({duration(one.low_s)} to {duration(one.high_s)}; looked every"
        f" {duration(one.resolution_s)})"
        for name, one in found.refresh.items()
    ]
