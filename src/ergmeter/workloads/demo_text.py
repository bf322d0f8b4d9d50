"""The demo's training text: short tales, generated from a small grammar.

They need no licence and no download. They have structure at several depths: spelling, word order, a
pronoun that agrees with its name, and a thing and a place that the request names and the tale
repeats. A model's loss therefore keeps falling for longer than a demo lasts.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

_T = TypeVar("_T")

END = b"\n"  # ends both the request and the tale, and occurs nowhere else
SIZE_BYTES = 400_000
SEED = 20


def _words(listed: str) -> list[str]:
    return listed.split()


_PEOPLE = [
    *((name, "she") for name in ("Mira", "Ada", "Ingrid", "Salma", "Rosa", "Noor", "Hana", "Wren")),
    *((name, "he") for name in ("Tomas", "Emil", "Kofi", "Ravi", "Jonas", "Pedro", "Olav", "Sami")),
]
_THINGS = _words(
    "lantern kettle violin compass basket ladder mirror blanket trumpet hammer candle bicycle clock"
    " drum key map rope spoon bell boat kite telescope"
)
_PLACES = _words(
    "harbour orchard market mill bridge library meadow station tower bakery garden forge island"
    " valley lighthouse school"
)
_ADJECTIVES = _words("dusty small bright heavy broken silver painted borrowed quiet golden")
_WEATHER = _words("rain snow fog wind thunder sunshine")
_HELPERS = ("a neighbour", "a patient goat", "the miller", "two children", "the captain")

# What may happen between a tale's first and last sentence.
_MIDDLES = (
    "The {weather} came down over the {place}, so {he} hid the {thing} under a coat.",
    "On the way {he} met {helper}, who asked about the {adjective} {thing}.",
    "{He} showed {helper} how the {thing} worked, and nobody at the {place} laughed.",
    "When the {weather} stopped, {name} counted to {number} and opened the door of the {place}.",
    "For {number} days {he} slept beside the {thing} and dreamed of {weather}.",
    "{He} wanted to sell the {thing}, but {helper} said that it was too {adjective}.",
)
_FIRSTS = (
    "{name} found a {adjective} {thing} near the {place}.",
    "One morning {name} carried a {adjective} {thing} to the {place}.",
    "{name} had lost a {thing}, and looked for it at the {place}.",
)
_LASTS = (
    "In the end {name} left the {thing} at the {place}.",
    "And so {he} took the {thing} home.",
    "Now the {thing} hangs in the {place}, and {name} is glad.",
)
_MOST_MIDDLES = 2


@dataclass(frozen=True, slots=True)
class DemoText:
    """A request and the tale that answers it, both in bytes and both with their END."""

    prompt: bytes
    tale: bytes

    @property
    def text(self) -> bytes:
        """The prompt and the tale."""
        return self.prompt + self.tale


class _Dice:
    """Choices from `Random.random` alone: the one method whose sequence Python promises to keep."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed).random

    def below(self, limit: int) -> int:
        return int(self._random() * limit)

    def pick(self, of: Sequence[_T]) -> _T:
        return of[self.below(len(of))]


def documents(size_bytes: int = SIZE_BYTES, *, seed: int = SEED) -> list[DemoText]:
    """Distinct documents of at least `size_bytes` in all; the same at every call."""
    dice = _Dice(seed)
    made: dict[bytes, DemoText] = {}
    size = 0
    while size < size_bytes:
        document = _document(dice)
        if document.text not in made:
            made[document.text] = document
            size += len(document.text)
    return list(made.values())


def _document(dice: _Dice) -> DemoText:
    name, pronoun = dice.pick(_PEOPLE)
    words = {
        "name": name,
        "he": pronoun,
        "He": pronoun.capitalize(),
        "thing": dice.pick(_THINGS),
        "place": dice.pick(_PLACES),
    }
    middles = [dice.pick(_MIDDLES) for _ in range(dice.below(_MOST_MIDDLES + 1))]
    sentences = [dice.pick(_FIRSTS), *middles, dice.pick(_LASTS)]
    tale = " ".join(sentence.format(**words, **_passing(dice)) for sentence in sentences)
    prompt = "Tell of {name}, the {thing} and the {place}.".format(**words)
    return DemoText(prompt.encode() + END, tale.encode() + END)


def _passing(dice: _Dice) -> dict[str, str]:
    """Random words that are used in one sentence only."""
    return {
        "adjective": dice.pick(_ADJECTIVES),
        "weather": dice.pick(_WEATHER),
        "helper": dice.pick(_HELPERS),
        "number": str(2 + dice.below(98)),
    }
