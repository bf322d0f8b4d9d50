"""How is this run going: what a live view shows, at a price that does not grow with the run.

Two traps shaped it. A run of a day must not be read from its start at every look: new rows are
followed (`following`), curves and the judge hold a bounded amount, and the figures of the last half
minute open no file from before. And a live view must not have figures of its own: those it shows
are the catalogue's, of the last half minute and of the run so far, each with its basis. The latter
need the whole run, so whoever calls says how often that is worth it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ergmeter.errors import NotMeasurable, UsageError
from ergmeter.metrics.alert_rules import DEFAULT, all_parsed, parsed
from ergmeter.metrics.alerts import Judge
from ergmeter.metrics.catalog import catalogue
from ergmeter.metrics.curves import Curve
from ergmeter.metrics.following import Following
from ergmeter.metrics.lately import evidence_since
from ergmeter.metrics.summarize import evidence_of, settings_of
from ergmeter.records import PHASES, Missing
from ergmeter.runlog.reader import RUNNING, Run
from ergmeter.units import NS_PER_S

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from ergmeter.metrics.alerts import Rows
    from ergmeter.metrics.evidence import Evidence
    from ergmeter.records import Device, Result

LATELY_NS = 30 * NS_PER_S
_FEW_STEPS = 3  # that lately is at least of
_SAME_NS = 30 * NS_PER_S  # within which a mark and a judgement are one alert
_ALERTS = 200  # that are held; a page shows a few
_TRAIN = PHASES.index("train")

NOW = ("throughput.tokens_per_s", "time.step_s", "energy.mean_w")
SO_FAR = (
    *("throughput.tokens_per_s", "time.step_s", "utilization.mfu_frac"),
    *("energy.joules_per_token", "energy.run_j"),
)


@dataclass(frozen=True, slots=True)
class Noted:
    """An alert: one that the run's own alarm told of, or one that is seen only now."""

    t_ns: int
    text: str
    was_told: bool


@dataclass
class Gauges:
    """What a device said last."""

    device: Device
    values: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Frame:
    """One look at a run: everything that a view shows of it."""

    run: Run
    status: str
    elapsed_s: float
    step: int | None  # optimizer steps done
    ranks: dict[int, int]  # steps done, by rank
    total: float | None  # of steps or tokens, as `unit` says
    unit: str
    done: float | None
    eta_s: float | None
    no_eta: str  # why there is none
    lately: dict[str, Result]
    so_far: dict[str, Result]
    so_far_ns: int  # the newest row that those know of
    loss: float | None
    curves: dict[str, tuple[float, ...]]
    gauges: tuple[Gauges, ...]
    energy_j: float | None
    alerts: tuple[Noted, ...]
    rules: tuple[str, ...]
    unjudged: dict[str, str]
    newest_ns: int

    @property
    def is_going(self) -> bool:
        """Whether somebody still writes."""
        return self.status == RUNNING


class Watching:
    """Follows one run. Raises FileNotFoundError or FormatError once it is gone."""

    def __init__(
        self,
        path: Path,
        *,
        rules: Iterable[str] = (),
        rank: int | None = None,
        total_steps: int | None = None,
    ) -> None:
        """`rules`: in place of those that the run was made with; `rank`: just this one."""
        self._path = path
        self._rank = rank
        self._total_steps = total_steps
        self._following = Following(path)
        self._following.learn()
        run = _newest(Run.open(path))
        texts = tuple(rules) or tuple(_rules_of(self._following)) or DEFAULT
        self._judge = Judge(
            all_parsed(texts),
            devices=self._following.devices,
            settings=settings_of(run),
            start_ns=self._following.start_ns,
        )
        self._curves = {name: Curve() for name in ("step_s", "loss", "power_w", "tokens_per_s")}
        self._steps: dict[int, int] = {}
        self._tokens = 0.0
        self._ends: deque[int] = deque(maxlen=64)
        self._first_ns: int | None = None  # when the first step began
        self._loss: float | None = None
        self._gauges: dict[str, Gauges] = {}
        self._seen: deque[Noted] = deque(maxlen=_ALERTS)
        self._so_far: dict[str, Result] = {}
        self._so_far_ns = 0

    def look(self, *, totals: bool) -> Frame:
        """What is new, taken in. `totals`: also the figures of the run so far, from its start."""
        run = _newest(Run.open(self._path))
        status = run.status
        is_behind = True
        while is_behind:
            new, ready, is_behind = self._following.look(is_last=status != RUNNING)
            self._take(new)
            for alert in self._judge.feed(ready):
                if not alert.is_over:
                    self._seen.append(Noted(alert.t_ns, alert.text, was_told=False))
        if totals:
            self._so_far = _figures(SO_FAR, evidence_of(run))
            self._so_far_ns = self._following.newest_ns
        return self._frame(run, status)

    def close(self) -> None:
        """Let go of the run's files."""
        self._following.close()

    # -- inside -----------------------------------------------------------------------------------

    def _take(self, new: Rows) -> None:
        for steps in new.steps.values():
            chosen = steps["phase"] == _TRAIN
            if self._rank is not None:
                chosen &= steps["rank"] == self._rank
            if chosen.any():
                self._take_steps({name: column[chosen] for name, column in steps.items()})
        for column, devices in new.samples.items():
            for device, (_, values) in devices.items():
                known = self._following.devices.get(device)
                if known is not None:
                    gauges = self._gauges.setdefault(device, Gauges(known))
                    gauges.values[column] = float(values[-1])
        self._take_power(new)

    def _take_steps(self, steps: dict[str, Any]) -> None:
        rank = int(np.nan_to_num(steps["rank"][-1]))
        first = min(self._steps, default=rank)
        counted = int(np.nansum(steps["steps"]))
        last = steps["index"][-1]
        before = self._steps.get(rank, 0)
        self._steps[rank] = before + counted if np.isnan(last) else int(last) + 1
        real = steps["tokens_real"]
        tokens = np.where(np.isnan(real), steps["tokens_computed"], real)
        each_s = (steps["end_ns"] - steps["start_ns"]) / NS_PER_S
        if rank > first:  # curves are of the first rank: those of several would be one in zigzag
            return
        self._tokens += float(np.nansum(tokens))
        many = np.where(np.nan_to_num(steps["steps"]) > 0, steps["steps"], 1.0)
        self._curves["step_s"].add(each_s / many)
        self._curves["tokens_per_s"].add((tokens / np.maximum(each_s, 1e-9))[~np.isnan(tokens)])
        told = steps["loss"][steps["loss_told"]]
        if len(told):
            self._loss = float(told[-1])
            self._curves["loss"].add(told[np.isfinite(told)])
        if self._first_ns is None:
            self._first_ns = int(steps["start_ns"].min())
        self._ends.extend(steps["end_ns"][-64:].tolist())

    def _take_power(self, new: Rows) -> None:
        """Of the boards, else of the CPUs: one of them alone stands for the shape of the curve."""
        by_device = new.samples.get("power_w", {})
        kinds = {i: d.kind for i, d in self._following.devices.items()}
        wanted = "gpu" if "gpu" in kinds.values() else "cpu"
        chosen = sorted(device for device in by_device if kinds.get(device) == wanted)
        if chosen:
            self._curves["power_w"].add(by_device[chosen[0]][1])

    def _frame(self, run: Run, status: str) -> Frame:
        newest_ns = self._following.newest_ns
        since_ns = newest_ns - LATELY_NS
        if self._ends:
            few_ns = self._ends[max(0, len(self._ends) - 1 - _FEW_STEPS)]
            since_ns = min(self._ends[-1] - LATELY_NS, few_ns - 1)
            # A window that begins before the first step would be as if nothing was done in it.
            since_ns = max(0, since_ns, self._first_ns or 0)
        lately = _figures(NOW, evidence_since(run, since_ns))
        start_ns = self._following.start_ns or newest_ns
        step = max(self._steps.values(), default=None)
        total, unit, done = self._goal(step)
        eta_s, no_eta = _eta(total, unit, done, lately, self._first_rank_per_s(lately))
        return Frame(
            run, status, max(0.0, (newest_ns - start_ns) / NS_PER_S), step,
            dict(sorted(self._steps.items())), total, unit, done, eta_s, no_eta, lately,
            self._so_far, self._so_far_ns, self._loss,
            {name: curve.points for name, curve in self._curves.items()},
            tuple(self._gauges.values()), self._judge.energy_j, self._alerts(run),
            tuple(rule.text for rule in self._judge.rules), self._judge.unjudged, newest_ns,
        )  # fmt: skip

    def _goal(self, step: int | None) -> tuple[float | None, str, float | None]:
        """What the run is to reach, in steps or tokens, and how much of it is done."""
        if self._total_steps:
            return self._total_steps, "steps", step
        for header in self._following.headers.values():
            budget = header.get("budget") or {}
            if "tokens" in budget:
                return float(budget["tokens"]), "tokens", self._tokens
            total = budget.get("steps") or header.get("total_steps")
            if total:
                return float(total), "steps", step
        return None, "", None

    def _first_rank_per_s(self, lately: dict[str, Result]) -> float | None:
        """Steps a second, by the time of a step lately."""
        if len(self._ends) > 1 and self._ends[-1] > self._ends[0]:
            return (len(self._ends) - 1) * NS_PER_S / (self._ends[-1] - self._ends[0])
        step_s = lately.get("time.step_s")
        return None if step_s is None or isinstance(step_s, Missing) else 1 / step_s.value

    def _alerts(self, run: Run) -> tuple[Noted, ...]:
        told = [Noted(m.t_ns, m.detail, was_told=True) for m in run.marks if m.name == "alert"]
        only = [one for one in self._seen if not any(_is_same(one, other) for other in told)]
        return tuple(sorted([*told, *only], key=lambda one: one.t_ns))


def _is_same(one: Noted, other: Noted) -> bool:
    rules = [noted.text.partition(": ")[0] for noted in (one, other)]
    return rules[0] == rules[1] and abs(one.t_ns - other.t_ns) < _SAME_NS


def _rules_of(following: Following) -> list[str]:
    found = (header.get("alerts") for header in following.headers.values())
    told = (one["rules"] for one in found if isinstance(one, dict) and "rules" in one)
    return [
        text for text in dict.fromkeys(str(t) for rules in told for t in rules) if _is_rule(text)
    ]


def _is_rule(text: str) -> bool:
    """Whether this version can judge it: a run may be from another."""
    try:
        parsed(text)
    except UsageError:
        return False
    return True


def _figures(keys: Iterable[str], evidence: Evidence) -> dict[str, Result]:
    found: dict[str, Result] = {}
    for key in keys:
        try:
            found[key] = catalogue()[key].compute(evidence)
        except NotMeasurable as error:
            found[key] = Missing(str(error))
    return found


def _eta(
    total: float | None,
    unit: str,
    done: float | None,
    lately: dict[str, Result],
    steps_per_s: float | None,
) -> tuple[float | None, str]:
    """How long it will take at the pace of lately, or why nobody knows."""
    if total is None:
        return None, "nobody said how many steps there will be (--steps)"
    rate = steps_per_s
    if unit == "tokens":
        found = lately.get("throughput.tokens_per_s")
        rate = None if found is None or isinstance(found, Missing) else found.value
    if done is None or not rate:
        return None, "no pace yet"
    return max(0.0, total - done) / rate, ""


def _newest(run: Run) -> Run:
    """The run, or the last of several trainings in it: figures of all of them there are none."""
    several = len(run.trainings)
    return run.training(several) if several > 1 else run
