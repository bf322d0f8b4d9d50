"""Groups runs into repeats, and checks whether two groups are comparable.

Facts that set the work (model, data, sequence length, batch, tuning, device) must be equal, or
there is no verdict: a speed-up between 2048 and 1024 tokens a sequence means nothing. Facts that
belong to the question (precision, optimizer, kernels, versions) may differ. They are listed beside
the verdict as possible explanations. Differences in `--group-by` columns never make groups
incomparable.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from statistics import fmean

from ergmeter.compare.entry import BATCH, NOT_COMPARABLE, SOURCE, Entry, Group, column_of
from ergmeter.compare.verdicts import OF_WHOLE_RUN
from ergmeter.errors import UsageError
from ergmeter.metrics.catalog import Metric
from ergmeter.units import duration

_WORK = {
    "model": "model",
    "dataset": "data set",
    "data_sha256": "data",
    "seq_len": "sequence length",
    "batch": "batch (size x accumulation x processes)",
    "world_size": "number of processes",
    "tuning": "what is tuned",
    "lora_r": "LoRA rank",
    "lora_targets": "LoRA's targets",
    "device": "device",
    "packing": "packing",
    "window": "kind of window",
    "convention": "convention of FLOPs",
}
_WAYS = {
    "precision": "precision",
    "optimizer": "optimizer",
    "attention": "attention",
    "kernels": "kernels",
    "bits": "bits",
    "lora_alpha": "LoRA's alpha",
    "weights_dtype": "type of weights",
    "compute_dtype": "type of products",
    "gradient_checkpointing": "gradient checkpointing",
    "batch_size": "batch size",
    "grad_accum": "accumulation",
    "pad_to_multiple_of": "padding to a multiple of",
    "lora_dropout": "LoRA's dropout",
    "lr": "learning rate",
    "lr_scheduler": "learning rate schedule",
    "trainer": "trainer",
    "threads": "threads",
    "evaluation": "evaluation in the window",
    "checkpoints": "checkpoints in the window",
}
_AROUND = {
    "trainable_parameters": "trainable parameters",
    "flops_per_token": "FLOPs per token",
    "power_limit_W": "power limit",
    **{n: n for n in ("driver", "torch", "transformers", "peft", "trl", "bitsandbytes", "unsloth")},
    "git_commit": "commit",
    "num_nodes": "nodes",
    "neuronxcc": "Neuron compiler",
}
# Facts that single metrics declare: where they differ, those metrics alone are not comparable.
_OF_SINGLE_METRICS = {
    "counted_by": "method of counting graphs",
    "score_offset": "offset of the score",
    "base_mfu": "baseline MFU of the score",
    "base_throughput": "baseline throughput of the score",
    "score_convention": "convention of the score's MFU",
}
WHOLE_RUN_FROM = "whole_run_from"  # where a whole run begins: at the command, or at the Meter
# Facts that every training has: listed as unknown if neither side has them. Others may be absent
# on both sides: full fine-tuning has no LoRA rank.
_ALWAYS = ("model", "dataset", "seq_len", "batch", "tuning", "device")
_PART_OF = {
    **dict.fromkeys(BATCH, ("batch", *BATCH)),
    "tuning": (
        *("tuning", "lora_r", "lora_alpha", "lora_targets", "bits"),
        *("trainable_parameters", "flops_per_token"),
    ),
    "device": ("device", "driver", "power_limit_W"),
    "model": ("model", "trainable_parameters", "flops_per_token"),
    "dataset": ("dataset", "data_sha256"),
    "seq_len": ("seq_len", "flops_per_token"),
}
_WARMER_C = 10.0
_OTHER_MODEL = 2.0  # ratio of FLOPs per token: other sequence lengths or adapters change them less
# As in `erg check`.
MIN_WINDOW_S = 5.0
MIN_STEPS = 10


@dataclass(frozen=True, slots=True)
class Fairness:
    """Reasons against comparing two groups, and facts that could explain a difference."""

    refusals: tuple[str, ...] = ()
    of_losses: tuple[str, ...] = ()  # against comparing losses only
    explanations: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()


def group_entries(
    entries: Sequence[Entry], by: Sequence[str]
) -> tuple[tuple[Group, ...], tuple[str, ...]]:
    """The groups in the order of their first runs, and notes on runs without these columns."""
    columns = {name for entry in entries for name in entry.facts} | {SOURCE}
    unknown = [name for name in by if name not in columns]
    if unknown:
        there = ", ".join(sorted(columns - {"run", "notes", "started"}))
        raise UsageError(f"no run has a column {unknown[0]!r}; there are {there}")
    members: dict[tuple[str, ...], list[Entry]] = {}
    silent = []
    for entry in entries:
        key = [column_of(entry, column) for column in by]
        lacking = [column for column, value in zip(by, key, strict=True) if value is None]
        if lacking:
            silent.append(f"{entry.source}: it does not state its {' and '.join(lacking)}")
        else:
            members.setdefault(tuple(str(value) for value in key), []).append(entry)
    is_given = tuple(by) == (SOURCE,)
    names = short_paths([key[0] for key in members]) if is_given else map(", ".join, members)
    groups = (Group(n, tuple(own)) for n, own in zip(names, members.values(), strict=True))
    return tuple(groups), tuple(silent)


def short_paths(paths: Sequence[str]) -> list[str]:
    """Paths without their common leading folders."""
    parts = [Path(path).parts for path in paths]
    folders = zip(*(path[:-1] for path in parts), strict=False)
    shared = len(list(takewhile(lambda names: len(set(names)) == 1, folders)))
    return [str(Path(*path[shared:])) for path in parts]


def default_group_by(entries: Sequence[Entry]) -> tuple[str, ...]:
    """The default columns to group by: the backend if there are several, else the source."""
    if len({entry.facts.get("backend") for entry in entries} - {None}) > 1:
        return ("backend",)
    if len({entry.argument for entry in entries}) > 1:
        return (SOURCE,)
    return ("backend",) if any("backend" in entry.facts for entry in entries) else (SOURCE,)


def mixed_facts(group: Group, by: Sequence[str]) -> Iterator[str]:
    """Facts that differ within a group though they must be equal, and runs that are too short."""
    exempt = _exempt(by)
    titles = {name: title for name, title in (_WORK | _WAYS).items() if name not in exempt}
    for column, title in titles.items():
        values = sorted(group.values(column))
        if len(values) > 1:
            yield f"{group.name} mixes runs of different {title} ({_listed(values)})"
    # `job` is set for resumed jobs only; the runs of such a job in a folder are one entry.
    for job, runs in Counter(entry.job for entry in group.entries if entry.job).items():
        if runs > 1:
            yield f"{group.name} has {runs} runs of the job {job}, which are not repeats"
    yield from _too_short(group)


def fairness(baseline: Group, other: Group, by: Sequence[str]) -> Fairness:
    """Compare the facts of two groups."""
    exempt = _exempt(by)
    refusals, unknown, explained = [], [], []
    for column, title in (_WORK | _WAYS | _AROUND).items():
        if column in exempt:
            continue
        sides = baseline.values(column), other.values(column)
        if all(sides) and sides[0] != sides[1]:
            if column in _WORK:
                refusals.append(f"{title} differs ({_both(*sides)})")
            else:
                explained.append(f"{title} ({_both(*sides)})")
        elif column not in _AROUND and not all(sides):
            is_unknown = any(sides) or _is_wanting(column, baseline, other)
            unknown += [title] if is_unknown else []
    if "flops_per_token" not in exempt:
        refusals += _other_models(baseline, other)
    steps = baseline.values("steps"), other.values("steps")
    of_losses: tuple[str, ...] = ()  # losses are comparable only after the same number of steps
    if not all(steps):
        unknown.append("number of steps")
    elif steps[0] != steps[1] or len(steps[0]) > 1:
        of_losses = (f"number of steps differs ({_both(*steps)})",)
    return Fairness(
        (*refusals, *mixed_facts(baseline, by), *mixed_facts(other, by)),
        of_losses,
        tuple(explained),
        tuple(_remarks(baseline, other)),
        tuple(unknown),
    )


def differing_facts(groups: Sequence[Group]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """All facts in which groups differ: the title, and the values of each group."""
    for column, title in (_WORK | _WAYS | _AROUND | _OF_SINGLE_METRICS).items():
        values = [sorted(group.values(column)) for group in groups]
        if any(own != values[0] for own in values):
            yield (title, tuple(_listed(own) if own else "not said" for own in values))


def why_other_terms(
    baseline: Group, other: Group, measured: Metric, fair: Fairness | None = None
) -> str:
    """Why a metric is not comparable, by step counts or facts that it depends on; else empty."""
    if fair is not None and measured.is_quality and fair.of_losses:
        return f"{NOT_COMPARABLE}{'; '.join(fair.of_losses)}"
    for name in measured.same_facts:
        sides = baseline.values(name), other.values(name)
        if len(set.union(*sides)) > 1:
            title = _OF_SINGLE_METRICS.get(name, name)
            return f"{NOT_COMPARABLE}{title} differs ({_both(*sides)})"
    starts = baseline.values(WHOLE_RUN_FROM) | other.values(WHOLE_RUN_FROM)
    if OF_WHOLE_RUN in measured.key and len(starts) > 1:
        return f"{NOT_COMPARABLE}one side's whole run starts with the command, one with the Meter"
    return ""


def _other_models(baseline: Group, other: Group) -> Iterable[str]:
    """Yield a refusal if a side names no model and FLOPs per token differ too much for one.

    Entries whose FLOPs are a lower bound are ignored.
    """
    sides = baseline.values("flops_per_token"), other.values("flops_per_token")
    conventions = {text.partition(", ")[2] for texts in sides for text in texts}
    each = [[e.flops_per_token for e in g.entries if e.flops_per_token] for g in (baseline, other)]
    is_named = baseline.values("model") and other.values("model")
    if is_named or len(conventions) != 1 or not all(each):
        return
    (low, high), (other_low, other_high) = ((min(flops), max(flops)) for flops in each)
    if other_low > _OTHER_MODEL * high or low > _OTHER_MODEL * other_high:
        yield f"FLOPs per token differ more than {_OTHER_MODEL:g} times ({_both(*sides)})"


def _is_wanting(column: str, baseline: Group, other: Group) -> bool:
    """True if a column that both sides lack leaves the work unknown."""
    has_checksums = bool(baseline.values("data_sha256") and other.values("data_sha256"))
    return column in _ALWAYS and not (column == "dataset" and has_checksums)


def _exempt(by: Sequence[str]) -> set[str]:
    return {name for column in by for name in _PART_OF.get(column, (column,))}


def _too_short(group: Group) -> Iterable[str]:
    for entry in group.entries:
        window_s, steps = entry.value("time.window_s"), entry.value("steps.count")
        if window_s is not None and window_s < MIN_WINDOW_S:
            yield (
                f"{entry.source}: a steady window of {duration(window_s)}, but"
                f" at least {MIN_WINDOW_S:g} s are needed"
            )
        elif steps is not None and steps < MIN_STEPS:
            yield f"{entry.source}: {steps:.0f} steady steps, but at least {MIN_STEPS} are needed"


def _remarks(baseline: Group, other: Group) -> Iterable[str]:
    seeds = baseline.values("seed"), other.values("seed")
    if all(seeds) and seeds[0] != seeds[1]:
        yield f"seeds differ ({_both(*seeds)}), so runs are not paired"
    begun = [sorted(group.values("started")) for group in (baseline, other)]
    if all(begun) and max(map(len, begun)) > 1:
        first, second = sorted((times[0], times[-1]) for times in begun)
        if first[1] < second[0]:
            yield (
                "all runs of one group were made before those of the other: a drift of the machine"
                " counts for one side (interleave them)"
            )
    starts_c = [
        [start_c for e in g.entries if (start_c := e.number("temperature_start_C")) is not None]
        for g in (baseline, other)
    ]
    if all(starts_c):
        ours_c, theirs_c = map(fmean, starts_c)
        if abs(ours_c - theirs_c) >= _WARMER_C:
            sides = f"{ours_c:.0f} °C and {theirs_c:.0f} °C"
            yield f"devices began at {sides}: heat costs speed and power"


def _both(ours: set[str], theirs: set[str]) -> str:
    return f"{_listed(sorted(ours))} / {_listed(sorted(theirs))}"


def _listed(values: Sequence[str]) -> str:
    """Up to four values; long ones such as checksums are cut."""
    short = [value if len(value) <= 40 else f"{value[:12]}.." for value in values[:4]]
    more = [f"{len(values) - 4} more"] if len(values) > 4 else []
    return ", ".join([*short, *more]) or "none"
