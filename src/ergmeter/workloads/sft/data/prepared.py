"""What is the model given? The data of a configuration as rows of tokens, and what to say of them.

The trap: tokens that vanish. What was cut, left out or not used is counted and told, since two
trainings that lost different parts of the same file were not trained on the same text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from ergmeter.errors import UsageError
from ergmeter.workloads.sft.config.sections import DataSource, SftConfig
from ergmeter.workloads.sft.data import packed
from ergmeter.workloads.sft.data.examples import DATA_SEED, Example, builtin, read
from ergmeter.workloads.sft.data.packed import Collate, Row
from ergmeter.workloads.sft.data.templates import Chat, Plain, Rendered, TemplateFile, template_for
from ergmeter.workloads.sft.data.tokenized import TextEncoder, Truncated

_SAMPLES = 3


class TokenRows(Dataset[Row]):
    """Rows of tokens, as a loader takes them."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, place: int) -> Row:
        return self._rows[place]


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


def prepared(config: SftConfig, tokenizer: Any, *, decoder_start: int | None = None) -> Prepared:  # noqa: ANN401
    """The configuration's data. `decoder_start`: what a seq2seq model's decoder begins with.

    Where that is not given, it is taken to be the padding for models of T5's kind; others make
    their decoder's input themselves, and then it is not in the batch to be counted.
    """
    making = _Making(config, tokenizer)
    train, evaluation = making.rows()
    is_seq2seq = config.model.type == "seq2seq"
    if is_seq2seq and decoder_start is None and _is_like_t5(config, tokenizer):
        decoder_start = tokenizer.pad_token_id
    fill = tokenizer.pad_token_id
    collate = Collate(
        fill=next(one for one in (fill, tokenizer.eos_token_id, 0) if one is not None),
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


def _is_like_t5(config: SftConfig, tokenizer: Any) -> bool:  # noqa: ANN401
    return config.model.is_builtin or "T5" in type(tokenizer).__name__


class _Making:
    """The way from files to rows, with what there is to tell of it."""

    def __init__(self, config: SftConfig, tokenizer: Any) -> None:  # noqa: ANN401
        self._config = config
        self._encoder = TextEncoder(tokenizer)
        self._template: Plain | Chat | TemplateFile = template_for(
            config.data.template_path, tokenizer
        )
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
        for place, source in enumerate(self._config.datasets):
            name = source.name or f"datasets[{place}]"
            if name in rows:
                raise UsageError(f"datasets: two are called {name}; give them different names")
            examples = self._of(source)
            self.documents += len(examples)
            rows[name] = self._made(examples, as_blocks=source.type == "cpt", of=f"{name}: ")
            weights[name] = source.weight
        mixture, taken = packed.mixed(rows, weights, seed=DATA_SEED)
        for name, number in taken.items():
            self.notes.append(f"{name}: {number} of {len(rows[name])} rows, by its weight")
        return mixture

    def _of(self, source: DataSource) -> list[Example]:
        limit = self._config.data.limit
        found = read(source.path) if source.path else builtin(longest=self.longest)[0]
        return found[:limit] if limit else found

    def _made(self, examples: Sequence[Example], *, as_blocks: bool, of: str) -> list[Row]:
        """The rows of these examples; `of`: whose they are, before what is told of them."""
        template = Plain() if as_blocks else self._template
        rendered = [template.rendered(one) for one in examples]
        if not of or len(self.samples) < _SAMPLES:
            self.samples += rendered[:_SAMPLES]
        if as_blocks:
            rows, rest = packed.blocks(self._encoder.texts(rendered), size=self.longest)
            if rest:
                self.notes.append(f"{of}the last {rest} tokens fill no block and are not used")
            return rows
        for one in examples:
            if one.text is not None and one.where.endswith(".txt"):
                raise UsageError(
                    f"{one.where} is one text, which sft can't learn; write task_mode: cpt"
                )
        return self._documents(examples, rendered, of)

    def _documents(
        self, examples: Sequence[Example], rendered: Sequence[Rendered], of: str
    ) -> list[Row]:
        cut = Truncated(self.longest)
        if self._config.model.type == "seq2seq":
            texts = [one.where for one in examples if one.text is not None]
            if texts:
                raise UsageError(
                    f"{texts[0]} is text without a question, which seq2seq can't learn"
                )
            documents = self._encoder.seq2seq(rendered, cut)
        else:
            documents = self._encoder.causal(rendered, [one.where for one in examples], cut)
        self.notes += [of + line for line in cut.lines]
        if self._config.data.packing:
            return packed.packed(documents, longest=self.longest)
        return packed.single(documents)


def _read(
    train: Path | None, val: Path | None, longest: int
) -> tuple[list[Example], list[Example] | None]:
    if train is None:
        return builtin(longest=longest)
    return read(train), None if val is None else read(val)
