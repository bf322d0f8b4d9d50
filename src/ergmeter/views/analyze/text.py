"""Number formats of `erg analyze`, and its headline metrics with their basis and interval.

A headline keeps its origin, or its reason where the value is absent.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ergmeter.neuron.kernels import decimals, percent
from ergmeter.units import significant
from ergmeter.version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    Document = Mapping[str, Any]

_COLUMNS = 80


def wrapped(text: str, lead: str = "") -> Iterator[str]:
    """Yield a sentence wrapped to the width of a terminal; paths and names are not broken."""
    yield from textwrap.wrap(
        text,
        _COLUMNS,
        initial_indent=lead,
        subsequent_indent=" " * max(2, len(lead)),
        break_long_words=False,
        break_on_hyphens=False,
    )


def heading(title: str, width: int) -> Iterator[str]:
    """Yield a title between two rules."""
    yield "=" * width
    yield title
    yield "=" * width


def ratio(value: float | None) -> str:
    """Format a ratio, or a dash if unknown."""
    return "-" if value is None else decimals(value, 4)


def fixed(value: float | None, digits: int) -> str:
    """Format with a fixed number of decimals; integers with thousands separators."""
    return (
        "-" if value is None else f"{value:,.{digits}f}" if digits == 0 else f"{value:.{digits}f}"
    )


def bound(figures: Mapping[str, Any]) -> str:
    """Return the note behind a ratio that is not fully known."""
    if figures.get("is_uncertain"):
        return " (not certain)"
    return " (a lower bound)" if figures.get("is_lower_bound") else ""


def mark(document: Mapping[str, Any], key: str) -> str:
    """Return the mark behind an impossible value."""
    return " (impossible)" if document.get("impossible", {}).get(key) else ""


def counted(count: int, what: str) -> str:
    """Return a count with its noun: `2 loops whose ...`, `1 loop whose ...`."""
    noun, _, rest = what.partition(" ")
    if count == 1:
        noun = noun.removesuffix("es") if noun.endswith("ches") else noun.removesuffix("s")
    return f"{count:,} {noun} {rest}"


# Headline metrics.


@dataclass(frozen=True)
class Headline:
    """A headline metric with its value, or the reason why it is absent."""

    key: str
    title: str
    value: str
    interval: str
    basis: str
    note: str
    formula: str
    reason: str = ""
    impossible: str = ""


def title(document: Document) -> str:
    """Return what was analyzed."""
    model = _model(document)
    nodes = document["num_nodes"]
    return f"{model} on {nodes} node{'' if nodes == 1 else 's'} of {document['hardware_backend']}"


def _model(document: Document) -> str:
    """Return the model's name, else that of its file or of the folder of its config.json."""
    named, path = document["versions"]["model"].get("name"), str(document["model_config"])
    if named:
        return str(named)
    file = Path(path)
    if file.suffix != ".json":
        return path
    return file.parent.name if file.stem == "config" and file.parent.name else file.stem


def headlines(document: Document) -> Iterator[Headline]:
    """Yield the headline metrics in order."""
    summary, is_original = document["nki_analysis"]["summary"], document["compat"] is not None
    under = "as the original counts" if is_original else f"under {document['convention']}"
    mfu = f"TFLOP of a sequence x sequences/s / peak of all cores, {under}"
    yield _headline(document, "mfu_percent", "MFU", "%", mfu)
    if not is_original and _is_more(document["hfu_percent"], document["mfu_percent"]):
        hfu = "as MFU, with what is computed twice"
        yield _headline(document, "hfu_percent", "HFU", "%", hfu)
    rate = document.get("obtained", {}).get("throughput_seq_per_sec", {})
    pace = rate.get("formula", "sequences of the counted steps / their time")
    yield _headline(document, "throughput_seq_per_sec", "throughput", "sequences/s", pace)
    if is_original:
        work = "forward and backward FLOPs of one sequence; the original calls it TFLOPs/second"
        yield _headline(document, "tflops_per_second", "work of a sequence", "TFLOP", work)
    else:
        speed = f"TFLOP of a sequence x sequences/s, {under}"
        yield _headline(document, "tflops_per_second", "work", "TFLOP/s", speed)
        work = str(document["convention_formula"])
        yield _headline(document, "tflop_per_sequence", "work of a sequence", "TFLOP", work)
    nki = "multiply-adds that NKI kernels state / all multiply-adds of the graphs"
    share = {"overall_nki_ratio": summary.get("overall_nki_ratio")}
    yield _headline(document, "overall_nki_ratio", "NKI share", "", nki, of=share, marked=summary)
    if "training_score_breakdown" in document:
        parts = document["training_score_breakdown"]
        product = (
            "MFU / base x throughput / base x loss x convergence"
            f" x ({parts['score_offset']:g} + NKI share)"
        )
        yield _headline(document, "training_score", "score", "", product, marked=parts)


def _headline(
    document: Document,
    key: str,
    name: str,
    unit: str,
    formula: str,
    *,
    of: Document | None = None,
    marked: Document | None = None,
) -> Headline:
    value = (of or document)[key]
    if value is None:
        reason = document.get("missing", {}).get(key, "not known")
        return Headline(key, name, "", "", "", "", formula, reason)
    origin = document.get("obtained", {}).get(key, {})
    ends = [origin.get("low"), origin.get("high")]
    interval = (
        "" if None in ends else f"{' to '.join(_value_text(end, unit) for end in ends)} {unit}"
    )
    return Headline(
        key, name, _number(key, value, unit) + bound(marked or {}) + mark(document, key),
        interval.rstrip(), origin.get("basis", ""), origin.get("note", ""), formula,
        impossible=document.get("impossible", {}).get(key, ""),
    )  # fmt: skip


def _number(key: str, value: float, unit: str) -> str:
    if key == "overall_nki_ratio":
        return percent(value)
    return f"{_value_text(value, unit)} {unit}".rstrip()


def _value_text(value: float, unit: str) -> str:
    return decimals(value, 2, full=100.0) if unit == "%" else significant(value, 5)


def _is_more(value: float | None, other: float | None) -> bool:
    return value is not None and other is not None and value > other * (1 + 1e-9)


def citation(document: Document) -> str:
    """Return a citable sentence: values and their basis."""
    clauses = []
    for headline in headlines(document):
        if headline.value:
            edges = f" [{headline.interval}]" if headline.interval else ""
            clauses.append(f"{headline.title} {headline.value}{edges} ({headline.basis})")
    under = "" if document["compat"] is not None else f", convention {document['convention']}"
    batch = f"{document['batch_size']} sequences of {document['sequence_length']} a step"
    figures = "; ".join(clauses) or "no figures"
    return f"ergmeter {__version__}: {title(document)}, {batch}{under}: {figures}."
