"""Makes or reads the prompts, and their lengths.

A prefix cache answers a repeated prompt without computing. So made-up prompts differ from their
first word on. Those of a file are used in order and begin again only when used up, which is
reported.

There is no tokenizer here. Two short requests measure how many tokens the server's template adds
and how many a word takes (`preflight`); the server's own count is the metric.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ergmeter.errors import FormatError, UsageError

if TYPE_CHECKING:
    from pathlib import Path

    from ergmeter.load.client import Endpoint

# Short and common: in most vocabularies each is one token, with the blank before it.
_COMMON = """
time year people way day man thing woman life child world school state family student
group country problem hand part place case week company system program question work
number night point home water room mother area money story fact month lot right study
book eye job word business issue side kind head house service friend father power hour
game line end member
"""
_WORDS = _COMMON.split()


@dataclass(frozen=True, slots=True)
class Prompt:
    """What one request asks: a text or messages, and how many tokens it may get."""

    content: str | list[dict[str, Any]]
    output_tokens: int

    def fields(self, endpoint: Endpoint) -> dict[str, Any]:
        """What is asked, as the endpoint wants it."""
        if endpoint == "completions":
            if not isinstance(self.content, str):
                raise UsageError("messages need --endpoint chat; completions take a prompt")
            return {"prompt": self.content}
        messages = (
            [{"role": "user", "content": self.content}]
            if isinstance(self.content, str)
            else self.content
        )
        return {"messages": messages}


@dataclass(frozen=True, slots=True)
class MadeUp:
    """Prompts of so many random words. The n-th of a seed is always the same."""

    words: int
    output_tokens: int
    seed: int
    repeats_after: int | None = None

    def prompt(self, number: int) -> Prompt:
        """The prompt of a request."""
        dice = random.Random(f"{self.seed}/{number}")
        return Prompt(" ".join(dice.choices(_WORDS, k=self.words)), self.output_tokens)


@dataclass(frozen=True, slots=True)
class FromFile:
    """Prompts of a file, in their order, again from the first when they are used up."""

    prompts: tuple[Prompt, ...]

    @property
    def repeats_after(self) -> int | None:
        """How many requests there are before one is asked again."""
        return len(self.prompts)

    def prompt(self, number: int) -> Prompt:
        """The prompt of a request."""
        return self.prompts[number % len(self.prompts)]


def read_prompts(path: Path, *, output_tokens: int) -> FromFile:
    """Prompts of a file of JSON lines: {"prompt": ...} or {"messages": [...]}, or a bare string.

    A line's own "max_tokens" goes before `output_tokens`.
    """
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            prompts.append(_prompt(line, output_tokens, f"{path}, line {number}"))
    if not prompts:
        raise FormatError(f"{path} holds no prompts; give a JSON object with a prompt in each line")
    return FromFile(tuple(prompts))


def _prompt(line: str, output_tokens: int, where: str) -> Prompt:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise FormatError(f"{where}: no JSON ({error})") from error
    if isinstance(entry, str):
        return Prompt(entry, output_tokens)
    content = entry.get("prompt", entry.get("messages")) if isinstance(entry, dict) else None
    if not isinstance(content, str | list) or not content:
        raise FormatError(f"{where}: neither a prompt nor messages: {line[:60]}")
    own = entry.get("max_tokens", output_tokens)
    if not isinstance(own, int) or own < 1:
        raise FormatError(f"{where}: max_tokens must be 1 or more; it is {own!r}")
    return Prompt(content, own)
