"""How does an example of a data set read as text, and where in it does the answer begin?

The trap: finding the answer by its tokens. A mark such as "\\n### Response:" is other tokens at the
beginning of a text than in the middle, so the original cut off the first two and hoped. Here the
mark is found in the text, and tokens are told apart by where in the text they begin.
"""

from __future__ import annotations

import csv
import importlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from ergmeter.errors import FormatError, PluginError, UsageError

Example: TypeAlias = Mapping[str, Any]

ALPACA = "yahma/alpaca-cleaned"  # what the original loads where nothing is said
_IGNORED = -100  # the label that bears no loss, in torch
_SLICED = re.compile(r"(\w+)(?:\[(\d*):(\d*)\])?")
# The form of Stanford Alpaca (Taori et al. 2023), which the original's marks are of.
_TASK = "Below is an instruction that describes a task"
_WITH_INPUT = ", paired with an input that provides further context"
_WRITE = ". Write a response that appropriately completes the request.\n\n"


class NoMark(Exception):  # noqa: N818  the text says what is missing
    """The answer's beginning can't be told."""


def loaded(name: str, *, split: str, options: Mapping[str, Any]) -> Iterable[Example]:
    """The examples of a local file (JSON, JSON Lines or CSV), or of a data set on the hub."""
    path = Path(name).expanduser()
    if path.is_file():
        return _sliced(_local(path), split)
    if path.suffix in (".json", ".jsonl", ".csv") or name.startswith((".", "/", "~")):
        raise UsageError(f"no data at {path}")
    library = _library("datasets", "data on the hub")
    found: Iterable[Example] = library.load_dataset(name, split=split, **options)
    return found


def _local(path: Path) -> list[Example]:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".csv":
        return list(csv.DictReader(text.splitlines()))
    try:
        if text.lstrip().startswith("["):
            rows = json.loads(text)
        else:
            rows = [json.loads(line) for line in text.split("\n") if line.strip()]
    except ValueError as error:
        raise FormatError(f"{path} is not JSON: {error}") from error
    if not all(isinstance(row, dict) for row in rows):
        raise FormatError(f"{path}: every example must be an object")
    return list(rows)


def _sliced(rows: list[Example], split: str) -> list[Example]:
    found = _SLICED.fullmatch(split)
    if found is None:
        raise UsageError(f"dataset_split {split!r} is none; write such as train[:2000]")
    return rows[int(found[2] or 0) : int(found[3]) if found[3] else None]


def _library(name: str, what: str) -> Any:  # noqa: ANN401  a module
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise PluginError(f"{what} needs {name}: pip install 'ergmeter[train]'") from error


def tokenizer(model: str) -> Any:  # noqa: ANN401  of transformers
    """The model's own."""
    found = _library("transformers", "tokenising").AutoTokenizer.from_pretrained(model)
    if not found.is_fast:
        raise UsageError(f"the tokenizer of {model} can't tell where a token begins in the text")
    return found


def form(
    chat_template: str | None,
    *,
    formatting: str,
    input_field: str,
    response_field: str,
    tokenizer: Any,  # noqa: ANN401
) -> Callable[[Example], str]:
    """The function that makes text of an example: a chat template's, or the instruction's."""
    if chat_template:
        return _chat(chat_template, tokenizer)
    if formatting != "instruct":
        raise UsageError(f"formatting {formatting!r} is none; write instruct, or a chat_template")

    def instruct(example: Example) -> str:
        try:
            asked, answer = example["instruction"], example[response_field]
        except KeyError as error:
            raise FormatError(
                f"an example has no {error}; it has {', '.join(example) or 'nothing'}"
            ) from error
        more = example.get(input_field) or ""
        said = f"{_TASK}{_WITH_INPUT if more else ''}{_WRITE}### Instruction:\n{asked}\n\n"
        return said + (f"### Input:\n{more}\n\n" if more else "") + f"### Response: {answer}"

    return instruct


def _chat(written: str, tokenizer: Any) -> Callable[[Example], str]:  # noqa: ANN401
    """The original gives the template one message: the example itself."""
    jinja = _library("jinja2", "a chat template")
    sandbox = _library("jinja2.sandbox", "a chat template").ImmutableSandboxedEnvironment
    marks = {
        name: getattr(tokenizer, name, None) or "" for name in ("bos_token", "eos_token")
    }  # without a tokenizer none: `erg train` puts its own
    try:
        template = sandbox(trim_blocks=True, lstrip_blocks=True).from_string(written)
    except jinja.TemplateError as error:
        raise UsageError(f"chat_template is no Jinja template: {error}") from error

    def chat(example: Example) -> str:
        try:
            return str(template.render(messages=[example], **marks))
        except jinja.TemplateError as error:
            raise UsageError(f"chat_template refuses an example: {error}") from error

    return chat


def pair(text: str, mark: str | None) -> dict[str, str]:
    """The text as prompt and response, divided behind the mark."""
    at = _answer_at(text, mark)
    prompt, response = text[:at], text[at:].strip()
    if not response:
        raise NoMark(f"there is nothing behind {mark!r}")
    return {"prompt": prompt, "response": response}


def tokens(text: str, mark: str | None, tokenizer: Any) -> dict[str, list[int]]:  # noqa: ANN401
    """The text in tokens; without a mark all of them bear loss."""
    whole = text if text.endswith(tokenizer.eos_token or "") else text + tokenizer.eos_token
    made = tokenizer(whole, return_offsets_mapping=True)
    at = _answer_at(whole, mark) if mark else 0
    labels = [
        one if start >= at and end > start else _IGNORED
        for one, (start, end) in zip(made["input_ids"], made["offset_mapping"], strict=True)
    ]
    return {
        "input_ids": list(made["input_ids"]),
        "attention_mask": list(made["attention_mask"]),
        "labels": labels,
    }


def _answer_at(text: str, mark: str | None) -> int:
    if not mark:
        raise NoMark("where the answer begins is not said; give response_template")
    at = text.find(mark)
    if at < 0:
        raise NoMark(f"its text has no {mark!r}")
    return at + len(mark)
