"""Reads iteration lines of Megatron-LM, Megatron-DeepSpeed, GPT-NeoX and DeepSpeed's pipe engine.

    [2024-04-06 02:59:36] iteration 43/ 100 | consumed samples: 5504 | elapsed time per iteration
    (ms): 5444.9 | throughput per GPU (TFLOP/s/GPU): 239.8 | ... | lm loss: 1.825991E+00 | ...

Names hold blanks, units and slashes. `throughput per GPU (TFLOP/s/GPU)` is no token rate, and
`load_balancing_loss` is not the model's loss. So a line is split at `|`, and a field is matched by
its whole name.
"""

from __future__ import annotations

import re

from ergmeter.importers.engine.pairs import (
    MAX_CHARS,
    NUMBER,
    Meaning,
    NamedNumber,
    count,
    number,
    plain,
)
from ergmeter.importers.engine.step_lines import Dialect

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

_PER_DEVICE = Meaning("rate", "tflops", unit="TFLOP/s/device")
_TOKENS_PER_DEVICE = Meaning("rate", "tokens_per_s_per_device", unit="tokens/s/device")
_SAMPLES = Meaning("rate", "samples_per_s", unit="samples/s")
STEP = Meaning("step", "iteration")
_LOSS = Meaning("loss", "lm_loss")
_FIELDS = {
    "consumed samples": Meaning("count", "consumed_samples"),
    "consumed train samples": Meaning("count", "consumed_samples"),
    "consumed tokens": Meaning("count", "consumed_tokens"),
    "global batch size": Meaning("count", "global_batch_size"),
    "elapsed time per iteration (ms)": Meaning("own_time", "elapsed", unit="ms", scale=1e-3),
    "learning rate": Meaning("learning_rate", "learning_rate"),
    "lm loss": _LOSS,
    "lm_loss": _LOSS,
    "loss": Meaning("loss", "loss", rank=1),
    "grad norm": Meaning("grad_norm", "grad_norm"),
    "throughput per gpu (tflop/s/gpu)": _PER_DEVICE,
    "throughput (tflop/s/gpu)": _PER_DEVICE,
    "approx flops per gpu": _PER_DEVICE,
    "tflops": _PER_DEVICE,
    "tokens per gpu per second (tgs)": _TOKENS_PER_DEVICE,
    "tokens per gpu per second": _TOKENS_PER_DEVICE,
    "tokens/sec/gpu": _TOKENS_PER_DEVICE,
    "samples per second": _SAMPLES,
    "samples/sec": _SAMPLES,
    "power per gpu (w/gpu)": Meaning("rate", "power", unit="W/device"),
    "energy per gpu (j/iter/gpu)": Meaning("rate", "energy", unit="J/step/device"),
}
_TOKENS = Meaning("count", "consumed_tokens")
_SEQ_LENGTH = (
    "tokens are consumed samples times seq_length {} of the log's arguments: computed tokens, "
    "padding included"
)


class Iterations(Dialect):
    """Megatron-LM, Megatron-DeepSpeed, GPT-NeoX, and DeepSpeed's pipe engine."""

    whole_numbers = True
    counts_all_ranks = True

    def __init__(self) -> None:
        super().__init__()
        self._seq_length: int | None = None

    def wanted(self, text: str) -> bool:
        """Whether it may be a line of an iteration, of memory, or an argument."""
        return (
            MEGATRON in text
            or "memory (MB) |" in text
            or "iter time (s):" in text
            or (" ...." in text and _ARGUMENT.match(text) is not None)
        )

    def pairs(self, text: str) -> list[NamedNumber]:
        """The fields that mean something."""
        text = plain(text[:MAX_CHARS])
        if MEGATRON in text:
            return self._with_tokens(_fields(text))
        if match := _PIPE.search(text):
            return _pipe(match)
        if match := _MEMORY.search(text):
            return _memory(match[1])
        if (match := _ARGUMENT.match(text)) and match[1] == "seq_length":
            self._seq_length = int(match[2])
        return []

    def is_step(self, pairs: list[NamedNumber], text: str) -> bool:  # noqa: ARG002
        """Every line with an iteration's number is one."""
        return any(pair.means.kind == "step" for pair in pairs)

    def is_evaluation(self, pairs: list[NamedNumber], text: str) -> bool:  # noqa: ARG002
        """None: Megatron's ` validation loss at iteration ..` is not among what is wanted."""
        return False

    def _with_tokens(self, pairs: list[NamedNumber]) -> list[NamedNumber]:
        """With the tokens, where the arguments told how long a sample is."""
        counts = {pair.means.name: pair.value for pair in pairs if pair.means.kind == "count"}
        samples = counts.get("consumed_samples")
        if self._seq_length is None or samples is None or "consumed_tokens" in counts:
            return pairs
        self.note(_SEQ_LENGTH.format(self._seq_length))
        return [
            *pairs,
            NamedNumber(_TOKENS, "consumed samples x seq_length", samples * self._seq_length),
        ]


def is_iteration(text: str) -> bool:
    """Whether this line, or one of the arguments before it, is Megatron's or DeepSpeed's."""
    if MEGATRON in text:
        return bool(_fields(plain(text[:MAX_CHARS])))
    if "iter time (s):" in text:
        return _PIPE.search(plain(text[:MAX_CHARS])) is not None
    return " ...." in text and _ARGUMENT.match(text) is not None


def _fields(text: str) -> list[NamedNumber]:
    pairs = []
    for part in text.split("|"):
        name, colon, figure = part.rpartition(":")
        if match := _ITERATION.search(part):
            pairs.append(NamedNumber(STEP, "iteration", float(match[1])))
            continue
        name = " ".join(name.split())
        means = _FIELDS.get(name.lower()) if colon else None
        value = _value(means, figure) if means else None
        if means is not None and value is not None:
            pairs.append(NamedNumber(means, name, value))
    return pairs if any(pair.means is STEP for pair in pairs) else []


def _value(means: Meaning, figure: str) -> float | None:
    match = _FIGURE.match(figure)
    if match is None:
        return None
    return count(match[1]) if means.kind == "count" else number(match[1])


def _pipe(match: re.Match[str]) -> list[NamedNumber]:
    figures = (
        (Meaning("loss", "loss"), "loss", number(match[2])),
        (Meaning("own_time", "iter_time", unit="s"), "iter time (s)", number(match[3])),
        (_SAMPLES, "samples/sec", number(match[4] or "")),
    )
    step = NamedNumber(STEP, "steps", float(match[1]))
    return [step, *(NamedNumber(means, name, v) for means, name, v in figures if v is not None)]


def _memory(text: str) -> list[NamedNumber]:
    """`[Rank 0] (after 10 iterations) memory (MB) | allocated: 1.5 | max allocated: 2.5 | ...`."""
    pairs = []
    for part in text.split("|"):
        name, colon, figure = part.partition(":")
        value = number(figure.strip()) if colon else None
        if value is not None and name.strip().endswith(("allocated", "reserved")):
            printed = f"memory {' '.join(name.split())}"
            pairs.append(NamedNumber(Meaning("rate", printed, unit="B"), printed, value * _MIB))
    return pairs
