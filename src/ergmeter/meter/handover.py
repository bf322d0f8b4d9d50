"""The thread that takes steps, samples and marks to the disk, twice a second.

Everything slow happens here or in the sampler, never on the training thread. It also watches the
sampler, because a thread that is stuck in a driver can't watch itself.

The trap: our own failure must not become the training's. What goes wrong here costs part of the
record, which says so; and since only this thread writes at the end too, a disk that hangs holds up
the program's exit for a while and no longer.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from functools import partial
from itertools import compress
from typing import TYPE_CHECKING, Any

from ergmeter.meter.clock import Timeline, catch_up
from ergmeter.records import COLUMN_KINDS, Mark, Reported, Sample
from ergmeter.runlog.meeting import in_group, launched_size, own_rank, told_task, world_size
from ergmeter.runlog.parallel import told_layout

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from typing import Protocol

    from ergmeter.runlog.writer import Writer
    from ergmeter.sampler import Opened, Sampler

    class Duty(Protocol):
        """To read a device that another process reads for us as long as it lives."""

        stands_by: bool

        def taken(self) -> Opened:
            """Its probe, if it falls to us now."""


HAND_OVER_S = 0.5
# Samples come at a steady rate, and a batch of any size costs about the same: every other time.
SAMPLES_EVERY = 2
OWN_COST_EVERY_S = 4.0
# If the disk hangs, a million steps wait; then the oldest go, and their numbers are missed.
MAX_WAITING_STEPS = 1_000_000
# How long a fork waits for a hand-over that is under way.
PAUSE_S = 5.0
# How long the end of a program waits for its last records to be written.
STOP_S = 10.0

# How long the end of a program waits for what it has asked of its device.
DEVICE_S = 5.0

# Of a step, what whoever made it says; the rest is filled in here.
_FILLED_IN = ("rank", "host_start_ns", "host_end_ns")
STEP_GIVEN = tuple(name for name in COLUMN_KINDS["steps"] if name not in _FILLED_IN)
_STEP_COLUMNS = (*STEP_GIVEN, "host_start_ns", "host_end_ns")
_FLOATS = {float, type(None)}
_INTS = {int, type(None)}
_TOO_MANY = 2**63


class HandOver:
    """Owns the writer and the sampler of one process. `steps` and `marks` may be appended to by
    any thread."""

    def __init__(
        self,
        writer: Writer,
        sampler: Sampler,
        *,
        stream: str,
        rank: int | None,
        cost_s: Callable[[], float] | None = None,
    ) -> None:
        self.steps: deque[tuple[Any, ...]] = deque(maxlen=MAX_WAITING_STEPS)
        self.marks: deque[Mark] = deque()
        self._timeline = Timeline(self.marks.append)
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
        self._cost_s = cost_s or self._cost_of_threads_s
        self._cpu_s = 0.0
        self._own_due_s = 0.0
        self._given_rank: int | None = None
        self._refused: set[str] = set()
        self._failed = False
        self._ending: Mark | None = None
        self._finished = False
        self._paused = False
        # Called before steps are taken: whoever holds some back until their tokens are known. At
        # the end, with wait=True, they are waited for.
        self.sources: list[Callable[..., None]] = []
        self.duties: list[Duty] = []  # that fall to us if who has them now ends
        self.on_end: list[Callable[[], None]] = []
        self.costs: list[Callable[[], float]] = []  # CPU seconds of other threads of ours
        self._where: dict[str, Any] = {}  # this rank among the others, as it was asked last
        self._told: dict[str, Any] = {}  # and as the header has it

    @property
    def run(self) -> Path:
        """The run directory that this is a share of."""
        return self._writer.directory.parent

    @property
    def writer_id(self) -> str:
        """Whose share this is."""
        return self._writer.id

    def start(self) -> None:
        """Begin to read and to write."""
        self._ask_rank()
        self._sampler.start()
        self._thread.start()

    def add(self, opened: Opened) -> None:
        """Read these probes too, from now on."""
        with self._lock:
            devices = [device for probe in opened.probes for device in probe.devices]
            self._writer.extend_header(devices=devices, unavailable=opened.unavailable)
            for probe in opened.probes:
                self._sampler.add(probe)

    def describe(self, **facts: Any) -> None:  # noqa: ANN401  parts of the writer's header
        """Say more of who and what this is, at the head of this share."""
        with self._lock:
            self._writer.extend_header(**facts)

    @property
    def rank(self) -> int:
        """This process's rank, as far as it is known now."""
        self._ask_rank()
        return self._rank_now()

    @property
    def has_others(self) -> bool:
        """Whether this process is one of several ranks, as far as that is known now."""
        return bool(self._where)

    def stop(self, ending: Mark | None, *, last: Callable[[], None] | None = None) -> None:
        """Take the last readings, do `last`, hand over everything, and close the files.

        It may be called again where it was interrupted, and finishes then.
        """
        self._ending = self._ending or ending
        if not self._stopping.is_set():
            self._guarded(self._ask_where)
            # What the device still computes is drawn for, and is a step's.
            self._guarded(partial(catch_up, DEVICE_S))
            self._guarded(self._sampler.stop)
            self.duties.clear()  # or what is let go of now would be taken up again
            for end in self.on_end:
                self._guarded(end)
            if last is not None:
                self._guarded(last)
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(STOP_S)
            if self._thread.is_alive():
                said = f"the disk has not answered for {STOP_S:g} s; the end of the run is missing"
                sys.stderr.write(f"ergmeter: {said} ({self._writer.directory})\n")
        else:
            self._finish()

    def pause(self) -> None:
        """Let no fork fall into a hand-over: a child would wait for ever for an import of ours."""
        self._paused = self._lock.acquire(timeout=PAUSE_S)

    def resume(self) -> None:
        """Go on after a fork."""
        if self._paused:
            self._paused = False
            self._lock.release()

    def flush(self, *, samples: bool = True) -> None:
        """Hand over what has come in so far; the samples only if told to."""
        with self._lock:
            if not self._finished:
                self._flush(samples=samples)

    def _flush(self, *, samples: bool, wait: bool = False) -> None:
        for source in self.sources:
            self._guarded(partial(source, wait=wait))
        # The samples first: a process killed in between has no steps that nothing was read for.
        steps = [self.steps.popleft() for _ in range(len(self.steps))]
        steps = self._timeline.passed(steps)
        if wait:
            steps += self._timeline.give_up()
        if samples:
            self._guarded(self._write_samples)
        self._ask_rank()
        self._guarded(self._say_where)
        self._guarded(partial(self._write_steps, steps))
        reported = [self.reported.popleft() for _ in range(len(self.reported))]
        self._guarded(partial(self._writer.write, "reported", reported))
        self._write_marks()

    def _finish(self) -> None:
        with self._lock:
            if self._finished:
                return
            for probe, ticks in self._sampler.missed.items():
                self.marks.append(Mark(time.monotonic_ns(), "ticks_missed", f"{probe}: {ticks}"))
            if self._ending is not None:
                self.marks.append(self._ending)
            self._flush(samples=True, wait=True)
            self._guarded(self._write_own_cost)
            self._write_marks()  # what went wrong just now
            self._writer.mark(Mark(time.monotonic_ns(), "closed"))
            self._finished = True
            self._guarded(self._writer.close)

    def _guarded(self, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001  our failure is a mark, not the training's end
            if not self._failed:
                self._failed = True
                said = f"{type(error).__name__}: {error}"[:1000]
                self.marks.append(Mark(time.monotonic_ns(), "handover_failed", said))

    def _write_marks(self) -> None:
        for _ in range(len(self.marks)):
            self._guarded(partial(self._writer.mark, self.marks.popleft()))

    def _write_samples(self) -> None:
        samples, marks = self._sampler.drain()
        self.marks.extendleft(reversed(marks))
        for probe, rows in samples.items():
            self._guarded(partial(self._writer.write, "samples", rows, stream=probe))
        if time.monotonic() >= self._own_due_s:
            self._own_due_s = time.monotonic() + OWN_COST_EVERY_S
            self._write_own_cost()

    def _write_own_cost(self) -> None:
        own = Sample(time.monotonic_ns(), own_id(self._writer.id), cpu_s=self._cost_s())
        self._writer.write("samples", [own], stream="self")

    def _cost_of_threads_s(self) -> float:
        if threading.current_thread() is self._thread:
            self._cpu_s = time.thread_time()
        return self._sampler.cpu_s + self._cpu_s + sum(cost_s() for cost_s in self.costs)

    def _loop(self) -> None:
        with self._lock:
            self._guarded(self._writer.prepare)
        rounds = 0
        while not self._stopping.wait(HAND_OVER_S):
            rounds += 1
            self.flush(samples=rounds % SAMPLES_EVERY == 0)
            self._guarded(self._sampler.watch)
            self._guarded(self._stand_in)
            self._guarded(self._ask_where)
            self._cpu_s = time.thread_time()
        self._finish()

    def _stand_in(self) -> None:
        """Read what nobody reads any more."""
        for duty in tuple(self.duties):
            opened = duty.taken()
            if not duty.stands_by and duty not in self.duties:  # the end came in between
                for probe in opened.probes:
                    self._guarded(probe.close)
            elif not duty.stands_by:
                self.duties.remove(duty)
                self.add(opened)
                names = ", ".join(probe.name for probe in opened.probes) or "nothing"
                self.marks.append(Mark(time.monotonic_ns(), "took_over", names))

    def _say_where(self) -> None:
        """What was asked, in the header: by the thread that writes, as the disk may hang."""
        if self._where != self._told:
            self._told = self._where
            self._writer.extend_header(**self._where)

    def _ask_where(self) -> None:
        """How many ranks there are, and where this one stands among them, once that is known.

        While there is somebody to ask: at the end of a program its process group is gone.
        """
        world = world_size() if in_group() else launched_size()
        told = {} if world < 2 else {"world": world, "layout": told_layout()}
        if told and told != self._where:
            self._where = told

    def _write_steps(self, rows: list[tuple[Any, ...]]) -> None:
        if not rows:
            return
        columns: dict[str, Any] = dict(zip(_STEP_COLUMNS, zip(*rows, strict=True), strict=True))
        columns["rank"] = (self._rank_now(),) * len(rows)
        for name, kind in COLUMN_KINDS["steps"].items():
            # Most columns hold what they should, and looking costs a hundredth of converting.
            if kind == "float" and not set(map(type, columns[name])) <= _FLOATS:
                columns[name] = [self._number(value) for value in columns[name]]
            elif kind == "count" and not set(map(type, columns[name])) <= _INTS:
                columns[name] = [self._whole(value) for value in columns[name]]
        try:
            self._writer.write_columns("steps", columns, stream=self._stream)
        except OverflowError:  # nothing was written; which one it was is looked for only now
            for name, kind in COLUMN_KINDS["steps"].items():
                if kind == "count":
                    columns[name] = [self._whole(value) for value in columns[name]]
            self._writer.write_columns("steps", columns, stream=self._stream)
        self._tally(columns)

    def _tally(self, columns: dict[str, Any]) -> None:
        """Keep the totals that progress is told from."""
        train = [phase == "train" for phase in columns["phase"]]
        # As in `metrics.ahead`: of each step the real ones, where they are told.
        both = zip(columns["tokens_real"], columns["tokens_computed"], strict=True)
        tokens = [computed if real is None else real for real, computed in both]
        self.train_steps += sum(filter(None, compress(columns["steps"], train)))
        self.tokens += sum(filter(None, compress(tokens, train)))
        self.first_ns = self.first_ns or columns["start_ns"][0]
        self.last_ns = columns["end_ns"][-1]

    def _whole(self, value: Any) -> int | None:  # noqa: ANN401
        number = value if isinstance(value, int) else self._number(value)
        if number is None:
            return None
        if not abs(number) < _TOO_MANY:
            self._refuse("a count was given that is no whole number below 2**63")
            return None
        return int(number)

    def _number(self, value: Any) -> float | None:  # noqa: ANN401  a number, or what a user gave
        """A float, unless reading it would make a device synchronise with us."""
        if value is None or isinstance(value, float):
            return value
        is_here = getattr(getattr(value, "device", None), "type", "cpu") == "cpu"
        if is_here and not isinstance(value, str | bytes | bytearray):
            try:
                return float(value)
            except (TypeError, ValueError, ArithmeticError, RuntimeError):
                pass
        kind = type(value).__name__
        self._refuse(f"a {kind} was given as a number; pass loss.item() where you have it")
        return None

    def _refuse(self, why: str) -> None:
        if why not in self._refused:
            self._refused.add(why)
            self.marks.append(Mark(time.monotonic_ns(), "value_refused", why))

    def _ask_rank(self) -> None:
        """Ask while there is somebody to ask: at the end of a program its process group is gone."""
        if self._rank is None:
            given = own_rank()
            self._given_rank = self._given_rank if given is None else given

    def _rank_now(self) -> int:
        """This process's rank: as declared, else as the framework said, else as the launcher said.

        The environment comes last: several launchers set it late or not at all, and then two ranks
        would both call themselves 0.
        """
        known = (self._rank, self._given_rank, told_task())
        return next((rank for rank in known if rank is not None), 0)


def own_id(writer: str) -> str:
    """The device under which a writer's own cost is written."""
    return f"ergmeter:{writer}"
