"""Opens a directory of results: new, resumed or moved aside; and adds cells to it.

Cells are identified by what they run. A resumed directory gets new cells under new numbers; its
cells that were not requested this time are left unchanged, and a warning counts them.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime, timezone
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from ergmeter.atomic_write import read_json, write_json
from ergmeter.bench.execute import state
from ergmeter.bench.execute.state import CLAIM, DRIVER, JOB, PLAN, Process, directory_of
from ergmeter.bench.plan.cells import BenchPlan, Cell
from ergmeter.errors import UsageError
from ergmeter.units import number_of

# Files that a directory may have before its plan is written.
_FIRST = ("script.json", "requirements.txt", DRIVER, CLAIM)


def opened(
    out: Path,
    plan: BenchPlan,
    *,
    resume: bool = False,
    move_aside: bool = False,
    script: Mapping[str, Any] | None = None,
) -> BenchPlan:
    """Create or resume a results directory and become its driver. Nothing in it is ever deleted.

    `script`: the command's options, to store in a new directory.
    Returns the plan to run, with the cells' numbers in the directory; its `warnings` say how many
    cells were added, and how many in the directory were not requested.
    """
    is_old = is_resumed(out, resume=resume, move_aside=move_aside)
    if move_aside and _is_filled(out):
        _check_undriven(out)
        _check_at_rest(out)
        stamp = datetime.now(timezone.utc).strftime("%Y%m%dT%H%M%S")
        out.rename(out.with_name(f"{out.name}-{stamp}-{secrets.token_hex(2)}"))
    out.mkdir(parents=True, exist_ok=True)
    claim_driver(out)
    if is_old:
        # The plan is replaced whole before a new cell has a directory: whenever this is cut off,
        # the new cells are not there, or planned and pending.
        joined_plan, asked = joined(out, plan)
        if joined_plan is not None:
            write_json(out / PLAN, joined_plan.to_json(), indent=None)
        return asked
    write_json(out / "script.json", dict(script or {}), indent=4)
    (out / "requirements.txt").write_text(_installed(), encoding="utf-8")
    write_json(out / PLAN, plan.to_json(), indent=None)
    return replace(plan, warnings=())


def is_resumed(out: Path, *, resume: bool, move_aside: bool) -> bool:
    """True if `out` has results to resume. Raises UsageError if `out` can't be used."""
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file; --out names a directory")
    if move_aside or not _is_filled(out):
        return False
    if not resume:
        raise UsageError(
            f"{out} is not empty: --resume continues it, --move-aside renames it and starts"
            " anew; results are never deleted"
        )
    if (out / PLAN).exists():
        return True
    names = [path.name for path in out.iterdir() if not path.name.startswith(".")]
    if set(names) - {*_FIRST}:
        raise UsageError(f"{out} has no {PLAN}, so it can't be resumed; --move-aside renames it")
    return False


def _is_filled(out: Path) -> bool:
    return out.is_dir() and any(out.iterdir())


def joined(out: Path, plan: BenchPlan) -> tuple[BenchPlan | None, BenchPlan]:
    """Return the directory's plan with `plan`'s new cells (None if there are none), and `plan` with
    its cells' numbers in the directory. New cells are numbered last. Nothing is written."""
    stored = BenchPlan.read(out / PLAN)
    # Scenarios that differ in a key alone have cells with one id.
    there = {(cell.scenario, cell.id): cell for cell in stored.cells}
    asked = {(cell.scenario, cell.id): cell for cell in plan.cells}
    left = [cell for key, cell in there.items() if key not in asked]
    new = [cell for key, cell in asked.items() if key not in there]
    # No directory that exists is written into.
    numbers = (int(path.name.removeprefix("exp_")) for path in state.cell_directories(out))
    free = 1 + max([*(cell.index for cell in stored.cells), *numbers], default=-1)
    added = [replace(cell, index=free + offset) for offset, cell in enumerate(new)]
    there |= {(cell.scenario, cell.id): cell for cell in added}
    remarks = _remarks(out, added=added, left=left)
    mine = replace(
        plan,
        source=stored.source,
        cells=tuple(there[key] for key in asked),
        warnings=tuple(remarks),
    )
    return replace(stored, cells=(*stored.cells, *added)) if added else None, mine


def _remarks(out: Path, *, added: Sequence[Cell], left: Sequence[Cell]) -> Iterator[str]:
    """Yield messages about cells that are added, and about cells that are left unchanged."""
    if added:
        first, last = added[0].index, added[-1].index
        names = f"exp_{first}" if first == last else f"exp_{first} to exp_{last}"
        yield f"{number_of(len(added), 'cell')} added to {out}: {names}"
    if left:
        pending = sum(not state.read(directory_of(out, cell)).is_final for cell in left)
        how = "were not requested and stay as they are"
        if len(left) == 1:
            how = "was not requested and stays as it is"
        waits = f" ({pending} not ended)" if pending else ""
        yield f"{number_of(len(left), 'further cell')} of {out} {how}{waits}"


def _check_at_rest(out: Path) -> None:
    """Raise UsageError if a cell runs or may be queued: it would write into the new directory.

    A cell may be queued in a scheduler if it has not ended and has a job file.
    """
    for cell, cell_state in state.states(out):
        directory = directory_of(out, cell)
        if state.is_worked_on(directory, cell_state):
            raise UsageError(
                f"{directory.name} of {out} is running: wait for it or stop it, then repeat"
                " --move-aside"
            )
        if not cell_state.is_final and (directory / JOB).exists():
            job = (directory / JOB).read_text(encoding="utf-8").strip()
            raise UsageError(
                f"{directory.name}'s job {job} may be queued: --resume continues it; or scancel it"
                f" and remove {out}/exp_*/{JOB}, then repeat --move-aside"
            )


def _installed() -> str:
    """Installed packages, much as `pip freeze` lists them."""
    read = [package.metadata for package in distributions()]  # which reads it at each asking
    packages = {about["Name"].lower(): about for about in read if about["Name"]}
    lines = sorted(f"{about['Name']}=={about['Version']}" for about in packages.values())
    return "\n".join(lines) + "\n"


def claim_driver(out: Path) -> None:
    """Become the only driver of a results directory: two would run every cell twice."""
    with state.claimed(out) as is_ours:
        if not is_ours:
            raise UsageError(f"another process is opening {out} just now; try again")
        _check_undriven(out)
        write_json(out / DRIVER, asdict(Process.of(os.getpid())))


def _check_undriven(out: Path) -> None:
    try:
        other = Process(**read_json(out / DRIVER))
    except TypeError:  # no driver, or one of another version
        return
    if other.pid != os.getpid() and other.live() is not None:
        raise UsageError(f"process {other.pid} is running {out} already; wait for it, or stop it")
