"""Latency and throughput of requests: TTFT, TPOT, ITL, end to end, goodput.

Tools define these differently. "ITL" is a mean per request in one and each gap in another;
"tokens/s" may count prompts; a 99th percentile of 20 requests is the slowest of them. Here:

- a request is a `prefill` span and the `decode` span of the same number;
- TTFT is the length of the prefill span, which ends at the first token; the note names its start;
- TPOT is (end of decode - its start) / (tokens generated - 1), one value per request;
- ITL is the gap between two chunks of a stream, one value per gap: it shows the stalls that TPOT
  averages away. A chunk may hold several tokens;
- end to end is from the start of the prefill span to the last token;
- the p-th percentile needs 100 / (100 - p) values: 20 for the 95th, 100 for the 99th;
- rates are over the window from the first request offered to the last settled, answered or failed
  (`evidence.requests`); goodput is good requests per second, SLO attainment good over all offered;
- a failed request has no latency. A percentile is over answered requests. It is absent if it would
  fall among the failed ones, were they the slowest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import numpy as np

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.catalog import Metric, vllm
from ergmeter.metrics.definitions.energy import run_j
from ergmeter.metrics.definitions.tokens import known_counts, need_rows, need_usage
from ergmeter.metrics.evidence.evidence import Evidence
from ergmeter.metrics.evidence.requests import (
    END_MARK,
    LOAD_MARK,
    Offered,
    failed_by_mark,
    has_rows,
    need_failures,
    why_not_timed,
)
from ergmeter.metrics.evidence.samples import cached_result
from ergmeter.metrics.evidence.steps import Steps
from ergmeter.records import Basis, FloatArray, Reading, mapped, weakest
from ergmeter.stats.intervals import percentile
from ergmeter.units import NS_PER_S, duration, number_of

_CHUNKS = "a chunk with text stands for a token: the server sends no usage"
_NO_LOAD = "this is not a run of `erg load`"
_MANY_INDICES = 2.0**40  # above any request number of one writer


@dataclass(frozen=True)
class Requests:
    """The requests of a run: row i of `prefill` and of `decode` is the same request."""

    prefill: Steps
    decode: Steps

    def __len__(self) -> int:
        return len(self.prefill)

    @property
    def e2e_s(self) -> FloatArray:
        """Seconds from the start of each request to its last token."""
        return (self.decode["end_ns"] - self.prefill["start_ns"]) / 1e9


def prefills(evidence: Evidence) -> Steps:
    """The prefill spans in the window; of a training run, all of them."""
    rows = evidence.all_steps if evidence.trains else evidence.counted
    spans = rows.of_phase("prefill")
    if not len(spans):
        raise NotMeasurable(f"no requests were timed: {why_not_timed(evidence)}")
    need_rows(evidence)
    return spans


def requests(evidence: Evidence) -> Requests:
    """The requests in the window: prefill and decode spans paired by their shared number."""
    prefill = prefills(evidence)
    rows = evidence.all_steps if evidence.trains else evidence.counted
    decode = rows.of_phase("decode")
    asked, answered = (rows["writer"] * _MANY_INDICES + rows["index"] for rows in (prefill, decode))
    _, of_prefill, of_decode = np.intersect1d(asked, answered, return_indices=True)
    pairs = Requests(prefill.where(of_prefill), decode.where(of_decode))
    is_after = pairs.decode["start_ns"] >= pairs.prefill["end_ns"]
    if not len(pairs) or len(pairs) < len(decode) or not is_after.all():
        raise NotMeasurable(
            f"{len(prefill)} prefill and {len(decode)} decode spans are not pairs: a request is a"
            " prefill span and a later decode span with the same number"
        )
    return pairs


def generated(evidence: Evidence, decode: Steps) -> tuple[FloatArray, Basis, str]:
    """Return the tokens of each decode span, their basis and a note.

    If the server sends no usage, chunks are counted instead, and the note says so.
    """
    chunks_count = bool(evidence.marked("assumed"))
    if not (chunks_count and np.isnan(decode["tokens_real"]).all()):
        need_usage(evidence, decode)
    values = known_counts(decode, "tokens_real")
    if values is None:
        values = known_counts(decode, "tokens_computed")
    if values is not None:
        return values, evidence.steps_basis, ""
    chunks = known_counts(decode, "micro_steps")
    if chunks is None or not chunks_count:
        raise NotMeasurable(
            "the decode spans have no token count: pass tokens= to meter.phase('decode')"
        )
    return chunks, "assumed", f"; assumed: {_CHUNKS}"


def _clock(evidence: Evidence) -> str:
    details = evidence.marked("latency_clock")
    return f"; {details[-1]}" if details else ""


def _percentile(
    evidence: Evidence, values: FloatArray, q: float, what: str = "requests", per_request: float = 1
) -> tuple[float, str]:
    """Return the q-th percentile of values, `per_request` of each answered request, and a note.

    Failed requests and those in flight at the end have no value. The note gives the percentile if
    they were the slowest; if it would fall among them, raises NotMeasurable.
    """
    needed = math.ceil(100 / (100 - q)) if q > 50 else 1  # one request is its own median
    if len(values) < needed:
        raise NotMeasurable(f"{len(values)} {what}: a {q:.0f}th percentile needs {needed}")
    load = evidence.offered
    if load is None or load.answered == len(load):
        return percentile(values, q), ""
    without = len(load) - load.answered
    who = f"{without} of {len(load)} requests have no latency ({load.outcomes})"
    rank = q / 100 * (len(values) + without * per_request - 1)
    name = "median" if q == 50 else f"{q:.0f}th percentile"
    if rank > len(values) - 1:
        raise NotMeasurable(f"{who}: if they were the slowest, the {name} would fall among them")
    highest = float(np.interp(rank, np.arange(len(values)), np.sort(values)))
    share = f"{100 * without / len(load):.3g} %"
    note = f"; {who}, {share}: were they the slowest, it would be {duration(highest)}"
    return percentile(values, q), note


def _until_token(evidence: Evidence, waits_s: FloatArray, q: float, which: str) -> Reading:
    """A percentile of the times from the start of a request to its first or last token."""
    value, failures = _percentile(evidence, waits_s, q)
    note = f"of {number_of(len(waits_s), 'request')}, to the {which} token{_clock(evidence)}"
    return Reading(value, "s", evidence.steps_basis, note=note + failures)


def ttft_s(evidence: Evidence, q: float) -> Reading:
    """Time from the start of a request to its first token: a percentile over requests."""
    return _until_token(evidence, prefills(evidence).duration_s, q, "first")


def tpot_s(evidence: Evidence, q: float) -> Reading:
    """Time per output token after the first: a percentile over requests, one value per request."""
    decode = requests(evidence).decode
    tokens, basis, label = generated(evidence, decode)
    several = tokens > 1
    if not several.any():
        raise NotMeasurable("no request generated a second token")
    each_s = decode.duration_s[several] / (tokens[several] - 1)
    alone = int((~several).sum())
    left_out = f", without {alone} of a single token" if alone else ""
    asked = f"{number_of(len(each_s), 'request')}{left_out}"
    value, failures = _percentile(evidence, each_s, q)
    note = f"of {asked}: first to last token / (tokens - 1){label}{failures}"
    return Reading(value, "s", basis, note=note)


def itl_s(evidence: Evidence, q: float) -> Reading:
    """Inter-token latency: a percentile of the gaps between chunks of a stream."""
    gaps_s = _gaps_s(evidence)
    decode = requests(evidence).decode
    value, failures = _percentile(
        evidence, gaps_s, q, "gaps between chunks", len(gaps_s) / len(decode)
    )
    chunk, basis = _tokens_per_chunk(evidence, decode)
    note = f"of {number_of(len(gaps_s), 'gap')} between chunks{chunk}{failures}"
    return Reading(value, "s", basis, note=note)


def _tokens_per_chunk(evidence: Evidence, decode: Steps) -> tuple[str, Basis]:
    """The tokens per chunk for the note of ITL, and the basis; ITL itself needs no token count."""
    try:
        tokens, basis, label = generated(evidence, decode)
    except NotMeasurable as reason:
        return f"; tokens of a chunk are not known: {reason}", "measured"
    if label:
        return label, weakest("measured", basis)
    per_chunk = float(tokens.sum()) / float(decode["micro_steps"].sum())
    return f"; {per_chunk:.3g} tokens a chunk", "measured"


@cached_result
def _gaps_s(evidence: Evidence) -> FloatArray:
    """The gaps between chunks. Cached: there are as many as tokens."""
    window = evidence.span
    timed = [reported for reported in evidence.run.reported() if reported.name == "itl"]
    inside = (gap.value for gap in timed if window.start_ns <= gap.t_ns <= window.end_ns)
    gaps = np.fromiter(inside, dtype=np.float64)
    if timed and not len(gaps):
        raise NotMeasurable(f"{number_of(len(timed), 'gap')} between chunks, none in the window")
    if not timed:
        raise NotMeasurable(
            "no gaps between chunks were timed: `erg load` and integrations.generate time them"
        )
    return gaps


def e2e_s(evidence: Evidence, q: float) -> Reading:
    """Time from the start of a request to its last token: a percentile over requests."""
    return _until_token(evidence, requests(evidence).e2e_s, q, "last")


def _served(evidence: Evidence) -> Requests:
    """The answered requests. Raises NotMeasurable for a training run, whose window has none."""
    if evidence.trains:
        raise NotMeasurable("this run trains: its window is of training steps, not of requests")
    need_failures(evidence)
    return requests(evidence)


def _load(evidence: Evidence) -> Offered:
    """The requests that `erg load` offered."""
    if evidence.offered is None:
        raise NotMeasurable(_why_no_offers(evidence))
    return evidence.offered


def _why_no_offers(evidence: Evidence) -> str:
    """Why a run has no rows of offered requests."""
    if not evidence.marked(LOAD_MARK):
        return _NO_LOAD
    is_ended = evidence.has_work or failed_by_mark(evidence.run) is not None
    if is_ended and not has_rows(evidence.run):
        return "an older `erg load` made this run, which did not record offered requests"
    return f"the run is {evidence.run.status}: no request was answered or failed yet"


def _over_window(evidence: Evidence, amount: float, unit: str, basis: Basis, note: str) -> Reading:
    value = amount / evidence.window.duration_s
    return Reading(value, unit, basis, note=f"{note}; {evidence.window_note}")


def _answered(evidence: Evidence) -> int:
    """The number of completely answered requests; 0 if every request of `erg load` failed."""
    load = evidence.offered
    return len(_served(evidence)) if load is None else load.answered


def _basis(evidence: Evidence) -> Basis:
    """The basis of request counts; `erg load` counts requests itself."""
    return evidence.steps_basis if evidence.offered is None else "measured"


def requests_per_s(evidence: Evidence) -> Reading:
    """Completely answered requests per second of the window."""
    number = _answered(evidence)
    note = f"{number} answered whole"
    return _over_window(evidence, number, "requests/s", _basis(evidence), note)


def failed_per_s(evidence: Evidence) -> Reading:
    """Failed requests per second of the window."""
    number = _load(evidence).failed
    return _over_window(evidence, number, "requests/s", "measured", f"{number} failed")


def offered_per_s(evidence: Evidence) -> Reading:
    """The rate of offered requests: (number - 1) / time from the first offered to the last."""
    load = _load(evidence)
    lasted_s = float(np.ptp(load.offered_ns)) / NS_PER_S if len(load) else 0.0
    if not lasted_s:
        offers = number_of(len(load), "request")
        raise NotMeasurable(f"{offers} offered in 0 s: a rate needs two at different times")
    note = f"{len(load)} offered in {duration(lasted_s)}, first to last{_clock(evidence)}"
    return Reading((len(load) - 1) / lasted_s, "requests/s", "measured", note=note)


def output_tokens_per_s(evidence: Evidence) -> Reading:
    """Generated tokens per second of the window, prefill time included."""
    tokens, basis, label = generated(evidence, _served(evidence).decode)
    note = f"tokens of whole answers over the window, prefill included{label}"
    return _over_window(evidence, float(tokens.sum()), "tokens/s", basis, note)


def _good(evidence: Evidence) -> tuple[int, int, Basis, str]:
    """Return the number of requests within every limit, the number offered, basis and note."""
    declared = evidence.marked("slo")
    if not declared:
        raise NotMeasurable("no limits were declared: erg load --slo ttft=0.5,tpot=0.05")
    parts = (part.partition("=") for part in declared[-1].split(","))
    limits = {name: float(limit) for name, _, limit in parts}
    within = ", ".join(f"{name} {limit:g} s" for name, limit in limits.items())
    number, basis, label = 0, _basis(evidence), ""
    answered = _answered(evidence)
    if answered:
        pairs = _served(evidence)
        waits = {"ttft": pairs.prefill.duration_s, "e2e": pairs.e2e_s}
        if "tpot" in limits:
            tokens, basis, label = generated(evidence, pairs.decode)
            waits["tpot"] = pairs.decode.duration_s / np.maximum(tokens - 1, 1)
        number = int(np.all([waits[name] <= limits[name] for name in limits], axis=0).sum())
    offered = answered if evidence.offered is None else len(evidence.offered)
    note = f"{number} of {number_of(offered, 'request')} offered within {within}{label}"
    return number, offered, basis, note


def goodput_per_s(evidence: Evidence) -> Reading:
    """Requests within every declared limit, per second of the window."""
    number, _, basis, note = _good(evidence)
    return _over_window(evidence, number, "requests/s", basis, note)


def slo_attainment_frac(evidence: Evidence) -> Reading:
    """Share of all requests offered that were answered within every limit."""
    number, offered, basis, note = _good(evidence)
    _need_end(evidence)
    return Reading(number / offered, "frac", basis, note=f"{note}; {evidence.window_note}")


def _need_end(evidence: Evidence) -> None:
    """Raise NotMeasurable for a load whose end is not recorded: requests in flight are unknown."""
    if evidence.offered and not evidence.marked(END_MARK):
        raise NotMeasurable(
            f"the run is {evidence.run.status}: requests in flight are recorded when a load ends"
        )


def in_flight_mean(evidence: Evidence) -> Reading:
    """The mean number of requests in flight over the window (Little's law)."""
    load = evidence.offered
    if load is None:
        total_s = float(_served(evidence).e2e_s.sum())
        note = "sum of end to end / window"
        return _over_window(evidence, total_s, "requests", evidence.steps_basis, note)
    note = f"sum of the times from offered to settled / window; {evidence.window_note}"
    return Reading(load.in_flight_mean(evidence.window.outer), "requests", "measured", note=note)


def count(evidence: Evidence) -> Reading:
    """The number of completely answered requests."""
    load = evidence.offered
    number = len(prefills(evidence)) if load is None else load.answered
    return Reading(number, "requests", _basis(evidence), note=evidence.window_note)


def offered_count(evidence: Evidence) -> Reading:
    """The number of requests offered after the warm-up."""
    load = _load(evidence)
    _need_end(evidence)
    return Reading(len(load), "requests", "measured", note=load.outcomes)


def failed(evidence: Evidence) -> Reading:
    """The number of requests after the warm-up without a complete answer."""
    load = evidence.offered
    if load is not None:
        kinds = ", ".join(f"{kind} ({number})" for kind, number in load.failures.most_common())
        return Reading(load.failed, "requests", "measured", note=kinds or "none")
    by_mark = failed_by_mark(evidence.run)
    if by_mark is None:
        raise NotMeasurable(_why_no_offers(evidence))
    return Reading(float(by_mark[0]), "requests", "measured", note=by_mark[1] or "none")


def failed_frac(evidence: Evidence) -> Reading:
    """Share of the settled requests that failed."""
    load = _load(evidence)
    evidence.window  # noqa: B018  or the reason why none was settled
    note = f"{load.failed} of {load.settled} settled; {failed(evidence).note}"
    return Reading(load.failed / load.settled, "frac", "measured", note=note)


def drain_s(evidence: Evidence) -> Reading:
    """Time from the last offered request to the last settled one; no new requests in it."""
    load = _load(evidence)
    _need_end(evidence)
    if load.unsettled:
        raise NotMeasurable(
            f"{number_of(load.unsettled, 'request')} in flight when the load was interrupted: it"
            " did not drain"
        )
    drained_s = (evidence.window.end_ns - int(load.offered_ns.max())) / NS_PER_S
    note = f"last offered to last settled, part of the window; {evidence.window_note}"
    return Reading(drained_s, "s", "measured", note=note)


def prompt_tokens(evidence: Evidence) -> Reading:
    """Mean length of a prompt."""
    rows = prefills(evidence)
    need_usage(evidence, rows)
    values = known_counts(rows, "tokens_real")
    if values is None:
        raise NotMeasurable(
            "the prefill spans have no token count: pass tokens= to meter.phase('prefill')"
        )
    return _mean_length(values, evidence.steps_basis)


def generated_tokens(evidence: Evidence) -> Reading:
    """Mean length of an answer."""
    return _mean_length(*generated(evidence, requests(evidence).decode))


def _mean_length(tokens: FloatArray, basis: Basis, label: str = "") -> Reading:
    many = number_of(len(tokens), "request")
    note = f"{tokens.min():.0f} to {tokens.max():.0f}, of {many}{label}"
    return Reading(float(tokens.mean()), "tokens/request", basis, note=note)


def _energy_over(evidence: Evidence, amount: float, unit: str, basis: Basis, note: str) -> Reading:
    energy, load = run_j(evidence), evidence.offered
    if load is not None and load.answered < len(load):
        note += f", that of {len(load) - load.answered} without a whole answer included"
    basis, note = weakest(energy.basis, basis), f"{note}; {energy.note}"
    return mapped(energy, lambda joules: joules / amount, unit=unit, basis=basis, note=note)


def joules_per_generated_token(evidence: Evidence) -> Reading:
    """All energy of the window, prefill included, over the tokens of complete answers."""
    tokens, basis, label = generated(evidence, _served(evidence).decode)
    note = f"all energy of the window over tokens of whole answers{label}"
    return _energy_over(evidence, float(tokens.sum()), "J/token", basis, note)


def joules_per_request(evidence: Evidence) -> Reading:
    """All energy of the window over the requests answered in it."""
    answered = len(_served(evidence))
    note = f"all energy of the window over {number_of(answered, 'answer')}"
    return _energy_over(evidence, answered, "J/request", evidence.steps_basis, note)


def client_cpu_frac(evidence: Evidence) -> Reading:
    """Share of one core that sending and receiving took: near 1, the client is the bottleneck."""
    costs = evidence.marked(END_MARK)
    if not costs:
        if not evidence.marked(LOAD_MARK):
            raise NotMeasurable(_NO_LOAD)
        raise NotMeasurable(
            f"the run is {evidence.run.status}: the client's CPU is recorded when a load ends"
        )
    cpu_frac, lag_s = (float(part.partition("=")[2]) for part in costs[-1].split(","))
    note = f"the event loop woke up to {lag_s * 1e3:.3g} ms late (p99)"
    return Reading(cpu_frac, "frac", "measured", note=note)


_KINDS = {
    "ttft": (ttft_s, "time to first token", "first token - start of the request", "requests"),
    "tpot": (tpot_s, "time per output token", "(last - first token) / (tokens - 1) of a request",
             "requests"),
    "itl": (itl_s, "inter-token latency", "chunk - chunk before it", "streamed requests"),
    "e2e": (e2e_s, "end-to-end latency", "last token - start of the request", "requests"),
}  # fmt: skip
_QUANTILES = {"median": 50.0, "p95": 95.0, "p99": 99.0}


_LATENCY_VIEWS = {
    ("ttft", "median"): "short card 20 as TTFT; card 300 in latency; report 50; model card 50;"
    " load 30 as TTFT\nmedian",
    ("ttft", "p95"): "card 310 in latency; load 40 as TTFT\np95",
    ("tpot", "median"): "short card 30 as TPOT; card 320 in latency; report 60;"
    " load 50 as TPOT\nmedian",
    ("tpot", "p95"): "card 330 in latency; load 60 as TPOT\np95",
    ("e2e", "median"): "card 340 in latency; load 70 as whole\nmedian",
}


def _latency(kind: str, name: str, q: float) -> Metric:
    """The metric of a percentile of one kind of latency."""
    compute, title, formula, needs = _KINDS[kind]
    which = "median" if q == 50 else f"{q:.0f}th percentile"
    theirs = f"{name}_{'e2el' if kind == 'e2e' else kind}_ms"
    return Metric(
        f"latency.{kind}_{name}_s",
        f"{title}, {which}",
        "s",
        "lower",
        f"{which} of {formula}",
        (needs,),
        partial(compute, q=q),
        aliases=vllm(theirs, "ms", f"{title}, {which}", 1e3),
        views=_LATENCY_VIEWS.get((kind, name), ""),
    )


_LOAD = ("a run of erg load",)
_REQUESTS, _WITH_TOKENS = ("requests",), ("requests with tokens",)
_WITH_LIMITS = ("requests", "limits (--slo)")
_ENERGY = "an energy counter or power readings"

METRICS = [
    *(_latency(kind, name, q) for kind in _KINDS for name, q in _QUANTILES.items()),
    Metric("throughput.requests_per_s", "requests/s", "requests/s", "higher",
           "requests answered whole / window (first offered to last settled)", _REQUESTS,
           requests_per_s, views="card 150 in throughput; load 10 as ok/s",
           aliases=vllm("request_throughput", "requests/s", "completed requests / time")),
    Metric("throughput.failed_requests_per_s", "requests failed/s", "requests/s", "lower",
           "requests failed / window", _LOAD, failed_per_s,
           views="load notes 20 in failures as failed"),
    Metric("throughput.offered_requests_per_s", "requests offered/s", "requests/s", "neither",
           "(requests offered - 1) / (last offered - first offered)", _LOAD, offered_per_s,
           views="load notes 10 in open as offered"),
    Metric("throughput.output_tokens_per_s", "tokens/s out", "tokens/s", "higher",
           "generated tokens of whole answers / window, prefill included", _WITH_TOKENS,
           output_tokens_per_s,
           aliases=vllm("output_throughput", "tokens/s", "output tokens / time"),
           views="short card 95 as tokens/s out;"
           " card 140 in throughput; report 30; model card 40;"
                           " load 20 as tokens/s\nout"),
    Metric("throughput.goodput_per_s", "goodput", "requests/s", "higher",
           "requests within every declared limit / window", _WITH_LIMITS, goodput_per_s,
           aliases=vllm("request_goodput", "requests/s", "requests within the limits / time"),
           views="load notes 40 as goodput"),
    Metric("requests.in_flight_mean", "requests in flight", "requests", "neither",
           "sum of the times from offered to settled / window", _REQUESTS, in_flight_mean),
    Metric("requests.count", "requests", "requests", "neither", "requests answered whole",
           _REQUESTS, count),
    Metric("requests.failed", "requests failed", "requests", "lower",
           "requests without a whole answer", _LOAD, failed,
           views="card 160 in throughput"),
    Metric("requests.failed_frac", "share of requests failed", "frac", "lower",
           "requests failed / requests answered or failed", _LOAD, failed_frac, upper_bound=1.0),
    Metric("requests.offered", "requests offered", "requests", "neither",
           "requests answered, failed or in flight at the end", _LOAD, offered_count),
    Metric("requests.slo_attainment_frac", "SLO attainment", "frac", "higher",
           "requests within every declared limit / requests offered", _WITH_LIMITS,
           slo_attainment_frac, upper_bound=1.0,
           views="load notes 50 as SLO attainment"),
    Metric("requests.drain_s", "drain time", "s", "neither",
           "last request settled - last request offered", _LOAD, drain_s,
           views="load notes 30 in failures as drain time"),
    Metric("requests.prompt_tokens", "tokens of a prompt", "tokens/request", "neither",
           "mean over requests", _WITH_TOKENS, prompt_tokens),
    Metric("requests.generated_tokens", "tokens of an answer", "tokens/request", "neither",
           "mean over requests", _WITH_TOKENS, generated_tokens),
    Metric("energy.joules_per_generated_token", "energy per generated token", "J/token", "lower",
           "energy.run_j / generated tokens of whole answers", (_ENERGY, *_WITH_TOKENS),
           joules_per_generated_token,
           views="card 630 in energy; model card 140; load notes 60 as energy"),
    Metric("energy.joules_per_request", "energy per request", "J/request", "lower",
           "energy.run_j / requests.count", (_ENERGY, *_REQUESTS), joules_per_request),
    Metric("overhead.client_cpu_frac", "load client's CPU", "frac", "lower",
           "CPU time of the thread that sends and receives / time", _LOAD, client_cpu_frac,
           upper_bound=1.0),
]  # fmt: skip
