"""Captured output of real programs, as the lines a recorder would make of it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ergmeter.ports import Line
from ergmeter.records import Mark, Record, Reported, Step

LOGS = Path(__file__).parents[2] / "data" / "logs"
# A bar has no line end of its own. A recorder hands it on as it comes ("prompt"), or only when the
# next one is drawn over it ("ended").
Delivery = Literal["prompt", "ended"]


@dataclass(frozen=True)
class Capture:
    """The chunks a program wrote, when and where, and the tokens it counted itself."""

    chunks: list[tuple[int, str, str]]
    truth: list[tuple[int, int, int]]  # for each micro-step: step, tokens computed, tokens real

    def lines(self, delivery: Delivery) -> Iterator[Line]:
        rest: dict[str, str] = {}
        for t_ns, stream, text in self.chunks:
            *ended, rest[stream] = re.split(r"[\r\n]", rest.get(stream, "") + text)
            for part in ended:
                yield Line(part, t_ns)
            if delivery == "prompt" and rest[stream]:
                yield Line(rest.pop(stream), t_ns)
        for part in rest.values():
            yield Line(part, self.chunks[-1][0])

    def computed(self, first: int, last: int) -> int:
        """Tokens the program fed in the steps first to last, counted from 1."""
        return sum(computed for step, computed, _ in self.truth if first <= step + 1 <= last)

    def real(self) -> int:
        return sum(real for _, _, real in self.truth)


def capture(name: str) -> Capture:
    data = json.loads((LOGS / f"{name}.json").read_text(encoding="utf-8"))
    return Capture([tuple(c) for c in data["chunks"]], [tuple(t) for t in data["truth"]])


def steps(records: list[Record], phase: str = "train") -> list[Step]:
    return [r for r in records if isinstance(r, Step) and r.phase == phase]


def reported(records: list[Record]) -> list[Reported]:
    return [r for r in records if isinstance(r, Reported)]


def marks(records: list[Record], name: str) -> list[str]:
    return [r.detail for r in records if isinstance(r, Mark) and r.name == name]
