"""Tokenizes examples, packs them into rows and collates batches, with the loss mask.

The end token is added to complete texts only. Left out, the model never learns to stop; behind text
that was cut, it learns to stop in mid-sentence. Padding is identified by length, since its token
may also be the end token.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from ergmeter.errors import UsageError
from ergmeter.workloads.sft.dataset import Rendered

NO_LOSS = -100  # what torch's cross entropy leaves out
_AT_ONCE = 1000


@dataclass(frozen=True, slots=True)
class Tokens:
    """A document's tokens and its labels: the same, or NO_LOSS where nothing is to be learnt.

    Of a seq2seq model they are the encoder's and the decoder's, and differ in length.
    """

    ids: list[int]
    labels: list[int]


@dataclass(slots=True)
class Truncated:
    """Counts of what was cut, for notes."""

    longest: int
    documents: int = 0
    tokens: int = 0
    without_answer: list[str] = field(default_factory=list)

    def fitted(self, ids: list[int], labels: list[int]) -> Tokens:
        """Cuts tokens to the length that fits."""
        over = len(ids) - self.longest
        if over > 0:
            self.documents += 1
            self.tokens += over
        return Tokens(ids[: self.longest], labels[: self.longest])

    @property
    def lines(self) -> list[str]:
        """Notes on what was cut."""
        lines = []
        if self.documents:
            lines.append(
                f"{self.documents} examples were cut to {self.longest} tokens, {self.tokens} tokens"
                " in all"
            )
        if self.without_answer:
            lines.append(
                f"{len(self.without_answer)} examples were left out: nothing of their answer is"
                f" within {self.longest} tokens (first: {self.without_answer[0]})"
            )
        return lines


class TextEncoder:
    """A tokenizer, and what it puts at the begin and at the end of a text."""

    def __init__(self, tokenizer: Any) -> None:  # noqa: ANN401  of transformers
        self._tokenizer = tokenizer
        added = tokenizer("")["input_ids"]
        begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
        self.begin = [begin] if begin is not None and begin in added else []
        self.end = [] if end is None else [end]

    def causal(
        self, rendered: Sequence[Rendered], where: Sequence[str], cut: Truncated
    ) -> list[Tokens]:
        """Documents for a causal model, without those whose answer was cut away."""
        documents = []
        for name, example, parts in zip(where, rendered, self._parts(rendered), strict=True):
            ids = [] if example.is_marked else list(self.begin)
            labels = [NO_LOSS] * len(ids)
            for (_, bears_loss), part in zip(example.parts, parts, strict=True):
                ids += part
                labels += part if bears_loss else [NO_LOSS] * len(part)
            if not example.is_marked:
                ids, labels = ids + self.end, labels + self.end
            tokens = cut.fitted(ids, labels)
            # The first token is predicted from nothing.
            if any(label != NO_LOSS for label in tokens.labels[1:]):
                documents.append(tokens)
            else:
                cut.without_answer.append(name)
        if not documents:
            raise UsageError(
                f"no example is left: none has an answer within {cut.longest} tokens; raise"
                " model.max_seq_len"
            )
        return documents

    def seq2seq(self, rendered: Sequence[Rendered], cut: Truncated) -> list[Tokens]:
        """What the encoder reads and what the decoder is to say, each with its end."""
        rows = []
        for example, parts in zip(rendered, self._parts(rendered), strict=True):
            read: list[int] = list(self.begin)
            answer: list[int] = []
            for (_, bears_loss), part in zip(example.parts, parts, strict=True):
                (answer if bears_loss else read).extend(part)
            over = max(len(read), len(answer)) + 1 - cut.longest
            if over > 0:
                cut.documents += 1
                cut.tokens += max(0, len(read) + 1 - cut.longest)
                cut.tokens += max(0, len(answer) + 1 - cut.longest)
            rows.append(
                Tokens((read + self.end)[: cut.longest], (answer + self.end)[: cut.longest])
            )
        return rows

    def texts(self, rendered: Sequence[Rendered]) -> list[list[int]]:
        """Whole documents, all of which is to be learnt."""
        return [
            [*self.begin, *(token for part in parts for token in part), *self.end]
            for example, parts in zip(rendered, self._parts(rendered), strict=True)
        ]

    def _parts(self, rendered: Sequence[Rendered]) -> Iterator[list[list[int]]]:
        """The tokens of each part of each document."""
        for start in range(0, len(rendered), _AT_ONCE):
            chunk = rendered[start : start + _AT_ONCE]
            flat = [text for example in chunk for text, _ in example.parts]
            # verbose: it warns of texts that are longer than the model, which are cut here.
            ids = self._tokenizer(flat, add_special_tokens=False, verbose=False)["input_ids"]
            position = 0
            for example in chunk:
                yield ids[position : position + len(example.parts)]
                position += len(example.parts)


# Packing of documents into rows of one length. The first token of a document does not continue the
# one before, so it bears no loss. Positions start again at 0, from which attention knows where to
# stop. Blocks of continued pre-training are one stream of text, cut where a block is full, as is
# usual there.


Row: TypeAlias = dict[str, list[int]]


def single(documents: Sequence[Tokens]) -> list[Row]:
    """One document a row."""
    return [{"input_ids": document.ids, "labels": document.labels} for document in documents]


def packed(documents: Sequence[Tokens], *, longest: int) -> list[Row]:
    """Packs documents into rows, in order.

    Sorting them by length first would waste less, and put documents of like length together.
    """
    rows: list[Row] = []
    for document in documents:
        if not rows or len(rows[-1]["input_ids"]) + len(document.ids) > longest:
            rows.append({"input_ids": [], "labels": [], "position_ids": []})
        rows[-1]["input_ids"] += document.ids
        rows[-1]["labels"] += [NO_LOSS, *document.labels[1:]]
        rows[-1]["position_ids"] += range(len(document.ids))
    return rows


def blocks(documents: Sequence[Sequence[int]], *, size: int) -> tuple[list[Row], int]:
    """Blocks of one stream of all documents, and how many tokens at its end fill none."""
    stream = [token for document in documents for token in document]
    count = len(stream) // size
    if not count:
        raise UsageError(f"the text is {len(stream)} tokens, less than one block of {size}")
    rows = [stream[start : start + size] for start in range(0, count * size, size)]
    return [{"input_ids": row, "labels": list(row)} for row in rows], len(stream) - count * size


def mixed(
    sources: Mapping[str, Sequence[Row]], weights: Mapping[str, float], *, seed: int
) -> tuple[list[Row], dict[str, int]]:
    """As many rows of each source as its weight says, and how many that is; none comes twice.

    Weights are shares of rows. The source that is used up first ends the mixture: drawing with
    replacement would go on, and train on some rows several times for others never seen.
    """
    total = sum(weights.values())
    most = min(len(rows) * total / weights[name] for name, rows in sources.items())
    taken = {name: int(most * weights[name] / total + 1e-9) for name in sources}
    missing = [name for name, number in taken.items() if not number]
    if missing:
        raise UsageError(f"by its weight not one row of {missing[0]} would be used; raise it")
    dice = random.Random(seed)
    rows: list[Row] = []
    for name, number in taken.items():
        rows += _some(sources[name], number, dice)
    return _some(rows, len(rows), dice), taken


def _some(rows: Sequence[Row], number: int, dice: random.Random) -> list[Row]:
    """`number` rows in random order, by `Random.random`, whose sequence Python keeps."""
    keyed = [(dice.random(), index) for index in range(len(rows))]
    return [rows[index] for _, index in sorted(keyed)[:number]]


# The mask is made from lengths, since a padding token may also be a real one. A packed batch has no
# mask: transformers looks for documents in the positions only where there is no mask and no cache.
# So its model must have `config.use_cache = False`. Padding has position 0, and each such position
# attends to itself alone.


@dataclass(frozen=True, slots=True)
class Collate:
    """Rows to a batch. It goes to the loader's workers, so it holds numbers only.

    `start`: what the decoder of a seq2seq model begins with; None leaves its input to the model.
    """

    fill: int
    multiple: int = 1
    is_seq2seq: bool = False
    start: int | None = None

    def __call__(self, rows: Sequence[Row]) -> dict[str, torch.Tensor]:
        """A rectangle as wide as the longest row, rounded up to the multiple."""
        ids = [row["input_ids"] for row in rows]
        batch = {"input_ids": self._padded(ids, self.fill)}
        labels = self._padded([row["labels"] for row in rows], NO_LOSS)
        if "position_ids" in rows[0]:
            batch["position_ids"] = self._padded([row["position_ids"] for row in rows], 0)
        else:
            batch["attention_mask"] = self._mask(ids)
        batch["labels"] = labels
        if self.is_seq2seq and self.start is not None:
            batch["decoder_input_ids"] = self._shifted(labels, self.start)
            batch["decoder_attention_mask"] = self._mask([row["labels"] for row in rows])
        return batch

    def _padded(self, rows: Sequence[Sequence[int]], fill: int) -> torch.Tensor:
        longest = max(map(len, rows))
        width = -(-longest // self.multiple) * self.multiple
        return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows])

    def _mask(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        return self._padded([[1] * len(row) for row in rows], 0)

    def _shifted(self, labels: torch.Tensor, start: int) -> torch.Tensor:
        """What the decoder reads: the labels, one place later."""
        moved = labels.roll(1, dims=-1)
        moved[:, 0] = start
        return moved.masked_fill(moved == NO_LOSS, self.fill)
