"""Runs several configurations several times, in an order that favours none.

Each round runs every configuration once, and the next round in the opposite order (A B, B A, A B).
So a steady drift, of temperature or page cache, affects all alike. Each training is a process of
its own with a pause before it. All trainings of a round share a seed, so that they can be compared
in pairs.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ergmeter import signals
from ergmeter.errors import PluginError
from ergmeter.workloads.sft.config_file import SftConfig

UNSLOTH_VARIABLE = "ERGMETER_UNSLOTH_PYTHON"
_UNSLOTH_PYTHON = Path(".venv-unsloth/bin/python")


@dataclass(frozen=True)
class SeriesTurn:
    """One training of the series."""

    round: int
    config: SftConfig
    seed: int
    out: Path
    output_dir: Path


def turns(configs: Sequence[SftConfig], rounds: int, *, runs: Path) -> Iterator[SeriesTurn]:
    """Yields the trainings in order: A B, B A, ..."""
    for number in range(rounds):
        order = list(configs) if number % 2 == 0 else list(reversed(configs))
        for config in order:
            name = f"{_label(config, configs)}-{number + 1}"
            yield SeriesTurn(
                number + 1,
                config,
                config.seed + number,
                runs / name,
                config.train.output_dir / f"round-{number + 1}",
            )


def run(turn: SeriesTurn, options: Sequence[str]) -> int:
    """Trains once in a process of its own, and returns its exit code."""
    words = ["train", "--config", str(turn.config.path), "--out", str(turn.out), "--no-report"]
    words += [*options, "--set", f"seed={turn.seed}"]
    words += ["--set", f"train.output_dir={turn.output_dir}"]
    child = subprocess.Popen([interpreter(turn.config), "-m", "ergmeter", *words])

    def pass_on(number: int, _frame: object) -> None:
        if number == signal.SIGTERM:  # on which it saves; it gets a terminal's Ctrl-C itself
            child.send_signal(number)

    with signals.handled(pass_on):
        code = child.wait()
    return 128 - code if code < 0 else code


def interpreter(config: SftConfig) -> str:
    """The path of the Python that trains this: Unsloth has an environment of its own."""
    if config.tuning.backend != "unsloth" or importlib.util.find_spec("unsloth") is not None:
        return sys.executable
    named = os.environ.get(UNSLOTH_VARIABLE) or str(_UNSLOTH_PYTHON)
    if not Path(named).exists():
        raise PluginError(
            f"{config.path}: Unsloth is neither here nor at {named}; `./dev unsloth` sets it up,"
            f" or name a Python that has it and ergmeter in {UNSLOTH_VARIABLE}"
        )
    return named


def _label(config: SftConfig, configs: Sequence[SftConfig]) -> str:
    """A short name that no other configuration of the series has."""
    same = [other for other in configs if other.path.stem == config.path.stem]
    at = next(i for i, other in enumerate(same) if other is config)
    return config.path.stem if len(same) == 1 else f"{config.path.stem}-{at + 1}"
