"""What does a gate come to for each cell: pass, worse, inconclusive, missing, new?

The trap: a cell that is fine in two rules and red in a third, shown as mostly fine. The word of a
cell is that of the worst that was found of it; what could not be judged at all is no pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

from ergmeter.bench.gate.comparing import TOGETHER

if TYPE_CHECKING:
    from ergmeter.bench.gate.gate import Gate, State
    from ergmeter.bench.gate.pairing import CellPair

Word: TypeAlias = Literal["worse", "inconclusive", "missing", "new", "pass", "not judged"]
WORDS: tuple[Word, ...] = ("worse", "missing", "inconclusive", "not judged", "new", "pass")


@dataclass(frozen=True, slots=True)
class CellVerdict:
    """One configuration: the word for it, and what that rests on."""

    name: str
    word: Word
    reasons: tuple[str, ...]


def cell_verdicts(found: Gate) -> tuple[CellVerdict, ...]:
    """Every configuration of both sides, the worst first, and all together where they were."""
    states: dict[str, list[tuple[State, str]]] = {}
    for judgement in found.judgements:
        said = f"{judgement.rule}: {judgement.words}"
        states.setdefault(judgement.name, []).append((judgement.state, said))
    for finding in found.findings:
        states.setdefault(finding.name, []).append((finding.state, finding.words))
    named = {pair.name: pair for pair in found.paired.pairs}
    names = [*([TOGETHER] if TOGETHER in states else []), *named]
    verdicts = [_verdict(name, named.get(name), states.get(name, [])) for name in names]
    return tuple(sorted(verdicts, key=lambda one: WORDS.index(one.word)))


def _verdict(name: str, pair: CellPair | None, states: list[tuple[State, str]]) -> CellVerdict:
    order: tuple[State, ...] = ("red", "inconclusive", "pass", "absent")
    told = sorted(states, key=lambda one: order.index(one[0]))
    worst = tuple(words for state, words in told if state == told[0][0])
    reasons = worst or ("no figure that both sides have",)
    if pair is not None and not pair.new.rows:
        return CellVerdict(name, "missing", reasons)
    if pair is not None and not pair.ref.rows:
        return CellVerdict(name, "new", reasons)
    words: dict[State, Word] = {"red": "worse", "inconclusive": "inconclusive", "pass": "pass"}
    return CellVerdict(name, words.get(told[0][0], "not judged") if told else "not judged", reasons)
