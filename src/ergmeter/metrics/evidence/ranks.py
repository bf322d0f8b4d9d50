"""The ranks of a run: which share tokens, which recorded no steps, whether host clocks agree.

Tensor- and pipeline-parallel ranks work on the same tokens, and each rank counts them. So one
rank's count per group is used: the highest, because a rank that was killed, or that gets no batch
in the middle of a pipeline, counts less. The layout is the user's (--layout), else the framework's;
without either, ranks share no tokens. Rank 0's count times the number of groups would be wrong:
batches differ in length, and a group may have been killed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from ergmeter.errors import NotMeasurable, UsageError
from ergmeter.metrics.evidence.samples import cached_result
from ergmeter.runlog.settings import WORDS, ParallelLayout
from ergmeter.units import NS_PER_S, duration, listed_by, number_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ergmeter.metrics.evidence.evidence import Evidence
    from ergmeter.metrics.evidence.steps import Mask, Steps
    from ergmeter.records import FloatArray, TimeArray
    from ergmeter.runlog.reader import Run


SAME_TOKENS = ("tp", "pp")
SAME_SAMPLES = ("tp", "cp", "pp")  # a context-parallel rank has a part of each sample
_APART_FRAC = 0.02  # ranks that share tokens disagree if their counts differ by more


def counting(evidence: Evidence, rows: Steps, column: str) -> Mask:
    """A mask of the rows to sum: if ranks share this column's values, one rank of each group."""
    groups = _groups(evidence, _shared(evidence, column))
    if all(len(ranks) == 1 for ranks in groups.values()):
        return np.ones(len(rows), dtype=bool)
    totals = _tokens_by_rank(rows, column)

    def most_told(rank: int) -> tuple[int, float, int]:
        return *totals.get(rank, (0, -1.0)), -rank

    return np.isin(rows["rank"], [max(ranks, key=most_told) for ranks in groups.values()])


def shared_tokens_note(evidence: Evidence) -> str:
    """For a note: how ranks share their tokens; "" if no ranks do."""
    groups = _groups(evidence, _shared(evidence))
    ranks = max(world_size(evidence), sum(len(group) for group in groups.values()))
    if ranks == len(groups):
        return ""
    at = _first_coordinates(evidence)
    sizes = (f"{n}={at[n][1]}" for n in WORDS if n in at and at[n][1] > 1)
    layout = evidence.settings.layout or (
        f"{','.join(sizes)} by the framework's word" if at else ""
    )
    return f"{len(groups)} of {ranks} ranks, which share theirs with the others ({layout})"


def disagreement(evidence: Evidence, rows: Steps) -> str:
    """A note if ranks that should share tokens counted different numbers; else empty."""
    for column in ("tokens_real", "tokens_computed"):
        totals = {
            rank: total[1] for rank, total in _tokens_by_rank(rows, column).items() if total[1] > 0
        }
        for ranks in _groups(evidence, _shared(evidence)).values():
            sums = {rank: totals[rank] for rank in ranks if rank in totals}
            if sums and min(sums.values()) < (1 - _APART_FRAC) * max(sums.values()):
                least, most = (pick(sums, key=lambda r: sums[r]) for pick in (min, max))
                return (
                    f"ranks {least} and {most} share their tokens by the layout, but counted"
                    f" {sums[least]:.0f} and {sums[most]:.0f}: is the layout right?"
                )
    return ""


def world_size(evidence: Evidence) -> int:
    """The number of ranks that the writers' headers declare; 1 if none does."""
    return max((declared_world_size(writer.header) for writer in evidence.run.writers), default=1)


def _shared(evidence: Evidence, column: str = "") -> tuple[str, ...]:
    """The dimensions along which ranks share this column (tokens by default).

    An integration that counts batches before sequences are split among context-parallel ranks
    declares `whole_sequences`; then these ranks share tokens too.
    """
    is_whole = any(writer.header.get("whole_sequences") for writer in evidence.run.writers)
    return SAME_SAMPLES if is_whole or column == "samples" else SAME_TOKENS


def _how_many(evidence: Evidence, shared: tuple[str, ...]) -> int:
    """The number of groups of ranks that share tokens, missing ranks included."""
    everyone = world_size(evidence)
    if evidence.settings.layout is not None:
        layout = ParallelLayout.parsed(evidence.settings.layout)
        return len({_own(layout.at(rank, everyone), shared) for rank in range(everyone)})
    declared = _coordinates_by_rank(evidence)
    if not declared or any("rank" in coordinate for coordinate in coordinates(evidence).values()):
        return everyone  # unknown for some ranks: each is a group of its own
    at = _first_coordinates(evidence)
    return prod(int(size) for name, (_, size) in at.items() if name not in shared)


def _first_coordinates(evidence: Evidence) -> dict[str, list[int]]:
    """For each dimension, [coordinate, size] of the first writer that declares them."""
    declared = (declared_coordinates(writer.header) for writer in evidence.run.writers)
    return next(filter(None, declared), {})


def _tokens_by_rank(rows: Steps, column: str) -> dict[int, tuple[int, float]]:
    """For each rank: 1 if all its rows have the column, else 0; and the column's sum."""
    ranks, at = np.unique(np.nan_to_num(rows["rank"]).astype(np.int64), return_inverse=True)
    values = rows[column]
    gaps = np.bincount(at, weights=np.isnan(values)).tolist()
    sums = np.bincount(at, weights=np.nan_to_num(values)).tolist()
    each = zip(ranks.tolist(), gaps, sums, strict=True)
    return {rank: (int(gap == 0), total) for rank, gap, total in each}


def _groups(evidence: Evidence, shared: tuple[str, ...]) -> dict[tuple[Any, ...], list[int]]:
    """The ranks that share tokens, grouped by their coordinates in the other dimensions."""
    return listed_by((_own(at, shared), rank) for rank, at in coordinates(evidence).items())


def _own(coordinate: dict[str, int], shared: tuple[str, ...]) -> tuple[tuple[str, int], ...]:
    return tuple((name, at) for name, at in sorted(coordinate.items()) if name not in shared)


@cached_result
def coordinates(evidence: Evidence) -> dict[int, dict[str, int]]:
    """The coordinates of each rank in the layout; {"rank": rank} if they are unknown."""
    ranks = sorted(ranks_in(evidence.all_steps))
    everyone = max(world_size(evidence), max(ranks, default=0) + 1)
    if everyone < 2 and (evidence.from_output or evidence.settings.layout is None):
        # A single rank; or printed output, which is one rank's.
        return {rank: {"rank": rank} for rank in ranks}
    if evidence.settings.layout is not None:
        layout = ParallelLayout.parsed(evidence.settings.layout)
        try:
            return {rank: layout.at(rank, everyone) for rank in ranks}
        except UsageError as error:
            raise NotMeasurable(f"{error}: which ranks share tokens is unknown") from error
    declared = _coordinates_by_rank(evidence)
    return {rank: declared.get(rank, {"rank": rank}) for rank in ranks}


def ranks_in(rows: Steps) -> set[int]:
    """The distinct ranks in these rows; rows without a rank are ignored."""
    return {int(rank) for rank in np.unique(rows["rank"]) if rank >= 0}


def declared_world_size(header: dict[str, Any]) -> int:
    """The number of ranks in a writer's header; 1 if it has none."""
    training = header.get("training")
    sizes = [header.get("world"), training.get("world") if isinstance(training, dict) else None]
    return max((size for size in sizes if isinstance(size, int)), default=1)


def _coordinates_by_rank(evidence: Evidence) -> dict[int, dict[str, int]]:
    """The coordinates that frameworks declared, by rank."""
    coordinates = {}
    for writer, rank in sorted(ranks_by_writer(evidence).items()):
        header = evidence.run.writers[writer].header
        why = _why_unknown(header)
        if why:
            raise NotMeasurable(
                f"{why}: which ranks share tokens is unknown; pass --layout tp=2,..."
            )
        at = declared_coordinates(header)
        if at:
            coordinates[rank] = {name: int(where[0]) for name, where in at.items()}
    return coordinates


def ranks_by_writer(evidence: Evidence) -> dict[int, int]:
    """The rank of each writer that recorded steps, by writer number, from its first row."""
    rows = evidence.all_steps
    writers, first = np.unique(rows["writer"], return_index=True)
    ranks = np.nan_to_num(rows["rank"][first]).astype(int)
    return dict(zip(writers.astype(int).tolist(), ranks.tolist(), strict=True))


def _why_unknown(header: dict[str, Any]) -> str:
    """Why declared coordinates do not cover all ranks, such as a mesh of some ranks; else ""."""
    at, everyone = declared_coordinates(header), declared_world_size(header)
    placed = prod(int(size) for _, size in at.values())
    if at and everyone > 1 and placed != everyone:
        sizes = ", ".join(f"{name}={size}" for name, (_, size) in at.items())
        return f"the framework places {placed} of the {everyone} ranks ({sizes})"
    unknown = [str(o["unknown"]) for o in _declared_layouts(header) if "unknown" in o]
    return unknown[0] if unknown and not at else ""


def declared_coordinates(header: dict[str, Any]) -> dict[str, list[int]]:
    """For each dimension in a writer's header, [coordinate, size]."""
    declared = (layout.get("at") for layout in _declared_layouts(header))
    return next((dict(at) for at in declared if isinstance(at, dict)), {})


def _declared_layouts(header: dict[str, Any]) -> list[dict[str, Any]]:
    """The layouts in a header: the training's first, then the process's."""
    training = header.get("training")
    layouts = (training.get("layout") if isinstance(training, dict) else None, header.get("layout"))
    return [layout for layout in layouts if isinstance(layout, dict)]


# Clocks of hosts. Each host's monotonic clock is aligned by the time of day at which its writers
# began. NTP keeps that within some milliseconds, and the kernel reports the possible error. Ranks
# of one training end a step together, so the ends of a step on two hosts are the same instant.
#
# Steps are weaker evidence than clocks. Pipeline stages end a step one after the other, a rank that
# writes a checkpoint ends later, and hosts may number their steps differently. So steps move a
# clock only if its host reports no error bound, by ranks of one stage whose step numbers agree.
# Where steps contradict a clock with an error bound, a note says so and nothing is moved.

# Assumed error of a time of day if the host did not report one: NTP over a bad network.
UNKNOWN_ERROR_S = 0.1
_FEW_STEPS = 10
_STEADY_FRAC = 0.1  # of a step: the most that step ends on two hosts may scatter
_ALIKE_FRAC = 0.9  # of the steps must be on both hosts; else their numbering differs

_Ends: TypeAlias = "tuple[FloatArray, TimeArray]"  # numbers of steps, and when they ended
_Stages: TypeAlias = "Callable[[int], int]"


@dataclass(frozen=True, slots=True)
class HostClock:
    """How far a host's clock is from the first host's, judged by the steps that both made."""

    host: str
    ahead_s: float
    within_s: float
    claimed_s: float  # the error that the hosts report themselves
    is_vouched_for: bool  # True if both hosts report an error
    step_s: float
    skipped: int  # steps that only one of the two hosts has

    @property
    def is_contradicted(self) -> bool:
        """True if step ends consistently differ by more than the clocks' reported errors."""
        is_steady = self.within_s < _STEADY_FRAC * self.step_s
        return is_steady and abs(self.ahead_s) > self.claimed_s + 3 * self.within_s

    @property
    def is_wrong(self) -> bool:
        """True if the clock is contradicted, its error is not reported by both hosts, and the
        difference is not just whole steps that one host began to count later."""
        steps_off = round(self.ahead_s / self.step_s)
        rest_s = abs(self.ahead_s - steps_off * self.step_s)
        is_whole = 1 <= abs(steps_off) <= max(1, self.skipped) and rest_s <= self.claimed_s
        return self.is_contradicted and not self.is_vouched_for and not is_whole


def aligned(run: Run, layout: str | None = None) -> tuple[Run, tuple[HostClock, ...]]:
    """Return the run with all hosts on one clock, and how the clocks compare.

    `layout`: the parallel layout that the user declared.
    """
    hosts = listed_by((writer.clock_of, number) for number, writer in enumerate(run.writers))
    if len(hosts) < 2:
        return run, ()
    first, *others = hosts.values()
    declared = _declared_stages(run, layout)
    stages = _by_stage(run, first, declared)
    clocks: list[HostClock] = []
    writers = list(run.writers)
    for numbers in others if stages else ():
        clock = _compared(run, stages, first[0], numbers, declared)
        if clock is None:
            continue
        clocks.append(clock)
        if clock.is_wrong:
            by_ns = round(clock.ahead_s * NS_PER_S)
            for number in numbers:
                offset_ns = writers[number].offset_ns - by_ns
                writers[number] = replace(writers[number], offset_ns=offset_ns)
    return replace(run, writers=writers), tuple(clocks)


def clock_notes(clocks: tuple[HostClock, ...]) -> Iterator[str]:
    """Yield notes about host clocks that were wrong and corrected, or that may be wrong."""
    wrong = [clock for clock in clocks if clock.is_wrong]
    if wrong:
        worst, more = _worst(wrong)
        way = "ahead of" if worst.ahead_s > 0 else "behind"
        yield (
            f"the clock of {worst.host} is {duration(abs(worst.ahead_s))} {way} the first host's,"
            f" by the ends of the steps they made together (± {duration(worst.within_s)}): it and"
            f" its devices{more} were put on one clock by these"
        )
    unclear = [clock for clock in clocks if clock.is_contradicted and not clock.is_wrong]
    if unclear:
        worst, more = _worst(unclear)
        way = "later" if worst.ahead_s > 0 else "earlier"
        yield (
            f"steps on {worst.host}{more} end {duration(abs(worst.ahead_s))} {way} than on the"
            f" first host, whose clocks may be {duration(worst.claimed_s)} apart: the cause may be"
            " pipeline stages, step numbers that differ, or a wrong clock; times are not corrected"
        )


def _worst(clocks: list[HostClock]) -> tuple[HostClock, str]:
    more = f" and {len(clocks) - 1} more hosts" if len(clocks) > 1 else ""
    return max(clocks, key=lambda clock: abs(clock.ahead_s)), more


def _by_stage(run: Run, numbers: list[int], declared: _Stages | None) -> dict[int, _Ends]:
    """For each pipeline stage, step numbers and ends of a host's first writer with enough steps."""
    ends_by_stage: dict[int, _Ends] = {}
    for number in numbers:
        at = declared_coordinates(run.writers[number].header).get("pp")
        stage = int(at[0]) if at else 0
        if declared is None and stage in ends_by_stage:
            continue
        steps = run.steps_by(number)
        numbered = ~np.isnan(steps["index"])
        index, first_rows = np.unique(steps["index"][numbered], return_index=True)
        if len(index) < _FEW_STEPS:
            continue
        if declared is not None:
            stage = declared(int(steps["rank"][0]))
        ends_ns = np.asarray(steps["end_ns"][numbered][first_rows], dtype=np.int64)
        ends_by_stage.setdefault(stage, (np.asarray(index, dtype=np.float64), ends_ns))
    return ends_by_stage


def _declared_stages(run: Run, layout: str | None) -> _Stages | None:
    """Return a function from rank to pipeline stage; None if no pipeline was declared."""
    if layout is None:
        return None
    world = max(declared_world_size(writer.header) for writer in run.writers)
    try:
        parsed = ParallelLayout.parsed(layout)
        parsed.check(world)
    except UsageError:  # the token metrics report what is wrong with it
        return None
    if parsed.sizes.get("pp", 1) == 1:
        return None
    return lambda rank: parsed.at(rank, world)["pp"]


def _compared(
    run: Run, stages: dict[int, _Ends], first: int, numbers: list[int], declared: _Stages | None
) -> HostClock | None:
    own = _by_stage(run, numbers, declared)
    stage = next((candidate for candidate in own if candidate in stages), None)
    if stage is None:
        return None
    (our_numbers, our_ends), (numbered, ended) = stages[stage], own[stage]
    _, ours, theirs = np.intersect1d(our_numbers, numbered, assume_unique=True, return_indices=True)
    longest = max(len(our_numbers), len(numbered))
    if len(ours) < max(_FEW_STEPS, _ALIKE_FRAC * longest) or our_numbers[0] != numbered[0]:
        return None
    apart_s = (ended[theirs] - our_ends[ours]) / NS_PER_S
    ahead_s = float(np.median(apart_s))
    headers = (run.writers[first].header, run.writers[numbers[0]].header)
    errors = [header["clock"].get("error_s") for header in headers]
    return HostClock(
        str(headers[1].get("host")),
        ahead_s,
        float(np.median(np.abs(apart_s - ahead_s))) * 1.4826,  # of a normal scatter, its deviation
        sum(UNKNOWN_ERROR_S if error is None else float(error) for error in errors),
        None not in errors,
        float(np.median(np.diff(np.sort(our_ends)))) / NS_PER_S,
        longest - len(ours),
    )


# Missing ranks. With a Meter on rank 0 alone, tokens are that rank's but devices are those of all
# ranks on the node. Four GPUs' joules over one rank's tokens would be four times the energy per
# token. So where ranks with tokens of their own recorded no steps, metrics that relate tokens to
# all devices are absent. Multiplying by the number of ranks would be a guess: batches differ.

_FEW = 8


@cached_result
def missing_ranks(evidence: Evidence) -> tuple[int, ...]:
    """The ranks that recorded no steps; empty if the number of ranks is unknown."""
    world = world_size(evidence)
    if world < 2 or evidence.from_output:  # one rank prints for all ranks
        return ()
    rows = evidence.work
    if len(rows.lanes) >= world:
        return ()  # or ranks that do not know their number
    return tuple(sorted(set(range(world)) - ranks_in(rows)))


def why_not_all(evidence: Evidence, what: str = "tokens") -> str:
    """The ranks without steps, as text, if the run's tokens or samples lack theirs; else ""."""
    missing = missing_ranks(evidence)
    if not missing:
        return ""
    world = world_size(evidence)
    shared = _shared(evidence, what)
    recorded = set(range(world)) - set(missing)
    present = sum(not recorded.isdisjoint(ranks) for ranks in _groups(evidence, shared).values())
    groups = _how_many(evidence, shared)
    if present >= groups:
        return ""
    some = ", ".join(map(str, missing[:_FEW])) + (", ..." if len(missing) > _FEW else "")
    who = f"{len(missing)} of the {world} ranks recorded no steps ({some})"
    return who if groups == world else f"{who}, {groups - present} of {groups} groups of ranks"


def missing_ranks_note(evidence: Evidence, what: str = "tokens") -> str:
    """For a note: how many ranks a count covers; "" if it covers all."""
    if not why_not_all(evidence, what):
        return ""
    world = world_size(evidence)
    some = f"of {world - len(missing_ranks(evidence))} of {world} ranks"
    return f"{some}: the others recorded no steps"


def is_declared(evidence: Evidence, what: str = "tokens") -> bool:
    """True if ranks are missing, and the user declared the amount per step of all ranks."""
    settings = evidence.settings
    declared = settings.samples_per_step if what == "samples" else settings.tokens_per_step
    return declared is not None and bool(why_not_all(evidence, what))


def need_all(evidence: Evidence, what: str = "tokens") -> None:
    """Raises NotMeasurable if tokens or samples of some ranks are missing."""
    why = why_not_all(evidence, what)
    if why and not is_declared(evidence, what):
        raise NotMeasurable(
            f"{why}: the {what} of all ranks are unknown; use a Meter in each rank, state which"
            f" ranks share {what} (--layout), or pass --{what}-per-step"
        )


def need_devices(evidence: Evidence) -> None:
    """Raises NotMeasurable if devices of some ranks were not sampled."""
    gpus, world = len(evidence.devices("gpu")), world_size(evidence)
    missing = len(missing_ranks(evidence)) if gpus else 0
    if missing and gpus < world:
        raise NotMeasurable(
            f"{number_of(gpus, 'GPU')} sampled for {world} ranks, {missing} of which"
            " recorded no steps: their GPUs may be on other nodes; use a Meter in each rank"
        )
