"""Prepares the data of cells: loads it, formats it and caches it.

One file serves all cells of a model, or of all models if no tokenizer is involved. `erg train` gets
a prompt and a response, split after the response_template; `sft_trainer` gets the text in one
field, or tokens.

The file's name has a digest of all that the data depends on, the contents of local files included,
so that other data is another file.
"""

from __future__ import annotations

import csv
import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from ergmeter.atomic_write import replacing
from ergmeter.bench.plan.cells import BenchPlan
from ergmeter.errors import FormatError, UsageError
from ergmeter.registry import library

_library = functools.partial(library, package="'ergmeter[train]'")
Example: TypeAlias = Mapping[str, Any]

ALPACA = "yahma/alpaca-cleaned"  # FMS's default
_IGNORED = -100  # torch's label for tokens without loss
_SLICED = re.compile(r"(\w+)(?:\[(\d*):(\d*)\])?")
# The prompt of Stanford Alpaca (Taori et al. 2023), which FMS's response templates belong to.
_TASK = "Below is an instruction that describes a task"
_WITH_INPUT = ", paired with an input that provides further context"
_WRITE = ". Write a response that appropriately completes the request.\n\n"


class NoMark(Exception):  # noqa: N818  the text says what is missing
    """An example's response can't be found by the response_template."""


def loaded(name: str, *, split: str, options: Mapping[str, Any]) -> Iterable[Example]:
    """The examples of a local file (JSON, JSON Lines or CSV), or of a data set on the hub."""
    path = Path(name).expanduser()
    if path.is_file():
        return _sliced(_local(path), split)
    if path.suffix in (".json", ".jsonl", ".csv") or name.startswith((".", "/", "~")):
        raise UsageError(f"no data at {path}")
    datasets = _library("datasets", "data on the hub")
    examples: Iterable[Example] = datasets.load_dataset(name, split=split, **options)
    return examples


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
    match = _SLICED.fullmatch(split)
    if match is None:
        raise UsageError(f"dataset_split {split!r} is not valid; write train or train[:2000]")
    return rows[int(match[2] or 0) : int(match[3]) if match[3] else None]


def load_tokenizer(model: str) -> Any:  # noqa: ANN401  of transformers
    """Load the model's tokenizer. Raises UsageError if it has no fast (Rust) version."""
    tokenizer = _library("transformers", "tokenising").AutoTokenizer.from_pretrained(model)
    if not tokenizer.is_fast:
        raise UsageError(f"{model} has no fast tokenizer, which is needed for token positions")
    return tokenizer


def text_form(
    chat_template: str | None,
    *,
    formatting: str,
    input_field: str,
    response_field: str,
    tokenizer: Any,  # noqa: ANN401
) -> Callable[[Example], str]:
    """Return the function that formats an example as text, by chat template or as instruction."""
    if chat_template:
        return _chat(chat_template, tokenizer)
    if formatting != "instruct":
        raise UsageError(f"formatting {formatting!r} is unknown; use instruct, or a chat_template")

    def instruct(example: Example) -> str:
        try:
            asked, answer = example["instruction"], example[response_field]
        except KeyError as error:
            raise FormatError(
                f"an example has no {error}; it has {', '.join(example) or 'nothing'}"
            ) from error
        more = example.get(input_field) or ""
        prompt = f"{_TASK}{_WITH_INPUT if more else ''}{_WRITE}### Instruction:\n{asked}\n\n"
        return prompt + (f"### Input:\n{more}\n\n" if more else "") + f"### Response: {answer}"

    return instruct


def _chat(written: str, tokenizer: Any) -> Callable[[Example], str]:  # noqa: ANN401
    """Return a function that renders a chat template, with the example as only message (FMS)."""
    jinja = _library("jinja2", "a chat template")
    sandbox = _library("jinja2.sandbox", "a chat template").ImmutableSandboxedEnvironment
    # Empty without a tokenizer: `erg train` adds its own.
    marks = {name: getattr(tokenizer, name, None) or "" for name in ("bos_token", "eos_token")}
    try:
        template = sandbox(trim_blocks=True, lstrip_blocks=True).from_string(written)
    except jinja.TemplateError as error:
        raise UsageError(f"chat_template is not a Jinja template: {error}") from error

    def chat(example: Example) -> str:
        try:
            return str(template.render(messages=[example], **marks))
        except jinja.TemplateError as error:
            raise UsageError(f"chat_template refuses an example: {error}") from error

    return chat


def pair(text: str, mark: str | None) -> dict[str, str]:
    """Split a text into prompt and response, after the mark. Raises NoMark if it can't be split."""
    at = _answer_at(text, mark)
    prompt, response = text[:at], text[at:].strip()
    if not response:
        raise NoMark(f"no response follows {mark!r}")
    return {"prompt": prompt, "response": response}


def tokens(text: str, mark: str | None, tokenizer: Any) -> dict[str, list[int]]:  # noqa: ANN401
    """Tokenize a text; only tokens after the mark bear loss, without a mark all of them."""
    ended = text if text.endswith(tokenizer.eos_token or "") else text + tokenizer.eos_token
    made = tokenizer(ended, return_offsets_mapping=True)
    at = _answer_at(ended, mark) if mark else 0
    labels = [
        token if start >= at and end > start else _IGNORED
        for token, (start, end) in zip(made["input_ids"], made["offset_mapping"], strict=True)
    ]
    return {
        "input_ids": list(made["input_ids"]),
        "attention_mask": list(made["attention_mask"]),
        "labels": labels,
    }


def _answer_at(text: str, mark: str | None) -> int:
    if not mark:
        raise NoMark("where the response begins is unknown; give response_template")
    at = text.find(mark)
    if at < 0:
        raise NoMark(f"response_template {mark!r} is not in its text")
    return at + len(mark)


_DIGITS = 16
_TEXT_FIELD = "output"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DataJob:
    """A data file to make. `stanza` is the scenario's `data_processing`."""

    file: str
    model: str
    stanza: Mapping[str, Any]
    response_template: str | None
    text_field: str
    as_pairs: bool


def data_job(
    stanza: Mapping[str, Any],
    *,
    model: str,
    response_template: object,
    text_field: object,
    as_pairs: bool,
) -> DataJob:
    """Return the data file that a model's cells need."""
    by_tokenizer = not as_pairs and (stanza.get("chat_template") or stanza.get("tokenize"))
    mark = stanza.get("response_template") or response_template
    field = str(stanza.get("dataset_text_field") or text_field or _TEXT_FIELD)
    whose = model if by_tokenizer else ""
    source = Path(str(stanza.get("dataset_name") or ALPACA)).expanduser()
    made_of = [dict(stanza), _contents(source), whose, mark, field, as_pairs]
    identity = json.dumps(made_of, sort_keys=True, default=str)
    digest = hashlib.sha256(identity.encode()).hexdigest()[:_DIGITS]
    # A readable part of the name; the digest makes it unique.
    name = re.sub(r"[^\w.]", "_", whose)[-64:] or "all"
    return DataJob(
        file=f"cache_{name}_{digest}.json",
        model=whose,
        stanza=stanza,
        response_template=None if mark is None else str(mark),
        text_field=field,
        as_pairs=as_pairs,
    )


def _contents(path: Path) -> str:
    """A digest of a local file; empty for data on the hub, or where there is no file yet."""
    try:
        status = path.stat()
        return _digest(path, status.st_mtime_ns, status.st_size) if path.is_file() else ""
    except OSError:
        return ""


@functools.lru_cache(maxsize=32)
def _digest(path: Path, _mtime_ns: int, _size_bytes: int) -> str:
    """Hash a file; cached by its time and size, since many cells share it."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def original_name(made: DataJob) -> str:
    """FMS's name of such a file, for data that FMS's own program has prepared."""
    return f"cache_{re.sub(r'[/-]', '_', made.model) or 'all'}.json"


def prepare(
    plan: BenchPlan, directory: Path, *, say: Callable[[str], None] = lambda _line: None
) -> None:
    """Write the data that a plan's cells need into that directory, unless it is there."""
    for stanza in plan.settings.get("data", ()):
        directory.mkdir(parents=True, exist_ok=True)
        wanted = DataJob(**stanza)
        path = directory / wanted.file
        if not path.is_file():
            number = _write(path, _rows(wanted))
            say(f"data: {number} examples in {path}")


def _rows(wanted: DataJob) -> Iterator[dict[str, Any]]:
    stanza = wanted.stanza
    examples = loaded(
        str(stanza.get("dataset_name") or ALPACA),
        split=str(stanza.get("dataset_split") or "train"),
        options=stanza.get("additional_dataset_kwargs") or {},
    )
    tokenizer = load_tokenizer(wanted.model) if wanted.model else None
    form = text_form(
        stanza.get("chat_template"),
        formatting=str(stanza.get("formatting") or "instruct"),
        input_field=str(stanza.get("input_field") or "input"),
        response_field=str(stanza.get("response_field") or wanted.text_field),
        tokenizer=tokenizer,
    )
    for number, example in enumerate(examples, 1):
        text = form(example)
        try:
            if wanted.as_pairs:
                yield pair(text, wanted.response_template)
            elif stanza.get("tokenize"):
                yield tokens(text, wanted.response_template, tokenizer)
            else:
                yield {wanted.text_field: text}
        except NoMark as error:
            raise FormatError(f"example {number} of the data: {error}") from error


def _write(path: Path, rows: Iterator[dict[str, Any]]) -> int:
    """Write a line for each row, whole or not at all; return their number."""
    number = 0
    with replacing(path) as part:
        with part.open("w", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
                number += 1
        if not number:
            raise FormatError(f"the data for {path.name} holds no example")
    return number
