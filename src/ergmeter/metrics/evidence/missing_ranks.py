"""Have all ranks told their steps? And what is not known where some have not.

A Meter on rank 0 alone is a common way to measure. Its tokens are that rank's, and are right as
such; the devices that it reads are those of all ranks on the node.

The trap: the one over the other. Four GPUs' joules over one rank's tokens is four times the energy
of a token, and nothing about it looks wrong. So where a rank says how many there are, and some told
no steps whose tokens no other rank tells (`layout`), figures that set tokens against all devices
are absent. To multiply what one rank told by the ranks was the other way, and a guess: batches
differ.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.evidence import token_ranks
from ergmeter.units import number_of

if TYPE_CHECKING:
    from ergmeter.metrics.evidence.evidence import Evidence

_KEPT = "ranks that told no steps"
_FEW = 8


def unseen(evidence: Evidence) -> tuple[int, ...]:
    """The ranks that told no steps. None where nobody says how many there are."""
    kept = evidence.drawn.get(_KEPT)
    if kept is None:
        kept = evidence.drawn[_KEPT] = _unseen(evidence)
    assert isinstance(kept, tuple)
    return kept


def _unseen(evidence: Evidence) -> tuple[int, ...]:
    world = token_ranks.world(evidence)
    if world < 2 or evidence.from_output:  # one of the ranks prints, for all of them
        return ()
    rows = evidence.work
    if len(rows.lanes) >= world:
        return ()  # or ranks that do not know their number
    return tuple(sorted(set(range(world)) - token_ranks.ranks_in(rows)))


def why_not_all(evidence: Evidence, what: str = "tokens") -> str:
    """Which ranks are missing from the tokens or samples of a run; empty where none is."""
    missing = unseen(evidence)
    if not missing:
        return ""
    world = token_ranks.world(evidence)
    told, groups = token_ranks.groups_of(evidence, set(range(world)) - set(missing), what)
    if told >= groups:
        return ""
    some = ", ".join(map(str, missing[:_FEW])) + (", ..." if len(missing) > _FEW else "")
    who = f"{len(missing)} of the {world} ranks told no steps ({some})"
    return who if groups == world else f"{who}, {groups - told} of {groups} groups of ranks"


def in_words(evidence: Evidence, what: str = "tokens") -> str:
    """Whose a count is, where it is not of all ranks."""
    if not why_not_all(evidence, what):
        return ""
    world = token_ranks.world(evidence)
    return f"of {world - len(unseen(evidence))} of {world} ranks: the others told no steps"


def is_declared(evidence: Evidence, what: str = "tokens") -> bool:
    """Whether somebody said what all ranks make in a step, where not all of them did."""
    settings = evidence.settings
    said = settings.samples_per_step if what == "samples" else settings.tokens_per_step
    return said is not None and bool(why_not_all(evidence, what))


def need_all(evidence: Evidence, what: str = "tokens") -> None:
    """Refuse a figure that needs the tokens or samples of every rank, where some are missing."""
    why = why_not_all(evidence, what)
    if why and not is_declared(evidence, what):
        raise NotMeasurable(
            f"{why}: the {what} of all ranks are not known; use a Meter in each rank, say which"
            f" ranks share theirs (--layout), or give --{what}-per-step"
        )


def need_devices(evidence: Evidence) -> None:
    """Refuse a figure that needs the devices of every rank, where nobody has read some."""
    gpus, world = len(evidence.devices("gpu")), token_ranks.world(evidence)
    if gpus and unseen(evidence) and gpus < world:
        raise NotMeasurable(
            f"{number_of(gpus, 'GPU')} sampled for {world} ranks, {len(unseen(evidence))} of which"
            " recorded no steps: their GPUs may be on other nodes; use a Meter in each rank"
        )
