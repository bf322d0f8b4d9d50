"""What does a printed name mean?

The trap: matching inside names. `loss:` is also found in `train_loss:` (so it was counted twice),
`step: 2048` in `tokens per step: 2048`, and seq/s, samples/s and tokens/s all look like one
"throughput". Here a name has one meaning, found by the whole name, and a rate keeps its own unit.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from ergmeter.importers.counts import COUNTS

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
