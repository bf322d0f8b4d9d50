"""What the options of `erg load` say: each a text that may be mistyped, so exit 2 with one line."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import click

LIMITS = ("ttft", "tpot", "e2e")


def numbers(option: str, text: str, kind: type[int] | type[float]) -> list[float]:
    """Numbers with commas, each above 0 and once."""
    try:
        found = [kind(part) for part in text.split(",")]
    except ValueError as error:
        raise click.UsageError(f"{option} takes numbers with commas; got {text!r}") from error
    if not all(0 < number < float("inf") for number in found):
        raise click.UsageError(f"{option} takes numbers above 0; got {text!r}")
    return list(dict.fromkeys(found))


def slo(text: str | None) -> dict[str, float]:
    """Limits by name: ttft=0.5,tpot=0.05."""
    limits = {}
    for part in text.split(",") if text else ():
        name, _, limit = part.partition("=")
        try:
            limits[name.strip()] = float(limit)
        except ValueError as error:
            raise click.UsageError(f"--slo takes ttft=0.5,tpot=0.05; got {part!r}") from error
    unknown = [name for name in limits if name not in LIMITS]
    if unknown:
        raise click.UsageError(f"--slo knows {', '.join(LIMITS)}; got {unknown[0]!r}")
    return limits


def share(option: str, text: str) -> float:
    """A share as 5% or 0.05, from 0 to 1."""
    number, is_percent = text.removesuffix("%"), text.endswith("%")
    try:
        value = float(number) / (100 if is_percent else 1)
    except ValueError as error:
        raise click.UsageError(
            f"{option} takes a share such as 5% or 0.05; got {text!r}"
        ) from error
    if not 0 <= value <= 1:
        raise click.UsageError(f"{option} takes 0% to 100%, or 0 to 1; got {text!r}")
    return value


def headers(given: tuple[str, ...], key: str) -> tuple[tuple[str, str], ...]:
    """Headers as pairs, that of the key first. $VARIABLE is filled in."""
    found = [("Authorization", f"Bearer {key}")] if key else []
    for header in given:
        name, colon, value = header.partition(":")
        if not colon or not name.strip():
            raise click.UsageError(f"--header takes 'NAME: VALUE'; got {name!r}")
        filled = os.path.expandvars(value.strip())
        if not (name + filled).isprintable() or not (name + filled).isascii():
            raise click.UsageError(f"--header {name.strip()!r}: its value can't stand in a header")
        found.append((name.strip(), filled))
    return tuple(found)


def body(text: str | None) -> dict[str, Any]:
    """Fields of a JSON object."""
    try:
        found = json.loads(text or "{}")
    except ValueError as error:
        raise click.UsageError(f"--body takes a JSON object ({error})") from error
    if not isinstance(found, dict):
        raise click.UsageError(f"--body takes a JSON object; got {text!r}")
    return found


def hide_headers() -> None:
    """A header may hold a key, and the command line goes into the run."""
    for place, word in enumerate(sys.argv):
        if word == "--header" and place + 1 < len(sys.argv):
            sys.argv[place + 1] = f"{sys.argv[place + 1].partition(':')[0]}: ***"
        elif word.startswith("--header="):
            sys.argv[place] = f"{word.partition(':')[0]}: ***"
