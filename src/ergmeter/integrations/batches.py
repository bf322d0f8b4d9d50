"""Token counts of a batch (computed, real, loss-bearing), from what the model is given.

Counting in a collator is wrong: it sees prefetched batches that are never used and evaluation, and
in a worker process nothing at all. Tokens are never compared with the pad token, which is often the
end-of-text token too: the attention mask defines padding. A packed row holds several sequences. A
number on a GPU is not waited for: it stays there as a `Later`, and many are fetched at once.

Neither torch nor jax is imported: a tensor is what has a shape, a dtype and a device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import numpy as np

Later: TypeAlias = Any  # a number on a device, whose value is not asked for yet
Amount: TypeAlias = "int | Later | None"

_IDS = "input_ids"
_PROMPT = "prompt_input_ids"


@dataclass(frozen=True, slots=True)
class Counts:
    """Token counts of a batch. An amount is an int, a `Later`, or None where it is unknown."""

    computed: int | None  # every position, padding included; None: no tokens
    samples: Amount  # sequences
    real: Amount  # positions that are not padding
    loss: Amount  # positions that the loss is taken at
    squares: Amount  # sum over sequences of their length squared: the cost of attention

    @property
    def laters(self) -> list[Later]:
        """The amounts that are still on a device."""
        return [amount for amount in self._amounts() if not isinstance(amount, int | None)]

    def settled(self, values: Sequence[float]) -> Counts:
        """These counts, with `values` in place of the amounts on a device."""
        numbers = iter(values)
        amounts = self._amounts()
        settled = [a if isinstance(a, int | None) else int(next(numbers)) for a in amounts]
        return Counts(self.computed, *settled)

    def _amounts(self) -> tuple[Amount, ...]:
        return self.samples, self.real, self.loss, self.squares


def count_samples(values: Sequence[Any]) -> Counts | None:
    """The number of samples in a batch without tokens (images, audio, features)."""
    for value in _flat(values):
        shape: Any = getattr(value, "shape", ())
        if len(shape) > 1 and hasattr(value, "dtype") and not _is_abstract(value):
            return Counts(None, int(shape[0]), None, None, None)
    return None


def count_tokens(batch: object, *, shifts: bool = True) -> Counts | None:
    """The counts of one batch, or None if there are no tokens in it.

    `shifts`: the model shifts the labels by one, as causal models of transformers do; the first
    position of a row then has no loss. In a pair without names, (inputs, targets), the targets are
    assumed to be shifted already.
    """
    if isinstance(batch, Mapping):  # a BatchEncoding is one too
        parts = {str(name): value for name, value in batch.items() if hasattr(value, "shape")}
    else:
        parts, shifts = _unnamed(batch), False
    names = [name for name in parts if name.endswith(_IDS)]
    if _PROMPT in names and len(names) > 1:
        # TRL before 1.0: answers with labels include the prompt. Those without are joined with it
        # later, so their number of positions is not known here.
        if not any(name.endswith("labels") for name in parts):
            return None
        names.remove(_PROMPT)
    candidates = [_part(parts, name, shifts=shifts) for name in names]
    counts = [count for count in candidates if count is not None]
    if len(counts) < 2:
        return counts[0] if counts else None
    return Counts(
        sum(count.computed or 0 for count in counts),
        _sum([count.samples for count in counts]),
        _sum([count.real for count in counts]),
        # Beside labels, tokens without any bear no loss: what an encoder reads.
        _sum([count.loss for count in counts if count.loss is not None] or [None]),
        _sum([count.squares for count in counts]),
    )


def _part(parts: Mapping[str, Any], name: str, *, shifts: bool) -> Counts | None:
    ids = parts[name]
    if not is_ids(ids):
        return None
    shape = ids.shape
    rows, length = (1, shape[0]) if len(shape) == 1 else (shape[0], shape[1])
    prefix = name[: -len(_IDS)]
    computed = int(rows * length)
    mask: Any = _fitting(parts, f"{prefix}attention_mask", ids)
    positions: Any = _fitting(parts, f"{prefix}position_ids", ids)
    samples: Amount = int(rows)
    squares: Amount = computed * int(length)
    real: Amount = None
    if mask is not None:
        lengths = _lengths(mask)
        real, squares = _amount(lengths.sum()), _amount((lengths * lengths).sum())
        if positions is not None:  # packed rows that are attended to as one
            samples = _number((positions == 0) & (mask != 0))
    elif positions is not None:
        real, samples, squares = _packed(positions)
    loss = _with_loss(parts, prefix, ids, shifts=shifts)
    return Counts(computed, samples, real, loss, squares)


def _packed(positions: Any) -> tuple[Amount, Amount, Amount]:  # noqa: ANN401  tensors
    """Real positions, sequences and sum of squared lengths of packed rows, by their position ids.

    Position ids restart at 0 in each sequence. 1 + 3 + 5 + ... (n terms) is n squared. Zeros at the
    end of a row are padding; a last sequence of one token looks the same, and trains nothing.
    """
    moved = (positions != 0).cumsum(-1)
    is_real = (positions != 0) | (moved != moved[..., -1:])
    return (
        _number(is_real),
        _number((positions == 0) & is_real),
        _amount(((2 * positions + 1) * is_real).sum()),
    )


def _with_loss(parts: Mapping[str, Any], prefix: str, ids: Any, *, shifts: bool) -> Amount:  # noqa: ANN401
    labels: Any = parts.get(f"{prefix}labels")
    if labels is not None:
        if not _fits(labels, ids) and (shifts or not _are_targets(labels, ids)):
            return None
        # Ignored labels are -100, -1 or another number below 0: no class is.
        borne = _near(labels) >= 0
    else:
        # TRL's preference trainers make the labels later, from what this mask selects.
        completion: Any = _fitting(parts, f"{prefix}completion_mask", ids)
        if completion is None:
            return None
        borne = completion != 0
    return _number(borne[..., 1:] if shifts else borne)


def count_labelled(labels: Any) -> Amount:  # noqa: ANN401
    """The number of positions that bear a loss, by labels that are not shifted."""
    return _number(_near(labels) >= 0)


def _are_targets(labels: Any, ids: Any) -> bool:  # noqa: ANN401
    """True if the labels are one target text per input text, of another length."""
    return is_ids(labels) and len(labels.shape) == len(ids.shape) == 2 and len(labels) == len(ids)


def _unnamed(batch: object) -> dict[str, Any]:
    """The token tensors of a batch without names, with targets if it is a pair."""
    if not isinstance(batch, list | tuple):
        return {_IDS: batch} if is_ids(batch) else {}
    # One row of whole numbers among others may as well be the classes of a batch of pictures.
    tensors = [value for value in _flat(batch) if is_ids(value) and len(value.shape) == 2]
    if not tensors:
        return {}
    named = {_IDS: tensors[0]}
    if len(tensors) == 2 and _fits(tensors[1], tensors[0]):
        named["labels"] = tensors[1]
    return named


def _flat(batch: Sequence[Any]) -> list[Any]:
    leaves: list[Any] = []
    for part in batch:
        if isinstance(part, list | tuple):
            leaves += _flat(part)
        else:
            leaves.append(part)
    return leaves


def is_ids(value: Any) -> bool:  # noqa: ANN401
    """True for an integer tensor of one or two dimensions: token ids."""
    kind = getattr(value, "dtype", None)
    if kind is None or not 1 <= len(getattr(value, "shape", ())) <= 2:
        return False
    return _is_whole(kind) and not _is_abstract(value)


@cache
def _is_whole(dtype: Any) -> bool:  # noqa: ANN401
    return str(dtype).rpartition(".")[2].startswith(("int", "uint"))


def _is_abstract(value: Any) -> bool:  # noqa: ANN401
    """True for shapes without values: torch's meta and fake tensors, jax's tracers."""
    device_type = getattr(getattr(value, "device", None), "type", "")
    kind: Any = type(value)
    return device_type == "meta" or _is_traced(kind)


@cache
def _is_traced(kind: type) -> bool:
    names = {base.__name__ for base in kind.__mro__}
    return bool(names & {"FakeTensor", "FunctionalTensor", "Tracer"})


def _fitting(parts: Mapping[str, Any], name: str, ids: Any) -> Any:  # noqa: ANN401
    """The batch's tensor `name` if it has the shape of `ids`, else None."""
    value = parts.get(name)
    return _near(value) if value is not None and _fits(value, ids) else None


def _fits(value: Any, ids: Any) -> bool:  # noqa: ANN401
    return bool(value.shape == ids.shape)


def _near(value: Any) -> Any:  # noqa: ANN401
    """A torch tensor in host memory as a numpy array, which counts ten times as fast. Other values
    are returned unchanged."""
    if value is None or getattr(getattr(value, "device", None), "type", None) != "cpu":
        return value
    try:
        return value.numpy()
    except (AttributeError, RuntimeError, TypeError):  # a tensor subclass
        return value


def _number(those: Any) -> Amount:  # noqa: ANN401
    """The number of true elements."""
    return int(np.count_nonzero(those)) if isinstance(those, np.ndarray) else _amount(those.sum())


def _lengths(mask: Any) -> Any:  # noqa: ANN401
    """The number of nonzero elements of each row."""
    if isinstance(mask, np.ndarray):
        return np.count_nonzero(mask, axis=-1)
    return (mask != 0).sum(-1)


def is_later(value: Any) -> bool:  # noqa: ANN401
    """True for a number that is on a device."""
    device = getattr(value, "device", None)
    if device is None:
        return False
    # The host is "cpu" itself in numpy, of type "cpu" in torch, of platform "cpu" in jax.
    names = (device, getattr(device, "type", None), getattr(device, "platform", None))
    return not any(name == "cpu" for name in names)


def _amount(value: Any) -> Amount:  # noqa: ANN401
    """The number itself if it is in host memory, else the tensor on its device."""
    return value if is_later(value) else int(value)


def _sum(amounts: list[Amount]) -> Amount:
    addends = [amount for amount in amounts if amount is not None]
    return sum(addends) if len(addends) == len(amounts) else None
