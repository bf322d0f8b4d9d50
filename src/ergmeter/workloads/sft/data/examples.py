"""What is there to learn from? Examples of a file, or those that are made here.

The trap: a bad line that becomes an empty example or a traceback at step 900. Every line is looked
at before anything is trained, and those that hold no example are named by number.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ergmeter.errors import FormatError, UsageError
from ergmeter.workloads.demo import text as tales

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
    """What one of the two says, or the system before them."""

    role: str
    text: str


@dataclass(frozen=True, slots=True)
class Example:
    """A conversation that ends with an answer, or a text; and what a template may name of it."""

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
        found = [Example(str(path), text=content)] if content.strip() else []
    else:
        found = _lines(content, path)
    if not found:
        raise FormatError(f"{path} holds no example")
    return found


def builtin(*, longest: int) -> tuple[list[Example], list[Example]]:
    """Requests for tales and the tales, to train on and to hold out; none is in both.

    An example asks for one tale or more, of up to about `longest` tokens together, so that lengths
    are spread as those of instructions are.
    """
    dice = random.Random(DATA_SEED)  # of which only random() is used: its sequence is kept
    most = min(longest, _MOST_TOKENS) * _BYTES_A_TOKEN
    sizes = [int(dice.random() * most) for _ in range(HELD_OUT + TRAINED)]
    documents = tales.documents(sum(sizes) + len(sizes) * _MOST_BYTES_A_TALE)
    documents.reverse()  # so that the next is the last, which is quick to take
    made = [
        _builtin(_taken(documents, size), f"built-in example {place + 1}")
        for place, size in enumerate(sizes)
    ]
    return made[HELD_OUT:], made[:HELD_OUT]


def _taken(documents: list[tales.Document], size_bytes: int) -> list[tales.Document]:
    """The next ones, of so many bytes at most; one at least."""
    taken = [documents.pop()]
    left = size_bytes - len(taken[0].text)
    while len(documents[-1].text) <= left:
        taken.append(documents.pop())
        left -= len(taken[-1].text)
    return taken


def _builtin(documents: list[tales.Document], where: str) -> Example:
    asked = "\n".join(document.prompt.decode().strip() for document in documents)
    answer = "\n".join(document.tale.decode().strip() for document in documents)
    return _asked(where, asked, answer)


def _lines(content: str, path: Path) -> list[Example]:
    found, bad = [], []
    # Not splitlines: JSON may hold characters that it takes for the end of a line.
    for number, line in enumerate(content.split("\n"), 1):
        if not line.strip():
            continue
        try:
            found.append(_example(line, f"{path}, line {number}"))
        except _NoExample as error:
            bad.append(f"line {number}: {error}")
    if bad:
        more = f" (and {len(bad) - _BAD_SHOWN} more)" if len(bad) > _BAD_SHOWN else ""
        raise FormatError(f"{path}: {'; '.join(bad[:_BAD_SHOWN])}{more}")
    return found


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


def _text(value: dict[str, Any], where: str) -> Example:
    return Example(where, text=_text_of(value, "text"))


def _pair(prompt: str, response: str) -> Callable[[dict[str, Any], str], Example]:
    def make(value: dict[str, Any], where: str) -> Example:
        system = _text_of(value, "system", may_lack=True)
        return _asked(where, _text_of(value, prompt), _text_of(value, response), system=system)

    return make


def _instruction(value: dict[str, Any], where: str) -> Example:
    more = _text_of(value, "input", may_lack=True)
    return _asked(
        where,
        _text_of(value, "instruction"),
        _text_of(value, "output"),
        more=more,
        system=_text_of(value, "system", may_lack=True),
    )


def _asked(where: str, asked: str, answer: str, *, more: str = "", system: str = "") -> Example:
    """An example of one question, by all the names that templates have for its parts."""
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
    turns = tuple(_turn(one, place) for place, one in enumerate(listed))
    if turns[-1].role != "assistant":
        raise _NoExample(f"messages end with {turns[-1].role}: there is no answer to learn")
    if [turn.role for turn in turns if turn.role != "system"] == ["user", "assistant"]:
        system = next((turn.text for turn in turns if turn.role == "system"), "")
        return _asked(where, turns[-2].text, turns[-1].text, system=system)
    return Example(where, turns)


def _turn(value: object, place: int) -> ChatTurn:
    if not isinstance(value, dict):
        raise _NoExample(f"messages[{place}] must be an object with role and content")
    role = value.get("role")
    if role not in ROLES:
        raise _NoExample(f"messages[{place}].role must be one of {', '.join(ROLES)}; got {role!r}")
    return ChatTurn(role, _text_of(value, "content"))


def _text_of(value: Mapping[str, Any], key: str, *, may_lack: bool = False) -> str:
    found = value.get(key)
    if may_lack and found in (None, ""):
        return ""
    if not isinstance(found, str):
        raise _NoExample(f"{key} must be text; got {type(found).__name__}")
    if not found.strip():
        raise _NoExample(f"{key} is empty")
    return found


_SHAPES: dict[tuple[str, ...], Callable[[dict[str, Any], str], Example]] = {
    ("messages",): _messages,
    ("prompt", "response"): _pair("prompt", "response"),
    ("prompt", "completion"): _pair("prompt", "completion"),
    ("instruction", "output"): _instruction,
    ("user", "assistant"): _pair("user", "assistant"),
    ("text",): _text,
}
