"""One figure as an SVG badge, for a README.

The trap: text that runs out of its box. A badge is drawn with whatever font there is, so each text
is given the width that its box was made for (`textLength`), roughly that of its letters.
A figure that is absent is shown as such, in grey, and never as 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from xml.sax.saxutils import escape, quoteattr

from ergmeter.metrics.catalog import catalogue
from ergmeter.records import Reading
from ergmeter.units import printable
from ergmeter.views.run.card import value

if TYPE_CHECKING:
    from ergmeter.records import Result

_HEIGHT, _MARGIN, _BASE = 20, 7, 14
_LABEL_COLOUR = "#444"
# Contrast with white of 4.5 and more; told apart by their words, not by colour alone.
_COLOURS = {"measured": "#2a6f3c", "derived": "#1f6187", "reported": "#7a5a00"}
_COLOURS |= {"assumed": "#7b3f8c", "impossible": "#b3261e", "": "#666"}
_LABELS = {
    "energy.joules_per_token": "energy per token",
    "utilization.mfu_frac": "MFU",
    "throughput.tokens_per_s": "throughput",
}
_NARROW, _WIDE = "ijl.,:;|!'()[] ftr/-", "mwMW%@"
_MOST = 60  # characters of a text


def badge(key: str, found: Result) -> str:
    """The badge of a metric: its name, its value, and how that was obtained."""
    label = _short(_LABELS.get(key) or catalogue()[key].title)
    if isinstance(found, Reading):
        said = f"{value(found)}, {found.basis}"
        colour = _COLOURS["impossible" if found.impossible else found.basis]
        title = f"{label}: {said}{found.impossible and f' ({found.impossible})'}"
    else:
        said, colour = "not measured", _COLOURS[""]
        title = f"{label}: not measured ({found.reason})"
    return _badge_svg(label, _short(said), colour, printable(title))


def _badge_svg(label: str, said: str, colour: str, title: str) -> str:
    left, right = (width(text) + 2 * _MARGIN for text in (label, said))
    whole = left + right
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{whole}" height="{_HEIGHT}"'
        f' viewBox="0 0 {whole} {_HEIGHT}" role="img" aria-label={quoteattr(f"{label}: {said}")}>\n'
        f"<title>{escape(title)}</title>\n"
        f'<rect width="{left}" height="{_HEIGHT}" fill="{_LABEL_COLOUR}"/>\n'
        f'<rect x="{left}" width="{right}" height="{_HEIGHT}" fill="{colour}"/>\n'
        '<g fill="#fff" font-family="Verdana,DejaVu Sans,Geneva,sans-serif" font-size="11">\n'
        f"{_text(label, _MARGIN)}\n{_text(said, left + _MARGIN)}\n</g>\n</svg>\n"
    )


def _text(text: str, x: int) -> str:
    fitted = f'textLength="{width(text)}" lengthAdjust="spacingAndGlyphs"'
    return f'<text x="{x}" y="{_BASE}" {fitted}>{escape(text)}</text>'


def width(text: str) -> int:
    """How wide a text is in Verdana of 11 pixels, about."""
    each = (4.2 if one in _NARROW else 10.2 if one in _WIDE else 7.0 for one in text)
    return max(1, round(sum(each)))


def _short(text: str) -> str:
    text = printable(text)  # XML has no place for control characters, escaped or not
    return text if len(text) <= _MOST else f"{text[: _MOST - 1]}…"
