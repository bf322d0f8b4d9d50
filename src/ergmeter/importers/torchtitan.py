"""Reads the step lines of torchtitan.

    [rank0]:[titan] 2025-06-16 22:30:50,322 - root - INFO - step: 200  loss:  6.1384
    memory: 49.66GiB(52.28%)  tps: 5,856  tflops: 339.16  mfu: 34.29%

`tps`, and `wps` before it, is tokens per second of one device, not of the training, so it has its
own unit. The tokens of a step come from a line before the first one: `with local batch size 8,
global batch size 64, sequence length 8192`.
"""

from __future__ import annotations

import re

from ergmeter.importers.engine.pairs import MAX_CHARS, NUMBER, Meaning, NamedNumber, number, plain
from ergmeter.importers.engine.reading import StepLineImporter
from ergmeter.importers.engine.step_lines import NumberedLines, with_step
from ergmeter.ports import LineHints

_FIGURE = re.compile(
    rf"(?<![\w/.])(step|loss|grad_norm|memory|tps|wps|tflops|mfu|lr):\s{{0,12}}({NUMBER})(GiB|%)?"
)
_STARTS = "global batch size "
_BATCH = re.compile(r"global batch size (\d{1,9}), sequence length (\d{1,9})\b")
_GIB = 1 << 30
_MEANS = {
    "step": Meaning("step", "step"),
    "loss": Meaning("loss", "loss"),
    "grad_norm": Meaning("grad_norm", "grad_norm"),
    "lr": Meaning("learning_rate", "lr"),
    "memory": Meaning("rate", "memory", unit="B"),
    "tps": Meaning("rate", "tps", unit="tokens/s/device"),
    "wps": Meaning("rate", "wps", unit="tokens/s/device"),
    "tflops": Meaning("rate", "tflops", unit="TFLOP/s/device"),
    "mfu": Meaning("rate", "mfu", unit="frac"),
}
_SCALE = {"GiB": float(_GIB), "%": 0.01}
# As running totals, which are exact over any number of steps.
_TOKENS = Meaning("count", "consumed_tokens")
_SAMPLES = Meaning("count", "consumed_samples")
_BATCHED = (
    "tokens of a step are global batch size {} times sequence length {}, as the log says at its "
    "start: computed tokens, padding included"
)


def is_torchtitan(text: str) -> bool:
    """True for `step: 10  loss: 7.9  memory: 47.2GiB(59.7%)  tps: 5,123 ...`, coloured or not."""
    return "memory:" in text and "GiB(" in text and ("tps:" in text or "wps:" in text)


class _TorchTitan(NumberedLines):
    def __init__(self) -> None:
        super().__init__()
        self._batch: tuple[int, int] | None = None  # samples of a step, tokens of a sample

    def wanted(self, text: str) -> bool:
        return is_torchtitan(text) or _STARTS in text

    def pairs(self, text: str) -> list[NamedNumber]:
        if _STARTS in text and (match := _BATCH.search(text, 0, MAX_CHARS)):
            self._batch = int(match[1]), int(match[2])
            return []
        pairs = _figures(text)
        if not pairs or self._batch is None:
            return pairs
        per_step, length = self._batch
        self.note(_BATCHED.format(per_step, length))
        samples = per_step * next(pair.value for pair in pairs if pair.means.kind == "step")
        return [
            *pairs,
            NamedNumber(_SAMPLES, "steps x global batch size", samples),
            NamedNumber(_TOKENS, "steps x global batch size x sequence length", samples * length),
        ]

    def is_evaluation(self, pairs: list[NamedNumber], text: str) -> bool:  # noqa: ARG002
        return "validate step:" in text


def _figures(text: str) -> list[NamedNumber]:
    pairs = []
    for name, figure, unit in _FIGURE.findall(plain(text[:MAX_CHARS])):
        value = number(figure.replace(",", ""))
        if value is not None and (name != "step" or value.is_integer()):
            pairs.append(NamedNumber(_MEANS[name], name, value * _SCALE.get(unit, 1.0)))
    return with_step(pairs)


class TorchTitanImporter(StepLineImporter):
    """The step lines of torchtitan, in colours or not."""

    name = "torchtitan"
    looks_for = "torchtitan `step: 10  loss: 7.9  memory: 47.2GiB(59.7%)  tps: 5,123 ...`"
    hints = LineHints((b"GiB(", _STARTS.encode()))
    dialect = _TorchTitan

    def is_own(self, text: str) -> bool:
        """True if this line is torchtitan's, or the one before its first that names the batch."""
        is_step = is_torchtitan(text) and bool(_figures(text))
        return is_step or _BATCH.search(text) is not None
