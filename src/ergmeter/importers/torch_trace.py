"""Splits the time of profiled steps into compute, communication, copies and idle time.

Input is a trace of torch's profiler (`export_chrome_trace`). Kernels overlap, so each kind is the
length of the union of its spans. Compute, communication without compute beside it, copies beside
neither, and idle time add up to the whole.

On a GPU kernels are classified by their libraries' names. Without a GPU, operators on the host
stand in for kernels and gloo's collectives for communication. A trace without named steps, of a
plain `with profile()`, is split too; its number of steps is unknown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ergmeter.errors import FormatError
from ergmeter.importers.logfile import MAX_LINE_BYTES
from ergmeter.ports import Importer, Line, LineHints
from ergmeter.records import Mark, Record, Reported, Step

Spans: TypeAlias = "npt.NDArray[np.float64]"  # starts and ends in us, in rows of two

MARK = "profiled"
_EVENTS = '"traceEvents"'
_BEGINS = re.compile(_EVENTS + r"\s*:\s*")
_STEP = re.compile(r"ProfilerStep#(\d+)")
_COLLECTIVE = re.compile(r"nccl|rccl|nvshmem|gloo:|mscclpp|deep_?ep", re.IGNORECASE)
_COPIES = ("gpu_memcpy", "gpu_memset")
_US_PER_S = 1e6
_NS_PER_US = 1000
_FAR_US = 2**62 / _NS_PER_US  # larger times can't be stored in ns
_NO_STEPS = (
    "the trace names no steps, so how long one took is not known: make it with profiler.step() at"
    " the end of each"
)
_ONE_LINE = (
    "a torch trace with a line of 64 KiB or more, as json.dump writes it: torch begins a line"
    " for each event, and so does `python -m json.tool --indent 1 trace.json lines.json`"
)


@dataclass(frozen=True, slots=True)
class TraceTimes:
    """Times of all profiled steps together. `alone` means that nothing else ran beside it."""

    steps: int | None  # None where the trace names none
    on: str  # "gpu" or "host"
    window_s: float
    compute_s: float
    communication_s: float
    communication_alone_s: float
    copy_s: float
    copy_alone_s: float
    idle_s: float

    def mark(self, t_ns: int, **more: Any) -> Mark:  # noqa: ANN401  what else is known of it
        """Return the mark that stores these times in a run."""
        return Mark(t_ns, MARK, json.dumps({**asdict(self), **more}))


class TorchTraceImporter(Importer):
    """Reads traces of torch's profiler, compressed or not."""

    name = "torch_trace"
    looks_for = "the traces of torch.profiler"
    order = 10
    is_live = False  # no program prints one

    def recognises(self, head: Sequence[str]) -> bool:
        """True if the list of events begins in one of these lines."""
        return any(_EVENTS in text for text in head)

    def words(self, recognised: str) -> LineHints | None:
        """The word that begins the events; after it, every line."""
        return None if recognised else LineHints((_EVENTS.encode(),))

    def records(self, lines: Iterable[Line]) -> Iterator[Record]:
        """Yield the profiled steps, by the host's clock, and a mark with their times by kind."""
        texts = [line.text for line in lines]
        if any(len(text.encode()) >= MAX_LINE_BYTES for text in texts):  # it was cut there
            raise FormatError(_ONE_LINE)
        text = "\n".join(texts)
        if not text:
            return
        events = events_of(text)
        steps, times = steps_of(events), split(events)
        if not steps:
            yield Mark(0, "output_unrecognised", _NO_STEPS)
            yield Reported(0, "profiled_s", times.window_s, "s")
        yield from steps
        yield times.mark(0)


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a trace that have a duration. FormatError if it is truncated or invalid."""
    begin = _BEGINS.search(text)
    try:
        events, _ = json.JSONDecoder().raw_decode(text, begin.end() if begin else len(text))
    except (ValueError, RecursionError) as error:
        raise FormatError(f"a truncated torch trace: its events have no end ({error})") from None
    if not isinstance(events, list):
        kind = "an object" if isinstance(events, dict) else json.dumps(events)[:40]
        raise FormatError(f"a torch trace whose traceEvents is {kind}: it must be a list of events")
    spans = [event for event in events if isinstance(event, dict) and event.get("ph") == "X"]
    # What has no end, or one before its beginning, says nothing of how long it took.
    lasting = [span for span in spans if _is_number(span.get("dur")) and span["dur"] >= 0]
    for event in lasting:
        if not _is_number(event.get("ts")):
            problem = f"ts {json.dumps(event['ts'])[:40]}" if "ts" in event else "no ts"
            name = str(event.get("name"))[:80]
            raise FormatError(
                f"a torch trace whose event {name} has {problem}: must be a number of microseconds"
            )
    return lasting


def _is_number(value: object) -> bool:
    """True for a finite time in range: JSON has NaN, and integers of any length."""
    return isinstance(value, int | float) and -_FAR_US < value < _FAR_US


def steps_of(events: Sequence[dict[str, Any]]) -> list[Step]:
    """The steps that the profiler marked, by the host's clock."""
    steps = []
    for event in events:
        name = _STEP.fullmatch(str(event.get("name")))
        if name and event.get("cat") == "user_annotation":
            start_ns = round(event["ts"] * _NS_PER_US)
            end_ns = start_ns + max(1, round(event["dur"] * _NS_PER_US))
            steps.append(Step(start_ns, end_ns, index=int(name[1])))
    return sorted(steps, key=lambda step: step.start_ns)


def split(events: Sequence[dict[str, Any]]) -> TraceTimes:
    """Split the time of the profiled steps into compute, communication, copies and idle time."""
    steps = steps_of(events)
    kernels = [event for event in events if event.get("cat") == "kernel"]
    work = kernels or [
        event for event in events if event.get("cat") == "cpu_op" or _is_collective(event)
    ]
    if not work and not steps:
        raise FormatError("the trace holds neither kernels nor operators nor profiled steps")
    communication = _spans(event for event in work if _is_collective(event))
    compute = _spans(event for event in work if not _is_collective(event))
    copies = _spans(event for event in events if kernels and event.get("cat") in _COPIES)
    if steps and not kernels:
        window = steps[0].start_ns / _NS_PER_US, steps[-1].end_ns / _NS_PER_US
        compute, communication = (_within(spans, window) for spans in (compute, communication))
    every = _union(np.concatenate([compute, communication, copies]))
    if kernels or not steps:  # from the first to the end of the last, however far ahead the host is
        window = every[0, 0], every[-1, 1]
    busy = _length(_union(np.concatenate([compute, communication])))
    window_us = window[1] - window[0]
    if not window_us > 0:
        raise FormatError("the trace holds nothing that lasted any time")
    return TraceTimes(
        steps=len(steps) or None,
        on="gpu" if kernels else "host",
        window_s=window_us / _US_PER_S,
        compute_s=_length(_union(compute)) / _US_PER_S,
        communication_s=_length(_union(communication)) / _US_PER_S,
        communication_alone_s=(busy - _length(_union(compute))) / _US_PER_S,
        copy_s=_length(_union(copies)) / _US_PER_S,
        copy_alone_s=(_length(every) - busy) / _US_PER_S,
        idle_s=(window_us - _length(every)) / _US_PER_S,
    )


def _is_collective(event: dict[str, Any]) -> bool:
    return _COLLECTIVE.search(str(event.get("name"))) is not None


def _spans(events: Iterable[dict[str, Any]]) -> Spans:
    spans = [(float(event["ts"]), float(event["ts"]) + float(event["dur"])) for event in events]
    return np.array(spans).reshape(-1, 2)


def _union(spans: Spans) -> Spans:
    """Merge overlapping spans; return them in order."""
    if not len(spans):
        return spans
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    ends = np.maximum.accumulate(spans[:, 1])
    first = np.concatenate([[True], spans[1:, 0] > ends[:-1]])
    last = np.concatenate([first[1:], [True]])
    return np.column_stack([spans[first, 0], ends[last]])


def _within(spans: Spans, window: tuple[float, float]) -> Spans:
    cut = np.clip(spans, *window)
    return cut[cut[:, 1] > cut[:, 0]]


def _length(spans: Spans) -> float:
    return float((spans[:, 1] - spans[:, 0]).sum()) if len(spans) else 0.0
