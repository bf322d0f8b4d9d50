"""How long a request waits, and how many are served: TTFT, TPOT, ITL, end to end, goodput.

The trap: one name, several definitions. "ITL" is a mean per request to one tool and each gap to
another; "tokens/s" counts prompts or does not; a 99th percentile of 20 requests is the slowest of
them under another name. So, here:

- a request is a `prefill` span and the `decode` span of the same number;
- TTFT is the length of the prefill span: to the first token; from when is in the note;
- TPOT is (end of decode - its start) / (tokens generated - 1), one figure a request;
- ITL is the gap between two chunks of a stream, one figure a gap: it shows the stalls that TPOT
  averages away. A chunk may hold several tokens;
- end to end is from the same start to the last token;
- the p-th percentile needs 100 / (100 - p) figures: 20 for the 95th, 100 for the 99th.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.catalog import Alias, Metric
from ergmeter.metrics.energy import run_j
from ergmeter.metrics.stats import percentile
from ergmeter.metrics.tokens import known
from ergmeter.records import PHASES, Reading, weakest
from ergmeter.units import number_of

if TYPE_CHECKING:
    from ergmeter.metrics.evidence import Evidence
    from ergmeter.metrics.steps import Steps
    from ergmeter.records import Basis, FloatArray

_PREFILL, _DECODE = PHASES.index("prefill"), PHASES.index("decode")
_CHUNKS = "a chunk with text stands for a token: the server sends no usage"
_MANY_INDICES = 2.0**40  # more requests than one writer numbers


@dataclass(frozen=True)
class Requests:
    """Requests of a run, each with its spans."""

    prefill: Steps
    decode: Steps

    def __len__(self) -> int:
        return len(self.prefill)

    @property
    def e2e_s(self) -> FloatArray:
        """From the start of each to its last token."""
        return (self.decode["end_ns"] - self.prefill["start_ns"]) / 1e9


def prefills(evidence: Evidence) -> Steps:
    """The prefill spans that count."""
    rows = evidence.all_steps if evidence.trains else evidence.counted
    found = rows.where_each(lambda lane: lane["phase"] == _PREFILL)
    if not len(found):
        raise NotMeasurable(
            "no requests were timed (erg load, integrations.generate, meter.phase('prefill'))"
        )
    return found


def requests(evidence: Evidence) -> Requests:
    """The requests that count, by the number that their two spans share."""
    prefill = prefills(evidence)
    rows = evidence.all_steps if evidence.trains else evidence.counted
    decode = rows.where_each(lambda lane: lane["phase"] == _DECODE)
    asked, answered = (rows["writer"] * _MANY_INDICES + rows["index"] for rows in (prefill, decode))
    _, of_prefill, of_decode = np.intersect1d(asked, answered, return_indices=True)
    pairs = Requests(prefill.where(of_prefill), decode.where(of_decode))
    is_after = pairs.decode["start_ns"] >= pairs.prefill["end_ns"]
    if not len(pairs) or len(pairs) < len(decode) or not is_after.all():
        raise NotMeasurable(
            f"{len(prefill)} prefill and {len(decode)} decode spans do not pair off as requests"
        )
    return pairs


def generated(evidence: Evidence, decode: Steps) -> tuple[FloatArray, Basis, str]:
    """Tokens of each decode span; where none was counted the chunks they came in, labelled."""
    values = known(decode, "tokens_real")
    if values is None:
        values = known(decode, "tokens_computed")
    if values is not None:
        return values, evidence.steps_basis, ""
    chunks = known(decode, "micro_steps")
    if chunks is None or not any(mark.name == "assumed" for mark in evidence.run.marks):
        raise NotMeasurable("the decode spans have no token count")
    return chunks, "assumed", f"; assumed: {_CHUNKS}"


def _clock(evidence: Evidence) -> str:
    said = [mark.detail for mark in evidence.run.marks if mark.name == "latency_clock"]
    return f"; {said[-1]}" if said else ""


def _percentile(values: FloatArray, q: float, what: str) -> float:
    needed = math.ceil(100 / (100 - q)) if q > 50 else 1  # one request is its own median
    if len(values) < needed:
        raise NotMeasurable(f"{len(values)} {what}: a {q:.0f}th percentile needs {needed}")
    return percentile(values, q)


def ttft_s(evidence: Evidence, q: float) -> Reading:
    """Time to the first token."""
    waits_s = prefills(evidence).duration_s
    value = _percentile(waits_s, q, "requests")
    note = f"of {number_of(len(waits_s), 'request')}, to the first token{_clock(evidence)}"
    return Reading(value, "s", evidence.steps_basis, note=note)


def _tpot(evidence: Evidence) -> tuple[FloatArray, Basis, str]:
    decode = requests(evidence).decode
    tokens, basis, label = generated(evidence, decode)
    several = tokens > 1
    if not several.any():
        raise NotMeasurable("no request generated a second token")
    each_s = decode.duration_s[several] / (tokens[several] - 1)
    alone = int((~several).sum())
    left_out = f", without {alone} of a single token" if alone else ""
    asked = f"{number_of(len(each_s), 'request')}{left_out}"
    note = f"of {asked}: first to last token / (tokens - 1){label}"
    return each_s, basis, note


def tpot_s(evidence: Evidence, q: float) -> Reading:
    """Time per output token after the first: one figure a request."""
    each_s, basis, note = _tpot(evidence)
    return Reading(_percentile(each_s, q, "requests"), "s", basis, note=note)


def itl_s(evidence: Evidence, q: float) -> Reading:
    """Gap between chunks of a stream: one figure a gap."""
    gaps_s = _gaps_s(evidence)
    value = _percentile(gaps_s, q, "gaps between chunks")
    tokens, basis, label = generated(evidence, requests(evidence).decode)
    held = float(tokens.sum()) / float(requests(evidence).decode["micro_steps"].sum())
    chunk = label.removeprefix("; ") or f"{held:.3g} tokens a chunk"
    note = f"of {number_of(len(gaps_s), 'gap')} between chunks; {chunk}"
    return Reading(value, "s", weakest("measured", basis) if label else "measured", note=note)


def _gaps_s(evidence: Evidence) -> FloatArray:
    """Kept once they are read: there are as many as tokens."""
    kept = evidence.drawn.get("latency.itl")
    if not isinstance(kept, np.ndarray):
        window = evidence.span
        timed = (one for one in evidence.run.reported() if one.name == "itl")
        inside = (one.value for one in timed if window.start_ns <= one.t_ns <= window.end_ns)
        kept = evidence.drawn["latency.itl"] = np.fromiter(inside, dtype=np.float64)
    if not len(kept):
        raise NotMeasurable("no gaps between chunks were timed (erg load, integrations.generate)")
    return kept


def e2e_s(evidence: Evidence, q: float) -> Reading:
    """From the start of a request to its last token."""
    found = requests(evidence)
    value = _percentile(found.e2e_s, q, "requests")
    note = f"of {number_of(len(found), 'request')}, to the last token{_clock(evidence)}"
    return Reading(value, "s", evidence.steps_basis, note=note)


def _served(evidence: Evidence) -> Requests:
    if evidence.trains:
        raise NotMeasurable("this run trains: its window is not that of its requests")
    return requests(evidence)


def _over_window(evidence: Evidence, amount: float, unit: str, basis: Basis, note: str) -> Reading:
    value = amount / evidence.window.duration_s
    return Reading(value, unit, basis, note=f"{note}; {evidence.window_note}")


def requests_per_s(evidence: Evidence) -> Reading:
    """Requests that were answered whole, over the window."""
    found = _served(evidence)
    note = f"{len(found)} answered whole"
    return _over_window(evidence, len(found), "requests/s", evidence.steps_basis, note)


def output_tokens_per_s(evidence: Evidence) -> Reading:
    """Generated tokens over the window, the time of prefill included."""
    tokens, basis, label = generated(evidence, _served(evidence).decode)
    note = f"generated tokens over the window, prefill included{label}"
    return _over_window(evidence, float(tokens.sum()), "tokens/s", basis, note)


def goodput_per_s(evidence: Evidence) -> Reading:
    """Requests within every limit that was declared, over the window."""
    said = [mark.detail for mark in evidence.run.marks if mark.name == "slo"]
    if not said:
        raise NotMeasurable("no limits were declared: erg load --slo ttft=0.5,tpot=0.05")
    found = _served(evidence)
    parts = (part.partition("=") for part in said[-1].split(","))
    limits = {name: float(limit) for name, _, limit in parts}
    waits = {"ttft": found.prefill.duration_s, "e2e": found.e2e_s}
    basis, label = evidence.steps_basis, ""
    if "tpot" in limits:
        tokens, basis, label = generated(evidence, found.decode)
        waits["tpot"] = found.decode.duration_s / np.maximum(tokens - 1, 1)
    good = np.all([waits[name] <= limit for name, limit in limits.items()], axis=0)
    within = ", ".join(f"{name} {limit:g} s" for name, limit in limits.items())
    note = f"{int(good.sum())} of {number_of(len(found), 'request')} within {within}{label}"
    return _over_window(evidence, float(good.sum()), "requests/s", basis, note)


def in_flight_mean(evidence: Evidence) -> Reading:
    """How many requests were under way, on average over the window (Little's law)."""
    found = _served(evidence)
    return _over_window(
        evidence, float(found.e2e_s.sum()), "requests", evidence.steps_basis,
        "sum of end to end / window",
    )  # fmt: skip


def count(evidence: Evidence) -> Reading:
    """Requests that were answered whole."""
    return Reading(len(prefills(evidence)), "requests", evidence.steps_basis,
                   note=evidence.window_note)  # fmt: skip


def failed(evidence: Evidence) -> Reading:
    """Requests that got no whole answer, after the warm-up."""
    said = [mark.detail for mark in evidence.run.marks if mark.name == "requests_failed"]
    if not said:
        raise NotMeasurable("not known: this is no whole run of erg load")
    number, _, why = said[-1].partition(": ")
    return Reading(float(number), "requests", "measured", note=why or "none")


def prompt_tokens(evidence: Evidence) -> Reading:
    """Mean length of a prompt."""
    values = known(prefills(evidence), "tokens_real")
    if values is None:
        raise NotMeasurable("the prefill spans have no token count")
    low, high = values.min(), values.max()
    note = f"{low:.0f} to {high:.0f}, of {number_of(len(values), 'request')}"
    return Reading(float(values.mean()), "tokens/request", evidence.steps_basis, note=note)


def generated_tokens(evidence: Evidence) -> Reading:
    """Mean length of an answer."""
    values, basis, label = generated(evidence, requests(evidence).decode)
    note = (
        f"{values.min():.0f} to {values.max():.0f}, of {number_of(len(values), 'request')}{label}"
    )
    return Reading(float(values.mean()), "tokens/request", basis, note=note)


def _energy_over(evidence: Evidence, amount: float, unit: str, basis: Basis, note: str) -> Reading:
    whole = run_j(evidence)
    low, high = (None if end is None else end / amount for end in (whole.low, whole.high))
    return replace(
        whole, value=whole.value / amount, unit=unit, basis=weakest(whole.basis, basis), low=low,
        high=high, note=f"{note}; {whole.note}",
    )  # fmt: skip


def joules_per_generated_token(evidence: Evidence) -> Reading:
    """All energy of the window, that of prefill too, over the tokens generated in it."""
    tokens, basis, label = generated(evidence, _served(evidence).decode)
    note = f"all energy of the window over generated tokens{label}"
    return _energy_over(evidence, float(tokens.sum()), "J/token", basis, note)


def joules_per_request(evidence: Evidence) -> Reading:
    """All energy of the window over the requests answered in it."""
    answered = len(_served(evidence))
    note = f"all energy of the window over {number_of(answered, 'request')}"
    return _energy_over(evidence, answered, "J/request", evidence.steps_basis, note)


def client_cpu_frac(evidence: Evidence) -> Reading:
    """Share of one core that sending and receiving took: near 1 the client is what was measured."""
    said = [mark.detail for mark in evidence.run.marks if mark.name == "load_client"]
    if not said:
        raise NotMeasurable("not known: this is no whole run of erg load")
    cpu_frac, lag_s = (float(part.partition("=")[2]) for part in said[-1].split(","))
    note = f"the event loop woke up to {lag_s * 1e3:.3g} ms late (p99)"
    return Reading(cpu_frac, "frac", "measured", note=note)


_VLLM = "vLLM bench serve"
_KINDS = {
    "ttft": (ttft_s, "time to first token", "first token - start of the request", "requests"),
    "tpot": (tpot_s, "time per output token", "(last - first token) / (tokens - 1) of a request",
             "requests"),
    "itl": (itl_s, "inter-token latency", "chunk - chunk before it", "streamed requests"),
    "e2e": (e2e_s, "end-to-end latency", "last token - start of the request", "requests"),
}  # fmt: skip
_QUANTILES = {"median": 50.0, "p95": 95.0, "p99": 99.0}


def _latencies() -> list[Metric]:
    made = []
    for kind, (compute, title, formula, needs) in _KINDS.items():
        theirs = "e2el" if kind == "e2e" else kind
        for name, q in _QUANTILES.items():
            which = "median" if q == 50 else f"{q:.0f}th percentile"
            made.append(
                Metric(
                    f"latency.{kind}_{name}_s",
                    f"{title}, {which}",
                    "s",
                    "lower",
                    f"{which} of {formula}",
                    (needs,),
                    partial(compute, q=q),
                    aliases=(Alias(f"{name}_{theirs}_ms", _VLLM, f"{title}, {which}", "ms", 1e3),),
                )
            )
    return made


METRICS = [
    *_latencies(),
    Metric(
        "throughput.requests_per_s",
        "requests/s",
        "requests/s",
        "higher",
        "requests answered whole / window",
        ("requests",),
        requests_per_s,
        aliases=(Alias("request_throughput", _VLLM, "completed requests / time", "requests/s"),),
    ),
    Metric(
        "throughput.output_tokens_per_s",
        "tokens/s out",
        "tokens/s",
        "higher",
        "generated tokens / window, prefill included",
        ("requests with tokens",),
        output_tokens_per_s,
        aliases=(Alias("output_throughput", _VLLM, "output tokens / time", "tokens/s"),),
    ),
    Metric(
        "throughput.goodput_per_s",
        "goodput",
        "requests/s",
        "higher",
        "requests within every declared limit / window",
        ("requests", "limits (--slo)"),
        goodput_per_s,
        aliases=(Alias("request_goodput", _VLLM, "requests within the limits / time",
                       "requests/s"),),
    ),
    Metric(
        "requests.in_flight_mean",
        "requests under way",
        "requests",
        "neither",
        "sum of end-to-end latencies / window",
        ("requests",),
        in_flight_mean,
    ),
    Metric("requests.count", "requests", "requests", "neither", "requests answered whole",
           ("requests",), count),
    Metric("requests.failed", "requests failed", "requests", "lower",
           "requests without a whole answer", ("a run of erg load",), failed),
    Metric("requests.prompt_tokens", "tokens of a prompt", "tokens/request", "neither",
           "mean over requests", ("requests with tokens",), prompt_tokens),
    Metric("requests.generated_tokens", "tokens of an answer", "tokens/request", "neither",
           "mean over requests", ("requests with tokens",), generated_tokens),
    Metric(
        "energy.joules_per_generated_token",
        "energy per generated token",
        "J/token",
        "lower",
        "energy.run_j / generated tokens",
        ("an energy counter or power readings", "requests with tokens"),
        joules_per_generated_token,
    ),
    Metric(
        "energy.joules_per_request",
        "energy per request",
        "J/request",
        "lower",
        "energy.run_j / requests.count",
        ("an energy counter or power readings", "requests"),
        joules_per_request,
    ),
    Metric(
        "overhead.client_cpu_frac",
        "load client's CPU",
        "frac",
        "lower",
        "CPU time of the thread that sends and receives / time",
        ("a run of erg load",),
        client_cpu_frac,
    ),
]  # fmt: skip
