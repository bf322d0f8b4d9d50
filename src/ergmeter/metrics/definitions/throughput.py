"""Tokens, samples and steps per second over the window.

A rate is a sum over a time, never a mean of rates: nine 60 ms steps and one of 1.2 s make 5 641
tokens/s, and the mean of their rates is 2.7 times that. Sum and time are of the same window, in
wall-clock time. Gaps between steps count (`evidence.window` defines the cuts).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.catalog import Metric, efficientllm, over_whole_run, sft_play
from ergmeter.metrics.definitions.tokens import (
    WORDS,
    counted_basis,
    declared_amounts,
    guess_note,
    label_of,
    need_rows,
    reported_counts,
    steps_in,
    steps_of,
    tokens,
    why_not_counted,
)
from ergmeter.metrics.evidence import ranks
from ergmeter.metrics.evidence.evidence import Evidence
from ergmeter.metrics.evidence.requests import why_not_timed
from ergmeter.metrics.evidence.samples import sampled
from ergmeter.metrics.evidence.steps import interval_in_order
from ergmeter.records import Basis, FloatArray, Missing, Reading, Reported, present
from ergmeter.stats.intervals import mean_rate
from ergmeter.units import number_of

_NOT_TRAINING = ("eval", "val", "test", "predict")  # prefixes of rates that are not of training


def samples(evidence: Evidence) -> tuple[FloatArray, str, Basis]:
    """Return the samples of each counted row, a note on the count, and its basis."""
    need_rows(evidence)
    rows = evidence.counted
    values = None
    if not ranks.is_declared(evidence, "samples"):
        values = reported_counts(evidence, rows, "samples")
    if values is not None:
        whose = ranks.missing_ranks_note(evidence, "samples") or "all ranks"
        note = f"{whose}{guess_note(evidence, 'samples')}"
        return values, note, counted_basis(evidence, rows, "samples")
    if evidence.settings.samples_per_step is not None:
        amounts = declared_amounts(rows, evidence.settings.samples_per_step)
        return amounts, "samples per step as declared", "assumed"
    if evidence.from_output:
        way = "the output names no samples: print samples=.."
    else:
        way = why_not_counted(evidence, "samples", "samples")
    raise NotMeasurable(f"{way}, or give --samples-per-step")


def need_speed(evidence: Evidence) -> None:
    """Raise NotMeasurable if the run's step times do not give its speed; `no_speed` says why."""
    if evidence.run.no_speed:
        raise NotMeasurable(evidence.run.no_speed)


def rate(
    evidence: Evidence, amounts: FloatArray, unit: str, basis: Basis, note: str, *, per: float = 1.0
) -> Reading:
    """Amounts of the counted rows over the window, divided by `per` (devices, parameters)."""
    need_speed(evidence)
    window = evidence.window
    value = float(amounts.sum()) / window.duration_s / per
    interval = evidence.timed.interval(amounts) if not evidence.is_whole_run else None
    low, high = (bound / per for bound in interval) if interval else (None, None)
    if low is not None and window.uncertain_s:  # the device may have trained in these cuts
        low *= window.duration_s / (window.duration_s + window.uncertain_s)
    return Reading(value, unit, basis, low, high, f"{note}; {evidence.window_note}")


def _reported(
    evidence: Evidence, unit: str, reason: NotMeasurable, *, also: str | None = None
) -> Reading:
    """Return the rate that the program printed, if none was measured; else raise `reason`.

    A rate printed many times is reduced to its harmonic mean: work over time, if each was printed
    after equal work. If the run was given a rate that replaces its steps, that rate is returned.
    """
    if why := evidence.run.no_speed:
        given = {} if evidence.is_whole_run else evidence.run.analysis
        return present(given.get(f"throughput.{unit.replace('/', '_per_')}", Missing(why)))
    rates = [reported for reported in evidence.run.reported() if reported.unit in (unit, also)]
    rates = [rate for rate in rates if not rate.name.startswith(_NOT_TRAINING) and rate.value > 0]
    if not rates:
        raise reason
    if evidence.is_whole_run:
        raise NotMeasurable(f"{reason}; printed rates are of steps, not of the whole run")
    name = rates[-1].name
    own = [rate for rate in rates if rate.name == name]
    if name.startswith("train_"):  # the Hugging Face Trainer's, over all so far
        own, where = own[-1:], ""
    else:
        own, where = _of_window(evidence, own)
    if not own:
        raise reason
    if len(own) == 1:
        value, whose = own[0].value, f"the program's own last {name!r}"
    else:
        value = mean_rate(np.array([rate.value for rate in own]))
        whose = f"harmonic mean of the {len(own)} {name!r} that the program printed, {where}"
    return Reading(value, unit, "reported", note=f"{whose}; not measured here: {reason}")


def _of_window(evidence: Evidence, rates: list[Reported]) -> tuple[list[Reported], str]:
    """Return the printed rates of the counted steps, and which those are, as text.

    A step's rate is printed at its end. Without steps, all but the first, which includes warm-up.
    """
    if not evidence.has_work:
        return rates[len(rates) > 1 :], "the first left out"
    ends_ns = evidence.counted.lowest("end_ns")
    return [rate for rate in rates if rate.t_ns >= ends_ns], "in the counted steps"


def tokens_per_s(evidence: Evidence) -> Reading:
    """Tokens per second of the window, all ranks."""
    try:
        need_speed(evidence)
        amounts, label, basis = tokens(evidence)
    except NotMeasurable as reason:
        return _reported(evidence, "tokens/s", reason)
    return rate(evidence, amounts, "tokens/s", basis, label_of(evidence, label))


def _of_column(evidence: Evidence, column: str, argument: str) -> Reading:
    """Tokens per second by one count: real, computed or loss-bearing tokens."""
    label, values = WORDS[column], reported_counts(evidence, evidence.counted, column)
    if values is None:
        raise NotMeasurable(why_not_counted(evidence, label, argument))
    if column == "tokens_computed":
        as_printed = "tokens as printed, which may or may not count padding"
        label = as_printed if evidence.from_output else "padding included"
    basis = counted_basis(evidence, evidence.counted, "tokens")
    whose = ranks.missing_ranks_note(evidence)
    note = f"{label}{guess_note(evidence, 'tokens')}{f', {whose}' if whose else ''}"
    return rate(evidence, values, "tokens/s", basis, note)


def tokens_per_s_per_device(evidence: Evidence) -> Reading:
    """Tokens per second of the window, per accelerator."""
    try:
        devices = len(sampled(evidence, "gpu"))
        ranks.need_all(evidence)
        ranks.need_devices(evidence)
        amounts, label, basis = tokens(evidence)
    except NotMeasurable as reason:
        return replace(_reported(evidence, "tokens/s/device", reason), unit="tokens/s")
    note = f"{label_of(evidence, label)}, over {number_of(devices, 'accelerator')}"
    return rate(evidence, amounts, "tokens/s", basis, note, per=devices)


def samples_per_s(evidence: Evidence) -> Reading:
    """Samples per second of the window, all ranks."""
    try:
        need_speed(evidence)
        amounts, note, basis = samples(evidence)
    except NotMeasurable as reason:
        return _reported(evidence, "samples/s", reason, also="sequences/s")
    return rate(evidence, amounts, "samples/s", basis, note)


def steps_per_s(evidence: Evidence) -> Reading:
    """Optimizer steps per second, measured or as printed. Steps are one rank's, not a sum."""
    try:
        return pace(evidence)
    except NotMeasurable as reason:
        return _reported(evidence, "steps/s", reason)


def pace(evidence: Evidence) -> Reading:
    """Measured optimizer steps per second of one rank; step time is the inverse."""
    steps = steps_of(evidence)
    amounts = steps_in(evidence.counted)
    per = float(amounts.sum()) / steps
    return rate(evidence, amounts, "steps/s", evidence.steps_basis, "optimizer steps", per=per)


def _per_parameter_per_s(evidence: Evidence, what: str) -> Reading:
    """EfficientLLM's TT and ST: tokens or samples over time, for each parameter of the model."""
    ranks.need_all(evidence, what)
    amounts, note, basis = tokens(evidence) if what == "tokens" else samples(evidence)
    note = label_of(evidence, note) if what == "tokens" else note
    parameters = evidence.settings.parameters
    if parameters is None:
        raise NotMeasurable(
            "the number of parameters was not declared: --parameters, or Meter(parameters=...)"
        )
    note = f"{note}, {parameters} parameters"
    return rate(evidence, amounts, f"{what}/s/param", basis, note, per=parameters)


def generated_tokens_per_s(evidence: Evidence) -> Reading:
    """EfficientLLM's IT: tokens of the decode spans over the time of those spans."""
    rows = evidence.all_steps if evidence.trains else evidence.counted
    rows = rows.of_phase("decode")
    if not len(rows):
        raise NotMeasurable(f"no decode spans were recorded: {why_not_timed(evidence)}")
    rows = rows.where(ranks.counting(evidence, rows, "tokens_computed"))
    amounts, label, basis = tokens(evidence, rows)
    if not all(lane.busy_s for lane in rows.lanes):
        raise NotMeasurable("decode spans of 0 s: each answer had one token, or came in one piece")
    value = sum(float(tokens(evidence, lane)[0].sum()) / lane.busy_s for lane in rows.lanes)
    # The interval of one span at a time, scaled: spans of several threads overlap.
    interval = interval_in_order(amounts, rows.duration_s)
    scale = value / float(amounts.sum() / rows.duration_s.sum())
    low, high = (bound * scale for bound in interval) if interval else (None, None)
    note = f"{label_of(evidence, label)} over the time of {len(rows)} decode spans, ranks added up"
    return Reading(value, "tokens/s", basis, low, high, note)


_TT = "token throughput: tokens / parameters / time; does not grow with the length of the run"
_speed = partial(Metric, unit="tokens/s", direction="higher", quantity="speed")

METRICS = [
    _speed(
        "throughput.tokens_per_s",
        "tokens/s",
        formula="sum of tokens of the counted steps, all ranks / window; real tokens where known",
        needs=("steps with tokens",),
        compute=tokens_per_s,
        noun="speed",
        alternatives=("throughput.real_tokens_per_s", "throughput.computed_tokens_per_s"),
        column="tokens_per_s",
        rule="tokens_per_s",
        aliases=sft_play(
            "tok_per_s",
            "tokens/s",
            "tokens after the warm-up over the time after it; the original divided all tokens by"
            " that time",
        ),
        views="short card 90 as tokens/s expected;"
        " card 100 in throughput expected; report 10 expected; citation 10;"
        " model card 10 expected; list 10 as tokens/s; watch 10 as tokens/s; recent 10;"
        " so far 10; serve list 10; serve live 10; serve run 10; serve ledger 10; console 20;"
        " ledger notes 10 as tok_per_s; compare 10 as tokens/s; pareto 10; bench compare 10;"
        " bench report 10 expected; bench matrix 10 in open",
    ),
    *(
        _speed(
            f"throughput.{name}_tokens_per_s",
            title,
            formula=f"sum of tokens_{name} / window",
            needs=(f"steps with {argument}",),
            compute=partial(_of_column, column=f"tokens_{name}", argument=argument),
            column=f"{name}_tokens_per_s" if name != "loss" else "",
            rule=f"{name}_tokens_per_s" if name != "loss" else "",
        )
        for name, title, argument in (
            ("computed", "tokens/s computed", "tokens"),
            ("real", "tokens/s real", "tokens_real"),
            ("loss", "tokens/s with loss", "tokens_loss"),
        )
    ),
    _speed(
        "throughput.tokens_per_s_per_device",
        "tokens/s per device",
        formula="throughput.tokens_per_s / accelerators",
        needs=("steps with tokens", "an accelerator"),
        compute=tokens_per_s_per_device,
        alternatives=(
            "throughput.real_tokens_per_s_per_device",
            "throughput.computed_tokens_per_s_per_device",
        ),
        column="tokens_per_s_per_device",
        rule="tokens_per_s_per_device",
        rule_aliases=("train_tokens_per_second",),
        views="card 120 in throughput; model card 30;"
        " bench report 30 as /device expected; bench matrix 20",
    ),
    _speed(
        "throughput.samples_per_s",
        "samples/s",
        unit="samples/s",
        formula="sum of samples of the counted steps, all ranks / window",
        needs=("steps with samples",),
        compute=samples_per_s,
        column="samples_per_s",
        rule="samples_per_s",
        rule_aliases=("train_samples_per_second",),
        views="card 130 in throughput; bench compare 20; analyze 30 as throughput;"
        " analyze json 20 in sequences/s as throughput_seq_per_sec; analyze compare 20;"
        " bench report 40 expected; bench matrix 30",
    ),
    _speed(
        "throughput.steps_per_s",
        "steps/s",
        unit="steps/s",
        formula="optimizer steps of one rank / window",
        needs=("steps",),
        compute=steps_per_s,
        column="steps_per_s",
        rule="steps_per_s",
        views="card 170 in throughput",
    ),
    *(
        _speed(
            f"throughput.{what}_per_parameter_per_s",
            f"{what}/s per parameter",
            unit=f"{what}/s/param",
            formula=f"throughput.{what}_per_s / parameters",
            needs=(f"steps with {what}", "parameters"),
            compute=partial(_per_parameter_per_s, what=what),
            aliases=efficientllm(name, f"{what}/param/s", definition),
        )
        for what, name, definition in (
            ("tokens", "TT", _TT),
            ("samples", "ST", "sample throughput: samples / parameters / time"),
        )
    ),
    Metric(
        "throughput.generated_tokens_per_s",
        "tokens/s generated",
        "tokens/s",
        "higher",
        "sum of tokens of decode spans / their time",
        ("decode spans with tokens",),
        generated_tokens_per_s,
        aliases=efficientllm("IT", "tokens/s", "inference throughput: tokens generated / time"),
    ),
]

METRICS += over_whole_run(
    METRICS,
    "throughput.tokens_per_s",
    is_in_bench=True,
    views="short card 90 in whole run as tokens/s;"
    " card 110 in throughput; report 20; model card 20 in the whole run;"
    " watch 80 as whole run; so far 60; console 90; compare 20; bench report 20 as whole run;"
    " bench matrix 60",
)
METRICS += over_whole_run(METRICS, "throughput.samples_per_s")
