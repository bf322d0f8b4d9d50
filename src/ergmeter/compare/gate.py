"""Judges whether NEW is worse than REF by more than a rule allows, or whether that is noise.

A change is worse if it is beyond the rule's tolerance and chance does not explain it. Chance is
counted over the whole gate, after Benjamini and Hochberg (1995): if nothing changed, the gate fails
at most once in 20 (1 - confidence), however many configurations it has. Metrics that are transforms
of one another count once. A change beyond the tolerance that may be chance, or within it that may
be beyond, is inconclusive.

A gate that fails only where the whole interval is beyond the tolerance misses a 5 % slowdown under
a rule of 3 % in most cases with three repeats at 1 % noise. Here a change right at the tolerance
fails every other time. A configuration's verdict is that of its worst metric.

Bench cells of one configuration did the same work. Runs, ledger rows and analyses are judged only
if their facts show that they did (`grouping.fairness`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from ergmeter.compare.entry import NOT_COMPARABLE, Group, read_side, rule_scale
from ergmeter.compare.grouping import Fairness, fairness, mixed_facts
from ergmeter.compare.pairing import (
    COUNTED,
    CompareOptions,
    NotComparable,
    Pairing,
    configuration_key,
    counts_differ,
    padding_remark,
    pair_sides,
    pair_verdict,
    pooled_verdict,
    why_incomparable,
)
from ergmeter.compare.verdicts import State, Verdict
from ergmeter.errors import FormatError, NotMeasurable, UsageError, suggestion
from ergmeter.metrics.catalog import Metric, rule_metric, rule_names
from ergmeter.records import Missing, Reading
from ergmeter.stats.ratio import PAIRED, Contrast, RunNoise, benjamini_hochberg, pooled_noise
from ergmeter.units import duration, number_of, scaled, significant

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ergmeter.compare.entry import Entry
    from ergmeter.compare.pairing import ConfigurationPair
    from ergmeter.stats.ratio import Scale, Way

# Rules and the noise of runs.

DEFAULT_RULES = ("tokens_per_s -3%", "peak_memory +2%", "loss +-1%")
JOB_RULES = ("job.tokens_per_s -3%", "loss +-1%")  # the default where a side has resumed jobs
_WRITTEN = re.compile(r"\s*([\w.]+)\s+(\+-|-\+|±|\+|-|)\s*(\d+(?:\.\d+)?(?:e-?\d+)?)\s*(%?)\s*")
_SHARE = re.compile(r"\s*(\d+(?:\.\d+)?(?:e-?\d+)?)\s*(%?)\s*")
_Sign: TypeAlias = Literal["-", "+", "+-"]
_SIGNS: dict[str, _Sign] = {"-": "-", "+": "+", "+-": "+-", "-+": "+-", "±": "+-"}
_WAYS: dict[_Sign, Way] = {"-": "fall", "+": "rise", "+-": "change"}
# The sign of a rule that has none, by the direction that is better.
_UNWANTED: dict[str, _Sign] = {"higher": "-", "lower": "+", "neither": "+-"}


@dataclass(frozen=True, slots=True)
class GateRule:
    """How far a metric may change: by a share of REF's value, or by an amount in its unit."""

    measure: Metric
    sign: _Sign  # the direction that is limited
    size: float
    scale: Scale

    @property
    def low(self) -> float | None:
        """The lowest change that is allowed, as a ratio or a difference."""
        return self._neutral - self.size if "-" in self.sign else None

    @property
    def high(self) -> float | None:
        """The highest change that is allowed."""
        return self._neutral + self.size if "+" in self.sign else None

    @property
    def way(self) -> Way:
        """The direction that the rule limits: fall, rise or any change."""
        return _WAYS[self.sign]

    @property
    def _neutral(self) -> float:
        return 1.0 if self.scale == "ratio" else 0.0

    def is_beyond(self, value: float) -> bool:
        """True if a change is more than the rule allows."""
        below = self.low is not None and value < self.low
        return below or (self.high is not None and value > self.high)

    def __str__(self) -> str:
        size = f"{self.size * 100:g}%" if self.scale == "ratio" else f"{self.size:g}"
        return f"{self.measure.label} {self.sign}{size}"


def parse_rule(text: str) -> GateRule:
    """Parse a rule. Without a sign, the catalogue says which direction of the metric is worse.

    UsageError with the nearest name for an unknown metric.
    """
    match = _WRITTEN.fullmatch(text)
    if not match:
        raise UsageError(
            f"{text!r} is not a rule; write a metric, a sign and a size: 'tokens_per_s -3%',"
            " 'peak_memory +2%', 'loss +-0.01'"
        )
    name, sign, size, percent = match.groups()
    measure = rule_metric(name)
    limited = _SIGNS[sign] if sign else _UNWANTED[measure.direction]
    value = float(size) / (100.0 if percent else rule_scale(name))
    if percent and value >= 1.0 and limited != "+":
        raise UsageError(f"{text!r} allows a fall to 0: give less than 100 %")
    return GateRule(measure, limited, value, "ratio" if percent else "difference")


def parse_noise(
    texts: Sequence[str],
    measures: Sequence[Metric] = (),
    *,
    judged: Sequence[Entry] = (),
    by: tuple[str, ...] = (),
) -> dict[str, RunNoise]:
    """The noise between runs, by metric name in rules; under "" for all metrics.

    A text is a share, or a path of repeats in which the noise of `measures` is measured. METRIC=
    before it limits it to that metric and takes precedence. The repeats must have done the work of
    the `judged` runs; `by`: the columns that match them.
    """
    named: dict[str, RunNoise] = {}
    for_all: dict[str, RunNoise] = {}
    for text in texts:
        name, is_named, size = text.rpartition("=")
        if Path(text).exists():
            name, is_named, size = "", "", text
        share = _SHARE.fullmatch(size)
        if not share and not Path(size).exists():
            raise FormatError(f"--noise {text}: neither a share such as 1% nor an existing path")
        label = rule_metric(name.strip()).label if is_named else ""
        noise_by_metric = named if label else for_all
        if not share:
            wanted = (rule_metric(label),) if label else measures
            noise_by_metric |= measured_noise(Path(size), wanted, judged, by)
            continue
        value = float(share[1]) / (100.0 if share[2] else 1.0)
        if value <= 0.0:
            raise UsageError(f"noise is a share above 0, such as 1%; got {text!r}")
        noise_by_metric[label] = RunNoise(value)
    return {**for_all, **named}


def check_trainings(path: Path, entries: Sequence[Entry]) -> None:
    """UsageError if one run has several trainings: they are not repeats of one another."""
    numbers = [entry.training for entry in entries if entry.training is not None]
    if len(set(numbers)) > 1:
        names = " or ".join(entry.source for entry in entries if entry.training is not None)
        raise UsageError(f"{path} has {len(numbers)} trainings: name one of them, {names}")


def measured_noise(
    path: Path, measures: Sequence[Metric], judged: Sequence[Entry], by: tuple[str, ...]
) -> dict[str, RunNoise]:
    """The scatter between the repeats under a path, by metric; several configurations are pooled.

    UsageError if no metric was repeated. Repeats that are equal to the last digit measure no
    scatter.
    """
    keys = [key for measured in measures for key in measured.every_key]
    groups = _repeats(path, keys, judged, by)
    noise_by_metric = {}
    for measured in measures:
        for key in measured.every_key:
            try:
                share, dof = pooled_noise([group.numbers(key) for group in groups])
            except NotMeasurable:
                continue
            if not share:
                break
            runs = number_of(sum(len(group.numbers(key)) for group in groups), "repeat")
            text = f"{runs} in {path} ({number_of(dof, 'degree')} of freedom)"
            noise_by_metric[measured.label] = RunNoise(share, dof, text)
            break
    if not noise_by_metric:
        names = ", ".join(measured.label for measured in measures)
        raise UsageError(
            f"--noise {path}: no configuration there has two runs with different {names}"
        )
    return noise_by_metric


def _repeats(
    path: Path, keys: Sequence[str], judged: Sequence[Entry], by: tuple[str, ...]
) -> list[Group]:
    """The groups of repeats under a path: all bench cells, or the runs of judged configurations.

    UsageError if runs of a configuration are not repeats, NotComparable if they did other work.
    """
    source = read_side(path, keys)
    entries = source.ended_well
    if not entries:
        raise FormatError(source.unused[0] if source.unused else f"{path} has no run")
    check_trainings(path, entries)
    is_bench = all(entry.kind == "cell" for entry in entries)
    pairing = pair_sides(entries, entries, CompareOptions(by=() if is_bench else by))
    groups = [pair.new for pair in pairing.both]
    if is_bench:
        return groups
    of_judged = {configuration_key(entry, pairing.by) for entry in judged}
    matching = [g for g in groups if configuration_key(g.entries[0], pairing.by) in of_judged]
    if by and judged and not matching:
        raise UsageError(f"--noise {path}: no run there has the {', '.join(by)} of a judged run")
    for group in matching or groups:
        mixed = list(mixed_facts(group, ()))
        if mixed:
            raise UsageError(f"--noise {path}: these runs are not repeats: {mixed[0]}")
        own = configuration_key(group.entries[0], pairing.by)
        others = tuple(e for e in judged if configuration_key(e, pairing.by) == own)
        refusals = fairness(Group("judged", others), group, ()).refusals
        if refusals:
            raise NotComparable(f"{NOT_COMPARABLE}--noise {path}: {refusals[0]}")
    return matching or groups


# The gate.

POOLED = "all cells together"
_ROUNDING = 1e-9  # p-values of transforms of one metric differ by rounding
GATE_STATES: tuple[State, ...] = ("worse", "inconclusive", "pass", "absent")


@dataclass(frozen=True, slots=True)
class GateRemark:
    """A verdict on a configuration that is not about a metric, such as a failed run."""

    name: str
    state: State
    words: str


@dataclass(frozen=True, slots=True)
class Gate:
    """All verdicts and remarks, and the state and exit code that follow."""

    rules: tuple[GateRule, ...]
    verdicts: tuple[Verdict, ...]
    remarks: tuple[GateRemark, ...]
    pairing: Pairing
    options: CompareOptions
    is_strict: bool = False
    is_plain: bool = False
    needed: tuple[GateRule, ...] = ()  # rules that must have something to judge
    not_comparable: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()  # possible explanations of a change; facts that a side lacks
    family: int = 0  # the number of tests that chance is counted over
    problem: str = ""  # misuse, or an input that could not be read, with its exit code
    problem_code: int = 0

    def count(self, state: State) -> int:
        """The number of verdicts and remarks with this state."""
        states = [verdict.state for verdict in self.verdicts]
        return [*states, *(remark.state for remark in self.remarks)].count(state)

    @property
    def unknown(self) -> int:
        """The number of verdicts without an interval, since the noise of a run is unknown."""
        return sum(v.contrast is not None and v.contrast.low is None for v in self.verdicts)

    @property
    def state(self) -> State:
        """worse, inconclusive, or pass."""
        if self.count("worse"):
            return "worse"
        is_open = self.count("inconclusive") or self.not_comparable or not self.count("pass")
        return "inconclusive" if is_open else "pass"

    @property
    def unjudged(self) -> tuple[GateRule, ...]:
        """Rules whose metric no configuration has on both sides."""
        judged = {verdict.rule for verdict in self.verdicts if verdict.contrast is not None}
        asked = {verdict.rule for verdict in self.verdicts}
        return tuple(rule for rule in self.rules if rule in asked - judged)

    @property
    def why_useless(self) -> str:
        """Why the gate can't be relied on, in one line; empty if it can.

        A rule that judges nothing would pass for ever: a metric that was renamed, or that programs
        no longer print.
        """
        lost = [rule for rule in self.unjudged if rule in self.needed]
        if lost:
            there = [
                label for label, measured in rule_names().items()
                if any(pair.common_key(measured) for pair in self.pairing.both)
            ]  # fmt: skip
            names = [rule.measure.label for rule in lost]
            if names[0] in there:
                why = next(verdict.words for verdict in self.verdicts if verdict.rule == lost[0])
                return f"nothing to judge by {names[0]}: {why} (--allow-missing: judge by others)"
            hint = suggestion(names[0], there, cutoff=0.5)
            return (
                f"nothing to judge by {', '.join(names)}: no cell has it on both sides; {hint}both"
                f" sides have {', '.join(there) or 'no metric'} (--allow-missing: judge by the"
                " other rules)"
            )
        is_empty = not any(self.count(state) for state in GATE_STATES[:3])
        if self.needed and is_empty and not self.not_comparable:
            return "nothing to judge: no cell worked on both sides, or none has a figure on both"
        return ""

    @property
    def exit_code(self) -> int:
        """1: worse, or inconclusive if strict. 3: not comparable. 2: a rule judged nothing."""
        if self.problem:
            return self.problem_code
        if self.state == "worse":
            return 1
        if self.not_comparable:
            return 3
        if self.why_useless:
            return 2
        return int(self.is_strict and self.state == "inconclusive")

    @property
    def reason(self) -> str:
        """Why the exit code is 2, 3 or 4, in one line; empty for other codes."""
        if self.exit_code == 3:
            return f"{NOT_COMPARABLE}{self.not_comparable[0]}"
        return self.problem or (self.why_useless if self.exit_code == 2 else "")


def gate(
    new: Sequence[Entry],
    ref: Sequence[Entry],
    rules: Sequence[str | GateRule] = (),
    *,
    options: CompareOptions | None = None,
    is_strict: bool = False,
    is_plain: bool = False,
    allow_missing: bool = False,
    left_out: Sequence[str] = (),
) -> Gate:
    """Judge NEW by REF. `is_plain`: single runs are compared with the bare threshold.

    `left_out`: lines about what could not be read on both sides; they become notes.

    A default rule may have nothing to judge if REF lacks its metric too: not every training logs a
    loss.
    """
    asked = options or CompareOptions()
    is_default = not rules
    has_jobs = any(entry.kind == "job" for entry in (*new, *ref))
    wanted = tuple(
        parse_rule(rule) if isinstance(rule, str) else rule
        for rule in rules or (JOB_RULES if has_jobs else DEFAULT_RULES)
    )
    pairing = pair_sides(new, ref, asked)
    fair = [(pair, _fairness(pair)) for pair in pairing.both]
    refused = [(pair.name, "; ".join(each.refusals)) for pair, each in fair if each.refusals]
    pairs = [
        (pair, each) for pair, each in fair if not each.refusals and pair.new.ok and pair.ref.ok
    ]
    drafts = [draft for rule in wanted for draft in _drafts(pairs, rule, asked, is_plain=is_plain)]
    remarks = [remark for pair in pairing.pairs for remark in _remarks(pair)]
    remarks += [GateRemark(name, "absent", f"{NOT_COMPARABLE}{why}") for name, why in refused]
    for rule in wanted:
        own = [draft for draft in drafts if draft.rule == rule]
        if own and all(draft.words.startswith(NOT_COMPARABLE) for draft in own):
            refused.append((str(rule), own[0].words.removeprefix(NOT_COMPARABLE)))
    judged, family = _against_chance(drafts, 1.0 - asked.confidence)
    notes = [line for entry in (*new, *ref) if entry.kind == "job" for line in entry.remarks]
    notes += [line for entry in (*new, *ref) for line in entry.cautions]
    notes += [f"left out: {line}" for line in left_out]
    notes += [line for label in asked.noise for line in _noise_notes(label, asked, drafts)]
    notes += [line for pair, each in fair for line in _fairness_notes(pair.name, each)]
    made = Gate(
        *(wanted, tuple(judged), tuple(remarks), pairing, asked, is_strict, is_plain),
        not_comparable=tuple(f"{name}: {why}" for name, why in refused),
        notes=tuple(dict.fromkeys(notes)),
        family=family,
    )
    if allow_missing:
        return made
    unjudged_rules = made.unjudged if is_default else ()
    spared = [
        rule
        for rule in unjudged_rules
        if rule.measure.scope != "job" and not any(p.ref.has(rule.measure) for p in pairing.pairs)
    ]
    if len(spared) == len(wanted):
        spared = []
    return replace(made, needed=tuple(rule for rule in wanted if rule not in spared))


def unjudged(error: Exception) -> Gate:
    """A gate that judged nothing, because of this error."""
    nothing = Gate((), (), (), Pairing((), ()), CompareOptions())
    reason = str(error).removeprefix(NOT_COMPARABLE)
    if isinstance(error, NotComparable):
        remark = GateRemark("NEW and REF", "absent", f"{NOT_COMPARABLE}{reason}")
        return replace(nothing, remarks=(remark,), not_comparable=(reason,))
    code = 2 if isinstance(error, UsageError) else 4
    return replace(nothing, problem=reason, problem_code=code)


def _fairness(pair: ConfigurationPair) -> Fairness:
    """Check that both sides did the same work; bench cells need no check: settings pair them.

    Facts are compared even if `--by` pairs the runs: they may differ although its columns do not.
    """
    is_bench = all(entry.kind == "cell" for entry in (*pair.new.entries, *pair.ref.entries))
    return Fairness() if is_bench else fairness(pair.ref, pair.new, ())


def _noise_notes(label: str, options: CompareOptions, drafts: Sequence[Verdict]) -> list[str]:
    """A note on the repeats in which a metric's noise was measured, if that noise was used."""
    noise = options.noise[label]
    methods = {v.contrast.method for v in drafts if v.contrast and v.measure.label == label}
    return [f"{label}: {noise}"] if noise.source and str(noise) in methods else []


def _fairness_notes(name: str, fair: Fairness) -> Iterator[str]:
    yield from (f"{name}: {remark}" for remark in fair.remarks)
    if fair.explanations:
        yield f"{name}: could explain a change: {', '.join(fair.explanations)}"
    if fair.unknown:
        yield f"{name}: not checked, since a side lacks it: {', '.join(fair.unknown)}"


def _drafts(
    pairs: Sequence[tuple[ConfigurationPair, Fairness]],
    rule: GateRule,
    options: CompareOptions,
    *,
    is_plain: bool,
) -> list[Verdict]:
    """Judge each configuration by one rule, before the correction for multiple tests."""
    drafts: list[Verdict] = []
    comparable: list[Verdict] = []
    for pair, fair in pairs:
        result = pair_verdict(pair, rule.measure, rule.scale, options)
        if result is None:
            # A metric that only REF has does not pass: the change may have broken it.
            is_gone = pair.ref.has(rule.measure) and not pair.new.has(rule.measure)
            state: State = "inconclusive" if is_gone else "absent"
            words = _why_absent(pair, rule)
            drafts.append(Verdict(rule.measure, state, words, name=pair.name, rule=rule))
            continue
        draft = replace(result, name=pair.name, rule=rule)
        why = _not_alike(pair, draft) or why_incomparable(pair, fair, rule.measure)
        if why:
            drafts.append(replace(draft, state="inconclusive", words=why, is_tested=False))
            continue
        drafts.append(_judged(draft, is_plain=is_plain))
        comparable.append(drafts[-1])
    pooled = pooled_verdict(comparable, options)
    if pooled is not None:
        drafts.append(_judged(replace(pooled, name=POOLED, rule=rule), is_plain=False))
    return drafts


def _judged(draft: Verdict, *, is_plain: bool) -> Verdict:
    """Judge by the metric's own interval; `_against_chance` corrects for multiple tests."""
    rule, change = draft.rule, draft.contrast
    assert rule is not None
    assert change is not None
    is_beyond = rule.is_beyond(change.value)
    words = change_text(draft)
    if change.low is None or change.high is None:
        if not is_plain:
            words = f"{words}; of single runs, whose noise is not known"
            return replace(draft, state="inconclusive", words=words)
        words = f"{words}; by the plain threshold, as the noise is not known"
        return replace(draft, state="worse" if is_beyond else "pass", words=words)
    span = _span_text(change)
    if is_beyond:
        return replace(draft, state="worse", words=f"{words} ({span})")
    if rule.is_beyond(change.low) or rule.is_beyond(change.high):
        words = f"{words}, but as much as {span} is possible: {_noise_text(change)}"
        return replace(draft, state="inconclusive", words=words)
    return replace(draft, state="pass", words=f"{words} ({span})")


def _against_chance(drafts: Sequence[Verdict], alpha: float) -> tuple[list[Verdict], int]:
    """Make "worse" inconclusive where chance may explain it; also return the test count."""
    family: dict[tuple[str, str], float] = {}
    for draft in drafts:
        p = _p_value(draft)
        if p is not None:
            test = draft.name, draft.measure.tested_quantity
            family[test] = min(p, family.get(test, 1.0))
    limit = benjamini_hochberg(list(family.values()), alpha) * (1.0 + _ROUNDING)
    judged = []
    for draft in drafts:
        p = _p_value(draft)
        is_chance = draft.state == "worse" and p is not None and p > limit
        judged.append(_taken_back(draft, alpha, len(family)) if is_chance else draft)
    return judged, len(family)


def _p_value(verdict: Verdict) -> float | None:
    if verdict.contrast is None or verdict.rule is None or not verdict.is_tested:
        return None
    return verdict.contrast.p_value(verdict.rule.way)


def _taken_back(verdict: Verdict, alpha: float, tests: int) -> Verdict:
    p = _p_value(verdict)
    assert p is not None
    assert verdict.contrast is not None
    why = f"1 of {tests} comparisons may well do so by chance (p = {significant(p, 2)})"
    if p > alpha:
        why = f"noise causes such changes in {significant(p * 100, 2)} % of cases"
    words = f"{verdict.words}, beyond the rule, but {why}: {_noise_text(verdict.contrast)}"
    return replace(verdict, state="inconclusive", words=words)


def _remarks(pair: ConfigurationPair) -> list[GateRemark]:
    new, ref = pair.new, pair.ref
    if not new.entries:
        return [GateRemark(pair.name, "inconclusive", "missing in NEW")]
    if not ref.entries:
        return [GateRemark(pair.name, "absent", "not in REF: nothing to compare it with")]
    remarks = [GateRemark(pair.name, "worse", f"claim not met: {line}") for line in new.broken]
    if new.failed:
        remarks.append(_failure(pair))
    elif not new.ok:
        words = f"not done in NEW ({new.entries[0].status})"
        remarks.append(GateRemark(pair.name, "inconclusive", words))
    elif ref.failed and not ref.ok:
        remarks.append(GateRemark(pair.name, "pass", "failed in REF, works in NEW"))
    elif not ref.ok:
        words = f"not done in REF ({ref.entries[0].status})"
        remarks.append(GateRemark(pair.name, "inconclusive", words))
    strange = padding_remark(pair)
    if strange:
        remarks.append(GateRemark(pair.name, "absent", strange))
    return remarks


def _failure(pair: ConfigurationPair) -> GateRemark:
    failed = pair.new.failed
    by_itself = [entry for entry in failed if entry.status != "cancelled"]
    last = (by_itself or failed)[-1]
    words = f"{last.status}: {last.reason}" if last.reason else last.status
    if pair.new.ok:
        runs = f"{len(failed)} of {len(pair.new.entries)} runs failed"
        return GateRemark(pair.name, "inconclusive", f"{runs}; {words}")
    if not by_itself:
        return GateRemark(pair.name, "inconclusive", f"not done in NEW; {words}")
    if not pair.ref.ok:
        return GateRemark(pair.name, "absent", f"failed on both sides; NEW {words}")
    return GateRemark(pair.name, "worse", f"failed in NEW, worked in REF; {words}")


def _not_alike(pair: ConfigurationPair, draft: Verdict) -> str:
    """Why a rate of tokens can't be judged: the two sides did not count the same tokens."""
    if not draft.key.startswith(COUNTED) or not counts_differ(pair):
        return ""
    return (
        f"{change_text(draft)}, but the sides count different tokens: one has more padding,"
        " which is counted, in a sample; judge samples_per_s or runtime"
    )


def _why_absent(pair: ConfigurationPair, rule: GateRule) -> str:
    for side, group in (("NEW", pair.new), ("REF", pair.ref)):
        if not group.has(rule.measure):
            return f"{side} does not have it{_reason(group, rule)}"
    if pair.common_key(rule.measure) is None:
        return "the two sides have no metric of this kind in common"
    return "it is not above 0 on both sides, so there is no ratio to judge"


def _reason(group: Group, rule: GateRule) -> str:
    """Why the first run lacks the metric, or a run has an impossible one."""
    for key in group.keys_of(rule.measure):
        for entry in group.ok:
            result = entry.figures.get(key)
            if isinstance(result, Reading) and result.impossible:
                return f": impossible: {result.impossible}"
        first = group.ok[0].figures.get(key)
        if isinstance(first, Missing):
            return f": {first.reason}"
    return ""


def amount_text(verdict: Verdict, value: float) -> str:
    """A side's value in its unit."""
    unit = verdict.measure.unit
    if unit == "B":
        return scaled(value, "B")
    return duration(value) if unit == "s" else significant(value)


def change_text(verdict: Verdict) -> str:
    """The change and the values on both sides: -3.1 % (100 to 96.9)."""
    change = verdict.contrast
    assert change is not None
    now, before = (amount_text(verdict, value) for value in change.means)
    return f"{value_text(change.value, change)} ({before} to {now})"


def _span_text(change: Contrast) -> str:
    assert change.low is not None
    assert change.high is not None
    if change.is_exact:
        return "the same in every repeat"
    return f"{value_text(change.low, change)} to {value_text(change.high, change)}"


def value_text(value: float, change: Contrast, unit: str = "", percent: str = " %") -> str:
    """A change, or an end of its interval, with its sign."""
    if change.scale == "difference":
        size = scaled(abs(value), "B") if unit == "B" else significant(abs(value), 3)
        return f"{'+' if value >= 0 else '-'}{size}"
    return f"{(value - 1.0) * 100:+.1f}{percent}"


def _noise_text(change: Contrast) -> str:
    """How much runs scatter, and the number of runs on each side."""
    if change.noise is None:
        return change.why
    size = significant(change.noise, 2)
    if change.scale == "ratio":
        size = f"{significant(change.noise * 100, 2)} %"
    if change.method == PAIRED:
        return f"the change scatters by {size} over {change.repeats[0]} cells"
    return f"runs scatter by {size} ({change.repeats[0]} of NEW, {change.repeats[1]} of REF)"
