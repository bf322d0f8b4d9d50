"""Reads iteration lines of Megatron-LM and its relatives, and EfficientLLM's blocks among them.

Megatron-LM, Megatron-DeepSpeed, GPT-NeoX and DeepSpeed's pipe engine:

    [2024-04-06 02:59:36] iteration 43/ 100 | consumed samples: 5504 | elapsed time per iteration
    (ms): 5444.9 | throughput per GPU (TFLOP/s/GPU): 239.8 | ... | lm loss: 1.825991E+00 | ...

Names hold blanks, units and slashes. `throughput per GPU (TFLOP/s/GPU)` is no token rate, and
`load_balancing_loss` is not the model's loss. So a line is split at `|`, and a field is matched by
its whole name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace

from ergmeter.atomic_write import toml_beside
from ergmeter.importers.engine.pairs import (
    MAX_CHARS,
    NUMBER,
    Meaning,
    NamedNumber,
    named_number,
    number,
    plain,
)
from ergmeter.importers.engine.reading import StepLineImporter
from ergmeter.importers.engine.step_lines import NumberedLines, with_step
from ergmeter.ports import Line, LineHints

MEGATRON = "elapsed time per iteration (ms):"
_ITERATION = re.compile(r"\biteration\s{1,12}(\d{1,12})\s?/\s{0,12}\d{1,12}\s{0,4}$")
_FIGURE = re.compile(rf"\s{{0,24}}({NUMBER})\s?(TFLOPS)?\s{{0,8}}$")
_PIPE = re.compile(
    r"\bsteps: (\d{1,12}) loss: ([^\s]{1,24}) iter time \(s\): ([^\s]{1,24})"
    r"(?: samples/sec: ([^\s]{1,24}))?"
)
# `  seq_length ...................................... 4096`, among the arguments at the start.
_ARGUMENT = re.compile(r"\s{0,12}(seq_length|global_batch_size) \.{3,80} (\d{1,9})\s*$")
_MEMORY = re.compile(r"memory \(MB\) \|(.{0,400})")
_MIB = 1 << 20  # Megatron divides by 1024 twice, and calls it MB

# Bytes that each of its lines holds one of.
WORDS = (MEGATRON.encode(), b"memory (MB) |", b"iter time (s):", b"seq_length ...")

_SAMPLES = Meaning("rate", "samples_per_s", unit="samples/s")
STEP = Meaning("step", "iteration")
_FIELDS, _BLOCK_FIELDS = (
    {name: Meaning(**means) for name, means in rows.items()}
    for rows in toml_beside(__file__, "megatron.toml").values()
)
_TOKENS = Meaning("count", "consumed_tokens")
_SEQ_LENGTH = (
    "tokens are consumed samples times seq_length {} of the log's arguments: computed tokens, "
    "padding included"
)


class Iterations(NumberedLines):
    """Megatron-LM, Megatron-DeepSpeed, GPT-NeoX, and DeepSpeed's pipe engine."""

    def __init__(self) -> None:
        super().__init__()
        self._seq_length: int | None = None

    def wanted(self, text: str) -> bool:
        """True if a line may be of an iteration, of memory use, or of an argument."""
        return (
            MEGATRON in text
            or "memory (MB) |" in text
            or "iter time (s):" in text
            or (" ...." in text and _ARGUMENT.match(text) is not None)
        )

    def pairs(self, text: str) -> list[NamedNumber]:
        """Return a line's fields that have a meaning here."""
        text = plain(text[:MAX_CHARS])
        if MEGATRON in text:
            return self._with_tokens(_fields(text))
        if match := _PIPE.search(text):
            return _pipe(match)
        if match := _MEMORY.search(text):
            return list(_memory(match[1]))
        if (match := _ARGUMENT.match(text)) and match[1] == "seq_length":
            self._seq_length = int(match[2])
        return []

    def _with_tokens(self, pairs: list[NamedNumber]) -> list[NamedNumber]:
        """Add the token count, if the log's arguments have the length of a sample."""
        counts = {pair.means.name: pair.value for pair in pairs if pair.means.kind == "count"}
        samples = counts.get("consumed_samples")
        if self._seq_length is None or samples is None or "consumed_tokens" in counts:
            return pairs
        self.note(_SEQ_LENGTH.format(self._seq_length))
        tokens = samples * self._seq_length
        return [*pairs, NamedNumber(_TOKENS, "consumed samples x seq_length", tokens)]


def _fields(text: str) -> list[NamedNumber]:
    pairs: list[NamedNumber | None] = []
    for part in text.split("|"):
        name, colon, figure = part.rpartition(":")
        if match := _ITERATION.search(part):
            pairs.append(named_number(STEP, "iteration", match[1]))
            continue
        name = " ".join(name.split())
        match = _FIGURE.match(figure) if colon else None
        pairs.append(named_number(_FIELDS.get(name.lower()), name, match[1]) if match else None)
    return with_step(pairs)


def _pipe(match: re.Match[str]) -> list[NamedNumber]:
    """`steps: 10 loss: 2.5 iter time (s): 1.2 samples/sec: 8.0`, of DeepSpeed's pipe engine."""
    names = ("steps", "loss", "iter time (s)", "samples/sec")
    meanings = (STEP, Meaning("loss", "loss"), Meaning("own_time", "iter_time", unit="s"), _SAMPLES)
    return with_step(map(named_number, meanings, names, match.groups("")))


def _memory(text: str) -> Iterator[NamedNumber]:
    """`[Rank 0] (after 10 iterations) memory (MB) | allocated: 1.5 | max allocated: 2.5 | ...`."""
    for part in text.split("|"):
        name, colon, figure = part.partition(":")
        value = number(figure.strip()) if colon else None
        if value is not None and name.strip().endswith(("allocated", "reserved")):
            printed = f"memory {' '.join(name.split())}"
            yield NamedNumber(Meaning("rate", printed, unit="B"), printed, value * _MIB)


class MegatronImporter(StepLineImporter):
    """The iteration lines of Megatron-LM, Megatron-DeepSpeed, GPT-NeoX and DeepSpeed."""

    name = "megatron"
    looks_for = "Megatron-LM and DeepSpeed `iteration 10/ 500 | ... | lm loss: 2.1 | ...`"
    hints = LineHints(WORDS)
    dialect = Iterations

    def is_own(self, text: str) -> bool:
        """True if this line, or one of the arguments before it, is Megatron's or DeepSpeed's."""
        if MEGATRON in text:
            return bool(_fields(plain(text[:MAX_CHARS])))
        if "iter time (s):" in text:
            return _PIPE.search(plain(text[:MAX_CHARS])) is not None
        return " ...." in text and _ARGUMENT.match(text) is not None


EFFICIENTLLM = "[EfficientLLM"
_BLOCK_HEAD = re.compile(r"\[EfficientLLM Metrics\] (?:Iteration|Step) (\d{1,12}):")
_BLOCK_LINE = re.compile(
    r"(?:^|[\s:|\]>])(Loss|AMU \(GB\)|PCU \(Ratio\)|AL \(Seconds\)|TT \(Tokens/Param/Sec\)"
    rf"|ST \(Samples/Param/Sec\)|AEC \(Watts\)|Energy \(J\)):\s{{0,12}}({NUMBER})\s*$"
)
_LAST_NAME = "AEC (Watts)"
_OURS = "Energy (J)"  # one line more, after the last: ergmeter's own block, whose GB are GB
_PATIENCE = 40  # lines of other programs between those of one block, at most
_LONGEST = 500  # characters of a block's line, with all that a logger puts before it
_GIB = 1 << 30
_BLOCK_WORDS = (b"Loss:", b"(GB):", b"(Ratio):", b"(Seconds):", b"/Sec):", b"(Watts):", b"(J):")
_MEAN = (
    "AL is the mean time of up to a thousand iterations before; here it is the time of each "
    "iteration that its block covers"
)


class _EfficientLlm(Iterations):
    """Blocks that EfficientLLM's metrics print, among Megatron's lines or alone.

        [EfficientLLM Metrics] Iteration 100:
          Loss: 3.245678
          AMU (GB): 45.23
          PCU (Ratio): 0.987
          AL (Seconds): 0.1234
          TT (Tokens/Param/Sec): 1.23e-06
          ST (Samples/Param/Sec): 4.56e-09
          AEC (Watts): 342.5

    The lines of a block are joined first. Some names mislead: AMU is in GiB, AL is a mean over up
    to a thousand iterations, and AEC is a mean power, not an energy. They are reported in their
    true units. AL becomes a step's time only where there is nothing better, and a mark says so.
    Where Megatron's iteration lines are printed as well, the steps are taken from those.
    """

    def __init__(self) -> None:
        super().__init__()
        self._has_iterations = False  # Megatron's own lines are there: steps come from them
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
        head = _BLOCK_HEAD.search(text) if EFFICIENTLLM in text else None
        if head is None:
            return super().pairs(text)
        pairs = [] if self._has_iterations else [NamedNumber(STEP, "iteration", float(head[1]))]
        amu_bytes = 10**9 if f"| {_OURS}: " in text else _GIB
        for part in text[head.end() :].split(" | "):
            name, _, figure = part.partition(": ")
            means, value = _BLOCK_FIELDS.get(name), number(figure)
            if means is not None and value is not None:
                if means.kind == "own_time" and not self._has_iterations and not self._is_live:
                    self.note(_MEAN)
                scale = amu_bytes if name == "AMU (GB)" else 1
                pairs.append(NamedNumber(means, name, value * scale))
        return pairs


def _blocks(lines: Iterable[Line]) -> Iterator[tuple[Line, bool]]:
    """Yields each block as one line, with the time of its first; lines between are unchanged."""
    block: Line | None = None
    since = 0
    is_whole = False
    for line in lines:
        text = line.text
        is_head = EFFICIENTLLM in text and _BLOCK_HEAD.search(text) is not None
        match = _BLOCK_LINE.search(plain(text)) if block and len(text) < _LONGEST else None
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
            is_whole = match[1] == _LAST_NAME
        if block is not None and (since > _PATIENCE or (match and match[1] == _OURS)):
            yield block, True
            block = None
    if block is not None:
        yield block, True


class EfficientLlmImporter(StepLineImporter):
    """The blocks of EfficientLLM's metrics, among Megatron's lines or alone."""

    name = "efficientllm"
    looks_for = "EfficientLLM `[EfficientLLM Metrics] Iteration 100:` blocks"
    hints = LineHints((*WORDS, EFFICIENTLLM.encode(), *_BLOCK_WORDS))
    dialect = _EfficientLlm

    def is_own(self, text: str) -> bool:
        """True if this line is of EfficientLLM's metrics."""
        return EFFICIENTLLM in text
