"""Which names and numbers does a line of output hold?

The trap: output is for people. Pairs come as `k=v`, `k: v`, `k v`, JSON or a printed dict, behind
timestamps, colours and progress bars, and prose has the same words in it. So `step 3` counts only
with another training figure beside it, while `step=3` stands for itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import NamedTuple

from ergmeter.importers.engine.names import (
    EVALUATION_STEP,
    NUMBER,
    SECONDS,
    Meaning,
    count,
    meaning,
    number,
    of_evaluation,
    plain,
)
from ergmeter.importers.engine.progress_bar import bar

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
_QUALIFIERS = frozenset(
    ("train", "training", "val", "valid", "validation", "eval", "test", "learning", "grad",
     "gradient", "global", "total", "consumed", "step", "iteration", "iter", "lm", "max", "warmup",
     "save", "num")
)  # fmt: skip
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
    """A name that means something, with its number."""

    means: Meaning
    printed: str
    value: float
    spaced: bool = False  # written `name value`, as prose would


def worth_reading(text: str) -> bool:
    """A quick look that spares most lines of output the full one."""
    low = text.lower()
    for hint in HINTS:
        if hint in low:
            return _DIGIT.search(text) is not None
    return False


def pairs(text: str) -> list[NamedNumber]:
    """The pairs of a line that mean something, as they stand in it."""
    text = plain(text[:MAX_CHARS])
    if text.lstrip().startswith("{") and (found := _json_pairs(text)) is not None:
        return found
    found = list(_text_pairs(text))
    return _with_bar(text, found)


def is_evaluation_line(found: list[NamedNumber], text: str) -> bool:
    """Whether all that a line says is about an evaluation, by its label or its step's name."""
    kinds = {pair.means.kind for pair in found}
    if not kinds & {"step", "loss", "count", "eval"}:
        return False
    if "eval" in kinds and "step" not in kinds:
        counts_its_own = any(EVALUATION_STEP.fullmatch(pair.means.name) for pair in found)
    else:
        counts_its_own = False
    return counts_its_own or of_evaluation(text[:MAX_CHARS])


def is_step_line(found: list[NamedNumber], text: str) -> bool:
    """Whether a line ends a step of training: it has a step's number, or tokens and a loss."""
    if is_evaluation_line(found, text):
        return False
    kinds = {pair.means.kind for pair in found}
    step = next((pair for pair in found if pair.means.kind == "step"), None)
    if step is None:
        tokens = any(p.means.kind == "count" and "tok" in p.means.name for p in found)
        return tokens and "loss" in kinds
    if "eval" in kinds and not kinds & {"loss", "count"}:
        return False
    if step.spaced and kinds <= {"step", "loss", "eval"} and "eval" in kinds:
        return False  # nanoGPT's `step 250: train loss 2.4, val loss 2.5`: an evaluation's
    others = kinds - {"step", "timestamp", "epoch"}
    return bool(others) or not step.spaced or _ONLY_STEP.fullmatch(text) is not None


class Field(NamedTuple):
    """A name with a figure, as they stand in a line, whether or not they mean something."""

    means: Meaning | None
    printed: str
    figure: str
    suffix: str
    start: int  # of the figure
    spaced: bool

    @property
    def value(self) -> float | None:
        """None if the name means nothing, or the figure does not go with it."""
        return None if self.means is None else figure_of(self.means, self.figure, self.suffix)


def fields_of(text: str) -> Iterator[Field]:
    """The names with figures that stand in a line of text, and figures whose unit is their name."""
    fields = [_named(text, match) for match in _PAIR.finditer(text)]
    if "ms" in text or "/s" in text or "s/" in text or "batches" in text:
        fields = _with_unnamed(text, fields)
    yield from fields


def _named(text: str, match: re.Match[str]) -> Field:
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
    return Field(means, printed, figure, suffix, match.start(3), separator.isspace())


def _is_duration(printed: str, before: str) -> bool:
    """Whether this names how long the step took; `saved in 3 s` and `data time: 3 ms` do not."""
    word = _WORD_BEFORE.search(before[-_REACH:])
    return printed.lower() in _DURATIONS and (word is None or word[1].lower() in _OF_STEP)


def _with_unnamed(text: str, fields: list[Field]) -> list[Field]:
    """The fields, with figures that only have a unit: a step's time, a rate, a batch's number."""
    named = {field.start for field in fields if field.means is not None}
    kinds = {field.means.kind for field in fields if field.means is not None}
    found: list[Field] = []
    if "loss" in kinds and "step" not in kinds and (match := _OF_EPOCH.search(text)):
        found.append(Field(_BATCH, "batches", match[1], "", match.start(1), spaced=True))
        found.append(Field(_EPOCH_STEPS, "batches", match[2], "", match.start(2), spaced=True))
    if bar(text) is None:  # whose rates are smoothed
        for match in _UNNAMED.finditer(text):
            figure, a_step, rate, alone = match.groups()
            if match.start(1) in named:
                continue
            if rate:
                found.append(Field(meaning(rate), rate, figure, "", match.start(1), spaced=True))
            elif "own_time" not in kinds and (a_step or _stands_alone(text, match)):
                kinds.add("own_time")
                name, unit = _STEP_TIME.name, a_step or alone
                found.append(Field(_STEP_TIME, name, figure, unit, match.start(1), spaced=True))
    if not found:
        return fields
    starts = {field.start for field in found}
    kept = [field for field in fields if field.start not in starts]
    return sorted([*kept, *found], key=lambda field: field.start)


def _stands_alone(text: str, match: re.Match[str]) -> bool:
    """Whether a time is all that stands between two bars, brackets or commas, and the only one."""
    before = text[: match.start(1)].rstrip()[-1:]
    return before in ("|", "(", ",", "[") and len(_ALONE.findall(text)) == 1


def _text_pairs(text: str) -> Iterator[NamedNumber]:
    for field in fields_of(text):
        value = field.value
        if field.means is not None and value is not None:
            yield NamedNumber(field.means, field.printed, value, spaced=field.spaced)


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
    """The figure in the unit its name has; None with a suffix that does not go with it, as "%"."""
    if means.kind in ("step", "epoch_steps"):
        return count(text, suffix) if suffix == "" else None
    if means.kind == "count":
        return count(text, suffix)
    if means.kind == "rate" and "tok" in means.unit:
        return _token_rate(text, suffix)
    value = number(text)
    if means.kind == "own_time" and value is not None and suffix in SECONDS:
        return value * SECONDS[suffix] / means.scale
    return value if suffix == "" else None


def _token_rate(text: str, suffix: str) -> float | None:
    factor = {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6}.get(suffix)
    value = number(text.replace(",", ""))
    return None if factor is None or value is None else value * factor


def _with_bar(text: str, found: list[NamedNumber]) -> list[NamedNumber]:
    """A loss shown in a progress bar belongs to the bar's n, where no step is named."""
    kinds = {pair.means.kind for pair in found}
    drawn = bar(text) if "loss" in kinds and "step" not in kinds else None
    step = meaning("it")
    if drawn is None or step is None or not drawn.of_steps:
        return found
    return [*found, NamedNumber(step, "it", float(drawn.n))]


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
    return [pair for name, value in flat.items() if (pair := _json_pair(name, value))]


def _json_pair(name: str, value: object) -> NamedNumber | None:
    means = meaning(name) if len(name) <= 100 else None
    if means is None or isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    figure = figure_of(means, str(value)[:60], "")
    return None if figure is None else NamedNumber(means, name, figure)
