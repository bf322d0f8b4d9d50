"""What a chart is here: a Vega-Lite spec with the table that says the same in words.

The trap: a chart that misleads. No area stands on a cut axis, no curve runs between two readings,
an axis names its unit, and a chart that can't be drawn keeps its place with the reason. The same
spec makes the page and the file.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ergmeter.errors import NotMeasurable
from ergmeter.units import significant

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_SI = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))


@dataclass(frozen=True)
class Table:
    """A chart's content in words: for who can't see it, and for who wants the figures."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Chart:
    """One chart, or why there is none. `on_time` ones share their time axis.

    The legend is for the page, which wraps it; a file has the one that Vega draws. `axes` are the x
    encodings that the reader may choose from, by name, and `axis` is the one that suits the chart.
    """

    id: str
    title: str
    unit: str
    spec: dict[str, Any] | None
    table: Table | None = None
    note: str = ""
    reason: str = ""
    on_time: bool = False
    legend: tuple[tuple[str, str], ...] = ()  # a label, and its look: c1 to c8, and dash1 to dash5
    axes: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    axis: str = ""


@dataclass(frozen=True, slots=True)
class Scale:
    """How values are brought to the unit that the axis names."""

    factor: float
    unit: str

    def text(self, value: float) -> str:
        """A value with its unit; a share in percent."""
        if self.unit == "frac":
            return f"{significant(value * 100, 3)} %"
        return f"{significant(value / self.factor)} {self.unit}"


def scale_for(unit: str, most: float) -> Scale:
    """An SI prefix for the axis, by the highest value on it."""
    if unit in ("frac", "C", ""):
        return Scale(1.0, {"C": "°C"}.get(unit, unit))
    if unit == "s":
        return Scale(1e-3, "ms") if most < 1 else Scale(1.0, "s")
    factor, prefix = next((one for one in _SI if abs(most) >= one[0]), _SI[-1])
    return Scale(factor, prefix + unit)


def framed(description: str, height: int, layers: list[dict[str, Any]]) -> dict[str, Any]:
    """A spec of these layers, as wide as what holds it."""
    return {
        "description": description,
        "width": "container",
        "height": height,
        "autosize": {"type": "fit-x", "contains": "padding"},
        "layer": layers,
    }


def chart_of(
    id_: str, title: str, unit: str, draw: Callable[[], Chart], *, on_time: bool = False
) -> Chart:
    """A chart, or its place with the reason."""
    try:
        return draw()
    except NotMeasurable as error:
        return Chart(id_, title, unit, None, reason=str(error), on_time=on_time)
