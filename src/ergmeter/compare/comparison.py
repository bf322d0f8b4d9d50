"""Compares groups of repeated runs with a baseline: metrics, verdicts and the Pareto front.

Fairness comes first (`grouping`). A pair that is not comparable has refusals and no verdicts,
unless the user asks for them anyway; the refusals are then shown beside them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations, compress

from ergmeter.compare.entry import Entry, Group, SourceEntries, measure
from ergmeter.compare.grouping import (
    Fairness,
    default_group_by,
    fairness,
    group_entries,
    mixed_facts,
    why_other_terms,
)
from ergmeter.compare.pairing import (
    CompareOptions,
    ConfigurationPair,
    Pairing,
    padding_remark,
    pair_sides,
    pair_verdict,
    pooled_verdict,
)
from ergmeter.compare.time_to_loss import ENERGY, SMOOTHING, TIME, to_target
from ergmeter.compare.verdicts import OF_WHOLE_RUN, Verdict, absent_verdict, verdict
from ergmeter.errors import NotMeasurable, UsageError, suggestion
from ergmeter.metrics.catalog import Metric, every_metric, in_view, rule_metric
from ergmeter.records import Displayed, Reading
from ergmeter.stats.ratio import UNBOUNDED, Contrast, Mean, contrast, holm, mean
from ergmeter.units import grouped


@dataclass(frozen=True, slots=True)
class Front:
    """The Pareto front: the groups on it, and for each beaten group the groups that beat it.

    A group is beaten only by one that is better in some metric, confirmed by Holm's method over all
    pairs of groups and metrics, and shown to be worse in none. So noise rarely moves a group off
    the front. Groups with a single run are compared by their plain values; `remark` notes this.
    """

    axes: tuple[str, ...]
    on: tuple[str, ...]
    beaten: dict[str, tuple[str, ...]]
    remark: str = ""


def _sign(axis: Metric, result: Contrast) -> int:
    """1 if `result` shows better, -1 if worse, 0 if neither. Single runs: by plain values."""
    is_open = min(result.repeats) > 1 and not result.is_shown
    if is_open or result.value == result.neutral:
        return 0
    return 1 if (result.value > result.neutral) == (axis.direction == "higher") else -1


def _confirmed(contrasts: Sequence[Contrast], confidence: float) -> tuple[list[bool], int]:
    """For each contrast, whether Holm's method over all confirms it; and the number tested.

    Single runs, and values that are equal in every repeat, are not tested and count as confirmed.
    """
    p_values = [None if result.is_exact else result.p_value() for result in contrasts]
    tested = [p_value for p_value in p_values if p_value is not None]
    shown = iter(holm(tested, 1.0 - confidence))
    return [p_value is None or next(shown) for p_value in p_values], len(tested)


_JOULES = "energy.joules_per_token"
_SENSOR = 0.01


@dataclass(frozen=True, slots=True)
class GroupPair(ConfigurationPair):
    """One group (`new`) against the baseline (`ref`), or one configuration of NEW and REF."""

    fairness: Fairness
    verdicts: tuple[Verdict, ...]
    is_comparable: bool
    padding: str = ""  # why samples/s and tokens/s disagree


_UNMATCHED = Pairing((), ())


@dataclass(frozen=True, slots=True)
class Comparison(Displayed):
    """A comparison's result: groups, verdicts against the baseline, Pareto front, notes."""

    group_by: tuple[str, ...]
    groups: tuple[Group, ...]
    measures: tuple[Metric, ...]
    pairs: tuple[GroupPair, ...]
    front: Front | None
    left_out: tuple[str, ...]
    notes: tuple[str, ...]
    options: CompareOptions
    pairing: Pairing = _UNMATCHED  # if two sides were matched by configuration
    pooled: tuple[Verdict, ...] = ()  # all configurations together

    @property
    def is_comparable(self) -> bool:
        """True if there are pairs and all of them are comparable."""
        return bool(self.pairs) and all(pair.is_comparable for pair in self.pairs)

    @property
    def cautions(self) -> tuple[str, ...]:
        """The cautions of all runs, each once."""
        entries = (entry for group in self.groups for entry in group.entries)
        return tuple(dict.fromkeys(line for entry in entries for line in entry.cautions))

    def mean(self, group: Group, measured: Metric) -> Mean:
        """The mean of a group's runs in one metric. NotMeasurable if it has none."""
        if measured.key in (TIME, ENERGY):
            _need_all(measured, group)
        if mixed := why_other_terms(group, group, measured):
            raise NotMeasurable(mixed)
        wrong = impossible_entry(group, measured.key)
        own = [entry.value(measured.key) for entry in group.entries]
        values = [value for value in own if value is not None]
        if wrong is not None or not values:
            raise NotMeasurable((wrong or group.entries[0]).why_not(measured.key))
        # A job may lose 0 steps: an arithmetic mean allows 0, the geometric mean of rates does not.
        has_zero = measured.scope == "job" and 0 in values
        scale = "difference" if has_zero else measured.scale
        return mean(values, scale=scale, confidence=self.options.confidence)

    @property
    def to_compare(self) -> tuple[Group, ...]:
        """The baseline and the groups that are comparable with it."""
        refused = {pair.new.name for pair in self.pairs if not pair.is_comparable}
        return tuple(group for group in self.groups if group.name not in refused)


def _front_keys() -> list[list[str]]:
    """Alternative metrics for each axis of the front; the first that all groups have is used."""
    return list(grouped((at.group or key, key) for key, at in in_view("pareto").items()).values())


def figures_needed(options: CompareOptions) -> tuple[str, ...]:
    """The keys of all metrics a comparison may show. UsageError for an unknown metric."""
    return tuple(
        dict.fromkeys((*in_view("compare"), *(measure(name).key for name in options.metrics)))
    )


def compare(source: SourceEntries, options: CompareOptions) -> Comparison:
    """Compare the runs of a source. UsageError for unknown groups or metrics."""
    left_out = source.unused
    entries = _with_target(source.ended_well, options.target_loss)
    if not entries:
        why = f": {left_out[0]}" if left_out else ""
        raise UsageError(f"nothing to compare{why}")
    by = options.group_by or default_group_by(entries)
    groups, silent = group_entries(entries, by)
    if not groups:
        raise UsageError(f"no run states its {' and '.join(by)}")
    groups = _baseline_first(groups, options.baseline)
    wanted = _measures(entries, options)
    named = {measure(name) for name in options.metrics}
    read = {
        key for e in entries for key, result in e.figures.items() if isinstance(result, Reading)
    }
    measures = tuple(metric for metric in wanted if metric in named or metric.key in read)
    pairs = _corrected([_pair(groups[0], g, measures, by, options) for g in groups[1:]], options)
    comparison = Comparison(by, groups, measures, pairs, None, (*left_out, *silent), (), options)
    absent_ = _absent(entries, [candidate for candidate in wanted if candidate not in measures])
    return replace(comparison, front=_front(comparison), notes=(*absent_, *_notes(comparison)))


def compare_sides(
    new: Sequence[Entry], ref: Sequence[Entry], options: CompareOptions
) -> Comparison:
    """Compare NEW with REF for each configuration, and pooled over all of them."""
    names = options.metrics or in_view("bench compare")
    measures = tuple(dict.fromkeys(rule_metric(name) for name in names))
    pairing = pair_sides(new, ref, options)
    pairs = []
    for groups in pairing.both:
        verdicts = (pair_verdict(groups, measured, "ratio", options) for measured in measures)
        pairs.append(
            GroupPair(
                *(groups.name, groups.new, groups.ref, Fairness()),
                verdicts=tuple(verdict for verdict in verdicts if verdict is not None),
                is_comparable=True,
                padding=padding_remark(groups),
            )
        )
    all_verdicts = [verdict for pair in pairs for verdict in pair.verdicts]
    by_measure = ([v for v in all_verdicts if v.measure == measured] for measured in measures)
    pooled = [pooled_verdict(verdicts, options) for verdicts in by_measure]
    sides = tuple(group for pair in pairing.both for group in (pair.new, pair.ref))
    return Comparison(
        *(pairing.by, sides, measures, tuple(pairs), None, (), (), options, pairing),
        pooled=tuple(each for each in pooled if each is not None),
    )


def contrast_of(ours: Group, theirs: Group, measured: Metric, *, confidence: float) -> Contrast:
    """The contrast of `ours` with `theirs` in one metric; paired if seeds match one to one.

    Assumed values widen the interval: from our lowest over their highest to our highest over their
    lowest.
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


def impossible_entry(group: Group, key: str) -> Entry | None:
    """The first run with an impossible reading; the group then has no mean and no verdict."""
    readings = ((entry, entry.figures.get(key)) for entry in group.entries)
    return next(
        (e for e, reading in readings if isinstance(reading, Reading) and reading.impossible), None
    )


def _having(group: Group, key: str) -> list[Entry]:
    return [entry for entry in group.entries if entry.value(key) is not None]


def _end(entry: Entry, key: str, end: str) -> float:
    reading = entry.figures[key]
    assert isinstance(reading, Reading)
    bounds = {"low": reading.low, "high": reading.high}
    bound = bounds.get(end) if key in entry.assumed else None
    return reading.value if bound is None else bound


def _paired(a: list[Entry], b: list[Entry]) -> tuple[list[Entry], list[Entry]] | None:
    """Both sides in the order of their seeds, if each seed occurs once on both; else None."""
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
    targets = ((entry, to_target(entry.run, loss, training=entry.training)) for entry in entries)
    return tuple(replace(entry, figures={**entry.figures, **target}) for entry, target in targets)


def _baseline_first(groups: tuple[Group, ...], name: str | None) -> tuple[Group, ...]:
    if name is None:
        return groups
    chosen = [group for group in groups if group.name == name]
    if not chosen:
        there = [group.name for group in groups]
        hint = suggestion(name, there, "did you mean {!r}? ")
        raise UsageError(f"no group {name!r}; {hint}there are {', '.join(there)}")
    return (chosen[0], *(group for group in groups if group.name != name))


def _measures(entries: Sequence[Entry], options: CompareOptions) -> tuple[Metric, ...]:
    if options.metrics:
        chosen = [measure(name) for name in options.metrics]
    else:
        present = {key for e in entries for key in e.figures if e.value(key) is not None}
        unwanted = {
            key
            for keys in _front_keys()
            for key in keys
            if key != next((k for k in keys if k in present), keys[0])
        }
        chosen = [measure(key) for key in in_view("compare") if key not in unwanted]
        if any(entry.kind == "job" for entry in entries):
            chosen += [metric for metric in every_metric().values() if metric.scope == "job"]
    if options.target_loss is not None:
        chosen += [measure(TIME), measure(ENERGY)]
    return tuple(dict.fromkeys(chosen))


def _absent(entries: Sequence[Entry], measures: Sequence[Metric]) -> list[str]:
    """One note for each reason, naming the metrics that it keeps from all runs."""
    by_reason = grouped(
        (entries[0].why_not(measured.key), measured.phrase)
        for measured in measures
        if OF_WHOLE_RUN not in measured.key  # the training window's metric has the same reason
    )
    return [f"no {', '.join(nouns)}: {reason}" for reason, nouns in by_reason.items()]


def _pair(
    baseline: Group,
    other: Group,
    measures: Sequence[Metric],
    by: Sequence[str],
    options: CompareOptions,
) -> GroupPair:
    fair = fairness(baseline, other, by)
    is_comparable = options.anyway or not fair.refusals
    compared = measures if is_comparable else ()
    verdicts = tuple(_verdict(baseline, other, measured, fair, options) for measured in compared)
    return GroupPair(other.name, other, baseline, fair, verdicts, is_comparable)


def _corrected(pairs: Sequence[GroupPair], options: CompareOptions) -> tuple[GroupPair, ...]:
    """The pairs; a difference that Holm's method doesn't confirm becomes "not shown"."""
    tests: dict[str, list[tuple[str, float]]] = {}  # group and p-value, by metric
    for pair in pairs:
        for v in pair.verdicts:
            if v.contrast and (p := v.contrast.p_value()) is not None:
                tests.setdefault(v.measure.key, []).append((pair.name, p))
    rejected: dict[tuple[str, str], int] = {}  # the number of tests, by group and metric
    for key, own in tests.items():
        shown = holm([p for _, p in own], 1.0 - options.confidence)
        lost = (name for (name, _), is_shown in zip(own, shown, strict=True) if not is_shown)
        rejected |= {(name, key): len(own) for name in lost}

    def corrected(pair: GroupPair, given: Verdict) -> Verdict:
        family = rejected.get((pair.name, given.measure.key), 1)
        if family == 1 or given.contrast is None or not given.contrast.is_shown:
            return given
        return verdict(
            pair.name, given.measure, given.contrast, effect=options.effect, family=family
        )

    return tuple(
        replace(pair, verdicts=tuple(corrected(pair, v) for v in pair.verdicts)) for pair in pairs
    )


def _verdict(
    baseline: Group, other: Group, measured: Metric, fair: Fairness, options: CompareOptions
) -> Verdict:
    why = why_other_terms(baseline, other, measured, fair)
    if why and not options.anyway:
        return absent_verdict(measured, why)
    try:
        if measured.key in (TIME, ENERGY):
            _need_all(measured, baseline, other)
        result = contrast_of(other, baseline, measured, confidence=options.confidence)
    except NotMeasurable as error:
        return absent_verdict(measured, str(error))
    return verdict(other.name, measured, result, effect=options.effect)


def _need_all(measured: Metric, *groups: Group) -> None:
    """NotMeasurable if only some runs reached the target: their mean would be biased."""
    for group in groups:
        own = _having(group, measured.key)
        if own and len(own) < len(group.entries):
            lacking = next(entry for entry in group.entries if entry not in own)
            raise NotMeasurable(
                f"{group.name}: only {len(own)} of {len(group.entries)} runs have it"
                f" ({lacking.why_not(measured.key)})"
            )


def _front(comparison: Comparison) -> Front | None:
    """The Pareto front; None without two groups and two metrics that all groups have."""
    groups = comparison.to_compare
    axes, _ = front_axes(comparison)
    if len(groups) < 2 or len(axes) < 2:
        return None
    confidence = comparison.options.confidence
    pairs = list(combinations(groups, 2))
    try:
        by_axis = [
            [contrast_of(rival, group, axis, confidence=confidence) for group, rival in pairs]
            for axis in axes
        ]
    except NotMeasurable:
        return None
    results = [result for own in by_axis for result in own]
    confirmed, tests = _confirmed(results, confidence)
    beaters: dict[str, list[str]] = {}  # in the order of the groups, as the pairs are
    for number, (group, rival) in enumerate(pairs):
        signs = [_sign(axis, own[number]) for axis, own in zip(axes, by_axis, strict=True)]
        sure = list(compress(signs, confirmed[number :: len(pairs)]))
        if max(sure, default=0) > 0 and min(signs) >= 0:
            beaters.setdefault(group.name, []).append(rival.name)
        elif min(sure, default=0) < 0 and max(signs) <= 0:
            beaters.setdefault(rival.name, []).append(group.name)
    beaten = {group.name: tuple(beaters[group.name]) for group in groups if group.name in beaters}
    is_single = any(min(result.repeats) == 1 for result in results)
    remark = "by plain values: some groups have a single run" if is_single else ""
    if not is_single and tests > 1:
        remark = f"Holm's method over {tests} tests"
    on = tuple(group.name for group in groups if group.name not in beaten)
    return Front(tuple(axis.key for axis in axes), on, beaten, remark)


def front_axes(comparison: Comparison) -> tuple[list[Metric], dict[tuple[str, str], list[str]]]:
    """The axes of the front, which all groups have; and which groups lack the other metrics.

    The groups are by metric and reason. A metric without a ratio (a rate of 0) counts as lacking.
    """
    axes: list[Metric] = []
    lacking: dict[tuple[str, str], list[str]] = {}
    for keys in _front_keys():
        without = [_without(comparison, measure(key)) for key in keys]
        full = [key for key, lacks in zip(keys, without, strict=True) if not lacks]
        if full:
            axes.append(measure(full[0]))
        else:
            lacking |= without[0]
    return axes, lacking


def _without(comparison: Comparison, measured: Metric) -> dict[tuple[str, str], list[str]]:
    lacking: dict[tuple[str, str], list[str]] = {}
    for group in comparison.to_compare:
        try:
            comparison.mean(group, measured)
        except NotMeasurable as error:
            lacking.setdefault((measured.key, str(error)), []).append(group.name)
    return lacking


def _notes(comparison: Comparison) -> tuple[str, ...]:
    notes = list(dict.fromkeys(r for g in comparison.groups for e in g.entries for r in e.remarks))
    for measured in comparison.measures:
        for group in comparison.groups:
            own = _having(group, measured.key)
            if own and len(own) < len(group.entries):
                notes.append(
                    f"{measured.phrase}: {len(own)} of {len(group.entries)} runs of"
                    f" {group.name} have it"
                )
    if len(comparison.groups) == 1:
        notes.append("one group: nothing to compare it with")
        notes += mixed_facts(comparison.groups[0], comparison.group_by)
    if comparison.options.target_loss is not None:
        notes.append(f"target loss {comparison.options.target_loss:g}: {SMOOTHING}")
    sensor = max((_width(e) for g in comparison.groups for e in g.entries), default=0.0)
    if sensor > _SENSOR:
        notes.append(
            f"the energy sensor is accurate to about {sensor * 100:.0f} %, which repeats do not"
            " show; on the same device the error is the same on both sides"
        )
    return tuple(notes)


def _width(entry: Entry) -> float:
    """Half the interval of a measured energy, relative to its value."""
    reading = entry.figures.get(_JOULES)
    if not isinstance(reading, Reading) or _JOULES in entry.assumed or not reading.value:
        return 0.0
    if reading.low is None or reading.high is None:
        return 0.0
    return (reading.high - reading.low) / 2 / abs(reading.value)
