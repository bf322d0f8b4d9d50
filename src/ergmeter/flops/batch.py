"""The shape of one step's input: sequences, packed documents, padding, images.

The cost of linear layers is per token, that of attention per pair of tokens. Two batches with the
same number of tokens can differ a lot in pairs, such as one sequence of 8192 and 16 packed
documents of 512. So a batch is a list of sequences, not a number of tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from ergmeter.errors import UsageError
from ergmeter.flops.graph.graph import Attention

Pairs = Literal["needed", "computed"]
"""Which pairs of query and key are counted: `needed`, those that the mask allows, exactly; or
`computed`, all of them, windows ignored, as a kernel that does not support masks computes."""

IMAGE_STREAMS = frozenset({"patch grid", "patches", "patch windows", "features", "images"})
"""Streams of rows that come from images: cut patches; rows of the tower's layers (with the class
token), also in windows; rows that the language model reads; one row per image."""


@dataclass(frozen=True, slots=True)
class Sequences:
    """`count` equal sequences of `new` positions each, after `past` cached positions."""

    new: int
    count: int = 1
    past: int = 0

    @property
    def rows(self) -> int:
        """The number of positions that are computed."""
        return self.new * self.count

    def pairs(self, attention: Attention, how: Pairs) -> float:
        """Return the number of pairs of query and key, for one head."""
        total = self.past + self.new
        if how == "computed":
            return self.rows * total
        if attention.mask == "full":
            if attention.window is not None:
                return self.count * _banded(self.new, attention.window)
            return self.rows * min(attention.chunk or total, total)
        if attention.chunk is not None:
            chunk = min(attention.window or total, attention.chunk, total)
            return self.count * (_chunked(total, chunk) - _chunked(self.past, chunk))
        window = min(attention.window or total, total)
        return self.count * (_windowed(total, window) - _windowed(self.past, window))


def _banded(length: int, window: int) -> int:
    """Count pairs if a position attends to half a window before it, half after it, and itself."""
    side = min(window // 2, length - 1)
    return length * (2 * side + 1) - side * (side + 1)


def _windowed(length: int, window: int) -> int:
    """Count pairs if position i (from 1 to `length`) attends to min(i, window) keys."""
    ramp = min(length, window)
    return ramp * (ramp + 1) // 2 + max(0, length - window) * window


def _chunked(length: int, chunk: int) -> int:
    chunks, rest = divmod(length, chunk)
    return chunks * (chunk * (chunk + 1) // 2) + rest * (rest + 1) // 2


@dataclass(frozen=True)
class Batch:
    """The rows of one step, by stream.

    The stream `tokens` has the documents, each of which attends only to itself. They are laid out
    in a grid of `sequences` x `seq_len`, which formulas use that do not know documents. The rest of
    the grid is padding, which is computed without use.
    """

    sequences: int
    seq_len: int
    documents: tuple[Sequences, ...]
    others: dict[str, tuple[Sequences, ...]] = field(default_factory=dict)
    images: int = 0
    padding: int = 0  # padded rows to count

    @classmethod
    def of(
        cls,
        sequences: int,
        seq_len: int,
        *,
        lengths: Iterable[int] | None = None,
        past: int = 0,
        source_len: int | None = None,
        images: int = 0,
        last_logits: bool = False,
        facts: Mapping[str, int] | None = None,
    ) -> Batch:
        """Return a batch of `sequences` rows of `seq_len`; `lengths`: the documents in them.

        `past`: positions already in the cache. `source_len`: the length of an encoder's input,
        which is already encoded if there is a past. `images`: the number of images in all sequences
        together; their tokens are part of `seq_len`. `last_logits`: the head is applied only to the
        last position of each document, as for a prompt. `facts`: those of the model
        (`Graph.facts`), such as the patches of an image or a fixed source length.
        """
        positive("batch size", sequences)
        positive("sequence length", seq_len)
        if past < 0:
            raise UsageError(f"the cached context can't be negative; got {past}")
        documents: tuple[Sequences, ...] = (Sequences(seq_len, sequences, past),)
        if lengths is not None:
            documents = _alike(lengths)
            rows = sum(document.rows for document in documents)
            longest = max(document.new for document in documents)
            if rows > sequences * seq_len or longest > seq_len:
                raise UsageError(
                    f"documents of {rows} tokens, the longest {longest}, do not fit"
                    f" {sequences} sequences of {seq_len}"
                )
        facts = facts or {}
        if "image_is_sequence" in facts:
            images = _image_each(sequences, seq_len, images, facts["tokens_per_image"])
        others = _source(sequences, source_len or facts.get("source_len"), facts, read=past > 0)
        if images:
            others |= _images(images, facts)
            if images * facts["tokens_per_image"] > sequences * seq_len:
                raise UsageError(
                    f"{images} images of {facts['tokens_per_image']} tokens do not fit"
                    f" {sequences} sequences of {seq_len}: an image's tokens are part of them"
                )
        if last_logits:
            others["logits"] = (Sequences(1, sum(document.count for document in documents)),)
        return cls(sequences, seq_len, documents, others, images)

    @property
    def tokens(self) -> int:
        """Positions of the grid, padding included."""
        return self.sequences * self.seq_len

    @property
    def tokens_real(self) -> int:
        """Tokens of the documents, without padding."""
        return sum(document.rows for document in self.documents)

    @property
    def is_grid(self) -> bool:
        """True if each sequence is one document without padding."""
        return all(document.new == self.seq_len for document in self.documents) and (
            self.tokens == self.tokens_real
        )

    def grid(self) -> Batch:
        """Return the batch with padding treated as real tokens: full sequences."""
        past = max(document.past for document in self.documents)
        full = (Sequences(self.seq_len, self.sequences, past),)
        return Batch(self.sequences, self.seq_len, full, self.others, self.images)

    def computed(self) -> Batch:
        """Return the batch with its padding counted as rows.

        Padding goes through every operation that works row by row, but adds no attention pairs: how
        many a kernel computes outside documents is unknown.
        """
        return replace(self, padding=self.tokens - self.tokens_real)

    def _own(self, name: str) -> str:
        """Return the stream to use for `name`: logits are those of all tokens, unless given."""
        return "tokens" if name == "logits" and "logits" not in self.others else name

    def stream(self, name: str) -> tuple[Sequences, ...]:
        """Return the sequences of a stream; empty for a stream that the batch does not have."""
        name = self._own(name)
        if name == "pooled":  # one row a document
            return (Sequences(1, sum(document.count for document in self.documents)),)
        return self.documents if name == "tokens" else self.others.get(name, ())

    def source_length(self, name: str) -> float:
        """Return the average number of source positions that a sequence attends to."""
        sources = self.others.get(name, ())
        count = sum(sequence.count for sequence in sources)
        return sum(s.count * (s.past + s.new) for s in sources) / count if count else 0

    def rows(self, name: str) -> int:
        """Return the rows of a stream; the tokens include `padding`."""
        real = sum(sequence.rows for sequence in self.stream(name))
        return real + self.padding if self._own(name) == "tokens" else real


def _source(
    sequences: int, length: int | None, facts: Mapping[str, int], *, read: bool
) -> dict[str, tuple[Sequences, ...]]:
    """Return the streams of an encoder's input (`read`: already encoded) and relative positions."""
    others: dict[str, tuple[Sequences, ...]] = {}
    if length is not None:
        positive("source length", length)
        new, past = (0, length) if read else (length, 0)
        others["source"] = (Sequences(new, sequences, past),)
        others["frames"] = (Sequences(new * facts.get("frames_per_source", 1), sequences),)
    if "relative_positions" in facts:
        others["relative positions"] = (Sequences(facts["relative_positions"]),)
    return others


def _image_each(sequences: int, seq_len: int, images: int, patches: int) -> int:
    """Check an image model's batch, where a sequence is an image; return the number of images."""
    if seq_len != patches or images not in (0, sequences):
        raise UsageError(
            f"a sequence of this model is an image of {patches} patches; got {sequences} sequences"
            f" of {seq_len} and {images} images: leave out --seq-len and --images"
        )
    return sequences


def _images(images: int, facts: Mapping[str, int]) -> dict[str, tuple[Sequences, ...]]:
    """Return the image streams of this many images, each with one or more views."""
    positive("number of images", images)
    if "patches_per_view" not in facts:
        raise UsageError(
            f"{images} images, but the number of patches of an image is unknown: pass the facts of"
            " a graph that has a vision tower"
        )
    views = images * facts["views_per_image"]
    others: dict[str, tuple[Sequences, ...]] = {
        "patch grid": (Sequences(facts["grid_rows"] * facts["grid_columns"], views),),
        "patches": (Sequences(facts["patches_per_view"], views),),
        "features": (Sequences(facts["features_per_view"], views),),
        "images": (Sequences(1, views),),
    }
    if "window_side" in facts:
        others["patch windows"] = tuple(
            Sequences(high * wide, views * down * across)
            for high, down in _cut(facts["grid_rows"], facts["window_side"])
            for wide, across in _cut(facts["grid_columns"], facts["window_side"])
        )
    return others


def _cut(length: int, side: int) -> list[tuple[int, int]]:
    """Return (size, number) of the windows along one edge: full ones, and the rest."""
    full, rest = divmod(length, side)
    return [(size, count) for size, count in ((side, full), (rest, 1)) if size and count]


def positive(what: str, value: object) -> int:
    """Return `value` if it is a whole number of 1 or more; UsageError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UsageError(f"the {what} must be a whole number of 1 or more; got {value!r}")
    return value


def _alike(lengths: Iterable[int]) -> tuple[Sequences, ...]:
    counts = Counter(positive("length of a document", length) for length in lengths)
    if not counts:
        raise UsageError("no documents: the list of lengths is empty")
    return tuple(Sequences(length, count) for length, count in sorted(counts.items()))
