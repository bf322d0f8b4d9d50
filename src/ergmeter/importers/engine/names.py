"""What does a printed name mean?

The trap: matching inside names. `loss:` is also found in `train_loss:` (so it was counted twice),
`step: 2048` in `tokens per step: 2048`, and seq/s, samples/s and tokens/s all look like one
"throughput". Here a name has one meaning, found by the whole name, and a rate keeps its own unit.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from ergmeter.importers.engine.counts import COUNTS

# -- numbers ---------------------------------------------------------------------------------------
# What number does this text hold?
#
# The trap: a pattern such as `[\d.]+` stops at the "e" and reads a learning rate of 2.73e-5 as
# 2.73, drops a minus sign, and loses a loss that became nan, which is the one a reader must see.


# The one spelling of a number used by every importer. Thousands: 1,024 but not 1,02.
NUMBER = (
    r"[-+]?(?:(?:\d{1,3}(?:,\d{3}){1,6}(?!\d)(?:\.\d{0,20})?|\d{1,30}(?:\.\d{0,30})?|\.\d{1,30})"
    r"(?:[eE][-+]?\d{1,4})?|(?:[nN]a[nN]|NAN|[iI]nf(?:inity)?|INF))"
)
_THOUSANDS = re.compile(r"\d{1,3}(?:,\d{3}){1,6}(?:\.\d*)?")
_SCALE = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
_MAX_COUNT = 2**53


def number(text: str) -> float | None:
    """Read a number: signs, exponents, nan and inf, but no thousands separators."""
    if "_" in text:  # float() takes 1_000, which no program prints
        return None
    try:
        return float(text)
    except ValueError:
        return None


def count(text: str, suffix: str = "") -> int | None:
    """Read a count: 2048, 2048.0, 1,024, 1.2k, 3.4M. None if it is no whole, sane number."""
    if not suffix and len(text) < 16 and text.isdecimal():
        return int(text)
    figure = number(text.replace(",", "") if _THOUSANDS.fullmatch(text) else text)
    if figure is None or suffix not in _SCALE:
        return None
    value = figure * _SCALE[suffix]
    if not math.isfinite(value) or not 0 <= value <= _MAX_COUNT:
        return None
    whole = round(value)
    # A fraction of a token is a rate or a mean under a count's name.
    return whole if abs(value - whole) <= 1e-6 * max(1.0, value) else None


# -- labels ----------------------------------------------------------------------------------------
# Does a line say of itself that it is about an evaluation?
#
# `eval step=1 loss=9 tokens=100` has all that a training step has. The trap on the other side: the
# same words qualify a single figure (`val loss 2.5` on a line of training), or stand in a path or
# the name of a run. So a label stands before the first figure, in brackets, or after a word such as
# `split=`; and where `train` stands nearer to the figure, it is none.


_ANSI = re.compile(r"\x1b\[[0-9;?]{0,20}[A-Za-z]")
_PLAIN = r"eval(?:uat(?:e|ion|ing))?|valid(?:at(?:e|ion|ing))?"
_WORD = rf"(?:{_PLAIN}|val|test(?:ing)?)"
_MARKED = re.compile(
    rf"[\[(<]\s?{_WORD}\s?[\])>]"
    rf"|(?<![\w/.\-])(?:split|mode|phase|stage|subset|prefix)[\"']?\s?[=:]\s?[\"']?{_WORD}\b",
    re.IGNORECASE,
)
_MARKED_TRAINING = re.compile(r"[\[(<]\s?train(?:ing)?\s?[\])>]", re.IGNORECASE)
_QUALIFIES = r"\s+(?:\w*loss|tok\w*|ppl|perplexity|acc\w*|metrics?)\b"  # that figure, not the line
_LEADING = re.compile(
    rf"(?<![\w/.\-])(?:(?:{_PLAIN})(?![\w/.\-=]|{_QUALIFIES})"
    r"|(?:val|test(?:ing)?)"
    r"(?:\s?[:|>]|\s-|\s+(?:global[_ ])?(?:step|iter|epoch|batch|dataloader)))",
    re.IGNORECASE,
)
_TRAINING = re.compile(r"(?<![\w/.\-])train(?:ing)?(?![\w.\-])", re.IGNORECASE)
_FIRST_FIGURE = re.compile(r"step|iter|loss|tok", re.IGNORECASE)
# `eval/step=3`, "val_iteration": 3: the line counts the steps of an evaluation.
EVALUATION_STEP = re.compile(
    r"(?:eval|val|valid|validation|test)[_/](?:global_)?(?:step|iter|iteration|batch)"
)


def plain(text: str) -> str:
    """The text without its colours."""
    return _ANSI.sub("", text) if "\x1b" in text else text


def of_evaluation(text: str) -> bool:
    """Whether the line is labelled as one of evaluation, validation or test."""
    text = plain(text)
    low = text.lower()
    if "val" not in low and "test" not in low:
        return False  # what most lines are spared: the full look
    if _MARKED.search(text) and not _MARKED_TRAINING.search(text):
        return True
    first = _FIRST_FIGURE.search(text)
    end = 0 if first is None else first.start()
    labels = [found.start() for found in _LEADING.finditer(text) if found.start() < end]
    return bool(labels) and _TRAINING.search(text, labels[-1], end) is None


# -- names -----------------------------------------------------------------------------------------


Kind = Literal["step", "count", "loss", "learning_rate", "grad_norm", "own_time", "rate",
               "eval", "timestamp", "epoch", "epoch_steps"]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Meaning:
    """What a name stands for. A lower rank wins where a line has two names of one kind."""

    kind: Kind
    name: str
    rank: int = 0
    unit: str = ""
    scale: float = 1.0  # own_time: seconds in one unit of the value


_STEP = ("global_step", "step", "train_step", "training_step", "iteration", "iter", "it")
_LOSS = (
    *("loss", "train_loss", "training_loss", "reduced_train_loss", "lm_loss"),
    *("loss_train", "loss/train"),
)
_RATE_NAMES = {
    "throughput": "", "throughput_peak": "", "mfu": "", "hfu": "",
    "tflops": "TFLOP/s", "gflops": "GFLOP/s", "tflops_per_gpu": "TFLOP/s", "tps": "tokens/s",
    "tgs": "tokens/s",
}  # fmt: skip
_PER_SECOND = re.compile(r"(.+?)(?:/|_per_)(?:s|sec|secs|second|seconds)(?:(?:/|_per_)\w+)?")
_PER_SECOND_NOUNS = {
    **dict.fromkeys(("tok", "toks", "token", "tokens"), "tokens/s"),
    **dict.fromkeys(("sample", "samples", "example", "examples"), "samples/s"),
    **dict.fromkeys(("seq", "seqs", "sequence", "sequences"), "sequences/s"),
    **dict.fromkeys(("it", "its", "iter", "iters", "iterations", "step", "steps"), "steps/s"),
    **dict.fromkeys(("tflop", "tflops"), "TFLOP/s"),
}
_OWN_TIME = re.compile(
    r"(?:step_time|time_per_step|time/step|step_duration|iter_time|iteration_time|time_per_iter"
    r"|time_per_iteration|time/iter|time/it|elapsed_time_per_iteration|dt|(?:elapsed|time|step)"
    r"(?=_?(?:ms|us)))_?(ms|us|s|sec|secs|seconds)?"
)
_PER_STEP = re.compile(r"(us|ms|s|sec|secs|seconds)/(?:step|it|iter|iteration|batch)")
SECONDS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0, "secs": 1.0, "seconds": 1.0}
_EVAL = re.compile(r"(?:eval|val|valid|validation|test)[_/].+")
_TRAIN_PREFIX = re.compile(r"(?:train|training|perf|performance|metrics|optim|global|timing)/(.+)")


@lru_cache(maxsize=4096)
def meaning(printed: str) -> Meaning | None:
    """What this name means, or None if it is nothing to us."""
    name = re.sub(r"[\s\-]+", "_", printed.strip().lower()).replace("(", "").replace(")", "")
    return _meaning(name) or _meaning_below_prefix(name)


def _meaning_below_prefix(name: str) -> Meaning | None:
    match = _TRAIN_PREFIX.fullmatch(name)
    return _meaning(match[1]) if match else None


def _meaning(name: str) -> Meaning | None:
    if name in COUNTS:
        return Meaning("count", name)
    for kind, names in _ONE_OF.items():
        if name in names:
            return Meaning(kind, name, rank=names.index(name))
    if match := _PER_STEP.fullmatch(name):
        return Meaning("own_time", name, unit=f"{match[1]}/step", scale=SECONDS[match[1]])
    if match := _OWN_TIME.fullmatch(name):
        unit = match[1] or "s"
        return Meaning("own_time", name, unit=unit, scale=SECONDS[unit])
    if _EVAL.fullmatch(name):
        return Meaning("eval", name, unit=_rate_unit(name) or "")
    unit_or_none = _rate_unit(name)
    return None if unit_or_none is None else Meaning("rate", name, unit=unit_or_none)


_ONE_OF: dict[Kind, tuple[str, ...]] = {
    "step": _STEP,
    "loss": _LOSS,
    "learning_rate": ("learning_rate", "lr"),
    "grad_norm": ("grad_norm", "gradient_norm", "gnorm", "global_grad_norm"),
    "timestamp": ("timestamp", "_timestamp", "ts", "wall_time", "unix_time"),
    "epoch": ("epoch",),
}


def _rate_unit(name: str) -> str | None:
    if name in _RATE_NAMES:
        return _RATE_NAMES[name]
    match = _PER_SECOND.fullmatch(name)
    if not match:
        return None
    noun = re.split(r"[_/]", match[1])[-1]
    return _PER_SECOND_NOUNS.get(noun, f"{noun}/s")
