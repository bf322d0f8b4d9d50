"""Alerts as they are shown: each once, with the ranks that it is of.

The trap: eight lines for one event. Each rank's alarm judges its own share, so what befalls all of
them is marked once a rank, some steps apart; and who looks at the run judges it once more. Two are
one alert where the rule is the same and they lie close together, but never two devices, and never
one rank that recovered and fell again.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import TYPE_CHECKING

from ergmeter.errors import UsageError
from ergmeter.metrics.alerts.rules import MEMORY, NAN, THROTTLED, AlertRule, parsed
from ergmeter.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ergmeter.runlog.reader import Run

_SAME_NS = 30 * NS_PER_S  # within which a mark and a judgement are one alert
_FEW = 8  # ranks that are named


@dataclass(frozen=True, slots=True)
class NotedAlert:
    """An alert: one that the run's own alarm told of, or one that is seen only now.

    `ranks` has whose loss it was, where there are several; more of them may come."""

    t_ns: int
    text: str
    was_told: bool
    ranks: tuple[int, ...] = field(default=(), compare=False)

    @property
    def said(self) -> str:
        """The text, with the ranks."""
        if not self.ranks:
            return self.text
        some = ", ".join(map(str, self.ranks[:_FEW])) + (", ..." if len(self.ranks) > _FEW else "")
        word = "rank" if len(self.ranks) == 1 else f"{len(self.ranks)} ranks:"
        return f"{self.text} ({word} {some})"

    @property
    def rule(self) -> AlertRule | None:
        """What it was held against; None where this version can't read that."""
        return rule_of(self.text.partition(": ")[0])


def rule_of(text: str) -> AlertRule | None:
    """A rule, if this version can judge it: a run may be from another."""
    try:
        return parsed(text)
    except UsageError:
        return None


def noted_alerts(run: Run, ranks: Mapping[str, int]) -> list[NotedAlert]:
    """What the alarms of a run marked, each once. `ranks`: by writer, of those that step."""
    marked = (
        NotedAlert(
            mark.t_ns + writer.offset_ns,
            mark.detail,
            was_told=True,
            ranks=ranks_of(mark.detail.partition(": ")[0], writer.directory.name, ranks),
        )
        for writer in run.writers
        for mark in writer.marks
        if mark.name == "alert"
    )
    return each_once(marked)


def ranks_of(rule: str, writer: str, ranks: Mapping[str, int]) -> tuple[int, ...]:
    """Whose alert it is, where that says something: of a loss, and of several ranks."""
    known = rule_of(rule)
    if known is None or known.kind != NAN or len(set(ranks.values())) < 2 or writer not in ranks:
        return ()
    return (ranks[writer],)


def with_seen(marked: list[NotedAlert], seen: Iterable[NotedAlert]) -> list[NotedAlert]:
    """Those that were told, with the ranks that are seen now, and those that nobody told of."""
    found, only = list(marked), []
    for one in seen:
        at = next((at for at, other in enumerate(found) if is_same(one, other)), None)
        if at is None:
            only.append(one)
        else:
            found[at] = _joined(found[at], one)
    return sorted([*found, *each_once(only)], key=lambda one: one.t_ns)


def each_once(alerts: Iterable[NotedAlert]) -> list[NotedAlert]:
    """In order of time; what several ranks tell of one event is one."""
    found: list[NotedAlert] = []
    for one in sorted(alerts, key=lambda one: one.t_ns):
        near = takewhile(
            lambda at, one=one: one.t_ns - found[at].t_ns < _SAME_NS,  # type: ignore[misc]
            reversed(range(len(found))),
        )
        at = next((at for at in near if _is_one_event(one, found[at])), None)
        if at is None:
            found.append(one)
        else:
            found[at] = _joined(found[at], one)
    return found


def is_same(one: NotedAlert, other: NotedAlert) -> bool:
    """Whether two are one alert, of the run's alarm and of who looks now. What is about a device
    names it: two devices at a time are two alerts."""
    rules = [noted.text.partition(": ")[0] for noted in (one, other)]
    if rules[0] != rules[1] or abs(one.t_ns - other.t_ns) >= _SAME_NS:
        return False
    rule = one.rule
    of_devices = rule is not None and rule.kind in (MEMORY, THROTTLED)
    return one.text == other.text or not of_devices


def _is_one_event(one: NotedAlert, other: NotedAlert) -> bool:
    """Whether two of the same kind of witness tell of one thing."""
    rule = one.rule
    if rule is None or not is_same(one, other):
        return False
    if rule.is_of_all_ranks:
        return True
    if rule.kind != NAN:
        return False
    if not one.ranks or not other.ranks:  # of one step, by somebody who watches all ranks
        return one.text == other.text
    return not set(one.ranks) & set(other.ranks)


def _joined(first: NotedAlert, other: NotedAlert) -> NotedAlert:
    return replace(first, ranks=tuple(sorted({*first.ranks, *other.ranks})))
