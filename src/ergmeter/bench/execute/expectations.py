"""Did a cell really do what it was asked to? What a scenario states, held against what was seen.

The trap: a plugin that falls back in silence. The command asked for flash attention, the run went
through without it, and the row says that flash attention brings nothing. So a scenario may state a
pattern that must be in the output, or a fact that the run's header must hold; a fact that the
run does not tell is not held, since nobody saw it.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ergmeter.compare.entry import fact
from ergmeter.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from ergmeter.bench.plan.cells import Expectation

_LONGEST = 200
# What the header of a run of `erg train` tells.
OF_ERG_TRAIN = (
    *("attention", "backend", "batch_size", "bits", "bitsandbytes", "checkpoints", "compute_dtype"),
    *("config", "data_sha256", "dataset", "evaluation", "git_commit", "grad_accum"),
    *("gradient_checkpointing", "kernels", "lora_alpha", "lora_dropout", "lora_r", "lora_targets"),
    *("lr", "lr_scheduler", "model", "optimizer", "packing", "pad_to_multiple_of", "parameters"),
    *("peft", "precision", "seed", "seq_len", "started", "status", "steps", "threads", "torch"),
    *("train_loss", "trainable_parameters", "trainer", "transformers", "trl", "tuning", "unsloth"),
    *("weights_dtype", "world_size", "eval_loss"),
)


@dataclass(frozen=True, slots=True)
class Checked:
    """A claim, whether it held, and what was seen instead or in proof of it."""

    name: str
    held: bool
    seen: str

    def to_json(self) -> dict[str, Any]:
        """As status.json has it."""
        return asdict(self)


def check(
    claims: Sequence[Expectation], *, outputs: Iterable[Path] = (), workload: Mapping[str, Any]
) -> tuple[Checked, ...]:
    """Each claim with its answer. `outputs` are the cell's stdout and stderr."""
    patterns = {one: _compiled(str(one.value)) for one in claims if one.kind == "pattern"}
    lines = _first_lines(patterns, outputs)
    return tuple(
        _of_output(one, lines.get(one)) if one.kind == "pattern" else _of_header(one, workload)
        for one in claims
    )


def broken(checked: Iterable[Checked]) -> str:
    """What did not hold, in one line; empty where all did."""
    return "; ".join(f"{one.name}: {one.seen}" for one in checked if not one.held)


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise UsageError(f"no regular expression: {pattern!r} ({error})") from error


def _first_lines(
    patterns: Mapping[Expectation, re.Pattern[str]], outputs: Iterable[Path]
) -> dict[Expectation, str]:
    """The first line that each pattern is in: line by line, since a log may be of any length."""
    found: dict[Expectation, str] = {}
    if not patterns:
        return found
    for line in _lines(outputs):
        for claim, pattern in patterns.items():
            if claim not in found and pattern.search(line):
                found[claim] = line.strip()[:_LONGEST]
        if len(found) == len(patterns):
            break
    return found


def _lines(outputs: Iterable[Path]) -> Iterator[str]:
    for path in outputs:
        if path.is_file():
            with path.open(encoding="utf-8", errors="replace") as file:
                yield from file


def _of_output(claim: Expectation, line: str | None) -> Checked:
    if line is None:
        return Checked(claim.name, held=False, seen=f"no line of the output has {claim.value!r}")
    return Checked(claim.name, held=True, seen=line)


def _of_header(claim: Expectation, workload: Mapping[str, Any]) -> Checked:
    if workload.get(claim.name) is None:
        return Checked(claim.name, held=False, seen="the run does not tell it")
    seen = workload[claim.name]
    return Checked(claim.name, held=_same(seen, claim.value), seen=str(seen))


def _same(seen: object, wanted: object) -> bool:
    """1024, "1024" and 1024.0 are one number, True and "true" one answer."""
    left, right = fact(seen), fact(wanted)
    if left == right:
        return True
    try:
        return float(str(left)) == float(str(right))
    except ValueError:
        return False
