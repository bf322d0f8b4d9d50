"""What did NXDT (NeuronX Distributed Training) print, or NeMo, of which it is a relative?

Three kinds of lines. Lightning's progress bar with `reduced_train_loss=..., throughput=...` in any
order. NeMo's `Training epoch 0, iteration 120/149 | reduced_train_loss: 1.2 | ...`. And the plain
lines that nki-llama's calculator asks for: `step_time: 1.234`, `throughput: 150.5`, `loss: 2.345`,
each on a line of its own, of which several are one step.

Three traps. `throughput` is sequences per second, in the bar a mean over the last ten steps that
begins with the compile; the tokens/s and samples/s that others print are other figures. The bar
prints three digits of a large number: 1.63e+6 consumed samples, so that a running total stands
still and leaps; what a step holds is then taken from the totals that were exact. And the plain
lines have no step number: in a file, those with a step time are numbered as they come, each as one
step.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from ergmeter.importers.bars import bar
from ergmeter.importers.dialect import Dialect
from ergmeter.importers.groups import GROUP, Groups, said_in
from ergmeter.importers.labels import plain
from ergmeter.importers.logfile import Words
from ergmeter.importers.names import Meaning, meaning
from ergmeter.importers.numbers import count, number
from ergmeter.importers.pairs import MAX_CHARS, Pair
from ergmeter.importers.plainlines import PLAIN_WORDS, is_own, plain_figures
from ergmeter.importers.reading import Reading
from ergmeter.importers.signatures import NXDT
from ergmeter.ports import Line
from ergmeter.records import Record

_SEQUENCES = Meaning("rate", "throughput", unit="sequences/s")
_STEP_TIME = Meaning("own_time", "train_step_timing", unit="s")
_NEMO_TIME = "train_step_timing in s"
_OTHER_LOSSES = ("loss", "train_loss")  # Lightning's own `loss` is a running mean
_BATCH = Meaning("count", "global_batch_size")
_MEAN_STEPS = 10  # of its bar's throughput
_MEANS_SEQUENCES = "throughput read as sequences/s"
_MEAN_OF_TEN = (
    "throughput read as sequences/s, as NXDT prints it: a mean over ten steps, the compile included"
)
_ROUNDED = (
    "consumed_samples is printed to three digits from {} on: samples are steps times the {} of a "
    "step before"
)
_COUNTED = (
    "no step number is printed: each group of lines that has a step_time counts as one step, and "
    "lasts as long as it says"
)
_EPOCH = re.compile(r"\bEpoch (\d{1,9}):")


class NxdtImporter:
    """NXDT's and NeMo's bars and lines, and the plain lines of nki-llama's calculator."""

    name = "nxdt"
    looks_for = (
        "NXDT and NeMo `Epoch 0: 5%|.. reduced_train_loss=6.93, ..`, or `step_time: 1.234` and "
        "`throughput: 150.5` on lines of their own"
    )

    def recognises(self, head: Sequence[str]) -> bool:
        """Say whether one of these lines is NXDT's. One line alone decides."""
        return any(_is_own(text) for text in reversed(head))

    def records(self, lines: Iterable[Line]) -> Iterator[Record]:
        """Yield records as the lines come. Plain lines wait for the first of the next step."""
        return Reading(self.dialect()).records(lines)

    def words(self, recognised: str) -> Words:
        """What to look for in a log after this line."""
        return Words((NXDT.encode(),)) if NXDT in recognised else PLAIN_WORDS

    def dialect(self) -> Dialect:
        """How its lines are read."""
        return _Nxdt()


def _is_own(text: str) -> bool:
    if NXDT in text:
        return bool(_fields(text))
    return any(is_own(name) for name, _ in plain_figures(text) or ())


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
        """With the plain lines of a step made one."""
        groups = self._groups
        for line in lines:
            said = None if self._has_bars else plain_figures(line.text)
            if said is not None:
                for group in groups.take(line, said):
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
        """Every line but a bar that is drawn again for the step before: most of them are."""
        if NXDT not in text:
            return not self._has_bars and (GROUP in text or super().wanted(text))
        if self._step_text and self._step_text in text:
            return False
        start = text.find("global_step=")
        self._step_text = text[start : text.find(",", start) + 1] if start >= 0 else ""
        return True

    def pairs(self, text: str) -> list[Pair]:
        if NXDT in text:
            found = self._without_rounding(_fields(text))
        elif GROUP in text:
            found = [Pair(means, name, v) for name, means, v in _figures(said_in(text))]
        else:
            found = [_in_sequences(pair) for pair in super().pairs(text)]
        if any(pair.means is _SEQUENCES for pair in found):
            self.note(_MEAN_OF_TEN if NXDT in text else _MEANS_SEQUENCES)
        return found

    def is_step(self, found: list[Pair], text: str) -> bool:
        """A bar or a line of NeMo's; a group with a step's number or time, or a loss and a rate."""
        kinds = {pair.means.kind for pair in found}
        if NXDT in text:
            return {"step", "loss"} <= kinds
        if GROUP in text:
            others = {"loss"} if not self._groups.rates_are_steps else set()
            return bool(kinds & {"step", "own_time"}) or {"rate"} | others <= kinds
        return super().is_step(found, text)

    def is_evaluation(self, found: list[Pair], text: str) -> bool:
        is_own = NXDT in text or GROUP in text
        return not is_own and super().is_evaluation(found, text)

    def _is_loops_own(self, text: str) -> bool:
        """Whether this is a step line as any loop prints them."""
        return super().wanted(text) and super().is_step(super().pairs(text), text)

    def _counted(self, group: Line) -> Line:
        """The group. One that was numbered here lasts as long as it says, stamped or not."""
        self.counts_all_ranks = True  # its throughput is the job's
        if self._groups.has_counted:
            self.sums_step_times = True
            self.note(_COUNTED)
        return group

    def _without_rounding(self, found: list[tuple[str, Meaning, float, str]]) -> list[Pair]:
        """The pairs; a rounded total of samples gives way to what a step was seen to hold."""
        kept = [Pair(means, name, value) for name, means, value, _ in found]
        step = next((int(p.value) for p in kept if p.means.kind == "step"), None)
        total = next((f for f in found if f[1].name == "consumed_samples"), None)
        if step is None or total is None:
            return kept
        if "e" not in total[3]:
            self._learn(step, int(total[2]))
            return kept
        kept = [pair for pair in kept if pair.means.name != "consumed_samples"]
        if self._per_step is None:
            return kept
        self.note(_ROUNDED.format(total[3], self._per_step))
        return [*kept, Pair(_BATCH, "samples of a step", float(self._per_step))]

    def _learn(self, step: int, total: int) -> None:
        if self._exact is not None and step > self._exact[0]:
            whole, rest = divmod(total - self._exact[1], step - self._exact[0])
            self._per_step = whole if rest == 0 and whole > 0 else None
        self._exact = step, total


def _in_sequences(pair: Pair) -> Pair:
    return pair._replace(means=_SEQUENCES) if pair.means.name == "throughput" else pair


def _fields(text: str) -> list[tuple[str, Meaning, float, str]]:
    """The figures of a bar or of NeMo's line, each with its text: in any order, none required."""
    text = plain(text[:MAX_CHARS])
    start = text.find(f"{NXDT}=")
    texts = dict(_of_bar(text, start) if start >= 0 else _of_line(text))
    found = [(name, means, v, texts[name]) for name, means, v in _figures(texts.items())]
    if any(name == NXDT for name, *_ in found):
        found = [f for f in found if f[0] not in _OTHER_LOSSES]
    return found


def _of_bar(text: str, start: int) -> list[tuple[str, str]]:
    """`... 3/62 [02:59<58:44, 0.02it/s, v_num=8-06, reduced_train_loss=6.930, ...]`."""
    begin = text.rfind("[", 0, start) + 1
    said = [part.partition("=")[::2] for part in text[begin:].rstrip("] \x1b").split(", ")]
    named = [(name.strip(), figure.strip()) for name, figure in said if figure]
    if any(name == "global_step" for name, _ in named):
        return named
    drawn, epoch = bar(text), _EPOCH.search(text)
    if drawn is None or drawn.total is None or epoch is None:
        return named
    # The bar counts from 0 again with each epoch; the numbers here are of the whole training.
    return [*named, ("it", str(int(epoch[1]) * drawn.total + drawn.n))]


def _of_line(text: str) -> list[tuple[str, str]]:
    """`Training epoch 0, iteration 120/149 | lr: 3e-05 | ... | global_step: 120 | ...`."""
    parts = text.split(" | ")
    said = [part.rpartition(":")[::2] for part in parts[1:]]
    head = re.search(r"\biteration (\d{1,12})/", parts[0])
    named = [(name.strip(), figure.strip()) for name, figure in said]
    return [*named, ("iteration", head[1])] if head else named


def _figures(said: Iterable[tuple[str, str]]) -> Iterator[tuple[str, Meaning, float]]:
    for name, figure in said:
        if name == "throughput":
            means: Meaning | None = _SEQUENCES
        else:
            means = _STEP_TIME if name == _NEMO_TIME else meaning(name)
        if means is None:
            continue
        whole = means.kind in ("step", "count")
        value = count(figure) if whole else number(figure)
        if value is not None:
            yield name, means, value
