"""The catalogue: every metric once, with its unit, direction, formula, needs and other names.

Every spelling elsewhere (the card, the JSON, a sink's tag, the reference page) derives from it.
A plugin adds metrics by naming a list of `Metric` under the entry point `ergmeter.metrics`.
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

from ergmeter import registry
from ergmeter.errors import NotMeasurable, UsageError, suggestion
from ergmeter.records import Device, Direction, Reading, Result, is_above
from ergmeter.units import significant

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ergmeter.metrics.evidence.evidence import Evidence

Scope: TypeAlias = Literal["run", "comparison", "cell", "job", "analysis"]

LEDGER_SYSTEM = "SFT-Play"  # its metric names are the columns of an energy ledger
IMPOSSIBLE = "is impossible"  # part of the reason why a dependent metric is absent


@dataclass(frozen=True, slots=True)
class Alias:
    """Another system's name for a metric. `scale` converts our value to its unit."""

    name: str
    system: str
    definition: str
    unit: str
    scale: float = 1.0


def _alias_in(
    system: str, name: str, unit: str, definition: str, scale: float = 1.0
) -> tuple[Alias, ...]:
    """The name of a metric in another system, as its only alias."""
    return (Alias(name, system, definition, unit, scale),)


efficientllm = partial(_alias_in, "EfficientLLM")
sft_play = partial(_alias_in, LEDGER_SYSTEM)
vllm = partial(_alias_in, "vLLM bench serve")


class Position(NamedTuple):
    """A metric's place in a view: its order, group and label.

    If a metric that `is_expected` is absent, the view names it with the reason.
    """

    order: int
    group: str = ""
    label: str = ""  # "" for the metric's title
    is_expected: bool = False


_POSITION = re.compile(
    r"(?P<view>[a-z ]+) (?P<order>\d+)( in (?P<group>.+?))?( as (?P<label>.+?))?(?P<is> expected)?",
    re.DOTALL,
)


@cache
def positions(text: str) -> dict[str, Position]:
    """Parse a metric's positions by view: "card 600 in energy expected; list 30 as J/token".

    Each is a view's name and the order there, then optionally "in" a group, "as" a label, and
    "expected".
    """
    declared = {}
    for part in text.split("; ") if text else ():
        match = _POSITION.fullmatch(part)
        if match is None:
            raise ValueError(f"not a position in a view: {part!r}")
        group, label = match["group"] or "", match["label"] or ""
        declared[match["view"]] = Position(int(match["order"]), group, label, bool(match["is"]))
    return declared


@dataclass(frozen=True, slots=True)
class Metric:
    """One row of the catalogue. `compute` raises NotMeasurable with the reason.

    A value above `upper_bound` is impossible; `above_bound` explains what is wrong then. Read a
    metric with `reading` and `device_reading`, which mark impossible values.

    `scope`: what the metric describes. Metrics of scope "run" are computed from a run. The others
    are filled in by a comparison, a bench cell, a job or a Trainium analysis.
    `quantity`: shared by metrics that differ by a constant factor for equal work, so that a family
    of tests counts them once. Empty: the key.
    `alternatives`: keys in order of preference; a comparison takes the first that both sides have.
    `same_facts`: facts that two runs must share for their values to be comparable.
    `views`: the views that show the metric, and in which order; parsed by `positions`.
    """

    key: str
    title: str
    unit: str
    direction: Direction
    formula: str
    needs: tuple[str, ...]
    compute: Callable[[Evidence], Reading]
    per_device: Callable[[Evidence, Device], Reading] | None = None
    kinds: tuple[str, ...] = ("gpu",)  # the kinds of device that per_device accepts
    aliases: tuple[Alias, ...] = ()
    upper_bound: float | None = None
    above_bound: str = "an input is wrong"
    noun: str = ""  # the metric's name in a sentence of a comparison; "" for the title
    scale: Literal["ratio", "difference"] = "ratio"  # how two values are compared
    quantity: str = ""
    alternatives: tuple[str, ...] = ()
    same_facts: tuple[str, ...] = ()
    scope: Scope = "run"
    column: str = ""  # in a bench's table of results
    rule: str = ""  # the metric's name in the rules of a gate
    rule_aliases: tuple[str, ...] = ()  # names in FMS and transformers that rules also accept
    views: str = ""

    @property
    def phrase(self) -> str:
        """The metric's name in a sentence: the noun, else the title."""
        return self.noun or self.title

    @property
    def tested_quantity(self) -> str:
        """The quantity that tests count once: `quantity`, else the key."""
        return self.quantity or self.key

    @property
    def label(self) -> str:
        """The metric's name in rules and tables of bench cells: `rule`, else the key."""
        return self.rule or self.key

    @property
    def every_key(self) -> tuple[str, ...]:
        """The keys that a comparison tries, in order: the alternatives, then the metric's own."""
        return tuple(dict.fromkeys((*self.alternatives, self.key)))

    @property
    def is_quality(self) -> bool:
        """True for a loss, which is compared by difference, not by ratio."""
        return self.scale == "difference"

    def reading(self, evidence: Evidence) -> Reading:
        """Compute the metric of a run; the reading is marked if its value is impossible."""
        return self.checked(self.compute(evidence))

    def device_reading(self, evidence: Evidence, device: Device) -> Reading:
        """Compute the metric of one device; the reading is marked if its value is impossible."""
        assert self.per_device is not None
        return self.checked(self.per_device(evidence, device))

    def checked(self, reading: Reading) -> Reading:
        """Mark a reading as impossible if it is above the metric's bound."""
        if self.upper_bound is None or not is_above(reading, self.upper_bound):
            return reading
        bound = _in_words(self.upper_bound, self.unit)
        return replace(reading, impossible=f"above {bound}: {self.above_bound}")

    def usable(self, reading: Reading) -> Reading:
        """Return a reading for use in another metric. NotMeasurable if its value is impossible."""
        if reading.impossible:
            raise NotMeasurable(f"{self.title} {refusal(reading)}")
        return reading


def refusal(reading: Reading) -> str:
    """The text on an impossible reading, for metrics that need it: the value and the reason."""
    return f"{_in_words(reading.value, reading.unit)} {IMPOSSIBLE}: {reading.impossible}"


def _in_words(value: float, unit: str) -> str:
    return f"{significant(value * 100, 3)} %" if unit == "frac" else f"{significant(value)} {unit}"


def checked(key: str, result: Result) -> Result:
    """Mark a metric's result as impossible if it is above the metric's bound."""
    return catalogue()[key].checked(result) if isinstance(result, Reading) else result


def over_whole_run(
    metrics: list[Metric], *keys: str, title: str = "", is_in_bench: bool = False, views: str = ""
) -> list[Metric]:
    """Return variants of these metrics that cover the whole run, not the training window.

    `is_in_bench`: include them in a bench's table and in the rules of a gate.
    """
    return [
        replace(
            metric,
            key=metric.key.replace(".run_", ".").replace(".", ".whole_run_"),
            title=f"{title or metric.title}, whole run",
            formula=f"as {metric.key}, from the start of the command or the Meter to the end of the"
            " run, with all training steps",
            compute=partial(_whole_run_reading, metric),
            per_device=None,
            aliases=(),
            noun=metric.noun and f"{metric.noun} over the whole run",
            quantity=metric.quantity and f"whole-run {metric.quantity}",
            alternatives=(),
            column=f"whole_run_{metric.column}" if is_in_bench else "",
            rule=f"whole_run_{metric.rule}" if is_in_bench else "",
            rule_aliases=(),
            views=views,
        )
        for metric in metrics
        if metric.key in keys
    ]


def _whole_run_reading(metric: Metric, evidence: Evidence) -> Reading:
    return metric.compute(evidence.whole_run)


@cache
def catalogue() -> dict[str, Metric]:
    """The metrics of a run by key, in the order of `every_metric`."""
    return {key: metric for key, metric in every_metric().items() if metric.scope == "run"}


@cache
def every_metric() -> dict[str, Metric]:
    """All metrics by key: the built-in ones in display order, then those of plugins."""
    first = (
        *("throughput", "tokens", "time", "energy", "step_energy", "idle", "memory", "allocator"),
        *("memory_phases", "utilization", "activity", "compute", "achievable", "carbon", "cost"),
        *("inference", "training", "other_scopes"),
    )
    names = sorted(
        registry.names("metrics"),
        key=lambda name: (first.index(name) if name in first else len(first), name),
    )
    metrics = [metric for name in names for metric in registry.load("metrics", name)]
    return {metric.key: metric for metric in metrics}


@cache
def ledger_aliases() -> list[tuple[Metric, Alias]]:
    """The metrics with a column in an energy ledger, each with the column's name as an alias."""
    every = ((metric, alias) for metric in catalogue().values() for alias in metric.aliases)
    return [(metric, alias) for metric, alias in every if alias.system == LEDGER_SYSTEM]


@cache
def in_view(view: str) -> dict[str, Position]:
    """The metrics that a view shows, by key, in the view's order."""
    placed = ((key, positions(metric.views).get(view)) for key, metric in every_metric().items())
    declared = [(key, at) for key, at in placed if at is not None]
    return dict(sorted(declared, key=lambda item: item[1].order))


def titles_in(view: str) -> dict[str, str]:
    """The label (else title) of each metric that a view shows, by key, in the view's order."""
    return {key: at.label or every_metric()[key].title for key, at in in_view(view).items()}


def expected_in(view: str) -> list[str]:
    """The keys of the metrics that a view names, with the reason, if they are absent."""
    return [key for key, at in in_view(view).items() if at.is_expected]


@cache
def bench_columns() -> dict[str, Metric]:
    """The metrics in a bench's table of results, by column."""
    return {metric.column: metric for metric in every_metric().values() if metric.column}


@cache
def rule_names() -> dict[str, Metric]:
    """The metrics with a name in the rules of a gate, by that name."""
    return {metric.rule: metric for metric in every_metric().values() if metric.rule}


def rule_metric(name: str) -> Metric:
    """Find the metric of a gate's rule: by rule name, alias, bench column, or as `find` does.

    Raises UsageError with the closest name.
    """
    others = {alias: metric for metric in every_metric().values() for alias in metric.rule_aliases}
    by_name = {**bench_columns(), **others, **rule_names()}
    if name in by_name:
        return by_name[name]
    try:
        return find(name, every_metric())[0]
    except UsageError:
        hint = suggestion(name, [*rule_names(), *others], "did you mean {}?", cutoff=0.4)
        names = f"there are {', '.join(rule_names())}"
        raise UsageError(f"no metric {name!r}; {hint or names}") from None


def find(name: str, among: Mapping[str, Metric] | None = None) -> tuple[Metric, Alias | None]:
    """Find a metric by key, alias, or the last part of its key if that is unique.

    `among`: by default the metrics of a run (`catalogue`); `every_metric` also has those of bench
    cells and analyses. Raises UsageError with the closest names.
    """
    metrics = catalogue() if among is None else among
    by_name: dict[str, tuple[Metric, Alias | None]] = {}
    last_parts = Counter(key.rpartition(".")[2] for key in metrics)
    for metric in metrics.values():
        by_name[metric.key.lower()] = (metric, None)
        last = metric.key.rpartition(".")[2]
        if last_parts[last] == 1:
            by_name.setdefault(last, (metric, None))
        for alias in metric.aliases:
            by_name[alias.name.lower()] = (metric, alias)
    if name.lower() in by_name:
        return by_name[name.lower()]
    near = difflib.get_close_matches(name.lower(), by_name, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    raise UsageError(f"no metric {name!r}; {hint}`erg metrics` lists them all")
