"""The state of a running run for live views, at a cost that does not grow with the run.

Only new rows are read; curves and alert rules use bounded memory; metrics of the last half minute
open no older files. Metrics are those of the catalogue, over the last half minute and over the run
so far. The latter read the whole run, so the caller chooses how often to compute them.

Between two reads another run may replace the directory. The run's id shows that, and all state is
reset.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ergmeter.metrics.catalog import in_view
from ergmeter.metrics.live.alert_judge import Judge
from ergmeter.metrics.live.alert_rules import (
    DEFAULT,
    NotedAlert,
    merge_alerts,
    noted_alerts,
    parse_rules,
    ranks_of,
    rule_of,
)
from ergmeter.metrics.live.follow import RunFollower
from ergmeter.metrics.live.recent_window import evidence_since, goal
from ergmeter.metrics.live.rows import TRAIN, LiveRows, LiveTotals, real_tokens
from ergmeter.metrics.summarize import evidence_of, readings_of, settings_of
from ergmeter.records import Device, FloatArray, Missing, Result
from ergmeter.runlog.reader import RUNNING, Run
from ergmeter.units import NS_PER_S, duration

POINTS = 256


class Curve:
    """A sparkline of a whole run in a bounded number of points.

    Each point is the mean of equally many values. When there are too many points, pairs are merged.
    """

    def __init__(self) -> None:
        self._each = 1  # values per point
        self._means = np.empty(0)
        self._rest = np.empty(0)  # values of the incomplete point

    def add(self, values: FloatArray) -> None:
        """Append values, in order."""
        values = np.concatenate([self._rest, values])
        points = len(values) // self._each
        cut = points * self._each
        means = values[:cut].reshape(points, self._each).mean(axis=1) if points else np.empty(0)
        self._means, self._rest = np.concatenate([self._means, means]), values[cut:]
        while len(self._means) > POINTS:
            self._halve()

    def _halve(self) -> None:
        pairs = len(self._means) // 2
        odd = self._means[2 * pairs :]
        # A point without a pair becomes single values again.
        self._rest = np.concatenate([np.repeat(odd, self._each), self._rest])
        self._means = self._means[: 2 * pairs].reshape(pairs, 2).mean(axis=1)
        self._each *= 2

    @property
    def points(self) -> tuple[float, ...]:
        """The points; the last one may have fewer values."""
        last = [self._rest.mean()] if len(self._rest) else []
        return tuple(float(point) for point in (*self._means, *last))


RECENT_NS = 30 * NS_PER_S
_FEW_STEPS = 3  # fewest steps in the recent window
_QUIET_STEPS = 5  # after this many median step times without a step there is no current rate
_PACE_ROWS = 4096  # steps in memory for the current rate
_ALERTS = 200  # alerts in memory
_FLOPS = "FLOPs"


@dataclass
class Gauges:
    """The last reading of each column of a device."""

    device: Device
    values: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class LiveFrame:
    """Everything that a live view shows of a run at one time."""

    run: Run
    status: str
    elapsed_s: float
    step: int | None  # optimizer steps done
    ranks: dict[int, int]  # steps done, by rank
    total: float | None  # the budget in `unit`: steps or tokens
    unit: str
    done: float | None
    eta_s: float | None
    no_eta: str  # why there is no ETA
    recent: dict[str, Result]
    so_far: dict[str, Result]
    so_far_ns: int  # time of the newest row in `so_far`
    loss: float | None
    loss_is_printed: bool  # from the output, as no step has one
    curves: dict[str, tuple[float, ...]]
    gauges: tuple[Gauges, ...]
    energy_j: float | None
    alerts: tuple[NotedAlert, ...]
    rules: tuple[str, ...]
    unjudged: dict[str, str]
    newest_ns: int
    quiet_s: float | None = None  # since the last step, if that is long ago
    training: int = 1  # number of the shown training, counted from 1
    trainings: int = 0
    replaced: int = 0  # how often another run replaced the watched one
    is_provisional: bool = False  # later steps may change which steps are warm-up

    @property
    def is_going(self) -> bool:
        """True if the run is still being written."""
        return self.status == RUNNING


class RunWatcher:
    """Follows one run. Raises FileNotFoundError or FormatError if it is removed."""

    def __init__(
        self,
        path: Path,
        *,
        rules: Iterable[str] = (),
        rank: int | None = None,
        training: int | None = None,
        total_steps: int | None = None,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """`rules` replace the run's own; `rank`: only this rank; `training`: counted from 1,
        default the newest; `now_ns`: the wall clock, to time the gap since the last step."""
        self._now_ns = now_ns
        self._path = path
        self._given = tuple(rules)
        self._rank = rank
        self._training = training
        self._total_steps = total_steps
        self._replaced = 0
        self._begin(Run.open(path))

    def _begin(self, run: Run) -> None:
        """Reset all state for the run in the directory."""
        self._id = run.header.get("id")
        self._beside: frozenset[str] = frozenset()  # writers of other trainings in the same run
        self._curves = {"mean_w": Curve()}
        self._following = RunFollower(self._path)
        self._following.learn()
        self._totals = LiveTotals(self._following.devices)
        run = self._chosen(run)
        texts = self._given or tuple(_rules_of(self._following)) or DEFAULT
        self._judge = Judge(
            parse_rules(texts),
            devices=self._following.devices,
            settings=settings_of(run),
            start_ns=self._following.start_ns,
        )
        self._others: deque[int] = deque(maxlen=_PACE_ROWS)  # when steps of other ranks ended
        self._start_anew()
        self._gauges: dict[str, Gauges] = {}
        self._seen: deque[NotedAlert] = deque(maxlen=_ALERTS)
        self._so_far: dict[str, Result] = {}
        self._so_far_ns = 0
        self._is_provisional = False

    def look(self, *, totals: bool) -> LiveFrame:
        """Read new rows and return the frame. `totals`: also metrics of the run so far."""
        run = Run.open(self._path)
        if run.header.get("id") != self._id:
            self._following.close()
            self._begin(run)
            self._replaced += 1
            totals = True  # the cached ones are of the previous run
        run = self._chosen(run)
        status = run.status
        is_behind = True
        while is_behind:
            new, ready, is_behind = self._following.look(is_last=status != RUNNING)
            self._take(new.without(self._beside))
            for alert in self._judge.feed(ready.without(self._beside)):
                if not alert.is_over:
                    ranks = ranks_of(alert.rule.text, alert.about, self._totals.ranks)
                    noted = NotedAlert(alert.t_ns, alert.text, was_told=False, ranks=ranks)
                    self._seen.append(noted)
        if totals:
            evidence = evidence_of(run)
            self._so_far = readings_of(evidence, in_view("so far"))
            self._is_provisional = evidence.is_provisional
            self._so_far_ns = self._following.newest_ns
        return self._frame(run, status)

    def close(self) -> None:
        """Close the run's files."""
        self._following.close()

    def _chosen(self, run: Run) -> Run:
        """Return the run; if it has several trainings, the chosen or newest one."""
        self._trainings = len(run.trainings)
        if self._training is None and self._trainings < 2:
            return run
        chosen = run.training(self._training or self._trainings)
        beside = frozenset(writer.directory.name for writer in chosen.beside)
        is_another = self._training is None and beside - self._beside
        if is_another and self._totals.steps:  # drop the state of the previous training
            self._totals.begin_training()
            self._start_anew()
        self._beside = beside
        return chosen

    def _start_anew(self) -> None:
        """Reset the values that are tracked for one rank: curves, pace and loss."""
        self._curves |= {name: Curve() for name in ("step_s", "loss", "tokens_per_s")}
        self._pace = _Pace()
        self._loss: float | None = None
        self._loss_is_printed = True

    def _take(self, new: LiveRows) -> None:
        by_rank: list[tuple[int, dict[str, Any]]] = []
        self._totals.feed(new)
        for steps in new.steps.values():
            chosen = steps["phase"] == TRAIN
            if self._rank is not None:
                chosen &= steps["rank"] == self._rank
            if chosen.any():
                taken = {name: column[chosen] for name, column in steps.items()}
                by_rank.append((int(np.nan_to_num(taken["rank"][-1])), taken))
        first = min((rank for rank, _ in by_rank), default=0)
        if by_rank and self._totals.steps and first < min(self._totals.steps):
            self._start_anew()
        for rank, steps in sorted(by_rank, key=lambda pair: pair[0]):
            self._take_steps(rank, steps)
        self._take_losses(new)
        for column, devices in new.samples.items():
            for device, (_, values) in devices.items():
                device_info = self._following.devices.get(device)
                if device_info is not None:
                    gauges = self._gauges.setdefault(device, Gauges(device_info))
                    gauges.values[column] = float(values[-1])
        self._take_power(new)

    def _take_steps(self, rank: int, steps: dict[str, Any]) -> None:
        self._totals.add_training(rank, steps)
        if rank > min(self._totals.steps):  # curves are of the lowest rank only
            self._others.extend(steps["end_ns"].tolist())
            return
        tokens = real_tokens(steps)
        each_s = (steps["end_ns"] - steps["start_ns"]) / NS_PER_S
        many = np.where(np.nan_to_num(steps["steps"]) > 0, steps["steps"], 1.0)
        self._curves["step_s"].add(each_s / many)
        self._curves["tokens_per_s"].add((tokens / np.maximum(each_s, 1e-9))[~np.isnan(tokens)])
        self._pace.add(int(steps["start_ns"].min()), steps["end_ns"], many, np.nan_to_num(tokens))

    def _take_losses(self, new: LiveRows) -> None:
        """Take the losses of the lowest watched rank; printed losses until a step has one."""
        first = min(self._totals.steps, default=0)
        by_steps = {w: s for w, s in new.steps.items() if w not in new.printed}
        by_writer = [loss for s in by_steps.values() if len(loss := _losses(s, rank=first))]
        if by_writer and self._loss_is_printed:
            self._loss_is_printed = False
            self._curves["loss"] = Curve()
        if not by_writer and self._loss_is_printed:
            by_writer = [
                loss for s in new.printed.values() if len(loss := _losses(s, rank=self._rank))
            ]
        for losses in by_writer:
            self._loss = float(losses[-1])
            self._curves["loss"].add(losses[np.isfinite(losses)])

    def _take_power(self, new: LiveRows) -> None:
        """Add the power readings of one GPU, or else of one CPU, to the power curve."""
        by_device = new.samples.get("power_w", {})
        kinds = {i: d.kind for i, d in self._following.devices.items()}
        wanted = "gpu" if "gpu" in kinds.values() else "cpu"
        chosen = sorted(device for device in by_device if kinds.get(device) == wanted)
        if chosen:
            self._curves["mean_w"].add(by_device[chosen[0]][1])

    def _frame(self, run: Run, status: str) -> LiveFrame:
        newest_ns = self._following.newest_ns
        now_ns = max(newest_ns, self._now_ns() - run.wall_zero_ns)
        quiet_s = self._pace.quiet_s(now_ns) if status == RUNNING else None
        since_ns = self._pace.since_ns(self._others)
        if since_ns is None:
            since_ns = max(0, newest_ns - RECENT_NS)
        if quiet_s is None:
            recent = readings_of(evidence_since(run, since_ns), in_view("recent"))
        else:  # earlier metrics are not recent
            why = f"the last step ended {duration(quiet_s)} ago"
            recent = dict.fromkeys(in_view("recent"), Missing(why))
        start_ns = self._following.start_ns or newest_ns
        step = max(self._totals.steps.values(), default=None)
        total, unit, done = self._goal(step)
        eta_s, no_eta = _eta(total, done, self._pace.per_s(since_ns, unit))
        if quiet_s is not None and total is not None:
            eta_s, no_eta = None, f"last step {duration(quiet_s)} ago"
        elif unit == _FLOPS:
            no_eta = "the budget is in FLOPs; live views count only steps and tokens"
        return LiveFrame(
            run, status, max(0.0, (newest_ns - start_ns) / NS_PER_S), step,
            dict(sorted(self._totals.steps.items())), total, unit, done, eta_s, no_eta, recent,
            self._so_far, self._so_far_ns, self._loss,
            self._loss is not None and self._loss_is_printed,
            {name: curve.points for name, curve in self._curves.items()},
            tuple(self._gauges.values()), self._totals.energy.known_j,
            tuple(merge_alerts(noted_alerts(run, self._totals.ranks), self._seen)),
            tuple(rule.text for rule in self._judge.rules), self._judge.unjudged, newest_ns,
            quiet_s, self._training or self._trainings, self._trainings, self._replaced,
            self._is_provisional,
        )  # fmt: skip

    def _goal(self, step: int | None) -> tuple[float | None, str, float | None]:
        """Return the total in steps or tokens, the unit, and how much is done."""
        if self._total_steps:
            return self._total_steps, "steps", step
        unit, total = goal(self._following.headers) or ("", None)
        if unit == _FLOPS:
            return None, unit, None
        tokens = self._totals.tokens.get(min(self._totals.steps, default=0), 0.0)
        return total, unit, tokens if unit == "tokens" else step


class _Pace:
    """The rate of one rank's newest steps, from their ends, step counts and tokens."""

    def __init__(self) -> None:
        self._first_ns: int | None = None  # when the first step began
        self._ends = np.empty(0, np.int64)
        self._many = np.empty(0)  # steps of each row: a printed line may stand for several
        self._tokens = np.empty(0)

    def add(self, start_ns: int, ends: Any, many: Any, tokens: Any) -> None:  # noqa: ANN401  arrays
        self._first_ns = start_ns if self._first_ns is None else min(start_ns, self._first_ns)
        both = np.concatenate([self._ends, ends])
        newest = np.argsort(both, kind="stable")[-_PACE_ROWS:]
        self._ends = both[newest]
        self._many = np.concatenate([self._many, many])[newest]
        self._tokens = np.concatenate([self._tokens, tokens])[newest]

    def since_ns(self, others: Iterable[int]) -> int | None:
        """The start of the recent window: a time at which all ranks have ended a step.

        A window that began within a step would count all of its work but part of its time. Other
        ranks (`others`: their step ends) end that step a little later.
        """
        if self._first_ns is None:
            return None
        last_ns = int(self._ends[-1])
        before = self._ends[self._ends <= last_ns - RECENT_NS]
        few = self._ends[: max(0, len(self._ends) - _FEW_STEPS)]
        if not len(before) or not len(few):
            # All steps; or steps so short that the exact start does not matter.
            all_held = len(self._ends) == _PACE_ROWS
            return max(self._first_ns, last_ns - RECENT_NS) if all_held else self._first_ns
        since_ns = min(int(before[-1]), int(few[-1]))
        half_ns = (int(self._ends[self._ends > since_ns][0]) - since_ns) // 2
        return max((t for t in others if since_ns < t < since_ns + half_ns), default=since_ns)

    def per_s(self, since_ns: int, unit: str) -> float | None:
        """Steps or tokens per second since a time; None without steps."""
        later = self._ends > since_ns
        if not later.any():
            return None
        amount = (self._tokens if unit == "tokens" else self._many)[later].sum()
        return float(amount) * NS_PER_S / (int(self._ends[-1]) - since_ns)

    def quiet_s(self, now_ns: int) -> float | None:
        """Seconds since the last step if that is unusually long; else None."""
        if self._first_ns is None:
            return None
        gaps_ns = np.diff(self._ends[-64:], prepend=self._first_ns if len(self._ends) == 1 else ())
        usual_ns = float(np.median(gaps_ns)) if len(gaps_ns) else 0.0
        quiet_ns = now_ns - int(self._ends[-1])
        return quiet_ns / NS_PER_S if quiet_ns > max(RECENT_NS, _QUIET_STEPS * usual_ns) else None


def _losses(steps: dict[str, Any], *, rank: int | None) -> Any:  # noqa: ANN401  an array
    """The losses of training steps that have one, NaN included, of `rank` or of all ranks."""
    has_loss = steps["loss_told"] & (steps["phase"] == TRAIN)
    if rank is not None:
        has_loss &= np.nan_to_num(steps["rank"]) == rank
    return steps["loss"][has_loss]


def _rules_of(following: RunFollower) -> list[str]:
    declared = (header.get("alerts") for header in following.headers)
    lists = (entry["rules"] for entry in declared if isinstance(entry, dict) and "rules" in entry)
    texts = dict.fromkeys(str(t) for rules in lists for t in rules)
    return [text for text in texts if rule_of(text) is not None]


def _eta(total: float | None, done: float | None, rate: float | None) -> tuple[float | None, str]:
    """Seconds left at the recent rate, or the reason why that is unknown."""
    if total is None:
        return None, "progress unknown: no total step count (--steps)"
    if done is None or not rate:
        return None, "no pace yet"
    return max(0.0, total - done) / rate, ""
