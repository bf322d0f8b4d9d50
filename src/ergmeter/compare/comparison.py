"""Is A better than B? Groups of repeated runs against a baseline: figures, verdicts, front.

The trap: comparing what differs in more than what is asked. Fairness comes first (`grouping`); a
pair that is not comparable has refusals and no verdicts, unless somebody wants them anyway, and
then the refusals stand beside them.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ergmeter.compare.entry import EVAL_LOSS
from ergmeter.compare.grouping import (
    WHOLE_RUN_FROM,
    Fairness,
    Group,
    fairness,
    grouped,
    mixed,
    question,
)
from ergmeter.compare.pareto import Front, front
from ergmeter.compare.time_to_loss import ENERGY, SMOOTHING, TIME, to_target
from ergmeter.compare.verdicts import (
    DEVICE_MEMORY,
    HOST_MEMORY,
    JOULES,
    LOSS,
    MFU,
    OF_WHOLE_RUN,
    RATE,
    WHOLE_JOULES,
    WHOLE_MFU,
    WHOLE_RATE,
    Measure,
    Verdict,
    absent,
    measure,
    verdict,
)
from ergmeter.errors import NotMeasurable, UsageError
from ergmeter.records import Reading
from ergmeter.stats.ratio import UNBOUNDED, Contrast, Mean, contrast, mean

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ergmeter.compare.entry import Entry, SourceEntries

DEFAULT = (
    *(RATE, WHOLE_RATE, JOULES, WHOLE_JOULES, DEVICE_MEMORY, HOST_MEMORY, MFU, WHOLE_MFU),
    *(LOSS, EVAL_LOSS),
)
# What a front is over; of memory, that of the devices where all groups have it.
_FRONT = ((RATE,), (JOULES,), (DEVICE_MEMORY, HOST_MEMORY))
_SENSOR = 0.01


@dataclass(frozen=True, slots=True)
class CompareOptions:
    """How to compare."""

    group_by: tuple[str, ...] = ()
    baseline: str | None = None
    metrics: tuple[str, ...] = ()
    anyway: bool = False
    target_loss: float | None = None
    confidence: float = 0.95
    effect: float = 0.02


@dataclass(frozen=True, slots=True)
class GroupPair:
    """One group against the baseline."""

    baseline: str
    other: str
    fairness: Fairness
    verdicts: tuple[Verdict, ...]
    is_comparable: bool


@dataclass(frozen=True, slots=True)
class Comparison:
    """All of it."""

    group_by: tuple[str, ...]
    groups: tuple[Group, ...]
    measures: tuple[Measure, ...]
    pairs: tuple[GroupPair, ...]
    front: Front | None
    left_out: tuple[str, ...]
    notes: tuple[str, ...]
    options: CompareOptions

    @property
    def is_comparable(self) -> bool:
        """Whether there are pairs, and every one may be compared."""
        return bool(self.pairs) and all(pair.is_comparable for pair in self.pairs)

    @property
    def cautions(self) -> tuple[str, ...]:
        """What is to be known of single runs before their verdicts are, each once."""
        entries = (entry for group in self.groups for entry in group.entries)
        return tuple(dict.fromkeys(line for entry in entries for line in entry.cautions))

    @property
    def to_compare(self) -> tuple[Group, ...]:
        """The baseline, and the groups that may be compared with it."""
        refused = {pair.other for pair in self.pairs if not pair.is_comparable}
        return tuple(group for group in self.groups if group.name not in refused)


def figures_needed(options: CompareOptions) -> tuple[str, ...]:
    """The keys of all that a comparison may show. UsageError for a figure there is not."""
    return tuple(dict.fromkeys((*DEFAULT, *(measure(name).key for name in options.metrics))))


def compare(found: SourceEntries, options: CompareOptions) -> Comparison:
    """Compare what was found. Raises UsageError for groups or figures there are not."""
    entries = _with_target(found.entries, options.target_loss)
    if not entries:
        why = f": {found.left_out[0]}" if found.left_out else ""
        raise UsageError(f"nothing to compare{why}")
    by = options.group_by or question(entries)
    groups, silent = grouped(entries, by)
    if not groups:
        raise UsageError(f"no run says its {' and '.join(by)}")
    groups = _baseline_first(groups, options.baseline)
    wanted = _measures(entries, options)
    named = {measure(name) for name in options.metrics}
    measures = tuple(one for one in wanted if one in named or _somebody_has(entries, one))
    pairs = tuple(_pair(groups[0], other, measures, by, options) for other in groups[1:])
    whole = Comparison(by, groups, measures, pairs, None, (*found.left_out, *silent), (), options)
    absent_ = _absent(entries, [one for one in wanted if one not in measures])
    return replace(whole, front=_front(whole), notes=(*absent_, *_notes(whole)))


def contrast_of(ours: Group, theirs: Group, measured: Measure, *, confidence: float) -> Contrast:
    """Two groups in one figure: paired where seeds match one to one.

    A figure that rests on an assumption widens the interval to where it may lie: the least of ours
    over the most of theirs, and the other way round.
    """
    a, b = (_having(group, measured.key) for group in (ours, theirs))
    for group, own in ((ours, a), (theirs, b)):
        wrong = impossible_entry(group, measured.key)
        if wrong is not None or not own:
            why = (wrong or group.entries[0]).why_not(measured.key)
            raise NotMeasurable(f"{group.name}: {why}")
    pairs = _paired(a, b)
    if pairs is not None:
        a, b = pairs

    def between(end: str, other_end: str) -> Contrast:
        return contrast(
            [_end(entry, measured.key, end) for entry in a],
            [_end(entry, measured.key, other_end) for entry in b],
            scale=measured.scale,
            is_paired=pairs is not None,
            confidence=confidence,
        )

    middle = between("value", "value")
    open_ = [entry for entry in (*a, *b) if measured.key in entry.assumed]
    if middle.low is None or not open_:
        return middle
    ends = between("low", "high").low, between("high", "low").high
    if None in ends:
        return replace(middle, low=None, high=None, why=UNBOUNDED)
    note = open_[0].figures[measured.key]
    assert isinstance(note, Reading)
    return replace(middle, low=ends[0], high=ends[1], why=note.note)


def mean_of(group: Group, measured: Measure, *, confidence: float) -> Mean:
    """What a group's runs come to in one figure. NotMeasurable where there is none."""
    if measured.key in (TIME, ENERGY):
        _need_all(measured, group)
    wrong = impossible_entry(group, measured.key)
    own = [entry.value(measured.key) for entry in group.entries]
    values = [value for value in own if value is not None]
    if wrong is not None or not values:
        raise NotMeasurable((wrong or group.entries[0]).why_not(measured.key))
    return mean(values, scale=measured.scale, confidence=confidence)


def impossible_entry(group: Group, key: str) -> Entry | None:
    """The first run whose reading is impossible: the group then has no mean and no verdict."""
    found = ((entry, entry.figures.get(key)) for entry in group.entries)
    return next((e for e, one in found if isinstance(one, Reading) and one.impossible), None)


def _having(group: Group, key: str) -> list[Entry]:
    return [entry for entry in group.entries if entry.value(key) is not None]


def _end(entry: Entry, key: str, end: str) -> float:
    found = entry.figures[key]
    assert isinstance(found, Reading)
    bounds = {"low": found.low, "high": found.high}
    bound = bounds.get(end) if key in entry.assumed else None
    return found.value if bound is None else bound


def _paired(a: list[Entry], b: list[Entry]) -> tuple[list[Entry], list[Entry]] | None:
    """The two in the order of their seeds, where each seed stands once on both sides."""
    ours = {entry.facts.get("seed"): entry for entry in a}
    theirs = {entry.facts.get("seed"): entry for entry in b}
    is_one_to_one = len(ours) == len(a) and len(theirs) == len(b) and ours.keys() == theirs.keys()
    if not is_one_to_one or None in ours or len(a) < 2:
        return None
    order = sorted(ours, key=str)
    return [ours[seed] for seed in order], [theirs[seed] for seed in order]


def _with_target(entries: Sequence[Entry], loss: float | None) -> tuple[Entry, ...]:
    if loss is None:
        return tuple(entries)
    found = ((one, to_target(one.run, loss, training=one.training)) for one in entries)
    return tuple(replace(one, figures={**one.figures, **target}) for one, target in found)


def _baseline_first(groups: tuple[Group, ...], name: str | None) -> tuple[Group, ...]:
    if name is None:
        return groups
    chosen = [group for group in groups if group.name == name]
    if not chosen:
        there = [group.name for group in groups]
        near = difflib.get_close_matches(name, there, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UsageError(f"no group {name!r}; {hint}there are {', '.join(there)}")
    return (chosen[0], *(group for group in groups if group.name != name))


def _measures(entries: Sequence[Entry], options: CompareOptions) -> tuple[Measure, ...]:
    if options.metrics:
        chosen = [measure(name) for name in options.metrics]
    else:
        has_device = any(entry.value(DEVICE_MEMORY) is not None for entry in entries)
        has_host = any(entry.value(HOST_MEMORY) is not None for entry in entries)
        unwanted = HOST_MEMORY if has_device or not has_host else DEVICE_MEMORY
        chosen = [measure(key) for key in DEFAULT if key != unwanted]
    if options.target_loss is not None:
        chosen += [measure(TIME), measure(ENERGY)]
    return tuple(dict.fromkeys(chosen))


def _somebody_has(entries: Sequence[Entry], measured: Measure) -> bool:
    return any(isinstance(entry.figures.get(measured.key), Reading) for entry in entries)


def _absent(entries: Sequence[Entry], measures: Sequence[Measure]) -> list[str]:
    """What no run has, by reason."""
    by_reason: dict[str, list[str]] = {}
    for one in measures:
        if OF_WHOLE_RUN not in one.key:  # the one over the training window says why
            by_reason.setdefault(entries[0].why_not(one.key), []).append(one.noun)
    return [f"no {', '.join(nouns)}: {reason}" for reason, nouns in by_reason.items()]


def _pair(
    baseline: Group,
    other: Group,
    measures: Sequence[Measure],
    by: Sequence[str],
    options: CompareOptions,
) -> GroupPair:
    fair = fairness(baseline, other, by)
    if fair.refusals and not options.anyway:
        return GroupPair(baseline.name, other.name, fair, (), is_comparable=False)
    verdicts = tuple(_verdict(baseline, other, one, fair, options) for one in measures)
    return GroupPair(baseline.name, other.name, fair, verdicts, is_comparable=True)


def _verdict(
    baseline: Group, other: Group, measured: Measure, fair: Fairness, options: CompareOptions
) -> Verdict:
    if measured.is_quality and fair.of_losses and not options.anyway:
        return absent(measured, f"not comparable: {'; '.join(fair.of_losses)}")
    starts = [group.said(WHOLE_RUN_FROM) for group in (baseline, other)]
    if OF_WHOLE_RUN in measured.key and len(set.union(*starts)) > 1 and not options.anyway:
        return absent(measured, "not comparable: one whole run is since the command, one the Meter")
    try:
        if measured.key in (TIME, ENERGY):
            _need_all(measured, baseline, other)
        found = contrast_of(other, baseline, measured, confidence=options.confidence)
    except NotMeasurable as error:
        return absent(measured, str(error))
    return verdict(other.name, measured, found, effect=options.effect, repeats=found.repeats)


def _need_all(measured: Measure, *groups: Group) -> None:
    """A mean over the runs that got there says nothing of those that did not."""
    for group in groups:
        own = _having(group, measured.key)
        if own and len(own) < len(group.entries):
            lacking = next(entry for entry in group.entries if entry not in own)
            raise NotMeasurable(
                f"{group.name}: {len(own)} of {len(group.entries)} runs have it"
                f" ({lacking.why_not(measured.key)})"
            )


def _front(whole: Comparison) -> Front | None:
    groups = {group.name: group for group in whole.to_compare}
    axes, _ = front_axes(whole)
    try:
        return front(
            list(groups),
            axes,
            lambda one, other, axis: contrast_of(
                groups[one], groups[other], axis, confidence=whole.options.confidence
            ),
        )
    except NotMeasurable:
        return None


def front_axes(whole: Comparison) -> tuple[list[Measure], dict[tuple[str, str], list[str]]]:
    """The figures that a front is over, which all groups have; of the others, who lacks them.

    Those by figure and reason. A figure of which no ratio can be taken, a rate of 0, is lacking.
    """
    axes: list[Measure] = []
    lacking: dict[tuple[str, str], list[str]] = {}
    for keys in _FRONT:
        without = [_without(whole, measure(key)) for key in keys]
        full = [key for key, found in zip(keys, without, strict=True) if not found]
        if full:
            axes.append(measure(full[0]))
        else:
            lacking |= without[0]
    return axes, lacking


def _without(whole: Comparison, measured: Measure) -> dict[tuple[str, str], list[str]]:
    found: dict[tuple[str, str], list[str]] = {}
    for group in whole.to_compare:
        try:
            mean_of(group, measured, confidence=whole.options.confidence)
        except NotMeasurable as error:
            found.setdefault((measured.key, str(error)), []).append(group.name)
    return found


def _notes(whole: Comparison) -> tuple[str, ...]:
    found = list(dict.fromkeys(r for g in whole.groups for e in g.entries for r in e.remarks))
    for one in whole.measures:
        for group in whole.groups:
            own = _having(group, one.key)
            if own and len(own) < len(group.entries):
                found.append(
                    f"{one.noun}: {len(own)} of {len(group.entries)} runs of {group.name} have it"
                )
    if len(whole.groups) == 1:
        found.append("one group: nothing to compare it with")
        found += mixed(whole.groups[0], whole.group_by)
    if whole.options.target_loss is not None:
        found.append(f"target loss {whole.options.target_loss:g}: {SMOOTHING}")
    sensor = max((_width(e) for g in whole.groups for e in g.entries), default=0.0)
    if sensor > _SENSOR:
        found.append(
            f"each energy is itself known to {sensor * 100:.0f} % or so (its sensor), which repeats"
            " do not show; of one device it is alike on both sides"
        )
    return tuple(found)


def _width(entry: Entry) -> float:
    """Half of what a measured energy leaves open, as a share of it."""
    found = entry.figures.get(JOULES)
    if not isinstance(found, Reading) or JOULES in entry.assumed or not found.value:
        return 0.0
    if found.low is None or found.high is None:
        return 0.0
    return (found.high - found.low) / 2 / abs(found.value)
