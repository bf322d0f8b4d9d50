"""Which data does a cell need, and how is it made? Loaded, put in form, and kept.

One file serves all cells of a model, or of all models where no tokenizer has a part in it.
`erg train` gets a prompt and a response, divided at the response's mark; `sft_trainer` the text in
one field, or tokens.

The trap: a cache that is known by a name that says nothing. The original's `cache_all.json` is of
whatever was wanted first. Here the name has a digest of all that the file is made of, a local
file's contents included: other data is another file, and other cells; a note beside it says which.
"""

from __future__ import annotations

import dataclasses
import fcntl
import functools
import hashlib
import json
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ergmeter.bench import dataforms
from ergmeter.bench.cells import Plan
from ergmeter.errors import FormatError

_DIGITS = 16
_PIECE_BYTES = 1 << 20
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
    response_template: object,
    text_field: object,
    as_pairs: bool,
) -> Job:
    """What is to be made for a model."""
    by_tokenizer = not as_pairs and (stanza.get("chat_template") or stanza.get("tokenize"))
    mark = stanza.get("response_template") or response_template
    field = str(stanza.get("dataset_text_field") or text_field or _TEXT_FIELD)
    whose = model if by_tokenizer else ""
    source = Path(str(stanza.get("dataset_name") or dataforms.ALPACA)).expanduser()
    made_of = [dict(stanza), _contents(source), whose, mark, field, as_pairs]
    said = json.dumps(made_of, sort_keys=True, default=str)
    digest = hashlib.sha256(said.encode()).hexdigest()[:_DIGITS]
    # For people: what tells files apart is the digest.
    name = re.sub(r"[^\w.]", "_", whose)[-64:] or "all"
    return Job(
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
        found = path.stat()
        return _digest(path, found.st_mtime_ns, found.st_size) if path.is_file() else ""
    except OSError:
        return ""


@functools.lru_cache(maxsize=32)
def _digest(path: Path, _mtime_ns: int, _size_bytes: int) -> str:
    """Once for all cells that are planned of it."""
    found = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE_BYTES):
            found.update(piece)
    return found.hexdigest()


def original_name(made: Job) -> str:
    """What FMS calls such a file: for data that its own program made, where ours is left out."""
    return f"cache_{re.sub(r'[/-]', '_', made.model) or 'all'}.json"


def to_json(made: Job) -> dict[str, Any]:
    """As a plan keeps it."""
    return {**dataclasses.asdict(made), "stanza": dict(made.stanza)}


def prepare(
    plan: Plan, directory: Path, *, say: Callable[[str], None] = lambda _line: None
) -> None:
    """Make the data that a plan's cells need, in that directory; what is there already is kept.

    Of several drivers that share the directory one makes it, and the others wait.
    """
    for one in plan.settings.get("data", ()):
        directory.mkdir(parents=True, exist_ok=True)
        wanted = Job(**one)
        path = directory / wanted.file
        note = path.with_suffix(".made.json")
        said = json.dumps(one, sort_keys=True, indent=1)
        with _locked(directory):
            if path.is_file() and note.is_file() and note.read_text(encoding="utf-8") == said:
                continue
            number = _write(path, _rows(wanted))
            note.write_text(said, encoding="utf-8")
        say(f"data: {number} examples in {path}")


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Be the one that makes data there, as far as the file system has locks.

    The directory itself is locked: a file for it would have to be left there.
    """
    number = os.open(directory, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(number, fcntl.LOCK_EX)
        yield
    finally:
        os.close(number)


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
    """A line for each, whole or not at all: where there are no locks, two at once do no harm."""
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
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
