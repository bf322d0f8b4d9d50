"""Which runs are repeats of one another, and may the groups be compared?

The trap of the original: a table in which one backend ran 2 048 tokens and the other 1 024, and a
speed-up in bold. What sets the work (model, data, length, batch, what is tuned, device) has to be
alike, or there is no verdict; what belongs to the question (precision, optimizer, kernels,
versions) may differ, and stands beside the verdict as what could explain it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ergmeter.errors import UsageError
from ergmeter.units import duration

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ergmeter.compare.entry import Entry

GIVEN = "source"  # the pseudo column: what was named on the command line
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
    "lr_scheduler": "its schedule",
    "trainer": "trainer",
    "threads": "threads",
    "evaluation": "evaluation in the window",
    "checkpoints": "checkpoints in the window",
}
_AROUND = {
    "trainable_parameters": "trainable parameters",
    "flops_per_token": "FLOPs per token",
    "power_limit_W": "power limit",
    "driver": "driver",
    "torch": "torch",
    "transformers": "transformers",
    "peft": "peft",
    "trl": "trl",
    "bitsandbytes": "bitsandbytes",
    "unsloth": "unsloth",
    "git_commit": "commit",
}
WHOLE_RUN_FROM = "whole_run_from"  # what a whole run begins with: the command, or the Meter
# What sets the work of any training: where neither side tells it, that is named too. The rest need
# not be: training every weight has no LoRA rank.
_ALWAYS = ("model", "dataset", "seq_len", "batch", "tuning", "device")
_BATCH = ("batch_size", "grad_accum", "world_size")
_PART_OF = {
    **dict.fromkeys(_BATCH, ("batch", *_BATCH)),
    "tuning": (
        "tuning",
        "lora_r",
        "lora_alpha",
        "lora_targets",
        "bits",
        "trainable_parameters",
        "flops_per_token",
    ),
    "device": ("device", "driver", "power_limit_W"),
    "model": ("model", "trainable_parameters", "flops_per_token"),
    "dataset": ("dataset", "data_sha256"),
    "seq_len": ("seq_len", "flops_per_token"),
}
_WARMER_C = 10.0
# As `erg check` has them.
MIN_WINDOW_S = 5.0
MIN_STEPS = 10


@dataclass(frozen=True, slots=True)
class Group:
    """Runs that are repeats of one another."""

    name: str
    entries: tuple[Entry, ...]

    def said(self, column: str) -> set[str]:
        """What its runs say of a column."""
        found = (_of(entry, column) for entry in self.entries)
        return {value for value in found if value is not None}


@dataclass(frozen=True, slots=True)
class Fairness:
    """What speaks against comparing two groups, for whom it holds, and what could explain it."""

    refusals: tuple[str, ...] = ()
    of_losses: tuple[str, ...] = ()  # just of what was learned, not of what it cost
    explanations: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()


def grouped(
    entries: Sequence[Entry], by: Sequence[str]
) -> tuple[tuple[Group, ...], tuple[str, ...]]:
    """The groups in the order of their first runs, and who says nothing of the columns."""
    known = {name for entry in entries for name in entry.facts} | {GIVEN}
    unknown = [name for name in by if name not in known]
    if unknown:
        there = ", ".join(sorted(known - {"run", "notes", "started"}))
        raise UsageError(f"no run says its {unknown[0]!r}; there are {there}")
    found: dict[tuple[str, ...], list[Entry]] = {}
    silent = []
    for entry in entries:
        key = [_of(entry, column) for column in by]
        lacking = [column for column, value in zip(by, key, strict=True) if value is None]
        if lacking:
            silent.append(f"{entry.source}: it does not say its {' and '.join(lacking)}")
        else:
            found.setdefault(tuple(str(value) for value in key), []).append(entry)
    is_given = tuple(by) == (GIVEN,)
    names = short_paths([key[0] for key in found]) if is_given else map(", ".join, found)
    groups = (Group(n, tuple(own)) for n, own in zip(names, found.values(), strict=True))
    return tuple(groups), tuple(silent)


def short_paths(paths: Sequence[str]) -> list[str]:
    """Paths without the folders that all of them share."""
    parts = [Path(path).parts for path in paths]
    shared = 0
    while all(len(one) > shared + 1 for one in parts) and len({one[shared] for one in parts}) == 1:
        shared += 1
    return [str(Path(*one[shared:])) for one in parts]


def question(entries: Sequence[Entry]) -> tuple[str, ...]:
    """What to group by where nobody says: the backend if there are several, else the sources."""
    if len({entry.facts.get("backend") for entry in entries} - {None}) > 1:
        return ("backend",)
    if len({entry.given for entry in entries}) > 1:
        return (GIVEN,)
    return ("backend",) if any("backend" in entry.facts for entry in entries) else (GIVEN,)


def mixed(group: Group, by: Sequence[str]) -> tuple[str, ...]:
    """In what the runs of a group differ that would have to be alike."""
    exempt = _exempt(by)
    titles = {name: title for name, title in (_WORK | _WAYS).items() if name not in exempt}
    found = []
    for column, title in titles.items():
        values = sorted(group.said(column))
        if len(values) > 1:
            found.append(f"{group.name} mixes runs of different {title} ({_listed(values)})")
    return (*found, *_too_short(group))


def fairness(baseline: Group, other: Group, by: Sequence[str]) -> Fairness:
    """Whether two groups may be compared."""
    exempt = _exempt(by)
    refusals, unknown = [], []
    for column, title in _WORK.items():
        if column in exempt:
            continue
        sides = baseline.said(column), other.said(column)
        if all(sides) and sides[0] != sides[1]:
            refusals.append(f"{title} differs ({_both(*sides)})")
        elif not all(sides) and (any(sides) or _is_wanting(column, baseline, other)):
            unknown.append(title)
    ways = ((name, title) for name, title in _WAYS.items() if name not in exempt)
    unknown += [
        title for name, title in ways if bool(baseline.said(name)) != bool(other.said(name))
    ]
    if not (baseline.said("steps") and other.said("steps")):
        unknown.append("number of steps")
    explained = [
        f"{title} ({_both(*sides)})"
        for column, title in (_WAYS | _AROUND).items()
        if column not in exempt
        if all(sides := (baseline.said(column), other.said(column))) and sides[0] != sides[1]
    ]
    return Fairness(
        (*refusals, *mixed(baseline, by), *mixed(other, by)),
        _of_losses(baseline, other),
        tuple(explained),
        tuple(_remarks(baseline, other)),
        tuple(unknown),
    )


def differing(groups: Sequence[Group]) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Everything in which groups differ: what it is, and what each of them says of it."""
    found = []
    for column, title in (_WORK | _WAYS | _AROUND).items():
        said = [sorted(group.said(column)) for group in groups]
        if any(one != said[0] for one in said):
            found.append((title, tuple(_listed(one) if one else "not said" for one in said)))
    return tuple(found)


def _of(entry: Entry, column: str) -> str | None:
    if column == GIVEN:
        return entry.given
    if column == "batch":
        numbers = [entry.number(name) for name in _BATCH]
        size, accum, world = numbers
        return None if size is None else f"{size * (accum or 1) * (world or 1):g}"
    said = entry.facts.get(column)
    if column == "bits" and said is None and "tuning" in entry.facts:
        return "none"  # who says what is tuned says its bits where there are few
    # QLoRA is LoRA on weights of few bits, and the bits are compared by themselves.
    return "lora" if column == "tuning" and said == "qlora" else said


def _is_wanting(column: str, baseline: Group, other: Group) -> bool:
    """Whether a column that neither side tells leaves open what was done."""
    has_checksums = bool(baseline.said("data_sha256") and other.said("data_sha256"))
    return column in _ALWAYS and not (column == "dataset" and has_checksums)


def _exempt(by: Sequence[str]) -> set[str]:
    return {name for column in by for name in _PART_OF.get(column, (column,))}


def _too_short(group: Group) -> Iterable[str]:
    for entry in group.entries:
        window_s, steps = entry.value("time.window_s"), entry.value("steps.count")
        if window_s is not None and window_s < MIN_WINDOW_S:
            yield (
                f"{entry.source}: a steady window of {duration(window_s)}, where"
                f" {MIN_WINDOW_S:g} s are the least"
            )
        elif steps is not None and steps < MIN_STEPS:
            yield f"{entry.source}: {steps:.0f} steady steps, where {MIN_STEPS} are the least"


def _of_losses(baseline: Group, other: Group) -> tuple[str, ...]:
    """Losses are of as much learning: the same steps of the same batch."""
    sides = baseline.said("steps"), other.said("steps")
    if all(sides) and (sides[0] != sides[1] or len(sides[0]) > 1):
        return (f"number of steps differs ({_both(*sides)})",)
    return ()


def _remarks(baseline: Group, other: Group) -> Iterable[str]:
    seeds = baseline.said("seed"), other.said("seed")
    if all(seeds) and seeds[0] != seeds[1]:
        yield f"seeds differ ({_both(*seeds)}), so runs are not paired"
    begun = [sorted(group.said("started")) for group in (baseline, other)]
    if all(begun) and max(map(len, begun)) > 1:
        first, second = sorted((times[0], times[-1]) for times in begun)
        if first[1] < second[0]:
            yield (
                "all runs of one group were made before those of the other: a drift of the machine"
                " counts for one side (interleave them)"
            )
    warm = [
        _mean(entry.number("temperature_start_C") for entry in g.entries) for g in (baseline, other)
    ]
    if warm[0] is not None and warm[1] is not None and abs(warm[0] - warm[1]) >= _WARMER_C:
        yield f"devices began at {warm[0]:.0f} °C and {warm[1]:.0f} °C: heat costs speed and power"


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _both(ours: set[str], theirs: set[str]) -> str:
    return f"{_listed(sorted(ours))} / {_listed(sorted(theirs))}"


def _listed(values: Sequence[str]) -> str:
    """At most a few, none of them long: a checksum is told by its beginning."""
    short = [value if len(value) <= 40 else f"{value[:12]}.." for value in values[:4]]
    more = [f"{len(values) - 4} more"] if len(values) > 4 else []
    return ", ".join([*short, *more]) or "none"
