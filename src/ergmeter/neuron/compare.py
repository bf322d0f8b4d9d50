"""Compares earlier outputs of `erg analyze` or of the original, and measures the spread of repeats.

Two MFUs may be under two counts. The original counts 6 % more FLOPs for the same job, and labels
the TFLOP of a sequence as TFLOP per second. So metrics are shown under a convention that all
outputs have, and are not compared where there is none. Outputs with the same inputs are repeats:
they get a mean and a spread, and a change within that spread is no change.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ergmeter.neuron.earlier_output import METRICS, EarlierOutput

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


@dataclass(frozen=True, slots=True)
class RepeatSpread:
    """Mean and spread of a metric over repeats."""

    count: int
    mean: float
    standard_deviation: float | None  # of the sample (n - 1); None for one run
    min: float
    max: float


@dataclass(frozen=True)
class OutputGroup:
    """Outputs with the same inputs."""

    outputs: tuple[EarlierOutput, ...]
    inputs: dict[str, Any]
    changed: dict[str, tuple[Any, Any]]  # against the group before, where both are known
    not_comparable: tuple[str, ...]  # metrics that are not held against the group before
    spreads: dict[str, RepeatSpread]


@dataclass(frozen=True)
class OutputComparison:
    """Groups in the order in which their first outputs were given."""

    groups: tuple[OutputGroup, ...]
    convention: str | None
    notes: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        """The comparison as JSON."""
        return {
            "convention": self.convention,
            "notes": list(self.notes),
            "groups": [
                {
                    "inputs": group.inputs,
                    "changed": {name: list(pair) for name, pair in group.changed.items()},
                    "not_comparable": list(group.not_comparable),
                    "metrics": {name: asdict(spread) for name, spread in group.spreads.items()},
                    "outputs": [output.summary(self.convention) for output in group.outputs],
                }
                for group in self.groups
            ],
        }


def compare(outputs: Sequence[EarlierOutput]) -> OutputComparison:
    """Groups the outputs into repeats and compares each group with the one before."""
    convention, notes = _common_convention(outputs)
    notes += [*_about_scores(outputs), *_about_counts(outputs)]
    grouped: dict[str, list[EarlierOutput]] = {}
    for output in outputs:
        grouped.setdefault(json.dumps(output.inputs, sort_keys=True), []).append(output)
    groups: list[OutputGroup] = []
    for members in grouped.values():
        inputs = members[0].inputs
        before = groups[-1].inputs if groups else inputs
        rest = _not_comparable(groups[-1].outputs, members) if groups else ()
        changed = {
            name: (before[name], value)
            for name, value in inputs.items()
            if value != before[name] and value is not None and before[name] is not None
        }
        spreads = _spreads(members, convention)
        groups.append(OutputGroup(tuple(members), inputs, changed, rest, spreads))
    if len(groups) > 1 and not any(len(group.outputs) > 1 for group in groups):
        notes.append(
            "no run was repeated: how far runs with the same inputs lie apart is not known"
        )
    return OutputComparison(tuple(groups), convention, tuple(notes))


def _about_scores(outputs: Sequence[EarlierOutput]) -> Iterator[str]:
    """Why scores are not comparable: the offset, the count of MFU, or the baseline."""
    scored = [output for output in outputs if output.has_score]
    offsets = {offset for output in scored if (offset := output.score_offset) is not None}
    if len(offsets) > 1:
        listed = " and ".join(f"{offset:g}" for offset in sorted(offsets))
        yield f"the scores were made with offsets {listed}: they are not comparable"
    counts = {output.convention for output in scored}
    if len(counts) > 1:
        listed = " and ".join(sorted(counts))
        yield f"the scores hold MFUs under {listed}: they are not comparable"
    if len({output.score_base for output in scored}) > 1:
        yield "the scores are against several baselines: they are not comparable"


def _about_counts(outputs: Sequence[EarlierOutput]) -> Iterator[str]:
    if len({output.is_original for output in outputs}) < 2:
        return
    has_lora = any(output.inputs["lora"] not in (None, "none") for output in outputs)
    lora = ", LoRA as full training" if has_lora else ""
    yield (
        f"the original counts every model as a dense Llama{lora}, and its peak is that of whole"
        " instances"
    )
    yield (
        "NKI ratios of the original count every computation once, ours what runs: they are not"
        " comparable"
    )


def _score_terms(outputs: Sequence[EarlierOutput]) -> set[tuple[Any, ...]]:
    """Convention, offset and baseline: scores are comparable where these are equal."""
    return {(o.convention, o.score_offset, o.score_base) for o in outputs if o.has_score}


def _not_comparable(
    before: Sequence[EarlierOutput], after: Sequence[EarlierOutput]
) -> tuple[str, ...]:
    metrics = []
    if before[0].is_original != after[0].is_original:
        metrics.append("overall_nki_ratio")
    if len(_score_terms([*before, *after])) > 1:
        metrics.append("training_score")
    return tuple(metrics)


def _common_convention(outputs: Sequence[EarlierOutput]) -> tuple[str | None, list[str]]:
    own = {output.convention for output in outputs}
    if len(own) == 1:
        return own.pop(), []
    common = set.intersection(*(set(output.mfu_by_convention) for output in outputs))
    if not common:
        listed = ", ".join(sorted(own))
        return None, [f"MFU is not compared: the outputs have no convention in common ({listed})"]
    chosen = next((o.convention for o in outputs if o.convention in common), min(common))
    listed = " and ".join(sorted(own))
    return chosen, [f"the outputs' own MFUs are under {listed}; all are shown under {chosen}"]


def _spreads(outputs: Sequence[EarlierOutput], convention: str | None) -> dict[str, RepeatSpread]:
    spreads = {}
    mixed = len(_score_terms(outputs)) > 1
    for name in METRICS:
        if name == "training_score" and mixed:
            continue
        values = [
            value
            for output in outputs
            if (value := output.value(name, convention=convention)) is not None
        ]
        if values:
            deviation = statistics.stdev(values) if len(values) > 1 else None
            mean = statistics.fmean(values)
            spreads[name] = RepeatSpread(len(values), mean, deviation, min(values), max(values))
    return spreads
