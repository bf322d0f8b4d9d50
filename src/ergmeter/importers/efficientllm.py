"""Reads the blocks that EfficientLLM's metrics print.

    [EfficientLLM Metrics] Iteration 100:
      Loss: 3.245678
      AMU (GB): 45.23
      PCU (Ratio): 0.987
      AL (Seconds): 0.1234
      TT (Tokens/Param/Sec): 1.23e-06
      ST (Samples/Param/Sec): 4.56e-09
      AEC (Watts): 342.5

The lines of a block are joined first. Some names mislead: AMU is in GiB, AL is a mean over up to a
thousand iterations, and AEC is a mean power, not an energy. They are reported in their true units.
AL becomes a step's time only where there is nothing better, and a mark says so. Where Megatron's
iteration lines are printed as well, the steps are taken from those.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from ergmeter.importers.engine.iterations import MEGATRON, WORDS, Iterations
from ergmeter.importers.engine.pairs import MAX_CHARS, NUMBER, Meaning, NamedNumber, number, plain
from ergmeter.importers.engine.reading import StepLineImporter
from ergmeter.ports import Line, LineHints

EFFICIENTLLM = "[EfficientLLM"
_HEAD = re.compile(r"\[EfficientLLM Metrics\] (?:Iteration|Step) (\d{1,12}):")
_LINE = re.compile(
    r"(?:^|[\s:|\]>])(Loss|AMU \(GB\)|PCU \(Ratio\)|AL \(Seconds\)|TT \(Tokens/Param/Sec\)"
    rf"|ST \(Samples/Param/Sec\)|AEC \(Watts\)|Energy \(J\)):\s{{0,12}}({NUMBER})\s*$"
)
_LAST = "AEC (Watts)"
_OURS = "Energy (J)"  # one line more, after the last: ergmeter's own block, whose GB are GB
_PATIENCE = 40  # lines of other programs between those of one block, at most
_LONGEST = 500  # characters of a block's line, with all that a logger puts before it
_GIB = 1 << 30
_MEANS = {
    "Loss": Meaning("loss", "loss"),
    "AMU (GB)": Meaning("rate", "amu", unit="B"),
    "PCU (Ratio)": Meaning("rate", "pcu", unit="frac"),
    "AL (Seconds)": Meaning("own_time", "al", unit="s"),
    "TT (Tokens/Param/Sec)": Meaning("rate", "tt", unit="tokens/s/param"),
    "ST (Samples/Param/Sec)": Meaning("rate", "st", unit="samples/s/param"),
    "AEC (Watts)": Meaning("rate", "aec", unit="W"),
    _OURS: Meaning("rate", "energy", unit="J"),
}
_WORDS = (b"Loss:", b"(GB):", b"(Ratio):", b"(Seconds):", b"/Sec):", b"(Watts):", b"(J):")
_STEP = Meaning("step", "iteration")
_MEAN = (
    "AL is the mean time of up to a thousand iterations before, and stands here for each of those "
    "its block covers"
)


class _EfficientLlm(Iterations):
    def __init__(self) -> None:
        super().__init__()
        self._has_iterations = False  # Megatron's own lines are there, and tell the steps
        self._is_live = False  # lines come with their times

    def joined(self, lines: Iterable[Line]) -> Iterator[Line]:
        """Yields blocks as lines. The first waits for a second block or Megatron's first line."""
        first: Line | None = None
        blocks = 0
        for line, is_block in _blocks(lines):
            blocks += is_block
            self._is_live |= line.t_ns is not None
            if is_block and blocks == 1 and not self._has_iterations:
                first = line
                continue
            self._has_iterations |= not is_block and MEGATRON in line.text
            if first is not None and (is_block or self._has_iterations):
                yield first
                first = None
            yield line
        if first is not None:
            yield first

    def wanted(self, text: str) -> bool:
        return EFFICIENTLLM in text or super().wanted(text)

    def pairs(self, text: str) -> list[NamedNumber]:
        head = _HEAD.search(text) if EFFICIENTLLM in text else None
        if head is None:
            return super().pairs(text)
        pairs = [] if self._has_iterations else [NamedNumber(_STEP, "iteration", float(head[1]))]
        amu_bytes = 10**9 if f"| {_OURS}: " in text else _GIB
        for part in text[head.end() :].split(" | "):
            name, _, figure = part.partition(": ")
            means, value = _MEANS.get(name), number(figure)
            if means is not None and value is not None:
                self._tell_mean(name)
                pairs.append(
                    NamedNumber(means, name, value * (amu_bytes if name == "AMU (GB)" else 1))
                )
        return pairs

    def _tell_mean(self, name: str) -> None:
        if name == "AL (Seconds)" and not self._has_iterations and not self._is_live:
            self.note(_MEAN)


def _blocks(lines: Iterable[Line]) -> Iterator[tuple[Line, bool]]:
    """Yields each block as one line, with the time of its first; lines between are unchanged."""
    block: Line | None = None
    since = 0
    is_whole = False
    for line in lines:
        text = line.text
        is_head = EFFICIENTLLM in text and _HEAD.search(text) is not None
        match = _LINE.search(plain(text)) if block and len(text) < _LONGEST else None
        if block is not None and (is_head or (is_whole and (match is None or match[1] != _OURS))):
            yield block, True
            block, match = None, None
        if is_head:
            block, since, is_whole = replace(line, text=plain(text[:MAX_CHARS])), 0, False
            continue
        if block is None or match is None:
            yield line, False
            since += 1
        else:
            block = replace(block, text=f"{block.text} | {match[1]}: {match[2]}")
            is_whole = match[1] == _LAST
        if block is not None and (since > _PATIENCE or (match and match[1] == _OURS)):
            yield block, True
            block = None
    if block is not None:
        yield block, True


class EfficientLlmImporter(StepLineImporter):
    """The blocks of EfficientLLM's metrics, among Megatron's lines or alone."""

    name = "efficientllm"
    looks_for = "EfficientLLM `[EfficientLLM Metrics] Iteration 100:` blocks"
    hints = LineHints((*WORDS, EFFICIENTLLM.encode(), *_WORDS))
    dialect = _EfficientLlm

    def recognises(self, head: Sequence[str]) -> bool:
        """True if one of these lines is of EfficientLLM's metrics. One line is enough."""
        return any(EFFICIENTLLM in text for text in reversed(head))
