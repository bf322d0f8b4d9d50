"""The colours of charts and page, in light and in dark.

The trap: a chart that is drawn for white paper and shown on black. A chart says `var(--c1)` and the
page decides what that is, by a style sheet; for a file, which has none, the colour is put in. The
colours are those of Okabe and Ito (2008), which people who see colours differently can tell apart,
in the order of their contrast to the ground. Yellow is left out on white, where it can't be seen.
"""

from __future__ import annotations

from typing import Any

LIGHT = {
    "bg": "#ffffff",
    "card": "#f6f7f9",
    "ink": "#1b1f24",
    "dim": "#57606a",
    "grid": "#dde1e6",
    "shade": "#e9ecef",
    "mark": "#57606a",
    "c1": "#0072b2",
    "c2": "#d55e00",
    "c3": "#009e73",
    "c4": "#cc79a7",
    "c5": "#e69f00",
    "c6": "#56b4e9",
    "c7": "#1b1f24",
    "c8": "#8c959f",
}
DARK = {
    "bg": "#14171b",
    "card": "#1d2127",
    "ink": "#e8eaed",
    "dim": "#a9b1ba",
    "grid": "#343a42",
    "shade": "#242a31",
    "mark": "#a9b1ba",
    "c1": "#56b4e9",
    "c2": "#e69f00",
    "c3": "#00b386",
    "c4": "#cc79a7",
    "c5": "#e8742a",
    "c6": "#f0e442",
    "c7": "#e8eaed",
    "c8": "#848d97",
}
THEMES = {"light": LIGHT, "dark": DARK}
SERIES = tuple(f"var(--c{number})" for number in range(1, 9))
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"


def config() -> dict[str, Any]:
    """What every chart looks like."""
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
            "labelSeparation": 8,  # of two that touch, one number is read
        },
        "legend": {**text, "title": None, "orient": "top", "labelLimit": 230, "symbolSize": 80},
        "range": {"category": list(SERIES)},
        "aria": True,
    }


def painted(spec: Any, theme: str) -> Any:  # noqa: ANN401  whatever JSON can hold
    """The same with the colours of a theme in it, for a file that has no style sheet."""
    if isinstance(spec, dict):
        return {key: painted(value, theme) for key, value in spec.items()}
    if isinstance(spec, list):
        return [painted(value, theme) for value in spec]
    if isinstance(spec, str) and spec.startswith("var(--"):
        return THEMES[theme][spec.removeprefix("var(--").removesuffix(")")]
    return spec


def style_variables(theme: str) -> str:
    """The colours as declarations of a style sheet."""
    return "".join(f"--{name}:{colour};" for name, colour in THEMES[theme].items())
