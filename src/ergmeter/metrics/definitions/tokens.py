"""Tokens (computed, real, loss-bearing) and optimizer steps of the window.

A padded batch has more positions than tokens: tools that count one or the other differ by a quarter
on the same run. So each count has its name, the real one is used where it is known, and the note
says which it was. A program's output seldom says: its count is called "tokens as printed".
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

import numpy as np

from ergmeter.errors import NotMeasurable
from ergmeter.metrics.catalog import Metric, over_whole_run, sft_play
from ergmeter.metrics.evidence.evidence import Evidence
from ergmeter.metrics.evidence.ranks import (
    counting,
    is_declared,
    missing_ranks_note,
    shared_tokens_note,
)
from ergmeter.metrics.evidence.requests import need_failures
from ergmeter.metrics.evidence.steps import Steps
from ergmeter.records import PHASES, Basis, FloatArray, Missing, Reading, or_missing, or_none
from ergmeter.runlog.format import dropped_steps
from ergmeter.units import number_of

# Printed counts. The tokens of a line `step=20 tokens=4096` that comes every ten steps may be of
# one step or of all ten. The importer guesses and writes a mark; where a line stands for several
# steps, the count is "assumed". Where each line is one step both readings agree, and nothing is
# assumed.

# The beginning of importers' remarks on a count: its printed name, then how it was interpreted.
_GUESS = re.compile(r"(?P<name>\S+)= (?P<made>read as|taken times|fell from)")
_OF_SAMPLES = ("sample", "batch_size")
# Lines that arrived together are also one row of several steps, but seldom equally many.
_REGULAR_FRAC = 0.8


def guessed(evidence: Evidence, rows: Steps, what: str) -> str:
    """Assumptions about the printed count of "tokens" or "samples" (`what`); "" if none."""
    if not evidence.from_output:
        return ""
    guesses = []
    for detail in evidence.marked("assumed"):
        match = _GUESS.match(detail)
        if match and any(part in match["name"] for part in _OF_SAMPLES) == (what == "samples"):
            guesses.append((match["made"], detail))
    # A count that fell is uncertain, however many steps its lines cover.
    if not any(made == "fell from" for made, _ in guesses) and not _stand_for_several(rows):
        return ""
    return "; ".join(dict.fromkeys(detail for _, detail in guesses))


def guess_note(evidence: Evidence, what: str) -> str:
    """For the end of a note: assumptions about the counted "tokens" or "samples"."""
    guess = guessed(evidence, evidence.counted, what)
    return f"; assumed: {guess}" if guess else ""


def _stand_for_several(rows: Steps) -> bool:
    """True if printed lines cover several steps each, or an unknown number."""
    steps = rows["steps"]
    if np.isnan(steps).any() or steps.min() > 1:
        return True
    strides, times = np.unique(steps, return_counts=True)
    usual = strides[np.argmax(times)]
    return bool(usual > 1 and (steps % usual == 0).mean() >= _REGULAR_FRAC)


WORDS = {
    "tokens_real": "real tokens",
    "tokens_computed": "computed tokens",
    "tokens_loss": "loss-bearing tokens",
    "samples": "samples",
    "micro_steps": "chunks",
}


def known_counts(rows: Steps, column: str) -> FloatArray | None:
    """A column if every row has it; None if no row has it. NotMeasurable if only some have it."""
    values = rows[column]
    absent, total = int(np.isnan(values).sum()), len(values)
    if absent == total:
        return None
    if absent and column == "steps":
        raise NotMeasurable(
            f"{absent} of {total} printed lines do not state how many steps they cover"
        )
    if absent:
        raise NotMeasurable(f"{absent} of {total} steps have no count of {WORDS[column]}")
    return values


def reported_counts(evidence: Evidence, rows: Steps, column: str) -> FloatArray | None:
    """Tokens or samples of each row; 0 in rows of ranks that share another rank's tokens."""
    need_rows(evidence)
    counts = counting(evidence, rows, column)
    if known_counts(rows.where(counts), column) is None:
        return None
    return np.where(counts, rows[column], 0.0)


def tokens(evidence: Evidence, rows: Steps | None = None) -> tuple[FloatArray, str, Basis]:
    """Return tokens of each row, the kind of count ("real", "computed", ...) and its basis.

    Real tokens are preferred. `rows` are the counted rows by default.
    """
    need_rows(evidence)
    rows = evidence.counted if rows is None else rows
    if not evidence.trains:
        need_usage(evidence, rows)
    reasons = []
    declared = evidence.settings.tokens_per_step
    columns = (("tokens_real", "real"), ("tokens_computed", "computed"))
    for column, label in () if is_declared(evidence) else columns:
        values = or_missing(reported_counts, evidence, rows, column)
        if isinstance(values, Missing):
            reasons.append(values.reason)
        elif values is not None and not values.any():
            reasons.append(f"the steps count 0 {label} tokens")
        elif values is not None:
            is_printed = label == "computed" and evidence.from_output
            basis = counted_basis(evidence, rows, "tokens")
            return values, "printed" if is_printed else label, basis
    if declared is not None:
        return declared_amounts(rows, declared), "declared", "assumed"
    raise NotMeasurable("; ".join(reasons) or _no_tokens(evidence))


def declared_amounts(rows: Steps, per_step: float) -> FloatArray:
    """Spread an amount that is declared per step of all ranks over rows."""
    return steps_in(rows) * (per_step / len(rows.lanes))


def need_usage(evidence: Evidence, rows: Steps) -> None:
    """Raises NotMeasurable if some of the requests have no token count."""
    for phase, what in (("decode", "answer"), ("prefill", "prompt")):
        own = rows.of_phase(phase)
        without = int((np.isnan(own["tokens_real"]) & np.isnan(own["tokens_computed"])).sum())
        if 0 < without < len(own) or (without and evidence.offered):
            of = f"{without} of {number_of(len(own), what)}"
            if evidence.offered is None:
                raise NotMeasurable(f"{of} have no token count")
            raise NotMeasurable(f"the server sent no token count (usage) above 0 for {of}")


def _no_tokens(evidence: Evidence) -> str:
    if not evidence.trains:
        return "the requests have no token count: pass tokens= to meter.phase"
    work = evidence.flops[0] if evidence.flops else None
    if work is not None and work.samples_per_step and not work.tokens_per_step:
        return "the model is called without token ids: throughput.samples_per_s has its rate"
    if not evidence.from_output:
        return f"{why_not_counted(evidence, 'tokens', 'tokens')}, or give --tokens-per-step"
    return (
        'the output prints no tokens: print tokens=.., set include_num_input_tokens_seen="all" in'
        " TrainingArguments, or give --tokens-per-step"
    )


def why_not_counted(evidence: Evidence, what: str, argument: str) -> str:
    """Why no step has a count of `what`, and the argument of meter.step that provides it."""
    why = evidence.marked("tokens_not_counted")
    if why and "token" in what:
        return f"the integration did not count {what}: {why[-1]}"
    if evidence.from_output:
        return f"the output prints no {what}; a Meter counts them"
    if any("training" in writer.header for writer in evidence.run.writers):
        return f"the integration could not count {what} from the model's inputs"
    return f"the steps have no count of {what}: pass {argument}= to meter.step"


def counted_basis(evidence: Evidence, rows: Steps, what: str) -> Basis:
    """The basis of the "tokens" or "samples" of these rows."""
    return "assumed" if guessed(evidence, rows, what) else evidence.steps_basis


def steps_in(rows: Steps) -> FloatArray:
    """Optimizer steps that each row covers."""
    values = known_counts(rows, "steps")
    if values is None:
        raise NotMeasurable(
            "the output does not state how many steps a printed line covers; leave a Trainer's"
            " progress bar on (disable_tqdm=False), or print step=.. in each line"
        )
    return values


def need_rows(evidence: Evidence) -> None:
    """Raises NotMeasurable if steps of the window were dropped."""
    need_failures(evidence)
    for dropped in dropped_steps(evidence.run):
        window = evidence.window
        if dropped.start_ns < window.end_ns and dropped.end_ns > window.start_ns:
            raise NotMeasurable(f"part of the record is missing: {dropped}")


def need_all_rows(evidence: Evidence) -> None:
    """Raises NotMeasurable if steps or spans of the run were dropped."""
    for dropped in dropped_steps(evidence.run):
        raise NotMeasurable(f"part of the record is missing: {dropped}")


def steps_of(evidence: Evidence) -> float:
    """The number of optimizer steps in the window, of the rank with the most."""
    if not evidence.trains and len(evidence.all_steps):
        raise NotMeasurable(_no_training_steps(evidence))
    need_rows(evidence)
    return max(float(steps_in(lane).sum()) for lane in evidence.counted.lanes)


def steps_made(evidence: Evidence) -> float:
    """The number of optimizer steps in the run, warm-up included, of the rank with the most."""
    lanes = evidence.work.lanes  # or the reason why there are none
    if not evidence.trains:
        raise NotMeasurable(_no_training_steps(evidence))
    need_all_rows(evidence)
    return max(float(steps_in(lane).sum()) for lane in lanes)


def _no_training_steps(evidence: Evidence) -> str:
    phases = [phase for phase in PHASES if len(evidence.all_steps.of_phase(phase))]
    return f"no training steps: the run has only {' and '.join(phases)} spans"


def steps_dropped(evidence: Evidence) -> Reading:
    """The number of training steps that were made but not recorded, all ranks, whole run."""
    every = list(dropped_steps(evidence.run))
    if not every and evidence.from_output:
        evidence.work  # noqa: B018  or the reason why there are no steps
        raise NotMeasurable("printed lines do not show whether steps are missing; a Meter does")
    note = "; ".join(map(str, every)) or "every step that was made is in the record"
    return Reading(sum(dropped.steps for dropped in every), "steps", "measured", note=note)


WHICH_TOKENS = {
    "real": "real tokens",
    "computed": "computed tokens (padding included)",
    "printed": "tokens as printed",
    "declared": "tokens per step as declared",
}


def label_of(evidence: Evidence, label: str) -> str:
    """For a note: which tokens are counted, and of which ranks."""
    ranks = len(evidence.counted.lanes)
    whose, guess = "", ""
    if label != "declared":
        whose = missing_ranks_note(evidence) or shared_tokens_note(evidence)
        guess = guess_note(evidence, "tokens")
    whose = whose or (f"all {ranks} ranks" if ranks > 1 else "")
    return f"{WHICH_TOKENS[label]}{f', {whose}' if whose else ''}{guess}"


def total_tokens(evidence: Evidence) -> Reading:
    """Tokens in the window."""
    amounts, label, basis = tokens(evidence)
    note = f"{label_of(evidence, label)}; {evidence.window_note}"
    return Reading(float(amounts.sum()), "tokens", basis, note=note)


def tokens_per_step(evidence: Evidence) -> Reading:
    """Tokens of one optimizer step, over all ranks."""
    amounts, label, basis = tokens(evidence)
    value = float(amounts.sum()) / steps_of(evidence)
    return Reading(value, "tokens/step", basis, note=label_of(evidence, label))


def padding_frac(evidence: Evidence) -> Reading:
    """Share of the computed tokens that were padding."""
    real, computed = _real_and_computed(evidence)
    if real is None or computed is None:
        lacking = "tokens_real" if real is None else "tokens_computed"
        argument = "tokens_real" if real is None else "tokens"
        raise NotMeasurable(why_not_counted(evidence, WORDS[lacking], argument))
    value = 1 - float(real.sum()) / float(computed.sum())
    return Reading(value, "frac", evidence.steps_basis, note=evidence.window_note)


def positions_per_token(evidence: Evidence) -> float:
    """Computed positions per real token; 1 if padding is unknown."""
    real, computed = or_none(_real_and_computed, evidence) or (None, None)
    if real is None or computed is None or not real.sum():
        return 1.0
    return float(computed.sum()) / float(real.sum())


def _real_and_computed(evidence: Evidence) -> tuple[FloatArray | None, FloatArray | None]:
    rows = evidence.counted
    real = reported_counts(evidence, rows, "tokens_real")
    return real, reported_counts(evidence, rows, "tokens_computed")


def steps(evidence: Evidence) -> Reading:
    """Optimizer steps in the window, of one rank."""
    return Reading(steps_of(evidence), "steps", evidence.steps_basis, note=evidence.window_note)


def generated(evidence: Evidence) -> Reading:
    """Tokens that the trained model generated between its steps, as in reinforcement learning."""
    window = evidence.window
    counts = [
        reported.value
        for reported in evidence.run.reported()
        if reported.name == "generated_tokens" and window.contains(np.array(reported.t_ns))
    ]
    if not counts:
        raise NotMeasurable("no call of `generate` was seen in the window")
    calls = f"{len(counts)} calls of generate, up to each end of text"
    return Reading(sum(counts), "tokens", "measured", note=f"{calls}; {evidence.window_note}")


_of_tokens = partial(Metric, unit="tokens", direction="neither", needs=("steps with tokens",))

METRICS = [
    _of_tokens(
        "tokens.total",
        "tokens",
        formula="sum of tokens of the counted steps; of ranks that share their tokens (--layout),"
        " of one",
        compute=total_tokens,
        views="model card 60; ledger 60 as window_tokens",
    ),
    _of_tokens(
        "tokens.per_step",
        "tokens per step",
        unit="tokens/step",
        formula="tokens.total / steps of one rank",
        compute=tokens_per_step,
        views="card 180 in throughput",
    ),
    Metric(
        "tokens.padding_frac",
        "padding",
        "frac",
        "lower",
        "1 - real tokens / computed tokens",
        ("both token counts",),
        padding_frac,
        upper_bound=1.0,
        column="padding_frac",
        views="card 190 in throughput",
    ),
    Metric(
        "steps.count",
        "steps",
        "steps",
        "neither",
        "optimizer steps counted, of one rank",
        ("steps",),
        steps,
        column="timed_steps",
        views="ledger 20 as window_steps; fairness 30",
    ),
    _of_tokens(
        "tokens.generated",
        "tokens generated",
        formula="tokens that `generate` of the trained model returned in the window, beside those"
        " trained",
        needs=("calls of generate in a training",),
        compute=generated,
    ),
    Metric(
        "steps.dropped",
        "steps not recorded",
        "steps",
        "lower",
        "optimizer steps that were made and could not be written, all ranks, whole run",
        ("steps of a Meter or an integration",),
        steps_dropped,
    ),
]
_PROCESSED = sft_play(
    "tokens_processed",
    "tokens",
    "tokens of all training steps, warm-up included; the original counted collated batches,"
    " evaluation and prefetch included",
)
METRICS += [replace(m, aliases=_PROCESSED) for m in over_whole_run(METRICS, "tokens.total")]
