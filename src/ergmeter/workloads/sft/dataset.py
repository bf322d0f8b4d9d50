"""Reads the examples of a data file or generates the built-in ones, and renders them as text.

Every line is checked before the training starts, and lines without an example are named by number.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ergmeter.errors import FormatError, UsageError, suggestion
from ergmeter.workloads import demo_text as tales

ROLES = ("system", "user", "assistant")
FORMATS = (
    "prompt and response; instruction, input and output; user and assistant; messages; or text"
)
_BAD_SHOWN = 3

# The built-in data set. Tokenizers make a token of 4 to 5 bytes of such text; so few bytes are put
# into an example that it is not cut.
TRAINED, HELD_OUT = 2048, 64
_BYTES_A_TOKEN = 4
_MOST_TOKENS = 2048
_MOST_BYTES_A_TALE = 512
DATA_SEED = 11  # of the data, not of the training: two seeds of a comparison see the same text


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """One message of a conversation: system, user or assistant."""

    role: str
    text: str


@dataclass(frozen=True, slots=True)
class Example:
    """A conversation that ends with an answer, or a text. `fields`: values for a template file."""

    where: str
    turns: tuple[ChatTurn, ...] = ()
    text: str | None = None
    fields: Mapping[str, str] | None = None


class _NoExample(Exception):  # noqa: N818  the text says what is wrong with the line
    pass


def read(path: Path) -> list[Example]:
    """The examples of a JSON Lines file; a .txt file is one text."""
    try:
        content = path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise UsageError(f"no data at {path}") from error
    except UnicodeDecodeError as error:
        raise FormatError(
            f"{path} is not UTF-8 text: {error.reason} at byte {error.start}"
        ) from error
    if path.suffix == ".txt":
        examples = [Example(str(path), text=content)] if content.strip() else []
    else:
        examples = _lines(content, path)
    if not examples:
        raise FormatError(f"{path} holds no example")
    return examples


def builtin(*, longest: int) -> tuple[list[Example], list[Example]]:
    """Generated examples (requests for tales, and the tales): to train on, and held out.

    An example asks for one tale or more, of up to about `longest` tokens together, so that lengths
    are spread as those of instructions are.
    """
    dice = random.Random(DATA_SEED)  # of which only random() is used: its sequence is kept
    most = min(longest, _MOST_TOKENS) * _BYTES_A_TOKEN
    sizes = [int(dice.random() * most) for _ in range(HELD_OUT + TRAINED)]
    documents = tales.documents(sum(sizes) + len(sizes) * _MOST_BYTES_A_TALE)
    documents.reverse()  # so that the next is the last, which is quick to take
    made = [
        _builtin(_taken(documents, size), f"built-in example {number + 1}")
        for number, size in enumerate(sizes)
    ]
    return made[HELD_OUT:], made[:HELD_OUT]


def _taken(documents: list[tales.DemoText], size_bytes: int) -> list[tales.DemoText]:
    """The next examples up to a size in bytes; at least one."""
    taken = [documents.pop()]
    left = size_bytes - len(taken[0].text)
    while len(documents[-1].text) <= left:
        taken.append(documents.pop())
        left -= len(taken[-1].text)
    return taken


def _builtin(documents: list[tales.DemoText], where: str) -> Example:
    asked = "\n".join(document.prompt.decode().strip() for document in documents)
    answer = "\n".join(document.tale.decode().strip() for document in documents)
    return _asked(where, asked, answer)


def _lines(content: str, path: Path) -> list[Example]:
    examples, bad = [], []
    # Not splitlines: JSON may hold characters that it takes for the end of a line.
    for number, line in enumerate(content.split("\n"), 1):
        if not line.strip():
            continue
        try:
            examples.append(_example(line, f"{path}, line {number}"))
        except _NoExample as error:
            bad.append(f"line {number}: {error}")
    if bad:
        more = f" (and {len(bad) - _BAD_SHOWN} more)" if len(bad) > _BAD_SHOWN else ""
        raise FormatError(f"{path}: {'; '.join(bad[:_BAD_SHOWN])}{more}")
    return examples


def _example(line: str, where: str) -> Example:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _NoExample(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise _NoExample(f"must be an object; got {type(value).__name__}")
    for keys, make in _SHAPES.items():
        if all(key in value for key in keys):
            return make(value, where)
    raise _NoExample(f"has the keys {', '.join(value) or 'none'}; expected {FORMATS}")


def _pair(
    prompt: str, response: str, *, context: str = ""
) -> Callable[[dict[str, Any], str], Example]:
    def make(value: dict[str, Any], where: str) -> Example:
        more = _text_of(value, context, may_lack=True) if context else ""
        system = _text_of(value, "system", may_lack=True)
        asked, answer = _text_of(value, prompt), _text_of(value, response)
        return _asked(where, asked, answer, more=more, system=system)

    return make


def _asked(where: str, asked: str, answer: str, *, more: str = "", system: str = "") -> Example:
    """An example of one question, with its fields under all names templates use."""
    prompt = f"{asked}\n\n{more}" if more else asked
    turns = (ChatTurn("user", prompt), ChatTurn("assistant", answer))
    fields = {
        **dict.fromkeys(("prompt", "user"), prompt),
        **dict.fromkeys(("response", "output", "assistant"), answer),
        "instruction": asked,
        "input": more,
        "system": system,
    }
    return Example(where, (ChatTurn("system", system), *turns) if system else turns, fields=fields)


def _messages(value: dict[str, Any], where: str) -> Example:
    listed = value["messages"]
    if not isinstance(listed, list) or not listed:
        raise _NoExample("messages must be a list")
    turns = tuple(_turn(turn, number) for number, turn in enumerate(listed))
    if turns[-1].role != "assistant":
        raise _NoExample(f"messages end with {turns[-1].role}: there is no answer to learn")
    if [turn.role for turn in turns if turn.role != "system"] == ["user", "assistant"]:
        system = next((turn.text for turn in turns if turn.role == "system"), "")
        return _asked(where, turns[-2].text, turns[-1].text, system=system)
    return Example(where, turns)


def _turn(value: object, number: int) -> ChatTurn:
    if not isinstance(value, dict):
        raise _NoExample(f"messages[{number}] must be an object with role and content")
    role = value.get("role")
    if role not in ROLES:
        raise _NoExample(f"messages[{number}].role must be one of {', '.join(ROLES)}; got {role!r}")
    return ChatTurn(role, _text_of(value, "content"))


def _text_of(value: Mapping[str, Any], key: str, *, may_lack: bool = False) -> str:
    content = value.get(key)
    if may_lack and content in (None, ""):
        return ""
    if not isinstance(content, str):
        raise _NoExample(f"{key} must be text; got {type(content).__name__}")
    if not content.strip():
        raise _NoExample(f"{key} is empty")
    return content


_SHAPES: dict[tuple[str, ...], Callable[[dict[str, Any], str], Example]] = {
    ("messages",): _messages,
    ("prompt", "response"): _pair("prompt", "response"),
    ("prompt", "completion"): _pair("prompt", "completion"),
    ("instruction", "output"): _pair("instruction", "output", context="input"),
    ("user", "assistant"): _pair("user", "assistant"),
    ("text",): lambda value, where: Example(where, text=_text_of(value, "text")),
}


# Templates render an example as parts, each with whether it bears loss. It stays in parts until it
# is tokens, so the answer need not be searched for in the rendered text.


_NAMED = re.compile(r"\{(\w+)\}")
_ANSWER = {"response", "output", "assistant"}
_QUESTION = {"prompt", "user", "instruction"}
_NAMES = [*sorted(_QUESTION), "input", "system", *sorted(_ANSWER)]
_JINJA = (".jinja", ".jinja2", ".j2")


@dataclass(frozen=True, slots=True)
class Rendered:
    """An example's text in parts, each with whether it bears loss.

    `is_marked`: the template wrote the marks of begin and end itself, so none are added.
    """

    parts: tuple[tuple[str, bool], ...]
    is_marked: bool = False

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(text for text, _ in self.parts)


Template: TypeAlias = Callable[[Example], Rendered]  # of a conversation


def render(example: Example, template: Template) -> Rendered:
    """The example in parts: a text as it is, a conversation by the template."""
    return template(example) if example.text is None else Rendered(((example.text, True),))


def plain(example: Example) -> Rendered:
    """The question, a new line, the answer: for a tokenizer without a chat template."""
    parts = []
    for turn in example.turns:
        is_answer = turn.role == "assistant"
        parts.append((turn.text, is_answer))
        parts.append(("\n", is_answer))
    return Rendered(tuple(parts[:-1]))


class Chat:
    """A tokenizer's own chat template. Answers bear loss, and what the template puts after them."""

    def __init__(self, tokenizer: Any) -> None:  # noqa: ANN401  of transformers
        self._tokenizer = tokenizer

    def __call__(self, example: Example) -> Rendered:
        """The example in parts, found by rendering it up to each answer and past it."""
        conversation = self._text(example, example.turns, is_asking=False)
        parts, done = [], ""
        for number, turn in enumerate(example.turns):
            if turn.role != "assistant":
                continue
            before = self._text(example, example.turns[:number], is_asking=True)
            after = self._text(example, example.turns[: number + 1], is_asking=False)
            longer = (done, before, after, conversation)
            if not all(more.startswith(less) for less, more in itertools.pairwise(longer)):
                raise UsageError(
                    f"{example.where}: the model's chat template changes earlier turns when later"
                    " ones come, so answers can't be separated; give data.template_path"
                )
            parts += [(before[len(done) :], False), (after[len(before) :], True)]
            done = after
        return Rendered(tuple(parts), is_marked=True)

    def _text(self, example: Example, turns: tuple[ChatTurn, ...], *, is_asking: bool) -> str:
        messages = [{"role": turn.role, "content": turn.text} for turn in turns]
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=is_asking
            )
        except TemplateError as error:
            raise UsageError(
                f"{example.where}: the model's chat template refuses this: {error}"
            ) from error
        return text


class TemplateFile:
    """A template file: {prompt}, {system} and so on; what follows {response} is learnt too.

    Without {response} the answer comes after the whole. A .jinja file is rendered as the prompt.
    """

    def __init__(self, path: Path) -> None:
        try:
            written = path.read_text(encoding="utf-8")
        except FileNotFoundError as error:
            raise UsageError(f"no template at {path}") from error
        self._path = path
        self._jinja = None
        if path.suffix in _JINJA:
            try:
                self._jinja = ImmutableSandboxedEnvironment().from_string(written)
            except TemplateError as error:
                raise FormatError(f"{path} is no Jinja template: {error}") from error
            return
        self._before, self._after = self._divided(written)

    def __call__(self, example: Example) -> Rendered:
        """Fill in the template; return the example in parts."""
        fields = example.fields
        if fields is None:
            raise UsageError(
                f"{example.where} has several questions; the template {self._path} takes one"
            )
        answer = fields["response"]
        if self._jinja is not None:
            return Rendered(((self._of_jinja(fields, example.where), False), (answer, True)))
        return Rendered(
            ((_filled(self._before, fields), False), (answer + _filled(self._after, fields), True))
        )

    def _of_jinja(self, fields: Any, where: str) -> str:  # noqa: ANN401
        assert self._jinja is not None
        try:
            return self._jinja.render(**fields)
        except TemplateError as error:
            raise UsageError(f"{where}: the template {self._path} refuses this: {error}") from error

    def _divided(self, written: str) -> tuple[str, str]:
        """Return the template's text before the answer and after it."""
        if "{{" in written or "{%" in written:
            raise UsageError(f"{self._path} reads like a Jinja template; name it .jinja")
        names = _NAMED.findall(written)
        for name in names:
            if name not in _NAMES:
                near = suggestion(name, _NAMES, "did you mean {{{}}}?")
                hint = near or f"there are {', '.join(_NAMES)}"
                raise UsageError(f"{self._path}: {{{name}}} is no placeholder; {hint}")
        if not _QUESTION & set(names):
            raise UsageError(f"{self._path} has no {{prompt}}, so answers would have no question")
        answers = [match for match in _NAMED.finditer(written) if match[1] in _ANSWER]
        if len(answers) > 1:
            raise UsageError(f"{self._path} names the answer {len(answers)} times; once is enough")
        if not answers:
            return written, ""
        return written[: answers[0].start()], written[answers[0].end() :]


def _filled(written: str, fields: Any) -> str:  # noqa: ANN401
    """Fills in the fields in one pass, so braces in values are left as they are."""
    return _NAMED.sub(lambda match: fields[match[1]], written)


def template_for(path: Path | None, tokenizer: Any) -> Template:  # noqa: ANN401
    """The template of the file, else the tokenizer's own, else `plain`."""
    if path is not None:
        return TemplateFile(path)
    return Chat(tokenizer) if getattr(tokenizer, "chat_template", None) else plain
