"""Finds names with numbers in a line of output: `k=v`, `k: v`, `k v`, JSON or a printed dict.

They come behind timestamps, colours and progress bars, and prose uses the same words. So `step 3`
counts only with another training figure beside it; `step=3` counts alone.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from ergmeter.importers.engine.parsed_line import COUNTS, NAMES
from ergmeter.importers.engine.progress_bar import bar

# Names. A name is matched as a whole: `loss:` also occurs in `train_loss:`, and `step: 2048` in
# `tokens per step: 2048`. A rate keeps its own unit.


# Numbers. A pattern such as `[\d.]+` would read 2.73e-5 as 2.73, drop a minus sign and lose a
# loss that became nan.


# The one spelling of a number used by every importer. Thousands: 1,024 but not 1,02.
NUMBER = (
    r"[-+]?(?:(?:\d{1,3}(?:,\d{3}){1,6}(?!\d)(?:\.\d{0,20})?|\d{1,30}(?:\.\d{0,30})?|\.\d{1,30})"
    r"(?:[eE][-+]?\d{1,4})?|(?:[nN]a[nN]|NAN|[iI]nf(?:inity)?|INF))"
)
_THOUSANDS = re.compile(r"\d{1,3}(?:,\d{3}){1,6}(?:\.\d*)?")
_SCALE = {"": 1, "k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
_RATE_SCALE = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6}
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
    """Read a count: 2048, 2048.0, 1,024, 1.2k, 3.4M. None if it is not whole, or above 2**53."""
    if not suffix and len(text) < 16 and text.isdecimal():
        return int(text)
    figure = number(text.replace(",", "") if _THOUSANDS.fullmatch(text) else text)
    if figure is None or suffix not in _SCALE:
        return None
    value = figure * _SCALE[suffix]
    if not math.isfinite(value) or not 0 <= value <= _MAX_COUNT:
        return None
    rounded = round(value)
    # A fraction of a token is a rate or a mean under a count's name.
    return rounded if abs(value - rounded) <= 1e-6 * max(1.0, value) else None


# Labels of evaluations. `eval step=1 loss=9 tokens=100` has all that a training step has. The
# same words may qualify one figure (`val loss 2.5`), or be part of a path or a run's name. A
# label is before the first figure, in brackets, or after a word such as `split=`. `train` nearer
# to the figure overrides it.


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
    """Return a text without its terminal colours."""
    return _ANSI.sub("", text) if "\x1b" in text else text


def of_evaluation(text: str) -> bool:
    """True if a line is labelled as evaluation, validation or test."""
    text = plain(text)
    low = text.lower()
    if "val" not in low and "test" not in low:
        return False  # most lines skip the full search
    if _MARKED.search(text) and not _MARKED_TRAINING.search(text):
        return True
    first = _FIRST_FIGURE.search(text)
    end = 0 if first is None else first.start()
    labels = [match.start() for match in _LEADING.finditer(text) if match.start() < end]
    return bool(labels) and _TRAINING.search(text, labels[-1], end) is None


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


_RATE_NAMES: dict[str, str] = NAMES["rates"]
_PER_SECOND = re.compile(r"(.+?)(?:/|_per_)(?:s|sec|secs|second|seconds)(?:(?:/|_per_)\w+)?")
_PER_SECOND_NOUNS: dict[str, str] = {
    noun: unit for unit, nouns in NAMES["per_second"].items() for noun in nouns
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
    """What a printed name means; None if ergmeter has no use for it."""
    name = re.sub(r"[\s\-]+", "_", printed.strip().lower()).replace("(", "").replace(")", "")
    match = _TRAIN_PREFIX.fullmatch(name)
    return _meaning(name) or (_meaning(match[1]) if match else None)


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


_ONE_OF: dict[Kind, list[str]] = NAMES["kinds"]


def _rate_unit(name: str) -> str | None:
    if name in _RATE_NAMES:
        return _RATE_NAMES[name]
    match = _PER_SECOND.fullmatch(name)
    if not match:
        return None
    noun = re.split(r"[_/]", match[1])[-1]
    return _PER_SECOND_NOUNS.get(noun, f"{noun}/s")


# Pairs.


MAX_CHARS = 65_536
# Plain substrings: on lines that have none, which are most, this is many times a pattern's speed.
HINTS = ("step", "iter", "tok", "loss", "throughput", "samples", "flops", "mfu", "it=", "it:")
_DIGIT = re.compile(r"\d")
_TIME = r"(?:ms|us|µs|seconds|secs|sec|s)"
_A_STEP = r"\s?/\s?(?:step|iteration|iter|it|batch)\b"
_PAIR = re.compile(
    r"(?<![\w/.\-])([A-Za-z_][\w/\-]{0,60}(?: ?\((?:ms|s)\))?)[\"']?"
    r"(\s{0,4}[=:]\s{0,16}|\s{1,12})[\"']?"
    rf"({NUMBER})(\s?%|\s?{_TIME}(?:{_A_STEP})?|[kKMBGT])?"
    r"(?:\s?/\s{0,12}[\d,]{1,20})?(?=$|[\s,;|\])}\"'>:]|\.(?:\s|$))"
)
# Words before a name that belong to it: `val loss` is not `loss`.
_QUALIFIERS = frozenset(NAMES["qualifiers"])
_REACH = 30
# Figures that have no name, only a unit: `| 29.1 ms |`, `29.1 ms/step`, `1,234 tok/s`.
_UNNAMED = re.compile(
    rf"(?:^|(?<=[\s|(,;\[]))({NUMBER})\s?"
    rf"(?:({_TIME}){_A_STEP}|(tok(?:en)?s?/s(?:ec(?:ond)?)?)|(ms)(?=\s{{0,4}}(?:[|),\]]|$)))"
    r"(?![\w/])"
)
# `200/ 2983 batches`, as pytorch's word_language_model counts the steps of an epoch.
_OF_EPOCH = re.compile(r"(?<![\w./-])(\d{1,12})\s?/\s{0,12}(\d{1,12})\s{1,4}batches\b")
_ALONE = re.compile(rf"[|(,\[]\s{{0,8}}{NUMBER}\s?ms(?=\s{{0,4}}(?:[|),\]]|$))")
_BATCH = Meaning("step", "batches", rank=99)
_EPOCH_STEPS = Meaning("epoch_steps", "batches per epoch")
_STEP_TIME = Meaning("own_time", "step_time", unit="s")
# `took 29.1 ms`: with its unit it is the step's own time, unless the word before says whose it is.
_DURATIONS = ("time", "took", "duration", "in")
_OF_STEP = ("step", "iter", "iteration", "batch", "train", "training")
_WORD_BEFORE = re.compile(r"([A-Za-z]+)[\s:]{1,2}$")
_UNIT_BEHIND = re.compile(r"\s?([A-Za-z]{2,12}/(?:s|sec|second))(?![\w/])(?!\s?[:=])")
_ONLY_STEP = re.compile(
    r"\W*(?:global[_ ])?(?:step|iter|iteration)\s+\d+\s?/\s?\d+\W*", re.IGNORECASE
)


class NamedNumber(NamedTuple):
    """A number with its printed name and what the name means."""

    means: Meaning
    printed: str
    value: float
    spaced: bool = False  # written `name value`, as prose would


def worth_reading(text: str) -> bool:
    """False if a line can't have figures of a step: a quick check that skips most lines."""
    low = text.lower()
    for hint in HINTS:
        if hint in low:
            return _DIGIT.search(text) is not None
    return False


def pairs(text: str) -> list[NamedNumber]:
    """Return the named numbers of a line whose names have a meaning, in their order."""
    text = plain(text[:MAX_CHARS])
    if text.lstrip().startswith("{") and (parsed := _json_pairs(text)) is not None:
        return parsed
    return _with_bar(text, _figures_in(text))


def is_evaluation_line(pairs: list[NamedNumber], text: str) -> bool:
    """True if a line is of an evaluation, by its label or the name of its step."""
    kinds = {pair.means.kind for pair in pairs}
    if not kinds & {"step", "loss", "count", "eval"}:
        return False
    names = (pair.means.name for pair in pairs)
    counts_its_own = "step" not in kinds and any(map(EVALUATION_STEP.fullmatch, names))
    return counts_its_own or of_evaluation(text[:MAX_CHARS])


def is_step_line(pairs: list[NamedNumber], text: str) -> bool:
    """True if a line that is no evaluation's ends a training step: it has a step number, or tokens
    and a loss."""
    kinds = {pair.means.kind for pair in pairs}
    step = next((pair for pair in pairs if pair.means.kind == "step"), None)
    if step is None:
        tokens = any(p.means.kind == "count" and "tok" in p.means.name for p in pairs)
        return tokens and "loss" in kinds
    if "eval" in kinds and not kinds & {"loss", "count"}:
        return False
    if step.spaced and kinds <= {"step", "loss", "eval"} and "eval" in kinds:
        return False  # nanoGPT's `step 250: train loss 2.4, val loss 2.5`: an evaluation's
    others = kinds - {"step", "timestamp", "epoch"}
    return bool(others) or not step.spaced or _ONLY_STEP.fullmatch(text) is not None


def _figures_in(text: str) -> list[NamedNumber]:
    """The named figures of a line of text, and figures whose unit is their name."""
    figures: dict[int, NamedNumber] = {}  # by where the figure starts
    meanings: dict[int, Meaning] = {}  # likewise, also of figures that can't be read
    for match in _PAIR.finditer(text):
        means, pair = _named(text, match)
        if means is not None:
            meanings[match.start(3)] = means
        if pair is not None:
            figures[match.start(3)] = pair
    if "ms" in text or "/s" in text or "s/" in text or "batches" in text:
        _add_unnamed(text, figures, meanings)
    return [figures[start] for start in sorted(figures)]


def _named(text: str, match: re.Match[str]) -> tuple[Meaning | None, NamedNumber | None]:
    """The meaning of a matched name, and its number with that meaning; each None if absent."""
    printed, separator, figure, unit = match.groups()
    start = match.start()
    if start > 1 and text[start - 1] == " " and text[start - 2].isalpha():
        printed = _qualified(text[max(0, start - _REACH) : start - 1], printed)
    means = meaning(printed)
    suffix, _, per = unit.strip().partition("/") if unit else ("", "", "")
    suffix = suffix.strip()
    if means is not None and means.name == "throughput":
        behind = _UNIT_BEHIND.match(text, match.end())  # `throughput: 2.0 seq/s`
        means = (behind and meaning(behind[1])) or means
    if suffix in SECONDS and (means is None or means.kind != "own_time"):
        if means is None and (per or _is_duration(printed, text[:start])):
            means = _STEP_TIME
        elif unit[0].isspace():
            suffix = ""  # of the words that follow, not of this figure
    return means, named_number(means, printed, figure, suffix, spaced=separator.isspace())


def named_number(
    means: Meaning | None, printed: str, figure: str, suffix: str = "", *, spaced: bool = False
) -> NamedNumber | None:
    """Return a number with its meaning; None without a meaning, or if the suffix does not fit."""
    value = None if means is None else figure_of(means, figure, suffix)
    return None if means is None or value is None else NamedNumber(means, printed, value, spaced)


def _is_duration(printed: str, before: str) -> bool:
    """True if a name is of the step's duration; False for `saved in 3 s` and `data time: 3 ms`."""
    word = _WORD_BEFORE.search(before[-_REACH:])
    return printed.lower() in _DURATIONS and (word is None or word[1].lower() in _OF_STEP)


def _add_unnamed(text: str, figures: dict[int, NamedNumber], meanings: dict[int, Meaning]) -> None:
    """Adds figures that only have a unit: a step's time, a rate, a batch's number."""
    kinds = {means.kind for means in meanings.values()}
    unnamed: list[tuple[int, NamedNumber | None]] = []
    if "loss" in kinds and "step" not in kinds and (match := _OF_EPOCH.search(text)):
        for group, means in enumerate((_BATCH, _EPOCH_STEPS), start=1):
            pair = named_number(means, "batches", match[group], spaced=True)
            unnamed.append((match.start(group), pair))
    if bar(text) is None:  # whose rates are smoothed
        for match in _UNNAMED.finditer(text):
            figure, a_step, rate, alone = match.groups()
            start, pair = match.start(1), None
            if start in meanings:
                continue
            if rate:
                pair = named_number(meaning(rate), rate, figure, spaced=True)
            elif "own_time" not in kinds and (a_step or _stands_alone(text, match)):
                kinds.add("own_time")
                unit = a_step or alone
                pair = named_number(_STEP_TIME, _STEP_TIME.name, figure, unit, spaced=True)
            unnamed.append((start, pair))
    figures |= {start: pair for start, pair in unnamed if pair is not None}


def _stands_alone(text: str, match: re.Match[str]) -> bool:
    """True if a time is alone between two bars, brackets or commas, and no other time is."""
    before = text[: match.start(1)].rstrip()[-1:]
    return before in ("|", "(", ",", "[") and len(_ALONE.findall(text)) == 1


def _qualified(before: str, name: str) -> str:
    """The name with the words before it that belong to it: `tokens per step` is not `step`."""
    words = before.rsplit(" ", 2)
    last = words[-1]
    if last == "per" and len(words) > 1:
        return f"{words[-2]} per {name}"
    if last.lower() == "loss" and name.lower() in ("train", "training"):
        return "loss train"  # litgpt's
    return f"{last} {name}" if last.lower() in _QUALIFIERS else name


def figure_of(means: Meaning, text: str, suffix: str) -> float | None:
    """Return a number in the unit of its name; None if the suffix does not fit, such as "%"."""
    if means.kind in ("step", "epoch_steps"):
        return count(text, suffix) if suffix == "" else None
    if means.kind == "count":
        return count(text, suffix)
    if means.kind == "rate" and "tok" in means.unit:
        value, factor = number(text.replace(",", "")), _RATE_SCALE.get(suffix)
        return None if factor is None or value is None else value * factor
    value = number(text)
    if means.kind == "own_time" and value is not None and suffix in SECONDS:
        return value * SECONDS[suffix] / means.scale
    return value if suffix == "" else None


def _with_bar(text: str, pairs: list[NamedNumber]) -> list[NamedNumber]:
    """Add a progress bar's n as the step number, if the line has a loss and no named step."""
    kinds = {pair.means.kind for pair in pairs}
    progress = bar(text) if "loss" in kinds and "step" not in kinds else None
    step = meaning("it")
    if progress is None or step is None or not progress.of_steps:
        return pairs
    return [*pairs, NamedNumber(step, "it", float(progress.n))]


def _json_pairs(text: str) -> list[NamedNumber] | None:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(data, dict):
        return None
    flat = dict(data)
    for inner in data.values():
        if isinstance(inner, dict):
            flat = {**inner, **flat}
    figures = (
        named_number(meaning(name), name, str(value)[:60])
        for name, value in flat.items()
        if len(name) <= 100 and type(value) in (int, float, str)
    )
    return [pair for pair in figures if pair is not None]
