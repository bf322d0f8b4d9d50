"""Counts a recorded step in a separate Python process, and adds up the step's FLOPs.

The request is a folder with `request.json` and the modules without weights. `start` runs a new
interpreter on it, at the lowest priority, with no GPU visible and without ergmeter's hook. That
process runs `step_calls.main` and writes `result.json` into the same folder. It is not a child of
the program, so a program that waits for its children does not wait for it. This module does not
import torch.

The record of a step is plain data, so the program can finish the count, or `erg record` can after
the program has ended.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ergmeter.atomic_write import write_text
from ergmeter.errors import NotMeasurable
from ergmeter.flops.counted.op_totals import CallFlops
from ergmeter.records import Flops, WorkPart

# FLOPs of a training step from its recorded calls and the count of each.

MODEL, OTHER, GENERATION = "model", "other models", "generation"
_COUNTED = "the calls of one training step, run again without weights or data"
_ATTENTION = "attention: "  # begins the line that names its pairs, which notes show
_MASKED = "pairs that is_causal hides are left out, all others counted"
_ALL_PAIRS = "every pair, as no kernel is told is_causal"
_ALIKE_FRAC = 0.01


@dataclass(frozen=True)
class RecordedCall:
    """A call of a module in the recorded step, without its FLOPs."""

    module: str  # the module's class name
    part: str  # MODEL (trained) or OTHER
    times: int = 1
    graph_flops: tuple[float, float] | None = None  # forward, backward: by the autograd graph
    is_loss: bool = False  # the module computes a loss: it was given labels


@dataclass(frozen=True)
class StepRecord:
    """One recorded step: its calls without their FLOPs, and its tokens."""

    groups: tuple[tuple[RecordedCall, ...], ...] = ()  # calls to be counted, by module
    tokens: int | None = None  # of the step, as the integration counts them
    samples: int | None = None
    length: float = 0.0  # sequence length, averaged over tokens
    outside_forward: float = 0.0  # products outside of modules
    outside_backward: float = 0.0
    not_counted: tuple[str, ...] = ()  # products of the trained models that could not be counted
    assumptions: tuple[str, ...] = ()
    analytic: tuple[Flops, ...] = ()  # of the largest model, if its configuration is readable
    is_head_on_labels: bool = False  # in `analytic` the head is applied to labelled positions only
    positions: float | None = None  # token positions that the largest model computed, if known
    generated: dict[str, int] = field(default_factory=dict)  # positions with a cache, by class
    parameters: int | None = None
    dtype: str | None = None
    reason: str = ""  # why `analytic` is empty

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> StepRecord:
        """Return the record from the fields in a request.json."""
        groups = tuple(tuple(RecordedCall(**c) for c in group) for group in stored["groups"])
        analytic = tuple(Flops.from_json(entry) for entry in stored["analytic"])
        texts = {name: tuple(stored[name]) for name in ("not_counted", "assumptions")}
        return cls(**{**stored, **texts, "groups": groups, "analytic": analytic})


@dataclass(frozen=True)
class Lengths:
    """Average sequence length and labelled share over all steps, to correct one step's count."""

    length: float = 0.0
    is_padded: bool = False
    # Labelled positions per token, relative to the recorded step. It scales the loss's FLOPs.
    labelled_ratio: float = 1.0
    labelled_frac: float = 0.0  # of all real tokens; 0: unknown, or the count does not depend on it


def step_flops(
    record: StepRecord, counts: Sequence[Sequence[CallFlops]], lengths: Lengths | None = None
) -> tuple[Flops, ...]:
    """Return the FLOPs of a step under each convention; NotMeasurable if nothing was counted."""
    lengths = lengths or Lengths()
    record = _with_all_labels(record, lengths.labelled_ratio)
    pairs = [
        (call, _by_graph(call, flops.error) if flops.error and call.graph_flops else flops)
        for calls, group in zip(record.groups, counts, strict=True)
        for call, flops in zip(calls, group, strict=True)
    ]
    trained = [pair for pair in pairs if pair[0].part == MODEL]
    others = [pair for pair in pairs if pair[0].part != MODEL]
    if record.analytic:
        return tuple(_completed(flops, record, trained, others) for flops in record.analytic)
    failed = [flops.error for _, flops in trained if flops.error]
    if not trained and not record.outside_forward:
        raise NotMeasurable(record.reason or _nothing_seen(record))
    if failed and all(flops.error for _, flops in trained):
        raise NotMeasurable(failed[0])
    return (_counted(record, trained, others, lengths),)


def _with_all_labels(record: StepRecord, ratio: float) -> StepRecord:
    """Return the record with the FLOPs on labelled positions scaled to an average step."""
    if ratio == 1.0:
        return record
    groups = tuple(
        tuple(_scaled(call, ratio) if call.is_loss else call for call in group)
        for group in record.groups
    )
    assumption = f"given: the labels of all steps ({ratio:.3f} times the recorded step's)"
    return replace(
        record,
        groups=groups,
        outside_forward=record.outside_forward * ratio,
        outside_backward=record.outside_backward * ratio,
        assumptions=(*record.assumptions, assumption),
    )


def _scaled(call: RecordedCall, ratio: float) -> RecordedCall:
    if call.graph_flops is None:
        return call
    forward, backward = call.graph_flops
    return replace(call, graph_flops=(forward * ratio, backward * ratio))


def _nothing_seen(record: StepRecord) -> str:
    if record.not_counted:
        return f"the step's matrix products can't be counted: {', '.join(record.not_counted)}"
    return "no call of a module with gradients was seen in the step that was recorded"


_Counted = list[tuple["RecordedCall", "CallFlops"]]


def _by_graph(call: RecordedCall, error: str) -> CallFlops:
    """Return the FLOPs of a call from the recorded step's autograd graph, and say why."""
    forward, backward = call.graph_flops or (0.0, 0.0)
    why = error.partition(";")[0]  # without the advice
    assumption = f"given: the products of {call.module} in one step's autograd graph ({why})"
    return CallFlops(forward, backward, assumptions=(assumption,))


def _counted(record: StepRecord, trained: _Counted, others: _Counted, lengths: Lengths) -> Flops:
    forward, backward, again, pairs = _sums(record, trained)
    model = forward + backward
    alone = None
    if record.tokens:
        alone = (model + again - pairs) / record.tokens
        if lengths.length and record.length:
            ratio = lengths.length / record.length
            if abs(ratio - 1) > _ALIKE_FRAC:
                model += pairs * (ratio - 1)
    return Flops(
        model_per_step=model,
        convention="counted",
        engine="counted",
        hardware_per_step=model + again,
        hardware_per_padding=alone if lengths.is_padded else None,
        tokens_per_step=record.tokens,
        samples_per_step=record.samples,
        assumptions=(_COUNTED, *_pair_notes(trained), *_count_notes(record, trained)),
        other_work=tuple(_other_work(record, others, model and forward / model, model, scale=1.0)),
        not_counted=_not_counted(record, trained),
    )


def _sums(record: StepRecord, trained: _Counted) -> tuple[float, float, float, float]:
    """Return a step's FLOPs: forward, backward, recomputed; and those of attention pairs in them.

    A call that could not be counted adds nothing.
    """
    forward = sum(c.times * flops.forward for c, flops in trained) + record.outside_forward
    backward = sum(c.times * flops.backward for c, flops in trained) + record.outside_backward
    again = sum(c.times * flops.recomputed for c, flops in trained)
    pairs = sum(c.times * (flops.pairs_forward + flops.pairs_backward) for c, flops in trained)
    return forward, backward, again, pairs


def _pair_notes(trained: _Counted) -> tuple[str, ...]:
    """Return a note on which attention pairs are counted; none if there is no attention."""
    if any(flops.pairs_masked for _, flops in trained):
        return (f"{_ATTENTION}{_MASKED}",)
    has_pairs = any(flops.pairs_forward for _, flops in trained)
    return (f"{_ATTENTION}{_ALL_PAIRS}",) if has_pairs else ()


def _completed(analytic: Flops, record: StepRecord, trained: _Counted, others: _Counted) -> Flops:
    """Return an analytic count plus the FLOPs that the step computes outside that model."""
    forward, backward, again, _ = _sums(record, trained)
    extra = forward + backward
    scale, calls = 1.0, 1.0
    if record.tokens and analytic.tokens_per_step:
        scale = analytic.tokens_per_step / record.tokens
        if record.positions:  # a model called twice on a batch costs twice its tokens
            calls = record.positions / record.tokens
    model = analytic.model_per_step * calls + extra * scale
    hardware = analytic.hardware_per_step
    if hardware is not None:
        hardware = hardware * calls + (extra + again) * scale
    return replace(
        analytic,
        model_per_step=model,
        hardware_per_step=hardware,
        assumptions=(*analytic.assumptions, *_count_notes(record, trained)),
        other_work=tuple(_other_work(record, others, 1 / 3, model / scale, scale=scale)),
        not_counted=_not_counted(record, trained),
    )


def _other_work(
    record: StepRecord, others: _Counted, forward_frac: float, model: float, *, scale: float
) -> Iterator[WorkPart]:
    if others:
        names = ", ".join(dict.fromkeys(call.module for call, _ in others))
        failed = [f"{call.module}: {flops.error}" for call, flops in others if flops.error]
        total = sum(
            c.times * (flops.forward + flops.backward + flops.recomputed) for c, flops in others
        )
        note = f"{names}; not counted: {failed[0]}" if failed else names
        yield WorkPart(OTHER, None if failed else total * scale, note)
    if record.generated:
        names, positions = ", ".join(record.generated), sum(record.generated.values())
        note = f"{names}: {positions:,} positions with a cache, each as in a forward pass"
        per_position = forward_frac * model / record.tokens if record.tokens else None
        flops = None if per_position is None else positions * per_position * scale
        yield WorkPart(GENERATION, flops, note)


def _count_notes(record: StepRecord, trained: _Counted) -> tuple[str, ...]:
    own = [line for _, flops in trained for line in flops.assumptions]
    assumptions = [*record.assumptions, *own]
    if record.outside_forward and not record.analytic and not trained:
        assumptions.append("all products are outside of modules: counted from the autograd graph")
    return tuple(dict.fromkeys(assumptions))


def _not_counted(record: StepRecord, trained: _Counted) -> tuple[str, ...]:
    lines = [line for _, flops in trained for line in flops.not_counted]
    operators = dict.fromkeys(line.removeprefix("not counted: ") for line in lines)
    failed = [f"{call.module} ({flops.error})" for call, flops in trained if flops.error]
    return (*record.not_counted, *operators, *failed)


# The request, and the process that counts it.

REQUEST, RESULT, STARTED, FAILED = "request.json", "result.json", "started", "failed"
LENGTHS = "lengths.json"
GROUP = "group"  # file with the process group of the counting process
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
# First of all, the counting process gives way to every other process on the machine.
_LAST = (
    "import os; os.nice(19); hasattr(os, 'SCHED_IDLE') and"
    " os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))"
)
# Imports this ergmeter, even if the program's Python has another one installed.
_CODE = (
    "import sys; sys.path.insert(0, sys.argv[2]); import ergmeter; del sys.path[0];"
    " sys.path += [p for p in sys.argv[3:] if p not in sys.path];"
    " from ergmeter.flops.counted.step_calls import main; main(sys.argv[1])"
)
_OWN = str(Path(__file__).parents[3])


@dataclass(frozen=True)
class CountRequest:
    """Serialised calls to be counted, without weights or data."""

    groups: tuple[bytes, ...]  # by module
    errors: dict[int, str] = field(default_factory=dict)  # of groups that can't be serialised
    sizes: tuple[int, ...] = ()  # calls in each group
    path: tuple[str, ...] = ()  # where installed packages are


FOLDER = ".flops"  # in a run directory, while a count is pending


def write(request: CountRequest, record: StepRecord, folder: Path) -> None:
    """Write a request to `folder`, which appears complete or not at all."""
    staging = folder.with_name(f".{folder.name}")
    staging.mkdir(parents=True)
    for number, data in enumerate(request.groups):
        (staging / f"{number}.pickle").write_bytes(data)
    about = {**asdict(request), "python": sys.executable, "record": asdict(record)}
    del about["groups"]
    (staging / REQUEST).write_text(json.dumps(about))
    staging.rename(folder)


def folder_for(run: Path, writer: str, number: int) -> Path:
    """Return the folder for a writer's request in a run directory."""
    return run / FOLDER / f"{writer}-{number:x}"


def writer_of(folder: Path) -> str:
    """Return the name of the writer that made this request folder."""
    return folder.name.rpartition("-")[0]


def write_lengths(folder: Path, lengths: Lengths) -> None:
    """Store the average lengths of all steps, which are known at the end of a training."""
    (folder / LENGTHS).write_text(json.dumps(asdict(lengths)))


def lengths_of(folder: Path) -> Lengths:
    """Return the lengths that `write_lengths` stored, or the defaults."""
    try:
        return Lengths(**json.loads((folder / LENGTHS).read_text()))
    except FileNotFoundError:
        return Lengths()


def is_pending(folder: Path) -> bool:
    """True if the folder has a request and no process has started to count it."""
    return (folder / REQUEST).is_file() and not (folder / STARTED).exists()


def start(folder: Path, *, is_urgent: bool = False) -> None:
    """Start a process that counts the request in this folder; return at once.

    It runs at the lowest priority unless `is_urgent`: on a busy machine that may never finish.
    Raises OSError if the process can't start.
    """
    folder = folder.absolute()  # the counter has another working directory
    about = json.loads((folder / REQUEST).read_text())
    (folder / STARTED).touch()
    python = about["python"]
    if not python:
        raise OSError("the program's Python does not know its own path (sys.executable is empty)")
    code = _CODE if is_urgent else f"{_LAST}; {_CODE}"
    command = [python, "-I", "-W", "ignore", "-c", code, str(folder), _OWN, *about["path"]]
    # A shell starts it and exits, so the interpreter becomes a child of the init process.
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
    """Restart the count at normal priority: the training is over."""
    stop(folder)
    (folder / FAILED).unlink(missing_ok=True)
    start(folder, is_urgent=True)


def stop(folder: Path) -> None:
    """Kill the process that counts this request, if there is one."""
    with suppress(OSError, ValueError):
        os.killpg(int((folder / GROUP).read_text()), signal.SIGKILL)


def fail(folder: Path, error: Exception) -> None:
    """Record that counting could not start: `result` then returns this error for each call."""
    with suppress(OSError):
        (folder / "log").write_text(f"{type(error).__name__}: {error}")
        (folder / FAILED).touch()


def result(folder: Path) -> list[list[CallFlops]] | None:
    """Return the counts, None while pending; if the process failed, each call has the error."""
    try:
        stored = json.loads((folder / RESULT).read_text())
    except FileNotFoundError:
        return _broken(folder) if (folder / FAILED).exists() else None
    return [[CallFlops(**_tuples(entry)) for entry in group] for group in stored]


def _broken(folder: Path) -> list[list[CallFlops]]:
    lines = (folder / "log").read_text(errors="replace").split("\n")
    message = next((line.strip() for line in reversed(lines) if line.strip()), "it was killed")
    failed = CallFlops(error=f"the counting process failed ({message[:200]})")
    return [[failed] * size for size in json.loads((folder / REQUEST).read_text())["sizes"]]


def record_of(folder: Path) -> StepRecord:
    """Return the recorded step of a request."""
    return StepRecord.from_json(json.loads((folder / REQUEST).read_text())["record"])


def digest(folder: Path) -> str:
    """Return a hash of a request's modules, equal for ranks with the same request."""
    sha = hashlib.sha256()
    for path in sorted(folder.glob("*.pickle")):
        sha.update(path.read_bytes())
    return sha.hexdigest()


def _tuples(stored: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(v) if isinstance(v, list) else v for name, v in stored.items()}


def files(folder: Path) -> tuple[dict[str, Any], tuple[bytes, ...]]:
    """Return the fields of a request and its serialised modules."""
    about = json.loads((folder / REQUEST).read_text())
    numbers = range(len(about["sizes"]))
    return about, tuple((folder / f"{number}.pickle").read_bytes() for number in numbers)


def answer(folder: Path, counted: Sequence[Sequence[CallFlops]]) -> None:
    """Write the counts to the request's folder."""
    write_text(
        folder / RESULT, json.dumps([[asdict(flops) for flops in group] for group in counted])
    )


def _environment() -> dict[str, str]:
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_LEFT_OUT) and name not in _NOT_ITS_OWN
    }
    return {**environment, **_SET}
