"""A run as a section of a model card, and one metric as an SVG badge.

A card is copied without its run, so each value has its basis and window beside it, and each absent
value its reason. The Hub shows `co2_eq_emissions` alone: it is written only if energy was measured
and the grid was declared. It covers all steps, warm-up included.

A badge is drawn with any font, so each text has a `textLength` estimated from its letters. An
absent metric is grey, never 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from xml.sax.saxutils import escape, quoteattr

import yaml

from ergmeter.hardware.grid import grids
from ergmeter.metrics.catalog import catalogue, expected_in, in_view
from ergmeter.metrics.explain.flops import peak_text
from ergmeter.metrics.live.alert_rules import noted_alerts
from ergmeter.records import Flops, Missing, Reading, Result, Summary, interval_text, value_text
from ergmeter.runlog.reader import FINISHED, IMPORTED, Run
from ergmeter.runlog.settings import Settings
from ergmeter.units import printable, tallied
from ergmeter.version import __version__
from ergmeter.views.document import Document, Items, Paragraph, Part, Table
from ergmeter.views.reading_text import label_lines
from ergmeter.views.render.markdown import markdown
from ergmeter.views.run.long_card import window_text

# Badge.


_HEIGHT, _MARGIN, _BASE = 20, 7, 14
_LABEL_COLOUR = "#444"
# Contrast with white of 4.5 and more; distinguished by their words, not by colour alone.
_COLOURS = {"measured": "#2a6f3c", "derived": "#1f6187", "reported": "#7a5a00"}
_COLOURS |= {"assumed": "#7b3f8c", "impossible": "#b3261e", "": "#666"}
_LABELS = {"throughput.tokens_per_s": "throughput"}
_NARROW, _WIDE = "ijl.,:;|!'()[] ftr/-", "mwMW%@"
_MOST = 60  # characters of a text


def badge(key: str, result: Result) -> str:
    """Return the SVG badge of a metric: name, value and basis."""
    label = _short(_LABELS.get(key) or catalogue()[key].title)
    if isinstance(result, Reading):
        text = f"{value_text(result)}, {result.basis}"
        colour = _COLOURS["impossible" if result.impossible else result.basis]
        title = f"{label}: {text}{result.impossible and f' ({result.impossible})'}"
    else:
        text, colour = "not measured", _COLOURS[""]
        title = f"{label}: not measured ({result.reason})"
    return _badge_svg(label, _short(text), colour, printable(title))


def _badge_svg(label: str, figure_text: str, colour: str, title: str) -> str:
    left, right = (width(text) + 2 * _MARGIN for text in (label, figure_text))
    total = left + right
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{total}" height="{_HEIGHT}"'
        f' viewBox="0 0 {total} {_HEIGHT}" role="img"'
        f" aria-label={quoteattr(f'{label}: {figure_text}')}>\n"
        f"<title>{escape(title)}</title>\n"
        f'<rect width="{left}" height="{_HEIGHT}" fill="{_LABEL_COLOUR}"/>\n'
        f'<rect x="{left}" width="{right}" height="{_HEIGHT}" fill="{colour}"/>\n'
        '<g fill="#fff" font-family="Verdana,DejaVu Sans,Geneva,sans-serif" font-size="11">\n'
        f"{_text(label, _MARGIN)}\n{_text(figure_text, left + _MARGIN)}\n</g>\n</svg>\n"
    )


def _text(text: str, x: int) -> str:
    fitted = f'textLength="{width(text)}" lengthAdjust="spacingAndGlyphs"'
    return f'<text x="{x}" y="{_BASE}" {fitted}>{escape(text)}</text>'


def width(text: str) -> int:
    """Estimate the width of a text in 11 px Verdana."""
    each = (4.2 if letter in _NARROW else 10.2 if letter in _WIDE else 7.0 for letter in text)
    return max(1, round(sum(each)))


def _short(text: str) -> str:
    text = printable(text)  # XML does not allow control characters, escaped or not
    return text if len(text) <= _MOST else f"{text[: _MOST - 1]}…"


CARBON = "carbon.co2e_g"
_ALL_STEPS = "all steps"  # the group of metrics over all steps instead of the window
_ADAPTERS = ("bridge-lora", "automodel-lora")  # counts of FLOPs that are for runs with adapters
_ALERTS = 5  # named; the others are counted
_BASES = (
    "Measured: read from a device or a clock. Derived: computed from what was measured."
    " Reported: somebody else's figure, or computed with one, such as a datasheet's peak."
    " Assumed: rests on a figure that was stated."
)


@dataclass(frozen=True)
class Sources:
    """A run, its summaries after warm-up and over all steps, and declarations.

    The run contains neither location nor kind of training; its owner may declare them.
    """

    run: Run
    summary: Summary
    all_steps: Summary
    settings: Settings
    flops: Sequence[Flops] = ()
    location: str | None = None
    training_type: str | None = None


def figure(of: Sources, key: str) -> Result:
    """Return a metric; energy and carbon are over all steps."""
    at = in_view("model card").get(key)
    is_of_all_steps = at is not None and at.group == _ALL_STEPS
    return (of.all_steps if is_of_all_steps else of.summary).readings[key]


def page(of: Sources) -> str:
    """Return the section in Markdown, preceded by the metadata if there is any."""
    fields = metadata(of)
    front = yaml.safe_dump(fields, sort_keys=False, allow_unicode=True, width=10_000)
    return (f"---\n{front}---\n\n" if fields else "") + markdown(document(of))


def document(of: Sources) -> Document:
    """Return the section: a paragraph to cite, the metrics, what is absent, how it was obtained."""
    absent, notes = [], []
    for key in expected_in("model card"):
        title, result = catalogue()[key].title, figure(of, key)
        if isinstance(result, Missing):
            absent.append(f"{title}: {result.reason}")
        elif result.note:
            notes.append(f"{title} ({result.basis}): {result.note}")
    labels = [f"{name}: {text}" for name, text in label_lines(of.run)]
    return Document(
        f"{'Training efficiency' if _trains(of) else 'Efficiency'}, energy and carbon",
        (
            Paragraph(" ".join(_sentences(of))),
            *_metrics(of),
            *_list("Not measured:", absent),
            Paragraph("How it was obtained:"),
            Items(tuple(notes)),
            Paragraph(_BASES),
            *_list("Tags and notes:", labels),
        ),
    )


def _list(title: str, texts: Sequence[str]) -> list[Part]:
    return [Paragraph(title), Items(tuple(texts))] if texts else []


def metadata(of: Sources) -> dict[str, Any]:
    """Return the Hub's metadata: `co2_eq_emissions` in grams, empty if unknown."""
    carbon = of.all_steps.readings[CARBON]
    if isinstance(carbon, Missing) or not _trains(of):  # the Hub's field is of the training
        return {}
    emissions: dict[str, Any] = {
        "emissions": float(f"{carbon.value:.4g}"),
        "source": f"ergmeter {__version__}: {printable(carbon.note)}",
    }
    flops = of.flops or of.run.flops
    adapted = "fine-tuning" if any(flop.convention in _ADAPTERS for flop in flops) else None
    grid = next((row.name for row in grids() if row.text == of.settings.grid_source), None)
    optional = {
        "training_type": of.training_type or adapted,
        "geographical_location": of.location or grid,
        "hardware_used": _hardware(of),
    }
    emissions |= {name: text for name, text in optional.items() if text}
    return {"co2_eq_emissions": emissions}


def _hardware(of: Sources) -> str:
    """Return the accelerators used, else the processors."""
    devices = of.run.devices
    used = [devices[id_] for id_ in of.summary.devices if id_ in devices]
    names = [device.name for device in used if device.kind == "gpu"]
    if not names:
        nodes = [device.facts.get("cpu_model") for device in devices.values()]
        names = [str(name) for name in nodes if name]
    return tallied(map(printable, names))


def _metrics(of: Sources) -> list[Part]:
    """Return the table of metrics, and what its last column means."""
    rows: list[tuple[str, ...]] = [
        (catalogue()[key].title, value_text(reading), interval_text(reading), reading.basis, over)
        for key, at in in_view("model card").items()
        if isinstance(reading := figure(of, key), Reading)
        for over in (at.group or "the window",)
    ]
    has_all_steps = any(over == _ALL_STEPS for *_, over in rows)
    hardware = _hardware(of)
    if hardware:
        rows.append(("hardware", hardware, "", "as the system names it", ""))
    if not rows:
        return []
    windows = f"The window: {_over(of.summary)}."
    if has_all_steps:
        windows += f" All steps: {_over(of.all_steps)}."
    titles = ("figure", "value", "from - to", "basis", "over")
    return [Table(titles, tuple(rows)), Paragraph(windows)]


def _over(summary: Summary) -> str:
    return window_text(summary).partition("; ")[0]


def _sentences(of: Sources) -> Iterator[str]:
    """Return citable sentences."""
    clauses = []
    for key in expected_in("model card"):
        reading = of.summary.readings[key]
        if isinstance(reading, Reading) and key != CARBON:
            span = f" ({interval_text(reading)})" if interval_text(reading) else ""
            is_mfu = key == "utilization.mfu_frac"
            peak = peak_text(reading.note) if is_mfu else ""
            figure_text = f"an MFU of {value_text(reading)}" if is_mfu else value_text(reading)
            clauses.append(f"{figure_text}{span}{peak and f' of {peak}'}, {reading.basis}")
    hardware = f" on {_hardware(of)}" if _hardware(of) else ""
    how = "read from its log" if of.run.header.get("imported") else "measured"
    what = "training" if _trains(of) else "run"
    first = f"This {what} was {how} with ergmeter {__version__}{hardware}, {_over(of.summary)}"
    yield f"{first}: {'; '.join(clauses)}." if clauses else f"{first}."
    energy, carbon = (of.all_steps.readings[key] for key in ("energy.run_j", CARBON))
    if isinstance(energy, Reading):
        parts = "steps" if _trains(of) else "requests"
        text = f"All of its {parts} drew {value_text(energy)} ({energy.basis})"
        if isinstance(carbon, Reading):
            pue = f" and a PUE of {of.settings.pue:.4g}" if of.settings.pue is not None else ""
            text += f", which is {value_text(carbon)} of CO2e ({carbon.basis})"
            text += f" at {of.settings.grid_g_per_kwh:.4g} g/kWh{pue}"
        yield f"{text}; other energy of the machine is not included."
    yield from _ending(of)


def _ending(of: Sources) -> Iterator[str]:
    """Yield how the run ended if not normally, the alerts that stopped it, and other alerts."""
    if of.summary.status not in (FINISHED, IMPORTED):
        yield f"The run did not end normally, or is still running: {of.summary.status}."
    asked = dict.fromkeys(mark.detail for mark in of.run.marks if mark.name == "stop_asked")
    if asked:
        yield f"It was asked to stop by an alert: {'; '.join(asked)}."
    texts = (alert.text for alert in noted_alerts(of.run, {}))
    others = dict.fromkeys(text for text in texts if text not in asked)
    if others:
        more = "; and more" if len(others) > _ALERTS else ""
        yield f"Alerts: {'; '.join(list(others)[:_ALERTS])}{more}."


def _trains(of: Sources) -> bool:
    return isinstance(of.summary.readings["steps.count"], Reading)
