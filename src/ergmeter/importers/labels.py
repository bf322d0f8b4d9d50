"""Does a line say of itself that it is about an evaluation?

`eval step=1 loss=9 tokens=100` has all that a training step has. The trap on the other side: the
same words qualify a single figure (`val loss 2.5` on a line of training), or stand in a path or the
name of a run. So a label stands before the first figure, in brackets, or after a word such as
`split=`; and where `train` stands nearer to the figure, it is none.
"""

from __future__ import annotations

import re

_ANSI = re.compile(r"\x1b\[[0-9;?]{0,20}[A-Za-z]")
_PLAIN = r"eval(?:uat(?:e|ion|ing))?|valid(?:at(?:e|ion|ing))?"
_WORD = rf"(?:{_PLAIN}|val|test(?:ing)?)"
_MARKED = re.compile(
    rf"[\[(<]\s?{_WORD}\s?[\])>]"
    rf"|(?<![\w/.\-])(?:split|mode|phase|stage|subset|prefix)[\"']?\s?[=:]\s?[\"']?{_WORD}\b",
    re.IGNORECASE,
)
_MARKED_TRAINING = re.compile(r"[\[(<]\s?train(?:ing)?\s?[\])>]", re.IGNORECASE)
_QUALIFIES = r"\s+(?:\w*loss|tok\w*|ppl|perplexity|acc\w*|metrics?)\b"  # that figure, not the line
_LEADING = re.compile(
    rf"(?<![\w/.\-])(?:(?:{_PLAIN})(?![\w/.\-=]|{_QUALIFIES})"
    r"|(?:val|test(?:ing)?)"
    r"(?:\s?[:|>]|\s-|\s+(?:global[_ ])?(?:step|iter|epoch|batch|dataloader)))",
    re.IGNORECASE,
)
_TRAINING = re.compile(r"(?<![\w/.\-])train(?:ing)?(?![\w.\-])", re.IGNORECASE)
_FIRST_FIGURE = re.compile(r"step|iter|loss|tok", re.IGNORECASE)
# `eval/step=3`, "val_iteration": 3: the line counts the steps of an evaluation.
EVALUATION_STEP = re.compile(
    r"(?:eval|val|valid|validation|test)[_/](?:global_)?(?:step|iter|iteration|batch)"
)


def plain(text: str) -> str:
    """The text without its colours."""
    return _ANSI.sub("", text) if "\x1b" in text else text


def of_evaluation(text: str) -> bool:
    """Whether the line is labelled as one of evaluation, validation or test."""
    text = plain(text)
    low = text.lower()
    if "val" not in low and "test" not in low:
        return False  # what most lines are spared: the full look
    if _MARKED.search(text) and not _MARKED_TRAINING.search(text):
        return True
    first = _FIRST_FIGURE.search(text)
    end = 0 if first is None else first.start()
    labels = [found.start() for found in _LEADING.finditer(text) if found.start() < end]
    return bool(labels) and _TRAINING.search(text, labels[-1], end) is None
