"""Metrics of `erg analyze`: their keys, and their names in the JSON of nki-llama."""

from __future__ import annotations

from typing import NamedTuple

from ergmeter.metrics.catalog import every_metric, in_view

THROUGHPUT = "throughput.samples_per_s"
TFLOP = "analysis.tflop_per_sequence"
TFLOP_PER_S = "analysis.tflop_per_s"
NKI = "analysis.nki_frac"
SCORE = "analysis.score"


class JsonName(NamedTuple):
    """A metric's name and unit in the JSON, and the scale from our unit to it."""

    name: str
    unit: str
    scale: float


JSON_NAMES = {
    key: JsonName(at.label, at.group, 100.0 if at.group == "%" else 1.0)
    for key, at in in_view("analyze json").items()
}
UNITS = {key: every_metric()[key].unit for key in JSON_NAMES}
FORMULAS = {key: every_metric()[key].formula for key in JSON_NAMES}
TITLES = {key: at.label or every_metric()[key].title for key, at in in_view("analyze").items()}
COMPARED = tuple(in_view("analyze compare"))
