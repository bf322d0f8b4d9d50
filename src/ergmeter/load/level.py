"""Runs one level of load (a concurrency or a rate) and writes it as one run.

A request that was answered completely is two spans with the request's number. `prefill` is from its
sending to its first token, with the tokens of the prompt. `decode` is from the first token to the
last, with the tokens generated and, as micro-steps, the chunks. The gaps between chunks are
reported as `itl`. `requests.jsonl` has every request, the failed ones too.

A failed request is fast or short, so it has no latency or tokens here. But it took the server's
time too, and a rate without that time would be too high. So each offered request is a row of
`reported`, by its outcome (`metrics.evidence.requests`). The window of all rates is from the first
request offered to the last one settled.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, TextIO

from ergmeter import registry
from ergmeter.load import pacing
from ergmeter.load.answer import Answer
from ergmeter.load.client import Client, Pulse
from ergmeter.load.request_body import Asking, FromFile, MadeUp
from ergmeter.meter import Meter
from ergmeter.metrics.evidence import requests
from ergmeter.records import Reported, Step
from ergmeter.units import NS_PER_S

REQUESTS_FILE = "requests.jsonl"


@dataclass(frozen=True, slots=True)
class LevelPlan:
    """The plan of a level."""

    asking: Asking
    prompts: MadeUp | FromFile
    pace: pacing.Closed | pacing.Open
    extent: pacing.LevelLength
    warmup: int  # requests before those that count
    slo: Mapping[str, float] = field(default_factory=dict)
    why_no_energy: str = ""  # empty: the devices of this machine are the server's


@dataclass
class LevelOutcome:
    """Counts of a level's requests after the warm-up, and the client's own cost."""

    run: Path
    answered: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    unsettled: int = 0  # in flight at an interruption
    unsettled_s: float = 0.0  # how long the oldest of these had waited
    no_usage: int = 0  # answers without a token count, though the server sends one
    zero_usage: int = 0  # answers with text for which the server counts 0 tokens
    most_in_flight: int = 0
    cpu_frac: float = 0.0
    lag_p99_s: float = 0.0
    is_interrupted: bool = False

    @property
    def failed(self) -> int:
        """Requests without a complete answer."""
        return sum(self.failures.values())

    @property
    def settled(self) -> int:
        """Requests that were answered or failed."""
        return self.answered + self.failed

    @property
    def offered(self) -> int:
        """All requests after the warm-up."""
        return self.settled + self.unsettled

    @property
    def failed_frac(self) -> float:
        """Share of the settled requests that failed; 0 if none was settled."""
        return self.failed / self.settled if self.settled else 0.0


class Interruption:
    """Ends the sending early on SIGINT or SIGTERM; the results so far are still reported.

    A second signal ends the program at once.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._stop: Callable[[], object] | None = None

    def on_signal(self, number: int, _frame: object) -> None:
        """End the sending at the first signal, the program at the second."""
        if self.signal is not None:
            raise KeyboardInterrupt
        self.signal = number
        if self._stop is not None:
            self._stop()

    def cancels(self, task: asyncio.Task[None]) -> None:
        """Cancel this task on a signal; at once if a signal has already arrived."""
        loop = task.get_loop()
        self._stop = lambda: loop.is_closed() or loop.call_soon_threadsafe(task.cancel)
        if self.signal is not None:
            self._stop()


def run(
    plan: LevelPlan,
    *,
    out: Path,
    name: str,
    tell: Callable[[LevelOutcome], None] = lambda _outcome: None,
    interruption: Interruption | None = None,
) -> LevelOutcome:
    """Send the requests of a level and write its run. `tell` is called after each answer."""
    probes = () if plan.why_no_energy else _machine_probes()
    with Meter(out, name=name, probes=probes) as meter:
        outcome = LevelOutcome(meter.path)
        with (meter.path / REQUESTS_FILE).open("w", buffering=1, encoding="utf-8") as file:
            log = _RequestLog(meter, outcome, file, tell, counts_tokens=plan.asking.counts_tokens)
            _begin(meter, plan)
            try:
                asyncio.run(_send(plan, log, interruption or Interruption()))
            except (KeyboardInterrupt, asyncio.CancelledError):
                outcome.is_interrupted = True  # settled requests still give metrics
        cost = f"cpu_frac={outcome.cpu_frac:.6g},lag_p99_s={outcome.lag_p99_s:.6g}"
        meter.mark(requests.END_MARK, cost)
    return outcome


def _machine_probes() -> tuple[str, ...]:
    """The probes of the machine's devices; the client's own process is not measured."""
    return registry.declaring("probes", is_default=True, reads="machine")


async def _send(plan: LevelPlan, log: _RequestLog, interruption: Interruption) -> None:
    task = asyncio.current_task()
    assert task is not None
    interruption.cancels(task)
    client = Client(plan.asking.target)
    sending = pacing.Sending(
        client, lambda number: plan.asking.request(plan.prompts.prompt(number)), log.settled
    )
    try:
        await asyncio.sleep(0)  # an earlier signal cancels the task here
        if plan.warmup:
            await _warm_up(plan, sending, log)
        await _measure(plan, sending, log.outcome)
    except asyncio.CancelledError:
        log.interrupted(sending, time.monotonic_ns())
        raise


async def _warm_up(plan: LevelPlan, sending: pacing.Sending, log: _RequestLog) -> None:
    at_once = min(plan.warmup, getattr(plan.pace, "concurrency", plan.warmup))
    try:
        await pacing.Closed(at_once).send(sending, pacing.LevelLength(plan.warmup), first=0)
    finally:  # if interrupted during the warm-up, nothing counts
        log.warmed_up()
        sending.client.most_in_flight = 0


async def _measure(plan: LevelPlan, sending: pacing.Sending, outcome: LevelOutcome) -> None:
    pulse = Pulse()
    beating = asyncio.create_task(pulse.beat())
    try:
        await plan.pace.send(sending, plan.extent, first=plan.warmup)
    finally:
        beating.cancel()
        outcome.cpu_frac, outcome.lag_p99_s = pulse.cpu_frac, pulse.lag_s(0.99)
        outcome.most_in_flight = sending.client.most_in_flight


@dataclass
class _RequestLog:
    """Writes each request to the run when it is settled."""

    meter: Meter
    outcome: LevelOutcome
    file: TextIO
    tell: Callable[[LevelOutcome], None]
    counts_tokens: bool
    counted_from_ns: int = 0

    def warmed_up(self) -> None:
        """Count requests from now on."""
        self.counted_from_ns = time.monotonic_ns()
        self.meter.mark("warmup_end")
        self.outcome.answered = self.outcome.no_usage = self.outcome.zero_usage = 0
        self.outcome.failures.clear()
        self.outcome.examples.clear()

    def settled(self, answer: Answer) -> None:
        """Write a request that was answered or has failed."""
        if answer.failure:
            self.outcome.failures[answer.failure] += 1
            self.outcome.examples.setdefault(answer.failure, answer.detail)
            self._write(answer, requests.failed_as(answer.failure), answer.end_ns)
        else:
            self.outcome.answered += 1
            self.outcome.no_usage += self.counts_tokens and answer.generated_tokens is None
            self.outcome.zero_usage += answer.generated_tokens == 0  # an answer has text
            self._spans(answer)
            self._write(answer, requests.ANSWERED, answer.end_ns)
        self.tell(self.outcome)

    def interrupted(self, sending: pacing.Sending, t_ns: int) -> None:
        """Write the requests in flight (offered, not settled) at an interruption."""
        for answer in sending.in_flight(t_ns):
            self._write(answer, requests.UNSETTLED, t_ns)
            if answer.offered_ns >= self.counted_from_ns:
                self.outcome.unsettled += 1
                waited_s = (t_ns - answer.offered_ns) / NS_PER_S
                self.outcome.unsettled_s = max(self.outcome.unsettled_s, waited_s)

    def _write(self, answer: Answer, name: str, t_ns: int) -> None:
        waited_s = (t_ns - answer.offered_ns) / NS_PER_S
        self.meter.record(Reported(t_ns, name, waited_s, "s"))
        self.file.write(json.dumps(_line(answer)) + "\n")

    def _spans(self, answer: Answer) -> None:
        # Chunks never stand in for tokens in these columns.
        prompt = answer.prompt_tokens if self.counts_tokens else None
        generated = answer.usage_tokens if self.counts_tokens else None
        number, first_ns = answer.number, answer.first_ns
        self.meter.record(
            Step(answer.due_ns, first_ns, number, phase="prefill", tokens_real=prompt, samples=1)
        )
        self.meter.record(
            Step(
                first_ns,
                answer.last_ns,
                number,
                phase="decode",
                tokens_real=generated,
                samples=0,  # the request is counted with its prefill
                micro_steps=len(answer.chunks_ns),
            )
        )
        for before_ns, t_ns in pairwise(answer.chunks_ns):
            self.meter.record(Reported(t_ns, "itl", (t_ns - before_ns) / NS_PER_S, "s"))


def _begin(meter: Meter, plan: LevelPlan) -> None:
    meter.mark("latency_clock", plan.pace.clock)
    meter.mark(requests.LOAD_MARK, f"{plan.asking.model} at {plan.asking.target.address.url}")
    if plan.slo:
        meter.mark("slo", ",".join(f"{name}={limit:g}" for name, limit in plan.slo.items()))
    if not plan.asking.counts_tokens:
        meter.mark("assumed", "the server sends no usage: a chunk with text stands for a token")
    if plan.why_no_energy:
        node = registry.declaring("probes", kinds=("node",))
        sensors = [name for name in _machine_probes() if name not in node]
        meter.explain(dict.fromkeys(sensors, f"not read, {plan.why_no_energy}"))


def _line(answer: Answer) -> dict[str, Any]:
    """Return the line of a request in `requests.jsonl`; times are on the run's monotonic clock."""
    line: dict[str, Any] = {
        "number": answer.number,
        "due_ns": answer.offered_ns,
        "sent_ns": answer.sent_ns,
        "end_ns": answer.end_ns or None,  # None: in flight at an interruption
        "connect_s": answer.connect_s,
        "chunks": len(answer.chunks_ns),
        "prompt_tokens": answer.prompt_tokens,
        "cached_tokens": answer.cached_tokens,
        "generated_tokens": answer.generated_tokens,
        "finish_reason": answer.finish_reason or None,
        "status": answer.response.status or None,
    }
    if answer.chunks_ns:
        line |= {"first_ns": answer.first_ns, "last_ns": answer.last_ns}
    if answer.failure:
        line |= {"failure": answer.failure, "detail": answer.detail}
    return line
