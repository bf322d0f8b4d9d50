"""Which data does a cell need, and how is it made? Loaded, put in form, and kept.

One file serves all cells of a model, or of all models where no tokenizer has a part in it.
`erg train` gets a prompt and a response, divided at the response's mark; `sft_trainer` the text in
one field, or tokens.

The trap: a cache that is known by its name. The original's `cache_all.json` says nothing of the
data in it; here a note beside each file says what it was made of, and another wish makes it anew.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ergmeter.bench import dataforms
from ergmeter.bench.cells import Plan
from ergmeter.errors import FormatError

_HASHED = 6
_TEXT_FIELD = "output"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One file to be made. `stanza` is the scenarios' `data_processing`."""

    file: str
    model: str
    stanza: Mapping[str, Any]
    response_template: str | None
    text_field: str
    as_pairs: bool


def job(
    stanza: Mapping[str, Any],
    *,
    model: str,
    scenario: str,
    response_template: object,
    text_field: object,
    as_pairs: bool,
) -> Job:
    """What is to be made for a model; `scenario` where the data is that scenario's own."""
    by_tokenizer = not as_pairs and (stanza.get("chat_template") or stanza.get("tokenize"))
    mark = stanza.get("response_template") or response_template
    field = str(stanza.get("dataset_text_field") or text_field or _TEXT_FIELD)
    name = f"cache_{re.sub(r'[/-]', '_', model) if by_tokenizer else 'all'}"
    if scenario or as_pairs:  # beside the original's names
        said = json.dumps([dict(stanza), mark, field, as_pairs], sort_keys=True, default=str)
        name += f"_{hashlib.sha256(said.encode()).hexdigest()[:_HASHED]}"
    return Job(
        file=f"{name}.json",
        model=model if by_tokenizer else "",
        stanza=stanza,
        response_template=None if mark is None else str(mark),
        text_field=field,
        as_pairs=as_pairs,
    )


def to_json(made: Job) -> dict[str, Any]:
    """As a plan keeps it."""
    return {**dataclasses.asdict(made), "stanza": dict(made.stanza)}


def prepare(
    plan: Plan, directory: Path, *, say: Callable[[str], None] = lambda _line: None
) -> None:
    """Make the data that a plan's cells need, in that directory; what is there already is kept."""
    for one in plan.settings.get("data", ()):
        wanted = Job(**one)
        path = directory / wanted.file
        note = path.with_suffix(".made.json")
        said = json.dumps(one, sort_keys=True, indent=1)
        if path.is_file() and note.is_file() and note.read_text(encoding="utf-8") == said:
            continue
        directory.mkdir(parents=True, exist_ok=True)
        number = _write(path, _rows(wanted))
        note.write_text(said, encoding="utf-8")
        if say is not None:
            say(f"data: {number} examples in {path}")


def _rows(wanted: Job) -> Iterator[dict[str, Any]]:
    stanza = wanted.stanza
    examples = dataforms.loaded(
        str(stanza.get("dataset_name") or dataforms.ALPACA),
        split=str(stanza.get("dataset_split") or "train"),
        options=stanza.get("additional_dataset_kwargs") or {},
    )
    tokenizer = dataforms.tokenizer(wanted.model) if wanted.model else None
    form = dataforms.form(
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
                yield dataforms.pair(text, wanted.response_template)
            elif stanza.get("tokenize"):
                yield dataforms.tokens(text, wanted.response_template, tokenizer)
            else:
                yield {wanted.text_field: text}
        except dataforms.NoMark as error:
            raise FormatError(f"example {number} of the data: {error}") from error


def _write(path: Path, rows: Iterator[dict[str, Any]]) -> int:
    """A line for each, whole or not at all: two drivers at once do no harm."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    number = 0
    try:
        with beside.open("w", encoding="utf-8") as file:
            for row in rows:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
                number += 1
        if not number:
            raise FormatError(f"the data for {path.name} holds no example")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    return number
