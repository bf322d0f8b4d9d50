"""What stands in a dict that transformers' Trainer printed?

    {'loss': '2.3', 'grad_norm': '1.5', 'learning_rate': '5e-05', 'epoch': '0.1'}

The trap: evaluating it. It is the output of somebody's program, may be cut off, and has `nan` in
it, so its names and number texts are picked out, and nothing is run. A dict names no step; a row of
a table takes it from the bar beside it, as the importer does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from ergmeter.importers.bars import bar
from ergmeter.importers.names import Meaning
from ergmeter.importers.numbers import count, number
from ergmeter.importers.pairs import Pair
from ergmeter.importers.progress import Progress
from ergmeter.importers.seen import Seen
from ergmeter.importers.stamps import stamp_ns
from ergmeter.importers.steplines import Told
from ergmeter.importers.times import BarClock
from ergmeter.ports import Line
from ergmeter.units import NS_PER_S

_MAX_CHARS = 65_536
_ITEM = re.compile(r"'([^']{1,200})': ?(?:'([^']{0,60})'|([^,}']{1,60}))(?=[,}])")
TOTALS = {"num_input_tokens_seen": "tokens_computed", "num_tokens": "tokens_real"}
# Figures of a step dict that become fields of Step.
FIGURES = ("loss", "learning_rate", "grad_norm")


def items_of(text: str) -> dict[str, str]:
    """The names and number texts of a printed dict. Nothing is evaluated."""
    start = text.find("{'", 0, _MAX_CHARS)
    end = text.rfind("}", start, _MAX_CHARS) if start >= 0 else -1
    if end < 0:
        return {}  # no dict, or half of one
    return {m[1]: (m[2] or m[3] or "").strip() for m in _ITEM.finditer(text, start, end + 1)}


def kind_of(found: dict[str, str]) -> str | None:
    """What the dict is about: "train" (steps), "eval", "final", or None: not a Trainer's."""
    if "step" in found or "epoch" not in found:
        return None
    if "train_loss" in found and "train_runtime" in found:
        return "final"
    if any(name.startswith("eval_") for name in found):
        return "eval" if any(name.endswith("_runtime") for name in found) else None
    return "train" if "loss" in found and "learning_rate" in found else None


def positive(text: str | None) -> float | None:
    """A time or a rate; None if it can't be one."""
    value = number(text) if text else None
    return value if value is not None and 0 < value < 1e9 else None


def dict_rows(lines: Iterable[Line]) -> Iterator[Told]:
    """The step dicts one by one, with the step that the bar beside each one gives it."""
    progress: Progress[Told] = Progress()
    bars = BarClock()
    bar_ns: int | None = None
    last: dict[str, str] = {}
    for line in lines:
        drawn = bar(line.text)
        if drawn is not None:
            yield from _numbered(progress.draw(drawn))
            if progress.is_own(drawn) and drawn.elapsed_s is not None:
                bar_ns = bars.time(drawn.elapsed_s)
        found = items_of(line.text)
        if kind_of(found) == "train" and found != last:
            last = found
            one = _told(found, line, bar_ns)
            yield from _numbered(progress.log(one, number(found.get("epoch", ""))))
    yield from _numbered(progress.flush())


def _told(found: dict[str, str], line: Line, bar_ns: int | None) -> Told:
    """A step dict as the tables have it."""
    loss, rate, norm = (number(found.get(name, "")) for name in FIGURES)
    told = Told("step", [], Seen(0, None, (), loss, rate, norm))
    told.counts = {name: v for name in TOTALS if (v := count(found.get(name, ""))) is not None}
    told.epoch = number(found.get("epoch", ""))
    tokens = number(found.get("train_tokens_per_second", ""))
    if tokens is not None:
        means = Meaning("rate", "train_tokens_per_second", unit="tokens/s")
        told.found.append(Pair(means, means.name, tokens))
    stamp = line.t_ns if line.t_ns is not None else stamp_ns(line.text)
    runtime_s = positive(found.get("train_runtime"))
    if stamp is not None:
        told.t_ns, told.clock = stamp, "stamps"
    elif runtime_s is not None:
        told.t_ns, told.clock = round(runtime_s * NS_PER_S), "train_runtime"
    elif bar_ns is not None:
        told.t_ns, told.clock = bar_ns, "bar"
    return told


def _numbered(logs: Iterator[tuple[Told, int | None]]) -> Iterator[Told]:
    for told, n in logs:
        told.seen.number = n
        yield told
