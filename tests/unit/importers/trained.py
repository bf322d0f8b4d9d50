"""Dicts and bars as a Trainer prints them, and what the importer makes of them."""

from __future__ import annotations

from ergmeter.importers.hf_trainer import HfTrainerImporter
from ergmeter.ports import Line
from ergmeter.records import Record

S = 1_000_000_000
BAR = " 10%|█         | {} [00:00<00:00, 9.0it/s]"


def live(*timed: tuple[float, str]) -> list[Record]:
    return list(HfTrainerImporter().records([Line(text, round(t * S)) for t, text in timed]))


def printed(epoch: float, **more: object) -> str:
    return str({"loss": 2.5, "grad_norm": 1.5, "learning_rate": 5e-05, "epoch": epoch} | more)
