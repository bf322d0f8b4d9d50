"""How each headline figure was obtained: its basis, its interval, and over what.

Only the pace of a log has an interval, that of its rows; what is made of it by multiplication has
the same one, scaled. The score has the pace in it twice, in MFU and as throughput, so its edges are
squared. A figure that was given on the command line has none: nobody said how sure.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ergmeter.records import Reading, weakest

if TYPE_CHECKING:
    from ergmeter.neuron.parts import Parts

_TERA = 1e12


def origins(parts: Parts) -> dict[str, dict[str, Any]]:
    """By the document's key; what is not known has no entry, and its reason is in `missing`."""
    pace, found = parts.pace, parts.figures
    origin: dict[str, dict[str, Any]] = {
        "tflop_per_sequence": as_origin(
            Reading(found.model_flops, "", "derived", note=f"{found.convention}, from config.json")
        )
    }
    if pace.seq_per_s is not None:
        rate = Reading(pace.seq_per_s, "", pace.basis, pace.low, pace.high, pace.said)
        how = pace.how or "as given by --throughput"
        origin["throughput_seq_per_sec"] = as_origin(rate) | {"formula": how}
        basis = weakest("derived", pace.basis)
        work = Reading(pace.seq_per_s, "", basis, pace.low, pace.high, found.convention)
        origin["tflops_per_second"] = as_origin(work, factor=found.model_flops / _TERA)
    for key, share in (("mfu_percent", found.mfu), ("hfu_percent", found.hfu)):
        if isinstance(share, Reading):
            origin[key] = as_origin(share, factor=100.0)
    summary = parts.summary
    if summary is not None and summary.overall_ratio is not None:
        note = f"counted in {summary.counted} compiled graphs, {summary.weighting}"
        share = Reading(summary.overall_ratio, "", "derived", note=note)
        origin["overall_nki_ratio"] = as_origin(share)
    score = _score(parts)
    return origin if score is None else origin | {"training_score": as_origin(score)}


def _score(parts: Parts) -> Reading | None:
    """The score, where all its factors are known."""
    value = None if parts.score is None else parts.score.value
    pace, mfu, summary = parts.pace, parts.figures.mfu, parts.summary
    if value is None or summary is None or pace.seq_per_s is None or not isinstance(mfu, Reading):
        return None
    basis, said = weakest(mfu.basis, pace.basis), "a product of five factors, given or found"
    is_whole = not (summary.is_lower_bound or summary.is_uncertain)
    if not is_whole or pace.low is None or pace.high is None:
        return Reading(value, "", basis, note=said)
    low, high = (value * (end / pace.seq_per_s) ** 2 for end in (pace.low, pace.high))
    note = f"{said}; its interval is that of the pace, squared"
    return Reading(value, "", basis, low, high, note)


def as_origin(reading: Reading, *, factor: float = 1.0) -> dict[str, Any]:
    """A reading without its value, its edges in another unit."""
    low, high = (None if end is None else end * factor for end in (reading.low, reading.high))
    return {"basis": reading.basis, "low": low, "high": high, "note": reading.note}
