"""Prepares the data of a configuration as rows of tokens, with notes on what was cut or left out.

Two trainings that lost different parts of the same file were not trained on the same text. So
tokens that are cut, left out or unused are counted and reported.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from ergmeter.errors import UsageError
from ergmeter.workloads.sft import token_batches
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
from ergmeter.workloads.sft.token_batches import NO_LOSS, Collate, Row, TextEncoder, Truncated

_SAMPLES = 3


class TokenRows(Dataset[Row]):
    """Rows of tokens, as a loader takes them."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        return self._rows[index]


@dataclass(frozen=True, slots=True)
class Prepared:
    """Data to train with. `examples` are rows: what an epoch has, and a batch is made of."""

    train: TokenRows
    evaluation: TokenRows | None
    collate: Collate
    seq_len: int
    examples: int
    documents: int = 0  # that were read, of which a packed row holds several
    notes: tuple[str, ...] = ()
    samples: tuple[Rendered, ...] = field(default=(), repr=False)


def prepare_data(
    config: SftConfig,
    tokenizer: Any,  # noqa: ANN401  of transformers, which has no types
    *,
    decoder_start: int | None = None,
) -> Prepared:
    """Prepares the configuration's data. `decoder_start`: a seq2seq decoder's first token.

    Where that is not given, it is taken to be the padding for models of T5's kind; others make
    their decoder's input themselves, and then it is not in the batch to be counted.
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
        train=TokenRows(train),
        evaluation=None if evaluation is None else TokenRows(evaluation),
        collate=collate,
        seq_len=making.longest,
        examples=len(train),
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
        """To train on, and to evaluate on where there is such text."""
        config, data = self._config, self._config.data
        as_blocks = config.task_mode != "sft"
        if config.task_mode == "cpt_mixed":
            train, held_out = self._mixture(), None
            if data.val_path:
                held_out = read(data.val_path)
            elif config.has_validation:
                held_out = builtin(longest=self.longest)[1]
        else:
            examples, held_out = _read(data.train_path, data.val_path, self.longest)
            examples = examples[: data.limit] if data.limit else examples
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
        mixture, taken = token_batches.mixed(rows, weights, seed=DATA_SEED)
        for name, number in taken.items():
            self.notes.append(f"{name}: {number} of {len(rows[name])} rows, by its weight")
        return mixture

    def _of(self, source: DataSource) -> list[Example]:
        limit = self._config.data.limit
        examples = read(source.path) if source.path else builtin(longest=self.longest)[0]
        return examples[:limit] if limit else examples

    def _made(self, examples: Sequence[Example], *, as_blocks: bool, of: str) -> list[Row]:
        """The rows of these examples; `of`: a prefix for their notes."""
        template = plain if as_blocks else self._template
        rendered = [render(example, template) for example in examples]
        if not of or len(self.samples) < _SAMPLES:
            self.samples += rendered[:_SAMPLES]
        if as_blocks:
            rows, rest = token_batches.blocks(self._encoder.texts(rendered), size=self.longest)
            if rest:
                self.notes.append(f"{of}the last {rest} tokens fill no block and are not used")
            return rows
        for example in examples:
            if example.text is not None and example.where.endswith(".txt"):
                raise UsageError(
                    f"{example.where} is one text, which sft can't learn; write task_mode: cpt"
                )
        return self._documents(examples, rendered, of)

    def _documents(
        self, examples: Sequence[Example], rendered: Sequence[Rendered], of: str
    ) -> list[Row]:
        cut = Truncated(self.longest)
        if self._config.model.type == "seq2seq":
            texts = [example.where for example in examples if example.text is not None]
            if texts:
                raise UsageError(
                    f"{texts[0]} is text without a question, which seq2seq can't learn"
                )
            documents = self._encoder.seq2seq(rendered, cut)
        else:
            documents = self._encoder.causal(rendered, [example.where for example in examples], cut)
        self.notes += [of + line for line in cut.lines]
        if self._config.data.packing:
            return token_batches.packed(documents, longest=self.longest)
        return token_batches.single(documents)


def _read(
    train: Path | None, val: Path | None, longest: int
) -> tuple[list[Example], list[Example] | None]:
    if train is None:
        return builtin(longest=longest)
    return read(train), None if val is None else read(val)


# Token counts of an epoch: computed, real and loss-bearing. A padded batch can be half padding, and
# a long prompt bears no loss.


@dataclass(frozen=True, slots=True)
class EpochTokens:
    """Tokens of one epoch, its rows taken in their order (a training shuffles them)."""

    rows: int
    real: int  # text; of a seq2seq model what is read and what is said
    computed: int  # every place of the rectangles, padding included
    loss: int  # predicted and compared
    shortest: int
    median: float
    longest: int


def epoch_tokens(rows: TokenRows, collate: Collate, *, batch_size: int) -> EpochTokens:
    """The amounts of these rows, in batches of this size."""
    listed = [rows[index] for index in range(len(rows))]
    starts = range(0, len(listed), batch_size)
    lengths = [len(row["input_ids"]) for row in listed]
    answer_tokens = sum(len(row["labels"]) for row in listed) if collate.is_seq2seq else 0
    return EpochTokens(
        rows=len(listed),
        real=sum(lengths) + answer_tokens,
        computed=sum(_places(listed[start : start + batch_size], collate) for start in starts),
        loss=sum(_bearing(row, collate) for row in listed),
        shortest=min(lengths),
        median=statistics.median(lengths),
        longest=max(lengths),
    )


def _places(rows: Sequence[Row], collate: Collate) -> int:
    batch = collate(rows)
    answer_tokens = batch["labels"].numel() if collate.is_seq2seq else 0
    return batch["input_ids"].numel() + answer_tokens


def _bearing(row: Row, collate: Collate) -> int:
    """A causal model predicts each token from those before, so the first one of a row never."""
    labels = row["labels"] if collate.is_seq2seq else row["labels"][1:]
    return sum(label != NO_LOSS for label in labels)
