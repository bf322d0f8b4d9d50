"""The tokens of a batch, three ways, from what the model is really given.

Four traps shaped it. A collator counts batches that are prefetched and never used, evaluation too,
and in a worker's process nothing. A pad token that is also the end-of-text token hides every real
one of those, so tokens are never compared with it: the attention mask says what is padding. A
packed row holds several sequences. And a number on a GPU is not to be waited for: what is not in
host memory stays where it is, as a `Later`, until somebody fetches many at once.

Nothing of torch or jax is imported: a tensor is what has a shape, a type and a place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

Later: TypeAlias = Any  # a number on a device, whose value is not asked for yet
Amount: TypeAlias = "int | Later | None"

IGNORED = -100  # torch's cross entropy leaves targets of this value out, and so does everybody
_IDS = "input_ids"
_HOST = ("cpu",)


@dataclass(frozen=True, slots=True)
class Counts:
    """What a batch holds. An amount is an int, a `Later`, or None where it can't be told."""

    computed: int  # every position, padding included
    samples: Amount  # sequences
    real: Amount  # positions that are not padding
    loss: Amount  # positions that the loss is taken at
    squares: Amount  # sum over sequences of their length squared: what attention pays for

    @property
    def laters(self) -> list[Later]:
        """The amounts that are not known yet."""
        return [one for one in self._amounts() if one is not None and not isinstance(one, int)]

    def settled(self, values: Sequence[int]) -> Counts:
        """With these values in the place of what was not known."""
        known = iter(values)
        amounts = [
            one if one is None or isinstance(one, int) else int(next(known))
            for one in self._amounts()
        ]
        return Counts(self.computed, *amounts)

    def _amounts(self) -> tuple[Amount, Amount, Amount, Amount]:
        return self.samples, self.real, self.loss, self.squares


def counted(batch: object, *, shifts: bool = True) -> Counts | None:
    """The counts of one batch, or None if there are no tokens in it.

    `shifts`: labels are the inputs, and the model moves them by one, as causal models of
    transformers do; the first position of a sequence then bears no loss.
    """
    parts = _named(batch)
    found = [_part(parts, name, shifts=shifts) for name in parts if name.endswith(_IDS)]
    whole = [one for one in found if one is not None]
    if not whole:
        return None
    if len(whole) == 1:
        return whole[0]
    return Counts(
        sum(one.computed for one in whole),
        _sum(whole, "samples"),
        _sum(whole, "real"),
        _sum(whole, "loss"),
        _sum(whole, "squares"),
    )


def _part(parts: Mapping[str, Any], name: str, *, shifts: bool) -> Counts | None:
    ids = parts[name]
    if not is_ids(ids):
        return None
    rows, length = (1, ids.shape[0]) if len(ids.shape) == 1 else (ids.shape[0], ids.shape[1])
    prefix = name[: -len(_IDS)]
    computed = int(rows * length)
    mask: Any = parts.get(f"{prefix}attention_mask")
    positions: Any = parts.get(f"{prefix}position_ids")
    labels: Any = parts.get(f"{prefix}labels")
    samples: Amount = int(rows)
    squares: Amount = computed * int(length)
    real: Amount = None
    if _fits(mask, ids):
        real = _amount((mask != 0).sum())
    elif _fits(positions, ids):
        # Packed without padding: each sequence starts again at 0, and 1 + 3 + 5 + ... is a square.
        real = computed
        samples = _amount((positions == 0).sum())
        squares = _amount((2 * positions + 1).sum())
    return Counts(computed, samples, real, _with_loss(labels, ids, shifts=shifts), squares)


def _with_loss(labels: Any, ids: Any, *, shifts: bool) -> Amount:  # noqa: ANN401  tensors
    if not _fits(labels, ids):
        return None
    borne = labels[..., 1:] if shifts else labels
    return _amount((borne != IGNORED).sum())


def _named(batch: object) -> Mapping[str, Any]:
    """The tensors of a batch by the names that transformers has for them."""
    if isinstance(batch, Mapping):
        return {str(name): value for name, value in batch.items() if hasattr(value, "shape")}
    if hasattr(batch, "data") and isinstance(batch.data, Mapping):  # a BatchEncoding is a UserDict
        return {str(name): value for name, value in batch.data.items() if hasattr(value, "shape")}
    tensors = [one for one in _flat(batch) if is_ids(one)]
    if not tensors:
        return {}
    named = {_IDS: tensors[0]}
    alike = [one for one in tensors[1:] if tuple(one.shape) == tuple(tensors[0].shape)]
    if alike:
        named["labels"] = alike[0]
    return named


def _flat(batch: object) -> list[Any]:
    if isinstance(batch, Sequence) and not isinstance(batch, str | bytes):
        return [one for part in batch for one in _flat(part)]
    return [batch]


def is_ids(value: Any) -> bool:  # noqa: ANN401
    """Whether this holds token numbers: whole numbers, in one row or several."""
    if not 1 <= len(getattr(value, "shape", ())) <= 2 or not hasattr(value, "dtype"):
        return False
    kind = str(value.dtype).rpartition(".")[2]
    return kind.startswith(("int", "uint")) and not _is_abstract(value)


def _is_abstract(value: Any) -> bool:  # noqa: ANN401
    """Shapes without values: torch's meta and fake tensors, what jax traces with."""
    place = getattr(getattr(value, "device", None), "type", "")
    names = {kind.__name__ for kind in type(value).__mro__}
    return place == "meta" or bool(names & {"FakeTensor", "FunctionalTensor", "Tracer"})


def _fits(value: Any, ids: Any) -> bool:  # noqa: ANN401
    return hasattr(value, "shape") and tuple(value.shape) == tuple(ids.shape)


def _amount(value: Any) -> Amount:  # noqa: ANN401
    """The number itself where it lies in host memory, else the promise of it."""
    place = getattr(value, "device", None)
    if place is None or getattr(place, "type", None) in _HOST or _is_on_host(place):
        return int(value)
    return value


def _is_on_host(place: Any) -> bool:  # noqa: ANN401
    """As numpy ("cpu") and jax (an object with a platform) say it."""
    return place == "cpu" or getattr(place, "platform", None) in _HOST


def _sum(parts: list[Counts], name: str) -> Amount:
    amounts = [getattr(one, name) for one in parts]
    return None if None in [a if a is None else 0 for a in amounts] else sum(amounts)
