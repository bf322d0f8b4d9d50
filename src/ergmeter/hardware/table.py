"""From a name to its row, or to the reason why there is none.

The trap: an answer for every name. A near name is a question to the user; its peak is never used.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import os
import re
import sys
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from ergmeter.errors import FormatError, NotMeasurable, UsageError
from ergmeter.hardware.rows import folded, read_rows

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from ergmeter.hardware.spec import DeviceSpec

USER_FILE_VARIABLE = "ERGMETER_HARDWARE"


def lookup(name: str, *, extra: Path | None = None) -> DeviceSpec:
    """The row of that name, or NotMeasurable with what to do. `extra`: instead of the user's file.

    The user's rows come first, then the built-in ones. Driver names and aliases are unique over a
    file, so their order can't matter; they are one index.
    """
    found = candidates(name, extra=extra)
    if len(found) > 1:
        keys = ", ".join(spec.key for spec in found)
        raise NotMeasurable(
            f"{name!r} is the name of several devices, and their figures differ; name one of"
            f" them: {keys}"
        )
    return found[0]


def candidates(name: str, *, extra: Path | None = None) -> tuple[DeviceSpec, ...]:
    """The rows that a name may mean: one, or those that share it; NotMeasurable if there is none.

    What all of them agree on can be said of the name.
    """
    wanted = folded(name)
    users, built_in = _user_table(extra), _built_in()
    rows = {**built_in.rows, **users.rows}
    if wanted in users.names:
        return (rows[users.names[wanted]],)
    if wanted in built_in.names:
        return (rows[built_in.names[wanted]],)
    if wanted in built_in.ambiguous:
        return tuple(rows[key] for key in built_in.ambiguous[wanted])
    raise NotMeasurable(
        f"no row of the hardware table is named {name!r}; `erg peaks` lists them"
        f"{_question(_like(wanted, rows))}"
    )


def devices(*, extra: Path | None = None) -> list[DeviceSpec]:
    """Every row: the built-in ones in the order of the file, a user's row in place of its like."""
    return list({**_built_in().rows, **_user_table(extra).rows}.values())


def built_in_devices() -> list[DeviceSpec]:
    """The rows that come with ergmeter, whatever the user has added."""
    return list(_built_in().rows.values())


def ambiguous_names() -> dict[str, tuple[str, ...]]:
    """Names that several rows could claim, with the keys of those rows."""
    return dict(_built_in().ambiguous)


def user_file() -> Path | None:
    """The file of the user's own rows, if there is one."""
    named = os.environ.get(USER_FILE_VARIABLE)
    if named:
        if not Path(named).is_file():
            raise UsageError(f"{USER_FILE_VARIABLE} names {named}, which is not a file")
        return Path(named)
    try:
        path = Path("~/.config/ergmeter/hardware.toml").expanduser()
    except RuntimeError:  # a container's user without a home has no rows there either
        return None
    return path if path.is_file() else None


@dataclasses.dataclass(frozen=True, slots=True)
class _Table:
    rows: dict[str, DeviceSpec]
    names: dict[str, str]  # every folded name, to the key of its row
    ambiguous: dict[str, tuple[str, ...]]


_NO_ROWS = _Table({}, {}, {})


_MOST_SUGGESTED = 5
_LEAST_LETTERS = 2  # of a part of a name; "a" is in most of them


def _like(wanted: str, rows: dict[str, DeviceSpec]) -> list[str]:
    """Keys of rows to ask about, nearest first: names with this text in them, else similar ones.

    Nothing is ever computed from them.
    """
    spelled = {
        key: [folded(n) for n in (key, row.name, *row.driver_names, *row.aliases)]
        for key, row in rows.items()
    }
    part = _letters(wanted)
    # A row is as near as its shortest name with the text in it: "4090" is the RTX 4090, then the D.
    around = {
        key: min((len(n) for n in map(_letters, names) if part in n), default=None)
        for key, names in spelled.items()
        if len(part) >= _LEAST_LETTERS
    }
    holding = {key: length for key, length in around.items() if length is not None}
    if holding:
        return sorted(holding, key=lambda key: holding[key])[:_MOST_SUGGESTED]
    of = {name: key for key, names in spelled.items() for name in names}
    near = difflib.get_close_matches(wanted, of, n=_MOST_SUGGESTED, cutoff=0.75)
    return list(dict.fromkeys(of[name] for name in near))[:2]


def _letters(name: str) -> str:
    """A name without what people leave out or put in: "rtx4090", "RTX-4090", "RTX 4090"."""
    return re.sub(r"[^a-z0-9]+", "", name.casefold())


def _question(keys: list[str]) -> str:
    if not keys:
        return ""
    *others, last = keys
    return f". Did you mean {', '.join(others)} or {last}?" if others else f". Did you mean {last}?"


@functools.cache
def _built_in() -> _Table:
    text = resources.files("ergmeter.hardware").joinpath("hardware.toml").read_text("utf-8")
    document = tomllib.loads(text)
    ambiguous = {folded(name): tuple(keys) for name, keys in document.pop("ambiguous").items()}
    rows, names = read_rows(document, "hardware.toml")
    return _Table(rows, names, ambiguous)


def _user_table(extra: Path | None) -> _Table:
    path = extra or user_file()
    if path is None:
        return _NO_ROWS
    try:
        document = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"{path} can't be read: {error.strerror or error}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FormatError(f"{path} is not TOML: {error}") from error
    rows, names = read_rows(document, str(path))
    for key, row in rows.items():
        own = {name for name, of in names.items() if of == key}
        replaced = sorted({of for name, of in _built_in().names.items() if name in own})
        said = f"row of {path}"
        if replaced:
            said += f", in place of the built-in {', '.join(replaced)}"
        note = f"{row.note}; {said}" if row.note else said
        rows[key] = dataclasses.replace(row, note=note, origin=str(path))
    return _Table(rows, names, {})
