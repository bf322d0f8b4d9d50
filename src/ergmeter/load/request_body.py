"""Makes the requests: their prompts, and the options that a server accepts.

A prefix cache answers a repeated prompt without computing. So made-up prompts differ from their
first word on. Those of a file are used in order and begin again only when used up, which is
reported. There is no tokenizer here. Two short requests measure how many tokens the server's
template adds and how many a word takes; the server's own count is the metric.

A first request outside any run finds the options that the server accepts. `stream_options` makes
vLLM send its token counts and is unknown to older servers. `ignore_eos` keeps answers at full
length on vLLM and SGLang, and `transformers serve` answers 422 to it. Options are removed until the
server accepts. If it accepts none, the answer's length is requested by its newer name,
`max_completion_tokens`, which OpenAI's reasoning models require. A server that is down is found
before a run directory is made.
"""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ergmeter.errors import ErgmeterError, FormatError, UsageError
from ergmeter.load.answer import Answer
from ergmeter.load.client import Client, Endpoint, RequestTarget

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
    """The prompt of a request, a text or messages, and the most tokens of its answer."""

    content: str | list[dict[str, Any]]
    output_tokens: int

    def fields(self, endpoint: Endpoint) -> dict[str, Any]:
        """Return the prompt as fields of the request body for this endpoint."""
        if endpoint == "completions":
            if not isinstance(self.content, str):
                raise UsageError("messages need --endpoint chat; completions take a prompt")
            return {"prompt": self.content}
        if isinstance(self.content, str):
            return {"messages": [{"role": "user", "content": self.content}]}
        return {"messages": self.content}


@dataclass(frozen=True, slots=True)
class MadeUp:
    """Prompts of `words` random words. The n-th prompt of a seed is always the same."""

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
    """Prompts of a file in order, starting again from the first when used up."""

    prompts: tuple[Prompt, ...]

    @property
    def repeats_after(self) -> int | None:
        """The number of requests before a prompt is repeated."""
        return len(self.prompts)

    def prompt(self, number: int) -> Prompt:
        """The prompt of a request."""
        return self.prompts[number % len(self.prompts)]


def read_prompts(path: Path, *, output_tokens: int) -> FromFile:
    """Read prompts from JSON lines: {"prompt": ...}, {"messages": [...]} or a bare string.

    A line's own "max_tokens" replaces `output_tokens`.
    """
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            prompts.append(_prompt(line, output_tokens, f"{path}, line {number}"))
    if not prompts:
        raise FormatError(f'{path} has no prompts; write one {{"prompt": "..."}} per line')
    return FromFile(tuple(prompts))


def _prompt(line: str, output_tokens: int, where: str) -> Prompt:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise FormatError(f"{where}: not JSON ({error})") from error
    if isinstance(entry, str):
        return Prompt(entry, output_tokens)
    content = entry.get("prompt", entry.get("messages")) if isinstance(entry, dict) else None
    if not isinstance(content, str | list) or not content:
        raise FormatError(f"{where}: neither a prompt nor messages: {line[:60]}")
    own = entry.get("max_tokens", output_tokens)
    if not isinstance(own, int) or own < 1:
        raise FormatError(f"{where}: max_tokens must be 1 or more; it is {own!r}")
    return Prompt(content, own)


# The most informative options first; if a server refuses them, the next are tried.
_OPTIONS: tuple[dict[str, Any], ...] = (
    {"stream_options": {"include_usage": True}, "ignore_eos": True},
    {"stream_options": {"include_usage": True}},
    {"ignore_eos": True},
    {},
)
_LENGTH_FIELDS = ("max_tokens", "max_completion_tokens")  # the second in chat only
_REFUSED = ("HTTP 400", "HTTP 422")
_FEW_WORDS = 8


class ServerError(ErgmeterError):
    """The server can't be used; the text has its URL, its answer and what to do."""


@dataclass(frozen=True, slots=True)
class Asking:
    """Where requests go, and the options and fields that this server accepts."""

    target: RequestTarget
    endpoint: Endpoint
    model: str
    extra: dict[str, Any]  # what the user adds to each body
    options: dict[str, Any]  # options that the server accepts
    length_field: str = _LENGTH_FIELDS[0]  # what limits the tokens of an answer
    counts_tokens: bool = True  # whether its answers have `usage`

    def request(self, prompt: Prompt) -> bytes:
        """Return the bytes of a request. A token limit in the user's own fields replaces ours."""
        body = {"model": self.model, **prompt.fields(self.endpoint), "stream": True}
        if not any(field in self.extra for field in _LENGTH_FIELDS):
            body[self.length_field] = prompt.output_tokens
        return self.target.request({**body, **self.options, **self.extra})


async def prepare(
    asking: Asking, prompts: MadeUp | FromFile, *, prompt_tokens: int
) -> tuple[Asking, MadeUp | FromFile]:
    """Find the accepted options, and fit made-up prompts to the requested length."""
    # Made-up prompts: one that no later request repeats.
    first = prompts.prompt(-3 if isinstance(prompts, MadeUp) else 0)
    asking = await accepted_options(asking, first)
    if asking.counts_tokens and isinstance(prompts, MadeUp):
        prompts = await prompts_of_length(asking, prompts, tokens=prompt_tokens)
    return asking, prompts


async def accepted_options(asking: Asking, prompt: Prompt) -> Asking:
    """Find the options that the server accepts. ServerError if it can't be used."""
    refusal = None
    fields = _LENGTH_FIELDS if asking.endpoint == "chat" else _LENGTH_FIELDS[:1]
    for length_field, options in itertools.product(fields, _OPTIONS):
        tried = replace(asking, options=options, length_field=length_field)
        answer = await _asked(tried, prompt)
        if answer.failure not in _REFUSED:
            break
        if length_field == _LENGTH_FIELDS[0]:
            refusal = answer  # of the field that most servers know
    else:
        assert refusal is not None
        answer = refusal
    if answer.failure and answer.failure != "empty":
        raise ServerError(_unusable(asking, answer))
    return replace(tried, counts_tokens=answer.usage_tokens is not None)


async def prompts_of_length(asking: Asking, prompts: MadeUp, *, tokens: int) -> MadeUp:
    """Set the words that make `tokens` tokens, by the server's count for two prompts."""
    counts = []
    for number, words in enumerate((_FEW_WORDS, max(tokens, 4 * _FEW_WORDS)), start=-2):
        prompt = replace(prompts, words=words, output_tokens=1).prompt(number)
        answer = await _asked(asking, prompt)
        if answer.prompt_tokens is None:
            return prompts
        counts.append((words, answer.prompt_tokens))
    (few, few_tokens), (many, many_tokens) = counts
    if many_tokens <= few_tokens:
        return prompts
    per_word = (many_tokens - few_tokens) / (many - few)
    return replace(prompts, words=max(1, round((tokens - few_tokens) / per_word + few)))


async def _asked(asking: Asking, prompt: Prompt) -> Answer:
    answer = Answer(0)
    client = Client(asking.target)
    connection = await client.connected(answer)
    if connection is not None:
        await client.ask(connection, asking.request(prompt), answer)
        connection.close()
    return answer


def _unusable(asking: Asking, answer: Answer) -> str:
    url = asking.target.address.url
    if answer.failure == "no connection":
        return f"no server at {url} ({answer.detail}); is it up, and is the port right?"
    if answer.failure in ("HTTP 401", "HTTP 403"):
        cure = "; put the key in OPENAI_API_KEY, or name its variable with --api-key-env"
    elif answer.failure == "HTTP 404":
        cure = f"; is {asking.model!r} what the server calls its model, and is the URL its base?"
    elif answer.failure == "timeout":
        cure = "; --timeout waits longer"
    else:
        cure = ""
    return f"{url} did not answer a first request: {answer.failure} ({answer.detail}){cure}"
