"""The thread that takes steps, samples and marks to the disk, twice a second.

Everything slow happens here or in the sampler, never on the training thread. It also watches the
sampler, because a thread that is stuck in a driver can't watch itself.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import deque
from itertools import compress
from typing import TYPE_CHECKING, Any

from ergmeter.records import COLUMN_KINDS, Mark, Reported, Sample

if TYPE_CHECKING:
    from ergmeter.runlog.writer import Writer
    from ergmeter.sampler import Opened, Sampler

HAND_OVER_S = 0.5
# Samples come at a steady rate, and a batch of any size costs about the same: every other time.
SAMPLES_EVERY = 2
OWN_COST_EVERY_S = 4.0
# If the disk hangs, a million steps wait; then the oldest go, and their numbers are missed.
MAX_WAITING_STEPS = 1_000_000
SELF = "ergmeter"

_STEP_COLUMNS = tuple(COLUMN_KINDS["steps"])
_FLOATS = {float, type(None)}
_INTS = {int, type(None)}


class HandOver:
    """Owns the writer and the sampler of one process. `steps` and `marks` may be appended to by
    any thread."""

    def __init__(self, writer: Writer, sampler: Sampler, *, stream: str, rank: int | None) -> None:
        self.steps: deque[tuple[Any, ...]] = deque(maxlen=MAX_WAITING_STEPS)
        self.marks: deque[Mark] = deque()
        self.reported: deque[Reported] = deque()
        self.train_steps = 0
        self.tokens = 0
        self.first_ns: int | None = None
        self.last_ns: int | None = None
        self._writer = writer
        self._sampler = sampler
        self._stream = stream
        self._rank = rank
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="ergmeter-write", daemon=True)
        self._cpu_s = 0.0
        self._own_due_s = 0.0
        self._refused_loss = False

    def start(self) -> None:
        """Begin to read and to write."""
        self._sampler.start()
        self._thread.start()

    def add(self, opened: Opened) -> None:
        """Read these probes too, from now on."""
        with self._lock:
            devices = [device for probe in opened.probes for device in probe.devices]
            self._writer.extend_header(devices=devices, unavailable=opened.unavailable)
            for probe in opened.probes:
                self._sampler.add(probe)

    def stop(self, ending: Mark | None) -> None:
        """Take the last readings, hand over everything, and close the files."""
        self._sampler.stop()
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        for probe, ticks in self._sampler.missed.items():
            self.marks.append(Mark(time.monotonic_ns(), "ticks_missed", f"{probe}: {ticks}"))
        if ending is not None:
            self.marks.append(ending)
        self.flush()
        self._write_own_cost()
        self._writer.mark(Mark(time.monotonic_ns(), "closed"))
        self._writer.close()

    def flush(self, *, samples: bool = True) -> None:
        """Hand over what has come in so far; the samples only if told to."""
        with self._lock:
            self._write_steps([self.steps.popleft() for _ in range(len(self.steps))])
            marks = self._write_samples() if samples else []
            reported = [self.reported.popleft() for _ in range(len(self.reported))]
            self._writer.write("reported", reported)
            for mark in [*marks, *(self.marks.popleft() for _ in range(len(self.marks)))]:
                self._writer.mark(mark)

    def _write_samples(self) -> list[Mark]:
        samples, marks = self._sampler.drain()
        for probe, rows in samples.items():
            self._writer.write("samples", rows, stream=probe)
        if time.monotonic() >= self._own_due_s:
            self._own_due_s = time.monotonic() + OWN_COST_EVERY_S
            self._write_own_cost()
        return marks

    def _write_own_cost(self) -> None:
        own = Sample(time.monotonic_ns(), SELF, cpu_s=self._sampler.cpu_s + self._cpu_s)
        self._writer.write("samples", [own], stream="self")

    def _loop(self) -> None:
        self._writer.prepare()
        rounds = 0
        while not self._stopping.wait(HAND_OVER_S):
            rounds += 1
            self.flush(samples=rounds % SAMPLES_EVERY == 0)
            self._sampler.watch()
            self._cpu_s = time.thread_time()

    def _write_steps(self, rows: list[tuple[Any, ...]]) -> None:
        if not rows:
            return
        columns: dict[str, Any] = dict(zip(_STEP_COLUMNS, zip(*rows, strict=True), strict=False))
        for name, kind in COLUMN_KINDS["steps"].items():
            # Most columns hold what they should, and looking costs a hundredth of converting.
            if kind == "float" and not set(map(type, columns[name])) <= _FLOATS:
                columns[name] = [self._number(value) for value in columns[name]]
            elif kind == "count" and name in columns and not set(map(type, columns[name])) <= _INTS:
                columns[name] = [self._whole(value) for value in columns[name]]
        self._tally(columns)
        columns["rank"] = (current_rank(self._rank),) * len(rows)
        self._writer.write_columns("steps", columns, stream=self._stream)

    def _tally(self, columns: dict[str, Any]) -> None:
        """Keep the totals that progress is told from."""
        train = [phase == "train" for phase in columns["phase"]]
        tokens = columns["tokens_real"]
        tokens = columns["tokens_computed"] if None in tokens else tokens
        self.train_steps += sum(filter(None, compress(columns["steps"], train)))
        self.tokens += sum(filter(None, compress(tokens, train)))
        self.first_ns = self.first_ns or columns["start_ns"][0]
        self.last_ns = columns["end_ns"][-1]

    def _whole(self, value: Any) -> int | None:  # noqa: ANN401
        number = self._number(value)
        return None if number is None or number != number else int(number)

    def _number(self, value: Any) -> float | None:  # noqa: ANN401  a number, or what a user gave
        """A float, unless reading it would make a device synchronise with us."""
        if value is None or isinstance(value, float):
            return value
        if getattr(getattr(value, "device", None), "type", "cpu") == "cpu":
            try:
                return float(value)
            except (TypeError, ValueError):
                pass
        if not self._refused_loss:
            self._refused_loss = True
            kind = type(value).__name__
            said = f"a {kind} was given as a number; pass loss.item() where you have it"
            self.marks.append(Mark(time.monotonic_ns(), "value_refused", said))
        return None


def current_rank(declared: int | None) -> int:
    """This process's rank: as declared, else as the framework says now, else as the launcher said.

    The environment comes last: several launchers set it late or not at all, and then two ranks
    would both call themselves 0.
    """
    if declared is not None:
        return declared
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    for name in ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"):
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return 0
