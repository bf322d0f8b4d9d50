"""What goes through a model in one step: sequences, how they are packed or padded, images.

The trap: tokens alone. Linear layers cost by the token, attention by the pair of tokens that meet,
and two batches of the same number of tokens can differ severalfold in pairs: one sequence of 8192,
or 16 documents of 512 packed into it. So a batch is its sequences, not their sum.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from ergmeter.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ergmeter.flops.graph import Attention

Pairs = Literal["needed", "half", "full", "computed"]
"""How the pairs of a query and a key are counted: those the mask lets meet, exactly; half of the
rectangle for a causal mask, the usual shorthand; the rectangle, a window cutting it; the whole
rectangle, windows ignored, as a kernel without a notion of masks computes it."""


@dataclass(frozen=True, slots=True)
class Sequences:
    """So many sequences alike: `new` positions each, after `past` ones that are cached."""

    new: int
    count: int = 1
    past: int = 0

    @property
    def rows(self) -> int:
        """Positions computed."""
        return self.new * self.count

    def pairs(self, attention: Attention, how: Pairs) -> float:
        """Pairs of a query and a key, for one head."""
        total = self.past + self.new
        reach = min(filter(None, (attention.window, attention.chunk, total)))
        if how == "computed":
            return self.rows * total
        if how == "full":
            return self.rows * reach
        if attention.mask == "full":
            return self.count * _banded(self.new, reach)
        if how == "half" and not self.past:
            return self.count * _half(self.new, reach)
        if attention.chunk is not None:
            return self.count * (_chunked(total, reach) - _chunked(self.past, reach))
        return self.count * (_windowed(total, reach) - _windowed(self.past, reach))


def _banded(length: int, window: int) -> int:
    """Pairs where a position sees as many keys before it as after it, itself in the middle."""
    if window >= length:
        return length * length
    side = window // 2
    return length * (2 * side + 1) - side * (side + 1)


def _half(length: int, reach: int) -> float:
    """Half of the rectangle; with a window, the band: what is left of the rectangle without the
    corner the window cuts off."""
    return length * reach - reach * reach / 2


def _windowed(length: int, window: int) -> int:
    """Pairs where position i (from 1) sees min(i, window) keys, summed up to `length`."""
    ramp = min(length, window)
    return ramp * (ramp + 1) // 2 + max(0, length - window) * window


def _chunked(length: int, chunk: int) -> int:
    whole, rest = divmod(length, chunk)
    return whole * (chunk * (chunk + 1) // 2) + rest * (rest + 1) // 2


@dataclass(frozen=True)
class Batch:
    """The rows of one step, by stream.

    `tokens` are documents that attend to themselves alone; `sequences` x `seq_len` is the grid they
    were laid out in, which a formula that knows only the grid uses. What of the grid no document
    fills is padding: computed, and no use.
    """

    sequences: int
    seq_len: int
    documents: tuple[Sequences, ...]
    others: dict[str, tuple[Sequences, ...]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        sequences: int,
        seq_len: int,
        *,
        lengths: Iterable[int] | None = None,
        past: int = 0,
        source_len: int | None = None,
    ) -> Batch:
        """A batch of `sequences` rows of `seq_len`; `lengths` are the documents in them, if known.

        `past` positions are in the cache already; `source_len` is what an encoder reads.
        """
        _positive("batch size", sequences)
        _positive("sequence length", seq_len)
        if past < 0:
            raise UsageError(f"the cached context can't be negative; got {past}")
        documents: tuple[Sequences, ...] = (Sequences(seq_len, sequences, past),)
        if lengths is not None:
            documents = _alike(lengths)
            held = sum(document.rows for document in documents)
            longest = max(document.new for document in documents)
            if held > sequences * seq_len or longest > seq_len:
                raise UsageError(
                    f"documents of {held} tokens, the longest {longest}, do not fit"
                    f" {sequences} sequences of {seq_len}"
                )
        others: dict[str, tuple[Sequences, ...]] = {}
        if source_len is not None:
            _positive("source length", source_len)
            others["source"] = (Sequences(source_len, sequences),)
        return cls(sequences, seq_len, documents, others)

    @property
    def tokens(self) -> int:
        """Rows of the grid: what is computed, padding included."""
        return self.sequences * self.seq_len

    @property
    def tokens_real(self) -> int:
        """Tokens of the documents."""
        return sum(document.rows for document in self.documents)

    @property
    def is_grid(self) -> bool:
        """Whether each sequence is one document without padding."""
        return all(document.new == self.seq_len for document in self.documents) and (
            self.tokens == self.tokens_real
        )

    def grid(self) -> Batch:
        """The same rows, every one of them computed and attended to as if it were real."""
        past = max(document.past for document in self.documents)
        whole = (Sequences(self.seq_len, self.sequences, past),)
        return Batch(self.sequences, self.seq_len, whole, self.others)

    def stream(self, name: str) -> tuple[Sequences, ...]:
        """The sequences of a stream. One the batch does not have is empty: no image, no cost."""
        if name == "logits":  # every position has them, unless somebody asked for the last alone
            name = "logits" if "logits" in self.others else "tokens"
        return self.documents if name == "tokens" else self.others.get(name, ())

    def rows(self, name: str) -> int:
        """Rows of a stream."""
        return sum(sequence.rows for sequence in self.stream(name))


def _positive(what: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"the {what} must be a whole number of 1 or more; got {value!r}")


def _alike(lengths: Iterable[int]) -> tuple[Sequences, ...]:
    counts: dict[int, int] = {}
    for length in lengths:
        _positive("length of a document", length)
        counts[length] = counts.get(length, 0) + 1
    if not counts:
        raise UsageError("no documents: the list of lengths is empty")
    return tuple(Sequences(length, count) for length, count in sorted(counts.items()))
