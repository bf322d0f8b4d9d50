"""Which variables of a cell are keys, and how do they reach it without being written down?

The trap: a key in a scenario's `environment` that is copied into plan.json and every cell.json, and
leaves the house with the results. A plan says "(hidden)" in its place. The driver, which has read
the file of scenarios, hands the value to its children in a variable of its own, from which it is
put under its name when the cell starts, and only in cells of that scenario.

The other trap: a setting that is taken for a key. MAX_TOKENS hidden is two cells with one id, so a
number, a truth and the name of a setting are none, but where the name says that it is a password.
"""

from __future__ import annotations

import hashlib
import os
import re
from typing import TYPE_CHECKING, Any

from ergmeter.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from ergmeter.bench.plan.cells import Cell

SAID = "(hidden)"
PREFIX = "ERGMETER_HIDDEN_"
# TOKENIZERS_PARALLELISM is none, nor is GIT_AUTHOR_NAME.
_KEY = re.compile(r"key|token(?!i[sz])|auth(?!or(?!i[sz]))|session", re.IGNORECASE)
_PASSWORD = re.compile(r"secret|passw|passphrase|cred|cookie", re.IGNORECASE)
_PLAIN = re.compile(r"[\d.eE+-]{1,12}|true|false|yes|no|none|\{\w+\}", re.IGNORECASE)
_IN_ADDRESS = re.compile(r"(?<=://)[^/@\s]+@")  # who signs in, and how
# Among arguments `pad_token` and `label_key` are none: just names that are of keys alone.
_ARGUMENT = re.compile(
    r"(?:^|[._-])(?:hub|hf|access|auth|api|bearer|private|secret)[_-]?(?:token|key)$|(?:^|\.)token$"
    r"|secret|passw|passphrase|credential",
    re.IGNORECASE,
)

# As those begin that are given out: Hugging Face, GitHub, GitLab, AWS, Slack; and OpenAI and its
# like, whose `sk-` begins names too, but not with so much by chance in one piece.
_ISSUED = re.compile(
    r"\b(?:(hf_|gh[pousr]_|github_pat_|glpat-|AKIA|xox[abpr]-)(?=[\w-]*\d)[\w-]{12,}"
    r"|(sk-)[\w-]*?(?=[A-Za-z]*\d)[A-Za-z\d]{16,})"
)
_NAMED = re.compile(r"-{0,2}([A-Za-z_][\w.-]*)(?:=(.*))?")


def is_key(name: str, value: str = "") -> bool:
    """Whether a variable is not to be written down: by its name, or an address with a password."""
    return _is_named(name, value) or bool(_IN_ADDRESS.search(value))


def _is_named(name: str, value: str) -> bool:
    return bool(_PASSWORD.search(name) or (_KEY.search(name) and not _PLAIN.fullmatch(value)))


def written(name: str, value: str) -> str:
    """A variable's value as it may be written down."""
    return "***" if _is_named(name, value) else _IN_ADDRESS.sub("***@", value)


def complaints(given: Mapping[str, Any], *, within: str = "") -> Iterator[str]:
    """What there is against settings: keys, which stand in the plan and in every table."""
    for one, value in given.items():
        name = f"{within}{one}"
        parts = value if isinstance(value, list | tuple) else [value]
        for part in parts:
            if isinstance(part, dict):
                yield from complaints(part, within=f"{name}.")
        texts = [part for part in parts if isinstance(part, str) and part]
        if _ARGUMENT.search(name) and any(not _PLAIN.fullmatch(text) for text in texts):
            yield (
                f"{name} is a key, and settings are written down in the plan and in every table:"
                " give it as a variable under `environment`"
            )


def in_command(words: Iterable[str]) -> list[str]:
    """What in a command looks like a key: how it begins, and never all of it."""
    parts = [part for word in words for part in word.split()]  # a word may be a line for a shell
    return [
        said
        for one, after in zip(parts, [*parts[1:], ""], strict=True)
        if (said := _key(one, after))
    ]


def _key(word: str, after: str) -> str:
    """How a key begins, in a word of a command or as the value that comes after it; or nothing."""
    issued = _ISSUED.search(word)
    if issued:
        return f"{issued[1] or issued[2]}..."
    if _IN_ADDRESS.search(word):
        return "an address with a password"
    found = _NAMED.fullmatch(word)
    if found is None:
        return ""
    name, value = found[1], found[2]
    is_option = word.startswith("-")
    if value is None:
        value = after if is_option and not after.startswith("-") else ""
    # What a shell or a setting puts in is not written here.
    if not value or value.startswith("$") or _PLAIN.fullmatch(value):
        return ""
    is_named = _ARGUMENT.search(name) if is_option else name.isupper() and _is_named(name, value)
    return word.partition("=")[0] + ("=..." if found[2] else " ...") if is_named else ""


def warning(words: Iterable[str], *, scenario: str) -> str:
    """What to say of a scenario's command; nothing where no key is in it."""
    said = dict.fromkeys(in_command(words))
    if not said:
        return ""
    return (
        f"scenario {scenario!r}: {', '.join(said)} in its command looks like a key, and commands"
        " are written down in the plan: give it as a variable under `environment`"
    )


def keys(environment: Mapping[str, str], *, scenario: str) -> dict[str, str]:
    """A scenario's keys, by the variables in which they are handed on."""
    there = environment.items()
    return {_handed(scenario, name): value for name, value in there if is_key(name, value)}


def hand_over(found: Mapping[str, str]) -> None:
    """Have the processes that this one starts find them."""
    os.environ.update(found)


def put(cell: Cell, around: Mapping[str, str]) -> dict[str, str]:
    """The cell's own variables, keys with their values, of what is in the environment around."""
    found = {}
    for name, value in cell.environment.items():
        if value != SAID:
            found[name] = value
            continue
        there = [one for one in (_handed(cell.scenario, name), name) if one in around]
        if not there:
            raise UsageError(
                f"{name} of scenario {cell.scenario!r} is a key, which is not kept in the plan,"
                f" and nothing hands it to this process: set {name} where cells start"
            )
        found[name] = around[there[0]]
    return found


def _handed(scenario: str, name: str) -> str:
    """Two scenarios may have different keys under one name."""
    return f"{PREFIX}{hashlib.sha256(scenario.encode()).hexdigest()[:8]}_{name}"
