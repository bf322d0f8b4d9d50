"""What in a text tells who and where: names that are known, addresses, paths; and what stands for
each.

The trap: a path has no end of its own. There are spaces, commas and apostrophes in what people call
their projects, and what is cut off at the first of them is half a name. So a value of a header that
begins with a path goes as a whole; in a sentence a path in quotes goes to the closing one, and any
other to the last word of its clause that has a slash or an ending in it. That may take some words
of a message with it, and those nobody misses.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

UUID = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_H = "[0-9a-f]{1,4}"
_BYTE = r"(?:25[0-5]|2[0-4]\d|1?\d?\d)"  # of an IPv4 address; a driver's 13.580.159.04 is none
_LABEL = "[a-z0-9](?:[a-z0-9-]*[a-z0-9])?"
# Each begins where a word does: tried from every letter of a long word it takes that squared.
_ADDRESS = re.compile(
    "|".join(
        (
            r"(?<![a-z0-9+.-])[a-z0-9+.-]+://[^\s'\"`<>]+",  # a URL, s3:// as well
            # Mail, and who is where in `user@host:path`.
            r"(?<![\w.+-])[\w.+-]+@[\w-]+(?:(?:\.[\w-]+)+|(?=:))",
            rf"(?<![\w.])(?:{_BYTE}\.){{3}}{_BYTE}(?![\w.])",
            r"(?<![\w:-])(?:[0-9a-f]{2}[:-]){5}[0-9a-f]{2}(?![\w:-])",  # of a network card
            # IPv6, which has 8 groups or a double colon: 12:34:56 is a time.
            rf"(?<![\w:.])(?:{_H}:){{7}}{_H}(?![\w:])",
            rf"(?<![\w:.])(?:{_H}(?::{_H})*)?::{_H}(?::{_H})*(?![\w:])",
            rf"(?<![\w:.])(?:{_H}:)+:(?![\w:])",
            # Hosts; of two parts only under the domains that are no other word.
            rf"(?<![\w.-])(?:{_LABEL}\.)+(?:com|org|edu|gov|local|internal|lan|intra|corp)(?![\w-])",
            rf"(?<![\w.-])(?:{_LABEL}\.){{2,}}(?:net|io|ai|dev|de|uk|fr|ch|eu|cn|jp|it|es|ca|in)"
            r"(?![\w-])",
        )
    ),
    re.IGNORECASE,
)
# What reasons of ours name, and is the same everywhere. No more of /dev and /proc: /dev/shm is for
# anybody's files, and /proc/N/cwd is where somebody is.
_EVERYWHERE = "|".join(
    (
        r"sys/class/(?:powercap|hwmon)\b",
        r"sys/devices/(?:system|virtual/neuron_device)\b",
        r"sys/block(?![\w/])",
        r"proc/(?:cpuinfo|diskstats|meminfo|stat|vmstat)(?![\w/])",
        r"dev/(?:kfd|dri|nvidia[\w*-]*|neuron[\d*]*|null)(?![\w.-])",
    )
)
_PATH = re.compile(
    rf"(?<![\w/\\])(?:~/|~(?=[A-Za-z_][\w.-]*/)|[A-Za-z]:[\\/](?!/)|\\\\(?=\w)|\.{{1,2}}/|"
    rf"/(?!(?:{_EVERYWHERE})))[\w.@+~\\-]"
)
_NO_APOSTROPHE = r"(?!(?<=\w)'(?=\w))"
_CLOSING = {quote: re.compile(rf"{_NO_APOSTROPHE}{quote}|\n") for quote in "'\"`"}
_CLAUSE_END = re.compile(rf"{_NO_APOSTROPHE}['\"`<>\n]|[:;)]+(?=\s|$)|\s\(")
_WORD = re.compile(r"\S+")
_OF_A_PATH = re.compile(r"[/\\]|\.[A-Za-z]\w{0,5}[.,]*$")  # a slash, or an ending
HOME = re.compile(r"(?:/home/|[/\\]Users[/\\])([\w.-]+)")
# The next word may be a user or just a directory: no name where it is a word of the run's own.
SCRATCH = re.compile(r"/scratch/([\w.-]+)")
_EVERYBODY = {"root", "user", "localhost", "local", "none", ""}


@dataclass
class Words:
    """Secrets, and what stands for each."""

    known: dict[str, str] = field(default_factory=dict)

    def add(self, secret: str, kind: str) -> None:
        """Take up one, unless it is everybody's."""
        if secret.lower() not in _EVERYBODY | {one.lower() for one in self.known}:
            number = sum(word.startswith(f"{kind}-") for word in self.known.values()) + 1
            self.known[secret] = f"{kind}-{number}"

    def uuid(self, secret: str) -> str:
        """What stands for this UUID."""
        number = sum(word.startswith("00000000-") for word in self.known.values()) + 1
        return self.known.setdefault(secret, f"00000000-0000-0000-0000-{number:012d}")

    def pattern(self) -> re.Pattern[str] | None:
        """Any of them. None where there is none."""
        longest = sorted(self.known, key=len, reverse=True)
        either = "|".join(f"({re.escape(one)})" for one in longest)
        # Whole words: a host may be called `vm`, and a probe is `nvml`.
        whole = rf"(?<![A-Za-z0-9])(?:{either})(?![A-Za-z0-9])"
        return re.compile(whole, re.IGNORECASE) if longest else None

    def clean(self, text: str) -> str:
        """A sentence without them, nor other paths, addresses or ids."""
        text = UUID.sub(lambda found: self.uuid(found[0]), text)
        pattern = self.pattern()
        words = [self.known[one] for one in sorted(self.known, key=len, reverse=True)]
        if pattern:
            text = pattern.sub(lambda found: words[(found.lastindex or 1) - 1], text)
        return without_paths(_ADDRESS.sub("address", text))

    def clean_value(self, text: str) -> str:
        """A value of a header, which is a path as a whole where it begins with one."""
        return "path" if _PATH.match(text) else self.clean(text)


def without_paths(text: str) -> str:
    """A sentence with `path` for each path in it."""
    kept, at = [], 0
    while found := _PATH.search(text, at):
        kept += [text[at : found.start()], "path"]
        at = _end(text, found.start(), found.end())
    return "".join((*kept, text[at:]))


def _end(text: str, start: int, least: int) -> int:
    """Where a path ends that starts here."""
    quote = text[start - 1] if start else ""
    if quote in _CLOSING:
        closing = _CLOSING[quote].search(text, least)
        return closing.start() if closing else len(text)
    clause = _CLAUSE_END.search(text, least)
    until = clause.start() if clause else len(text)
    words = _WORD.finditer(text, start, until)
    last = max((word.end() for word in words if _OF_A_PATH.search(word[0])), default=least)
    return max(least, start + len(text[start:last].rstrip(".,;:()")))


def strings_in(value: Any) -> Iterator[str]:  # noqa: ANN401  whatever JSON holds
    """All texts of a JSON value, names of fields too, as they were and not as JSON writes them."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, one in value.items():
            yield str(name)
            yield from strings_in(one)
    elif isinstance(value, list):
        for one in value:
            yield from strings_in(one)
