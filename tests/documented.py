"""The shell commands and Python programs that our pages show."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [
    *sorted(ROOT.glob("*.md")),
    ROOT / "bench" / "README.md",
    *(path for path in sorted(DOCS.rglob("*.md")) if path.name != "commands.md"),
]
SHELLS = ("sh", "bash", "console")
_FENCE = re.compile(r"^( *)(```+)(\w*)\s*$")
_ENDS = {"&&", "||", "|", ";", "&", "(", ")", ";;"}
_KEYWORDS = {"do", "then", "else", "exec", "time", "if", "while", "!"}
_ASSIGNED = re.compile(r"\w+=")
_HEREDOC = re.compile(r"<<-?\s*['\"]?(\w+)['\"]?")
# Programs that start the command behind them.
_WRAPPERS = ("srun", "ssh", "torchrun", "nice", "env")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@dataclass(frozen=True)
class Command:
    """A command of a page, without assignments, redirections and wrappers."""

    block: Block
    words: tuple[str, ...]
    is_partial: bool = False  # the page leaves words out: "..."

    def __str__(self) -> str:
        return f"{self.block.place}: {shlex.join(self.words)}"


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page; those in a list are moved to the left."""
    fence, indent, language, first = "", 0, "", 0
    lines: list[str] = []
    for number, line in enumerate(page.read_text().splitlines(), 1):
        match = _FENCE.match(line)
        if match and not fence:
            fence, indent, language, first = match[2], len(match[1]), match[3], number
            lines = []
        elif match and match[2] == fence and not match[3]:
            yield Block(page, first, language, "\n".join(lines))
            fence = ""
        elif fence:
            lines.append(line[indent:] if not line[:indent].strip() else line)
    assert not fence, f"{page}:{first}: a block that does not end"


def commands(page: Path) -> Iterator[Command]:
    """The commands in the shell blocks of a page."""
    for block in blocks(page):
        if block.language in SHELLS:
            for line in _lines(block):
                yield from _simple(block, line)


def _lines(block: Block) -> Iterator[str]:
    """Whole command lines: continued ones joined, here-documents and output left out."""
    rows = iter(block.text.splitlines())
    for row in rows:
        if block.language == "console":
            if not row.startswith("$ "):
                continue
            row = row.removeprefix("$ ")
        while row.endswith("\\"):
            row = row[:-1] + next(rows)
        yield _HEREDOC.sub("", row)
        for end in _HEREDOC.findall(row):
            while next(rows) != end:
                pass


def _simple(block: Block, line: str) -> Iterator[Command]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, ";"]:
        if word in _ENDS:
            yield from _command(block, words)
            words = []
        else:
            words.append(word)


def _command(block: Block, words: list[str]) -> Iterator[Command]:
    while words and words[0] in _KEYWORDS:
        words = words[1:]
    count = next((n for n, word in enumerate(words) if not _ASSIGNED.match(word)), len(words))
    words = words[count:]
    if not words or words[0] in ("for", "done", "fi"):
        return
    bare: list[str] = []
    rest = iter(words)
    for word in rest:
        if word in (">", ">>", "<", ">&", "&>"):
            next(rest)
        elif word != "...":
            bare.append(word)
    if bare[0] in _WRAPPERS and "erg" in bare:
        bare = bare[bare.index("erg") :]
    if {"-m", "ergmeter"} <= {*bare}:
        bare = ["erg", *bare[bare.index("ergmeter") + 1 :]]
    yield Command(block, tuple(bare), "..." in words)


def erg_words(command: Command) -> tuple[str, ...] | None:
    """The arguments of `erg`, where the command is one of its."""
    first, *rest = command.words
    if first == "erg":
        return tuple(rest)
    if first == "./dev" and rest[:1] and rest[0] in ("demo", "train", "compare"):
        return tuple(rest)
    if Path(first).name == "calculate_training_metrics.py":
        return ("analyze", *rest)
    if first == "python" and rest and Path(rest[0]).name == "calculate_training_metrics.py":
        return ("analyze", *rest[1:])
    return None


def build_site(folder: Path, config: Path = ROOT / "mkdocs.yml") -> None:
    """Build the site as `./dev docs` does. A warning is an error, which --quiet would hide."""
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", config, "-d", folder],
        cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True, text=True, check=False, timeout=200,
    )  # fmt: skip
    lines = (built.stdout + built.stderr).splitlines()
    unusual = [line for line in lines if not line.startswith("INFO    -  ")]
    assert (unusual, built.returncode) == ([], 0), built.stderr


def sessions(text: str) -> Iterator[tuple[str, list[str]]]:
    """What is pasted into a shell, and the lines that the page then shows of its output."""
    pasted = ""
    for language, body in re.findall(r"```(\w+)\n(.*?)```", text, re.DOTALL):
        if language == "bash":
            pasted += body
        elif language == "text":
            yield pasted, body.splitlines()
            pasted = ""
    if pasted:
        yield pasted, []


def outputs(block: Block) -> Iterator[tuple[str, list[str]]]:
    """The commands of a console block, each with the output that the page shows."""
    command, lines = "", list[str]()
    for row in block.text.splitlines():
        if row.startswith("$ "):
            if command:
                yield command, lines
            command, lines = row.removeprefix("$ "), []
        else:
            lines.append(row)
    if command:
        yield command, lines
