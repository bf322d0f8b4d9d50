"""Prepares the data of a configuration as rows of tokens, and collates them with the loss mask.

Two trainings that lost different parts of the same file were not trained on the same text. So
tokens that are cut, left out or unused are counted and reported.

The end token is added to complete texts only. Left out, the model never learns to stop; behind text
that was cut, it learns to stop in mid-sentence. Padding is identified by length, since its token
may also be the end token.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from ergmeter.errors import UsageError
from ergmeter.workloads.sft.config_file import DataSource, SftConfig
from ergmeter.workloads.sft.dataset import (
    DATA_SEED,
    Example,
    Rendered,
    builtin,
    plain,
    read,
    render,
    template_for,
)

NO_LOSS = -100  # what torch's cross entropy leaves out
_AT_ONCE = 1000


# A document's tokens (input_ids) and its labels: the same, or NO_LOSS where nothing is to be
# learnt. Of a seq2seq model they are the encoder's and the decoder's, and differ in length. A
# packed row has the position_ids of its documents too.
Row: TypeAlias = dict[str, list[int]]


@dataclass(slots=True)
class Truncated:
    """Counts of what was cut, for notes."""

    longest: int
    documents: int = 0
    tokens: int = 0
    without_answer: list[str] = field(default_factory=list)

    def fitted(self, ids: list[int], labels: list[int]) -> Row:
        """Cut a document to `longest` tokens, and count what was cut."""
        over = len(ids) - self.longest
        if over > 0:
            self.documents += 1
            self.tokens += over
        return {"input_ids": ids[: self.longest], "labels": labels[: self.longest]}

    @property
    def lines(self) -> Iterator[str]:
        """Notes on what was cut."""
        if self.documents:
            yield (
                f"{self.documents} examples were cut to {self.longest} tokens, {self.tokens} tokens"
                " in all"
            )
        if self.without_answer:
            yield (
                f"{len(self.without_answer)} examples were left out: nothing of their answer is"
                f" within {self.longest} tokens (first: {self.without_answer[0]})"
            )


class TextEncoder:
    """A tokenizer, and the tokens that it puts at the beginning and the end of a text."""

    def __init__(self, tokenizer: Any) -> None:  # noqa: ANN401  of transformers
        self._tokenizer = tokenizer
        added = tokenizer("")["input_ids"]
        begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
        self.begin = [begin] if begin is not None and begin in added else []
        self.end = [] if end is None else [end]

    def causal(
        self, rendered: Sequence[Rendered], where: Sequence[str], cut: Truncated
    ) -> list[Row]:
        """Rows for a causal model, without the documents whose answer was cut away."""
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
            if any(label != NO_LOSS for label in tokens["labels"][1:]):
                documents.append(tokens)
            else:
                cut.without_answer.append(name)
        if not documents:
            raise UsageError(
                f"no example is left: none has an answer within {cut.longest} tokens; raise"
                " model.max_seq_len"
            )
        return documents

    def seq2seq(self, rendered: Sequence[Rendered], cut: Truncated) -> Iterator[Row]:
        """Yield rows for a seq2seq model: input and labels, each with an end token."""
        for example, parts in zip(rendered, self._parts(rendered), strict=True):
            source: list[int] = list(self.begin)
            answer: list[int] = []
            for (_, bears_loss), part in zip(example.parts, parts, strict=True):
                (answer if bears_loss else source).extend(part)
            over = [max(0, len(ids) + 1 - cut.longest) for ids in (source, answer)]
            cut.documents += any(over)
            cut.tokens += sum(over)
            texts = {"input_ids": source + self.end, "labels": answer + self.end}
            yield {name: ids[: cut.longest] for name, ids in texts.items()}

    def texts(self, rendered: Sequence[Rendered]) -> list[list[int]]:
        """The tokens of whole documents, all of which bear a loss."""
        return [
            [*self.begin, *(token for part in parts for token in part), *self.end]
            for parts in self._parts(rendered)
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


def packed(documents: Sequence[Row], *, longest: int) -> list[Row]:
    """Pack documents into rows, in order.

    Sorting them by length first would waste less, but put documents of like length together.
    """
    rows: list[Row] = []
    for document in documents:
        ids = document["input_ids"]
        if not rows or len(rows[-1]["input_ids"]) + len(ids) > longest:
            rows.append({"input_ids": [], "labels": [], "position_ids": []})
        rows[-1]["input_ids"] += ids
        rows[-1]["labels"] += [NO_LOSS, *document["labels"][1:]]
        rows[-1]["position_ids"] += range(len(ids))
    return rows


def blocks(documents: Sequence[Sequence[int]], *, size: int) -> tuple[list[Row], int]:
    """Cut the stream of all documents into blocks; also return the number of tokens left over."""
    stream = [token for document in documents for token in document]
    count = len(stream) // size
    if not count:
        raise UsageError(f"the text is {len(stream)} tokens, less than one block of {size}")
    rows = [stream[start : start + size] for start in range(0, count * size, size)]
    return [{"input_ids": row, "labels": list(row)} for row in rows], len(stream) - count * size


def mixed(
    sources: Mapping[str, Sequence[Row]], weights: Mapping[str, float], *, seed: int
) -> tuple[list[Row], dict[str, int]]:
    """Rows of all sources in proportion to their weights, none twice; and the number of each.

    Weights are shares of rows. The source that is used up first ends the mixture: drawing with
    replacement would go on, and train on some rows several times for others never seen.
    """
    total = sum(weights.values())
    most = min(len(rows) * total / weights[name] for name, rows in sources.items())
    taken = {name: int(most * weights[name] / total + 1e-9) for name in sources}
    missing = [name for name, number in taken.items() if not number]
    if missing:
        raise UsageError(f"the weight of {missing[0]} is too low for a single row; raise it")
    dice = random.Random(seed)
    rows: list[Row] = []
    for name, number in taken.items():
        rows += _some(sources[name], number, dice)
    return _some(rows, len(rows), dice), taken


def _some(rows: Sequence[Row], number: int, dice: random.Random) -> list[Row]:
    """`number` rows in random order, by `Random.random`, whose sequence Python never changes."""
    keyed = [(dice.random(), index) for index in range(len(rows))]
    return [rows[index] for _, index in sorted(keyed)[:number]]


# The mask is made from lengths, since a padding token may also be a real one. A packed batch has no
# mask: transformers looks for documents in the positions only where there is no mask and no cache.
# So its model must have `config.use_cache = False`. Padding has position 0, and each such position
# attends to itself alone.


@dataclass(frozen=True, slots=True)
class Collate:
    """Collates rows into a batch. It is sent to the loader's workers, so it has numbers only.

    `start`: the first token of a seq2seq decoder; None: the model makes the decoder's input.
    """

    fill: int
    multiple: int = 1
    is_seq2seq: bool = False
    start: int | None = None

    def __call__(self, rows: Sequence[Row]) -> dict[str, torch.Tensor]:
        """Pad the rows to the longest one, rounded up to the multiple."""
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
        """The decoder's input: the labels, shifted right by one position."""
        moved = labels.roll(1, dims=-1)
        moved[:, 0] = start
        return moved.masked_fill(moved == NO_LOSS, self.fill)


_SAMPLES = 3


@dataclass(frozen=True, slots=True)
class Prepared:
    """Data to train with: rows, of which an epoch and a batch are made."""

    train: list[Row]
    evaluation: list[Row] | None
    collate: Collate
    seq_len: int
    documents: int = 0  # documents that were read; a packed row has several
    notes: tuple[str, ...] = ()
    samples: tuple[Rendered, ...] = field(default=(), repr=False)


def prepare_data(
    config: SftConfig,
    tokenizer: Any,  # noqa: ANN401  of transformers, which has no types
    *,
    decoder_start: int | None = None,
) -> Prepared:
    """Prepares the configuration's data. `decoder_start`: a seq2seq decoder's first token.

    Left out, it is the padding token for models like T5. Other models make the decoder's input
    themselves; then it is not in the batch, and its tokens are not counted.
    """
    making = _Making(config, tokenizer)
    train, evaluation = making.rows()
    is_seq2seq = config.model.type == "seq2seq"
    fill = tokenizer.pad_token_id
    is_like_t5 = config.model.is_builtin or "T5" in type(tokenizer).__name__
    if is_seq2seq and decoder_start is None and is_like_t5:
        decoder_start = fill
    collate = Collate(
        fill=next(token for token in (fill, tokenizer.eos_token_id, 0) if token is not None),
        multiple=config.data.pad_to_multiple_of or 1,
        is_seq2seq=is_seq2seq,
        start=decoder_start,
    )
    return Prepared(
        train=train,
        evaluation=evaluation,
        collate=collate,
        seq_len=making.longest,
        documents=making.documents,
        notes=tuple(making.notes),
        samples=tuple(making.samples),
    )


class _Making:
    """Makes rows from files, and collects notes."""

    def __init__(self, config: SftConfig, tokenizer: Any) -> None:  # noqa: ANN401
        self._config = config
        self._encoder = TextEncoder(tokenizer)
        self._template = template_for(config.data.template_path, tokenizer)
        self.longest = config.model.max_seq_len
        if config.task_mode != "sft":
            self.longest = config.block_size or self.longest
        self.documents = 0
        self.notes: list[str] = []
        self.samples: list[Rendered] = []
        if config.pack_factor:
            self.notes.append("pack_factor has no effect: all of the text is joined before cutting")
        if not self._encoder.end:
            self.notes.append("the tokenizer has no token for the end of a text; none was added")

    def rows(self) -> tuple[list[Row], list[Row] | None]:
        """The rows to train on, and the rows to evaluate on; None without held-out text."""
        config, data = self._config, self._config.data
        as_blocks = config.task_mode != "sft"
        if config.task_mode == "cpt_mixed":
            train, held_out = self._mixture(), None
            if data.val_path:
                held_out = read(data.val_path)
            elif config.has_validation:
                held_out = builtin(longest=self.longest)[1]
        else:
            if data.train_path is None:
                examples, held_out = builtin(longest=self.longest)
            else:
                examples = read(data.train_path)
                held_out = read(data.val_path) if data.val_path else None
            examples = examples[: data.limit]
            self.documents = len(examples)
            train = self._made(examples, as_blocks=as_blocks, of="")
        if held_out is None:
            return train, None
        return train, self._made(held_out, as_blocks=as_blocks, of="evaluation: ")

    def _mixture(self) -> list[Row]:
        rows: dict[str, list[Row]] = {}
        weights: dict[str, float] = {}
        for index, source in enumerate(self._config.datasets):
            name = source.name or f"datasets[{index}]"
            if name in rows:
                raise UsageError(f"datasets: two are called {name}; give them different names")
            examples = self._of(source)
            self.documents += len(examples)
            rows[name] = self._made(examples, as_blocks=source.type == "cpt", of=f"{name}: ")
            weights[name] = source.weight
        mixture, taken = mixed(rows, weights, seed=DATA_SEED)
        for name, number in taken.items():
            self.notes.append(f"{name}: {number} of {len(rows[name])} rows, by its weight")
        return mixture

    def _of(self, source: DataSource) -> list[Example]:
        examples = read(source.path) if source.path else builtin(longest=self.longest)[0]
        return examples[: self._config.data.limit]

    def _made(self, examples: Sequence[Example], *, as_blocks: bool, of: str) -> list[Row]:
        """The rows of these examples; `of`: a prefix for their notes."""
        template = plain if as_blocks else self._template
        rendered = [render(example, template) for example in examples]
        if not of or len(self.samples) < _SAMPLES:
            self.samples += rendered[:_SAMPLES]
        if as_blocks:
            rows, rest = blocks(self._encoder.texts(rendered), size=self.longest)
            if rest:
                self.notes.append(f"{of}the last {rest} tokens fill no block and are not used")
            return rows
        for example in examples:
            if example.text is not None and example.where.endswith(".txt"):
                raise UsageError(
                    f"{example.where} is one text, which sft can't learn; write task_mode: cpt"
                )
        cut = Truncated(self.longest)
        if self._config.model.type == "seq2seq":
            texts = [example.where for example in examples if example.text is not None]
            if texts:
                raise UsageError(
                    f"{texts[0]} is text without a question, which seq2seq can't learn"
                )
            documents = list(self._encoder.seq2seq(rendered, cut))
        else:
            documents = self._encoder.causal(rendered, [example.where for example in examples], cut)
        self.notes += [of + line for line in cut.lines]
        is_packed = self._config.data.packing
        return packed(documents, longest=self.longest) if is_packed else documents


# Token counts of an epoch: computed, real and loss-bearing. A padded batch can be half padding, and
# a long prompt bears no loss.


@dataclass(frozen=True, slots=True)
class EpochTokens:
    """Tokens of one epoch, its rows taken in their order (a training shuffles them)."""

    rows: int
    real: int  # text; for a seq2seq model input and labels
    computed: int  # every position of the batches, padding included
    loss: int  # predicted and compared
    shortest: int
    median: float
    longest: int


def epoch_tokens(rows: Sequence[Row], collate: Collate, *, batch_size: int) -> EpochTokens:
    """The token counts of these rows, in batches of this size."""
    starts = range(0, len(rows), batch_size)
    lengths = [len(row["input_ids"]) for row in rows]
    answer_tokens = sum(len(row["labels"]) for row in rows) if collate.is_seq2seq else 0
    return EpochTokens(
        rows=len(rows),
        real=sum(lengths) + answer_tokens,
        computed=sum(_places(rows[start : start + batch_size], collate) for start in starts),
        loss=sum(_bearing(row, collate) for row in rows),
        shortest=min(lengths),
        median=statistics.median(lengths),
        longest=max(lengths),
    )


def _places(rows: Sequence[Row], collate: Collate) -> int:
    batch = collate(rows)
    answer_tokens = batch["labels"].numel() if collate.is_seq2seq else 0
    return batch["input_ids"].numel() + answer_tokens


def _bearing(row: Row, collate: Collate) -> int:
    """Tokens of a row that bear a loss. A causal model never predicts the first one."""
    labels = row["labels"] if collate.is_seq2seq else row["labels"][1:]
    return sum(label != NO_LOSS for label in labels)
