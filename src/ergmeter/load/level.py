"""What of it is written to the run?

One level (so many at a time, or so many a second) is one run. Each request that was answered whole
is two spans with the request's number: `prefill`, from its sending to its first token, with the
tokens of the prompt; and `decode`, from the first token to the last, with the tokens generated and,
as micro-steps, the chunks they came in. The gaps between chunks are written as figures named `itl`.
`requests.jsonl` beside them has every request, the failed ones too.

The trap: failed requests among the fast ones. A refusal is quick, and half an answer is short;
neither has a latency or tokens here. They are counted and listed by their reason.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

from ergmeter.load import pacing
from ergmeter.load.client import Client, Pulse
from ergmeter.meter import Meter
from ergmeter.records import Reported, Step

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from ergmeter.load.answer import Answer
    from ergmeter.load.pacing import Closed, Extent, Open
    from ergmeter.load.preflight import Asking
    from ergmeter.load.prompts import FromFile, MadeUp

REQUESTS_FILE = "requests.jsonl"
_SENSORS = ("nvml", "amd", "neuron", "apple", "rapl", "grace")
_DEVICES = (*_SENSORS, "node")  # the machine's; our own process is not what is measured


@dataclass(frozen=True, slots=True)
class Plan:
    """What a level does."""

    asking: Asking
    prompts: MadeUp | FromFile
    pace: Closed | Open
    extent: Extent
    warmup: int  # requests before those that count
    slo: Mapping[str, float] = field(default_factory=dict)
    why_no_energy: str = ""  # empty: the devices of this machine are the server's


@dataclass
class Outcome:
    """What came of a level, beside its run."""

    run: Path
    answered: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    most_in_flight: int = 0
    cpu_frac: float = 0.0
    lag_p99_s: float = 0.0
    is_interrupted: bool = False

    @property
    def failed(self) -> int:
        """Requests that got no whole answer."""
        return sum(self.failures.values())


def run(
    plan: Plan, *, out: Path, name: str, tell: Callable[[Outcome], None] = lambda _outcome: None
) -> Outcome:
    """Send the requests of a level and write its run. `tell` is called after each answer."""
    probes = () if plan.why_no_energy else _DEVICES
    with Meter(out, name=name, probes=probes) as meter:
        outcome = Outcome(meter.path)
        with (meter.path / REQUESTS_FILE).open("w", buffering=1, encoding="utf-8") as file:
            keeper = _Keeper(meter, outcome, file, tell, counts_tokens=plan.asking.counts_tokens)
            _begin(meter, plan)
            try:
                asyncio.run(_sent(plan, meter, keeper))
            except KeyboardInterrupt:  # what was answered until then is worth its figures
                outcome.is_interrupted = True
        _end(meter, outcome)
    return outcome


async def _sent(plan: Plan, meter: Meter, keeper: _Keeper) -> None:
    client = Client(plan.asking.target)
    sending = pacing.Sending(
        client, lambda number: plan.asking.request(plan.prompts.prompt(number)), keeper.keep
    )
    if plan.warmup:
        at_once = plan.pace.concurrency if isinstance(plan.pace, pacing.Closed) else plan.warmup
        extent = pacing.Extent(requests=plan.warmup)
        await pacing.closed_loop(sending, min(at_once, plan.warmup), extent, first=0)
        meter.mark("warmup_end")
        keeper.begin_counting()
        client.most_in_flight = 0
    pulse = Pulse()
    beating = asyncio.create_task(pulse.beat())
    try:
        if isinstance(plan.pace, pacing.Closed):
            at_once = plan.pace.concurrency
            await pacing.closed_loop(sending, at_once, plan.extent, first=plan.warmup)
        else:
            await pacing.open_loop(sending, plan.pace, plan.extent, first=plan.warmup)
    finally:
        beating.cancel()
        outcome = keeper.outcome
        outcome.cpu_frac, outcome.lag_p99_s = pulse.cpu_frac, pulse.lag_s(0.99)
        outcome.most_in_flight = client.most_in_flight


@dataclass
class _Keeper:
    """Writes down each answer as it ends."""

    meter: Meter
    outcome: Outcome
    file: TextIO
    tell: Callable[[Outcome], None]
    counts_tokens: bool

    def begin_counting(self) -> None:
        """What came so far was the warm-up."""
        self.outcome.answered = 0
        self.outcome.failures.clear()
        self.outcome.examples.clear()

    def keep(self, answer: Answer) -> None:
        """One answer."""
        if answer.failure:
            self.outcome.failures[answer.failure] += 1
            self.outcome.examples.setdefault(answer.failure, answer.detail)
        else:
            self.outcome.answered += 1
            self._spans(answer)
        self.file.write(json.dumps(_line(answer)) + "\n")
        self.tell(self.outcome)

    def _spans(self, answer: Answer) -> None:
        # Never a mixture: chunks stand in for tokens nowhere in these columns.
        prompt = answer.prompt_tokens if self.counts_tokens else None
        generated = answer.generated_tokens if self.counts_tokens else None
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
        for t_ns, gap_s in zip(answer.chunks_ns[1:], answer.gaps_s, strict=True):
            self.meter.record(Reported(t_ns, "itl", gap_s, "s"))


def _begin(meter: Meter, plan: Plan) -> None:
    meter.mark("latency_clock", plan.pace.clock)
    meter.mark("server", f"{plan.asking.model} at {plan.asking.target.address.url}")
    if plan.slo:
        meter.mark("slo", ",".join(f"{name}={limit:g}" for name, limit in plan.slo.items()))
    if not plan.asking.counts_tokens:
        meter.mark("assumed", "the server sends no usage: a chunk with text stands for a token")
    if plan.why_no_energy:
        meter.explain(dict.fromkeys(_SENSORS, f"not read, {plan.why_no_energy}"))


def _end(meter: Meter, outcome: Outcome) -> None:
    why = ", ".join(f"{kind} ({count})" for kind, count in outcome.failures.most_common())
    meter.mark("requests_failed", f"{outcome.failed}{': ' if why else ''}{why}")
    meter.mark("load_client", f"cpu_frac={outcome.cpu_frac:.6g},lag_p99_s={outcome.lag_p99_s:.6g}")


def _line(answer: Answer) -> dict[str, Any]:
    """A request in `requests.jsonl`: times on the run's monotonic clock."""
    line: dict[str, Any] = {
        "number": answer.number,
        "due_ns": answer.due_ns,
        "sent_ns": answer.sent_ns,
        "end_ns": answer.end_ns,
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
