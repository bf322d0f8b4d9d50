"""Which importer reads this log?

The trap: the first line that looks like a step. A loop's own `step=1` may stand before Megatron's
first line, and the importer for any loop reads Megatron's too, only less of them. So once a line is
recognised, the log is looked at a little further, and the one that knows its program best is taken.
One importer reads a log, so what two kinds of lines say of one step is not counted twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from ergmeter import registry
from ergmeter.errors import FormatError, UsageError
from ergmeter.importers.logfile import LineHints, LogFile

if TYPE_CHECKING:
    from ergmeter.ports import Importer, Line

# A file of its own kind is asked for first. Those whose lines are most like any program's are asked
# last; and after them nvidia-smi, which somebody may have run from within a training.
_SOONEST = ("torch_trace",)
_LAST = ("nxdt", "keyvalue", "nvidia_smi")
_FURTHER = 2000  # lines looked at after the first that was recognised
_BEFORE = 20  # lines before it that the importer gets to see
_SHOWN = 120


@dataclass(frozen=True)
class ChosenImporter:
    """An importer, the line that spoke for it, and the lines it is to read."""

    importer: Importer
    recognised: str
    lines: Iterator[Line]


def chosen(
    log: LogFile, *, format: str | None, options: dict[str, Any] | None = None, hint: str = ""
) -> ChosenImporter:
    """The importer of a log. Raises FormatError, with what was looked for, if there is none;
    `hint` is what else can be done where the caller stands."""
    importers = {name: made(name, options or {}) for name in _names(format)}
    log.words = _words_of_all(importers.values())
    lines = log.lines()
    before: deque[Line] = deque(maxlen=_BEFORE)
    for line in lines:
        before.append(line)
        best = _best(importers.values(), line.text)
        if best is not None:
            if _words(best, line.text) is None:
                log.words = None  # every line is wanted, also those that are looked at on the way
            settled = _settled(importers, best, line, [*before], lines)
            log.words = _words(settled.importer, settled.recognised)
            return settled
    if not log.line_count:
        raise FormatError(f"{log.path} is empty")
    advices = (getattr(one, "advice", lambda _: "")(log.first_texts) for one in importers.values())
    hint = next(filter(None, advices), hint)
    raise FormatError(_nothing(log, importers) + (f"; {hint}" if hint else ""))


def made(name: str, options: dict[str, Any]) -> Importer:
    """An importer, with those of the options that it takes."""
    import inspect  # noqa: PLC0415  costs more than all else here

    make = registry.load("importers", name)
    takes = inspect.signature(make).parameters
    importer: Importer = make(**{n: v for n, v in options.items() if n in takes})
    return importer


def _words(importer: Importer, recognised: str) -> LineHints | None:
    """What an importer looks for in a log after this line; None if it did not say."""
    words_of = getattr(importer, "words", None)
    found: LineHints | None = words_of(recognised) if words_of else None
    return found


def _words_of_all(importers: Iterable[Importer]) -> LineHints | None:
    """What one or another of them looks for: the lines that the chosen one will want are read on
    the way to the choice."""
    all_of: set[bytes] = set()
    for importer in importers:
        words = _words(importer, "")
        if words is None:
            return None
        all_of |= {word.lower() for word in words.any_of}
    least = (w for w in all_of if not any(other != w and other in w for other in all_of))
    return LineHints(tuple(sorted(least)), folds_case=True)


def _names(wanted: str | None) -> list[str]:
    known = registry.names("importers")
    if wanted is not None:
        if wanted not in known:
            raise UsageError(f"no format {wanted!r}; there are {', '.join(known)}")
        return [wanted]
    first, last = ([name for name in some if name in known] for some in (_SOONEST, _LAST))
    return [*first, *(name for name in known if name not in {*first, *last}), *last]


def _best(importers: Iterable[Importer], text: str) -> Importer | None:
    return next((one for one in importers if one.recognises([text])), None)


def _settled(
    importers: dict[str, Importer],
    best: Importer,
    line: Line,
    head: list[Line],
    lines: Iterator[Line],
) -> ChosenImporter:
    """Look further for an importer that goes before the best so far."""
    names = list(importers)
    better = [importers[name] for name in names[: names.index(best.name)]]
    recognised = line.text
    for number, further in enumerate(lines):
        if not better or number >= _FURTHER:
            lines = chain([further], lines)
            break
        head.append(further)
        found = _best(better, further.text)
        if found is not None:
            best, recognised = found, further.text
            better = better[: better.index(found)]
    return ChosenImporter(best, _shortened(recognised, _SHOWN), chain(head, lines))


def _nothing(log: LogFile, importers: dict[str, Importer]) -> str:
    lines = "1 line" if log.line_count == 1 else f"{log.line_count} lines"
    shown = " / ".join(repr(_shortened(text, _SHOWN // 3)) for text in log.first_texts)
    last = "keyvalue" if "keyvalue" in importers else next(iter(importers))
    looked = getattr(importers[last], "looks_for", last)
    known = [name for name in importers if name != last]
    if known:
        looked = f"lines of {', '.join(known)}, or {looked}"
    return (
        f"{log.path}: no training step recognised in {lines}; looked for {looked}; "
        f"it begins {shown}"
    )


def _shortened(text: str, most: int) -> str:
    """A line for a message: cut between words, or within one that is all there is."""
    text = " ".join(text.split())
    if len(text) <= most:
        return text
    begin, _, rest = text[: most - 3].rpartition(" ")
    return f"{begin or rest} ..."
