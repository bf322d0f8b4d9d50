"""Judges whether NEW is worse than REF by more than a rule allows, or whether that is noise.

A change is red if it is beyond the rule's tolerance and chance does not explain it. Chance is
counted over the whole gate, after Benjamini and Hochberg (1995): if nothing changed, the gate goes
red at most once in 20 (1 - confidence), however many cells it has. A change beyond the tolerance
that may be chance, or within it that may be beyond, is inconclusive.

The alternative is red only where the whole interval is beyond the tolerance. It misses a 5 %
slowdown under a rule of 3 % in most cases with three repeats at 1 % noise. Here a change right at
the tolerance is red every other time. A cell's verdict is that of its worst metric.
"""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

from ergmeter.bench.comparing import (
    DEFAULT_RULES,
    METRICS,
    TOGETHER,
    BenchCompareOptions,
    CellChange,
    amount,
    counts_differ,
    figure,
    matched,
    padding_remark,
    parse_rule,
    together,
)
from ergmeter.bench.pairing import CellPair, Paired, Side, impossible_in
from ergmeter.stats.ratio import PAIRED
from ergmeter.units import significant

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa

    from ergmeter.bench.comparing import GateRule, Way


def change_in_words(change: CellChange) -> str:
    """By how much, and from what to what."""
    was, is_now = amount(change, change.ref), amount(change, change.new)
    return f"{_value_text(change.value, change)} ({was} to {is_now})"


def span_in_words(change: CellChange) -> str:
    """The interval of the change."""
    assert change.low is not None
    assert change.high is not None
    if change.low == change.high:
        return "the same in every repeat"
    return f"{_value_text(change.low, change)} to {_value_text(change.high, change)}"


def _value_text(value: float, change: CellChange) -> str:
    if change.scale == "difference":
        return f"{'+' if value >= 0 else '-'}{significant(abs(value), 3)}"
    return f"{(value - 1.0) * 100:+.1f} %"


def noise_in_words(change: CellChange) -> str:
    """How much runs scatter, and how many there were."""
    if change.noise is None:
        return change.basis
    size = (
        f"{significant(change.noise * 100, 2)} %"
        if change.scale == "ratio"
        else significant(change.noise, 2)
    )
    if change.basis == PAIRED:
        return f"the change scatters by {size} over {change.repeats[0]} cells"
    return f"runs scatter by {size} ({change.repeats[0]} of NEW, {change.repeats[1]} of REF)"


State: TypeAlias = Literal["red", "inconclusive", "pass", "absent"]
_COUNTED = "computed_tokens_per_s"


@dataclass(frozen=True, slots=True)
class Judgement:
    """One rule on one configuration, or on all of them together."""

    name: str
    rule: GateRule
    state: State
    words: str
    figure: CellChange | None = None


@dataclass(frozen=True, slots=True)
class GateRemark:
    """A remark on a configuration besides its metrics."""

    name: str
    state: State
    words: str


@dataclass(frozen=True, slots=True)
class Gate:
    """All judgements and findings, and what they come to."""

    rules: tuple[GateRule, ...]
    judgements: tuple[Judgement, ...]
    findings: tuple[GateRemark, ...]
    paired: Paired
    options: BenchCompareOptions
    is_strict: bool = False
    is_plain: bool = False
    needed: tuple[GateRule, ...] = ()  # rules that must have something to judge

    def count(self, state: State) -> int:
        """How many judgements and findings came to this."""
        states = [
            *(finding.state for finding in self.judgements),
            *(remark.state for remark in self.findings),
        ]
        return states.count(state)

    @property
    def unknown(self) -> int:
        """How many judgements lack nothing but a noise."""
        return sum(
            judgement.figure is not None and judgement.figure.low is None
            for judgement in self.judgements
        )

    @property
    def state(self) -> State:
        """red, inconclusive, or pass."""
        if self.count("red"):
            return "red"
        return "inconclusive" if self.count("inconclusive") or not self.count("pass") else "pass"

    @property
    def unjudged(self) -> tuple[GateRule, ...]:
        """Rules whose metric no cell has on both sides."""
        judged = {judgement.rule for judgement in self.judgements if judgement.figure is not None}
        asked = {judgement.rule for judgement in self.judgements}
        return tuple(rule for rule in self.rules if rule in asked - judged)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was judged at all: no figure, and no cell that failed or is missing."""
        return not any(self.count(state) for state in ("red", "inconclusive", "pass"))

    @property
    def why_useless(self) -> str:
        """Why the gate can't be relied on, in one line; empty where it can.

        A rule that nothing is judged by is green whatever happens: a metric that was renamed, or
        that the programs no longer tell.
        """
        lost = [rule for rule in self.unjudged if rule in self.needed]
        if lost:
            there = [name for name in METRICS if self._has(name)]
            names = ", ".join(rule.metric for rule in lost)
            near = difflib.get_close_matches(lost[0].metric, there, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}? " if near else ""
            return (
                f"nothing to judge by {names}: no cell has it on both sides; {hint}both sides have"
                f" {', '.join(there) or 'no figure'} (--allow-missing: judge by the other rules)"
            )
        if self.needed and self.is_empty:
            return "nothing to judge: no cell worked on both sides, or none has a figure on both"
        return ""

    def is_in_ref(self, rule: GateRule) -> bool:
        """Whether a cell of REF has what the rule is about."""
        return any(pair.ref.values(column) for pair in self.paired.pairs for column in rule.columns)

    def _has(self, metric: str) -> bool:
        return any(pair.column(METRICS[metric]) for pair in self.paired.both)

    @property
    def exit_code(self) -> int:
        """1 for red; 2 where a rule judged nothing; 1 for inconclusive, where it is strict."""
        if self.state != "red" and self.why_useless:
            return 2
        return int(self.state == "red" or (self.is_strict and self.state == "inconclusive"))


def gate(
    new: pa.Table,
    ref: pa.Table,
    rules: Sequence[str | GateRule] = (),
    *,
    options: BenchCompareOptions | None = None,
    is_strict: bool = False,
    is_plain: bool = False,
    allow_missing: bool = False,
) -> Gate:
    """Judge NEW by REF. `is_plain`: single runs are compared with the bare threshold.

    Without rules those of `rules.DEFAULTS`, of which one may have nothing to judge where REF has no
    such figure either: a training that logs no loss has none.
    """
    asked = options or BenchCompareOptions()
    is_default = not rules
    rules = rules or DEFAULT_RULES
    wanted = tuple(parse_rule(rule) if isinstance(rule, str) else rule for rule in rules)
    pairs = matched(new, ref, asked)
    drafts = [draft for rule in wanted for draft in _drafts(pairs, rule, asked, is_plain=is_plain)]
    findings = tuple(finding for pair in pairs.pairs for finding in _findings(pair))
    judged = _against_chance(drafts, 1.0 - asked.confidence)
    made = Gate(wanted, tuple(judged), findings, pairs, asked, is_strict, is_plain)
    if allow_missing:
        return made
    spared = [rule for rule in made.unjudged if is_default and not made.is_in_ref(rule)]
    if len(spared) == len(wanted):
        spared = []
    return replace(made, needed=tuple(rule for rule in wanted if rule not in spared))


def _drafts(
    pairs: Paired, rule: GateRule, options: BenchCompareOptions, *, is_plain: bool
) -> list[Judgement]:
    """Each configuration under one rule, as if it were the only one."""
    drafts, figures = [], []
    for pair in pairs.both:
        if not pair.new.ok or not pair.ref.ok:
            continue
        figure_change = figure(pair, rule.metric, rule.scale, options)
        if figure_change is None:
            why = _why_absent(pair, rule)
            # What REF has and NEW has not is no pass: it may be the very thing that broke.
            there = [
                any(side.values(column) for column in rule.columns) for side in (pair.ref, pair.new)
            ]
            is_gone = there == [True, False]
            state: State = "inconclusive" if is_gone else "absent"
            drafts.append(Judgement(pair.name, rule, state, why))
            continue
        why = _not_alike(pair, figure_change)
        if why:
            drafts.append(Judgement(pair.name, rule, "inconclusive", why, figure_change))
            continue
        figures.append(figure_change)
        drafts.append(_judged(pair.name, rule, figure_change, is_plain=is_plain))
    overall = together(figures, options)
    if overall is not None:
        drafts.append(_judged(TOGETHER, rule, overall, is_plain=False))
    return drafts


def _judged(name: str, rule: GateRule, figure_change: CellChange, *, is_plain: bool) -> Judgement:
    """By the figure's own interval; whether chance over all cells explains it comes later."""
    beyond = _is_beyond(rule, figure_change.value)
    change = change_in_words(figure_change)
    if figure_change.low is None or figure_change.high is None:
        if not is_plain:
            words = f"{change}; of single runs, whose noise is not known"
            return Judgement(name, rule, "inconclusive", words, figure_change)
        words = f"{change}; by the plain threshold, as the noise is not known"
        return Judgement(name, rule, "red" if beyond else "pass", words, figure_change)
    span = span_in_words(figure_change)
    if beyond:
        return Judgement(name, rule, "red", f"{change} ({span})", figure_change)
    if _is_beyond(rule, figure_change.low) or _is_beyond(rule, figure_change.high):
        words = f"{change}, but as much as {span} is possible: {noise_in_words(figure_change)}"
        return Judgement(name, rule, "inconclusive", words, figure_change)
    return Judgement(name, rule, "pass", f"{change} ({span})", figure_change)


def _against_chance(drafts: Sequence[Judgement], alpha: float) -> list[Judgement]:
    """Take back what chance explains, over all that was tested (Benjamini and Hochberg 1995)."""
    tested = {at: p for at, draft in enumerate(drafts) if (p := _p(draft)) is not None}
    ordered = sorted(tested.values())
    limit = max(
        (p for rank, p in enumerate(ordered, 1) if p <= alpha * rank / len(ordered)), default=-1.0
    )
    return [
        _taken_back(draft, tested[at], alpha, len(ordered))
        if draft.state == "red" and at in tested and tested[at] > limit
        else draft
        for at, draft in enumerate(drafts)
    ]


def _p(judgement: Judgement) -> float | None:
    if judgement.figure is None or judgement.state == "absent":
        return None
    way: Way = (
        "change"
        if judgement.rule.is_two_sided
        else "fall"
        if judgement.rule.rise is None
        else "rise"
    )
    return judgement.figure.chance(of=way)


def _taken_back(judgement: Judgement, p: float, alpha: float, tests: int) -> Judgement:
    assert judgement.figure is not None
    why = (
        f"chance brings so much in {significant(p * 100, 2)} % of cases"
        if p > alpha
        else f"1 of {tests} comparisons may well do so by chance (p = {significant(p, 2)})"
    )
    words = f"{judgement.words}, beyond the rule, but {why}: {noise_in_words(judgement.figure)}"
    return replace(judgement, state="inconclusive", words=words)


def _findings(pair: CellPair) -> list[GateRemark]:
    new, ref = pair.new, pair.ref
    if not new.rows:
        return [GateRemark(pair.name, "inconclusive", "missing in NEW")]
    if not ref.rows:
        return [GateRemark(pair.name, "absent", "not in REF: nothing to hold it against")]
    remarks = [GateRemark(pair.name, "red", f"not what it says: {line}") for line in new.broken]
    if new.failed:
        remarks.append(_failure(pair))
    elif not new.ok:
        words = f"not done in NEW ({new.rows[0]['status']})"
        remarks.append(GateRemark(pair.name, "inconclusive", words))
    elif not ref.ok:
        remarks.append(GateRemark(pair.name, "pass", "failed in REF, works in NEW"))
    strange = padding_remark(pair)
    if strange:
        remarks.append(GateRemark(pair.name, "absent", strange))
    return remarks


def _failure(pair: CellPair) -> GateRemark:
    failed, rows = pair.new.failed, pair.new.rows
    by_itself = [row for row in failed if row["status"] != "cancelled"]
    last = (by_itself or failed)[-1]
    words = f"{last['status']}: {last['reason']}" if last["reason"] else str(last["status"])
    if pair.new.ok:
        return GateRemark(
            pair.name, "inconclusive", f"{len(failed)} of {len(rows)} runs failed; {words}"
        )
    if not by_itself:
        return GateRemark(pair.name, "inconclusive", f"not done in NEW; {words}")
    if not pair.ref.ok:
        return GateRemark(pair.name, "absent", f"failed on both sides; NEW {words}")
    return GateRemark(pair.name, "red", f"failed in NEW, worked in REF; {words}")


def _not_alike(pair: CellPair, change: CellChange) -> str:
    """Why a rate of tokens can't be judged: the two sides did not count the same thing."""
    if not change.column.startswith(_COUNTED) or not counts_differ(pair):
        return ""
    return (
        f"{change_in_words(change)}, but not of the same tokens: padding is counted, and one side"
        " has more of it in a sample; judge samples_per_s or runtime"
    )


def _why_absent(pair: CellPair, rule: GateRule) -> str:
    for side, rows in (("NEW", pair.new), ("REF", pair.ref)):
        if not any(rows.values(column) for column in rule.columns):
            return f"{side} does not have it{_reason(rows, rule)}"
    return "the two sides have no figure of the same kind, or none that is above 0"


def _reason(side: Side, rule: GateRule) -> str:
    """Why, as the first of its rows has it."""
    reasons = json.loads(side.ok[0]["missing"] or "{}")
    reasons |= {name: f"impossible: {why}" for name, why in impossible_in(side.ok).items()}
    return next((f": {reasons[column]}" for column in rule.columns if column in reasons), "")


def _is_beyond(rule: GateRule, value: float) -> bool:
    below = rule.low is not None and value < rule.low
    return below or (rule.high is not None and value > rule.high)


Word: TypeAlias = Literal["worse", "inconclusive", "missing", "new", "pass", "not judged"]
WORDS: tuple[Word, ...] = ("worse", "missing", "inconclusive", "not judged", "new", "pass")


@dataclass(frozen=True, slots=True)
class CellVerdict:
    """One configuration: the word for it, and what that rests on."""

    name: str
    word: Word
    reasons: tuple[str, ...]


def cell_verdicts(judged_gate: Gate) -> tuple[CellVerdict, ...]:
    """Every configuration of both sides, the worst first, and all together where they were."""
    states: dict[str, list[tuple[State, str]]] = {}
    for judgement in judged_gate.judgements:
        text = f"{judgement.rule}: {judgement.words}"
        states.setdefault(judgement.name, []).append((judgement.state, text))
    for finding in judged_gate.findings:
        states.setdefault(finding.name, []).append((finding.state, finding.words))
    named = {pair.name: pair for pair in judged_gate.paired.pairs}
    names = [*([TOGETHER] if TOGETHER in states else []), *named]
    verdicts = [_verdict(name, named.get(name), states.get(name, [])) for name in names]
    return tuple(sorted(verdicts, key=lambda verdict: WORDS.index(verdict.word)))


def _verdict(name: str, pair: CellPair | None, states: list[tuple[State, str]]) -> CellVerdict:
    order: tuple[State, ...] = ("red", "inconclusive", "pass", "absent")
    ordered = sorted(states, key=lambda item: order.index(item[0]))
    worst = tuple(words for state, words in ordered if state == ordered[0][0])
    reasons = worst or ("no figure that both sides have",)
    if pair is not None and not pair.new.rows:
        return CellVerdict(name, "missing", reasons)
    if pair is not None and not pair.ref.rows:
        return CellVerdict(name, "new", reasons)
    words: dict[State, Word] = {"red": "worse", "inconclusive": "inconclusive", "pass": "pass"}
    return CellVerdict(
        name, words.get(ordered[0][0], "not judged") if ordered else "not judged", reasons
    )
