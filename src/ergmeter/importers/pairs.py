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

from ergmeter.importers.bars import bar
from ergmeter.importers.labels import EVALUATION_STEP, of_evaluation, plain
from ergmeter.importers.names import SECONDS, Meaning, meaning
from ergmeter.importers.numbers import NUMBER, count, number

MAX_CHARS = 65_536
# Plain substrings: on lines that have none, which are most, this is many times a pattern's speed.
HINTS = ("step", "iter", "tok", "loss", "throughput", "samples", "flops", "mfu", "it=", "it:")
_DIGIT = re.compile(r"\d")
_PAIR = re.compile(
    r"(?<![\w/.\-])([A-Za-z_][\w/\-]{0,60}(?: ?\((?:ms|s)\))?)[\"']?"
    r"(\s{0,4}[=:]\s{0,16}|\s{1,12})[\"']?"
    rf"({NUMBER})(\s?%|ms|us|µs|secs|sec|s|[kKMBGT])?"
    r"(?:\s?/\s{0,12}[\d,]{1,20})?(?=$|[\s,;|\])}\"'>:]|\.(?:\s|$))"
)
# Words before a name that belong to it: `val loss` is not `loss`.
_QUALIFIERS = frozenset(
    ("train", "training", "val", "valid", "validation", "eval", "test", "learning", "grad",
     "gradient", "global", "total", "consumed", "step", "iteration", "iter", "lm", "max", "warmup",
     "save", "num")
)  # fmt: skip
_REACH = 30
_UNIT_BEHIND = re.compile(r"\s?([A-Za-z]{2,12}/(?:s|sec|second))(?![\w/])(?!\s?[:=])")
_ONLY_STEP = re.compile(
    r"\W*(?:global[_ ])?(?:step|iter|iteration)\s+\d+\s?/\s?\d+\W*", re.IGNORECASE
)


class Pair(NamedTuple):
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


def pairs(text: str) -> list[Pair]:
    """The pairs of a line that mean something, as they stand in it."""
    text = plain(text[:MAX_CHARS])
    if text.lstrip().startswith("{") and (found := _json_pairs(text)) is not None:
        return found
    found = list(_text_pairs(text))
    return _with_bar(text, found)


def is_evaluation_line(found: list[Pair], text: str) -> bool:
    """Whether all that a line says is about an evaluation, by its label or its step's name."""
    kinds = {pair.means.kind for pair in found}
    if not kinds & {"step", "loss", "count", "eval"}:
        return False
    if "eval" in kinds and "step" not in kinds:
        counts_its_own = any(EVALUATION_STEP.fullmatch(pair.means.name) for pair in found)
    else:
        counts_its_own = False
    return counts_its_own or of_evaluation(text[:MAX_CHARS])


def is_step_line(found: list[Pair], text: str) -> bool:
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
    """The names with figures that stand in a line of text."""
    for match in _PAIR.finditer(text):
        printed, separator, figure, unit = match.groups()
        start = match.start()
        if start > 1 and text[start - 1] == " " and text[start - 2].isalpha():
            printed = _qualified(text[max(0, start - _REACH) : start - 1], printed)
        means = meaning(printed)
        suffix = unit.strip() if unit else ""
        if means is not None and means.name == "throughput":
            behind = _UNIT_BEHIND.match(text, match.end())  # `throughput: 2.0 seq/s`
            means = (behind and meaning(behind[1])) or means
        if means is None and printed.lower() == "time" and suffix in SECONDS:
            means = meaning("step_time")  # `time 123.45ms`: with its unit, it is the step's own
        yield Field(means, printed, figure, suffix, match.start(3), separator.isspace())


def _text_pairs(text: str) -> Iterator[Pair]:
    for field in fields_of(text):
        value = field.value
        if field.means is not None and value is not None:
            yield Pair(field.means, field.printed, value, spaced=field.spaced)


def _qualified(before: str, name: str) -> str:
    """The name with the words before it that belong to it: `tokens per step` is not `step`."""
    words = before.rsplit(" ", 2)
    last = words[-1]
    if last == "per" and len(words) > 1:
        return f"{words[-2]} per {name}"
    return f"{last} {name}" if last.lower() in _QUALIFIERS else name


def figure_of(means: Meaning, text: str, suffix: str) -> float | None:
    """The figure in the unit its name has; None with a suffix that does not go with it, as "%"."""
    if means.kind == "step":
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


def _with_bar(text: str, found: list[Pair]) -> list[Pair]:
    """A loss shown in a progress bar belongs to the bar's n, where no step is named."""
    kinds = {pair.means.kind for pair in found}
    drawn = bar(text) if "loss" in kinds and "step" not in kinds else None
    step = meaning("it")
    if drawn is None or step is None or not drawn.of_steps:
        return found
    return [*found, Pair(step, "it", float(drawn.n))]


def _json_pairs(text: str) -> list[Pair] | None:
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


def _json_pair(name: str, value: object) -> Pair | None:
    means = meaning(name) if len(name) <= 100 else None
    if means is None or isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    figure = figure_of(means, str(value)[:60], "")
    return None if figure is None else Pair(means, name, figure)
