"""The chart type: a Vega-Lite specification, its data table, and the palette it is drawn in.

Areas start at 0, lines do not bridge missing readings, and each axis names its unit. A chart that
cannot be drawn stays on the page with the reason. Pages and image files use the same specification.

Specifications name colours as CSS variables (`var(--c1)`), so that a page can switch between light
and dark. Image files have no style sheet; there the colours are filled in. The palette is that of
Okabe and Ito (2008), which works for colour-blind readers, ordered by contrast. Yellow is left out
on white.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ergmeter.errors import NotMeasurable
from ergmeter.units import si_prefix, significant
from ergmeter.views.document import Table as Table  # the data table of a chart

# Colours.


# By CSS variable: on a light and on a dark ground.
_COLOURS = {
    "bg": ("#ffffff", "#14171b"),
    "card": ("#f6f7f9", "#1d2127"),
    "ink": ("#1b1f24", "#e8eaed"),
    "dim": ("#57606a", "#a9b1ba"),
    "grid": ("#dde1e6", "#343a42"),
    "shade": ("#e9ecef", "#242a31"),
    "mark": ("#57606a", "#a9b1ba"),
    "c1": ("#0072b2", "#56b4e9"),
    "c2": ("#d55e00", "#e69f00"),
    "c3": ("#009e73", "#00b386"),
    "c4": ("#cc79a7", "#cc79a7"),
    "c5": ("#e69f00", "#e8742a"),
    "c6": ("#56b4e9", "#f0e442"),
    "c7": ("#1b1f24", "#e8eaed"),
    "c8": ("#8c959f", "#848d97"),
    "link": ("#0a5a8c", "#7cc4f0"),
    "good": ("#00694c", "#3ecfa5"),
    "bad": ("#a33600", "#ff9b5e"),
}
LIGHT, DARK = ({name: pair[at] for name, pair in _COLOURS.items()} for at in (0, 1))
THEMES = {"light": LIGHT, "dark": DARK}


def css(colour: str) -> str:
    """Return a colour of the palette as a CSS variable."""
    return f"var(--{colour})"


SERIES = tuple(css(f"c{number}") for number in range(1, 9))
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"


def config() -> dict[str, Any]:
    """Return the Vega-Lite configuration of all charts."""
    text = {"labelColor": "var(--dim)", "titleColor": "var(--ink)", "labelFontSize": 11}
    return {
        "background": "transparent",
        "font": _FONT,
        "view": {"stroke": None},
        "axis": {
            **text,
            "titleFontSize": 12,
            "titleFontWeight": "normal",
            "gridColor": "var(--grid)",
            "domainColor": "var(--grid)",
            "tickColor": "var(--grid)",
            "labelLimit": 150,
            "labelSeparation": 8,  # overlapping labels: one is hidden
        },
        "legend": {**text, "title": None, "orient": "top", "labelLimit": 230, "symbolSize": 80},
        "range": {"category": list(SERIES)},
        "aria": True,
    }


def with_colours(spec: Any, theme: str) -> Any:  # noqa: ANN401  whatever JSON can hold
    """Return a specification with a theme's colours filled in, for a file."""
    if isinstance(spec, dict):
        return {key: with_colours(value, theme) for key, value in spec.items()}
    if isinstance(spec, list):
        return [with_colours(value, theme) for value in spec]
    if isinstance(spec, str) and spec.startswith("var(--"):
        return THEMES[theme][spec.removeprefix("var(--").removesuffix(")")]
    return spec


def theme_css() -> str:
    """Return the colours as CSS variables, by the reader's choice of a theme or the system's."""
    light, dark = (
        f"color-scheme:{theme};"
        + "".join(f"--{name}:{colour};" for name, colour in colours.items())
        for theme, colours in THEMES.items()
    )
    return (
        f":root{{{light}}}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}"
        f":root[data-theme=light]{{{light}}}:root[data-theme=dark]{{{dark}}}"
        f"@media print{{:root,:root[data-theme]{{{light}}}}}"
    )


@dataclass(frozen=True)
class Chart:
    """A chart, or the reason why it is not drawn. Charts with `on_time` share their time axis.

    The legend is for the page, which wraps it; files use Vega's own. `axes` are the x encodings
    that a reader may choose from, by name; `axis` is the default one.
    """

    id: str = ""
    title: str = ""
    unit: str = ""
    spec: dict[str, Any] | None = None
    table: Table | None = None
    note: str = ""
    reason: str = ""
    on_time: bool = False
    legend: tuple[tuple[str, str], ...] = ()  # a label, and its look: c1 to c8, and dash1 to dash5
    axes: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    axis: str = ""

    def as_json(self) -> dict[str, Any]:
        """Return the chart as JSON, its data table as head and rows."""
        table = self.table and {"head": self.table.head, "rows": self.table.rows}
        return {**asdict(self), "table": table}


@dataclass(frozen=True, slots=True)
class Scale:
    """The factor and unit of an axis."""

    factor: float
    unit: str

    def text(self, value: float) -> str:
        """Format a value with its unit; a share in percent."""
        if self.unit == "frac":
            return f"{significant(value * 100, 3)} %"
        return f"{significant(value / self.factor)} {self.unit}"


def scale_for(unit: str, most: float) -> Scale:
    """Return the SI prefix of an axis by its highest value."""
    if unit in ("frac", "C", ""):
        return Scale(1.0, {"C": "°C"}.get(unit, unit))
    if unit == "s":
        return Scale(1e-3, "ms") if most < 1 else Scale(1.0, "s")
    factor, prefix = si_prefix(abs(most))
    return Scale(factor, prefix + unit)


def rounded(value: float, scale: Scale) -> float | None:
    """Return a value on its axis with six digits; None for a NaN, which breaks a line."""
    return None if math.isnan(value) else float(f"{value / scale.factor:.6g}")


def chart_of(
    id_: str, title: str, unit: str, draw: Callable[[], Chart], *, on_time: bool = False
) -> Chart:
    """Return `draw()` with this id and title, or an empty chart with the reason."""
    try:
        drawing = draw()
    except NotMeasurable as error:
        drawing = Chart(unit=unit, reason=str(error))
    return replace(drawing, id=id_, title=title, on_time=on_time)
