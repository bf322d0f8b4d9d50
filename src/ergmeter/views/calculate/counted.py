"""A counted step: its document, and differences from the analytic count."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from ergmeter.errors import FormatError
from ergmeter.flops.analytic import PartFlops, Parts, step_flops, total
from ergmeter.flops.batch import Batch, Pairs
from ergmeter.flops.counted.op_totals import CountedStep, agreement
from ergmeter.flops.source import UnknownArchitectureError, model_graph
from ergmeter.flops.work import TrainedParts, trained_graph, writes
from ergmeter.units import scaled
from ergmeter.views.document import Document, Paragraph, Part, Table, TableColumn

if TYPE_CHECKING:
    from ergmeter.flops.config import ModelConfig

_DEPTH = 3  # of a module's dotted name: model.layers.0 and the like


@dataclass(frozen=True, slots=True)
class AnalyticComparison:
    """The analytic count of the same step, or the reason why there is none."""

    sentence: str
    exact_flops: float | None = None  # the model FLOPs that `--engine analytic` leads with


def cross_check(
    config: ModelConfig,
    counted: CountedStep,
    batch: Batch,
    training: TrainedParts,
    *,
    train: bool,
    source_len: int | None,
) -> AnalyticComparison:
    """Compare the count with the analytic count of the same step.

    The run computes all pairs of the attention rectangle, and the head at every prompt position.
    """
    try:
        plain = model_graph(config)
    except UnknownArchitectureError as error:
        return AnalyticComparison(f"{config.where}: {error.said}")
    except FormatError as error:
        return AnalyticComparison(str(error))
    graph, trained = trained_graph(plain, training)
    is_prompt = not train and writes(graph)

    def analytic(pairs: Pairs, *, last_logits: bool = False) -> Parts:
        return step_flops(
            graph,
            Batch.of(
                batch.sequences,
                batch.seq_len,
                lengths=_lengths(batch),
                source_len=source_len,
                last_logits=last_logits,
                facts=graph.facts,
            ),
            trainable=trained if train else None,
            checkpointing=training.checkpointing,
            pairs=pairs,
        )

    needed = total(analytic("needed", last_logits=is_prompt)).model
    head = " and the head on the last token alone" if is_prompt else ""
    return AnalyticComparison(
        f"of what was run, {agreement(analytic('computed'), counted).sentence}; exact, with just"
        f" the pairs that the mask and windows let meet{head}, is {scaled(needed, 'FLOP')}"
        f" ({100 * (needed / counted.model - 1):+.1f} %)",
        needed,
    )


def _lengths(batch: Batch) -> list[int] | None:
    """Return document lengths if a batch does not consist of full sequences."""
    if batch.is_grid:
        return None
    return [document.new for document in batch.documents for _ in range(document.count)]


def counted_document(counted: CountedStep, agreed: AnalyticComparison) -> Document:
    """Return a counted step by module and by operator, and where the analytic count differs."""
    parts: tuple[Part, ...] = (
        _table("module", counted.modules(depth=_DEPTH)),
        _table("operator", counted.operators),
        *map(Paragraph, _lines(counted, agreed)),
    )
    return Document("A step, counted by running the model", parts, _data(counted, agreed))


def _table(title: str, rows: dict[str, PartFlops]) -> Table:
    passes = ("forward", "backward", "again")
    cells = (
        (name or "all", *(scaled(v, "FLOP") if v else "-" for v in _numbers(flops).values()))
        for name, flops in _alike(rows)
    )
    return Table((title, *(TableColumn(name, "number") for name in passes)), tuple(cells))


def _alike(rows: dict[str, PartFlops]) -> list[tuple[str, PartFlops]]:
    """Merge consecutive layers of equal cost into one row."""
    merged: list[tuple[str, PartFlops]] = []
    for (form, flops), group in groupby(rows.items(), lambda row: (_form(row[0]), row[1])):
        names = [name for name, _ in group]
        last = re.findall(r"\d+", names[-1])
        many = f"{names[0]} to {last[-1]}, each" if len(names) > 1 and form and last else names[0]
        merged.append((many, flops))
    return merged


def _form(name: str) -> str:
    return re.sub(r"\d+", "*", name)


def _lines(counted: CountedStep, agreed: AnalyticComparison) -> list[str]:
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


def _data(counted: CountedStep, agreed: AnalyticComparison) -> dict[str, Any]:
    """Return the count as JSON, in FLOPs."""
    return {
        "engine": "counted",
        "attention": "the whole rectangle, as computed; masks and windows are not seen",
        "head": "at every position",
        "model_flops": counted.total.model,
        "hardware_flops": counted.total.hardware,
        "forward_flops": counted.total.forward,
        "parameters": counted.params,
        "modules": {name: _numbers(flops) for name, flops in counted.modules().items()},
        "operators": {name: _numbers(flops) for name, flops in counted.operators.items()},
        "not_counted": counted.calls_not_counted,
        "analytic": agreed.sentence,
        "exact_model_flops": agreed.exact_flops,
        "assumptions": list(counted.assumptions),
    }


def _numbers(flops: PartFlops) -> dict[str, float]:
    return {
        "forward": flops.forward,
        "backward": flops.backward,
        "again": flops.recomputed,
    }
