"""Which figures stand on lines of their own, as nki-llama's calculator asks for them?

    step_time: 1.234
    throughput: 150.5
    loss: 2.345

The trap: such lines are half of prose. `Average throughput: 150.5` is a summary, `eval loss: 2.1`
an evaluation, `throughput: 9000 tokens/s` another figure under the same name; and a line that also
names its step is a loop's own, which is read as any loop's.
"""

from __future__ import annotations

import re

from ergmeter.importers.labels import of_evaluation, plain
from ergmeter.importers.logfile import Words
from ergmeter.importers.names import SECONDS
from ergmeter.importers.pairs import HINTS
from ergmeter.importers.signatures import NXDT

_PLAIN = re.compile(
    r"(?<![\w/.\-])(step_time|throughput|samples/sec|tokens/sec|seq/s|train_loss|loss|lr"
    r"|learning_rate|grad_norm|gradient_norm|global_step|step|epoch)\s{0,4}[:=]\s{0,12}"
    r"([-+]?(?:\d[\d.]{0,30}(?:[eE][-+]?\d{1,4})?|\.\d{1,20}|[nN]a[nN]|[iI]nf))"
    r"(?=\s?([A-Za-z]{1,9}(?:/[A-Za-z]{1,6})?)?)(?![\w.]*[:=])"
)
PLAIN_WORDS = Words(
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
    """The names and figures of a plain line; None if it is none, or a loop's own."""
    if len(text) > _LONGEST or not any(hint in text for hint in _HINTS):
        return None
    if NXDT in text or "%|" in text or "{" in text:
        return None
    text = plain(text)
    said = _PLAIN.findall(text)
    if not said or _OTHER.search(text) or of_evaluation(text):
        return None
    found = [_in_its_unit(name, figure, unit) for name, figure, unit in said]
    names = {name for name, _ in found}
    if names & _STEP:
        return None if names - _STEP - {"epoch"} else found
    numbered = _SPACED_STEP.search(text)
    return [("step", numbered[1]), *found] if numbered else found


def is_own(name: str) -> bool:
    """Whether this name makes plain lines NXDT's: a step time or a rate, whatever its unit."""
    return name.startswith("step_time") or name == "throughput" or "/" in name


def _in_its_unit(name: str, figure: str, unit: str) -> tuple[str, str]:
    """`throughput: 9000 tokens/s` is no throughput of NXDT's; `step_time: 12 ms` has its unit."""
    if name == "throughput" and "/" in unit:
        return unit, figure
    if name == "step_time" and unit in SECONDS:
        return f"step_time_{'s' if unit == 's' else unit}", figure
    return name, figure
