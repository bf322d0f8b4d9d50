"""Metrics of `erg analyze`: their keys, the rows of the catalogue they need, and their JSON names.

Throughput, MFU and HFU are the catalogue's. The rows below are those it does not have: they need
compiled graphs or a baseline, which no run holds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.catalog import Alias, Metric
from ergmeter.metrics.definitions.compute import HFU, MFU
from ergmeter.metrics.definitions.compute import METRICS as COMPUTE
from ergmeter.units import NO_UNIT

if TYPE_CHECKING:
    from ergmeter.metrics.evidence.evidence import Evidence

THROUGHPUT = "throughput.samples_per_s"
TFLOP = "analysis.tflop_per_sequence"
TFLOP_PER_S = "analysis.tflop_per_s"
NKI = "analysis.nki_frac"
SCORE = "analysis.score"


def _not_of_a_run(_: Evidence) -> NoReturn:
    raise NotMeasurable("`erg analyze` computes it from the files of a Trainium job")


_MODEL, _GRAPHS, _PACE = "a model's configuration", "compiled graphs", "a throughput"
METRICS = (
    Metric(
        TFLOP, "work of a sequence", "TFLOP", "neither",
        "forward and backward FLOPs of one sequence, under the convention of the note",
        (_MODEL,), _not_of_a_run,
    ),
    Metric(
        TFLOP_PER_S, "work", "TFLOP/s", "higher", "TFLOP of a sequence x sequences/s",
        (_MODEL, _PACE), _not_of_a_run,
    ),
    Metric(
        NKI, "NKI share", "frac", "higher",
        "multiply-adds that NKI kernels state / all multiply-adds of the graphs",
        (_GRAPHS,), _not_of_a_run, upper_bound=1.0,
    ),
    Metric(
        SCORE, "score", NO_UNIT, "higher",
        "MFU / base x throughput / base x loss x convergence x (offset + NKI share)",
        (_MODEL, _PACE, _GRAPHS, "a baseline"), _not_of_a_run,
    ),
)  # fmt: skip
_ROWS = {row.key: row for row in (*COMPUTE, *METRICS)}
UNITS = {THROUGHPUT: "samples/s"} | {key: row.unit for key, row in _ROWS.items()}
FORMULAS = {key: row.formula for key, row in _ROWS.items()}
# In the order of the document, with their titles; and those that outputs are compared by.
TITLES = {
    key: "throughput" if key == THROUGHPUT else _ROWS[key].title
    for key in (MFU, HFU, THROUGHPUT, TFLOP_PER_S, TFLOP, NKI, SCORE)
}
COMPARED = (MFU, THROUGHPUT, NKI, SCORE)

# The keys of nki-llama's JSON, and ours beside them, in the order of `obtained`.
JSON_NAMES = {
    key: Alias(name, "nki-llama", "as in the JSON of calculate_training_metrics.py", unit, scale)
    for key, name, unit, scale in (
        (TFLOP, "tflop_per_sequence", "TFLOP", 1.0),
        (THROUGHPUT, "throughput_seq_per_sec", "sequences/s", 1.0),
        (TFLOP_PER_S, "tflops_per_second", "TFLOP/s", 1.0),
        (MFU, "mfu_percent", "%", 100.0),
        (HFU, "hfu_percent", "%", 100.0),
        (NKI, "overall_nki_ratio", "", 1.0),
        (SCORE, "training_score", "", 1.0),
    )
}
