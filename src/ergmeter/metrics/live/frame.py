"""How is this run going: what a live view shows, at a price that does not grow with the run.

Two traps shaped it. A run of a day must not be read from its start at every look: new rows are
followed (`following`), curves and the judge hold a bounded amount, and the figures of the last half
minute open no file from before. And a live view must not have figures of its own: those it shows
are the catalogue's, of the last half minute and of the run so far, each with its basis. The latter
need the whole run, so whoever calls says how often that is worth it.

A directory may be removed and hold another run at the next look, whose rows would be taken for more
of the first one's: by its id it is known, and everything begins anew.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.alerts.judge import Judge
from ergmeter.metrics.alerts.marks import NotedAlert, noted_alerts, ranks_of, rule_of, with_seen
from ergmeter.metrics.alerts.rules import DEFAULT, all_parsed
from ergmeter.metrics.catalog import catalogue
from ergmeter.metrics.live.eta import goal, real_tokens, steps_done
from ergmeter.metrics.live.follow import Following
from ergmeter.metrics.live.recent_window import evidence_since
from ergmeter.metrics.summarize import evidence_of, settings_of
from ergmeter.records import PHASES, Missing
from ergmeter.runlog.reader import RUNNING, Run
from ergmeter.units import NS_PER_S, duration

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from ergmeter.metrics.alerts.judge import AlertRows
    from ergmeter.metrics.evidence.evidence import Evidence
    from ergmeter.records import Device, FloatArray, Result

# -- curves ----------------------------------------------------------------------------------------
# A curve of bounded length, of numbers without end: for the sparkline of a run of any length.
#
# The trap: the last hundred points. A curve of those forgets how it was, and says that a run which
# has been slow for an hour is as fast as ever. Here each point is the mean of as many numbers, and
# as many more as the run grows: when there are too many points, two become one.


POINTS = 256


class Curve:
    """The means of equal numbers of values, from the first on."""

    def __init__(self) -> None:
        self._each = 1  # values in a point
        self._means = np.empty(0)
        self._rest = np.empty(0)  # that make no whole point yet

    def add(self, values: FloatArray) -> None:
        """Some more, in order."""
        values = np.concatenate([self._rest, values])
        whole = len(values) // self._each
        cut = whole * self._each
        means = values[:cut].reshape(whole, self._each).mean(axis=1) if whole else np.empty(0)
        self._means, self._rest = np.concatenate([self._means, means]), values[cut:]
        while len(self._means) > POINTS:
            self._halve()

    def _halve(self) -> None:
        pairs = len(self._means) // 2
        odd = self._means[2 * pairs :]
        # What makes no pair goes back among the values, as many times as it stands for.
        self._rest = np.concatenate([np.repeat(odd, self._each), self._rest])
        self._means = self._means[: 2 * pairs].reshape(pairs, 2).mean(axis=1)
        self._each *= 2

    @property
    def points(self) -> tuple[float, ...]:
        """The curve; its last point may be of fewer values."""
        last = [self._rest.mean()] if len(self._rest) else []
        return tuple(float(point) for point in (*self._means, *last))


# -- watching --------------------------------------------------------------------------------------


LATELY_NS = 30 * NS_PER_S
_FEW_STEPS = 3  # that lately is at least of
_QUIET_STEPS = 5  # without one for as long there is no pace to speak of
_PACE_ROWS = 4096  # that are held to tell a pace from
_ALERTS = 200  # that are held; a page shows a few
_TRAIN = PHASES.index("train")
_FLOPS = "FLOPs"

NOW = ("throughput.tokens_per_s", "time.step_s", "energy.mean_w")
SO_FAR = (
    *("throughput.tokens_per_s", "time.step_s", "utilization.mfu_frac"),
    *("energy.joules_per_token", "energy.run_j", "throughput.whole_run_tokens_per_s"),
)


@dataclass
class Gauges:
    """What a device said last."""

    device: Device
    values: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class LiveFrame:
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
    loss_is_printed: bool  # seen in the output, as no step tells it
    curves: dict[str, tuple[float, ...]]
    gauges: tuple[Gauges, ...]
    energy_j: float | None
    alerts: tuple[NotedAlert, ...]
    rules: tuple[str, ...]
    unjudged: dict[str, str]
    newest_ns: int
    quiet_s: float | None = None  # since the last step, where that is too long ago
    training: int = 1  # which of so many in this run, counted from 1
    trainings: int = 0
    replaced: int = 0  # how often another run has taken the place of the one that was watched
    is_provisional: bool = False  # steps to come may change what is warm-up

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
        training: int | None = None,
        total_steps: int | None = None,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """`rules`: in place of those that the run was made with; `rank`: just this one; `training`:
        of several in the run this one, counted from 1, else the newest; `now_ns`: the clock by
        which a run has been quiet."""
        self._now_ns = now_ns
        self._path = path
        self._given = tuple(rules)
        self._rank = rank
        self._training = training
        self._total_steps = total_steps
        self._replaced = 0
        self._begin(Run.open(path))

    def _begin(self, run: Run) -> None:
        """Know nothing yet of the run that is there."""
        self._id = run.header.get("id")
        self._beside: frozenset[str] = frozenset()  # writers of other trainings in the same run
        self._curves = {"power_w": Curve()}
        self._steps: dict[int, int] = {}
        self._following = Following(self._path)
        self._following.learn()
        run = self._chosen(run)
        texts = self._given or tuple(_rules_of(self._following)) or DEFAULT
        self._judge = Judge(
            all_parsed(texts),
            devices=self._following.devices,
            settings=settings_of(run),
            start_ns=self._following.start_ns,
        )
        self._ranks: dict[str, int] = {}  # by writer
        self._others: deque[int] = deque(maxlen=_PACE_ROWS)  # when steps of other ranks ended
        self._start_anew()
        self._gauges: dict[str, Gauges] = {}
        self._seen: deque[NotedAlert] = deque(maxlen=_ALERTS)
        self._so_far: dict[str, Result] = {}
        self._so_far_ns = 0
        self._is_provisional = False

    def look(self, *, totals: bool) -> LiveFrame:
        """What is new, taken in. `totals`: also the figures of the run so far, from its start."""
        run = Run.open(self._path)
        if run.header.get("id") != self._id:
            self._following.close()
            self._begin(run)
            self._replaced += 1
            totals = True  # those that are known are of the one before
        run = self._chosen(run)
        status = run.status
        is_behind = True
        while is_behind:
            new, ready, is_behind = self._following.look(is_last=status != RUNNING)
            self._take(new.without(self._beside))
            for alert in self._judge.feed(ready.without(self._beside)):
                if not alert.is_over:
                    ranks = ranks_of(alert.rule.text, alert.about, self._ranks)
                    self._seen.append(
                        NotedAlert(alert.t_ns, alert.text, was_told=False, ranks=ranks)
                    )
        if totals:
            evidence = evidence_of(run)
            self._so_far = _figures(SO_FAR, evidence)
            self._is_provisional = evidence.is_provisional
            self._so_far_ns = self._following.newest_ns
        return self._frame(run, status)

    def close(self) -> None:
        """Let go of the run's files."""
        self._following.close()

    # -- inside -----------------------------------------------------------------------------------

    def _chosen(self, run: Run) -> Run:
        """The run, or one of several trainings in it: figures of all of them there are none."""
        self._trainings = len(run.trainings)
        if self._training is None and self._trainings < 2:
            return run
        chosen = run.training(self._training or self._trainings)
        beside = frozenset(writer.directory.name for writer in chosen.beside)
        is_another = self._training is None and beside - self._beside
        if is_another and self._steps:  # it has begun: what was told is not of it
            self._steps.clear()
            self._start_anew()
        self._beside = beside
        return chosen

    def _start_anew(self) -> None:
        """What is told of one rank."""
        self._curves |= {name: Curve() for name in ("step_s", "loss", "tokens_per_s")}
        self._tokens = 0.0
        self._pace = _Pace()
        self._loss: float | None = None
        self._loss_is_printed = True

    def _take(self, new: AlertRows) -> None:
        by_rank: list[tuple[int, dict[str, Any]]] = []
        for writer, steps in new.steps.items():
            self._ranks[writer] = int(np.nan_to_num(steps["rank"][-1]))
            chosen = steps["phase"] == _TRAIN
            if self._rank is not None:
                chosen &= steps["rank"] == self._rank
            if chosen.any():
                taken = {name: column[chosen] for name, column in steps.items()}
                by_rank.append((int(np.nan_to_num(taken["rank"][-1])), taken))
        first = min((rank for rank, _ in by_rank), default=0)
        if by_rank and self._steps and first < min(self._steps):
            self._start_anew()
        for rank, steps in sorted(by_rank, key=lambda one: one[0]):
            self._take_steps(rank, steps)
        self._take_losses(new)
        for column, devices in new.samples.items():
            for device, (_, values) in devices.items():
                known = self._following.devices.get(device)
                if known is not None:
                    gauges = self._gauges.setdefault(device, Gauges(known))
                    gauges.values[column] = float(values[-1])
        self._take_power(new)

    def _take_steps(self, rank: int, steps: dict[str, Any]) -> None:
        self._steps[rank] = steps_done(steps, before=self._steps.get(rank, 0))
        if rank > min(self._steps):  # curves of several ranks would be one in zigzag
            self._others.extend(steps["end_ns"].tolist())
            return
        tokens = real_tokens(steps)
        each_s = (steps["end_ns"] - steps["start_ns"]) / NS_PER_S
        self._tokens += float(np.nansum(tokens))
        many = np.where(np.nan_to_num(steps["steps"]) > 0, steps["steps"], 1.0)
        self._curves["step_s"].add(each_s / many)
        self._curves["tokens_per_s"].add((tokens / np.maximum(each_s, 1e-9))[~np.isnan(tokens)])
        self._pace.add(int(steps["start_ns"].min()), steps["end_ns"], many, np.nan_to_num(tokens))

    def _take_losses(self, new: AlertRows) -> None:
        """Of the lowest rank that is watched; as printed, while no step has told one."""
        first = min(self._steps, default=0)
        by_steps = {w: s for w, s in new.steps.items() if w not in new.printed}
        told = [loss for s in by_steps.values() if len(loss := _losses(s, rank=first))]
        if told and self._loss_is_printed:
            self._loss_is_printed = False
            self._curves["loss"] = Curve()
        if not told and self._loss_is_printed:
            told = [loss for s in new.printed.values() if len(loss := _losses(s, rank=self._rank))]
        for losses in told:
            self._loss = float(losses[-1])
            self._curves["loss"].add(losses[np.isfinite(losses)])

    def _take_power(self, new: AlertRows) -> None:
        """Of the boards, else of the CPUs: one of them alone stands for the shape of the curve."""
        by_device = new.samples.get("power_w", {})
        kinds = {i: d.kind for i, d in self._following.devices.items()}
        wanted = "gpu" if "gpu" in kinds.values() else "cpu"
        chosen = sorted(device for device in by_device if kinds.get(device) == wanted)
        if chosen:
            self._curves["power_w"].add(by_device[chosen[0]][1])

    def _frame(self, run: Run, status: str) -> LiveFrame:
        newest_ns = self._following.newest_ns
        now_ns = max(newest_ns, self._now_ns() - run.wall_zero_ns)
        quiet_s = self._pace.quiet_s(now_ns) if status == RUNNING else None
        since_ns = self._pace.since_ns(self._others)
        if since_ns is None:
            since_ns = max(0, newest_ns - LATELY_NS)
        if quiet_s is None:
            lately = _figures(NOW, evidence_since(run, since_ns))
        else:  # what it was before is no figure of lately
            lately = dict.fromkeys(NOW, Missing(f"the last step ended {duration(quiet_s)} ago"))
        start_ns = self._following.start_ns or newest_ns
        step = max(self._steps.values(), default=None)
        total, unit, done = self._goal(step)
        eta_s, no_eta = _eta(total, done, self._pace.per_s(since_ns, unit))
        if quiet_s is not None and total is not None:
            eta_s, no_eta = None, f"last step {duration(quiet_s)} ago"
        elif unit == _FLOPS:
            no_eta = "its budget is in FLOPs, which are not counted here"
        return LiveFrame(
            run, status, max(0.0, (newest_ns - start_ns) / NS_PER_S), step,
            dict(sorted(self._steps.items())), total, unit, done, eta_s, no_eta, lately,
            self._so_far, self._so_far_ns, self._loss,
            self._loss is not None and self._loss_is_printed,
            {name: curve.points for name, curve in self._curves.items()},
            tuple(self._gauges.values()), self._judge.energy_j,
            tuple(with_seen(noted_alerts(run, self._ranks), self._seen)),
            tuple(rule.text for rule in self._judge.rules), self._judge.unjudged, newest_ns,
            quiet_s, self._training or self._trainings, self._trainings, self._replaced,
            self._is_provisional,
        )  # fmt: skip

    def _goal(self, step: int | None) -> tuple[float | None, str, float | None]:
        """What the run is to reach, in steps or tokens, and how much of it is done."""
        if self._total_steps:
            return self._total_steps, "steps", step
        unit, total = goal(self._following.headers.values()) or ("", None)
        if unit == _FLOPS:
            return None, unit, None
        return total, unit, self._tokens if unit == "tokens" else step


class _Pace:
    """When the newest steps of one rank ended, and what they came to."""

    def __init__(self) -> None:
        self._first_ns: int | None = None  # when the first step began
        self._ends = np.empty(0, np.int64)
        self._many = np.empty(0)  # a printed line may be of several steps
        self._tokens = np.empty(0)

    def add(self, start_ns: int, ends: Any, many: Any, tokens: Any) -> None:  # noqa: ANN401  arrays
        self._first_ns = start_ns if self._first_ns is None else min(start_ns, self._first_ns)
        both = np.concatenate([self._ends, ends])
        newest = np.argsort(both, kind="stable")[-_PACE_ROWS:]
        self._ends = both[newest]
        self._many = np.concatenate([self._many, many])[newest]
        self._tokens = np.concatenate([self._tokens, tokens])[newest]

    def since_ns(self, others: Iterable[int]) -> int | None:
        """Where lately begins: at the end of a step. A window from within one would have its work
        and half of its time. Other ranks end that step a little later, and it is none of theirs."""
        if self._first_ns is None:
            return None
        last_ns = int(self._ends[-1])
        before = self._ends[self._ends <= last_ns - LATELY_NS]
        few = self._ends[: max(0, len(self._ends) - _FEW_STEPS)]
        if not len(before) or not len(few):
            # All there is; or of steps so short that it does not matter where one begins.
            all_held = len(self._ends) == _PACE_ROWS
            return max(self._first_ns, last_ns - LATELY_NS) if all_held else self._first_ns
        since_ns = min(int(before[-1]), int(few[-1]))
        half_ns = (int(self._ends[self._ends > since_ns][0]) - since_ns) // 2
        return max((t for t in others if since_ns < t < since_ns + half_ns), default=since_ns)

    def per_s(self, since_ns: int, unit: str) -> float | None:
        """Steps or tokens a second since then."""
        later = self._ends > since_ns
        if not later.any():
            return None
        amount = (self._tokens if unit == "tokens" else self._many)[later].sum()
        return float(amount) * NS_PER_S / (int(self._ends[-1]) - since_ns)

    def quiet_s(self, now_ns: int) -> float | None:
        """For how long there has been no step, where that is long: of what steps usually take."""
        if self._first_ns is None:
            return None
        gaps_ns = np.diff(self._ends[-64:], prepend=self._first_ns if len(self._ends) == 1 else ())
        usual_ns = float(np.median(gaps_ns)) if len(gaps_ns) else 0.0
        quiet_ns = now_ns - int(self._ends[-1])
        return quiet_ns / NS_PER_S if quiet_ns > max(LATELY_NS, _QUIET_STEPS * usual_ns) else None


def _losses(steps: dict[str, Any], *, rank: int | None) -> Any:  # noqa: ANN401  an array
    """The losses that training steps tell, NaN among them; of a rank, or of all."""
    told = steps["loss_told"] & (steps["phase"] == _TRAIN)
    if rank is not None:
        told &= np.nan_to_num(steps["rank"]) == rank
    return steps["loss"][told]


def _rules_of(following: Following) -> list[str]:
    found = (header.get("alerts") for header in following.headers.values())
    given = (one["rules"] for one in found if isinstance(one, dict) and "rules" in one)
    texts = dict.fromkeys(str(t) for rules in given for t in rules)
    return [text for text in texts if rule_of(text) is not None]


def _figures(keys: Iterable[str], evidence: Evidence) -> dict[str, Result]:
    found: dict[str, Result] = {}
    for key in keys:
        try:
            found[key] = catalogue()[key].reading(evidence)
        except NotMeasurable as error:
            found[key] = Missing(str(error))
    return found


def _eta(total: float | None, done: float | None, rate: float | None) -> tuple[float | None, str]:
    """How long it will take at the pace of lately, or why nobody knows."""
    if total is None:
        return None, "nobody said how many steps there will be (--steps)"
    if done is None or not rate:
        return None, "no pace yet"
    return max(0.0, total - done) / rate, ""
