"""A copy of a run that says nothing of who made it and where, with every figure as it was.

Two traps shaped it. A name hides in more places than its own field: a writer's id has the host in
it, a device's id is a serial number, an error message has a path. So what is secret is gathered
first, from all headers, and then replaced wherever a text is, each by the same word every time.
And a file may keep what it no longer shows: tables are written anew, never patched, and the copy is
read back and searched before anybody sees it.

Only what ergmeter wrote as a run is copied: no command line, no labels, no report or log beside it.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from ergmeter.errors import FormatError, UsageError
from ergmeter.runlog import format as fmt
from ergmeter.runlog.reader import RUNNING, Run

# What of a header is not passed on, as it holds free words or is of no use to another.
_DROPPED = {
    "run.json": ("command", "directory", "job", "group"),
    "writer.json": ("pid_started_s", "platform"),
    "settings": ("note", "job"),
    "facts": ("pci_bus_id", "serial", "disk_path", "disks", "network_interfaces", "kernel", "host"),
}
_UUID = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_ADDRESS = re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w.])|[\w.+-]+@[\w-]+(?:\.[\w-]+)+")
# Of the system's own directories everybody has the same, and a reason names them.
_PATH = re.compile(
    r"(?<![\w/])(?:~|[A-Za-z]:\\|/(?!(?:sys|proc|dev)/)|\.{1,2}/)[\w.@+~\\-][^\s'\"`,;:()<>]*"
)
_HOME = re.compile(r"(?:/home/|/Users/|/scratch/|\\Users\\)([\w.-]+)")
_EVERYBODY = {"root", "user", "localhost", "local", "none", ""}
_TEXTS = ("device", "name", "unit", "phase")


@dataclass
class _Words:
    """Secrets, and what stands for each."""

    known: dict[str, str] = field(default_factory=dict)

    def add(self, secret: str, kind: str) -> None:
        if secret.lower() not in _EVERYBODY and secret not in self.known:
            number = sum(word.startswith(f"{kind}-") for word in self.known.values()) + 1
            self.known[secret] = f"{kind}-{number}"

    def uuid(self, secret: str) -> str:
        number = sum(word.startswith("00000000-") for word in self.known.values()) + 1
        return self.known.setdefault(secret, f"00000000-0000-0000-0000-{number:012d}")

    def pattern(self) -> re.Pattern[str] | None:
        longest = sorted(self.known, key=len, reverse=True)
        either = "|".join(re.escape(one) for one in longest)
        # Whole words: a host may be called `vm`, and a probe is `nvml`.
        return re.compile(rf"(?<![A-Za-z0-9])(?:{either})(?![A-Za-z0-9])") if longest else None

    def clean(self, text: str) -> str:
        """A text without them, nor other paths, addresses or ids."""
        text = _UUID.sub(lambda found: self.uuid(found[0]), text)
        pattern = self.pattern()
        text = pattern.sub(lambda found: self.known[found[0]], text) if pattern else text
        text = _ADDRESS.sub("address", text)
        return _PATH.sub("path", text)


def anonymise(run: Path, into: Path, *, name: str | None = None) -> Path:
    """Write the copy. UsageError while the run is written; FormatError where something is left."""
    opened = Run.open(run)
    if opened.status == RUNNING:
        raise UsageError(f"{run} is being written; anonymise it when it has ended")
    if into.exists():
        raise UsageError(f"{into} exists; choose another directory")
    into.parent.mkdir(parents=True, exist_ok=True)
    words = _gathered(opened)
    staging = into.with_name(f".{into.name}.{secrets.token_hex(4)}")
    try:
        staging.mkdir()
        _write_run(run, staging, words, name)
        for writer in opened.writers:
            target = staging / words.clean(writer.directory.name)
            target.mkdir()
            _write_writer(writer.directory, target, words)
        left = leaks(staging, words.known)
        if left:
            raise FormatError(f"{run} can't be made anonymous: {left[0]}")
        staging.rename(into)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return into


def leaks(run: Path, known: dict[str, str]) -> list[str]:
    """Where one of these words still stands: in the bytes of a file or the texts of a table."""
    words = _Words(dict.fromkeys(known, ""))
    pattern = words.pattern()
    found = []
    for path in sorted(p for p in run.rglob("*") if p.is_file()):
        texts = [str(path.relative_to(run)), path.read_bytes().decode("latin-1")]
        if path.suffix in (fmt.LIVE, fmt.FULL):
            texts += _texts_in(_table(path))
        for text in texts:
            match = pattern.search(text) if pattern else None
            if match:
                found.append(f"{path.name} still holds {match[0]!r}")
                break
    return found


def _gathered(run: Run) -> _Words:
    words = _Words()
    texts = [json.dumps(run.header)]
    for writer in run.writers:
        header = writer.header
        _add_host(words, str(header.get("host") or ""))
        words.add(str(header.get("boot_id") or ""), "boot")
        texts += [json.dumps(header), *(mark.detail for mark in writer.marks)]
        for device in header["devices"]:
            _add_host(words, str((device.get("facts") or {}).get("host") or ""))
            for key in ("serial", "pci_bus_id"):
                words.add(str((device.get("facts") or {}).get(key) or ""), "id")
    for text in texts:
        for one in _UUID.findall(text):
            words.uuid(one)
        for one in _HOME.findall(text):
            words.add(one, "user")
    for key in ("id", "group"):
        words.add(str(run.header.get(key) or ""), "run")
    words.add(str(run.header.get("directory") or ""), "path")
    return words


def _add_host(words: _Words, host: str) -> None:
    """A host by its whole name, its own and its domain's."""
    first, _, domain = host.partition(".")
    for one in (host, first, domain):
        words.add(one, "host")


def _write_run(run: Path, target: Path, words: _Words, name: str | None) -> None:
    header = json.loads((run / fmt.RUN_FILE).read_bytes())
    kept = {n: v for n, v in header.items() if n not in _DROPPED["run.json"]}
    whole = {**_clean(kept, words), "id": secrets.token_hex(8), "anonymised": True}
    if name is not None:
        whole["name"] = name
    _put(target / fmt.RUN_FILE, json.dumps(whole, indent=1) + "\n", run / fmt.RUN_FILE)


def _write_writer(source: Path, target: Path, words: _Words) -> None:
    for path in sorted(source.iterdir()):
        if path.name.startswith(".") or path.is_symlink():
            continue
        if path.name == fmt.WRITER_FILE:
            header = json.loads(path.read_bytes())
            _put(target / path.name, json.dumps(_writer(header, words), indent=1) + "\n", path)
        elif path.name == fmt.MARKS_FILE:
            lines = [_mark(line, words) for line in path.read_text().splitlines()]
            _put(target / path.name, "".join(f"{line}\n" for line in lines if line), path)
        elif path.suffix in (fmt.LIVE, fmt.FULL):
            _write_table(path, target / path.name, words)


def _writer(header: dict[str, Any], words: _Words) -> dict[str, Any]:
    kept = {n: v for n, v in header.items() if n not in _DROPPED["writer.json"]}
    settings = kept.get("settings") or {}
    kept["settings"] = {n: v for n, v in settings.items() if n not in _DROPPED["settings"]}
    for device in kept.get("devices") or ():
        facts = device.get("facts") or {}
        device["facts"] = {n: v for n, v in facts.items() if n not in _DROPPED["facts"]}
    clean: dict[str, Any] = _clean(kept, words)
    for device, before in zip(clean.get("devices") or (), kept.get("devices") or (), strict=True):
        device.update(kind=before["kind"], probe=before["probe"])  # words of ours
    return clean


def _clean(value: Any, words: _Words) -> Any:  # noqa: ANN401  whatever JSON holds
    if isinstance(value, str):
        return words.clean(value)
    if isinstance(value, list):
        return [_clean(one, words) for one in value]
    if isinstance(value, dict):
        return {words.clean(str(n)): _clean(v, words) for n, v in value.items()}
    return value


def _mark(line: str, words: _Words) -> str:
    try:
        mark = json.loads(line)
        return json.dumps({**mark, "detail": words.clean(str(mark["detail"]))})
    except (ValueError, KeyError, TypeError):
        return ""  # half a line of a killed writer: nobody knows what is in it


def _table(path: Path) -> pa.Table:
    """Whatever of a table can be read: of one that was cut off all whole batches."""
    if path.suffix == fmt.FULL:
        import pyarrow.parquet as pq  # noqa: PLC0415

        with pq.ParquetFile(path) as file:
            return file.read()
    batches = []
    reader = None
    try:
        with path.open("rb") as file:
            reader = pa.ipc.open_stream(file)
            batches.extend(iter(reader))
    except (pa.ArrowException, OSError):
        pass
    return pa.table({}) if reader is None else pa.Table.from_batches(batches, reader.schema)


def _write_table(source: Path, target: Path, words: _Words) -> None:
    table = _table(source)
    if not table.num_columns:
        return
    for number, name in enumerate(table.column_names):
        if name in _TEXTS and pa.types.is_dictionary(table.schema.field(name).type):
            chunks = [_renamed(chunk, words) for chunk in table[name].chunks]
            column = pa.chunked_array(chunks, table.schema.field(name).type)
            table = table.set_column(number, table.schema.field(name), column)
    about = {k: v for k, v in (table.schema.metadata or {}).items() if k in _OURS}
    table = table.replace_schema_metadata(about)
    if source.suffix == fmt.FULL:
        import pyarrow.parquet as pq  # noqa: PLC0415

        pq.write_table(table, target, compression="zstd", write_page_checksum=True)
    else:
        with target.open("wb") as file, pa.ipc.new_stream(file, table.schema) as stream:
            stream.write_table(table.unify_dictionaries())
    _aged(target, source)


_OURS = (b"format", b"version", b"table")


def _renamed(chunk: pa.DictionaryArray, words: _Words) -> pa.DictionaryArray:
    texts = [None if t is None else words.clean(t) for t in chunk.dictionary.to_pylist()]
    return pa.DictionaryArray.from_arrays(chunk.indices, pa.array(texts, pa.string()))


def _texts_in(table: pa.Table) -> list[str]:
    found = [str(table.schema.metadata or {})]
    for name in table.column_names:
        column = table[name]
        if pa.types.is_dictionary(column.type):
            found += [str(t) for chunk in column.chunks for t in chunk.dictionary.to_pylist()]
    return found


def _put(path: Path, text: str, like: Path) -> None:
    path.write_text(text)
    _aged(path, like)


def _aged(path: Path, like: Path) -> None:
    """As old as the original: by that a run that was cut off is known."""
    changed_s = like.stat().st_mtime
    os.utime(path, (changed_s, changed_s))
