"""What `erg analyze` found, in parts: for the page and for Markdown."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ergmeter.neuron.kernels import decimals
from ergmeter.neuron.score import factors
from ergmeter.units import significant
from ergmeter.version import __version__
from ergmeter.views.analyze.blocks import Items, PagePart, Paragraph, TableBlock
from ergmeter.views.analyze.graphs import graphs_part
from ergmeter.views.analyze.headline import citation, headlines
from ergmeter.views.analyze.text import bound, mark

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ergmeter.neuron.score import Factor
    from ergmeter.views.analyze.blocks import Block
    from ergmeter.views.analyze.headline import Headline

    Document = Mapping[str, Any]

_OURS = "log_disagrees"  # what a finding is about that holds the log against the rest
_NOT_ASKED = "No score was asked for: --calculate-score gives one, with its factors."


def analysis_parts(
    document: Document, files: Sequence[Document], *, most_graphs: int
) -> list[PagePart]:
    """Every part, in the order in which they are read."""
    return [
        _figures_part(document),
        score_part(document),
        _conventions_part(document),
        log_part(document),
        graphs_part(document, files, most=most_graphs),
        _agreement_part(document),
        _advice_part(document),
        _absent_part(document),
        _inputs_part(document),
        PagePart("cite", "How to cite", (Paragraph(citation(document), is_to_copy=True),)),
    ]


def _figures_part(document: Document) -> PagePart:
    head = ("figure", "value", "95 % interval", "how", "of this job")
    rows = tuple(
        (one.title, one.value, one.interval or "-", one.basis, _note(one))
        if one.value
        else (one.title, "-", "-", "absent", one.reason)
        for one in headlines(document)
    )
    return PagePart("figures", "Figures", (TableBlock("figures", head, rows), *_remarks(document)))


def _note(one: Headline) -> str:
    return "; ".join(part for part in (one.impossible, one.note) if part)


def _remarks(document: Document) -> Iterator[Paragraph]:
    if document["compat"] is not None:
        yield Paragraph(
            f"The numbers are those of {document['compat']['version']}, faults included."
        )


def score_part(document: Document) -> PagePart:
    """The factors of the score, one a row."""
    if "training_score_breakdown" not in document:
        return PagePart("score", "Score", (Paragraph(_NOT_ASKED),))
    parts = document["training_score_breakdown"]
    rows = [_factor(one) for one in factors(parts)]
    value, reason = document["training_score"], document.get("missing", {}).get("training_score")
    wrong = mark(document, "training_score")
    shown = "-" if value is None else f"{significant(value, 5)}{bound(parts)}{wrong}"
    rows.append(("score", "", "", shown, shown, ""))
    head = ("factor", "reached", "base", "ratio", "product so far", "log2 of the ratio")
    blocks: list[Block] = [TableBlock("factors of the score", head, tuple(rows))]
    if reason:
        blocks.append(Paragraph(f"No score: {reason}."))
    if "remark" in parts:
        blocks.append(Paragraph(f"Mind that {parts['remark']}."))
    return PagePart("score", "Score", tuple(blocks))


def _factor(one: Factor) -> tuple[str, ...]:
    marked = bound({"is_lower_bound": one.is_bound, "is_uncertain": one.is_uncertain})
    ratio = "-" if one.ratio is None else significant(one.ratio, 5) + marked
    product = "-" if one.product is None else significant(one.product, 5) + marked
    added = "-" if one.doublings is None else f"{one.doublings:+.3f}"
    if one.is_given:
        return one.name, "as given", "", ratio, product, added
    reached = "-" if one.reached is None else f"{significant(one.reached, 4)} {one.unit}".rstrip()
    reached += " (impossible)" if one.is_impossible else ""
    base = "-" if one.base is None else f"{one.base:g} {one.unit}".rstrip()
    if not one.unit:  # the share is added to the offset
        base = f"{base} + share"
    return one.name, reached, base, ratio, product, added


def _conventions_part(document: Document) -> PagePart:
    """MFU under the other counts, and why the original's is another."""
    if document["compat"] is not None:
        kept = Items(tuple(document["compat"]["quirks_kept"]))
        lost = Items(tuple(document["compat"]["not_kept"]))
        said = (Paragraph("Kept as the original has it:"), kept, Paragraph("Not kept:"), lost)
        return PagePart("conventions", "What was kept of the original", said)
    rows = [
        (name, f"{significant(one['tflop_per_sequence'], 5)}", _percent(one["mfu_percent"]))
        for name, one in document["conventions"].items()
    ]
    chosen = f"The figures above are under {document['convention']}: erg conventions explains all."
    blocks: list[Block] = [Paragraph(chosen)]
    blocks.append(TableBlock("conventions", ("convention", "TFLOP a sequence", "MFU"), tuple(rows)))
    theirs = document["original_count"]
    if theirs is not None:
        count = f"By the original's count: {significant(theirs['tflop_per_sequence'], 5)} TFLOP"
        share = theirs["mfu_percent"]
        wrong = mark(document, "original_count.mfu_percent")
        mfu = "" if share is None else f", MFU {_percent(share)}{wrong}"
        blocks.append(Paragraph(f"{count} a sequence{mfu}."))
        extra = theirs["over_exact_tflop_per_sequence"]
        if extra:
            pieces = tuple((why, f"{tflop:+.3f}") for why, tflop in extra.items())
            head = ("what it counts that exact does not", "TFLOP a sequence")
            blocks.append(TableBlock("the original's count over exact", head, pieces))
    return PagePart("conventions", "Under other conventions", tuple(blocks))


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{decimals(value, 2, whole=100.0)} %"


def log_part(document: Document) -> PagePart:
    """What the log holds."""
    log = document.get("log_metrics")
    if log is None:
        return PagePart("log", "Log", (Paragraph("No log was given: --log-file."),))
    rows = []
    for name, key, unit in (
        ("step time", "step_times", "s"),
        ("printed throughput", "throughput", "sequences/s"),
        ("loss", "losses", ""),
    ):
        of = log[key]
        if of["count"]:
            figures = (
                f"{significant(of[n], 5)} {unit}".rstrip() for n in ("average", "min", "max")
            )
            rows.append((name, *figures, f"{of['count']:,}"))
    blocks: list[Block] = [Paragraph(" ".join(_about_log(log)))]
    if rows:
        head = ("of the log", "mean", "least", "most", "lines")
        blocks.append(TableBlock("what the log printed", head, tuple(rows)))
    notes = tuple(log.get("notes", ()))
    return PagePart("log", "Log", (*blocks, *([Items(notes)] if notes else ())))


def _about_log(log: Document) -> Iterator[str]:
    steps, losses = log["steps"], log["losses"]
    yield f"{log['log_file']}: {steps['count']:,} steps, {steps['first']} to {steps['last']}."
    if log.get("runs_in_log", 1) > 1:
        yield f"{log['runs_in_log']} runs in it: the last one is shown."
    if "steady_state" in log:
        yield f"Steady state: {log['steady_state']['rule']}."
    if losses.get("not_finite"):
        yield (
            f"{losses['not_finite']} printed losses are no number (nan or inf), first at step"
            f" {losses['first_not_finite_step']}."
        )


def _agreement_part(document: Document) -> PagePart:
    """Whether the log, the YAML and the command line speak of the same training."""
    said = tuple(one["text"] for one in document["findings"] if one["about"] == _OURS)
    if said:
        return PagePart("agreement", "Agreement", (Items(said),))
    if document["compat"] is not None:
        words = "Not checked: the original takes the log and the YAML as they are."
    elif "log_metrics" not in document:
        words = "Not checked: there is no log to hold against the YAML."
    else:
        words = "Nothing found: what the log says of its steps contradicts no option and no YAML."
    return PagePart("agreement", "Agreement", (Paragraph(words),))


def _advice_part(document: Document) -> PagePart:
    said = tuple(one["text"] for one in document["findings"] if one["about"] != _OURS)
    block = Items(said) if said else Paragraph("Nothing in the inputs calls for a remark.")
    return PagePart("advice", "Worth knowing", (block,))


def _absent_part(document: Document) -> PagePart:
    """What is null, by its reason."""
    by_reason: dict[str, list[str]] = {}
    for key, why in document.get("missing", {}).items():
        by_reason.setdefault(why, []).append(key)
    if not by_reason:
        return PagePart("absent", "Absent", (Paragraph("Nothing that was asked for is absent."),))
    rows = tuple((why, ", ".join(keys)) for why, keys in by_reason.items())
    return PagePart("absent", "Absent", (TableBlock("absent figures", ("why", "what"), rows),))


def _inputs_part(document: Document) -> PagePart:
    """Files and sizes with their source, then what was assumed."""
    rows = tuple(
        (one["what"], _input(one["value"]), str(one["from"])) for one in document["inputs"]
    )
    model = document["versions"]["model"]
    versions = [("ergmeter", __version__, "this program")]
    if model.get("config_sha256"):
        versions.append(("SHA-256 of config.json", model["config_sha256"], "its content"))
    compilers = ", ".join(document["versions"]["neuronxcc"]) or "-"
    versions.append(("neuronxcc", compilers, "the paths of the graphs"))
    grid = TableBlock("inputs", ("input", "value", "from"), (*rows, *versions))
    lora = document.get("lora")
    notes = list(document.get("notes", ()))
    if lora:
        notes.insert(0, f"LoRA: r={lora['r']} on {', '.join(lora['targets'])}")
    assumed = (Paragraph("Assumed and noted:"), Items(tuple(notes))) if notes else ()
    return PagePart("inputs", "Inputs", (grid, *assumed))


def _input(value: object) -> str:
    if value is None:
        return "-"
    return significant(value, 6) if isinstance(value, float) else str(value)
