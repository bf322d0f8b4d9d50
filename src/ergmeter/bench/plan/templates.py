"""What does a cell start? A command, or the template of one, with the cell's settings put in.

`erg train` is the default; `sft_trainer` is the original's; anything else is a template, in which
`{name}` stands for a setting and `{arguments}` for all arguments as `--name value`. `{out}`,
`{run}`, `{hf}`, `{data}`, `{python}` and `{port}` are known only when the cell starts and stay.

The trap: a template that forgets a setting. A matrix over `optim` with a command that has no
`{optim}` in it runs one configuration many times under many names, so that is an error.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from ergmeter.bench.plan.cells import AT_START, BRACE, Launch

Workload: TypeAlias = Literal["erg", "sft_trainer", "other"]

ARGUMENTS = "arguments"
OF_A_CELL = ("num_gpus", "nodes")
_NAMED = re.compile(r"\{\{|\}\}|\{([A-Za-z_][\w.]*)\}")
_OPEN, _CLOSE = "\x00", "\x01"  # for {{ and }}
_MISTAKEN = re.compile(rf"{_OPEN}(?=(\w+)[}}{_CLOSE}])")

_ERG = ("{python}", "-m", "ergmeter", "train", "--config", "{out}/train.yaml", "--out", "{run}",
        "--no-report")  # fmt: skip
_SFT = ("{python}", "-m", "tuning.sft_trainer", "{arguments}")
PRESETS: dict[str, tuple[Workload, tuple[str, ...]]] = {
    "erg train": ("erg", _ERG),
    "sft_trainer": ("sft_trainer", _SFT),
    "sft_trainer.py": ("sft_trainer", _SFT),
}


@dataclass(frozen=True, slots=True)
class Template:
    """A command with places for settings."""

    workload: Workload
    words: tuple[str, ...]

    @property
    def launch(self) -> Launch:
        """How several ranks of it are started, if nothing else is asked for."""
        return {"erg": "torchrun", "sft_trainer": "accelerate"}.get(self.workload, "plain")  # type: ignore[return-value]

    @property
    def names(self) -> set[str]:
        """The settings that it names, `arguments` among them."""
        return {name for word in self.words for name in unknown(word, ())}

    @property
    def takes_all(self) -> bool:
        """Whether every argument reaches the command."""
        return self.workload == "erg" or ARGUMENTS in self.names

    def command(self, settings: Mapping[str, Any], arguments: Sequence[str]) -> tuple[str, ...]:
        """The command of one cell."""
        words: list[str] = []
        for word in self.words:
            if word == f"{{{ARGUMENTS}}}":
                words.extend(arguments)
            else:
                words.append(filled(word, settings))
        return tuple(words)


def template(given: str | Sequence[str]) -> Template:
    """The template of that text or list of words; ValueError if it can't be split."""
    if isinstance(given, str):
        if given.strip() in PRESETS:
            return Template(*PRESETS[given.strip()])
        words = shlex.split(given)
    else:
        words = [str(word) for word in given]
    if not words:
        raise ValueError("the command is empty")
    is_of_fms = any("sft_trainer" in word for word in words) and "{arguments}" in words
    return Template("sft_trainer" if is_of_fms else "other", tuple(words))


def filled(text: str, settings: Mapping[str, Any]) -> str:
    """The text with settings in it; `{{` and `}}` are braces; what is known at the start stays."""

    def put(found: re.Match[str]) -> str:
        if found[0] in AT_START:
            return found[0]
        if found[1] is None:
            return _OPEN if found[0] == "{{" else _CLOSE
        value = settings[found[1]]
        return "" if value is None else str(value)

    def kept(found: re.Match[str]) -> str:
        return BRACE if f"{{{found[1]}}}" in AT_START else "{"

    return _MISTAKEN.sub(kept, _NAMED.sub(put, text)).replace(_OPEN, "{").replace(_CLOSE, "}")


def unknown(text: str, known: Collection[str]) -> list[str]:
    """Names in a text that stand for nothing."""
    found = [one for one in _NAMED.findall(text) if one]
    return [name for name in found if f"{{{name}}}" not in AT_START and name not in known]


def flags(arguments: Mapping[str, Any]) -> list[str]:
    """`--name value` for each, several values after one name; null removes the argument."""
    words: list[str] = []
    for name, value in arguments.items():
        if value is None:
            continue
        words.append(f"--{name}")
        words.extend(map(str, value) if isinstance(value, list) else (str(value),))
    return words
