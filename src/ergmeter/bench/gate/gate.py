"""Is NEW worse than REF by more than is allowed, or is that noise?

The trap, on both sides: a plain threshold goes red for a noisy cell that nobody touched, and of
many cells one always is; a wide tolerance lets the regression through. A figure is red where its
change is beyond what the rule allows *and* chance does not explain it. Chance is counted over the
whole gate, after Benjamini and Hochberg (1995): where nothing changed at all, the gate goes red
at most once in 20 (1 - confidence), however many cells it has. What is beyond the tolerance but may
be chance, or lies within it but could be beyond as far as the repeats tell, is inconclusive.

The other defensible rule is red only where the *whole interval* is beyond the tolerance. It never
goes red for a change that is allowed, and it misses a 5 % slowdown under a rule of 3 % in most
cases with three repeats at 1 % noise. Here a change right at the tolerance is red every other time.
"""

from __future__ import annotations

import difflib
import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

from ergmeter.bench.gate.comparing import (
    TOGETHER,
    BenchCompareOptions,
    CellChange,
    amount,
    figure,
    matched,
    together,
)
from ergmeter.bench.gate.padding_check import counts_differ, paradox
from ergmeter.bench.gate.pairing import impossible_in
from ergmeter.bench.gate.rules import DEFAULTS, METRICS
from ergmeter.bench.gate.rules import rule as parsed
from ergmeter.stats.ratio import PAIRED
from ergmeter.units import significant

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pyarrow as pa

    from ergmeter.bench.gate.comparing import Way
    from ergmeter.bench.gate.pairing import CellPair, Paired, Side
    from ergmeter.bench.gate.rules import GateRule

# -- gate words ------------------------------------------------------------------------------------
# What a gate says of a figure: its change, the interval of it, the noise that it has.


def change_in_words(found: CellChange) -> str:
    """By how much, and from what to what."""
    was, is_now = amount(found, found.ref), amount(found, found.new)
    return f"{_value_text(found.value, found)} ({was} to {is_now})"


def span_in_words(found: CellChange) -> str:
    """The interval of the change."""
    assert found.low is not None
    assert found.high is not None
    if found.low == found.high:
        return "the same in every repeat"
    return f"{_value_text(found.low, found)} to {_value_text(found.high, found)}"


def _value_text(value: float, found: CellChange) -> str:
    if found.scale == "difference":
        return f"{'+' if value >= 0 else '-'}{significant(abs(value), 3)}"
    return f"{(value - 1.0) * 100:+.1f} %"


def noise_in_words(found: CellChange) -> str:
    """How much runs scatter, and how many there were."""
    if found.noise is None:
        return found.basis
    size = (
        f"{significant(found.noise * 100, 2)} %"
        if found.scale == "ratio"
        else significant(found.noise, 2)
    )
    if found.basis == PAIRED:
        return f"the change scatters by {size} over {found.repeats[0]} cells"
    return f"runs scatter by {size} ({found.repeats[0]} of NEW, {found.repeats[1]} of REF)"


# -- gate ------------------------------------------------------------------------------------------


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
    """What is to be said of a configuration besides its figures."""

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
        states = [*(one.state for one in self.judgements), *(one.state for one in self.findings)]
        return states.count(state)

    @property
    def unknown(self) -> int:
        """How many judgements lack nothing but a noise."""
        return sum(one.figure is not None and one.figure.low is None for one in self.judgements)

    @property
    def state(self) -> State:
        """red, inconclusive, or pass."""
        if self.count("red"):
            return "red"
        return "inconclusive" if self.count("inconclusive") or not self.count("pass") else "pass"

    @property
    def unjudged(self) -> tuple[GateRule, ...]:
        """Rules whose figure no cell that works on both sides has on both."""
        judged = {one.rule for one in self.judgements if one.figure is not None}
        asked = {one.rule for one in self.judgements}
        return tuple(one for one in self.rules if one in asked - judged)

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
        lost = [one for one in self.unjudged if one in self.needed]
        if lost:
            there = [name for name in METRICS if self._has(name)]
            names = ", ".join(one.metric for one in lost)
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
    """Judge NEW by REF. `is_plain`: single runs are held to the bare threshold, and named so.

    Without rules those of `rules.DEFAULTS`, of which one may have nothing to judge where REF has no
    such figure either: a training that logs no loss has none.
    """
    asked = options or BenchCompareOptions()
    is_default = not rules
    rules = rules or DEFAULTS
    wanted = tuple(parsed(one) if isinstance(one, str) else one for one in rules)
    found = matched(new, ref, asked)
    drafts = [draft for one in wanted for draft in _drafts(found, one, asked, is_plain=is_plain)]
    findings = tuple(one for pair in found.pairs for one in _findings(pair))
    judged = _against_chance(drafts, 1.0 - asked.confidence)
    made = Gate(wanted, tuple(judged), findings, found, asked, is_strict, is_plain)
    if allow_missing:
        return made
    spared = [one for one in made.unjudged if is_default and not made.is_in_ref(one)]
    if len(spared) == len(wanted):
        spared = []
    return replace(made, needed=tuple(one for one in wanted if one not in spared))


def _drafts(
    found: Paired, rule: GateRule, options: BenchCompareOptions, *, is_plain: bool
) -> list[Judgement]:
    """Each configuration under one rule, as if it were the only one."""
    drafts, figures = [], []
    for pair in found.both:
        if not pair.new.ok or not pair.ref.ok:
            continue
        one = figure(pair, rule.metric, rule.scale, options)
        if one is None:
            why = _why_absent(pair, rule)
            # What REF has and NEW has not is no pass: it may be the very thing that broke.
            there = [
                any(side.values(column) for column in rule.columns) for side in (pair.ref, pair.new)
            ]
            is_gone = there == [True, False]
            state: State = "inconclusive" if is_gone else "absent"
            drafts.append(Judgement(pair.name, rule, state, why))
            continue
        why = _not_alike(pair, one)
        if why:
            drafts.append(Judgement(pair.name, rule, "inconclusive", why, one))
            continue
        figures.append(one)
        drafts.append(_judged(pair.name, rule, one, is_plain=is_plain))
    whole = together(figures, options)
    if whole is not None:
        drafts.append(_judged(TOGETHER, rule, whole, is_plain=False))
    return drafts


def _judged(name: str, rule: GateRule, found: CellChange, *, is_plain: bool) -> Judgement:
    """By the figure's own interval; whether chance over all cells explains it comes later."""
    beyond = _is_beyond(rule, found.value)
    change = change_in_words(found)
    if found.low is None or found.high is None:
        if not is_plain:
            words = f"{change}; of single runs, whose noise is not known"
            return Judgement(name, rule, "inconclusive", words, found)
        words = f"{change}; by the plain threshold, as the noise is not known"
        return Judgement(name, rule, "red" if beyond else "pass", words, found)
    span = span_in_words(found)
    if beyond:
        return Judgement(name, rule, "red", f"{change} ({span})", found)
    if _is_beyond(rule, found.low) or _is_beyond(rule, found.high):
        words = f"{change}, but as much as {span} is possible: {noise_in_words(found)}"
        return Judgement(name, rule, "inconclusive", words, found)
    return Judgement(name, rule, "pass", f"{change} ({span})", found)


def _against_chance(drafts: Sequence[Judgement], alpha: float) -> list[Judgement]:
    """Take back what chance explains, over all that was tested (Benjamini and Hochberg 1995)."""
    tested = {at: p for at, one in enumerate(drafts) if (p := _p(one)) is not None}
    ordered = sorted(tested.values())
    limit = max(
        (p for rank, p in enumerate(ordered, 1) if p <= alpha * rank / len(ordered)), default=-1.0
    )
    return [
        _taken_back(one, tested[at], alpha, len(ordered))
        if one.state == "red" and at in tested and tested[at] > limit
        else one
        for at, one in enumerate(drafts)
    ]


def _p(one: Judgement) -> float | None:
    if one.figure is None or one.state == "absent":
        return None
    way: Way = "change" if one.rule.is_two_sided else "fall" if one.rule.rise is None else "rise"
    return one.figure.chance(of=way)


def _taken_back(one: Judgement, p: float, alpha: float, tests: int) -> Judgement:
    assert one.figure is not None
    why = (
        f"chance brings so much in {significant(p * 100, 2)} % of cases"
        if p > alpha
        else f"1 of {tests} comparisons may well do so by chance (p = {significant(p, 2)})"
    )
    words = f"{one.words}, beyond the rule, but {why}: {noise_in_words(one.figure)}"
    return replace(one, state="inconclusive", words=words)


def _findings(pair: CellPair) -> list[GateRemark]:
    new, ref = pair.new, pair.ref
    if not new.rows:
        return [GateRemark(pair.name, "inconclusive", "missing in NEW")]
    if not ref.rows:
        return [GateRemark(pair.name, "absent", "not in REF: nothing to hold it against")]
    found = [GateRemark(pair.name, "red", f"not what it says: {line}") for line in new.broken]
    if new.failed:
        found.append(_failure(pair))
    elif not new.ok:
        words = f"not done in NEW ({new.rows[0]['status']})"
        found.append(GateRemark(pair.name, "inconclusive", words))
    elif not ref.ok:
        found.append(GateRemark(pair.name, "pass", "failed in REF, works in NEW"))
    strange = paradox(pair)
    if strange:
        found.append(GateRemark(pair.name, "absent", strange))
    return found


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


def _not_alike(pair: CellPair, found: CellChange) -> str:
    """Why a rate of tokens can't be judged: the two sides did not count the same thing."""
    if not found.column.startswith(_COUNTED) or not counts_differ(pair):
        return ""
    return (
        f"{change_in_words(found)}, but not of the same tokens: padding is counted, and one side"
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
    return next((f": {reasons[one]}" for one in rule.columns if one in reasons), "")


def _is_beyond(rule: GateRule, value: float) -> bool:
    below = rule.low is not None and value < rule.low
    return below or (rule.high is not None and value > rule.high)
