"""From a name to its row, or to the reason why there is none.

The trap: an answer for every name. A near name is a question to the user; its peak is never used.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import os
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
    wanted = folded(name)
    users, built_in = _user_table(extra), _built_in()
    if wanted in users.names:
        return users.rows[users.names[wanted]]
    if wanted in built_in.names:
        key = built_in.names[wanted]
        return users.rows.get(key, built_in.rows[key])
    if wanted in built_in.ambiguous:
        keys = ", ".join(built_in.ambiguous[wanted])
        raise NotMeasurable(
            f"unknown peak: pass --peak, or one of these as the device: {keys} ({name!r} is the"
            " name of several, and their figures differ)"
        )
    raise NotMeasurable(
        f"unknown peak: pass --peak (no row of the hardware table is named {name!r};"
        f" `erg peaks` lists them){_nearest(wanted, users, built_in)}"
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


def _nearest(wanted: str, *tables: _Table) -> str:
    """A question about names like it. Nothing is ever computed from them."""
    spelled = {
        folded(name): name
        for table in tables
        for row in table.rows.values()
        for name in (*row.driver_names, *row.aliases, row.key)
    }
    near = difflib.get_close_matches(wanted, spelled, n=2, cutoff=0.75)
    if not near:
        return ""
    return f". Did you mean {' or '.join(repr(spelled[name]) for name in near)}?"


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
