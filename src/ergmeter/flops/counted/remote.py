"""Counts a recorded step in a Python of its own, which neither the training nor its GPUs notice.

The request lies in a folder: `request.json` and the modules without weights. `start` runs a fresh
interpreter on it, at the lowest priority, with no GPU visible and none of ergmeter's hook; it
writes `result.json` beside it. It is nobody's child, so a program that waits for its own children
never meets it. Nothing of torch is imported here; that interpreter runs `step_calls.main`.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ergmeter.flops.counted.op_totals import CallFlops
from ergmeter.flops.counted.step_work import Lengths, StepRecord

if TYPE_CHECKING:
    from collections.abc import Sequence

REQUEST, RESULT, STARTED, FAILED = "request.json", "result.json", "started", "failed"
LENGTHS = "lengths.json"
GROUP = "group"  # of processes that count it
_LEFT_OUT = ("ERGMETER_", "PYTHON", "LD_PRELOAD", "TORCHELASTIC_", "SLURM_", "OMPI_", "PMI_")
_NOT_ITS_OWN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
_SET = {
    "CUDA_VISIBLE_DEVICES": "",
    "HIP_VISIBLE_DEVICES": "",
    "ROCR_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
# Before anything is imported: it gives way to every other process on the machine.
_LAST = (
    "import os; os.nice(19); hasattr(os, 'SCHED_IDLE') and"
    " os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))"
)
# This ergmeter, also where another one is installed in the program's Python.
_CODE = (
    "import sys; sys.path.insert(0, sys.argv[2]); import ergmeter; del sys.path[0];"
    " sys.path += [p for p in sys.argv[3:] if p not in sys.path];"
    " from ergmeter.flops.counted.step_calls import main; main(sys.argv[1])"
)
_OWN = str(Path(__file__).parents[3])


@dataclass(frozen=True)
class CountRequest:
    """Calls to be counted, as bytes: those of one module together."""

    groups: tuple[bytes, ...]
    errors: dict[int, str] = field(default_factory=dict)  # of groups that can't be serialised
    sizes: tuple[int, ...] = ()  # calls in each group
    path: tuple[str, ...] = ()  # where installed packages are

    def as_json(self) -> dict[str, Any]:
        """All but the bytes."""
        found = asdict(self)
        found.pop("groups")
        return found


FOLDER = ".flops"  # in a run directory, while something is to be counted


def write(request: CountRequest, record: StepRecord, folder: Path) -> None:
    """Put a request into this folder, which appears complete or not at all."""
    staging = folder.with_name(f".{folder.name}")
    staging.mkdir(parents=True)
    for number, data in enumerate(request.groups):
        (staging / f"{number}.pickle").write_bytes(data)
    about = {**request.as_json(), "python": sys.executable, "record": record.as_json()}
    (staging / REQUEST).write_text(json.dumps(about))
    staging.rename(folder)


def folder_for(run: Path, writer: str, number: int) -> Path:
    """Where a writer of a run puts a request."""
    return run / FOLDER / f"{writer}-{number:x}"


def writer_of(folder: Path) -> str:
    """The writer that put a request here."""
    return folder.name.rpartition("-")[0]


def write_lengths(folder: Path, lengths: Lengths) -> None:
    """The lengths of all steps, which are known at the end of a training."""
    (folder / LENGTHS).write_text(json.dumps(asdict(lengths)))


def lengths_of(folder: Path) -> Lengths:
    """What `write_lengths` wrote."""
    try:
        return Lengths(**json.loads((folder / LENGTHS).read_text()))
    except FileNotFoundError:
        return Lengths()


def is_pending(folder: Path) -> bool:
    """Whether a request lies here that nobody has begun to count."""
    return (folder / REQUEST).is_file() and not (folder / STARTED).exists()


def start(folder: Path, *, is_urgent: bool = False) -> None:
    """Begin to count what lies in this folder. Returns at once; OSError where it can't begin.

    At the lowest priority, unless it is urgent: on a busy machine that may take for ever.
    """
    folder = folder.absolute()  # the counter has another working directory
    about = json.loads((folder / REQUEST).read_text())
    (folder / STARTED).touch()
    python = about["python"]
    if not python:
        raise OSError("the program's Python has no path to start another one by")
    code = _CODE if is_urgent else f"{_LAST}; {_CODE}"
    command = [python, "-I", "-W", "ignore", "-c", code, str(folder), _OWN, *about["path"]]
    # By a shell that is gone at once: the interpreter is then the init process's child.
    line = f'echo $$ >"$0/{GROUP}"; {{ "$@" >"$0/log" 2>&1 </dev/null || touch "$0/{FAILED}"; }} &'
    subprocess.run(
        ["/bin/sh", "-c", line, str(folder), *command],
        env=_environment(),
        check=True,
        start_new_session=True,
        cwd="/",
        stderr=subprocess.DEVNULL,
    )


def hurry(folder: Path) -> None:
    """The training is over, so begin again at the priority of any program."""
    stop(folder)
    (folder / FAILED).unlink(missing_ok=True)
    start(folder, is_urgent=True)


def stop(folder: Path) -> None:
    """End the process that counts here, if there is one."""
    with suppress(OSError, ValueError):
        os.killpg(int((folder / GROUP).read_text()), signal.SIGKILL)


def fail(folder: Path, error: Exception) -> None:
    """Counting could not begin: each call gives this as the reason."""
    with suppress(OSError):
        (folder / "log").write_text(f"{type(error).__name__}: {error}")
        (folder / FAILED).touch()


def result(folder: Path) -> list[list[CallFlops]] | None:
    """What was counted; None until it is there. Where the counter broke, each call says so."""
    try:
        stored = json.loads((folder / RESULT).read_text())
    except FileNotFoundError:
        return _broken(folder) if (folder / FAILED).exists() else None
    return [[CallFlops(**_tuples(one)) for one in group] for group in stored]


def _broken(folder: Path) -> list[list[CallFlops]]:
    lines = (folder / "log").read_text(errors="replace").split("\n")
    said = next((line.strip() for line in reversed(lines) if line.strip()), "it was killed")
    failed = CallFlops(error=f"the counting process failed ({said[:200]})")
    sizes = json.loads((folder / REQUEST).read_text())["sizes"]
    return [[failed] * size for size in sizes]


def record_of(folder: Path) -> StepRecord:
    """The step that a request is of."""
    return StepRecord.from_json(json.loads((folder / REQUEST).read_text())["record"])


def digest(folder: Path) -> str:
    """The same for requests that are counted alike: those of ranks of one training."""
    found = hashlib.sha256()
    for path in sorted(folder.glob("*.pickle")):
        found.update(path.read_bytes())
    return found.hexdigest()


def _tuples(stored: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(v) if isinstance(v, list) else v for name, v in stored.items()}


def files(folder: Path) -> tuple[dict[str, Any], tuple[bytes, ...]]:
    """What a request says, and its modules."""
    about = json.loads((folder / REQUEST).read_text())
    numbers = range(len(about["sizes"]))
    return about, tuple((folder / f"{number}.pickle").read_bytes() for number in numbers)


def answer(folder: Path, counted: Sequence[Sequence[CallFlops]]) -> None:
    """Write what was counted."""
    staging = folder / f".{RESULT}"
    staging.write_text(json.dumps([[asdict(one) for one in group] for group in counted]))
    staging.rename(folder / RESULT)


def _environment() -> dict[str, str]:
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_LEFT_OUT) and name not in _NOT_ITS_OWN
    }
    return {**kept, **_SET}
