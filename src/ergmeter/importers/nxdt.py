"""Reads the output of NXDT (NeuronX Distributed Training) and of NeMo.

Three kinds of lines. Lightning's progress bar with `reduced_train_loss=..., throughput=...` in any
order. NeMo's `Training epoch 0, iteration 120/149 | reduced_train_loss: 1.2 | ...`. And the plain
lines that nki-llama's calculator expects: `step_time: 1.234`, `throughput: 150.5`, `loss: 2.345`,
each on its own line, several of which make one step.

- `throughput` is sequences per second. In the bar it is a mean over the last ten steps, which at
  first include compilation.
- The bar prints three digits of a large number, such as 1.63e+6 consumed samples. A running total
  then stands still and leaps, so the samples of a step come from the totals that were exact.
- Plain lines have no step number. In a file, those with a step time are numbered in order.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain, groupby, islice

from ergmeter.importers.engine.pairs import (
    HINTS,
    MAX_CHARS,
    SECONDS,
    Meaning,
    NamedNumber,
    meaning,
    named_number,
    of_evaluation,
    plain,
)
from ergmeter.importers.engine.progress_bar import bar
from ergmeter.importers.engine.reading import StepLineImporter
from ergmeter.importers.engine.step_lines import Dialect, label_of, rank_of
from ergmeter.ports import Line, LineHints

# Figures on lines of their own, as nki-llama's calculator expects them: `step_time: 1.234`,
# `throughput: 150.5`, `loss: 2.345`. `Average throughput: 150.5` is a summary, `eval loss: 2.1`
# an evaluation, and `throughput: 9000 tokens/s` another quantity. A line that also names its step
# is read as any loop's.


NXDT = "reduced_train_loss"
_PLAIN = re.compile(
    r"(?<![\w/.\-])(step_time|throughput|samples/sec|tokens/sec|seq/s|train_loss|loss|lr"
    r"|learning_rate|grad_norm|gradient_norm|global_step|step|epoch)\s{0,4}[:=]\s{0,12}"
    r"([-+]?(?:\d[\d.]{0,30}(?:[eE][-+]?\d{1,4})?|\.\d{1,20}|[nN]a[nN]|[iI]nf))"
    r"(?=\s?([A-Za-z]{1,9}(?:/[A-Za-z]{1,6})?)?)(?![\w.]*[:=])"
)
PLAIN_WORDS = LineHints(
    (*(hint.encode() for hint in HINTS), b"seq/s", b"lr:", b"lr=", b"norm", b"learning_rate",
     b"epoch:"),
    folds_case=True,
)  # fmt: skip
_HINTS = ("loss", "step", "throughput", "/s", "lr", "learning_rate", "norm", "epoch")
# Of another thing than a step of training: a summary, or an evaluation.
_OTHER = re.compile(
    r"\b(?:average|avg|mean|total|final|best|overall|peak|max|min|eval|val|valid|validation|test)\b",
    re.IGNORECASE,
)
# `step 3 step_time: 1.2`: without a colon it is a step's number only among figures.
_SPACED_STEP = re.compile(r"(?<![\w/.\-])(?:step|iter|iteration) (\d{1,12})(?=$|[\s/:,|\])])")
_LONGEST = 400  # characters of a plain line
_STEP = {"step", "global_step"}


def plain_figures(text: str) -> list[tuple[str, str]] | None:
    """The names and numbers of a plain line; None if it is another kind of line."""
    if len(text) > _LONGEST or not any(hint in text for hint in _HINTS):
        return None
    if NXDT in text or "%|" in text or "{" in text:
        return None
    text = plain(text)
    fields = _PLAIN.findall(text)
    if not fields or _OTHER.search(text) or of_evaluation(text):
        return None
    figures = [_in_its_unit(name, figure, unit) for name, figure, unit in fields]
    names = {name for name, _ in figures}
    if names & _STEP:
        return None if names - _STEP - {"epoch"} else figures
    numbered = _SPACED_STEP.search(text)
    return [("step", numbered[1]), *figures] if numbered else figures


def _in_its_unit(name: str, figure: str, unit: str) -> tuple[str, str]:
    """Name a figure by its unit: `throughput: 9000 tokens/s` is tokens/s, not NXDT's throughput."""
    if name == "throughput" and "/" in unit:
        return unit, figure
    if name == "step_time" and unit in SECONDS:
        return f"step_time_{'s' if unit == 's' else unit}", figure
    return name, figure


# Groups of plain lines that make one step. A name that comes again begins the next step. Ranks
# that print into one output have one group each. srun's `0: ` before a line may be an epoch's
# number; it is a rank's if one comes again after another. A rate alone is a step only in a log
# that has nothing else, so rates wait until that is known.


GROUP = "\x1f"  # between the first line of a group and its fields; no program prints it
_RATES = 64  # after so many groups with only rates, each counts as a step
_LABELLED = 1024  # lines in which a rank's label is expected twice


class Groups:
    """Joins the plain lines of a step into one line."""

    def __init__(self) -> None:
        self.rates_are_steps = False  # the log has nothing but rates
        self.has_counted = False  # steps were numbered as they came
        self._open: dict[int | None, tuple[Line, dict[str, str]]] = {}
        self._numbers: dict[int | None, int] = {}
        self._waiting: list[Line] = []  # groups that have only rates
        self._has_steps = False

    def __bool__(self) -> bool:
        return bool(self._open or self._waiting)

    def take(self, line: Line, figures: list[tuple[str, str]]) -> Iterator[Line]:
        """Add figures of a line to its rank's open step. Yields each finished step, as one line."""
        whose = rank_of(line.text)
        opened = self._open.get(whose)
        if opened is not None and any(name in opened[1] for name, _ in figures):
            yield from self._close(whose)
            opened = None
        if opened is None:
            opened = self._open[whose] = line, {}
        opened[1].update(figures)

    def end(self, *, before_a_step: bool = False) -> Iterator[Line]:
        """Yield the open groups: the log has ended, or a step line of another kind comes next."""
        for whose in list(self._open):
            yield from self._close(whose)
        self._has_steps |= before_a_step
        self.rates_are_steps |= not self._has_steps
        yield from self._let_go()

    def drop(self) -> None:
        """Drops the open groups: they were configuration, not steps."""
        self._open.clear()
        self._waiting.clear()

    def _close(self, whose: int | None) -> Iterator[Line]:
        """Join a group into one line. A group with only rates waits, as it may be no step."""
        first, group = self._open.pop(whose)
        is_timed = any(name.startswith("step_time") for name in group)
        is_numbered = "step" in group or "global_step" in group
        has_loss = "loss" in group or "train_loss" in group
        if is_timed and not is_numbered and first.t_ns is None:
            self.has_counted = True
            number = self._numbers[whose] = self._numbers.get(whose, 0) + 1
            group = {"step": str(number), **group}
        fields = " | ".join(f"{name}={figure}" for name, figure in group.items())
        line = replace(first, text=f"{first.text}{GROUP}{fields}")
        has_rate = any(name == "throughput" or "/" in name for name in group)
        self._waiting.append(line)
        if is_timed or is_numbered or (has_loss and has_rate):
            self._has_steps = True
        elif has_rate and not has_loss and first.t_ns is None and not self._has_steps:
            self.rates_are_steps |= len(self._waiting) >= _RATES
            if not self.rates_are_steps:
                return
        yield from self._let_go()

    def _let_go(self) -> Iterator[Line]:
        waiting, self._waiting = self._waiting, []
        yield from waiting


def _with_ranks(lines: Iterable[Line]) -> Iterator[Line]:
    """Yield a file's lines; if numbers before plain lines are ranks, rewrite them as `[rank0]:`."""
    lines = iter(lines)
    for line in lines:
        if line.t_ns is not None or _label(line) is None:
            yield line
            continue
        head = [line, *islice(lines, _LABELLED)]
        printed = (label for each in head if (label := _label(each)) is not None)
        labels = [label for label, _ in groupby(printed)]
        are_ranks = len(set(labels)) < len(labels)
        for each in chain(head, lines):
            label = _label(each) if are_ranks else None
            yield each if label is None else replace(each, text=f"[rank{label}]: {each.text}")


def _label(line: Line) -> int | None:
    """The number before a plain line that names no rank."""
    label = label_of(line.text)
    if label is None or rank_of(line.text) is not None or plain_figures(line.text) is None:
        return None
    return label


_SEQUENCES = Meaning("rate", "throughput", unit="sequences/s")
_STEP_TIME = Meaning("own_time", "train_step_timing", unit="s")
_OWN_NAMES = {"throughput": _SEQUENCES, "train_step_timing in s": _STEP_TIME}
_OTHER_LOSSES = ("loss", "train_loss")  # Lightning's own `loss` is a running mean
_BATCH = Meaning("count", "global_batch_size")
_MEAN_STEPS = 10  # of its bar's throughput
_MEANS_SEQUENCES = "throughput read as sequences/s"
_MEAN_OF_TEN = (
    "throughput read as sequences/s, as NXDT prints it: a mean over ten steps, the compile included"
)
_ROUNDED = (
    "consumed_samples is printed to three digits from {} on: samples are steps times {}, the "
    "samples of an earlier step"
)
_COUNTED = (
    "no step number is printed: each group of lines that has a step_time counts as one step, of "
    "that duration"
)
_EPOCH = re.compile(r"\bEpoch (\d{1,9}):")


class _Nxdt(Dialect):
    """A loop of any make whose throughput is in sequences/s, until a line of NXDT's own comes."""

    def __init__(self) -> None:
        super().__init__()
        self._exact: tuple[int, int] | None = None  # the last step whose total was printed whole
        self._per_step: int | None = None  # samples, by two such totals
        self._has_bars = False  # or lines of NeMo's: then there are no plain ones
        self._groups = Groups()
        self._step_text = ""  # as the last bar has it

    def joined(self, lines: Iterable[Line]) -> Iterator[Line]:
        """Yields the lines, with the plain lines of a step joined into one."""
        groups = self._groups
        for line in _with_ranks(lines):
            figures = None if self._has_bars else plain_figures(line.text)
            if figures is not None:
                for group in groups.take(line, figures):
                    yield self._counted(group)
                continue
            if NXDT in line.text and not self._has_bars:
                groups.drop()
                self._has_bars, self.sums_step_times = True, False
                self.whole_numbers, self.counts_all_ranks = True, True
                self.rate_steps = _MEAN_STEPS
            elif groups and self._is_loops_own(line.text):
                # A step of its own: what comes before it in time is handed on before it.
                yield from groups.end(before_a_step=True)
                self.counts_all_ranks = False
            yield line
        for group in groups.end():
            yield self._counted(group)

    def wanted(self, text: str) -> bool:
        """True for a line that may be a step; False for a bar redrawn at the same step."""
        if NXDT not in text:
            return not self._has_bars and (GROUP in text or super().wanted(text))
        if self._step_text and self._step_text in text:
            return False
        start = text.find("global_step=")
        self._step_text = text[start : text.find(",", start) + 1] if start >= 0 else ""
        return True

    def pairs(self, text: str) -> list[NamedNumber]:
        if NXDT in text:
            pairs = self._without_rounding(_fields(text))
        elif GROUP in text:
            fields = text.rpartition(GROUP)[2].split(" | ")
            pairs = list(_figures(field.partition("=")[::2] for field in fields))
        else:
            pairs = [
                pair._replace(means=_SEQUENCES) if pair.means.name == "throughput" else pair
                for pair in super().pairs(text)
            ]
        if any(pair.means is _SEQUENCES for pair in pairs):
            self.note(_MEAN_OF_TEN if NXDT in text else _MEANS_SEQUENCES)
        return pairs

    def is_step(self, pairs: list[NamedNumber], text: str) -> bool:
        """A bar or a line of NeMo's; a group with a step's number or time, or a loss and a rate."""
        kinds = {pair.means.kind for pair in pairs}
        if NXDT in text:
            return {"step", "loss"} <= kinds
        if GROUP in text:
            others = {"loss"} if not self._groups.rates_are_steps else set()
            return bool(kinds & {"step", "own_time"}) or {"rate"} | others <= kinds
        return super().is_step(pairs, text)

    def is_evaluation(self, pairs: list[NamedNumber], text: str) -> bool:
        is_own = NXDT in text or GROUP in text
        return not is_own and super().is_evaluation(pairs, text)

    def _is_loops_own(self, text: str) -> bool:
        """True if this is a step line that needs no rules of NXDT."""
        return super().wanted(text) and Dialect().read(text)[1] == "step"

    def _counted(self, group: Line) -> Line:
        """Return the group. If steps were numbered here, they last as long as their lines say."""
        self.counts_all_ranks = True  # its throughput is the job's
        if self._groups.has_counted:
            self.sums_step_times = True
            self.note(_COUNTED)
        return group

    def _without_rounding(self, texts: dict[str, str]) -> list[NamedNumber]:
        """The bar's figures; a rounded total of samples is replaced by the samples of a step."""
        pairs = _bar_figures(texts)
        step = next((int(p.value) for p in pairs if p.means.kind == "step"), None)
        total = next((p for p in pairs if p.means.name == "consumed_samples"), None)
        if step is None or total is None:
            return pairs
        text = texts[total.printed]
        if "e" not in text:
            self._learn(step, int(total.value))
            return pairs
        pairs.remove(total)
        if self._per_step is None:
            return pairs
        self.note(_ROUNDED.format(text, self._per_step))
        return [*pairs, NamedNumber(_BATCH, "samples of a step", float(self._per_step))]

    def _learn(self, step: int, total: int) -> None:
        if self._exact is not None and step > self._exact[0]:
            per_step, rest = divmod(total - self._exact[1], step - self._exact[0])
            self._per_step = per_step if rest == 0 and per_step > 0 else None
        self._exact = step, total


def _fields(text: str) -> dict[str, str]:
    """The names and figures of a bar or of NeMo's line: in any order, none required."""
    text = plain(text[:MAX_CHARS])
    start = text.find(f"{NXDT}=")
    return dict(_of_bar(text, start) if start >= 0 else _of_line(text))


def _bar_figures(texts: dict[str, str]) -> list[NamedNumber]:
    pairs = list(_figures(texts.items()))
    if any(pair.printed == NXDT for pair in pairs):
        return [pair for pair in pairs if pair.printed not in _OTHER_LOSSES]
    return pairs


def _of_bar(text: str, start: int) -> list[tuple[str, str]]:
    """`... 3/62 [02:59<58:44, 0.02it/s, v_num=8-06, reduced_train_loss=6.930, ...]`."""
    begin = text.rfind("[", 0, start) + 1
    fields = [part.partition("=")[::2] for part in text[begin:].rstrip("] \x1b").split(", ")]
    named = [(name.strip(), figure.strip()) for name, figure in fields if figure]
    if any(name == "global_step" for name, _ in named):
        return named
    progress, epoch = bar(text), _EPOCH.search(text)
    if progress is None or progress.total is None or epoch is None:
        return named
    # The bar counts from 0 again with each epoch; the numbers here are of the whole training.
    return [*named, ("it", str(int(epoch[1]) * progress.total + progress.n))]


def _of_line(text: str) -> list[tuple[str, str]]:
    """`Training epoch 0, iteration 120/149 | lr: 3e-05 | ... | global_step: 120 | ...`."""
    parts = text.split(" | ")
    fields = [part.rpartition(":")[::2] for part in parts[1:]]
    head = re.search(r"\biteration (\d{1,12})/", parts[0])
    named = [(name.strip(), figure.strip()) for name, figure in fields]
    return [*named, ("iteration", head[1])] if head else named


def _figures(fields: Iterable[tuple[str, str]]) -> Iterator[NamedNumber]:
    for name, figure in fields:
        if pair := named_number(_OWN_NAMES.get(name) or meaning(name), name, figure):
            yield pair


class NxdtImporter(StepLineImporter):
    """NXDT's and NeMo's bars and lines, and the plain lines of nki-llama's calculator."""

    name = "nxdt"
    order = 80
    looks_for = (
        "NXDT and NeMo `Epoch 0: 5%|.. reduced_train_loss=6.93, ..`, or `step_time: 1.234` and "
        "`throughput: 150.5` on lines of their own"
    )
    dialect = _Nxdt

    def is_own(self, text: str) -> bool:
        """True if this line is NXDT's or NeMo's, or a plain line of a step time or a rate."""
        if NXDT in text:
            return bool(_bar_figures(_fields(text)))
        names = [name for name, _ in plain_figures(text) or ()]
        is_plain = any(n.startswith("step_time") or n == "throughput" or "/" in n for n in names)
        return is_plain and Dialect().read(text)[1] == "other"  # and no step line of any loop

    def words(self, recognised: str) -> LineHints:
        """Byte strings, at least one of which is in every line to read."""
        return LineHints((NXDT.encode(),)) if NXDT in recognised else PLAIN_WORDS
