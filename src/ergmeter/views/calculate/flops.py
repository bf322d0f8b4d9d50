"""FLOPs of a step, its MFU, and the conventions they are counted under: the documents."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

from ergmeter.flops.analytic import PartFlops, total
from ergmeter.flops.batch import Batch
from ergmeter.flops.conventions import CONVENTIONS, LETTERS, Convention
from ergmeter.flops.counted.op_totals import AnalyticComparison, CountedStep
from ergmeter.flops.source import read_graph
from ergmeter.flops.work import Work, step_work
from ergmeter.metrics.catalog import every_metric
from ergmeter.metrics.definitions.compute import NotApplicable
from ergmeter.metrics.explain.flops import peak_text
from ergmeter.records import Missing, Reading, Result
from ergmeter.units import grouped, number_of, percent, scaled, significant
from ergmeter.views.calculate.reference import filled_page, markdown_table
from ergmeter.views.document import (
    Document,
    HeadlinePart,
    Paragraph,
    Part,
    Table,
    TableColumn,
    columns_of,
    title_case,
)
from ergmeter.views.documents import result

# Conventions.


# Llama 3 8B (arXiv 2407.21783, table 3): the model that most published results are of.
_EXAMPLE = "hidden=4096,layers=32,heads=32,kv_heads=8,ffn=14336,vocab=128256"
_LENGTHS = (2048, 8192, 131072)


def conventions_document(conventions: Sequence[Convention]) -> Document:
    """Return what each convention counts."""
    parts: list[Part] = []
    for convention in conventions:
        letters = ", ".join(f"{letter} {word}" for letter, word in convention.letters.items())
        fields = {
            "counts": convention.definition,
            "letters": f"{letters}; per token" if letters else "",
            "for": ", ".join(_limits(convention)),
            "source": convention.source,
        }
        rows = tuple((name, text) for name, text in fields.items() if text)
        parts.append(HeadlinePart(convention.name, convention.formula))
        parts.append(Table(("what", "value"), rows, has_head=False))
    return Document("Conventions", tuple(parts), list(map(_convention_data, conventions)))


def _limits(convention: Convention) -> list[str]:
    """Return what a convention is limited to, such as a causal mask."""
    if convention.weights is None:
        return []
    job = (
        "training with LoRA" if convention.is_for_lora else "whole sequences, every weight trained"
    )
    mask = "a causal mask" if convention.halves else ""
    return [limit for limit in (job, mask, convention.only_for) if limit]


def _convention_data(convention: Convention) -> dict[str, Any]:
    """Return one convention as JSON."""
    limits = _limits(convention)
    return {
        "name": convention.name,
        "formula_per_token": convention.formula,
        "letters": convention.letters,
        "definition": convention.definition,
        "limits": [f"for: {', '.join(limits)}"] if limits else [],
        "source": convention.source,
    }


def conventions_page() -> str:
    """Return the page docs/conventions.md."""
    counted = (
        (
            f"`{convention.name}`",
            convention.formula,
            convention.definition
            + (f" Only for {convention.only_for}." if convention.only_for else ""),
            convention.source,
        )
        for convention in CONVENTIONS.values()
    )
    heads = [f"T = {length}" for length in _LENGTHS]
    works = [step_work(read_graph(_EXAMPLE), Batch.of(1, length)) for length in _LENGTHS]
    rows = []
    for name in works[0].flops:
        cells = []
        for work, length in zip(works, _LENGTHS, strict=True):
            flops, exact = work.flops[name].model_per_step, work.chosen.model_per_step
            off = round(100 * (flops / exact - 1), 1) or 0.0  # no -0.0
            cells.append(f"{flops / length / 1e9:.2f} ({off:+.1f} %)")
        rows.append((f"`{name}`", *cells))
    return filled_page(
        "conventions_page.md",
        letters=", ".join(f"{letter}: {word}" for letter, word in LETTERS.items()),
        conventions=markdown_table(("name", "per token", "what it counts", "source"), counted),
        side_by_side=markdown_table(("convention", *heads), rows, numbers=len(_LENGTHS)),
    )


# `erg flops` and `erg mfu`.


def flops_document(work: Work) -> Document:
    """Return the cost of each part of the model in a step, and the step under each convention."""
    tables = (_parts_table(work), *_conventions_table(work))
    lines = (Paragraph(line, style="dim") for line in _convention_lines(work))
    return Document(title_case(_step(work)), (*_about(work), *tables, *lines), _data(work))


def mfu_document(work: Work, results: dict[str, Result]) -> Document:
    """Return the metrics of a step at a reported rate."""
    data = {"readings": {key: result(reading) for key, reading in results.items()}, **_data(work)}
    applicable = {
        every_metric()[key].title: reading
        for key, reading in results.items()
        if not isinstance(reading, NotApplicable)
    }
    table = readings_table(applicable, _value)
    return Document(title_case(_step(work)), (_mfu(results), *_about(work), table), data)


def _mfu(results: dict[str, Result]) -> HeadlinePart:
    """Return the MFU with its peak and convention, or "not known"."""
    mfu = results["utilization.mfu_frac"]
    if isinstance(mfu, Missing):
        return HeadlinePart("MFU", "not known", state="unsure")
    conventions = ", ".join(mfu.note.split("; ")[:2])
    about = f"of {peak_text(mfu.note)}; {conventions}"
    return HeadlinePart(f"MFU {significant(100 * mfu.value, 3)} %{mfu.mark}", about=about)


def _parts_table(work: Work) -> Table:
    sums, tokens = total(work.parts), work.batch.tokens_real
    step, token = _scale(sums.model), _scale(sums.model / tokens)
    extra = "; extra: computed again, or on padding" if sums.recomputed else ""
    unit = _token(work)
    each = f", {token[1]}FLOP {unit}" if tokens > 1 else ""
    columns = ["forward", *(["backward"] if sums.backward else [])]
    columns += ["extra"] if sums.recomputed else []
    rows = []
    for part, flops in [*work.parts.items(), ("all", sums)]:
        values = {"forward": flops.forward, "backward": flops.backward, "extra": flops.recomputed}
        row = (
            part,
            *(_number(values[name], step) for name in columns),
            percent(flops.model / sums.model),
            *([_number(flops.model / tokens, token)] if tokens > 1 else []),
        )
        rows += [row] if flops.hardware else []
    titles = (*columns, "share", *([unit] if tokens > 1 else []))
    return Table(
        columns_of("part", *titles, no_wrap=True),
        tuple(rows),
        f"exact, by part: {step[1]}FLOP a step{each}{extra}",
        strong_rows=frozenset({len(rows) - 1}),
    )


def _scale(value: float) -> tuple[float, str]:
    """Return the factor and SI prefix for a table with values up to this one."""
    prefixes = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"))
    return next((pair for pair in prefixes if value >= pair[0]), (1.0, ""))


def _number(value: float, scale: tuple[float, str]) -> str:
    """Format a value in the table's unit, or in its own if it is too small for that."""
    if not value:
        return "-"
    if value < _LEAST * scale[0]:
        return scaled(value, "FLOP")
    return significant(value / scale[0])


_LEAST = 1e-3


def _token(work: Work) -> str:
    """Return the unit of per-token values; padding does not count."""
    return "a token" if work.batch.tokens == work.batch.tokens_real else "a real token"


def _conventions_table(work: Work) -> list[Table]:
    """Return the step under each convention, with the difference from the chosen one."""
    if len(work.flops) == 1:
        return []
    chosen = work.chosen
    tokens = chosen.tokens_per_step or 1
    step, token = _scale(chosen.model_per_step), _scale(chosen.model_per_step / tokens)
    unit = _token(work)
    titles = ("a step", unit, f"vs {chosen.convention}")
    rows = []
    for name, flops in work.flops.items():
        off = round(100 * (flops.model_per_step / chosen.model_per_step - 1), 1)
        rows.append(
            (
                name,
                _number(flops.model_per_step, step),
                _number(flops.model_per_step / tokens, token),
                "" if flops is chosen else f"{off or 0.0:+.1f} %",
                CONVENTIONS[name].formula,
            )
        )
    columns = (
        *columns_of("convention", *titles, no_wrap=True),
        TableColumn(_PER[work.phase], style="dim"),
    )
    caption = f"as others count it: {step[1]}FLOP a step, {token[1]}FLOP {unit}"
    return [Table(columns, tuple(rows), caption)]


# The formulas are for training; prefill is a third of it.
_PER = {"train": "formula, a token", "prefill": "a third of this, a token", "decode": ""}


def _convention_lines(work: Work) -> Iterator[str]:
    """Return the legend of the conventions, and those that do not cover this step."""
    used = {letter for name in work.flops for letter in CONVENTIONS[name].letters}
    if used:
        words = ", ".join(f"{letter} {LETTERS[letter]}" for letter in LETTERS if letter in used)
        yield f"{words}. `erg conventions NAME` says what each counts."
    if used and not work.batch.is_grid:
        yield "formulas count whole sequences with their padding, not documents"
    elsewhere = work.not_defined
    if work.training.lora is None:  # LoRA conventions are not mentioned without adapters
        elsewhere = {n: why for n, why in elsewhere.items() if not CONVENTIONS[n].is_for_lora}
    for reason, names in grouped((why, name) for name, why in elsewhere.items()).items():
        which = ", ".join(names) if len(work.flops) > 1 else "every other convention"
        yield f"not defined here: {which}: {reason}"


def _about(work: Work) -> list[Part]:
    """Return the lines above the tables: step, model, bytes, assumptions."""
    facts = [f"{_count(work.params)} parameters"]
    if work.params_active != work.params:
        facts.append(f"{_count(work.params_active)} active per token")
    if work.params_trained != work.params and work.phase == "train":
        share = 100 * work.params_trained / work.params
        facts.append(f"{_count(work.params_trained)} trained ({significant(share, 3)} %)")
    parts: list[Part] = [HeadlinePart(_step(work)), Paragraph(", ".join(facts))]
    if work.params_given is not None:
        used = ", ".join(work.of_params_given)
        parts.append(Paragraph(f"given: N = {_count(work.params_given)} parameters, in {used}"))
    traffic = work.traffic
    if traffic is not None:
        moved = (
            f"must move {scaled(traffic.total_bytes, 'B')}: weights"
            f" {scaled(traffic.weights_bytes, 'B')} (of {scaled(work.kept_bytes or 0, 'B')} kept),"
            f" cache read {scaled(traffic.cache_read_bytes, 'B')}, written"
            f" {scaled(traffic.cache_written_bytes, 'B')}"
        )
        parts.append(Paragraph(moved))
    if work.kept:
        parts.append(Paragraph(f"kept: {'; '.join(work.kept)}", style="dim"))
    parts += [Paragraph(f"assumed: {line}", style="dim") for line in work.assumptions]
    return parts


def _step(work: Work) -> str:
    """Describe one step in a line."""
    batch, first = work.batch, work.batch.documents[0]
    if work.phase == "decode":
        each = " each" if batch.sequences > 1 else ""
        whose = number_of(batch.sequences, "sequence")
        return f"a decoding step: {whose}, one new token{each} after {first.past} cached"
    laid_out = f"{number_of(batch.sequences, 'sequence')} of {batch.seq_len} tokens"
    if not batch.is_grid:
        documents = sum(document.count for document in batch.documents)
        laid_out = (
            f"{number_of(documents, 'document')}, {batch.tokens_real} tokens in all, in {laid_out}"
        )
    elif batch.sequences > 1:
        laid_out += f", {batch.tokens} in all"
    if batch.images:
        laid_out += f", {number_of(batch.images, 'image')} in them"
    if work.phase == "prefill":
        return f"reading a prompt (forward): {laid_out}" + (
            f", after {first.past} cached" if first.past else ""
        )
    again = work.training.checkpointing
    how = "" if again == "none" else f", {again} checkpointing"
    return f"a training step (forward and backward{how}): {laid_out}"


def _count(number: int) -> str:
    for factor, name in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if number >= factor:
            return f"{significant(number / factor)} {name}"
    return str(number)


def _data(work: Work) -> dict[str, Any]:
    """Return the work of a step as JSON, in FLOPs and bytes."""
    sums = total(work.parts)
    chosen, n_given = work.chosen, {}
    if work.params_given is not None:
        n_given = {"N_given": {"value": work.params_given, "used_by": work.of_params_given}}
    body: dict[str, Any] = {
        "step": _step(work),
        "phase": work.phase,
        "convention": chosen.convention,
        "model_flops": chosen.model_per_step,
        "hardware_flops": chosen.hardware_per_step,
        "tokens": chosen.tokens_per_step,
        "model_flops_per_token": chosen.model_per_step / (chosen.tokens_per_step or 1),
        "parameters": work.params,
        "parameters_active": work.params_active,
        "parameters_trained": work.params_trained,
        **n_given,
        "parts": {part: _numbers(flops) for part, flops in work.parts.items()},
        "exact": _numbers(sums),
        "conventions": {
            name: {
                "model_flops": flops.model_per_step,
                "hardware_flops": flops.hardware_per_step,
                "model_flops_per_token": flops.model_per_step / (flops.tokens_per_step or 1),
                "formula": CONVENTIONS[name].formula,
                "letters": CONVENTIONS[name].letters,
            }
            for name, flops in work.flops.items()
        },
        "not_defined": work.not_defined,
        "assumptions": list(work.assumptions),
    }
    traffic = work.traffic
    if traffic is not None:
        body["bytes_moved"] = {
            "weights": traffic.weights_bytes,
            "cache_read": traffic.cache_read_bytes,
            "cache_written": traffic.cache_written_bytes,
            "total": traffic.total_bytes,
        }
        body["kept"] = {"weights_bytes": work.kept_bytes, "as": list(work.kept)}
    return body


def _numbers(flops: PartFlops) -> dict[str, float]:
    return {**_passes(flops), "model": flops.model, "hardware": flops.hardware}


def readings_table(results: dict[str, Result], value: Callable[[Reading], str]) -> Table:
    """Return readings with their notes, then absent metrics; shared reasons are given once."""
    rows: list[tuple[str, ...]] = [
        (
            key,
            f"{value(reading)}{reading.mark}",
            reading.basis,
            "; ".join(part for part in (reading.impossible, reading.note) if part),
        )
        for key, reading in results.items()
        if isinstance(reading, Reading)
    ]
    absent = grouped((r.reason, key) for key, r in results.items() if isinstance(r, Missing))
    rows += [(", ".join(keys), "-", "", reason) for reason, keys in absent.items()]
    columns = (
        "metric",
        TableColumn("value", style="strong"),
        TableColumn("how", "basis"),
        TableColumn("of", "below"),
    )
    return Table(columns, tuple(rows))


def _value(reading: Reading) -> str:
    if reading.unit == "frac":
        return percent(reading.value, decimals=2)
    return scaled(reading.value, reading.unit)


# `erg flops --engine counted`.


_DEPTH = 3  # of a module's dotted name: model.layers.0 and the like


def counted_document(counted: CountedStep, agreed: AnalyticComparison) -> Document:
    """Return the FLOPs of a step counted by running it, and whether the analytic count agrees."""
    parts: tuple[Part, ...] = (
        _counted_table("module", counted.modules(depth=_DEPTH)),
        _counted_table("operator", counted.operators),
        *map(Paragraph, _counted_lines(counted, agreed)),
    )
    return Document("A step, counted by running the model", parts, _counted_data(counted, agreed))


def _counted_table(title: str, rows: dict[str, PartFlops]) -> Table:
    passes = ("forward", "backward", "again")
    cells = (
        (name or "all", *(scaled(v, "FLOP") if v else "-" for v in _passes(flops).values()))
        for name, flops in _alike(rows)
    )
    return Table(columns_of(title, *passes), tuple(cells))


def _alike(rows: dict[str, PartFlops]) -> Iterator[tuple[str, PartFlops]]:
    """Merge consecutive layers of equal cost into one row."""
    for (form, flops), group in groupby(rows.items(), lambda row: (_form(row[0]), row[1])):
        names = [name for name, _ in group]
        last = re.findall(r"\d+", names[-1])
        many = f"{names[0]} to {last[-1]}, each" if len(names) > 1 and form and last else names[0]
        yield (many, flops)


def _form(name: str) -> str:
    return re.sub(r"\d+", "*", name)


def _counted_lines(counted: CountedStep, agreed: AnalyticComparison) -> list[str]:
    """Return the lines below the tables."""
    sums = counted.total
    return [
        f"{scaled(sums.model, 'FLOP')} as run: attention over the whole rectangle, masks not"
        f" seen, the head at every position; {scaled(sums.hardware, 'FLOP')} with what is computed"
        f" again, in fused attention too; {counted.params} parameters",
        agreed.sentence,
        *counted.not_counted,
        *(f"assumed: {assumption}" for assumption in counted.assumptions),
    ]


def _counted_data(counted: CountedStep, agreed: AnalyticComparison) -> dict[str, Any]:
    """Return the count as JSON, in FLOPs."""
    return {
        "engine": "counted",
        "attention": "the whole rectangle, as computed; masks and windows are not seen",
        "head": "at every position",
        "model_flops": counted.total.model,
        "hardware_flops": counted.total.hardware,
        "forward_flops": counted.total.forward,
        "parameters": counted.params,
        "modules": {name: _passes(flops) for name, flops in counted.modules().items()},
        "operators": {name: _passes(flops) for name, flops in counted.operators.items()},
        "not_counted": counted.calls_not_counted,
        "analytic": agreed.sentence,
        "exact_model_flops": agreed.exact_flops,
        "assumptions": list(counted.assumptions),
    }


def _passes(flops: PartFlops) -> dict[str, float]:
    return {"forward": flops.forward, "backward": flops.backward, "again": flops.recomputed}
