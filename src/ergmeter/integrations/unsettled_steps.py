"""Finished steps whose counts or losses are not here yet: still on a device, or logged later.

Reading such a number at once would make the training wait for the device. So a step is stored as
little more than its times, and the thread that hands over records fetches the numbers of many
steps together.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

from ergmeter.integrations.batches import Counts, is_later
from ergmeter.meter.clock import apart_from_captures
from ergmeter.records import Step
from ergmeter.units import listed_by

# -- fetching numbers from a device ----------------------------------------------------------------
# `tensor.item()` waits until the device has done all queued work. Here the numbers of many steps
# are copied together, by a thread and on a stream of our own, and read once the copy has arrived.
# The training thread only records an event. While any thread captures a CUDA graph, an allocation
# or query on another thread invalidates the capture, hence `apart_from_captures`.

Events: TypeAlias = "dict[Any, Any]"  # by device: a CUDA event
_streams: dict[Any, Any] = {}


class Fetch:
    """Copies numbers from their devices, once `start` is called."""

    def __init__(self, numbers: Sequence[Any], after: Events | None = None) -> None:
        """`after` is what `device_events` returned when the last number was computed."""
        self._numbers = list(numbers)
        self._after = after or {}
        self._host: list[Any] = []  # for each device: indices, and the numbers in host memory
        self._arrived: list[Any] = []

    def start(self) -> Fetch:
        """Begin the copies. Runs on a thread of ours."""
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(self._numbers[0], torch.Tensor):
            return self  # jax: `values` reads its arrays, on this thread and not in the loop
        places = listed_by((number.device, index) for index, number in enumerate(self._numbers))
        for device, indices in places.items():
            numbers = [self._numbers[index] for index in indices]
            self._host.append((indices, self._copied(torch, device, numbers)))
        return self

    def _copied(self, torch: Any, device: Any, numbers: list[Any]) -> Any:  # noqa: ANN401
        if device.type != "cuda":
            return torch.stack([number.cpu().double() for number in numbers])
        with (
            apart_from_captures(),
            torch.cuda.device(device),
            torch.cuda.stream(_stream(torch, device)),
        ):
            if device in self._after:
                torch.cuda.current_stream().wait_event(self._after[device])
            together = torch.stack([number.double() for number in numbers])
            host = torch.empty(len(numbers), dtype=torch.float64, pin_memory=True)
            host.copy_(together, non_blocking=True)
            arrived = torch.cuda.Event()
            arrived.record()
        self._arrived.append(arrived)
        return host

    @property
    def is_here(self) -> bool:
        """True if the numbers can be read without waiting."""
        if not self._arrived:
            return True
        with apart_from_captures():
            return all(event.query() for event in self._arrived)

    def values(self) -> list[float]:
        """The numbers. Waits for them if they are not here."""
        if self._arrived:
            with apart_from_captures():
                for event in self._arrived:
                    event.synchronize()
        if not self._host:
            return [float(number) for number in self._numbers]
        values = dict.fromkeys(range(len(self._numbers)), 0.0)
        for places, host in self._host:
            values |= zip(places, host.tolist(), strict=True)
        return [float(value) for value in values.values()]


def device_events(numbers: Iterable[Any]) -> Events | None:
    """Record an event on each CUDA device of these numbers, without waiting; None without one."""
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    devices = {getattr(number, "device", None) for number in numbers}
    events: Events = {}
    for device in devices:
        if getattr(device, "type", "") == "cuda":
            events[device] = torch.cuda.Event()
            events[device].record(torch.cuda.current_stream(device))
    return events or None


def _stream(torch: Any, device: Any) -> Any:  # noqa: ANN401
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]


# -- steps -----------------------------------------------------------------------------------------

Brief: TypeAlias = "Step | tuple[int, int, int, int]"  # start, end, index, micro-steps
# With the events after which numbers on a device are ready.
Row: TypeAlias = "tuple[Brief, list[Counts], Any]"

_LOSSES = ("loss", "train_loss", "train/loss")
_RATES = ("learning_rate", "lr")
_NORMS = ("grad_norm", "gradient_norm", "grad_norm_total")
_FIRST = 8  # first steps whose labelled positions are stored one by one
_FIGURES = ("loss", "learning_rate", "grad_norm")


class UnsettledSteps:
    """The finished steps of one training that wait for numbers, in order."""

    def __init__(self, pass_on: Callable[[Step], None]) -> None:
        """`pass_on` receives each step once it is complete."""
        self.rows: deque[Row] = deque()
        self.sums = TokenSums()
        self._pass_on = pass_on
        self._fetch: tuple[Fetch, list[Row]] | None = None
        self._settling = threading.Lock()

    def extend(self, end_ns: int) -> None:
        """Move the end of the newest step."""
        if self.rows:
            step, counts, after = self.rows.pop()
            self.rows.append((replace(_full_step(step), end_ns=end_ns), counts, after))

    def complete(self, logged: Mapping[str, Any], last: Step | None) -> None:
        """Add logged values to the newest step, if it is `last`."""
        if not logged or not self.rows:
            return
        newest, counts, after = self.rows[-1]
        if newest is last or isinstance(newest, tuple):
            far = [value for value in logged.values() if is_later(value)]
            after = {**(after or {}), **(device_events(far) or {})}
            self.rows[-1] = (_with_logged(_full_step(newest), logged), counts, after)

    def settle(self, *, wait: bool) -> None:
        """Pass on the steps whose numbers are here; begin to fetch the numbers of the others."""
        with self._settling:
            while self._settled(wait=wait):
                pass

    def _settled(self, *, wait: bool) -> bool:
        """One round of `settle`; True if there may be more to pass on."""
        if self._fetch is not None:
            fetch, waiting = self._fetch
            if not (wait or fetch.is_here):
                return False
            self._fetch = None
            self._give(waiting, fetch.values())
        # The loss of the newest step may be logged after its end.
        ready = [self.rows.popleft() for _ in range(len(self.rows) - (not wait))]
        if not ready:
            return False
        laters = [later for step, counts, _ in ready for later in _laters(step, counts)]
        if laters:
            newest = {
                device: event for _, _, after in ready for device, event in (after or {}).items()
            }
            self._fetch = (Fetch(laters, newest).start(), ready)
        else:
            self._give(ready, [])
        return True

    def _give(self, rows: list[Row], values: list[float]) -> None:
        numbers = iter(values)
        for step, counts, _ in rows:
            settled = [count.settled([next(numbers) for _ in count.laters]) for count in counts]
            far = [name for name in _FIGURES if is_later(getattr(step, name, None))]
            if far:
                fetched: dict[str, Any] = {name: next(numbers) for name in far}
                step = replace(_full_step(step), **fetched)
            self.sums.add(settled)
            self._pass_on(_with_tokens(_full_step(step), settled))


@dataclass
class TokenSums:
    """Token sums over all steps, with the squares of sequence lengths for attention."""

    computed: int = 0
    real: int = 0
    squares: int = 0
    loss: int | None = 0  # None: unknown in some step
    first_losses: list[int | None] = field(default_factory=list)  # of each of the first steps

    def add(self, step: list[Counts]) -> None:
        """Add the batches of one step, all of whose numbers are here."""
        counts = [count for count in step if count.computed is not None]
        for count in counts:
            computed = count.computed or 0
            self.computed += computed
            self.real += computed if count.real is None else int(count.real)
            self.squares += int(count.squares or 0)
        loss = _total([count.loss for count in counts]) if counts else None
        self.loss = _total([self.loss, loss])
        if len(self.first_losses) < _FIRST:
            self.first_losses.append(loss)

    @property
    def length(self) -> float:
        """Mean sequence length, weighted by tokens."""
        return self.squares / self.real


class StepAmounts(NamedTuple):
    """Tokens, samples and sequence length of one step, as its integration counts them."""

    tokens: int | None
    samples: int | None
    length: float

    @classmethod
    def of(cls, counts: list[Counts]) -> StepAmounts:
        """The amounts of a step's batches, where known.

        The length is weighted by tokens, as `TokenSums.length` is, so that the two can be compared.
        """
        tokens = [count.computed for count in counts if count.computed is not None]
        samples = [count.samples for count in counts if isinstance(count.samples, int)]
        total = sum(tokens) if counts and len(tokens) == len(counts) else None
        if not counts or len(samples) < len(counts):
            return cls(total, None, max(1.0, total / len(counts)) if total else 0.0)
        if not total:
            return cls(total, sum(samples), 0.0)
        squares = sum(n * n / (rows or 1) for n, rows in zip(tokens, samples, strict=True))
        return cls(total, sum(samples), max(1.0, squares / total))


def _laters(step: Brief, counts: list[Counts]) -> list[Any]:
    """The numbers of a step still on a device: its counts, then its logged values."""
    figures = [getattr(step, name, None) for name in _FIGURES]
    return [
        *(later for count in counts for later in count.laters),
        *(value for value in figures if is_later(value)),
    ]


def _full_step(step: Brief) -> Step:
    """A full Step from its times."""
    if isinstance(step, Step):
        return step
    start_ns, end_ns, index, micro_steps = step
    return Step(start_ns, end_ns, index, micro_steps=micro_steps)


def _with_tokens(step: Step, counts: list[Counts]) -> Step:
    if not counts:
        return step
    return replace(
        step,
        tokens_computed=_total([count.computed for count in counts]),
        tokens_real=_total([count.real for count in counts]),
        tokens_loss=_total([count.loss for count in counts]),
        samples=_total([count.samples for count in counts]),
    )


def _total(amounts: list[Any]) -> int | None:
    return None if any(amount is None for amount in amounts) else sum(amounts)


def _with_logged(step: Step, logged: Mapping[str, Any]) -> Step:
    def first(names: tuple[str, ...], now: float | None) -> Any:  # noqa: ANN401
        return now if now is not None else next((logged[n] for n in names if n in logged), None)

    return replace(
        step,
        loss=first(_LOSSES, step.loss),
        learning_rate=first(_RATES, step.learning_rate),
        grad_norm=first(_NORMS, step.grad_norm),
    )
