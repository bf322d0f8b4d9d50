"""Which rows of steps count tokens that no other row counts.

Ranks among which the model is cut (tensor- and pipeline-parallel) work on the same tokens, and each
tells them. Of such ranks one is listened to: the one that tells the most, since a rank that was
killed or that gets no batch (the middle of a pipeline) tells less. How the ranks are laid out is
the user's word, else the framework's; where nobody said, every rank has tokens of its own.

The trap: taking rank 0's count times the groups. Batches differ in length, and a group that was
killed did less.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from ergmeter.errors import NotMeasurable, UsageError
from ergmeter.runlog.settings import WORDS, ParallelLayout

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from ergmeter.metrics.evidence.evidence import Evidence
    from ergmeter.metrics.evidence.steps import Mask, Steps

SAME_TOKENS = ("tp", "pp")
SAME_SAMPLES = ("tp", "cp", "pp")  # of which each context-parallel rank has a part
_APART_FRAC = 0.02  # beyond which ranks that should tell the same do not


def counting(evidence: Evidence, rows: Steps, column: str) -> Callable[[Steps], Mask]:
    """Which rows of a lane to add up for this column: of each group of ranks that share it, one
    rank's."""
    groups = _groups(evidence, _shared(evidence, column))
    if all(len(ranks) == 1 for ranks in groups.values()):
        return lambda lane: np.ones(len(lane), dtype=bool)
    told = _tokens_by_rank(rows, column)
    chosen = [max(ranks, key=lambda rank: (*told.get(rank, (0, -1.0)), -rank))
              for ranks in groups.values()]  # fmt: skip
    return lambda lane: np.isin(lane["rank"], chosen)


def in_words(evidence: Evidence) -> str:
    """How the ranks share their tokens, for a note; empty where none does."""
    groups = _groups(evidence, _shared(evidence))
    ranks = max(world(evidence), sum(len(group) for group in groups.values()))
    if ranks == len(groups):
        return ""
    one = evidence.settings.layout or _sizes(evidence)
    return f"{len(groups)} of {ranks} ranks, which share theirs with the others ({one})"


def disagreement(evidence: Evidence, rows: Steps) -> str:
    """Where ranks that are said to work on the same tokens told different ones."""
    for column in ("tokens_real", "tokens_computed"):
        told = {rank: one[1] for rank, one in _tokens_by_rank(rows, column).items() if one[1] > 0}
        for ranks in _groups(evidence, _shared(evidence)).values():
            sums = {rank: told[rank] for rank in ranks if rank in told}
            if sums and min(sums.values()) < (1 - _APART_FRAC) * max(sums.values()):
                least, most = (pick(sums, key=lambda r: sums[r]) for pick in (min, max))
                return (
                    f"ranks {least} and {most} are laid out to work on the same tokens but told"
                    f" {sums[least]:.0f} and {sums[most]:.0f} of them: is the layout right?"
                )
    return ""


def groups_of(evidence: Evidence, ranks: Collection[int], column: str) -> tuple[int, int]:
    """Of how many groups of ranks that share this column these are, and how many there are."""
    shared = _shared(evidence, column)
    told = sum(1 for group in _groups(evidence, shared).values() if set(group) & set(ranks))
    return told, _how_many(evidence, shared)


def world(evidence: Evidence) -> int:
    """How many ranks there are by the word of any of them; 1 where nobody said."""
    return max((world_of(one.header) for one in evidence.run.writers), default=1)


def _shared(evidence: Evidence, column: str = "") -> tuple[str, ...]:
    """The dimensions along which ranks tell the same of this column; tokens if nothing is said.

    An integration that counts batches before their sequences are cut says that these are whole.
    """
    is_whole = any(one.header.get("whole_sequences") for one in evidence.run.writers)
    return SAME_SAMPLES if is_whole or column == "samples" else SAME_TOKENS


def _how_many(evidence: Evidence, shared: tuple[str, ...]) -> int:
    """How many groups there are in the world, those of ranks that nobody has seen included."""
    everyone = world(evidence)
    if evidence.settings.layout is not None:
        layout = ParallelLayout.parsed(evidence.settings.layout)
        return len({_own(layout.at(rank, everyone), shared) for rank in range(everyone)})
    told = _told_places(evidence)
    if not told or any("rank" in place for place in places(evidence).values()):
        return everyone  # of some it is not known: each stands for itself
    at = next(filter(None, (told_at(one.header) for one in evidence.run.writers)))
    return prod(int(size) for name, (_, size) in at.items() if name not in shared)


def _tokens_by_rank(rows: Steps, column: str) -> dict[int, tuple[int, float]]:
    """By rank: whether all of its rows have the column, and their sum."""
    sums: dict[int, float] = {}
    gaps: dict[int, int] = {}
    for lane in rows.lanes:
        ranks = np.nan_to_num(lane["rank"], nan=0.0).astype(np.int64)
        for rank in np.unique(ranks).tolist():
            values = lane[column][ranks == rank]
            sums[rank] = sums.get(rank, 0.0) + float(np.nansum(values))
            gaps[rank] = gaps.get(rank, 0) + int(np.isnan(values).sum())
    return {rank: (int(gaps[rank] == 0), sums[rank]) for rank in sorted(sums)}


def _groups(evidence: Evidence, shared: tuple[str, ...]) -> dict[tuple[Any, ...], list[int]]:
    """The ranks that work on the same, by what tells them from the others."""
    groups: dict[tuple[Any, ...], list[int]] = {}
    for rank, place in places(evidence).items():
        groups.setdefault(_own(place, shared), []).append(rank)
    return groups


def _own(place: dict[str, int], shared: tuple[str, ...]) -> tuple[tuple[str, int], ...]:
    return tuple((name, at) for name, at in sorted(place.items()) if name not in shared)


def places(evidence: Evidence) -> dict[int, dict[str, int]]:
    """Where each rank stands along each dimension. A rank that nobody placed stands for itself."""
    kept = evidence.drawn.get("places")
    if kept is None:
        kept = evidence.drawn["places"] = _places(evidence)
    assert isinstance(kept, dict)
    return kept


def _places(evidence: Evidence) -> dict[int, dict[str, int]]:
    ranks = sorted(ranks_in(evidence.all_steps))
    everyone = max(world(evidence), max(ranks, default=0) + 1)
    if everyone < 2 and (evidence.from_output or evidence.settings.layout is None):
        # Alone; or a program's output, which one of them has printed.
        return {rank: {"rank": rank} for rank in ranks}
    if evidence.settings.layout is not None:
        layout = ParallelLayout.parsed(evidence.settings.layout)
        try:
            return {rank: layout.at(rank, everyone) for rank in ranks}
        except UsageError as error:
            raise NotMeasurable(f"{error}: what its ranks share is not known") from error
    told = _told_places(evidence)
    return {rank: told.get(rank, {"rank": rank}) for rank in ranks}


def ranks_in(rows: Steps) -> set[int]:
    """The ranks that told these rows."""
    lanes = rows.lanes if len(rows) else ()
    return {int(rank) for lane in lanes for rank in np.unique(lane["rank"]) if rank >= 0}


def world_of(header: dict[str, Any]) -> int:
    """How many ranks there are by a writer's word; 1 where it gave none."""
    training = header.get("training")
    said = [header.get("world"), training.get("world") if isinstance(training, dict) else None]
    return max((one for one in said if isinstance(one, int)), default=1)


def _told_places(evidence: Evidence) -> dict[int, dict[str, int]]:
    """What frameworks said, by rank."""
    rank_of: dict[int, int] = {}  # by the first row of each writer
    for lane in evidence.all_steps.lanes if len(evidence.all_steps) else ():
        writers, first = np.unique(lane["writer"], return_index=True)
        rank_of |= {int(w): int(lane["rank"][row]) for w, row in zip(writers, first, strict=True)}
    found = {}
    for writer, rank in sorted(rank_of.items()):
        header = evidence.run.writers[writer].header
        why = _why_unknown(header)
        if why:
            raise NotMeasurable(
                f"{why}: which of them share their tokens is not known; say it (--layout tp=2,...)"
            )
        at = told_at(header)
        if at:
            found[rank] = {name: int(where[0]) for name, where in at.items()}
    return found


def _why_unknown(header: dict[str, Any]) -> str:
    """Why a place that was told is none among all ranks, as meshes of some of them are."""
    at, everyone = told_at(header), world_of(header)
    placed = prod(int(size) for _, size in at.values())
    if at and everyone > 1 and placed != everyone:
        sizes = ", ".join(f"{name}={size}" for name, (_, size) in at.items())
        return f"the framework places {placed} of the {everyone} ranks ({sizes})"
    return (
        ""
        if at
        else next((str(o["unknown"]) for o in _declared_layouts(header) if "unknown" in o), "")
    )


def told_at(header: dict[str, Any]) -> dict[str, list[int]]:
    """Where a writer's framework said it stands: by dimension its number and how many there are."""
    return next(
        (dict(one["at"]) for one in _declared_layouts(header) if isinstance(one.get("at"), dict)),
        {},
    )


def _declared_layouts(header: dict[str, Any]) -> list[dict[str, Any]]:
    """What was said of the layout: of this training first, then of the process."""
    training = header.get("training")
    told = (training.get("layout") if isinstance(training, dict) else None, header.get("layout"))
    return [one for one in told if isinstance(one, dict)]


def _sizes(evidence: Evidence) -> str:
    for writer in evidence.run.writers:
        at = told_at(writer.header)
        if at:
            sizes = (f"{n}={at[n][1]}" for n in WORDS if n in at and at[n][1] > 1)
            return f"{','.join(sizes)} by the framework's word"
    return ""
