"""A run as a section of a model card: figures with their basis, metadata, a paragraph to cite.

The trap: a figure that outlives its footnote. A card is copied without the run, so each figure has
its basis and window beside it, what was not measured is named with its reason, and the Hub's
`co2_eq_emissions` is written only where energy was measured and somebody stated the grid: the Hub
shows that number alone. It is of all steps, warm-up included: those were emitted too.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import yaml

from ergmeter.hardware.grid import grids
from ergmeter.metrics.catalog import catalogue
from ergmeter.metrics.explain.flops import peak_text
from ergmeter.metrics.live.alert_rules import noted_alerts
from ergmeter.records import Missing, Reading
from ergmeter.runlog.reader import FINISHED, IMPORTED
from ergmeter.units import printable, tallied
from ergmeter.version import __version__
from ergmeter.views.labels import label_lines
from ergmeter.views.run.card import interval, value

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ergmeter.records import Flops, Result, Summary
    from ergmeter.runlog.reader import Run
    from ergmeter.runlog.settings import Settings

CARBON = "carbon.co2e_g"
_FIGURES = (
    "throughput.tokens_per_s",
    "throughput.whole_run_tokens_per_s",
    "throughput.tokens_per_s_per_device",
    "throughput.output_tokens_per_s",
    "latency.ttft_median_s",
    "tokens.total",
    "time.step_s",
    "utilization.mfu_frac",
    "utilization.whole_run_mfu_frac",
    "utilization.hfu_frac",
    "utilization.mfu_of_achievable_frac",
    "energy.joules_per_token",
    "energy.whole_run_joules_per_token",
    "energy.joules_per_generated_token",
    "energy.mean_w",
    "memory.device_peak_bytes",
)
_OF_ALL = ("energy.run_j", CARBON)  # of all steps
_EXPECTED = ("throughput.tokens_per_s", "utilization.mfu_frac", "energy.joules_per_token", CARBON)
_CITED = ("throughput.tokens_per_s", "utilization.mfu_frac", "energy.joules_per_token")
_ADAPTERS = ("bridge-lora", "automodel-lora")  # counts of FLOPs that are for runs with adapters
_ALERTS = 5  # that are named
_MARKUP = re.compile(r"([\\`*_{}\[\]<>#|~&$])")


@dataclass(frozen=True)
class OwnerFacts:
    """What the run does not say and its owner may."""

    location: str | None = None
    training_type: str | None = None


@dataclass(frozen=True)
class Sources:
    """A run, its figures after the warm-up and of all its steps, and what was declared."""

    run: Run
    summary: Summary
    whole: Summary
    settings: Settings
    told: OwnerFacts
    flops: Sequence[Flops] = ()


def figure(of: Sources, key: str) -> Result:
    """One figure as the section gives it: energy and carbon are of all steps."""
    return (of.whole if key in _OF_ALL else of.summary).readings[key]


def page(of: Sources) -> str:
    """The section, with the metadata in front where there is any."""
    parts = [
        _front(of),
        f"## {'Training efficiency' if _trains(of) else 'Efficiency'}, energy and carbon\n",
        _paragraph(of),
        _table(of),
        _absent(of),
        _how(of),
        _labels(of),
    ]
    return "\n".join(part for part in parts if part)


# -- metadata -----------------------------------------------------------------------------------


def metadata(of: Sources) -> dict[str, Any]:
    """The Hub's metadata: `co2_eq_emissions` in grams, or nothing where it is not known."""
    carbon = of.whole.readings[CARBON]
    if isinstance(carbon, Missing) or not _trains(of):  # the Hub's field is of the training
        return {}
    found: dict[str, Any] = {
        "emissions": float(f"{carbon.value:.4g}"),
        "source": f"ergmeter {__version__}: {printable(carbon.note)}",
    }
    kind = of.told.training_type or _kind(of.flops or of.run.flops)
    if kind:
        found["training_type"] = kind
    place = of.told.location or _source_link(of.settings.grid_source)
    if place:
        found["geographical_location"] = place
    hardware = _hardware(of)
    if hardware:
        found["hardware_used"] = hardware
    return {"co2_eq_emissions": found}


def _front(of: Sources) -> str:
    found = metadata(of)
    if not found:
        return ""
    text = yaml.safe_dump(found, sort_keys=False, allow_unicode=True, width=10_000)
    return f"---\n{text}---\n"


def _kind(flops: Sequence[Flops]) -> str | None:
    """Adapters are trained on a model that there is already; of the rest nothing is known."""
    has_adapters = any(one.convention in _ADAPTERS for one in flops)
    return "fine-tuning" if has_adapters else None


def _source_link(source: str | None) -> str | None:
    """The place whose grid was declared by name."""
    return next((row.name for row in grids() if row.said == source), None)


def _hardware(of: Sources) -> str:
    """What the figures are of: the accelerators that were used, or else the processors."""
    devices = of.run.devices
    used = [devices[id_] for id_ in of.summary.devices if id_ in devices]
    names = [device.name for device in used if device.kind == "gpu"]
    if not names:
        nodes = [device.facts.get("cpu_model") for device in devices.values()]
        names = [str(name) for name in nodes if name]
    return tallied(map(printable, names))


# -- what is read -------------------------------------------------------------------------------


def _table(of: Sources) -> str:
    rows = ["| figure | value | from - to | basis | over |", "| --- | --- | --- | --- | --- |"]
    for key in _FIGURES:
        rows += _row(key, of.summary, "the window")
    for key in _OF_ALL:
        rows += _row(key, of.whole, "all steps")
    hardware = _hardware(of)
    rows += [f"| hardware | {_safe(hardware)} | | as its driver says | |"] if hardware else []
    if len(rows) == 2:
        return ""
    over = (
        f"The window: {_safe(_over(of.summary))}. All steps: {_safe(_over(of.whole))}."
        if any("all steps" in row for row in rows)
        else f"The window: {_safe(_over(of.summary))}."
    )
    return "\n".join([*rows, "", over, ""])


def _row(key: str, summary: Summary, over: str) -> list[str]:
    found = summary.readings.get(key)
    if not isinstance(found, Reading):
        return []
    cells = (catalogue()[key].title, value(found), interval(found), found.basis, over)
    return [f"| {' | '.join(_safe(cell) for cell in cells)} |"]


def _over(summary: Summary) -> str:
    window = summary.readings["time.window_s"]
    note = window.note if isinstance(window, Reading) else window.reason
    return note.partition("; ")[0]


def _absent(of: Sources) -> str:
    lines = []
    for key in _EXPECTED:
        found = figure(of, key)
        if isinstance(found, Missing):
            lines.append(f"- {catalogue()[key].title}: {_safe(found.reason)}")
    return "\n".join(["Not measured:\n", *lines, ""]) if lines else ""


def _how(of: Sources) -> str:
    """The notes of the figures that rest on most."""
    lines = []
    pairs = [(key, of.summary) for key in _CITED] + [(CARBON, of.whole)]
    for key, summary in pairs:
        found = summary.readings[key]
        if isinstance(found, Reading) and found.note:
            lines.append(f"- {catalogue()[key].title} ({found.basis}): {_safe(found.note)}")
    basis = (
        "Measured: read from a device or a clock. Derived: computed from what was measured."
        " Reported: somebody else's figure. Assumed: rests on a figure that was stated."
    )
    return "\n".join(["How it was obtained:\n", *lines, "", basis, ""])


def _labels(of: Sources) -> str:
    """What people said of the run, in a list below the figures."""
    said = [f"- {_safe(what)}: {_safe(words)}" for what, words in label_lines(of.run)]
    return "\n".join(["Said of the run:\n", *said, ""]) if said else ""


def _paragraph(of: Sources) -> str:
    """Sentences that can be cited as they are."""
    said = []
    for key in _CITED:
        found = of.summary.readings[key]
        if isinstance(found, Reading):
            span = f" ({interval(found)})" if interval(found) else ""
            peak = peak_text(found.note) if key == "utilization.mfu_frac" else ""
            of_peak = f" of {peak}" if peak else ""
            said.append(f"{_NAMED[key].format(value(found))}{span}{of_peak}, {found.basis}")
    hardware = f" on {_hardware(of)}" if _hardware(of) else ""
    how = "read from its log" if of.run.header.get("imported") else "measured"
    what = "training" if _trains(of) else "run"
    first = f"This {what} was {how} with ergmeter {__version__}{hardware}, {_over(of.summary)}"
    sentences = [f"{first}: {'; '.join(said)}." if said else f"{first}."]
    energy, carbon = (of.whole.readings[key] for key in _OF_ALL)
    if isinstance(energy, Reading):
        parts = "steps" if _trains(of) else "requests"
        drawn = f"All of its {parts} drew {value(energy)} ({energy.basis})"
        if isinstance(carbon, Reading):
            pue = f" and a PUE of {of.settings.pue:.4g}" if of.settings.pue is not None else ""
            drawn += f", which is {value(carbon)} of CO2e ({carbon.basis})"
            drawn += f" at {of.settings.grid_g_per_kwh:.4g} g/kWh{pue}"
        sentences.append(f"{drawn}; what else the machine drew is not in it.")
    return _safe(" ".join([*sentences, *_ending(of)])) + "\n"


def _ending(of: Sources) -> list[str]:
    """How the run ended where that is not as it should, who asked for it, and what alarmed it."""
    said = []
    if of.summary.status not in (FINISHED, IMPORTED):
        said.append(f"The run did not end as it should, or goes on: {of.summary.status}.")
    asked = dict.fromkeys(one.detail for one in of.run.marks if one.name == "stop_asked")
    if asked:
        said.append(f"It was asked to stop by an alert: {'; '.join(asked)}.")
    others = dict.fromkeys(one.text for one in noted_alerts(of.run, {}) if one.text not in asked)
    if others:
        more = "; and more" if len(others) > _ALERTS else ""
        said.append(f"Alerts: {'; '.join(list(others)[:_ALERTS])}{more}.")
    return said


def _trains(of: Sources) -> bool:
    return isinstance(of.summary.readings["steps.count"], Reading)


_NAMED = {
    "throughput.tokens_per_s": "{}",
    "utilization.mfu_frac": "an MFU of {}",
    "energy.joules_per_token": "{}",
}


def _safe(text: str) -> str:
    """A text in which nothing is Markdown or HTML, whatever a run or a device is called."""
    return _MARKUP.sub(r"\\\1", printable(text)).replace("\\&", "&amp;").replace("\\<", "&lt;")
